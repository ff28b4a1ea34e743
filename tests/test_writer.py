"""What an output may replace, what a run leaves when it is stopped at any moment, and names that clash."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from runner import Run, run, snapshot

from nvfp4prep import writer
from nvfp4prep.convert import _previous_shard_bytes
from nvfp4prep.errors import UsageFault
from nvfp4prep.plan import Shard

DENSE, QWEN = "qwen3-dense-nvfp4", "qwen3moe-nvfp4-perexpert"
Fetch = Callable[[str], Path]


@pytest.fixture
def source(checkpoint: Fetch, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint(DENSE), tmp_path / "source")


def unchanged(around: Path, *arguments: object, code: int = 2) -> Run:
    before = snapshot(around)
    result = run("convert", *arguments, "--json")
    assert result.code == code, result.stderr
    assert snapshot(around) == before
    return result


def process(code: str, *arguments: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """The command line in a process in which `code` ran first."""
    whole = f"{textwrap.dedent(code)}\nimport sys\nfrom nvfp4prep.cli import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", whole, *map(str, arguments)]
    shell = ["bash", "-c", f'{before} "$@"', "bash", *command] if before else command
    return subprocess.run(shell, capture_output=True, text=True, check=False, timeout=120)


# --- what may be replaced --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".partial"])
@pytest.mark.parametrize("kind", ["shard", "side file", "chain", "root"])
def test_source_that_reaches_into_out(kind: str, suffix: str, source: Path, tmp_path: Path) -> None:
    place = tmp_path / f"out{suffix}"
    shutil.copytree(source, place)
    if suffix:
        writer.marker_path(tmp_path / "out").write_text(f"nvfp4prep {place.stat().st_ino}\n")
    name = "config.json" if kind == "side file" else "model.safetensors"
    if kind == "chain":
        (tmp_path / "elsewhere").symlink_to(source / name)
        (place / "hop").symlink_to(source / "real")
        (source / name).rename(source / "real")
        (source / name).symlink_to(place / "hop")
    elif kind == "root":
        (place / "hop").symlink_to(source)
        source = place / "hop"
    else:
        (source / name).unlink()
        (source / name).symlink_to(place / name)
    assert "inside" in unchanged(tmp_path, source, tmp_path / "out", "--overwrite").stderr


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": "{}"},
        {"config.json": '{"model_type": "x"}'},
        {"config.json": "[]", "a.safetensors": ""},
        {"config.json": '{"editor": 1}', "a.safetensors": ""},
        {"nvfp4prep.json": "not ours"},
        {"hf/nvfp4prep.json": '{"runs": []}', "photos/cat.jpg": ""},
    ],
)
def test_overwrite_spares_what_only_looks_like_a_checkpoint(
    files: dict[str, str], source: Path, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    assert "no checkpoint" in unchanged(tmp_path, source, tmp_path / "out", "--overwrite").stderr


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"config.json": '{"model_type": "x"}', "a.safetensors": ""},
        {"config.json": '{"architectures": []}', "a.safetensors": ""},
        {"nvfp4prep.json": '{"runs": []}', "rank-00/a.safetensors": ""},
        {"hf/nvfp4prep.json": '{"runs": []}', "vllm-marlin/nvfp4prep.json": '{"runs": []}'},
    ],
)
def test_overwrite_replaces_checkpoints(files: dict[str, str], source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for name, text in files.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_text(text)
    assert run("convert", source, tmp_path / "out", "--overwrite", "-q").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    assert not {*files} & {"a.safetensors"} or not (tmp_path / "out" / "a.safetensors").exists()


@pytest.mark.parametrize("existed", [False, True])
def test_out_that_changes_during_the_run_is_kept(existed: bool, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if existed:
        shutil.copytree(source, out)
    with pytest.raises(UsageFault, match="during the run"), writer.PartialOutput(out, "0" * 32) as output:
        if existed:
            out.rename(tmp_path / "away")
        shutil.copytree(source, out)
        (out / "precious").write_text("x")
        output.publish([], overwrite=True)
    assert (out / "precious").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out", *(["away"] if existed else [])}


@pytest.mark.parametrize("length", [180, 255])
def test_names_that_leave_no_room(length: int, source: Path, tmp_path: Path) -> None:
    """Beside OUT lie a folder and files whose names are longer."""
    result = run("convert", source, tmp_path / ("o" * length), "--no-smoke", "-q")
    assert (result.code, "it may have" in result.stderr) == ((0, False) if length == 180 else (2, True))


# --- symbolic links that lead to themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["loop", "loop/out", "loop/a/out"])
def test_out_on_a_loop(place: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "leads to itself" in unchanged(source, source, tmp_path / place).stderr


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x/y", "file:///x", "hf://buckets/o/n"])
def test_object_stores(url: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    for options in ((), ("--shard", "1/2")):
        result = run("convert", source, url, *options)
        assert result.code == 2 and "OUT must be a folder on a disk" in result.stderr
        assert url.replace("///", "//") in result.stderr
    assert run("finish", url).code == 2
    assert snapshot(tmp_path) == before
    (tmp_path / url.partition("/")[0]).mkdir()  # a folder with such a name
    assert run("convert", source, url, "-q", "--no-smoke").code == 0


def test_source_that_is_a_loop(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    result = run("convert", tmp_path / "loop", tmp_path / "out", "--json")
    assert (result.code, result.findings[0]["rule"]) == (3, "no-such-checkpoint")


# --- killed and interrupted ------------------------------------------------------------------------------------------

KILLED = {
    "before the rename": """
        import os
        from nvfp4prep import writer
        writer._sync_folder = lambda _: os.kill(os.getpid(), 9)
    """,
    "after the rename": """
        import os
        real = os.rename
        os.rename = lambda *a: (real(*a), os.kill(os.getpid(), 9))
    """,
}


@pytest.mark.parametrize("moment", KILLED)
def test_killed_around_the_rename(moment: str, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert process(KILLED[moment], "convert", source, out, "-q").returncode == -signal.SIGKILL
    assert run("convert", source, out, "-q", "--overwrite").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    assert "nvfp4prep.json" in snapshot(out)


INTERRUPTED = """
    import os
    real, calls = os.rename, 0
    def rename(*arguments):
        global calls
        calls += 1
        real(*arguments)
        if calls == {call}:
            raise KeyboardInterrupt
    os.rename = rename
