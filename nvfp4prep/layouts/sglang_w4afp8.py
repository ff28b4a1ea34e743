"""sglang-w4afp8: SGLang's CUTLASS int4 x FP8 MoE (`cutlass_w4a8_moe_mm`) on SM90.

Rows: gate first, then up; weights stay as they are, signed; group 128 only. Activations are quantised to E4M3 with one
scale per GEMM of the layer. There is no place for pre_quant_scale.

    w13_weight         I8    [2I, H/2]          low nibble = even k
    w13_weight_scale   BF16  [H/512, 4·2I]      row n of four neighbouring groups side by side; [H/128, 2I] if H/128 % 4
    w2_weight          I8    [H, I/2]
    w2_weight_scale    BF16  [I/512, 4·H]       or [I/128, H]

Source: SGLang 0.5.23 `W4AFp8MoEMethod`, `interleave_scales`. It rounds input scales to BF16 while loading; here they
stay F32, as its kernel takes them.
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
from nvfp4prep.schema import Format

NAME = "sglang-w4afp8"
VERSION = 1
REQUIRES = Requires(
    kernel="cutlass_w4a8_moe_mm",
    gpus=("sm90",),
    engines={"sglang": EngineRules("w4afp8", 128, inner_multiple=128, activations=("silu",))},
    format=Format.INT4,
    groups=(128,),
    activation_dtypes=("bf16",),
)


def shapes(geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each of one expert's tensors, in load order."""
    rows, hidden, inner = geometry.w13_rows, geometry.hidden, geometry.intermediate
    return {
        "w13_weight": ("I8", (rows, hidden // 2)),
        "w13_weight_scale": ("BF16", _scale_shape(rows, hidden // 128)),
        "w2_weight": ("I8", (hidden, inner // 2)),
        "w2_weight_scale": ("BF16", _scale_shape(hidden, inner // 128)),
    }


def _run(groups: int) -> int:
    """How many groups of a row stand side by side."""
    return 4 if groups % 4 == 0 else 1


def _scale_shape(rows: int, groups: int) -> tuple[int, int]:
    return groups // _run(groups), rows * _run(groups)


def _pack_scale(scale: Tensor) -> Tensor:
    rows, groups = scale.shape
    runs = scale.reshape(rows, groups // _run(groups), _run(groups)).transpose(0, 1)
    return runs.reshape(_scale_shape(rows, groups)).contiguous()


def _unpack_scale(packed: Tensor, rows: int) -> Tensor:
    return packed.reshape(packed.shape[0], rows, -1).transpose(0, 1).reshape(rows, -1)


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`."""
    w13 = join(expert, "gate")
    return {
        "w13_weight": w13.weight.contiguous().view(torch.int8),
        "w13_weight_scale": _pack_scale(w13.scale),
        "w2_weight": expert.down.weight.contiguous().view(torch.int8),
        "w2_weight_scale": _pack_scale(expert.down.scale),
    }


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""

    def matrix(name: str) -> Matrix:
        weight = packed[name].view(torch.uint8)
        return Matrix(weight, _unpack_scale(packed[f"{name}_scale"], weight.shape[0]), geometry.group)

    gate, up = split(matrix("w13_weight"), geometry.gated, "gate")
    return Expert(gate, up, matrix("w2_weight"))


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`."""
    return {
        "w13_weight": "w13_weight",
        "w13_weight_scale": "w13_weight_scale_inv",
        "w2_weight": "w2_weight",
        "w2_weight_scale": "w2_weight_scale_inv",
    }


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """a1 and a2, F32 [E], one value for all experts: inputs are quantised as E4M3(x / a), outputs multiplied by a."""
    assert scales.w13_input is not None and scales.w2_input is not None
    return {
        "g1_alphas": torch.full_like(scales.w13_input, float(scales.w13_input.max())),
        "g2_alphas": torch.full_like(scales.w2_input, float(scales.w2_input.max())),
    }


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """The engine's small parameters: the layer's input scales, F32 [1]."""
    return {"w13_input_scale": scalars["g1_alphas"][:1].clone(), "w2_input_scale": scalars["g2_alphas"][:1].clone()}


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of `cutlass_w4a8_moe`, stacked over a rank's experts; `activations` passes."""
    return {
        **activations,
        "w1_q": packed["w13_weight"],
        "w1_scale": packed["w13_weight_scale"],
        "w2_q": packed["w2_weight"],
        "w2_scale": packed["w2_weight_scale"],
        "a1_scale": scalars["g1_alphas"][:1],
        "a2_scale": scalars["g2_alphas"][:1],
    }
