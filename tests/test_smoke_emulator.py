"""The emulator against logical tensors, against a real kernel's outputs, and against damage to the packed bytes.

What may differ. Emulator and `exact` round at the same points, so they differ where F32 sums of another order fall on
either side of a rounding. A requantised value that does so moves by one step of e2m1, a quarter of the values' RMS on
average; a block scale that does so moves 16 values by 0.19 of it (requantisation noise of 0.13, twice and independent).
Relative to the N values that are requantised that is 0.25/sqrt(N) and 0.76/sqrt(N); F32 sums are some 4e-7 off, which
happens to N · 2e-6 values and N/16 · 5e-6 block scales. The bound allows one block: 1/sqrt(N). Without requantisation a
value that rounds otherwise moves by a step of BF16, as much as rounding itself costs: the bound is 2^-9, one rounding
of all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checkpoints import DATA
from layout_layers import LAYOUTS, OAI, RELU2, SILU, Case, Layer, cases, make_layer
from safetensors.torch import load_file
from smoke_layers import packed_layer
from torch import Tensor

from nvfp4prep.layouts import vllm_marlin
from nvfp4prep.layouts.logical import Activation, Expert, LayerFacts, Matrix, Scales, plan_geometry
from nvfp4prep.layouts.permutations import put_rows, row_shuffle, unswizzle
from nvfp4prep.smoke import emulator
from nvfp4prep.smoke.emulator import emulate, read_weights, run_expert, stray_padding
from nvfp4prep.smoke.layer import LogicalLayer, PackedLayer, Routing
from nvfp4prep.smoke.reference import engine_scales, exact, plain, weights_of
from nvfp4prep.smoke.rounding import ROUNDING, away_from_ties, rounding_of, weighted_sum
from nvfp4prep.targets import Target

CLAMPED = Activation("silu", limit=5.0)
TOKENS, EXPERTS, TOP_K = 16, 4, 2
CASES = [
    *cases(hidden=(384,), intermediate=(96,)),
    *cases(hidden=(192,), intermediate=(48,)),
    *cases(hidden=(256,), intermediate=(128,)),
]


def activations(case: Case) -> tuple[Activation, ...]:
    known = LAYOUTS[case.layout].REQUIRES.engines[case.engine].activations
    return tuple(a for a in ((SILU, OAI, CLAMPED) if case.gated else (RELU2,)) if a.kind in known)


PAIRS = [pytest.param(case, a, id=f"{case}-{a.kind}{a.limit or ''}") for case in CASES for a in activations(case)]


def both(case: Case, activation: Activation, experts: int = EXPERTS) -> tuple[Layer, PackedLayer, LogicalLayer]:
    """A made layer, packed and as the checkpoint means it; gate and up scales differ where the kernel allows that."""
    split = case.gated and activation.limit is None and LAYOUTS[case.layout].REQUIRES.alphas == 2
    layer = make_layer(case, experts=experts, activation=activation, split=split)
    packed = packed_layer(layer, activation)
    scales = engine_scales(layer.scales, packed.target)
    return (
        layer,
        packed,
        LogicalLayer(case.hidden, case.intermediate, experts, activation, lambda e: layer.experts[e], scales),
    )


def inputs(hidden: int, tokens: int = TOKENS, experts: int = EXPERTS, seed: int = 1) -> tuple[Tensor, Routing]:
    generator = torch.Generator().manual_seed(seed)
    x = (3 * torch.randn(tokens, hidden, generator=generator)).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:TOP_K] for _ in range(tokens)])
    return x, Routing(ids, torch.rand(tokens, TOP_K, generator=generator) + 0.1)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def tolerance(case: Case, tokens: int = TOKENS) -> float:
    return 2.0**-9 if case.layout == "vllm-marlin" else 1 / math.sqrt(tokens * TOP_K * case.intermediate)


# --- against logical tensors ---


@pytest.mark.parametrize(("case", "activation"), PAIRS)
def test_is_exact(case: Case, activation: Activation) -> None:
    _, packed, logical = both(case, activation)
    x, routing = inputs(case.hidden)
    ours = emulate(packed, x, routing)
    assert ours.shape == x.shape and ours.dtype == torch.float32
    expected = exact(logical, x, routing, packed.target.activations, rounding_of(packed.target))
    assert expected.abs().max() > 0.1
    assert relative(ours, expected) <= tolerance(case)


SIZES = [case for case in CASES if not case.biased or case.intermediate == 96]


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_weights_are_read_exactly(case: Case) -> None:
    """Every element, bit by bit; zeros in the padding, and no stray byte there."""
    layer, packed, _ = both(case, SILU if case.gated else RELU2, experts=2)
    geometry = packed.geometry
    for e in range(2):
        ours, expected = read_weights(packed, e), weights_of(layer.experts[e], None)
        for a, b, shape in (
            (ours.gate, expected.gate, (geometry.padded_intermediate, geometry.padded_hidden)),
            (ours.up, expected.up, (geometry.padded_intermediate, geometry.padded_hidden)),
            (ours.down, expected.down, (geometry.padded_hidden, geometry.padded_intermediate)),
        ):
            if a is None or b is None:
                assert a is None and b is None
                continue
            assert a.shape == shape
            assert torch.equal(a[: b.shape[0], : b.shape[1]], b)
            assert not a[b.shape[0] :].any() and not a[:, b.shape[1] :].any()
        stray = stray_padding(packed, e)
        assert len(stray) == (6 if case.biased else 4) and not any(stray.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_add_up(layout: str) -> None:
    """Two EP ranks: global ids, and other ranks' experts are left out."""
    case = Case(layout, "vllm", 256, 128, True)
    layer = make_layer(case, experts=4)
    x, routing = inputs(256)
    whole = emulate(packed_layer(layer, SILU), x, routing)
    ranks = [emulate(packed_layer(layer, SILU, ep=2, rank=rank), x, routing) for rank in (0, 1)]
    assert relative(ranks[0] + ranks[1], whole) < 2.0**-8  # outputs are rounded once more
    nobody = Routing(torch.zeros_like(routing.ids), routing.weights)
    assert not emulate(packed_layer(layer, SILU, ep=2, rank=1), x, nobody).any()


