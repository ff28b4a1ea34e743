"""flashinfer-cutedsl: FlashInfer's `CuteDslMoEWrapper` (SM100, SM103), which needs nvidia-cutlass-dsl and triton.

Activations are quantised before the call, with linear block scales that get a last dimension of 1. The clamped SwiGLU's
numbers are the wrapper's own (in real units), not the kernel's per expert.
Source: FlashInfer 0.7.2.post1 `fused_moe/cute_dsl/fused_moe.py`; vLLM 0.33 `FlashInferCuteDSLExperts` uses the function
of the same module.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.layouts import flashinfer_cutedsl as layout
from nvfp4prep.smoke.kernels import common
from nvfp4prep.smoke.layer import PackedLayer, Routing

NAME = "flashinfer-cutedsl"
LAYOUTS: tuple[str, ...] = (layout.NAME,)

_PACKAGES = common.FLASHINFER | {"cutlass": "pip install nvidia-cutlass-dsl", "triton": "pip install triton"}


def available() -> str | None:
    """None if the kernel can run here, else why not and what to install."""
    return common.flashinfer_problem(layout.REQUIRES.kernel, layout.REQUIRES.gpus, _PACKAGES)


def VERSIONS() -> dict[str, str]:
    """The GPU and the libraries."""
    return common.gpu_versions("flashinfer-python", "nvidia-cutlass-dsl")


def run(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
    """F32 [T, H], the weighted sum over the rank's experts, on x's device."""
    common.require(available())
    where = common.device()
    wrapper = _kernel("flashinfer.fused_moe.cute_dsl.fused_moe")(**wrapper_arguments(layer, routing, where))
    result = wrapper.run(**arguments(layer, x, routing, where))
    return common.cropped_output(layer, common.only_output(result), x)


def wrapper_arguments(layer: PackedLayer, routing: Routing, where: torch.device) -> dict[str, Any]:
    """Every argument of the wrapper's constructor, by name."""
    swiglu = {
        f"swiglu_{name}": value
        for name, value in (
            ("alpha", layer.activation.alpha),
            ("beta", layer.activation.beta),
            ("limit", layer.activation.limit),
        )
        if value is not None
    }
    return {
        "num_experts": common.all_experts(layer),
        "top_k": routing.ids.shape[1],
        "hidden_size": layer.geometry.padded_hidden,
        "intermediate_size": layer.geometry.padded_intermediate,
        "num_local_experts": len(layer.experts),
        "local_expert_offset": layer.experts.start,
        "output_dtype": torch.bfloat16,
        "device": str(where),
        "activation_type": int(common.activation_type(layer)),
        "quant_mode": "w4a4",
        **swiglu,
    }


def arguments(layer: PackedLayer, x: Tensor, routing: Routing, where: torch.device) -> dict[str, Any]:
    """Every argument of `run`, by name."""
    scalars = common.moved(layer.scalars, where)
    codes, block = common.quantized_input(layer, x, scalars, where, swizzled=False)
    activations = {
        "x": codes,
        "x_sf": block.reshape(len(codes), -1, 1),
        "token_selected_experts": common.expert_ids(routing, where),
        "token_final_scales": common.expert_weights(routing, where),
    }
    return layout.kernel_args(common.moved(layer.packed, where), scalars, activations)


def _kernel(module: str) -> Any:
    return importlib.import_module(module).CuteDslMoEWrapper
