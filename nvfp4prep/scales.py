"""What every scale becomes: input-scale normalisation, gate/up and fusion-group unification, E4M3 rescale tables.

Pure functions on floats; the values come from `survey`, the block scales' bytes change in `blockscales`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from nvfp4prep.findings import Finding
from nvfp4prep.schema import Format, FusionGroup, GateUpOrder, Linear, MoeLayer, Schema

InputScalePolicy = Literal["layer-max", "keep"]
W13ScalePolicy = Literal["split", "unify"]
ImputePolicy = Literal["none", "layer-max", "ones"]
"""Each does what the one before does, and more. layer-max: an unusable or missing input_scale becomes the maximum of
the others. ones: a pre_quant_scale that an expert lacks and others have counts as ones."""

F32_MIN_NORMAL = 2.0**-126
WIDE_RATIO = 2.0**9
"""Between global scales to be unified: above it block scales of 0.5, and all below, become subnormal or zero."""
FATAL_RATIO = 2.0**18
"""Above it hardly a block scale survives: 448, the largest, becomes the smallest one there is."""


@dataclass(frozen=True, slots=True)
class ScalePolicy:
    """How scales are resolved; a target fixes `w13_scale` where the command line says auto."""

    input_scale: InputScalePolicy = "layer-max"
    w13_scale: W13ScalePolicy = "unify"
    impute: ImputePolicy = "none"


# --- one value ------------------------------------------------------------------------------------------------------


def fault(value: float) -> str | None:
    """Why a scale can't be used in a maximum or a reciprocal, or None when it can."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "zero"
    if value < 0:
        return "negative"
    return "subnormal" if value < F32_MIN_NORMAL else None


# --- E4M3 rescale tables --------------------------------------------------------------------------------------------


