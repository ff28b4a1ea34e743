"""`validate`: every rule that a level reaches, on one checkpoint, as data. No printing."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nvfp4prep import checks, jobs
from nvfp4prep import manifest as manifests
from nvfp4prep.checkpoint import Checkpoint, peek_checkpoint, read_checkpoint
from nvfp4prep.checks import awq, files
from nvfp4prep.errors import CheckFailed, InputRefused, UsageFault
from nvfp4prep.execute import Job, rehearse
from nvfp4prep.findings import Finding, errors
from nvfp4prep.options import COMPRESSED, Ask, Options, ask
from nvfp4prep.plan import DEFAULT_SHARD_BYTES, Compress, Dequantize, Divide
from nvfp4prep.rules import LEVELS, RULES, SEVERITIES, Level, Rule, Severity
from nvfp4prep.scales import resolve
from nvfp4prep.source import Source, open_source, read_json

_NO_CHECKPOINT = frozenset({"no-such-checkpoint", "not-a-directory", "no-weights"})
"""Rules whose findings mean that there is nothing to validate."""
_ONLY_OF_CONVERT = frozenset(
    {
        "already-packed",
        "name-taken",
        "header-too-large",
        "input-scale-imputed",
        "input-scales-kept",
        "gate-up-split",
        "activation-scales-dropped",
    }
)
_OF_TARGETS = frozenset({"target-refused", "block-scale-bad", "kernel-scale-bad"})
_OF_SMOKE = "NVP9"
_MOST_BASELINE_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class Report:
    """What `validate` found.

    `source` is as it was asked for; `targets` are those it was judged for; `findings` are those of the rules selected,
    worst first; `known` are the ones that the baseline has already, which don't count; `judged` are the rules that were
    looked at, whether they found something or not. `stopped` says why the checkpoint could not be judged, if so: then
    `findings` say why, all of them, and `judged` is empty.
    """

    source: str
    revision: str | None
    level: Level
    targets: tuple[str, ...]
    findings: tuple[Finding, ...]
    known: tuple[Finding, ...]
    judged: tuple[Rule, ...]
    stopped: str | None = None

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, fail_on: Severity) -> bool:
        """Whether a finding is at least as bad as `fail_on`, or the checkpoint could not be judged."""
        if self.stopped is not None:
            return True
        limit = SEVERITIES.index(fail_on)
        return any(SEVERITIES.index(finding.severity) <= limit for finding in self.findings)


def validate(
    spec: str,
    level: Level,
    targets: Sequence[Options] = (Options(),),
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Judge a checkpoint, or a packed output of `convert`, by every rule that `level` reaches.

    Args:
        spec: a directory or Hub repo, whose shards are downloaded at level full only.
        level: what is read.
        targets: what it shall be converted to.
        workers: threads, for level full.
        progress: called with bytes just read and bytes to read in all, from any worker, at level full.

    Raises:
        InputRefused: there is no checkpoint.
        EnvironmentFault: I/O.
    """
    judged, labels = _judged(level, targets)
    root = Path(spec).expanduser()
    if root.is_dir() and (own := _own_method(root)) is not None:
        look = _packed_findings if own == "nvfp4prep" else _compressed_findings
        findings, stopped = look(root, level, workers)
        return Report(spec, None, level, (), _sorted(findings), (), () if stopped else judged, stopped)
    try:
        checkpoint = read_checkpoint(spec) if level == "full" else peek_checkpoint(spec)
    except InputRefused as refused:
        if any(finding.rule in _NO_CHECKPOINT for finding in refused.findings):
            raise
        return Report(spec, None, level, labels, _sorted(refused.findings), (), (), str(refused.findings[0]))
    return validated(spec, checkpoint, level, targets, workers, progress)


