"""One routed expert between a checkpoint's form and the logical tensors that layouts take; slices for TP ranks.

Every function has its inverse beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4prep.blockscales import check_fold, fold_codes, half_of, rescale_codes
from nvfp4prep.layouts.logical import Expert, LayoutError, Matrix
from nvfp4prep.numerics import became, exchange_bits, unfit
from nvfp4prep.scales import Rescale, RescaleCounts
from nvfp4prep.schema import Format, GateUpOrder, Linear, MoeLayer

Read = Callable[[str, int | None], Tensor]
"""(tensor name, expert index of a fused tensor or None) -> its stored values; U8 for FP4 pairs and E4M3 codes."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A TP rank's share of I: rows start..end of gate and up, columns start..end of down."""

    start: int
    end: int


# --- checkpoint form <-> logical -------------------------------------------------------------------------------------


def load_expert(moe: MoeLayer, index: int, read: Read, rescales: Mapping[str, Rescale]) -> tuple[Expert, RescaleCounts]:
    """One expert's logical tensors, block scales rescaled where the resolution says so; int4 group scales as F32.

    Args:
        moe: an NVFP4 or int4 layer.
        index: 0 .. E-1.
        read: reads stored tensors.
        rescales: of the resolution, by block-scale tensor name.
    """
    if moe.gate_up is not None and moe.down is not None:
        return _load_fused(moe, moe.gate_up, moe.down, index, read, rescales)
    expert = moe.experts[index]
    counts = RescaleCounts()
    matrices: list[Matrix | None] = []
    for linear in (expert.gate, expert.up, expert.down):
        if linear is None:
            matrices.append(None)
            continue
        scale = _stored(linear, "weight_scale", None, read)
        if linear.format is Format.INT4:
            weight = columns_packed(_stored(linear, "weight", None, read))
            matrices.append(Matrix(weight, scale.to(torch.float32), linear.group_size))
            continue
        rescale = rescales.get(linear.params["weight_scale"].name)
        if rescale is not None:
            counts += rescale_codes(scale, rescale, 0)
        matrices.append(Matrix(_stored(linear, "weight", None, read), scale))
    gate, up, down = matrices
    assert up is not None
    assert down is not None
    return Expert(
        gate, up, down, *(_bias(linear, None, read) for linear in (expert.gate, expert.up, expert.down))
    ), counts


def load_folded(
    moe: MoeLayer, index: int, read: Read, rescales: Mapping[str, Rescale]
) -> tuple[Expert, RescaleCounts, RescaleCounts]:
    """As `load_expert`, with down's pre_quant_scale in the rows of up, if one is stored.

    Returns:
        The expert, what rescaling did, and what the fold did to up's NVFP4 block scales, a rescale of them included.

    Raises:
        LayoutError: a product that does not fit, with its place, or too many that become zero.
    """
    if moe.gate_up is not None or "pre_quant_scale" not in moe.experts[index].down.params:
        return *load_expert(moe, index, read, rescales), RescaleCounts()
    linears = moe.experts[index]
    factors = _stored(linears.down, "pre_quant_scale", None, read).to(torch.float32)
    if moe.format is Format.INT4:
        expert, counts = load_expert(moe, index, read, rescales)
        return with_row_factors(expert, factors), counts, RescaleCounts()
    others = [linear.params["weight_scale"].name for linear in (linears.gate, linears.down) if linear is not None]
    expert, counts = load_expert(moe, index, read, {name: rescales[name] for name in others if name in rescales})
    scale, folded = fold_codes(expert.up.scale, factors, rescales.get(linears.up.params["weight_scale"].name))
    check_fold(expert.up.scale, scale, factors)
    return replace(expert, up=replace(expert.up, scale=scale)), counts, folded


def _stored(linear: Linear, param: str, index: int | None, read: Read) -> Tensor:
    """What is stored of one expert. Raises ValueError where a fused tensor has no such slice: a check is missing."""
    info = linear.params[param]
    if index is not None and not (len(info.shape) > 1 and 0 <= index < info.shape[0]):
        raise ValueError(f"{info.name}: {list(info.shape)} has no expert {index}")
    return read(info.name, index)


def _bias(linear: Linear | None, index: int | None, read: Read) -> Tensor | None:
    if linear is None or "bias" not in linear.params:
        return None
    bias = _stored(linear, "bias", index, read).to(torch.float32)
    if bias.shape != (linear.rows,):
        raise ValueError(f"{linear.params['bias'].name}: {list(bias.shape)} for a weight of {linear.rows} rows")
    return bias