def e4m3_magnitude(code: int) -> float:
    """The value of an E4M3 code 0..126 (sign bit clear): 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    exponent, mantissa = code >> 3, code & 7
    return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)


E4M3_VALUES = tuple(e4m3_magnitude(code) for code in range(127))
"""0 to 448, ascending, so that neighbours in value are neighbours in code."""
E4M3_NAN = 0x7F
E4M3_SMALLEST_NORMAL_CODE = 8
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(E4M3_VALUES))


@lru_cache(maxsize=4096)
def rescale_table(old: float, new: float) -> bytes:
    """256 codes: entry c is the E4M3 code nearest to value(c) * old / new, ties to even. NaN codes stay, signs stay.

    Exact: `value * old` and `midpoint * new` have at most 5 + 24 significant bits, so float64 compares them exactly.

    Args:
        old: the global scale that the block scales belong to, an F32 value > 0.
        new: the global scale that they shall belong to, an F32 value >= old.

    Raises:
        ValueError: unless 0 < old <= new < inf.
    """
    if not 0 < old <= new < math.inf:
        raise ValueError(f"a rescale needs 0 < old <= new, got old {old} and new {new}")
    bounds = [midpoint * new for midpoint in _MIDPOINTS]
    table = bytearray(256)
    for code, value in enumerate(E4M3_VALUES):
        product = value * old
        nearest = bisect_left(bounds, product)  # bounds[nearest - 1] < product <= bounds[nearest]
        if nearest < len(bounds) and bounds[nearest] == product and nearest % 2:
            nearest += 1
        table[code], table[code | 0x80] = nearest, nearest | 0x80
    table[E4M3_NAN], table[E4M3_NAN | 0x80] = E4M3_NAN, E4M3_NAN | 0x80
    return bytes(table)


@dataclass(frozen=True, slots=True)
class RescaleCounts:
    """What a rescale did to block scales; `max_relative_error` is of the new code against the exact product."""

    blocks: int = 0
    inexact: int = 0
    became_subnormal: int = 0
    became_zero: int = 0
    max_relative_error: float = 0.0

    def __add__(self, other: RescaleCounts) -> RescaleCounts:
        return RescaleCounts(
            self.blocks + other.blocks,
            self.inexact + other.inexact,
            self.became_subnormal + other.became_subnormal,
            self.became_zero + other.became_zero,
            max(self.max_relative_error, other.max_relative_error),
        )


def count_rescale(histogram: Sequence[int], old: float, new: float) -> RescaleCounts:
    """Counts for block scales with `histogram[code]` codes each that went through `rescale_table(old, new)`."""
    table = rescale_table(old, new)
    inexact = subnormal = zero = 0
    worst = 0.0
    for code in (code for code, count in enumerate(histogram) if count):
        magnitude, count = code & 0x7F, histogram[code]
        if magnitude == E4M3_NAN:
            continue
        after = table[code] & 0x7F
        exact, rounded = E4M3_VALUES[magnitude] * old, E4M3_VALUES[after] * new
        if exact != rounded:
            inexact += count
            worst = max(worst, abs(rounded - exact) / exact)
        subnormal += count * (magnitude >= E4M3_SMALLEST_NORMAL_CODE and 0 < after < E4M3_SMALLEST_NORMAL_CODE)
        zero += count * (magnitude > 0 and after == 0)
    return RescaleCounts(sum(histogram), inexact, subnormal, zero, worst)


@dataclass(frozen=True, slots=True)
class Rescale:
    """How a block-scale tensor changes.

    `old[e][h]` is the global scale of expert e's half h (0 gate, 1 up; one half when `order` is None) and `new[e]` the
    shared one. A plain linear has one expert and one half.
    """

    old: tuple[tuple[float, ...], ...]
    new: tuple[float, ...]
    order: GateUpOrder | None = None


# --- resolution -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InputScaleReport:
    """Input scales of one GEMM of one MoE layer, or of one fusion group, before and after.

    `raw` are the stored values in order (None where missing), `bad` says what is wrong by member.
    `after` is the one value written, or None under `keep`.
    """

    where: str
    layer: int | None
    gemm: str
    raw: tuple[float | None, ...]
    bad: Mapping[str, str]
    imputed: int
    after: float | None

    @property
    def good(self) -> list[float]:
        return [value for value in self.raw if value is not None and fault(value) is None]

    @property
    def spread(self) -> float:
        """Largest over smallest usable value; 1 when all agree or none is usable."""
        good = self.good
        return max(good) / min(good) if good else 1.0


@dataclass(frozen=True, slots=True)
class GlobalScaleReport:
    """weight_scale_2 of the gate/up pairs of one MoE layer, or of one fusion group.

    `pairs` are the stored values that differ, by expert id or member name; `tensors` names the block scales to rescale.
    """

    where: str
    layer: int | None
    total: int
    pairs: Mapping[str, tuple[float, ...]]
    unified: bool
    tensors: tuple[str, ...]

    @property
    def max_ratio(self) -> float:
        return max((max(values) / min(values) for values in self.pairs.values()), default=1.0)


@dataclass(frozen=True)
class Resolution:
    """What each scale becomes.

    `values` are the F32 values of every scale tensor of the output by name, imputed ones too; `rescales` says by
    tensor name which block scales change.
    """

    values: Mapping[str, tuple[float, ...]]
    rescales: Mapping[str, Rescale]
    input_scales: tuple[InputScaleReport, ...]
    global_scales: tuple[GlobalScaleReport, ...]
    findings: tuple[Finding, ...]


@dataclass
class _Draft:
    stored: Mapping[str, tuple[float, ...]]
    policy: ScalePolicy
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rescales: dict[str, Rescale] = field(default_factory=dict)
    input_scales: list[InputScaleReport] = field(default_factory=list)
    global_scales: list[GlobalScaleReport] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def resolve(
    schema: Schema, stored: Mapping[str, tuple[float, ...]], weight_only: frozenset[str], policy: ScalePolicy
) -> Resolution:
    """Decide what each scalar scale of NVFP4 and int4 linears becomes.

    int4's weight_scale_2 (W4A8) is no factor of the weight but the FP8 scale of the dequantised one: each is kept.

    Args:
        schema: the checkpoint.
        stored: values of their weight_scale_2 and input_scale by tensor name (`survey.read_values`).
        weight_only: modules whose activations stay 16-bit (W4A16): a missing input_scale is right there.
        policy: see ScalePolicy. Fusion groups outside the experts always share one weight_scale_2, since no engine
            keeps theirs apart.

    Returns:
        A Resolution; scales that refuse the checkpoint are errors in its findings.
    """
    draft = _Draft(stored, policy)
    grouped: set[str] = set()
    for moe in schema.nvfp4_layers:
        _resolve_moe(draft, moe, weight_only)
        grouped.update(linear.module for linear in (*moe.w13, *moe.w2))
    for group in schema.fusion_groups:
        if group.format is Format.NVFP4:
            _resolve_group(draft, group, weight_only)
        else:
            _resolve_input(draft, group.members, weight_only, group.label, "input", group.members[0].layer)
            _keep_global(draft, group.members)
        grouped.update(member.module for member in group.members)
    for moe in schema.layers_of(Format.INT4):
        _resolve_input(draft, moe.w13, weight_only, moe.path, "w13", moe.layer)
        _resolve_input(draft, moe.w2, weight_only, moe.path, "w2", moe.layer)
        _keep_global(draft, (*moe.w13, *moe.w2))
        grouped.update(linear.module for linear in (*moe.w13, *moe.w2))
    for linear in (*schema.of_format(Format.NVFP4), *schema.of_format(Format.INT4)):
        if linear.module not in grouped:
            _resolve_input(draft, [linear], weight_only, linear.module, "input", linear.layer)
            _keep_global(draft, [linear])
    return Resolution(
        draft.values, draft.rescales, tuple(draft.input_scales), tuple(draft.global_scales), tuple(draft.findings)
    )


def _owner(linear: Linear, position: int, count: int) -> int | None:
    """The expert that value `position` of `count` of a scale tensor belongs to (stored expert-major), or None."""
    if linear.expert is not None or linear.experts is None or count == 1:
        return linear.expert
    return position * linear.experts // count


def _resolve_input(
    draft: _Draft, linears: Sequence[Linear], weight_only: frozenset[str], where: str, gemm: str, layer: int | None
) -> None:
    """One GEMM's input scales: filter, impute, take the maximum, and write the values and the report."""
    tensors = [linear.params.get("input_scale") for linear in linears]
    if all(tensor is None for tensor in tensors) and all(linear.module in weight_only for linear in linears):
        return
    raw: list[float | None] = []
    faults: list[_Fault] = []
    for linear, tensor in zip(linears, tensors, strict=True):
        values: Sequence[float | None] = draft.stored[tensor.name] if tensor else (None,)
        raw += values
        for position, value in enumerate(values):
            problem = "missing" if value is None else fault(value)
            if problem:
                faults.append(_Fault(problem, linear, _owner(linear, position, len(values))))
    good = [value for value in raw if value is not None and fault(value) is None]
    if faults and not (draft.policy.impute != "none" and good):
        _refuse_input(draft, faults, len(raw), bool(good), where, gemm, layer)
        return
    top = max(good)
    shared = draft.policy.input_scale == "layer-max"
    for linear, tensor in zip(linears, tensors, strict=True):
        stored = draft.stored[tensor.name] if tensor else ()
        count = math.prod(output_shape(linear, "input_scale", draft.policy))
        kept = [value if fault(value) is None else top for value in stored] or [top]
        draft.values[linear.tensor_name("input_scale")] = (top,) * count if shared else tuple(kept)
    bad = {f.label: f.problem for f in faults}
    draft.input_scales.append(
        InputScaleReport(where, layer, gemm, tuple(raw), bad, len(faults), top if shared else None)
    )
    if faults:
        listed = ", ".join(f"{count} {problem}" for problem, count in Counter(f.problem for f in faults).items())
        draft.findings.append(
            Finding(
                "input-scale-imputed",
                "warning",
                f"{where} {gemm}: {listed} input_scale replaced by the maximum of the others, {top:.6g}",
                layer=layer,
                experts=_experts(faults),
            )
        )


