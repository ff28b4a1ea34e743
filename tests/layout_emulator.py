"""What each fused-MoE kernel computes from packed bytes, and what a layer should compute; numpy, F64.

The kernels are read from their index formulas alone, those of nvfp4prep.smoke.emulator: a byte's offset for (expert,
row, k), nothing of nvfp4prep's pack, unpack or permutations. Sizes come from the shapes of the kernel's arguments.
Activations stay unquantised: where a kernel quantises with 1/a, `x · (1/a)` is exact here, so only the algebra of the
scales is left.

Each `run_*` takes the dictionary of the layout's `kernel_args`, one expert's number and tokens x [T, K'], and returns
the expert's output [T, H'].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nvfp4prep.smoke.emulator import (
    marlin_bias_column,
    marlin_nibble,
    marlin_scale_column,
    shuffled_row,
    swizzled_offset,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Args = Mapping[str, Any]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return np.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


E4M3 = np.array([_e4m3(code) for code in range(256)])


def raw(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The tensor's bytes, flat, in the order of its elements."""
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1)


def reals(tensor: torch.Tensor) -> Floats:
    return tensor.to(torch.float64).numpy()


def sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-x))


# --- where things lie ---


def nibble_values(flat: NDArray[np.uint8], index: Ints) -> Floats:
    """e2m1 values of the nibbles `index`, the even one of a byte being the low one."""
    return E2M1[flat[index // 2] >> (4 * (index % 2)) & 15]


def row_major(weight: torch.Tensor, expert: int, rows: Ints, columns: int) -> Floats:
    """Nibbles of the given rows of [E, M, K/2]; [len(rows), K]."""
    matrix_rows = weight[0].numel() * weight.element_size() * 2 // columns
    k = np.arange(columns)
    return nibble_values(raw(weight), (expert * matrix_rows + rows[:, None]) * columns + k)


def swizzled_scales(scale: torch.Tensor, expert: int, rows: Ints, columns: int) -> Floats:
    """Block scales of the given rows, repeated to [len(rows), K]."""
    per_expert = scale[0].numel() * scale.element_size()
    block = np.arange(columns) // 16
    return E4M3[raw(scale)[expert * per_expert + swizzled_offset(rows[:, None], block, columns // 16)]]


def mma_scales(view: torch.Tensor, expert: int, rows: Ints, columns: int) -> Floats:
    """The same from CuteDSL's strided view (32, 4, M/128, 4, K/64, E)."""
    codes = view.view(torch.uint8).numpy()
    r, c = rows[:, None], np.arange(columns) // 16
    return E4M3[codes[r % 32, r % 128 // 32, r // 128, c % 4, c // 4, expert]]


# --- TRT-LLM-gen ---


def trtllm_weights(args: Args, expert: int, gated: bool) -> tuple[Floats | None, Floats, Floats]:
    """Gate [I', H'], up [I', H'] and down [H', I'], without global scales."""
    w13, w2 = args["gemm1_weights"], args["gemm2_weights"]
    hidden, inner = w13.shape[2] * 2, w2.shape[2] * 2

    def matrix(weight: str, rows: Ints, columns: int) -> Floats:
        scale = swizzled_scales(args[f"{weight}_scale"], expert, rows, columns)
        return row_major(args[weight], expert, rows, columns) * scale

    i = np.arange(inner)
    step = 2 if gated else 1
    gate = matrix("gemm1_weights", shuffled_row(step * i + 1), hidden) if gated else None
    up = matrix("gemm1_weights", shuffled_row(step * i), hidden)
    return gate, up, matrix("gemm2_weights", shuffled_row(np.arange(hidden)), inner)


def run_trtllm(args: Args, expert: int, x: Floats, gated: bool, quantise: Floats) -> Floats:
    """KernelRunner.h: `scaleC'·(x0 + beta')·(x1·scaleGate)·sigmoid(alpha·x1·scaleGate)` on raw accumulators x0, x1."""
    gate, up, down = trtllm_weights(args, expert, gated)
    inner, hidden = up.shape
    scalar = {
        name: None if args[name] is None else float(args[name][expert])
        for name in (
            "output1_scale_scalar",
            "output1_scale_gate_scalar",
            "output2_scale_scalar",
            "gemm1_clamp_limit",
            "gemm1_alpha",
            "gemm1_beta",
        )
    }
    scale_c, scale_gate = scalar["output1_scale_scalar"], scalar["output1_scale_gate_scalar"]
    scale_out, limit = scalar["output2_scale_scalar"], scalar["gemm1_clamp_limit"]
    alpha = 1.0 if scalar["gemm1_alpha"] is None else scalar["gemm1_alpha"]
    beta = 0.0 if scalar["gemm1_beta"] is None else scalar["gemm1_beta"]
    assert scale_c is not None and scale_gate is not None and scale_out is not None
    quantised = x * quantise[expert]
    x0 = quantised @ up.T
    x1 = None if gate is None else quantised @ gate.T
    if args["gemm1_bias"] is not None:
        bias = reals(args["gemm1_bias"])[expert]
        step = 2 if gated else 1
        x0 = x0 + bias[shuffled_row(step * np.arange(inner))]
        x1 = None if x1 is None else x1 + bias[shuffled_row(step * np.arange(inner) + 1)]
    if x1 is None:
        between = scale_c * np.maximum(x0 * scale_gate, 0) ** 2
    else:
        if limit is not None:
            x0, x1 = np.clip(x0, -limit, limit), np.minimum(x1, limit)
        between = scale_c * (x0 + beta) * (x1 * scale_gate) * sigmoid(alpha * x1 * scale_gate)
    out = between @ down.T
    if args["gemm2_bias"] is not None:
        out = out + reals(args["gemm2_bias"])[expert][shuffled_row(np.arange(hidden))]
    return out * scale_out


# --- kernels with one alpha per GEMM ---


@dataclass(frozen=True)
class Swiglu:
    """Parameters in real units: a limit of None and alpha 1, beta 0 make silu(gate)·up."""

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    def __call__(self, gate: Floats | None, up: Floats) -> Floats:
        if gate is None:
            return np.maximum(up, 0) ** 2
        if self.limit is not None:
            gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        return gate * sigmoid(self.alpha * gate) * (up + self.beta)


def real_swiglu(scalars: Mapping[str, torch.Tensor], expert: int) -> Swiglu:
    """From [E] tensors named swiglu_limit, swiglu_alpha and swiglu_beta, where there are such."""
    found = {name: scalars.get(f"swiglu_{name}") for name in ("limit", "alpha", "beta")}
    return Swiglu(**{name: float(value[expert]) for name, value in found.items() if value is not None})


def cutlass_weights(
    w13: torch.Tensor,
    s13: torch.Tensor,
    w2: torch.Tensor,
    s2: torch.Tensor,
    expert: int,
    rows: Callable[[int], tuple[Ints | None, Ints]],
    scales: Callable[[torch.Tensor, int, Ints, int], Floats] = swizzled_scales,
) -> tuple[Floats | None, Floats, Floats]:
    """As trtllm_weights, of kernels that leave weights in place; `rows(I')` says where gate and up rows are."""
    hidden = w2.shape[1]
    inner = w2.shape[2] * w2.element_size() * 2
    gate_rows, up_rows = rows(inner)

    def matrix(weight: torch.Tensor, scale: torch.Tensor, at: Ints, columns: int) -> Floats:
        return row_major(weight, expert, at, columns) * scales(scale, expert, at, columns)

    return (
        None if gate_rows is None else matrix(w13, s13, gate_rows, hidden),
        matrix(w13, s13, up_rows, hidden),
        matrix(w2, s2, np.arange(hidden), inner),
    )


def gate_first(gated: bool) -> Callable[[int], tuple[Ints | None, Ints]]:
    return lambda inner: (np.arange(inner), inner + np.arange(inner)) if gated else (None, np.arange(inner))


def up_first(gated: bool) -> Callable[[int], tuple[Ints | None, Ints]]:
    return lambda inner: (inner + np.arange(inner), np.arange(inner)) if gated else (None, np.arange(inner))


def chunks_of_64(gated: bool) -> Callable[[int], tuple[Ints | None, Ints]]:
    """64 rows of up, 64 of gate, 64 of up, …"""

    def rows(inner: int) -> tuple[Ints | None, Ints]:
        i = np.arange(inner)
        up = i // 64 * 128 + i % 64
        return (up + 64, up) if gated else (None, i)

    return rows


def _two_gemms(
    weights: tuple[Floats | None, Floats, Floats],
    x: Floats,
    swiglu: Swiglu,
    alphas: tuple[float, float],
    quantise: tuple[float, float] = (1.0, 1.0),
    gate_bias: Floats | float = 0.0,
    up_bias: Floats | float = 0.0,
    down_bias: Floats | float = 0.0,
) -> Floats:
    gate, up, down = weights
    quantised = x * quantise[0]
    gate_out = None if gate is None else quantised @ gate.T * alphas[0] + gate_bias
    between = swiglu(gate_out, quantised @ up.T * alphas[0] + up_bias)
    return between * quantise[1] @ down.T * alphas[1] + down_bias


def flashinfer_cutlass_weights(args: Args, expert: int, gated: bool) -> tuple[Floats | None, Floats, Floats]:
    _, s13, _, _, s2, _ = args["quant_scales"]
    w13, w2 = args["fc1_expert_weights"], args["fc2_expert_weights"]
    assert w13.dtype == w2.dtype == torch.int64 and s13.dtype == s2.dtype == torch.int32
    return cutlass_weights(w13, s13, w2, s2, expert, up_first(gated))


def run_flashinfer_cutlass(args: Args, expert: int, x: Floats, gated: bool) -> Floats:
    first_quantise, _, first_alpha, second_quantise, _, second_alpha = args["quant_scales"]
    alphas = float(first_alpha[expert]), float(second_alpha[expert])
    quantise = float(first_quantise[expert]), float(second_quantise[expert])
    weights = flashinfer_cutlass_weights(args, expert, gated)
    inner = weights[1].shape[0]
    biases: dict[str, Floats] = {}
    if "fc1_expert_biases" in args:
        first = reals(args["fc1_expert_biases"])[expert]
        biases = {"up_bias": first[:inner], "down_bias": reals(args["fc2_expert_biases"])[expert]}
        if gated:
            biases["gate_bias"] = first[inner:]
    return _two_gemms(weights, x, real_swiglu(args, expert), alphas, quantise, **biases)


def vllm_cutlass_weights(args: Args, expert: int, gated: bool) -> tuple[Floats | None, Floats, Floats]:
    return cutlass_weights(
        args["w1_fp4"], args["w1_blockscale"], args["w2_fp4"], args["w2_blockscale"], expert, gate_first(gated)
    )


def run_vllm_cutlass(args: Args, expert: int, x: Floats, gated: bool, swiglu: Swiglu) -> Floats:
    weights = vllm_cutlass_weights(args, expert, gated)
    alphas = float(args["w1_alphas"][expert]), float(args["w2_alphas"][expert])
    return _two_gemms(weights, x, swiglu, alphas, (float(args["a1_gscale"][expert]), float(args["a2_gscale"][expert])))


def cutedsl_weights(args: Args, expert: int, gated: bool) -> tuple[Floats | None, Floats, Floats]:
    w13, w2 = args["w1_weight"], args["w2_weight"]
    return cutlass_weights(
        w13, args["w1_weight_sf"], w2, args["w2_weight_sf"], expert, chunks_of_64(gated), scales=mma_scales
    )


def run_cutedsl(args: Args, expert: int, x: Floats, gated: bool, swiglu: Swiglu, quantise: Floats) -> Floats:
    """One fc2_input_scale for all experts."""
    assert args["fc2_input_scale"].shape == (1,)
    weights = cutedsl_weights(args, expert, gated)
    alphas = float(args["w1_alpha"][expert]), float(args["w2_alpha"][expert])
    return _two_gemms(weights, x, swiglu, alphas, (quantise[expert], float(args["fc2_input_scale"])))


# --- Marlin ---


def s0e5m3(codes: NDArray[np.uint8], dtype: str) -> Floats:
    """The scale as the kernel's 16-bit registers have it: codes shifted into half, or spread over bf16's exponent."""
    top, exponent, mantissa = codes >> 7, (codes >> 3 & 15).astype(np.int64), (codes & 7) / 8
    if dtype == "fp16":
        full = top * 16 + exponent
        return np.where(full == 0, mantissa * 2.0**-14, (1 + mantissa) * 2.0 ** (full - 15.0))
    full = top * 128 + exponent
    return np.where(full == 0, mantissa * 2.0**-126, (1 + mantissa) * 2.0 ** (full - 127.0))


def marlin_weights(args: Args, expert: int, gated: bool, dtype: str) -> tuple[Floats | None, Floats, Floats]:
    """Gate, up and down in the registers' units: FP4 has its exponent bias of the dtype still to be taken out."""
    bias = 2.0**-126 if dtype == "bf16" else 2.0**-14

    def matrix(weight: str, scale: str, n: Ints) -> Floats:
        tiles, columns = args[weight].shape[1], args[weight].shape[2] // 2
        k = np.arange(tiles * 16)
        at = expert * tiles * 16 * columns + marlin_nibble(k, n[:, None], columns)
        scale_at = (expert * tiles + k // 16) * columns + marlin_scale_column(n[:, None])
        return nibble_values(raw(args[weight]), at) * bias * s0e5m3(raw(args[scale])[scale_at], dtype)

    inner = args["w2"].shape[1] * 16
    i = np.arange(inner)
    return (
        matrix("w1", "w1_scale", i) if gated else None,
        matrix("w1", "w1_scale", i + inner if gated else i),
        matrix("w2", "w2_scale", np.arange(args["w2"].shape[2] // 2)),
    )


def run_marlin(args: Args, expert: int, x: Floats, gated: bool, swiglu: Swiglu, dtype: str) -> Floats:
    weights = marlin_weights(args, expert, gated, dtype)
    inner, hidden = weights[1].shape
    biases: dict[str, Floats] = {}
    if args["bias1"] is not None:
        first = reals(args["bias1"])[expert]
        at = marlin_bias_column(np.arange(inner))
        biases = {
            "up_bias": first[at + inner if gated else at],
            "down_bias": reals(args["bias2"])[expert][marlin_bias_column(np.arange(hidden))],
        }
        if gated:
            biases["gate_bias"] = first[at]
    alphas = float(args["global_scale1"][expert]), float(args["global_scale2"][expert])
    return _two_gemms(weights, x, swiglu, alphas, **biases)


# --- what it should be ---


def dequantised(weight: torch.Tensor, scale: torch.Tensor, global_scale: float = 1.0) -> Floats:
    """[N, K] of a logical NVFP4 matrix: U8 [N, K/2] and codes [N, K/16]."""
    codes = weight.numpy()
    values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], -1).reshape(codes.shape[0], -1)
    return values * np.repeat(E4M3[scale.numpy()], 16, 1) * global_scale
