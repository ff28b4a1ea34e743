"""Scales that no kernel can compute with, told from bytes as they pass by on their way to the output."""

from __future__ import annotations

from collections.abc import Mapping

from nvfp4prep.header import TensorInfo
from nvfp4prep.schema import FLOAT_DTYPES
from nvfp4prep.widening import widened

_GOOD_CODES = bytes(range(0x7F)) + b"\x80"
"""E4M3 codes of block scales that kernels read right: from 0 to 448, and -0."""

TEXTS: Mapping[str, str] = {
    "block-scale-nan": "block scales are NaN, and outputs would be; export these weights again",
    "block-scale-negative": "block scales are negative, and kernels read them without sign; export these weights again",
    "int4-scale-bad": "group scales are inf or NaN; export these weights again",
    "pre-quant-scale-bad": "factors of pre_quant_scale are zero, inf or NaN; export again",
}
"""What a finding says after the count, by rule."""


def unusable(tensor: TensorInfo, data: bytes | memoryview) -> dict[str, int]:
    """How many values of a part of a tensor are unusable, by rule; empty for tensors that are no such scales."""
    if tensor.name.endswith("weight_scale"):
        if tensor.dtype == "F8_E4M3":
            return _of_codes(bytes(data))
        if tensor.dtype in FLOAT_DTYPES and len(tensor.shape) == 2:
            return _counted("int4-scale-bad", tensor.dtype, data, zero=False)
    elif tensor.name.endswith("pre_quant_scale") and tensor.dtype in FLOAT_DTYPES:
        return _counted("pre-quant-scale-bad", tensor.dtype, data, zero=True)
    return {}


def _of_codes(data: bytes) -> dict[str, int]:
    bad = data.translate(None, _GOOD_CODES)
    if not bad:
        return {}
    nan = bad.count(b"\x7f") + bad.count(b"\xff")
    counts = {"block-scale-nan": nan, "block-scale-negative": len(bad) - nan}
    return {rule: count for rule, count in counts.items() if count}


def _counted(rule: str, dtype: str, data: bytes | memoryview, *, zero: bool) -> dict[str, int]:
    import numpy as np

    values = widened(dtype, data)
    bad = ~np.isfinite(values)
    if zero:
        bad |= values == 0
    count = int(np.count_nonzero(bad))
    return {rule: count} if count else {}
