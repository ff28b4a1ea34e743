"""E4M3 rescaling over all 256 codes against exact rational arithmetic; how scales resolve; how their bytes are read."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from nvfp4prep.blockscales import half_of, rescale_codes
from nvfp4prep.dialects import layer_number
from nvfp4prep.header import TensorInfo, tensor_bytes
from nvfp4prep.scales import (
    Rescale,
    RescaleCounts,
    ScalePolicy,
    count_rescale,
    fault,
    output_shape,
    rescale_table,
    resolve,
)
from nvfp4prep.schema import build_schema
from nvfp4prep.survey import decode_floats, encode_floats
from nvfp4prep.widening import widened

# --- an independent E4M3 -------------------------------------------------------------------------------------------


def magnitude(code: int) -> Fraction | None:
    """The exact value of a code without its sign; None for NaN."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    return Fraction(mantissa, 512) if exponent == 0 else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


MAGNITUDES = [magnitude(code) for code in range(127)]


def nearest_even(value: Fraction) -> int:
    """The code whose value is nearest, by trying all; of two equally near the even one."""
    assert None not in MAGNITUDES
    return min(range(127), key=lambda code: (abs(MAGNITUDES[code] - value), code % 2))  # type: ignore[operator]


def rescaled(code: int, old: float, new: float) -> int:
    value = magnitude(code & 0x7F)
    return code if value is None else (code & 0x80) | nearest_even(value * Fraction(old) / Fraction(new))


def f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


scale_values = st.floats(min_value=2.0**-126, max_value=2.0**100, width=32)
ratios = st.one_of(
    st.floats(min_value=2.0**-12, max_value=1.0, width=32),
    st.integers(1, 24).map(lambda n: 2.0**-n),
    st.tuples(st.integers(1, 16), st.integers(1, 16)).map(lambda pair: min(pair) / max(pair)),  # many ties
)


@st.composite
def scale_pairs(draw: st.DrawFn) -> tuple[float, float]:
    """(old, new) with old <= new, often an exact ratio."""
    new = draw(scale_values)
    old = f32(new * draw(ratios))
    assume(2.0**-126 <= old <= new)
    return old, new


@given(scale_pairs())
@settings(max_examples=60, deadline=None)
@example((1.0, 1.0))
@example((0.75, 1.0))  # ties
@example((2.0**-126, 2.0**100))  # all to zero
@example((1.0, 1.0 + 2.0**-23))  # just below every tie
@example((1.0 - 2.0**-24, 1.0))
def test_table_is_the_nearest_even_code_for_all_256(pair: tuple[float, float]) -> None:
    assert list(rescale_table(*pair)) == [rescaled(code, *pair) for code in range(256)]


def test_table_by_hand() -> None:
    table = rescale_table(0.5, 1.0)
    expected = {
        0x7E: 0x76,
        0x08: 0x04,
        0x01: 0x00,
        0x03: 0x02,
        0x05: 0x02,
        0x07: 0x04,
        0x09: 0x04,
        0x0B: 0x06,
        0x38: 0x30,
    }
    assert {code: table[code] for code in expected} == expected
    assert {code: table[code | 0x80] for code in expected} == {code: new | 0x80 for code, new in expected.items()}
    assert (table[0x7F], table[0xFF], table[0x80]) == (0x7F, 0xFF, 0x80)
    assert rescale_table(3.0, 3.0) == bytes(range(256))


@pytest.mark.parametrize(
    ("old", "new"), [(2.0, 1.0), (0.0, 1.0), (-1.0, 1.0), (1.0, math.inf), (math.nan, 1.0), (1.0, math.nan), (0.0, 0.0)]
)
def test_table_refuses(old: float, new: float) -> None:
    with pytest.raises(ValueError, match="0 < old <= new"):
        rescale_table(old, new)


