"""The whole path: open, classify, plan, survey, resolve; then execute and publish. No printing."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvfp4prep import checks, jobs, schedule, validation
from nvfp4prep import manifest as manifests
from nvfp4prep import quant_config as qc
from nvfp4prep.checkpoint import Checkpoint, read_checkpoint
from nvfp4prep.checks import awq
from nvfp4prep.errors import InputRefused, UsageFault
from nvfp4prep.execute import Elsewhere, Job, execute, shard_digests
from nvfp4prep.findings import Finding, errors
from nvfp4prep.header import TensorInfo
from nvfp4prep.journal import Outcome, finished, plan_id
from nvfp4prep.memory import check_memory
from nvfp4prep.options import COMPRESSED, Options, ask
from nvfp4prep.plan import DEFAULT_SHARD_BYTES, Plan, bytes_read, index_of, key_of, merge, shards_read
from nvfp4prep.scales import ImputePolicy, Resolution, ScalePolicy, changes, output_shape, resolve
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear, MoeLayer, Schema
from nvfp4prep.sharing import Share, SharedJob, SharedOutput, unfinished
from nvfp4prep.source import INDEX
from nvfp4prep.unusable import TEXTS
from nvfp4prep.writer import PartialOutput, check_destination, check_names, check_space

_MOST_SHARD_BYTES = 1 << 62
_REWRITTEN = (qc.CONFIG, qc.HF_QUANT_CONFIG, manifests.MANIFEST)


@dataclass(frozen=True)
class Prepared:
    """A conversion to one target decided in full; nothing is written yet. `folder` is relative to OUT."""

    checkpoint: Checkpoint
    options: Options
    policy: ScalePolicy
    max_shard_bytes: int
    plan: Plan
    job: Job
    quant: qc.QuantConfig
    findings: tuple[Finding, ...]
    folder: str = ""

    @property
    def resolution(self) -> Resolution:
        return self.job.resolution

    @property
    def smoked(self) -> tuple[MoeLayer, ...]:
        """The MoE layers that the smoke check runs on, if it is asked for: those that are packed, or that can be."""
        if self.options.target == COMPRESSED:
            return ()
        schema, pack = self.checkpoint.schema, self.job.pack
        return schema.nvfp4_layers if pack is None else pack.target.layers(schema)

    @property
    def bytes_needed(self) -> int:
        """Bytes on disk for the output, side files included."""
        source = self.checkpoint.source
        return self.plan.nbytes + source.side_bytes()


@dataclass(frozen=True)
class Result:
    """A finished conversion: each target's manifest as written, and what the workers counted."""

    out: Path
    manifests: tuple[Mapping[str, Any], ...]
    outcome: Outcome

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The first target's manifest."""
        return self.manifests[0]


def prepare(spec: str, options: Options) -> Prepared:
    """Read a checkpoint and decide its conversion to one target: see `decide`."""
    return decide(read_checkpoint(spec), options)


def findings_of(checkpoint: Checkpoint, impute: ImputePolicy = "none") -> list[Finding]:
    """What the headers and JSON files of a checkpoint say against converting it, and what else was noticed."""
    return [*checkpoint.findings, *awq.imputed(checks.found(checks.HEADERS, checkpoint), impute)]


