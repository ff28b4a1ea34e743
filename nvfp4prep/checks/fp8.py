"""FP8 linears beside the 4-bit ones: their scales."""

from __future__ import annotations

import math
from collections.abc import Iterable

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding
from nvfp4prep.scales import fault
from nvfp4prep.schema import FLOAT_DTYPES, Format, Linear
from nvfp4prep.survey import read_values

_SCALES = ("weight_scale", "input_scale")


def missing(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP325: FP8 weights without a weight_scale, or the weight_scale_inv that other exporters store."""
    for linear in checkpoint.schema.of_format(Format.FP8):
        inverse = linear.module + linear.separator + "weight_scale_inv"
        if "weight_scale" in linear.params or inverse in checkpoint.source.tensors:
            continue
        weight = linear.params["weight"]
        message = "an FP8 weight without weight_scale, which its values can't be told without; export it again"
        yield Finding(
            "fp8-scale-missing", "error", message, weight.file, weight.name, linear.layer, _expert_ids(linear)
        )


def values(checkpoint: Checkpoint) -> Iterable[Finding]:
    """NVP416: scales of one value that no kernel can use. Scales for rows or blocks are not looked at."""
    found = [
        (linear, linear.params[param])
        for linear in checkpoint.schema.of_format(Format.FP8)
        for param in _SCALES
        if param in linear.params
        and linear.params[param].dtype in FLOAT_DTYPES
        and math.prod(linear.params[param].shape) == 1
    ]
    if not found:
        return
    read = read_values(checkpoint.source, [tensor for _, tensor in found])
    for linear, tensor in found:
        (value,) = read[tensor.name]
        if fault(value):
            message = f"the scale of an FP8 linear is {fault(value)} ({value}); export it again"
            yield Finding(
                "fp8-scale-bad",
                "error",
                message,
                tensor.file,
                tensor.name,
                linear.layer,
                _expert_ids(linear),
                values={"value": value},
            )


def _expert_ids(linear: Linear) -> tuple[int, ...]:
    return () if linear.expert is None else (linear.expert,)
