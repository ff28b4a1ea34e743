"""nvfp4prep's SGLang plugin: a packed output fills a real module as SGLang's own conversion does, or is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pack_checks as packs
import pytest
import sglang
import sglang_moe
import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.layers.quantization import modelopt_quant
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptMixedPrecisionConfig
from sglang.srt.model_loader.loader import DefaultModelLoader, ModelOptModelLoader, get_model_loader
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group
from torch import nn

import nvfp4prep
from nvfp4prep import sglang_plugin
from nvfp4prep.errors import InputRefused, UsageFault
from nvfp4prep.sglang_plugin.loader import PackedLoader, fill

LAYOUTS = tuple(sglang_moe.BACKENDS)
NAME = "qwen3moe-nvfp4-perexpert"
RANKS = {"one": (1, 1), "tp2": (2, 1), "ep2": (1, 2), "tp2-ep2": (2, 2)}
CASES = [
    *((NAME, layout, ranks) for layout in LAYOUTS for ranks in RANKS),
    *(("nemotronh-nvfp4", layout, "one") for layout in LAYOUTS),
    *(("mixtral-nvfp4", layout, "tp2") for layout in LAYOUTS),
    *(("qwen3moe-mixed-fp8attn", layout, "one") for layout in LAYOUTS),
    ("qwen3moe-nvfp4-i96", "flashinfer-trtllm", "tp2"),
    ("qwen3moe-w4a16nvfp4", "vllm-marlin", "one"),
]
STATE = ("intermediate_size_per_partition", "trtllm_padded_hidden_size", "_cutlass_swiglu_params", "_cutedsl_wrapper")
"""What SGLang's conversion leaves beside parameters."""

Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """An output of `convert`, made once. Read only."""
    outputs: dict[str, Path] = {}

    def path_of(name: str, target: str, **options: Any) -> Path:
        key = f"{name} {target} {options}"
        if key not in outputs:
            outputs[key] = packs.pack(checkpoint(name), tmp_path_factory.mktemp("out") / "out", target, **options)
        return outputs[key]

    return path_of


@contextmanager
def hooked() -> Iterator[None]:
    """The first hook, as SGLang's registry puts it there; taken out again for tests of SGLang without it."""
    original = sglang_moe.ModelConfig._parse_quant_hf_config

    def wrapped(self: Any, *args: Any) -> Any:
        return sglang_plugin.logical_section(original, self, *args)

    with patch.object(sglang_moe.ModelConfig, "_parse_quant_hf_config", wrapped):
        yield


def model_config(packed: Path) -> Any:
    with hooked():
        return sglang_moe.ModelConfig(str(packed))


class Model(nn.Module):
    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(modules)


@contextmanager
def filled(
    hf: Path, packed: Path, rank: tuple[int, int] = (0, 0), layout: str | None = None, **parallel: int
) -> Iterator[Model]:
    """A model with every layer of a packed output, filled by the plugin and processed, while SGLang runs so."""
    opened = nvfp4prep.open(packed)
    tp, ep = parallel.get("tp", opened.tp), parallel.get("ep", opened.ep)
    quantization = sglang_moe.parsed_quantization(hf)
    with sglang_moe.running(hf, layout or opened.layout, tp, ep, rank):
        model = Model([sglang_moe.make_experts(quantization, layer) for layer in opened.layers])
        fill(model, opened)
        for module in model.experts:
            module.quant_method.process_weights_after_loading(module)
        yield model


