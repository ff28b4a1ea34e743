"""A run that was killed: nothing loads, and the same command goes on from there to the same bytes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import damage
import pytest
from runner import run, snapshot

from nvfp4prep import execute, writer
from nvfp4prep.errors import EnvironmentFault

Fetch = Callable[[str], Path]
QWEN, LLAMA4, SPLIT = "qwen3moe-nvfp4-perexpert", "llama4-nvfp4", "tinymoe-nvfp4-splitscale"
LOADABLE = {"config.json", "model.safetensors.index.json", "nvfp4prep.json", "hf_quant_config.json"}

SLOW = """
    import os, sys, time
    from nvfp4prep import execute
    execute.COMMIT_SECONDS = 0.0
    real = os.pwrite
    def slow(*arguments):
        time.sleep(0.003)
        return real(*arguments)
    os.pwrite = slow
    from nvfp4prep.cli import main
    main(sys.argv[1:])
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command whose every write takes a while, and that journals each finished item."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(SLOW), *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def journal(out: Path) -> list[bytes]:
    """Whole lines of the journal of a run to `out`."""
    path = writer.marker_path(out)
    return path.read_bytes().split(b"\n")[2:-1] if path.exists() else []


def forget_digests(marker: Path) -> None:
    lines = marker.read_bytes().split(b"\n")
    entry = json.loads(lines[3])
    marker.write_bytes(b"\n".join([*lines[:3], json.dumps({**entry, "digests": []}).encode(), *lines[4:]]))


