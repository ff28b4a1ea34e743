"""The check checked: a packed layer is broken on purpose, one way at a time; the check must notice each. No printing.

What notices are the functions that `check.check` itself uses. Comparing outputs and comparing bytes are told apart: a
kernel is judged by its outputs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from nvfp4prep import packing
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.layouts import flashinfer_mxint4, marlin_repack, vllm_marlin
from nvfp4prep.layouts.logical import Expert, LayoutError, Matrix, Scales
from nvfp4prep.layouts.permutations import (
    put_rows,
    row_shuffle,
    separate_halves,
    swizzle,
    unswizzle,
)
from nvfp4prep.plan import Rank
from nvfp4prep.schema import MoeLayer
from nvfp4prep.smoke import selftest_int4
from nvfp4prep.smoke.breaking import mapped, on_bytes, with_scales, with_weights
from nvfp4prep.smoke.check import (
    Expectation,
    Row,
    Settings,
    Subject,
    choose_backend,
    comparable,
    expectations,
    judged,
    layer_problems,
)
from nvfp4prep.smoke.choice import chosen_layers
from nvfp4prep.smoke.layer import LogicalLayer, PackedLayer, Routing, Run
from nvfp4prep.smoke.selftest_int4 import NO_GLOBAL_SCALE, is_int4

_MOST_TOKENS = 128
_MARLIN = "vllm-marlin"
_TRTLLM = "flashinfer-trtllm"
_CUTEDSL = "flashinfer-cutedsl"
_PLAIN_ROWS = "no row order to forget: this kernel reads rows as they are"
_UNBROKEN = "nothing (the layer as it is)"

Status = Literal["noticed", "missed", "not showable"]


@dataclass(frozen=True)
class Result:
    """What became of one mutation.

    `output` are the problems of comparisons of outputs, `data` those of stored bytes and scalars; either suffices.
    `how` names what noticed first. `rel_l2` is the worst relative L2 against the exact emulation, `tolerance` what was
    allowed there; None where nothing was run. `why` says why a layer can't show it, or what a miss means.
    """

    name: str
    imitates: str
    status: Status
    how: str
    rel_l2: float | None = None
    tolerance: float | None = None
    why: str = ""
    output: tuple[str, ...] = ()
    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutation:
    """One way to break a layer. `apply` gives the broken layer, or why a layer can't show it.

    With `scales_routing` the layer stays and the routing weights are multiplied by the model's factor once more.
    """

    name: str
    imitates: str
    apply: Callable[[PackedLayer], PackedLayer | str]
    scales_routing: bool = False


# --- mutations --------------------------------------------------------------------------------------------------------


def _swap_halves(layer: PackedLayer) -> PackedLayer | str:
    if not layer.geometry.gated:
        return "not gated: there are no halves"

    def swapped(expert: Expert) -> Expert:
        assert expert.gate is not None
        return replace(expert, gate=expert.up, up=expert.gate, gate_bias=expert.up_bias, up_bias=expert.gate_bias)

    return _repacked(layer, swapped)


def _gate_scale_for_up(layer: PackedLayer) -> PackedLayer | str:
    if is_int4(layer):
        return NO_GLOBAL_SCALE
    if layer.scales.gate is None:
        return "not gated: there is no gate"
    if torch.equal(layer.scales.gate, layer.scales.up):
        return "gate and up share their weight_scale_2 here"
    return _rescaled(layer, replace(layer.scales, up=layer.scales.gate))


def _unswizzled(layer: PackedLayer) -> PackedLayer | str:
    if is_int4(layer):
        return selftest_int4.scales_as_stored(layer)
    if layer.target.layout == _MARLIN:
        return with_scales(layer, lambda name, scale: _natural_columns(scale))
    return with_scales(layer, lambda name, scale: unswizzle(scale, *scale.shape))


def _natural_columns(scale: Tensor) -> Tensor:
    """Marlin's block scales [K/16, N] with columns as they were before both permutations."""
    return marlin_repack.restore_columns(scale, vllm_marlin.SCALE_ORDER)