def decide(checkpoint: Checkpoint, options: Options, folder: str = "", number: int = 0, workers: int = 1) -> Prepared:
    """Decide a conversion to one target in full.

    Args:
        checkpoint: as read.
        options: for this target.
        folder: where its files lie, relative to OUT.
        number: its index in the run.
        workers: threads, for layouts that look at all block scales first.

    Raises:
        InputRefused: with every error found.
        EnvironmentFault: I/O.
    """
    found = findings_of(checkpoint, options.impute)
    if checkpoint.quant is None or checkpoint.exclude is None or errors(found):
        raise InputRefused(errors(found))
    schema = checkpoint.schema
    shard_bytes = options.max_shard_bytes or _previous_shard_bytes(checkpoint.manifest) or DEFAULT_SHARD_BYTES
    asked = ask(checkpoint, options)
    policy = asked.policy
    resolution = resolve(schema, checkpoint.scale_values, asked.weight_only, policy)
    found += [*checks.found(checks.SCALES, checkpoint), *resolution.findings]
    if errors(found):
        raise InputRefused(errors(found))
    job = jobs.with_facts(checkpoint, jobs.job_of(checkpoint, options, asked, resolution, folder), workers)
    plan = jobs.plan_of(checkpoint, options, asked, job, shard_bytes, folder, number)
    if options.target == COMPRESSED:
        from nvfp4prep import compressed_tensors

        found += compressed_tensors.warnings(checkpoint)
    if asked.target is None:
        found += _form_warnings(schema, policy, resolution)
    quant = qc.rewrite(schema, checkpoint.quant, checkpoint.exclude)
    pack = job.pack
    if pack is not None and (folded := {*job.folds, *(() if pack.factors else pack.rows)}):
        quant = _without_factors(checkpoint, quant, folded)
    if pack is not None or options.target == COMPRESSED:
        found = _of_factors_left(found, quant, options.target)
    return Prepared(checkpoint, options, policy, shard_bytes, plan, job, quant, tuple(found), folder)


def _of_factors_left(found: Iterable[Finding], quant: qc.QuantConfig, target: str) -> list[Finding]:
    """The findings, where the experts' pre_quant_scale goes elsewhere: what is left of the warning about NVFP4_AWQ."""
    kept = [finding for finding in found if finding.rule != "nvfp4-awq"]
    if target != COMPRESSED and quant.algo == "NVFP4_AWQ":
        message = (
            "quant_algo stays NVFP4_AWQ, for linears outside the experts that keep their pre_quant_scale: vLLM refuses "
            "it, with its plugin too; --target compressed-tensors folds those as well"
        )
        kept.append(Finding("nvfp4-awq", "warning", message, qc.CONFIG))
    return kept


def _without_factors(checkpoint: Checkpoint, quant: qc.QuantConfig, folds: Collection[str]) -> qc.QuantConfig:
    """The configuration once the factors of the layers `folds` are folded away, where no other linear has any."""
    schema = checkpoint.schema
    folded = {linear.module for moe in schema.moe_layers if moe.path in folds for linear in (*moe.w13, *moe.w2)}
    if any("pre_quant_scale" in x.params for x in schema.linears.values() if x.module not in folded):
        return quant
    extras = dict(quant.extras or {})
    if quant.algo == "NVFP4_AWQ":
        extras.pop("pre_quant_scale", None)
        return replace(quant, algo=qc.W4A4, extras=extras)
    return replace(quant, extras={**extras, "pre_quant_scale": False} if "pre_quant_scale" in extras else extras)


def _previous_shard_bytes(manifest: Mapping[str, Any] | None) -> int | None:
    """max_shard_bytes of the run that wrote this source, so that converting an output again splits it alike."""
    run = manifest["runs"][-1] if manifest and manifest["runs"] else None
    options = run.get("options") if isinstance(run, dict) else None
    value = options.get("max_shard_bytes") if isinstance(options, dict) else None
    return value if type(value) is int and 0 < value <= _MOST_SHARD_BYTES else None


def _form_warnings(schema: Schema, policy: ScalePolicy, resolution: Resolution) -> list[Finding]:
    """Warnings about scales that stay in a form that engines misread."""
    findings = []
    kept = [report for report in resolution.input_scales if report.after is None and report.spread > 1]
    if kept:
        widest = max(report.spread for report in kept)
        findings.append(
            Finding(
                "input-scales-kept",
                "warning",
                f"{len(kept)} of {len(resolution.input_scales)} GEMMs keep differing input_scales (up to {widest:.3g}x "
                "apart): engines and backends take the layer's maximum, a rank's, or each expert's own",
                layer=kept[0].layer,
            )
        )
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
    """Write a prepared conversion to `out`: see `write_all`."""
    return write_all([prepared], out, overwrite=overwrite, workers=workers, progress=progress)


def no_check(prepared: Prepared, root: Path) -> None:
    """For `write_all`: nothing is checked before the output takes its name."""


