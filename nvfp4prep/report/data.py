"""What the page shows, as data: collected from a checkpoint, what `validate` found in it, and its block scales."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nvfp4prep import __version__
from nvfp4prep import manifest as manifests
from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.findings import Finding
from nvfp4prep.model_config import number_in
from nvfp4prep.report.history import History, history
from nvfp4prep.rules import SEVERITIES, Rule, Severity
from nvfp4prep.scales import E4M3_NAN, E4M3_SMALLEST_NORMAL_CODE, fault
from nvfp4prep.scalestats import Entry, Spread, entries, layer_entries, spread
from nvfp4prep.schema import Format, MoeLayer
from nvfp4prep.validation import Report

_MAX_CODE = 126
"""E4M3's 448."""


@dataclass(frozen=True, slots=True)
class FormatBytes:
    """Bytes stored in one format, scales and biases included; `linears` is None for what belongs to no linear."""

    label: str
    linears: int | None
    routed: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class RuleGroup:
    """The findings of one rule, worst first."""

    rule: Rule
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Severity:
        return self.findings[0].severity


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What `validate` said: the groups, worst first, and what it did not judge."""

    level: str
    counts: Mapping[Severity, int]
    groups: tuple[RuleGroup, ...]
    known: int
    judged: int
    targets: tuple[str, ...]
    stopped: str | None


@dataclass(frozen=True, slots=True)
class GemmScales:
    """Input scales of one GEMM (w13: gate and up; w2: down) of one MoE layer. `label` names the layer in plots."""

    label: str
    path: str
    gemm: str
    experts: int
    entries: tuple[Entry, ...]

    @property
    def spread(self) -> Spread:
        return spread(self.entries)

    @property
    def median(self) -> float | None:
        """The median of the usable values."""
        good = usable(self.entries)
        return statistics.median(good) if good else None


@dataclass(frozen=True, slots=True)
class Pair:
    """weight_scale_2 of one expert's gate and up."""

    expert: int | None
    gate: Entry
    up: Entry

    @property
    def problem(self) -> str | None:
        """What is wrong with one of the two, or None."""
        return problem(self.gate) or problem(self.up)

    @property
    def ratio(self) -> float | None:
        """Up over gate; None where one of the two is unusable."""
        if self.problem or self.gate.value is None or self.up.value is None:
            return None
        return self.up.value / self.gate.value


@dataclass(frozen=True, slots=True)
class LayerPairs:
    """The gate/up pairs of one MoE layer; none where gate and up share one value by the form they are stored in."""

    label: str
    path: str
    gated: bool
    pairs: tuple[Pair, ...]


@dataclass(frozen=True, slots=True)
class FusedScales:
    """Scales of linears outside the experts that engines fuse into one GEMM."""

    label: str
    layer: int | None
    inputs: tuple[Entry, ...]
    globals: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Counts of the E4M3 codes among all NVFP4 block scales."""

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def nan(self) -> int:
        return self.counts[E4M3_NAN] + self.counts[E4M3_NAN | 0x80]

    @property
    def negative(self) -> int:
        return sum(self.counts[0x81 : E4M3_NAN | 0x80])

    @property
    def negative_zero(self) -> int:
        return self.counts[0x80]

    @property
    def zero(self) -> int:
        return self.counts[0]

    @property
    def subnormal(self) -> int:
        return sum(self.counts[1:E4M3_SMALLEST_NORMAL_CODE])

    @property
    def largest(self) -> int:
        return self.counts[_MAX_CODE]


@dataclass(frozen=True)
class PageData:
    """Everything on the page.

    `inputs` leaves out GEMMs that need no input scale (W4A16); `quantized_moe` tells whether there are NVFP4 experts at
    all; `blocks` is None when block scales were not read.
    """

    name: str
    revision: str | None
    version: str
    facts: tuple[tuple[str, str], ...]
    formats: tuple[FormatBytes, ...]
    nbytes: int
    verdicts: Verdicts
    moe_layers: int
    quantized_moe: int
    inputs: tuple[GemmScales, ...]
    pairs: tuple[LayerPairs, ...]
    fused: tuple[FusedScales, ...]
    blocks: BlockScales | None
    history: History | None


def problem(entry: Entry) -> str | None:
    """Why a scale can't be used (missing, NaN, zero ...), or None."""
    return "missing" if entry.value is None else fault(entry.value)