def test_weighted_sum() -> None:
    x, routing = inputs(32, tokens=5)
    x = x.float()
    tables = torch.randn(EXPERTS, 32)
    ours = weighted_sum(routing, range(EXPERTS), 5, 32, lambda e, token: (x[token] * tables[e], None), None)
    for t in range(5):
        expected = sum(float(routing.weights[t, j]) * x[t] * tables[int(routing.ids[t, j])] for j in range(TOP_K))
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(ours[t], expected)


def test_no_tokens() -> None:
    _, packed, logical = both(Case("flashinfer-trtllm", "vllm", 256, 96, True), SILU)
    x, routing = inputs(256, tokens=1)
    none = Routing(routing.ids[:0], routing.weights[:0])
    assert emulate(packed, x[:0], none).shape == exact(logical, x[:0], none, "NVFP4").shape == (0, 256)


# --- quantisation of activations ---


def test_quantise_is_nvfp4() -> None:
    """Ties to even, saturation, zeros, and NaN through the block only; the emulator has its own codec."""
    values = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, -5, -0.25, 0.26, 5.01, 0, 1, -0.75, 4])
    x = torch.stack([values, values * 448, values * 449, torch.zeros(16), values])
    x[4, 3] = math.nan
    ours = emulator.quantise(x, torch.ones(()))
    codes = torch.tensor([6, 4, 4, 2, 2, 1, 1, 0, -4, 0, 0.5, 6, 0, 1, -1, 4])
    assert torch.equal(ours[0], codes)
    assert torch.equal(ours[1], codes * 448)
    assert ours[2].abs().max() == 6 * 448
    assert not ours[3].any()
    assert ours[4].isnan().all()


