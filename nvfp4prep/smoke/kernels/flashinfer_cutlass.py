"""flashinfer-cutlass: FlashInfer's `cutlass_fused_moe` with NVFP4 (SM100, SM103, SM120, SM121).

Activations are quantised before the call, with swizzled block scales. A TP rank runs as tp_size 1: the kernel's tp_rank
only decides who adds the down bias, and packing has already given that to the first rank and zeros to the others.
Source: FlashInfer 0.7.2.post1 `fused_moe/core.py`, `flashinfer_cutlass_fused_moe_binding.cu`; vLLM 0.33 calls it alike.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.layouts import flashinfer_cutlass as layout
from nvfp4prep.smoke.kernels import common
from nvfp4prep.smoke.layer import PackedLayer, Routing

NAME = "flashinfer-cutlass"
LAYOUTS: tuple[str, ...] = (layout.NAME,)


def available() -> str | None:
    """None if the kernel can run here, else why not and what to install."""
    return common.flashinfer_problem(layout.REQUIRES.kernel, layout.REQUIRES.gpus, common.FLASHINFER)


def VERSIONS() -> dict[str, str]:
    """The GPU and the libraries."""
    return common.gpu_versions("flashinfer-python")


def run(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
    """F32 [T, H], the weighted sum over the rank's experts, on x's device."""
    common.require(available())
    result = _kernel("flashinfer.fused_moe")(**arguments(layer, x, routing, common.device()))
    return common.cropped_output(layer, common.only_output(result), x)


def arguments(layer: PackedLayer, x: Tensor, routing: Routing, where: torch.device) -> dict[str, Any]:
    """Every argument of the call, by name."""
    scalars = common.moved(layer.scalars, where)
    codes, block = common.quantized_input(layer, x, scalars, where, swizzled=True)
    activations = {
        "input": codes,
        "input_sf": block,
        "swizzled_input_sf": True,
        "token_selected_experts": common.expert_ids(routing, where),
        "token_final_scales": common.expert_weights(routing, where),
        "output_dtype": torch.bfloat16,
        "tp_size": 1,
        "tp_rank": 0,
        "ep_size": layer.target.ep,
        "ep_rank": layer.experts.start // len(layer.experts),
        "activation_type": common.activation_type(layer),
    }
    return layout.kernel_args(common.moved(layer.packed, where), scalars, activations)


def _kernel(module: str) -> Any:
    return importlib.import_module(module).cutlass_fused_moe
