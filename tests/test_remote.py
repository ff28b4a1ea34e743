"""A Hub repo read by byte ranges, from a server on this machine that does what the Hub does, and goes wrong."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import checkpoints
import damage
import huggingface_hub
import pytest
import torch
from hub_server import LISTING, Hub
from huggingface_hub import constants
from safetensors.torch import save_file

from nvfp4prep import remote
from nvfp4prep.checkpoint import peek_checkpoint, read_checkpoint
from nvfp4prep.errors import EnvironmentFault, InputRefused
from nvfp4prep.remote import HubFiles, RemoteSource, read_remote_range
from nvfp4prep.schema import Format
from nvfp4prep.source import HubRepo, listed_files, open_source, read_tensor

REPO = "org/name"
NAMES = (*checkpoints.NVFP4, *checkpoints.INT4)
SHARDED = "qwen3moe-nvfp4-sharded"


def put(hub: Hub, name: str) -> str:
    return hub.repos[REPO].push(checkpoints.DATA / name)


def peek() -> RemoteSource:
    source = peek_checkpoint(REPO).source
    assert isinstance(source, RemoteSource)
    return source


# --- the same as the files themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_same_checkpoint_for_a_fraction_of_its_bytes(
    name: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tensors, findings and scale values; and of the shards no byte is sent but headers and spans of scales."""
    monkeypatch.setattr(remote, "HEADER_BYTES", 1000)
    monkeypatch.setattr(remote, "GAP_BYTES", 500)
    commit = put(hub, name)
    far, near = peek_checkpoint(REPO), read_checkpoint(str(checkpoints.DATA / name))
    assert (far.source.spec, far.source.revision) == (REPO, commit)
    assert far.source.tensors == near.source.tensors and list(far.source.tensors) == list(near.source.tensors)
    assert far.source.shards == near.source.shards and far.source.side_files == near.source.side_files
    assert far.source.metadata == near.source.metadata and far.source.side_bytes() == near.source.side_bytes()
    assert (far.findings, far.config, far.weight_only) == (near.findings, near.config, near.weight_only)

    expected = {}
    for shard, size in near.source.shards.items():
        with (checkpoints.DATA / name / shard).open("rb") as file:
            header = 8 + struct.unpack("<Q", file.read(8))[0]
        expected[shard] = {(0, min(1000, size))} | ({(1000, header - 1000)} if header > 1000 else set())
    assert {shard: set(ranges) for shard, ranges in hub.ranges.items()} == expected
    hub.ranges.clear()
    assert far.scale_values == near.scale_values
    asked = [near.source.tensors[scale] for scale in near.scale_values]
    for shard in near.source.shards:
        covered = {at for start, length in hub.ranges[shard] for at in range(start, start + length)}
        wanted = {at for tensor in asked if tensor.file == shard for at in range(tensor.start, tensor.end)}
        assert sum(length for _, length in hub.ranges[shard]) == len(covered)  # nothing twice
        assert wanted <= covered
        edge = [at for at in sorted(covered) if at - 1 not in covered or at + 1 not in covered]
        assert all(at in wanted for at in edge)  # each span begins and ends with a scale
        between = sorted(wanted)
        gaps = sum(b - a - 1 for a, b in pairwise(between) if b - a - 1 <= 500)
        assert len(covered) == len(wanted) + gaps
        assert hub.sent[shard] < near.source.shards[shard] / 4
    cached = tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    assert {path.name for path in cached.iterdir()} == {*near.source.side_files} | (
        {damage.INDEX} if len(near.source.shards) > 1 else set()
    )
    assert ("127.0.0.1", "Bearer hf_secret") in hub.tokens
    assert {token for host, token in hub.tokens if host == "localhost"} == {None}


def test_tensors_and_parts_of_them(hub: Hub) -> None:
    put(hub, SHARDED)
    far, near = peek(), open_source(str(checkpoints.DATA / SHARDED))
    for tensor in list(near.tensors.values())[::40]:
        assert read_tensor(far, tensor) == read_tensor(near, tensor)
        half = tensor.nbytes // 2
        assert read_tensor(far, tensor, half, 1) == read_tensor(near, tensor)[half : half + 1]
        with pytest.raises(ValueError, match=f"{tensor.name}: bytes"):
            read_tensor(far, tensor, 1, tensor.nbytes)
    with pytest.raises(EnvironmentFault, match="not downloaded; fetch org/name"):
        far.open_shard(next(iter(far.shards)))
    far.verify_unchanged()


