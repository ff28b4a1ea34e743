"""Counts of the E4M3 codes among a checkpoint's NVFP4 block scales, streamed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from nvfp4prep.header import TensorInfo
from nvfp4prep.schema import Format, Schema
from nvfp4prep.source import Source, read_part

PIECE = 8 << 20
"""Bytes read at once, at most."""


def block_scales(schema: Schema) -> list[TensorInfo]:
    """The block scales of every NVFP4 linear."""
    return [linear.params["weight_scale"] for linear in schema.of_format(Format.NVFP4)]


def block_scale_histogram(
    source: Source, tensors: Iterable[TensorInfo], progress: Callable[[int], None] = lambda _: None
) -> list[int]:
    """How often each of the 256 codes occurs.

    Args:
        source: where the bytes are.
        tensors: one byte to a value, such as those of `block_scales`.
        progress: called with the bytes of each piece read.

    Raises:
        EnvironmentFault: I/O, or a file that changed since its header was read.
    """
    counts = np.zeros(256, dtype=np.int64)
    ordered = sorted(tensors, key=lambda tensor: (tensor.file, tensor.start))
    for file, group in groupby(ordered, key=lambda tensor: tensor.file):
        descriptor = source.open_shard(file)
        try:
            for tensor in group:
                for start in range(0, tensor.nbytes, PIECE):
                    raw = read_part(descriptor, tensor, start, min(PIECE, tensor.nbytes - start))
                    counts += _counts(raw)
                    progress(len(raw))
        finally:
            os.close(descriptor)
    return [int(count) for count in counts]


def _counts(raw: bytes) -> NDArray[np.int64]:
    """Counts of bytes, taken two at a time: bincount is many times slower on single bytes."""
    even = len(raw) & ~1
    pairs = np.bincount(np.frombuffer(raw, np.uint16, even // 2), minlength=1 << 16).reshape(256, 256)
    counts: NDArray[np.int64] = (pairs.sum(axis=0) + pairs.sum(axis=1)).astype(np.int64)
    if even < len(raw):
        counts[raw[-1]] += 1
    return counts