@pytest.mark.parametrize("bf16_max", [1.0, 3.140625, 57.75])
def test_away_from_ties(bf16_max: float) -> None:
    """Calibrated scales put BF16 values on ties; away from them both roundings of every quotient agree."""
    a = torch.tensor([bf16_max]) / (6 * 448)
    x = (torch.randn(64, 512, generator=torch.Generator().manual_seed(3)) * bf16_max / 5).to(torch.bfloat16)
    moved = away_from_ties(x, a)
    assert (moved != x).float().mean() < 0.02 and (moved.abs() <= x.abs()).all()
    assert torch.equal(away_from_ties(moved, a), moved)
    steps = [1 - 2.0**-18, 1.0, 1 + 2.0**-18]

    def flips(x: Tensor) -> int:
        first, *others = (emulator.quantise(x.float(), step / a[0]) for step in steps)
        return sum(int((first != other).sum()) for other in others)

    assert flips(x) > 0 and flips(moved) == 0


# --- against the real kernel ---

GOLDEN = load_file(DATA / "golden/marlin_moe_sm90.safetensors")


def golden_layer(case: str) -> tuple[PackedLayer, Tensor, Routing]:
    def of(name: str) -> Tensor:
        return GOLDEN[f"{case}.{name}"]

    s13, s2 = of("w13_global_scale"), of("w2_global_scale")
    facts = LayerFacts(w13_factor=float(of("w13_sf")), w2_factor=float(of("w2_sf")))
    scales = Scales(s13, s13, s2, None, None)
    packed = {
        "w13_weight": of("marlin_w13"),
        "w13_weight_scale": of("marlin_w13_scale").view(torch.uint8),
        "w2_weight": of("marlin_w2"),
        "w2_weight_scale": of("marlin_w2_scale").view(torch.uint8),
    }
    scalars = vllm_marlin.scalars(scales, SILU, facts)
    scalars |= {"g1_alphas": of("marlin_w13_global_scale"), "g2_alphas": of("marlin_w2_global_scale")}
    geometry = plan_geometry(
        vllm_marlin.REQUIRES, "vllm", experts=4, hidden=256, intermediate=128, gated=True, biased=False
    )
    layer = PackedLayer(Target("vllm-marlin"), geometry, SILU, facts, range(4), packed, scalars, scales)
    return layer, of("x"), Routing(of("topk_ids").to(torch.int64), of("topk_weights"))


@pytest.mark.parametrize("case", ["nvfp4", "nvfp4_rescaled"])
def test_golden_marlin(case: str) -> None:
    """Every step of an H200's run, from its packed bytes. Measured: all bits equal.

    A sum of another order may round the other way: allowed in one value of 1000, by one step of BF16.
    """
    layer, x, routing = golden_layer(case)
    flat, rows = routing.ids.flatten(), x.repeat_interleave(TOP_K, 0)
    found = {name: torch.zeros(GOLDEN[f"{case}.{name}"].shape) for name in ("gemm1_out", "act_out", "gemm2_out")}
    for e in range(4):
        at = (flat == e).nonzero()[:, 0]
        stages = run_expert(layer, e, rows[at])
        assert stages.gate is not None and stages.scale is not None
        weight = (routing.weights.flatten()[at] * stages.scale).to(torch.bfloat16).to(torch.float32)
        found["gemm1_out"][at] = torch.cat([stages.gate, stages.up], 1)
        found["act_out"][at] = stages.between
        found["gemm2_out"][at] = (stages.out * weight[:, None]).to(torch.bfloat16).to(torch.float32)
    found["out"] = emulate(layer, x, routing)
    for name, ours in found.items():
        golden = GOLDEN[f"{case}.{name}"].to(torch.float32)
        differ = ours != golden
        print(f"{case} {name}: {int(differ.sum())} of {differ.numel()} values differ")
        assert differ.float().mean() <= 1e-3
        assert ((ours - golden).abs() <= golden.abs() * 2.0**-7 + 1e-6 * golden.abs().max()).all()


