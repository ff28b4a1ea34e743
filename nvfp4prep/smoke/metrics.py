"""How far a MoE output is from what was expected, and how far it may be.

Tolerances are derived here, from two measured numbers, and never fitted to a result. Relative L2 is
|out - expected| / |expected|.

**The numbers**

- u = 0.0016: one rounding to BF16 (8 significant bits: error uniform in ±2^-8 of the binade, value log-uniform in it).
- q = 0.095: one quantisation to NVFP4, of weights as of activations. e2m1 with a block scale for 16 values, normal
  values: 0.0952; heavy-tailed ones: 0.092. Measured by Monte Carlo, in the tests too.
- Errors of the terms of a dot product are independent, so a dot product's relative error is its terms' relative error,
  and errors of different origin add as the root of the sum of squares.

**From GEMM1 to the output.** An error n of gate and up each becomes sqrt(2)·n behind silu(gate)·up (both factors
contribute; silu's own slope is 1 on average) and sqrt(4/3)·n behind relu(up)² (4·E[r²n²] / E[r⁴] of a half-normal r).
GEMM2 adds its own n. So with n² = q² for the weights if quantised + q² for the activations if quantised:

    against BF16     silu: sqrt(3)·n     relu2: sqrt(7/3)·n
    W4A4             0.233               0.205              Monte Carlo 0.229, 0.194
    W4A16            0.165               0.145              Monte Carlo 0.165, 0.145
    activations only 0.165               0.145              Monte Carlo 0.160, 0.130

**Unified scales.** Where gate and up had two global scales and were given one, the block scales of one half were
rounded to E4M3 once more: r = 0.0266 (3 bits of mantissa: error uniform in ±1/16 of the binade, value log-uniform in
it: 1/8 / sqrt(12) · sqrt(3 / (8·ln 2))). The output takes it once, as it takes an error of one half; r² joins the
squares above. Against a BF16 checkpoint it is lost in q.

**E4M3 activations** (W4A8). One quantisation to E4M3 of values spread over many binades is r too. So against the same
weights silu gives sqrt(3)·r = 0.046 (FlashInfer's SM90 kernel on an H200 measured 0.047, shared/golden); and against
the exact emulation a value flips with probability |d·v| / s as above, s = sqrt(12)·r·v: sqrt(0.8·d·sqrt(12)·r + 11·u²)
= 0.015.

**int4 weights.** Groups of 128 normal values with scale amax / 7: 0.118, measured likewise. Tails are worse.

**AWQ.** Weights W / p were quantised for inputs p·x, p a factor for each column. A group's scale follows its largest
|W / p|. So against BF16 the weights' q is at most rms(p)·max(1/p) times as large where x is made without p, and
max(1/p) / rms(1/p) times where it is made as it leaves the norm that p was folded into, over the columns of a group: 1
where p is the same for all. That much more is allowed, for each GEMM (`reference.unevenness`).

**16-bit global scales.** An engine that rounds them (SGLang's Marlin: up to 2^-9 or 2^-8 each) changes all of an
expert's output one way. That change is known, and added as it is: to tolerances against real weights only.

**Kernel against exact emulation, W4A16.** Only roundings to BF16 differ: at most eleven on the way, counting a second
one where a kernel multiplies by a scale in BF16 (gate 2, up 2, silu and product 2, GEMM2 2, routing weight 2, sum over
experts 1): sqrt(11)·u = 0.0053. Marlin on an H200 measured 0.0049 to 0.0055 (shared/golden).

**Kernel against exact emulation, W4A4.** x is quantised from the same BF16 bits by both. The intermediate is not:
roundings to BF16 of gate, up and product shift it by d = sqrt(3)·u before it is quantised. A value v whose e2m1 step
is s flips to the neighbour with probability |d·v| / s, changing by s: mean square |d·v|·s, with s = sqrt(12)·q·v. A
block scale flips with probability |d| / 0.087 (E4M3: 8 steps in a factor of 2), and its block is then as if quantised
anew: 2q². With E|d| = 0.8·d, and the eleven roundings,

    sqrt(0.8·d · (sqrt(12)·q + 2·q² / 0.087) + 11·u²) = 0.035       Monte Carlo 0.028 to 0.033

The emulator may round where the kernel rounds; then it is closer. No bound below this is claimed, since kernels differ.

**Headroom.** Tolerances are 1.5 times these. A single token may be twice as far (its error is a mean over fewer terms),
and in W4A4 against exact as far as 1.5 · sqrt(2)·q = 0.20, everything quantised anew: one token may have one dominant
block and that block's scale flips. In W4A8 likewise 1.5 · sqrt(2)·r = 0.056, for a dominant value. Over n tokens,
a whole output's or one expert's, the squares average:
sqrt(all² + token²/n).
The cosine follows: 1 - r²/2 is what an error of r leaves at least, to second order.

Layout errors are far outside: swapped halves 1.4, an expert missing 1, a scale wrong by a factor f |f - 1|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nvfp4prep.schema import Format
from nvfp4prep.smoke.layer import Routing
from nvfp4prep.targets import Activations

BF16_ROUNDING = 0.0016
NVFP4_NOISE = 0.095
RESCALE_NOISE = 0.0266
E4M3_NOISE = RESCALE_NOISE
INT4_NOISE = 0.118

_WEIGHT_NOISE: Mapping[Format | None, float] = {None: 0.0, Format.NVFP4: NVFP4_NOISE, Format.INT4: INT4_NOISE}
_ACTIVATION_NOISE: Mapping[Activations, float] = {"16-bit": 0.0, "NVFP4": NVFP4_NOISE, "E4M3": E4M3_NOISE}

_HEADROOM = 1.5
_TOKEN = 2.0
_ROUNDINGS = 11
_E4M3_STEP = math.log(2) / 8


@dataclass(frozen=True, slots=True)
class Worst:
    """A token's or an expert's index and its relative L2 (inf when not finite)."""

    index: int
    rel: float


@dataclass(frozen=True, slots=True)
class ExpertError:
    """Relative L2 over the tokens routed to an expert, each weighted with the expert's share of its routing weights."""

    expert: int
    rel: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """An output against the expected one. No field is ever NaN; what can't be computed is inf, a cosine then 0.

    `tokens` are those whose expected output is not all 0, `zeros` those of them whose output is all 0, `nonfinite` the
    elements that are NaN or inf on either side. `worst_token` and `worst_expert` are None when there are none.
    """

    tokens: int
    rel_l2: float
    cosine: float
    worst_token: Worst | None
    worst_expert: Worst | None
    zeros: int
    nonfinite: int
    experts: tuple[ExpertError, ...] = ()


