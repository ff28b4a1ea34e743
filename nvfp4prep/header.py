"""The safetensors header: parsed with every rule of the format checked, and built.

A file is an 8-byte little-endian length n, n bytes of JSON, then the tensors' bytes. Offsets in the JSON are relative
to byte 8 + n; they must cover the rest of the file with no hole and no overlap.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""
MAX_METADATA_BYTES = 1_000_000
"""Of `__metadata__`: it is repeated in every file written."""
MAX_DIMENSIONS = 16
_MAX_COUNT = 1 << 63
_MAX_SHOWN = 200

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class HeaderError(ValueError):
    """The bytes are not a valid safetensors header; the message says what was found and expected."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor. `start` and `end` are absolute byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


def short(value: object) -> str:
    """A value from an untrusted header, for a message: its repr, cut."""
    try:
        text = repr(value)
    except RecursionError:
        return f"a deep {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor.

    Raises:
        HeaderError: an unknown dtype, too many dimensions, a size that no file has or that is no whole number of bytes.
    """
    if dtype not in DTYPE_BITS:
        raise HeaderError(f"unknown dtype {short(dtype)}")
    if len(shape) > MAX_DIMENSIONS:
        raise HeaderError(f"{len(shape)} dimensions; nvfp4prep reads up to {MAX_DIMENSIONS}")
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        if bits >= _MAX_COUNT:
            raise HeaderError(f"{dtype} {short(list(shape))} is larger than any file")
    if bits % 8:
        raise HeaderError(f"{dtype} {list(shape)} is not a whole number of bytes")
    return bits // 8


def header_length(first_8_bytes: bytes, file_bytes: int) -> int:
    """The JSON's length n from the file's first 8 bytes. Raises HeaderError when the file can't hold it."""
    if len(first_8_bytes) < 8:
        raise HeaderError(f"the file has {file_bytes} bytes; a safetensors file has at least 8")
    (length,) = struct.unpack("<Q", first_8_bytes)
    if length == 0:
        raise HeaderError("the header length is 0; the download was probably cut off or preallocated; fetch it again")
    if length <= MAX_HEADER_BYTES and 8 + length <= file_bytes:
        return int(length)
    if first_8_bytes.lstrip()[:1] == b"<":
        raise HeaderError("the file starts like an HTML page, not like safetensors; download it again")
    if first_8_bytes == b"version ":
        raise HeaderError("the file is a Git LFS pointer, not the weights; run `git lfs pull`")
    if length > MAX_HEADER_BYTES:
        raise HeaderError(f"the header claims {length} bytes, over the format's limit of {MAX_HEADER_BYTES}")
    raise HeaderError(f"the header claims {length} bytes but the file ends after {file_bytes}; fetch it again")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HeaderError(f"the key {short(twice)} stands twice")
    return table


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


def _parse_tensor(name: str, entry: Any, file: str, base: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"the entry of {short(name)} must hold dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise HeaderError(f"{short(name)} has dtype {short(dtype)} and shape {short(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise HeaderError(f"{short(name)} has data_offsets {short(offsets)}, not two counts")
    try:
        expected = tensor_bytes(dtype, shape)
    except HeaderError as error:
        raise HeaderError(f"{short(name)}: {error}") from None
    if offsets[1] - offsets[0] != expected:
        raise HeaderError(
            f"{short(name)} ({dtype} {shape}) needs {expected} bytes, its offsets hold {offsets[1] - offsets[0]}"
        )
    return TensorInfo(name, dtype, tuple(shape), file, base + offsets[0], base + offsets[1])


def check_metadata_size(metadata: Mapping[str, str]) -> None:
    """Raise HeaderError when the metadata are larger than MAX_METADATA_BYTES."""
    size = len("".join([*metadata, *metadata.values()]).encode("utf-8"))
    if size > MAX_METADATA_BYTES:
        raise HeaderError(f"__metadata__ has {size} bytes, over the limit of {MAX_METADATA_BYTES}")


def parse_header(raw: bytes, file: str, file_bytes: int) -> tuple[list[TensorInfo], dict[str, str]]:
    """Tensors in file order, and the metadata, from the header's JSON bytes.

    Args:
        raw: the JSON bytes, without the 8 length bytes.
        file: the file's name, kept in each TensorInfo.
        file_bytes: the file's size, which the tensors must fill exactly.

    Raises:
        HeaderError: any rule of the format is broken.
    """
    try:
        table = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except HeaderError:
        raise
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise HeaderError(f"the header is not JSON: {error}") from None
    if not isinstance(table, dict):
        raise HeaderError("the header is not a JSON object")
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("__metadata__ must map strings to strings")
    try:
        "".join(table).encode("utf-8")
        check_metadata_size(metadata)
    except UnicodeEncodeError:
        raise HeaderError("a name holds half a surrogate pair, which is no text") from None
    base = 8 + len(raw)
    tensors = [_parse_tensor(name, entry, file, base) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = base
    for tensor in tensors:
        if tensor.start != position:
            kind = "a hole before" if tensor.start > position else "an overlap at"
            raise HeaderError(
                f"{kind} {short(tensor.name)}: it starts at byte {tensor.start}, the one before ends at {position}"
            )
        position = tensor.end
    if position != file_bytes:
        state = "is cut short" if position > file_bytes else "has bytes that no tensor names"
        raise HeaderError(
            f"the file {state}: the header needs {position} bytes, the file has {file_bytes}; fetch it again"
        )
    return tensors, metadata


def build_header(tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON bytes for tensors (name, dtype, shape) one after another, padded with spaces to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + tensor_bytes(dtype, shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise HeaderError(
            f"the header would be {len(raw)} bytes, over {MAX_HEADER_BYTES}; use a smaller --max-shard-size"
        )
    return struct.pack("<Q", len(raw)) + raw
