"""The safetensors header: every rule, and agreement with the safetensors library in both directions."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from nvfp4prep.header import (
    DTYPE_BITS,
    MAX_HEADER_BYTES,
    HeaderError,
    Tally,
    TensorInfo,
    build_header,
    header_length,
    parse_header,
    tensor_bytes,
)


def parse(raw: bytes) -> tuple[list[TensorInfo], dict[str, str]]:
    """Parse a whole file's bytes."""
    length = header_length(raw[:8], len(raw))
    return parse_header(raw[8 : 8 + length], "f.safetensors", len(raw))


def file_of(table: Any, data: int | bytes = 0) -> bytes:
    """A file with a header from JSON (or raw bytes) and `data` bytes."""
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + (data if isinstance(data, bytes) else bytes(data))


def library_accepts(raw: bytes) -> bool:
    try:
        safetensors.deserialize(raw)
    except (SafetensorError, ValueError):
        return False
    return True


# --- built here -----------------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=3)
dtypes = st.sampled_from(sorted(DTYPE_BITS))


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[str, str, list[int]]]:
    tensors = [(name, draw(dtypes), draw(shapes)) for name in draw(st.lists(names, unique=True, max_size=6))]
    whole = [(n, d, s if DTYPE_BITS[d] % 8 == 0 else [*s, 8]) for n, d, s in tensors]
    return sorted(whole, key=lambda tensor: -DTYPE_BITS[tensor[1]])


@given(layouts(), st.dictionaries(st.sampled_from(["format", "ü", ""]), st.text(max_size=5)))
@settings(deadline=None)
def test_round_trip(tensors: list[tuple[str, str, list[int]]], metadata: dict[str, str]) -> None:
    header = build_header(tensors, metadata)
    assert len(header) % 8 == 0
    size = sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
    raw = header + bytes(size)
    found, found_metadata = parse(raw)
    assert found_metadata == metadata
    assert {(t.name, t.dtype, t.shape) for t in found} == {(n, d, tuple(s)) for n, d, s in tensors}
    assert sum(t.nbytes for t in found) == size
    assert all(t.file == "f.safetensors" for t in found)
    position = len(header)
    for tensor in found:
        assert tensor.start == position
        position = tensor.end
    known = {(name, entry["dtype"], tuple(entry["shape"])) for name, entry in safetensors.deserialize(raw)}
    assert known == {(n, d, tuple(s)) for n, d, s in tensors}