def write_all(
    targets: Sequence[Prepared],
    out: Path,
    *,
    overwrite: bool,
    workers: int,
    progress: Callable[[int], None],
    check: Callable[[Prepared, Path], None] = no_check,
    shares: int | None = None,
    elsewhere: Callable[[str], Elsewhere] | None = None,
) -> Result:
    """Write one or several prepared targets of one checkpoint, each to its folder of `out`, reading the source once.

    `check(prepared, folder)` looks at the finished shards, which have no config or index yet; where it raises
    CheckFailed, they stay under OUT.partial and OUT does not appear. With `shares`, that many processes have written
    everything (`write_share`), and what they have not is a UsageFault. `elsewhere(plan id)` runs items on other
    machines.

    Raises:
        CheckFailed: by `check`, or the output does not pass `validate`.
        InputRefused: a side file has the name of a file or folder of the output, or scales are unusable.
        UsageFault: the destination can't be used.
        EnvironmentFault: I/O; nothing is left under `out`.
    """
    source = targets[0].checkpoint.source
    plan, identity = _checked(targets, out, workers, overwrite=overwrite)
    with PartialOutput(out, identity) as output:
        if shares is not None:
            owners = _owners(plan, shares)
            left = unfinished(out, set(finished(output.journalled, plan)), owners, shares)
            if left is not None:
                raise UsageFault(left)
        _copy_side_files(targets, output)
        there = None if elsewhere is None else elsewhere(identity)
        outcome = execute(source, plan, [one.job for one in targets], output, workers, progress, elsewhere=there)
        if outcome.unusable:
            raise InputRefused(_unusable(targets[0].checkpoint, outcome.unusable_by_tensor()))
        output.seal()
        source.verify_unchanged()
        for prepared in targets:
            check(prepared, output.partial)
        digests = shard_digests(plan, outcome)
        written = [_manifest(prepared, number, outcome, digests) for number, prepared in enumerate(targets)]
        small = [_small_files(prepared, manifest) for prepared, manifest in zip(targets, written, strict=True)]

        def validate(root: Path) -> None:
            for prepared in targets:
                validation.check_output(root / prepared.folder, prepared.options)

        output.publish([file for files in small for file in files], overwrite=overwrite, check=validate)
    return Result(out, tuple(written), outcome)


def _owners(plan: Plan, count: int) -> list[int]:
    """The share, from 1 to `count`, that runs each of the plan's items."""
    return schedule.shares([shards_read(item) for item in plan.items], [bytes_read(item) for item in plan.items], count)


