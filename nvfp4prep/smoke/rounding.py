"""Where each kernel rounds to 16 bits between its steps, the weighted sum over a token's experts, and ties.

Between the points of this table kernels compute in F32. The output is of 16 bits everywhere. What an NVFP4
requantisation makes of a rounding is in `docs/smoke.md`: codes near a tie go the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4prep.numerics import BLOCK, encode_e4m3, round_e2m1
from nvfp4prep.smoke.layer import Routing
from nvfp4prep.targets import Target


@dataclass(frozen=True, slots=True)
class Rounding:
    """What a kernel rounds to its output's 16-bit type.

    `gemm1`: GEMM1's output, alphas applied. `bias`: once more after adding a bias, in both GEMMs; `early_bias`: biases
    are added before GEMMs' outputs are rounded, not after. `silu`: silu(gate) before it is multiplied by up, without a
    clamp. `activation`: the activation's output. `gemm2`: an expert's output. `routing`: the routing weight.
    `weighted`: output times weight, before the sum. `folded`: GEMM2's alpha is not in an expert's output but multiplied
    into the routing weight, before that is rounded; with a bias it is not, and weighting is F32. `weight`: code times
    group scale of int4; `column`: except where one group spans all of K, whose scale multiplies the rounded output of
    the codes and is rounded once more.
    """

    gemm1: bool = False
    bias: bool = False
    early_bias: bool = False
    silu: bool = False
    activation: bool = False
    gemm2: bool = False
    routing: bool = False
    weighted: bool = False
    folded: bool = False
    weight: bool = False
    column: bool = False
    dtype: torch.dtype = torch.bfloat16

    def at(self, point: str, x: Tensor) -> Tensor:
        """`x`, rounded if the kernel rounds at this point; F32."""
        return x.to(self.dtype).to(torch.float32) if getattr(self, point) else x


NO_ROUNDING = Rounding()

FOLDED = 2.0**7
"""What a folded alpha is multiplied and the expert's output divided by, as in Marlin's registers: FP16 has few
exponents."""

ROUNDING: Mapping[str, Rounding] = {
    # Activation and requantisation in GEMM1's epilogue; rows of GEMM2 and routing weights are BF16 for the finalize
    # kernel, which sums in F32. The kernel is a binary: read from its runner and its callers, not from its source.
    "flashinfer-trtllm": Rounding(early_bias=True, gemm2=True, routing=True),
    # GEMM1 writes BF16, `doActivationKernel` adds the bias in F32, activates and quantises a BF16 result; GEMM2's
    # epilogue (`use_fused_finalize`) adds bias, multiplies by the F32 weight and adds BF16 to the output.
    "flashinfer-cutlass": Rounding(gemm1=True, activation=True, weighted=True),
    # Activation and requantisation in GEMM1's epilogue in F32; finalize fusion as above.
    "flashinfer-cutedsl": Rounding(weighted=True),
    # `run_cutlass_moe_fp4`: c1 and c3 are BF16, silu·up is rounded once before it is quantised, weights are cast.
    "vllm-cutlass": Rounding(gemm1=True, activation=True, gemm2=True, routing=True, weighted=True),
    # Both GEMMs write 16 bits and add a 16-bit bias after that; vLLM's silu_and_mul rounds silu(gate) first; GEMM2
    # with mul_topk_weights rounds accumulators, weight·global scale and their product. All bits as golden
    # marlin_moe_sm90 has them. With a bias GEMM2 must be called without mul_topk_weights: it would add the bias to
    # accumulators that lack the global scale.
    "vllm-marlin": Rounding(
        gemm1=True, bias=True, silu=True, activation=True, gemm2=True, routing=True, weighted=True, folded=True
    ),
    # The same kernel without a global scale; weights are code times scale in 16-bit registers, except for one group:
    # `write_result` multiplies what it has rounded. Golden int4_g128 and int4_g128_single.
    "vllm-marlin-int4": Rounding(
        gemm1=True, silu=True, activation=True, gemm2=True, routing=True, weighted=True, weight=True, column=True
    ),
    # `fused_moe_kernel_gptq_awq`: dequantised weights are cast before the dot product, the F32 accumulator is
    # multiplied by the F32 routing weight and cast.
    "moe-wna16": Rounding(gemm1=True, silu=True, activation=True, weighted=True, weight=True),
    # As flashinfer-cutlass; group scales are applied to F32 partial sums.
    "flashinfer-sm90-w4a8": Rounding(gemm1=True, activation=True, weighted=True),
    # `cutlass_w4a8_moe`: both GEMMs write BF16, silu·up is quantised from F32, the sum over experts is F32.
    "sglang-w4afp8": Rounding(gemm1=True, gemm2=True),
    # As flashinfer-trtllm, with a BF16 intermediate. A binary too.
    "flashinfer-mxint4": Rounding(activation=True, gemm2=True, routing=True),
}


def rounding_of(target: Target) -> Rounding:
    """The points of a target's kernel.

    SGLang's silu_and_mul rounds once. Its Marlin has a global scale of 16 bits and rounds before and after multiplying
    by it, which is not modelled: at most one more rounding of 16 bits for each GEMM.
    """
    rounding = ROUNDING[target.layout]
    dtype = torch.float16 if target.activation_dtype == "fp16" else torch.bfloat16
    return replace(rounding, dtype=dtype, silu=rounding.silu and target.engine == "vllm")


def away_from_ties(x: Tensor, scales: Tensor, margin: float = 2.0**-16) -> Tensor:
    """Inputs whose quantisation to NVFP4 does not depend on how a kernel divides.

    A calibrated scale is a BF16 maximum over 6·448, so BF16 inputs often lie on a tie of e2m1 or of E4M3, up to the
    rounding of the scale; kernels with approximate reciprocals may go either way there, which would cost up to some
    percent. Values on a tie, or maxima of blocks whose scale is on one, go a step of BF16 towards zero.

    Args:
      x: BF16 [T, H], finite; H a multiple of 16.
      scales: the input scales in use, F32.
      margin: relative distance from a tie that is kept where the steps of BF16 allow.

    Returns:
      BF16 [T, H].
    """
    x = x.clone()
    blocks = x.view(x.shape[0], -1, BLOCK)
    for _ in range(16):
        moved = torch.zeros_like(blocks, dtype=torch.bool)
        for a in set(scales.to(torch.float32).tolist()):
            values = blocks.to(torch.float32)
            amax = values.abs().amax(-1, keepdim=True)
            ideal = amax / (6 * a)
            scale, low, high = (encode_e4m3(ideal * f).to(torch.float32) for f in (1, 1 - margin, 1 + margin))
            moved |= (low != high) & (values.abs() == amax)
            ideal = (values / (scale * a)).masked_fill_(scale == 0, 0)
            moved |= round_e2m1(ideal * (1 - margin)) != round_e2m1(ideal * (1 + margin))
        if not bool(moved.any()):
            break
        blocks.view(torch.int16).sub_(moved.to(torch.int16))  # the bits of BF16 count up with the magnitude
    return x


def weighted_sum(
    routing: Routing,
    experts: range,
    tokens: int,
    hidden: int,
    expert: Callable[[int, Tensor], tuple[Tensor, Tensor | None]],
    rounding: Rounding | None,
) -> Tensor:
    """The sum over each token's experts, those outside `experts` left out; only experts with tokens are run.

    Args:
      expert: (global expert id, indices of its tokens I64 [n]) -> outputs F32 [n, hidden], and what is still to be
        multiplied into the weight, if anything (`Rounding.folded`).
      rounding: None for none, not even of the output.

    Returns:
      F32 [tokens, hidden].
    """
    device = routing.ids.device
    out = torch.zeros(tokens, hidden, dtype=torch.float32, device=device)
    for e in experts:
        token, slot = (routing.ids == e).nonzero(as_tuple=True)
        if token.numel():
            output, scale = expert(e, token)
            weight = routing.weights[token, slot].to(torch.float32)
            points = NO_ROUNDING if rounding is None or (rounding.folded and scale is None) else rounding
            weight = points.at("routing", weight if scale is None else weight * scale)
            out.index_add_(0, token, points.at("weighted", output * weight[:, None]))
    return out if rounding is None else out.to(rounding.dtype).to(torch.float32)