def test_a_revision_stays_the_one_it_was(hub: Hub, tmp_path: Path) -> None:
    """The branch moves while its files are read."""
    first = put(hub, SHARDED)
    source = peek()
    hub.repos[REPO].push(checkpoints.DATA / "dsv3-nvfp4")
    tensor = next(iter(source.tensors.values()))
    assert read_tensor(source, tensor) == read_tensor(open_source(str(checkpoints.DATA / SHARDED)), tensor)
    asked = [path for path in hub.requests if "/resolve/" in path]
    assert asked and all(f"/resolve/{first}/" in path for path in asked)
    assert peek_checkpoint(f"{REPO}@{first}").source.revision == first
    assert peek().revision == hub.repos[REPO].branches["main"] != first


def test_shards_in_the_cache_are_read_from_there(hub: Hub) -> None:
    commit = put(hub, SHARDED)
    near = open_source(str(checkpoints.DATA / SHARDED))
    here = sorted(near.shards)[1]
    path = huggingface_hub.hf_hub_download(REPO, here, revision=commit)
    before = hub.sent[here]
    far = peek_checkpoint(REPO)
    assert far.source.tensors == near.tensors and set(far.source.states) == {here}
    assert far.scale_values == read_checkpoint(str(checkpoints.DATA / SHARDED)).scale_values
    assert hub.sent[here] == before and all(hub.ranges[shard] for shard in near.shards if shard != here)
    os.close(far.source.open_shard(here))
    os.utime(path, ns=(0, 0))
    with pytest.raises(EnvironmentFault, match=f"{here}: changed since its header was read"):
        read_tensor(far.source, next(tensor for tensor in near.tensors.values() if tensor.file == here))


def test_a_local_folder_is_read_as_ever(hub: Hub) -> None:
    source = peek_checkpoint(str(checkpoints.DATA / SHARDED)).source
    assert not isinstance(source, RemoteSource) and not hub.requests


def test_files_that_are_not_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones and tensors in folders count as side files; git's are no part of the model."""
    folder = tmp_path / "repo"
    shutil.copytree(checkpoints.DATA / "dsv3-nvfp4", folder)
    (folder / "image.bin").write_bytes(bytes(5000))
    (folder / "odd [name]*.txt").write_bytes(b"x")
    (folder / "merges.json").write_bytes(b" " * 6000)
    (folder / "onnx").mkdir()
    save_file({"x": torch.ones(1)}, folder / "onnx" / "x.safetensors")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_bytes(b"x")
    monkeypatch.setattr(remote, "SMALL_FILE_BYTES", 5000)
    hub.repos[REPO].push(folder)
    far, near = peek(), open_source(str(folder))
    assert far.side_files == near.side_files and {"image.bin", "onnx/x.safetensors"} < set(far.side_files)
    assert far.side_bytes() == near.side_bytes()
    fetched = {str(path.relative_to(far.root)) for path in far.root.rglob("*") if path.is_file()}
    assert {*near.side_files} - fetched == {"image.bin", "onnx/x.safetensors"}
    assert hub.sent["image.bin"] == hub.sent["x.safetensors"] == 0


# --- what is wrong with a repo ------------------------------------------------------------------------------------


def test_everything_wrong_with_its_shards_at_once(hub: Hub, tmp_path: Path) -> None:
    """Far away as here: what is missing, what is damaged, and what is there twice."""
    folder = tmp_path / "repo"
    shutil.copytree(checkpoints.DATA / SHARDED, folder)
    one, two, three, four, *_ = sorted(folder.glob("*.safetensors"))
    one.unlink()
    two.write_bytes(two.read_bytes()[:-1])
    three.write_bytes(b"")
    shutil.copy(four, folder / "again.safetensors")
    hub.repos[REPO].push(folder)
    for spec in (str(folder), REPO):
        with pytest.raises(InputRefused) as caught:
            peek_checkpoint(spec)
        found = {(finding.rule, finding.file) for finding in caught.value.findings}
        assert found == {
            ("shard-missing", one.name),
            ("bad-shard", two.name),
            ("bad-shard", three.name),
            ("tensor-in-two-shards", four.name),
        }