def test_the_library_loads_what_is_built(tmp_path: Path) -> None:
    values = {"b": torch.arange(6.0).view(2, 3), "a.ü": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    header = build_header([("b", "F32", (2, 3)), ("a.ü", "U8", (3,))], {"format": "pt"})
    data = b"".join(value.numpy().tobytes() for value in values.values())
    (tmp_path / "x.safetensors").write_bytes(header + data)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == values.keys()
    assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_what_the_library_writes() -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "half": torch.ones(3, dtype=torch.float16),
        "brain": torch.ones(2, 2, dtype=torch.bfloat16),
        "fp8": torch.ones(5).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
        "long": torch.arange(3),
        "flag": torch.tensor([True]),
    }
    raw = save(tensors, {"format": "pt", "note": "ü"})
    found, metadata = parse(raw)
    assert metadata == {"format": "pt", "note": "ü"}
    dtype_of = {
        "scalar": "F32",
        "half": "F16",
        "brain": "BF16",
        "fp8": "F8_E4M3",
        "empty": "F32",
        "long": "I64",
        "flag": "BOOL",
    }
    assert {t.name: (t.dtype, t.shape) for t in found} == {n: (dtype_of[n], tuple(v.shape)) for n, v in tensors.items()}
    for tensor in found:
        expected = tensors[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw[tensor.start : tensor.end] == expected


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_dtype_sizes_are_the_library_s(dtype: str) -> None:
    size = DTYPE_BITS[dtype]  # bytes of 8 values
    entry = {"dtype": dtype, "shape": [8], "data_offsets": [0, size]}
    assert library_accepts(file_of({"a": entry}, size))
    assert [(t.dtype, t.nbytes) for t in parse(file_of({"a": entry}, size))[0]] == [(dtype, size)]
    assert not library_accepts(file_of({"a": entry | {"data_offsets": [0, size + 1]}}, size + 1))


@pytest.mark.parametrize("length", [60, 316, 0x3C09, 0x3C0A, 0x3C20, 0x203C, 0x3C2020])
def test_header_lengths_that_look_like_html(length: int) -> None:
    """Length bytes such as 20 3c 00 ... are ` <` in ASCII, and a length that files do have."""
    tensors, _ = parse(file_of(b"{}".ljust(length)))
    assert tensors == []


def test_metadata_alone_and_nothing_at_all() -> None:
    assert parse(file_of({"__metadata__": {"a": "b"}})) == ([], {"a": "b"})
    assert parse(file_of({})) == ([], {})
    assert parse(file_of({"__metadata__": None})) == ([], {})


def test_build_refuses_too_large_a_header() -> None:
    with pytest.raises(HeaderError, match="max-shard-size"):
        build_header([("a" * 1000 + str(i), "U8", (1,)) for i in range(MAX_HEADER_BYTES // 1000)], {})


# --- broken files ----------------------------------------------------------------------------------------------------


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4), **more: Any) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": offsets,
        **more,
    }


def one(**keys: Any) -> bytes:
    return file_of({"a": entry(**keys)}, 4)


def without(key: str) -> bytes:
    return file_of({"a": {name: value for name, value in entry().items() if name != key}}, 4)


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "at least 8"),
    "seven bytes": (bytes(7), "7 bytes"),
    "zero length": (bytes(16), "header length is 0"),
    "length beyond the file": (struct.pack("<Q", 100) + b"{}", "claims 100 bytes but the file ends after 10"),
    "length by one": (struct.pack("<Q", 3) + b"{}", "claims 3"),
    "length over the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "limit"),
    "length negative": (b"\xff" * 8 + b"{}", "limit"),
    "html": (b"<!doctype html><p>Not found", "HTML"),
    "html after white space": (b"\n\n <html><p>Not found", "HTML"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
    "not json": (file_of(b"{]"), "not JSON"),
    "not utf-8": (file_of(b'{"\xff":1}'), "not JSON"),
    "deep": (file_of(b"[" * 100_000), "not JSON"),
    "list": (file_of([]), "object"),
    "number": (file_of(b"1"), "object"),
    "metadata twice": (file_of(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' stands twice"),
    "two tables": (file_of(b"{}{}"), "at byte 2 its end was expected"),
    "a comma at the end": (file_of(b'{"__metadata__":{},}'), "at byte 19 a name was expected"),
    "no comma": (file_of(b'{"__metadata__":{} "a":{}}'), "__metadata__"),
    "an entry cut off": (file_of(b'{"a":{"dtype":"U8"'), "'a'"),
    "a name cut off": (file_of(b'{"a'), "at byte 1 a name was expected"),
    "a name of a kilobyte": (file_of({"a" * 1023: entry()}, 4), "a name of 1025 bytes, over 1024"),
    "a number of 5000 digits": (file_of(b'{"a":{"shape":[' + b"1" * 5000 + b"]}}"), "thousands of digits"),
    "more bytes than any checkpoint": (one(shape=[1 << 47], offsets=[0, 1 << 47]), "over 100,000,000,000,000 bytes"),
    "key twice": (
        file_of(b'{"a":%b,"a":%b}' % ((json.dumps(entry(shape=[0], offsets=[0, 0])).encode(),) * 2)),
        "twice",
    ),
    "metadata list": (file_of({"__metadata__": [1]}), "__metadata__"),
    "metadata empty list": (file_of({"__metadata__": []}), "__metadata__"),
    "metadata zero": (file_of({"__metadata__": 0}), "__metadata__"),
    "metadata false": (file_of({"__metadata__": False}), "__metadata__"),
    "metadata empty string": (file_of({"__metadata__": ""}), "__metadata__"),
    "metadata value": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry a list": (file_of({"a": []}), "'a'"),
    "entry null": (file_of({"a": None}), "'a'"),
    "no dtype": (without("dtype"), "'a'"),
    "no shape": (without("shape"), "'a'"),
    "no offsets": (without("data_offsets"), "'a'"),
    "unknown dtype": (one(dtype="F31"), "F31"),
    "dtype a number": (one(dtype=8), "'a'"),
    "dtype null": (one(dtype=None), "'a'"),
    "shape a number": (one(shape=4), "'a'"),
    "shape negative": (one(shape=[-4]), "'a'"),
    "shape a float": (one(shape=[4.0]), "'a'"),
    "shape a bool": (one(shape=[True]), "'a'"),
    "shape null": (one(shape=None), "'a'"),
    "shape huge": (one(shape=[1 << 62, 1 << 62]), "'a'"),
    "shape overflowing": (one(shape=[1 << 63, 2]), "'a'"),
    "shape without end": (one(shape=[1 << 62] * 300), "'a': 300 dimensions"),
    "shape of 400,000 dimensions": (one(shape=[1 << 62] * 400_000), "'a' has 8400050 bytes, over 65536"),
    "shape of 17 dimensions": (one(shape=[4] + [1] * 16), "'a': 17 dimensions; nvfp4prep reads up to 16"),
    "shape larger than any file": (one(shape=[1 << 40, 1 << 40]), "'a': U8 .* is larger than any file"),
    "metadata over the limit": (
        file_of({"__metadata__": {"a": "ü" * 500_000}}),
        "__metadata__ has 1000001 bytes, over the limit of 1000000",
    ),
    "offsets of three": (one(offsets=[0, 4, 8]), "'a'"),
    "offsets of one": (one(offsets=[4]), "'a'"),
    "offsets floats": (one(offsets=[0.0, 4.0]), "'a'"),
    "offsets negative": (one(offsets=[-4, 0]), "'a'"),
    "offsets backwards": (one(offsets=[4, 0]), "'a'"),
    "offsets minus zero": (file_of(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[-0,4]}}', 4), "'a'.* negative"),
    "shape with a leading zero": (file_of(b'{"a":{"dtype":"U8","shape":[04],"data_offsets":[0,4]}}', 4), "not JSON"),
    "offsets with a leading zero": (file_of(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,04]}}', 4), "not JSON"),
    "shape with a comma at its end": (
        file_of(b'{"a":{"dtype":"U8","shape":[4,],"data_offsets":[0,4]}}', 4),
        "not JSON",
    ),
    "a control character in a name": (
        file_of(b'{"\n":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4),
        "not JSON",
    ),
    "unknown dtype with a minus": (one(dtype="F-8"), "unknown dtype 'F-8'"),
    "offsets minus zero after a space": (
        file_of(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[ -0,4]}}', 4),
        "'a'.* negative",
    ),
    "offsets null": (one(offsets=None), "'a'"),
    "too few bytes": (file_of({"a": entry(offsets=[0, 3])}, 3), "needs 4 bytes"),
    "too many bytes": (file_of({"a": entry(offsets=[0, 5])}, 5), "needs 4 bytes"),
    "half bytes": (file_of({"a": entry("F4", [1], [0, 1])}, 1), "whole number"),
    "file short": (file_of({"a": entry()}, 3), "cut short"),
    "file long": (file_of({"a": entry()}, 5), "no tensor names"),
    "data without tensors": (file_of({}, 5), "no tensor names"),
    "hole in front": (file_of({"a": entry(offsets=[1, 5])}, 5), "hole before 'a'"),
    "hole": (file_of({"a": entry(), "b": entry(offsets=[5, 9])}, 9), "hole before 'b'"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=[3, 7])}, 7), "overlap at 'b'"),
    "same place": (file_of({"a": entry(), "b": entry()}, 4), "overlap"),
    "name a lone surrogate": (file_of(b'{"\\ud800":%b}' % json.dumps(entry()).encode(), 4), ""),
    "metadata a lone surrogate": (file_of(b'{"__metadata__":{"a":"\\udfff"}}'), ""),
    "byte order mark": (file_of(b"\xef\xbb\xbf{}"), "not JSON"),
}
# Stricter than the library: two values for one key are ambiguous.
# A tensor has no 17 dimensions and no name of a kilobyte; metadata are repeated in every file written.
STRICTER = {"key twice", "shape of 17 dimensions", "metadata over the limit", "a name of a kilobyte"}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_rule(name: str) -> None:
    raw, says = BROKEN[name]
    with pytest.raises(HeaderError, match=says):
        parse(raw)