def wait_for(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the items that are run from now on."""
    labels: list[str] = []
    real = execute._run_item

    def run_item(context: execute.Context, item: object) -> None:
        labels.append(item.label)  # type: ignore[attr-defined]
        real(context, item)  # type: ignore[arg-type]

    monkeypatch.setattr(execute, "_run_item", run_item)
    return labels


@pytest.mark.parametrize(
    ("base", "options"),
    [
        (QWEN, ("--target", "hf")),
        (SPLIT, ("--target", "hf", "--max-shard-size", "2MB")),
        (QWEN, ("--target", "flashinfer-trtllm", "--tp", "2", "--ep", "2")),
        (LLAMA4, ("--target", "vllm-marlin", "--target", "hf")),
        ("qwen3moe-int4awq", ("--target", "compressed-tensors", "--pre-quant-scale", "fold")),
        ("qwen3moe-int4awq", ("--target", "vllm-marlin", "--target", "moe-wna16", "--pre-quant-scale", "fold")),
        ("qwen3moe-w4a8awq", ("--target", "flashinfer-sm90-w4a8", "--ep", "4")),
    ],
)
def test_killed_again_and_again(
    base: str,
    options: tuple[str, ...],
    checkpoint: Fetch,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seven kills at random moments of one run; then it ends, does only what is missing, and the bytes are the same."""
    source, out = checkpoint(base), tmp_path / "killed"
    arguments = ("convert", source, out, "--no-smoke", "-q", *options)
    chance = random.Random(f"{base} {options}")
    done = 0
    for _ in range(7):
        process = start(*arguments)
        wanted = done + chance.randint(0, 6)
        wait_for(process, lambda: len(journal(out)) > wanted or process.poll() is not None)  # noqa: B023
        if process.poll() is not None:
            break
        time.sleep(chance.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0 or out.exists():  # it was quicker, or killed once OUT had its name
            break
        done = len(journal(out))
        assert not out.exists()
        assert not LOADABLE & {path.name for path in (tmp_path / "killed.partial").rglob("*")}
    assert done
    labels = counted(monkeypatch)
    if not out.exists():
        assert run(*arguments).code == 0
    resumed = len(labels)
    labels.clear()
    assert run("convert", source, tmp_path / "straight", "--no-smoke", "-q", *options).code == 0
    assert snapshot(out) == snapshot(tmp_path / "straight")
    assert resumed <= len(labels) - done
    left = {path.name for path in tmp_path.iterdir()} - {"killed", "straight"}
    assert not left or (left == {writer.marker_path(out).name} and process.returncode != 0)


def begun(start: Callable[..., subprocess.Popen[str]], source: Path, out: Path, *options: str) -> int:
    """A killed run; how many items it finished."""
    process = start("convert", source, out, "--no-smoke", "-q", *options)
    wait_for(process, lambda: len(journal(out)) >= 5)
    process.kill()
    process.communicate()
    return len(journal(out))


def test_other_options_or_another_source_start_anew(
    checkpoint: Fetch,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, out = Path(shutil.copytree(checkpoint(QWEN), tmp_path / "source")), tmp_path / "out"
    labels = counted(monkeypatch)
    assert run("convert", source, tmp_path / "keep", "--no-smoke", "-q", "--input-scale", "keep").code == 0
    whole = len(labels)
    for change in ("options", "source"):
        begun(start, source, out)
        if change == "source":
            os.utime(source / "model.safetensors", ns=(1, 1))
        labels.clear()
        options = ("--input-scale", "keep") if change == "options" else ()
        assert run("convert", source, out, "--no-smoke", "-q", *options).code == 0
        assert len(labels) == whole
        shutil.rmtree(out)


@pytest.mark.parametrize(
    "harm", ["journal cut", "journal garbage", "shard gone", "shard cut", "header", "strays", "another folder"]
)
def test_what_was_left_is_not_trusted_blindly(
    harm: str, checkpoint: Fetch, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    source, out = checkpoint(QWEN), tmp_path / "out"
    begun(start, source, out)
    marker, partial = writer.marker_path(out), writer.partial_path(out)
    shard = partial / "model.safetensors"
    if harm == "journal cut":
        marker.write_bytes(marker.read_bytes()[:-7])
    elif harm == "journal garbage":
        marker.write_bytes(marker.read_bytes() + b'{"item": 99999999, "bytes": 1, "digests": [[0, 0, "zz"]]}\nnonsense')
    elif harm == "shard gone":
        shard.unlink()
    elif harm == "shard cut":
        os.truncate(shard, 1000)
    elif harm == "header":
        shard.write_bytes(b"\0" * 8 + shard.read_bytes()[8:])
    elif harm == "strays":
        (partial / "old").mkdir()
        for name in ("model-00007-of-00009.safetensors", "chat_template.jinja", "old/x.json", "link"):
            (partial / name).symlink_to("x") if name == "link" else (partial / name).write_text("of an earlier run")
    else:
        partial.rename(tmp_path / "aside")
        shutil.copytree(tmp_path / "aside", partial)
        shutil.rmtree(tmp_path / "aside")
    code = run("convert", source, out, "--no-smoke", "-q").code
    if harm == "another folder":  # not the one that the marker names: somebody's
        assert code == 2
        return
    assert code == 0
    assert run("convert", source, tmp_path / "straight", "--no-smoke", "-q").code == 0
    assert snapshot(out) == snapshot(tmp_path / "straight")


def test_a_journal_without_digests(
    checkpoint: Fetch, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """It is told, and the next run begins anew."""
    source, out = checkpoint(QWEN), tmp_path / "out"
    begun(start, source, out)
    forget_digests(writer.marker_path(out))
    result = run("convert", source, out, "--no-smoke", "-q")
    assert result.code == 1 and "the journal of an earlier run is damaged" in result.stderr
    assert run("convert", source, out, "--no-smoke", "-q").code == 0
    assert run("convert", source, tmp_path / "straight", "--no-smoke", "-q").code == 0
    assert snapshot(out) == snapshot(tmp_path / "straight")


@pytest.mark.parametrize("fault", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_long_run_that_is_ended_can_go_on(
    fault: str, checkpoint: Fetch, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    source, out = checkpoint(QWEN), tmp_path / "out"
    process = start("convert", source, out, "--no-smoke", "-q")
    wait_for(process, lambda: len(journal(out)) >= 5)
    process.send_signal(getattr(signal, fault))
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == (130 if fault == "SIGINT" else 143)
    assert "the same command goes on from there" in stderr and "Traceback" not in stderr
    assert not out.exists()
    assert run("convert", source, out, "--no-smoke", "-q").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(
    ("function", "code", "after", "target"),
    [("pwrite", 28, 150, "hf"), ("pread", 5, 60, "hf"), ("preadv", 5, 60, "flashinfer-cutlass")],
)
def test_a_disk_that_fails_late(
    function: str,
    code: int,
    after: int,
    target: str,
    checkpoint: Fetch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk or a bad sector after a while keeps what is done; the same command ends it."""
    source, out = checkpoint(QWEN), tmp_path / "out"
    monkeypatch.setattr(execute, "COMMIT_SECONDS", 0.0)
    real, calls = getattr(os, function), 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        time.sleep(0.003)  # or all is written before the first sync ends
        if calls > after:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, function, failing)
        result = run("convert", source, out, "--no-smoke", "--workers", "1", "--target", target)
    assert result.code == 4 and "the same command goes on from there" in result.stderr
    finished = len(journal(out))
    assert finished and not out.exists()
    labels = counted(monkeypatch)
    assert run("convert", source, out, "--no-smoke", "-q", "--target", target).code == 0
    resumed = len(labels)
    labels.clear()
    assert run("convert", source, tmp_path / "straight", "--no-smoke", "-q", "--target", target).code == 0
    assert len(labels) - resumed == finished
    assert snapshot(out) == snapshot(tmp_path / "straight")


def test_short_runs_leave_nothing(checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise EnvironmentFault("no")

    monkeypatch.setattr(execute, "_run_step", failing)
    assert run("convert", checkpoint(QWEN), tmp_path / "out", "-q").code == 4
    assert not list(tmp_path.iterdir())


def test_a_failed_check_is_not_gone_on_with(checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the smoke check refuses is written anew by the next run."""
    from nvfp4prep import validation
    from nvfp4prep.errors import CheckFailed

    monkeypatch.setattr(execute, "COMMIT_SECONDS", 0.0)

    def refuse(*_: object) -> None:
        raise CheckFailed("no")

    labels = counted(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(validation, "check_output", refuse)
        assert run("convert", checkpoint(QWEN), tmp_path / "out", "-q", "--no-smoke").code == 1
    whole = len(labels)
    labels.clear()
    assert run("convert", checkpoint(QWEN), tmp_path / "out", "-q", "--no-smoke").code == 0
    assert len(labels) == whole


def test_the_journal_names_items_and_digests(
    checkpoint: Fetch, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    begun(start, checkpoint(SPLIT), out)
    entries = [json.loads(raw) for raw in journal(out)]
    assert len({entry["item"] for entry in entries}) == len(entries)
    assert all(entry["bytes"] > 0 and entry["digests"] for entry in entries)
    assert damage.INDEX not in {path.name for path in writer.partial_path(out).iterdir()}
