"""flashinfer-trtllm: FlashInfer's `trtllm_fp4_block_scale_moe` on SM100 and SM103.

Rows: up first, then gate (gated); each half padded on its own; both halves interleaved row by row, then shuffled within
32 rows (GATED+ROW); w2: ROW. Block scales take the same rows, then SWZ. Not gated: up alone, ROW.

    w13_weight         U8    [2I', H'/2]    destination row r <- row (x%2)·I' + x//2 of [up; gate], x = S(r)
    w13_weight_scale   E4M3  [2I', H'/16]   same rows, then the 128x4 swizzle
    w2_weight          U8    [H', I'/2]     destination row r <- row S(r)
    w2_weight_scale    E4M3  [H', I'/16]    same rows, then the 128x4 swizzle
    gemm1_bias         F32   [2I']          rows as w13_weight, divided by the half's own alpha
    gemm2_bias         F32   [H']           rows as w2_weight, divided by g2_alphas

S is `permutations.row_shuffle`. Sources: vLLM 0.33 `prepare_static_weights_for_trtllm_fp4_moe` and
`TrtLlmNvFp4ExpertsBase`; SGLang 0.5.23 `ModelOptNvFp4FusedMoEMethod`; FlashInfer 0.7.2 `fused_moe/core.py`.
The only layout where unequal gate/up global scales stay exact: the gate half is scaled by g1_alphas, the up half by
g1_scale_c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.layouts import swizzled
from nvfp4prep.layouts.logical import (
    Activation,
    Engine,
    EngineRules,
    Expert,
    Geometry,
    LayerFacts,
    Matrix,
    Requires,
    Scales,
    crop_expert,
    join,
    join_bias,
    one_w13_scale,
    pad_expert,
    split,
    split_bias,
)
from nvfp4prep.layouts.permutations import (
    gated_row_shuffle,
    put_rows,
    row_shuffle,
    take_rows,
)

NAME = "flashinfer-trtllm"
VERSION = 1
REQUIRES = Requires(
    kernel="trtllm_fp4_block_scale_moe",
    gpus=("sm100", "sm103"),
    engines={
        "vllm": EngineRules("flashinfer_trtllm", 16, pad_gated=64, pad_plain=128, pad_hidden=256),
        "sglang": EngineRules("flashinfer_trtllm", 128, pad_gated=64, pad_plain=128, padded_stride=True),
    },
    alphas=2,
    biases=True,
)


def shapes(geometry: Geometry) -> swizzled.Shapes:
    """dtype and shape of each of one expert's tensors, in load order."""
    table = swizzled.shapes(geometry)
    if geometry.biased:
        table |= {"gemm1_bias": ("F32", (geometry.w13_rows,)), "gemm2_bias": ("F32", (geometry.padded_hidden,))}
    return table


