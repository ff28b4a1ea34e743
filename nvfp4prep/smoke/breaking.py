"""What mutations of packed layers are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4prep.smoke.layer import PackedLayer


def mapped(layer: PackedLayer, change: Callable[[str, Tensor], Tensor]) -> PackedLayer:
    """Every expert's tensors changed by name."""
    packed = {
        name: torch.stack([change(name, stacked[position]) for position in range(len(layer.experts))])
        for name, stacked in layer.packed.items()
    }
    return replace(layer, packed=packed)


def with_scales(layer: PackedLayer, change: Callable[[str, Tensor], Tensor]) -> PackedLayer:
    """Every expert's block or group scales changed by name."""
    return mapped(layer, lambda name, value: change(name, value) if name.endswith("_scale") else value)


def with_weights(layer: PackedLayer, change: Callable[[Tensor], Tensor]) -> PackedLayer:
    """Every expert's weights changed."""
    return mapped(layer, lambda name, value: change(value) if name.endswith("_weight") else value)


def on_bytes(value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor whose bytes, U8, are changed."""
    return change(value.contiguous().view(torch.uint8)).view(value.dtype)
