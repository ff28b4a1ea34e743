"""Reading a checkpoint: headers of all shards, the index against them, byte ranges, side files. Never writes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import damage
import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st
from runner import snapshot
from safetensors import safe_open
from safetensors.torch import save_file

from nvfp4prep.errors import EnvironmentFault, InputRefused
from nvfp4prep.header import TensorInfo
from nvfp4prep.ranges import read_into, read_range
from nvfp4prep.source import (
    is_safe_name,
    open_source,
    read_json,
    read_part,
    read_slice,
    read_tensor,
)
from nvfp4prep.survey import read_values


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index, and side files."""
    root = tmp_path / "model"
    root.mkdir()
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.arange(5, dtype=torch.uint8)}
    save_file(one, root / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({"c": torch.tensor(3.0)}, root / "model-00002-of-00002.safetensors", {"format": "pt", "extra": "x"})
    index({"a": 1, "b": 1, "c": 2}, root)
    damage.write_json(root / "config.json", {})
    return root


def index(shard_of: dict[str, int], root: Path) -> None:
    weight_map = {name: f"model-{shard:05}-of-00002.safetensors" for name, shard in shard_of.items()}
    damage.write_json(root / damage.INDEX, {"weight_map": weight_map})


def test_tensors_are_where_the_library_finds_them(folder: Path) -> None:
    before = snapshot(folder)
    source = open_source(str(folder))
    assert source.findings == () and source.revision is None and source.spec == "model"
    assert source.metadata == {"format": "pt", "extra": "x"}
    assert source.side_files == ("config.json",)
    assert source.shards == {path.name: path.stat().st_size for path in folder.glob("*.safetensors")}
    for tensor in source.tensors.values():
        with safe_open(folder / tensor.file, "pt") as file:
            value = file.get_tensor(tensor.name)
        assert tensor.shape == tuple(value.shape)
        descriptor = source.open_shard(tensor.file)
        raw = read_range(descriptor, tensor.file, tensor.start, tensor.nbytes)
        os.close(descriptor)
        assert raw == value.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert list(source.tensors) == ["a", "b", "c"]
    assert snapshot(folder) == before


def test_a_checkpoint_through_links(folder: Path, tmp_path: Path) -> None:
    """As huggingface_hub's cache stores it: every file a link to a blob."""
    linked = tmp_path / "snapshots" / "abc"
    linked.mkdir(parents=True)
    for path in folder.iterdir():
        (linked / path.name).symlink_to(path)
    assert open_source(str(linked)).tensors == open_source(str(folder)).tensors


def test_index_that_names_the_wrong_shard(folder: Path) -> None:
    index({"a": 1, "b": 2, "c": 2}, folder)
    (finding,) = open_source(str(folder)).findings
    assert (finding.rule, finding.severity, finding.tensor) == ("index-wrong-shard", "warning", "b")
    assert finding.file == "model-00001-of-00002.safetensors"


def test_tensors_that_the_index_does_not_know(folder: Path) -> None:
    index({"a": 1, "c": 2}, folder)
    (finding,) = open_source(str(folder)).findings
    assert (finding.rule, finding.severity, finding.tensor) == ("unindexed-tensors", "warning", "b")


def test_a_second_copy_under_other_names_is_refused(folder: Path) -> None:
    save_file({"layers.0.w": torch.ones(1)}, folder / "consolidated.safetensors")
    with pytest.raises(InputRefused) as caught:
        open_source(str(folder))
    assert caught.value.findings[0].rule == "second-copy"


def test_without_an_index_all_shards_count(folder: Path) -> None:
    (folder / damage.INDEX).unlink()
    assert set(open_source(str(folder)).tensors) == {"a", "b", "c"}


def test_an_unreadable_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def fail(self: Path, *arguments: object, **keywords: object) -> object:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied")
        return real(self, *arguments, **keywords)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(EnvironmentFault, match=r"model-00001-of-00002\.safetensors: can't be read: Permission denied"):
        open_source(str(folder))


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("model.safetensors", True),
        ("模型.safetensors", True),
        ("a b", True),
        ("..a", True),
        ("", False),
        (".", False),
        ("..", False),
        ("../a", False),
        ("a/b", False),
        ("/a", False),
        ("a/", False),
        ("./a", False),
        ("a\\b", False),
        ("a\0", False),
        ("a\n", False),
        ("a\x1b[0m", False),
    ],
)
def test_safe_names(name: str, safe: bool) -> None:
    assert is_safe_name(name) == safe


