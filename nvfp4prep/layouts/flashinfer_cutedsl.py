"""flashinfer-cutedsl: FlashInfer's `CuteDslMoEWrapper` on SM100 and SM103.

Rows: up first, then gate; each half padded on its own to a multiple of 64 (not gated: 128); chunks of 64 rows of the
two halves in turn (ILV64) for weights and scales; scales then through the 128x4 swizzle.

    w13_weight         U8    [2I', H'/2]    chunk c of 64 rows <- chunk c//2 of the half c%2 (0 up, 1 gate)
    w13_weight_scale   E4M3  [2I', H'/16]   same rows, then swizzled
    w2_weight          U8    [H', I'/2]
    w2_weight_scale    E4M3  [up(H',128), I'/16]    swizzled

The kernel takes the scales as a strided view (32, 4, mt, 4, kt, E) of the same bytes; `kernel_args` makes it.
Sources: vLLM 0.33 `prepare_nvfp4_moe_layer_for_flashinfer_cutedsl` (pads H to 256); SGLang 0.5.23 (no padding of H, no
clamp: swiglu-oai is silently ignored there, so it is refused here); FlashInfer 0.7.2 `convert_sf_to_mma_layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    pad_expert,
    split,
)
from nvfp4prep.layouts.permutations import interleave_halves, separate_halves

NAME = "flashinfer-cutedsl"
VERSION = 1
REQUIRES = Requires(
    kernel="CuteDslMoEWrapper",
    gpus=("sm100", "sm103"),
    engines={
        "vllm": EngineRules("flashinfer_cutedsl", 16, pad_gated=64, pad_plain=128, pad_hidden=256),
        "sglang": EngineRules("flashinfer_cutedsl", 128, pad_gated=64, pad_plain=128, activations=("silu", "relu2")),
    },
)


def shapes(geometry: Geometry) -> swizzled.Shapes:
    """dtype and shape of each of one expert's tensors, in load order."""
    return swizzled.shapes(geometry)


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`; E4M3 as U8 codes."""
    padded = pad_expert(expert, geometry)
    w13 = join(padded, "up")
    if geometry.gated:
        w13 = Matrix(interleave_halves(w13.weight), interleave_halves(w13.scale))
    return swizzled.stored(w13, padded.down)


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack."""
    w13, down = swizzled.restored(packed, geometry)
    if geometry.gated:
        w13 = Matrix(separate_halves(w13.weight), separate_halves(w13.scale))
    return crop_expert(Expert(*split(w13, geometry.gated, "up"), down), geometry)


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`."""
    return swizzled.tensor_names(engine)


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """The kernel's F32 [E] scalars: see `swizzled.one_alpha`."""
    return swizzled.one_alpha(scales, activation)


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """The engine's small parameters, by its names; both engines multiply raw scales at start-up."""
    raw = swizzled.raw_parameters(scales)
    if facts.engine == "vllm":
        return raw
    raw["w13_weight_scale_2"] = scales.up if scales.gate is None else torch.stack([scales.gate, scales.up], 1)
    names = ("g1_alphas", "g2_alphas", "w13_input_scale_quant", "w2_input_scale_quant")
    del raw["w13_input_scale"], raw["w2_input_scale"]
    return raw | {name: scalars[name] for name in names}


def mma_view(scale: Tensor) -> Tensor:
    """Swizzled scales [E, M', K'] as the kernel's strided view (32, 4, M'/128, 4, K'/4, E); no copy."""
    experts, rows, columns = scale.shape
    return scale.view(experts, rows // 128, columns // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `CuteDslMoEWrapper.run`, stacked over a rank's experts; `activations` (x, x_sf, …) passes.

    swiglu_alpha, swiglu_beta and swiglu_limit are arguments of the wrapper's constructor.
    """
    return {
        **activations,
        "w1_weight": packed["w13_weight"],
        "w1_weight_sf": mma_view(packed["w13_weight_scale"]),
        "w1_alpha": scalars["g1_alphas"],
        "fc2_input_scale": scalars["w2_input_scale_quant"][:1],
        "w2_weight": packed["w2_weight"],
        "w2_weight_sf": mma_view(packed["w2_weight_scale"]),
        "w2_alpha": scalars["g2_alphas"],
    }
