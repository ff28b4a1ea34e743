"""Applies a rescale to E4M3 block scales, code by code through a table, and counts what changed."""

from __future__ import annotations

import torch

from nvfp4prep.scales import Rescale, RescaleCounts, count_rescale, rescale_table
from nvfp4prep.schema import GateUpOrder


def half_of(codes: torch.Tensor, half: int, order: GateUpOrder | None) -> torch.Tensor:
    """A view of one half (0 gate, 1 up) of the last dimension, by the order of fused columns; all of it for None."""
    if order is None:
        return codes
    if order == "interleaved":
        return codes[..., half::2]
    width = codes.shape[-1] // 2
    return codes[..., half * width : (half + 1) * width]


def rescale_codes(codes: torch.Tensor, rescale: Rescale, expert: int) -> RescaleCounts:
    """Rescale one expert's block scales in place.

    Args:
        codes: U8 codes of E4M3 block scales; rows x columns, any rows of one expert (fused: columns are gate and up).
        rescale: the global scales before and after.
        expert: index into `rescale.old` and `rescale.new`.

    Returns:
        Counts over all codes given, those of unchanged halves included as blocks.
    """
    total = RescaleCounts()
    new = rescale.new[expert]
    for half, old in enumerate(rescale.old[expert]):
        view = half_of(codes, half, rescale.order)
        if old == new:
            total += RescaleCounts(view.numel())
            continue
        index = view.to(torch.int64)
        total += count_rescale(torch.bincount(index.flatten(), minlength=256).tolist(), old, new)
        table = torch.frombuffer(bytearray(rescale_table(old, new)), dtype=torch.uint8)
        view.copy_(table[index])
    return total
