"""The safetensors header: parsed with every rule of the format checked, and built.

A file is an 8-byte little-endian length n, n bytes of JSON, then the tensors' bytes. Offsets in the JSON are relative
to byte 8 + n; they must cover the rest of the file with no hole and no overlap.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself."""
MAX_METADATA_BYTES = 1_000_000
"""Of `__metadata__`: it is repeated in every file written."""
MAX_TENSORS = 1_000_000
"""Of a checkpoint. The largest of today have about 300,000."""
MAX_NAME_BYTES = 200_000_000
"""That the names of a checkpoint's tensors may take in memory: 200 for each of MAX_TENSORS."""
MAX_DIMENSIONS = 16
MAX_TOTAL_BYTES = 100 * 10**12
"""Of all tensors of a checkpoint; a sparse file can claim any size. The largest of today have about 4 TB."""
_MAX_NAME = 1024
_MAX_ENTRY_BYTES = 65_536
"""Of a tensor's JSON: a hundred times what one of MAX_DIMENSIONS needs."""
_MAX_METADATA_JSON = 4_000_000
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


# --- parsed ----------------------------------------------------------------------------------------------------------

# One entry of the table: its name, then what stands beside it, as far as that is an object without others in it. The
# JSON parser gets one entry at a time; given the whole header, it makes gigabytes of Python objects from 100 MB of
# brackets. The patterns match bytes and never go back, so that nothing is decoded or copied. Measured: a header of
# 1,000,000 tensors takes 8 s and 0.6 GB at most, names with wide characters and the header's own bytes included; every
# bomb of 100 MB is refused within 2 s and 0.2 GB.
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_SPACE = rb"[ \t\n\r]*+"
_NAME = re.compile(_SPACE + rb"(" + _STRING + rb")" + _SPACE + rb":" + _SPACE, re.DOTALL)
_VALUE = re.compile(rb'(\{(?:[^{}"]++|' + _STRING + rb")*+\}|null)" + _SPACE + rb"([,}])", re.DOTALL)
# What writers write, without spaces or escapes, is read by patterns alone; the JSON parser takes longer.
_COUNT = rb"(?:0|[1-9][0-9]{0,17})"
_PLAIN_NAME = re.compile(rb'"[ !#-\[\]-~]*+"')
_PLAIN_ENTRY = re.compile(
    rb'\{"dtype":"([A-Z0-9_]+)","shape":\[((?:%b(?:,%b)*+)?)\],"data_offsets":\[(%b),(%b)\]\}' % (4 * (_COUNT,))
)
_MINUS = re.compile(rb"[\[,]" + _SPACE + b"-")
_OPEN, _EMPTY, _REST = re.compile(_SPACE + rb"\{"), re.compile(_SPACE + rb"\}"), re.compile(_SPACE)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise HeaderError(f"the key {short(twice)} stands twice")
    return table


_decode = json.JSONDecoder(object_pairs_hook=_unique_keys).decode


def _json(raw: bytes) -> Any:
    """A small piece of the header, parsed."""
    try:
        return _decode(raw.decode("utf-8"))
    except HeaderError:
        raise
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HeaderError(f"the header is not JSON: {error}") from None
    except ValueError:  # Python's own limit
        raise HeaderError("the header holds a number of thousands of digits") from None


