"""Configs of target compressed-tensors in the engines' own parsers (vLLM 0.33.0, SGLang 0.5.23): no engine is run.

Their classes are cut out of the unzipped wheels as in `engine_code`, and need the library compressed-tensors.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, cast

import checkpoints
import damage
import oracle
import pytest
import torch
from engine_code import PACKED, _common, extract, extract_method
from runner import run

FOLDER = os.environ.get("NVFP4PREP_ENGINES")
if not FOLDER:
    reason = "not available: the engines' parsers (NVFP4PREP_ENGINES names no folder of unzipped wheels)"
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("compressed_tensors", reason="not available: compressed-tensors (pip install -e '.[dev]')")

from compressed_tensors.config import CompressionFormat, SparsityCompressionConfig  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    ActivationOrdering,
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from compressed_tensors.transform import TransformConfig  # noqa: E402

INT4 = checkpoints.INT4
AWQ, W4A16, KV = "qwen3moe-nvfp4-awqlite", "qwen3moe-w4a16nvfp4", "qwen3moe-nvfp4-expertsonly-fp8kv"
NVFP4 = (
    "qwen3moe-nvfp4-perexpert",
    AWQ,
    W4A16,
    KV,
    "dsv3-nvfp4",
    "mixtral-nvfp4",
    "nemotronh-nvfp4",
    "qwen3-dense-nvfp4",
)
FUSED = {"qkv_proj": "Qkv", "gate_up_proj": "Merged", "fused_qkv_a_proj": "Merged"}


class Logger(logging.Logger):
    """The engines' loggers have these besides."""

    info_once = warning_once = logging.Logger.debug


def named(name: str) -> Any:
    """A class that remembers what it was made with; stands for a scheme, which is chosen here and not used."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs

    return type(name, (), {"__init__": init, "get_min_capability": classmethod(lambda cls: 75)})


def layer_of(name: str) -> Any:
    """A layer of a class with a name; its tensors and sizes don't matter for the choice."""
    layer = type(name, (), {})()
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
    layer.moe_config = None
    return layer


def space_with(names: list[str]) -> dict[str, Any]:
    return (
        _common()
        | {
            "logger": Logger("engine"),
            "torch": torch,
            "cast": cast,
            "partial": partial,
            "suppress": suppress,
            "MappingProxyType": MappingProxyType,
            "CompressionFormat": CompressionFormat,
            "SparsityCompressionConfig": SparsityCompressionConfig,
            "ActivationOrdering": ActivationOrdering,
            "QuantizationArgs": QuantizationArgs,
            "QuantizationStrategy": QuantizationStrategy,
            "QuantizationType": QuantizationType,
            "TransformConfig": TransformConfig,
            "WNA16_SUPPORTED_BITS": [4, 8],
            "re": __import__("re"),
        }
        | {name: named(name) for name in names}
    )


