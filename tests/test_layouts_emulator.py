"""Packed bytes, read as the kernels read them (layout_emulator.py), give what the logical tensors give."""

from __future__ import annotations

from typing import Any

import layout_emulator as emulator
import numpy as np
import pytest
import torch
from layout_emulator import Floats
from layout_layers import LAYOUTS, OAI, RELU2, SILU, Case, Layer, cases, make_layer

from nvfp4prep.layouts import vllm_marlin
from nvfp4prep.layouts.logical import Activation, LayoutError

TOKENS = 3
CASES = list(cases(hidden=(192, 256, 384), intermediate=(48, 96, 128, 192)))


def pack(layer: Layer, activation: Activation) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The kernel's arguments for the whole layer, as the layout gives them, and its scalars."""
    layout, geometry = LAYOUTS[layer.case.layout], layer.case.geometry(len(layer.experts))
    packed = [layout.pack(e, geometry, facts) for e, facts in zip(layer.experts, layer.facts, strict=True)]
    stacked = {name: torch.stack([tensors[name] for tensors in packed]) for name in packed[0]}
    scalars = layout.scalars(layer.scales, activation, layer.facts[0])
    return layout.kernel_args(stacked, scalars, {"output_dtype": torch.bfloat16}), scalars


def kernel_weights(layer: Layer, args: dict[str, Any], expert: int) -> tuple[Floats | None, Floats, Floats]:
    """Gate, up and down at their padded sizes, without global scales."""
    case = layer.case
    if case.layout == "flashinfer-trtllm":
        return emulator.trtllm_weights(args, expert, case.gated)
    if case.layout == "flashinfer-cutlass":
        return emulator.flashinfer_cutlass_weights(args, expert, case.gated)
    if case.layout == "flashinfer-cutedsl":
        return emulator.cutedsl_weights(args, expert, case.gated)
    if case.layout == "vllm-cutlass":
        return emulator.vllm_cutlass_weights(args, expert, case.gated)
    gate, up, down = emulator.marlin_weights(args, expert, case.gated, case.dtype)
    # The global scale brings the registers' units back; the layer's factor goes out with it.
    unit = 2.0 ** (119 if case.dtype == "bf16" else 7)
    facts = layer.facts[expert]
    w13, w2 = unit / facts.w13_factor, unit / facts.w2_factor
    return None if gate is None else gate * w13, up * w13, down * w2


def kernel_output(
    layer: Layer, args: dict[str, Any], scalars: dict[str, torch.Tensor], expert: int, x: Floats
) -> Floats:
    case, real = layer.case, emulator.real_swiglu(scalars, expert)
    if case.layout == "flashinfer-trtllm":
        quantise = emulator.reals(scalars["w13_input_scale_quant"])
        return emulator.run_trtllm(args, expert, x, case.gated, quantise)
    if case.layout == "flashinfer-cutlass":
        return emulator.run_flashinfer_cutlass(args, expert, x, case.gated)
    if case.layout == "flashinfer-cutedsl":
        quantise = emulator.reals(scalars["w13_input_scale_quant"])
        return emulator.run_cutedsl(args, expert, x, case.gated, real, quantise)
    if case.layout == "vllm-cutlass":
        return emulator.run_vllm_cutlass(args, expert, x, case.gated, real)
    return emulator.run_marlin(args, expert, x, case.gated, real, case.dtype)


def effective(layer: Layer, scale: torch.Tensor) -> list[float]:
    """Global scales as the engine has them: SGLang's Marlin rounds them to the activations' dtype."""
    if layer.case.layout == "vllm-marlin" and layer.case.engine == "sglang":
        scale = scale.to({"bf16": torch.bfloat16, "fp16": torch.float16}[layer.case.dtype])
    return scale.to(torch.float64).tolist()


