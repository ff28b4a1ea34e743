"""What `inspect` shows, as data: what is stored, its scales, the engines' verdicts, and what `convert` would change."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nvfp4prep import convert as conversion
from nvfp4prep import manifest as manifests
from nvfp4prep import quant_config as qc
from nvfp4prep.checkpoint import Checkpoint, peek_checkpoint
from nvfp4prep.convert import Prepared
from nvfp4prep.engines import TITLES, Facts, Verdict, verdicts
from nvfp4prep.errors import UsageFault
from nvfp4prep.findings import Finding, errors, ranges
from nvfp4prep.header import TensorInfo
from nvfp4prep.model_config import expert_count, number_in
from nvfp4prep.options import Options, ask
from nvfp4prep.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from nvfp4prep.scales import Resolution, changes, fault, resolve
from nvfp4prep.scalestats import (
    Entry,
    GroupScales,
    LayerScales,
    Pairs,
    Spread,
    entries,
    is_power_of_two,
    layer_entries,
    times,
)
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear, MoeLayer, Schema, build_schema
from nvfp4prep.source import read_json
from nvfp4prep.survey import read_each


@dataclass(frozen=True, slots=True)
class FormatRow:
    """Linears of one format: how many, of routed experts, and their bytes with all sidecars."""

    format: Format
    linears: int
    routed: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Counts of what is stored against what the configuration says."""

    formats: tuple[FormatRow, ...]
    other_tensors: int
    other_bytes: int
    excluded: int
    not_excluded: int
    unclassified: int
    missing_input_scales: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """What `convert` with its defaults would do.

    `refused` are the errors that stop it; `remedy` is the option with which it would not be, if there is one. `changes`
    are what it would change, in words; `after` are the engines' verdicts on its output.
    """

    refused: tuple[Finding, ...]
    remedy: str | None
    changes: tuple[str, ...]
    after: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True)
class Detail:
    """One layer: its MoE block's scales by expert, and its other quantised linears."""

    layer: int
    experts: tuple[tuple[int | None, Mapping[str, float | None], Mapping[str, float | None]], ...]
    linears: tuple[Linear, ...]
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Inspection:
    """Everything `inspect` shows."""

    checkpoint: Checkpoint
    geometry: Mapping[str, Any]
    inventory: Inventory
    layers: tuple[LayerScales, ...]
    groups: tuple[GroupScales, ...]
    verdicts: tuple[Verdict, ...]
    outlook: Outlook
    detail: Detail | None


def inspect(src: str, layer: int | None) -> Inspection:
    """Inspect a checkpoint.

    Args:
        src: a directory or Hub repo.
        layer: also show this layer expert by expert.

    Raises:
        InputRefused: it can't be read as a checkpoint at all.
        UsageFault: there is no such layer.
        EnvironmentFault: I/O.
    """
    checkpoint = peek_checkpoint(src)
    values = checkpoint.scale_values
    nested = read_json(checkpoint.source.root, qc.HF_QUANT_CONFIG)
    facts = Facts(checkpoint, values, nested, _pre_quant_digests(checkpoint))
    return Inspection(
        checkpoint,
        _geometry(checkpoint),
        _inventory(checkpoint),
        facts.layers,
        facts.groups,
        verdicts(facts),
        _outlook(facts),
        None if layer is None else _detail(checkpoint.schema, values, layer),
    )


def other_targets(checkpoint: Checkpoint) -> str | None:
    """What else than `hf` the experts may be converted to, in a sentence; None where there are no quantised ones."""
    layers = [moe for moe in checkpoint.schema.moe_layers if moe.format in (Format.NVFP4, Format.INT4)]
    linears = [linear for moe in layers for linear in (*moe.w13, *moe.w2)]
    if not linears:
        return None
    fold = " and --pre-quant-scale fold" if any("pre_quant_scale" in linear.params for linear in linears) else ""
    if any(moe.format is Format.INT4 for moe in layers):
        return (
            f"vLLM and SGLang read ModelOpt's int4 in another form: --target compressed-tensors{fold}; or packed for a "
            "kernel: --target vllm-marlin, and those in docs/int4.md."
        )
    if fold:
        return (
            f"vLLM and SGLang leave out the experts' pre_quant_scale: --target compressed-tensors{fold}, or a packed "
            "target with it, serves them right."
        )
    if any(linear.module in checkpoint.weight_only for linear in linears):
        return "Weight-only experts: --target vllm-marlin packs them for Marlin kernels, the only ones that fit."
    return "For Blackwell (B200, B300), --target flashinfer-trtllm packs the experts for its kernel."


