"""The target `compressed-tensors`: what stock vLLM, SGLang and transformers load through the library of that name.

int4 becomes `pack-quantized`: weight_packed I32 [N, K/8], eight codes + 8 to a word, the first in the lowest nibble;
weight_scale BF16 [N, K/g]; weight_shape I64 [2]. NVFP4 becomes `nvfp4-pack-quantized`: weight_packed U8 and
weight_scale E4M3 as ModelOpt stores them (up's with down's pre_quant_scale, if any), weight_global_scale and
input_global_scale F32 [1], the reciprocals of weight_scale_2 and input_scale. Names and forms: compressed-tensors 0.20.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from nvfp4prep.blockscales import check_fold, fold_codes
from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.dialects import FUSION_GROUPS, layer_number
from nvfp4prep.errors import InputRefused
from nvfp4prep.experts import columns_packed
from nvfp4prep.findings import Finding
from nvfp4prep.folding import DTYPES, Fold, factors_fit, has_pre_quant_scale
from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts.logical import LayoutError
from nvfp4prep.numerics import (
    became,
    dequantize_int4,
    dequantize_nvfp4,
    floats,
    raw_bytes,
    unfit,
)
from nvfp4prep.plan import (
    PIECE_BYTES,
    Compress,
    Constant,
    Copy,
    Dequantize,
    Divide,
    Plan,
    RescaleBlocks,
    Spec,
    Step,
    copies,
    gather,
    key_of,
    outputs_of,
    place,
)
from nvfp4prep.quant_config import QuantConfig
from nvfp4prep.scales import Resolution
from nvfp4prep.schema import GROUP_SIZE, Format, Linear
from nvfp4prep.survey import encode_floats

if TYPE_CHECKING:
    from nvfp4prep.execute import Context

NAME = "compressed-tensors"
_QUANTIZED = (Format.NVFP4, Format.INT4)
_REPLACED = frozenset({"weight", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"})
_PARAMS = _REPLACED | {"bias", "k_scale", "v_scale"}
"""What a quantised linear may have. KV scales keep ModelOpt's names: engines know them, the library's converter too."""


# --- what can't be written -------------------------------------------------------------------------------------------


def refusals(checkpoint: Checkpoint, fold: bool) -> list[Finding]:
    """Errors for a checkpoint that compressed-tensors has no form for.

    Args:
        checkpoint: as read.
        fold: whether pre_quant_scale may be folded away.
    """
    schema = checkpoint.schema
    findings: list[Finding] = []

    def refuse(message: str, linear: Linear | None = None) -> None:
        weight = None if linear is None else linear.params["weight"]
        file, tensor = (weight.file, weight.name) if weight else (None, None)
        layer = None if linear is None else linear.layer
        experts = () if linear is None or linear.expert is None else (linear.expert,)
        findings.append(Finding("target-refused", "error", f"{NAME}: {message}", file, tensor, layer, experts))

    formats = {linear.format for linear in schema.linears.values()} & {*_QUANTIZED, Format.FP8}
    if len(formats) > 1:
        names = " and ".join(sorted(form.value for form in formats))
        refuse(f"{names} linears in one checkpoint; only one format is written; use --target hf")
    for linear in schema.linears.values():
        if linear.format not in _QUANTIZED:
            continue
        unknown = sorted(set(linear.params) - _PARAMS)
        if linear.experts is not None:
            refuse("experts fused in one tensor, which it has no name for; use --target hf", linear)
        elif unknown:
            refuse(f"no place for {', '.join(unknown)}; use --target hf", linear)
        elif linear.format is Format.INT4 and linear.columns % 8:
            refuse(f"{linear.columns} columns are no multiple of 8 codes", linear)
        elif not factors_fit(linear):
            factors = linear.params["pre_quant_scale"]
            refuse(f"pre_quant_scale is {factors.dtype} {list(factors.shape)} for {linear.columns} inputs", linear)
        else:
            continue
        break
    quantized = list(schema.of_format(Format.NVFP4))
    unscaled = [one for one in quantized if one.module in checkpoint.weight_only and "input_scale" not in one.params]
    if unscaled and len(unscaled) < len(quantized):
        message = f"{len(unscaled)} of {len(quantized)} linears are weight-only (no input_scale), and all must be alike"
        refuse(f"{message}; use --target hf", unscaled[0])
    kv_cache = checkpoint.quant.kv_cache if checkpoint.quant else None
    if kv_cache is not None and kv_cache.upper() != "FP8":
        refuse(f"a KV cache in {kv_cache}, which it has no form for; use --target hf")
    scaled = [moe for moe in schema.layers_of(*_QUANTIZED) if has_pre_quant_scale(moe)]
    if scaled and not fold:
        refuse("the experts have pre_quant_scale, which it has no place for; --pre-quant-scale fold", scaled[0].w13[0])
    return findings


def warnings(checkpoint: Checkpoint) -> list[Finding]:
    """What a checkpoint loses in this form."""
    scaled = [linear for linear in checkpoint.schema.of_format(Format.INT4) if "input_scale" in linear.params]
    if not scaled:
        return []
    message = (
        f"{len(scaled)} linears have scales for FP8 activations (W4A8), which pack-quantized has no place for: "
        "activations stay 16-bit (W4A16)"
    )
    tensor = scaled[0].params["input_scale"]
    return [Finding("activation-scales-dropped", "warning", message, tensor.file, tensor.name)]


# --- the plan --------------------------------------------------------------------------------------------------------


def make_compressed_plan(
    checkpoint: Checkpoint,
    resolution: Resolution,
    folds: Mapping[str, Fold],
    max_shard_bytes: int,
    folder: str,
    job: int,
) -> Plan:
    """Quantised linears under the library's names; what is folded, or has no form there, in BF16; the rest as it is."""
    schema, tensors = checkpoint.schema, checkpoint.source.tensors
    specs: dict[str, Spec] = {}
    steps: list[tuple[str, Step]] = []
    done: set[str] = set()
    divided = {reader.module: path for path, fold in folds.items() for reader in fold.readers}
    rows = _row_factors(checkpoint)
    plain = unpacked(checkpoint, folds)
    for linear in schema.linears.values():
        fold = divided.get(linear.module)
        if linear.format not in _QUANTIZED and fold is None:
            continue
        done.update(tensor.name for tensor in linear.params.values())
        path, expert = schema.expert_of.get(linear.module, (None, None))
        label = linear.module if path is None else f"{path} expert {expert}"
        row_factors, values = rows.get(linear.module), checkpoint.scale_values
        plain_ = linear.module in plain
        made, work = _linear(linear, plain_, fold, row_factors, resolution, values, folder, job)
        specs |= made
        steps += [(label, step) for step in work]
    for path, fold_ in folds.items():
        done.add(fold_.norm.name)
        specs[fold_.norm.name] = (fold_.norm.dtype, fold_.norm.shape)
        steps.append((path, Constant(key_of(folder, fold_.norm.name), bytes(raw_bytes(fold_.folded)))))
    for name, tensor in tensors.items():
        if name not in done:
            specs[name] = (tensor.dtype, tensor.shape)
            steps += copies(tensor, name, folder)
    imputed = tuple(
        name
        for linear in schema.of_format(Format.NVFP4)
        if (name := f"{linear.module}.input_global_scale") in specs and "input_scale" not in linear.params
    )
    shards = place(specs, checkpoint.source.metadata, max_shard_bytes, folder)
    return Plan(shards, outputs_of(shards, folder), gather(steps), imputed)


