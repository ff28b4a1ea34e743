"""Scales before a conversion, from the manifest of one of our own outputs, beside those stored now.

A manifest is a file from outside: what does not have the shape that `manifest` writes is passed over, and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.scales import fault
from nvfp4prep.scalestats import Entry, entries, layer_entries
from nvfp4prep.schema import FusionGroup, Linear, MoeLayer

UNKNOWN = "missing, NaN or inf"
"""What a raw value of null was, when the manifest does not say."""
_SMALLEST, _LARGEST = 1.4e-45, 3.5e38  # of F32
_MOST_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class Before:
    """A scale before the conversion; `problem` says what was wrong with it, if something was."""

    expert: int | None
    projection: str
    value: float | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class InputChange:
    """Input scales of one GEMM of a MoE layer (w13, w2), or of a fusion group (input), before and after."""

    where: str
    layer: int | None
    gemm: str
    before: tuple[Before, ...]
    after: tuple[Entry, ...]

    @property
    def changed(self) -> bool:
        """Whether a value is another now, or was bad."""
        bad = any(scale.problem for scale in self.before)
        return bad or {scale.value for scale in self.before} != {entry.value for entry in self.after}

    @property
    def spread(self) -> float:
        """Largest over smallest usable value before."""
        good = [scale.value for scale in self.before if scale.value is not None and scale.problem is None]
        return max(good) / min(good) if good else 1.0


@dataclass(frozen=True, slots=True)
class PairChange:
    """weight_scale_2 of one expert's gate and up, before and after; a gate without an up is one scale for both."""

    where: str
    layer: int | None
    expert: int
    before: tuple[float, float]
    after: tuple[float | None, float | None]

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def ratio(self) -> float:
        """The larger over the smaller before."""
        return max(self.before) / min(self.before)


@dataclass(frozen=True, slots=True)
class History:
    """What the first run that made this output read, against what is stored now.

    `source` is its name and revision; `passed_over` counts entries of the manifest that fit nothing stored here.
    """

    source: str
    runs: int
    inputs: tuple[InputChange, ...]
    pairs: tuple[PairChange, ...]
    passed_over: int

    @property
    def shown(self) -> History:
        """Without the kinds of scales (w13, w2, input, pairs) in which nothing changed."""
        kinds = {change.gemm for change in self.inputs if change.changed}
        pairs = self.pairs if any(pair.changed for pair in self.pairs) else ()
        return replace(self, inputs=tuple(change for change in self.inputs if change.gemm in kinds), pairs=pairs)


def history(checkpoint: Checkpoint) -> History | None:
    """The scales before and after, or None for a checkpoint that is no output of nvfp4prep."""
    manifest = checkpoint.manifest
    if manifest is None:
        return None
    source, runs = manifest["source"], manifest["runs"]
    first = runs[0] if runs and isinstance(runs[0], Mapping) else {}
    name, revision = source.get("name"), source.get("revision")
    label = (name if isinstance(name, str) else "unknown") + (f"@{revision}" if isinstance(revision, str) else "")
    moe_layers = {moe.path: moe for moe in checkpoint.schema.nvfp4_layers}
    groups = {group.label: group for group in checkpoint.schema.nvfp4_groups}
    values = checkpoint.scale_values
    inputs: list[InputChange] = []
    pairs: list[PairChange] = []
    passed_over = 0
    for entry in _entries(first, "input_scales"):
        change = _input_change(entry, moe_layers, groups, values)
        if change is not None:
            inputs.append(change)
        elif str(entry.get("where")) in {*moe_layers, *groups}:
            passed_over += 1
    for entry in _entries(first, "weight_scale_2"):
        moe = moe_layers.get(str(entry.get("where")))
        if moe is None:
            continue
        found = _pair_changes(entry, moe, values)
        if found is None:
            passed_over += 1
        else:
            pairs += found
    return History(label, len(runs), tuple(inputs), tuple(pairs), passed_over)


