"""flashinfer-mxint4: FlashInfer's TRT-LLM-gen int4 MoE (`trtllm_mxint4_block_scale_moe`) on SM100 and SM103.

Rows: up first, then gate, through the gated row shuffle; w2 through the row shuffle. Signed codes, blocks of 128 bytes
along K first. The kernel's groups are of 32: the scale of a larger group is repeated, which is exact. Weight-only.

    w13_weight         U8    [H/256, 2I, 128]   gated row shuffle, block-major
    w13_weight_scale   BF16  [2I·H/32]          gated row shuffle, 128x4 swizzle of 16-bit elements, flat
    w2_weight          U8    [I/256, H, 128]    row shuffle, block-major
    w2_weight_scale    BF16  [H·I/32]

Sources: vLLM 0.33 `prepare_static_weights_for_trtllm_mxint4_moe`, SGLang 0.5.23 `CompressedTensorsMxInt4MoE`.
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
from nvfp4prep.layouts.permutations import (
    block_major,
    gated_row_shuffle,
    put_rows,
    row_major,
    row_shuffle,
    swizzle,
    take_rows,
    unswizzle,
)
from nvfp4prep.schema import Format

NAME = "flashinfer-mxint4"
VERSION = 1
KERNEL_GROUP = 32
REQUIRES = Requires(
    kernel="trtllm_mxint4_block_scale_moe",
    gpus=("sm100", "sm103"),
    engines={
        "vllm": EngineRules("flashinfer_trtllm", 256, inner_multiple=256, activations=("silu",)),
        "sglang": EngineRules("flashinfer_trtllm", 256, inner_multiple=256, activations=("silu",)),
    },
    input_scales=False,
    format=Format.INT4,
    groups=(32, 64, 128),
    activation_dtypes=("bf16",),
)


def shapes(geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each of one expert's tensors, in load order."""
    rows, hidden, inner = geometry.w13_rows, geometry.hidden, geometry.intermediate
    return {
        "w13_weight": ("U8", (hidden // 256, rows, 128)),
        "w13_weight_scale": ("BF16", (rows * hidden // KERNEL_GROUP,)),
        "w2_weight": ("U8", (inner // 256, hidden, 128)),
        "w2_weight_scale": ("BF16", (hidden * inner // KERNEL_GROUP,)),
    }


def _w13_order(geometry: Geometry) -> Tensor:
    return gated_row_shuffle(geometry.w13_rows) if geometry.gated else row_shuffle(geometry.w13_rows)


def _pack(matrix: Matrix, order: Tensor) -> tuple[Tensor, Tensor]:
    scale = matrix.scale.repeat_interleave(matrix.group // KERNEL_GROUP, 1)
    return block_major(take_rows(matrix.weight, order)), swizzle(take_rows(scale, order)).flatten()


def _unpack(weight: Tensor, scale: Tensor, order: Tensor, columns: int, group: int) -> Matrix:
    rows, groups = len(order), columns // KERNEL_GROUP
    scales = put_rows(unswizzle(scale.view(rows, groups), rows, groups), order)
    repeated = group // KERNEL_GROUP
    return Matrix(put_rows(row_major(weight), order), scales[:, ::repeated].contiguous(), group)


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`."""
    w13, w13_scale = _pack(join(expert, "up"), _w13_order(geometry))
    w2, w2_scale = _pack(expert.down, row_shuffle(geometry.hidden))
    return {"w13_weight": w13, "w13_weight_scale": w13_scale, "w2_weight": w2, "w2_weight_scale": w2_scale}


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""
    hidden, inner, group = geometry.hidden, geometry.intermediate, geometry.group
    order = _w13_order(geometry)
    w13 = _unpack(packed["w13_weight"], packed["w13_weight_scale"], order, hidden, group)
    down = _unpack(packed["w2_weight"], packed["w2_weight_scale"], row_shuffle(hidden), inner, group)
    gate, up = split(w13, geometry.gated, "up")
    return Expert(gate, up, down)


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`."""
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
    """Arguments of `trtllm_mxint4_block_scale_moe`, stacked over a rank's experts; `activations` passes."""
    return {
        **activations,
        "gemm1_weights": packed["w13_weight"],
        "gemm1_weights_scale": packed["w13_weight_scale"],
        "gemm2_weights": packed["w2_weight"],
        "gemm2_weights_scale": packed["w2_weight_scale"],
    }
