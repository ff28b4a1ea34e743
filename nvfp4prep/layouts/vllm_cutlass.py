"""vllm-cutlass: vLLM's own CUTLASS NVFP4 experts (`CutlassExpertsFp4`) on SM100, SM103, SM110, SM120 and SM121.

Rows: gate first, then up; each half padded on its own to a multiple of 64 (not gated: 128). Weights stay as they are,
block scales go through the 128x4 swizzle.

    w13_weight         U8    [2I', H/2]                     [gate; up]
    w13_weight_scale   E4M3  [up(2I',128), up(H/16,4)]      swizzled
    w2_weight          U8    [H, I'/2]
    w2_weight_scale    E4M3  [up(H,128), up(I'/16,4)]       swizzled

The one layout whose scalars do not depend on other experts: input scales may differ between them (--input-scale keep).
Sources: vLLM 0.33 `CutlassExpertsFp4` and `prepare_nvfp4_moe_layer_for_fi_or_cutlass`, which refuses a gated I that is
no multiple of 64; padding each half is this project's. SGLang has no counterpart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.layouts import swizzled
from nvfp4prep.layouts.logical import Activation, Engine, EngineRules, Expert, Geometry, LayerFacts, Requires, Scales

NAME = "vllm-cutlass"
VERSION = 1
REQUIRES = Requires(
    kernel="cutlass_fp4_moe_mm",
    gpus=("sm100", "sm103", "sm110", "sm120", "sm121"),
    engines={"vllm": EngineRules("cutlass", 64, pad_gated=64, pad_plain=128)},
    input_scale_per_expert=True,
)


def shapes(geometry: Geometry) -> swizzled.Shapes:
    """dtype and shape of each of one expert's tensors, in load order."""
    return swizzled.shapes(geometry)


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`; E4M3 as U8 codes."""
    return swizzled.pack(expert, geometry, "gate")


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""
    return swizzled.unpack(packed, geometry, "gate")


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`."""
    return swizzled.tensor_names(engine)


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """The kernel's F32 [E] scalars: see `swizzled.one_alpha`."""
    return swizzled.one_alpha(scales, activation)


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """vLLM's small parameters, raw: its experts multiply them at start-up."""
    return swizzled.raw_parameters(scales)


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of vLLM's `run_cutlass_moe_fp4`, stacked over a rank's experts; `activations` is passed through."""
    return {
        **activations,
        "a1_gscale": scalars["w13_input_scale_quant"],
        "w1_fp4": packed["w13_weight"],
        "w1_blockscale": packed["w13_weight_scale"].view(torch.float8_e4m3fn),
        "w1_alphas": scalars["g1_alphas"],
        "a2_gscale": scalars["w2_input_scale_quant"],
        "w2_fp4": packed["w2_weight"],
        "w2_blockscale": packed["w2_weight_scale"].view(torch.float8_e4m3fn),
        "w2_alphas": scalars["g2_alphas"],
    }
