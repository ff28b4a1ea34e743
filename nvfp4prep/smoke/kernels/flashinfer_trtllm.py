"""flashinfer-trtllm: FlashInfer's `trtllm_fp4_block_scale_routed_moe` (SM100, SM103) with routing that is given.

The same kernel as `trtllm_fp4_block_scale_moe`, which computes its own routing. Routing goes in as a tuple of I32 ids
and F32 weights, consumed as they are; the packed form would round the weights to 16 bits.
Source: FlashInfer 0.7.2.post1 `fused_moe/core.py`, `trtllm_fused_moe_kernel_launcher.cu`; vLLM 0.33 calls it alike.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.layouts import flashinfer_trtllm as layout
from nvfp4prep.smoke.kernels import common
from nvfp4prep.smoke.layer import PackedLayer, Routing

NAME = "flashinfer-trtllm"
LAYOUTS: tuple[str, ...] = (layout.NAME,)

_NOT_USED = 1
"""routing_method_type: the kernel doesn't read it when routing is given; the value that vLLM passes."""


def available() -> str | None:
    """None if the kernel can run here, else why not and what to install."""
    return common.flashinfer_problem(layout.REQUIRES.kernel, layout.REQUIRES.gpus, common.FLASHINFER)


def VERSIONS() -> dict[str, str]:
    """The GPU and the libraries."""
    return common.gpu_versions("flashinfer-python", "flashinfer-cubin")


def run(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
    """F32 [T, H], the weighted sum over the rank's experts, on x's device."""
    common.require(available())
    result = _kernel("flashinfer.fused_moe")(**arguments(layer, x, routing, common.device()))
    return common.cropped_output(layer, common.only_output(result), x)


def arguments(layer: PackedLayer, x: Tensor, routing: Routing, where: torch.device) -> dict[str, Any]:
    """Every argument of the call, by name."""
    scalars = common.moved(layer.scalars, where)
    codes, block = common.quantized_input(layer, x, scalars, where, swizzled=False)
    enums = importlib.import_module("flashinfer.tllm_enums")
    activations = {
        "topk_ids": (common.expert_ids(routing, where), common.expert_weights(routing, where)),
        "routing_bias": None,
        "hidden_states": codes,
        "hidden_states_scale": block.view(torch.float8_e4m3fn).reshape(len(codes), -1),
        "num_experts": common.all_experts(layer),
        "top_k": routing.ids.shape[1],
        "n_group": None,
        "topk_group": None,
        "intermediate_size": layer.geometry.padded_intermediate,
        "local_expert_offset": layer.experts.start,
        "local_num_experts": len(layer.experts),
        "routed_scaling_factor": None,
        "routing_method_type": _NOT_USED,
        "do_finalize": True,
        "activation_type": int(common.activation_type(layer)),
        "hidden_states_scale_layout": enums.SfLayout.layout_linear,
    }
    return layout.kernel_args(common.moved(layer.packed, where), scalars, activations)


def _kernel(module: str) -> Any:
    return importlib.import_module(module).trtllm_fp4_block_scale_routed_moe