def logical(layer: Layer, expert: int) -> tuple[Floats | None, Floats, Floats]:
    """Gate, up and down, dequantised, global scales and all."""
    e, scales = layer.experts[expert], layer.scales
    gate = None
    if e.gate is not None and scales.gate is not None:
        gate = emulator.dequantised(e.gate.weight, e.gate.scale, effective(layer, scales.gate)[expert])
    up = emulator.dequantised(e.up.weight, e.up.scale, effective(layer, scales.up)[expert])
    return gate, up, emulator.dequantised(e.down.weight, e.down.scale, effective(layer, scales.down)[expert])


def expected_output(layer: Layer, activation: Activation, expert: int, x: Floats) -> tuple[Floats, Floats]:
    """The logical layer's output, and its size: the sum of |terms| that the rounding of F32 scalars is relative to."""
    e = layer.experts[expert]
    gate, up, down = logical(layer, expert)

    def bias(values: torch.Tensor | None) -> Floats:
        return np.zeros(1) if values is None else emulator.reals(values)

    up_out = x @ up.T + bias(e.up_bias)
    if gate is None:
        between = np.maximum(up_out, 0) ** 2
    else:
        gate_out = x @ gate.T + bias(e.gate_bias)
        if activation.limit is not None:
            assert (gate_out > activation.limit).any() and (np.abs(up_out) > activation.limit).any(), "no clamp tested"
            gate_out = np.minimum(gate_out, activation.limit)
            up_out = np.clip(up_out, -activation.limit, activation.limit)
        alpha = 1.0 if activation.alpha is None else activation.alpha
        beta = 0.0 if activation.beta is None else activation.beta
        between = gate_out / (1 + np.exp(-alpha * gate_out)) * (up_out + beta)
    return between @ down.T + bias(e.down_bias), np.abs(between) @ np.abs(down).T + np.abs(bias(e.down_bias))


def check_output(layer: Layer, activation: Activation) -> None:
    case, geometry = layer.case, layer.case.geometry(len(layer.experts))
    args, scalars = pack(layer, activation)
    rng = np.random.default_rng(7)
    for expert in range(len(layer.experts)):
        x = 3 * rng.standard_normal((TOKENS, case.hidden))
        padded = np.pad(x, ((0, 0), (0, geometry.padded_hidden - case.hidden)))
        ours = kernel_output(layer, args, scalars, expert, padded)
        assert ours.shape == (TOKENS, geometry.padded_hidden)
        assert not ours[:, case.hidden :].any()
        expected, size = expected_output(layer, activation, expert, x)
        assert np.abs(expected).max() > 0.1
        assert (np.abs(ours[:, : case.hidden] - expected) <= 1e-5 * size).all()


@pytest.mark.parametrize("case", [case for case in CASES if not case.biased], ids=str)
def test_weights(case: Case) -> None:
    """Element by element and exactly, and zeros where there is padding; unequal global scales do not matter here."""
    layer, geometry = make_layer(case, split=LAYOUTS[case.layout].REQUIRES.alphas == 2), case.geometry(2)
    activation = SILU if case.gated else RELU2
    args, _ = pack(layer, activation)
    for expert, logical_expert in enumerate(layer.experts):
        matrices = (logical_expert.gate, logical_expert.up, logical_expert.down)
        for ours, matrix in zip(kernel_weights(layer, args, expert), matrices, strict=True):
            assert (ours is None) == (matrix is None)
            if ours is None or matrix is None:
                continue
            rows, columns = matrix.weight.shape[0], matrix.weight.shape[1] * 2
            assert (ours[:rows, :columns] == emulator.dequantised(matrix.weight, matrix.scale)).all()
            assert not ours[rows:].any() and not ours[:, columns:].any()
        inner, hidden = geometry.padded_intermediate, geometry.padded_hidden
        _, up, down = kernel_weights(layer, args, expert)
        assert up.shape == (inner, hidden) and down.shape == (hidden, inner)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer(case: Case) -> None:
    """silu, or relu2 where there is no gate; two alphas where the kernel has them."""
    split = case.gated and LAYOUTS[case.layout].REQUIRES.alphas == 2
    check_output(make_layer(case, split=split), SILU if case.gated else RELU2)


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in CASES
        if case.gated and OAI.kind in LAYOUTS[case.layout].REQUIRES.engines[case.engine].activations
    ],
    ids=str,
)
def test_swiglu_oai(case: Case) -> None:
    check_output(make_layer(case, activation=OAI), OAI)


