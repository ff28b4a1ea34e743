"""What the check can't judge: `smoke` refuses it, `convert` says that the check was not run; neither breaks."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import Damage, Editable, damaged
from runner import run

from nvfp4prep.unpack import read_packed_output

QWEN, DSV3, INT4, W4A8 = "qwen3moe-nvfp4-perexpert", "dsv3-nvfp4", "tinymoe-int4awq", "tinymoe-w4a8awq"
MARLIN = ("--target", "vllm-marlin", "--pre-quant-scale", "fold")

Fetch = Callable[[str], Path]


def with_config(**keys: Any) -> Damage:
    return lambda ck: ck.config.update(keys)


def cast(name: str, dtype: torch.dtype) -> Damage:
    def change(ck: Editable) -> None:
        for full in ck.names(rf".*layers\.\d+\.\w+\.{name}"):
            ck.tensors[full] = torch.ones(ck.tensors[full].shape, dtype=dtype)

    return change


def wider_router(ck: Editable) -> None:
    for name in ck.names(r".*\.gate\.weight"):
        weight = ck.tensors[name]
        ck.tensors[name] = torch.zeros(weight.shape[0], weight.shape[1] * 2, dtype=weight.dtype)


UNJUDGED = {
    "top_k above experts": (QWEN, with_config(num_experts_per_tok=99), "num_experts_per_tok 99 of "),
    "top_k 0": (QWEN, with_config(num_experts_per_tok=0), "num_experts_per_tok 0"),
    "top_k text": (QWEN, with_config(num_experts_per_tok="a"), "num_experts_per_tok 'a'"),
    "U8 router": (QWEN, cast(r"gate\.weight", torch.uint8), "gate.weight: a router stored as U8"),
    "I64 bias": (DSV3, cast(r"gate\.e_score_correction_bias", torch.int64), "a router stored as I64"),
    "other hidden": (QWEN, wider_router, "the router reads "),
    "no groups": (DSV3, with_config(n_group=5, topk_group=2), "experts in 5 groups"),
}


@pytest.mark.parametrize("case", UNJUDGED)
def test_routing_that_can_not_be_judged(case: str, checkpoint: Fetch, tmp_path: Path) -> None:
    name, damage, says = UNJUDGED[case]
    source, out = damaged(checkpoint(name), tmp_path / "source", damage), tmp_path / "out"
    done = run("convert", source, out, "--json", *MARLIN)
    assert done.code == 0, done.stderr
    (report,) = done.json["smoke"]
    assert not report["checked"] and says in report["because"]
    for checked in (("smoke", out), ("smoke", source, "--target", "vllm-marlin")):
        refused = run(*checked, "--tokens", "3", "--json", "-")
        assert refused.code == 3
        (finding,) = refused.findings
        assert finding["rule"] == "smoke-refused" and says in finding["message"]


def test_the_message_says_which_layer(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damaged(checkpoint(QWEN), tmp_path / "source", cast(r"gate\.weight", torch.uint8))
    (finding,) = run("smoke", source, "--layers", "1", "--json", "-").findings
    assert finding["layer"] == 1
    assert "model.layers.1.mlp: model.safetensors: model.layers.1.mlp.gate.weight" in finding["message"]


def test_other_layers_can_still_be_checked(checkpoint: Fetch, tmp_path: Path) -> None:
    def first_router(ck: Editable) -> None:
        name = "model.layers.0.mlp.gate.weight"
        ck.tensors[name] = ck.tensors[name].to(torch.int32)

    source = damaged(checkpoint(QWEN), tmp_path / "source", first_router)
    assert run("smoke", source, "--layers", "1", "--tokens", "3").code == 0
    assert run("smoke", source, "--layers", "0", "--tokens", "3").code == 3


# --- sources ----------------------------------------------------------------------------------------------------------


def packed(source: Path, out: Path, *options: object) -> Path:
    done = run("convert", source, out, "--no-smoke", "-q", *options)
    assert done.code == 0, done.stderr
    return out


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
def test_damaged_input_scales_fail_the_check(value: float, checkpoint: Fetch, tmp_path: Path) -> None:
    """No hidden states can be made for them; what differs is told all the same."""
    out = packed(checkpoint(QWEN), tmp_path / "out", "--target", "vllm-cutlass")
    for info in read_packed_output(out).source.tensors.values():
        if info.name.endswith("nvfp4prep.up_input_scale") or info.name.endswith("nvfp4prep.gate_input_scale"):
            with (out / info.file).open("r+b") as file:
                file.seek(info.start)
                file.write(struct.pack("<f", value) * info.shape[0])
    done = run("smoke", out, "--tokens", "3", "--json", "-")
    assert done.code == 1, done.stderr
    assert done.json["byte_problems"] and not done.json["passed"]
    assert any("no hidden states can be made" in problem for problem in done.json["byte_problems"])


@pytest.mark.parametrize(
    ("name", "other", "options", "rule", "says"),
    [
        ("qwen3moe-int4awq", W4A8, MARLIN, "reference-layer", "model.layers.2.mlp of the source"),
        (INT4, "qwen3moe-int4awq", MARLIN, "reference-layer", "has no int4 experts under model.layers.2.mlp"),
        (QWEN, "qwen3moe-nvfp4-i96", MARLIN, "reference-shape", "intermediate 96"),
        (QWEN, "qwen3moe-int4awq", MARLIN, "reference-layer", "has no NVFP4 experts under"),
        (QWEN, "qwen3-dense-nvfp4", MARLIN, "reference-layer", "has no NVFP4 experts under"),
    ],
)
def test_another_models_source_is_refused(
    name: str, other: str, options: tuple[str, ...], rule: str, says: str, checkpoint: Fetch, tmp_path: Path
) -> None:
    out = packed(checkpoint(name), tmp_path / "out", *options)
    refused = run("smoke", out, "--source", checkpoint(other), "--tokens", "3", "--json", "-")
    assert refused.code == 3
    assert refused.findings[0]["rule"] == rule
    assert says in refused.findings[0]["message"]


@pytest.mark.parametrize("options", [5, {"input_scale": "x"}, {"w13_scale": ["auto"]}, {"impute": None}])
def test_a_manifest_with_other_options_is_refused(options: Any, checkpoint: Fetch, tmp_path: Path) -> None:
    out = packed(checkpoint(QWEN), tmp_path / "out", *MARLIN)
    path = out / "nvfp4prep.json"
    manifest = json.loads(path.read_text())
    manifest["runs"][-1]["options"] = options
    path.write_text(json.dumps(manifest))
    refused = run("smoke", out, "--source", checkpoint(QWEN), "--tokens", "3", "--json", "-")
    assert refused.code == 3
    assert refused.findings[0]["rule"] == "manifest-bad"


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.complex64])
@pytest.mark.parametrize("prefix", ["nvfp4prep.", "routed_experts.", "nvfp4prep.x."])
def test_names_of_our_own_in_a_source_are_refused(
    prefix: str, dtype: torch.dtype, checkpoint: Fetch, tmp_path: Path
) -> None:
    name = f"model.layers.1.mlp.experts.{prefix}foo"

    def taken(ck: Editable) -> None:
        ck.tensors[name] = torch.ones(3, dtype=dtype)

    source, out = damaged(checkpoint(QWEN), tmp_path / "source", taken), tmp_path / "out"
    for command in (("convert", source, out, "--json"), ("smoke", source, "--json", "-")):
        refused = run(*command, "--target", "vllm-marlin")
        assert refused.code == 3
        assert [(f["rule"], f["tensor"], f["layer"]) for f in refused.findings] == [("target-refused", name, 1)]
    assert not out.exists()
    assert run("validate", source, "--target", "vllm-marlin", "--level", "headers").code == 1
    assert run("convert", source, out, "-q").code == 0, "hf has no names of its own"