def _load_fused(
    moe: MoeLayer, gate_up: Linear, down: Linear, index: int, read: Read, rescales: Mapping[str, Rescale]
) -> tuple[Expert, RescaleCounts]:
    assert moe.order is not None  # targets.check_target
    scale = _stored(gate_up, "weight_scale", index, read)
    rescale = rescales.get(gate_up.params["weight_scale"].name)
    counts = RescaleCounts() if rescale is None else rescale_codes(scale, rescale, index)
    weight = _stored(gate_up, "weight", index, read)
    gate, up = (
        Matrix(half_of(weight, half, moe.order).T.contiguous(), half_of(scale, half, moe.order).T.contiguous())
        for half in (0, 1)
    )
    down_matrix = Matrix(
        _stored(down, "weight", index, read).T.contiguous(),
        _stored(down, "weight_scale", index, read).T.contiguous(),
    )
    bias, down_bias = _bias(gate_up, index, read), _bias(down, index, read)
    if bias is None or down_bias is None:
        if bias is not down_bias:
            raise ValueError(f"{moe.path}: a bias on one of gate_up and down only")
        return Expert(gate, up, down_matrix), counts
    gate_bias, up_bias = (half_of(bias, half, moe.order).contiguous() for half in (0, 1))
    return Expert(gate, up, down_matrix, gate_bias, up_bias, down_bias), counts


def store_expert(expert: Expert, fused: bool, order: GateUpOrder | None) -> dict[tuple[str, str], Tensor]:
    """The inverse of load_expert: tensors by (projection, parameter), in the checkpoint's form.

    Projections are gate, up, down, or gate_up and down when `fused`. Biases stay F32, int4 scales in their dtype.
    """
    if not fused:
        table: dict[tuple[str, str], Tensor] = {}
        for projection, matrix, bias in (
            ("gate", expert.gate, expert.gate_bias),
            ("up", expert.up, expert.up_bias),
            ("down", expert.down, expert.down_bias),
        ):
            if matrix is not None:
                weight = rows_packed(matrix.weight) if matrix.is_int4 else matrix.weight
                table |= {(projection, "weight"): weight, (projection, "weight_scale"): matrix.scale}
            if bias is not None:
                table[projection, "bias"] = bias
        return table
    assert expert.gate is not None
    assert order is not None
    table = {
        ("gate_up", "weight"): _merge_halves(expert.gate.weight.T, expert.up.weight.T, order),
        ("gate_up", "weight_scale"): _merge_halves(expert.gate.scale.T, expert.up.scale.T, order),
        ("down", "weight"): expert.down.weight.T.contiguous(),
        ("down", "weight_scale"): expert.down.scale.T.contiguous(),
    }
    if expert.gate_bias is not None and expert.up_bias is not None and expert.down_bias is not None:
        table["gate_up", "bias"] = _merge_halves(expert.gate_bias, expert.up_bias, order)
        table["down", "bias"] = expert.down_bias
    return table


