"""The whole path: open, classify, plan, survey, resolve; then execute and publish. No printing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nvfp4prep import manifest as manifests
from nvfp4prep import quant_config as qc
from nvfp4prep.errors import InputRefused
from nvfp4prep.execute import Outcome, execute, shard_digest
from nvfp4prep.findings import Finding, errors
from nvfp4prep.plan import Plan, make_plan
from nvfp4prep.scales import (
    ImputePolicy,
    InputScalePolicy,
    RescaleCounts,
    Resolution,
    ScalePolicy,
    changes,
    output_shape,
    resolve,
)
from nvfp4prep.schema import SCALAR_PARAMS, Format, MoeLayer, Schema, build_schema
from nvfp4prep.source import INDEX, Source, open_source, read_json
from nvfp4prep.survey import read_values
from nvfp4prep.writer import PartialOutput, check_destination, check_space, file_sizes

DEFAULT_SHARD_BYTES = 5_000_000_000
_REWRITTEN = (qc.CONFIG, qc.HF_QUANT_CONFIG, manifests.MANIFEST)

W13Choice = Literal["auto", "split", "unify"]


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for. `max_shard_bytes` None: the previous run's, or 5 GB."""

    target: str = "hf"
    input_scale: InputScalePolicy = "layer-max"
    w13_scale: W13Choice = "auto"
    impute: ImputePolicy = "none"
    max_shard_bytes: int | None = None

    def policy(self) -> ScalePolicy:
        """How the target resolves scales: `hf` unifies, since no engine reads two global scales right from it."""
        return ScalePolicy(self.input_scale, "unify" if self.w13_scale == "auto" else self.w13_scale, self.impute)


@dataclass(frozen=True)
class Checkpoint:
    """A source read and classified, before any decision."""

    source: Source
    config: Mapping[str, Any]
    schema: Schema
    quant: qc.QuantConfig | None
    exclude: qc.ExcludeReport | None
    weight_only: frozenset[str]
    manifest: Mapping[str, Any] | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Prepared:
    """A conversion decided in full; nothing is written yet."""

    checkpoint: Checkpoint
    options: Options
    policy: ScalePolicy
    max_shard_bytes: int
    plan: Plan
    resolution: Resolution
    quant: qc.QuantConfig
    findings: tuple[Finding, ...]

    @property
    def bytes_needed(self) -> int:
        """Bytes on disk for the output, side files included."""
        source = self.checkpoint.source
        return self.plan.nbytes + sum(file_sizes(source.root, source.side_files).values())


@dataclass(frozen=True)
class Result:
    """A finished conversion: the manifest as written, and what rescaling did by block-scale tensor."""

    out: Path
    manifest: Mapping[str, Any]
    rescaled: Mapping[str, RescaleCounts]


def read_checkpoint(spec: str) -> Checkpoint:
    """Read and classify a checkpoint; what is wrong with it is in its findings.

    Raises:
        InputRefused: it can't even be read as a checkpoint.
        EnvironmentFault: I/O.
    """
    source = open_source(spec)
    config = read_json(source.root, qc.CONFIG)
    if config is None:
        raise InputRefused(
            [Finding("no-config", "error", "not there; nvfp4prep needs the model's config.json", qc.CONFIG)]
        )
    nested = read_json(source.root, qc.HF_QUANT_CONFIG)
    schema = build_schema(source.tensors, config)
    quant, findings = qc.read_quant_config(config, nested)
    previous, manifest_findings = manifests.read_manifest(source.root)
    findings = [*source.findings, *findings, *manifest_findings, *schema.findings]
    exclude, weight_only = None, frozenset[str]()
    if quant is not None:
        findings += qc.check_config(schema, quant)
        tied = config.get("tie_word_embeddings") is True and "lm_head.weight" not in source.tensors
        exclude = qc.rewrite_exclude(schema, quant.exclude, tied)
        findings += exclude.findings
        weight_only = qc.weight_only_modules(schema, quant)
    findings += [finding for moe in schema.moe_layers for finding in _pre_quant_scale(moe)]
    return Checkpoint(source, config, schema, quant, exclude, weight_only, previous, tuple(findings))


