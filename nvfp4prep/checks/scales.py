"""Scales as they are stored: dtypes and shapes, spreads over experts, halves that differ, reciprocals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.scales import fault
from nvfp4prep.scalestats import Spread, group_scales, layer_scales, times
from nvfp4prep.schema import SCALAR_PARAMS, Format, MoeLayer


def stored_in_16_bits(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP323: scalar scales, and int4's group scales, that loaders read as F32."""
    found: dict[tuple[str, str], list[TensorInfo]] = defaultdict(list)
    for linear in checkpoint.schema.linears.values():
        params = {Format.NVFP4: SCALAR_PARAMS, Format.INT4: ("weight_scale", *SCALAR_PARAMS)}.get(linear.format, ())
        for param in params:
            tensor = linear.params.get(param)
            if tensor is not None and tensor.dtype in ("BF16", "F16"):
                found[param, tensor.dtype].append(tensor)
    for (param, dtype), tensors in found.items():
        message = (
            f"{len(tensors)} {param} are {dtype}: a loader that reads F32 bits gets garbage, and TensorRT-LLM rounds "
            "their reciprocals to 16 bits; convert widens them by value"
        )
        yield Finding("scale-16bit", "warning", message, tensors[0].file, tensors[0].name)


def fused_vectors(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP324: fused experts' scales of more than one value."""
    found = [
        linear.params[param]
        for moe in checkpoint.schema.nvfp4_layers
        for linear in (moe.gate_up, moe.down)
        if linear is not None
        for param in SCALAR_PARAMS
        if param in linear.params and linear.params[param].shape not in ((), (1,))
    ]
    if found:
        message = (
            f"{list(found[0].shape)} ({len(found)} such scales): vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM load fused "
            "scales of one value only"
        )
        yield Finding("fused-scale-vector", "warning", message, found[0].file, found[0].name)


OUTLIER = 2.0**14
"""How far an input scale may lie from the median of its GEMM: above, the block scales of the others' activations, at
most 448, are left with E4M3's subnormals, or vanish. Reciprocals of usual scales (0.002) are 250,000 times as large."""


def outliers(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP417: input scales so far from those of the other experts that they can't be what calibration saw."""
    for moe in checkpoint.schema.layers_of(Format.NVFP4, Format.INT4):
        for gemm, linears in (("w13", moe.w13), ("w2", moe.w2)):
            tensors = [linear.params["input_scale"] for linear in linears if "input_scale" in linear.params]
            values = [value for tensor in tensors for value in checkpoint.scale_values[tensor.name] if not fault(value)]
            if len(values) < 2:
                continue
            median = sorted(values)[len(values) // 2]
            far = [
                (linear, value)
                for linear in linears
                if "input_scale" in linear.params
                for value in checkpoint.scale_values[linear.params["input_scale"].name]
                if not fault(value) and not 1 / OUTLIER <= value / median <= OUTLIER
            ]
            if not far:
                continue
            linear, value = max(far, key=lambda pair: abs(math.log(pair[1] / median)))
            tensor = linear.params["input_scale"]
            message = (
                f"{moe.path} {gemm}: {len(far)} of {len(values)} input_scale lie more than {OUTLIER:,.0f}x from the "
                f"median {median:.6g} ({value:.6g} here): a reciprocal, or a fault; calibrate again"
            )
            yield Finding(
                "input-scale-outlier",
                "error",
                message,
                tensor.file,
                tensor.name,
                moe.layer,
                tuple(sorted({one.expert for one, _ in far if one.expert is not None})),
                gemm,
                {"value": value, "median": median},
            )


def _scale_of(moe: MoeLayer, gemm: str, param: str, expert: int | None) -> TensorInfo | None:
    """A stored scale of an expert in a GEMM, or the first there is."""
    stored = [linear for linear in (moe.w13 if gemm == "w13" else moe.w2) if param in linear.params]
    chosen = next((linear for linear in stored if linear.expert == expert), stored[0] if stored else None)
    return None if chosen is None else chosen.params[param]


def differing_inputs(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP404: input scales of one GEMM of a MoE layer that are not one value."""
    layers = checkpoint.schema.layers_of(Format.NVFP4, Format.INT4)
    for layer in layer_scales(layers, checkpoint.scale_values):
        gemms: tuple[tuple[Literal["w13", "w2"], Spread], ...] = (("w13", layer.w13), ("w2", layer.w2))
        for gemm, spread in gemms:
            if spread.ratio <= 1 or spread.low is None or spread.high is None:
                continue
            halves = layer.gate_up_inputs_differ if gemm == "w13" else ()
            tensor = _scale_of(layer.moe, gemm, "input_scale", spread.top)
            also = f"; gate and up differ in {len(halves)} experts, and share one slot" if halves else ""
            yield Finding(
                "input-scale-differs",
                "warning",
                f"{layer.moe.path} {gemm}: {spread.stored} input_scale from {spread.low:.6g} to {spread.high:.6g} "
                f"({times(spread.ratio)} apart){also}; engines take the largest (this one's), a rank's largest or each "
                "its own: convert makes them one",
                None if tensor is None else tensor.file,
                None if tensor is None else tensor.name,
                layer=layer.moe.layer,
                experts=() if spread.top is None else (spread.top,),
                projection=gemm,
                values={"min": spread.low, "max": spread.high, "ratio": spread.ratio},
            )


def differing_halves(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP408: gate and up of an expert with two weight_scale_2."""
    for layer in layer_scales(checkpoint.schema.nvfp4_layers, checkpoint.scale_values):
        pairs = layer.gate_up
        if pairs is None or not pairs.differing:
            continue
        tensor = _scale_of(layer.moe, "w13", "weight_scale_2", pairs.worst)
        yield Finding(
            "gate-up-scale-differs",
            "warning",
            f"{layer.moe.path}: {len(pairs.differing)} of {pairs.total} gate/up pairs have two weight_scale_2, up to "
            f"{times(pairs.max_ratio)} apart (expert {pairs.worst}): vLLM reads up with the gate's; convert makes them "
            "one or keeps both where the kernel can",
            None if tensor is None else tensor.file,
            None if tensor is None else tensor.name,
            layer=layer.moe.layer,
            experts=pairs.differing,
            projection="w13",
            values={"max_ratio": pairs.max_ratio},
        )


def differing_linears(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP410: linears that engines fuse (q/k/v, gate/up, q_a/kv_a) with different scales."""
    for scales in group_scales(checkpoint.schema.fusion_groups, checkpoint.scale_values):
        for param, spread in (("weight_scale_2", scales.globals), ("input_scale", scales.input)):
            if param == "weight_scale_2" and scales.group.format is Format.INT4:
                continue  # no factor of the weight
            if spread.ratio <= 1 or spread.low is None or spread.high is None:
                continue
            yield Finding(
                "fused-linear-scale-differs",
                "warning",
                f"{scales.group.label}: {param} from {spread.low:.6g} to {spread.high:.6g} ({times(spread.ratio)} "
                "apart), but engines fuse these linears and take one; convert makes them one",
                tensor=scales.group.members[0].tensor_name(param),
                layer=scales.group.members[0].layer,
                projection=scales.kind,
                values={"min": spread.low, "max": spread.high, "ratio": spread.ratio},
            )


def reciprocals(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP411: scales above 1, which amax / 2688 is for no weight: compressed-tensors stores the reciprocal.

    weight_scale_2 above 1 means weights above 2688. An input_scale can be above 1 where activations are large, so that
    only all of them together tell.
    """
    values = checkpoint.scale_values
    for param, impossible in (("weight_scale_2", True), ("input_scale", False)):
        linears = [linear for linear in checkpoint.schema.of_format(Format.NVFP4) if param in linear.params]
        good = [(x, value) for x in linears for value in values[x.params[param].name] if not fault(value)]
        large = [(linear, value) for linear, value in good if value > 1]
        if not large or (len(large) < len(good) and not impossible):
            continue
        first, value = large[0]
        tensor = first.params[param]
        message = (
            f"{len(large)} of {len(good)} {param} are above 1 ({value:.6g} here; the largest value would be "
            f"{value * 2688:.3g}): these are reciprocals, as compressed-tensors stores them; write 1 / scale"
        )
        ids = {linear.expert for linear, _ in large if linear.layer == first.layer and linear.expert is not None}
        place = (tensor.file, tensor.name, first.layer, tuple(sorted(ids)))
        yield Finding("scale-reciprocal", "error", message, *place, values={"value": value})
