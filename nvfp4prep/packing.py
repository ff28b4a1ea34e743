"""Packed targets: which tensors each rank's files hold, and the steps that fill them, one expert at a time.

Names: the engine's parameters under `target.prefix(moe)`; kernel scalars and logical scales under
`target.own_prefix(moe)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvfp4prep import folding
from nvfp4prep.errors import InputRefused
from nvfp4prep.experts import (
    Read,
    Slice,
    join_slices,
    load_expert,
    load_folded,
    slice_expert,
    store_expert,
    with_scales_in,
)
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts import vllm_marlin
from nvfp4prep.layouts.logical import (
    ENGINE_VERSIONS,
    Activation,
    Expert,
    LayerFacts,
    LayoutError,
    Scales,
    pad_bias,
    positions_where,
)
from nvfp4prep.numerics import raw_bytes
from nvfp4prep.plan import (
    Constant,
    Divide,
    Pack,
    Parameters,
    Plan,
    Rank,
    Shard,
    Spec,
    Step,
    Unpack,
    aligned,
    files_of,
    gather,
    key_of,
    logical_steps,
    outputs_of,
    shards_of,
    split,
)
from nvfp4prep.quant_config import QuantConfig, hf_quant_config, quantization_config
from nvfp4prep.scales import F32_MIN_NORMAL, RescaleCounts, Resolution, ScalePolicy, fault, output_shape
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear, MoeLayer, Schema, dialect_of, lacking_factors
from nvfp4prep.source import Source, read_tensor
from nvfp4prep.targets import IDENTITY, Target, activation_of

if TYPE_CHECKING:
    from nvfp4prep.checkpoint import Checkpoint
    from nvfp4prep.execute import Context, Job
    from nvfp4prep.folding import Factors, Fold
    from nvfp4prep.options import Ask

DTYPES: Mapping[str, torch.dtype] = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.uint8,
    "I32": torch.int32,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
FLOAT_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class PackJob:
    """How one packed target works.

    `raw` are the stored input scales and weight_scale_2 by tensor name; `facts` what each layer and rank needs
    (`layer_facts`), filled after the survey. `factors` are those that the kernel multiplies inputs by, by MoE path;
    `rows` the paths of layers whose down's pre_quant_scale goes into the rows of up.
    """

    target: Target
    folder: str
    config: Mapping[str, Any]
    raw: Mapping[str, tuple[float, ...]]
    facts: Mapping[tuple[str, Rank], LayerFacts]
    factors: Mapping[str, Factors] = field(default_factory=dict)
    rows: frozenset[str] = frozenset()

    def activation(self, moe: MoeLayer) -> Activation:
        return activation_of(self.config, moe.gated)

    def rank_folder(self, rank: Rank) -> str:
        return key_of(self.folder, self.target.folder(rank))


def pack_job(checkpoint: Checkpoint, target: Target, folder: str, fold: bool) -> tuple[PackJob, Mapping[str, Fold]]:
    """The job of a target, without facts, and how its layers' pre_quant_scale is folded where the kernel has no place.

    Raises:
        InputRefused: pre_quant_scale can neither be kept nor folded.
        EnvironmentFault: I/O.
    """
    layers = target.layers(checkpoint.schema)
    job = PackJob(target, folder, checkpoint.config, checkpoint.scale_values, {})
    if not target.module.REQUIRES.pre_quant_scale:
        folds = folding.fold_all(checkpoint, layers)
        quantised = [
            _undividable(path, reader)
            for path, fold in folds.items()
            for reader in fold.readers
            if reader.format is not Format.UNQUANTIZED
        ]
        if quantised:
            raise InputRefused(quantised)
        return replace(job, rows=frozenset(moe.path for moe in layers if folding.has_row_factors(moe))), folds
    factors = folding.place_all(checkpoint, layers, fold)
    return replace(job, factors=factors, rows=frozenset(path for path, found in factors.items() if found.rows)), {}


def _undividable(path: str, reader: Linear) -> Finding:
    weight = reader.params["weight"]
    message = f"{path}: pre_quant_scale can't be folded: {reader.module} reads the norm and is quantised"
    return Finding("target-refused", "error", message, weight.file, weight.name, reader.layer)


# --- scales of one rank ----------------------------------------------------------------------------------------------


def expert_value(values: Sequence[float], moe: MoeLayer, expert: int, half: int) -> float:
    """A fused scale's value for one expert and half: one value, [E], or [E, 2] flattened."""
    if len(values) == 2 * moe.expert_count:
        return values[2 * expert + half]
    return values[expert] if len(values) == moe.expert_count else values[0]