def _unshuffled(layer: PackedLayer) -> PackedLayer | str:
    if layer.target.layout == _CUTEDSL:
        if not layer.geometry.gated:
            return "not gated: there are no halves to interleave"
        return _with_rows(layer, separate_halves, ("w13_weight", "w13_weight_scale"))
    if layer.target.layout == _TRTLLM:
        return _with_rows(layer, lambda rows: put_rows(rows, row_shuffle(rows.shape[0])), tuple(layer.packed))
    if layer.target.layout == flashinfer_mxint4.NAME:
        return selftest_int4.rows_as_stored(layer)
    return selftest_int4.OTHER_ORDER.get(layer.target.layout, _PLAIN_ROWS)


def _with_rows(layer: PackedLayer, change: Callable[[Tensor], Tensor], names: tuple[str, ...]) -> PackedLayer:
    """Rows of some of the tensors moved; block scales under their swizzle."""

    def moved(name: str, value: Tensor) -> Tensor:
        if name not in names:
            return value
        return swizzle(change(unswizzle(value, *value.shape))) if name.endswith("scale") else change(value)

    return mapped(layer, moved)


def _swap_nibbles(layer: PackedLayer) -> PackedLayer:
    return with_weights(layer, lambda weight: on_bytes(weight, lambda pairs: pairs >> 4 | pairs << 4))


def _reciprocal(layer: PackedLayer) -> PackedLayer | str:
    if is_int4(layer):
        return NO_GLOBAL_SCALE
    return _rescaled(layer, _each(layer.scales, lambda scale: 1 / scale))


def _f16_as_f32(layer: PackedLayer) -> PackedLayer | str:
    if is_int4(layer):
        return NO_GLOBAL_SCALE

    def misread(scale: Tensor) -> Tensor:
        bits = scale.to(torch.float16).view(torch.int16).to(torch.int32) << 16
        return bits.view(torch.float32)

    return _rescaled(layer, _each(layer.scales, misread))


def _another_input_scale(layer: PackedLayer) -> PackedLayer | str:
    if is_int4(layer):
        return selftest_int4.another_input_scale(layer)
    if not layer.target.module.REQUIRES.input_scales or layer.scales.w13_input is None:
        return "weight-only: the kernel takes no input scale"
    raw = layer.scalars.get("raw_input_scale", layer.scales.w13_input)
    usable = torch.where(raw.isfinite() & (raw > 0), raw, torch.nan)
    if usable.isnan().all() or float(usable.nan_to_num(-torch.inf).max()) == float(usable.nan_to_num(torch.inf).min()):
        return "all experts were calibrated to the same input scale"
    largest, smallest = int(usable.nan_to_num(-torch.inf).argmax()), int(usable.nan_to_num(torch.inf).argmin())
    mixed = layer.scales.w13_input.clone()
    mixed[largest] = usable[smallest]
    broken = _rescaled(layer, replace(layer.scales, w13_input=mixed))
    # x is still quantised with the right scale; the alpha that undoes it is the other expert's.
    kept = {name: layer.scalars[name] for name in ("w13_input_scale_quant", "w2_input_scale_quant")}
    return replace(broken, scalars={**broken.scalars, **kept})