def brute_counts(codes: list[int], old: float, new: float) -> RescaleCounts:
    inexact = subnormal = zero = 0
    worst = 0.0
    for code in codes:
        value = magnitude(code & 0x7F)
        if value is None:
            continue
        after = magnitude(rescaled(code, old, new) & 0x7F)
        assert after is not None
        exact, rounded = value * Fraction(old), after * Fraction(new)
        if exact != rounded:
            inexact += 1
            worst = max(worst, float(abs(rounded - exact) / exact))
        subnormal += value >= Fraction(1, 64) and 0 < after < Fraction(1, 64)
        zero += value > 0 and after == 0
    return RescaleCounts(len(codes), inexact, subnormal, zero, worst)


def check_counts(found: RescaleCounts, expected: RescaleCounts) -> None:
    for field in ("blocks", "inexact", "became_subnormal", "became_zero"):
        assert getattr(found, field) == getattr(expected, field), field
    assert found.max_relative_error == pytest.approx(expected.max_relative_error, rel=1e-12, abs=0)


code_lists = st.lists(st.integers(0, 255), max_size=40)


@given(code_lists, scale_pairs())
@settings(max_examples=60, deadline=None)
def test_counts_against_brute_force(codes: list[int], pair: tuple[float, float]) -> None:
    histogram = [codes.count(code) for code in range(256)]
    check_counts(count_rescale(histogram, *pair), brute_counts(codes, *pair))


def test_counts_add_up() -> None:
    total = RescaleCounts(1, 2, 3, 4, 0.5) + RescaleCounts(10, 20, 30, 40, 0.25)
    assert total == RescaleCounts(11, 22, 33, 44, 0.5)


# --- applied to tensors ---------------------------------------------------------------------------------------------


@given(st.data(), st.sampled_from([None, "halves", "interleaved"]), st.integers(1, 5), st.integers(1, 6), scale_pairs())
@settings(max_examples=60, deadline=None)
def test_codes_are_rescaled_in_their_half_only(
    data: st.DataObject, order: str | None, rows: int, half: int, pair: tuple[float, float]
) -> None:
    """Against a loop over single codes. Half the time only one half has another scale."""
    old, new = pair
    width = half * 2
    values = data.draw(st.lists(st.integers(0, 255), min_size=rows * width, max_size=rows * width))
    olds = (old,) if order is None else data.draw(st.sampled_from([(old, new), (new, old), (old, old)]))
    codes = torch.tensor(values, dtype=torch.uint8).view(rows, width)
    other = (new,) * len(olds)
    counts = rescale_codes(codes, Rescale((other, olds), (new, new), order), 1)  # type: ignore[arg-type]

    def half_index(column: int) -> int:
        return {None: 0, "halves": column // half, "interleaved": column % 2}[order]

    expected, changed = [], []
    for position, code in enumerate(values):
        scale = olds[half_index(position % width)]
        expected.append(rescaled(code, scale, new))
        changed += [code] if scale != new else []
    assert codes.flatten().tolist() == expected
    brute = brute_counts(changed, old, new)
    assert counts.blocks == len(values)
    check_counts(counts, brute + RescaleCounts(len(values) - len(changed)))


def test_other_expert_s_scales_are_not_used() -> None:
    codes = torch.tensor([[0x38, 0x38]], dtype=torch.uint8)
    rescale = Rescale(((1.0, 0.5), (0.25, 1.0)), (1.0, 1.0), "interleaved")
    rescale_codes(codes, rescale, 1)
    assert codes.tolist() == [[0x28, 0x38]]


def test_halves_are_views() -> None:
    codes = torch.arange(8, dtype=torch.uint8).view(1, 8)
    assert half_of(codes, 1, "halves").tolist() == [[4, 5, 6, 7]]
    assert half_of(codes, 0, "halves").tolist() == [[0, 1, 2, 3]]
    assert half_of(codes, 1, "interleaved").tolist() == [[1, 3, 5, 7]]
    assert half_of(codes, 0, "interleaved").tolist() == [[0, 2, 4, 6]]
    half_of(codes, 0, None).fill_(9)
    assert codes.tolist() == [[9] * 8]


# --- bytes to values ------------------------------------------------------------------------------------------------

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_all_16_bit_patterns_are_widened_by_value(dtype: str) -> None:
    raw = np.arange(1 << 16, dtype="<u2").tobytes()
    expected = torch.frombuffer(bytearray(raw), dtype=TORCH[dtype]).to(torch.float64).numpy()
    found = np.array(decode_floats(dtype, raw))
    assert np.array_equal(widened(dtype, raw), found, equal_nan=True)  # the same for tensors
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected))
    finite = [value for value in found.tolist() if math.isfinite(value)]
    assert struct.unpack(f"<{len(finite)}f", encode_floats(finite)) == tuple(finite)  # F32 holds each exactly