def usable(found: Iterable[Entry]) -> list[float]:
    """The values that can be used, in order."""
    return [entry.value for entry in found if entry.value is not None and problem(entry) is None]


def collect(checkpoint: Checkpoint, validated: Report, histogram: Sequence[int] | None) -> PageData:
    """Collect what the page shows.

    Args:
        checkpoint: as read; its scalar scales are read if they were not yet.
        validated: what `validate` found in it.
        histogram: counts of the 256 codes among all block scales, or None when they were not read.

    Raises:
        EnvironmentFault: a scale can't be read.
        ValueError: a histogram that has not 256 counts.
    """
    if histogram is not None and len(histogram) != 256:
        raise ValueError(f"a histogram has 256 counts, not {len(histogram)}")
    source, schema = checkpoint.source, checkpoint.schema
    labels = layer_labels(schema.nvfp4_layers)
    return PageData(
        source.spec,
        source.revision,
        __version__,
        tuple(_facts(checkpoint)),
        _formats(checkpoint),
        sum(source.shards.values()),
        _verdicts(validated),
        len(schema.moe_layers),
        len(schema.nvfp4_layers),
        tuple(_inputs(checkpoint, labels)),
        tuple(_pairs(moe, labels[moe.path], checkpoint.scale_values) for moe in schema.nvfp4_layers),
        tuple(_fused(checkpoint)),
        None if histogram is None else BlockScales(tuple(histogram)),
        history(checkpoint),
    )


def layer_labels(layers: Iterable[MoeLayer]) -> dict[str, str]:
    """A short name of each layer by path: its number, or the path where two have the same or none."""
    listed = list(layers)
    numbers = Counter(moe.layer for moe in listed)
    return {
        moe.path: str(moe.layer) if moe.layer is not None and numbers[moe.layer] == 1 else moe.path for moe in listed
    }


# --- the head --------------------------------------------------------------------------------------------------------