def _row_factors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """down's pre_quant_scale by the module of the up that takes it."""
    return {
        expert.up.module: expert.down.params["pre_quant_scale"]
        for moe in checkpoint.schema.layers_of(*_QUANTIZED)
        for expert in moe.experts
        if "pre_quant_scale" in expert.down.params
    }


def unpacked(checkpoint: Checkpoint, folds: Mapping[str, Fold]) -> frozenset[str]:
    """Quantised modules outside the routed experts that are written in BF16.

    Those with a pre_quant_scale of their own, those that read a folded norm, and what engines fuse with one of them.
    """
    schema = checkpoint.schema
    routed = {linear.module for moe in schema.moe_layers for linear in (*moe.w13, *moe.w2)}
    divided = {reader.module for fold in folds.values() for reader in fold.readers}
    quantized = {
        module: linear
        for module, linear in schema.linears.items()
        if linear.format in _QUANTIZED and module not in routed
    }
    own = {module for module, linear in quantized.items() if "pre_quant_scale" in linear.params or module in divided}
    fused = {
        f"{module.rpartition('.')[0]}.{name}"
        for module in own
        for group in FUSION_GROUPS
        if module.rpartition(".")[2] in group
        for name in group
    }
    return frozenset(own | (fused & quantized.keys()))


