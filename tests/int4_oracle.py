"""What int4 checkpoints and int4 layouts hold, read back by index formulas alone; numpy.

Formulas are those of the kernels' own sources and of their GPU outputs in tests/data/golden: a nibble's number for
(row, k), a scale's place for (row, group). Nothing of nvfp4prep is used: no pack, unpack, permutation, name or shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Codes = NDArray[np.int8]
Bits = NDArray[np.uint16]
Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Layer = Mapping[str, torch.Tensor]

LAYOUTS = ("vllm-marlin-int4", "moe-wna16", "flashinfer-sm90-w4a8", "sglang-w4afp8", "flashinfer-mxint4")
PAIRS = (
    ("vllm-marlin-int4", "vllm"),
    ("vllm-marlin-int4", "sglang"),
    ("moe-wna16", "vllm"),
    ("moe-wna16", "sglang"),
    ("flashinfer-sm90-w4a8", "flashinfer"),
    ("sglang-w4afp8", "sglang"),
    ("flashinfer-mxint4", "vllm"),
    ("flashinfer-mxint4", "sglang"),
)
NAMES: Mapping[str, tuple[str, str, str, str]] = {
    "vllm-marlin-int4": ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"),
    "moe-wna16": ("w13_qweight", "w13_scales", "w2_qweight", "w2_scales"),
    "flashinfer-sm90-w4a8": ("fc1_expert_weights", "fc1_expert_scales", "fc2_expert_weights", "fc2_expert_scales"),
    "sglang-w4afp8": ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"),
    "flashinfer-mxint4": ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"),
}
"""The engines' parameters of w13's weight and scale and w2's."""
OFFSET = {"vllm-marlin-int4": 8, "moe-wna16": 8}
UP_FIRST = {"flashinfer-sm90-w4a8", "flashinfer-mxint4"}
INTERLEAVED = {"flashinfer-mxint4"}


@dataclass(frozen=True)
class Matrix:
    """Codes -8 to 7 [N, K] and the bits of 16-bit group scales [N, K/group]."""

    codes: Codes
    scale: Bits

    def cropped(self, rows: int, columns: int, group: int) -> Matrix:
        return Matrix(self.codes[:rows, :columns], self.scale[:rows, : columns // group])


@dataclass(frozen=True)
class Expert:
    """`gate` is None when not gated."""

    gate: Matrix | None
    up: Matrix
    down: Matrix

    def items(self) -> dict[str, Matrix]:
        found = {"up": self.up, "down": self.down}
        return found if self.gate is None else {"gate": self.gate, **found}


def assert_same(ours: Expert, expected: Expert, label: object = "") -> None:
    assert ours.items().keys() == expected.items().keys()
    for name, mine in ours.items().items():
        theirs = expected.items()[name]
        for what, a, b in (("codes", mine.codes, theirs.codes), ("scales", mine.scale, theirs.scale)):
            assert a.shape == b.shape, (label, name, what, a.shape, b.shape)
            assert (a == b).all(), (label, name, what, f"{(a != b).sum()} of {a.size} differ")


# --- numbers ---------------------------------------------------------------------------------------------------------


def bits_of(scale: torch.Tensor) -> Bits:
    assert scale.element_size() == 2, scale.dtype
    return scale.contiguous().view(torch.int16).numpy().view(np.uint16)


def bytes_of(weight: torch.Tensor) -> Bytes:
    return weight.contiguous().view(torch.uint8).numpy().reshape(-1)


def bf16_bits(values: Floats) -> Bits:
    """F32 to BF16, half to even, on the bits."""
    whole = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    return ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16)


def rounded_bits(values: Floats, dtype: str) -> Bits:
    """Rounded once to the kernel's dtype, bf16 or fp16."""
    if dtype == "bf16":
        return bf16_bits(values)
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, dtype=np.float32).astype(np.float16).view(np.uint16)


def floats_of(bits: Bits, dtype: str = "bf16") -> Floats:
    if dtype == "fp16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def signed(nibbles: NDArray[np.integer[Any]], offset: int = 0) -> Codes:
    values = nibbles.astype(np.int8)
    return values - np.int8(offset) if offset else np.where(values < 8, values, values - 16).astype(np.int8)