def not_read(layout: str, own: Any) -> set[str]:
    """Parameters that SGLang's conversion leaves and no kernel reads: raw scales, and what it has replaced."""
    inputs = {"w13_input_scale", "w2_input_scale"}
    if layout == "vllm-marlin":
        return inputs | {"w13_blockscale_swizzled", "w2_blockscale_swizzled"}
    padded = own.w13_weight_scale.shape != own.w13_blockscale_swizzled.shape
    padded = padded or own.w2_weight_scale.shape != own.w2_blockscale_swizzled.shape
    return (
        inputs
        | {"w13_weight_scale_2", "w2_weight_scale_2"}
        | ({"w13_weight_scale", "w2_weight_scale"} if padded else set())
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and packs.same_bytes(
        a.detach().contiguous(), b.detach().contiguous()
    )


# --- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout", "ranks"), CASES)
def test_a_module_ends_as_after_sglangs_own_conversion(made: Made, name: str, layout: str, ranks: str) -> None:
    """The same parameters, bytes and strides, and the same state beside them."""
    tp, ep = RANKS[ranks]
    hf, packed = made(name, "hf"), made(name, layout, engine="sglang", w13_scale="unify", tp=tp, ep=ep)
    opened = nvfp4prep.open(packed)
    quantization = sglang_moe.parsed_quantization(hf)
    for rank in opened.ranks:
        with filled(hf, packed, rank) as model:
            for layer, module in zip(opened.layers, model.experts, strict=True):
                own = sglang_moe.make_experts(quantization, layer)
                sglang_moe.load(own, layer, hf)
                with patch.object(own.dispatcher, "set_quant_config") as told:
                    own.quant_method.process_weights_after_loading(own)
                theirs = dict(own.named_parameters(remove_duplicate=False))
                ours = dict(module.named_parameters(remove_duplicate=False))
                unread = not_read(layout, own)
                assert unread | ours.keys() >= theirs.keys(), (layer.path, rank)
                assert [n for n in ours if n not in unread and not same(ours[n], theirs[n])] == [], (layer.path, rank)
                for state in STATE:
                    assert getattr(module, state, None) == getattr(own, state, None), state
                if layout == "vllm-marlin":
                    assert same(module.workspace, own.workspace)
                else:
                    assert told.call_args.args == ({"input_global_scale": None},)
                    assert module.w13_blockscale_swizzled is not None


def test_unequal_gate_and_up_stay_exact(made: Made) -> None:
    name = "tinymoe-nvfp4-splitscale"
    packed = made(name, "flashinfer-trtllm", engine="sglang")
    ours = nvfp4prep.open(packed).load_experts(0)
    assert not torch.equal(ours.scalars["g1_alphas"], ours.scalars["g1_alphas_up"])
    with filled(made(name, "hf"), packed) as model:
        assert torch.equal(model.experts[0].g1_alphas_up, ours.scalars["g1_alphas_up"])
        assert torch.equal(model.experts[0].g1_scale_c, ours.scalars["g1_scale_c"])


def test_sglang_takes_it_for_the_checkpoint_behind_it(made: Made) -> None:
    packed = model_config(made(NAME, "flashinfer-trtllm", engine="sglang"))
    assert packed.quantization == "modelopt_fp4"
    section = dict(packed.hf_config.quantization_config)
    assert section["nvfp4prep"]["layout"] == "flashinfer-trtllm/sglang/1"
    hf = sglang_moe.ModelConfig(str(made(NAME, "hf")))
    assert ModelOptFp4Config.from_config(section).exclude_modules == (
        ModelOptFp4Config.from_config(dict(hf.hf_config.quantization_config)).exclude_modules
    )
    mixed = model_config(made("qwen3moe-mixed-fp8attn", "vllm-marlin", engine="sglang"))
    assert mixed.quantization == "modelopt_mixed"
    parsed = ModelOptMixedPrecisionConfig.from_config(
        {**mixed.hf_config.quantization_config, "packed_modules_mapping": {}}
    )
    assert parsed.nvfp4_config is not None


def test_its_loader_is_chosen_for_packed_outputs_alone(made: Made) -> None:
    load = LoadConfig(load_format=LoadFormat.AUTO)
    packed = model_config(made(NAME, "flashinfer-trtllm", engine="sglang"))
    assert type(sglang_plugin.packed_loader(get_model_loader, load, packed)) is PackedLoader
    hf = sglang_moe.ModelConfig(str(made(NAME, "hf")))
    assert type(sglang_plugin.packed_loader(get_model_loader, load, hf)) is ModelOptModelLoader
    assert type(sglang_plugin.packed_loader(get_model_loader, load)) is DefaultModelLoader


def test_other_tensors_are_those_of_the_hf_checkpoint(made: Made) -> None:
    hf = packs.tensors_of(made(NAME, "hf"))
    for options in ({}, {"tp": 2}):
        loader = PackedLoader(LoadConfig(load_format=LoadFormat.AUTO))
        loader.packed = nvfp4prep.open(made(NAME, "flashinfer-trtllm", engine="sglang", **options))
        given = dict(loader._get_all_weights(None, None))
        assert given.keys() == {name for name in hf if ".mlp.experts." not in name}
        assert all(torch.equal(given[name], hf[name]) for name in given)


def test_sglangs_own_plugin_loader_finds_and_applies_it(made: Made) -> None:
    """In a process of its own: hooks stay."""
    assert load_plugins_by_group(GENERAL_PLUGINS_GROUP)["nvfp4prep"][0] is sglang_plugin.register
    code = f"""
import sys
import sglang_moe
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader import get_model_loader
config = sglang_moe.ModelConfig({str(made(NAME, "flashinfer-trtllm", engine="sglang"))!r})
print(config.quantization, type(get_model_loader(LoadConfig(load_format=LoadFormat.AUTO), config)).__name__)
"""
    paths = [Path(__file__).parents[1], Path(__file__).parents[2], Path(__file__).parents[3] / "scripts"]
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "modelopt_fp4 PackedLoader"


# --- what it refuses -------------------------------------------------------------------------------------------------


def refuses(hf: Path, packed: Path, message: str, **running: Any) -> None:
    with pytest.raises(UsageFault, match=message), filled(hf, packed, **running):
        pass


def test_tp_and_ep(made: Made) -> None:
    hf = made(NAME, "hf")
    packed = made(NAME, "flashinfer-trtllm", engine="sglang", tp=2)
    refuses(hf, packed, "packed for TP 2 and EP 1, and the experts run with TP 1 and EP 1: .*--tp 1", tp=1)
    refuses(hf, packed, "packed for TP 2 and EP 1, and the experts run with TP 1 and EP 2", tp=1, ep=2)


def test_backend_and_layout(made: Made) -> None:
    packed = made(NAME, "flashinfer-cutlass", engine="sglang")
    message = r"MoE backend flashinfer_cutlass \(flashinfer-cutlass\), and marlin is chosen"
    refuses(made(NAME, "hf"), packed, message, layout="vllm-marlin")


def test_engine_and_version(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageFault, match="packed for vllm, and this is sglang; convert again with --engine sglang"):
        model_config(made(NAME, "flashinfer-trtllm"))
    packed = made(NAME, "flashinfer-trtllm", engine="sglang")
    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    with pytest.raises(UsageFault, match=r"packed for sglang 0\.5\.23, and this is 0\.6\.0"):
        model_config(packed)


def test_activation_dtype_of_marlin(made: Made) -> None:
    packed = made(NAME, "vllm-marlin", engine="sglang", activation_dtype="fp16")
    refuses(made(NAME, "hf"), packed, "packed for fp16 activations, and the model runs in bf16")


def test_another_load_format(made: Made) -> None:
    packed = model_config(made(NAME, "flashinfer-trtllm", engine="sglang"))
    load = LoadConfig(load_format=LoadFormat.PRESHARDED)
    with pytest.raises(UsageFault, match="--load-format presharded is asked for; leave it out"):
        sglang_plugin.packed_loader(get_model_loader, load, packed)


def modules_of(packed: Path, layers: list[Any]) -> list[Any]:
    quantization = sglang_moe.parsed_quantization(packed)
    return [sglang_moe.make_experts(quantization, layer) for layer in layers]


def test_another_models_layers(made: Made) -> None:
    hf, packed = made(NAME, "hf"), nvfp4prep.open(made(NAME, "flashinfer-trtllm", engine="sglang"))
    first = packed.layers[0]
    with sglang_moe.running(hf, "flashinfer-trtllm", 1, 1, (0, 0)):
        smaller = SimpleNamespace(**{**vars(first), "intermediate": 64})
        with pytest.raises(UsageFault, match=r"packed as .*intermediate=128.*, and the engine's model has .*=64"):
            fill(Model(modules_of(hf, [smaller])), packed)
        other = SimpleNamespace(**{**vars(first), "path": "model.layers.7.mlp"})
        with pytest.raises(
            UsageFault, match=r"model\.layers\.7\.mlp\.experts with ModelOptNvFp4FusedMoEMethod; packed are"
        ):
            fill(Model(modules_of(hf, [other])), packed)


@pytest.mark.parametrize("change", ["shared", "per token", "moved"])
def test_other_weights_than_by_default(made: Made, change: str) -> None:
    hf, packed = made(NAME, "hf"), nvfp4prep.open(made(NAME, "flashinfer-trtllm", engine="sglang"))
    with sglang_moe.running(hf, "flashinfer-trtllm", 1, 1, (0, 0)):
        [module] = modules_of(hf, [packed.layers[0]])
        if change == "shared":
            module.num_fused_shared_experts, message = 1, "--disable-shared-experts-fusion"
        elif change == "per token":
            module.quant_method.quant_config.use_per_token_activation, message = True, "told to use none of them"
        else:
            message = "without EPLB's placement"
        where = SimpleNamespace(physical_to_logical_map=torch.tensor([[1, 0, 2, 3, 4, 5, 6, 7]]))
        there = where if change == "moved" else None
        with (
            patch("nvfp4prep.sglang_plugin.experts.get_global_expert_location_metadata", lambda: there),
            pytest.raises(UsageFault, match=message),
        ):
            fill(Model([module]), packed)


@pytest.mark.parametrize("change", ["megamoe", "cutedsl v1", "w4a16"])
def test_other_forms_of_the_weights(made: Made, change: str) -> None:
    layout = "flashinfer-trtllm" if change == "megamoe" else "flashinfer-cutedsl"
    hf, packed = made(NAME, "hf"), nvfp4prep.open(made(NAME, layout, engine="sglang"))
    where = "nvfp4prep.sglang_plugin.experts"
    dispatch = SimpleNamespace(is_megamoe=lambda: change == "megamoe", value="other")
    with sglang_moe.running(hf, layout, 1, 1, (0, 0)), pytest.MonkeyPatch.context() as patched:
        [module] = modules_of(hf, [packed.layers[0]])
        message = r"not packed for --moe-a2a-backend other; use none"
        if change == "w4a16":
            patched.setattr(f"{where}.envs.SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16.get", lambda: True)
            message = "told to use none of them"
        else:
            patched.setattr(f"{where}.get_moe_a2a_backend", lambda: dispatch)
            v1 = property(lambda self: change == "cutedsl v1")
            patched.setattr(type(module.quant_method), "_is_cutedsl_v1_deepep", v1)
        with pytest.raises(UsageFault, match=message):
            fill(Model([module]), packed)


def test_another_activation(made: Made) -> None:
    """The model's clamp is not in config.json: trtllm's kernel would be given what the output does not hold."""
    hf, packed = made(NAME, "hf"), nvfp4prep.open(made(NAME, "flashinfer-trtllm", engine="sglang"))
    with sglang_moe.running(hf, "flashinfer-trtllm", 1, 1, (0, 0)):
        [module] = modules_of(hf, [packed.layers[0]])
        module.moe_runner_config.gemm1_clamp_limit = 7.0
        message = r"packed with \[\], and SGLang's model computes with \['gemm1_clamp_limit'\]"
        with pytest.raises(UsageFault, match=message):
            fill(Model([module]), packed)


def test_dispatch_in_nvfp4_with_cutedsl(made: Made) -> None:
    with patch.object(modelopt_quant, "_use_nvfp4_dispatch", lambda: True):
        refuses(made(NAME, "hf"), made(NAME, "flashinfer-cutedsl", engine="sglang"), "not packed for dispatch in NVFP4")


def test_processing_twice(made: Made) -> None:
    with filled(made(NAME, "hf"), made(NAME, "flashinfer-cutlass", engine="sglang")) as model:
        module = model.experts[0]
        with pytest.raises(UsageFault, match="loaded once; start SGLang again"):
            module.quant_method.process_weights_after_loading(module)


def test_incomplete_outputs(made: Made, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made(NAME, "flashinfer-trtllm", engine="sglang", tp=2), copy)
    shutil.rmtree(copy / "rank-01-of-02_00-of-01")
    loader = PackedLoader(LoadConfig(load_format=LoadFormat.AUTO))
    with pytest.raises(InputRefused, match="rank-missing"):
        loader.load_model(model_config=SimpleNamespace(model_path=str(copy)), device_config=None)
    (copy / "nvfp4prep.json").unlink()
    with pytest.raises(UsageFault, match=r"nvfp4prep\.json: not there; copy the whole output"):
        model_config(copy)