@pytest.mark.parametrize("case", [case for case in CASES if case.gated and case.intermediate == 96], ids=str)
def test_clamped_silu(case: Case) -> None:
    clamped = Activation("silu", limit=5.0)
    check_output(make_layer(case, activation=clamped), clamped)


def test_beta_without_a_clamp_is_exact_with_unequal_scales() -> None:
    """flashinfer-trtllm: beta shifts the accumulator of up, so it goes by the alpha of up."""
    case = Case("flashinfer-trtllm", "vllm", 256, 96, gated=True, biased=True)
    activation = Activation("swiglu-oai", alpha=1.702, beta=1.0)
    check_output(make_layer(case, activation=activation, split=True), activation)


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "flashinfer-trtllm"])
def test_one_alpha_refuses_unequal_scales(name: str) -> None:
    layer = make_layer(Case(name, "vllm", 256, 128, gated=True), split=True)
    with pytest.raises(LayoutError, match="unify them first"):
        LAYOUTS[name].scalars(layer.scales, SILU, layer.facts[0])


def test_trtllm_clamp_refuses_unequal_scales() -> None:
    layer = make_layer(Case("flashinfer-trtllm", "vllm", 256, 128, gated=True), split=True)
    with pytest.raises(LayoutError, match="unify them first"):
        LAYOUTS["flashinfer-trtllm"].scalars(layer.scales, OAI, layer.facts[0])


# --- Marlin's subnormal block scales ---


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.layout == "vllm-marlin" and c.hidden == 256 and c.gated], ids=str
)
def test_marlin_small_scales(case: Case) -> None:
    """Codes 0 to 40 (up to 0.25), subnormals among them.

    bf16: vLLM's factor saves them all, SGLang's kernel has subnormals as good as 0. fp16: vLLM flushes them, SGLang's
    kernel is exact.
    """
    layer = make_layer(case, codes=(0, 40))
    flush = case.engine == "vllm"
    factor = layer.facts[0].w13_factor
    if case.engine == "vllm" and case.dtype == "bf16":
        assert factor >= 1024
        zeroed = 0
    else:
        assert factor == 1
        zeroed = 0 if (case.engine, case.dtype) == ("sglang", "fp16") else 8
    lost = [code for code in vllm_marlin.lost_codes(factor, flush) if code <= 40]
    assert lost == (list(range(1, 8)) if flush and case.dtype == "fp16" else [])

    args, _ = pack(layer, SILU)
    for expert, logical_expert in enumerate(layer.experts):
        _, ours, _ = kernel_weights(layer, args, expert)
        scale = logical_expert.up.scale
        kept = scale.masked_fill(scale < zeroed, 0)
        expected = emulator.dequantised(logical_expert.up.weight, kept)
        rows = expected.shape[0]
        np.testing.assert_allclose(ours[:rows], expected, rtol=0, atol=1e-30)


# --- the emulator itself must be able to fail ---


def test_the_emulator_sees_a_wrong_order() -> None:
    """Weights that another layout of the same shapes packed give something else."""
    case = Case("flashinfer-cutlass", "vllm", 256, 128, gated=True)
    layer = make_layer(case)
    args, _ = pack(layer, SILU)
    other = {**args, "fc1_expert_weights": args["fc1_expert_weights"].roll(64, 1)}
    right, wrong = kernel_weights(layer, args, 0)[1], kernel_weights(layer, other, 0)[1]
    assert (right != wrong).any()
    expected = emulator.dequantised(layer.experts[0].up.weight, layer.experts[0].up.scale)
    assert (right == expected).all() and (wrong != expected).mean() > 0.5