def written_tightly(raw: bytes) -> bytes:
    """The file with its header as libraries write it, without a space."""
    length = header_length(raw[:8], len(raw))
    header = raw[8 : 8 + length].replace(b", ", b",").replace(b": ", b":")
    return file_of(header, raw[8 + length :])


# What is said of a header's size is another without spaces.
TIGHT = {"shape of 400,000 dimensions": "'a' has 8000045 bytes, over 65536"}


@pytest.mark.parametrize("name", [name for name, (raw, _) in BROKEN.items() if b'": ' in raw])
def test_broken_rule_written_tightly(name: str) -> None:
    raw, says = BROKEN[name]
    says = TIGHT.get(name, says)
    tight = written_tightly(raw)
    with pytest.raises(HeaderError, match=says):
        parse(tight)


@given(layouts())
@settings(deadline=None)
def test_spaces_make_no_difference(tensors: list[tuple[str, str, list[int]]]) -> None:
    header = build_header(tensors, {})
    loose = json.dumps(json.loads(header[8:]), indent=1).encode()
    size = sum(tensor_bytes(dtype, shape) for _, dtype, shape in tensors)
    found, tight = parse_header(loose, "f", 8 + len(loose) + size)[0], parse(header + bytes(size))[0]
    assert [(t.name, t.dtype, t.shape, t.nbytes) for t in found] == [
        (t.name, t.dtype, t.shape, t.nbytes) for t in tight
    ]