@pytest.mark.parametrize(
    ("dtype", "raw", "value"),
    [
        ("BF16", "803f", 1.0),
        ("BF16", "0100", 2.0**-133),
        ("F16", "003c", 1.0),
        ("F16", "0100", 2.0**-24),
        ("F16", "ff03", 1023 * 2.0**-24),
        ("F32", "0000803f", 1.0),
        ("F32", "01000000", 2.0**-149),
    ],
)
def test_decoding_by_hand(dtype: str, raw: str, value: float) -> None:
    assert decode_floats(dtype, bytes.fromhex(raw)) == (value,)


def test_decoding_keeps_order_and_refuses_other_dtypes() -> None:
    assert decode_floats("BF16", bytes.fromhex("803f0040404080c0")) == (1.0, 2.0, 3.0, -4.0)
    assert decode_floats("F32", b"") == ()
    for dtype in ("F64", "U8", "F8_E4M3"):
        with pytest.raises(ValueError, match=dtype):
            decode_floats(dtype, bytes(8))


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_encoding_round_trip(values: list[float]) -> None:
    raw = encode_floats(values)
    assert raw == np.array(values, dtype="<f4").tobytes()
    assert decode_floats("F32", raw) == tuple(values)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, None),
        (2.0**-126, None),
        (3.4e38, None),
        (2.0**-127, "subnormal"),
        (2.0**-149, "subnormal"),
        (0.0, "zero"),
        (-0.0, "zero"),
        (-(2.0**-149), "negative"),
        (-1.0, "negative"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "NaN"),
    ],
)
def test_faults(value: float, expected: str | None) -> None:
    assert fault(value) == expected


# --- resolution -----------------------------------------------------------------------------------------------------


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, "f", 0, tensor_bytes(dtype, shape))


def per_expert(experts: int, scale_shape: tuple[int, ...] = (), dtype: str = "F32") -> dict[str, TensorInfo]:
    tensors = []
    for module in (f"model.layers.3.mlp.experts.{e}.{p}_proj" for e in range(experts) for p in ("gate", "up", "down")):
        tensors += [info(f"{module}.weight", "U8", 32, 16), info(f"{module}.weight_scale", "F8_E4M3", 32, 2)]
        tensors += [info(f"{module}.{scale}", dtype, *scale_shape) for scale in ("weight_scale_2", "input_scale")]
    return {tensor.name: tensor for tensor in tensors}


def fused(experts: int, gate_up: tuple[int, ...], down: tuple[int, ...]) -> dict[str, TensorInfo]:
    base = "model.layers.3.mlp.experts"
    tensors = []
    for projection, rows, shape in (("gate_up_proj", 64, gate_up), ("down_proj", 32, down)):
        name = f"{base}.{projection}"
        tensors += [info(name, "U8", experts, 16, rows), info(f"{name}_weight_scale", "F8_E4M3", experts, 2, rows)]
        tensors += [info(f"{name}_{scale}", "BF16", *shape) for scale in ("weight_scale_2", "input_scale")]
    return {tensor.name: tensor for tensor in tensors}


