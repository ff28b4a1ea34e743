"""Marlin's 4-bit repack for 16-bit activations, and its column order of scales and biases; each with its inverse."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def repack(weight: Tensor) -> Tensor:
    """NVFP4 nibbles of [N, K] in Marlin's order.

    `q[K, N].view(K/16, 2, 4, 2, N/64, 4, 2, 8).permute(0, 4, 7, 2, 5, 3, 6, 1).reshape(K/16, 2N, 8)`, then int32 = sum
    of nibble_i << 4i. The bytes of vLLM's `gptq_marlin_repack` (no act-order, 16-bit activations); golden vectors.

    Computed in three moves: words of 16 k's to their line of 64 bytes, which holds 8 n's; nibbles swapped inside each
    word; bytes in order inside each line.

    Args:
        weight: U8 [N, K/2], low nibble = even k; N a multiple of 64, K of 16.

    Returns:
        I32 [K/16, 2N].
    """
    rows, half = weight.shape
    words = weight.contiguous().view(torch.int64).view(rows // 64, 4, 2, 8, half // 8).permute(4, 0, 3, 1, 2)
    lines = _swap_nibbles(words.contiguous()).view(torch.uint8).view(-1, 64)
    return _take_bytes(lines, _LINE_ORDER).view(torch.int32).view(half // 8, 2 * rows)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of repack: U8 [N, K/2] from I32 [K/16, 2N]."""
    tiles, double = packed.shape
    lines = _take_bytes(packed.contiguous().view(torch.uint8).view(-1, 64), _LINE_SOURCE)
    words = _swap_nibbles(lines.view(torch.int64)).view(tiles, double // 128, 8, 4, 2).permute(1, 3, 4, 2, 0)
    return words.contiguous().view(torch.uint8).view(double // 2, tiles * 8)


def _swap_nibbles(words: Tensor) -> Tensor:
    """High nibbles of each word's first 4 bytes exchanged with low nibbles of its last 4: its own inverse.

    Of a word's 16 k's, k and k + 8 come to share a byte, and even k's stand before odd ones.

    Args:
        words: I64, little-endian; taken over by the result.
    """
    moved = words >> 28
    moved ^= words
    moved &= 0xF0F0F0F0
    words ^= moved
    moved <<= 28
    words ^= moved
    return words


_LINE_ORDER = np.arange(64).reshape(4, 2, 2, 4).transpose(3, 0, 2, 1).reshape(64)
"""Source byte of each byte of a line: (n/16, n/8, k%2, k/2), n within 64 and k within 8, to (k/2, n/16, k%2, n/8)."""
_LINE_SOURCE = np.argsort(_LINE_ORDER)


def _take_bytes(lines: Tensor, order: NDArray[np.intp]) -> Tensor:
    """Byte i of each line from its byte order[i]; U8 [lines, 64]. NumPy's take is several times faster than torch's."""
    return torch.from_numpy(lines.numpy().take(order, 1))


def _orders() -> tuple[Tensor, Tensor]:
    grouped = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    single = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    return grouped, single


GROUPED_ORDER, SINGLE_ORDER = _orders()
"""Source column of each destination column within 64 (several groups along K) or 32 (one group; biases)."""


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def permute_columns(values: Tensor, order: Tensor) -> Tensor:
    """Columns in Marlin's order: within each run of len(order) columns, column i comes from order[i]."""
    bits = values.contiguous().view(_BITS[values.element_size()])  # NumPy has no BF16
    runs = bits.reshape(-1, len(order)).numpy()
    return torch.from_numpy(runs.take(order.numpy(), 1)).view(values.shape).view(values.dtype)


def restore_columns(values: Tensor, order: Tensor) -> Tensor:
    """The inverse of permute_columns."""
    return permute_columns(values, torch.argsort(order))
