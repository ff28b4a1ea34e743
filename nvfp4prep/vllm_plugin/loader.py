"""vLLM's load format `nvfp4prep`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from nvfp4prep.errors import UsageFault
from nvfp4prep.loading import open_packed
from nvfp4prep.serving import METHOD, mapped, other_tensors

logger = init_logger(__name__)


class PackedLoader(BaseModelLoader):
    """Other tensors through the model's own `load_weights`, then each module's packed experts."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: `override_quantization_method` has refused what is not local."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load a model that was just made.

        Raises:
            InputRefused: no packed output, or a damaged one.
            UsageFault: it is packed for something else, or experts of the model are not in it.
        """
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

        from nvfp4prep.vllm_plugin.experts import PackedMoE

        if model_config.quantization != METHOD:
            raise UsageFault(
                f"--load-format {METHOD} is for packed outputs, and {model_config.model} is quantised as "
                f"{model_config.quantization}"
            )
        started = time.perf_counter()
        packed = open_packed(Path(model_config.model))
        model.load_weights(other_tensors(packed))
        layers = {
            mapped(getattr(model, "hf_to_vllm_mapper", None), f"{layer.path}.experts"): layer for layer in packed.layers
        }
        modules = {module.layer_name: module for module in model.modules() if isinstance(module, RoutedExperts)}
        for name, module in modules.items():
            if isinstance(module.quant_method, PackedMoE) != (name in layers):
                raise UsageFault(
                    f"{packed.path}: vLLM quantises {name} with {type(module.quant_method).__name__}; packed are "
                    f"{', '.join(sorted(layers))}"
                )
            if name in layers:
                module.quant_method.hold(module, packed, layers[name])
        elsewhere = sorted(layers.keys() - modules.keys())  # on other pipeline ranks, or of a draft model
        logger.info(
            "nvfp4prep: %d layers of packed experts loaded in %.2f s%s",
            len(layers) - len(elsewhere),
            time.perf_counter() - started,
            f"; not in this process: {', '.join(elsewhere)}" if elsewhere else "",
        )
