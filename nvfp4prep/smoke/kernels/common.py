"""What the backends share: the GPU, moving a layer there, expert parallelism, FlashInfer's quantisation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_zeros

from nvfp4prep.errors import EnvironmentFault
from nvfp4prep.smoke.layer import PackedLayer, Routing
from nvfp4prep.targets import present_capability

_SOLD_AS = {"sm90": "H100, H200", "sm100": "B200", "sm103": "B300", "sm120": "RTX 50 and RTX PRO", "sm121": "DGX Spark"}


capability = present_capability
"""The GPU's compute capability (sm100), or None without a GPU."""


def device() -> torch.device:
    """The current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device())


def gpu_problem(kernel: str, gpus: Sequence[str]) -> str | None:
    """Why this machine's GPU can't run a kernel that needs one of `gpus`, or None."""
    present = capability()
    if present in gpus:
        return None
    needs = ", ".join(f"{gpu.upper()} ({_SOLD_AS[gpu]})" for gpu in gpus)
    return f"{kernel} needs a GPU of {needs}; {found_instead(present)}"


def found_instead(present: str | None) -> str:
    """What this machine has, by its capability."""
    return "this machine has no CUDA GPU" if present is None else f"this machine's GPU is {present.upper()}"


def require(problem: str | None) -> None:
    """Raises EnvironmentFault with what `available` says, unless that is None."""
    if problem is not None:
        raise EnvironmentFault(problem)


def gpu_versions(*packages: str) -> dict[str, str]:
    """The GPU, torch, CUDA and the versions of packages that are installed."""
    table = {"torch": torch.__version__, "cuda": torch.version.cuda or "none"}
    if torch.cuda.is_available():
        table |= {"gpu": torch.cuda.get_device_name(), "capability": capability() or ""}
    for package in packages:
        try:
            table[package] = version(package)
        except PackageNotFoundError:
            continue
    return table


# --- a layer and its inputs on the GPU --------------------------------------------------------------------------------


def moved(tensors: Mapping[str, Tensor], where: torch.device) -> dict[str, Tensor]:
    """Contiguous tensors on a device; those that are already there are not copied."""
    return {name: tensor.to(where).contiguous() for name, tensor in tensors.items()}


def padded_input(layer: PackedLayer, x: Tensor, where: torch.device, dtype: torch.dtype) -> Tensor:
    """x [T, H] with zero columns up to the padded H, contiguous, on a device."""
    geometry = layer.geometry
    if x.dim() != 2 or x.shape[1] != geometry.hidden:
        raise ValueError(f"x must be [tokens, {geometry.hidden}], got {list(x.shape)}")
    return pad_zeros(x.to(where, dtype), (0, geometry.padded_hidden - geometry.hidden)).contiguous()


def cropped_output(layer: PackedLayer, output: Tensor, x: Tensor) -> Tensor:
    """The kernel's [T, padded H] as F32 [T, H] on x's device."""
    tokens, hidden = x.shape[0], layer.geometry.hidden
    if output.shape != (tokens, layer.geometry.padded_hidden):
        raise ValueError(f"the kernel gave {list(output.shape)} for {tokens} tokens of {layer.geometry.padded_hidden}")
    return output[:, :hidden].to(x.device, torch.float32)


def expert_ids(routing: Routing, where: torch.device) -> Tensor:
    """Global expert ids as kernels take them: I32 [T, k], contiguous."""
    return routing.ids.to(where, torch.int32).contiguous()


def expert_weights(routing: Routing, where: torch.device) -> Tensor:
    """Routing weights as kernels take them: F32 [T, k], contiguous."""
    return routing.weights.to(where, torch.float32).contiguous()


def all_experts(layer: PackedLayer) -> int:
    """Experts over all EP ranks, which hold equal shares."""
    return len(layer.experts) * layer.target.ep


# --- FlashInfer -------------------------------------------------------------------------------------------------------


def flashinfer_problem(kernel: str, gpus: Sequence[str], packages: Mapping[str, str]) -> str | None:
    """Why a FlashInfer kernel can't run here, or None. `packages`: module -> how to install it."""
    problem = gpu_problem(kernel, gpus)
    if problem is not None:
        return problem
    missing = [install for module, install in packages.items() if importlib.util.find_spec(module) is None]
    return f"{kernel} is not installed: {'; '.join(missing)}" if missing else None


FLASHINFER = {"flashinfer": "pip install 'nvfp4prep[flashinfer]'"}


def quantize(x: Tensor, scale: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """x in NVFP4 by FlashInfer's own kernel, without its "4 over 6" variant (which the environment can switch on).

    Args:
        x: BF16 [T, H].
        scale: F32 [1], 1 / input_scale.
        swizzled: block scales in the 128x4 swizzle (padded to whole tiles), else linear.

    Returns:
        U8 [T, H/2], low nibble = even column, and E4M3 codes U8 [T, H/16] or [up(T, 128), up(H/16, 4)].
    """
    fp4_quantize: Any = importlib.import_module("flashinfer").fp4_quantize
    codes, block = fp4_quantize(
        x, scale, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=swizzled, nvfp4_4over6=None
    )
    return codes, block


def quantized_input(
    layer: PackedLayer, x: Tensor, scalars: Mapping[str, Tensor], where: torch.device, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """x [T, H] padded and quantised with the layer's input scale: see `quantize`."""
    hidden_states = padded_input(layer, x, where, torch.bfloat16)
    return quantize(hidden_states, scalars["w13_input_scale_quant"][:1], swizzled)


def activation_type(layer: PackedLayer) -> Any:
    """FlashInfer's ActivationType of the layer."""
    kinds = importlib.import_module("flashinfer.tllm_enums").ActivationType
    return kinds.Relu2 if layer.activation.kind == "relu2" else kinds.Swiglu


def only_output(result: Tensor | Sequence[Tensor]) -> Tensor:
    """FlashInfer's MoE functions give a list of one tensor, or the tensor itself, depending on version."""
    return result if isinstance(result, Tensor) else result[0]