def _pre_quant_scale(moe: MoeLayer) -> list[Finding]:
    """An error when only some experts of a GEMM have a pre_quant_scale."""
    findings = []
    for gemm, linears in (("w13", moe.w13), ("w2", moe.w2)):
        without = [linear for linear in linears if "pre_quant_scale" not in linear.params]
        if without and len(without) < len(linears):
            ids = tuple(sorted({linear.expert for linear in without if linear.expert is not None}))
            findings.append(
                Finding(
                    "pre-quant-scale-missing",
                    "error",
                    f"{moe.path} {gemm}: {len(without)} of {len(linears)} linears lack pre_quant_scale; export again",
                    tensor=without[0].tensor_name("pre_quant_scale"),
                    layer=moe.layer,
                    experts=ids,
                )
            )
    return findings


def scale_values(checkpoint: Checkpoint) -> dict[str, tuple[float, ...]]:
    """Values of every NVFP4 weight_scale_2 and input_scale."""
    return read_values(
        checkpoint.source,
        [
            linear.params[param]
            for linear in checkpoint.schema.of_format(Format.NVFP4)
            for param in SCALAR_PARAMS
            if param in linear.params
        ],
    )


def prepare(spec: str, options: Options) -> Prepared:
    """Decide a conversion in full.

    Raises:
        InputRefused: with every error found.
        EnvironmentFault: I/O.
    """
    checkpoint = read_checkpoint(spec)
    policy = options.policy()
    if checkpoint.quant is None or checkpoint.exclude is None or errors(checkpoint.findings):
        raise InputRefused(errors(checkpoint.findings))
    source, schema = checkpoint.source, checkpoint.schema
    shard_bytes = options.max_shard_bytes or _previous_shard_bytes(checkpoint.manifest) or DEFAULT_SHARD_BYTES
    plan = make_plan(source.tensors, source.metadata, schema, policy, checkpoint.weight_only, shard_bytes)
    resolution = resolve(schema, scale_values(checkpoint), checkpoint.weight_only, policy)
    if errors(resolution.findings):
        raise InputRefused(errors(resolution.findings))
    findings = [*checkpoint.findings, *resolution.findings, *_form_warnings(schema, policy, resolution)]
    quant = qc.rewrite(schema, checkpoint.quant, checkpoint.exclude)
    return Prepared(checkpoint, options, policy, shard_bytes, plan, resolution, quant, tuple(findings))


def _previous_shard_bytes(manifest: Mapping[str, Any] | None) -> int | None:
    """max_shard_bytes of the run that wrote this source, so that converting an output again splits it alike."""
    run = manifest["runs"][-1] if manifest and manifest["runs"] else None
    options = run.get("options") if isinstance(run, dict) else None
    value = options.get("max_shard_bytes") if isinstance(options, dict) else None
    return value if isinstance(value, int) and value > 0 else None


def _form_warnings(schema: Schema, policy: ScalePolicy, resolution: Resolution) -> list[Finding]:
    """Warnings about scales that stay in a form that engines misread."""
    findings = []
    for report in resolution.global_scales:
        if report.pairs and not report.unified:
            findings.append(
                Finding(
                    "gate-up-split",
                    "warning",
                    f"{report.where}: {len(report.pairs)} gate/up pairs keep two weight_scale_2 (up to "
                    f"{report.max_ratio:.3g}x apart): vLLM reads the up half with the gate's, TensorRT-LLM both with "
                    "the larger, SGLang is right on flashinfer-trtllm only",
                    layer=report.layer,
                )
            )
    vectors = [
        moe
        for moe in schema.moe_layers
        for linear in (moe.gate_up, moe.down)
        if linear is not None and linear.format is Format.NVFP4
        if any(output_shape(linear, param, policy) for param in SCALAR_PARAMS if param in linear.params)
    ]
    if vectors:
        findings.append(
            Finding(
                "fused-scale-vector",
                "warning",
                f"{len(vectors)} fused expert linears keep scales of more than one value; vLLM 0.33, "
                "SGLang 0.5.23 and TensorRT-LLM load fused scales of one value only",
                layer=vectors[0].layer,
            )
        )
    return findings


