"""Marlin's 4-bit repack for 16-bit activations, and its column order of scales and biases; each with its inverse."""

from __future__ import annotations

import torch
from torch import Tensor


def repack(weight: Tensor) -> Tensor:
    """NVFP4 nibbles of [N, K] in Marlin's order.

    `q[K, N].view(K/16, 2, 4, 2, N/64, 4, 2, 8).permute(0, 4, 7, 2, 5, 3, 6, 1).reshape(K/16, 2N, 8)`, then int32 = sum
    of nibble_i << 4i. The bytes of vLLM's `gptq_marlin_repack` (no act-order, 16-bit activations); golden vectors.

    Args:
        weight: U8 [N, K/2], low nibble = even k; N a multiple of 64, K of 16.

    Returns:
        I32 [K/16, 2N].
    """
    rows, half = weight.shape
    columns = 2 * half
    nibbles = torch.stack([weight & 15, weight >> 4], -1).view(rows, columns).T
    tiles = nibbles.reshape(columns // 16, 2, 4, 2, rows // 64, 4, 2, 8).permute(0, 4, 7, 2, 5, 3, 6, 1)
    pairs = tiles.reshape(columns // 16, 2 * rows, 4, 2)
    packed = pairs[..., 0] | pairs[..., 1] << 4
    return packed.contiguous().view(torch.int32).view(columns // 16, 2 * rows)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of repack: U8 [N, K/2] from I32 [K/16, 2N]."""
    tiles, double = packed.shape
    rows, columns = double // 2, tiles * 16
    octets = packed.contiguous().view(torch.uint8).view(tiles, double, 4)
    nibbles = torch.stack([octets & 15, octets >> 4], -1).view(tiles, rows // 64, 8, 4, 4, 2, 2, 2)
    logical = nibbles.permute(0, 7, 3, 5, 1, 4, 6, 2).reshape(columns, rows).T
    pairs = logical.reshape(rows, columns // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def _orders() -> tuple[Tensor, Tensor]:
    grouped = torch.tensor([i + 8 * j for i in range(8) for j in range(8)])
    single = torch.tensor([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])
    return grouped, single


GROUPED_ORDER, SINGLE_ORDER = _orders()
"""Source column of each destination column within 64 (several groups along K) or 32 (one group; biases)."""


def permute_columns(values: Tensor, order: Tensor) -> Tensor:
    """Columns in Marlin's order: within each run of len(order) columns, column i comes from order[i]."""
    return values.reshape(-1, len(order))[:, order].reshape(values.shape)


def restore_columns(values: Tensor, order: Tensor) -> Tensor:
    """The inverse of permute_columns."""
    return permute_columns(values, torch.argsort(order))