def _without_shards(folder: Path) -> None:
    for path in (*folder.glob("*.safetensors"), folder / damage.INDEX):
        path.unlink()


REFUSED = {
    "no-weights": _without_shards,
    "no-config": lambda folder: (folder / "config.json").unlink(),
    "bad-json": lambda folder: (folder / "config.json").write_text("{"),
    "already-packed": lambda folder: damage.write_json(
        folder / "config.json", {"quantization_config": {"quant_method": "nvfp4prep"}}
    ),
    "unfinished-output": lambda folder: (folder / ".nvfp4prep-partial").touch(),
    "bad-index": lambda folder: damage.write_json(folder / damage.INDEX, {"weight_map": 3}),
    "not-a-file": lambda folder: save_file({"x": torch.ones(1)}, _folder(folder / "a.safetensors") / "x.safetensors"),
}


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("rule", REFUSED)
def test_what_is_refused_here_is_refused_there(rule: str, hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    shutil.copytree(checkpoints.DATA / SHARDED, folder)
    REFUSED[rule](folder)
    hub.repos[REPO].push(folder)
    for spec in (str(folder), REPO):
        with pytest.raises(InputRefused) as caught:
            peek_checkpoint(spec)
        assert [finding.rule for finding in caught.value.findings] == [rule]


@pytest.mark.parametrize("path", ["../x", "/x", "a/../x", "./x", "a//x", "a/", ""])
def test_paths_that_lead_out_of_a_repo(path: str) -> None:
    with pytest.raises(EnvironmentFault, match="which is no path inside a repo"):
        listed_files(["config.json", path])


def test_a_config_too_large_to_fetch(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    put(hub, SHARDED)
    monkeypatch.setattr(remote, "MAX_LARGE_JSON_BYTES", 100)
    with pytest.raises(InputRefused, match=r"bytes, over the limit of 100") as caught:
        peek()
    assert caught.value.findings[0].rule == "bad-json" and not hub.sent


# --- a Hub that fails ---------------------------------------------------------------------------------------------


@pytest.fixture
def files(hub: Hub) -> HubFiles:
    """The one shard of a repo, whose ETag was seen."""
    commit = put(hub, "dsv3-nvfp4")
    path = checkpoints.DATA / "dsv3-nvfp4" / "model.safetensors"
    files = HubFiles(HubRepo(REPO, None), commit, {path.name: path.stat().st_size})
    assert read_remote_range(files, path.name, 0, 8) == path.read_bytes()[:8]
    hub.ranges.clear()
    return files


@pytest.mark.parametrize(
    ("faults", "waits"),
    [
        ([], []),
        (["drop"], [1]),
        (["truncate"], [1]),
        (["503", "drop", "500", "truncate"], [1, 2, 4, 8]),
        (["408", "504"], [1, 2]),
        (["429 after 3"], [3]),
        (["429", "429 after 0", "429 window"], [1, 2, 7]),
        (["429 after Wed, 21 Oct 2015 07:28:00 GMT"], [1]),
        (["slow"], [1]),
    ],
)
def test_faults_that_pass(
    faults: list[str], waits: list[float], hub: Hub, files: HubFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "WAITS", (1, 2, 4, 8))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.faults["model.safetensors"].extend(faults)
    waited: list[float] = []
    raw = read_remote_range(files, "model.safetensors", 100, 400_000, waited.append)
    assert raw == (checkpoints.DATA / "dsv3-nvfp4" / "model.safetensors").read_bytes()[100:400_100]
    [(start, length)] = hub.ranges["model.safetensors"]
    assert waited == waits and start + length == 400_100
    assert start > 100 if {"drop", "truncate"} & set(faults) else start == 100  # what came is not asked for again


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["drop"] * 5, " to 10100, asked 5 times ("),
        (["truncate"] * 5, "asked 5 times (only 312 of 625 bytes came)"),
        (["503"] * 5, "503"),
        (["429 after 900"], "the Hub asks to wait 900 s ("),
        (["401"], "the Hub refuses it ("),
        (["403"], "the Hub refuses it (403 Forbidden: trouble here."),
        (["404"], "the Hub refuses it ("),
        (["416"], "the Hub refuses it ("),
        (["204"], "gives whole files only (status 204"),
        (["whole"], "gives whole files only (status 200"),
        (["other range"], "asked for bytes 100-10099, the server sends bytes 101-10100/"),
        (["no range"], "the server sends no Content-Range"),
        (["other size"], "changed on the Hub: it had "),
        (["etag"], "changed on the Hub: its ETag was "),
        (["more"], "asked for 10000 bytes, the Hub sends more"),
        (["drop", "etag"], "changed on the Hub: its ETag was "),
    ],
)
def test_faults_that_stop_the_run(faults: list[str], message: str, hub: Hub, files: HubFiles) -> None:
    hub.faults["model.safetensors"].extend(faults)
    with pytest.raises(EnvironmentFault) as caught:
        read_remote_range(files, "model.safetensors", 100, 10_000)
    text = str(caught.value)
    assert text.startswith("model.safetensors: ") and message in text and "\n" not in text
    assert "hf_secret" not in text
    assert not hub.faults["model.safetensors"]