def write(prepared: Prepared, out: Path, *, overwrite: bool, workers: int, progress: Callable[[int], None]) -> Result:
    """Write a prepared conversion to `out`.

    Raises:
        UsageFault: the destination can't be used.
        EnvironmentFault: I/O; nothing is left under `out`.
    """
    source = prepared.checkpoint.source
    check_destination(out, source.root, overwrite=overwrite)
    check_space(out, prepared.bytes_needed)
    with PartialOutput(out) as output:
        for name in source.side_files:
            if name not in _REWRITTEN:
                output.copy_side_file(source.root / name, name)
        outcome = execute(source, prepared.plan, prepared.resolution, output, workers, progress)
        output.seal()
        manifest = _manifest(prepared, outcome)
        output.publish(_small_files(prepared, manifest), overwrite=overwrite)
    return Result(out, manifest, outcome.rescaled)


def _small_files(prepared: Prepared, manifest: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Manifest, index and configs: what makes a folder loadable is written last."""
    plan = prepared.plan
    files = [(manifests.MANIFEST, manifests.to_bytes(manifest))]
    if len(plan.shards) > 1:
        weight_map = {name: plan.outputs[name].file for name in sorted(plan.outputs)}
        total = sum(tensor.nbytes for tensor in plan.outputs.values())
        files.append((INDEX, manifests.to_bytes({"metadata": {"total_size": total}, "weight_map": weight_map})))
    files.append((qc.HF_QUANT_CONFIG, manifests.to_bytes(qc.hf_quant_config(prepared.quant))))
    files.append((qc.CONFIG, manifests.to_bytes(qc.rewritten_config(prepared.checkpoint.config, prepared.quant))))
    return files


def _manifest(prepared: Prepared, outcome: Outcome) -> dict[str, Any]:
    checkpoint, resolution = prepared.checkpoint, prepared.resolution
    source = checkpoint.source
    assert checkpoint.exclude is not None
    configs = {name: (source.root / name).read_bytes() for name in _REWRITTEN[:2] if (source.root / name).is_file()}
    print_ = manifests.fingerprint(source, configs)
    widened = [name for name, tensor in source.tensors.items() if tensor.dtype != prepared.plan.outputs[name].dtype]
    reshaped = [name for name, tensor in source.tensors.items() if tensor.shape != prepared.plan.outputs[name].shape]
    run = {
        "source_fingerprint": print_,
        "options": manifests.options_entry(prepared.options.target, prepared.policy, prepared.max_shard_bytes),
        "changes": {
            "input_scales_normalised": sum(changes(report) for report in resolution.input_scales),
            "pairs_unified": sum(len(report.pairs) for report in resolution.global_scales if report.unified),
            "scales_widened_to_f32": len(widened),
            "scales_reshaped": len(reshaped),
            "imputed": list(prepared.plan.imputed),
            "exclude_list": {
                "corrupted": list(checkpoint.exclude.corrupted),
                "unmatched": list(checkpoint.exclude.unmatched),
                "contradicted": list(checkpoint.exclude.contradicted),
                "added": list(checkpoint.exclude.added),
            },
        },
        "findings": [finding.to_json() for finding in prepared.findings],
        "input_scales": [manifests.input_scale_entry(report) for report in resolution.input_scales],
        "weight_scale_2": [
            manifests.global_scale_entry(report, outcome.rescaled) for report in resolution.global_scales
        ],
    }
    outputs = {
        shard.file: {"bytes": shard.nbytes, "digest": shard_digest(prepared.plan, outcome, shard.file)}
        for shard in prepared.plan.shards
    }
    facts = manifests.geometry(checkpoint.schema, checkpoint.config)
    return manifests.build_manifest(checkpoint.manifest, manifests.source_entry(source, print_), run, facts, outputs)


def default_workers() -> int:
    """Threads by default: the CPUs, at most 8 (the work is mostly I/O)."""
    return min(8, os.cpu_count() or 1)
