"""Every (target, engine, checkpoint, TP, EP): packed and unpacked again it is what `--target hf` writes, or refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import checkpoints
import pack_checks as packs
import pytest
import torch
from damage import damaged, drop, put

from nvfp4prep.checkpoint import Checkpoint, read_checkpoint
from nvfp4prep.errors import InputRefused

SMALL = tuple(name for name in checkpoints.NVFP4 if not name.startswith("tinymoe"))
SIZES = (1, 2, 4)
GRID = tuple((tp, ep) for tp in SIZES for ep in SIZES)


@lru_cache(maxsize=64)
def checkpoint_of(path: Path) -> Checkpoint:
    return read_checkpoint(str(path))


_hf: dict[tuple[Path, tuple[tuple[str, Any], ...]], dict[str, bytes]] = {}


def hf(path: Path, scratch: Path, **options: Any) -> dict[str, bytes]:
    """Contents of `--target hf`, made once."""
    key = path, tuple(sorted(options.items()))
    if key not in _hf:
        out = packs.pack(checkpoint_of(path), scratch / "hf", "hf", **options)
        _hf[key] = packs.contents(out)
        shutil.rmtree(out)
    return _hf[key]


def w13_of(layout: str, name: str) -> str:
    """What --w13-scale auto comes to: two alphas on TRT-LLM only, and there not with gpt-oss's clamp."""
    return "split" if layout == "flashinfer-trtllm" and not name.startswith("gptoss") else "unify"


def expected_refusal(name: str, layout: str, engine: str, tp: int, ep: int) -> str | None:
    """A part of the reason, or None where packing works. From the facts about checkpoints and kernels alone."""
    if (layout, engine) == ("vllm-cutlass", "sglang"):
        return "sglang 0.5.23 has no such NVFP4 experts; use --engine vllm"
    if name == "qwen3-dense-nvfp4":
        return "no MoE layer with NVFP4 experts to pack; use --target hf"
    if name == "qwen3moe-nvfp4-awqlite":
        return "pre_quant_scale (AWQ)"
    if name == "qwen3moe-w4a16nvfp4" and layout != "vllm-marlin":
        return "no input_scale (W4A16); weight-only targets work: vllm-marlin"
    if name == "gptoss-nvfp4" and (layout, engine) == ("flashinfer-cutedsl", "sglang"):
        return "sglang ignores the clamp of swiglu-oai"
    if name == "gptoss-nvfp4" and layout in ("flashinfer-cutedsl", "vllm-cutlass"):
        return "the experts have biases, and this kernel has no place for them"
    if name == "qwen3moe-nvfp4-i96" and tp == 4:
        return "intermediate size 24 per rank cuts NVFP4's groups of 16; --tp 1, 2 works"
    return None


def round_trip(path: Path, scratch: Path, layout: str, **options: Any) -> list[str]:
    """Files in which the unpacked output differs from `hf`."""
    checked = options.pop("w13", None)
    prepared = packs.decide(checkpoint_of(path), layout, **options)
    assert checked is None or prepared.policy.w13_scale == checked
    out, back = scratch / "packed", scratch / "back"
    try:
        result = packs.write(prepared, out)
        assert not result.outcome.flushed
        packs.unpacked(out, back)
        policy = prepared.policy
        expected = hf(path, scratch, w13_scale=policy.w13_scale, input_scale=policy.input_scale, impute=policy.impute)
        return packs.differences(packs.contents(back), expected)
    finally:
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(back, ignore_errors=True)


def every_case() -> Iterator[tuple[str, str, str]]:
    return ((name, layout, engine) for name in SMALL for layout in packs.LAYOUTS for engine in packs.ENGINES)


