"""Reads the scalar scales of a checkpoint as exact floats, in a few large reads."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from itertools import groupby

from nvfp4prep.header import TensorInfo
from nvfp4prep.source import Source, read_range

_GAP = 1 << 16
_SPAN = 1 << 24


def decode_floats(dtype: str, raw: bytes) -> tuple[float, ...]:
    """Values of F32, BF16 or F16 bytes, each exactly: widened by value, never reinterpreted.

    BF16 is the upper half of an F32; F16 is IEEE binary16.

    Raises:
        ValueError: another dtype.
    """
    if dtype == "F32":
        return struct.unpack(f"<{len(raw) // 4}f", raw)
    if dtype == "F16":
        return struct.unpack(f"<{len(raw) // 2}e", raw)
    if dtype == "BF16":
        widened = b"".join(b"\0\0" + raw[i : i + 2] for i in range(0, len(raw), 2))
        return struct.unpack(f"<{len(widened) // 4}f", widened)
    raise ValueError(f"{dtype} is no float scale dtype")


def encode_floats(values: Iterable[float]) -> bytes:
    """F32 bytes of values that F32 holds exactly."""
    listed = list(values)
    return struct.pack(f"<{len(listed)}f", *listed)


def read_values(source: Source, tensors: Iterable[TensorInfo]) -> dict[str, tuple[float, ...]]:
    """The values of scale tensors by name, row-major. Neighbouring tensors are read together."""
    values: dict[str, tuple[float, ...]] = {}
    ordered = sorted(tensors, key=lambda tensor: (tensor.file, tensor.start))
    for file, group in groupby(ordered, key=lambda tensor: tensor.file):
        descriptor = source.open_shard(file)
        try:
            for span in _spans(list(group)):
                start = span[0].start
                raw = read_range(descriptor, file, start, span[-1].end - start)
                for tensor in span:
                    values[tensor.name] = decode_floats(tensor.dtype, raw[tensor.start - start : tensor.end - start])
        finally:
            os.close(descriptor)
    return values


def _spans(tensors: list[TensorInfo]) -> Iterable[list[TensorInfo]]:
    span = [tensors[0]]
    for tensor in tensors[1:]:
        if tensor.start - span[-1].end > _GAP or tensor.end - span[0].start > _SPAN:
            yield span
            span = []
        span.append(tensor)
    yield span