def compare(out: Tensor, expected: Tensor, routing: Routing) -> Comparison:
    """Compares in F64.

    Args:
        out: floating [T, H].
        expected: floating [T, H].
        routing: ids and weights [T, k]; negative ids are experts of other ranks and left out.

    Returns:
        The comparison. A token that should be all 0 (no expert on this rank) and is not counts as infinitely wrong.

    Raises:
        ValueError: shapes that differ.
    """
    if out.dim() != 2 or out.shape != expected.shape or routing.ids.shape != routing.weights.shape:
        raise ValueError(f"out {list(out.shape)}, expected {list(expected.shape)}, ids {list(routing.ids.shape)}")
    if routing.ids.dim() != 2 or routing.ids.shape[0] != out.shape[0]:
        raise ValueError(f"{out.shape[0]} tokens, routing for {list(routing.ids.shape)}")
    actual, wanted = out.detach().cpu().double(), expected.detach().cpu().double()
    nonfinite = int((~actual.isfinite()).sum() + (~wanted.isfinite()).sum())
    error = _or_inf((actual - wanted).square().sum(1))
    power = _or_inf(wanted.square().sum(1))
    present = power > 0
    rel = _ratio(error, power)
    dot, own = (actual * wanted).sum().item(), actual.square().sum().item()
    norm = math.sqrt(own * power.sum().item()) if nonfinite == 0 else 0.0
    worst_token = None
    if rel.numel():
        index = int(rel.argmax())
        worst_token = Worst(index, rel[index].item())
    experts = _by_expert(error, power, routing)
    worst = max(experts, key=lambda entry: entry.rel, default=None)
    return Comparison(
        tokens=int(present.sum()),
        rel_l2=_ratio(error.sum(), power.sum()).item(),
        cosine=max(-1.0, min(1.0, dot / norm)) if norm > 0 else 0.0,
        worst_token=worst_token,
        worst_expert=None if worst is None else Worst(worst.expert, worst.rel),
        zeros=int((present & (actual == 0).all(1)).sum()),
        nonfinite=nonfinite,
        experts=experts,
    )


def _or_inf(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=math.inf, posinf=math.inf)


def _ratio(error: Tensor, power: Tensor) -> Tensor:
    """sqrt(error / power); 0 for 0/0, inf for anything over 0 and for anything not finite."""
    quotient = torch.where(error == 0, 0.0, error / power).sqrt()
    return torch.where(error.isinf() | power.isinf(), math.inf, quotient)


def _by_expert(error: Tensor, power: Tensor, routing: Routing) -> tuple[ExpertError, ...]:
    """Experts in order of their ids. error, power: F64 [T] squared norms."""
    ids, weights = routing.ids.detach().cpu(), routing.weights.detach().cpu().double().abs()
    share = weights / weights.sum(1, keepdim=True)
    chosen = (ids >= 0) & (share > 0)
    if not bool(chosen.any()):
        return ()
    experts, squares = ids[chosen].long(), share[chosen].square()
    token = torch.arange(ids.shape[0])[:, None].expand_as(ids)[chosen]
    count = int(experts.max()) + 1
    sums = [torch.zeros(count, dtype=torch.float64) for _ in range(2)]
    for total, values in zip(sums, (error, power), strict=True):
        total.index_add_(0, experts, squares * values[token])
    rel = _ratio(*sums).tolist()
    tokens = experts.bincount(minlength=count).tolist()
    return tuple(ExpertError(expert, rel[expert], hits) for expert, hits in enumerate(tokens) if hits)


