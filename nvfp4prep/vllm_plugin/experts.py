"""The quant method of packed routed experts in vLLM, and vLLM's configs that hand it out."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import map_nvfp4_backend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ModelOptNvFp4FusedMoE,
)
from vllm.model_executor.utils import weights_already_processed

from nvfp4prep.errors import UsageFault
from nvfp4prep.layouts import LAYOUTS
from nvfp4prep.loading import PackedCheckpoint, PackedExperts, PackedLayer
from nvfp4prep.schema import Format
from nvfp4prep.serving import METHOD, Module, Running, check_module, check_running

_SETTLED = ("g1_scale_c", "gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta")
"""What trtllm's experts compute at start-up from the gate's alpha alone, and a packed output holds."""
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class PackedMoE(ModelOptNvFp4FusedMoE):
    """vLLM's method, which takes a packed output's parameters instead of converting.

    With `--moe-backend auto` it asks for the backend that the output is packed for; vLLM says why if there is none.
    """

    def __init__(self, quant_config: Any, moe_config: Any, layout: str) -> None:
        if moe_config.moe_backend == "auto":
            moe_config.moe_backend = LAYOUTS[layout].REQUIRES.engines["vllm"].backend
        super().__init__(quant_config, moe_config)
        self.held: PackedExperts | None = None

    def hold(self, module: RoutedExperts, packed: PackedCheckpoint, layer: PackedLayer) -> None:
        """Put a layer's packed parameters into a module, in the place of those that it made.

        Raises:
            UsageFault: the module, or the way the engine runs, is not what the output is packed for.
            EnvironmentFault: I/O.
        """
        moe = module.moe_config
        parallel = moe.moe_parallel_config
        place = f"{packed.path}: {layer.path}"
        backends = {
            map_nvfp4_backend(rules.backend): rules.backend
            for found in LAYOUTS.values()
            if found.REQUIRES.format is Format.NVFP4
            for rules in (found.REQUIRES.engines["vllm"],)
        }
        running = Running(
            "vllm",
            vllm.__version__,
            backends.get(self.nvfp4_backend, self.nvfp4_backend.value.lower()),
            parallel.tp_size,
            parallel.ep_size,
            _DTYPES.get(module.params_dtype, str(module.params_dtype)),
        )
        check_running(packed, running)
        unpadded = moe.hidden_dim_unpadded or moe.hidden_dim
        check_module(packed, layer, Module(moe.num_experts, unpadded, moe.intermediate_size, moe.is_act_and_mul))
        if parallel.enable_eplb:
            raise UsageFault(f"{place}: packed experts stay where they are; start vLLM without --enable-eplb")
        if parallel.ep_size > 1 and module.expert_placement_strategy != "linear":
            raise UsageFault(
                f"{place}: each EP rank is packed with experts that follow each other, and the placement is "
                f"{module.expert_placement_strategy}; start vLLM with --expert-placement-strategy linear"
            )
        if self.per_token_activation:
            raise UsageFault(
                f"{place}: packed with the checkpoint's input scales, and activations are scaled per token"
            )
        device = module.w13_weight.device
        for name in [name for name, _ in module.named_parameters(recurse=False)]:
            module.register_parameter(name, None)  # frees it; what stays None, the backend has not
        self.held = packed.load_experts(layer.path, (parallel.tp_rank, parallel.ep_rank), device)
        for name, value in self.held.parameters.items():
            if name not in _SETTLED:
                module.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """What vLLM's own conversion does after it has converted."""
        held = self.held
        if held is None:
            raise UsageFault(
                f"{layer.layer_name}: its packed experts were not loaded; start vLLM with --load-format {METHOD}"
            )
        self.held = None  # vLLM multiplies some in place: not twice
        if held.layout == "flashinfer-trtllm":
            with weights_already_processed():
                super().process_weights_after_loading(layer)
            self._settle(layer, held)
            return
        sizes = held.geometry
        if held.layout == "flashinfer-cutedsl" or (
            held.layout != "vllm-marlin" and sizes.gated and sizes.padded_intermediate != sizes.intermediate
        ):
            self._restore_padded_moe_dims(layer)
        self._build_moe_kernel(layer)

    def _settle(self, layer: RoutedExperts, held: PackedExperts) -> None:
        """trtllm's scalars as packed: exact where gate and up have scales of their own."""
        ours = {name: value for name, value in held.parameters.items() if name in _SETTLED}
        theirs = {name for name in _SETTLED if getattr(layer, name, None) is not None}
        if theirs != ours.keys():
            raise UsageFault(
                f"{layer.layer_name}: packed with {', '.join(sorted(ours))}, and vLLM's model computes with "
                f"{', '.join(sorted(theirs))}: its activation is not the one of config.json"
            )
        for name, value in ours.items():
            getattr(layer, name).data.copy_(value)


class PackedNvFp4Config(ModelOptNvFp4Config):
    """vLLM's config of NVFP4 and W4A16_NVFP4 checkpoints, with packed routed experts."""

    layout: str

    def FusedMoEMethodCls(self, quant_config: Any, moe_config: Any) -> PackedMoE:
        """What vLLM calls to make the method of routed experts."""
        return PackedMoE(quant_config, moe_config, self.layout)


class PackedMixedConfig(ModelOptMixedPrecisionConfig):
    """vLLM's config of MIXED_PRECISION checkpoints, with packed routed experts where those are NVFP4."""

    layout: str

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if isinstance(layer, RoutedExperts) and not self.is_layer_excluded(prefix):
            configs = {"NVFP4": self.nvfp4_config, "W4A16_NVFP4": self.w4a16_nvfp4_config}
            found = configs.get(self._resolve_quant_algo(prefix) or "")
            if found is not None:
                return PackedMoE(found, layer.moe_config, self.layout)
        return super().get_quant_method(layer, prefix)


CONFIGS = (PackedMixedConfig, PackedNvFp4Config)
