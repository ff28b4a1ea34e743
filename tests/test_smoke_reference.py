"""Dequantised weights, references read from the original checkpoints, and the two references of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layout_emulator import dequantised
from layout_layers import OAI, RELU2, SILU, Case, make_layer
from safetensors.torch import save_file
from torch import Tensor

from nvfp4prep.errors import InputRefused
from nvfp4prep.experts import load_expert
from nvfp4prep.layouts.logical import Activation, Expert, Scales
from nvfp4prep.packing import expert_value, reader
from nvfp4prep.schema import Format, MoeLayer, build_schema
from nvfp4prep.smoke.layer import LogicalLayer, Routing, Weights
from nvfp4prep.smoke.reference import engine_scales, exact, plain, reference_weights, scale_change, weights_of
from nvfp4prep.source import Source, open_source, read_json, read_tensor
from nvfp4prep.targets import Target


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# --- weights_of, exact, plain ---


def test_weights_of() -> None:
    layer = make_layer(Case("flashinfer-trtllm", "vllm", 256, 96, True, biased=True), split=True)
    for e, expert in enumerate(layer.experts):
        scaled, bare = weights_of(expert, layer.scales, e), weights_of(expert, None)
        assert expert.gate is not None and layer.scales.gate is not None
        for ours, raw, matrix, scale in (
            (scaled.gate, bare.gate, expert.gate, layer.scales.gate[e]),
            (scaled.up, bare.up, expert.up, layer.scales.up[e]),
            (scaled.down, bare.down, expert.down, layer.scales.down[e]),
        ):
            assert ours is not None and raw is not None
            expected = dequantised(matrix.weight, matrix.scale)
            assert (raw.double().numpy() == expected).all()
            np.testing.assert_allclose(ours.double().numpy(), expected * float(scale), rtol=2.0**-23, atol=0)
        assert scaled.down_bias is expert.down_bias and scaled.gate_bias is expert.gate_bias


def test_scale_change_is_the_worst_experts_sum() -> None:
    one = torch.ones(2)
    given = Scales(one, one, one, None, None)
    engine = Scales(torch.tensor([1.25, 1.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.0, 1.5]), None, None)
    assert scale_change(given, given) == 0
    assert scale_change(given, engine) == 0.75
    assert scale_change(replace(given, gate=None), replace(engine, gate=None)) == 0.5


def test_engine_scales() -> None:
    layer = make_layer(Case("vllm-marlin", "sglang", 256, 128, True))
    same = engine_scales(layer.scales, Target("vllm-marlin", "vllm"))
    assert same is layer.scales
    rounded = engine_scales(layer.scales, Target("vllm-marlin", "sglang"))
    assert rounded.gate is not None and torch.equal(rounded.gate, rounded.up)
    assert torch.equal(rounded.down, layer.scales.down.bfloat16().float()) and not torch.equal(
        rounded.down, layer.scales.down
    )


def brute_force(weights: Weights, activation: Activation, x: Tensor) -> Tensor:
    """One expert in F64."""
    x = x.double()

    def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        return x @ w.double().T + (0 if b is None else b.double())

    up = linear(x, weights.up, weights.up_bias)
    if weights.gate is None:
        between = up.clamp(min=0) ** 2
    else:
        gate = linear(x, weights.gate, weights.gate_bias)
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        alpha = 1.0 if activation.alpha is None else activation.alpha
        between = gate / (1 + (-alpha * gate).exp()) * (up + (activation.beta or 0.0))
    return linear(between, weights.down, weights.down_bias)


@pytest.mark.parametrize("activation", [SILU, OAI, RELU2, Activation("silu", limit=1.0)], ids=str)
def test_plain_and_weight_only(activation: Activation) -> None:
    gated = activation.kind != "relu2"
    layer = make_layer(Case("vllm-marlin", "vllm", 256, 128, gated, biased=gated), experts=3)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 256, generator=generator).bfloat16()
    routing = Routing(torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]]), torch.rand(5, 2, generator=generator))

    def weights(e: int) -> Weights:
        return weights_of(layer.experts[e], layer.scales, e)

    expected = torch.zeros(5, 256, dtype=torch.float64)
    for t in range(5):
        for j in range(2):
            out = brute_force(weights(int(routing.ids[t, j])), activation, x[t : t + 1])[0]
            expected[t] += float(routing.weights[t, j]) * out
    assert relative(plain(weights, activation, x, routing).double(), expected) < 1e-6
    logical = LogicalLayer(256, 128, 3, activation, lambda e: layer.experts[e], layer.scales)
    assert relative(exact(logical, x, routing, "16-bit").double(), expected) < 1e-6


def test_exact_quantises_activations() -> None:
    """About NVFP4's error of both activations from the unquantised layer: neither nothing nor far more."""
    layer = make_layer(Case("flashinfer-cutlass", "vllm", 512, 256, True), experts=2)
    x = (torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) / 3).bfloat16()
    routing = Routing(torch.randint(0, 2, (64, 1)), torch.ones(64, 1))
    logical = LogicalLayer(512, 256, 2, SILU, lambda e: layer.experts[e], layer.scales)
    unquantised = plain(lambda e: weights_of(layer.experts[e], layer.scales, e), SILU, x, routing)
    assert 0.08 < relative(exact(logical, x, routing, "NVFP4"), unquantised) < 0.25