@pytest.mark.parametrize("case", ["nvfp4", "nvfp4_rescaled"])
def test_exact_is_the_golden_reference(case: str) -> None:
    """`ref` of the golden file is F32; the kernel was measured 0.0049 from it."""
    layer, x, routing = golden_layer(case)
    experts = [_golden_expert(case, e) for e in range(4)]
    logical = LogicalLayer(256, 128, 4, SILU, lambda e: experts[e], layer.scales)
    reference, out = GOLDEN[f"{case}.ref"], GOLDEN[f"{case}.out"].to(torch.float32)
    assert relative(exact(logical, x, routing, "16-bit"), reference) < 1e-6
    assert relative(plain(lambda e: weights_of(experts[e], layer.scales, e), SILU, x, routing), reference) < 1e-6
    assert relative(exact(logical, x, routing, "16-bit", ROUNDING["vllm-marlin"]), out) < 2.0**-9


def _golden_expert(case: str, e: int) -> Expert:
    w13, s13 = GOLDEN[f"{case}.w13_packed_nibbles"][e], GOLDEN[f"{case}.w13_scale"][e].view(torch.uint8)
    down = Matrix(GOLDEN[f"{case}.w2_packed_nibbles"][e], GOLDEN[f"{case}.w2_scale"][e].view(torch.uint8))
    return Expert(Matrix(w13[:128], s13[:128]), Matrix(w13[128:], s13[128:]), down)


# --- damage ---

Damage = Callable[[Layer, PackedLayer], dict[str, Tensor] | None]


def _packed_again(layer: Layer, packed: PackedLayer, change: Callable[[Expert], Expert]) -> dict[str, Tensor]:
    module = LAYOUTS[layer.case.layout]
    geometry = packed.geometry
    made = [module.pack(change(e), geometry, f) for e, f in zip(layer.experts, layer.facts, strict=True)]
    return {name: torch.stack([tensors[name] for tensors in made]) for name in made[0]}


def swapped_halves(layer: Layer, packed: PackedLayer) -> dict[str, Tensor] | None:
    if not layer.case.gated:
        return None

    def swap(expert: Expert) -> Expert:
        assert expert.gate is not None
        return replace(expert, gate=expert.up, up=expert.gate)

    return _packed_again(layer, packed, swap)


def linear_scales(layer: Layer, packed: PackedLayer) -> dict[str, Tensor] | None:
    """Block scales not swizzled."""
    if layer.case.layout == "vllm-marlin":
        return None
    scale = packed.packed["w13_weight_scale"]
    linear = torch.stack([unswizzle(s, *s.shape) for s in scale])
    return {"w13_weight_scale": linear}


def unpermuted_columns(layer: Layer, packed: PackedLayer) -> dict[str, Tensor] | None:
    """Marlin's scales without their column order."""
    if layer.case.layout != "vllm-marlin":
        return None
    scale = packed.packed["w13_weight_scale"]
    flush = layer.case.engine == "vllm"
    table = vllm_marlin.recode_table(layer.facts[0].w13_factor, flush)
    joined = [torch.cat([m.scale for m in (e.gate, e.up) if m is not None]).T for e in layer.experts]
    plain_order = torch.stack([table[codes.long()] for codes in joined])
    return {"w13_weight_scale": plain_order} if plain_order.shape == scale.shape else None


def identity_rows(layer: Layer, packed: PackedLayer) -> dict[str, Tensor] | None:
    """TRT-LLM-gen rows of w2 not shuffled."""
    if layer.case.layout != "flashinfer-trtllm":
        return None
    weight = packed.packed["w2_weight"]
    order = row_shuffle(weight.shape[1])
    return {"w2_weight": torch.stack([put_rows(w, order) for w in weight])}


def swapped_nibbles(layer: Layer, packed: PackedLayer) -> dict[str, Tensor] | None:
    weight = packed.packed["w2_weight"]
    raw = weight.view(torch.uint8)
    return {"w2_weight": (raw >> 4 | raw << 4).view(weight.dtype)}


def zeroed_expert(layer: Layer, packed: PackedLayer) -> dict[str, Tensor] | None:
    weight = packed.packed["w13_weight"].clone()
    weight[1] = 0
    return {"w13_weight": weight}


