"""vLLM 0.33.0's own loading and conversion of an `hf` output gives the bytes that `convert` packs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pack_checks as packs
import pytest
import vllm_moe
from torch import Tensor

import nvfp4prep

LAYOUTS = tuple(vllm_moe.BACKENDS)
CUTLASS = ("flashinfer-cutlass", "vllm-cutlass")
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
RANKS = {"one": (1, 1), "tp2": (2, 1), "ep2": (1, 2)}

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


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of which dtype, shape or bytes differ, or which only one side has."""

    def same(name: str) -> bool:
        if name not in ours or name not in theirs:
            return False
        a, b = ours[name], theirs[name].contiguous()
        return (a.dtype, a.shape) == (b.dtype, b.shape) and packs.same_bytes(a, b)

    return sorted(name for name in {*ours, *theirs} if not same(name))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_same_bytes(made: Made, name: str, layout: str, ranks: str) -> None:
    tp, ep = RANKS[ranks]
    compare(made(name, "hf"), made(name, layout, w13_scale="unify", tp=tp, ep=ep), layout)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-perexpert", "nemotronh-nvfp4"])
def test_same_bytes_with_each_experts_own_input_scale(made: Made, name: str, ranks: str) -> None:
    tp, ep = RANKS[ranks]
    packed = made(name, "vllm-cutlass", input_scale="keep", tp=tp, ep=ep)
    compare(made(name, "hf", input_scale="keep"), packed, "vllm-cutlass")


def compare(hf: Path, packed: Path, layout: str) -> None:
    """Every layer and rank: what the kernel object is given, and its scales after its own processing."""
    opened = nvfp4prep.open(packed)
    quantization = vllm_moe.parsed_quantization(hf)
    for layer in opened.layers:
        for rank in opened.ranks:
            with vllm_moe.backend(layout):
                module = vllm_moe.make_experts(quantization, layer, opened.tp, opened.ep, rank)
            vllm_moe.load(module, hf)
            rows = module.w13_weight.shape[1]
            if layout in CUTLASS and layer.gated and rows % 128:
                with pytest.raises(NotImplementedError, match="padding for w1 and w3"):
                    vllm_moe.process(module)
                continue  # what convert makes of it is proved by the emulator (tests/test_layouts_emulator.py)
            experts = vllm_moe.process(module)
            ours = opened.load_experts(layer.path, rank)
            done = vllm_moe.parameters(module)
            held = done if layout == "flashinfer-trtllm" else experts.given
            assert differing(dict(ours.parameters), held) == [], (layer.path, rank)
            alphas = {"g1_alphas": done["w13_weight_scale_2"], "g2_alphas": done["w2_weight_scale_2"]}
            assert differing({name: ours.scalars[name] for name in alphas}, alphas) == [], (layer.path, rank)
            config = module.moe_config
            assert config.hidden_dim == ours.geometry.padded_hidden


def test_gated_96_is_refused_by_cutlass_only(made: Made) -> None:
    """The case that vLLM refuses and convert packs: it must not go unnoticed when a later vLLM accepts it."""
    hf = made("qwen3moe-nvfp4-i96", "hf")
    layer = nvfp4prep.open(made("qwen3moe-nvfp4-i96", "vllm-cutlass")).layers[0]
    assert (layer.intermediate, layer.gated) == (96, True)
    refused = []
    for layout in LAYOUTS:
        with vllm_moe.backend(layout):
            module = vllm_moe.make_experts(vllm_moe.parsed_quantization(hf), layer, 1, 1, (0, 0))
        vllm_moe.load(module, hf)
        try:
            vllm_moe.process(module)
        except NotImplementedError:
            refused.append(layout)
    assert tuple(refused) == CUTLASS


def test_experts_have_no_parameter_for_biases(made: Made) -> None:
    """Why gpt-oss in NVFP4 is not compared: vLLM has nowhere to put its experts' biases."""
    hf = made("qwen3moe-nvfp4-perexpert", "hf")
    layer = nvfp4prep.open(made("qwen3moe-nvfp4-perexpert", "vllm-marlin")).layers[0]
    with vllm_moe.backend("vllm-marlin"):
        module = vllm_moe.make_experts(vllm_moe.parsed_quantization(hf), layer, 1, 1, (0, 0))
    assert not [name for name, _ in module.named_parameters() if "bias" in name]