def validated(
    spec: str,
    checkpoint: Checkpoint,
    level: Level,
    targets: Sequence[Options] = (Options(),),
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """`validate` of a checkpoint that was read already."""
    judged, labels = _judged(level, targets)
    findings = judge(checkpoint, level, targets, workers, progress)
    return Report(spec, checkpoint.source.revision, level, labels, _sorted(findings), (), judged)


def judge(
    checkpoint: Checkpoint,
    level: Level,
    targets: Sequence[Options] = (Options(),),
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Finding]:
    """Every finding about a checkpoint that could be read: see `validate`."""
    of_headers = checks.found((*checks.HEADERS, *checks.HEADERS_REPAIRED), checkpoint)
    ones = bool(targets) and all(options.impute == "ones" for options in targets)
    findings = [*checkpoint.findings, *awq.imputed(of_headers, "ones" if ones else "none")]
    if level != "headers":
        try:
            findings += checks.found((*checks.SCALES, *checks.SCALES_REPAIRED), checkpoint)
        except InputRefused as refused:  # far too many values: nothing further can be judged
            return findings + list(refused.findings)
    if level == "full":
        from nvfp4prep.checks import blocks

        total = blocks.scanned_bytes(checkpoint)
        findings += blocks.scan(checkpoint, workers, lambda count: progress(count, total))
        findings += _changed_bytes(checkpoint.source, checkpoint.manifest, workers)
        checkpoint.source.verify_unchanged()
    if checkpoint.quant is not None:
        findings += _of_targets(checkpoint, level, targets, workers)
    return findings


def _judged(level: Level, targets: Sequence[Options]) -> tuple[tuple[Rule, ...], tuple[str, ...]]:
    """The rules that are looked at, and what the targets are called."""
    rules = tuple(rule for rule in RULES if _reaches(rule, level, targets))
    return rules, tuple(_label(options) for options in targets)


def _reaches(rule: Rule, level: Level, targets: Sequence[Options]) -> bool:
    """Whether `validate` judges a rule."""
    packed = any(options.target != "hf" for options in targets)
    if rule.name in _ONLY_OF_CONVERT or rule.id.startswith(_OF_SMOKE) or (rule.name in _OF_TARGETS and not packed):
        return False
    return LEVELS.index(rule.level) <= LEVELS.index(level)


def _sorted(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first, then by rule; else in the order found."""
    return tuple(sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), finding.id)))


# --- targets ---------------------------------------------------------------------------------------------------------


def _label(options: Options) -> str:
    if options.target == "hf":
        return "hf"
    ranks = "".join(f" {name}{count}" for name, count in (("tp", options.tp), ("ep", options.ep)) if count > 1)
    if options.target == COMPRESSED:
        return options.target
    from nvfp4prep.targets import engine_of

    return f"{options.target}/{engine_of(options.target, options.engine)}{ranks}"


def _of_targets(checkpoint: Checkpoint, level: Level, targets: Sequence[Options], workers: int) -> list[Finding]:
    """What each target has against the checkpoint; what all of them have is told once, of no target."""
    found = {_label(options): _of_target(checkpoint, level, options, workers) for options in targets}
    shared = set.intersection(*map(set, found.values()))
    common = {finding for finding in shared if finding.rule not in _OF_TARGETS}
    told = [finding for finding in next(iter(found.values())) if finding in common]
    own = [
        replace(finding, target=label)
        for label, findings in found.items()
        for finding in findings
        if finding not in common
    ]
    return told + own


def _of_target(checkpoint: Checkpoint, level: Level, options: Options, workers: int) -> list[Finding]:
    try:
        asked = ask(checkpoint, options)
    except InputRefused as refused:
        return list(refused.findings)
    if level == "headers":
        return []
    resolution = resolve(checkpoint.schema, checkpoint.scale_values, asked.weight_only, asked.policy)
    try:
        job = jobs.job_of(checkpoint, options, asked, resolution)
    except InputRefused as refused:
        return list(refused.findings)
    findings = list(resolution.findings)
    if level == "full" and not errors(findings):
        findings += _of_values(checkpoint, options, asked, job, workers)
    return findings


def _of_values(checkpoint: Checkpoint, options: Options, asked: Ask, job: Job, workers: int) -> list[Finding]:
    """What a target can't store, for which all that it computes, but kernels' layouts, is computed."""
    try:
        job = jobs.with_facts(checkpoint, job, workers)
    except InputRefused as refused:
        return list(refused.findings)
    scales: list[Finding] = []
    if job.pack is not None:
        from nvfp4prep.layer_facts import group_scale_findings

        scales = group_scale_findings(checkpoint.source, checkpoint.schema, job.pack, job.resolution, workers)
    if not job.folds and options.target != COMPRESSED:
        return scales
    plan = jobs.plan_of(checkpoint, options, asked, job, DEFAULT_SHARD_BYTES, "", 0)
    return [*scales, *rehearse(checkpoint.source, plan, [job], workers, (Compress, Dequantize, Divide))]


# --- outputs of convert ----------------------------------------------------------------------------------------------


def _own_method(root: Path) -> str | None:
    """The quant_method of our own outputs in another form than ModelOpt's: nvfp4prep, compressed-tensors; else None."""
    try:
        section = (read_json(root, "config.json") or {}).get("quantization_config")
        manifest = manifests.read_manifest(root)[0]
    except InputRefused:
        return None  # told by the reader of checkpoints
    method = section.get("quant_method") if isinstance(section, dict) else None
    if method == "nvfp4prep" or (method == COMPRESSED and manifest is not None):
        return str(method)
    return None


def _compressed_findings(root: Path, level: Level, workers: int) -> tuple[list[Finding], str | None]:
    """Findings about an output in the form of compressed-tensors: its files, against index and manifest."""
    try:
        source = open_source(str(root))
    except InputRefused as refused:
        return list(refused.findings), str(refused.findings[0])
    manifest, findings = manifests.read_manifest(root)
    findings += [*source.findings, *files.changed_shards(source, manifest)]
    return findings + (_changed_bytes(source, manifest, workers) if level == "full" else []), None


def _packed_findings(root: Path, level: Level, workers: int) -> tuple[list[Finding], str | None]:
    """Findings about a packed output, and why the rest could not be judged."""
    from nvfp4prep import unpack

    try:
        packed = unpack.read_packed_output(root)
    except InputRefused as refused:
        return list(refused.findings), str(refused.findings[0])
    return [_digest_differs(file) for file in unpack.changed_files(packed, workers)] if level == "full" else [], None


def _changed_bytes(source: Source, manifest: Mapping[str, Any] | None, workers: int) -> list[Finding]:
    """NVP808 for an output with its manifest; what the manifest does not list is found by `files.changed_shards`."""
    outputs = None if manifest is None else manifests.listed_outputs(manifest)
    if outputs is None:
        return []
    from nvfp4prep.digests import differing_files

    digests = {file: digest for file, (size, digest) in outputs.items() if size == source.shards.get(file)}
    return [_digest_differs(file) for file in differing_files(source, digests, workers)]


def _digest_differs(file: str) -> Finding:
    message = f"not the bytes that were written: their digest is not the one in {manifests.MANIFEST}; copy it again"
    return Finding("digest-differs", "error", message, file)


def check_output(root: Path, options: Options) -> None:
    """Judge what `convert` wrote, before it takes its name.

    Raises:
        CheckFailed: it is not what `validate` would pass: a fault of nvfp4prep or of the disk.
        EnvironmentFault: I/O.
    """
    try:
        if options.target == COMPRESSED:
            findings = list(open_source(str(root)).findings)  # stored in another tool's form: files and index
        elif _own_method(root) is not None:
            findings = _packed_findings(root, "scales", 1)[0]
        else:
            kept = replace(options, target="hf")
            findings = judge(read_checkpoint(str(root)), "scales", [kept])
    except InputRefused as refused:
        findings = list(refused.findings)
    wrong = errors(findings)
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise CheckFailed(f"the output does not pass nvfp4prep validate: {wrong[0]}{more}; please report this")


# --- selection -------------------------------------------------------------------------------------------------------


def selected(report: Report, names: Collection[str], baseline: Collection[str]) -> Report:
    """The report with only the findings of some rules, those that a baseline has already set apart.

    A report that had to stop stays as it is: nothing else was judged.

    Args:
        report: as `validate` gives it.
        names: rules to keep.
        baseline: fingerprints of findings that are known.
    """
    if report.stopped is not None:
        return report
    kept = [finding for finding in report.findings if finding.rule in names]
    return replace(
        report,
        findings=tuple(finding for finding in kept if finding.fingerprint not in baseline),
        known=tuple(finding for finding in kept if finding.fingerprint in baseline),
        judged=tuple(rule for rule in report.judged if rule.name in names),
    )


def fingerprints(baseline: Path) -> frozenset[str]:
    """Fingerprints of all findings of an earlier report in JSON, those that it knew already too.

    Raises:
        UsageFault: it is no such report.
    """
    try:
        with baseline.open("rb") as file:
            raw = file.read(_MOST_BASELINE_BYTES + 1)
        value = json.loads(raw) if len(raw) <= _MOST_BASELINE_BYTES and baseline.is_file() else None
        found = [finding["fingerprint"] for key in ("findings", "known") for finding in value[key]]  # type: ignore[index]
        if not all(isinstance(one, str) for one in found):
            raise TypeError
        return frozenset(found)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageFault(f"{baseline}: no report of nvfp4prep validate --format json") from None


def at_least(report: Report, severity: Severity) -> Report:
    """The report without findings milder than `severity`."""
    limit = SEVERITIES.index(severity)
    shown = tuple(finding for finding in report.findings if SEVERITIES.index(finding.severity) <= limit)
    return replace(report, findings=shown)
