"""flashinfer-cutlass: FlashInfer's `cutlass_fused_moe` with NVFP4 on SM100, SM103, SM120 and SM121.

Rows: up first, then gate; each half padded on its own to a multiple of 64 (not gated: 128). Weights stay as they are,
block scales go through the 128x4 swizzle, whose row tiles run over both halves.

    w13_weight         U8    [2I', H/2]                              [up; gate]
    w13_weight_scale   E4M3  [up(2I',128), up(H/16,4)]               swizzled
    w2_weight          U8    [H, I'/2]
    w2_weight_scale    E4M3  [up(H,128), up(I'/16,4)]                swizzled
    fc1_expert_biases  F32   [2I']  up first, in real units (the kernel adds them after the alphas)
    fc2_expert_biases  F32   [H]

Sources: vLLM 0.33 `prepare_nvfp4_moe_layer_for_fi_or_cutlass`; SGLang 0.5.23 `ModelOptNvFp4FusedMoEMethod`; FlashInfer
0.7.2 `cutlass_fused_moe`. vLLM and SGLang themselves refuse a gated I that is no multiple of 64; padding each half is
this project's.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    Requires,
    Scales,
    join_bias,
    pad_expert,
    split_bias,
)

NAME = "flashinfer-cutlass"
VERSION = 1
REQUIRES = Requires(
    kernel="cutlass_fused_moe",
    gpus=("sm100", "sm103", "sm120", "sm121"),
    engines={
        "vllm": EngineRules("flashinfer_cutlass", 64, pad_gated=64, pad_plain=128),
        "sglang": EngineRules("flashinfer_cutlass", 64, pad_gated=64, pad_plain=128),
    },
    biases=True,
)


def shapes(geometry: Geometry) -> swizzled.Shapes:
    """dtype and shape of each of one expert's tensors, in load order."""
    table = swizzled.shapes(geometry)
    if geometry.biased:
        table |= {
            "fc1_expert_biases": ("F32", (geometry.w13_rows,)),
            "fc2_expert_biases": ("F32", (geometry.padded_hidden,)),
        }
    return table


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`; E4M3 as U8 codes."""
    packed = swizzled.pack(expert, geometry, "up")
    if expert.down_bias is not None:
        padded = pad_expert(expert, geometry)
        assert padded.down_bias is not None
        packed |= {"fc1_expert_biases": join_bias(padded, "up"), "fc2_expert_biases": padded.down_bias}
    return packed


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""
    expert = swizzled.unpack(packed, geometry, "up")
    if "fc2_expert_biases" not in packed:
        return expert
    gate, up = split_bias(packed["fc1_expert_biases"], geometry.gated, "up")
    inner = geometry.intermediate
    return replace(
        expert,
        gate_bias=None if gate is None else gate[:inner],
        up_bias=up[:inner],
        down_bias=packed["fc2_expert_biases"][: geometry.hidden],
    )


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`; neither has one for biases, which keep the kernel's names."""
    names = swizzled.tensor_names(engine)
    return names | {name: name for name in ("fc1_expert_biases", "fc2_expert_biases")}


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """The kernel's F32 [E] scalars: see `swizzled.one_alpha`."""
    return swizzled.one_alpha(scales, activation)


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """The engine's small parameters, by its names."""
    if facts.engine == "vllm":
        return swizzled.raw_parameters(scales)
    one = {name: scalars[name][0] for name in ("w13_input_scale_quant", "w2_input_scale_quant")}
    return {"g1_alphas": scalars["g1_alphas"], "g2_alphas": scalars["g2_alphas"], **one}


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `cutlass_fused_moe`, stacked over a rank's experts.

    Weights are viewed as I64 (16 FP4 values), block scales as I32 (4 codes). `activations` holds input, input_sf,
    output_dtype and routing, passed through; biases take the output's dtype there.
    """
    biases = {
        name: packed[name].to(activations["output_dtype"])
        for name in ("fc1_expert_biases", "fc2_expert_biases")
        if name in packed
    }
    swiglu = {name: scalars[name] for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit") if name in scalars}
    return {
        **activations,
        "fc1_expert_weights": packed["w13_weight"].view(torch.int64),
        "fc2_expert_weights": packed["w2_weight"].view(torch.int64),
        "quant_scales": [
            scalars["w13_input_scale_quant"],
            packed["w13_weight_scale"].view(torch.int32),
            scalars["g1_alphas"],
            scalars["w2_input_scale_quant"],
            packed["w2_weight_scale"].view(torch.int32),
            scalars["g2_alphas"],
        ],
        **biases,
        **swiglu,
    }
