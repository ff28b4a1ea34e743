"""SGLang's plugin: a packed output loads like the ModelOpt checkpoint behind it, its experts without being converted.

SGLang calls `register` early in each of its processes (entry point group `sglang.srt.plugins`). Two of its functions
are wrapped, through its own hook registry; both do as ever for every other checkpoint:

    ModelConfig._parse_quant_hf_config   takes the logical quantization_config for the packed one, so that SGLang sees
                                         modelopt_fp4 or modelopt_mixed, and chooses as it does for those
    get_model_loader                     gives loader.py's, whatever else would have been chosen

Read from SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CONFIG = "sglang.srt.configs.model_config.ModelConfig._parse_quant_hf_config"
_LOADER = "sglang.srt.model_loader.loader.get_model_loader"


def register() -> None:
    """Register the two hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CONFIG, logical_section, HookType.AROUND)
    HookRegistry.register(_LOADER, packed_loader, HookType.AROUND)


def logical_section(original: Callable[..., Any], model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Before SGLang parses config.json's quantisation: the logical one, with the packed one under `nvfp4prep`.

    Raises:
        UsageFault: packed for another engine or version, or no manifest.
    """
    from nvfp4prep.serving import METHOD, check_version, logical_quantization

    section = getattr(model_config.hf_config, "quantization_config", None)
    if isinstance(section, dict) and section.get("quant_method") == METHOD:
        import sglang

        path, packed = str(model_config.model_path), dict(section)
        engine, version = str(packed.get("engine")), str(packed.get("engine_version"))
        check_version("sglang", sglang.__version__, engine, version, path)
        model_config.hf_config.quantization_config = {**logical_quantization(path), METHOD: packed}
    return original(model_config, *args, **kwargs)


def packed_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """The loader of packed outputs, or SGLang's own choice.

    Raises:
        UsageFault: a load format is asked for that is not the default.
    """
    from nvfp4prep.serving import METHOD

    section = getattr(getattr(model_config, "hf_config", None), "quantization_config", None)
    if not isinstance(section, dict) or METHOD not in section:
        return original(load_config, model_config)
    from sglang.srt.configs.load_config import LoadFormat

    from nvfp4prep.errors import UsageFault
    from nvfp4prep.sglang_plugin.loader import PackedLoader

    if load_config.load_format != LoadFormat.AUTO:
        raise UsageFault(
            f"{model_config.model_path}: a packed output loads in its own way, and --load-format "
            f"{getattr(load_config.load_format, 'value', load_config.load_format)} is asked for; leave it out"
        )
    return PackedLoader(load_config)
