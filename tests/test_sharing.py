"""One conversion by several processes: shares in any order and at once, killed and repeated, then finished."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from runner import run, snapshot

from nvfp4prep import cluster, execute, sharing, writer
from nvfp4prep import convert as conversion
from nvfp4prep.errors import EnvironmentFault, InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.options import Options

Fetch = Callable[[str], Path]
QWEN, LLAMA4 = "qwen3moe-nvfp4-perexpert", "llama4-nvfp4"
PACKED = ("--target", "flashinfer-trtllm", "--tp", "2")
OPTIONS = [
    (QWEN, ()),
    (QWEN, PACKED),
    (LLAMA4, ("--target", "vllm-marlin", "--target", "hf")),
    ("qwen3moe-int4awq", ("--target", "compressed-tensors", "--pre-quant-scale", "fold")),
    ("qwen3moe-w4a8awq", ("--target", "vllm-marlin", "--target", "flashinfer-sm90-w4a8", "--pre-quant-scale", "fold")),
]

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


def convert(source: Path, out: Path, *options: object) -> None:
    result = run("convert", source, out, "--no-smoke", "-q", *options)
    assert result.code == 0, result.stderr


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A command whose every write takes a while, and that journals each finished item."""
    command = [sys.executable, "-c", textwrap.dedent(SLOW), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


def journal(out: Path, share: str) -> list[bytes]:
    path = writer.share_path(out, share)
    return path.read_bytes().split(b"\n")[1:-1] if path.exists() else []


# --- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_shares_make_what_one_process_makes(
    name: str, options: tuple[str, ...], checkpoint: Fetch, tmp_path: Path
) -> None:
    source, alone, out = checkpoint(name), tmp_path / "alone", tmp_path / "out"
    convert(source, alone, *options)
    for index in (3, 1, 2):
        convert(source, out, "--shard", f"{index}/3", *options)
        assert not out.exists()
    assert run("finish", out, "--no-smoke", "-q").code == 0
    assert snapshot(out) == snapshot(alone)
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "out"}


def test_each_share_runs_its_items_alone(checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share that is repeated does nothing; `finish` does nothing either."""
    labels: list[str] = []
    real = execute._run_item

    def run_item(context: execute.Context, item: Any) -> None:
        labels.append(item.label)
        real(context, item)

    monkeypatch.setattr(execute, "_run_item", run_item)
    source, out = checkpoint(QWEN), tmp_path / "out"
    convert(source, out, "--shard", "1/2")
    first = set(labels)
    labels.clear()
    convert(source, out, "--shard", "1/2")
    assert labels == []
    convert(source, out, "--shard", "2/2")
    assert first.isdisjoint(labels) and first and labels
    labels.clear()
    assert run("finish", out, "--no-smoke", "-q").code == 0
    assert labels == []


def test_at_once(checkpoint: Fetch, tmp_path: Path) -> None:
    source, alone, out = checkpoint(QWEN), tmp_path / "alone", tmp_path / "out"
    convert(source, alone, *PACKED)
    command = ("-m", "nvfp4prep", "convert", source, out, "--no-smoke", "-q", *PACKED, "--shard")
    processes = [subprocess.Popen([sys.executable, *map(str, command), f"{index}/4"]) for index in range(1, 5)]
    assert [process.wait(120) for process in processes] == [0, 0, 0, 0]
    assert run("finish", out, "--no-smoke", "-q").code == 0
    assert snapshot(out) == snapshot(alone)


def test_a_killed_share_goes_on(checkpoint: Fetch, tmp_path: Path) -> None:
    """The other share's work is kept, and what the journal has is not done again."""
    source, alone, out = checkpoint(QWEN), tmp_path / "alone", tmp_path / "out"
    convert(source, alone)
    convert(source, out, "--shard", "2/2")
    other = journal(out, "2-of-2")
    with started("convert", source, out, "--no-smoke", "-q", "--shard", "1/2") as process:
        wait_for(process, lambda: len(journal(out, "1-of-2")) >= 3)
        process.send_signal(signal.SIGKILL)
        process.wait()
    refused = run("finish", out, "--no-smoke")
    assert refused.code == 2
    assert "run --shard 1/2, then finish again" in refused.stderr
    assert not out.exists() and journal(out, "2-of-2") == other
    before = len(journal(out, "1-of-2"))
    assert before >= 3
    convert(source, out, "--shard", "1/2")
    assert len(journal(out, "1-of-2")) > before
    assert run("finish", out, "--no-smoke", "-q").code == 0
    assert snapshot(out) == snapshot(alone)


def test_the_first_is_killed_while_it_makes_the_files(checkpoint: Fetch, tmp_path: Path) -> None:
    source, alone, out = checkpoint(QWEN), tmp_path / "alone", tmp_path / "out"
    convert(source, alone)
    with started("convert", source, out, "--no-smoke", "-q", "--shard", "1/2") as process:
        wait_for(process, writer.partial_path(out).exists)
        process.kill()
        process.wait()
    for index in (2, 1):
        convert(source, out, "--shard", f"{index}/2")
    assert run("finish", out, "--no-smoke", "-q").code == 0
    assert snapshot(out) == snapshot(alone)


def test_a_plain_run_does_the_rest(checkpoint: Fetch, tmp_path: Path) -> None:
    source, alone, out = checkpoint(QWEN), tmp_path / "alone", tmp_path / "out"
    convert(source, alone)
    convert(source, out, "--shard", "1/3")
    convert(source, out)
    assert snapshot(out) == snapshot(alone)
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "out"}