@pytest.mark.parametrize(("name", "layout", "engine"), list(every_case()))
def test_every_pair(name: str, layout: str, engine: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The whole grid of TP and EP for the small checkpoints."""
    path = checkpoint(name)
    for tp, ep in GRID:
        reason = expected_refusal(name, layout, engine, tp, ep)
        if reason is None:
            different = round_trip(path, tmp_path, layout, engine=engine, tp=tp, ep=ep, w13=w13_of(layout, name))
            assert different == [], (tp, ep)
            continue
        with pytest.raises(InputRefused) as stop:
            packs.decide(checkpoint_of(path), layout, engine=engine, tp=tp, ep=ep)
        assert {finding.rule for finding in stop.value.findings} == {"target-refused"}
        assert all(reason in finding.message for finding in stop.value.findings), stop.value.findings
        assert not list(tmp_path.iterdir()) or {entry.name for entry in tmp_path.iterdir()} <= {"hf"}


def test_the_expectations_are_of_both_kinds() -> None:
    """The grid holds packable and refused pairs; a rule that silently refuses everything would show here."""
    reasons = [
        expected_refusal(name, layout, engine, tp, ep) for name, layout, engine in every_case() for tp, ep in GRID
    ]
    assert (len(reasons), reasons.count(None)) == (len(SMALL) * 10 * 9, 774)


@pytest.mark.parametrize(
    ("layout", "engine", "tp", "ep"),
    [
        ("flashinfer-trtllm", "vllm", 1, 1),
        ("flashinfer-trtllm", "sglang", 4, 2),
        ("flashinfer-cutlass", "vllm", 2, 4),
        ("flashinfer-cutedsl", "sglang", 2, 2),
        ("vllm-cutlass", "vllm", 1, 4),
        ("vllm-marlin", "vllm", 4, 1),
    ],
)
@pytest.mark.parametrize("name", ["tinymoe-nvfp4-fewtokens", "tinymoe-nvfp4-splitscale"])
def test_tinymoe(
    name: str, layout: str, engine: str, tp: int, ep: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Each target once; splitscale's unequal gate/up stay apart on TRT-LLM and are unified elsewhere, as hf does."""
    different = round_trip(checkpoint(name), tmp_path, layout, engine=engine, tp=tp, ep=ep, w13=w13_of(layout, name))
    assert different == []


@pytest.mark.parametrize("layout", packs.LAYOUTS)
def test_imputed_input_scales(layout: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Experts that saw no token, with no input_scale or an unusable one, get the layer's maximum, as with hf."""
    experts = r"model\.layers\.1\.mlp\.experts"
    path = damaged(
        checkpoint("qwen3moe-nvfp4-perexpert"),
        tmp_path / "source",
        drop(rf"{experts}\.(0|5)\.(gate|up|down)_proj\.input_scale"),
        put(0.0, rf"{experts}\.2\.(gate|up|down)_proj\.input_scale"),
        put(float("nan"), rf"{experts}\.7\.down_proj\.input_scale"),
    )
    for target in ("hf", *(() if layout == "vllm-marlin" else (layout,))):  # Marlin has no use for them
        with pytest.raises(InputRefused) as stop:
            packs.decide(checkpoint_of(path), target)
        assert {finding.rule for finding in stop.value.findings} == {"input-scale-missing", "input-scale-bad"}
    for ranks in ({"tp": 2}, {"ep": 4}):
        assert round_trip(path, tmp_path, layout, impute="layer-max", **ranks) == []


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"input_scale": "keep"}, "vllm-cutlass"),
        ({"input_scale": "keep", "tp": 2, "ep": 2}, "vllm-marlin"),
        ({"w13_scale": "unify"}, "flashinfer-trtllm"),
        ({"activation_dtype": "fp16"}, "flashinfer-cutlass"),
        ({"max_shard_bytes": 100_000, "tp": 2}, "flashinfer-trtllm"),
        ({"max_shard_bytes": 100_000}, "vllm-marlin"),
    ],
)
def test_options(options: dict[str, Any], layout: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = checkpoint("qwen3moe-nvfp4-perexpert")
    prepared = packs.decide(checkpoint_of(path), layout, **options)
    out, back = packs.write(prepared, tmp_path / "packed").out, tmp_path / "back"
    packs.unpacked(out, back)
    logical = {"w13_scale": prepared.policy.w13_scale, "input_scale": prepared.policy.input_scale}
    limit = options.get("max_shard_bytes")
    expected = packs.contents(packs.pack(checkpoint_of(path), tmp_path / "hf", "hf", **logical, max_shard_bytes=limit))
    assert packs.differences(packs.contents(back), expected) == []
    if limit:
        assert len(list(back.glob("*.safetensors"))) > 5


def test_eight_experts_over_three_ranks(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("qwen3moe-nvfp4-perexpert")
    for layout, engine in packs.PAIRS:
        with pytest.raises(InputRefused, match="8 experts can't be split over --ep 3; these work: 1, 2, 4, 8"):
            packs.decide(checkpoint_of(path), layout, engine=engine, ep=3)
        with pytest.raises(InputRefused, match=r"can't be split over --tp 3; --tp 1, 2, 4, 8 works"):
            packs.decide(checkpoint_of(path), layout, engine=engine, tp=3)


def test_a_clamp_on_sglang_cutedsl(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """SGLang builds the wrapper without the clamp; vLLM does not, and everything else takes it."""

    def clamp(ck: Any) -> None:
        ck.config["swiglu_limit"] = 7.0

    path = damaged(checkpoint("qwen3moe-nvfp4-i96"), tmp_path / "source", clamp)
    for layout, engine in packs.PAIRS:
        if (layout, engine) == ("flashinfer-cutedsl", "sglang"):
            with pytest.raises(InputRefused, match="sglang ignores the clamp of silu on this kernel"):
                packs.decide(checkpoint_of(path), layout, engine=engine)
        else:
            assert round_trip(path, tmp_path, layout, engine=engine, tp=2, w13="unify") == []


def test_what_layouts_have_no_place_for(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A parameter that packing would lose is refused, and hf keeps it; biases that only some linears have, by all."""
    source = checkpoint("qwen3moe-nvfp4-perexpert")
    module = "model.layers.1.mlp.experts.3.up_proj"
    cases = {
        "zero_point": ({f"{module}.zero_point": torch.ones(4)}, "the experts have zero_point"),
        "bias": ({f"{module}.bias": torch.ones(128)}, "1 of 24 linears have a bias"),
    }
    for label, (tensors, message) in cases.items():
        path = damaged(source, tmp_path / label, lambda ck, tensors=tensors: ck.tensors.update(tensors))
        if label != "bias":
            packs.decide(path, "hf")
        for layout in packs.LAYOUTS:
            with pytest.raises(InputRefused, match=message):
                packs.decide(path, layout)


def test_another_tensor_below_experts_stays_logical(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A router's correction that lies beside the experts is no expert: it is kept, flat or not."""
    name = "model.layers.1.mlp.experts.e_score_correction_bias"
    path = damaged(
        checkpoint("qwen3moe-nvfp4-perexpert"),
        tmp_path / "source",
        lambda ck: ck.tensors.update({name: torch.arange(8, dtype=torch.float32)}),
    )
    for engine in packs.ENGINES:
        for tp in (1, 2):
            assert round_trip(path, tmp_path, "flashinfer-trtllm", engine=engine, tp=tp) == []
    kept = hf(path, tmp_path, w13_scale="split", input_scale="layer-max", impute="none")
    assert any(name.encode() in data for data in kept.values())