@dataclass(frozen=True, slots=True)
class _Fault:
    problem: str
    linear: Linear
    expert: int | None

    @property
    def label(self) -> str:
        names = self.linear.module.split(".")
        projection = names[-2] if names[-1].isdecimal() else names[-1]  # experts.gate_proj.3
        return projection if self.expert is None else f"{self.expert}.{projection}"


def _experts(faults: Iterable[_Fault]) -> tuple[int, ...]:
    return tuple(sorted({f.expert for f in faults if f.expert is not None}))


def _refuse_input(
    draft: _Draft, faults: Sequence[_Fault], total: int, some_good: bool, where: str, gemm: str, layer: int | None
) -> None:
    if some_good:
        remedy = "--impute layer-max replaces them by the maximum of the others; or calibrate again with more tokens"
    else:
        remedy = "no usable one is left to impute from; calibrate again"
    for problem, count in Counter(f.problem for f in faults).items():
        these = [f for f in faults if f.problem == problem]
        calibrated = "" if some_good else " (0 calibrated)"
        draft.findings.append(
            Finding(
                "input-scale-missing" if problem == "missing" else "input-scale-bad",
                "error",
                f"{where} {gemm}: {count} of {total} input_scale {problem}{calibrated}; {remedy}",
                these[0].linear.params["weight"].file,
                these[0].linear.tensor_name("input_scale"),
                layer,
                _experts(these),
            )
        )