@pytest.mark.parametrize("shape", [[1 << 62] * 300, [10**4000], ["x" * 10**6], [[[1]] * 10**5]])
def test_messages_are_short(shape: list[Any]) -> None:
    """Whatever numbers a header holds; Python refuses to print integers of more than 4300 digits."""
    with pytest.raises(HeaderError, match="'a'") as caught:
        parse(one(shape=shape))
    assert len(str(caught.value)) < 600


def test_a_tally_over_all_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [TensorInfo(f"t{number}", "U8", (4,), "f", 0, 4) for number in range(3)]
    for limit, allowed, says in (
        ("MAX_TENSORS", 5, "over 5 tensors"),
        ("MAX_NAME_BYTES", 300, "names"),
        ("MAX_TOTAL_BYTES", 20, "20 bytes"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"nvfp4prep.header.{limit}", allowed)
            tally = Tally()
            tally.add(tensors)
            with pytest.raises(HeaderError, match=says):
                tally.add(tensors)


def test_escapes_and_white_space_anywhere() -> None:
    raw = (
        b' {\n"\\u0061\\"}" :\t{ "d\\u0074ype": "\\u00558","shape" :[ 4 ] ,"data_offsets": [0,4]\r} ,'
        b' "__metadata__":{"}":"{\\""} } '
    )
    assert library_accepts(file_of(raw, 4))
    (tensor,), metadata = parse(file_of(raw, 4))
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.nbytes) == ('a"}', "U8", (4,), 4)
    assert metadata == {"}": '{"'}


def test_sixteen_dimensions_and_a_megabyte_of_metadata() -> None:
    table = {"__metadata__": {"a": "x" * 999_999}, "t": entry(shape=[4] + [1] * 15)}
    (tensor,), metadata = parse(file_of(table, 4))
    assert len(tensor.shape) == 16 and len(metadata["a"]) == 999_999


@pytest.mark.parametrize("name", sorted(BROKEN.keys() - STRICTER))
def test_the_library_refuses_it_too(name: str) -> None:
    """So that the cases above are rules of the format and not inventions."""
    assert not library_accepts(BROKEN[name][0])


# --- both see the same ---------------------------------------------------------------------------------------------

VALID = {
    "__metadata__": {"format": "pt"},
    "x": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "y": {"dtype": "U8", "shape": [3], "data_offsets": [16, 19]},
    "z": {"dtype": "BF16", "shape": [0], "data_offsets": [19, 19]},
}
json_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.floats(0, 4),
    st.sampled_from(["F32", "U8", "BF16", "x", ""]),
    st.lists(st.integers(0, 19), max_size=3),
    st.just({}),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A valid file with one place of its header replaced, removed or added to, or with some bytes changed."""
    table = json.loads(json.dumps(VALID))
    size = 19
    match draw(st.integers(0, 4)):
        case 0:
            table[draw(st.sampled_from(sorted(VALID)))] = draw(json_values)
        case 1:
            table[draw(st.sampled_from(["x", "y", "z"]))][
                draw(st.sampled_from(["dtype", "shape", "data_offsets", "new"]))
            ] = draw(json_values)
        case 2:
            del table[draw(st.sampled_from(sorted(VALID)))]
            size = draw(st.sampled_from([0, 3, 16, 19]))
        case 3:
            size = draw(st.integers(0, 25))
        case 4:
            raw = bytearray(file_of(table, size))
            for _ in range(draw(st.integers(1, 3))):
                raw[draw(st.integers(8, len(raw) - 20))] = draw(st.sampled_from(b'{}[]",: 0123456789xFU\n\\e-.'))
            return bytes(raw)
    return file_of(table, size)


@given(mutated())
@settings(max_examples=400, deadline=None)
def test_never_accepts_what_the_library_refuses(raw: bytes) -> None:
    """And reads the same where both accept."""
    try:
        found, _ = parse(raw)
    except HeaderError:
        return
    assert library_accepts(raw)
    theirs = {
        (name, info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in safetensors.deserialize(raw)
    }
    assert {(t.name, t.dtype, t.shape, raw[t.start : t.end]) for t in found} == theirs


@given(st.binary(max_size=60))
def test_any_bytes_end_in_a_header_error_or_tensors(raw: bytes) -> None:
    check: Callable[[bytes], Any] = parse
    try:
        check(raw)
    except HeaderError as error:
        assert str(error)
