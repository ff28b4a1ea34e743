"""Hidden states for the smoke check: seeded, the same bits on every machine, as large as the checkpoint was calibrated.

**Magnitude.** ModelOpt stores `input_scale = amax / (6 · 448)`, amax being the largest |x| that calibration saw, so
that its block gets the largest E4M3 block scale (448) and the largest e2m1 code (6). Hence for an input scale a1

    amax = 6 · 448 · a1 = 2688 · a1

Token 0 reaches it once; nothing exceeds it, so nothing saturates. The other values have an RMS of about amax / 16.
With scale 1.0 instead, block scales would round to E4M3's subnormals or 0 and hide errors, or saturate and fake them.

A weight-only checkpoint (W4A16) has no input scale and no activation that could saturate: the states are what an
RMSNorm gives, unit RMS, times the norm's weight where the caller has it; magnitudes then end at 16 times the RMS.

**Shape.** Real hidden states have heavy tails, a few large channels that are the same for every token, and quiet
stretches; uniform or normal values would exercise neither the block scales' range nor e2m1's small codes. Here

- a value is z + 0.3 z³, z a sum of four uniforms (kurtosis of the value about 7.7; a normal one has 3);
- every 128th channel is 4 times larger;
- one block of 16 in 16 is 1024 times smaller, and one in 64 all 0. Which ones differs from token to token: a channel
  that is quiet for all tokens would hide errors in the weights that read it.

**Same bits everywhere.** Torch's normal generator and its exp and log differ in the last bits between CPUs. Only
integers from the generator and F64 products and sums of fixed order are used. A longer run begins with the tokens of a
shorter one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvfp4prep.numerics import BLOCK, E2M1_MAX, E4M3_MAX

CALIBRATED_PEAK = E2M1_MAX * E4M3_MAX
"""amax / input_scale, 2688."""

PEAK_TO_RMS = 16.0

_BITS = 16
_CUBIC = 0.3
_OUTLIER_STRIDE = 128
_OUTLIER = 4.0
_QUIET = 2.0**-10
_STREAMS = 5


def hidden_states(
    tokens: int, hidden: int, seed: int, input_scale: float | None, norm_weight: Tensor | None = None
) -> Tensor:
    """Hidden states for one MoE layer.

    Args:
        tokens: T.
        hidden: H, a multiple of 16.
        seed: any non-negative integer.
        input_scale: of the layer's first GEMM, the largest over the experts; None for a weight-only checkpoint.
        norm_weight: floating [H], the weight of the norm before the layer; used without an input scale only.

    Returns:
        BF16 [T, H], finite. With an input scale the largest magnitude is 2688 times it, rounded to BF16 towards 0.

    Raises:
        ValueError: sizes that are negative or no multiple of 16, or an input scale that is not positive and finite, or
            too small or large for BF16.
    """
    if tokens < 0 or hidden <= 0 or hidden % BLOCK or seed < 0:
        raise ValueError(f"tokens {tokens}, hidden {hidden}, seed {seed}: positive, hidden a multiple of {BLOCK}")
    peak = PEAK_TO_RMS if input_scale is None else _round_down(CALIBRATED_PEAK * input_scale)
    streams = [torch.Generator().manual_seed(seed * _STREAMS + index) for index in range(_STREAMS)]
    z = (_uniform_sum(streams[:4], tokens, hidden) - 2.0) * math.sqrt(3.0)  # unit variance, at most 2·sqrt(3)
    x = (z + _CUBIC * z * z * z) * (peak / PEAK_TO_RMS / _RMS)
    outliers = torch.arange(seed % _OUTLIER_STRIDE % hidden, hidden, _OUTLIER_STRIDE)
    x[:, outliers] *= _OUTLIER
    draw = torch.randint(0, 64, (tokens, hidden // BLOCK), generator=streams[4])
    loud = torch.ones_like(draw, dtype=torch.float64).masked_fill_(draw < 4, _QUIET).masked_fill_(draw == 63, 0.0)
    x = (x.reshape(tokens, hidden // BLOCK, BLOCK) * loud[..., None]).reshape(tokens, hidden).clamp_(-peak, peak)
    if input_scale is None:
        if norm_weight is not None:
            x = x * norm_weight.to(torch.float64)
    elif tokens:
        x[0, outliers[0]] = peak
    return x.to(torch.bfloat16)


def _uniform_sum(streams: list[torch.Generator], tokens: int, hidden: int) -> Tensor:
    """Sum of one uniform in (0, 1) from each stream, multiples of 2^-17: exact. F64 [T, H]."""
    total = torch.zeros(tokens, hidden, dtype=torch.int64)
    for stream in streams:
        total += torch.randint(0, 1 << _BITS, (tokens, hidden), generator=stream)
    return (total.to(torch.float64) + len(streams) / 2) / (1 << _BITS)


def _round_down(value: float) -> float:
    """The largest BF16 <= value."""
    if not (float(torch.finfo(torch.bfloat16).tiny) <= value < float(torch.finfo(torch.bfloat16).max)):
        raise ValueError(f"an input scale of {value / CALIBRATED_PEAK} leaves no usable magnitude in BF16")
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * 256), exponent - 8)


def _rms() -> float:
    """RMS of z + c·z³, with large channels and quiet blocks, from the moments of a sum of four uniforms."""
    # Cumulants of a uniform of unit width: 1/12, -1/120, 1/252; of z with variance 1: times 4, over (1/3)^(n/2).
    k4, k6 = -4 / 120 * 9, 4 / 252 * 27
    fourth = 3 + k4
    sixth = 15 + 15 * k4 + k6
    power = 1 + 2 * _CUBIC * fourth + _CUBIC**2 * sixth
    channels = 1 + (_OUTLIER**2 - 1) / _OUTLIER_STRIDE
    blocks = 1 - (4 + 1) / 64
    return math.sqrt(power * channels * blocks)


_RMS = _rms()