def test_a_server_that_ignores_ranges(hub: Hub, tmp_path: Path) -> None:
    """Nobody waits for the whole shard."""
    size = 1 << 26
    (tmp_path / "big").mkdir()
    with (tmp_path / "big" / "model.safetensors").open("wb") as file:
        file.truncate(size)
    commit = hub.repos[REPO].push(tmp_path / "big")
    hub.faults["model.safetensors"].append("whole")
    files = HubFiles(HubRepo(REPO, None), commit, {"model.safetensors": size})
    with pytest.raises(EnvironmentFault, match="whole files only"):
        read_remote_range(files, "model.safetensors", 0, 8)
    assert hub.sent["model.safetensors"] < size / 2 and sum("elsewhere" in path for path in hub.requests) == 1


@pytest.mark.parametrize("fault", ["drop", "truncate", "503", "429 after 0"])
def test_faults_while_headers_are_read(fault: str, hub: Hub) -> None:
    put(hub, SHARDED)
    near = read_checkpoint(str(checkpoints.DATA / SHARDED))
    for shard in near.source.shards:
        hub.faults[shard].extend([fault, fault])
    far = peek_checkpoint(REPO)
    assert far.source.tensors == near.source.tensors
    for shard in near.source.shards:
        hub.faults[shard].append(fault)
    assert far.scale_values == near.scale_values


def test_a_shard_that_changes_between_header_and_scales(hub: Hub) -> None:
    put(hub, SHARDED)
    far = peek_checkpoint(REPO)
    shard = next(linear.params["weight_scale_2"].file for linear in far.schema.of_format(Format.NVFP4))
    hub.faults[shard].append("etag")
    with pytest.raises(EnvironmentFault, match=f"{shard}: changed on the Hub"):
        _ = far.scale_values