@given(st.text(max_size=8))
def test_a_safe_name_stays_in_its_folder(name: str) -> None:
    if is_safe_name(name):
        path = Path("/root/folder", name)
        assert path.parent == Path("/root/folder") and ".." not in path.parts and path.name == name


def test_read_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(100)))
    descriptor = os.open(tmp_path / "x", os.O_RDONLY)
    real, into = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, length, at: real(fd, min(length, 7), at))  # short reads
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: into(fd, [buffers[0][:7]], at))
    assert read_range(descriptor, "x", 10, 50) == bytes(range(10, 60))
    assert read_range(descriptor, "x", 10, 0) == b""
    with pytest.raises(EnvironmentFault, match="x: nothing at byte 100, 1 bytes missing"):
        read_range(descriptor, "x", 90, 11)
    buffer = bytearray(50)
    read_into(descriptor, "x", 10, memoryview(buffer))
    assert buffer == bytes(range(10, 60))
    with pytest.raises(EnvironmentFault, match="x: nothing at byte 100, 1 bytes missing"):
        read_into(descriptor, "x", 90, memoryview(bytearray(11)))
    os.close(descriptor)


def test_read_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_json(tmp_path, "absent.json") is None
    (tmp_path / "a.json").write_text('{"a": [1]}')
    assert read_json(tmp_path, "a.json") == {"a": [1]}
    for content in ("", "null", "3", "[", "[" * 100_000, '{"a"}', "\xff"):
        (tmp_path / "a.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(InputRefused, match=r"a\.json"):
            read_json(tmp_path, "a.json")
    monkeypatch.setattr("nvfp4prep.source.MAX_JSON_BYTES", 3)
    for name in ("a.json", "config.json", "hf_quant_config.json"):
        (tmp_path / name).write_text("{   }")
        with pytest.raises(InputRefused, match=rf"{name}: 5 bytes, over the limit of 3"):
            read_json(tmp_path, name)
    for name in (damage.INDEX, "nvfp4prep.json"):
        (tmp_path / name).write_text("{   }")
        assert read_json(tmp_path, name) == {}


def test_json_limits(tmp_path: Path) -> None:
    """A config of 90 MB takes gigabytes once it is parsed; those of large mixed models have 5 MB."""
    (tmp_path / "config.json").write_text('{"a": [' + "[]," * 30_000_000 + "0]}")
    with pytest.raises(InputRefused, match="over the limit of 32000000"):
        read_json(tmp_path, "config.json")
    (tmp_path / damage.INDEX).write_text('{"a": ["' + f'{"x" * 800_000}","' * 50 + '"]}')
    assert read_json(tmp_path, damage.INDEX)


TOO_MUCH = {
    "values": ('{"a": [' + "[]," * 2_000_000 + "0]}", "over 4,000,000 values"),
    "depth": ('{"a":' * 102 + "1" + "}" * 102, "nested over 100 deep"),
    "great depth": ('{"a":' * 90_000, "nested over 100 deep"),
    "string": ('{"a": ["' + "x" * 1_000_001 + '"]}', "a string of 1000001 characters"),
    "key": ('{"' + "x" * 1_000_001 + '": 1}', "a string of 1000001 characters"),
    "number": ('{"a": {"b": [0, -1' + "0" * 40 + "]}}", r"a\.b\.1 is a number of 41 digits"),
    "number of a megabyte": ('{"a": ' + "1" * 1_000_000 + "}", "a number of thousands of digits"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_json_that_would_cost_too_much(name: str, tmp_path: Path) -> None:
    content, says = TOO_MUCH[name]
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(InputRefused, match=says) as caught:
        read_json(tmp_path, "config.json")
    assert caught.value.findings[0].rule == "bad-json"


def test_json_just_within_its_limits(tmp_path: Path) -> None:
    value = {"a": [2**128 - 1, -(2**128) + 1, "x" * 1_000_000], "x" * 1_000_000: json.loads("[" * 99 + "]" * 99)}
    damage.write_json(tmp_path / "config.json", value)
    assert read_json(tmp_path, "config.json") == value


FILES = ("config.json", "hf_quant_config.json", "nvfp4prep.json", damage.INDEX)
NOT_WRITABLE = {
    "lone surrogate": r'{"a": "\ud800"}',
    "key": r'{"\uDFFF": 1}',
    "deep in it": r'{"a": [{"b": ["\udc00x"]}]}',
    "raw surrogate": '{"a": "\ud800"}',
    "NaN": '{"a": NaN}',
    "Infinity": '{"a": Infinity}',
    "-Infinity": '{"a": {"b": -Infinity}}',
    "too large": '{"a": 1e999}',
    "NaN in a list": '{"a": [NaN]}',
    "quantisation": '{"quantization_config": {"a": [Infinity]}}',
    "architectures": '{"architectures": [Infinity]}',
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", NOT_WRITABLE)
def test_json_that_could_not_be_written_again(name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(NOT_WRITABLE[name].encode("utf-8", "surrogatepass"))
    with pytest.raises(InputRefused) as caught:
        read_json(tmp_path, file)
    assert caught.value.findings[0].rule == "bad-json" and caught.value.findings[0].file == file


def test_json_that_can_be_written_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(r'{"a": "\ud83d\ude00 \\ud800", "time_step_limit": [0.0, Infinity]}')
    config = read_json(tmp_path, "config.json")
    assert config == {"a": "\U0001f600 \\ud800", "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "nvfp4prep.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    with pytest.raises(InputRefused, match=r"time_step_limit\.1 is inf"):
        read_json(tmp_path, "nvfp4prep.json")


@pytest.mark.parametrize("name", [*FILES, "x.safetensors", "model-00001-of-00002.safetensors"])
def test_a_folder_in_place_of_a_file(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    (folder / name / "x").write_text("x")
    with pytest.raises(InputRefused, match=re.escape(name)) as caught:
        open_source(str(folder))
    assert caught.value.findings[0].rule == "not-a-file"


def test_an_unfinished_output(folder: Path) -> None:
    (folder / ".nvfp4prep-partial").touch()
    with pytest.raises(InputRefused, match=r"unfinished-output.*\.nvfp4prep-partial"):
        open_source(str(folder))


@pytest.mark.parametrize("target", ["elsewhere", ".", "..", "model/real"])
def test_links_to_folders_are_refused(target: str, folder: Path, tmp_path: Path) -> None:
    """They would be left out silently, or followed in a circle."""
    (tmp_path / "elsewhere").mkdir()
    (folder / "real").mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "tokenizer").symlink_to(tmp_path / target)
    with pytest.raises(InputRefused, match=r"linked-folder.*sub/tokenizer"):
        open_source(str(folder))
    (folder / "sub" / "tokenizer").unlink()
    (folder / ".git").symlink_to(tmp_path / "elsewhere")
    open_source(str(folder))


@pytest.mark.parametrize("name", [b"a\xff.safetensors", b"tok\xfe.json", b"sub\xff/x.json"])
def test_names_that_are_no_text(name: bytes, folder: Path) -> None:
    path = folder / os.fsdecode(name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"{}")
    with pytest.raises(InputRefused, match=r"undecodable-name.*is not UTF-8") as caught:
        open_source(str(folder))
    str(caught.value).encode()
    json.dumps(caught.value.findings[0].to_json(), ensure_ascii=False).encode()


def test_metadata_of_all_shards_together(folder: Path) -> None:
    """Each file written gets all of it."""
    for number in range(2):
        metadata = {f"note {number}": "x" * 600_000}
        save_file({f"t{number}": torch.ones(1)}, folder / f"x{number}.safetensors", metadata)
    with pytest.raises(InputRefused, match=r"x1\.safetensors: with the shards before it, __metadata__ has"):
        open_source(str(folder))


def test_limits_hold_for_all_shards_together(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4prep.header.MAX_TENSORS", 2)  # three tensors in two shards
    with pytest.raises(InputRefused, match=r"model-00002-of-00002\.safetensors: with the shards before it, over 2 "):
        open_source(str(folder))


def test_reading_past_a_tensor(folder: Path) -> None:
    source = open_source(str(folder))
    tensor = source.tensors["a"]
    descriptor = source.open_shard(tensor.file)
    assert len(read_part(descriptor, tensor, 4, 4)) == 4
    for start, length in ((4, 5), (-1, 2), (0, 9), (8, 1), (0, -1)):
        with pytest.raises(ValueError, match="a: bytes"):
            read_part(descriptor, tensor, start, length)
    os.close(descriptor)


def test_shards_that_change_are_noticed(folder: Path) -> None:
    source = open_source(str(folder))
    source.verify_unchanged()
    first, second = sorted(source.shards)
    os.utime(folder / second, ns=(0, 0))
    os.close(source.open_shard(first))
    for check in (lambda: source.open_shard(second), lambda: source.verify_unchanged()):
        with pytest.raises(EnvironmentFault, match=f"{second}: changed since its header was read"):
            check()
    (folder / second).unlink()
    with pytest.raises(EnvironmentFault, match=f"{second}: gone since its header was read"):
        source.verify_unchanged()


# --- scale values in few reads ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["F32", "BF16", "F16"])), min_size=1, max_size=12),
    st.randoms(),
)
def test_values_of_scattered_scales(layout: list[tuple[int, str]], random: object) -> None:
    """Whatever lies between them, and in whatever order they are asked for."""
    torch_of = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    raw, tensors, expected = b"", [], {}
    for number, (gap, dtype) in enumerate(layout):
        raw += bytes([0xAA]) * (gap * 3)
        value = torch.tensor([number + 1.5, -number], dtype=torch_of[dtype])
        data = value.view(torch.uint8).numpy().tobytes()
        tensors.append(TensorInfo(f"t{number}", dtype, (2,), "f", len(raw), len(raw) + len(data)))
        expected[f"t{number}"] = (number + 1.5, float(-number))
        raw += data
    random.shuffle(tensors)  # type: ignore[attr-defined]

    @contextmanager
    def reader() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(gap=4, map=map, read=lambda _, start, length: raw[start : start + length])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvfp4prep.survey.SPAN_BYTES", 24)
        assert read_values(SimpleNamespace(reader=reader), tensors) == expected  # type: ignore[arg-type]


def test_a_reader_opens_a_file_once_and_closes_it(folder: Path) -> None:
    source = open_source(str(folder))
    opened: list[int] = []

    class Counting(type(source)):  # type: ignore[misc]
        def open_shard(self, file: str) -> int:
            opened.append(super().open_shard(file))
            return opened[-1]

    counting = Counting(**{name: getattr(source, name) for name in source.__dataclass_fields__})
    with counting.reader() as reader:
        for tensor in (*source.tensors.values(), *source.tensors.values()):
            assert read_slice(reader, tensor, 0, tensor.nbytes) == read_tensor(source, tensor)
    assert len(opened) == len(source.shards)
    for descriptor in opened:
        with pytest.raises(OSError):
            os.fstat(descriptor)


# --- the Hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str | None]]]:
    """`snapshot_download` that hands out the folder as a snapshot, and notes what was asked for."""
    asked: list[tuple[str, str | None]] = []
    root = tmp_path / "snapshots" / "0123abcd"
    root.parent.mkdir()
    folder.rename(root)

    def download(repo: str, revision: str | None = None, **_: object) -> str:
        asked.append((repo, revision))
        return str(root)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    yield asked


@pytest.mark.parametrize(
    ("spec", "revision"), [("org/name", None), ("org/name@v1.0", "v1.0"), ("o-r.g/n_a@refs/pr/3", "refs/pr/3")]
)
def test_a_hub_repo(spec: str, revision: str | None, hub: list[tuple[str, str | None]]) -> None:
    source = open_source(spec)
    repo = spec.partition("@")[0]
    assert hub == [(repo, revision)]
    assert (source.spec, source.revision) == (repo, "0123abcd")


@pytest.mark.parametrize(
    "spec", ["name", "../org/name", "./a", "/no/such", "~/x", "a/b/c", "org/name@", "org/na me", "a/b@c@d", "-x/y"]
)
def test_what_is_no_hub_repo_is_not_downloaded(spec: str, hub: list[tuple[str, str | None]]) -> None:
    with pytest.raises(InputRefused) as caught:
        open_source(spec)
    assert caught.value.findings[0].rule == "no-such-checkpoint" and spec in str(caught.value)
    assert hub == []


@pytest.mark.parametrize(
    ("error", "stop"),
    [
        (HFValidationError("bad"), InputRefused),
        (LocalEntryNotFoundError("offline"), EnvironmentFault),
        (OSError("no route"), EnvironmentFault),
    ],
)
def test_a_failed_download(
    error: Exception, stop: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(stop, match=f"org/name.*{error}"):
        open_source("org/name@main")
