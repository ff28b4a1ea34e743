"""The plan: every output tensor with its place, and the work items that fill them. From headers and options alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nvfp4prep.dialects import natural_key
from nvfp4prep.header import DTYPE_BITS, HeaderError, TensorInfo, build_header, tensor_bytes
from nvfp4prep.scales import ScalePolicy, output_shape
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear, MoeLayer, Schema, lacking_factors
from nvfp4prep.source import refuse


@dataclass(frozen=True, slots=True)
class Rank:
    """One TP and EP rank."""

    tp: int
    ep: int


DEFAULT_SHARD_BYTES = 5_000_000_000
"""Of an output file at most, where nobody asks for another size: what the Hub's own library writes."""
READ_BYTES = 1 << 23
"""Read, changed and written in one go, of tensors that need not be held whole."""
PIECE_BYTES = 1 << 26
"""Tensors are copied, and hashed, in pieces of at most 64 MiB."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes `start`..`start + length` of the source tensor, unchanged, to the same place of each output in `keys`."""

    tensor: TensorInfo
    start: int
    length: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """F32 values of scale tensor `name`, from the job's resolution, to output `key`."""

    name: str
    key: str
    job: int


@dataclass(frozen=True, slots=True)
class RescaleBlocks:
    """E4M3 block scales, through the resolution's rescale for this tensor, to output `key`."""

    tensor: TensorInfo
    key: str
    job: int


@dataclass(frozen=True, slots=True)
class Pack:
    """One expert through the job's layout, for every TP rank, into the stacked tensors of its EP rank."""

    moe: MoeLayer
    expert: int
    job: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """The small tensors of one MoE layer and rank: the engine's parameters and the kernel's scalars."""

    moe: MoeLayer
    rank: Rank
    job: int


@dataclass(frozen=True, slots=True)
class Unpack:
    """One expert back from the packed tensors of every TP rank to the checkpoint's own tensors."""

    moe: MoeLayer
    expert: int
    job: int


@dataclass(frozen=True, slots=True)
class Widen:
    """A BF16 or F16 tensor as F32, by value."""

    tensor: TensorInfo
    key: str


@dataclass(frozen=True, slots=True)
class Constant:
    """Bytes that are known when the plan is made."""

    key: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Compress:
    """A 4-bit linear's weight and scales in compressed-tensors' form; `rows` are factors of its rows.

    NVFP4 without factors is copied and rescaled instead.
    """

    linear: Linear
    keys: tuple[str, str]
    rows: TensorInfo | None
    job: int


@dataclass(frozen=True, slots=True)
class Dequantize:
    """A 4-bit linear's weight in BF16, with its pre_quant_scale; columns divided by the factor of a layer's fold."""

    linear: Linear
    key: str
    global_scale: float
    fold: str | None
    job: int


@dataclass(frozen=True, slots=True)
class Divide:
    """A float weight with its columns divided by the factor of the fold of a MoE layer, in its own dtype."""

    tensor: TensorInfo
    key: str
    fold: str
    job: int


Step = Copy | Fill | RescaleBlocks | Widen | Constant | Compress | Dequantize | Divide | Pack | Parameters | Unpack
"""`job` is the index of the target that a step works for (a run may write several)."""


@dataclass(frozen=True, slots=True)
class Item:
    """Work done by one worker in one go: an expert, a linear, or one other tensor's piece."""

    label: str
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """An output file: header bytes, then tensors (name, dtype, shape) one after another."""

    file: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    header: bytes = field(repr=False)
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """Everything that will be written except the configs and side files.

    `outputs` maps each output's key, its folder and name, to its TensorInfo (file and absolute offsets in the output).
    `stacked` are keys that are written, and hashed, expert by expert; `imputed` names that the source does not have.
    """

    shards: tuple[Shard, ...]
    outputs: Mapping[str, TensorInfo]
    items: tuple[Item, ...]
    imputed: tuple[str, ...] = ()
    stacked: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def nbytes_of_tensors(self) -> int:
        """Bytes that the items write."""
        return sum(shard.nbytes - len(shard.header) for shard in self.shards)


def shards_read(item: Item) -> frozenset[str]:
    """The source's shards that an item's steps read."""
    return frozenset(tensor.file for step in item.steps for tensor in _tensors_read(step))


def bytes_read(item: Item) -> int:
    """Bytes of the source that an item's steps read."""
    return sum(map(step_reads, item.steps))


def step_reads(step: Step) -> int:
    """Bytes of the source that a step reads; of a fused expert's tensors, its own."""
    if isinstance(step, Copy):
        return step.length
    whole = sum(tensor.nbytes for tensor in _tensors_read(step))
    return whole // step.moe.expert_count if isinstance(step, Pack) and step.moe.gate_up is not None else whole


def _tensors_read(step: Step) -> Iterator[TensorInfo]:
    match step:
        case Copy() | RescaleBlocks() | Widen() | Divide():
            yield step.tensor
        case Compress() | Dequantize():
            yield from _stored_bytes(step.linear)
            if isinstance(step, Compress) and step.rows is not None:
                yield step.rows
        case Pack():
            moe = step.moe
            if moe.gate_up is not None and moe.down is not None:
                linears = [moe.gate_up, moe.down]
            else:
                expert = moe.experts[step.expert]
                linears = [linear for linear in (expert.gate, expert.up, expert.down) if linear is not None]
            for linear in linears:
                yield from _stored_bytes(linear)
        case Fill() | Constant() | Parameters() | Unpack():
            return


