"""nvfp4prep's vLLM plugin: a packed output fills a real module as vLLM's own conversion does, or is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pack_checks as packs
import pytest
import torch
import vllm
import vllm_moe
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor import model_loader
from vllm.model_executor.layers import quantization as methods
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.model_loader.weight_utils import get_quant_config
from vllm.model_executor.models.utils import WeightsMapper
from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string

import nvfp4prep
from nvfp4prep.errors import InputRefused, UsageFault

LAYOUTS = tuple(vllm_moe.BACKENDS)
NAME = "qwen3moe-nvfp4-perexpert"
RANKS = {"one": (1, 1), "tp2": (2, 1), "ep2": (1, 2)}
CASES = [
    *((NAME, layout, ranks) for layout in LAYOUTS for ranks in RANKS),
    *(("nemotronh-nvfp4", layout, "one") for layout in LAYOUTS),
    *(("mixtral-nvfp4", layout, "tp2") for layout in LAYOUTS),
    *(("qwen3moe-mixed-fp8attn", layout, "one") for layout in LAYOUTS),
    *(("qwen3moe-nvfp4-i96", layout, "one") for layout in LAYOUTS if "cutlass" not in layout),
    ("qwen3moe-w4a16nvfp4", "vllm-marlin", "tp2"),
]

Made = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[None]:
    """The plugin as vLLM finds and calls it; taken out again for tests of vLLM without it."""
    load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["nvfp4prep"]()
    yield
    methods.QUANTIZATION_METHODS.remove("nvfp4prep")
    del methods._CUSTOMIZED_METHOD_TO_QUANT_CONFIG["nvfp4prep"]
    del model_loader._LOAD_FORMAT_TO_MODEL_LOADER["nvfp4prep"]


@pytest.fixture(autouse=True)
def requested_backend() -> Iterator[None]:
    """Instead of asking the GPU that is there, vLLM takes the backend that is asked for."""

    def select(config: Any, **_: Any) -> tuple[Any, type]:
        chosen = oracle.map_nvfp4_backend(config.moe_backend)
        return chosen, oracle.backend_to_kernel_cls(chosen)[-1]

    with patch.object(modelopt, "select_nvfp4_moe_backend", select):
        yield


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


def config_of(packed: Path) -> tuple[Any, Any]:
    """vLLM's model config and quantisation config of a packed output."""
    model = vllm_moe.ModelConfig(model=str(packed), skip_tokenizer_init=True)
    quantization = get_quant_config(model, LoadConfig(load_format="nvfp4prep"))
    quantization.packed_modules_mapping = {}
    return model, quantization


class Model(nn.Module):
    """Stands for a model: its modules of experts are vLLM's own, and it notes what else it is given."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(modules)
        self.given: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.given = dict(weights)


def loaded(packed: Path, rank: tuple[int, int] = (0, 0), **parallel: int) -> Model:
    """A model with every layer of a packed output, loaded by the plugin's loader and processed."""
    opened = nvfp4prep.open(packed)
    config, quantization = config_of(packed)
    tp, ep = parallel.get("tp", opened.tp), parallel.get("ep", opened.ep)
    model = Model([vllm_moe.make_experts(quantization, layer, tp, ep, rank) for layer in opened.layers])
    model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(model, config)
    for module in model.experts:
        vllm_moe.process(module)
    return model


