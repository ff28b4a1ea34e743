"""The codecs and the emulation against values written by hand and scalar references that share no code with them."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from nvfp4prep.numerics import (
    decode_e2m1,
    decode_e4m3,
    dequantize_nvfp4,
    dequantize_nvfp4_fused,
    encode_e2m1,
    encode_e4m3,
    pack_nibbles,
    quantize_dequantize_nvfp4,
    round_e2m1,
    unfit,
    unpack_nibbles,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


# --- Scalar references ---


def e4m3_value(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 0xF, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


def nearest_code(value: float, magnitudes: list[float]) -> int:
    """The code of the nearest magnitude, ties to the even code; beyond the last one, the last one."""
    distance = [abs(Fraction(abs(value)) - Fraction(m)) for m in magnitudes]
    return min(range(len(magnitudes)), key=lambda code: (distance[code], code % 2))


def e2m1_code(value: float) -> int:
    return nearest_code(value, E2M1[:8]) | (8 if math.copysign(1, value) < 0 else 0)


def e4m3_code(value: float) -> int:
    magnitude = nearest_code(value, [e4m3_value(code) for code in range(0x7F)])
    return magnitude | (0x80 if math.copysign(1, value) < 0 else 0)


def emulated_block(block: list[float], q: float, d: float) -> list[float]:
    """One block of 16, one F32 operation at a time."""
    f32 = np.float32
    with np.errstate(all="ignore"):
        amax = max(abs(f32(value)) for value in block)
        scale = f32(e4m3_value(e4m3_code(float(min(amax / (f32(6) * f32(q)), f32(448))))))
        if scale == 0:
            return [0.0] * len(block)
        step = scale * f32(q)
        ratios = [max(min(float(f32(value) / step), 100.0), -100.0) for value in block]
        return [float(f32(E2M1[e2m1_code(ratio)]) * (scale * f32(d))) for ratio in ratios]


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_scales(*shape: int, seed: int = 1) -> torch.Tensor:
    """All E4M3 codes but the two NaNs, negative ones too."""
    codes = random_bytes(*shape, seed=seed)
    return torch.where(codes & 0x7F == 0x7F, codes ^ 1, codes).view(torch.float8_e4m3fn)


def reference_dequantized(weight: torch.Tensor, scale: torch.Tensor, scale_2: float) -> list[list[float]]:
    """[N, K/2] and [N, K/16] to exact values (Python floats are F64), one element at a time."""
    rows = zip(weight.tolist(), scale.view(torch.uint8).tolist(), strict=True)
    return [
        [
            E2M1[(packed[column // 2] >> (4 if column % 2 else 0)) & 15] * e4m3_value(scales[column // 16]) * scale_2
            for column in range(2 * len(packed))
        ]
        for packed, scales in rows
    ]


def bits(tensor: torch.Tensor) -> list[int]:
    """The bits of F32 values, so that -0 and 0 differ and NaN equals itself."""
    return tensor.float().contiguous().view(torch.int32).flatten().tolist()


# --- Nibbles ---


def test_even_column_is_in_the_low_nibble() -> None:
    assert unpack_nibbles(torch.tensor([[0x21, 0xF0]], dtype=torch.uint8)).tolist() == [[1, 2, 0, 15]]
    assert pack_nibbles(torch.tensor([[1, 2, 0, 15]], dtype=torch.uint8)).tolist() == [[0x21, 0xF0]]


def test_packing_along_the_middle_dimension() -> None:
    packed = torch.tensor([[[0x21, 0x43], [0x65, 0x87]]], dtype=torch.uint8)
    codes = [[[1, 3], [2, 4], [5, 7], [6, 8]]]
    assert unpack_nibbles(packed, 1).tolist() == codes
    assert pack_nibbles(torch.tensor(codes, dtype=torch.uint8), 1).tolist() == packed.tolist()


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_pack_and_unpack_are_inverse_along_any_dimension(shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    packed = random_bytes(*shape, seed=data.draw(st.integers(0, 99)))
    unpacked = unpack_nibbles(packed, dim)
    assert unpacked.shape[dim] == 2 * packed.shape[dim]
    assert torch.equal(pack_nibbles(unpacked, dim), packed)


def test_nibbles_refuse_wrong_input() -> None:
    with pytest.raises(ValueError, match="even length"):
        pack_nibbles(torch.zeros(2, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="uint8"):
        unpack_nibbles(torch.zeros(2, 4, dtype=torch.int8))


# --- e2m1 ---


def test_all_sixteen_e2m1_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert bits(decode_e2m1(codes)) == bits(torch.tensor(E2M1))
    assert encode_e2m1(decode_e2m1(codes)).tolist() == list(range(16))


@pytest.mark.parametrize(
    ("tie", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e2m1_ties_go_to_the_even_code_and_neighbours_do_not(tie: float, rounded: float, sign: float) -> None:
    below = max(magnitude for magnitude in E2M1[:8] if magnitude < tie)
    above = min(magnitude for magnitude in E2M1[:8] if magnitude > tie)
    exact = torch.tensor(sign * tie)
    less, more = torch.tensor(np.nextafter(np.float32(tie), [0, 9], dtype=np.float32)) * sign
    for encode in (lambda x: decode_e2m1(encode_e2m1(x)), round_e2m1):
        assert [encode(x).item() for x in (less, exact, more)] == [sign * below, sign * rounded, sign * above]


def test_e2m1_saturates_at_6_and_keeps_the_sign_of_zero() -> None:
    x = torch.tensor([5.1, 6.0, 7.0, 1e30, math.inf, -7.0, -math.inf, -0.0, -0.1])
    assert encode_e2m1(x).tolist() == [7, 7, 7, 7, 7, 15, 15, 8, 8]


def test_e2m1_has_no_code_for_nan() -> None:
    with pytest.raises(ValueError, match="NaN"):
        encode_e2m1(torch.tensor([1.0, math.nan]))
    assert math.isnan(round_e2m1(torch.tensor(math.nan)).item())


@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=64))
def test_e2m1_encodes_to_the_nearest(values: list[float]) -> None:
    x = torch.tensor(values)
    original = x.clone()
    expected = [e2m1_code(value) for value in values]
    assert encode_e2m1(x).tolist() == expected
    assert bits(round_e2m1(x)) == bits(torch.tensor([E2M1[code] for code in expected]))
    assert bits(x) == bits(original)


# --- E4M3 ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_all_256_e4m3_codes(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = decode_e4m3(codes, dtype)
    assert values.dtype == dtype
    for code, value in enumerate(values.tolist()):
        expected = e4m3_value(code)
        assert value == expected or (math.isnan(value) and math.isnan(expected)), code
    assert bits(decode_e4m3(codes.view(torch.float8_e4m3fn))) == bits(decode_e4m3(codes))


def test_every_finite_e4m3_code_survives_a_round_trip() -> None:
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    values = torch.tensor([e4m3_value(code) for code in codes])
    assert encode_e4m3(values).view(torch.uint8).tolist() == codes


def test_every_e4m3_tie_and_its_neighbours() -> None:
    for code in range(0x7E):
        tie = np.float32((e4m3_value(code) + e4m3_value(code + 1)) / 2)
        below, above = np.nextafter(tie, [np.float32(0), np.float32(1e9)], dtype=np.float32)
        x = torch.tensor([below, tie, above, -tie])
        even = code + code % 2
        assert encode_e4m3(x).view(torch.uint8).tolist() == [code, even, code + 1, even | 0x80], code


def test_e4m3_saturates_and_keeps_nan() -> None:
    x = torch.tensor([448.0, 464.0, 465.0, 1e30, math.inf, -math.inf])
    assert encode_e4m3(x).view(torch.uint8).tolist() == [0x7E] * 5 + [0xFE]
    assert encode_e4m3(torch.tensor([math.nan])).view(torch.uint8).item() & 0x7F == 0x7F


@given(st.lists(st.floats(-600, 600, width=32), min_size=1, max_size=16))
@settings(max_examples=50)
def test_e4m3_encodes_to_the_nearest(values: list[float]) -> None:
    assert encode_e4m3(torch.tensor(values)).view(torch.uint8).tolist() == [e4m3_code(value) for value in values]


def test_e4m3_refuses_other_dtypes() -> None:
    with pytest.raises(ValueError, match="float64"):
        encode_e4m3(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="int8"):
        decode_e4m3(torch.zeros(1, dtype=torch.int8))


# --- Dequantisation ---


@given(st.floats(2.0**-40, 2.0**40, width=32), st.integers(0, 2**16))
@settings(max_examples=30, deadline=None)
def test_dequantize_equals_the_scalar_reference(scale_2: float, seed: int) -> None:
    weight, scale = random_bytes(3, 16, seed=seed), random_scales(3, 2, seed=seed + 1)
    expected = reference_dequantized(weight, scale, scale_2)
    exact = dequantize_nvfp4(weight, scale, torch.tensor(scale_2), torch.float64)
    assert exact.dtype == torch.float64
    assert exact.tolist() == expected
    rounded = dequantize_nvfp4(weight, scale, torch.tensor([scale_2]))
    assert bits(rounded) == bits(torch.tensor(expected, dtype=torch.float64))


def test_dequantize_f64_is_exact_in_rational_arithmetic() -> None:
    scale_2 = float(np.float32(1) / np.float32(3))
    weight, scale = random_bytes(4, 32), random_scales(4, 4)
    codes = unpack_nibbles(weight).tolist()
    scales = scale.view(torch.uint8).tolist()
    values = dequantize_nvfp4(weight, scale, scale_2, torch.float64).tolist()
    for n in range(4):
        for k in range(64):
            product = Fraction(E2M1[codes[n][k]]) * Fraction(e4m3_value(scales[n][k // 16])) * Fraction(scale_2)
            assert Fraction(values[n][k]) == product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scale_2_is_widened_by_value(dtype: torch.dtype) -> None:
    weight, scale, scale_2 = random_bytes(2, 8), random_scales(2, 1), torch.tensor(0.0123, dtype=dtype)
    assert torch.equal(dequantize_nvfp4(weight, scale, scale_2), dequantize_nvfp4(weight, scale, scale_2.item()))


@pytest.mark.parametrize("form", ["float", "[]", "[1]", "[E]", "[E,1,1]", "[1,1,N]", "[E,1,N]"])
def test_fused_is_each_column_dequantised_as_a_row(form: str) -> None:
    experts, k, columns = 3, 32, 5
    weight, scale = random_bytes(experts, k // 2, columns), random_scales(experts, k // 16, columns)
    full = torch.linspace(0.001, 0.9, experts * columns).reshape(experts, 1, columns)
    scale_2 = {
        "float": 0.37,
        "[]": torch.tensor(0.37),
        "[1]": torch.tensor([0.37]),
        "[E]": full[:, 0, 0],
        "[E,1,1]": full[:, :, :1],
        "[1,1,N]": full[:1],
        "[E,1,N]": full,
    }[form]
    for dtype in (torch.float32, torch.float64):
        fused = dequantize_nvfp4_fused(weight, scale, scale_2, dtype)
        assert fused.shape == (experts, k, columns)
        for e in range(experts):
            for n in range(columns):
                column_scale = {
                    "[E]": full[e, 0, 0],
                    "[E,1,1]": full[e, 0, 0],
                    "[1,1,N]": full[0, 0, n],
                    "[E,1,N]": full[e, 0, n],
                }.get(form, torch.tensor(0.37) if form != "float" else 0.37)
                row = dequantize_nvfp4(weight[e, :, n][None], scale[e, :, n][None], column_scale, dtype)
                assert torch.equal(fused[e, :, n], row[0])


@pytest.mark.parametrize(
    ("weight", "scale", "scale_2", "match"),
    [
        ((2, 3, 8), (2, 3, 1), (), "weight: "),
        ((4, 8), (4, 2), (), "weight_scale: "),
        ((4, 8), (1, 4), (), "weight_scale: "),
        ((4, 12), (4, 1), (), "weight_scale: "),
        ((4, 8), (4, 1), (2,), "weight_scale_2: "),
    ],
)
def test_dequantize_refuses_wrong_shapes(
    weight: tuple[int, ...], scale: tuple[int, ...], scale_2: tuple[int, ...], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        dequantize_nvfp4(random_bytes(*weight), random_scales(*scale), torch.ones(scale_2))


@pytest.mark.parametrize("scale_2", [(2,), (5,), (3, 5), (3, 2, 5), (3, 1, 4), (2, 1, 1)])
def test_fused_refuses_wrong_scale_2(scale_2: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="weight_scale_2"):
        dequantize_nvfp4_fused(random_bytes(3, 16, 5), random_scales(3, 2, 5), torch.ones(scale_2))


def test_dequantize_refuses_wrong_dtypes() -> None:
    weight, scale = random_bytes(4, 8), random_scales(4, 1)
    with pytest.raises(ValueError, match="dtype"):
        dequantize_nvfp4(weight, scale, 1.0, torch.bfloat16)
    with pytest.raises(ValueError, match="E4M3"):
        dequantize_nvfp4(weight, scale.float(), 1.0)
    with pytest.raises(ValueError, match="weight: uint8"):
        dequantize_nvfp4(weight.view(torch.int8), scale, 1.0)
    with pytest.raises(ValueError, match="weight_scale_2"):
        dequantize_nvfp4(weight, scale, torch.tensor(1))


# --- Real tensors ---


def checkpoint(name: str) -> Path:
    """A checkpoint of the full set, or the test is skipped."""
    root = os.environ.get("NVFP4PREP_CHECKPOINTS")
    if not root:
        pytest.skip("NVFP4PREP_CHECKPOINTS is not set")
    if not (Path(root) / name).is_dir():
        pytest.skip(f"{name} is not in NVFP4PREP_CHECKPOINTS")
    return Path(root) / name


def stored(directory: Path, name: str) -> torch.Tensor:
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            if name in handle.keys():  # noqa: SIM118 - not a dict
                return handle.get_tensor(name)
    raise KeyError(name)


def relative_error(dequantized: torch.Tensor, original: torch.Tensor) -> float:
    assert dequantized.shape == original.shape
    return ((dequantized - original.double()).norm() / original.double().norm()).item()


@pytest.mark.parametrize("expert", [0, 7, 15])
@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_relative_error_of_a_real_linear(expert: int, projection: str) -> None:
    quantized, original = checkpoint("tinymoe-nvfp4-perexpert"), checkpoint("tinymoe-bf16")
    module = f"model.layers.1.mlp.experts.{expert}.{projection}_proj"
    parts = [stored(quantized, f"{module}.{part}") for part in ("weight", "weight_scale", "weight_scale_2")]
    error = relative_error(dequantize_nvfp4(*parts, torch.float64), stored(original, f"{module}.weight"))
    assert 0.094 <= error <= 0.096


@pytest.mark.parametrize(
    ("name", "layer"),
    [("llama4-nvfp4", "model.layers.0.feed_forward"), ("gptoss-nvfp4", "model.layers.0.mlp")],
)
@pytest.mark.parametrize("projection", ["gate_up_proj", "down_proj"])
def test_relative_error_of_real_fused_experts(name: str, layer: str, projection: str) -> None:
    quantized, original = checkpoint(name), checkpoint(f"{name}-bf16")
    module = f"{layer}.experts.{projection}"
    parts = [stored(quantized, module + suffix) for suffix in ("", "_weight_scale", "_weight_scale_2")]
    error = relative_error(dequantize_nvfp4_fused(*parts, torch.float64), stored(original, module))
    assert 0.094 <= error <= 0.096


# --- Activations ---

blocks = st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16)
input_scales = st.floats(2.0**-20, 2.0**10, width=32)


@given(st.lists(blocks, min_size=1, max_size=4), input_scales, input_scales)
@settings(deadline=None)
def test_emulation_equals_the_scalar_reference(rows: list[list[float]], q: float, d: float) -> None:
    x = torch.tensor(rows).reshape(1, -1)
    emulated = quantize_dequantize_nvfp4(x, q, torch.tensor([d]))
    expected = [value for row in rows for value in emulated_block(row, q, d)]
    assert emulated.flatten().tolist() == expected


def test_emulation_by_hand() -> None:
    x = torch.tensor([[6.0, 5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -6.0, -5.0, -3.5, -2.5, -1.75, -1.25, -0.75, -0.25]])
    y = torch.tensor([[6.0, 4.0, 4.0, 2.0, 2.0, 1.0, 1.0, 0.0, -6.0, -4.0, -4.0, -2.0, -2.0, -1.0, -1.0, 0.0]])
    assert torch.equal(quantize_dequantize_nvfp4(x, 1.0, 1.0), y)
    assert torch.equal(quantize_dequantize_nvfp4(x * 4, 0.5, 0.5), y * 4)  # a block scale of 8
    assert torch.equal(quantize_dequantize_nvfp4(x, 1.0, 0.25), y / 4)


def test_each_block_has_its_own_scale() -> None:
    x = torch.cat((torch.full((1, 16), 1.0), torch.full((1, 16), 256.0)), 1)
    assert torch.allclose(quantize_dequantize_nvfp4(x, 0.25, 0.25), x, rtol=0.04)


def test_block_scales_saturate_at_448_and_vanish_below_the_subnormals() -> None:
    # 6·448·q is the largest value a scale q can hold.
    assert quantize_dequantize_nvfp4(torch.full((16,), 5000.0), 1.0, 1.0).unique().tolist() == [2688.0]
    # amax/6 of half the smallest subnormal rounds to a scale of zero.
    assert quantize_dequantize_nvfp4(torch.full((16,), 6 * 2.0**-10), 1.0, 1.0).unique().tolist() == [0.0]
    assert quantize_dequantize_nvfp4(torch.full((16,), 6.1 * 2.0**-10), 1.0, 1.0).unique().item() > 0
    assert quantize_dequantize_nvfp4(torch.zeros(16), 1.0, 1.0).unique().tolist() == [0.0]


def test_non_finite_inputs() -> None:
    x = torch.ones(2, 16)
    x[0, 3] = math.nan
    y = quantize_dequantize_nvfp4(x, 1.0, 1.0)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()
    x[0, 3] = -math.inf
    y = quantize_dequantize_nvfp4(x, 1.0, 1.0)
    assert y[0].tolist() == [0.0] * 3 + [-2688.0] + [0.0] * 12


@given(blocks, input_scales, st.integers(-8, 8))
@settings(deadline=None)
def test_emulation_is_odd_and_scales_with_powers_of_two(block: list[float], q: float, exponent: int) -> None:
    x, factor = torch.tensor(block), 2.0**exponent
    y = quantize_dequantize_nvfp4(x, q, q)
    assert torch.equal(quantize_dequantize_nvfp4(-x, q, q), -y)
    assert torch.equal(quantize_dequantize_nvfp4(x, q, q * factor), y * factor)
    assert torch.equal(quantize_dequantize_nvfp4(x * factor, q * factor, q * factor), y * factor)


@given(blocks, st.floats(1.0, 64.0, width=32))
@settings(deadline=None)
def test_error_is_at_most_a_sixth_of_the_largest_value(block: list[float], headroom: float) -> None:
    # The spacing at the top is 2 of 6, so rounding errs by at most 1/6 of amax, and the block scale by 1/16 more.
    amax = max(map(abs, block))
    q = amax * headroom / 2688
    if q < 2.0**-100:
        return
    x = torch.tensor(block)
    assert (quantize_dequantize_nvfp4(x, q, q) - x).abs().max().item() <= amax / 6 * (1 + 1 / 15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_emulation_takes_any_float_and_leaves_it_alone(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    original = x.clone()
    y = quantize_dequantize_nvfp4(x, 0.01, 0.01)
    assert y.dtype == torch.float32
    assert y.shape == x.shape
    assert torch.equal(x, original)
    assert torch.equal(y, quantize_dequantize_nvfp4(x.float(), 0.01, 0.01))


def test_emulation_of_no_tokens() -> None:
    assert quantize_dequantize_nvfp4(torch.zeros(0, 32), 1.0, 1.0).shape == (0, 32)


@pytest.mark.parametrize("shape", [(), (8,), (2, 24)])
def test_emulation_refuses_wrong_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        quantize_dequantize_nvfp4(torch.zeros(shape), 1.0, 1.0)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40, torch.ones(2)])
def test_emulation_refuses_unusable_scales(scale: float | torch.Tensor) -> None:
    with pytest.raises(ValueError, match="dequantize_scale"):
        quantize_dequantize_nvfp4(torch.zeros(16), 1.0, scale)
    with pytest.raises(ValueError, match="quantize_scale"):
        quantize_dequantize_nvfp4(torch.zeros(16), scale, 1.0)
    with pytest.raises(ValueError, match="floating"):
        quantize_dequantize_nvfp4(torch.zeros(16, dtype=torch.int32), 1.0, 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_unfit_is_what_loses_more_than_a_normal_number(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp2(torch.randint(-8, 4, (200, 64), generator=generator).float())
    exact = torch.randn(200, 64, generator=generator) * scale * limits.smallest_normal
    rounded = exact.to(dtype)
    off = (rounded.double() - exact.double()).abs()
    assert torch.equal(unfit(exact, rounded), (rounded == 0) | (off > exact.double().abs() * limits.eps / 2))
    largest = exact.double().abs().amax(1, keepdim=True)
    assert torch.equal(unfit(exact, rounded, rows=True), (rounded == 0) | (off > largest * limits.eps / 2))
    assert not bool(unfit(exact, exact).any())


def test_unfit_is_what_is_no_number_any_more() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, 1e39, 3.4e38, float("nan"), 1e-45])
    assert unfit(exact, exact.to(torch.bfloat16)).tolist() == [False, False, False, True, True, True, True]
