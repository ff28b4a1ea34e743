"""Statistics of stored scales, as they are: spreads, pairs and bad values by MoE layer and by fusion group."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nvfp4prep.scales import fault
from nvfp4prep.schema import SCALAR_PARAMS, FusionGroup, Linear, MoeLayer

ScaleValues = Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One scale: whose it is, and its value; None where nothing is stored. `projection` is gate, up, down or a name."""

    expert: int | None
    projection: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Spread:
    """Scales that one GEMM shares or should share. `low` and `high` are of the usable values, None without any.

    `faults` maps a kind (missing, NaN, inf, zero, ...) to how often it occurs and the expert ids where it does;
    `top` is the expert of the maximum.
    """

    count: int
    stored: int
    low: float | None
    high: float | None
    top: int | None
    faults: Mapping[str, tuple[int, tuple[int, ...]]]

    @property
    def ratio(self) -> float:
        return 1.0 if self.low is None or self.high is None else self.high / self.low

    @property
    def faulty(self) -> int:
        return sum(count for count, _ in self.faults.values())


@dataclass(frozen=True, slots=True)
class Pairs:
    """weight_scale_2 of gate/up pairs: how many, which differ (by expert id), and how far each."""

    total: int
    differing: tuple[int, ...]
    ratios: tuple[float, ...]

    @property
    def max_ratio(self) -> float:
        return max(self.ratios, default=1.0)

    @property
    def worst(self) -> int | None:
        """The expert with the largest ratio."""
        return max(zip(self.ratios, self.differing, strict=True))[1] if self.differing else None


@dataclass(frozen=True, slots=True)
class LayerScales:
    """The scales of one NVFP4 MoE layer."""

    moe: MoeLayer
    w13: Spread
    w2: Spread
    gate_up: Pairs | None
    gate_up_inputs_differ: tuple[int, ...]
    global_faults: Mapping[str, tuple[int, tuple[int, ...]]]
    dtypes: frozenset[str]
    shapes: frozenset[tuple[int, ...]]
    mixed_dtypes: tuple[int, ...]

    @property
    def faulty(self) -> int:
        return self.w13.faulty + self.w2.faulty + sum(count for count, _ in self.global_faults.values())


@dataclass(frozen=True, slots=True)
class GroupScales:
    """The scales of one fusion group outside the experts; `kind` is the members' names, q_proj/k_proj/v_proj."""

    group: FusionGroup
    kind: str
    input: Spread
    globals: Spread


def entries(linears: Iterable[Linear], param: str, values: ScaleValues, names: Sequence[str]) -> list[Entry]:
    """Every value of a scale over linears, in order; a linear without it gives one entry of None.

    Args:
        linears: of one GEMM.
        param: weight_scale_2 or input_scale.
        values: by tensor name.
        names: projection of each linear, repeated over experts; a fused tensor's halves alternate through them.
    """
    found = []
    for position, linear in enumerate(linears):
        projection = names[position % len(names)]
        tensor = linear.params.get(param)
        if tensor is None:
            found.append(Entry(linear.expert, projection, None))
            continue
        stored = values[tensor.name]
        if linear.experts is None:
            found.append(Entry(linear.expert, projection, stored[0]))
            continue
        halves = len(stored) == 2 * linear.experts
        for index, value in enumerate(stored):
            owner = None if len(stored) == 1 < linear.experts else index * linear.experts // len(stored)
            found.append(Entry(owner, ("gate", "up")[index % 2] if halves else projection, value))
    return found


def layer_entries(moe: MoeLayer, param: str, values: ScaleValues) -> tuple[list[Entry], list[Entry]]:
    """(w13, w2) entries of a MoE layer."""
    names = ("gate/up",) if moe.gate_up else (("gate", "up") if moe.gated else ("up",))
    return entries(moe.w13, param, values, names), entries(moe.w2, param, values, ("down",))


def faults_of(found: Iterable[Entry]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Bad entries by kind: how many, and the expert ids."""
    ids: dict[str, list[int | None]] = defaultdict(list)
    for entry in found:
        problem = "missing" if entry.value is None else fault(entry.value)
        if problem:
            ids[problem].append(entry.expert)
    return {
        kind: (len(owners), tuple(sorted({owner for owner in owners if owner is not None})))
        for kind, owners in sorted(ids.items())
    }


def spread(found: Sequence[Entry]) -> Spread:
    """The spread of scales, bad ones left out of minimum and maximum."""
    good = [entry for entry in found if entry.value is not None and fault(entry.value) is None]
    values = [entry.value for entry in good if entry.value is not None]
    high = max(values, default=None)
    top = next((entry.expert for entry in good if entry.value == high), None)
    stored = sum(entry.value is not None for entry in found)
    return Spread(len(found), stored, min(values, default=None), high, top, faults_of(found))


def times(ratio: float) -> str:
    """A ratio for a person: 1.53x, 1,060x."""
    return f"{ratio:.3g}x" if ratio < 1000 else f"{ratio:,.0f}x"


def is_power_of_two(ratio: float) -> bool:
    """Whether scaling by `ratio` only moves exponents."""
    return math.frexp(ratio)[0] == 0.5


def layer_scales(layers: Iterable[MoeLayer], values: ScaleValues) -> tuple[LayerScales, ...]:
    """Statistics of MoE layers with 4-bit experts."""
    return tuple(_layer(moe, values) for moe in layers)


def group_scales(groups: Iterable[FusionGroup], values: ScaleValues) -> tuple[GroupScales, ...]:
    """Statistics of fusion groups."""
    found = []
    for group in groups:
        names = [member.module.rpartition(".")[2] for member in group.members]
        inputs = entries(group.members, "input_scale", values, names)
        globals_ = entries(group.members, "weight_scale_2", values, names)
        found.append(GroupScales(group, "/".join(names), spread(inputs), spread(globals_)))
    return tuple(found)


def _layer(moe: MoeLayer, values: ScaleValues) -> LayerScales:
    in13, in2 = layer_entries(moe, "input_scale", values)
    out13, out2 = layer_entries(moe, "weight_scale_2", values)
    scales = [
        linear.params[param] for linear in (*moe.w13, *moe.w2) for param in SCALAR_PARAMS if param in linear.params
    ]
    pairs = _pairs(moe, out13)
    return LayerScales(
        moe,
        spread(in13),
        spread(in2),
        pairs,
        _differing(moe, in13)[0],
        faults_of([*out13, *out2]),
        frozenset(tensor.dtype for tensor in scales),
        frozenset(tensor.shape for tensor in scales),
        tuple(e.id for e in moe.experts if e.gate and _dtypes(e.gate) != _dtypes(e.up)),
    )


def _dtypes(linear: Linear) -> list[str | None]:
    return [linear.params[param].dtype if param in linear.params else None for param in SCALAR_PARAMS]


def _pairs(moe: MoeLayer, found: Sequence[Entry]) -> Pairs | None:
    if not moe.gated:
        return None
    total = len(moe.experts) or sum(entry.projection == "gate" for entry in found)
    return Pairs(total, *_differing(moe, found))


def _differing(moe: MoeLayer, found: Sequence[Entry]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """(expert ids whose gate and up differ, their ratios), of usable values only."""
    if not moe.gated or not any(entry.projection == "up" for entry in found):
        return (), ()
    ids, ratios = [], []
    for gate, up in zip(found[::2], found[1::2], strict=True):
        a, b = gate.value, up.value
        if a is None or b is None or a == b or fault(a) or fault(b) or gate.expert is None:
            continue
        ids.append(gate.expert)
        ratios.append(max(a, b) / min(a, b))
    return tuple(ids), tuple(ratios)