# --- references ---

BF16 = {
    "gptoss-nvfp4": "gptoss-nvfp4-bf16",
    "llama4-nvfp4": "llama4-nvfp4-bf16",
    "mixtral-nvfp4": "mixtral-nvfp4-bf16",
    "nemotronh-nvfp4": "nemotronh-nvfp4-bf16",
    "qwen3moe-nvfp4-perexpert": "qwen3moe-nvfp4-perexpert-bf16",
    "tinymoe-nvfp4-perexpert": "tinymoe-bf16",
}


def opened(path: Path) -> tuple[Source, Mapping[str, Any], tuple[MoeLayer, ...]]:
    source = open_source(str(path))
    config = read_json(source.root, "config.json") or {}
    return source, config, build_schema(source.tensors, config).moe_layers


def dequantised_layer(source: Source, moe: MoeLayer) -> Callable[[int], Weights]:
    """Experts of an NVFP4 checkpoint by its own stored scales."""
    read = reader(lambda *part: bytearray(read_tensor(source, *part)), source.tensors)

    def stored(expert: int, projection: str) -> Tensor | None:
        fused = {"gate": moe.gate_up, "up": moe.gate_up, "down": moe.down}[projection]
        linear = fused or getattr(moe.experts[expert], projection)
        if linear is None:
            return None
        values = read(linear.params["weight_scale_2"].name, None).float().flatten().tolist()
        return torch.tensor([expert_value(values, moe, expert, int(projection == "up")) if fused else values[0]])

    def weights(e: int) -> Weights:
        up, down = stored(e, "up"), stored(e, "down")
        assert up is not None and down is not None
        expert: Expert = load_expert(moe, e, read, {})[0]
        return weights_of(expert, Scales(stored(e, "gate"), up, down, None, None))

    return weights


@pytest.mark.parametrize("name", BF16)
def test_reference_weights_of_real_checkpoints(
    name: str, full_set: dict[str, Path], checkpoint: Callable[[str], Path]
) -> None:
    """Dequantised and original weights differ by NVFP4's error; swapped halves or experts would give 1.4."""
    if BF16[name] not in full_set:
        pytest.skip(f"{BF16[name]}: set NVFP4PREP_CHECKPOINTS")
    source, _, layers = opened(checkpoint(name))
    original, config, _ = opened(full_set[BF16[name]])
    assert layers
    for moe in layers:
        assert moe.format is Format.NVFP4
        read, ours = reference_weights(original, config, moe), dequantised_layer(source, moe)
        for e in range(moe.expert_count):
            a, b = ours(e), read(e)
            assert (a.gate is None) == (b.gate is None) == (not moe.gated)
            for x, y in ((a.gate, b.gate), (a.up, b.up), (a.down, b.down)):
                if x is not None and y is not None:
                    assert x.shape == y.shape and 0.09 < relative(x, y) < 0.1
            for x, y in ((a.gate_bias, b.gate_bias), (a.up_bias, b.up_bias), (a.down_bias, b.down_bias)):
                assert (x is None) == (y is None) == (name != "gptoss-nvfp4")
                assert x is None or y is None or torch.equal(x, y)