def _scale(
    moe: MoeLayer, projection: str, param: str, expert: int, values: Mapping[str, tuple[float, ...]]
) -> float | None:
    """weight_scale_2 or input_scale of gate, up or down of one expert; None when there is none."""
    if moe.gate_up is not None and moe.down is not None:
        linear = moe.down if projection == "down" else moe.gate_up
        found = values.get(linear.tensor_name(param))
        return None if found is None else expert_value(found, moe, expert, int(projection == "up"))
    linear_ = getattr(moe.experts[expert], projection)
    found = None if linear_ is None else values.get(linear_.tensor_name(param))
    return None if found is None else found[0]


def projections(moe: MoeLayer) -> tuple[str, ...]:
    """gate, up, down; or up, down when not gated."""
    return ("gate", "up", "down") if moe.gated else ("up", "down")


def _column(
    moe: MoeLayer, projection: str, param: str, experts: range, values: Mapping[str, tuple[float, ...]]
) -> Tensor | None:
    column = [_scale(moe, projection, param, expert, values) for expert in experts]
    if all(value is None for value in column):
        return None
    return torch.tensor([float("nan") if value is None else value for value in column], dtype=torch.float32)


def rank_scales(moe: MoeLayer, experts: range, resolution: Resolution) -> Scales:
    """Global scales of a rank's experts; w13_input is the larger of gate's and up's (they differ under `keep`).

    int4 has no global scales (W4A8's weight_scale_2 is no factor of the weight): ones.
    """
    column = {
        (projection, param): _column(moe, projection, param, experts, resolution.values)
        for projection in projections(moe)
        for param in ("weight_scale_2", "input_scale")
    }
    gate, up, down = (column.get((projection, "weight_scale_2")) for projection in ("gate", "up", "down"))
    if moe.format is Format.INT4:
        up = down = torch.ones(len(experts), dtype=torch.float32)
        gate = up if moe.gated else None
    assert up is not None
    assert down is not None
    w13_input, gate_input = column["up", "input_scale"], column.get(("gate", "input_scale"))
    if w13_input is not None and gate_input is not None:
        w13_input = torch.maximum(w13_input, gate_input)
    return Scales(gate, up, down, w13_input, column["down", "input_scale"])


def with_factors(scales: Scales, factors: Factors | None, share: Slice) -> Scales:
    """The scales with what the kernel multiplies a rank's inputs by, if anything."""
    if factors is None:
        return scales
    return replace(scales, w13_factors=factors.w13, w2_factors=factors.w2[share.start : share.end].contiguous())


