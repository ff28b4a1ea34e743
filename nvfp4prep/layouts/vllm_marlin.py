"""vllm-marlin: vLLM's and SGLang's Marlin MoE (`moe_wna16_marlin_gemm`), weight-only, on SM75 to SM90 and newer.

Rows: gate first, then up; each half padded on its own. Weights go through Marlin's 4-bit repack, block scales are
transposed, permuted and recoded from E4M3 to S0E5M3.

    w13_weight         I32   [H/16, 2·2I']   marlin_repack.repack
    w13_weight_scale   E4M3  [H/16, 2I']     S0E5M3 bytes: see `recode_table`
    w2_weight          I32   [I'/16, 2·H]
    w2_weight_scale    E4M3  [I'/16, H]
    w13_bias, w2_bias  F32   [2I'], [H]      columns in Marlin's single order, in real units

Columns of scales: within 64, column i + 8j goes to 8i + j; then each 4 columns in the order 0, 2, 1, 3.
vLLM multiplies block scales by a power of two per layer and rank (`scale_factor`) and flushes those that stay below
2^-6; SGLang does neither (with bf16 activations its kernel reads those as 2^-112 times their value: in effect 0).
vLLM's global scale is F32, SGLang's is of the activations' dtype, and rounded to it first.
Sources: vLLM 0.33 `prepare_nvfp4_moe_layer_for_marlin`; SGLang 0.5.23 `prepare_moe_nvfp4_layer_for_marlin`; golden
vectors of vLLM 0.24's kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4prep.layouts import marlin_repack
from nvfp4prep.layouts.logical import (
    Activation,
    Engine,
    EngineRules,
    Expert,
    Geometry,
    LayerFacts,
    LayoutError,
    Matrix,
    Requires,
    Scales,
    crop_expert,
    join,
    join_bias,
    one_w13_scale,
    pad_expert,
    positions_where,
    split,
    split_bias,
)
from nvfp4prep.scales import E4M3_NAN, E4M3_VALUES

NAME = "vllm-marlin"
VERSION = 1
REQUIRES = Requires(
    kernel="moe_wna16_marlin_gemm",
    gpus=("sm75", "sm80", "sm86", "sm89", "sm90"),
    engines={
        "vllm": EngineRules("marlin", 64, pad_gated=64, pad_plain=64, pad_odd_hidden=128),
        "sglang": EngineRules("marlin", 128, pad_gated=64, pad_plain=128),
    },
    input_scales=False,
    biases=True,
    block_scale_maximum=True,
)


def shapes(geometry: Geometry) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of each of one expert's tensors, in load order."""
    rows, hidden, inner = geometry.w13_rows, geometry.padded_hidden, geometry.padded_intermediate
    table: dict[str, tuple[str, tuple[int, ...]]] = {
        "w13_weight": ("I32", (hidden // 16, 2 * rows)),
        "w13_weight_scale": ("F8_E4M3", (hidden // 16, rows)),
        "w2_weight": ("I32", (inner // 16, 2 * hidden)),
        "w2_weight_scale": ("F8_E4M3", (inner // 16, hidden)),
    }
    if geometry.biased:
        table |= {"w13_bias": ("F32", (rows,)), "w2_bias": ("F32", (hidden,))}
    return table


# --- block scales: E4M3 to S0E5M3 ----------------------------------------------------------------------------------


def scale_factor(largest_code: int, facts: LayerFacts) -> float:
    """The power of two that vLLM multiplies a rank's block scales of one GEMM by.

    2^floor(log2(448 / largest)), at least 1; 1 with fp16 activations and for SGLang. `largest_code` is the largest E4M3
    code of the rank's experts among those with the sign bit clear (0 to 126).
    Source: vLLM 0.33 `_nvfp4_compute_scale_factor`.
    """
    largest = E4M3_VALUES[largest_code]
    if facts.engine == "sglang" or facts.activation_dtype == "fp16" or largest == 0:
        return 1.0
    return 2.0 ** math.floor(math.log2(E4M3_VALUES[-1] / largest))


def with_factors(facts: LayerFacts, largest_w13: int, largest_w2: int) -> LayerFacts:
    """The facts with the factors that a rank's largest E4M3 codes ask for."""
    return replace(facts, w13_factor=scale_factor(largest_w13, facts), w2_factor=scale_factor(largest_w2, facts))


@lru_cache(maxsize=64)
def recode_table(factor: float, flush: bool) -> Tensor:
    """S0E5M3 byte of each E4M3 code: the upper 8 bits below the sign of half(value · factor · 2^7). U8 [256].

    With `flush`, products below 2 (and negative ones) become 0; without, the sign is dropped. NaN codes have no entry
    of their own: half's NaN. Source: vLLM 0.33 `nvfp4_marlin_process_scales`.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    half = (codes.to(torch.float32) * factor).to(torch.half) * 2**7
    if flush:
        half[half < 2] = 0
    return (half.view(torch.int16).to(torch.int32) >> 7 & 0xFF).to(torch.uint8)


@lru_cache(maxsize=64)
def restore_table(factor: float, flush: bool) -> Tensor:
    """The E4M3 code of each S0E5M3 byte, the smallest of those that share a byte; 0 for bytes of no code. U8 [256]."""
    table = torch.zeros(256, dtype=torch.uint8)
    forward = recode_table(factor, flush)
    for code in reversed(range(256)):
        table[int(forward[code])] = code
    return table


@lru_cache(maxsize=64)
def lost_codes(factor: float, flush: bool) -> tuple[int, ...]:
    """E4M3 codes that do not come back: flushed to zero, or negative."""
    back = restore_table(factor, flush)[recode_table(factor, flush).long()]
    return tuple(code for code in range(256) if int(back[code]) != code)


def lost_blocks(expert: Expert, facts: LayerFacts) -> int:
    """How many of an expert's block scales do not come back from `pack`: flushed, once `unusable_blocks` is empty."""
    flush = facts.engine == "vllm"
    matrices = ((expert.gate, facts.w13_factor), (expert.up, facts.w13_factor), (expert.down, facts.w2_factor))
    return sum(
        int(np.count_nonzero(matrix.scale.numpy() - np.uint8(first) <= last - first))
        for matrix, factor in matrices
        if matrix is not None
        for first, last in _lost_ranges(factor, flush)
    )


@lru_cache(maxsize=64)
def _lost_ranges(factor: float, flush: bool) -> tuple[tuple[int, int], ...]:
    """The first and last of each run of `lost_codes`."""
    codes = lost_codes(factor, flush)
    starts = [code for code in codes if code - 1 not in codes]
    ends = [code for code in codes if code + 1 not in codes]
    return tuple(zip(starts, ends, strict=True))


def unusable_blocks(codes: Tensor) -> dict[str, int]:
    """How many block scales S0E5M3 has no code for: those with the sign bit set (-0 too), and NaN."""
    if not codes.numel() or int(codes.max()) < E4M3_NAN:
        return {}
    nan = (codes & E4M3_NAN) == E4M3_NAN
    negative = (codes > E4M3_NAN) & ~nan
    return {kind: count for kind, count in (("negative", int(negative.sum())), ("NaN", int(nan.sum()))) if count}


def acting(expert: Expert, facts: LayerFacts) -> Expert:
    """The expert as the kernel reads it: block scales that `pack` flushes are 0, and those whose S0E5M3 byte lacks the
    top bit where activations are bf16."""
    flush = facts.engine == "vllm" or facts.activation_dtype == "bf16"

    def through(matrix: Matrix, factor: float) -> Matrix:
        back = restore_table(factor, flush)[recode_table(factor, flush).long()]
        return Matrix(matrix.weight, back[matrix.scale.long()])

    gate = None if expert.gate is None else through(expert.gate, facts.w13_factor)
    return replace(
        expert, gate=gate, up=through(expert.up, facts.w13_factor), down=through(expert.down, facts.w2_factor)
    )


SCALE_ORDER = marlin_repack.GROUPED_ORDER.view(-1, 4)[:, [0, 2, 1, 3]].reshape(-1)
"""Source column of each destination column of block scales within 64."""


def _pack_scale(scale: Tensor, factor: float, flush: bool) -> Tensor:
    codes = torch.from_numpy(recode_table(factor, flush).numpy().take(scale.numpy()))
    return marlin_repack.turn(codes, SCALE_ORDER)


def _unpack_scale(packed: Tensor, factor: float, flush: bool) -> Tensor:
    return marlin_repack.turn_back(restore_table(factor, flush)[packed.long()], SCALE_ORDER)


# --- one expert -------------------------------------------------------------------------------------------------------


def pack(expert: Expert, geometry: Geometry, facts: LayerFacts) -> dict[str, Tensor]:
    """One expert's tensors, named and shaped as in `shapes`; S0E5M3 as U8 bytes."""
    padded = pad_expert(expert, geometry)
    w13 = join(padded, "gate")
    flush = facts.engine == "vllm"
    packed = {
        "w13_weight": marlin_repack.repack(w13.weight),
        "w13_weight_scale": _pack_scale(w13.scale, facts.w13_factor, flush),
        "w2_weight": marlin_repack.repack(padded.down.weight),
        "w2_weight_scale": _pack_scale(padded.down.scale, facts.w2_factor, flush),
    }
    if padded.down_bias is not None:
        order = marlin_repack.SINGLE_ORDER
        packed["w13_bias"] = marlin_repack.permute_columns(join_bias(padded, "gate"), order)
        packed["w2_bias"] = marlin_repack.permute_columns(padded.down_bias, order)
    return packed


def unpack(packed: Mapping[str, Tensor], geometry: Geometry, facts: LayerFacts) -> Expert:
    """The inverse of pack; block scales that were flushed come back as 0 (`lost_codes`)."""
    flush = facts.engine == "vllm"
    w13 = Matrix(
        marlin_repack.unpack(packed["w13_weight"]),
        _unpack_scale(packed["w13_weight_scale"], facts.w13_factor, flush),
    )
    down = Matrix(
        marlin_repack.unpack(packed["w2_weight"]), _unpack_scale(packed["w2_weight_scale"], facts.w2_factor, flush)
    )
    gate, up = split(w13, geometry.gated, "gate")
    expert = Expert(gate, up, down)
    if "w2_bias" in packed:
        order = marlin_repack.SINGLE_ORDER
        w13_bias = marlin_repack.restore_columns(packed["w13_bias"], order)
        gate_bias, up_bias = split_bias(w13_bias, geometry.gated, "gate")
        down_bias = marlin_repack.restore_columns(packed["w2_bias"], order)
        expert = replace(expert, gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias)
    return crop_expert(expert, geometry)


def tensor_names(engine: Engine) -> dict[str, str]:
    """The engine's parameter of each tensor of `shapes`."""
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "w13_bias", "w2_bias")
    return {name: name for name in names}


def scalars(scales: Scales, activation: Activation, facts: LayerFacts) -> dict[str, Tensor]:
    """The kernel's scalars: the global scales as its dequantisation expects them, F32 [E], and the factors taken out.

    g1_alphas = s·2^119 / factor for bf16 activations, s·2^7 for fp16 (exponent bias of the activations' dtype less that
    of FP4, less 7). SGLang rounds s to the activations' dtype first; `parameters` stores it in that dtype.
    Source: vLLM 0.33 `nvfp4_marlin_process_global_scale`, SGLang 0.5.23 function of the same name.
    """
    table = {
        "g1_alphas": _global(one_w13_scale(scales), facts.w13_factor, facts),
        "g2_alphas": _global(scales.down, facts.w2_factor, facts),
        "w13_scale_factor": torch.full_like(scales.up, facts.w13_factor),
        "w2_scale_factor": torch.full_like(scales.up, facts.w2_factor),
    }
    for name, value in (("limit", activation.limit), ("alpha", activation.alpha), ("beta", activation.beta)):
        if value is not None:
            table[f"swiglu_{name}"] = torch.full_like(scales.up, value)
    return table


def _global(scale: Tensor, factor: float, facts: LayerFacts) -> Tensor:
    exponent = 119 if facts.activation_dtype == "bf16" else 7
    dtype = _DTYPES[facts.activation_dtype] if facts.engine == "sglang" else torch.float32
    processed = scale.to(dtype) * 2.0**exponent / factor
    over = ~torch.isfinite(processed)
    if bool(over.any()):
        name = str(dtype).removeprefix("torch.")
        raise LayoutError(
            f"a weight_scale_2 of {float(scale[over].max()):g} overflows {name} in Marlin's form; use another target",
            positions_where(over),
        )
    return processed.to(torch.float32)


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def parameters(scales: Scales, scalars: Mapping[str, Tensor], facts: LayerFacts) -> dict[str, Tensor]:
    """The engine's small parameters: the processed global scales; SGLang's are of the activations' dtype (exact)."""
    dtype = _DTYPES[facts.activation_dtype] if facts.engine == "sglang" else torch.float32
    return {
        "w13_weight_scale_2": scalars["g1_alphas"].to(dtype),
        "w2_weight_scale_2": scalars["g2_alphas"].to(dtype),
    }


def kernel_args(
    packed: Mapping[str, Tensor], scalars: Mapping[str, Tensor], activations: Mapping[str, Any]
) -> dict[str, Any]:
    """Weights and scales of both `moe_wna16_marlin_gemm` calls, stacked over a rank's experts; `activations` passes."""
    return {
        **activations,
        "w1": packed["w13_weight"],
        "w1_scale": packed["w13_weight_scale"].view(torch.float8_e4m3fn),
        "global_scale1": scalars["g1_alphas"],
        "bias1": packed.get("w13_bias"),
        "w2": packed["w2_weight"],
        "w2_scale": packed["w2_weight_scale"].view(torch.float8_e4m3fn),
        "global_scale2": scalars["g2_alphas"],
        "bias2": packed.get("w2_bias"),
    }
