"""What layouts with swizzled block scales share (all but vllm-marlin); the cutlass ones leave rows as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from nvfp4prep.layouts.logical import (
    Activation,
    Engine,
    Expert,
    Geometry,
    Matrix,
    Scales,
    crop_expert,
    join,
    one_w13_scale,
    pad_expert,
    round_up,
    split,
)
from nvfp4prep.layouts.permutations import swizzle, unswizzle

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def shapes(geometry: Geometry) -> Shapes:
    """dtype and shape of each of one expert's tensors; swizzled scales are padded to 128 rows and 4 columns."""
    rows, hidden, inner = geometry.w13_rows, geometry.padded_hidden, geometry.padded_intermediate
    return {
        "w13_weight": ("U8", (rows, hidden // 2)),
        "w13_weight_scale": ("F8_E4M3", (round_up(rows, 128), round_up(hidden // 16, 4))),
        "w2_weight": ("U8", (hidden, inner // 2)),
        "w2_weight_scale": ("F8_E4M3", (round_up(hidden, 128), round_up(inner // 16, 4))),
    }


def pack(expert: Expert, geometry: Geometry, first: Literal["gate", "up"]) -> dict[str, Tensor]:
    """Pad each half, join with `first` on top, swizzle the block scales."""
    padded = pad_expert(expert, geometry)
    return stored(join(padded, first), padded.down)


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, first: Literal["gate", "up"]) -> Expert:
    """The inverse of pack."""
    w13, down = restored(packed, geometry)
    return crop_expert(Expert(*split(w13, geometry.gated, first), down), geometry)


def stored(w13: Matrix, down: Matrix) -> dict[str, Tensor]:
    """The four tensors of `shapes`, from matrices whose rows are in the kernel's order."""
    return {
        "w13_weight": w13.weight,
        "w13_weight_scale": swizzle(w13.scale),
        "w2_weight": down.weight,
        "w2_weight_scale": swizzle(down.scale),
    }


def restored(packed: Mapping[str, Tensor], geometry: Geometry) -> tuple[Matrix, Matrix]:
    """The inverse of stored: w13 and down, rows in the kernel's order."""
    rows, hidden, inner = geometry.w13_rows, geometry.padded_hidden, geometry.padded_intermediate
    return (
        Matrix(packed["w13_weight"], unswizzle(packed["w13_weight_scale"], rows, hidden // 16)),
        Matrix(packed["w2_weight"], unswizzle(packed["w2_weight_scale"], hidden, inner // 16)),
    )


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`. SGLang keeps swizzled scales beside the linear ones."""
    suffix = "blockscale_swizzled" if engine == "sglang" else "weight_scale"
    return {
        "w13_weight": "w13_weight",
        "w13_weight_scale": f"w13_{suffix}",
        "w2_weight": "w2_weight",
        "w2_weight_scale": f"w2_{suffix}",
    }


def one_alpha(scales: Scales, activation: Activation) -> dict[str, Tensor]:
    """F32 [E] scalars of kernels with one alpha per GEMM: a1·s1, a2·s2, 1/a1, 1/a2; swiglu parameters in real units."""
    assert scales.w13_input is not None and scales.w2_input is not None
    table = {
        "g1_alphas": scales.w13_input * one_w13_scale(scales),
        "g2_alphas": scales.w2_input * scales.down,
        "w13_input_scale_quant": 1.0 / scales.w13_input,
        "w2_input_scale_quant": 1.0 / scales.w2_input,
    }
    for name, value in (("limit", activation.limit), ("alpha", activation.alpha), ("beta", activation.beta)):
        if value is not None:
            table[f"swiglu_{name}"] = torch.full_like(scales.up, value)
    return table


def raw_parameters(scales: Scales) -> dict[str, Tensor]:
    """vLLM's small parameters where its experts multiply them at start-up: raw weight_scale_2, input_scale. F32 [E]."""
    assert scales.w13_input is not None and scales.w2_input is not None
    return {
        "w13_weight_scale_2": scales.up,
        "w13_input_scale": scales.w13_input,
        "w2_weight_scale_2": scales.down,
        "w2_input_scale": scales.w2_input,
    }