def _globals(draft: _Draft, linear: Linear) -> tuple[float, ...] | None:
    """A linear's weight_scale_2 values, or None after a finding when one is unusable."""
    tensor = linear.params["weight_scale_2"]
    values = draft.stored[tensor.name]
    problems = [(position, problem) for position, value in enumerate(values) if (problem := fault(value))]
    if not problems:
        return values
    position, problem = problems[0]
    owner = _owner(linear, position, len(values))
    draft.findings.append(
        Finding(
            "global-scale-bad",
            "error",
            f"weight_scale_2 is {problem} ({values[position]}); the weight can't be dequantised, export it again",
            tensor.file,
            tensor.name,
            linear.layer,
            () if owner is None else (owner,),
        )
    )
    return None


def _keep_global(draft: _Draft, linears: Iterable[Linear]) -> None:
    """Write each linear's own weight_scale_2; int4 has one for W4A8 only."""
    for linear in (linear for linear in linears if "weight_scale_2" in linear.params):
        values = _globals(draft, linear)
        if values is not None:
            draft.values[linear.tensor_name("weight_scale_2")] = values


def _resolve_moe(draft: _Draft, moe: MoeLayer, weight_only: frozenset[str]) -> None:
    _resolve_input(draft, moe.w13, weight_only, moe.path, "w13", moe.layer)
    _resolve_input(draft, moe.w2, weight_only, moe.path, "w2", moe.layer)
    _keep_global(draft, moe.w2)
    unify = draft.policy.w13_scale == "unify"
    if moe.gate_up is not None:
        _resolve_fused_pairs(draft, moe, moe.gate_up, unify)
        return
    pairs: dict[str, tuple[float, ...]] = {}
    tensors: list[str] = []
    for expert in moe.experts:
        found = [_globals(draft, linear) for linear in expert.w13]
        values = [value[0] for value in found if value is not None]
        if len(values) < len(found):
            continue
        if len(set(values)) > 1:
            pairs[str(expert.id)] = tuple(values)
        tensors += _share(draft, expert.w13, values, unify)
    if unify:
        _check_ratios(draft, moe.path, moe.layer, moe.w13[0], pairs)
    if moe.gated:
        draft.global_scales.append(
            GlobalScaleReport(moe.path, moe.layer, len(moe.experts), pairs, unify and bool(pairs), tuple(tensors))
        )


def _share(draft: _Draft, linears: Sequence[Linear], values: Sequence[float], unify: bool) -> list[str]:
    """Write each linear's weight_scale_2, shared when `unify`; returns the block-scale tensors to rescale."""
    shared = max(values)
    rescaled = []
    for linear, value in zip(linears, values, strict=True):
        draft.values[linear.tensor_name("weight_scale_2")] = (shared if unify else value,)
        if unify and value != shared:
            name = linear.tensor_name("weight_scale")
            draft.rescales[name] = Rescale(((value,),), (shared,))
            rescaled.append(name)
    return rescaled


