"""A whole model through vLLM's own arguments and `get_model`, twice: an `hf` output as vLLM converts it, and packed.

Run as a program, since it settles for a process that the platform is a CPU: vllm_model.py HF PACKED LAYOUT. Prints
JSON: the model's class, how many tensors it holds, and the names of those that differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()  # vLLM finds none: its wheel is CUDA's, and there is no GPU
torch.accelerator.empty_cache = lambda: None

import vllm_moe  # noqa: E402
from torch import Tensor  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle  # noqa: E402
from vllm.model_executor.layers.quantization import modelopt  # noqa: E402
from vllm.model_executor.model_loader import get_model  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402


def load_whole(checkpoint: Path, load_format: str) -> tuple[str, dict[str, Tensor]]:
    """The class of a model, and all its parameters and buffers."""
    arguments = ["--model", str(checkpoint), "--load-format", load_format, "--skip-tokenizer-init", "--enforce-eager"]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    config = EngineArgs.from_cli_args(parser.parse_args(arguments)).create_engine_config()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{checkpoint}.rendezvous", 0, backend="gloo")
            parallel_state.initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
    return type(model).__name__, {**dict(model.named_parameters()), **dict(model.named_buffers())}


def main(hf: Path, packed: Path, layout: str) -> None:
    backend = vllm_moe.BACKENDS[layout]

    def select(config: Any, **_: Any) -> tuple[Any, type]:
        """Instead of asking the GPU that is there: the backend that is asked for, else the one to compare with."""
        chosen = backend if config.moe_backend == "auto" else oracle.map_nvfp4_backend(config.moe_backend)
        return chosen, oracle.backend_to_kernel_cls(chosen)[-1]

    modelopt.select_nvfp4_moe_backend = select
    modelopt.make_nvfp4_moe_kernel = vllm_moe.make_kernel
    parallel_state._TP = None  # a real process group of one, here
    (kind, theirs), (_, ours) = load_whole(hf, "auto"), load_whole(packed, "nvfp4prep")

    def same(name: str) -> bool:
        if name not in ours or name not in theirs:
            return False
        a, b = ours[name], theirs[name]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(
            a.detach().contiguous().flatten().view(torch.uint8), b.detach().contiguous().flatten().view(torch.uint8)
        )

    differing = sorted(name for name in {*ours, *theirs} if not same(name))
    print(json.dumps({"model": kind, "tensors": len(theirs), "differing": differing}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