def _merge_halves(gate: Tensor, up: Tensor, order: GateUpOrder) -> Tensor:
    """The inverse of `half_of` for both halves."""
    if order == "interleaved":
        return torch.stack([gate, up], -1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return torch.cat([gate, up], -1)


# --- int4 ------------------------------------------------------------------------------------------------------------


def columns_packed(weight: Tensor) -> Tensor:
    """ModelOpt's int4, two rows to a byte, as kernels have it, two columns to a byte.

    Args:
        weight: U8 [N/2, K], row 2r in the low nibble.

    Returns:
        U8 [N, K/2], even k in the low nibble.
    """
    columns = _swap_middle(weight.contiguous().view(torch.int16))
    rows = torch.empty(columns.shape[0], 2, columns.shape[1], dtype=torch.uint8)
    rows[:, 0] = columns  # the lower byte
    rows[:, 1] = columns >> 8
    return rows.view(2 * weight.shape[0], weight.shape[1] // 2)


def rows_packed(weight: Tensor) -> Tensor:
    """The inverse of columns_packed."""
    even, odd = weight[0::2].to(torch.int16), weight[1::2].to(torch.int16)
    return _swap_middle(even | (odd << 8)).view(torch.uint8)


def _swap_middle(words: Tensor) -> Tensor:
    """The second and third nibble of each I16, little-endian, exchanged: its own inverse.

    A word of two rows and two columns then has the columns side by side in its bytes, or the rows again.
    """
    return exchange_bits(words, 0x00F0, 4)


def with_row_factors(expert: Expert, factors: Tensor) -> Expert:
    """An int4 expert whose up takes over down's pre_quant_scale: each row's scales times its factor, F32.

    Exact but for rounding where the activation is linear in up: down(p · act(gate) · up) = down(act(gate) · (p · up)).

    Args:
        expert: int4, F32 scales.
        factors: F32 [I].

    Raises:
        LayoutError: a product over- or underflows, with its place.
    """
    before, factor = expert.up.scale, factors[:, None]
    scale = before * factor
    lost = ~torch.isfinite(scale) | ((scale == 0) & (before != 0) & (factor != 0))
    if bool(lost.any()):
        row, group = (int(i) for i in lost.nonzero()[0])
        text = f"{float(before[row, group]):g} times down's pre_quant_scale {float(factors[row]):g}"
        raise LayoutError(f"up's group scale {text} at [{row}, {group}] does not fit float32")
    return replace(expert, up=replace(expert.up, scale=scale))


def with_scales_in(expert: Expert, dtype: torch.dtype) -> tuple[Expert, float]:
    """An int4 expert with its group scales in the kernel's dtype, by value, and the largest relative error of that.

    Raises:
        LayoutError: a scale that the dtype can't hold (`numerics.unfit`), with its place.
    """
    largest = 0.0

    def rounded(projection: str, matrix: Matrix) -> Matrix:
        nonlocal largest
        scale = matrix.scale.to(dtype)
        back = scale.to(torch.float32)
        lost = unfit(matrix.scale, scale)
        if bool(lost.any()):
            row, group = (int(i) for i in lost.nonzero()[0])
            value, name = float(matrix.scale[row, group]), str(dtype).removeprefix("torch.")
            remedy = "--activation-dtype bf16" if dtype == torch.float16 else "--target hf"
            raise LayoutError(
                f"{projection}'s group scale {value:g} at [{row}, {group}] does not fit {name}"
                f"{became(float(back[row, group]), value)}; use {remedy}"
            )
        error = torch.where(matrix.scale == 0, 0.0, (back / matrix.scale - 1).abs())
        largest = max(largest, float(error.max()) if error.numel() else 0.0)
        return replace(matrix, scale=scale)

    gate = None if expert.gate is None else rounded("gate", expert.gate)
    rounded_ = replace(expert, gate=gate, up=rounded("up", expert.up), down=rounded("down", expert.down))
    return rounded_, largest


# --- TP --------------------------------------------------------------------------------------------------------------


def slice_expert(expert: Expert, share: Slice, first_rank: bool) -> Expert:
    """A TP rank's part: rows of gate and up, columns of down. down's bias goes to the first rank, zeros to the others,
    since the ranks' outputs are summed."""
    rows = slice(share.start, share.end)

    def cut_rows(matrix: Matrix) -> Matrix:
        return replace(matrix, weight=matrix.weight[rows], scale=matrix.scale[rows])

    columns = slice(share.start // 2, share.end // 2)
    blocks = slice(share.start // expert.down.group, share.end // expert.down.group)
    down_bias = expert.down_bias
    if down_bias is not None and not first_rank:
        down_bias = torch.zeros_like(down_bias)
    return Expert(
        None if expert.gate is None else cut_rows(expert.gate),
        cut_rows(expert.up),
        replace(expert.down, weight=expert.down.weight[:, columns], scale=expert.down.scale[:, blocks]),
        None if expert.gate_bias is None else expert.gate_bias[rows],
        None if expert.up_bias is None else expert.up_bias[rows],
        down_bias,
    )


def join_slices(parts: Sequence[Expert]) -> Expert:
    """The inverse of slice_expert over all TP ranks, in rank order."""

    def along(dimension: int, matrices: Sequence[Matrix]) -> Matrix:
        return replace(
            matrices[0],
            weight=torch.cat([matrix.weight for matrix in matrices], dimension),
            scale=torch.cat([matrix.scale for matrix in matrices], dimension),
        )

    gates = [part.gate for part in parts if part.gate is not None]
    gate_biases = [part.gate_bias for part in parts if part.gate_bias is not None]
    up_biases = [part.up_bias for part in parts if part.up_bias is not None]
    return Expert(
        along(0, gates) if gates else None,
        along(0, [part.up for part in parts]),
        along(1, [part.down for part in parts]),
        torch.cat(gate_biases) if gate_biases else None,
        torch.cat(up_biases) if up_biases else None,
        parts[0].down_bias,
    )
