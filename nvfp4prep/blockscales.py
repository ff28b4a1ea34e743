"""Changes E4M3 block scales and counts what changed: a rescale through a table, factors of rows by multiplying."""

from __future__ import annotations

from itertools import pairwise

import torch

from nvfp4prep.layouts.logical import LayoutError
from nvfp4prep.scales import (
    E4M3_SMALLEST_NORMAL_CODE,
    E4M3_VALUES,
    Rescale,
    RescaleCounts,
    count_rescale,
    rescale_table,
)
from nvfp4prep.schema import GateUpOrder

_VALUES = torch.tensor([*E4M3_VALUES, float("nan")], dtype=torch.float64)
_LARGEST = len(E4M3_VALUES) - 1
_LIMITS = torch.tensor([(low + high) / 2 for low, high in pairwise((*E4M3_VALUES, 480.0))], dtype=torch.float64)
"""Between neighbouring values; the last between 448 and what would follow it."""
_FOLDED_AT_ONCE = 1 << 16
"""Block scales, whose products take some MB then."""
_MOST_LOST = 0.01
"""Of a linear's block scales: exporters leave some at the smallest code, of blocks that hardly matter."""


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


def fold_codes(
    codes: torch.Tensor, factors: torch.Tensor, rescale: Rescale | None
) -> tuple[torch.Tensor, RescaleCounts]:
    """up's block scales with down's pre_quant_scale of each row multiplied in, and a rescale besides, rounded once.

    To the nearest E4M3 value, half to even; a product's sign is kept. Exact: value, factor and global scale have at
    most 4 + 24 + 24 significant bits, so float64 compares products with limits exactly.

    Args:
        codes: U8 [I, H / 16] codes of E4M3 block scales.
        factors: F32 [I].
        rescale: of this tensor, not applied yet, or None.

    Returns:
        U8 codes in the shape given, and counts as of a rescale; errors are those of the single rounding.

    Raises:
        LayoutError: a product that rounds beyond 448, or a NaN, with its place.
    """
    old, new = (1.0, 1.0) if rescale is None else (rescale.old[0][0], rescale.new[0])
    step = max(1, _FOLDED_AT_ONCE // max(codes.shape[1], 1))
    total, folded = RescaleCounts(), torch.empty_like(codes)
    for first in range(0, codes.shape[0], step):
        rows = slice(first, first + step)
        folded[rows], counts = _fold_rows(codes[rows], factors[rows], old, new, first)
        total += counts
    return folded, total


def check_fold(before: torch.Tensor, after: torch.Tensor, factors: torch.Tensor) -> None:
    """Refuse a fold that loses what matters: more than one in a hundred of a linear's block scales, or a whole row.

    A row is whole where it had a normal block scale: one of subnormals alone is that of a channel that is dead. Where
    not, its factor was taken out of down's weights before they were quantised: that column of down is as large as the
    factor is small, and the row counts as any other.

    Args:
        before, after: U8 [I, H / 16] codes of E4M3 block scales.
        factors: F32 [I].

    Raises:
        LayoutError: it does, with the row, or the counts.
    """
    magnitude, has = before & 0x7F, (after & 0x7F) != 0
    gone = (magnitude >= E4M3_SMALLEST_NORMAL_CODE).any(1) & ~has.any(1)
    if bool(gone.any()):
        row = int(gone.nonzero()[0])
        raise LayoutError(
            f"all of up's block scales in row {row} ({int(gone.sum()):,} such rows of {len(gone):,}) times down's "
            f"pre_quant_scale {float(factors[row]):.3g} round to zero in E4M3, and the row with them"
        )
    lost = int(((magnitude > 0) & ~has).sum())
    if lost > before.numel() * _MOST_LOST:
        raise LayoutError(
            f"{lost:,} of {before.numel():,} of up's block scales times down's pre_quant_scale (factors from "
            f"{float(factors.abs().min()):.3g}) round to zero in E4M3; up to {_MOST_LOST:.0%} may"
        )


def _fold_rows(
    codes: torch.Tensor, factors: torch.Tensor, old: float, new: float, first: int
) -> tuple[torch.Tensor, RescaleCounts]:
    """`fold_codes` of some rows, from row `first` on. Raises LayoutError."""
    magnitude = codes & 0x7F
    before = _VALUES[magnitude.to(torch.int64)]
    exact = before * factors.to(torch.float64).abs()[:, None] * old
    limits = _LIMITS * new
    nearest = torch.searchsorted(limits, exact)  # limits[nearest - 1] < exact <= limits[nearest]
    tie = limits[nearest.clamp(max=_LARGEST)] == exact
    nearest += tie & (nearest % 2 == 1)
    lost = torch.isnan(exact) | (nearest > _LARGEST)
    if bool(lost.any()):
        row, block = (int(i) for i in lost.nonzero()[0])
        text = f"{float(before[row, block] * old / new):g} times down's pre_quant_scale {float(factors[row]):g}"
        raise LayoutError(f"up's block scale {text} at [{first + row}, {block}] does not fit E4M3")
    rounded = _VALUES[nearest] * new
    error = torch.where(exact == 0, 0.0, (rounded - exact).abs() / exact)
    normal = magnitude >= E4M3_SMALLEST_NORMAL_CODE
    counts = RescaleCounts(
        codes.numel(),
        int((rounded != exact).sum()),
        int((normal & (nearest > 0) & (nearest < E4M3_SMALLEST_NORMAL_CODE)).sum()),
        int(((magnitude > 0) & (nearest == 0)).sum()),
        float(error.max()) if error.numel() else 0.0,
    )
    negative = (codes >> 7) ^ torch.signbit(factors).to(torch.uint8)[:, None]
    return nearest.to(torch.uint8) | (negative << 7), counts