def _entries(run: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    listed = run.get(key)
    return [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []


def _float(value: Any) -> float | None:
    """A number of the manifest that an F32 scale can be; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if value == 0 or _SMALLEST <= abs(value) <= _LARGEST else None


# --- input scales ----------------------------------------------------------------------------------------------------


def _input_change(
    entry: Mapping[str, Any],
    moe_layers: Mapping[str, MoeLayer],
    groups: Mapping[str, FusionGroup],
    values: Mapping[str, tuple[float, ...]],
) -> InputChange | None:
    where, gemm = str(entry.get("where")), str(entry.get("gemm"))
    moe, group = moe_layers.get(where), groups.get(where)
    if moe is not None and gemm in ("w13", "w2"):
        after = layer_entries(moe, "input_scale", values)[gemm == "w2"]
        linears, layer = (moe.w2 if gemm == "w2" else moe.w13), moe.layer
    elif group is not None and gemm == "input":
        names = [member.module.rpartition(".")[2] for member in group.members]
        after = entries(group.members, "input_scale", values, names)
        linears, layer = group.members, group.members[0].layer
    else:
        return None
    raw = _raw(entry)
    owners = _owners(linears, after, len(raw)) if raw else None
    if raw is None or owners is None:
        return None
    imputed = entry.get("imputed")
    problems = imputed if isinstance(imputed, Mapping) else {}
    before = [
        Before(expert, projection, value, _problem(value, problems.get(label)))
        for value, (expert, projection, label) in zip(raw, owners, strict=True)
    ]
    return InputChange(where, layer, gemm, tuple(before), tuple(after))


def _raw(entry: Mapping[str, Any]) -> Sequence[float | None] | None:
    """The values before; where they were all equal, the manifest holds one and their count."""
    raw, count = entry.get("raw"), entry.get("count")
    top = _float(entry.get("max"))
    if raw is None and top is not None and isinstance(count, int) and 0 < count <= _MOST_VALUES:
        return [top] * count
    if not isinstance(raw, list) or any(value is not None and _float(value) is None for value in raw):
        return None
    return [_float(value) for value in raw]


def _owners(linears: Sequence[Linear], after: Sequence[Entry], count: int) -> list[tuple[int | None, str, str]] | None:
    """(expert, projection, label in `imputed`) of each of `count` values before, or None when they don't fit."""
    first = linears[0]
    if first.experts is None:
        if count != len(linears):
            return None
        return [
            (entry.expert, entry.projection, _label(linear, entry.expert))
            for linear, entry in zip(linears, after, strict=True)
        ]
    halves = count == 2 * first.experts
    if not halves and count not in (1, first.experts):
        return None
    projection = after[0].projection if not halves else ""
    owners = []
    for index in range(count):
        expert = None if count == 1 < first.experts else index * first.experts // count
        owners.append((expert, ("gate", "up")[index % 2] if halves else projection, _label(first, expert)))
    return owners


def _label(linear: Linear, expert: int | None) -> str:
    names = linear.module.split(".")
    projection = names[-2] if names[-1].isdecimal() and len(names) > 1 else names[-1]
    return projection if expert is None else f"{expert}.{projection}"


def _problem(value: float | None, told: Any) -> str | None:
    if value is not None:
        return fault(value)
    return told if isinstance(told, str) else UNKNOWN


# --- gate and up -----------------------------------------------------------------------------------------------------


def _pair_changes(
    entry: Mapping[str, Any], moe: MoeLayer, values: Mapping[str, tuple[float, ...]]
) -> list[PairChange] | None:
    before = entry.get("before", {})
    if not isinstance(before, Mapping):
        return None
    now: dict[int, dict[str, float | None]] = {}
    for stored in layer_entries(moe, "weight_scale_2", values)[0]:
        experts = range(moe.expert_count) if stored.expert is None else (stored.expert,)
        for expert in experts:
            now.setdefault(expert, {})[stored.projection] = stored.value
    found = []
    for expert, scales in now.items():
        one = scales.get("gate/up")
        after = (scales.get("gate", one), scales.get("up", one))
        pair = before.get(str(expert))
        if pair is None:
            known = next((value for value in after if value is not None), None)
            old = None if known is None else (known, known)
        else:
            old = _pair(pair)
            if old is None:
                return None
        if old is not None:
            found.append(PairChange(moe.path, moe.layer, expert, old, after))
    return found


def _pair(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list) or len(value) != 2:
        return None
    gate, up = map(_float, value)
    return None if gate is None or up is None or gate <= 0 or up <= 0 else (gate, up)
