"""e2m1 and E4M3 codecs, NVFP4 dequantisation of weights, and emulation of NVFP4 activations. Pure functions on tensors.

An NVFP4 tensor is three things: e2m1 codes, two to a byte; one E4M3 scale for each block of 16 codes along the
contraction dimension; one F32 scale for the whole tensor (`weight_scale_2` for weights, `input_scale` for activations):

    value = e2m1(code) · block scale · tensor scale
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvfp4prep.widening import widened

BLOCK = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Twice a magnitude is an integer; this maps it to the magnitude's code. Entries no magnitude reaches are 0.
_CODE_OF_TWICE = tuple(E2M1_VALUES.index(twice / 2) if twice / 2 in E2M1_VALUES else 0 for twice in range(13))


def raw_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, row-major; not copied where it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def floats(dtype: str, raw: bytes) -> Tensor:
    """F32, BF16 or F16 bytes as F32 values, flat, in memory of their own. Raises as `widened`."""
    return torch.from_numpy(widened(dtype, raw).copy())


def unfit(exact: Tensor, rounded: Tensor, *, rows: bool = False) -> Tensor:
    """Where values do not survive rounding: NaN, inf, a zero of what is none, and subnormals that lose too much.

    Too much is more than rounding costs a normal value of the dtype: 2^-8 of it in BF16, 2^-11 in F16.

    Args:
      exact: F32.
      rounded: `exact` in F32, BF16 or F16.
      rows: measure what a subnormal loses against the largest of its row (last dimension), not against itself.

    Returns:
      bool, the same shape.
    """
    limits, magnitude = torch.finfo(rounded.dtype), exact.abs()
    if exact.numel() and limits.smallest_normal <= float(magnitude.min()) and float(magnitude.max()) <= limits.max:
        return torch.zeros_like(exact, dtype=torch.bool)
    back = rounded.to(torch.float32)
    lost = ~torch.isfinite(back) | ((back == 0) & (exact != 0))
    small = (magnitude < limits.smallest_normal) & (exact != 0) & ~lost
    if bool(small.any()):  # in float64: F32 has no room for errors of its own smallest values
        value = exact[small].to(torch.float64)
        whole = magnitude.amax(-1, keepdim=True).expand_as(exact)[small].to(torch.float64) if rows else value.abs()
        lost[small] = (back[small].to(torch.float64) - value).abs() > whole * (limits.eps / 2)
    return lost


def became(rounded: float, value: float) -> str:
    """For a message: what is left of a value that became subnormal; nothing for zero, inf and NaN, which speak."""
    if not math.isfinite(rounded) or rounded == 0:
        return ""
    return f" (it is subnormal there: {rounded:g}, {abs(rounded / value - 1):.2g} of it off)"


def exchange_bits(words: Tensor, mask: int, distance: int) -> Tensor:
    """The bits of each word under `mask` exchanged with those `distance` higher: its own inverse.

    Args:
      words: a signed integer dtype, any shape.
      mask: the lower bits; all that a shift of the sign could reach, and the higher bits, are outside of it.
      distance: in bits.

    Returns:
      The dtype and shape of `words`.
    """
    moved = words >> distance
    moved ^= words
    moved &= mask
    exchanged = words ^ moved
    moved <<= distance
    exchanged ^= moved
    return exchanged


def pack_nibbles(codes: Tensor, dim: int = -1) -> Tensor:
    """Packs two 4-bit codes to a byte along `dim`, the even index in the low nibble.

    Args:
      codes: U8, values 0 to 15, an even number of them along `dim`.
      dim: the dimension to halve.

    Returns:
      U8, `dim` half as long: `codes[2i] | codes[2i + 1] << 4`.

    Raises:
      ValueError: not U8, or odd along `dim`.
    """
    _require_u8("codes", codes)
    if codes.shape[dim] % 2:
        raise ValueError(f"codes: an even length along dim {dim} is needed to pack, shape is {_dims(codes)}")
    dim %= codes.dim()
    low, high = torch.unflatten(codes, dim, (codes.shape[dim] // 2, 2)).unbind(dim + 1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor, dim: int = -1) -> Tensor:
    """Inverse of `pack_nibbles`.

    Args:
      packed: U8.
      dim: the dimension to double.

    Returns:
      U8, values 0 to 15, `dim` twice as long: low nibble at even indices, high nibble at odd ones.

    Raises:
      ValueError: not U8.
    """
    _require_u8("packed", packed)
    dim %= packed.dim()
    return torch.stack((packed & 0xF, packed >> 4), dim + 1).flatten(dim, dim + 1)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e2m1 codes: sign in bit 3, magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 in bits 0 to 2.

    Args:
      codes: U8, values 0 to 15, any shape.
      dtype: a floating dtype; all values are exact in any of 16 bits or more.

    Returns:
      `dtype`, the shape of `codes`; code 8 is -0.

    Raises:
      ValueError: not U8.
    """
    _require_u8("codes", codes)
    return torch.tensor(E2M1_VALUES, dtype=dtype, device=codes.device)[codes.int()]


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 codes, ties to the even code, magnitudes above 6 saturated; the sign is kept, of zeros too.

    Args:
      x: floating, any shape, no NaN.

    Returns:
      U8, values 0 to 15, the shape of `x`.

    Raises:
      ValueError: `x` holds NaN, for which e2m1 has no code.
    """
    if bool(x.isnan().any()):
        raise ValueError("x holds NaN: e2m1 has no code for it")
    codes = torch.tensor(_CODE_OF_TWICE, dtype=torch.uint8, device=x.device)[(round_e2m1(x).abs() * 2).int()]
    return codes | (x.signbit().to(torch.uint8) << 3)


def round_e2m1(x: Tensor) -> Tensor:
    """What `encode_e2m1` and `decode_e2m1` make of `x`, in one step and in its dtype. NaN stays NaN.

    The spacing of e2m1 is 0.5 below 2, 1 up to 4 and 2 up to 6, and the even codes are the even multiples of the
    spacing, so rounding the quotient half to even is rounding the code half to even.
    """
    a = x.abs().clamp_(max=E2M1_MAX)
    coarse = torch.where(a < 4, a.round(), (a * 0.5).round_().mul_(2))
    return torch.where(a < 2, (a * 2).round_().mul_(0.5), coarse).copysign_(x)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E4M3 (`float8_e4m3fn`) codes: bias 7, subnormals of 2^-9, at most 448, NaN at 0x7F and 0xFF.

    Args:
      codes: float8_e4m3fn, or U8 holding the same bits; any shape.
      dtype: a floating dtype; all values are exact in any of 16 bits or more.

    Raises:
      ValueError: another dtype.
    """
    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"E4M3 codes are float8_e4m3fn or uint8, not {codes.dtype}")
    return codes.to(dtype)


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 codes, ties to even, magnitudes above 448 saturated, as `cvt.rn.satfinite` does on GPUs.

    Torch's own cast saturates in some versions and gives NaN in others, hence the clamp.

    Args:
      x: F32, F16 or BF16, any shape. F64 is refused: torch would round it twice, through F32.

    Returns:
      float8_e4m3fn, the shape of `x`; NaN stays NaN.

    Raises:
      ValueError: another dtype.
    """
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"E4M3 encodes float32, float16 or bfloat16, not {x.dtype}")
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize_int4(weight: Tensor, scale: Tensor, dim: int) -> Tensor:
    """Dequantises an int4 weight: `code · scale`.

    Args:
      weight: U8, two's complement, the even index in the low nibble: [N, K/2] as kernels have it, [N/2, K] as ModelOpt.
      scale: floating [N, K/group].
      dim: the dimension that is packed, 1 or 0.

    Returns:
      F32 [N, K].
    """
    codes = (unpack_nibbles(weight, dim) ^ 8).to(torch.float32) - 8
    return codes * scale.to(torch.float32).repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def dequantize_nvfp4(
    weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor | float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantises a linear's NVFP4 weight: `e2m1 · weight_scale · weight_scale_2`.

    The first product fits in 6 bits, so F32 is the exact value rounded once and F64 (6 + 24 bits) is exact.

    Args:
      weight: U8 [N, K/2], the even column in the low nibble.
      weight_scale: float8_e4m3fn (or U8) [N, K/16].
      weight_scale_2: a float, or a floating tensor with one element.
      dtype: float32 or float64.

    Returns:
      `dtype` [N, K].

    Raises:
      ValueError: shapes or dtypes that differ from these.
    """
    if weight.dim() != 2:
        raise ValueError(f"weight: [N, K/2] expected, shape is {_dims(weight)}")
    if isinstance(weight_scale_2, Tensor) and weight_scale_2.numel() != 1:
        raise ValueError(f"weight_scale_2: one element expected, shape is {_dims(weight_scale_2)}")
    return _dequantize(weight, weight_scale, _floats("weight_scale_2", weight_scale_2, dtype).reshape(()), dim=1)