def differing(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    def same(name: str) -> bool:
        if name not in ours or name not in theirs:
            return False
        a, b = ours[name].contiguous(), theirs[name].contiguous()
        return (a.dtype, a.shape) == (b.dtype, b.shape) and packs.same_bytes(a, b)

    return sorted(name for name in {*ours, *theirs} if not same(name))


def sizes(config: Any) -> tuple[int, ...]:
    return (config.hidden_dim, config.hidden_dim_unpadded, config.intermediate_size_per_partition)


# --- what it does ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout", "ranks"), CASES)
def test_a_module_ends_as_after_vllms_own_conversion(made: Made, name: str, layout: str, ranks: str) -> None:
    """The same parameters, bytes and padded sizes."""
    tp, ep = RANKS[ranks]
    hf, packed = made(name, "hf"), made(name, layout, w13_scale="unify", tp=tp, ep=ep)
    opened = nvfp4prep.open(packed)
    quantization = vllm_moe.parsed_quantization(hf)
    for rank in opened.ranks:
        model = loaded(packed, rank)
        for layer, module in zip(opened.layers, model.experts, strict=True):
            with vllm_moe.backend(layout):
                own = vllm_moe.make_experts(quantization, layer, tp, ep, rank)
            vllm_moe.load(own, hf)
            given = vllm_moe.process(own).given
            assert differing(vllm_moe.parameters(module), vllm_moe.parameters(own)) == [], (layer.path, rank)
            assert sizes(module.moe_config) == sizes(own.moe_config)
            if layout != "flashinfer-trtllm":
                assert differing(module.quant_method.moe_kernel.fused_experts.given, given) == []


def test_other_tensors_are_those_of_the_hf_checkpoint(made: Made) -> None:
    hf = packs.tensors_of(made(NAME, "hf"))
    given = loaded(made(NAME, "flashinfer-trtllm", tp=2), (1, 0)).given
    assert given.keys() == {name for name in hf if ".mlp.experts." not in name}
    assert differing(given, {name: hf[name] for name in given}) == []
    assert loaded(made(NAME, "flashinfer-trtllm")).given.keys() == given.keys()


def test_unequal_gate_and_up_stay_exact(made: Made) -> None:
    """vLLM alone computes g1_scale_c from the gate's alpha; packed, it is the up half's."""
    packed = made("tinymoe-nvfp4-splitscale", "flashinfer-trtllm")
    module = loaded(packed).experts[0]
    ours = nvfp4prep.open(packed).load_experts(0)
    assert not torch.equal(ours.scalars["g1_alphas"], ours.scalars["g1_alphas_up"])
    assert torch.equal(module.w13_weight_scale_2, ours.scalars["g1_alphas"])
    quantize = 1.0 / ours.logical["down_input_scale"]
    assert torch.equal(module.g1_scale_c, ours.scalars["g1_alphas_up"] * quantize)
    assert not torch.equal(module.g1_scale_c, ours.scalars["g1_alphas"] * quantize)


def test_vllm_reads_the_rest_of_the_config_as_the_hf_checkpoints(made: Made) -> None:
    """The dtype of the KV cache stands in the section that nvfp4prep's takes the place of."""
    name = "qwen3moe-nvfp4-expertsonly-fp8kv"
    hf = vllm_moe.ModelConfig(model=str(made(name, "hf")), skip_tokenizer_init=True)
    packed, quantization = config_of(made(name, "flashinfer-trtllm"))
    assert packed.quantization == "nvfp4prep"
    assert resolve_kv_cache_dtype_string("auto", packed) == resolve_kv_cache_dtype_string("auto", hf) == "fp8_e4m3"
    assert isinstance(quantization, modelopt.ModelOptNvFp4Config)
    assert quantization.exclude_modules == vllm_moe.parsed_quantization(made(name, "hf")).exclude_modules


def test_a_model_with_other_names_than_the_checkpoint(made: Made) -> None:
    """NemotronH and multimodal models: the model's own mapper says where a layer is."""
    packed = made(NAME, "flashinfer-trtllm")
    config, quantization = config_of(packed)
    opened = nvfp4prep.open(packed)
    renamed = [SimpleNamespace(**{**vars(layer), "path": f"language_{layer.path}"}) for layer in opened.layers]
    model = Model([vllm_moe.make_experts(quantization, layer, 1, 1, (0, 0)) for layer in renamed])
    model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.": "language_model."})
    model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(model, config)
    for layer, module in zip(opened.layers, model.experts, strict=True):
        expected = opened.load_experts(layer.path).parameters["w2_weight"]
        assert torch.equal(module.w2_weight, expected)


def test_other_checkpoints_are_vllms_own(made: Made) -> None:
    assert vllm_moe.ModelConfig(model=str(made(NAME, "hf")), skip_tokenizer_init=True).quantization == "modelopt_fp4"


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_tp_and_ep(made: Made) -> None:
    with pytest.raises(UsageFault, match=r"packed for TP 2 and EP 1, and the experts run with TP 1 and EP 1: .*--tp 1"):
        loaded(made(NAME, "flashinfer-trtllm", tp=2), tp=1)
    with pytest.raises(UsageFault, match=r"packed for TP 1 and EP 1, and the experts run with TP 1 and EP 2: .*--ep 2"):
        loaded(made(NAME, "vllm-marlin"), ep=2)


def test_backend_and_layout(made: Made) -> None:
    packed = made(NAME, "flashinfer-cutlass")
    config, quantization = config_of(packed)
    layer = nvfp4prep.open(packed).layers[0]
    make = vllm_moe.FusedMoEConfig

    def with_backend(**options: Any) -> Any:
        return make(**options, moe_backend="marlin")

    with patch.object(vllm_moe, "FusedMoEConfig", with_backend):
        module = vllm_moe.make_experts(quantization, layer, 1, 1, (0, 0))
    loader = model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep"))
    message = r"MoE backend flashinfer_cutlass \(flashinfer-cutlass\), and marlin is chosen"
    with pytest.raises(UsageFault, match=message):
        loader.load_weights(Model([module]), config)


def test_engine_and_version(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageFault, match="packed for sglang, and this is vllm; convert again with --engine vllm"):
        config_of(made(NAME, "flashinfer-trtllm", engine="sglang"))
    packed = made(NAME, "flashinfer-trtllm")
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    with pytest.raises(UsageFault, match=r"packed for vllm 0\.33, and this is 0\.34\.1"):
        config_of(packed)
    monkeypatch.setattr(vllm, "__version__", "0.33.2+cu130")
    assert config_of(packed)[0].quantization == "nvfp4prep"


def test_activation_dtype_of_marlin(made: Made) -> None:
    with pytest.raises(UsageFault, match="packed for fp16 activations, and the model runs in bf16"):
        loaded(made(NAME, "vllm-marlin", activation_dtype="fp16"))


def test_another_models_sizes(made: Made) -> None:
    packed = made(NAME, "flashinfer-trtllm")
    config, quantization = config_of(packed)
    layer = nvfp4prep.open(made("qwen3moe-nvfp4-i96", "vllm-marlin")).layers[0]
    module = vllm_moe.make_experts(quantization, layer, 1, 1, (0, 0))
    with pytest.raises(UsageFault, match=r"packed as .*intermediate=128.*, and the engine's model has .*=96"):
        model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(Model([module]), config)


@pytest.mark.parametrize(
    ("change", "message"), [("eplb", "--enable-eplb"), ("round_robin", "placement is round_robin")]
)
def test_experts_that_move(made: Made, change: str, message: str) -> None:
    packed = made(NAME, "flashinfer-trtllm", ep=2)
    config, quantization = config_of(packed)
    module = vllm_moe.make_experts(quantization, nvfp4prep.open(packed).layers[0], 1, 2, (0, 0))
    if change == "eplb":
        module.moe_config.moe_parallel_config.enable_eplb = True
    else:
        module.expert_placement_strategy = "round_robin"
    with pytest.raises(UsageFault, match=message):
        model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(Model([module]), config)


def test_activations_scaled_per_token(made: Made) -> None:
    packed = made(NAME, "flashinfer-trtllm")
    config, quantization = config_of(packed)
    module = vllm_moe.make_experts(quantization, nvfp4prep.open(packed).layers[0], 1, 1, (0, 0))
    module.quant_method.per_token_activation = True
    with pytest.raises(UsageFault, match="packed with the checkpoint's input scales, and activations are scaled per"):
        model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(Model([module]), config)


def test_another_activation(made: Made) -> None:
    """The model's clamp is not in config.json: trtllm's kernel would be given what the output does not hold."""
    packed = made(NAME, "flashinfer-trtllm")
    config, quantization = config_of(packed)
    module = vllm_moe.make_experts(quantization, nvfp4prep.open(packed).layers[0], 1, 1, (0, 0))
    model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(Model([module]), config)
    module.gemm1_clamp_limit = nn.Parameter(torch.full((8,), 7.0), requires_grad=False)
    with pytest.raises(UsageFault, match=r"packed with g1_scale_c, and .* computes with g1_scale_c, gemm1_clamp_limit"):
        vllm_moe.process(module)


def test_another_load_format(made: Made) -> None:
    """The module was made for packed experts, and something else loaded the model."""
    packed = made(NAME, "flashinfer-trtllm")
    _, quantization = config_of(packed)
    module = vllm_moe.make_experts(quantization, nvfp4prep.open(packed).layers[0], 1, 1, (0, 0))
    with pytest.raises(UsageFault, match=r"model\.layers\.0\.mlp\.experts: .* start vLLM with --load-format nvfp4prep"):
        vllm_moe.process(module)


def test_processing_twice(made: Made) -> None:
    """Some alphas are multiplied in place: a second time would be wrong."""
    module = loaded(made(NAME, "flashinfer-cutlass")).experts[0]
    with pytest.raises(UsageFault, match="were not loaded"):
        vllm_moe.process(module)


def test_the_load_format_for_another_checkpoint(made: Made) -> None:
    config = vllm_moe.ModelConfig(model=str(made(NAME, "hf")), skip_tokenizer_init=True)
    with pytest.raises(UsageFault, match=r"--load-format nvfp4prep is for packed outputs, and .* modelopt_fp4"):
        model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(Model([]), config)


def test_a_layer_that_is_not_packed(made: Made) -> None:
    packed = made(NAME, "flashinfer-trtllm")
    config, quantization = config_of(packed)
    layer = nvfp4prep.open(packed).layers[0]
    other = SimpleNamespace(**{**vars(layer), "path": "model.layers.7.mlp"})
    module = vllm_moe.make_experts(quantization, other, 1, 1, (0, 0))
    with pytest.raises(UsageFault, match=r"model\.layers\.7\.mlp\.experts with PackedMoE; packed are model\.layers\.0"):
        model_loader.get_model_loader(LoadConfig(load_format="nvfp4prep")).load_weights(Model([module]), config)


def test_incomplete_outputs(made: Made, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(made(NAME, "flashinfer-trtllm", tp=2), copy)
    (copy / "nvfp4prep.json").rename(tmp_path / "aside.json")
    with pytest.raises(UsageFault, match=r"nvfp4prep\.json: not there; copy the whole output"):
        config_of(copy)
    (copy / "nvfp4prep.json").write_text(json.dumps({"format": 1}))
    with pytest.raises(UsageFault, match="its logical entry is None"):
        config_of(copy)
    (copy / "nvfp4prep.json").write_bytes((tmp_path / "aside.json").read_bytes())
    shutil.rmtree(copy / "rank-01-of-02_00-of-01")
    with pytest.raises(InputRefused, match="rank-missing"):
        loaded(copy)
