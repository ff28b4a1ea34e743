"""vLLM's own RoutedExperts, built for a rank, loaded from an `hf` output and processed by vLLM's own quant method."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import fused
import stubs
import torch
from safetensors.torch import load_file
from torch import Tensor

stubs.stub_vllm()

from vllm.config import ModelConfig  # noqa: E402
from vllm.model_executor.layers.fused_moe import modular_kernel  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
)
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe import TrtLlmNvFp4ExpertsBase  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle  # noqa: E402
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.quantization import get_quantization_config, modelopt  # noqa: E402

from nvfp4prep.loading import PackedLayer  # noqa: E402

BACKENDS = {
    "flashinfer-trtllm": oracle.NvFp4MoeBackend.FLASHINFER_TRTLLM,
    "flashinfer-cutlass": oracle.NvFp4MoeBackend.FLASHINFER_CUTLASS,
    "flashinfer-cutedsl": oracle.NvFp4MoeBackend.FLASHINFER_CUTEDSL,
    "vllm-cutlass": oracle.NvFp4MoeBackend.VLLM_CUTLASS,
    "vllm-marlin": oracle.NvFp4MoeBackend.MARLIN,
}


@contextmanager
def backend(layout: str) -> Iterator[None]:
    """vLLM chooses a backend by the GPU that is there: here it is told which."""
    chosen = BACKENDS[layout]
    classes = oracle.backend_to_kernel_cls(chosen)
    with patch.object(modelopt, "select_nvfp4_moe_backend", lambda **_: (chosen, classes[-1])):
        yield


def parsed_quantization(checkpoint: Path) -> Any:
    """The quantisation config that vLLM makes of a checkpoint's config.json."""
    method = ModelConfig(model=str(checkpoint), skip_tokenizer_init=True).quantization
    section = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    parsed = get_quantization_config(method).from_config(section)
    parsed.packed_modules_mapping = {}
    return parsed


def make_experts(quantization: Any, layer: PackedLayer, tp: int, ep: int, rank: tuple[int, int]) -> RoutedExperts:
    """A RoutedExperts module as a model of these sizes has on one rank. Either `tp` or `ep` is 1, as in vLLM."""
    parallel = FusedMoEParallelConfig(
        tp_size=tp,
        tp_rank=rank[0],
        ep_size=ep,
        ep_rank=rank[1],
        pcp_size=1,
        pcp_rank=0,
        dp_size=1,
        dp_rank=0,
        sp_size=1,
        use_ep=ep > 1,
        all2all_backend="allgather_reducescatter",
        enable_eplb=False,
    )
    with stubs.on_cuda():
        config = FusedMoEConfig(
            num_experts=layer.experts,
            num_logical_experts=layer.experts,
            num_local_experts=layer.experts // ep,
            experts_per_token=2,
            hidden_dim=layer.hidden,
            intermediate_size=layer.intermediate,
            activation=MoEActivation.SILU if layer.gated else MoEActivation.RELU2_NO_MUL,
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=parallel,
            in_dtype=torch.bfloat16,
        )
    experts = ExpertMapManager(8192, 2, layer.experts, 0, None, parallel, "linear", False)
    names = {"ckpt_gate_proj_name": "gate_proj", "ckpt_down_proj_name": "down_proj", "ckpt_up_proj_name": "up_proj"}
    if "block_sparse_moe" in layer.path:
        names = {"ckpt_gate_proj_name": "w1", "ckpt_down_proj_name": "w2", "ckpt_up_proj_name": "w3"}
    if not layer.gated:
        names = {"ckpt_gate_proj_name": "up_proj", "ckpt_down_proj_name": "down_proj", "ckpt_up_proj_name": None}
    return RoutedExperts(f"{layer.path}.experts", torch.bfloat16, config, quantization, experts, **names)


def load(module: RoutedExperts, checkpoint: Path) -> None:
    """Every tensor of the layer's experts through the module's own loader."""
    prefix = f"{module.layer_name}."
    for file in sorted(checkpoint.glob("*.safetensors")):
        mine = ((name, value) for name, value in load_file(file).items() if name.startswith(prefix))
        split = fused.per_expert(mine, module.global_num_experts)
        list(module.load_weights((name.removeprefix(prefix), value) for name, value in split))


class Experts:
    """Stands for the kernel object, which needs a GPU: notes what it is given, then runs that one's own processing."""

    def __init__(self, quant_config: Any, moe_config: Any, experts_cls: type) -> None:
        self.given: dict[str, Tensor] = {}
        self._own = SimpleNamespace(quant_config=quant_config)
        self._process = experts_cls.process_weights_after_loading
        if issubclass(experts_cls, TrtLlmNvFp4ExpertsBase):
            self._own = TrtLlmNvFp4ExpertsBase(moe_config, quant_config)
            self._process = TrtLlmNvFp4ExpertsBase.process_weights_after_loading

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        self.given = parameters(layer)
        self._process(self._own, layer)


def make_kernel(moe_quant_config: Any, moe_config: Any, experts_cls: type, **_: Any) -> Any:
    """Instead of `make_nvfp4_moe_kernel`."""
    assert issubclass(experts_cls, modular_kernel.FusedMoEExperts)
    return SimpleNamespace(fused_experts=Experts(moe_quant_config, moe_config, experts_cls))


def process(module: RoutedExperts) -> Experts:
    """vLLM's own conversion, up to the kernel object and with that one's processing."""
    with patch.object(modelopt, "make_nvfp4_moe_kernel", make_kernel):
        module.quant_method.process_weights_after_loading(module)
    experts = module.quant_method.moe_kernel.fused_experts
    assert isinstance(experts, Experts)
    return experts


def parameters(module: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of a module's parameters."""
    return {name: value.detach().clone() for name, value in module.named_parameters()}
