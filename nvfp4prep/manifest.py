"""`nvfp4prep.json`: where an output came from and all that was done to it. Deterministic: no times, no local paths."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvfp4prep import __version__
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.scales import GlobalScaleReport, InputScaleReport, RescaleCounts, ScalePolicy
from nvfp4prep.schema import Schema
from nvfp4prep.source import Source, may_be_infinite, non_finite, read_json

if TYPE_CHECKING:
    from nvfp4prep.targets import Target

MANIFEST = "nvfp4prep.json"
FORMAT_VERSION = 1
NO_OUTPUTS = "its outputs are no table of files with bytes and digest"


def fingerprint(source: Source, small_files: Mapping[str, bytes]) -> str:
    """SHA-256 of a source's identity: its configs, and every tensor's name, dtype, shape and place.

    Weights' bytes are not read for it; a Hub source is pinned by its commit besides.
    """
    whole = hashlib.sha256()
    for name in sorted(small_files):
        whole.update(f"{name}\0{len(small_files[name])}\0".encode())
        whole.update(small_files[name])
    for file in sorted(source.shards):
        whole.update(f"{file}\0{source.shards[file]}\0".encode())
    for name in sorted(source.tensors):
        tensor = source.tensors[name]
        whole.update(f"{name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.file}\0{tensor.start}\0".encode())
    return f"sha256:{whole.hexdigest()}"


def read_manifest(root: Path) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The manifest of one of our own outputs, or None; a file that is no manifest is ignored with a warning."""
    try:
        manifest = read_json(root, MANIFEST)
    except InputRefused as refused:
        return None, [Finding("manifest-bad", "warning", f"{refused.findings[0].message}; ignored", MANIFEST)]
    if manifest is None:
        return None, []
    shape_ok = manifest.get("format") == FORMAT_VERSION and isinstance(manifest.get("source"), dict)
    if not shape_ok or not isinstance(manifest.get("runs"), list):
        return None, [
            Finding("manifest-bad", "warning", "not a manifest that this version understands; ignored", MANIFEST)
        ]
    return manifest, []


def listed_outputs(manifest: Mapping[str, Any]) -> Mapping[str, tuple[int, str]] | None:
    """Size and digest of each file that a manifest lists; None where it has no such table, as convert writes one."""
    outputs = manifest.get("outputs")
    if not isinstance(outputs, dict) or not all(
        isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("digest"), str)
        for entry in outputs.values()
    ):
        return None
    return {file: (entry["bytes"], entry["digest"]) for file, entry in outputs.items()}


