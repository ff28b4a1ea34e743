"""Real kernels that run a packed layer on this machine's GPU, one module per backend.

To add a backend, write a module with the names that `Backend` lists and add it to `_MODULES`. Nothing here imports an
engine or FlashInfer before a backend is asked for; `available` says in words why one can't be used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from nvfp4prep.smoke.kernels import (
    flashinfer_cutedsl,
    flashinfer_cutlass,
    flashinfer_sm90_w4a8,
    flashinfer_trtllm,
    marlin,
)
from nvfp4prep.smoke.layer import PackedLayer, Routing


class Backend(Protocol):
    """What a backend module offers. `LAYOUTS` are the layouts whose packed tensors it runs."""

    NAME: str
    LAYOUTS: tuple[str, ...]

    def available(self) -> str | None: ...
    def run(self, layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor: ...
    def VERSIONS(self) -> dict[str, str]: ...


_MODULES: tuple[Backend, ...] = (
    flashinfer_trtllm,
    flashinfer_cutlass,
    flashinfer_cutedsl,
    flashinfer_sm90_w4a8,
    marlin,
)
BACKENDS: Mapping[str, Backend] = {backend.NAME: backend for backend in _MODULES}


def for_layout(layout: str) -> Backend | None:
    """The backend that runs a layout's kernel; None where there is none (vllm-cutlass, other int4)."""
    return next((backend for backend in _MODULES if layout in backend.LAYOUTS), None)
