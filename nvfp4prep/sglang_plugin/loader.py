"""SGLang's loader of packed outputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.modelopt_quant import ModelOptNvFp4FusedMoEMethod
from sglang.srt.model_loader.loader import DefaultModelLoader
from torch import Tensor

from nvfp4prep.errors import UsageFault
from nvfp4prep.loading import PackedCheckpoint, open_packed
from nvfp4prep.serving import mapped, other_tensors
from nvfp4prep.sglang_plugin.experts import hold


class PackedLoader(DefaultModelLoader):
    """Other tensors through the model's own `load_weights`, then each module's packed experts."""

    packed: PackedCheckpoint

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """Load a model.

        Raises:
            InputRefused: no packed output, or a damaged one.
            UsageFault: it is packed for something else, or experts of the model are not in it.
        """
        self.packed = open_packed(Path(model_config.model_path))
        return super().load_model(model_config=model_config, device_config=device_config)

    def _get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Tensor]]:
        return other_tensors(self.packed)

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        self.load_weights_only(model, weights, target_device)
        fill(model, self.packed)
        self.postprocess_weights(model, target_device)


def fill(model: Any, packed: PackedCheckpoint) -> None:
    """Every module of routed experts with its packed layer.

    Raises:
        UsageFault: a module's layer is not packed, or packed and not what SGLang made of it.
    """
    mapper = getattr(model, "hf_to_sglang_mapper", None)
    layers = {mapped(mapper, f"{layer.path}.experts"): layer for layer in packed.layers}
    for module in model.modules():
        if not isinstance(module, FusedMoE) or module.is_shared_fused_moe:
            continue
        name = module.layer_name
        if (type(module.quant_method) is ModelOptNvFp4FusedMoEMethod) != (name in layers):
            raise UsageFault(
                f"{packed.path}: SGLang quantises {name} with {type(module.quant_method).__name__}; packed are "
                f"{', '.join(sorted(layers))}"
            )
        if name in layers:
            hold(module, packed, layers[name])
