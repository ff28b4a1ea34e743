"""vllm-marlin-int4: vLLM's and SGLang's Marlin MoE (`moe_wna16_marlin_gemm`) for int4, weight-only, SM75 to SM90 and
newer.

Rows: gate first, then up; each half padded on its own (vLLM; SGLang pads nothing). Codes are stored + 8 (uint4b8) and
go through Marlin's 4-bit repack; group scales are transposed and permuted.

    w13_weight         I32       [H/16, 2·2I']   marlin_repack.repack
    w13_weight_scale   BF16/F16  [H/g, 2I']      g the group size, dtype of the activations
    w2_weight          I32       [I'/16, 2·H]
    w2_weight_scale    BF16/F16  [I'/g, H]

Columns of scales: GROUPED_ORDER where K holds several groups, SINGLE_ORDER where it is one. vLLM 0.33 goes by I for w13
too, which is wrong where I <= g < H; the kernel wants H, and so it is here. Padding has code 0 and scale 0.
Sources: vLLM 0.33 `_process_weights_marlin`, SGLang 0.5.23 `CompressedTensorsWNA16MoE`; golden vectors of vLLM 0.24's
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nvfp4prep.layouts import int4, marlin_repack
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
    pad_expert,
    split,
)
from nvfp4prep.schema import Format

NAME = "vllm-marlin-int4"
VERSION = 1
REQUIRES = Requires(
    kernel="moe_wna16_marlin_gemm",
    gpus=("sm75", "sm80", "sm86", "sm89", "sm90"),
    engines={
        "vllm": EngineRules("marlin", 128, pad_gated=64, pad_plain=64),
        "sglang": EngineRules("marlin", 128, inner_multiple=64),
    },
    input_scales=False,
    format=Format.INT4,
    groups=(32, 64, 128),
)


def shapes(geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each of one expert's tensors, in load order."""
    rows, hidden, inner = geometry.w13_rows, geometry.padded_hidden, geometry.padded_intermediate
    return {
        "w13_weight": ("I32", (hidden // 16, 2 * rows)),
        "w13_weight_scale": (geometry.scale_dtype, (hidden // geometry.group, rows)),
        "w2_weight": ("I32", (inner // 16, 2 * hidden)),
        "w2_weight_scale": (geometry.scale_dtype, (inner // geometry.group, hidden)),
    }


def _pack_scale(scale: Tensor) -> Tensor:
    return marlin_repack.turn(scale, marlin_repack.scale_order(scale.shape[1]))


def _unpack_scale(packed: Tensor) -> Tensor:
    return marlin_repack.turn_back(packed, marlin_repack.scale_order(packed.shape[0]))


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`."""
    padded = pad_expert(int4.with_offset(expert), geometry)
    w13 = join(padded, "gate")
    return {
        "w13_weight": marlin_repack.repack(w13.weight),
        "w13_weight_scale": _pack_scale(w13.scale),
        "w2_weight": marlin_repack.repack(padded.down.weight),
        "w2_weight_scale": _pack_scale(padded.down.scale),
    }


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""
    group = geometry.group
    w13 = Matrix(marlin_repack.unpack(packed["w13_weight"]), _unpack_scale(packed["w13_weight_scale"]), group)
    down = Matrix(marlin_repack.unpack(packed["w2_weight"]), _unpack_scale(packed["w2_weight_scale"]), group)
    gate, up = split(w13, geometry.gated, "gate")
    return int4.with_offset(crop_expert(Expert(gate, up, down), geometry))


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`: those of compressed-tensors' int4 experts."""
    return {
        "w13_weight": "w13_weight_packed",
        "w13_weight_scale": "w13_weight_scale",
        "w2_weight": "w2_weight_packed",
        "w2_weight_scale": "w2_weight_scale",
    }


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """The activation's constants, F32 [E]; there are no global scales."""
    return int4.swiglu(scales, activation)


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """The engine has no small parameters."""
    return {}


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Weights and scales of both `moe_wna16_marlin_gemm` calls, stacked over a rank's experts; `activations` passes."""
    return {
        **activations,
        "w1": packed["w13_weight"],
        "w1_scale": packed["w13_weight_scale"],
        "w2": packed["w2_weight"],
        "w2_scale": packed["w2_weight_scale"],
    }
