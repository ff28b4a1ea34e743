"""Converting a Hub repo: each shard is fetched once, kept for as long as it is needed, and the bytes are the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import checkpoints
import huggingface_hub
import pytest
from hub_server import LISTING, Hub
from huggingface_hub import constants
from runner import run, snapshot
from test_resume import LOADABLE, counted, journal, wait_for

from nvfp4prep import convert, execute, plan, remote, spool
from nvfp4prep.checkpoint import peek_checkpoint, read_checkpoint
from nvfp4prep.errors import EnvironmentFault, Stopped
from nvfp4prep.options import Options
from nvfp4prep.remote import RemoteSource

REPO = "org/name"
SHARDED, QWEN, LLAMA4 = "qwen3moe-nvfp4-sharded", "qwen3moe-nvfp4-perexpert", "llama4-nvfp4"
ROUND = 4096
"""Of a map fetched at once, in these tests."""


def put(hub: Hub, folder: Path) -> str:
    return hub.repos[REPO].push(folder)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests as small for these shards as they are for real ones."""
    monkeypatch.setattr(remote, "HEADER_BYTES", 1000)
    monkeypatch.setattr(remote, "GAP_BYTES", 500)
    monkeypatch.setattr(spool, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(spool, "BLOCK_BYTES", ROUND)


@pytest.fixture
def environment(hub: Hub) -> dict[str, str]:
    """Of a process that is to see the Hub and the cache that this one sees."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    path = os.pathsep.join([str(Path(remote.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    hubs = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_TOKEN": "hf_secret"}
    return {**kept, **hubs, "PYTHONPATH": path}


def same_but_for_the_source(out: Path, straight: Path) -> None:
    """All files the same but for the manifests, which differ in name and revision of the source."""
    one, two = snapshot(out), snapshot(straight)
    assert one.keys() == two.keys()
    manifests = {name for name in one if Path(name).name == "nvfp4prep.json"}
    assert manifests and {name for name in one if one[name] != two[name]} <= manifests
    for name in manifests:
        mine, other = json.loads((out / name).read_text()), json.loads((straight / name).read_text())
        for key in ("name", "revision"):
            mine["source"].pop(key), other["source"].pop(key)
        assert mine == other


def nothing_left(folder: Path, *names: str) -> None:
    assert {path.name for path in folder.iterdir()} == {*names}


# --- the same bytes, each fetched once ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "options"),
    [
        (SHARDED, ()),
        (SHARDED, ("--target", "vllm-cutlass", "--tp", "2")),
        (SHARDED, ("--target", "vllm-marlin", "--target", "hf", "--max-shard-size", "300kB")),
        (LLAMA4, ("--target", "flashinfer-trtllm", "--target", "hf")),
        ("qwen3moe-int4awq", ("--target", "compressed-tensors", "--pre-quant-scale", "fold")),
        (QWEN, ("--target", "compressed-tensors")),
    ],
)
def test_the_same_bytes(base: str, options: tuple[str, ...], hub: Hub, tmp_path: Path) -> None:
    commit = put(hub, checkpoints.DATA / base)
    work = tmp_path / "work"
    far = run("convert", REPO, work / "far", "--json", *options)
    assert far.code == 0, far.stderr
    assert run("convert", checkpoints.DATA / base, work / "near", "-q", *options).code == 0
    same_but_for_the_source(work / "far", work / "near")
    for manifest in far.json.get("manifests") or [far.json["manifest"]]:
        assert (manifest["source"]["name"], manifest["source"]["revision"]) == (REPO, commit)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    nothing_left(work, "far", "near")


def test_every_shard_is_fetched_once(hub: Hub, small: None, tmp_path: Path) -> None:
    """All but headers and scalar scales, which were read to make the plan, and a look at each ETag at the end."""
    put(hub, checkpoints.DATA / SHARDED)
    planned = peek_checkpoint(REPO)
    assert planned.scale_values
    before = dict(hub.sent)
    assert run("convert", REPO, tmp_path / "out", "-q", "--no-smoke").code == 0
    for shard, size in planned.source.shards.items():
        assert hub.sent[shard] - 2 * before[shard] == size + 8
        whole = [(start, length) for start, length in hub.ranges[shard] if start % 50_000 == 0 and length > 1000]
        covered = sorted(whole)
        assert [start for start, _ in covered] == list(range(0, size, 50_000))
        assert sum(length for _, length in covered) == size


def test_the_smoke_check_fetches_its_layers_again(hub: Hub, small: None, tmp_path: Path) -> None:
    put(hub, checkpoints.DATA / SHARDED)
    source = peek_checkpoint(REPO)
    assert run("convert", REPO, tmp_path / "one", "-q", "--no-smoke").code == 0
    without = dict(hub.sent)
    hub.sent.clear()
    result = run("convert", REPO, tmp_path / "two", "--json", "--smoke-layers", "1")
    assert result.code == 0 and result.json["smoke"][0]["passed"]
    moe = next(moe for moe in source.schema.moe_layers if moe.layer == 1)
    wanted: dict[str, set[int]] = {}
    for linear in (*moe.w13, *moe.w2):
        for tensor in linear.params.values():
            blocks = range(tensor.start // ROUND, -(-tensor.end // ROUND))
            wanted.setdefault(tensor.file, set()).update(blocks)
    assert wanted and wanted.keys() != source.source.shards.keys()
    for shard in source.source.shards:
        again = hub.sent[shard] - without[shard]
        assert again <= len(wanted.get(shard, ())) * ROUND
        assert (again > 0) == (shard in wanted) or again <= 0


def test_few_shards_at_a_time(hub: Hub, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, checkpoints.DATA / SHARDED)
    most, files = 0, set()
    real_begin = spool.Spool._begin

    def begin(self: spool.Spool, file: str, size: int) -> None:
        nonlocal most
        real_begin(self, file, size)
        files.add(file)
        most = max(most, len(self._descriptors))
        assert self._held <= self._limit
        assert self._held == sum(self._sizes[name] for name in self._descriptors)

    monkeypatch.setattr(spool.Spool, "_begin", begin)
    assert run("convert", REPO, tmp_path / "out", "-q", "--no-smoke", "--workers", "4").code == 0
    assert len(files) == len(list((checkpoints.DATA / SHARDED).glob("*.safetensors"))) > 4
    assert most <= 3


def test_keep_source(hub: Hub, tmp_path: Path) -> None:
    """As before: all of it in huggingface_hub's cache. From there it is read by the next run, streamed or not."""
    commit = put(hub, checkpoints.DATA / SHARDED)
    assert run("convert", REPO, tmp_path / "kept", "-q", "--keep-source").code == 0
    cache = Path(huggingface_hub.snapshot_download(REPO, revision=commit, local_files_only=True))
    shards = {path.name for path in cache.glob("*.safetensors")}
    assert shards == {path.name for path in (checkpoints.DATA / SHARDED).glob("*.safetensors")}
    hub.sent.clear()
    assert run("convert", REPO, tmp_path / "streamed", "-q").code == 0
    assert not any(hub.sent[shard] for shard in shards)
    assert snapshot(tmp_path / "kept") == snapshot(tmp_path / "streamed")


def test_shards_in_the_cache_are_used_from_there(hub: Hub, tmp_path: Path) -> None:
    commit = put(hub, checkpoints.DATA / SHARDED)
    here = sorted(path.name for path in (checkpoints.DATA / SHARDED).glob("*.safetensors"))[1::2]
    for name in here:
        huggingface_hub.hf_hub_download(REPO, name, revision=commit)
    hub.sent.clear()
    assert run("convert", REPO, tmp_path / "out", "-q").code == 0
    assert not any(hub.sent[name] for name in here)
    assert run("convert", checkpoints.DATA / SHARDED, tmp_path / "near", "-q").code == 0
    same_but_for_the_source(tmp_path / "out", tmp_path / "near")


def test_side_files_of_any_size(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are too large for the cache are fetched in pieces, straight to where they belong."""
    folder = tmp_path / "repo"
    shutil.copytree(checkpoints.DATA / QWEN, folder)
    (folder / "odd [name]*.bin").write_bytes(os.urandom(500_001))
    (folder / "onnx").mkdir()
    shutil.copy(folder / "model.safetensors", folder / "onnx" / "x.safetensors")
    monkeypatch.setattr(remote, "SMALL_FILE_BYTES", 5000)
    monkeypatch.setattr(remote, "SIDE_FILE_PIECE", 200_000)
    put(hub, folder)
    assert run("convert", REPO, tmp_path / "far", "-q", "--no-smoke").code == 0
    assert run("convert", folder, tmp_path / "near", "-q", "--no-smoke").code == 0
    same_but_for_the_source(tmp_path / "far", tmp_path / "near")


def test_shares(hub: Hub, tmp_path: Path) -> None:
    """Each share streams what it needs; they and finish stay with one commit, though the branch moves on."""
    commit = put(hub, checkpoints.DATA / SHARDED)
    work = tmp_path / "work"
    assert run("convert", f"{REPO}@main", work / "out", "-q", "--shard", "1/2").code == 0
    assert run("convert", f"{REPO}@{commit}", work / "out", "-q", "--shard", "2/2", "--keep-source").code == 0
    put(hub, checkpoints.DATA / QWEN)
    assert run("finish", work / "out", "-q").code == 0
    assert run("convert", checkpoints.DATA / SHARDED, work / "near", "-q").code == 0
    same_but_for_the_source(work / "out", work / "near")
    nothing_left(work, "out", "near")


def test_a_share_fetches_its_part(hub: Hub, small: None, tmp_path: Path) -> None:
    """Of two shares each fetches about half the bytes; the shard in which they meet, both."""
    put(hub, checkpoints.DATA / SHARDED)
    sizes = peek_checkpoint(REPO).source.shards
    fetched = []
    for share in ("1/2", "2/2"):
        hub.ranges.clear()
        assert run("convert", REPO, tmp_path / "out", "-q", "--shard", share).code == 0
        fetched.append({file for file in sizes if any(length == 50_000 for _, length in hub.ranges[file])})
    assert fetched[0] | fetched[1] == set(sizes)
    assert len(fetched[0] & fetched[1]) <= 1


# --- a Hub that fails ---------------------------------------------------------------------------------------------


def shard_names() -> list[str]:
    return sorted(path.name for path in (checkpoints.DATA / SHARDED).glob("*.safetensors"))


@pytest.fixture
def at_the_second_piece(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, list[str]]], None]:
    """Puts faults in the way of shards once their items are run, not while the plan is made."""

    def later(faults: Mapping[str, list[str]]) -> None:
        real = spool.Spool._begin

        def begin(self: spool.Spool, file: str, size: int) -> None:
            hub.faults[file].extend(faults.get(file, ()))
            real(self, file, size)

        monkeypatch.setattr(spool.Spool, "_begin", begin)

    return later


@pytest.mark.parametrize("faults", [["drop"], ["truncate"], ["503", "500"], ["429 after 0", "drop", "429"]])
def test_faults_that_pass(
    faults: list[str],
    hub: Hub,
    small: None,
    at_the_second_piece: Callable[[Mapping[str, list[str]]], None],
    tmp_path: Path,
) -> None:
    put(hub, checkpoints.DATA / SHARDED)
    at_the_second_piece(dict.fromkeys(shard_names(), faults))
    assert run("convert", REPO, tmp_path / "far", "-q").code == 0
    assert run("convert", checkpoints.DATA / SHARDED, tmp_path / "near", "-q").code == 0
    same_but_for_the_source(tmp_path / "far", tmp_path / "near")
    assert not any(hub.faults[name] for name in shard_names())


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["drop"] * 40, "the Hub can't give bytes"),
        (["503"] * 40, "asked 5 times"),
        (["other range"], "the server sends bytes"),
        (["whole"], "gives whole files only"),
        (["other size"], "changed on the Hub: it had"),
        (["etag"], "changed on the Hub: its ETag was"),
        (["more"], "the Hub sends more"),
        (["404"], "the Hub refuses it"),
    ],
)
@pytest.mark.parametrize("position", [0, 4])
def test_faults_that_stop_the_run(
    faults: list[str],
    message: str,
    position: int,
    hub: Hub,
    small: None,
    at_the_second_piece: Callable[[Mapping[str, list[str]]], None],
    tmp_path: Path,
) -> None:
    """The first shard or a later one; nothing is left of a run so short."""
    put(hub, checkpoints.DATA / SHARDED)
    name = shard_names()[position]
    at_the_second_piece({name: faults})
    (tmp_path / "work").mkdir()
    result = run("convert", REPO, tmp_path / "work" / "out", "-q")
    assert result.code == 4 and name in result.stderr and message in result.stderr, result.stderr
    nothing_left(tmp_path / "work")


def test_an_etag_that_changes_after_the_last_item(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, checkpoints.DATA / SHARDED)
    real = RemoteSource.verify_unchanged

    def verify(self: RemoteSource) -> None:
        hub.faults[shard_names()[2]].append("etag")
        real(self)

    monkeypatch.setattr(RemoteSource, "verify_unchanged", verify)
    result = run("convert", REPO, tmp_path / "out", "-q")
    assert result.code == 4 and f"{shard_names()[2]}: changed on the Hub" in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_disk_too_small(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output fits, and what is converted does not beside it."""
    put(hub, checkpoints.DATA / SHARDED)
    needed = run("convert", REPO, tmp_path / "out", "--dry-run", "--json").json["disk_needed"]
    sizes = [path.stat().st_size for path in (checkpoints.DATA / SHARDED).glob("*.safetensors")]
    (tmp_path / "work").mkdir()
    for free, code in ((needed + max(sizes), 4), (needed + 3 * max(sizes), 0)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        result = run("convert", REPO, tmp_path / "work" / "out", "-q")
        assert result.code == code, result.stderr
        if code:
            assert "of them for shards until they are converted" in result.stderr
            nothing_left(tmp_path / "work")


def test_a_disk_that_is_full(hub: Hub, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, checkpoints.DATA / SHARDED)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    real = spool.writer_to

    def writer_to(descriptor: int, file: str, folder: Path) -> Callable[[int, bytes], None]:
        take = real(descriptor, file, folder)

        def failing(position: int, data: bytes) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(os, "pwrite", full)
                take(position, data)

        return failing if file == shard_names()[1] else take

    monkeypatch.setattr(spool, "writer_to", writer_to)
    result = run("convert", REPO, tmp_path / "out", "-q", "--no-smoke")
    assert result.code == 4 and "No space left on device; free space and run again" in result.stderr


def test_without_a_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete snapshot in the cache is converted; else the message says what to do."""
    put(hub, checkpoints.DATA / SHARDED)
    with monkeypatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        result = run("convert", REPO, tmp_path / "out", "-q")
        assert result.code == 4 and "fetch it first with `hf download`" in result.stderr
    read_checkpoint(REPO)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert run("convert", REPO, tmp_path / "out", "-q").code == 0
    assert run("convert", checkpoints.DATA / SHARDED, tmp_path / "near", "-q").code == 0
    same_but_for_the_source(tmp_path / "out", tmp_path / "near")


def test_offline(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    """HF_HUB_OFFLINE: nothing is asked, and the same holds."""
    put(hub, checkpoints.DATA / SHARDED)
    command = [sys.executable, "-m", "nvfp4prep", "convert", REPO, str(tmp_path / "out"), "-q", "--no-smoke"]
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=offline, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 4 and "fetch it first with `hf download`" in result.stderr
    read_checkpoint(REPO)
    hub.requests.clear()
    result = subprocess.run(command, env=offline, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert not hub.requests
    assert run("convert", checkpoints.DATA / SHARDED, tmp_path / "near", "-q").code == 0
    same_but_for_the_source(tmp_path / "out", tmp_path / "near")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "GatedRepo", "Access to model org/name is restricted"), "Cannot access gated repo for url"),
        ((401, "RepoNotFound", "Repository not found"), "make sure you are authenticated"),
    ],
)
def test_a_repo_that_may_not_be_read(refusal: tuple[int, str, str], words: str, hub: Hub, tmp_path: Path) -> None:
    put(hub, checkpoints.DATA / SHARDED)
    hub.repos[REPO].refusal = refusal
    result = run("convert", REPO, tmp_path / "out", "-q")
    assert result.code == 4 and words in result.stderr and "org/name: no such directory here" in result.stderr


def test_a_listing_that_fails(hub: Hub, tmp_path: Path) -> None:
    put(hub, checkpoints.DATA / SHARDED)
    hub.faults[LISTING].extend(["503"] * 5)
    assert run("convert", REPO, tmp_path / "out", "-q").code == 4


# --- killed -------------------------------------------------------------------------------------------------------

SLOW = """
    import os, sys, time
    from nvfp4prep import execute, remote, spool
    execute.COMMIT_SECONDS = 0.0
    spool.PIECE_BYTES = 50_000
    real = execute._run_item
    def slow(*arguments):
        time.sleep(0.02)
        return real(*arguments)
    execute._run_item = slow
    from nvfp4prep.cli import main
    main(sys.argv[1:])
"""


@pytest.fixture
def start(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command whose every item takes a while, and that journals each when it is finished."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(SLOW), *map(str, arguments)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("options", [(), ("--target", "flashinfer-trtllm", "--tp", "2")])
def test_killed_and_gone_on_with(
    options: tuple[str, ...],
    hub: Hub,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of the spool is left, and only shards that unfinished items read are fetched again."""
    put(hub, checkpoints.DATA / SHARDED)
    work = tmp_path / "work"
    work.mkdir()
    arguments = ("convert", REPO, work / "out", "--no-smoke", "-q", "--workers", "2", *options)
    done = 0
    for more in (4, 12):
        process = start(*arguments)
        wait_for(process, lambda: len(journal(work / "out")) >= done + more)  # noqa: B023
        process.send_signal(signal.SIGKILL)
        process.communicate()
        done = len(journal(work / "out"))
        nothing_left(work, "out.partial", ".out.partial.nvfp4prep")
        assert not LOADABLE & {path.name for path in (work / "out.partial").rglob("*")}

    wanted: set[str] = set()
    real = plan.shards_read

    def shards_read(item: plan.Item) -> frozenset[str]:
        wanted.update(real(item))
        return real(item)

    monkeypatch.setattr(execute, "shards_read", shards_read)
    monkeypatch.setattr(remote, "HEADER_BYTES", 1000)
    labels = counted(monkeypatch)
    hub.ranges.clear()
    assert run(*arguments).code == 0
    fetched = {name for name in shard_names() if any(length > 50_000 for _, length in hub.ranges[name])}
    assert fetched == wanted < set(shard_names())
    resumed = len(labels)
    labels.clear()
    assert run("convert", checkpoints.DATA / SHARDED, work / "near", "--no-smoke", "-q", *options).code == 0
    same_but_for_the_source(work / "out", work / "near")
    assert resumed <= len(labels) - done
    nothing_left(work, "out", "near")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ended_while_a_shard_is_on_its_way(
    name: str, hub: Hub, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    """Workers that wait for it, and attempts that wait to be made, end at once."""
    put(hub, checkpoints.DATA / SHARDED)
    work = tmp_path / "work"
    work.mkdir()
    hub.faults[shard_names()[5]].extend(["spared", *["429 after 100"] * 9])  # the first request is for its header
    process = start("convert", REPO, work / "out", "--no-smoke", "-q", "--workers", "2")
    wait_for(process, lambda: len(hub.faults[shard_names()[5]]) < 9)
    time.sleep(0.5)
    begun = time.monotonic()
    process.send_signal(getattr(signal, name))
    _, stderr = process.communicate(timeout=20)
    assert time.monotonic() - begun < 5
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}[name], stderr
    assert "Traceback" not in stderr
    left = {path.name for path in work.iterdir()}
    assert left <= {"out.partial", ".out.partial.nvfp4prep"}


def test_gone_on_with_from_the_cache(
    hub: Hub, start: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit says what the bytes are, wherever they are read."""
    commit = put(hub, checkpoints.DATA / SHARDED)
    out = tmp_path / "out"
    process = start("convert", REPO, out, "--no-smoke", "-q")
    wait_for(process, lambda: len(journal(out)) >= 5)
    process.kill()
    process.communicate()
    done = len(journal(out))
    labels = counted(monkeypatch)
    assert run("convert", f"{REPO}@{commit}", out, "--no-smoke", "-q", "--keep-source").code == 0
    resumed = len(labels)
    labels.clear()
    assert run("convert", checkpoints.DATA / SHARDED, tmp_path / "near", "--no-smoke", "-q").code == 0
    assert resumed == len(labels) - done
    same_but_for_the_source(out, tmp_path / "near")


def test_another_commit_starts_anew(
    hub: Hub, start: Callable[..., subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(hub, checkpoints.DATA / SHARDED)
    out = tmp_path / "out"
    process = start("convert", REPO, out, "--no-smoke", "-q")
    wait_for(process, lambda: len(journal(out)) >= 5)
    process.kill()
    process.communicate()
    shutil.copytree(checkpoints.DATA / SHARDED, tmp_path / "repo")
    put(hub, tmp_path / "repo")
    labels = counted(monkeypatch)
    assert run("convert", REPO, out, "--no-smoke", "-q").code == 0
    resumed = len(labels)
    labels.clear()
    assert run("convert", tmp_path / "repo", tmp_path / "near", "--no-smoke", "-q").code == 0
    assert resumed == len(labels)


# --- the spool ----------------------------------------------------------------------------------------------------


class Elsewhere:
    """Shards of a byte repeated; fetching takes no time, but may be held up."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.fetched: list[str] = []
        self.may = threading.Event()
        self.may.set()

    def __call__(
        self, file: str, start: int, length: int, take: Callable[[int, bytes], None], stop: threading.Event
    ) -> None:
        self.fetched.append(file)
        while not self.may.wait(0.01):
            if stop.is_set():
                raise Stopped
        take(start, file[-1:].encode() * length)


def no_file(file: str) -> int:
    raise EnvironmentFault(f"{file}: no")


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("seed", range(6))
def test_no_order_of_needs_ends_in_a_deadlock(seed: int, workers: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    sizes = {f"shard {letter}": chance.randint(1, 5000) for letter in "abcdefghij"}
    needs = {number: chance.sample(sorted(sizes), chance.choice([0, 1, 1, 1, 2, 3])) for number in range(60)}
    fetch, stop = Elsewhere(sizes), threading.Event()
    held = spool.Spool(needs, sizes, no_file, fetch, tmp_path, stop)

    def item(number: int) -> None:
        for file in chance.sample(needs[number], len(needs[number])):
            assert os.pread(held[file], 9999, 0) == file[-1:].encode() * sizes[file]
        assert held._held <= held._limit <= sum(sizes.values())
        held.done(number)

    with ThreadPoolExecutor(workers) as pool:
        for future in [pool.submit(item, number) for number in held.order]:
            future.result(timeout=30)
    assert sorted(fetch.fetched) == sorted({file for files in needs.values() for file in files})
    assert not held._descriptors and not held._held
    held.close()
    nothing_left(tmp_path)


def test_items_that_do_not_read_what_they_might(tmp_path: Path) -> None:
    """A shard that comes too late is dropped, and one that nobody needs any longer is not fetched at all."""
    sizes = dict.fromkeys("abc", 10)
    fetch, stop = Elsewhere(sizes), threading.Event()
    fetch.may.clear()
    held = spool.Spool({0: "a", 1: "b", 2: "c"}, sizes, no_file, fetch, tmp_path, stop)
    wait = time.monotonic() + 10
    while len(fetch.fetched) < 2 and time.monotonic() < wait:
        time.sleep(0.01)
    for number in (0, 2):
        held.done(number)
    fetch.may.set()
    assert os.pread(held["b"], 99, 0) == b"b" * 10
    with pytest.raises(ValueError, match="not known to need it"):
        held["a"]
    held.done(1)
    while held._descriptors and time.monotonic() < wait:  # a's own fetch has to come to its end
        time.sleep(0.01)
    assert sorted(fetch.fetched) == ["a", "b"] and not held._descriptors and not held._held
    held.close()


def test_whoever_waits_is_told_of_the_end(tmp_path: Path) -> None:
    sizes = dict.fromkeys("ab", 10)
    fetch, stop = Elsewhere(sizes), threading.Event()
    fetch.may.clear()
    held = spool.Spool({0: "a"}, sizes, no_file, fetch, tmp_path, stop)
    threading.Timer(0.1, stop.set).start()
    with pytest.raises(Stopped):
        held["a"]
    held.close()
    held = spool.Spool({0: "x", 1: "a"}, sizes, no_file, Elsewhere(sizes), tmp_path, threading.Event())
    for file in ("a", "x"):
        with pytest.raises(EnvironmentFault, match="x: no"):
            held[file]
    held.close()
    with pytest.raises(EnvironmentFault, match="no file can be made there"):
        spool.unnamed_file(tmp_path / "gone")


def test_which_shards_items_read(tmp_path: Path) -> None:
    """Just those: what is read through a context that notes it, for every kind of step."""
    for name, options in (
        (SHARDED, ("hf",)),
        (SHARDED, ("vllm-marlin",)),
        ("qwen3moe-int4awq", ("compressed-tensors",)),
        ("gptoss-nvfp4", ("flashinfer-trtllm",)),
        (QWEN, ("compressed-tensors",)),
    ):
        prepared = convert.prepare(str(checkpoints.DATA / name), Options(options[0], pre_quant_scale="fold"))
        read: dict[str, set[str]] = {}
        real, own = execute.Context.read, execute.Context.read_own
        labels: list[str] = []
        real_item = execute._run_item

        def noting(real, labels=labels, read=read):  # type: ignore[no-untyped-def]
            def noted(context, tensor, *rest):  # type: ignore[no-untyped-def]
                read.setdefault(labels[-1], set()).add(tensor.file)
                return real(context, tensor, *rest)

            return noted

        def item(context, one, real_item=real_item, labels=labels):  # type: ignore[no-untyped-def]
            labels.append(one.label)
            real_item(context, one)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(execute.Context, "read", noting(real))
            patched.setattr(execute.Context, "read_own", noting(own))
            patched.setattr(execute, "_run_item", item)
            out = tmp_path / f"{name} {options[0]}"
            convert.write(prepared, out, overwrite=False, workers=1, progress=lambda _: None)
        known = {one.label: plan.shards_read(one) for one in prepared.plan.items}
        assert {label: set(files) for label, files in known.items() if files} == read
