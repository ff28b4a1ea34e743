"""Config parsing and exclude matching of vLLM and SGLang, run from their own source files.

The folder named by NVFP4PREP_ENGINES holds unzipped wheels, `vllm/vllm/...` and `sglang/sglang/...`. Nothing is
imported from them: classes and functions are cut out of their files by `ast` and executed here, unchanged, with
annotations left unevaluated. What they refer to and does not take part in parsing or matching is a stub; each is
listed with why.
"""

from __future__ import annotations
import __future__

import ast
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from copy import deepcopy
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

from nvfp4prep.engine_excludes import EngineModule

PACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}
"""Stub for the model classes' packed_modules_mapping: Qwen3, Qwen3-MoE, Mixtral and DeepSeek-V3 name these."""


class _Anything:
    """Accepts any arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def extract(path: Path, names: Iterable[str], namespace: dict[str, Any]) -> None:
    """Execute the top-level classes, functions and assignments of `names` from a file, in file order."""
    wanted = set(names)
    body = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            own = {node.name}
        elif isinstance(node, ast.Assign):
            own = {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = {node.target.id}
        else:
            continue
        if own & wanted:
            body.append(node)
            wanted -= own
    assert not wanted, f"{path} has no {sorted(wanted)}"
    _execute(ast.Module(body, []), path, namespace)


def extract_method(path: Path, owner: str, name: str, namespace: dict[str, Any]) -> None:
    """Execute one method of a class as a plain function."""
    tree = ast.parse(path.read_text())
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
    method = next(node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == name)
    _execute(ast.Module([method], []), path, namespace)


def _execute(module: ast.Module, path: Path, namespace: dict[str, Any]) -> None:
    code = compile(module, str(path), "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    exec(code, namespace)


def _common() -> dict[str, Any]:
    """Python's own names that both engines import."""
    return {
        "ABC": ABC,
        "abstractmethod": abstractmethod,
        "Any": Any,
        "Literal": Literal,
        "Mapping": Mapping,
        "MappingProxyType": MappingProxyType,
        "deepcopy": deepcopy,
        "fnmatch": fnmatch,
        "lru_cache": lru_cache,
        "logger": logging.getLogger("engine"),  # their loggers only print
    }


class Vllm:
    """vLLM's parsers and matchers."""

    def __init__(self, root: Path) -> None:
        package = root / "vllm" / "vllm"
        quantization = package / "model_executor" / "layers" / "quantization"
        space = _common() | {
            # base classes and classes of layers: built later, from a parsed config; never called here
            "FusedMoEMethodBase": _Anything,
            "BaseKVCacheMethod": _Anything,
            "Fp8Config": _Anything,  # the config of block-FP8 layers inside MIXED; no shipped checkpoint has any
        }
        extract(package / "utils" / "b12x.py", ["B12X_BLOCK_CODECS"], space)
        extract(quantization / "utils" / "quant_utils.py", ["is_layer_skipped"], space)
        extract(quantization / "base_config.py", ["QuantizationConfig"], space)
        classes = [f"ModelOpt{kind}Config" for kind in ("Fp8", "NvFp4", "MxFp8", "MixedPrecision")]
        constants = ["_BLOCK_FP8_MOE_ALGOS", "LINEAR_ALGOS", "QUANT_ALGOS", "algos_owned_by"]
        extract(quantization / "modelopt.py", ["ModelOptQuantConfigBase", *constants, *classes], space)
        extract_method(
            package / "transformers_utils" / "model_arch_config_convertor.py",
            "ModelArchConfigConvertorBase",
            "_normalize_quantization_config",
            space,
        )
        self.space = space

    def parse(self, config: Mapping[str, Any], nested: Mapping[str, Any] | None) -> Any:
        """The parsed config, as `get_config` and `get_quant_config` choose between the files. Raises as vLLM does."""
        section = deepcopy(config.get("quantization_config"))
        if section is None and nested is not None:
            section = deepcopy(dict(nested))
        section = self.space["_normalize_quantization_config"](None, SimpleNamespace(quantization_config=section))
        kinds = [self.space[f"ModelOpt{kind}Config"] for kind in ("NvFp4", "MixedPrecision", "MxFp8", "Fp8")]
        chosen = next((kind for kind in kinds if kind.override_quantization_method(section, None)), kinds[-1])
        if chosen is kinds[1] and "quantized_layers" not in section and nested is not None:
            section = deepcopy(dict(nested))  # get_quant_config: the other file for an incomplete MIXED
        parsed = chosen.from_config(section)
        parsed.packed_modules_mapping = PACKED
        return parsed

    def excludes(self, parsed: Any, module: EngineModule) -> bool:
        return bool(parsed.is_layer_excluded(module.names["vllm"]))


