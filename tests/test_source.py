"""Reading a checkpoint: headers of all shards, the index against them, byte ranges, side files. Never writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from nvfp4prep.source import is_safe_name, open_source, read_json, read_range
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
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, at: real(fd, min(length, 7), at))  # short reads
    assert read_range(descriptor, "x", 10, 50) == bytes(range(10, 60))
    assert read_range(descriptor, "x", 10, 0) == b""
    with pytest.raises(EnvironmentFault, match="x: nothing at byte 100, 1 bytes missing"):
        read_range(descriptor, "x", 90, 11)
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
    (tmp_path / "a.json").write_text("{   }")
    with pytest.raises(InputRefused, match="over the limit of 3"):
        read_json(tmp_path, "a.json")


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nvfp4prep.survey._GAP", 4)
        patch.setattr("nvfp4prep.survey._SPAN", 24)
        reader, writer = os.pipe()
        os.close(writer)
        patch.setattr(
            "nvfp4prep.survey.read_range", lambda _descriptor, _file, start, length: raw[start : start + length]
        )
        source = SimpleNamespace(open_shard=lambda _: os.dup(reader))
        assert read_values(source, tensors) == expected  # type: ignore[arg-type]
        os.close(reader)


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
