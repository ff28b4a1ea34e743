"""One file per kernel layout: REQUIRES, shapes, pack, unpack, tensor_names, scalars, parameters, kernel_args.

To add a layout, write a module with the names that `Layout` lists and add it to `_MODULES`. What else knows layouts
is in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from nvfp4prep.layouts import (
    flashinfer_cutedsl,
    flashinfer_cutlass,
    flashinfer_mxint4,
    flashinfer_sm90_w4a8,
    flashinfer_trtllm,
    moe_wna16,
    sglang_w4afp8,
    vllm_cutlass,
    vllm_marlin,
    vllm_marlin_int4,
)
from nvfp4prep.layouts.logical import Activation, Engine, Expert, Geometry, LayerFacts, Requires, Scales


class Layout(Protocol):
    """What a layout module offers."""

    NAME: str
    VERSION: int
    REQUIRES: Requires

    def shapes(self, geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]: ...
    def pack(self, expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]: ...
    def unpack(self, packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert: ...
    def scalars(self, scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]: ...
    def tensor_names(self, engine: Engine) -> dict[str, str]: ...
    def parameters(self, scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]: ...
    def kernel_args(
        self, packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
    ) -> dict[str, Any]: ...


_MODULES: tuple[Layout, ...] = (
    flashinfer_trtllm,
    flashinfer_cutlass,
    flashinfer_cutedsl,
    vllm_cutlass,
    vllm_marlin,
    vllm_marlin_int4,
    moe_wna16,
    flashinfer_sm90_w4a8,
    sglang_w4afp8,
    flashinfer_mxint4,
)
LAYOUTS: Mapping[str, Layout] = {layout.NAME: layout for layout in _MODULES}