class Sglang:
    """SGLang's parsers and matchers."""

    def __init__(self, root: Path) -> None:
        package = root / "sglang" / "sglang" / "srt"
        quantization = package / "layers" / "quantization"
        flag = SimpleNamespace(get=lambda: False)
        space = _common() | {
            "List": list,
            "Dict": dict,
            "Optional": Any,
            "re": re,  # the package `regex`: patterns here use nothing that differs
            "Fp8Config": _Anything,  # the configs of MXFP8 and block-FP8 layers inside MIXED
            # a switch read from the environment, off by default
            "envs": SimpleNamespace(SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=flag),
        }
        extract(quantization / "base_config.py", ["QuantizationConfig"], space)
        extract(quantization / "utils.py", ["_module_path_match", "_FALLBACK_FUSED_SHARDS", "is_layer_skipped"], space)
        classes = [f"ModelOpt{kind}Config" for kind in ("Quant", "Fp8", "MixedPrecision", "Fp4")]
        extract(quantization / "modelopt_quant.py", ["_compile_exclusion_pattern", "_BLOCK_FP8_ALGOS", *classes], space)
        model_config = package / "configs" / "model_config.py"
        extract(model_config, ["unwrap_modelopt_quantization_config"], space)
        extract_method(model_config, "ModelConfig", "_parse_modelopt_quant_config", space)
        self.space = space
        self._incomplete = _assigned(package / "model_loader" / "weight_utils.py", "modelopt_mixed_config_incomplete")

    def parse(self, config: Mapping[str, Any], nested: Mapping[str, Any] | None) -> Any:
        """The parsed config, as `_parse_quant_hf_config` and `get_quant_config` find it. Raises as SGLang does."""
        section = deepcopy(config.get("quantization_config"))
        chosen = {"quantization": section} if section is not None else dict(nested or {})
        found = self.space["_parse_modelopt_quant_config"](None, chosen) or {}
        method = found.get("quant_method", "modelopt")
        kinds = {
            "modelopt_fp4": "ModelOptFp4Config",
            "modelopt_mixed": "ModelOptMixedPrecisionConfig",
            "modelopt": "ModelOptFp8Config",
            "modelopt_fp8": "ModelOptFp8Config",
        }
        if method not in kinds:
            raise ValueError(f"takes it for {method}")
        parser = self.space[kinds[method]]
        names = {
            "model_config": SimpleNamespace(quantization=method),
            "hf_quant_config": section,
        }
        if section is None or eval(self._incomplete, names):
            if nested is None:
                raise ValueError(f"Cannot find the config file for {method}")
            section = deepcopy(dict(nested))
        section["packed_modules_mapping"] = {key: PACKED[key] for key in ("qkv_proj", "gate_up_proj")}
        return parser.from_config(section)

    def excludes(self, parsed: Any, module: EngineModule) -> bool:
        """As `_get_quant_method` asks: containers of experts by one rule, linears by two."""
        name = module.names["sglang"]
        if module.is_experts:
            return bool(parsed.is_layer_excluded(name))
        skipped = self.space["is_layer_skipped"](name, parsed.exclude_modules, parsed.packed_modules_mapping)
        return bool(skipped or parsed.is_layer_excluded(name))


def _assigned(path: Path, name: str) -> Any:
    """The code of the expression that is assigned to a local variable somewhere in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return compile(ast.Expression(node.value), str(path), "eval")
    raise AssertionError(f"{path} assigns no {name}")
