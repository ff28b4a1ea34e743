"""What each fused-MoE kernel computes from packed bytes: an independent model in torch.

Bytes are read through the kernel's index formulas alone (where a nibble, a block scale or a bias of (row, k) lies),
from the arguments that the layout's `kernel_args` gives; nothing of the layouts' pack, unpack or permutations is used,
nor their codecs. One expert's F32 weights exist at a time. Sizes are the padded ones, so padding contributes what its
bytes say. No GPU kernel runs here.

W4A4 kernels quantise what enters each GEMM as NVFP4: for 16 values with a = 1/g of the stored g,

    s = E4M3(amax / (6·a)), half to even, at most 448;   c = e2m1(x / (s·a)), half to even, at most 6, 0 if s = 0

and multiply c·s by the weights' e2m1·E4M3 in F32. Kernels multiply by approximate reciprocals, so a value within a
rounding error of a tie may go the other way there. Calibrated scales come from BF16 maxima, so BF16 values hit exact
ties often: some in 10,000. `rounding.ROUNDING` says where a kernel rounds to 16 bits.

    flashinfer-trtllm   x1 gate, x0 up, raw; x0 clamped to ±limit, x1 to <= limit (limit/alpha);
                        scale_c·(x0 + beta)·(x1·scale_gate)·sigmoid(alpha·x1·scale_gate), not gated
                        scale_c·relu(x0·scale_gate)²; scale_c holds 1/a2, so requantised with g = 1; ·output2_scale
    others              accumulator·alpha, bias, activation in real units, requantised with 1/a2; ·alpha
    vllm-marlin         the same without quantisation, 16-bit activations
    int4 layouts        code·scale in F32 or 16 bits, no alpha; W4A8 kernels quantise to E4M3(x·f/a) and multiply by a
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4prep.smoke.layer import PackedLayer, Routing, Weights
from nvfp4prep.smoke.rounding import FOLDED, rounding_of, weighted_sum

_F32 = torch.float32
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Stages:
    """What one expert makes of its tokens, F32, at padded sizes, as the kernel leaves it after each step.

    `gate` (None when not gated) and `up` are GEMM1's accumulators times alpha with bias (flashinfer-trtllm: raw, before
    the clamp), `between` the activation's output before it is requantised (flashinfer-trtllm: times 1/a2), `out` the
    expert's output; `scale` is GEMM2's alpha where `out` lacks it (`Rounding.folded`), else None.
    """

    gate: Tensor | None
    up: Tensor
    between: Tensor
    out: Tensor
    scale: Tensor | None = None


def emulate(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
    """The weighted sum over the rank's experts as the layout's kernel computes it: a `layer.Run`.

    Args:
      layer: as packed.
      x: BF16 [T, H].
      routing: global expert ids; those of other ranks are left out.

    Returns:
      F32 [T, H]; values of the kernel's output type.
    """
    kernel = _kernel(layer, x.device)
    hidden = layer.geometry.hidden

    def expert(e: int, token: Tensor) -> tuple[Tensor, Tensor | None]:
        stages = kernel.run(layer.experts.index(e), x[token])
        return stages.out[:, :hidden], stages.scale

    return weighted_sum(routing, layer.experts, x.shape[0], hidden, expert, kernel.rounding)


def run_expert(layer: PackedLayer, position: int, x: Tensor) -> Stages:
    """All steps of the expert at `position` (of the rank's) for x BF16 [n, H], without routing."""
    return _kernel(layer, x.device).run(position, x)


def read_weights(layer: PackedLayer, position: int) -> Weights:
    """The expert's weights as the kernel reads them: e2m1 · block scale, exact, F32, at padded sizes.

    Global scales are left out, and Marlin's power-of-two factor is taken out. Biases are as stored. int4: code · scale.
    """
    return _kernel(layer, torch.device("cpu")).weights(position, real_blocks=True)


def stray_padding(layer: PackedLayer, position: int) -> dict[str, int]:
    """Nibbles, block scales and biases that are not zero although no element inside H and I reads them.

    By the name of the kernel's argument; all zero in a clean layer. Index formulas are injective, so these are all
    that are not zero less those that the elements read.
    """
    return _kernel(layer, torch.device("cpu")).stray(position)


# --- numbers ----------------------------------------------------------------------------------------------------------

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=_F32)


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def _s0e5m3(code: int, dtype: torch.dtype) -> float:
    """Marlin's block scale, in the units of the E4M3 scale times its factor: the 16-bit register's value · 2^-7.

    BF16 registers spread the bits over a wider exponent: with the top bit set that is the same value as half's; without
    it, some 2^-112 times the value, and the product with an FP4 in the register, at most 6·2^-126, is 0.
    """
    exponent, mantissa = code >> 3, code & 7
    if dtype == torch.float16:
        return mantissa * 2.0**-24 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 25)
    return (8 + mantissa) * 2.0 ** (exponent - 25) if code & 128 else 0.0


