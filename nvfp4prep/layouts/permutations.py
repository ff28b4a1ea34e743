"""Row orders, swizzles and interleaves that the layouts are made of; each with its inverse beside it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvfp4prep.layouts.logical import pad_zeros, round_up


def take_words(values: Tensor, order: NDArray[np.intp]) -> Tensor:
    """Word i of two bytes from word order[i], within each run of len(order) words. NumPy's take is several times as
    fast as torch's.

    Args:
        values: of any dtype.
        order: [n].

    Returns:
        I16 [words / n, n].
    """
    runs = values.contiguous().view(torch.int16).view(-1, len(order)).numpy()
    return torch.from_numpy(runs.take(order, 1))


# --- SWZ: the 128x4 block-scale swizzle ------------------------------------------------------------------------------


_FOUR = {1: torch.int32, 2: torch.int64}
"""Four neighbours, which stay together, as one number; by bytes of each (the golden vectors have 2)."""


def swizzle(scale: Tensor) -> Tensor:
    """Block scales in the order of Blackwell's block-scaled tensor cores.

    [M, K] is padded with zeros to [M', K'] (M' multiple of 128, K' of 4); byte (m, k) goes to
    `(m//128)·(K'/4)·512 + (k//4)·512 + (m%32)·16 + ((m%128)//32)·4 + k%4`.

    Source: FlashInfer 0.7.2 `block_scale_interleave` (CUDA), vLLM 0.33 `swizzle_blockscale`.

    Args:
        scale: U8 [M, K].

    Returns:
        U8 [M', K'], its bytes in swizzled order.
    """
    rows, columns = round_up(scale.shape[0], 128), round_up(scale.shape[1], 4)
    fours = pad_zeros(scale, rows, columns).view(_FOUR[scale.element_size()])
    tiles = fours.view(rows // 128, 4, 32, columns // 4).permute(0, 3, 2, 1)
    return tiles.contiguous().view(scale.dtype).view(rows, columns)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of swizzle: U8 [rows, columns] from U8 [M', K']."""
    padded_rows, padded_columns = swizzled.shape
    fours = swizzled.contiguous().view(_FOUR[swizzled.element_size()])
    tiles = fours.view(padded_rows // 128, padded_columns // 4, 32, 4).permute(0, 3, 2, 1)
    linear = tiles.contiguous().view(swizzled.dtype)
    return linear.view(padded_rows, padded_columns)[:rows, :columns]


# --- ROW and GATED: TRT-LLM-gen's row shuffle ------------------------------------------------------------------------


@lru_cache(maxsize=16)
def row_shuffle(rows: int) -> Tensor:
    """Source row of each destination row: `S(r) = (r//32)·32 + (r%8)·4 + (r%32)//8` (epilogue tile 128). I64 [rows].

    Source: FlashInfer 0.7.2 `get_shuffle_matrix_a_row_indices`; the same rows for weights and block scales.
    `rows` must be a multiple of 128 (asserted there too).
    """
    if rows % 128:
        raise ValueError(f"the row shuffle needs a multiple of 128 rows, got {rows}")
    r = torch.arange(rows)
    return r // 32 * 32 + r % 8 * 4 + r % 32 // 8


@lru_cache(maxsize=16)
def gated_row_shuffle(rows: int) -> Tensor:
    """As row_shuffle for [first half; second half], interleaved row by row first. I64 [rows].

    Source row of destination row r: `(x%2)·rows/2 + x//2`, x = S(r).
    Source: FlashInfer 0.7.2 `_maybe_get_cached_w3_w1_permute_indices`.
    """
    x = row_shuffle(rows)
    return x % 2 * (rows // 2) + x // 2


def take_rows(matrix: Tensor, order: Tensor) -> Tensor:
    """Row r of the result is row order[r] of the matrix."""
    return matrix.index_select(0, order)


def put_rows(shuffled: Tensor, order: Tensor) -> Tensor:
    """The inverse of take_rows."""
    return torch.empty_like(shuffled).index_copy_(0, order, shuffled)


# --- ILV64: CuteDSL's interleave of the two halves --------------------------------------------------------------------


def interleave_halves(joined: Tensor, chunk: int = 64) -> Tensor:
    """Chunks of rows of the two halves in turn: [2I, *] -> first chunk of the top half, first of the bottom, second …

    Source: vLLM 0.33 `interleave_linear_and_gate`. I must be a multiple of `chunk`.
    """
    rows = joined.shape[0]
    return joined.view(2, rows // (2 * chunk), chunk, -1).transpose(0, 1).reshape(joined.shape)


def separate_halves(interleaved: Tensor, chunk: int = 64) -> Tensor:
    """The inverse of interleave_halves."""
    rows = interleaved.shape[0]
    return interleaved.view(rows // (2 * chunk), 2, chunk, -1).transpose(0, 1).reshape(interleaved.shape)


# --- BLK: BlockMajorK ------------------------------------------------------------------------------------------------


def block_major(weight: Tensor, width: int = 128) -> Tensor:
    """Columns cut into blocks of `width` bytes, block by block: U8 [M, B] -> [B/width, M, width].

    Source: FlashInfer 0.7.2 `convert_to_block_layout`. B must be a multiple of `width`.
    """
    rows, columns = weight.shape
    return weight.view(rows, columns // width, width).transpose(0, 1).contiguous()


def row_major(blocks: Tensor) -> Tensor:
    """The inverse of block_major."""
    count, rows, width = blocks.shape
    return blocks.transpose(0, 1).reshape(rows, count * width)


# --- SM90INT4: Hopper's mixed-input GEMM -----------------------------------------------------------------------------


def interleave_sm90(weight: Tensor) -> Tensor:
    """Signed nibbles in the order of Hopper's mixed-input GEMM.

    On words of four nibbles: `[N, K/4].view(N/16, 2, 8, K/64, 2, 2, 4).permute(0, 5, 2, 3, 4, 6, 1)`.
    Source: FlashInfer 0.7.2 `interleave_moe_weights_for_sm90_mixed_gemm`, quant_type int4 (CUDA; golden vectors).

    Args:
        weight: U8 [N, K/2], contiguous; N a multiple of 16, K of 64.

    Returns:
        U8 [N, K/2].
    """
    return take_words(weight, _sm90_order(weight.shape[1])).view(torch.uint8).view(weight.shape)


def separate_sm90(interleaved: Tensor) -> Tensor:
    """The inverse of interleave_sm90."""
    order = np.argsort(_sm90_order(interleaved.shape[1]))
    return take_words(interleaved, order).view(torch.uint8).view(interleaved.shape)


@lru_cache(maxsize=16)
def _sm90_order(half: int) -> NDArray[np.intp]:
    """Source of each word of four nibbles among those of 16 rows of `half` bytes."""
    words = np.arange(8 * half).reshape(2, 8, half // 32, 2, 2, 4)
    return words.transpose(4, 1, 2, 3, 5, 0).reshape(-1)