def _check_ratios(
    draft: _Draft, where: str, layer: int | None, first: Linear, pairs: Mapping[str, tuple[float, ...]]
) -> None:
    """A warning, or an error, where global scales to be unified lie so far apart that block scales are lost.

    `pairs` are those that differ, by expert id or, of a fusion group, member names.
    """
    ratios = {key: max(values) / min(values) for key, values in pairs.items()}
    for limit, most, severity, what in (
        (FATAL_RATIO, math.inf, "error", "unified, all block scales of the smaller would vanish; export again"),
        (WIDE_RATIO, FATAL_RATIO, "warning", "unified, many block scales of the smaller lose precision or vanish"),
    ):
        wide = {key: ratio for key, ratio in ratios.items() if limit < ratio <= most}
        if wide:
            draft.findings.append(
                Finding(
                    "global-scale-ratio",
                    severity,  # type: ignore[arg-type]
                    f"{where}: {len(wide)} sets of weight_scale_2 that engines need to be one differ by up to "
                    f"{max(wide.values()):.3g}x; {what}",
                    first.params["weight"].file,
                    first.tensor_name("weight_scale_2"),
                    layer,
                    tuple(sorted(int(key) for key in wide if key.isdecimal())),
                )
            )


def _resolve_fused_pairs(draft: _Draft, moe: MoeLayer, linear: Linear, unify: bool) -> None:
    values = _globals(draft, linear)
    if values is None:
        return
    name = linear.tensor_name("weight_scale_2")
    if linear.params["weight_scale_2"].shape != (moe.expert_count, 2):
        draft.values[name] = values
        draft.global_scales.append(GlobalScaleReport(moe.path, moe.layer, len(values), {}, False, ()))
        return
    halves = tuple(zip(values[::2], values[1::2], strict=True))
    pairs = {str(expert): pair for expert, pair in enumerate(halves) if pair[0] != pair[1]}
    if pairs and unify and moe.order is None:
        draft.findings.append(
            Finding(
                "unknown-gate-up-order",
                "error",
                "gate and up global scales differ, but config.json's model_type does not say whether the columns are "
                "halves (llama4) or interleaved (gpt_oss)",
                linear.params["weight"].file,
                name,
                moe.layer,
            )
        )
        return
    if unify:
        _check_ratios(draft, moe.path, moe.layer, linear, pairs)
    shared = tuple(max(pair) for pair in halves)
    draft.values[name] = shared if unify else values
    if pairs and unify:
        draft.rescales[linear.tensor_name("weight_scale")] = Rescale(halves, shared, moe.order)
    tensors = (linear.tensor_name("weight_scale"),) if pairs and unify else ()
    draft.global_scales.append(
        GlobalScaleReport(moe.path, moe.layer, len(halves), pairs, unify and bool(pairs), tensors)
    )


def _resolve_group(draft: _Draft, group: FusionGroup, weight_only: frozenset[str]) -> None:
    layer = group.members[0].layer
    _resolve_input(draft, group.members, weight_only, group.label, "input", layer)
    found = [_globals(draft, member) for member in group.members]
    values = [value[0] for value in found if value is not None]
    if len(values) < len(found):
        return
    differ = len(set(values)) > 1
    names = [member.module.rpartition(".")[2] for member in group.members]
    tensors = _share(draft, group.members, values, True)
    pairs = {"/".join(names): tuple(values)} if differ else {}
    _check_ratios(draft, group.label, layer, group.members[0], pairs)
    draft.global_scales.append(GlobalScaleReport(group.label, layer, 1, pairs, differ, tuple(tensors)))


def output_shape(linear: Linear, param: str, policy: ScalePolicy) -> tuple[int, ...]:
    """The canonical shape of a weight_scale_2 or input_scale in the output, from headers and policy alone.

    Per-expert and dense linears: []. Fused: [] stays, [1] (unless E = 1) becomes [], [E, 1] becomes [E], [E, 2]
    becomes [E] when unified (input_scale: normalised) and stays otherwise.
    """
    stored = linear.params[param].shape if param in linear.params else ()
    if linear.experts is None:
        return ()
    if stored == (linear.experts, 2):
        merged = policy.w13_scale == "unify" if param == "weight_scale_2" else policy.input_scale == "layer-max"
        return (linear.experts,) if merged else stored
    return (linear.experts,) if math.prod(stored) == linear.experts and stored else ()


def changes(report: InputScaleReport) -> bool:
    """Whether normalising changes any value of this group."""
    return report.after is not None and any(value != report.after for value in report.raw)