def own_scalars(
    moe: MoeLayer, experts: range, job: PackJob, resolution: Resolution, scales: Scales, scalars: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Everything under `nvfp4prep.`: the kernel's scalars, the logical scales behind them, the stored input scales.

    F32 [E]; factors on inputs [H] and [I]. raw_input_scale is the larger of gate's and up's, NaN where none is stored.
    """
    table = dict(scalars)
    for gemm, values in (("w13", scales.w13_factors), ("w2", scales.w2_factors)):
        if values is not None:
            table[f"{gemm}_pre_quant_scale"] = values
    for projection in projections(moe):
        for param in ("weight_scale_2", "input_scale"):
            column = _column(moe, projection, param, experts, resolution.values)
            if column is not None:
                table[f"{projection}_{param}"] = column
    raw = [
        column
        for projection in projections(moe)[:-1]
        if (column := _column(moe, projection, "input_scale", experts, job.raw)) is not None
    ]
    if raw:
        table["raw_input_scale"] = torch.stack(raw).amax(0)
    raw_w2 = _column(moe, "down", "input_scale", experts, job.raw)
    if raw_w2 is not None:
        table["raw_w2_input_scale"] = raw_w2
    return {name: value.contiguous() for name, value in table.items()}


def rank_parameters(moe: MoeLayer, rank: Rank, job: PackJob, resolution: Resolution) -> dict[str, Tensor]:
    """All small tensors of a layer and rank, by full name. Raises LayoutError."""
    target = job.target
    experts = target.experts(moe, rank.ep)
    scales, kernel, engine = _small_tensors(moe, rank, job, resolution)
    own = own_scalars(moe, experts, job, resolution, scales, kernel)
    named = {target.prefix(moe) + name: value for name, value in engine.items()}
    return named | {target.own_prefix(moe) + name: value for name, value in own.items()}


def _small_tensors(
    moe: MoeLayer, rank: Rank, job: PackJob, resolution: Resolution
) -> tuple[Scales, dict[str, Tensor], dict[str, Tensor]]:
    """The logical scales, the kernel's scalars and the engine's parameters. Raises LayoutError."""
    target = job.target
    facts = job.facts.get((moe.path, rank), LayerFacts(target.engine, target.activation_dtype))
    scales = rank_scales(moe, target.experts(moe, rank.ep), resolution)
    scales = with_factors(scales, job.factors.get(moe.path), target.share(moe, rank.tp))
    scalars = target.module.scalars(scales, job.activation(moe), facts)
    return scales, scalars, target.module.parameters(scales, scalars, facts)


def scalar_findings(layers: Sequence[MoeLayer], job: PackJob, resolution: Resolution) -> list[Finding]:
    """Layers whose kernel scalars or engine parameters a kernel can't compute with, as errors: each scale may be fine
    and their product or quotient not."""
    findings: dict[Finding, None] = {}
    for moe in layers:
        for rank in job.target.ranks():
            experts = job.target.experts(moe, rank.ep)
            try:
                _, kernel, engine = _small_tensors(moe, rank, job, resolution)
            except LayoutError as error:
                findings[kernel_refused(moe, job.target, str(error), [experts[p] for p in error.positions])] = None
                continue
            for name, value in {**engine, **kernel}.items():
                wide = value.to(torch.float64)
                wrong = ~(torch.isfinite(wide) & (wide >= F32_MIN_NORMAL))
                if name in engine and value.dtype == torch.float16:
                    wrong = ~(torch.isfinite(wide) & (wide > 0))
                if bool(wrong.any()):
                    kind = fault(float(wide[wrong].flatten()[0])) or "zero"
                    rows = wrong.flatten(1).any(1) if wrong.ndim > 1 else wrong
                    of_experts = wrong.ndim and wrong.shape[0] == len(experts)
                    ids = [experts[p] for p in positions_where(rows)] if of_experts else []
                    place = "" if of_experts or not wrong.ndim else f" at {wrong.nonzero()[0].tolist()}"
                    why = "the product or quotient of its scales does not fit its dtype"
                    if kind == "negative":
                        why = "kernels' scales are above zero"
                    message = f"{name} would be {kind}{place}; {why}; use --target hf, which keeps what is stored"
                    findings[kernel_refused(moe, job.target, message, ids)] = None
    return list(findings)


def kernel_refused(moe: MoeLayer, target: Target, message: str, experts: Sequence[int] = ()) -> Finding:
    """That a kernel can't compute with a layer's values, or with those of some experts."""
    where = f"{target.layout}/{target.engine}: {moe.path}: {message}"
    return Finding("kernel-scale-bad", "error", where, layer=moe.layer, experts=tuple(experts))


def stacked_names(moe: MoeLayer, target: Target) -> dict[str, str]:
    """Full name of each of the layout's tensors. No engine has parameters for NVFP4 experts' biases: they are ours."""
    names = target.module.tensor_names(target.engine)
    return {
        tensor: (target.own_prefix(moe) + tensor) if "bias" in tensor else target.prefix(moe) + name
        for tensor, name in names.items()
    }


def raw_bias_names(moe: MoeLayer, target: Target) -> dict[str, str]:
    """Full name of each stacked bias as the checkpoint has it, by field of Expert.

    Kept where a kernel's biases are divided by alphas and the checkpoint's are F32, whose quotient does not say which
    of several values they were.
    """
    if target.module.REQUIRES.alphas != 2 or not moe.biased:
        return {}
    biases = [linear.params["bias"] for linear in (*moe.w13, *moe.w2) if "bias" in linear.params]
    if not any(bias.dtype == "F32" for bias in biases):
        return {}
    return {f"{projection}_bias": f"{target.own_prefix(moe)}raw_{projection}_bias" for projection in projections(moe)}


def packed_names(moe: MoeLayer, target: Target, config: Mapping[str, Any]) -> frozenset[str]:
    """Full names of a layer's tensors under the engine's names, small ones too."""
    ones = torch.ones(1, dtype=torch.float32)
    scales = Scales(ones if moe.gated else None, ones, ones, ones, ones, ones, ones)
    facts = LayerFacts(target.engine, target.activation_dtype)
    scalars = target.module.scalars(scales, activation_of(config, moe.gated), facts)
    small = {target.prefix(moe) + name for name in target.module.parameters(scales, scalars, facts)}
    return frozenset(small | set(stacked_names(moe, target).values()) | set(raw_bias_names(moe, target).values()))


# --- the plan --------------------------------------------------------------------------------------------------------


def make_packed_plan(checkpoint: Checkpoint, asked: Ask, job: Job, max_shard_bytes: int, number: int) -> Plan:
    """The plan for a packed target: everything but routed experts as for `hf`, and each rank's packed experts.

    Args: as `jobs.plan_of`; the job packs.
    """
    pack, source, schema = job.pack, checkpoint.source, checkpoint.schema
    assert pack is not None
    target, layers = pack.target, pack.target.layers(schema)
    skip = frozenset(linear.module for moe in layers for linear in (*moe.w13, *moe.w2))
    common = key_of(pack.folder, target.common)
    instead = _divided(job.folds, common, number)
    specs, steps, imputed = logical_steps(
        source.tensors, schema, asked.policy, asked.weight_only, skip, instead, common, number
    )
    steps += [(f"{moe.path} expert {e}", Pack(moe, e, number)) for moe in layers for e in range(moe.expert_count)]
    shards: list[Shard] = []
    stacked: set[str] = set()
    outputs: dict[str, TensorInfo] = {}
    files = files_of(specs, max_shard_bytes)
    if not target.flat:
        shards += shards_of(files, specs, {**source.metadata, IDENTITY: target.identity(None)}, common)
        outputs |= outputs_of(shards, common)
    for rank in target.ranks():
        folder = pack.rank_folder(rank)
        big: dict[str, Spec] = {}
        small: dict[str, Spec] = {}
        for moe in layers:
            big |= stacked_specs(moe, rank, target)
            small |= _small_specs(moe, rank, pack, job.resolution)
            steps.append((f"{moe.path} parameters {folder}", Parameters(moe, rank, number)))
        mine = big | small
        # Stacked tensors layer by layer, as they are loaded; their sizes keep what follows aligned. Small ones last.
        own = split([*big, *aligned(list(small), small)], mine, max_shard_bytes)
        stacked |= {key_of(folder, name) for name in big}
        marked = {**source.metadata, IDENTITY: target.identity(rank)}
        placed = shards_of([*files, *own] if target.flat else own, {**specs, **mine}, marked, folder)
        shards += placed
        outputs |= outputs_of(placed, folder)
    return Plan(tuple(shards), outputs, gather(steps), tuple(imputed), frozenset(stacked))


def stacked_specs(moe: MoeLayer, rank: Rank, target: Target) -> dict[str, Spec]:
    """Specs of a layer's packed tensors for one rank, stacked over its experts, in load order."""
    count = len(target.experts(moe, rank.ep))
    names = stacked_names(moe, target)
    geometry = target.geometry(moe, rank.tp)
    shapes = target.module.shapes(geometry)
    specs = {names[tensor]: (dtype, (count, *shape)) for tensor, (dtype, shape) in shapes.items()}
    for bias_field, name in raw_bias_names(moe, target).items():
        size = geometry.hidden if bias_field == "down_bias" else geometry.padded_intermediate
        specs[name] = ("F32", (count, size))
    return specs


def _small_specs(moe: MoeLayer, rank: Rank, job: PackJob, resolution: Resolution) -> dict[str, Spec]:
    parameters = rank_parameters(moe, rank, job, resolution)
    return {name: (FLOAT_NAMES[value.dtype], tuple(value.shape)) for name, value in parameters.items()}


def _divided(folds: Mapping[str, Fold], folder: str, number: int) -> dict[str, Step]:
    """Steps that write folded norms, and the weights divided for them, by name."""
    steps: dict[str, Step] = {}
    for path, fold in folds.items():
        steps[fold.norm.name] = Constant(key_of(folder, fold.norm.name), bytes(raw_bytes(fold.folded)))
        for one in fold.readers:
            weight = one.params["weight"]
            steps[weight.name] = Divide(weight, key_of(folder, weight.name), path, number)
    return steps


# --- steps -----------------------------------------------------------------------------------------------------------


def run(context: Context, step: Pack | Parameters | Unpack) -> None:
    """Run one step."""
    match step:
        case Pack():
            _pack(context, step)
        case Parameters():
            _parameters(context, step)
        case Unpack():
            _unpack(context, step)


def reader(
    read: Callable[[TensorInfo, int, int], bytearray | NDArray[np.uint8]], tensors: Mapping[str, TensorInfo]
) -> Read:
    """A Read over source tensors, in memory that `read` has made for the caller.

    Index e of a fused tensor is its slice e along the first dimension.
    """

    def read_tensor(name: str, index: int | None) -> Tensor:
        info = tensors[name]
        shape = info.shape if index is None else info.shape[1:]
        length = info.nbytes if index is None else info.nbytes // info.shape[0]
        data = read(info, 0 if index is None else index * length, length)
        return torch.frombuffer(data, dtype=DTYPES[info.dtype]).view(shape)

    return read_tensor


@dataclass(frozen=True, slots=True)
class Changed:
    """What was done to an expert's scales before it is packed.

    `rescaled` and `folded` (down's pre_quant_scale in the rows of up) count NVFP4 block scales; `rounding` is the
    largest relative error of int4 group scales in the kernel's dtype.
    """

    rescaled: RescaleCounts
    folded: RescaleCounts
    rounding: float = 0.0


def logical_expert(
    moe: MoeLayer, index: int, job: PackJob, resolution: Resolution, read: Read
) -> tuple[Expert, Changed]:
    """One expert as it is packed, and what that changed.

    Raises:
        LayoutError: a scale that the kernel's dtype, or E4M3, can't hold.
    """
    expert, rescaled, folded = loaded_expert(moe, index, job.rows, resolution, read)
    if moe.format is not Format.INT4:
        return expert, Changed(rescaled, folded)
    dtype = torch.float16 if job.target.activation_dtype == "fp16" else torch.bfloat16
    expert, rounding = with_scales_in(expert, dtype)
    return expert, Changed(rescaled, folded, rounding)


def loaded_expert(
    moe: MoeLayer, index: int, rows: frozenset[str], resolution: Resolution, read: Read
) -> tuple[Expert, RescaleCounts, RescaleCounts]:
    """As `load_folded` where `rows` has the layer's path, else as `load_expert`. Raises LayoutError."""
    if moe.path in rows:
        return load_folded(moe, index, read, resolution.rescales)
    return *load_expert(moe, index, read, resolution.rescales), RescaleCounts()


def _pack(context: Context, step: Pack) -> None:
    job = context.jobs[step.job]
    assert job.pack is not None
    target, moe = job.pack.target, step.moe
    read = reader(context.read_own, context.source.tensors)
    try:
        expert, changed = logical_expert(moe, step.expert, job.pack, job.resolution, read)
    except LayoutError as error:
        if context.outcome.unusable:  # refuses the run at its end, by its own name
            return
        raise InputRefused([kernel_refused(moe, target, str(error), [step.expert])]) from None
    _count_changed(context, step, changed)
    ep_rank, position = divmod(step.expert, moe.expert_count // target.ep)
    names = stacked_names(moe, target)
    for tp_rank in range(target.tp):
        rank = Rank(tp_rank, ep_rank)
        facts = _expert_facts(context, step, rank, position)
        share = target.share(moe, tp_rank)
        part = slice_expert(expert, share, tp_rank == 0)
        packed = target.module.pack(part, target.geometry(moe, tp_rank), facts)
        _count_flushed(context, step, part, facts)
        folder = job.pack.rank_folder(rank)
        for tensor, value in packed.items():
            context.put(key_of(folder, names[tensor]), raw_bytes(value), position)
        for bias_field, name in raw_bias_names(moe, target).items():
            bias, inner = getattr(part, bias_field), target.geometry(moe, tp_rank).padded_intermediate
            raw = bias if bias_field == "down_bias" else pad_bias(bias, inner)
            context.put(key_of(folder, name), raw_bytes(raw), position)


def _expert_facts(context: Context, step: Pack, rank: Rank, position: int) -> LayerFacts:
    """The layer's facts, with this expert's alphas where biases are divided by them."""
    job = context.jobs[step.job]
    assert job.pack is not None
    target, moe = job.pack.target, step.moe
    facts = job.pack.facts.get((moe.path, rank), LayerFacts(target.engine, target.activation_dtype))
    if not target.geometry(moe, rank.tp).biased:
        return facts
    scales = rank_scales(moe, target.experts(moe, rank.ep), job.resolution)
    return expert_facts(facts, target.module.scalars(scales, job.pack.activation(moe), facts), position)


def expert_facts(facts: LayerFacts, scalars: Mapping[str, Tensor], position: int) -> LayerFacts:
    """The layer's facts with one expert's alphas, for kernels whose biases are divided by them."""
    if "g1_alphas_up" not in scalars:
        return facts
    return replace(
        facts,
        g1_alpha=float(scalars["g1_alphas"][position]),
        g1_alpha_up=float(scalars["g1_alphas_up"][position]),
        g2_alpha=float(scalars["g2_alphas"][position]),
    )


def _count_changed(context: Context, step: Pack, changed: Changed) -> None:
    key, kind = (step.job, step.moe.path), (step.job, "scales")
    with context.lock:
        outcome = context.outcome
        for counts, table in ((changed.rescaled, outcome.rescaled), (changed.folded, outcome.folded)):
            if counts.blocks:
                table[key] = table.get(key, RescaleCounts()) + counts
        if changed.rounding:
            outcome.rounding[kind] = max(outcome.rounding.get(kind, 0.0), changed.rounding)


def _count_flushed(context: Context, step: Pack, part: Expert, facts: LayerFacts) -> None:
    job = context.jobs[step.job].pack
    assert job is not None
    if not job.target.module.REQUIRES.block_scale_maximum:
        return
    lost = vllm_marlin.lost_blocks(part, facts)
    if lost:
        key = (step.job, step.moe.path)
        with context.lock:
            context.outcome.flushed[key] = context.outcome.flushed.get(key, 0) + lost


def _parameters(context: Context, step: Parameters) -> None:
    job = context.jobs[step.job]
    assert job.pack is not None
    folder = job.pack.rank_folder(step.rank)
    for name, value in rank_parameters(step.moe, step.rank, job.pack, job.resolution).items():
        context.put(key_of(folder, name), raw_bytes(value))


def read_whole(source: Source, key: str) -> Tensor:
    """One stored tensor."""
    info = source.tensors[key]
    return torch.frombuffer(bytearray(read_tensor(source, info)), dtype=DTYPES[info.dtype]).view(info.shape)


def _unpack(context: Context, step: Unpack) -> None:
    """One expert from every TP rank's slices back to the checkpoint's own tensors."""
    job = context.jobs[step.job].pack
    assert job is not None
    target, moe = job.target, step.moe
    ep_rank, position = divmod(step.expert, moe.expert_count // target.ep)
    tensors, read = context.source.tensors, reader(context.read_own, context.source.tensors)
    parts = [unpack_part(moe, Rank(tp_rank, ep_rank), position, target, tensors, read) for tp_rank in range(target.tp)]
    fused = moe.gate_up is not None
    linears = {"gate_up": moe.gate_up, "down": moe.down} if fused else dict(_linears(moe, step.expert))
    for (projection, param), value in store_expert(join_slices(parts), fused, moe.order).items():
        linear = linears[projection]
        assert linear is not None
        info = linear.params[param]
        context.put(info.name, raw_bytes(value.to(DTYPES[info.dtype])), step.expert if fused else 0)


def unpack_part(
    moe: MoeLayer, rank: Rank, position: int, target: Target, tensors: Mapping[str, TensorInfo], read: Read
) -> Expert:
    """One expert's logical share from a rank's stacked tensors."""
    folder = target.folder(rank)
    packed = {
        tensor: read(key_of(folder, name), position)
        for tensor, name in stacked_names(moe, target).items()
        if key_of(folder, name) in tensors
    }
    facts = stored_facts(moe, rank, position, target, lambda key: read(key, None))
    geometry = target.geometry(moe, rank.tp)
    expert = target.module.unpack(packed, geometry, facts)
    raw = {bias_field: read(key_of(folder, name), position) for bias_field, name in raw_bias_names(moe, target).items()}
    if not raw:
        return expert
    inner = geometry.intermediate
    return replace(
        expert,
        gate_bias=raw["gate_bias"][:inner] if "gate_bias" in raw else None,
        up_bias=raw["up_bias"][:inner],
        down_bias=raw["down_bias"],
    )


def _linears(moe: MoeLayer, expert: int) -> Iterator[tuple[str, Linear | None]]:
    found = moe.experts[expert]
    return iter((("gate", found.gate), ("up", found.up), ("down", found.down)))


def stored_facts(moe: MoeLayer, rank: Rank, position: int, target: Target, read: Callable[[str], Tensor]) -> LayerFacts:
    """The facts that an expert was packed with, from the scalars stored beside it."""
    prefix = key_of(target.folder(rank), target.own_prefix(moe))
    values = {name: read(prefix + name)[position].item() for name in fact_names(moe, target)}
    plain = LayerFacts(target.engine, target.activation_dtype)
    return replace(
        plain,
        w13_factor=values.get("w13_scale_factor", plain.w13_factor),
        w2_factor=values.get("w2_scale_factor", plain.w2_factor),
        g1_alpha=values.get("g1_alphas", plain.g1_alpha),
        g1_alpha_up=values.get("g1_alphas_up", plain.g1_alpha_up),
        g2_alpha=values.get("g2_alphas", plain.g2_alpha),
    )


def fact_names(moe: MoeLayer, target: Target) -> tuple[str, ...]:
    """The scalars that unpacking an expert needs, without prefix."""
    if target.module.REQUIRES.block_scale_maximum:
        return ("w13_scale_factor", "w2_scale_factor")
    biased = moe.biased and target.module.REQUIRES.alphas == 2
    return ("g1_alphas", "g1_alphas_up", "g2_alphas") if biased else ()


# --- what the manifest says ------------------------------------------------------------------------------------------


def manifest_entry(job: PackJob, schema: Schema) -> dict[str, Any]:
    """Layout id, engine, geometry before and after padding, TP and EP."""
    target = job.target
    layers = target.layers(schema)
    sizes = {}
    for moe in layers:
        geometries = [target.geometry(moe, tp) for tp in range(target.tp)]
        shape = {
            "experts": moe.expert_count,
            "hidden": moe.hidden,
            "intermediate": moe.intermediate,
            "gated": moe.gated,
            "padded_hidden": geometries[0].padded_hidden,
            "intermediate_per_rank": [geometry.intermediate for geometry in geometries],
            "padded_intermediate_per_rank": geometries[0].padded_intermediate,
        }
        if moe.format is Format.INT4:
            shape["group_size"] = geometries[0].group
        sizes[moe.path] = shape
    return {
        "layout": target.layout_id,
        "engine": target.engine,
        "engine_version": ENGINE_VERSIONS[target.engine],
        "kernel": target.module.REQUIRES.kernel,
        "tp": target.tp,
        "ep": target.ep,
        "activation_dtype": target.activation_dtype,
        "layers": sizes,
    }


def logical_entry(
    job: PackJob,
    schema: Schema,
    policy: ScalePolicy,
    metadata: Mapping[str, str],
    max_shard_bytes: int,
    quant: QuantConfig,
) -> dict[str, Any]:
    """What `unpack` needs to write the `hf` checkpoint again: specs of the experts' own tensors, and the configs."""
    return {
        "metadata": dict(metadata),
        "max_shard_bytes": max_shard_bytes,
        "quantization_config": quantization_config(quant),
        "hf_quant_config": hf_quant_config(quant),
        "moe": [_moe_entry(moe, policy, job.factors.get(moe.path)) for moe in job.target.layers(schema)],
    }


def _moe_entry(moe: MoeLayer, policy: ScalePolicy, factors: Factors | None) -> dict[str, Any]:
    dialect = dialect_of(moe)
    table = {}
    by_gemm = {gemm: sibling for gemm, (_, sibling) in lacking_factors(moe).items()}
    lacking = {p: by_gemm[gemm] for p, gemm in (("gate", "w13"), ("up", "w13"), ("down", "w2")) if gemm in by_gemm}
    first = {"gate_up": moe.gate_up, "down": moe.down} if moe.gate_up else dict(_linears(moe, 0))
    for projection, linear in first.items():
        if linear is None:
            continue
        folded = factors is None or (projection == "down" and factors.rows)
        kept = {param: info for param, info in linear.params.items() if param != "pre_quant_scale" or not folded}
        if not folded and projection in lacking:
            kept["pre_quant_scale"] = lacking[projection]
        specs = {param: [info.dtype, list(info.shape)] for param, info in kept.items()}
        if moe.format is Format.INT4:
            specs["weight_scale"][0] = "F32"
        wanted = [*linear.params, *(["input_scale"] if _has_input_scale(moe) else [])]
        for param in SCALAR_PARAMS:
            if param in wanted:
                specs[param] = ["F32", list(output_shape(linear, param, policy))]
        table[projection] = specs
    return {"path": moe.path, "dialect": dialect.name, "experts": moe.expert_count, "projections": table}


def _has_input_scale(moe: MoeLayer) -> bool:
    """Whether the output's experts have input scales: stored, or imputed from one that is."""
    return any("input_scale" in linear.params for linear in (*moe.w13, *moe.w2))
