"""Outputs uploaded to a Hub on this machine: what arrives, the model card, and what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import checkpoints
import damage
import pytest
import torch
from hub_server import BATCH, CARD, COMMIT, CREATE, PREUPLOAD, UPLOAD, WHOAMI, Hub
from huggingface_hub import constants
from runner import run, snapshot

from nvfp4prep.card import card

REPO = "org/out"
QWEN, SHARDED = "qwen3moe-nvfp4-perexpert", "qwen3moe-nvfp4-sharded"
README = "---\nlicense: mit\nbase_model: org/base\n---\n\n# Its own card\n\nText | with a table.\n"


@pytest.fixture(autouse=True)
def _no_xet(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint with a model card of its own."""
    folder = shutil.copytree(checkpoints.DATA / QWEN, tmp_path / "source")
    (folder / "README.md").write_text(README)
    return folder


def there(hub: Hub, repo: str = REPO, branch: str = "main") -> Path:
    """What a branch of a repo holds."""
    return hub.repos[repo].commits[hub.repos[repo].branches[branch]]


def same_but_for_the_card(hub: Hub, out: Path, **place: str) -> str:
    """All of OUT arrived; the text of the card that came with it."""
    mine, other = snapshot(out), snapshot(there(hub, **place))
    mine.pop("README.md", None)
    assert other.pop("README.md")
    assert mine == other
    return (there(hub, **place) / "README.md").read_text()


