"""SGLang 0.5.23's own loading and conversion of an `hf` output gives the bytes that `convert` packs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pack_checks as packs
import pytest
import sglang_moe
from torch import Tensor

import nvfp4prep

LAYOUTS = tuple(sglang_moe.BACKENDS)
W4A4 = (
    "dsv3-nvfp4",
    "llama4-nvfp4",
    "mixtral-nvfp4",
    "nemotronh-nvfp4",
    "qwen3moe-mixed-fp8attn",
    "qwen3moe-nvfp4-expertsonly-fp8kv",
    "qwen3moe-nvfp4-i96",
    "qwen3moe-nvfp4-perexpert",
    "qwen3moe-nvfp4-sharded",
    "tinymoe-nvfp4-perexpert",
    "tinymoe-nvfp4-splitscale",
)
CASES = [(name, layout) for name in W4A4 for layout in LAYOUTS] + [("qwen3moe-w4a16nvfp4", "vllm-marlin")]
RANKS = {"one": (1, 1), "tp2": (2, 1), "ep2": (1, 2), "tp2-ep2": (2, 2)}

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An output of `convert`, made once."""
    outputs: dict[str, Path] = {}

    def path_of(name: str, target: str, **options: Any) -> Path:
        key = f"{name} {target} {options}"
        if key not in outputs:
            outputs[key] = packs.pack(checkpoint(name), tmp_path_factory.mktemp("out") / "out", target, **options)
        return outputs[key]

    return path_of


def differing(ours: dict[str, Tensor], module: Any) -> list[str]:
    """Names of which dtype, shape or bytes differ from the module's, or which it has not."""

    def same(name: str) -> bool:
        theirs = getattr(module, name, None)
        if theirs is None:
            return False
        a, b = ours[name], theirs.detach().contiguous()
        return (a.dtype, a.shape) == (b.dtype, b.shape) and packs.same_bytes(a, b)

    return sorted(name for name in ours if not same(name))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_same_bytes(made: Made, name: str, layout: str, ranks: str) -> None:
    tp, ep = RANKS[ranks]
    hf, packed = made(name, "hf"), made(name, layout, engine="sglang", w13_scale="unify", tp=tp, ep=ep)
    opened = nvfp4prep.open(packed)
    quantization = sglang_moe.parsed_quantization(hf)
    for layer in opened.layers:
        for rank in opened.ranks:
            ours = opened.load_experts(layer.path, rank)
            with sglang_moe.running(hf, layout, tp, ep, rank):
                module = sglang_moe.make_experts(quantization, layer)
                sglang_moe.load(module, layer, hf)
                refused = refusal(layout, layer.gated, ours.geometry.intermediate)
                if refused is not None:
                    with pytest.raises(refused[0], match=refused[1]):
                        module.quant_method.process_weights_after_loading(module)
                    continue  # what convert makes of it is proved by the emulator (tests/test_layouts_emulator.py)
                module.quant_method.process_weights_after_loading(module)
            expected = []
            if layout == "vllm-marlin" and ours.geometry.intermediate % 64:
                # SGLang does not pad a gated I here: 96 gives 2 * 96 rows, which its repack takes.
                assert module.w2_weight.shape[1] == ours.geometry.intermediate // 16
                assert ours.tensors["w2_weight"].shape[1] == ours.geometry.padded_intermediate // 16
                expected = ["w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"]
            assert differing(dict(ours.parameters), module) == expected, (layer.path, rank)


def refusal(layout: str, gated: bool, intermediate: int) -> tuple[type[Exception], str] | None:
    """How SGLang refuses a gated I per rank that is no multiple of 64, if it does."""
    if not gated or intermediate % 64 == 0:
        return None
    if layout == "vllm-marlin":
        return (RuntimeError, "not divisible by tiles") if 2 * intermediate % 64 else None
    return {
        "flashinfer-cutlass": (AssertionError, "required padding"),
        "flashinfer-cutedsl": (ValueError, f"divisible by group_size=64, got {intermediate}"),
    }.get(layout)
