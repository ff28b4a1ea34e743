"""Layouts: round trips, shapes, refusals, and the engines' names, shapes and dtypes of parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layout_layers import LAYOUTS, OAI, RELU2, SILU, Case, cases, make_layer
from torch import Tensor

from nvfp4prep import layouts
from nvfp4prep.layouts import vllm_marlin
from nvfp4prep.layouts.logical import (
    ENGINES,
    Activation,
    Engine,
    Expert,
    LayerFacts,
    LayoutError,
    Matrix,
    plan_geometry,
)

CASES = list(cases(hidden=(192, 256, 384, 512), intermediate=(48, 96, 128, 192)))
DTYPES = {"U8": torch.uint8, "F8_E4M3": torch.uint8, "I32": torch.int32, "F32": torch.float32}
PAIRS = [(name, engine) for name, layout in LAYOUTS.items() for engine in layout.REQUIRES.engines]


def assert_same(ours: Expert, expected: Expert) -> None:
    """Bit for bit."""
    for mine, theirs in ((ours.gate, expected.gate), (ours.up, expected.up), (ours.down, expected.down)):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            assert torch.equal(mine.weight, theirs.weight)
            assert torch.equal(mine.scale, theirs.scale)
    for name in ("gate_bias", "up_bias", "down_bias"):
        mine, theirs = getattr(ours, name), getattr(expected, name)
        assert (mine is None) == (theirs is None), name
        if mine is not None:
            assert mine.dtype == torch.float32
            assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32)), name


# --- pack, unpack, shapes ---


def test_every_pair_has_cases() -> None:
    assert {(case.layout, case.engine) for case in CASES} == set(PAIRS)
    for name, engine in PAIRS:
        mine = [case for case in CASES if (case.layout, case.engine) == (name, engine)]
        assert {case.gated for case in mine} == {True, False}
        assert {case.biased for case in mine} == ({True, False} if LAYOUTS[name].REQUIRES.biases else {False})
        padded = {case.geometry(1).padded_intermediate != case.intermediate for case in mine}
        assert padded == {True, False}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip(case: Case) -> None:
    layout, layer = LAYOUTS[case.layout], make_layer(case, split=LAYOUTS[case.layout].REQUIRES.alphas == 2)
    geometry = case.geometry(len(layer.experts))
    for expert, facts in zip(layer.experts, layer.facts, strict=True):
        packed = layout.pack(expert, geometry, facts)
        assert_same(layout.unpack(packed, geometry, facts), expert)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_are_what_pack_gives(case: Case) -> None:
    """In the same order, contiguous, whatever the strides of the input (gpt-oss is transposed, TP cuts columns)."""
    layout, layer = LAYOUTS[case.layout], make_layer(case, experts=1)
    geometry, facts = case.geometry(1), layer.facts[0]
    packed = layout.pack(layer.experts[0], geometry, facts)
    shapes = layout.shapes(geometry)
    assert list(packed) == list(shapes)
    for name, (dtype, shape) in shapes.items():
        assert packed[name].shape == shape, name
        assert packed[name].dtype == DTYPES[dtype], name
        assert packed[name].is_contiguous(), name

    def strided(matrix: Matrix | None) -> Matrix | None:
        return None if matrix is None else Matrix(matrix.weight.T.contiguous().T, matrix.scale.T.contiguous().T)

    e = layer.experts[0]
    up, down = strided(e.up), strided(e.down)
    assert up is not None and down is not None
    again = layout.pack(replace(e, gate=strided(e.gate), up=up, down=down), geometry, facts)
    for name, tensor in packed.items():
        assert torch.equal(again[name], tensor), name
        assert again[name].is_contiguous(), name


@pytest.mark.parametrize("case", [c for c in CASES if c.intermediate in (96, 192) and c.hidden == 256], ids=str)
def test_gate_and_up_are_padded_apart(case: Case) -> None:
    """Packing nothing but ones in gate leaves up empty, and the other way round."""
    if not case.gated:
        return
    layout, geometry, facts = LAYOUTS[case.layout], case.geometry(1), LayerFacts(case.engine, case.dtype)
    layer = make_layer(case, experts=1).experts[0]
    for filled in ("gate", "up"):
        matrices = {
            half: Matrix(
                torch.full((case.intermediate, case.hidden // 2), 0x22 if half == filled else 0, dtype=torch.uint8),
                torch.full((case.intermediate, case.hidden // 16), 0x38 if half == filled else 0, dtype=torch.uint8),
            )
            for half in ("gate", "up")
        }
        expert = replace(layer, **matrices)
        packed = layout.pack(expert, geometry, facts)
        assert_same(layout.unpack(packed, geometry, facts), expert)
        nibbles = packed["w13_weight"].contiguous().view(torch.uint8)
        assert int((nibbles != 0).sum()) == case.intermediate * case.hidden // 2


@pytest.mark.parametrize("alpha", [1.0, 3e-7, 1.2345e-6, 0.0009765625, 7.7e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trtllm_biases_come_back_exactly(alpha: float, dtype: torch.dtype) -> None:
    """Every finite BF16 and F16 value (normal in F32) survives the division by an F32 alpha."""
    case = Case("flashinfer-trtllm", "vllm", 256, 128, gated=True, biased=True)
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).to(torch.float32)
    every = every[torch.isfinite(every) & ((every == 0) | (every.abs() > 1e-30)) & (every.abs() < 1e30)]
    layer, geometry = make_layer(case, experts=1).experts[0], case.geometry(1)
    alpha = float(torch.tensor(alpha))
    facts = LayerFacts(g1_alpha=alpha, g1_alpha_up=alpha / 2, g2_alpha=alpha)
    for values in every.split(256):
        padded = torch.nn.functional.pad(values, (0, 256 - len(values)))
        expert = replace(layer, gate_bias=padded[:128], up_bias=padded[128:], down_bias=padded)
        assert_same(
            LAYOUTS[case.layout].unpack(LAYOUTS[case.layout].pack(expert, geometry, facts), geometry, facts), expert
        )


def test_trtllm_f32_biases_come_back_within_a_step() -> None:
    case = Case("flashinfer-trtllm", "vllm", 256, 128, gated=False, biased=True)
    layer, geometry = make_layer(case, experts=1).experts[0], case.geometry(1)
    bias = torch.randn(256, generator=torch.Generator().manual_seed(1))
    expert, facts = replace(layer, down_bias=bias), LayerFacts(g2_alpha=float(torch.tensor(1.37e-5)))
    layout = LAYOUTS[case.layout]
    packed = layout.pack(expert, geometry, facts)
    back = layout.unpack(packed, geometry, facts)
    assert back.down_bias is not None
    assert ((back.down_bias.view(torch.int32) - bias.view(torch.int32)).abs() <= 1).all()
    assert torch.equal(layout.pack(back, geometry, facts)["gemm2_bias"], packed["gemm2_bias"])


# --- geometry ---


@pytest.mark.parametrize(
    ("name", "engine", "hidden", "intermediate", "gated", "padded"),
    [
        ("flashinfer-trtllm", "vllm", 192, 96, True, (256, 128)),
        ("flashinfer-trtllm", "vllm", 320, 192, True, (512, 192)),
        ("flashinfer-trtllm", "vllm", 256, 192, False, (256, 256)),
        ("flashinfer-trtllm", "sglang", 384, 96, True, (384, 128)),
        ("flashinfer-trtllm", "sglang", 384, 64, False, (384, 128)),
        ("flashinfer-cutlass", "vllm", 192, 96, True, (192, 128)),
        ("flashinfer-cutlass", "sglang", 192, 192, False, (192, 256)),
        ("flashinfer-cutedsl", "vllm", 384, 48, True, (512, 64)),
        ("flashinfer-cutedsl", "sglang", 384, 192, False, (384, 256)),
        ("vllm-cutlass", "vllm", 192, 48, True, (192, 64)),
        ("vllm-cutlass", "vllm", 192, 48, False, (192, 128)),
        ("vllm-marlin", "vllm", 256, 96, True, (256, 128)),
        ("vllm-marlin", "vllm", 192, 192, True, (192, 256)),
        ("vllm-marlin", "vllm", 256, 192, False, (256, 192)),
        ("vllm-marlin", "sglang", 256, 192, True, (256, 192)),
        ("vllm-marlin", "sglang", 256, 192, False, (256, 256)),
    ],
)
def test_padding(
    name: str, engine: Engine, hidden: int, intermediate: int, gated: bool, padded: tuple[int, int]
) -> None:
    geometry = Case(name, engine, hidden, intermediate, gated).geometry(3)
    assert (geometry.padded_hidden, geometry.padded_intermediate) == padded
    assert (geometry.hidden, geometry.intermediate, geometry.experts) == (hidden, intermediate, 3)
    assert geometry.w13_rows == padded[1] * (2 if gated else 1)


@pytest.mark.parametrize(
    ("name", "engine", "hidden", "intermediate", "biased", "reason"),
    [
        ("flashinfer-trtllm", "vllm", 200, 128, False, "hidden size 200 is no multiple of 16"),
        ("flashinfer-trtllm", "sglang", 192, 128, False, "hidden size 192 is no multiple of 128"),
        ("flashinfer-cutlass", "vllm", 96, 128, False, "hidden size 96 is no multiple of 64"),
        ("flashinfer-cutlass", "sglang", 96, 128, False, "hidden size 96 is no multiple of 64"),
        ("flashinfer-cutedsl", "vllm", 200, 128, False, "hidden size 200 is no multiple of 16"),
        ("flashinfer-cutedsl", "sglang", 192, 128, False, "hidden size 192 is no multiple of 128"),
        ("vllm-cutlass", "vllm", 96, 128, False, "hidden size 96 is no multiple of 64"),
        ("vllm-marlin", "vllm", 96, 128, False, "hidden size 96 is no multiple of 64"),
        ("vllm-marlin", "sglang", 192, 128, False, "hidden size 192 is no multiple of 128"),
        *((name, engine, 256, 24, False, "24 per rank cuts NVFP4's groups of 16") for name, engine in PAIRS),
        *(
            (name, engine, 256, 128, True, "this kernel has no place for them")
            for name, engine in PAIRS
            if not LAYOUTS[name].REQUIRES.biases
        ),
    ],
)
def test_refusals(name: str, engine: Engine, hidden: int, intermediate: int, biased: bool, reason: str) -> None:
    for gated in (True, False):
        with pytest.raises(LayoutError, match=reason):
            plan_geometry(
                LAYOUTS[name].REQUIRES,
                engine,
                experts=2,
                hidden=hidden,
                intermediate=intermediate,
                gated=gated,
                biased=biased,
            )


def test_pairs() -> None:
    """SGLang has no counterpart of vLLM's own CUTLASS; its CuteDSL wrapper ignores a clamp."""
    assert {pair for pair in PAIRS if pair[1] == "sglang"} == {
        ("flashinfer-trtllm", "sglang"),
        ("flashinfer-cutlass", "sglang"),
        ("flashinfer-cutedsl", "sglang"),
        ("vllm-marlin", "sglang"),
    }
    assert {(name, "vllm") for name in LAYOUTS} <= set(PAIRS)
    without_oai = {
        (name, engine) for name, engine in PAIRS if OAI.kind not in LAYOUTS[name].REQUIRES.engines[engine].activations
    }
    assert without_oai == {("flashinfer-cutedsl", "sglang")}