def test_convert_and_push(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", source, out, "--push-to", REPO)
    assert result.code == 0 and f"{hub.url}/{REPO}/tree/main" in result.stdout
    text = same_but_for_the_card(hub, out)
    assert text.startswith(README.rstrip()) and "## Converted with nvfp4prep" in text
    assert "| Source | source |" in text and "| Target | `hf` |" in text
    assert (out / "README.md").read_text() == README
    assert not {"visibility", "private"} & hub.created[REPO].keys()
    assert hub.messages == ["nvfp4prep: hf", "nvfp4prep: model card"]
    assert ("localhost", "Bearer hf_secret") not in hub.tokens
    assert run("validate", there(hub), "--level", "full").code == 0


def test_the_card_says_what_was_done(hub: Hub, tmp_path: Path) -> None:
    """Source and revision, target, layout, engine, versions, and what was changed; base_model where the Hub has it."""
    commit = hub.repos["org/name"].push(checkpoints.DATA / "qwen3moe-nvfp4-awqlite")
    out = tmp_path / "out"
    options = ("--target", "vllm-marlin", "--tp", "2", "--pre-quant-scale", "fold")
    result = run("convert", "org/name", out, *options, "--push-to", f"{REPO}@packed", "--private", "--json")
    assert result.code == 0, result.stderr
    commits = hub.repos[REPO].branches
    assert result.json["pushed"] == {
        "repo": REPO,
        "branch": "packed",
        "commit": commits["packed"],
        "url": f"{hub.url}/{REPO}/tree/packed",
    }
    assert not list(there(hub).iterdir())  # main stays as it was made
    assert hub.created[REPO].get("visibility") == "private" or hub.created[REPO].get("private")
    text = same_but_for_the_card(hub, out, branch="packed")
    head, body = text.removeprefix("---\n").split("---\n", 1)
    assert head.splitlines() == [
        "base_model: org/name",
        "base_model_relation: quantized",
        "tags:",
        "- nvfp4prep",
        "- vllm-marlin",
    ]
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    for words in (
        f"| Source | org/name at `{commit}` |",
        "| Target | `vllm-marlin` |",
        f"| Layout | `{manifest['packed']['layout']}`, kernel `moe_wna16_marlin_gemm` |",
        "| Engine | vllm 0.33.0 |",
        "| Ranks | TP 2, EP 1 |",
        f"nvfp4prep {manifest['runs'][-1]['nvfp4prep']}, target vllm-marlin (input_scale layer-max",
        "- input_scale set to one value per layer and GEMM: 4 GEMMs",
        "- pre_quant_scale folded into norms and scales: 2 MoE layers",
        "- rounded, readers: largest relative error 0.00387",
    ):
        assert words in body, words


def test_the_card_says_what_became_of_factors(tmp_path: Path) -> None:
    """Ones are no input scales, and factors of down have counts of their own."""
    lacking = "model.layers.0.mlp.experts.3.down_proj.pre_quant_scale"

    def change(ck: damage.Editable) -> None:
        for name in ck.names(r".*\.experts\.\d+\.down_proj\.weight"):
            ck.tensors[name.replace("weight", "pre_quant_scale")] = torch.full((128,), 0.75, dtype=torch.bfloat16)
        del ck.tensors[lacking]

    source = damage.damaged(checkpoints.DATA / "qwen3moe-nvfp4-awqlite", tmp_path / "source", change)
    told = []
    for number, options in enumerate(((), ("--target", "vllm-cutlass", "--pre-quant-scale", "fold"))):
        out = tmp_path / f"out{number}"
        done = run("convert", source, out, "--no-smoke", "-q", "--impute", "ones", *options)
        assert done.code == 0, done.stderr
        told.append(card(out))
    assert "- pre_quant_scale filled in, ones: 1\n" in told[0] and "input_scale filled in" not in told[0]
    layers = json.loads((tmp_path / "out1" / "nvfp4prep.json").read_text())["runs"][-1]["block_scales_folded"]
    rounded = sum(counts["inexact"] for counts in layers.values())
    assert rounded > 1000
    line = f"- down's pre_quant_scale folded into block scales of 2 MoE layers: {rounded:,} rounded\n"
    assert line in told[1] and "filled in" not in told[1]


def test_several_targets_have_a_section_each(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", source, out, "--target", "hf", "--target", "vllm-cutlass", "-q", "--push-to", REPO)
    assert result.code == 0, result.stderr
    text = same_but_for_the_card(hub, out)
    assert text.startswith(README.rstrip())
    assert text.index("### hf") < text.index("### vllm-cutlass") and text.count("| Source |") == 2
    assert (there(hub) / "hf" / "README.md").read_text() == README


def test_a_section_of_an_earlier_run_is_replaced(source: Path, tmp_path: Path) -> None:
    """A pushed output is converted again: its card has one section, which tells of both runs."""
    out, again = tmp_path / "out", tmp_path / "again"
    assert run("convert", source, out, "-q").code == 0
    (out / "README.md").write_text(card(out) + "\nWritten below.\n")
    assert run("convert", out, again, "-q", "--target", "vllm-cutlass").code == 0
    text = card(again)
    assert text.count("## Converted with nvfp4prep") == 1 and "Written below." in text
    assert "target hf (" in text and "target vllm-cutlass (" in text
    assert text.startswith(README.rstrip())


def test_values_of_a_manifest_stay_text(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", source, out, "-q", "--no-smoke").code == 0
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    manifest["source"]["name"] = "a | b\n<script>`x`"
    manifest["runs"] = [
        7,
        {},
        {"options": 3, "changes": {"recast": [], "imputed": {}, "pairs_unified": "many", "exclude_list": 1}},
    ]
    (out / "nvfp4prep.json").write_text(json.dumps(manifest))
    assert "| Source | a \\| b &lt;script>'x' |" in card(out)


def test_push_again_sends_nothing_twice(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", source, out, "-q").code == 0
    assert run("push", out, REPO).code == 0
    commit = hub.repos[REPO].branches["main"]
    hub.requests.clear()
    result = run("push", out, REPO, "--json")
    assert result.code == 0 and result.json["pushed"]["commit"] == commit
    assert not [path for path in hub.requests if path.startswith(("PUT", "POST /api/models/org/out/commit"))]
    assert run("push", out, f"{REPO}@other", "-q").code == 0
    same_but_for_the_card(hub, out, branch="other")


# --- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "fault", "words"),
    [
        (CREATE, "403", "403 Forbidden"),
        (PREUPLOAD, "403", "403 Forbidden"),
        (BATCH, "403", "403 Forbidden"),
        (UPLOAD, "403", "403 Forbidden"),
        (COMMIT, "413", "413"),
        (COMMIT, "502", "502"),
        (CARD, "400", "Invalid metadata in README.md"),
    ],
)
def test_an_upload_that_fails(place: str, fault: str, words: str, hub: Hub, source: Path, tmp_path: Path) -> None:
    """OUT is complete and stays so; the message says how to go on, and that works."""
    out = tmp_path / "out"
    hub.faults[place].extend([fault] * 5)
    result = run("convert", source, out, "-q", "--push-to", REPO)
    assert result.code == 4 and words in result.stderr
    assert f"{REPO}: {out} was not uploaded" in result.stderr
    assert f"repeat it with: nvfp4prep push {out} {REPO}" in result.stderr
    assert "hf_secret" not in result.stderr and "Traceback" not in result.stderr
    hub.faults.clear()
    assert run("validate", out, "--level", "full").code == 0
    assert run("push", out, REPO, "-q").code == 0
    same_but_for_the_card(hub, out)


@pytest.mark.parametrize("fault", ["503", "429 after 0"])
@pytest.mark.parametrize("place", [CREATE, PREUPLOAD, BATCH, UPLOAD, COMMIT])
def test_faults_that_pass(place: str, fault: str, hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", source, out, "-q", "--no-smoke").code == 0
    hub.faults[place].append(fault)
    assert run("push", out, REPO, "-q").code == 0
    same_but_for_the_card(hub, out)
    assert not hub.faults[place] and len(hub.messages) == 2


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ({"auth": {"accessToken": {"role": "read"}}}, "the token of me may only read"),
        ({"orgs": [{"name": "others", "roleInOrg": "admin"}]}, "the token is me's, who is no member of org"),
        ({"orgs": [{"name": "org", "roleInOrg": "read"}]}, "the token is me's, who may only read in org"),
        ("503", "the Hub was asked whether the token may write there: "),
        ("401", "Invalid user token"),
        (None, "login"),
    ],
)
def test_a_token_that_may_not_write(
    user: Any, words: str, hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before anything is done; a dry run tells it and goes on."""
    if isinstance(user, str):
        hub.faults[WHOAMI].extend([user] * 2)
    elif user is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    else:
        hub.user = {"name": "me", "orgs": [], **user}
    result = run("convert", source, tmp_path / "out", "-q", "--push-to", REPO)
    assert result.code == 4 and words in result.stderr and f"{REPO}: " in result.stderr
    assert not (tmp_path / "out").exists()
    result = run("convert", source, tmp_path / "out", "--push-to", REPO, "--dry-run")
    assert result.code == 0 and "a real run would stop here" in result.stderr and words in result.stderr
    assert f"would then be uploaded to {REPO} with a model card" in result.stdout
    assert not hub.created


@pytest.mark.parametrize(
    "user",
    [
        {"name": "me", "orgs": [{"name": "org", "roleInOrg": "write"}]},
        {"name": "me", "orgs": [{"name": "org"}], "auth": {"accessToken": {"role": "fineGrained"}}},
        {"name": "somebody"},
        {"name": "org", "auth": None},
    ],
)
def test_a_token_that_may(user: dict[str, object], hub: Hub, source: Path, tmp_path: Path) -> None:
    hub.user = user
    result = run("convert", source, tmp_path / "out", "--push-to", REPO, "--dry-run")
    assert result.code == 0 and "would stop" not in result.stderr
    assert "uploaded to" not in run("convert", source, tmp_path / "out", "--dry-run").stdout


def test_shards_of_something_else_are_not_mixed_with(hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    hub.repos[REPO].push(checkpoints.DATA / SHARDED)
    assert run("convert", source, out, "-q", "--no-smoke").code == 0
    result = run("push", out, REPO)
    assert result.code == 2 and "has model-00001-of-00006.safetensors and 5 more, which" in result.stderr
    assert not hub.messages


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("push", "none", REPO), "no such directory; give an output of convert"),
        (("push", "source", REPO), "holds no nvfp4prep.json, so it is no output of convert"),
        (("push", "source", "out"), "not a Hub repo; write org/name or org/name@branch"),
        (("push", "source", "a--b/c"), "a--b/c: "),
        (("push", "source", f"{REPO}@{'0' * 40}"), "a commit can't be pushed to; give a branch"),
        (("convert", "source", "out", "--push-to", "./out"), "not a Hub repo"),
        (("convert", "source", "out", "--push-to", REPO, "--shard", "1/2"), "upload with nvfp4prep push"),
        (("convert", "source", "out", "--private"), "--private is for --push-to"),
    ],
)
def test_what_makes_no_sense(arguments: tuple[str, ...], words: str, hub: Hub, source: Path, tmp_path: Path) -> None:
    result = run(*arguments)
    assert result.code == 2 and words in result.stderr
    assert not hub.requests and not (tmp_path / "out").exists()


@pytest.mark.parametrize("harm", ["gone", "cut", "no outputs"])
def test_what_is_not_complete(harm: str, hub: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("convert", source, out, "-q").code == 0
    shard, manifest = next(out.glob("*.safetensors")), out / "nvfp4prep.json"
    if harm == "gone":
        shard.unlink()
    elif harm == "cut":
        os.truncate(shard, 1000)
    else:
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "outputs": {}}))
    result = run("push", out, REPO)
    assert result.code == 2 and (manifest if harm == "no outputs" else shard).name in result.stderr
    assert REPO not in hub.created


def test_offline(hub: Hub, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("convert", source, tmp_path / "out", "-q", "--no-smoke").code == 0
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = run("push", tmp_path / "out", REPO)
    assert result.code == 4 and "repeat it with" in result.stderr
