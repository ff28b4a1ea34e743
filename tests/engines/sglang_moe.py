"""SGLang's own FusedMoE, built for a rank, loaded from an `hf` output and processed by SGLang's own quant method."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fused
import stubs
import torch
from safetensors.torch import load_file

stubs.stub_sglang()

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE  # noqa: E402
from sglang.srt.layers.moe.utils import MoeRunnerBackend  # noqa: E402
from sglang.srt.layers.quantization import get_quantization_config  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from nvfp4prep.loading import PackedLayer  # noqa: E402

BACKENDS = {
    "flashinfer-trtllm": MoeRunnerBackend.FLASHINFER_TRTLLM,
    "flashinfer-cutlass": MoeRunnerBackend.FLASHINFER_CUTLASS,
    "flashinfer-cutedsl": MoeRunnerBackend.FLASHINFER_CUTEDSL,
    "vllm-marlin": MoeRunnerBackend.MARLIN,
}


@contextmanager
def running(checkpoint: Path, layout: str, tp: int, ep: int, rank: tuple[int, int]) -> Iterator[None]:
    """What SGLang keeps for a process: its arguments, its place among the ranks, its MoE backend."""
    runtime_context.get_context().set_server_args(ServerArgs(model_path=str(checkpoint), device="cpu"))
    place = {"moe_tp_size": tp, "moe_tp_rank": rank[0], "moe_ep_size": ep, "moe_ep_rank": rank[1]}
    sizes = {"tp_size": tp * ep, "attn_tp_size": tp * ep, "ep_size": ep}
    flags = runtime_context.get_flags().moe
    with (
        runtime_context.get_parallel().override(**place, **sizes),
        flags.override(runner_backend=BACKENDS[layout]),
    ):
        yield


def parsed_quantization(checkpoint: Path) -> Any:
    """The quantisation config that SGLang makes of a checkpoint's config.json."""
    section = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
    method = ModelConfig._parse_modelopt_quant_config(None, {"quantization": section})["quant_method"]
    return get_quantization_config(method).from_config({**section, "packed_modules_mapping": {}})


def make_experts(quantization: Any, layer: PackedLayer) -> FusedMoE:
    """A FusedMoE module as a model of these sizes has, within `running`."""
    return FusedMoE(
        num_experts=layer.experts,
        hidden_size=layer.hidden,
        intermediate_size=layer.intermediate,
        layer_id=layer.layer or 0,
        top_k=2,
        params_dtype=torch.bfloat16,
        quant_config=quantization,
        prefix=f"{layer.path}.experts",
        activation="silu" if layer.gated else "relu2",
        is_gated=layer.gated,
    )


def load(module: FusedMoE, layer: PackedLayer, checkpoint: Path) -> None:
    """Every tensor of the layer's experts through the module's own loader, named as models do."""
    names = ("gate_proj", "down_proj", "up_proj")
    if "block_sparse_moe" in layer.path:
        names = ("w1", "w2", "w3")
    if not layer.gated:
        names = ("up_proj", "down_proj", "")
    mapping = FusedMoE.make_expert_params_mapping(*names, layer.experts)
    parameters = dict(module.named_parameters())
    prefix = f"{layer.path}."
    for file in sorted(checkpoint.glob("*.safetensors")):
        mine = ((name, value) for name, value in load_file(file).items() if name.startswith(prefix))
        for full, value in fused.per_expert(mine, layer.experts):
            name = full.removeprefix(prefix)
            for parameter, stored, expert, shard in mapping:
                if stored in name:
                    mapped = name.replace(stored, parameter)
                    target = parameters[mapped.removeprefix("experts.")]
                    target.weight_loader(target, value, mapped, shard_id=shard, expert_id=expert)
                    break