# --- the engines' names ---

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E = 3
RAW = {
    "w13_weight_scale_2": (F32, (E,)),
    "w13_input_scale": (F32, (E,)),
    "w2_weight_scale_2": (F32, (E,)),
    "w2_input_scale": (F32, (E,)),
}
SWIGLU = dict.fromkeys(("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta"), (F32, (E,)))


def described(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def parameters(case: Case, activation: Activation) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    layout, layer = LAYOUTS[case.layout], make_layer(case, experts=E, activation=activation)
    scalars = layout.scalars(layer.scales, activation, layer.facts[0])
    for name, scalar in scalars.items():
        assert scalar.dtype == F32 and scalar.shape == (E,), name
    return layout.parameters(layer.scales, scalars, layer.facts[0]), scalars


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("oai", [False, True])
def test_vllm_parameters(gated: bool, oai: bool) -> None:
    """vLLM 0.33 ModelOptNvFp4FusedMoE after process_weights_after_loading."""
    activation = OAI if gated and oai else SILU if gated else RELU2
    for name in ("flashinfer-cutlass", "flashinfer-cutedsl", "vllm-cutlass"):
        case = Case(name, "vllm", 256, 128, gated)
        ours, _ = parameters(case, activation)
        assert described(ours) == RAW
        layer = make_layer(case, experts=E, activation=activation)
        assert torch.equal(ours["w13_weight_scale_2"], layer.scales.up)
        assert torch.equal(ours["w2_weight_scale_2"], layer.scales.down)

    ours, scalars = parameters(Case("flashinfer-trtllm", "vllm", 256, 128, gated), activation)
    assert described(ours) == RAW | {"g1_scale_c": (F32, (E,))} | (SWIGLU if activation is OAI else {})
    assert torch.equal(ours["w13_weight_scale_2"], scalars["g1_alphas"])
    assert torch.equal(ours["w2_weight_scale_2"], scalars["g2_alphas"])

    ours, _ = parameters(Case("vllm-marlin", "vllm", 256, 128, gated), activation)
    assert described(ours) == {"w13_weight_scale_2": (F32, (E,)), "w2_weight_scale_2": (F32, (E,))}


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("oai", [False, True])
def test_sglang_parameters(gated: bool, oai: bool) -> None:
    """SGLang 0.5.23 ModelOptNvFp4FusedMoEMethod after process_weights_after_loading: what its apply reads."""
    activation = OAI if gated and oai else SILU if gated else RELU2
    quantise = {"w13_input_scale_quant": (F32, ()), "w2_input_scale_quant": (F32, ())}
    alphas = {"g1_alphas": (F32, (E,)), "g2_alphas": (F32, (E,))}

    ours, _ = parameters(Case("flashinfer-trtllm", "sglang", 256, 128, gated), activation)
    expected = alphas | quantise | {"g1_alphas_up": (F32, (E,)), "g1_scale_c": (F32, (E,))}
    assert described(ours) == expected | (SWIGLU if activation is OAI else {})

    ours, _ = parameters(Case("flashinfer-cutlass", "sglang", 256, 128, gated), activation)
    assert described(ours) == alphas | quantise

    if activation is not OAI:
        case = Case("flashinfer-cutedsl", "sglang", 256, 128, gated)
        ours, _ = parameters(case, activation)
        assert described(ours) == alphas | {
            "w13_input_scale_quant": (F32, (E,)),
            "w2_input_scale_quant": (F32, (E,)),
            "w13_weight_scale_2": (F32, (E, 2) if gated else (E,)),
            "w2_weight_scale_2": (F32, (E,)),
        }
        up = make_layer(case, experts=E, activation=activation).scales.up
        assert torch.equal(ours["w13_weight_scale_2"], up[:, None].expand(E, 2) if gated else up)

    for dtype, stored in (("bf16", BF16), ("fp16", F16)):
        ours, _ = parameters(Case("vllm-marlin", "sglang", 256, 128, gated, dtype=dtype), activation)
        assert described(ours) == {"w13_weight_scale_2": (stored, (E,)), "w2_weight_scale_2": (stored, (E,))}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sglang_marlin_global_scale_is_rounded_first(dtype: str) -> None:
    """SGLang: `s.to(dtype) · 2^119` (2^7), in that order: an F16 scale may be subnormal."""
    case = Case("vllm-marlin", "sglang", 256, 128, gated=True, dtype="bf16" if dtype == "bf16" else "fp16")
    layer = make_layer(case, experts=E)
    scales = replace(layer.scales, gate=None, up=torch.tensor([3.1e-7, 1.2345e-5, 0.7]))
    scalars = vllm_marlin.scalars(scales, RELU2, layer.facts[0])
    ours = vllm_marlin.parameters(scales, scalars, layer.facts[0])["w13_weight_scale_2"]
    stored, exponent = (BF16, 119) if dtype == "bf16" else (F16, 7)
    assert torch.equal(ours, scales.up.to(stored) * 2.0**exponent)
    assert torch.equal(ours.to(F32), scalars["g1_alphas"])


@pytest.mark.parametrize(("engine", "dtype"), [("vllm", "bf16"), ("sglang", "bf16"), ("sglang", "fp16")])
def test_marlin_refuses_a_global_scale_that_overflows(engine: Engine, dtype: str) -> None:
    facts = LayerFacts(engine, "bf16" if dtype == "bf16" else "fp16")
    layer = make_layer(Case("vllm-marlin", "vllm", 256, 128, gated=False), experts=1)
    scales = replace(layer.scales, up=torch.tensor([600.0]))
    with pytest.raises(LayoutError, match="overflows"):
        vllm_marlin.scalars(scales, RELU2, facts)


@pytest.mark.parametrize("case", [c for c in CASES if c.layout == "vllm-marlin" and c.intermediate == 96], ids=str)
def test_marlin_lost_blocks_are_those_that_differ(case: Case) -> None:
    layer, geometry = make_layer(case, codes=(0, 40)), case.geometry(2)
    for facts in (layer.facts[0], replace(layer.facts[0], w13_factor=2.0, w2_factor=1.0)):
        for expert in layer.experts:
            back = vllm_marlin.unpack(vllm_marlin.pack(expert, geometry, facts), geometry, facts)
            pairs = ((back.gate, expert.gate), (back.up, expert.up), (back.down, expert.down))
            differ = sum(int((ours.scale != x.scale).sum()) for ours, x in pairs if ours is not None and x is not None)
            assert vllm_marlin.lost_blocks(expert, facts) == differ
            assert all(torch.equal(ours.weight, x.weight) for ours, x in pairs if ours is not None and x is not None)


@pytest.mark.parametrize(("name", "engine"), PAIRS)
def test_tensor_names(name: str, engine: Engine) -> None:
    names = LAYOUTS[name].tensor_names(engine)
    for gated in (True, False):
        case = Case(name, engine, 256, 128, gated, biased=LAYOUTS[name].REQUIRES.biases)
        assert list(names) == list(LAYOUTS[name].shapes(case.geometry(1)))
    assert len(set(names.values())) == len(names)
    swizzled = engine == "sglang" and name in ("flashinfer-cutlass", "flashinfer-cutedsl")
    for weight in ("w13", "w2"):
        assert names[f"{weight}_weight"] == f"{weight}_weight"
        assert names[f"{weight}_weight_scale"] == f"{weight}_{'blockscale_swizzled' if swizzled else 'weight_scale'}"
    ours, _ = parameters(Case(name, engine, 256, 128, gated=True), SILU)
    assert not set(ours) & set(names.values())


def test_registry() -> None:
    for name, layout in layouts.LAYOUTS.items():
        assert name == layout.NAME
        assert layout.VERSION == 1
        assert set(layout.REQUIRES.engines) <= set(ENGINES)
        assert layout.REQUIRES.kernel and layout.REQUIRES.gpus


def test_float_scalars_of_trtllm() -> None:
    """The engines' own order of F32 operations: `(a1 · s) · (1 / a2)`, `limit / g1_alphas`."""
    layer = make_layer(Case("flashinfer-trtllm", "vllm", 256, 128, gated=True), experts=64, activation=OAI)
    scales, scalars = layer.scales, LAYOUTS["flashinfer-trtllm"].scalars(layer.scales, OAI, layer.facts[0])
    assert scales.w13_input is not None and scales.w2_input is not None
    alphas = scales.up * scales.w13_input
    assert torch.equal(scalars["g1_alphas"], alphas)
    assert torch.equal(scalars["g1_scale_c"], alphas * (1.0 / scales.w2_input))
    assert torch.equal(scalars["g2_alphas"], scales.down * scales.w2_input)
    assert torch.equal(scalars["gemm1_clamp_limit"], torch.full((64,), 7.0) / alphas)
    assert torch.equal(scalars["gemm1_beta"], torch.full((64,), 1.0) / alphas)
    assert torch.equal(scalars["gemm1_alpha"], torch.full((64,), 1.702))
    assert torch.equal(scalars["w13_input_scale_quant"], 1.0 / scales.w13_input)