_E4M3_TABLE = torch.tensor([_e4m3(code) for code in range(256)], dtype=_F32)
_S0E5M3_TABLES = {
    dtype: torch.tensor([_s0e5m3(code, dtype) for code in range(256)], dtype=_F32) for dtype in _DTYPES.values()
}


def quantise(x: Tensor, g: Tensor) -> Tensor:
    """What the GEMM reads of x [n, K]: c·s of the module's formula, F32; a block with NaN is NaN."""
    blocks, a = x.reshape(x.shape[0], -1, 16), 1 / g
    scale = (blocks.abs().amax(-1, keepdim=True) / (6 * a)).clamp(max=448).to(torch.float8_e4m3fn).to(_F32)
    return (_to_e2m1(torch.where(scale == 0, 0, blocks / (scale * a))) * scale).reshape(x.shape)


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest e2m1 value. Ties go to the even code: 0, 1, 1, 2, 2, 4, 4."""
    a = x.abs()
    code = torch.zeros_like(a, dtype=torch.int32)
    for bound, tie_goes_up in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        code += a >= bound if tie_goes_up else a > bound
    return torch.where(x.isnan(), x, _E2M1.to(x.device)[code].copysign(x))


# --- where things lie; indices are tensors of integers, or numpy's ----------------------------------------------------


def shuffled_row(x: Any) -> Any:
    """Where row x goes in the TRT-LLM-gen shuffle: the r with x = (r//32)·32 + (r%8)·4 + (r%32)//8."""
    return x // 32 * 32 + x % 4 * 8 + x % 32 // 4


def swizzled_offset(row: Any, block: Any, blocks: int) -> Any:
    """Offset of the scale of (row, block) in the 128x4 swizzle of a matrix with `blocks` blocks in a row."""
    tiles = -(-blocks // 4)
    return row // 128 * tiles * 512 + block // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def marlin_nibble(k: Any, n: Any, columns: int) -> Any:
    """Number of the nibble of (k, n) in I32 [K/16, 2N], from the low nibble of the first word.

    A 16x64 tile is 128 words: thread t = n%8·4 + k%8//2 of warp n%64//16 has word t·4 + warp, and in it
    (k, n), (k+8, n), (k, n+8), (k+8, n+8), then the same of k+1.
    """
    word = k // 16 * 2 * columns + n // 64 * 128 + (n % 8 * 4 + k % 8 // 2) * 4 + n % 64 // 16
    return word * 8 + k % 2 * 4 + n % 16 // 8 * 2 + k % 16 // 8


def marlin_scale_column(n: Any) -> Any:
    """Column of the scale of n: i + 8j of a run of 64 at 8i + j, and of each 4 columns the middle two swapped."""
    column = n // 64 * 64 + n % 8 * 8 + n % 64 // 8
    return column - column % 4 + column % 4 // 2 + column % 2 * 2


def marlin_bias_column(n: Any) -> Any:
    """Column of the bias of n: of 32, 2i + j with j in 0, 1, 8, 9, 16, 17, 24, 25 at 8i + (number of j)."""
    return n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2


def _raw(tensor: Tensor) -> Tensor:
    """The tensor's bytes, flat, in the order of its elements."""
    return tensor.contiguous().view(torch.uint8).reshape(-1)


def _elements(scale: Tensor) -> Tensor:
    """16-bit scales as they are, 8-bit ones as codes."""
    return scale if scale.element_size() == 2 else _raw(scale)


def marlin_group_column(n: Any) -> Any:
    """Column of int4's scale of n where K holds several groups: i + 8j of a run of 64 at 8i + j."""
    return n // 64 * 64 + n % 8 * 8 + n % 64 // 8


def sm90_word(n: Any, w: Any, words: Any) -> Any:
    """Number of the 16-bit word of (row n, word w of `words` in a row) in Hopper's mixed-input order.

    Tiles of 16 rows; in one: w's second bit (f), row in 8 (c), w's tile of 16 (d), w's third bit (e), w's last two
    (g), the half of 8 rows (b).
    """
    c, b = n % 8, n % 16 // 8
    d, e, f, g = w // 16, w % 16 // 8, w % 8 // 4, w % 4
    return (((((n // 16 * 2 + f) * 8 + c) * (words // 16) + d) * 2 + e) * 4 + g) * 2 + b


def _nibbles(packed: Tensor) -> Tensor:
    """Two for each byte, the low one first, along the last dimension."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


@dataclass(frozen=True)
class _Codes:
    """Rows of a matrix as stored: nibbles U8 [N, K], codes of block scales U8 [N, K/16]."""

    nibbles: Tensor
    scales: Tensor

    def values(self, table: Tensor) -> Tensor:
        """e2m1 · block scale, F32 [N, K]."""
        rows, columns = self.nibbles.shape
        values = _E2M1.to(self.nibbles.device)[self.nibbles.int()].view(rows, -1, 16)
        return values.mul_(table.to(self.scales.device)[self.scales.int()].unsqueeze(-1)).view(rows, columns)

    def crop(self, rows: int, columns: int) -> _Codes:
        return _Codes(self.nibbles[:rows, :columns], self.scales[:rows, : columns // 16])


@dataclass(frozen=True)
class _Int4(_Codes):
    """Nibbles U8 [N, K], code + `offset` (0: two's complement), and group scales of 16-bit floats [N, K/group]."""

    offset: int = 0

    def values(self, table: Tensor) -> Tensor:
        codes = self.nibbles.to(_F32)
        codes = codes - self.offset if self.offset else torch.where(codes < 8, codes, codes - 16)
        rows, columns = self.nibbles.shape
        return (codes.view(rows, self.scales.shape[1], -1) * self.scales.to(_F32).unsqueeze(-1)).view(rows, columns)

    def crop(self, rows: int, columns: int) -> _Int4:
        group = self.nibbles.shape[1] // self.scales.shape[1]
        return _Int4(self.nibbles[:rows, :columns], self.scales[:rows, : columns // group], self.offset)


def _row_major(weight: Tensor, rows: Tensor, columns: int) -> Tensor:
    """Nibbles of rows of [M, K/2]: (row, k) is nibble row·K + k."""
    return _nibbles(_raw(weight).view(-1, columns // 2)[rows])


def _swizzled(scale: Tensor, rows: Tensor, columns: int) -> Tensor:
    block = torch.arange(columns // 16, device=rows.device)
    return _raw(scale)[swizzled_offset(rows[:, None], block, columns // 16)]


def _mma(scale: Tensor, rows: Tensor, columns: int) -> Tensor:
    """The same from CuteDSL's strided view (32, 4, M/128, 4, K/64)."""
    r, c = rows[:, None], torch.arange(columns // 16, device=rows.device)
    return scale.view(torch.uint8)[r % 32, r % 128 // 32, r // 128, c % 4, c // 4]


def _marlin_codes(weight: Tensor, scale: Tensor, n: Tensor) -> _Codes:
    """Columns n of I32 [K/16, 2N] and U8 [K/16, N]. A tile of 16 k is 8·N bytes."""
    tiles, width = weight.shape[0], weight.shape[1] // 2
    nibble = marlin_nibble(torch.arange(16, device=n.device), n[:, None], width).reshape(-1)
    found = _raw(weight).view(tiles, 8 * width).index_select(1, nibble // 2)
    nibbles = found >> (nibble % 2 * 4).to(torch.uint8) & 15
    scales = scale.view(torch.uint8)[:, marlin_scale_column(n)].T
    return _Codes(nibbles.view(tiles, len(n), 16).transpose(0, 1).reshape(len(n), tiles * 16), scales)


# --- kernels ----------------------------------------------------------------------------------------------------------


class _Kernel(ABC):
    """One layer through one kernel. Subclasses say where things lie and what the scalars mean."""

    weight_arguments: tuple[str, ...]
    scale_arguments: tuple[str, ...]
    bias_arguments: tuple[str, ...] = ()

    def __init__(self, layer: PackedLayer, device: torch.device) -> None:
        self.layer, self.device = layer, device
        self.gated = layer.geometry.gated
        self.hidden, self.inner = layer.geometry.padded_hidden, layer.geometry.padded_intermediate
        self.dtype = _DTYPES[layer.target.activation_dtype]
        self.rounding = rounding_of(layer.target)
        self.args: Mapping[str, Any] = layer.target.module.kernel_args(
            layer.packed, layer.scalars, {"output_dtype": self.dtype}
        )
        self.table = _E4M3_TABLE

    @abstractmethod
    def codes(self, position: int) -> tuple[_Codes | None, _Codes, _Codes]:
        """Gate, up and down of an expert, at padded sizes."""

    def biases(self, position: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gate's, up's and down's, F32, as stored; None where the kernel takes none."""
        return None, None, None

    @abstractmethod
    def run(self, position: int, x: Tensor) -> Stages:
        """One expert's steps for its tokens [n, H]."""

    def stored(self, position: int) -> dict[str, Tensor]:
        """One expert's argument tensors by the names of `*_arguments`."""
        names = (*self.weight_arguments, *self.scale_arguments, *self.bias_arguments)
        return {name: self.args[name][position] for name in names if self.args.get(name) is not None}

    def weights(self, position: int, real_blocks: bool = False) -> Weights:
        gate, up, down = (None if codes is None else codes.values(self.table) for codes in self.codes(position))
        assert up is not None and down is not None
        return Weights(gate, up, down, *self.biases(position))

    def stray(self, position: int) -> dict[str, int]:
        geometry = self.layer.geometry
        inner, hidden = geometry.intermediate, geometry.hidden
        gate, up, down = self.codes(position)
        halves = [codes.crop(inner, hidden) for codes in (gate, up) if codes is not None]
        read = (halves, [down.crop(hidden, inner)])
        stored = self.stored(position)
        found = {}
        for name, parts in zip(self.weight_arguments, read, strict=True):
            total = int(_nibbles(_raw(stored[name])).count_nonzero())
            found[name] = total - sum(int(part.nibbles.count_nonzero()) for part in parts)
        for name, parts in zip(self.scale_arguments, read, strict=True):
            total = int(_elements(stored[name]).count_nonzero())
            found[name] = total - sum(int(part.scales.count_nonzero()) for part in parts)
        gate_bias, up_bias, down_bias = self.biases(position)
        biases = (((gate_bias, inner), (up_bias, inner)), ((down_bias, hidden),))
        for name, values in zip(self.bias_arguments, biases, strict=False):
            if name in stored:
                inside = [value[:size] for value, size in values if value is not None]
                found[name] = int(stored[name].count_nonzero()) - sum(int(v.count_nonzero()) for v in inside)
        return found

    def entering(self, x: Tensor) -> Tensor:
        """x at the padded hidden size, with the kernel's 16-bit values, F32."""
        return pad(x.to(self.dtype).to(_F32), (0, self.hidden - x.shape[1]))

    def scalar(self, name: str, position: int) -> Tensor:
        """One of the layer's scalars for an expert, F32, 0-dim."""
        return self.layer.scalars[name][position].to(self.device, _F32)

    def arange(self, n: int) -> Tensor:
        return torch.arange(n, device=self.device)

    def on_device(self, tensor: Tensor, position: int) -> Tensor:
        return tensor[position].to(self.device)


class _Trtllm(_Kernel):
    weight_arguments = ("gemm1_weights", "gemm2_weights")
    scale_arguments = ("gemm1_weights_scale", "gemm2_weights_scale")
    bias_arguments = ("gemm1_bias", "gemm2_bias")

    def rows(self) -> tuple[Tensor | None, Tensor, Tensor]:
        i, step = self.arange(self.inner), 2 if self.gated else 1
        gate = shuffled_row(step * i + 1) if self.gated else None
        return gate, shuffled_row(step * i), shuffled_row(self.arange(self.hidden))

    def codes(self, position: int) -> tuple[_Codes | None, _Codes, _Codes]:
        def matrix(name: str, rows: Tensor, columns: int) -> _Codes:
            scale = self.on_device(self.args[f"{name}_scale"], position)
            weight = self.on_device(self.args[name], position)
            return _Codes(_row_major(weight, rows, columns), _swizzled(scale, rows, columns))

        gate, up, down = self.rows()
        return (
            None if gate is None else matrix("gemm1_weights", gate, self.hidden),
            matrix("gemm1_weights", up, self.hidden),
            matrix("gemm2_weights", down, self.inner),
        )

    def biases(self, position: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.args["gemm1_bias"] is None:
            return None, None, None
        first, second = (self.on_device(self.args[name], position) for name in self.bias_arguments)
        gate, up, down = self.rows()
        return None if gate is None else first[gate], first[up], second[down]

    def run(self, position: int, x: Tensor) -> Stages:
        w = self.weights(position)
        scale_c, scale_gate, scale_out = (
            self.args[name][position].to(self.device)
            for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
        )
        limit, alpha, beta = (
            None if self.args[name] is None else self.args[name][position].to(self.device)
            for name in ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta")
        )
        # Activations are quantised once for all experts, with the layer's one scale.
        a = quantise(self.entering(x), self.scalar("w13_input_scale_quant", 0))
        x0 = _linear(a, w.up, w.up_bias)
        x1 = None if w.gate is None else _linear(a, w.gate, w.gate_bias)
        if x1 is None:
            between = scale_c * (x0 * scale_gate).clamp(min=0) ** 2
        else:
            up, gate = (x0, x1) if limit is None else (x0.clamp(-limit, limit), x1.clamp(max=limit))
            gate = gate * scale_gate
            shifted = up if beta is None else up + beta
            between = scale_c * shifted * gate * torch.sigmoid(gate if alpha is None else alpha * gate)
        between = self.rounding.at("activation", between)
        out = _linear(quantise(between, torch.ones((), device=self.device, dtype=torch.float32)), w.down, w.down_bias)
        return Stages(x1, x0, between, self.rounding.at("gemm2", out * scale_out))


class _OneAlpha(_Kernel):
    """Accumulators times one alpha, then everything in real units."""

    alpha_arguments: tuple[str, str]

    def gate_and_up_rows(self) -> tuple[Tensor | None, Tensor]:
        """Up first."""
        i = self.arange(self.inner)
        return (i + self.inner, i) if self.gated else (None, i)

    def first_scale(self, position: int) -> Tensor:
        """1/a1: one for the layer, as its callers quantise x once for all experts."""
        return self.scalar("w13_input_scale_quant", 0)

    def second_scale(self, position: int) -> Tensor:
        """1/a2 of the expert."""
        return self.scalar("w2_input_scale_quant", position)

    def alphas(self, position: int) -> tuple[Tensor, Tensor]:
        first, second = (self.args[name][position].to(self.device, _F32) for name in self.alpha_arguments)
        return first, second

    def run(self, position: int, x: Tensor) -> Stages:
        w, rounding = self.weights(position), self.rounding
        first, second = self.alphas(position)

        def gemm(a: Tensor, weight: Tensor, bias: Tensor | None, alpha: Tensor, point: str) -> Tensor:
            out = rounding.at(point, _linear(a, weight) * alpha)
            return out if bias is None else rounding.at("bias", out + bias)

        w = replace(w, gate=rounding.at("weight", w.gate) if w.gate is not None else None)
        w = replace(w, up=rounding.at("weight", w.up), down=rounding.at("weight", w.down))
        a = self.quantised(self.entering(x), position, first=True)
        up = gemm(a, w.up, w.up_bias, first, "gemm1")
        gate = None if w.gate is None else gemm(a, w.gate, w.gate_bias, first, "gemm1")
        between = rounding.at("activation", self.activate(gate, up, position))
        b = self.quantised(between, position, first=False)
        if rounding.folded and w.down_bias is None:
            return Stages(gate, up, between, rounding.at("gemm2", _linear(b, w.down) / FOLDED), second * FOLDED)
        return Stages(gate, up, between, gemm(b, w.down, w.down_bias, second, "gemm2"))

    def quantised(self, x: Tensor, position: int, first: bool) -> Tensor:
        """What GEMM1 (`first`) or GEMM2 reads of x, without the scale that its alpha undoes."""
        return quantise(x, self.first_scale(position) if first else self.second_scale(position))

    def swiglu(self, position: int) -> tuple[float | None, float | None, float | None]:
        """limit, alpha and beta, real units: arguments of the activation's call, by the model's configuration."""
        activation = self.layer.activation
        return activation.limit, activation.alpha, activation.beta

    def activate(self, gate: Tensor | None, up: Tensor, position: int) -> Tensor:
        limit, alpha, beta = self.swiglu(position)
        if gate is None:
            return up.clamp(min=0) ** 2
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        elif alpha is None and beta is None:
            return self.rounding.at("silu", gate * torch.sigmoid(gate)) * up
        return gate * torch.sigmoid((1.0 if alpha is None else alpha) * gate) * (up + (beta or 0.0))

    def codes(self, position: int) -> tuple[_Codes | None, _Codes, _Codes]:
        stored = {name: tensor.to(self.device) for name, tensor in self.stored(position).items()}
        w13, w2 = (stored[name] for name in self.weight_arguments)
        s13, s2 = (stored[name] for name in self.scale_arguments)

        def matrix(weight: Tensor, scale: Tensor, rows: Tensor, columns: int) -> _Codes:
            return _Codes(_row_major(weight, rows, columns), self.scale_codes(scale, rows, columns))

        gate, up = self.gate_and_up_rows()
        return (
            None if gate is None else matrix(w13, s13, gate, self.hidden),
            matrix(w13, s13, up, self.hidden),
            matrix(w2, s2, self.arange(self.hidden), self.inner),
        )

    def scale_codes(self, scale: Tensor, rows: Tensor, columns: int) -> Tensor:
        return _swizzled(scale, rows, columns)


class _FlashinferCutlass(_OneAlpha):
    weight_arguments = ("fc1_expert_weights", "fc2_expert_weights")
    scale_arguments = ("quant_scales[1]", "quant_scales[4]")
    bias_arguments = ("fc1_expert_biases", "fc2_expert_biases")
    alpha_arguments = ("quant_scales[2]", "quant_scales[5]")

    def __init__(self, layer: PackedLayer, device: torch.device) -> None:
        super().__init__(layer, device)
        numbered = {f"quant_scales[{i}]": scale for i, scale in enumerate(self.args["quant_scales"])}
        self.args = {**self.args, **numbered}

    def swiglu(self, position: int) -> tuple[float | None, float | None, float | None]:
        """[E] arguments of the kernel."""
        limit, alpha, beta = (
            float(self.args[name][position]) if name in self.args else None
            for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
        )
        return limit, alpha, beta

    def second_scale(self, position: int) -> Tensor:
        found: Tensor = self.args["quant_scales[3]"][position].to(self.device)
        return found

    def biases(self, position: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if "fc1_expert_biases" not in self.args:
            return None, None, None
        first, second = (self.on_device(self.args[name], position).to(_F32) for name in self.bias_arguments)
        gate, up = self.gate_and_up_rows()
        return None if gate is None else first[gate], first[up], second


class _CuteDsl(_OneAlpha):
    weight_arguments = ("w1_weight", "w2_weight")
    scale_arguments = ("w1_weight_sf", "w2_weight_sf")
    alpha_arguments = ("w1_alpha", "w2_alpha")

    def gate_and_up_rows(self) -> tuple[Tensor | None, Tensor]:
        """64 rows of up, 64 of gate, 64 of up, …"""
        i = self.arange(self.inner)
        up = i // 64 * 128 + i % 64
        return (up + 64, up) if self.gated else (None, i)

    def second_scale(self, position: int) -> Tensor:
        """One for all experts."""
        found: Tensor = self.args["fc2_input_scale"][0].to(self.device)
        return found

    def stored(self, position: int) -> dict[str, Tensor]:
        names = (*self.weight_arguments, *self.scale_arguments)
        return {
            name: self.args[name][..., position] if name in self.scale_arguments else self.args[name][position]
            for name in names
        }

    def scale_codes(self, scale: Tensor, rows: Tensor, columns: int) -> Tensor:
        return _mma(scale, rows, columns)


class _VllmCutlass(_OneAlpha):
    weight_arguments = ("w1_fp4", "w2_fp4")
    scale_arguments = ("w1_blockscale", "w2_blockscale")
    alpha_arguments = ("w1_alphas", "w2_alphas")

    def gate_and_up_rows(self) -> tuple[Tensor | None, Tensor]:
        i = self.arange(self.inner)
        return (i, i + self.inner) if self.gated else (None, i)

    def first_scale(self, position: int) -> Tensor:
        """Tokens are quantised per expert, after they are sorted."""
        found: Tensor = self.args["a1_gscale"][position].to(self.device)
        return found

    def second_scale(self, position: int) -> Tensor:
        found: Tensor = self.args["a2_gscale"][position].to(self.device)
        return found


class _Marlin(_OneAlpha):
    weight_arguments = ("w1", "w2")
    scale_arguments = ("w1_scale", "w2_scale")
    bias_arguments = ("bias1", "bias2")
    alpha_arguments = ("global_scale1", "global_scale2")

    def quantised(self, x: Tensor, position: int, first: bool) -> Tensor:
        return x

    def __init__(self, layer: PackedLayer, device: torch.device) -> None:
        super().__init__(layer, device)
        self.table = _S0E5M3_TABLES[self.dtype]

    def gate_and_up_rows(self) -> tuple[Tensor | None, Tensor]:
        i = self.arange(self.inner)
        return (i, i + self.inner) if self.gated else (None, i)

    def codes(self, position: int) -> tuple[_Codes | None, _Codes, _Codes]:
        stored = {name: tensor.to(self.device) for name, tensor in self.stored(position).items()}
        gate, up = self.gate_and_up_rows()
        return (
            None if gate is None else _marlin_codes(stored["w1"], stored["w1_scale"], gate),
            _marlin_codes(stored["w1"], stored["w1_scale"], up),
            _marlin_codes(stored["w2"], stored["w2_scale"], self.arange(self.hidden)),
        )

    def weights(self, position: int, real_blocks: bool = False) -> Weights:
        w = super().weights(position)
        if not real_blocks:
            return w
        w13, w2 = (float(self.layer.scalars[f"{name}_scale_factor"][position]) for name in ("w13", "w2"))
        return replace(w, gate=None if w.gate is None else w.gate / w13, up=w.up / w13, down=w.down / w2)

    def alphas(self, position: int) -> tuple[Tensor, Tensor]:
        """In a register FP4 lacks 2^126 (half: 2^14), and a block scale has 2^7 too much; here neither does."""
        unit = 2.0 ** (119 if self.dtype == torch.bfloat16 else 7)
        first, second = super().alphas(position)
        return first / unit, second / unit

    def biases(self, position: int) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.args["bias1"] is None:
            return None, None, None
        first, second = (
            self.on_device(self.args[name], position).to(self.dtype).to(_F32) for name in self.bias_arguments
        )
        gate, up = self.gate_and_up_rows()
        return (
            None if gate is None else first[marlin_bias_column(gate)],
            first[marlin_bias_column(up)],
            second[marlin_bias_column(self.arange(self.hidden))],
        )


class _WeightOnlyInt4(_OneAlpha):
    """int4 without alphas, 16-bit activations, gate first."""

    weight_arguments = ("w1", "w2")
    scale_arguments = ("w1_scale", "w2_scale")

    def quantised(self, x: Tensor, position: int, first: bool) -> Tensor:
        return x

    def alphas(self, position: int) -> tuple[Tensor, Tensor]:
        one = torch.ones((), device=self.device, dtype=torch.float32)
        return one, one

    def gate_and_up_rows(self) -> tuple[Tensor | None, Tensor]:
        i = self.arange(self.inner)
        return (i, i + self.inner) if self.gated else (None, i)

    def matrix(self, weight: Tensor, scale: Tensor, rows: Tensor, columns: int) -> _Int4:
        """Rows of a stored matrix."""
        return _Int4(_row_major(weight, rows, columns), scale[rows], 8)

    def codes(self, position: int) -> tuple[_Codes | None, _Codes, _Codes]:
        stored = {name: tensor.to(self.device) for name, tensor in self.stored(position).items()}
        w13, w2 = (stored[name] for name in self.weight_arguments)
        s13, s2 = (stored[name] for name in self.scale_arguments)
        gate, up = self.gate_and_up_rows()
        return (
            None if gate is None else self.matrix(w13, s13, gate, self.hidden),
            self.matrix(w13, s13, up, self.hidden),
            self.matrix(w2, s2, self.arange(self.hidden), self.inner),
        )


class _MarlinInt4(_WeightOnlyInt4):
    def run(self, position: int, x: Tensor) -> Stages:
        """One group along K is a scale per column, which multiplies what the kernel has already rounded."""
        rounding = self.rounding

        def gemm(a: Tensor, matrix: _Codes, point: str) -> Tensor:
            if matrix.scales.shape[1] > 1:
                return rounding.at(point, _linear(a, rounding.at("weight", matrix.values(self.table))))
            codes = replace(matrix, scales=torch.ones_like(matrix.scales)).values(self.table)
            return rounding.at(point, rounding.at(point, _linear(a, codes)) * matrix.scales[:, 0].to(_F32))

        gate_codes, up_codes, down_codes = self.codes(position)
        a = self.entering(x)
        up = gemm(a, up_codes, "gemm1")
        gate = None if gate_codes is None else gemm(a, gate_codes, "gemm1")
        between = rounding.at("activation", self.activate(gate, up, position))
        return Stages(gate, up, between, gemm(between, down_codes, "gemm2"))

    def matrix(self, weight: Tensor, scale: Tensor, rows: Tensor, columns: int) -> _Int4:
        """Columns `rows` of I32 [K/16, 2N]; scales [K/g, N]."""
        found = _marlin_codes(weight, weight.view(torch.uint8), rows).nibbles
        place = marlin_group_column(rows) if scale.shape[0] > 1 else marlin_bias_column(rows)
        return _Int4(found, scale[:, place].T, 8)


class _MxInt4(_WeightOnlyInt4):
    weight_arguments = ("gemm1_weights", "gemm2_weights")
    scale_arguments = ("gemm1_weights_scale", "gemm2_weights_scale")

    def gate_and_up_rows(self) -> tuple[Tensor | None, Tensor]:
        i, step = self.arange(self.inner), 2 if self.gated else 1
        return (2 * i + 1 if self.gated else None), step * i

    def matrix(self, weight: Tensor, scale: Tensor, rows: Tensor, columns: int) -> _Int4:
        """Blocks of 128 bytes of a row, [K/256, M, 128]; one scale for 32 codes, swizzled."""
        r = shuffled_row(rows)
        byte = self.arange(columns // 2)
        found = weight[byte // 128, r[:, None], byte % 128]
        group = self.arange(columns // 32)
        return _Int4(_nibbles(found), scale[swizzled_offset(r[:, None], group, columns // 32)])


class _Fp8(_WeightOnlyInt4):
    """int4 with E4M3 activations."""

    @abstractmethod
    def scaled(self, x: Tensor, position: int, first: bool) -> Tensor:
        """What becomes E4M3."""

    def quantised(self, x: Tensor, position: int, first: bool) -> Tensor:
        return self.scaled(x, position, first).clamp(-448, 448).to(torch.float8_e4m3fn).to(_F32)


class _W4AFp8(_Fp8):
    weight_arguments = ("w1_q", "w2_q")
    scale_arguments = ("w1_scale", "w2_scale")

    def alphas(self, position: int) -> tuple[Tensor, Tensor]:
        return self.args["a1_scale"][0].to(self.device), self.args["a2_scale"][0].to(self.device)

    def scaled(self, x: Tensor, position: int, first: bool) -> Tensor:
        return x / self.alphas(position)[0 if first else 1]

    def matrix(self, weight: Tensor, scale: Tensor, rows: Tensor, columns: int) -> _Int4:
        """Four groups of a row side by side where their number allows."""
        group = self.arange(columns // 128)
        side = 4 if columns // 128 % 4 == 0 else 1
        scales = scale[group // side, rows[:, None] * side + group % side]
        return _Int4(_row_major(weight.view(torch.uint8), rows, columns), scales)


class _Sm90W4A8(_Fp8):
    weight_arguments = ("fc1_expert_weights", "fc2_expert_weights")
    scale_arguments = ("quant_scales[0]", "quant_scales[1]")

    def __init__(self, layer: PackedLayer, device: torch.device) -> None:
        super().__init__(layer, device)
        numbered = {f"quant_scales[{i}]": scale for i, scale in enumerate(self.args["quant_scales"])}
        self.args = {**self.args, **numbered}

    def alphas(self, position: int) -> tuple[Tensor, Tensor]:
        first, second = (self.args[f"quant_scales[{i}]"][position].to(self.device) for i in (6, 7))
        return first, second

    def scaled(self, x: Tensor, position: int, first: bool) -> Tensor:
        """The product is rounded to BF16 first: golden flashinfer_sm90_w4a8."""
        multiplier: Tensor = self.args[f"quant_scales[{2 if first else 3}]"].to(self.device)
        return (x.to(torch.bfloat16) * multiplier).to(_F32)

    def gate_and_up_rows(self) -> tuple[Tensor | None, Tensor]:
        i = self.arange(self.inner)
        return (i + self.inner, i) if self.gated else (None, i)

    def matrix(self, weight: Tensor, scale: Tensor, rows: Tensor, columns: int) -> _Int4:
        word = self.arange(columns // 4)
        place = sm90_word(rows[:, None], word, columns // 4)
        found = _raw(weight).view(-1, 2)[place].flatten(1)
        group = self.arange(columns // 128)
        r = rows[:, None]
        return _Int4(_nibbles(found), scale[r // 64, group, r % 8, r % 64 // 8])


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out = a @ weight.T
    return out if bias is None else out + bias


_KERNELS: Mapping[str, type[_Kernel]] = {
    "flashinfer-trtllm": _Trtllm,
    "flashinfer-cutlass": _FlashinferCutlass,
    "flashinfer-cutedsl": _CuteDsl,
    "vllm-cutlass": _VllmCutlass,
    "vllm-marlin": _Marlin,
    "vllm-marlin-int4": _MarlinInt4,
    "moe-wna16": _WeightOnlyInt4,
    "flashinfer-sm90-w4a8": _Sm90W4A8,
    "sglang-w4afp8": _W4AFp8,
    "flashinfer-mxint4": _MxInt4,
}


def _kernel(layer: PackedLayer, device: torch.device) -> _Kernel:
    return _KERNELS[layer.target.layout](layer, device)