E_, H_, I_ = 3, 32, 16


def _fused(columns: bool) -> tuple[dict[str, Tensor], list[Weights]]:
    """Fused BF16 tensors of a tiny layer, and its experts; H = 2I, so shapes alone do not say the order."""
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(E_, I_, H_, generator=generator).bfloat16() for _ in range(2))
    down = torch.randn(E_, H_, I_, generator=generator).bfloat16()
    first = torch.cat([gate, up], 1)
    second = down
    if columns:
        first, second = first.mT.contiguous(), down.mT.contiguous()
    experts = [Weights(gate[e].float(), up[e].float(), down[e].float()) for e in range(E_)]
    return {"gate_up_proj": first, "down_proj": second}, experts


def _checkpoint(folder: Path, tensors: dict[str, Tensor]) -> Source:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return open_source(str(folder))


def _moe(path: str, hidden: int = H_, intermediate: int = I_, gated: bool = True, experts: int = E_) -> MoeLayer:
    return MoeLayer(path, Format.NVFP4, experts, hidden, intermediate, gated)


@pytest.mark.parametrize(
    ("model_type", "columns"), [("llama4_text", True), ("qwen3_moe", False), ("mixtral", False)], ids=str
)
def test_fused_references(tmp_path: Path, model_type: str, columns: bool) -> None:
    """Llama-4's [E, H, 2I], and transformers 5's [E, 2I, H] of other models; inside a multimodal model too."""
    tensors, experts = _fused(columns)
    path = "model.language_model.layers.2.mlp"
    source = _checkpoint(tmp_path, {f"{path}.experts.{name}": tensor for name, tensor in tensors.items()})
    read = reference_weights(source, {"model_type": model_type}, _moe("language_model.model.layers.2.mlp"))
    for e, expected in enumerate(experts):
        ours = read(e)
        assert ours.gate is not None and expected.gate is not None
        assert torch.equal(ours.gate, expected.gate)
        assert torch.equal(ours.up, expected.up) and torch.equal(ours.down, expected.down)


def test_unfit_references_are_refused(tmp_path: Path) -> None:
    path = "model.layers.0.mlp"
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{path}.experts.{e}.{name}.weight": torch.randn(*shape, generator=generator)
        for e in range(E_)
        for name, shape in (("gate_proj", (I_, H_)), ("up_proj", (I_, H_)), ("down_proj", (H_, I_)))
    }
    source = _checkpoint(tmp_path, tensors)
    assert reference_weights(source, {}, _moe(path))(2).down.shape == (H_, I_)
    for moe, words in (
        (_moe("model.layers.1.mlp"), "no routed experts under model.layers.1.mlp"),
        (_moe(path, intermediate=32), "intermediate 16"),
        (_moe(path, experts=4), "experts 3"),
        (_moe(path, gated=False), "gated 1"),
    ):
        with pytest.raises(InputRefused, match=words):
            reference_weights(source, {}, moe)


def test_fused_reference_of_other_sizes_is_refused(tmp_path: Path) -> None:
    tensors, _ = _fused(columns=False)
    path = "model.layers.0.mlp"
    source = _checkpoint(tmp_path, {f"{path}.experts.{name}": tensor for name, tensor in tensors.items()})
    with pytest.raises(InputRefused, match=r"\[3, 64, 32\] fits"):
        reference_weights(source, {"model_type": "qwen3_moe"}, _moe(path, intermediate=32))
    with pytest.raises(InputRefused, match="experts"):
        reference_weights(source, {"model_type": "qwen3_moe"}, replace(_moe(path), gated=False))


def test_a_quantised_reference_is_refused(checkpoint: Callable[[str], Path]) -> None:
    source, config, layers = opened(checkpoint("tinymoe-nvfp4-perexpert"))
    with pytest.raises(InputRefused, match="a reference holds BF16"):
        reference_weights(source, config, layers[0])