# --- tolerances ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tolerances:
    """The largest relative L2 of many tokens together, and of one token."""

    rel_l2: float
    token: float

    def cosine(self, tokens: int) -> float:
        """The smallest cosine that `over(tokens)` leaves."""
        return 1 - self.over(tokens) ** 2 / 2

    def over(self, tokens: int) -> float:
        """The largest relative L2 over so many tokens: one may be as far as `token`, and the squares average."""
        return math.hypot(self.rel_l2, self.token / math.sqrt(tokens))


def exact_error(activations: Activations) -> float:
    """Expected relative L2 of a kernel against the exact emulation of its quantisation."""
    rounding = math.sqrt(_ROUNDINGS) * BF16_ROUNDING
    if activations == "16-bit":
        return rounding
    shift = 0.8 * math.sqrt(3) * BF16_ROUNDING
    if activations == "E4M3":
        return math.hypot(rounding, math.sqrt(shift * math.sqrt(12) * E4M3_NOISE))
    flips = shift * (math.sqrt(12) * NVFP4_NOISE + 2 * NVFP4_NOISE**2 / _E4M3_STEP)
    return math.hypot(rounding, math.sqrt(flips))


def quantisation_error(
    kind: Literal["silu", "swiglu-oai", "relu2"],
    *,
    weights: Format | None,
    activations: Activations,
    uneven: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Expected relative L2 that quantisation alone makes against unquantised weights and activations.

    `weights` is None when the reference has the same quantised weights. `uneven`: how much more AWQ's factors make of
    the weights' error in GEMM1 and GEMM2.
    """
    first, second = (math.hypot(_WEIGHT_NOISE[weights] * more, _ACTIVATION_NOISE[activations]) for more in uneven)
    return math.hypot(first * math.sqrt(4 / 3 if kind == "relu2" else 2), second)


def exact_tolerances(activations: Activations) -> Tolerances:
    """For a kernel against the exact emulation of the same quantisation."""
    whole = _HEADROOM * exact_error(activations)
    anew = _HEADROOM * math.sqrt(2) * _ACTIVATION_NOISE[activations]
    return Tolerances(whole, anew if activations != "16-bit" else _TOKEN * whole)


def reference_tolerances(
    kind: Literal["silu", "swiglu-oai", "relu2"],
    *,
    weights: Format | None,
    activations: Activations,
    rescaled: bool = False,
    scale_change: float = 0.0,
    uneven: tuple[float, float] = (1.0, 1.0),
) -> Tolerances:
    """For a kernel against the F32 reference; see `quantisation_error` for the arguments.

    `rescaled`: block scales were rounded (a global scale shared, factors folded in), and the reference's were not.
    `scale_change`: relative change of an expert's output by the engine's rounding of its global scales.
    """
    noise = quantisation_error(kind, weights=weights, activations=activations, uneven=uneven)
    whole = _HEADROOM * math.hypot(noise, exact_error(activations), RESCALE_NOISE * rescaled)
    return Tolerances(whole + scale_change, _TOKEN * whole + scale_change)


def verdict(comparison: Comparison, tolerances: Tolerances) -> list[str]:
    """Why a comparison fails; empty when it passes. A comparison of nothing fails."""
    reasons = []
    if comparison.tokens == 0:
        reasons.append("nothing was compared: no token has an expected output other than 0")
    if comparison.nonfinite:
        reasons.append(f"{comparison.nonfinite} elements are NaN or infinite")
    if comparison.zeros:
        reasons.append(f"{comparison.zeros} of {comparison.tokens} tokens have an output of zeros")
    limit = tolerances.over(max(comparison.tokens, 1))
    if not comparison.rel_l2 <= limit:
        reasons.append(f"relative L2 {comparison.rel_l2:.3g}, over {limit:.3g}")
    least = tolerances.cosine(max(comparison.tokens, 1))
    if comparison.tokens and not comparison.cosine >= least:
        reasons.append(f"cosine {comparison.cosine:.5f}, under {least:.5f}")
    token = comparison.worst_token
    if token is not None and not token.rel <= tolerances.token:
        reasons.append(f"token {token.index}: relative L2 {token.rel:.3g}, over {tolerances.token:.3g}")
    beyond = [entry for entry in comparison.experts if not entry.rel <= tolerances.over(entry.tokens)]
    if beyond:
        first = max(beyond, key=lambda entry: entry.rel / tolerances.over(entry.tokens))
        more = f" (and {len(beyond) - 1} more experts)" if len(beyond) > 1 else ""
        limit = tolerances.over(first.tokens)
        reasons.append(f"expert {first.expert}: relative L2 {first.rel:.3g}, over {limit:.3g}{more}")
    return reasons