def geometry(schema: Schema, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes of the model, from the tensors; architecture from config.json."""
    architectures = config.get("architectures")
    first = schema.moe_layers[0] if schema.moe_layers else None
    facts: dict[str, Any] = {
        "architecture": architectures[0] if isinstance(architectures, list) and architectures else None,
        "model_type": config.get("model_type"),
        "moe_layers": [moe.layer if moe.layer is not None else moe.path for moe in schema.moe_layers],
    }
    if first is not None:
        facts |= {
            "experts": first.expert_count,
            "hidden_size": first.hidden,
            "intermediate_size": first.intermediate,
            "gated": first.gated,
            "fused_gate_up": first.order if first.gate_up else None,
        }
    return facts


def input_scale_entry(report: InputScaleReport) -> dict[str, Any]:
    """One GEMM's input scales before and after; the raw values are kept when they differed."""
    good = report.good
    entry: dict[str, Any] = {
        "where": report.where,
        "layer": report.layer,
        "gemm": report.gemm,
        "count": len(report.raw),
        "min": min(good),
        "max": max(good),
        "after": report.after,
    }
    if report.spread != 1 or report.bad:
        entry["raw"] = [
            value if value is not None and value == value and abs(value) != float("inf") else None
            for value in report.raw
        ]
    if report.bad:
        entry["imputed"] = dict(report.bad)
    return entry


def global_scale_entry(report: GlobalScaleReport, rescaled: Mapping[str, RescaleCounts]) -> dict[str, Any]:
    """weight_scale_2 of one layer's pairs or of one fusion group, with what unifying did to the block scales."""
    entry: dict[str, Any] = {
        "where": report.where,
        "layer": report.layer,
        "pairs": report.total,
        "differing": len(report.pairs),
    }
    if not report.pairs:
        return entry
    entry |= {"unified": report.unified, "max_ratio": report.max_ratio}
    entry["before"] = {key: list(values) for key, values in report.pairs.items()}
    if report.unified:
        entry["block_scales"] = counts_entry(total_counts(report, rescaled))
    return entry


def total_counts(report: GlobalScaleReport, rescaled: Mapping[str, RescaleCounts]) -> RescaleCounts:
    """The sum over a report's block-scale tensors (`hf`), or of its MoE layer (packed)."""
    names = (*report.tensors, report.where)
    return sum((rescaled[name] for name in names if name in rescaled), RescaleCounts())


def by_layer(counts: Mapping[str, RescaleCounts], schema: Schema) -> dict[str, RescaleCounts]:
    """Counts by MoE path, in the order of the layers, from counts by MoE path or by an expert's linear."""
    found = {moe.path: RescaleCounts() for moe in schema.moe_layers}
    for name, one in counts.items():
        found[schema.expert_of.get(name, (name, 0))[0]] += one
    return {path: total for path, total in found.items() if total.blocks}


def counts_entry(counts: RescaleCounts) -> dict[str, Any]:
    """Counts as JSON."""
    return {
        "blocks": counts.blocks,
        "inexact": counts.inexact,
        "max_relative_error": counts.max_relative_error,
        "became_subnormal": counts.became_subnormal,
        "became_zero": counts.became_zero,
    }


def source_entry(source: Source, source_fingerprint: str) -> dict[str, Any]:
    """What the first run read."""
    return {
        "name": source.spec,
        "revision": source.revision,
        "fingerprint": source_fingerprint,
        "tensors": len(source.tensors),
        "bytes": sum(source.shards.values()),
    }


def options_entry(target: str, policy: ScalePolicy, max_shard_bytes: int) -> dict[str, Any]:
    """The resolved options of a run."""
    return {
        "target": target,
        "input_scale": policy.input_scale,
        "w13_scale": policy.w13_scale,
        "impute": policy.impute,
        "max_shard_bytes": max_shard_bytes,
    }


def packed_config(target: Target) -> dict[str, Any]:
    """The quantization_config of a packed output: a method that stock engines refuse, and what it is packed for."""
    from nvfp4prep.layouts.logical import ENGINE_VERSIONS

    return {
        "quant_method": "nvfp4prep",
        "layout": target.layout_id,
        "engine": target.engine,
        "engine_version": ENGINE_VERSIONS[target.engine],
        "tp": target.tp,
        "ep": target.ep,
        "activation_dtype": target.activation_dtype,
    }


def build_manifest(
    previous: Mapping[str, Any] | None,
    source: Mapping[str, Any],
    run: Mapping[str, Any],
    facts: Mapping[str, Any],
    outputs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The manifest of an output; a previous one's source and runs are kept and this run is appended."""
    runs: Sequence[Any] = previous["runs"] if previous else ()
    return {
        "format": FORMAT_VERSION,
        "source": previous["source"] if previous else dict(source),
        "target": run["options"]["target"],
        "geometry": dict(facts),
        "outputs": dict(outputs),
        "digest": "XXH3-128 over the digests of the header and of each tensor's 64 MiB pieces (packed: each expert), "
        "in file order",
        "runs": [*runs, {"nvfp4prep": __version__, **run}],
    }


def to_bytes(value: Mapping[str, Any]) -> bytes:
    """JSON bytes as written to disk: two spaces, order kept, a final newline.

    Raises:
        ValueError: NaN or an infinity, except those of a config.json (`source.may_be_infinite`).
    """
    infinities = all(not math.isnan(number) and may_be_infinite(place) for number, place in non_finite(value))
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=infinities)
    return (text + "\n").encode("utf-8")