def filled_padding(layer: Layer, packed: PackedLayer) -> dict[str, Tensor] | None:
    """Weights where I is padded: what the first rows and columns hold, once more."""
    inner, padded = packed.geometry.intermediate, packed.geometry.padded_intermediate
    if inner == padded or layer.case.biased:
        return None

    def fill(expert: Expert) -> Expert:
        def rows(m: Matrix) -> Matrix:
            return Matrix(
                torch.cat([m.weight, m.weight[: padded - inner]]), torch.cat([m.scale, m.scale[: padded - inner]])
            )

        more = padded - inner
        down = Matrix(
            torch.cat([expert.down.weight, expert.down.weight[:, : more // 2]], 1),
            torch.cat([expert.down.scale, expert.down.scale[:, : more // 16]], 1),
        )
        return Expert(None if expert.gate is None else rows(expert.gate), rows(expert.up), down)

    return _packed_again(layer, packed, fill)


DAMAGE: tuple[Damage, ...] = (
    swapped_halves,
    linear_scales,
    unpermuted_columns,
    identity_rows,
    swapped_nibbles,
    zeroed_expert,
    filled_padding,
)
DAMAGED = [
    Case(name, engine, 256, 96, gated)
    for name, layout in LAYOUTS.items()
    for engine in layout.REQUIRES.engines
    for gated in (True, False)
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("case", DAMAGED, ids=str)
def test_damage_shows(case: Case, damage: Damage) -> None:
    activation = SILU if case.gated else RELU2
    layer, packed, logical = both(case, activation)
    if case.layout == "vllm-marlin" and damage is unpermuted_columns:
        layer, packed, logical = both(replace(case, intermediate=128), activation)  # no padding in the way
    changed = damage(layer, packed)
    if changed is None:
        assert damage is not zeroed_expert and damage is not swapped_nibbles
        return
    x, routing = inputs(case.hidden)
    broken = replace(packed, packed={**packed.packed, **changed})
    expected = exact(logical, x, routing, packed.target.activations, rounding_of(packed.target))
    ratio = relative(emulate(broken, x, routing), expected) / tolerance(case)
    print(f"{case} {damage.__name__}: {ratio:.0f} times the tolerance")
    assert ratio > 5
    if damage is filled_padding:
        stray = stray_padding(broken, 0)
        assert all(stray[name] > 0 for name in stray)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scalar", ["g1_alphas", "g2_alphas", "w13_input_scale_quant", "w2_input_scale_quant"])
def test_damaged_scalars_show(layout: str, scalar: str) -> None:
    """flashinfer-trtllm: 1/a2 is in g1_scale_c."""
    case = Case(layout, "vllm", 256, 96, True)
    _, packed, logical = both(case, SILU)
    name = "g1_scale_c" if layout == "flashinfer-trtllm" and scalar == "w2_input_scale_quant" else scalar
    if name not in packed.scalars:
        assert layout == "vllm-marlin" and "input" in scalar
        return
    broken = replace(packed, scalars={**packed.scalars, name: packed.scalars[name] * 1.5})
    x, routing = inputs(case.hidden)
    expected = exact(logical, x, routing, packed.target.activations, rounding_of(packed.target))
    assert relative(emulate(broken, x, routing), expected) > 5 * tolerance(case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_scale_shows(layout: str) -> None:
    """An E4M3 NaN reaches the output; Marlin's S0E5M3 has none, there the largest scale does it."""
    case = Case(layout, "vllm", 256, 128, True)
    _, packed, _ = both(case, SILU)
    codes = packed.packed["w2_weight_scale"].clone()
    codes[0, 0, 0] = 0xFF if layout == "vllm-marlin" else 0x7F
    x, routing = inputs(case.hidden)
    broken = emulate(replace(packed, packed={**packed.packed, "w2_weight_scale": codes}), x, routing)
    clean = emulate(packed, x, routing)
    if layout == "vllm-marlin":
        assert relative(broken, clean) > 5 * tolerance(case)
    else:
        assert 0 < int(broken.isnan().any(0).sum()) == 1