def test_one_failure_stops_the_other_reads(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for attempts that can no longer matter."""
    monkeypatch.setattr(remote, "WAITS", (60, 60))
    put(hub, SHARDED)
    first, *others = sorted(path.name for path in (checkpoints.DATA / SHARDED).glob("*.safetensors"))
    hub.faults[first].append("404")
    for shard in others:
        hub.faults[shard].append("503")
    with pytest.raises(EnvironmentFault, match=f"{first}: the Hub refuses it"):
        peek()


# --- no Hub, or no repo -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((403, "GatedRepo", "Access to model org/name is restricted"), "Cannot access gated repo for url"),
        ((401, "RepoNotFound", "Repository not found"), "make sure you are authenticated"),
        ((403, "", "no"), "locate the file on the Hub"),
    ],
)
def test_a_repo_that_may_not_be_read(refusal: tuple[int, str, str], words: str, hub: Hub) -> None:
    put(hub, SHARDED)
    hub.repos[REPO].refusal = refusal
    with pytest.raises(EnvironmentFault) as caught:
        peek()
    text = str(caught.value)
    assert text.startswith("org/name: no such directory here") and words in text and "\n" not in text


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("org/other", "Repository Not Found"),
        ("org/name@gone", "Revision Not Found"),
        (f"org/name@{'0' * 40}", "Revision Not Found"),
    ],
)
def test_a_repo_that_is_not_there(spec: str, words: str, hub: Hub) -> None:
    put(hub, SHARDED)
    with pytest.raises(EnvironmentFault) as caught:
        peek_checkpoint(spec)
    text = str(caught.value)
    assert text.startswith(f"{spec}: no such directory here") and words in text and "\n" not in text
    assert sum(hub.requests.values()) == 1


def test_names_that_no_repo_has(hub: Hub) -> None:
    for spec in ("a--b/c", "org/name.git", "../org", "name"):
        with pytest.raises(InputRefused) as caught:
            peek_checkpoint(spec)
        assert caught.value.findings[0].rule == "no-such-checkpoint"
    assert not hub.requests


@pytest.mark.parametrize("fault", ["503", "429 after 0", "no json"])
def test_a_listing_that_fails_at_first(fault: str, hub: Hub) -> None:
    put(hub, SHARDED)
    hub.faults[LISTING].extend([fault] * 4)
    assert peek().tensors


@pytest.mark.parametrize(("fault", "words"), [("503", "503"), ("no json", "does not answer as a Hub does")])
def test_a_listing_that_fails(fault: str, words: str, hub: Hub) -> None:
    put(hub, SHARDED)
    hub.faults[LISTING].extend([fault] * 5)
    with pytest.raises(EnvironmentFault) as caught:
        peek()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_no_server(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentFault, match=r"org/name: no such directory here.*refused"):
        peek()


@pytest.mark.parametrize("failing", ["down", "503"])
def test_a_snapshot_in_the_cache_serves_without_a_hub(failing: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete one; what an earlier look at the headers left there is none."""
    commit = put(hub, SHARDED)
    peek()
    huggingface_hub.hf_hub_download(REPO, "config.json")  # now the branch is known to the cache, too

    def fail(patch: pytest.MonkeyPatch) -> None:
        if failing == "down":
            patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        else:
            hub.faults[LISTING].extend(["503"] * 5)

    with monkeypatch.context() as patch, pytest.raises(EnvironmentFault, match="org/name: no such directory here"):
        fail(patch)
        peek_checkpoint(REPO)
    near = read_checkpoint(REPO)
    fail(monkeypatch)
    source = peek_checkpoint(REPO).source
    assert not isinstance(source, RemoteSource)
    assert (source.revision, source.tensors) == (commit, near.source.tensors)


CHILD = """
import sys
from nvfp4prep.checkpoint import peek_checkpoint, read_checkpoint
from nvfp4prep.errors import Stop
try:
    checkpoint = globals()[sys.argv[1]]("org/name")
    print(type(checkpoint.source).__name__, checkpoint.source.revision, sum(map(sum, checkpoint.scale_values.values())))
except Stop as stop:
    print(type(stop).__name__, stop)
"""


def test_the_variables_of_huggingface_hub(hub: Hub, tmp_path: Path) -> None:
    commit = put(hub, SHARDED)
    values = read_checkpoint(str(checkpoints.DATA / SHARDED)).scale_values

    def child(function: str = "peek_checkpoint", **more: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_other", **more}
        root = str(Path(remote.__file__).parents[1])
        run = subprocess.run(
            [sys.executable, "-c", CHILD, function],
            env=environment | {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    found = f"{commit} {sum(map(sum, values.values()))}"
    assert child() == f"RemoteSource {found}"
    assert (tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / commit / "config.json").is_file()
    assert ("127.0.0.1", "Bearer hf_other") in hub.tokens
    hub.requests.clear()
    assert child(HF_HUB_OFFLINE="1").startswith("EnvironmentFault org/name: no such directory here")
    assert not hub.requests
    assert child("read_checkpoint") == f"Source {found}"
    hub.requests.clear()
    assert child(HF_HUB_OFFLINE="1") == f"Source {found}"
    assert not hub.requests