# --- what is stored --------------------------------------------------------------------------------------------------


def _geometry(checkpoint: Checkpoint) -> dict[str, Any]:
    config = checkpoint.config
    layers = {linear.layer for linear in checkpoint.schema.linears.values()} - {None}
    facts = manifests.geometry(checkpoint.schema, config)
    return {
        "layers": number_in(config, "num_hidden_layers", "n_layer") or len(layers),
        "top_k": number_in(config, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k"),
        "experts": expert_count(config),
        "hidden_size": number_in(config, "hidden_size"),
        **facts,
    }


def _inventory(checkpoint: Checkpoint) -> Inventory:
    schema, source = checkpoint.schema, checkpoint.source
    routed = {linear.module for moe in schema.moe_layers for linear in (*moe.w13, *moe.w2)}
    rows = []
    counted = held = 0
    for kind in Format:
        linears = list(schema.of_format(kind))
        nbytes = sum(tensor.nbytes for linear in linears for tensor in linear.params.values())
        counted += sum(len(linear.params) for linear in linears)
        held += nbytes
        if linears:
            rows.append(FormatRow(kind, len(linears), sum(linear.module in routed for linear in linears), nbytes))
    not_excluded = _not_excluded(checkpoint)
    missing = (
        linear
        for linear in schema.of_format(Format.NVFP4)
        if "input_scale" not in linear.params and linear.module not in checkpoint.weight_only
    )
    return Inventory(
        tuple(rows),
        len(source.tensors) - counted,
        sum(tensor.nbytes for tensor in source.tensors.values()) - held,
        sum(1 for _ in schema.of_format(Format.UNQUANTIZED)) - not_excluded,
        not_excluded,
        sum(1 for _ in schema.of_format(Format.UNCLASSIFIED)),
        sum(1 for _ in missing),
    )


def _not_excluded(checkpoint: Checkpoint) -> int:
    """Unquantised linears that the exclude list does not name."""
    stored = {linear.module for linear in checkpoint.schema.of_format(Format.UNQUANTIZED)}
    if checkpoint.exclude is None:
        return len(stored)
    return len(stored & set(checkpoint.exclude.added))


def _pre_quant_digests(checkpoint: Checkpoint) -> dict[str, bytes]:
    """A digest of each w13 pre_quant_scale, by tensor name; equal digests are equal scales."""
    tensors = [
        linear.params["pre_quant_scale"]
        for moe in checkpoint.schema.moe_layers
        for linear in moe.w13
        if "pre_quant_scale" in linear.params
    ]
    return read_each(checkpoint.source, tensors, lambda _, raw: hashlib.blake2b(raw, digest_size=16).digest())


def _detail(schema: Schema, values: Mapping[str, tuple[float, ...]], layer: int) -> Detail:
    numbers = {linear.layer for linear in schema.linears.values() if linear.layer is not None}
    if layer not in numbers:
        raise UsageFault(f"no layer {layer}; the layers are {ranges(numbers) or 'not numbered'}")
    moe = next((m for m in schema.nvfp4_layers if m.layer == layer), None)
    routed = {linear.module for linear in (*moe.w13, *moe.w2)} if moe else set()
    others = tuple(
        linear for linear in schema.linears.values() if linear.layer == layer and linear.module not in routed
    )
    return Detail(layer, tuple(_by_expert(moe, values)) if moe else (), others, values)


def _by_expert(
    moe: MoeLayer, values: Mapping[str, tuple[float, ...]]
) -> Iterable[tuple[int | None, dict[str, float | None], dict[str, float | None]]]:
    tables: dict[int | None, tuple[dict[str, float | None], dict[str, float | None]]] = {}
    for position, param in enumerate(("input_scale", "weight_scale_2")):
        for found in layer_entries(moe, param, values):
            for entry in found:
                tables.setdefault(entry.expert, ({}, {}))[position][entry.projection] = entry.value
    for expert in sorted(tables, key=lambda expert: -1 if expert is None else expert):
        yield expert, *tables[expert]


# --- what convert would do -------------------------------------------------------------------------------------------


def outlook_of(prepared: Prepared) -> tuple[Verdict, ...]:
    """What engines do with the output of a decided `hf` conversion."""
    checkpoint = prepared.checkpoint
    nested = read_json(checkpoint.source.root, qc.HF_QUANT_CONFIG)
    facts = Facts(checkpoint, prepared.resolution.values, nested, _pre_quant_digests(checkpoint))
    outputs = {tensor.name: tensor for tensor in prepared.plan.outputs.values()}
    return verdicts(_converted(facts, outputs, prepared.resolution, prepared.quant))


def _outlook(facts: Facts) -> Outlook:
    checkpoint = facts.checkpoint
    refused = tuple(errors(conversion.findings_of(checkpoint)))
    if refused or checkpoint.quant is None or checkpoint.exclude is None:
        return Outlook(refused, None, (), ())
    policy = ask(checkpoint, Options()).policy
    resolution = resolve(checkpoint.schema, facts.values, checkpoint.weight_only, policy)
    remedy = None
    if errors(resolution.findings):
        refused = tuple(errors(resolution.findings))
        policy = replace(policy, impute="layer-max")
        resolution = resolve(checkpoint.schema, facts.values, checkpoint.weight_only, policy)
        if errors(resolution.findings):
            return Outlook(refused, None, (), ())
        remedy = "--impute layer-max"
    source = checkpoint.source
    plan = make_plan(
        source.tensors,
        source.metadata,
        checkpoint.schema,
        policy,
        checkpoint.weight_only,
        DEFAULT_SHARD_BYTES,
    )
    quant = qc.rewrite(checkpoint.schema, checkpoint.quant, checkpoint.exclude)
    after = verdicts(_converted(facts, plan.outputs, resolution, quant))
    return Outlook(refused, remedy, tuple(_changes(facts, plan, resolution, quant)), after)


def _converted(facts: Facts, outputs: Mapping[str, TensorInfo], resolution: Resolution, quant: qc.QuantConfig) -> Facts:
    """The facts of the output, without writing it."""
    checkpoint = facts.checkpoint
    config = qc.rewritten_config(checkpoint.config, qc.quantization_config(quant))
    nested = qc.hf_quant_config(quant)
    schema = build_schema(outputs, config)
    read, findings = qc.read_quant_config(config, nested)
    assert read is not None
    return replace(
        facts,
        checkpoint=replace(checkpoint, config=config, schema=schema, quant=read, findings=tuple(findings)),
        values=resolution.values,
        nested=nested,
    )


def _changes(facts: Facts, plan: Plan, resolution: Resolution, quant: qc.QuantConfig) -> Iterable[str]:
    checkpoint = facts.checkpoint
    exclude, source = checkpoint.exclude, checkpoint.source
    assert exclude is not None and checkpoint.quant is not None
    normalised = sum(map(changes, resolution.input_scales))
    if normalised:
        widest = max(report.spread for report in resolution.input_scales)
        total = len(resolution.input_scales)
        where = f"{normalised} of {total} GEMMs or groups"
        yield f"input_scale of {where} set to its maximum (up to {times(widest)} apart)"
    if plan.imputed:
        yield f"{len(plan.imputed)} missing input_scale added"
    bad = sum(report.imputed for report in resolution.input_scales) - len(plan.imputed)
    if bad > 0:
        yield f"{bad} unusable input_scale replaced"
    yield from _unified(resolution)
    widened = [t.dtype for name, t in source.tensors.items() if t.dtype != plan.outputs[name].dtype]
    if widened:
        yield f"{len(widened)} scales widened from {' and '.join(sorted(set(widened)))} to F32"
    if len(plan.shards) != len(source.shards):
        yield f"{len(source.shards)} files become {len(plan.shards)}"
    reshaped = sum(tensor.shape != plan.outputs[name].shape for name, tensor in source.tensors.items())
    if reshaped:
        yield f"{reshaped} scales reshaped to their canonical shape"
    yield from _config_changes(facts, quant)


def _unified(resolution: Resolution) -> Iterable[str]:
    reports = [report for report in resolution.global_scales if report.unified]
    pairs = [values for report in reports for values in report.pairs.values()]
    if pairs:
        exact = sum(all(is_power_of_two(max(values) / value) for value in values) for values in pairs)
        worst = max(report.max_ratio for report in reports)
        rounded = f"of {len(pairs) - exact:,} rounded to E4M3" if exact < len(pairs) else "scaled by powers of two"
        yield f"{len(pairs):,} groups of unequal weight_scale_2 (up to {times(worst)}) unified, block scales {rounded}"


def _config_changes(facts: Facts, quant: qc.QuantConfig) -> Iterable[str]:
    checkpoint = facts.checkpoint
    exclude = checkpoint.exclude
    assert exclude is not None and checkpoint.quant is not None
    dropped = [
        f"{len(entries)} {what}"
        for entries, what in (
            (exclude.corrupted, "corrupted"),
            (exclude.unmatched, "unmatched"),
            (exclude.contradicted, "contradicted by what is stored"),
        )
        if entries
    ]
    if dropped:
        yield f"exclude list: entries dropped: {', '.join(dropped)}"
    if exclude.added:
        yield f"exclude list: {len(exclude.added)} unquantised modules added"
    old = checkpoint.quant
    if not dropped and not exclude.added and set(quant.exclude) != set(old.exclude):
        yield f"exclude list: {len(old.exclude)} entries written as {len(quant.exclude)} explicit names"
    if quant.algo != old.algo:
        yield f"quant_algo {old.algo} becomes {quant.algo}"
    if quant.layers is not None and quant.layers != old.layers:
        yield f"quantized_layers: {len(old.layers or {})} entries become {len(quant.layers)}, one for each linear"
    if facts.flat is None or facts.deep is None:
        yield f"{qc.CONFIG if facts.flat is None else qc.HF_QUANT_CONFIG}: quantisation config added"
    if any(finding.rule == "configs-disagree" for finding in checkpoint.findings):
        yield "config.json and hf_quant_config.json made equal"


# --- as JSON ---------------------------------------------------------------------------------------------------------


def to_json(found: Inspection) -> dict[str, Any]:
    """The inspection as JSON; NaN and infinities become strings."""
    checkpoint = found.checkpoint
    quant = checkpoint.quant
    inventory = asdict(found.inventory) | {"formats": [_row_json(row) for row in found.inventory.formats]}
    entry: dict[str, Any] = {
        "source": _source_json(checkpoint),
        "model": dict(found.geometry) | {"quant_algo": quant.algo if quant else None},
        "inventory": inventory,
        "moe_layers": [_layer_json(layer) for layer in found.layers],
        "fusion_groups": [_group_json(group) for group in found.groups],
        "engines": [_verdict_json(verdict) for verdict in found.verdicts],
        "convert": _outlook_json(found.outlook),
        "findings": [finding.to_json() for finding in checkpoint.findings],
    }
    if found.detail is not None:
        entry["layer"] = _detail_json(found.detail)
    return entry


def _source_json(checkpoint: Checkpoint) -> dict[str, Any]:
    source = checkpoint.source
    return {
        "name": source.spec,
        "revision": source.revision,
        "files": len(source.shards),
        "tensors": len(source.tensors),
        "bytes": sum(source.shards.values()),
        "converted_by_nvfp4prep": checkpoint.manifest is not None,
    }


def _row_json(row: FormatRow) -> dict[str, Any]:
    return {"format": row.format.value, "linears": row.linears, "routed": row.routed, "bytes": row.nbytes}


def json_number(value: float | None) -> float | str | None:
    """A float that JSON can hold; NaN and infinities as strings."""
    return value if value is None or math.isfinite(value) else str(value)


def _spread_json(spread: Spread) -> dict[str, Any]:
    return {
        "count": spread.count,
        "stored": spread.stored,
        "min": spread.low,
        "max": spread.high,
        "ratio": spread.ratio,
        "expert_of_max": spread.top,
        "bad": _faults_json(spread.faults),
    }


def _faults_json(faults: Mapping[str, tuple[int, tuple[int, ...]]]) -> dict[str, Any]:
    return {kind: {"count": count, "experts": list(ids)} for kind, (count, ids) in faults.items()}


def _pairs_json(pairs: Pairs | None) -> dict[str, Any] | None:
    if pairs is None:
        return None
    return {
        "pairs": pairs.total,
        "differing": len(pairs.differing),
        "max_ratio": pairs.max_ratio,
        "experts": list(pairs.differing),
    }


def _layer_json(layer: LayerScales) -> dict[str, Any]:
    return {
        "path": layer.moe.path,
        "layer": layer.moe.layer,
        "experts": layer.moe.expert_count,
        "w13_input_scale": _spread_json(layer.w13),
        "w2_input_scale": _spread_json(layer.w2),
        "gate_up_weight_scale_2": _pairs_json(layer.gate_up),
        "bad_weight_scale_2": _faults_json(layer.global_faults),
    }


def _group_json(group: GroupScales) -> dict[str, Any]:
    return {
        "members": [member.module for member in group.group.members],
        "input_scale": _spread_json(group.input),
        "weight_scale_2": _spread_json(group.globals),
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    reasons = [
        {"id": reason.id, "verdict": reason.outcome, "sure": reason.sure, "text": reason.text}
        for reason in verdict.reasons
    ]
    return {"engine": TITLES[verdict.engine], "verdict": verdict.outcome, "sure": verdict.sure, "reasons": reasons}


def _outlook_json(outlook: Outlook) -> dict[str, Any]:
    return {
        "refused": [finding.to_json() for finding in outlook.refused],
        "remedy": outlook.remedy,
        "changes": list(outlook.changes),
        "engines_after": [_verdict_json(verdict) for verdict in outlook.after],
    }


def linear_scales(detail: Detail, linear: Linear) -> Mapping[str, list[Entry]]:
    """A linear's input_scale and weight_scale_2, empty where it has none."""
    return {
        param: entries([linear], param, detail.values, (linear.module.rpartition(".")[2],))
        if param in linear.params and linear.params[param].name in detail.values
        else []
        for param in SCALAR_PARAMS
    }


def _detail_json(detail: Detail) -> dict[str, Any]:
    experts = [
        {
            "expert": expert,
            "input_scale": {key: json_number(value) for key, value in inputs.items()},
            "weight_scale_2": {key: json_number(value) for key, value in globals_.items()},
            "bad": sorted({fault(value) or "" if value is not None else "missing" for value in inputs.values()} - {""}),
        }
        for expert, inputs, globals_ in detail.experts
    ]
    linears = [
        {
            "module": linear.module,
            "format": linear.format.value,
            **{
                param: [json_number(entry.value) for entry in found]
                for param, found in linear_scales(detail, linear).items()
            },
        }
        for linear in detail.linears
    ]
    return {"layer": detail.layer, "experts": experts, "linears": linears}


def plan_json(prepared: Prepared) -> dict[str, Any]:
    """A decided conversion as JSON, for `convert --json` and `--dry-run`."""
    plan, resolution, quant = prepared.plan, prepared.resolution, prepared.quant
    formats = Counter(linear.format.value for linear in prepared.checkpoint.schema.linears.values())
    return {
        "target": prepared.options.target,
        "layout": None if prepared.job.pack is None else prepared.job.pack.target.layout_id,
        "options": manifests.options_entry(prepared.options.target, prepared.policy, prepared.max_shard_bytes),
        "source": _source_json(prepared.checkpoint),
        "outputs": [
            {"file": shard.file, "bytes": shard.nbytes, "tensors": len(shard.tensors)} for shard in plan.shards
        ],
        "tensors": len(plan.outputs),
        "bytes": plan.nbytes,
        "disk_needed": prepared.bytes_needed,
        "linears": dict(formats),
        "imputed": list(plan.imputed),
        "input_scales": [manifests.input_scale_entry(report) for report in resolution.input_scales],
        "weight_scale_2": [
            {key: value for key, value in manifests.global_scale_entry(report, {}).items() if key != "block_scales"}
            for report in resolution.global_scales
        ],
        "quant_config": {
            "quant_algo": quant.algo,
            "kv_cache_quant_algo": quant.kv_cache,
            "group_size": quant.group_size,
            "excluded": len(quant.exclude),
            "quantized_layers": None if quant.layers is None else len(quant.layers),
        },
        "findings": [finding.to_json() for finding in prepared.findings],
    }