usable = st.floats(min_value=2.0**-126, max_value=2.0**60, width=32)
unusable = st.sampled_from([0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 2.0**-140])


@given(st.integers(1, 4), st.sampled_from([(), (1,), (1, 1)]), st.data())
@settings(max_examples=60, deadline=None)
def test_input_scales_of_a_layer(experts: int, shape: tuple[int, ...], data: st.DataObject) -> None:
    """Refused when one is bad, else imputed; a bad one never takes part in a maximum."""
    tensors = per_expert(experts, shape)
    schema = build_schema(tensors, {"num_experts": experts})
    assert not schema.findings
    stored = {name: (data.draw(usable),) for name in tensors if name.endswith("weight_scale_2")}
    names = [name for name in tensors if name.endswith("input_scale")]
    stored |= {name: (data.draw(st.one_of(usable, unusable)),) for name in names}
    gemms = {"w13": [n for n in names if ".down_proj" not in n], "w2": [n for n in names if ".down_proj" in n]}
    good = {gemm: [stored[n][0] for n in members if fault(stored[n][0]) is None] for gemm, members in gemms.items()}
    refused = resolve(schema, stored, frozenset(), ScalePolicy())
    imputed = resolve(schema, stored, frozenset(), ScalePolicy(impute="layer-max"))
    for gemm, members in gemms.items():
        bad = len(members) - len(good[gemm])
        for resolution, writes in ((refused, not bad), (imputed, bool(good[gemm]))):
            mine = [f for f in resolution.findings if f" {gemm}:" in f.message and "scale" in f.rule]
            assert any(f.severity == "error" for f in mine) != writes
            if writes:
                assert {resolution.values[name] for name in members} == {(max(good[gemm]),)}
                report = next(r for r in resolution.input_scales if r.gemm == gemm)
                assert (report.imputed, report.layer, report.after) == (bad, 3, max(good[gemm]))
                assert report.spread == max(good[gemm]) / min(good[gemm])


@given(st.integers(1, 4), st.sampled_from(["unify", "split"]), st.data())
@settings(max_examples=60, deadline=None)
def test_global_scales_of_pairs(experts: int, w13: str, data: st.DataObject) -> None:
    tensors = per_expert(experts)
    schema = build_schema(tensors, {"num_experts": experts})
    few = st.sampled_from([0.5, 0.75, 1.0])
    stored = {
        name: (data.draw(few) if name.endswith("weight_scale_2") else 1.0,) for name in tensors if "scale" in name
    }
    resolution = resolve(schema, stored, frozenset(), ScalePolicy(w13_scale=w13))  # type: ignore[arg-type]
    rescales = {}
    for expert in range(experts):
        base = f"model.layers.3.mlp.experts.{expert}"
        pair = {p: stored[f"{base}.{p}_proj.weight_scale_2"][0] for p in ("gate", "up")}
        for projection, old in pair.items():
            new = max(pair.values()) if w13 == "unify" else old
            assert resolution.values[f"{base}.{projection}_proj.weight_scale_2"] == (new,)
            if new != old:
                rescales[f"{base}.{projection}_proj.weight_scale"] = Rescale(((old,),), (new,))
        down = f"{base}.down_proj.weight_scale_2"
        assert resolution.values[down] == stored[down]
    assert resolution.rescales == rescales
    (report,) = resolution.global_scales
    assert report.unified == bool(rescales)
    assert set(report.tensors) == set(rescales)


