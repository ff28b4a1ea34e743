"""vLLM's plugin: the quantisation and the load format `nvfp4prep`, so that packed experts load without being converted.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). What is packed is routed
experts; every other tensor loads and is processed as in the `hf` checkpoint, by vLLM's own ModelOpt code.

    config.py    config.json's quantisation -> vLLM's own ModelOpt config, with experts.py's method for routed experts
    experts.py   the method: takes packed parameters instead of converting, refuses what is packed otherwise
    loader.py    the load format: other tensors through the model's own loader, then each module's packed experts
"""

from __future__ import annotations


def register() -> None:
    """Register both names. May be called again."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from nvfp4prep.serving import METHOD
    from nvfp4prep.vllm_plugin.config import PackedConfig
    from nvfp4prep.vllm_plugin.loader import PackedLoader

    if _LOAD_FORMAT_TO_MODEL_LOADER.get(METHOD) is not PackedLoader:
        register_quantization_config(METHOD)(PackedConfig)
        register_model_loader(METHOD)(PackedLoader)