"""


@pytest.mark.parametrize("call", [1, 2])
def test_interrupted_between_the_renames(call: int, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", source, out, "-q").code == 0
    (out / "mark").write_text("the old one")
    before = snapshot(tmp_path)
    done = process(INTERRUPTED.format(call=call), "convert", source, out, "-q", "--overwrite")
    assert done.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}
    if call == 1:
        assert snapshot(tmp_path) == before and "nothing was left behind" in done.stderr
    else:
        assert not (out / "mark").exists() and f"{out} is complete" in done.stderr


def test_interrupted_while_cleaning(source: Path, tmp_path: Path) -> None:
    code = """
        import os, shutil
        def stop(*_, **__):
            raise KeyboardInterrupt
        os.pwrite, shutil.rmtree = stop, stop
    """
    done = process(code, "convert", source, tmp_path / "out", "-q")
    assert done.returncode == 130 and f"{tmp_path / 'out'}.partial is left" in done.stderr
    assert run("convert", source, tmp_path / "out", "-q").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_partial_of_somebody_else_is_kept_beside_a_stale_marker(source: Path, tmp_path: Path) -> None:
    writer.marker_path(tmp_path / "out").write_text("nvfp4prep 1\n")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "cat.jpg").write_text("cat")
    unchanged(tmp_path, source, tmp_path / "out")


def test_one_run_at_a_time(source: Path, tmp_path: Path) -> None:
    with writer.PartialOutput(tmp_path / "out", "0" * 32):
        assert "another nvfp4prep" in unchanged(tmp_path, source, tmp_path / "out", code=4).stderr


def test_folders_made_for_out_go_with_it(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fail)
    unchanged(tmp_path, source, tmp_path / "new" / "a" / "out", code=4)


def test_many_shards_with_few_descriptors(checkpoint: Fetch, tmp_path: Path) -> None:
    arguments = ("convert", checkpoint(QWEN), tmp_path / "out", "-q", "--no-smoke", "--max-shard-size", "1")
    done = process("", *arguments, before="ulimit -n 64;")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 64


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("nvfp4prep.json/x", ()),
        ("model.safetensors.index.json/x", ("--max-shard-size", "100KB")),
        ("model-00001-of-00003.safetensors/x", ("--max-shard-size", "100KB")),
        ("common", ("--target", "vllm-cutlass", "--tp", "2")),
        ("common/extra.safetensors", ("--target", "vllm-cutlass", "--tp", "2")),
        ("rank-00-of-02_00-of-01/x", ("--target", "vllm-cutlass", "--tp", "2")),
    ],
)
def test_side_files_with_names_of_the_output(
    name: str, options: tuple[str, ...], checkpoint: Fetch, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint(QWEN), tmp_path / "source")
    if "00003" in name:
        plan = run("convert", source, tmp_path / "out", "--dry-run", "--json", *options).json
        name = f"{plan['outputs'][0]['file']}/x"
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_text("x")
    (finding,) = unchanged(tmp_path, source, tmp_path / "out", *options, code=3).findings
    taken = ("name-taken", name)
    assert (finding["rule"], finding["file"]) in (taken, ("not-a-file", name.removesuffix("/x")))  # source sees some


@pytest.mark.parametrize(("value", "taken"), [(5, 5), (True, None), (0, None), (1 << 63, None), (1.5, None)])
def test_previous_shard_size(value: object, taken: int | None) -> None:
    assert _previous_shard_bytes(json.loads(json.dumps({"runs": [{"options": {"max_shard_bytes": value}}]}))) == taken


def test_shards_start_for_the_disk_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(writer, "start_writeback", started.append)
    monkeypatch.setattr(writer, "_WRITEBACK_BYTES", 100)
    with writer.PartialOutput(tmp_path / "out", "0" * 32) as output:
        output.open_shards([Shard("model.safetensors", (), b"h" * 10, 300)])
        for position in range(10, 290, 70):
            output.write("model.safetensors", position, b"x" * 70)
    assert len(started) == 2