def _stored_bytes(linear: Linear) -> Iterator[TensorInfo]:
    """A linear's tensors but for its scalars, which were all read before."""
    return (tensor for param, tensor in linear.params.items() if param not in SCALAR_PARAMS)


Spec = tuple[str, tuple[int, ...]]
"""dtype and shape of an output tensor."""


def key_of(folder: str, name: str) -> str:
    """An output's key: unique over all folders of a run. Either may be empty."""
    return f"{folder}/{name}" if folder and name else folder or name


_ONE = {"F32": b"\x00\x00\x80\x3f", "BF16": b"\x80\x3f", "F16": b"\x00\x3c"}
"""1.0 by dtype."""


def make_plan(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, str],
    schema: Schema,
    policy: ScalePolicy,
    weight_only: frozenset[str],
    max_shard_bytes: int,
    folder: str = "",
    job: int = 0,
) -> Plan:
    """The plan for target `hf`: the source's names and formats, scales F32 and canonical.

    Args:
        tensors, metadata: from the source's headers.
        schema: without errors.
        policy: how scales are resolved, which decides their shapes.
        weight_only: modules that need no input_scale, so that none is imputed for them.
        max_shard_bytes: bytes of tensors per file, exceeded only by a single larger tensor.
        folder: where the files lie, relative to the output.
        job: index of this target in the run.
    """
    specs, steps, imputed = logical_steps(tensors, schema, policy, weight_only, frozenset(), {}, folder, job)
    shards = place(specs, metadata, max_shard_bytes, folder)
    return Plan(shards, outputs_of(shards, folder), gather(steps), tuple(imputed))


def logical_steps(
    tensors: Mapping[str, TensorInfo],
    schema: Schema,
    policy: ScalePolicy,
    weight_only: frozenset[str],
    skip: frozenset[str],
    instead: Mapping[str, Step],
    folder: str,
    job: int,
) -> tuple[dict[str, Spec], list[tuple[str, Step]], list[str]]:
    """Specs of tensors in the checkpoint's own form, labelled steps, imputed names.

    Modules in `skip` are left out; `instead` has the steps that write some unquantised tensors, which are not copied.
    """
    specs: dict[str, Spec] = {}
    steps: list[tuple[str, Step]] = []
    imputed: list[str] = []
    rescalable = _rescalable(schema, policy)
    factors = _imputed_factors(schema) if policy.impute == "ones" else {}
    done: set[str] = set()
    for linear in schema.linears.values():
        if linear.format not in (Format.NVFP4, Format.INT4) and linear.module not in skip:
            continue
        done.update(tensor.name for tensor in linear.params.values())
        if linear.module in skip:
            continue
        path, expert = schema.expert_of.get(linear.module, (None, None))
        label = linear.module if path is None else f"{path} expert {expert}"
        for param, tensor in linear.params.items():
            if param in SCALAR_PARAMS:
                continue
            specs[tensor.name] = (tensor.dtype, tensor.shape)
            if param == "weight_scale" and tensor.dtype in ("BF16", "F16"):
                specs[tensor.name] = ("F32", tensor.shape)
                steps.append((label, Widen(tensor, key_of(folder, tensor.name))))
            elif param == "weight_scale" and linear.module in rescalable:
                steps.append((label, RescaleBlocks(tensor, key_of(folder, tensor.name), job)))
            else:
                steps += copies(tensor, label, folder)
        for param in SCALAR_PARAMS:
            name = linear.tensor_name(param)
            if param not in linear.params:
                if linear.module in weight_only or policy.impute == "none" or param == "weight_scale_2":
                    continue
                imputed.append(name)
            specs[name] = ("F32", output_shape(linear, param, policy))
            steps.append((label, Fill(name, key_of(folder, name), job)))
        if linear.module in factors:
            name, sibling = linear.tensor_name("pre_quant_scale"), factors[linear.module]
            imputed.append(name)
            specs[name] = (sibling.dtype, sibling.shape)
            ones = _ONE[sibling.dtype] * math.prod(sibling.shape)
            steps.append((label, Constant(key_of(folder, name), ones)))
    for name, tensor in tensors.items():
        if name not in done:
            specs[name] = (tensor.dtype, tensor.shape)
            steps += [(name, instead[name])] if name in instead else copies(tensor, name, folder)
    return specs, steps, imputed


def _imputed_factors(schema: Schema) -> dict[str, TensorInfo]:
    """The pre_quant_scale of another linear by the module of each linear that alone lacks one."""
    return {
        linear.module: sibling
        for moe in schema.moe_layers
        for linears, sibling in lacking_factors(moe).values()
        for linear in linears
    }