def _zero_expert(layer: PackedLayer) -> PackedLayer:
    packed = {name: value.clone() for name, value in layer.packed.items()}
    for value in packed.values():
        value[len(layer.experts) // 2] = 0
    return replace(layer, packed=packed)


def _dirty_padding(layer: PackedLayer) -> PackedLayer | str:
    geometry = layer.geometry
    marked = _marked(layer)
    if not any(bool((mark == 0).any()) for mark in marked.values()):
        return f"no padding: I {geometry.intermediate} and H {geometry.hidden} fit as they are"
    ones = {"_weight": 0x22, "_scale": 0xB8 if layer.target.layout == _MARLIN else 0x38}  # 1.0, twice for FP4

    def filled(name: str, value: Tensor) -> Tensor:
        if value.is_floating_point():  # biases, and int4's group scales
            return torch.where(marked[name] == 0, 1.0, value)
        fill = next(code for end, code in ones.items() if name.endswith(end))
        data = value.contiguous().view(torch.uint8)
        return torch.where(marked[name].contiguous().view(torch.uint8) == 0, fill, data).view(value.dtype)

    return mapped(layer, filled)


def _marked(layer: PackedLayer) -> dict[str, Tensor]:
    """An expert's tensors with something that is not zero in every byte (floats: value) that is no padding."""
    geometry = layer.geometry
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16}
    inner, hidden = geometry.intermediate, geometry.hidden

    def full(rows: int, columns: int) -> Matrix:
        weight = torch.full((rows, columns // 2), 0xFF, dtype=torch.uint8)
        if is_int4(layer):
            ones = torch.ones(rows, columns // geometry.group, dtype=dtypes[geometry.scale_dtype])
            return Matrix(weight, ones, geometry.group)
        return Matrix(weight, torch.full((rows, columns // 16), 0x7E, dtype=torch.uint8))

    gated = geometry.gated
    ones = partial(torch.ones, dtype=torch.float32)
    biases = (ones(inner) if gated else None, ones(inner), ones(hidden)) if geometry.biased else ()
    expert = Expert(full(inner, hidden) if gated else None, full(inner, hidden), full(hidden, inner), *biases)
    facts = replace(layer.facts, w13_factor=1.0, w2_factor=1.0, g1_alpha=1.0, g1_alpha_up=1.0, g2_alpha=1.0)
    return layer.target.module.pack(expert, geometry, facts)


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("halves swapped", "gate and up in the other order", _swap_halves),
    Mutation("gate's scale on up", "one weight_scale_2 read for two halves", _gate_scale_for_up),
    Mutation("scales not swizzled", "block scales copied as they are stored", _unswizzled),
    Mutation("rows not shuffled", "weights copied as they are stored", _unshuffled),
    Mutation("nibbles swapped", "high nibble taken for the even k", _swap_nibbles),
    Mutation("reciprocal weight_scale_2", "a scale multiplied where it should divide", _reciprocal),
    Mutation("another expert's input scale", "input scales in another order, or not normalised", _another_input_scale),
    Mutation("F16 bits read as F32", "a scale reinterpreted, not widened", _f16_as_f32),
    Mutation("one expert zeroed", "an expert that was never loaded", _zero_expert),
    Mutation("padding not zero", "memory that nobody cleared", _dirty_padding),
    Mutation("weights not interleaved", "int4 weights copied as they are stored", selftest_int4.weights_as_stored),
    Mutation(
        "offset of 8 forgotten", "signed codes read as unsigned, or the reverse", selftest_int4.codes_without_offset
    ),
    Mutation(
        "16-bit scales misread", "BF16 bits taken for FP16, or the reverse", selftest_int4.scales_of_the_other_type
    ),
    Mutation("scale order by I", "the order of w13's group scales chosen by w2's groups", selftest_int4.order_by_inner),
    Mutation("pre_quant_scale ignored", "AWQ's factors never applied", selftest_int4.factors_ignored),
    Mutation(
        "routing factor twice", "routed_scaling_factor applied by router and by kernel", lambda layer: layer, True
    ),
)


# --- what mutations are made of ---------------------------------------------------------------------------------------


def _repacked(layer: PackedLayer, change: Callable[[Expert], Expert]) -> PackedLayer:
    """Every expert unpacked, changed, and packed again with the same facts."""
    module, stacked = layer.target.module, dict[str, list[Tensor]]()
    for position in range(len(layer.experts)):
        facts = packing.expert_facts(layer.facts, layer.scalars, position)
        own = {name: value[position] for name, value in layer.packed.items()}
        expert = change(module.unpack(own, layer.geometry, facts))
        for name, value in module.pack(expert, layer.geometry, facts).items():
            stacked.setdefault(name, []).append(value)
    return replace(layer, packed={name: torch.stack(values) for name, values in stacked.items()})


def _each(scales: Scales, change: Callable[[Tensor], Tensor]) -> Scales:
    """All weight_scale_2 changed."""
    gate = None if scales.gate is None else change(scales.gate)
    return replace(scales, gate=gate, up=change(scales.up), down=change(scales.down))


def _rescaled(layer: PackedLayer, scales: Scales) -> PackedLayer:
    """The kernel's scalars made of other scales; the packed bytes stay."""
    try:
        scalars = layer.target.module.scalars(scales, layer.activation, layer.facts)
    except LayoutError:  # beyond what Marlin's form holds: an engine that does not look gets infinity
        scalars = {name: torch.full_like(layer.scalars[name], torch.inf) for name in ("g1_alphas", "g2_alphas")}
    return replace(layer, scalars={**layer.scalars, **scalars}, scales=scales)


def _alike(one: PackedLayer, other: PackedLayer) -> bool:
    """The same bytes and scalars."""

    def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(value.nan_to_num(), right[name].nan_to_num()) for name, value in left.items())

    return same(one.packed, other.packed) and same(one.scalars, other.scalars)


# --- the self-test ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bench:
    """One rank of one layer, with what it should give and the backend that runs it."""

    subject: Subject
    settings: Settings
    moe: MoeLayer
    rank: Rank
    layer: PackedLayer
    logical: LogicalLayer
    expected: tuple[Expectation, ...]
    run: Run

    def rows(self, layer: PackedLayer, factor: float = 1.0) -> list[Row]:
        found: list[Row] = []
        for expected in self.expected:
            ids, weights = expected.routing.ids, expected.routing.weights
            out = self.run(layer, expected.x, Routing(ids, weights * factor)).cpu()
            found += judged(self.subject, self.settings, self.moe, self.logical, expected, {self.rank: out})
        return found

    def problems(self, layer: PackedLayer) -> list[str]:
        return layer_problems(self.subject, self.moe, self.rank, layer, self.logical)


def self_test(
    subject: Subject, settings: Settings, progress: Callable[[str], None] = lambda _: None
) -> tuple[Result, ...]:
    """Break the first chosen layer (of several ranks: on the first that is there) in every way of MUTATIONS.

    Every expert gets tokens, by random routing. A layer that fails as it is can't show anything: that is one missed
    result, and the only one.

    Raises:
        InputRefused: no rank of the layer is there.
        UsageFault, EnvironmentFault: as `check.choose_backend`.
    """
    run = choose_backend(subject.target, settings.backend)[1]
    moe = chosen_layers(subject.layers, settings.layers)[0]
    rank, layer = _first_rank(subject, moe)
    logical = subject.logical(moe)
    enough = -(-2 * logical.expert_count // subject.router_config.top_k)
    settings = replace(settings, tokens=(max(16, min(enough, _MOST_TOKENS)),))
    subject = replace(subject, router=lambda moe: None)  # random routing alone
    known = comparable(subject, moe, (rank,), logical)
    expected = tuple(expectations(subject, settings, moe, (rank,), logical, known))
    bench = _Bench(subject, settings, moe, rank, layer, logical, expected, run)
    unbroken = [problem for row in bench.rows(layer) for problem in row.problems] + bench.problems(layer)
    if unbroken:
        why = f"the layer fails before anything is broken: {unbroken[0]}"
        return (Result(_UNBROKEN, "a good layer", "missed", "", why=why),)
    results = []
    for mutation in MUTATIONS:
        progress(mutation.name)
        results.append(_result(bench, mutation))
    return tuple(results)


def _first_rank(subject: Subject, moe: MoeLayer) -> tuple[Rank, PackedLayer]:
    for rank in subject.target.ranks():
        layer = subject.pack(moe, rank)
        if layer is not None:
            return rank, layer
    raise InputRefused([Finding("smoke-refused", "error", f"no rank of {moe.path} is there")])


def _result(bench: _Bench, mutation: Mutation) -> Result:
    def not_showable(why: str) -> Result:
        return Result(mutation.name, mutation.imitates, "not showable", "", why=why)

    factor = bench.subject.router_config.scale if mutation.scales_routing else 1.0
    if mutation.scales_routing and factor == 1.0:
        return not_showable("this model's routing factor is 1")
    broken = mutation.apply(bench.layer)
    if isinstance(broken, str):
        return not_showable(broken)
    if factor == 1.0 and _alike(bench.layer, broken):
        return not_showable("this layer's bytes come out the same")
    rows = bench.rows(broken, factor)
    failed = [row for row in rows if row.problems]
    output = tuple(f"{row.against}: {problem}" for row in failed for problem in row.problems)
    data = tuple(bench.problems(broken))
    noticed = bool(output or data)
    how = " and ".join(f"{what} ({found[0]})" for what, found in (("output", output), ("bytes", data)) if found)
    worst = max((row for row in rows if row.against == "exact"), key=lambda row: row.comparison.rel_l2)
    return Result(
        mutation.name,
        mutation.imitates,
        "noticed" if noticed else "missed",
        how,
        worst.comparison.rel_l2,
        worst.tolerances.over(max(worst.comparison.tokens, 1)),
        "" if noticed else "neither outputs nor bytes show it",
        output,
        data,
    )