def _entries(raw: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and JSON of each entry of the header's table, in order."""
    opened = _OPEN.match(raw)
    if opened is None:
        raise HeaderError("the header is not JSON with an object at the top")
    position = opened.end()
    empty = _EMPTY.match(raw, position)
    if empty is not None:
        position = empty.end()
    while empty is None:
        key = _NAME.match(raw, position)
        if key is None:
            raise HeaderError(f"the header is not JSON: at byte {position} a name was expected")
        if len(key[1]) > _MAX_NAME:
            raise HeaderError(f"at byte {position} stands a name of {len(key[1])} bytes, over {_MAX_NAME}")
        name = key[1][1:-1].decode("ascii") if _PLAIN_NAME.fullmatch(key[1]) else _json(key[1])
        if b"\\" in key[1]:
            try:
                name.encode("utf-8")
            except UnicodeEncodeError:
                raise HeaderError("a name holds half a surrogate pair, which is no text") from None
        value = _VALUE.match(raw, key.end())
        if value is None:
            raise HeaderError(
                "__metadata__ must map strings to strings"
                if name == "__metadata__"
                else f"the entry of {short(name)} is no object of dtype, shape and data_offsets"
            )
        yield name, value[1]
        position = value.end()
        if value[2] == b"}":
            break
    rest = _REST.match(raw, position)
    if rest is not None and rest.end() < len(raw):
        raise HeaderError(f"the header is not JSON: at byte {rest.end()} its end was expected")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_COUNT


Values = tuple[str, list[int], list[int]]
"""dtype, shape and data_offsets of an entry."""


def _plain_values(dtype: bytes, shape: bytes, start: bytes, end: bytes) -> Values:
    """From the groups of `_PLAIN_ENTRY`."""
    return dtype.decode("ascii"), [int(size) for size in shape.split(b",") if size], [int(start), int(end)]


def _any_values(name: str, raw: bytes) -> Values:
    """From any JSON. Raises HeaderError where it is not what it should be."""
    entry = _json(raw)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"the entry of {short(name)} must hold dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, shape)):
        raise HeaderError(f"{short(name)} has dtype {short(dtype)} and shape {short(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise HeaderError(f"{short(name)} has data_offsets {short(offsets)}, not two counts")
    if _MINUS.search(raw):  # -0, which Python takes for a count
        raise HeaderError(f"the entry of {short(name)} holds a negative number")
    return dtype, shape, offsets


def _parse_tensor(
    name: str, raw: bytes, file: str, base: int, shapes: dict[tuple[int, ...], tuple[int, ...]]
) -> TensorInfo:
    if len(raw) > _MAX_ENTRY_BYTES:
        raise HeaderError(f"the entry of {short(name)} has {len(raw)} bytes, over {_MAX_ENTRY_BYTES}")
    plain = _PLAIN_ENTRY.fullmatch(raw)
    if plain is not None:
        dtype, shape, offsets = _plain_values(*plain.groups())
    else:
        dtype, shape, offsets = _any_values(name, raw)
    try:
        expected = tensor_bytes(dtype, shape)
    except HeaderError as error:
        raise HeaderError(f"{short(name)}: {error}") from None
    if offsets[1] - offsets[0] != expected:
        raise HeaderError(
            f"{short(name)} ({dtype} {shape}) needs {expected} bytes, its offsets hold {offsets[1] - offsets[0]}"
        )
    kept = tuple(shape)  # one object for all tensors of a shape
    return TensorInfo(
        name, sys.intern(dtype), shapes.setdefault(kept, kept), file, base + offsets[0], base + offsets[1]
    )


def _parse_metadata(raw: bytes) -> dict[str, str]:
    if len(raw) > _MAX_METADATA_JSON:
        raise HeaderError(f"__metadata__ has {len(raw)} bytes of JSON, over the limit of {_MAX_METADATA_JSON}")
    metadata = _json(raw)
    if metadata is None:
        return {}
    if not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("__metadata__ must map strings to strings")
    try:
        check_metadata_size(metadata)
    except UnicodeEncodeError:
        raise HeaderError("__metadata__ holds half a surrogate pair, which is no text") from None
    return dict(metadata)


def check_metadata_size(metadata: Mapping[str, str]) -> None:
    """Raise HeaderError when the metadata are larger than MAX_METADATA_BYTES."""
    size = len("".join([*metadata, *metadata.values()]).encode("utf-8"))
    if size > MAX_METADATA_BYTES:
        raise HeaderError(f"__metadata__ has {size} bytes, over the limit of {MAX_METADATA_BYTES}")


@dataclass
class Tally:
    """What was found over all shards of a checkpoint: tensors, what their names take in memory, and their bytes."""

    tensors: int = 0
    name_bytes: int = 0
    nbytes: int = 0

    def add(self, found: Iterable[TensorInfo]) -> None:
        """Count tensors. Raises HeaderError beyond MAX_TENSORS, MAX_NAME_BYTES or MAX_TOTAL_BYTES."""
        for tensor in found:
            self.tensors += 1
            self.name_bytes += sys.getsizeof(tensor.name)
            self.nbytes += tensor.nbytes
            if self.tensors > MAX_TENSORS:
                raise HeaderError(f"over {MAX_TENSORS:,} tensors in all; nvfp4prep reads no checkpoint that large")
            if self.name_bytes > MAX_NAME_BYTES:
                raise HeaderError(f"the names of all tensors take over {MAX_NAME_BYTES:,} bytes")
            if self.nbytes > MAX_TOTAL_BYTES:
                raise HeaderError(f"over {MAX_TOTAL_BYTES:,} bytes in all; nvfp4prep reads no checkpoint that large")


def parse_header(raw: bytes, file: str, file_bytes: int) -> tuple[list[TensorInfo], dict[str, str]]:
    """Tensors in file order, and the metadata, from the header's JSON bytes.

    Args:
        raw: the JSON bytes, without the 8 length bytes.
        file: the file's name, kept in each TensorInfo.
        file_bytes: the file's size, which the tensors must fill exactly.

    Raises:
        HeaderError: any rule of the format is broken, or it holds more than a checkpoint may (see `Tally`).
    """
    base = 8 + len(raw)
    metadata: dict[str, str] | None = None
    table: dict[str, TensorInfo] = {}
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
    tally = Tally()
    for name, entry in _entries(raw):
        if name in table or (name == "__metadata__" and metadata is not None):
            raise HeaderError(f"the key {short(name)} stands twice")
        if name == "__metadata__":
            metadata = _parse_metadata(entry)
            continue
        table[name] = _parse_tensor(name, entry, file, base, shapes)
        tally.add((table[name],))
    tensors = sorted(table.values(), key=lambda tensor: (tensor.start, tensor.end))
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
    return tensors, metadata or {}


# --- built ------------------------------------------------------------------------------------------------------------


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
