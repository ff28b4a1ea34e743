"""Every stub that lets the engines' own conversion code run on a CPU without their compiled parts, and why it may.

What converts weights is never replaced, but for two CUDA functions that nvfp4prep's own stand in for. Both of those are
tied to golden vectors from the real kernels (tests/data/golden, tests/test_layouts_golden.py).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch import Tensor

from nvfp4prep.layouts import marlin_repack, permutations

# --- packages that are not there -------------------------------------------------------------------------------------

FLASHINFER_ABSENT = {
    "cutlass": "CuteDSL's compiler; the file of convert_sf_to_mma_layout, which is plain PyTorch, names its types",
}


class _Empty(types.ModuleType):
    """A package in which every name exists and does nothing."""

    __path__: list[str] = []  # noqa: RUF012
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_empty(packages: Collection[str]) -> None:
    """Packages that can be imported, where they are not installed, and do nothing."""
    sys.meta_path.append(_Finder(packages))


# --- both engines ----------------------------------------------------------------------------------------------------


def stay_on_cpu() -> None:
    """`Tensor.cuda` is the identity: conversion code moves index tensors to the GPU, which changes no value."""
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def block_scale_interleave(scale: Tensor) -> Tensor:
    """FlashInfer's `nvfp4_block_scale_interleave`, a CUDA kernel: the 128x4 swizzle, flat. Golden vectors."""
    return permutations.swizzle(scale.view(torch.uint8)).flatten()


def gptq_marlin_repack(
    b_q_weight: Tensor, perm: Tensor | None, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False
) -> Tensor:
    """vLLM's and SGLang's `gptq_marlin_repack`, a CUDA kernel, for 4 bits without act-order. Golden vectors.

    `b_q_weight` is GPTQ's I32 [K/8, N], which is NVFP4's U8 [N, K/2] read as I32 and transposed. The kernel checks its
    tiles of 16 x 64.
    """
    if size_k % 16 or size_n % 64:
        raise RuntimeError(f"[{size_k}, {size_n}] is not divisible by tiles of [16, 64]")
    assert (num_bits, is_a_8bit, perm is None or perm.numel() == 0) == (4, False, True)
    nibbles = b_q_weight.T.contiguous().view(torch.uint8).view(size_n, size_k // 2)
    return marlin_repack.repack(nibbles)


def stub_flashinfer() -> None:
    """FlashInfer's Python runs as it is (row orders come from it); only its one CUDA kernel is replaced."""
    import flashinfer

    flashinfer.nvfp4_block_scale_interleave = block_scale_interleave
    flashinfer.block_scale_interleave = block_scale_interleave
    stand_empty(FLASHINFER_ABSENT)  # not before: flashinfer leaves out what needs a cutlass that is not there
    import flashinfer.cute_dsl.utils


# --- vLLM ------------------------------------------------------------------------------------------------------------


def stub_vllm() -> None:
    """vLLM 0.33.0 imports without its compiled parts. What is left of a GPU and of a process group:"""
    stay_on_cpu()
    stub_flashinfer()
    # Parameters note their rank when made; RoutedExperts slices by its own parallel config, which tests set.
    import vllm.distributed.parallel_state as parallel

    parallel._TP = SimpleNamespace(rank_in_group=0, world_size=1)
    # A CUDA kernel, see gptq_marlin_repack. vLLM's wrapper takes no perm.
    from vllm import _custom_ops

    _custom_ops.gptq_marlin_repack = lambda b_q_weight, size_k, size_n, num_bits, is_a_8bit=False: gptq_marlin_repack(
        b_q_weight, None, size_k, size_n, num_bits, is_a_8bit
    )
    # Where trtllm's experts make their clamp, alpha and beta: a device index, which a CPU has not.
    torch.accelerator.current_device_index = lambda: "cpu"  # type: ignore[assignment,return-value]


@contextmanager
def on_cuda() -> Iterator[None]:
    """The platform says that it is CUDA's, where a config that is not gated is made: vLLM refuses it elsewhere."""
    from vllm.platforms import current_platform

    with patch.object(type(current_platform), "is_cuda_alike", lambda self: True):
        yield


# --- SGLang ----------------------------------------------------------------------------------------------------------

SGLANG_ABSENT = {
    "sgl_kernel": "compiled CUDA kernels; imported by name at module level, called by none of the conversion code",
    "cuda": "CUDA driver bindings, imported by virtual-memory helpers",
    "IPython": "shows things in notebooks",
    "torchvision": "image transforms of multimodal models, imported by their configs",
}


def stub_sglang() -> None:
    """SGLang 0.5.23 imports kernel packages at module level: they are empty (SGLANG_ABSENT). What is left of a GPU:"""
    stay_on_cpu()
    # transformers asks once whether torchvision is there, and must be told the truth.
    from transformers.utils import is_torchvision_available

    is_torchvision_available()
    stub_flashinfer()
    stand_empty(SGLANG_ABSENT)
    import sglang.srt.layers.quantization.marlin_utils_fp4 as marlin
    import sglang.srt.layers.quantization.modelopt_quant as modelopt

    # NVFP4 experts are refused anywhere but on Blackwell, and, with Marlin, on SM80 and newer.
    modelopt.get_platform = lambda: SimpleNamespace(is_blackwell=True)
    # A CUDA kernel that SGLang imports on CUDA alone, see gptq_marlin_repack.
    marlin.gptq_marlin_repack = gptq_marlin_repack
    # Scratch memory of the kernel, as large as the GPU has multiprocessors.
    marlin.marlin_make_workspace = lambda device, blocks: torch.zeros(blocks, dtype=torch.int)