def test_while_a_share_is_at_work(checkpoint: Fetch, tmp_path: Path) -> None:
    """A plain run, finish, and the same share are refused; another share is not."""
    source, out = checkpoint(QWEN), tmp_path / "out"
    with started("convert", source, out, "--no-smoke", "-q", "--shard", "1/2") as process:
        wait_for(process, lambda: len(journal(out, "1-of-2")) >= 1)
        for arguments in (("convert", source, out), ("finish", out), ("convert", source, out, "--shard", "1/2")):
            refused = run(*arguments, "--no-smoke", "-q")
            assert refused.code == 4, arguments
            assert "being written already" in refused.stderr or "another nvfp4prep is writing here" in refused.stderr
        convert(source, out, "--shard", "2/2")
        assert process.poll() is None, "it must still be at work for this test to say anything"


@pytest.mark.parametrize("other", [("--w13-scale", "split"), ("--target", "vllm-marlin"), ("--max-shard-size", "1MB")])
def test_another_command_does_not_touch_the_shares(other: tuple[str, ...], checkpoint: Fetch, tmp_path: Path) -> None:
    source, out = checkpoint(QWEN), tmp_path / "out"
    convert(source, out, "--shard", "1/2")
    before = snapshot(tmp_path)
    refused = run("convert", source, out, "--no-smoke", "-q", "--shard", "2/2", *other)
    assert refused.code == 2
    assert "shares of something else are here" in refused.stderr
    assert snapshot(tmp_path) == before
    refused = run("convert", source, out, "--no-smoke", "-q", *other)  # nor does one without shares
    assert refused.code == 2
    assert "shares of something else are here" in refused.stderr
    assert snapshot(tmp_path) == before


