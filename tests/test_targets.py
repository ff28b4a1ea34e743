"""What targets take of config.json, and scales, biases and block scales that a kernel could not compute with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pack_checks as packs
import pytest
import torch
from damage import Damage, Editable, damaged
from runner import run

from nvfp4prep import checks
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.layouts.logical import LayoutError
from nvfp4prep.targets import activation_of

Checkpoint = Callable[[str], Path]
QWEN = "qwen3moe-nvfp4-perexpert"
WEIGHT = r".*\.layers\.1\.mlp\.experts\.\d+\.\w+\.weight_scale_2"
INPUT = r".*\.layers\.1\.mlp\.experts\.\d+\.\w+\.input_scale"


# --- the activation ---

BAD_LIMITS = ("abc", [7.0], {}, 10**400, 1e300, 3.5e38, float("nan"), float("inf"), -1, 0, 1e-50, True, False)


@pytest.mark.parametrize("limit", BAD_LIMITS, ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_limits_that_no_kernel_can_clamp_with(limit: object, model: str) -> None:
    with pytest.raises(LayoutError, match="swiglu_limit") as caught:
        activation_of({"model_type": model, "hidden_act": "silu", "swiglu_limit": limit}, gated=True)
    assert len(str(caught.value)) < 200


def test_limits_that_are_fine() -> None:
    for limit in (7, 7.0, 1e30, None):
        assert activation_of({"hidden_act": "silu", "swiglu_limit": limit}, gated=True).limit == limit
    assert activation_of({"model_type": "gpt_oss"}, gated=True).limit == 7.0


@pytest.mark.parametrize("name", [["silu"], {"silu": 1}, 1, True, None, "x" * 10**6], ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("gated", [True, False])
def test_other_activations(name: object, gated: bool) -> None:
    with pytest.raises(LayoutError, match="names the activation") as caught:
        activation_of({"hidden_act": name}, gated)
    assert len(str(caught.value)) < 200


def test_a_bad_limit_is_a_refusal(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = damaged(checkpoint(QWEN), tmp_path / "source", lambda ck: ck.config.update(swiglu_limit="abc"))
    done = run("convert", source, tmp_path / "out", "--target", "flashinfer-cutlass", "--json")
    assert done.code == 3 and {finding["rule"] for finding in done.findings} == {"target-refused"}
    assert not (tmp_path / "out").exists()


# --- scalars: every scale is fine alone, and the product is not ---


def refusal(source: Path, target: str, **options: Any) -> tuple[Finding, ...]:
    with pytest.raises(InputRefused) as caught:
        packs.decide(source, target, **options)
    return caught.value.findings


@pytest.mark.parametrize("target", [name for name in packs.LAYOUTS if name != "vllm-marlin"])
@pytest.mark.parametrize(
    ("weight", "activation", "kind"),
    [(3e38, 10.0, "inf"), (1e-25, 1e-25, "zero"), (1e-20, 1e-20, "subnormal"), (None, 3e38, "subnormal")],
)
def test_scalars_that_overflow_or_vanish(
    target: str,
    weight: float | None,
    activation: float,
    kind: str,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "SCALES", ())  # which refuse a weight_scale_2 above 1 for any target
    put = [damage.put(weight, WEIGHT)] if weight else []
    source = damaged(checkpoint(QWEN), tmp_path / "source", *put, damage.put(activation, INPUT))
    found = refusal(source, target)
    assert {finding.rule for finding in found} == {"kernel-scale-bad"}
    assert {finding.layer for finding in found} == {1}
    alphas = [finding for finding in found if "g2_alphas would be" in finding.message]
    assert (kind == "subnormal" and weight is None) or (alphas and all(kind in f.message for f in alphas))
    assert all(finding.experts in (tuple(range(8)), ()) for finding in found)


def test_the_experts_are_named_over_ranks(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SCALES", ())  # which refuse such a scale for any target
    bad = damage.put(3e38, r".*\.layers\.0\.mlp\.experts\.6\.down_proj\.weight_scale_2")
    hot = damage.put(10.0, r".*\.layers\.0\.mlp\.experts\.\d+\.down_proj\.input_scale")
    source = damaged(checkpoint(QWEN), tmp_path / "source", bad, hot)
    found = refusal(source, "flashinfer-trtllm", tp=2, ep=2)
    assert {(finding.layer, finding.experts) for finding in found} == {(0, (6,))}


@pytest.mark.parametrize(
    ("engine", "dtype", "value"), [("vllm", "fp16", 3e38), ("sglang", "fp16", 513.0), ("vllm", "bf16", 1e5)]
)
def test_marlin_s_global_scales(
    engine: str,
    dtype: str,
    value: float,
    checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checks, "SCALES", ())  # which refuse such a scale for any target
    within = r".*\.layers\.1\.mlp\.experts\.5\.\w+\.weight_scale_2"
    source = damaged(checkpoint(QWEN), tmp_path / "source", damage.put(value, within))
    (found,) = refusal(source, "vllm-marlin", engine=engine, activation_dtype=dtype)
    assert (found.rule, found.layer, found.experts) == ("kernel-scale-bad", 1, (5,))
    assert "overflows" in found.message


# --- Marlin's block scales ---


def codes(*values: int) -> Damage:
    def change(ck: Editable) -> None:
        scale = ck.tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale"].view(torch.uint8)
        scale.view(-1)[: len(values)] = torch.tensor(values, dtype=torch.uint8)

    return change


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0x80, 0xB8), "2 negative block scales"),
        ((0x7F,), "1 NaN block scales"),
        ((0xFF, 0x81), "1 negative and 1 NaN block"),
    ],
)
@pytest.mark.parametrize("engine", packs.ENGINES)
def test_marlin_refuses_negative_and_nan_block_scales(
    values: tuple[int, ...], words: str, engine: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source = damaged(checkpoint(QWEN), tmp_path / "source", codes(*values))
    (found,) = refusal(source, "vllm-marlin", engine=engine)
    assert (found.rule, found.layer, found.experts) == ("block-scale-bad", 1, (3,)) and words in found.message
    with pytest.raises(InputRefused) as stop:  # others could hold them, but no kernel reads them right
        packs.pack(source, tmp_path / "packed", "flashinfer-trtllm")
    assert {found.rule for found in stop.value.findings} <= {"block-scale-nan", "block-scale-negative"}


# --- biases ---


@pytest.mark.parametrize(("tp", "ep", "engine"), [(1, 1, "vllm"), (2, 2, "vllm"), (2, 1, "sglang")])
def test_biases_in_f32_come_back(tp: int, ep: int, engine: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    def random_biases(ck: Editable) -> None:
        generator = torch.Generator().manual_seed(1)
        for name in ck.names(r".*experts.*bias"):
            ck.tensors[name] = torch.randn(ck.tensors[name].shape, generator=generator)

    source = damaged(checkpoint("gptoss-nvfp4"), tmp_path / "source", random_biases)
    packed = packs.pack(source, tmp_path / "packed", "flashinfer-trtllm", tp=tp, ep=ep, engine=engine)
    same = packs.pack(source, tmp_path / "hf", "hf")
    assert packs.differences(packs.contents(packs.unpacked(packed, tmp_path / "back")), packs.contents(same)) == []


def test_biases_in_bf16_are_not_kept_twice(checkpoint: Checkpoint, tmp_path: Path) -> None:
    names = packs.decide(checkpoint("gptoss-nvfp4"), "flashinfer-trtllm").plan.outputs
    assert not any("bias" in name and ".raw_" in name for name in names)


@pytest.mark.parametrize("value", [3e38, float("inf"), float("nan")])
def test_biases_that_overflow(value: float, checkpoint: Checkpoint, tmp_path: Path) -> None:
    def huge(ck: Editable) -> None:
        for name in ck.names(r".*layers\.1\..*experts.*down_proj_bias"):
            ck.tensors[name] = ck.tensors[name].clone()
            ck.tensors[name][2, 5] = value

    source = damaged(checkpoint("gptoss-nvfp4"), tmp_path / "source", huge)
    (found,) = refusal(source, "flashinfer-trtllm")
    assert (found.rule, found.layer, found.experts) == ("kernel-scale-bad", 1, (2,)) and "biases" in found.message