SHAPES = {(): ((), ()), (1,): ((), ()), (3,): ((3,), (3,)), (3, 1): ((3,), (3,)), (3, 2): ((3,), (3, 2))}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("param", ["weight_scale_2", "input_scale"])
def test_fused_shapes(shape: tuple[int, ...], param: str) -> None:
    """[] stays, [1] becomes [], [E] stays, [E, 1] becomes [E], [E, 2] becomes [E] when its pairs become one value."""
    schema = build_schema(fused(3, shape, ()), {"model_type": "llama4"})
    assert not schema.findings
    linear = schema.linears["model.layers.3.mlp.experts.gate_up_proj"]
    merged, kept = SHAPES[shape]
    assert output_shape(linear, param, ScalePolicy()) == merged
    assert output_shape(linear, param, ScalePolicy(input_scale="keep", w13_scale="split")) == kept
    assert output_shape(linear, "input_scale", ScalePolicy(w13_scale="split")) == merged
    assert output_shape(linear, "weight_scale_2", ScalePolicy(input_scale="keep")) == merged


@given(st.lists(st.integers(0, 9), min_size=0, max_size=3), st.sampled_from(["gate_up_proj", "down_proj"]))
def test_any_other_fused_shape_is_refused(shape: list[int], projection: str) -> None:
    shapes = {"gate_up_proj": (), "down_proj": ()} | {projection: tuple(shape)}
    schema = build_schema(fused(3, shapes["gate_up_proj"], shapes["down_proj"]), {"model_type": "gpt_oss"})
    allowed = [[], [1], [3], [3, 1], *([[3, 2]] if projection == "gate_up_proj" else [])]
    rules = {finding.rule for finding in schema.findings if finding.severity == "error"}
    assert ("scale-shape" in rules) == (shape not in allowed)


@given(st.lists(st.integers(0, 3), max_size=3), st.sampled_from(["F32", "BF16", "F16", "F64", "I32", "U8", "F8_E4M3"]))
def test_any_other_per_expert_shape_or_dtype_is_refused(shape: list[int], dtype: str) -> None:
    schema = build_schema(per_expert(2, tuple(shape), dtype), {"num_experts": 2})
    rules = {finding.rule for finding in schema.findings if finding.severity == "error"}
    fine = shape in ([], [1], [1, 1]) and dtype in ("F32", "BF16", "F16")
    assert rules == (set() if fine else {"scale-dtype" if dtype not in ("F32", "BF16", "F16") else "scale-shape"})


@pytest.mark.parametrize("model_type", ["llama4", "llama4_text", "gpt_oss", "novel"])
def test_fused_pairs(model_type: str) -> None:
    schema = build_schema(fused(2, (2, 2), (2,)), {"model_type": model_type})
    base = "model.layers.3.mlp.experts"
    stored = {
        f"{base}.gate_up_proj_weight_scale_2": (0.5, 1.0, 2.0, 2.0),
        f"{base}.gate_up_proj_input_scale": (1.0, 2.0, 3.0, 4.0),
        f"{base}.down_proj_weight_scale_2": (0.25, 0.125),
        f"{base}.down_proj_input_scale": (5.0, 7.0),
    }
    resolution = resolve(schema, stored, frozenset(), ScalePolicy())
    if model_type == "novel":
        assert [(f.rule, f.severity, f.layer) for f in resolution.findings] == [("unknown-gate-up-order", "error", 3)]
        return
    order = "interleaved" if model_type == "gpt_oss" else "halves"
    assert resolution.values == {
        f"{base}.gate_up_proj_weight_scale_2": (1.0, 2.0),
        f"{base}.gate_up_proj_input_scale": (4.0, 4.0),
        f"{base}.down_proj_weight_scale_2": (0.25, 0.125),
        f"{base}.down_proj_input_scale": (7.0, 7.0),
    }
    rescale = Rescale(((0.5, 1.0), (2.0, 2.0)), (1.0, 2.0), order)  # type: ignore[arg-type]
    assert resolution.rescales == {f"{base}.gate_up_proj_weight_scale": rescale}


def test_layer_numbers() -> None:
    names = {"model.layers.12.mlp": 12, "layers.0": 0, "backbone.blocks.7.x": 7, "h.3.attn": 3, "model.norm": None}
    assert {name: layer_number(name) for name in names} == names