def _facts(checkpoint: Checkpoint) -> Iterable[tuple[str, str]]:
    source, quant, config, manifest = checkpoint.source, checkpoint.quant, checkpoint.config, checkpoint.manifest
    facts = manifests.geometry(checkpoint.schema, config)
    yield "architecture", str(facts["architecture"] or facts["model_type"] or "not named by config.json")
    if quant is None:
        yield "quantisation", "no ModelOpt quantisation config"
    else:
        producer = quant.producer or {}
        by = f", by {producer['name']} {producer.get('version', '')}".rstrip() if producer.get("name") else ""
        yield "quantisation", f"{quant.algo}{f', KV cache {quant.kv_cache}' if quant.kv_cache else ''}{by}"
    numbered = {linear.layer for linear in checkpoint.schema.linears.values()} - {None}
    layers = number_in(config, "num_hidden_layers", "n_layer") or len(numbered)
    yield "layers", f"{layers}, {len(facts['moe_layers'])} of them MoE"
    if facts["moe_layers"]:
        top = number_in(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
        form = f", fused ({facts['fused_gate_up'] or 'gate/up order unknown'})" if _is_fused(checkpoint) else ""
        gated = "" if facts["gated"] else ", not gated"
        yield "experts", f"{facts['experts']}{f', top-{top}' if top else ''}{gated}{form}"
        yield "sizes", f"hidden {facts['hidden_size']}, expert intermediate {facts['intermediate_size']}"
    elif hidden := number_in(config, "hidden_size"):
        yield "sizes", f"hidden {hidden}"
    files = len(source.shards)
    yield "stored", f"{len(source.tensors):,} tensors in {files:,} file{'s' if files != 1 else ''}"
    yield "revision", source.revision or "a local directory"
    if manifest is not None:
        name, revision = manifest["source"].get("name"), manifest["source"].get("revision")
        yield "converted from", f"{name}{f'@{revision}' if revision else ''}"


def _is_fused(checkpoint: Checkpoint) -> bool:
    return any(moe.gate_up is not None for moe in checkpoint.schema.moe_layers)


def _formats(checkpoint: Checkpoint) -> tuple[FormatBytes, ...]:
    schema = checkpoint.schema
    routed = {linear.module for moe in schema.moe_layers for linear in (*moe.w13, *moe.w2)}
    rows = []
    for kind in Format:
        linears = list(schema.of_format(kind))
        nbytes = sum(tensor.nbytes for linear in linears for tensor in linear.params.values())
        if linears:
            label = "unquantised" if kind is Format.UNQUANTIZED else kind.value
            rows.append(FormatBytes(label, len(linears), sum(linear.module in routed for linear in linears), nbytes))
    rest = sum(tensor.nbytes for tensor in checkpoint.source.tensors.values()) - sum(row.nbytes for row in rows)
    return (*rows, FormatBytes("other tensors", None, 0, rest))


def _verdicts(validated: Report) -> Verdicts:
    found: dict[str, list[Finding]] = defaultdict(list)
    for finding in validated.findings:
        found[finding.rule].append(finding)
    groups = []
    for same in found.values():
        same.sort(key=lambda finding: SEVERITIES.index(finding.severity))
        groups.append(RuleGroup(same[0].entry, tuple(same)))
    groups.sort(key=lambda group: (SEVERITIES.index(group.worst), group.rule.id))
    return Verdicts(
        validated.level,
        {severity: validated.count(severity) for severity in SEVERITIES},
        tuple(groups),
        len(validated.known),
        len(validated.judged),
        validated.targets,
        validated.stopped,
    )


# --- scales ----------------------------------------------------------------------------------------------------------


def _inputs(checkpoint: Checkpoint, labels: Mapping[str, str]) -> Iterable[GemmScales]:
    for moe in checkpoint.schema.nvfp4_layers:
        found = layer_entries(moe, "input_scale", checkpoint.scale_values)
        for gemm, linears, scales in zip(("w13", "w2"), (moe.w13, moe.w2), found, strict=True):
            stored = any(entry.value is not None for entry in scales)
            if stored or not all(linear.module in checkpoint.weight_only for linear in linears):
                yield GemmScales(labels[moe.path], moe.path, gemm, moe.expert_count, tuple(scales))


def _pairs(moe: MoeLayer, label: str, values: Mapping[str, tuple[float, ...]]) -> LayerPairs:
    found = layer_entries(moe, "weight_scale_2", values)[0]
    if not moe.gated or not any(entry.projection == "up" for entry in found):
        return LayerPairs(label, moe.path, moe.gated, ())
    pairs = (Pair(gate.expert, gate, up) for gate, up in zip(found[::2], found[1::2], strict=True))
    return LayerPairs(label, moe.path, True, tuple(pairs))


def _fused(checkpoint: Checkpoint) -> Iterable[FusedScales]:
    values = checkpoint.scale_values
    for group in checkpoint.schema.nvfp4_groups:
        names = [member.module.rpartition(".")[2] for member in group.members]
        inputs = entries(group.members, "input_scale", values, names)
        if all(entry.value is None for entry in inputs) and all(
            member.module in checkpoint.weight_only for member in group.members
        ):
            inputs = []
        found = entries(group.members, "weight_scale_2", values, names)
        yield FusedScales(group.label, group.members[0].layer, tuple(inputs), tuple(found))