def copies(tensor: TensorInfo, label: str, folder: str) -> list[tuple[str, Step]]:
    """A verbatim copy; one larger than a piece is cut into pieces, each an item of its own."""
    keys = (key_of(folder, tensor.name),)
    if tensor.nbytes <= PIECE_BYTES:
        return [(label, Copy(tensor, 0, tensor.nbytes, keys))] if tensor.nbytes else []
    return [
        (f"{tensor.name} piece {at // PIECE_BYTES}", Copy(tensor, at, min(PIECE_BYTES, tensor.nbytes - at), keys))
        for at in range(0, tensor.nbytes, PIECE_BYTES)
    ]


def _rescalable(schema: Schema, policy: ScalePolicy) -> frozenset[str]:
    """Modules whose block scales may change: members of a pair or group with several global scales."""
    members: list[Linear] = [member for group in schema.nvfp4_groups for member in group.members]
    if policy.w13_scale == "unify":
        for moe in schema.moe_layers:
            if moe.gate_up is None and moe.gated:
                members += moe.w13
            elif moe.gate_up is not None:
                scale = moe.gate_up.params.get("weight_scale_2")
                if scale is not None and scale.shape == (moe.expert_count, 2):
                    members.append(moe.gate_up)
    return frozenset(member.module for member in members)


def split(ordered: Sequence[str], specs: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """Names cut into files of at most `limit` bytes of tensors, in the order given."""
    files: list[list[str]] = [[]]
    held = 0
    for name in ordered:
        nbytes = tensor_bytes(*specs[name])
        if files[-1] and held + nbytes > limit:
            files.append([])
            held = 0
        files[-1].append(name)
        held += nbytes
    return files


def aligned(names: Sequence[str], specs: Mapping[str, Spec]) -> list[str]:
    """Larger dtypes first, as safetensors itself writes, so that every tensor is aligned; else the order given."""
    return sorted(names, key=lambda name: -DTYPE_BITS[specs[name][0]])


def files_of(specs: Mapping[str, Spec], limit: int) -> list[list[str]]:
    """Names by file, for a checkpoint in its own form: in natural order, aligned inside each file."""
    return [aligned(names, specs) for names in split(sorted(specs, key=natural_key), specs, limit)]


def shards_of(
    files: Sequence[Sequence[str]], specs: Mapping[str, Spec], metadata: Mapping[str, str], folder: str
) -> tuple[Shard, ...]:
    """Output files with the tensors named, one after another as given."""
    shards = []
    for number, names in enumerate(files, 1):
        base = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = tuple((name, *specs[name]) for name in names)
        file = key_of(folder, base)
        try:
            header = build_header(tensors, metadata)
        except HeaderError as error:
            refuse("header-too-large", str(error), file=file)
        shards.append(Shard(file, tensors, header, len(header) + sum(tensor_bytes(*specs[name]) for name in names)))
    return tuple(shards)


def place(specs: Mapping[str, Spec], metadata: Mapping[str, str], limit: int, folder: str) -> tuple[Shard, ...]:
    """Output files of a checkpoint in its own form."""
    return shards_of(files_of(specs, limit), specs, metadata, folder)


def outputs_of(shards: Iterable[Shard], folder: str) -> dict[str, TensorInfo]:
    """Every tensor of the shards by key, with its absolute place."""
    outputs = {}
    for shard in shards:
        position = len(shard.header)
        for name, dtype, shape in shard.tensors:
            end = position + tensor_bytes(dtype, shape)
            outputs[key_of(folder, name)] = TensorInfo(name, dtype, shape, shard.file, position, end)
            position = end
    return outputs


def index_of(tensors: Iterable[TensorInfo]) -> dict[str, Any]:
    """model.safetensors.index.json for the tensors of one folder."""
    found = {tensor.name: tensor for tensor in tensors}
    weight_map = {name: found[name].file.rpartition("/")[2] for name in sorted(found)}
    return {"metadata": {"total_size": sum(tensor.nbytes for tensor in found.values())}, "weight_map": weight_map}


def gather(steps: Iterable[tuple[str, Step]]) -> tuple[Item, ...]:
    """Items from labelled steps, in the order in which labels first appear; copies of the same bytes become one."""
    gathered: dict[str, list[Step]] = defaultdict(list)
    for label, step in steps:
        parts = gathered[label]
        if isinstance(step, Copy):
            twin = next(
                (p for p in parts if isinstance(p, Copy) and (p.tensor, p.start) == (step.tensor, step.start)), None
            )
            if twin is not None:
                parts[parts.index(twin)] = Copy(step.tensor, step.start, step.length, twin.keys + step.keys)
                continue
        parts.append(step)
    return tuple(Item(label, tuple(parts)) for label, parts in gathered.items())


def merge(plans: Sequence[Plan]) -> Plan:
    """One plan for several targets: each source tensor's item serves them all."""
    if len(plans) == 1:
        return plans[0]
    return Plan(
        tuple(shard for plan in plans for shard in plan.shards),
        {key: tensor for plan in plans for key, tensor in plan.outputs.items()},
        gather((item.label, step) for plan in plans for item in plan.items for step in item.steps),
        tuple(name for plan in plans for name in plan.imputed),
        frozenset(key for plan in plans for key in plan.stacked),
    )
