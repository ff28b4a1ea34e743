"""Reads the scalar scales of a checkpoint as exact floats, in a few large reads."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar

from nvfp4prep.header import TensorInfo
from nvfp4prep.source import Source, refuse

T = TypeVar("T")

SPAN_BYTES = 1 << 24
"""Of one read of scalars and what lies between them, unless a single tensor is larger."""
_MAX_TENSOR_BYTES = 1 << 26
_MAX_VALUE_BYTES = 1 << 25
"""Of all scales of one kind together: eight million values, which Python keeps in 0.3 GB. Real ones are far below one
million; but a name that ends in k_scale can stand for a tensor of any size."""


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
    """The values of scale tensors by name, row-major. Neighbouring tensors are read together.

    Raises:
        InputRefused: they have far more values than scales have.
        EnvironmentFault: I/O.
    """
    wanted = list(tensors)
    if sum(tensor.nbytes for tensor in wanted) > _MAX_VALUE_BYTES:
        _refuse_size(max(wanted, key=lambda tensor: tensor.nbytes))
    return read_each(source, wanted, lambda tensor, raw: decode_floats(tensor.dtype, raw))


def _refuse_size(tensor: TensorInfo) -> NoReturn:
    message = f"{tensor.dtype} {list(tensor.shape)} is no scale of a model, or one of far too many"
    refuse("scale-shape", message, file=tensor.file, tensor=tensor.name)


def read_each(source: Source, tensors: Iterable[TensorInfo], of: Callable[[TensorInfo, bytes], T]) -> dict[str, T]:
    """What `of` makes of each small tensor's bytes, by name. Neighbouring tensors are read together.

    Raises:
        InputRefused: one is not small.
        EnvironmentFault: I/O.
    """
    tensors = list(tensors)
    for tensor in tensors:
        if tensor.nbytes > _MAX_TENSOR_BYTES:
            _refuse_size(tensor)
    values: dict[str, T] = {}
    with source.reader() as reader:

        def read(span: list[TensorInfo]) -> list[tuple[str, T]]:
            start = span[0].start
            raw = reader.read(span[0].file, start, span[-1].end - start)
            return [(tensor.name, of(tensor, raw[tensor.start - start : tensor.end - start])) for tensor in span]

        for found in reader.map(read, spans(tensors, reader.gap)):
            values.update(found)
    return values


def spans(tensors: Iterable[TensorInfo], gap: int) -> Iterator[list[TensorInfo]]:
    """Tensors to read together: of one file, at most `gap` bytes apart, in order."""
    span: list[TensorInfo] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.file, tensor.start)):
        if span and (
            tensor.file != span[0].file or tensor.start - span[-1].end > gap or tensor.end - span[0].start > SPAN_BYTES
        ):
            yield span
            span = []
        span.append(tensor)
    if span:
        yield span