def test_finish_after_the_source_was_changed(
    checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the shares wrote stays, and is what `finish` takes once the source is the same again."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(checkpoint(QWEN), source)
    monkeypatch.chdir(tmp_path)
    for index in (1, 2):
        convert(Path("source"), out, "--shard", f"{index}/2")
    before, shard = snapshot(tmp_path), source / "model.safetensors"
    times = shard.stat()
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    refused = run("finish", out, "--no-smoke", "-q")
    assert refused.code == 2
    assert "the source was changed since" in refused.stderr
    assert snapshot(tmp_path) == before
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    monkeypatch.chdir("/")  # shares were given a relative path
    assert run("finish", out, "--no-smoke", "-q").code == 0


def test_shares_replace_an_output_when_asked(checkpoint: Fetch, tmp_path: Path) -> None:
    source, alone, out = checkpoint(QWEN), tmp_path / "alone", tmp_path / "out"
    convert(source, alone, *PACKED)
    convert(source, out)
    assert run("convert", source, out, "--shard", "1/2", *PACKED).code == 2
    for index in (1, 2):
        convert(source, out, "--shard", f"{index}/2", "--overwrite", *PACKED)
    assert run("finish", out, "--no-smoke", "-q").code == 0
    assert snapshot(out) == snapshot(alone)


@pytest.mark.parametrize("share", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/1000000"])
def test_shares_that_are_none(share: str, checkpoint: Fetch, tmp_path: Path) -> None:
    assert run("convert", checkpoint(QWEN), tmp_path / "out", "--shard", share).code == 2
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_finish(checkpoint: Fetch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "no conversion by shares to finish" in run("finish", out).stderr
    convert(checkpoint(QWEN), out)
    refused = run("finish", out)
    assert (refused.code, "is there already" in refused.stderr) == (2, True)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"{}", b'{"source": 1, "targets": [{"x": 1}], "shares": 2}'])
def test_a_damaged_note(text: bytes, checkpoint: Fetch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(checkpoint(QWEN), out, "--shard", "1/1")
    sharing.job_path(out).write_bytes(text)
    refused = run("finish", out, "--no-smoke")
    assert refused.code == 2
    assert "delete" in refused.stderr


def test_json(checkpoint: Fetch, tmp_path: Path) -> None:
    source, out = checkpoint(QWEN), tmp_path / "out"
    assert run("convert", source, out, "--no-smoke", "--json", "--shard", "1/1").json["share"] == "1/1"
    done = run("finish", out, "--no-smoke", "--json").json
    assert done["manifest"] == json.loads((out / "nvfp4prep.json").read_text())


# --- Dask ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dask() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as local:
        yield local


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_a_cluster_makes_what_one_process_makes(
    name: str, options: tuple[str, ...], checkpoint: Fetch, dask: LocalCluster, tmp_path: Path
) -> None:
    source, alone, out = checkpoint(name), tmp_path / "alone", tmp_path / "out"
    convert(source, alone, *options)
    convert(source, out, "--executor", "dask", "--scheduler", dask.scheduler_address, *options)
    assert snapshot(out) == snapshot(alone)
    assert {path.name for path in tmp_path.iterdir()} == {"alone", "out"}


def _hurry_slowly(seconds: float) -> int:
    """On a worker: every write takes a while from now on."""
    real = os.pwrite

    def slow(*arguments: Any) -> int:
        time.sleep(seconds)
        return real(*arguments)

    os.pwrite = slow
    return os.getpid()


def test_a_worker_is_killed(checkpoint: Fetch, dask: LocalCluster, tmp_path: Path) -> None:
    """What it was at is done again by another; the bytes are the same."""
    source, alone, out = checkpoint(QWEN), tmp_path / "alone", tmp_path / "out"
    convert(source, alone, *PACKED)
    with Client(dask) as client:
        pids = client.run(_hurry_slowly, 0.01)
        command = ("convert", source, out, "--no-smoke", "-q", *PACKED, "--executor", "dask")
        command = (*command, "--scheduler", dask.scheduler_address)
        process = subprocess.Popen([sys.executable, "-m", "nvfp4prep", *map(str, command)])
        deadline = time.monotonic() + 60
        while not client.processing() or not any(client.processing().values()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(next(iter(pids.values())), signal.SIGKILL)
        assert process.wait(120) == 0
    assert snapshot(out) == snapshot(alone)


def test_a_worker_of_a_run_that_is_no_more(checkpoint: Fetch, tmp_path: Path) -> None:
    """It does not write into what another run makes under the same name, nor where nothing is made."""
    source, out = checkpoint(QWEN), tmp_path / "out"
    prepared = conversion.prepare(str(source), Options())
    planned, identity = conversion.identified([prepared])
    batch = (str(source), (Options(),), ("",), str(out), identity, tuple(range(len(planned.items))))
    with pytest.raises(EnvironmentFault, match="can't be written to"):
        cluster.run_batch(*batch)
    with writer.PartialOutput(out, "0" * 32) as output:
        output.open_shards(planned.shards)
        before = snapshot(output.partial)
        with pytest.raises(EnvironmentFault, match="another run's"):
            cluster.run_batch(*batch)
        assert snapshot(output.partial) == before


def test_a_worker_keeps_to_the_folder_that_it_began_with(checkpoint: Fetch, tmp_path: Path) -> None:
    shards = conversion.prepare(str(checkpoint(QWEN)), Options()).plan.shards
    with writer.PartialOutput(tmp_path / "out", "0" * 32) as mine:
        mine.open_shards(shards)
        with writer.PartialOutput(tmp_path / "out", "0" * 32).joined() as worker:
            mine.partial.rename(tmp_path / "moved")
            mine.partial.mkdir()
            (mine.partial / shards[0].file).write_bytes(b"another's")
            worker.write(shards[0].file, shards[0].nbytes - 3, b"end")
            worker.sync_written()
        assert (mine.partial / shards[0].file).read_bytes() == b"another's"
        assert (tmp_path / "moved" / shards[0].file).read_bytes()[-3:] == b"end"


def test_the_scheduler_is_lost(checkpoint: Fetch, tmp_path: Path) -> None:
    cluster_of_one = LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None)
    with Client(cluster_of_one) as client:
        client.run(_hurry_slowly, 0.05)
    command = ("convert", checkpoint(QWEN), tmp_path / "out", "--no-smoke", "-q", "--executor", "dask", "--scheduler")
    process = subprocess.Popen(
        [sys.executable, "-m", "nvfp4prep", *map(str, command), cluster_of_one.scheduler_address],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out.partial" / "model.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    cluster_of_one.close()
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 4
    assert re.search("^error: .*(scheduler|worker)", errors, re.MULTILINE) and "nvfp4prep/cluster.py" not in errors


def test_no_worker_for_long(checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "WORKERS_SECONDS", 1)
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.1)
    with LocalCluster(n_workers=0, dashboard_address=None) as empty:
        there = ("--executor", "dask", "--scheduler", empty.scheduler_address)
        refused = run("convert", checkpoint(QWEN), tmp_path / "out", "--no-smoke", "-q", *there)
    assert refused.code == 4 and "has had no worker for 1 seconds" in refused.stderr


@pytest.mark.parametrize(
    "address", ["", "foo", "tcp://", "tcp://127.0.0.1:notaport", "http://127.0.0.1:1", "inproc://x", "tcp://a b:1"]
)
def test_addresses_that_are_none(address: str, checkpoint: Fetch, tmp_path: Path) -> None:
    refused = run("convert", checkpoint(QWEN), tmp_path / "out", "-q", "--executor", "dask", "--scheduler", address)
    assert refused.code == 2 and "tcp://host:8786" in refused.stderr


def test_a_worker_that_sees_something_else(checkpoint: Fetch, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="another plan"):
        cluster.run_batch(str(checkpoint(QWEN)), (Options(),), ("",), str(tmp_path / "out"), "0" * 32, (0,))


def test_no_scheduler(checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1)
    out = tmp_path / "out"
    dask_there = ("--executor", "dask", "--scheduler", "tcp://127.0.0.1:1")
    refused = run("convert", checkpoint(QWEN), out, "--no-smoke", "-q", *dask_there)
    assert refused.code == 4
    assert "no Dask scheduler answers" in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_dask_is_not_installed(checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    dask_there = ("--executor", "dask", "--scheduler", "tcp://127.0.0.1:1")
    refused = run("convert", checkpoint(QWEN), tmp_path / "out", "--no-smoke", "-q", *dask_there)
    assert (refused.code, "nvfp4prep[distributed]" in refused.stderr) == (4, True)


@pytest.mark.parametrize(
    "options",
    [
        ("--executor", "dask"),
        ("--scheduler", "tcp://127.0.0.1:1"),
        ("--executor", "dask", "--scheduler", "tcp://127.0.0.1:1", "--shard", "1/2"),
    ],
)
def test_options_that_exclude_each_other(options: tuple[str, ...], checkpoint: Fetch, tmp_path: Path) -> None:
    assert run("convert", checkpoint(QWEN), tmp_path / "out", *options).code == 2


def test_findings_come_from_a_worker_whole() -> None:
    import pickle

    refused = InputRefused([Finding("scale-dtype", "error", "F8 where F32 was expected", "a.safetensors", "x")])
    again = pickle.loads(pickle.dumps(refused))
    assert again.findings == refused.findings and str(again) == str(refused)
