"""What the int4 layouts share: codes with an offset, and the activation's constants."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nvfp4prep.layouts.logical import Activation, Expert, Matrix, Scales

_OFFSET = 0x88


def with_offset(expert: Expert) -> Expert:
    """Two's complement codes as code + 8 (uint4b8); its own inverse, since adding 8 flips a nibble's top bit."""

    def shifted(matrix: Matrix) -> Matrix:
        return replace(matrix, weight=matrix.weight ^ _OFFSET)

    gate = None if expert.gate is None else shifted(expert.gate)
    return replace(expert, gate=gate, up=shifted(expert.up), down=shifted(expert.down))


def swiglu(scales: Scales, activation: Activation) -> dict[str, Tensor]:
    """The constants of an activation that has some, F32 [E]."""
    constants = (("limit", activation.limit), ("alpha", activation.alpha), ("beta", activation.beta))
    return {f"swiglu_{name}": torch.full_like(scales.up, value) for name, value in constants if value is not None}