class Vllm:
    """vLLM's choice of a scheme for linears and experts."""

    kinds: dict[str, tuple[str, str]] = {  # noqa: RUF012
        "int4": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoEMethod"),
        "nvfp4": ("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A4Nvfp4MoEMethod"),
        "nvfp4a16": ("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    }

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        quantization = root / "vllm" / "vllm" / "model_executor" / "layers" / "quantization"
        package = quantization / "compressed_tensors"
        space = space_with(["CompressedTensorsWNA16", "CompressedTensorsW4A4Fp4", "UnquantizedFusedMoEMethod"])
        space["BaseKVCacheMethod"] = object
        space["current_platform"] = SimpleNamespace(is_rocm=lambda: False, get_device_capability=lambda: None)
        extract(quantization / "base_config.py", ["QuantizationConfig"], space)
        extract(
            quantization / "utils" / "config_utils.py", ["is_equal_or_regex_match", "find_matching_patterns"], space
        )
        extract(
            package / "utils.py",
            [
                "is_activation_quantization_format",
                "should_ignore_layer",
                "find_matched_target",
                "_find_first_match",
                "_match_fused_layer",
            ],
            space,
        )
        extract(
            package / "compressed_tensors.py",
            ["SPARSITY_CONFIG_NAME", "CompressedTensorsConfig", "CompressedTensorsKVCacheMethod"],
            space,
        )
        space["__package__"] = "engine_stub"
        for module, name in (
            ("compressed_tensors_moe_wna16", "CompressedTensorsWNA16MoEMethod"),
            ("compressed_tensors_moe_w4a4_nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod"),
        ):
            stub = ModuleType(f"engine_stub.{module}")
            setattr(stub, name, named(name))
            monkeypatch.setitem(sys.modules, stub.__name__, stub)
        monkeypatch.setitem(sys.modules, "engine_stub", ModuleType("engine_stub"))
        moe = package / "compressed_tensors_moe" / "compressed_tensors_moe.py"
        extract_method(moe, "CompressedTensorsMoEMethod", "get_moe_method", space)
        self.space = space

    def parse(self, section: dict[str, Any]) -> Any:
        parsed = self.space["CompressedTensorsConfig"].from_config(deepcopy(section))
        parsed.packed_modules_mapping = PACKED
        return parsed

    def linear(self, parsed: Any, name: str, kind: str) -> Any:
        return parsed.get_scheme(layer_of(f"{kind}ParallelLinear"), name)

    def head(self, parsed: Any) -> Any:
        """As `get_quant_method` asks of a ParallelLMHead."""
        return parsed.get_scheme(layer_of("ParallelLMHead"), "lm_head")

    def experts(self, parsed: Any, name: str) -> Any:
        found = self.space["get_moe_method"](parsed, layer_of("RoutedExperts"), name)
        return None if type(found).__name__ == "UnquantizedFusedMoEMethod" else found

    def kv_cache(self, parsed: Any) -> None:
        """Raises for a scheme that is not supported."""
        self.space["CompressedTensorsKVCacheMethod"].validate_kv_cache_scheme(parsed.kv_cache_scheme)


class Sglang:
    """SGLang's choice of a scheme for linears and experts."""

    kinds: dict[str, tuple[str, str]] = {  # noqa: RUF012
        "int4": ("CompressedTensorsWNA16", "CompressedTensorsWNA16MoE"),
        "nvfp4": ("CompressedTensorsW4A4Fp4", "CompressedTensorsW4A4Nvfp4MoE"),
        "nvfp4a16": ("CompressedTensorsW4A16Fp4", "CompressedTensorsW4A16Nvfp4MoE"),
    }

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        quantization = root / "sglang" / "sglang" / "srt" / "layers" / "quantization"
        package = quantization / "compressed_tensors"
        space = space_with([name for kind in self.kinds.values() for name in kind])
        no = SimpleNamespace(
            is_flashinfer_trtllm=lambda: False, is_triton=lambda: False, is_auto=lambda: False, is_marlin=lambda: False
        )
        space |= {
            "List": list, "Dict": dict, "Optional": Any, "BaseModel": object, "BaseKVCacheMethod": object,
            "_is_npu": False, "_is_hip": False, "_is_xpu": False, "_is_cuda": True,
            "get_moe_runner_backend": lambda: no, "get_fp4_gemm_runner_backend": lambda: no,
            "get_platform": lambda: SimpleNamespace(is_sm100=False),
        }  # fmt: skip
        extract(quantization / "base_config.py", ["QuantizationConfig"], space)
        extract(
            package / "utils.py",
            [
                "is_activation_quantization_format",
                "should_ignore_layer",
                "check_equal_or_regex_match",
                "find_matched_target",
                "_find_first_match",
                "_is_equal_or_regex_match",
                "_match_fused_layer",
            ],
            space,
        )
        extract(
            package / "compressed_tensors.py",
            ["SPARSITY_CONFIG_NAME", "CompressedTensorsConfig", "CompressedTensorsKVCacheMethod"],
            space,
        )
        self.space = space

    def parse(self, section: dict[str, Any]) -> Any:
        parsed = self.space["CompressedTensorsConfig"].from_config(
            deepcopy(section) | {"packed_modules_mapping": PACKED}
        )
        parsed._check_scheme_supported = lambda *args, **kwargs: True  # asks for the GPU
        return parsed

    def linear(self, parsed: Any, name: str, kind: str) -> Any:
        found = parsed.get_scheme_dict(layer_of(f"{kind}ParallelLinear"), name)
        if not found:
            return None
        return parsed._get_scheme_from_parts(found["weights"], found["input_activations"], found["format"])

    def head(self, parsed: Any) -> Any:
        """As `get_lm_head_scheme` finds it, up to what it asks of the GPU."""
        ignored = self.space["should_ignore_layer"]("lm_head", ignore=parsed.ignore, fused_mapping=PACKED)
        match = self.space["check_equal_or_regex_match"]
        target = next((one for one in parsed.target_scheme_map if match(layer_name="lm_head", targets=[one])), None)
        if ignored or target is None:
            return None
        found = parsed.get_scheme_dict(layer_of("ParallelLMHead"), "lm_head", target)
        return parsed._get_scheme_from_parts(found["weights"], found["input_activations"], found["format"])

    def experts(self, parsed: Any, name: str) -> Any:
        return parsed.get_moe_scheme(layer_of("FusedMoE"), name)

    def kv_cache(self, parsed: Any) -> None:
        assert parsed.kv_cache_scheme is None or parsed.kv_cache_quant_algo == "FP8"


@pytest.fixture(params=[Vllm, Sglang])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    assert FOLDER
    return request.param(Path(FOLDER), monkeypatch)


def modules_of(view: oracle.View) -> Iterator[tuple[str, str, bool]]:
    """(name as the engine builds it, kind, stored packed) of each linear outside the experts and of each container."""
    stored = {}
    for name, tensor in view.tensors.items():
        module, _, param = name.rpartition(".")
        if param == "weight_packed" or (param == "weight" and len(tensor.shape) == 2):
            stored[module] = param == "weight_packed"
    done = set()
    for fused, kind in FUSED.items():
        for module in stored:
            parent, _, last = module.rpartition(".")
            if last == PACKED[fused][0] and ".experts." not in module and f"{parent}.{PACKED[fused][1]}" in stored:
                shards = [f"{parent}.{name}" for name in PACKED[fused]]
                done |= set(shards)
                packed = {stored[shard] for shard in shards}
                assert len(packed) == 1, shards
                yield f"{parent}.{fused}", kind, packed.pop()
    containers: dict[str, set[bool]] = {}
    for module, packed_ in stored.items():
        if ".experts." in module:
            containers.setdefault(module.partition(".experts.")[0] + ".experts", set()).add(packed_)
        elif module not in done and not module.endswith(("embed_tokens", "embeddings", "lm_head", "conv1d")):
            yield module, "Row", packed_
    for container, kinds in containers.items():
        (packed_,) = kinds
        yield container, "Experts", packed_


@pytest.mark.parametrize("name", [*INT4, *NVFP4])
def test_parsers_choose_the_scheme_of_each_layer(
    name: str, engine: Any, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Quantised what is stored packed, with the scheme of its format, and nothing else."""
    options = ("--target", "compressed-tensors", "--pre-quant-scale", "fold")
    assert run("convert", checkpoint(name), tmp_path / "out", *options).code == 0
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    parsed = engine.parse(section)
    engine.kv_cache(parsed)
    assert (parsed.kv_cache_scheme is not None) == (name == KV)
    form = "int4" if name in INT4 else "nvfp4a16" if name == W4A16 else "nvfp4"
    linear, experts = engine.kinds[form]
    seen = set()
    for module, kind, packed in modules_of(oracle.read(tmp_path / "out")):
        found = engine.experts(parsed, module) if kind == "Experts" else engine.linear(parsed, module, kind)
        expected = (experts if kind == "Experts" else linear) if packed else None
        assert (None if found is None else type(found).__name__) == expected, module
        if found is not None and form == "int4" and kind != "Experts":
            assert (found.kwargs["num_bits"], found.kwargs["group_size"], found.kwargs["symmetric"]) == (4, 128, True)
        seen.add((kind == "Experts", packed))
    assert (name == "qwen3-dense-nvfp4") != ((True, True) in seen)
    assert any(not packed for _, packed in seen) or "dense" in name


@pytest.mark.parametrize("name", ["qwen3moe-int4awq", "qwen3moe-nvfp4-perexpert"])
@pytest.mark.parametrize("quantised", [True, False])
def test_heads(name: str, quantised: bool, engine: Any, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(name), tmp_path / "source", *([damage.quantised_head] if quantised else []))
    options = ("--target", "compressed-tensors", "--pre-quant-scale", "fold")
    assert run("convert", source, tmp_path / "out", *options).code == 0
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    found = engine.head(engine.parse(section))
    expected = engine.kinds["int4" if "int4" in name else "nvfp4"][0] if quantised else None
    assert (None if found is None else type(found).__name__) == expected