def nibbles_at(flat: Bytes, number: Ints) -> Bytes:
    """Nibbles by number, the low one of a byte first."""
    found: Bytes = (flat[number // 2] >> (number % 2 * 4).astype(np.uint8) & 15).astype(np.uint8)
    return found


# --- ModelOpt's own form ---------------------------------------------------------------------------------------------


def modelopt_codes(weight: torch.Tensor) -> Codes:
    """U8 [N/2, K]: row 2r in the low nibble of row r, 2r + 1 in the high one, two's complement."""
    stored = weight.numpy()
    codes = np.empty((2 * stored.shape[0], stored.shape[1]), dtype=np.int8)
    codes[0::2], codes[1::2] = signed(stored & 15), signed(stored >> 4)
    return codes


def dequantised(tensors: Layer, module: str) -> NDArray[np.float64]:
    """code · scale · pre_quant_scale (if any), exact in F64 for scales and factors of BF16, and else near enough."""
    codes = modelopt_codes(tensors[f"{module}.weight"]).astype(np.float64)
    scale = tensors[f"{module}.weight_scale"].to(torch.float64).numpy()
    weight: NDArray[np.float64] = codes * np.repeat(scale, codes.shape[1] // scale.shape[1], axis=1)
    factors = tensors.get(f"{module}.pre_quant_scale")
    if factors is not None:
        weight = weight * factors.to(torch.float64).numpy()
    return weight


def source_expert(tensors: Layer, path: str, expert: int, dtype: str = "bf16", rows: bool = False) -> Expert:
    """What a layout must hold of an expert: codes as they are, scales rounded once.

    Args:
        rows: down's pre_quant_scale multiplies the scales of up's rows first, in F32.
    """

    def matrix(projection: str, factors: Floats | None = None) -> Matrix:
        module = f"{path}.experts.{expert}.{projection}_proj"
        scale = tensors[f"{module}.weight_scale"].to(torch.float32).numpy()
        if factors is not None:
            scale = scale * factors[:, None]
        return Matrix(modelopt_codes(tensors[f"{module}.weight"]), rounded_bits(scale, dtype))

    factors = tensors.get(f"{path}.experts.{expert}.down_proj.pre_quant_scale")
    up = None if factors is None or not rows else factors.to(torch.float32).numpy()
    gated = f"{path}.experts.{expert}.gate_proj.weight" in tensors
    return Expert(matrix("gate") if gated else None, matrix("up", up), matrix("down"))


def moe_paths(tensors: Layer) -> list[str]:
    found = {match[1] for name in tensors if (match := re.match(r"(.+)\.experts\.0\.up_proj\.weight$", name))}
    return sorted(found)


# --- kernels' forms --------------------------------------------------------------------------------------------------

Read = Callable[[torch.Tensor, torch.Tensor, Ints, int, int, int], tuple[Bytes, Bits]]
"""(weight, scale, row numbers, rows in all, K, group) -> nibbles [len, K], scales [len, K/group]."""


def row_major(weight: torch.Tensor, rows: Ints, columns: int) -> Bytes:
    return nibbles_at(bytes_of(weight), rows[:, None] * columns + np.arange(columns))


def marlin_nibble(n: Ints, k: Ints, rows: int) -> Ints:
    """`q[K, N].view(K/16, 2, 4, 2, N/64, 4, 2, 8).permute(0, 4, 7, 2, 5, 3, 6, 1)`, flat."""
    a, b, c = k % 16 // 8, k % 8 // 2, k % 2
    d, e, f = n % 64 // 16, n % 16 // 8, n % 8
    return (((((k // 16 * (rows // 64) + n // 64) * 8 + f) * 4 + b) * 4 + d) * 2 + c) * 4 + e * 2 + a


SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
"""Source column of each of 32 where K is one group."""


def read_marlin(
    weight: torch.Tensor, scale: torch.Tensor, n: Ints, rows: int, columns: int, group: int
) -> tuple[Bytes, Bits]:
    assert weight.dtype == torch.int32 and weight.shape == (columns // 16, 2 * rows)
    assert scale.shape == (columns // group, rows)
    nibbles = nibbles_at(bytes_of(weight), marlin_nibble(n[:, None], np.arange(columns), rows))
    if columns // group > 1:
        place = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
    else:
        place = n // 32 * 32 + np.argsort(np.array(SINGLE))[n % 32]
    return nibbles, bits_of(scale)[:, place].T


def read_wna16(
    weight: torch.Tensor, scale: torch.Tensor, n: Ints, rows: int, columns: int, group: int
) -> tuple[Bytes, Bits]:
    assert weight.dtype == torch.uint8 and weight.shape == (rows, columns // 2)
    assert scale.shape == (rows, columns // group)
    return row_major(weight, n, columns), bits_of(scale)[n]


def sm90_word(n: Ints, w: Ints, words: int) -> Ints:
    """`view(N/16, 2, 8, K/64, 2, 2, 4).permute(0, 5, 2, 3, 4, 6, 1)` on words of four nibbles, flat."""
    t, b, c = n // 16, n % 16 // 8, n % 8
    d, e, f, g = w // 16, w % 16 // 8, w % 8 // 4, w % 4
    return (((((t * 2 + f) * 8 + c) * (words // 16) + d) * 2 + e) * 4 + g) * 2 + b


def sm90_nibbles(weight: torch.Tensor, n: Ints, columns: int) -> Bytes:
    k = np.arange(columns)
    return nibbles_at(bytes_of(weight), sm90_word(n[:, None], k // 4, columns // 4) * 4 + k % 4)


def read_sm90(
    weight: torch.Tensor, scale: torch.Tensor, n: Ints, rows: int, columns: int, group: int
) -> tuple[Bytes, Bits]:
    assert weight.dtype == torch.uint8 and weight.shape == (rows, columns // 2)
    assert scale.shape == (rows // 64, columns // group, 8, 8)
    groups = np.arange(columns // group)
    return sm90_nibbles(weight, n, columns), bits_of(scale)[
        n[:, None] // 64, groups, n[:, None] % 8, n[:, None] % 64 // 8
    ]


def read_w4afp8(
    weight: torch.Tensor, scale: torch.Tensor, n: Ints, rows: int, columns: int, group: int
) -> tuple[Bytes, Bits]:
    assert weight.dtype == torch.int8 and weight.shape == (rows, columns // 2)
    side = 4 if columns // group % 4 == 0 else 1
    assert scale.shape == (columns // group // side, rows * side)
    groups = np.arange(columns // group)
    return row_major(weight, n, columns), bits_of(scale)[groups // side, n[:, None] * side + groups % side]


def row_of(x: Ints) -> Ints:
    """Where row x goes: the r with (r//32)·32 + (r%8)·4 + (r%32)//8 = x."""
    r = np.arange(int(x.max()) // 32 * 32 + 32)
    table = np.empty_like(r)
    table[r // 32 * 32 + r % 8 * 4 + r % 32 // 8] = r
    return table[x]


def read_mxint4(
    weight: torch.Tensor, scale: torch.Tensor, n: Ints, rows: int, columns: int, group: int
) -> tuple[Bytes, Bits]:
    """`n` as x of the shuffle; the kernel's groups are of 32, and all of one of ours must be the same."""
    assert weight.dtype == torch.uint8 and weight.shape == (columns // 256, rows, 128)
    assert scale.shape == (rows * columns // 32,)
    r, k, groups = row_of(n)[:, None], np.arange(columns), np.arange(columns // 32)
    nibbles = nibbles_at(bytes_of(weight), (k // 256 * rows + r) * 256 + k % 256)
    tiles = -(-len(groups) // 4)
    place = r // 128 * tiles * 512 + groups // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + groups % 4
    found = bits_of(scale)[place].reshape(len(n), columns // group, group // 32)
    assert (found == found[..., :1]).all(), "parts of a group have other scales"
    return nibbles, found[..., 0]


READ: Mapping[str, Read] = {
    "vllm-marlin-int4": read_marlin,
    "moe-wna16": read_wna16,
    "flashinfer-sm90-w4a8": read_sm90,
    "sglang-w4afp8": read_w4afp8,
    "flashinfer-mxint4": read_mxint4,
}


def unpacked(
    layout: str, weights: tuple[torch.Tensor, ...], hidden: int, inner: int, group: int, gated: bool = True
) -> Expert:
    """One expert from its tensors in the order of NAMES, at the sizes that are stored."""
    w13, s13, w2, s2 = weights
    i, rows = np.arange(inner), (2 if gated else 1) * inner
    if layout in INTERLEAVED:
        step = 2 if gated else 1
        up, gate = step * i, step * i + 1
    else:
        gate, up = (i + inner, i) if layout in UP_FIRST or not gated else (i, i + inner)

    def matrix(weight: torch.Tensor, scale: torch.Tensor, n: Ints, rows: int, columns: int) -> Matrix:
        nibbles, scales = READ[layout](weight, scale, n, rows, columns, group)
        return Matrix(signed(nibbles, OFFSET.get(layout, 0)), scales)

    return Expert(
        matrix(w13, s13, gate, rows, hidden) if gated else None,
        matrix(w13, s13, up, rows, hidden),
        matrix(w2, s2, np.arange(hidden), hidden, inner),
    )


def stored_expert(
    tensors: Layer, path: str, layout: str, engine: str, position: int, hidden: int, inner: int, group: int
) -> Expert:
    """One expert of a rank's files, by the engine's parameter names."""
    prefix = f"{path}.experts." + ("routed_experts." if engine == "vllm" else "")
    weights = tuple(tensors[prefix + name][position] for name in NAMES[layout])
    return unpacked(layout, weights, hidden, inner, group)


def joined(parts: list[Expert]) -> Expert:
    """An expert from its TP ranks' parts."""

    def along(axis: int, matrices: list[Matrix]) -> Matrix:
        return Matrix(
            np.concatenate([one.codes for one in matrices], axis), np.concatenate([one.scale for one in matrices], axis)
        )

    gates = [part.gate for part in parts if part.gate is not None]
    return Expert(
        along(0, gates) if gates else None, along(0, [p.up for p in parts]), along(1, [p.down for p in parts])
    )
