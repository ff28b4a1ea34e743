"""What vLLM makes of config.json's `quant_method: nvfp4prep`: its own ModelOpt config of the logical checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from nvfp4prep.errors import UsageFault
from nvfp4prep.serving import METHOD, check_version, logical_quantization


class PackedConfig(QuantizationConfig):
    """Found by name; never held by a model: `from_config` gives a subclass of vLLM's own config."""

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim packed outputs, and put the logical quantization_config in the place of the packed one.

        vLLM reads more of that section than the method's name (the KV cache's dtype, for one). The packed section stays
        under the key `nvfp4prep`.

        Raises:
            UsageFault: another engine or version, or no manifest.
        """
        if METHOD in hf_quant_cfg:
            return METHOD
        if hf_quant_cfg.get("quant_method") != METHOD:
            return None
        import vllm

        path = str(getattr(hf_config, "_name_or_path", ""))
        packed = dict(hf_quant_cfg)
        check_version("vllm", vllm.__version__, str(packed.get("engine")), str(packed.get("engine_version")), path)
        section = {**logical_quantization(path), METHOD: packed}
        sections = [hf_quant_cfg]
        for config in (hf_config, getattr(hf_config, "text_config", None)):
            held = getattr(config, "quantization_config", None)
            if isinstance(held, dict) and held.get("quant_method") == METHOD:
                sections.append(held)
        for held in sections:
            held.clear()
            held.update(section)
        return METHOD

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """vLLM's ModelOpt config of the logical section, whose routed experts take packed parameters."""
        from nvfp4prep.vllm_plugin.experts import CONFIGS

        if METHOD not in config:
            raise UsageFault("config.json names nvfp4prep's quantisation, but vLLM did not ask the plugin about it")
        logical = {key: value for key, value in config.items() if key != METHOD}
        for kind in CONFIGS:
            if kind.override_quantization_method(logical, None) is not None:
                parsed = kind.from_config(logical)
                parsed.layout = str(config[METHOD]["layout"]).partition("/")[0]
                return parsed
        raise UsageFault(f"vLLM's ModelOpt code knows no quant_algo {logical.get('quant_algo')!r} with NVFP4 experts")

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        raise NotImplementedError  # from_config never gives this class