def dequantize_nvfp4_fused(
    weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor | float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Dequantises the fused experts of a layer in the BMM form (Llama-4, gpt-oss), packed along dim 1.

    Args:
      weight: U8 [E, K/2, N], the even row of K in the low nibble.
      weight_scale: float8_e4m3fn (or U8) [E, K/16, N].
      weight_scale_2: a float, or a floating tensor: one element, [E], or three dimensions that broadcast to [E, 1, N].
      dtype: float32 (exact value rounded once) or float64 (exact).

    Returns:
      `dtype` [E, K, N].

    Raises:
      ValueError: shapes or dtypes that differ from these.
    """
    if weight.dim() != 3:
        raise ValueError(f"weight: [E, K/2, N] expected, shape is {_dims(weight)}")
    experts, _, columns = weight.shape
    scale_2 = _floats("weight_scale_2", weight_scale_2, dtype)
    if scale_2.numel() == 1:
        scale_2 = scale_2.reshape(())
    elif scale_2.shape == (experts,):
        scale_2 = scale_2.reshape(experts, 1, 1)
    elif scale_2.dim() != 3 or any(n not in (1, m) for n, m in zip(scale_2.shape, (experts, 1, columns), strict=True)):
        raise ValueError(
            f"weight_scale_2: one element, [{experts}] or [{experts}, 1, {columns}] expected, shape is {_dims(scale_2)}"
        )
    return _dequantize(weight, weight_scale, scale_2, dim=1)


def quantize_dequantize_nvfp4(x: Tensor, quantize_scale: Tensor | float, dequantize_scale: Tensor | float) -> Tensor:
    """Emulates NVFP4 activations: what an engine's GEMM sees of `x`, when its two scales may differ.

    Per block of 16 along the last dimension, with q = quantize_scale and d = dequantize_scale:

        s = E4M3(min(amax(|x|) / (6·q), 448))      the block scale, half to even, saturated
        c = e2m1(x / (s·q))                        half to even, saturated at 6; 0 where s = 0
        y = c · (s·d)

    An engine that quantises and dequantises an expert with one input scale has q = d. One that quantises all experts'
    inputs with one scale and folds each expert's own into the GEMM's alpha has q != d.

    This is the formula of FlashInfer's quantiser (`quantization/quantization_cute_dsl_utils.py`,
    `quantization/kernels/nvfp4_quantize.py`, where the argument is 1/q) and of vLLM's emulation (`ref_nvfp4_quant` in
    `model_executor/layers/quantization/utils/nvfp4_emulation_utils.py`). Kernels use approximate reciprocals where
    this divides in F32, so a value within a rounding error of a tie may go the other way there.

    Args:
      x: floating [..., K], K a multiple of 16; computed in F32.
      quantize_scale: a float, or a tensor with one element; positive, finite and normal in F32.
      dequantize_scale: likewise.

    Returns:
      F32, the shape of `x`. A block that holds NaN is NaN throughout.

    Raises:
      ValueError: K is not a multiple of 16, `x` is not floating, or a scale is not one usable number.
    """
    if not x.is_floating_point():
        raise ValueError(f"x: a floating dtype expected, not {x.dtype}")
    if x.dim() == 0 or x.shape[-1] % BLOCK:
        raise ValueError(f"x: last dimension must be a multiple of {BLOCK}, shape is {_dims(x)}")
    quantize = _usable_scale("quantize_scale", quantize_scale)
    dequantize = _usable_scale("dequantize_scale", dequantize_scale)
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    if blocks.numel() == 0:
        return blocks.reshape(x.shape)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = decode_e4m3(encode_e4m3(amax / (E2M1_MAX * quantize)))
    # x / inf is 0, where x / 0 would not be.
    values = round_e2m1(blocks / (scale * quantize).masked_fill_(scale == 0, math.inf))
    return values.mul_(scale * dequantize).reshape(x.shape)


def _dequantize(weight: Tensor, weight_scale: Tensor, scale_2: Tensor, dim: int) -> Tensor:
    """`e2m1 · weight_scale · scale_2` of a weight packed along `dim`, in the dtype of `scale_2`."""
    _require_u8("weight", weight)
    blocks = list(weight.shape)
    blocks[dim] //= BLOCK // 2
    if weight.shape[dim] % (BLOCK // 2) or list(weight_scale.shape) != blocks:
        raise ValueError(
            f"weight_scale: one scale for {BLOCK // 2} bytes along dim {dim} expected, "
            f"weight is {_dims(weight)} and weight_scale is {_dims(weight_scale)}"
        )
    values = decode_e2m1(unpack_nibbles(weight, dim), scale_2.dtype)
    scales = decode_e4m3(weight_scale, scale_2.dtype).repeat_interleave(BLOCK, dim)
    return values.mul_(scales).mul_(scale_2)


def _floats(name: str, value: Tensor | float, dtype: torch.dtype) -> Tensor:
    """`value` widened to `dtype`, which is float32 or float64."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype: float32 or float64 expected, not {dtype}")
    if isinstance(value, Tensor) and not value.is_floating_point():
        raise ValueError(f"{name}: a floating dtype expected, not {value.dtype}")
    return torch.as_tensor(value, dtype=dtype)


def _usable_scale(name: str, value: Tensor | float) -> Tensor:
    scale = _floats(name, value, torch.float32)
    if scale.numel() != 1 or not (torch.finfo(torch.float32).tiny <= scale.item() < math.inf):
        raise ValueError(f"{name}: one positive, finite, normal number expected, got {value}")
    return scale.reshape(())


def _require_u8(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"{name}: uint8 expected, not {tensor.dtype}")


def _dims(tensor: Tensor) -> str:
    return str(list(tensor.shape))
