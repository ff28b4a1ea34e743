"""A packed MoE layer to run, and what a run takes and gives; shared by emulator, kernels and references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from nvfp4prep.layouts.logical import Activation, Expert, Geometry, LayerFacts, Scales
from nvfp4prep.targets import Target


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to. `ids` I64 [T, k] global expert ids, `weights` F32 [T, k]."""

    ids: Tensor
    weights: Tensor


@dataclass(frozen=True)
class PackedLayer:
    """A rank's share of a MoE layer as packed.

    `packed` are the layout's tensors stacked over `experts` (E4M3 as U8 codes), `scalars` the kernel's F32 [E],
    `scales` the logical global scales behind them. `experts` are the global ids held, in order.
    """

    target: Target
    geometry: Geometry
    activation: Activation
    facts: LayerFacts
    experts: range
    packed: Mapping[str, Tensor]
    scalars: Mapping[str, Tensor]
    scales: Scales


@dataclass(frozen=True)
class Weights:
    """One expert's real weights, F32: gate and up [I, H] (gate None when not gated), down [H, I], biases or None."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True)
class LogicalLayer:
    """A whole MoE layer as the checkpoint means it.

    `expert(e)` gives logical NVFP4 tensors (block scales as packed from, before padding), `scales` their global scales,
    F32 [E] over all experts.
    """

    hidden: int
    intermediate: int
    expert_count: int
    activation: Activation
    expert: Callable[[int], Expert]
    scales: Scales


Run = Callable[[PackedLayer, Tensor, Routing], Tensor]
"""A backend: (layer, x BF16 [T, H], routing) -> F32 [T, H], the weighted sum over the rank's experts."""