def _linear(
    linear: Linear,
    plain: bool,
    fold: str | None,
    rows: TensorInfo | None,
    resolution: Resolution,
    stored: Mapping[str, tuple[float, ...]],
    folder: str,
    job: int,
) -> tuple[dict[str, Spec], list[Step]]:
    """Output tensors of one linear, and the steps that write them.

    Args:
        linear: of any format; an unquantised one only where `fold` is given.
        plain: write it in BF16.
        fold: the MoE layer whose fold divides its columns.
        rows: factors of its rows.
        resolution: what its scales become.
        stored: what they are in the checkpoint.
        folder, job: where the output lies, and whose it is.
    """
    module, weight, scale = linear.module, linear.params["weight"], linear.params.get("weight_scale")

    def key(param: str) -> str:
        return key_of(folder, f"{module}.{param}")

    specs: dict[str, Spec] = {}
    steps: list[Step] = []
    for tensor in (tensor for param, tensor in linear.params.items() if param not in _REPLACED):
        specs[tensor.name] = (tensor.dtype, tensor.shape)
        steps.append(Copy(tensor, 0, tensor.nbytes, (key_of(folder, tensor.name),)))
    if linear.format not in _QUANTIZED or scale is None:
        assert fold is not None
        specs[f"{module}.weight"] = (weight.dtype, weight.shape)
        return specs, [*steps, Divide(weight, key("weight"), fold, job)]
    if plain:
        specs[f"{module}.weight"] = ("BF16", (linear.rows, linear.columns))
        scale_2 = stored[linear.tensor_name("weight_scale_2")][0] if linear.format is Format.NVFP4 else 1.0
        return specs, [*steps, Dequantize(linear, key("weight"), scale_2, fold, job)]
    specs[f"{module}.weight_packed"] = ("U8", weight.shape)
    specs[f"{module}.weight_scale"] = (scale.dtype, scale.shape)
    if linear.format is Format.INT4:
        specs[f"{module}.weight_packed"] = ("I32", (linear.rows, linear.columns // 8))
        specs[f"{module}.weight_scale"] = ("BF16", scale.shape)
        specs[f"{module}.weight_shape"] = ("I64", (2,))
        steps.append(Compress(linear, (key("weight_packed"), key("weight_scale")), rows, job))
        steps.append(Constant(key("weight_shape"), struct.pack("<2q", linear.rows, linear.columns)))
        return specs, steps
    if rows is not None:
        steps.append(Compress(linear, (key("weight_packed"), key("weight_scale")), rows, job))
    else:
        for at in range(0, weight.nbytes, PIECE_BYTES):
            steps.append(Copy(weight, at, min(PIECE_BYTES, weight.nbytes - at), (key("weight_packed"),)))
        steps.append(RescaleBlocks(scale, key("weight_scale"), job))
    for param, target in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
        values = resolution.values.get(linear.tensor_name(param))
        if values is not None:
            specs[f"{module}.{target}"] = ("F32", (1,))
            steps.append(Constant(key(target), encode_floats([_reciprocal(values[0])])))
    return specs, steps


def _reciprocal(value: float) -> float:
    """1 / value rounded to F32."""
    return float((1 / torch.tensor(value, dtype=torch.float64)).to(torch.float32))


# --- the configuration -----------------------------------------------------------------------------------------------


def quantization_config(checkpoint: Checkpoint, quant: QuantConfig, folds: Mapping[str, Fold]) -> dict[str, Any]:
    """config.json's quantization_config."""
    schema = checkpoint.schema
    linear = next(linear for linear in schema.linears.values() if linear.format in _QUANTIZED)
    if linear.format is Format.INT4:
        form = "pack-quantized"
        weights: dict[str, Any] = _arguments("int", "group", linear.group_size)
        inputs = None
    else:
        form = "nvfp4-pack-quantized"
        weights = _arguments("float", "tensor_group", GROUP_SIZE) | {"scale_dtype": "torch.float8_e4m3fn"}
        scaled = any("input_scale" in one.params for one in schema.of_format(Format.NVFP4))
        inputs = weights | {"dynamic": "local"} if scaled else None
    ignore = sorted({*quant.exclude, *unpacked(checkpoint, folds)})
    packed = (one.module for one in schema.linears.values() if one.format in _QUANTIZED and one.module not in ignore)
    heads = [module for module in packed if module.rpartition(".")[2] == "lm_head"]  # engines have no Linear there
    section: dict[str, Any] = {
        "quant_method": NAME,
        "format": form,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear", *heads],
                "weights": weights,
                "input_activations": inputs,
                "output_activations": None,
                "format": form,
            }
        },
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
    if quant.kv_cache is not None:
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
        section["kv_cache_scheme"] = scheme
    return section


def _arguments(kind: str, strategy: str, group_size: int) -> dict[str, Any]:
    return {
        "num_bits": 4,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": group_size,
        "dynamic": False,
    }


# --- the steps -------------------------------------------------------------------------------------------------------


def pack_int4(weight: Tensor) -> Tensor:
    """ModelOpt's int4 as the library packs it.

    Args:
        weight: U8 [N/2, K], row 2r in the low nibble, two's complement.

    Returns:
        I32 [N, K/8], code + 8, the first code in the lowest nibble.
    """
    return (columns_packed(weight) ^ 0x88).view(torch.int32)


def run(context: Context, step: Compress | Dequantize | Divide) -> None:
    """Execute a step. Raises InputRefused for values that the output's dtype can't hold."""
    match step:
        case Compress():
            _compress(context, step)
        case Dequantize():
            _dequantize(context, step)
        case Divide():
            values = _floats(context, step.tensor) / context.jobs[step.job].folds[step.fold].factor
            place = Place(step.tensor, layer_number(step.fold), None)
            _put_rounded(context, step.key, values, step.tensor.dtype, place, (step.job, "readers"))


def _floats(context: Context, tensor: TensorInfo) -> Tensor:
    return floats(tensor.dtype, context.read(tensor, 0, tensor.nbytes)).view(tensor.shape)


def _bytes(context: Context, tensor: TensorInfo) -> Tensor:
    return torch.from_numpy(context.read_own(tensor, 0, tensor.nbytes)).view(tensor.shape)


def _compress(context: Context, step: Compress) -> None:
    linear = step.linear
    packed, scale = step.keys
    if linear.format is Format.NVFP4:
        _fold(context, step)
        return
    context.put(packed, raw_bytes(pack_int4(_bytes(context, linear.params["weight"]))))
    values = _floats(context, linear.params["weight_scale"])
    if step.rows is not None:
        values = values * _floats(context, step.rows)[:, None]
    place = Place(linear.params["weight_scale"], linear.layer, linear.expert)
    _put_rounded(context, scale, values, "BF16", place, (step.job, "scales"))


def _fold(context: Context, step: Compress) -> None:
    """An NVFP4 up: FP4 bytes as they are, block scales with the factors of its rows, and with their rescale."""
    linear, scale = step.linear, step.linear.params["weight_scale"]
    assert step.rows is not None
    context.put(step.keys[0], raw_bytes(_bytes(context, linear.params["weight"])))
    rescale = context.jobs[step.job].resolution.rescales.get(scale.name)
    try:
        factors = _floats(context, step.rows)
        before = _bytes(context, scale)
        codes, counts = fold_codes(before, factors, rescale)
        check_fold(before, codes, factors)
    except LayoutError as error:
        if context.outcome.unusable:  # refuses the run at its end, by its own name
            return
        raise InputRefused([_unfit(linear, error)]) from None
    with context.lock:
        context.outcome.folded[step.job, linear.module] = counts
    context.put(step.keys[1], raw_bytes(codes))


def _unfit(linear: Linear, error: LayoutError) -> Finding:
    scale, experts = linear.params["weight_scale"], () if linear.expert is None else (linear.expert,)
    message = f"{error}; use --target hf"
    return Finding("kernel-scale-bad", "error", message, scale.file, scale.name, linear.layer, experts)


def _dequantize(context: Context, step: Dequantize) -> None:
    linear = step.linear
    scale = linear.params["weight_scale"]
    weight = _bytes(context, linear.params["weight"])
    if linear.format is Format.INT4:
        values = dequantize_int4(weight, _floats(context, scale), 0)
    else:
        blocks = _bytes(context, scale).view(torch.float8_e4m3fn)
        values = dequantize_nvfp4(weight, blocks, torch.tensor(step.global_scale, dtype=torch.float32))
    if "pre_quant_scale" in linear.params:
        values = values * _floats(context, linear.params["pre_quant_scale"])
    if step.fold is not None:
        values = values / context.jobs[step.job].folds[step.fold].factor
    place = Place(linear.params["weight"], linear.layer, linear.expert)
    _put_rounded(context, step.key, values, "BF16", place, (step.job, "unpacked"))


class Place(NamedTuple):
    """Where values come from, for a message."""

    tensor: TensorInfo
    layer: int | None
    expert: int | None


def _put_rounded(context: Context, key: str, values: Tensor, dtype: str, place: Place, of: tuple[int, str]) -> None:
    """Write F32 values in a dtype, and note the largest relative error that rounding made, by job and kind.

    Of weights below the dtype's smallest normal number, the error is taken relative to that.

    Raises:
        InputRefused: a value that the dtype can't hold (`numerics.unfit`).
    """
    rounded = values.to(DTYPES[dtype])
    back = rounded.float()
    # A weight that is small beside its row adds little, and F16 routers have such; each scale is a group's own factor.
    rows = of[1] != "scales"
    lost = unfit(values, rounded, rows=rows)
    if bool(lost.any()) and not context.outcome.unusable:  # those refuse the run at its end, by their own names
        at = tuple(int(i) for i in lost.nonzero()[0])
        left = became(float(back[at]), float(values[at]))
        message = f"{float(values[at]):.6g} at {list(at)} does not fit {dtype}{left}; use --target hf"
        if bool(torch.isnan(values[at])):
            message = f"nan at {list(at)}, which no target makes right; export this tensor again"
        tensor, experts = place.tensor, () if place.expert is None else (place.expert,)
        raise InputRefused(
            [Finding("kernel-scale-bad", "error", message, tensor.file, tensor.name, place.layer, experts)]
        )
    whole = values.abs()
    if rows:
        whole = whole.clamp_(min=torch.finfo(rounded.dtype).smallest_normal)
    error = torch.where(torch.isfinite(values) & (values != 0), (back - values).abs_() / whole, 0.0)
    largest = float(error.max()) if values.numel() else 0.0
    with context.lock:
        context.outcome.rounding[of] = max(context.outcome.rounding.get(of, 0.0), largest)
    context.put(key, raw_bytes(rounded))
