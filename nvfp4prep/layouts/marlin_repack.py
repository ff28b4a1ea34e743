"""Marlin's 4-bit repack for 16-bit activations, and its column order of scales and biases; each with its inverse."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nvfp4prep.layouts.permutations import take_words
from nvfp4prep.numerics import exchange_bits


def repack(weight: Tensor) -> Tensor:
    """NVFP4 nibbles of [N, K] in Marlin's order.

    `q[K, N].view(K/16, 2, 4, 2, N/64, 4, 2, 8).permute(0, 4, 7, 2, 5, 3, 6, 1).reshape(K/16, 2N, 8)`, then int32 = sum
    of nibble_i << 4i. The bytes of vLLM's `gptq_marlin_repack` (no act-order, 16-bit activations); golden vectors.

    Computed in moves of whole words: within each 16 k's of a row, nibbles that share a byte; between rows n and n + 8,
    bytes that stand side by side; then a transpose, and pairs of bytes in order within 64 n's.

    Args:
        weight: U8 [N, K/2], low nibble = even k; N a multiple of 64, K of 16.

    Returns:
        I32 [K/16, 2N].
    """
    rows, half = weight.shape
    words = _swap_rows(_swap_nibbles(weight.contiguous().view(torch.int64)))
    return take_words(words.T, _PAIR_ORDER).view(torch.int32).view(half // 8, 2 * rows)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of repack: U8 [N, K/2] from I32 [K/16, 2N]."""
    tiles, double = packed.shape
    words = take_words(packed, _PAIR_SOURCE).view(torch.int64).view(tiles, double // 2)
    return _swap_nibbles(_swap_rows(words.T.contiguous())).view(torch.uint8)


def _swap_nibbles(words: Tensor) -> Tensor:
    """High nibbles of each word's first 4 bytes exchanged with low nibbles of its last 4: its own inverse.

    Of a word's 16 k's, k and k + 8 come to share a byte, and even k's stand before odd ones.

    Args:
        words: I64 [N, K/16], little-endian.
    """
    return exchange_bits(words, 0xF0F0F0F0, 28)


def _swap_rows(words: Tensor) -> Tensor:
    """Odd bytes of each row n exchanged with the even bytes of row n + 8, within 16 rows: its own inverse.

    Args:
        words: I64 [N, K/16], little-endian, contiguous; changed in place and returned.
    """
    upper, lower = words.view(words.shape[0] // 16, 2, -1).unbind(1)
    moved = upper >> 8
    moved ^= lower
    moved &= 0x00FF00FF00FF00FF
    lower ^= moved
    moved <<= 8
    upper ^= moved
    return words


_PAIR_ORDER = np.arange(256).reshape(4, 2, 8, 2, 2).transpose(2, 4, 1, 0, 3).reshape(256)
"""Source of each pair of bytes among 64 n's of 16 k's: (n/16, k/2%2, n%8, k%2, k/4), k within 8 and each pair of n and
n + 8, to (n%8, k/4, k/2%2, n/16, k%2)."""
_PAIR_SOURCE = np.argsort(_PAIR_ORDER)


def _orders() -> tuple[Tensor, Tensor]:
    grouped = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    single = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    return grouped, single


GROUPED_ORDER, SINGLE_ORDER = _orders()
"""Source column of each destination column within 64 (several groups along K) or 32 (one group; biases)."""


def scale_order(groups: int) -> Tensor:
    """The column order of int4's scales, for so many groups along K."""
    return GROUPED_ORDER if groups > 1 else SINGLE_ORDER


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def permute_columns(values: Tensor, order: Tensor) -> Tensor:
    """Columns in Marlin's order: within each run of len(order) columns, column i comes from order[i]."""
    bits = values.contiguous().view(_BITS[values.element_size()])  # NumPy has no BF16
    runs = bits.reshape(-1, len(order)).numpy()
    return torch.from_numpy(runs.take(order.numpy(), 1)).view(values.shape).view(values.dtype)


def restore_columns(values: Tensor, order: Tensor) -> Tensor:
    """The inverse of permute_columns."""
    return permute_columns(values, torch.argsort(order))


def turn(scale: Tensor, order: Tensor) -> Tensor:
    """Scales transposed, with columns in Marlin's order. Whole rows are moved before they become columns.

    Args:
        scale: [N, G], elements of 1 to 8 bytes.
        order: its length divides N.

    Returns:
        [G, N].
    """
    runs = scale.contiguous().view(_BITS[scale.element_size()]).view(-1, len(order), scale.shape[1]).numpy()
    rows = torch.from_numpy(runs.take(order.numpy(), 1)).view(scale.shape)
    return rows.T.contiguous().view(scale.dtype)


def turn_back(turned: Tensor, order: Tensor) -> Tensor:
    """The inverse of turn: [N, G] from [G, N]."""
    return restore_columns(turned, order).T.contiguous()