def write_share(
    targets: Sequence[Prepared],
    out: Path,
    share: Share,
    job: SharedJob,
    *,
    overwrite: bool,
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Write one share of what `write_all` writes, to an OUT.partial that several processes share.

    Args:
        targets, out, overwrite, workers, progress: as for `write_all`.
        share: which.
        job: what `finish` must know to go on; noted beside OUT.partial by the first of the processes.

    Raises:
        InputRefused, UsageFault, EnvironmentFault: as `write_all`.
    """
    source = targets[0].checkpoint.source
    plan, identity = _checked(targets, out, workers, overwrite=overwrite)
    with SharedOutput(out, identity, share, job) as output:
        if output.makes_files:
            _copy_side_files(targets, output)
        mine = {number for number, owner in enumerate(_owners(plan, share.count)) if owner == share.index}
        outcome = execute(source, plan, [one.job for one in targets], output, workers, progress, mine)
        if outcome.unusable:
            raise InputRefused(_unusable(targets[0].checkpoint, outcome.unusable_by_tensor()))
        source.verify_unchanged()


def _checked(targets: Sequence[Prepared], out: Path, workers: int, *, overwrite: bool) -> tuple[Plan, str]:
    """The plan of all targets and its id, once nothing stands in the way of writing it."""
    source = targets[0].checkpoint.source
    check_destination(out, source.root, overwrite=overwrite)
    for prepared in targets:
        _check_side_files(prepared)
    plan, identity = identified(targets)
    passing = source.passing_bytes([shards_read(item) for item in plan.items])
    check_space(out, sum(prepared.bytes_needed for prepared in targets), passing)
    check_memory(plan, workers)
    return plan, identity


def identified(targets: Sequence[Prepared]) -> tuple[Plan, str]:
    """The plan of all targets, and its id."""
    plan = merge([prepared.plan for prepared in targets])
    decided = [(prepared.options, prepared.policy, prepared.job.resolution.values) for prepared in targets]
    return plan, plan_id(targets[0].checkpoint.source, plan, decided)


def _copy_side_files(targets: Sequence[Prepared], output: PartialOutput) -> None:
    source = targets[0].checkpoint.source
    for prepared in targets:
        for name in source.side_files:
            if name not in _REWRITTEN:
                output.copy_side_file(source.side_file(name), key_of(prepared.folder, name))


def _unusable(checkpoint: Checkpoint, counts: Mapping[str, Mapping[str, int]]) -> list[Finding]:
    """What the run came across that no kernel can compute with: one finding for each rule and MoE block or linear."""
    findings = []
    for rule, by_name in counts.items():
        found: dict[str, list[tuple[Linear, TensorInfo]]] = defaultdict(list)
        for linear in checkpoint.schema.linears.values():
            for tensor in linear.params.values():
                if tensor.name in by_name:
                    block = checkpoint.schema.expert_of.get(linear.module, (linear.module, 0))[0]
                    found[block].append((linear, tensor))
        for where, members in found.items():
            linear, tensor = members[0]
            count = sum(by_name[one.name] for _, one in members)
            experts = tuple(sorted({one.expert for one, _ in members if one.expert is not None}))
            message = f"{where}: {count:,} {TEXTS[rule]}"
            findings.append(Finding(rule, "error", message, tensor.file, tensor.name, linear.layer, experts))
    return findings


def _check_side_files(prepared: Prepared) -> None:
    """Refuse a side file with a planned name, or in a folder of packed tensors. Raises InputRefused."""
    folder, source = prepared.folder, prepared.checkpoint.source
    side = {name: key_of(folder, name) for name in source.side_files if name not in _REWRITTEN}
    files = [shard.file for shard in prepared.plan.shards]
    ranks = {file.rpartition("/")[0] for file in files} - {folder}
    planned = [*files, *(key_of(place, INDEX) for place in (folder, *ranks))]
    check_names(side, [*planned, *(key_of(folder, name) for name in _REWRITTEN)], ranks)


def _small_files(prepared: Prepared, manifest: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Manifest, indexes and configs: what makes a folder loadable is written last."""
    folder, pack = prepared.folder, prepared.job.pack
    files = [(key_of(folder, manifests.MANIFEST), manifests.to_bytes(manifest))]
    files += [
        (key_of(place, INDEX), manifests.to_bytes(index)) for place, index in _indexes(prepared.plan, pack is not None)
    ]
    config = prepared.checkpoint.config
    if prepared.options.target == COMPRESSED:
        from nvfp4prep import compressed_tensors

        section = compressed_tensors.quantization_config(prepared.checkpoint, prepared.quant, prepared.job.folds)
    elif pack is None:
        files.append((key_of(folder, qc.HF_QUANT_CONFIG), manifests.to_bytes(qc.hf_quant_config(prepared.quant))))
        section = qc.quantization_config(prepared.quant)
    else:
        section = manifests.packed_config(pack.target)
    files.append((key_of(folder, qc.CONFIG), manifests.to_bytes(qc.rewritten_config(config, section))))
    return files


def _indexes(plan: Plan, always: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The index of each folder; a folder with one file needs none unless `always`."""
    folders: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in plan.outputs.values():
        folders[tensor.file.rpartition("/")[0]].append(tensor)
    for folder, tensors in folders.items():
        if not always and len({tensor.file for tensor in tensors}) == 1:
            continue
        yield folder, index_of(tensors)


def _manifest(prepared: Prepared, number: int, outcome: Outcome, digests: Mapping[str, str]) -> dict[str, Any]:
    checkpoint, pack = prepared.checkpoint, prepared.job.pack
    source = checkpoint.source
    assert checkpoint.quant is not None
    configs = {name: (source.root / name).read_bytes() for name in _REWRITTEN[:2] if (source.root / name).is_file()}
    print_ = manifests.fingerprint(source, configs)
    rescaled, flushed = outcome.rescaled_by(number), outcome.flushed_by(number)
    run = {
        "source_fingerprint": print_,
        "options": manifests.options_entry(prepared.options.target, prepared.policy, prepared.max_shard_bytes),
        "changes": _changes(prepared),
        "findings": [_lasting(finding) for finding in prepared.findings],
        "input_scales": [manifests.input_scale_entry(report) for report in prepared.resolution.input_scales],
        "weight_scale_2": [
            manifests.global_scale_entry(report, rescaled) for report in prepared.resolution.global_scales
        ],
    }
    if flushed:
        run["block_scales_flushed"] = flushed
    if folded := manifests.by_layer(outcome.folded_by(number), checkpoint.schema):
        run["block_scales_folded"] = {path: manifests.counts_entry(counts) for path, counts in folded.items()}
    if rounding := outcome.rounding_by(number):
        run["rounding"] = rounding
    if prepared.job.folds:
        run["folded"] = {
            path: {
                "norm": fold.norm.name,
                "norm_rounding": fold.rounding,
                "divided": [reader.module for reader in fold.readers],
            }
            for path, fold in prepared.job.folds.items()
        }
    prefix = len(prepared.folder) + 1 if prepared.folder else 0
    outputs = {
        shard.file[prefix:]: {"bytes": shard.nbytes, "digest": digests[shard.file]} for shard in prepared.plan.shards
    }
    facts = manifests.geometry(checkpoint.schema, checkpoint.config)
    entry = manifests.source_entry(source, print_)
    manifest = manifests.build_manifest(checkpoint.manifest, entry, run, facts, outputs)
    if pack is not None:
        from nvfp4prep import packing

        manifest["packed"] = packing.manifest_entry(pack, checkpoint.schema)
        manifest["logical"] = packing.logical_entry(
            pack, checkpoint.schema, prepared.policy, source.metadata, prepared.max_shard_bytes, prepared.quant
        )
    return manifest


def _lasting(finding: Finding) -> dict[str, Any]:
    """A finding for the manifest: what was found, not what the catalogue says of its rule."""
    return {key: value for key, value in finding.to_json().items() if key not in ("fix", "fingerprint")}


def _recast(kept: Sequence[tuple[TensorInfo, TensorInfo]]) -> dict[str, int]:
    """How many tensors changed dtype or shape, by name with every number as *, and from what to what."""
    found: Counter[str] = Counter()
    for before, after in kept:
        if (before.dtype, before.shape) != (after.dtype, after.shape):
            name = re.sub(r"\d+", "*", before.name)
            found[f"{name}: {before.dtype} {list(before.shape)} -> {after.dtype} {list(after.shape)}"] += 1
    return dict(found)


def _changes(prepared: Prepared) -> dict[str, Any]:
    checkpoint, resolution = prepared.checkpoint, prepared.resolution
    assert checkpoint.exclude is not None
    outputs = {tensor.name: tensor for tensor in prepared.plan.outputs.values()}
    kept = [(tensor, outputs[name]) for name, tensor in checkpoint.source.tensors.items() if name in outputs]
    return {
        "input_scales_normalised": sum(changes(report) for report in resolution.input_scales),
        "pairs_unified": sum(len(report.pairs) for report in resolution.global_scales if report.unified),
        "scales_widened_to_f32": sum(before.dtype != after.dtype == "F32" for before, after in kept),
        "scales_reshaped": sum(before.shape != after.shape and after.dtype == "F32" for before, after in kept),
        "recast": _recast(kept),
        "imputed": list(prepared.plan.imputed),
        "exclude_list": {
            "corrupted": list(checkpoint.exclude.corrupted),
            "unmatched": list(checkpoint.exclude.unmatched),
            "contradicted": list(checkpoint.exclude.contradicted),
            "added": list(checkpoint.exclude.added),
        },
    }


def default_workers() -> int:
    """Threads by default: the CPUs, at most 8 (the work is mostly I/O)."""
    return min(8, os.cpu_count() or 1)
