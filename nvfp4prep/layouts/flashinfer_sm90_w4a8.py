"""flashinfer-sm90-w4a8: FlashInfer's int4 x FP8 MoE (`cutlass_fused_moe(use_w4_group_scaling=True)`) on SM90.

Rows: up first, then gate; signed codes go through the order of Hopper's mixed-input GEMM; group 128 only. The kernel
multiplies a GEMM's inputs by factors before it quantises them to E4M3, which is where pre_quant_scale goes.

    fc1_expert_weights   U8    [2I, H/2]             permutations.interleave_sm90
    fc1_expert_scales    BF16  [2I/64, H/128, 8, 8]  row 64t + 8i + j of group k at [t, k, j, i]
    fc2_expert_weights   U8    [H, I/2]
    fc2_expert_scales    BF16  [H/64, I/128, 8, 8]

Sources: FlashInfer 0.7.2 `interleave_moe_scales_for_sm90_mixed_gemm`, the runner with `fc1_act_scale`; golden vectors
of its kernel. No engine calls this kernel with int4 (vLLM 0.33 does with MXFP4): the engine is FlashInfer itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

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
    join,
    split,
)
from nvfp4prep.layouts.permutations import interleave_sm90, separate_sm90
from nvfp4prep.schema import Format

NAME = "flashinfer-sm90-w4a8"
VERSION = 1
REQUIRES = Requires(
    kernel="cutlass_fused_moe",
    gpus=("sm90",),
    engines={"flashinfer": EngineRules("cutlass", 128, inner_multiple=128, activations=("silu",))},
    format=Format.INT4,
    groups=(128,),
    pre_quant_scale=True,
    activation_dtypes=("bf16",),
)


def shapes(geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each of one expert's tensors, in load order."""
    rows, hidden, inner = geometry.w13_rows, geometry.hidden, geometry.intermediate
    return {
        "w13_weight": ("U8", (rows, hidden // 2)),
        "w13_weight_scale": ("BF16", (rows // 64, hidden // 128, 8, 8)),
        "w2_weight": ("U8", (hidden, inner // 2)),
        "w2_weight_scale": ("BF16", (hidden // 64, inner // 128, 8, 8)),
    }


def _pack_scale(scale: Tensor) -> Tensor:
    rows, groups = scale.shape
    return scale.reshape(rows // 64, 8, 8, groups).permute(0, 3, 2, 1).contiguous()


def _unpack_scale(packed: Tensor) -> Tensor:
    tiles, groups = packed.shape[:2]
    return packed.permute(0, 3, 2, 1).reshape(tiles * 64, groups)


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`."""
    w13 = join(expert, "up")
    return {
        "w13_weight": interleave_sm90(w13.weight.contiguous()),
        "w13_weight_scale": _pack_scale(w13.scale),
        "w2_weight": interleave_sm90(expert.down.weight.contiguous()),
        "w2_weight_scale": _pack_scale(expert.down.scale),
    }


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""

    def matrix(name: str) -> Matrix:
        return Matrix(separate_sm90(packed[name]), _unpack_scale(packed[f"{name}_scale"]), geometry.group)

    gate, up = split(matrix("w13_weight"), geometry.gated, "up")
    return Expert(gate, up, matrix("w2_weight"))


def tensor_names(engine: Engine) -> dict[str, str]:
    """FlashInfer's name of each tensor of `shapes`."""
    return {
        "w13_weight": "fc1_expert_weights",
        "w13_weight_scale": "fc1_expert_scales",
        "w2_weight": "fc2_expert_weights",
        "w2_weight_scale": "fc2_expert_scales",
    }


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """a1 and a2, F32 [E], the same for all experts, by which outputs are multiplied, and what inputs are multiplied by
    before E4M3: pre_quant_scale / a, BF16 [H] and [I]."""
    assert scales.w13_input is not None and scales.w2_input is not None
    assert scales.w13_factors is not None and scales.w2_factors is not None
    a1, a2 = scales.w13_input.max(), scales.w2_input.max()
    return {
        "fc1_alpha": torch.full_like(scales.w13_input, float(a1)),
        "fc2_alpha": torch.full_like(scales.w2_input, float(a2)),
        "fc1_act_scale": (scales.w13_factors / a1).to(torch.bfloat16),
        "fc2_act_scale": (scales.w2_factors / a2).to(torch.bfloat16),
    }


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """All of `scalars`: the kernel's own arguments."""
    return dict(scalars)


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of `cutlass_fused_moe`, stacked over a rank's experts; `activations` passes. Zero points are empty."""
    none = torch.empty(0, dtype=torch.bfloat16, device=packed["w13_weight"].device)
    return {
        **activations,
        "fc1_expert_weights": packed["w13_weight"],
        "fc2_expert_weights": packed["w2_weight"],
        "quant_scales": [
            packed["w13_weight_scale"],
            packed["w2_weight_scale"],
            scalars["fc1_act_scale"],
            scalars["fc2_act_scale"],
            none,
            none,
            scalars["fc1_alpha"],
            scalars["fc2_alpha"],
        ],
        "use_w4_group_scaling": True,
        "use_packed_weights": True,
    }
