"""moe-wna16: the Triton fused MoE of vLLM and SGLang for int4 (`fused_moe_kernel_gptq_awq`), weight-only.

Rows: gate first, then up; nothing is permuted. Codes are stored + 8 (uint4b8), so there are no zero points.

    w13_weight         U8        [2I, H/2]   low nibble = even k
    w13_weight_scale   BF16/F16  [2I, H/g]   g the group size, dtype of the activations
    w2_weight          U8        [H, I/2]
    w2_weight_scale    BF16/F16  [H, I/g]

Sources: vLLM 0.33 and SGLang 0.5.23 `MoeWNA16Method`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nvfp4prep.layouts import int4
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

NAME = "moe-wna16"
VERSION = 1
REQUIRES = Requires(
    kernel="fused_moe_kernel_gptq_awq",
    gpus=("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120", "sm121"),
    engines={
        "vllm": EngineRules("triton", 32, activations=("silu",)),
        "sglang": EngineRules("moe_wna16", 32, activations=("silu",)),
    },
    input_scales=False,
    format=Format.INT4,
    groups=(32, 64, 128),
)


def shapes(geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each of one expert's tensors, in load order."""
    rows, hidden, inner, group = geometry.w13_rows, geometry.hidden, geometry.padded_intermediate, geometry.group
    return {
        "w13_weight": ("U8", (rows, hidden // 2)),
        "w13_weight_scale": (geometry.scale_dtype, (rows, hidden // group)),
        "w2_weight": ("U8", (hidden, inner // 2)),
        "w2_weight_scale": (geometry.scale_dtype, (hidden, inner // group)),
    }


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`."""
    shifted = int4.with_offset(expert)
    w13 = join(shifted, "gate")
    return {
        "w13_weight": w13.weight.contiguous(),
        "w13_weight_scale": w13.scale.contiguous(),
        "w2_weight": shifted.down.weight.contiguous(),
        "w2_weight_scale": shifted.down.scale.contiguous(),
    }


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""
    w13 = Matrix(packed["w13_weight"], packed["w13_weight_scale"], geometry.group)
    gate, up = split(w13, geometry.gated, "gate")
    return int4.with_offset(Expert(gate, up, Matrix(packed["w2_weight"], packed["w2_weight_scale"], geometry.group)))


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`."""
    return {
        "w13_weight": "w13_qweight",
        "w13_weight_scale": "w13_scales",
        "w2_weight": "w2_qweight",
        "w2_weight_scale": "w2_scales",
    }


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """None: there are no global scales, and no activation but silu."""
    return {}


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """The engine has no small parameters."""
    return {}


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Weights and scales of `fused_experts(use_int4_w4a16=True)`, over a rank's experts; `activations` passes."""
    return {
        **activations,
        "w1": packed["w13_weight"],
        "w1_scale": packed["w13_weight_scale"],
        "w2": packed["w2_weight"],
        "w2_scale": packed["w2_weight_scale"],
    }