def _orders(geometry: Geometry) -> tuple[Tensor, Tensor]:
    w13 = gated_row_shuffle(geometry.w13_rows) if geometry.gated else row_shuffle(geometry.w13_rows)
    return w13, row_shuffle(geometry.padded_hidden)


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`; E4M3 as U8 codes."""
    padded = pad_expert(_map_biases(expert, _divide, facts), geometry)
    w13_order, w2_order = _orders(geometry)
    w13 = _map_rows(join(padded, "up"), take_rows, w13_order)
    packed = swizzled.stored(w13, _map_rows(padded.down, take_rows, w2_order))
    if padded.down_bias is not None:
        packed["gemm1_bias"] = take_rows(join_bias(padded, "up"), w13_order)
        packed["gemm2_bias"] = take_rows(padded.down_bias, w2_order)
    return packed


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack; biases come back exactly if they were BF16 or F16 and not `bias_lost`, else within one step
    of F32 (packing keeps those beside)."""
    w13_order, w2_order = _orders(geometry)
    w13, down = swizzled.restored(packed, geometry)
    gate, up = split(_map_rows(w13, put_rows, w13_order), geometry.gated, "up")
    down = _map_rows(down, put_rows, w2_order)
    if "gemm2_bias" not in packed:
        return crop_expert(Expert(gate, up, down), geometry)
    gate_bias, up_bias = split_bias(put_rows(packed["gemm1_bias"], w13_order), geometry.gated, "up")
    down_bias = put_rows(packed["gemm2_bias"], w2_order)
    expert = Expert(gate, up, down, gate_bias, up_bias, down_bias)
    return crop_expert(_map_biases(expert, _undo_divide, facts), geometry)


def _map_rows(matrix: Matrix, function: Callable[[Tensor, Tensor], Tensor], order: Tensor) -> Matrix:
    return Matrix(function(matrix.weight, order), function(matrix.scale, order))


def _map_biases(expert: Expert, function: Callable[[Tensor, float], Tensor], facts: LayerFacts) -> Expert:
    if expert.down_bias is None or expert.up_bias is None:
        return expert
    return replace(
        expert,
        gate_bias=None if expert.gate_bias is None else function(expert.gate_bias, facts.g1_alpha),
        up_bias=function(expert.up_bias, facts.g1_alpha_up),
        down_bias=function(expert.down_bias, facts.g2_alpha),
    )


def _divide(bias: Tensor, alpha: float) -> Tensor:
    return bias / torch.tensor(alpha, dtype=torch.float32)


def _undo_divide(divided: Tensor, alpha: float) -> Tensor:
    """A bias whose quotient is `divided`: the one of 12 significant bits (BF16 and F16 have fewer) if there is one."""
    product = (divided.to(torch.float64) * alpha).to(torch.float32)
    short = (product.view(torch.int32) + 0x800 & ~0xFFF).view(torch.float32)
    return torch.where(_divide(short, alpha) == divided, short, product)


def bias_lost(expert: Expert, facts: LayerFacts, exact: bool) -> bool:
    """Whether a bias has no finite quotient by its alpha, or (`exact`) one that does not give it back."""
    lost = False

    def check(bias: Tensor, alpha: float) -> Tensor:
        nonlocal lost
        divided = _divide(bias, alpha)
        lost |= not bool(torch.isfinite(divided).all()) or (
            exact and not torch.equal(_undo_divide(divided, alpha), bias)
        )
        return bias

    _map_biases(expert, check, facts)
    return lost


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`; neither has one for biases, which keep the kernel's names."""
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "gemm1_bias", "gemm2_bias")
    return {name: name for name in names}


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """The kernel's F32 [E] scalars.

    g1_alphas = a1·s_gate (output1_scale_gate_scalar), g1_alphas_up = a1·s_up, g1_scale_c = g1_alphas_up·(1/a2)
    (output1_scale_scalar; not gated: 1/a2), g2_alphas = a2·s_down (output2_scale_scalar). The clamp acts on both raw
    accumulators, beta on that of up: limit/g1_alphas (gate and up must share a scale), beta/g1_alphas_up; alpha acts on
    the dequantised gate and stays.
    Sources: vLLM 0.33 `TrtLlmNvFp4ExpertsBase`; FlashInfer 0.7.2 `KernelRunner.h`.
    """
    assert scales.w13_input is not None and scales.w2_input is not None
    quantize_w2 = 1.0 / scales.w2_input
    g1_alphas = scales.w13_input * (scales.up if scales.gate is None else scales.gate)
    g1_alphas_up = scales.w13_input * scales.up
    table = {
        "g1_alphas": g1_alphas,
        "g1_alphas_up": g1_alphas_up,
        "g1_scale_c": quantize_w2.clone() if scales.gate is None else g1_alphas_up * quantize_w2,
        "g2_alphas": scales.w2_input * scales.down,
        "w13_input_scale_quant": 1.0 / scales.w13_input,
        "w2_input_scale_quant": quantize_w2,
    }
    if activation.limit is not None:
        one_w13_scale(scales)
        table["gemm1_clamp_limit"] = torch.full_like(g1_alphas, activation.limit) / g1_alphas
    if activation.alpha is not None:
        table["gemm1_alpha"] = torch.full_like(g1_alphas, activation.alpha)
    if activation.beta is not None:
        table["gemm1_beta"] = torch.full_like(g1_alphas, activation.beta) / g1_alphas_up
    return table


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """The engine's small parameters, by its names. vLLM holds the alphas already multiplied in w13_weight_scale_2."""
    assert scales.w13_input is not None and scales.w2_input is not None
    swiglu = {name: scalars[name] for name in ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta") if name in scalars}
    if facts.engine == "sglang":
        names = ("g1_alphas", "g1_alphas_up", "g1_scale_c", "g2_alphas")
        one = {name: scalars[name][0] for name in ("w13_input_scale_quant", "w2_input_scale_quant")}
        return {**{name: scalars[name] for name in names}, **one, **swiglu}
    return {
        "w13_weight_scale_2": scalars["g1_alphas"],
        "w13_input_scale": scales.w13_input,
        "w2_weight_scale_2": scalars["g2_alphas"],
        "w2_input_scale": scales.w2_input,
        "g1_scale_c": scalars["g1_scale_c"],
        **swiglu,
    }


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `trtllm_fp4_block_scale_moe`, stacked over a rank's experts.

    Args:
        packed: tensors of `shapes` with a leading [E].
        scalars: as `scalars` gives them.
        activations: hidden_states, hidden_states_scale (linear order), routing and sizes, passed through.
    """
    return {
        **activations,
        "gemm1_weights": packed["w13_weight"],
        "gemm1_weights_scale": packed["w13_weight_scale"].view(torch.float8_e4m3fn),
        "gemm1_bias": packed.get("gemm1_bias"),
        "gemm1_alpha": scalars.get("gemm1_alpha"),
        "gemm1_beta": scalars.get("gemm1_beta"),
        "gemm1_clamp_limit": scalars.get("gemm1_clamp_limit"),
        "gemm2_weights": packed["w2_weight"],
        "gemm2_weights_scale": packed["w2_weight_scale"].view(torch.float8_e4m3fn),
        "gemm2_bias": packed.get("gemm2_bias"),
        "output1_scale_scalar": scalars["g1_scale_c"],
        "output1_scale_gate_scalar": scalars["g1_alphas"],
        "output2_scale_scalar": scalars["g2_alphas"],
    }
