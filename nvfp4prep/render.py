"""Plans and results as rich renderables, for people. Data in, renderable out; `cli` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvfp4prep.convert import Prepared, Result
from nvfp4prep.execute import Job
from nvfp4prep.findings import Finding, printable
from nvfp4prep.inspection import other_targets
from nvfp4prep.manifest import by_layer, total_counts
from nvfp4prep.options import COMPRESSED
from nvfp4prep.scales import GlobalScaleReport, InputScaleReport, RescaleCounts, changes
from nvfp4prep.schema import Format

_SHOWN_FILES = 12
STYLE = {"error": "bold red", "warning": "yellow", "info": "dim"}


def plain(text: str, style: str = "") -> Text:
    """Text as it is: no markup in it is read, and control characters are escaped. Names come from files."""
    return Text(printable(text), style=style)


def add_row(table: Table, *cells: str | Text) -> None:
    """A row of cells that are shown as they are."""
    table.add_row(*(plain(cell) if isinstance(cell, str) else cell for cell in cells))


def size(count: float) -> str:
    """Bytes for a person: 1.5 GB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def counted(tensors: int, files: int) -> str:
    """855 tensors in 1 file."""
    return f"{tensors:,} tensors in {files:,} file{'s' if files != 1 else ''}"


def shard_list(prepared: Prepared) -> list[Text]:
    """The output files, for a dry run."""
    shards = prepared.plan.shards
    lines = [
        plain(f"  {shard.file}: {len(shard.tensors):,} tensors, {size(shard.nbytes)}")
        for shard in shards[:_SHOWN_FILES]
    ]
    if len(shards) > _SHOWN_FILES:
        lines.append(plain(f"  ... and {len(shards) - _SHOWN_FILES} files more; --json lists all"))
    return lines


def findings(found: Iterable[Finding], verbose: bool) -> list[Text]:
    """One line each; without `verbose` only warnings and errors, each rule three times at most."""
    lines: list[Text] = []
    seen: Counter[str] = Counter()
    for finding in found:
        if finding.severity == "info" and not verbose:
            continue
        seen[finding.rule] += 1
        if verbose or seen[finding.rule] <= 3:
            lines.append(Text(str(finding), style=STYLE[finding.severity]))
    hidden = sum(count - 3 for count in seen.values() if count > 3)
    if hidden and not verbose:
        lines.append(Text(f"... and {hidden} more of these; -v shows all", style="dim"))
    return lines


def plan(prepared: Prepared, verbose: bool) -> RenderableType:
    """What will be written, before it is."""
    source, plan_ = prepared.checkpoint.source, prepared.plan
    revision = f"@{source.revision}" if source.revision else ""
    facts = Table.grid(padding=(0, 2))
    add_row(facts, "source", f"{source.spec}{revision}: {counted(len(source.tensors), len(source.shards))}")
    add_row(
        facts,
        prepared.options.target,
        f"{counted(len(plan_.outputs), len(plan_.shards))}; {size(prepared.bytes_needed)} of disk needed",
    )
    if prepared.job.pack is not None:
        target = prepared.job.pack.target
        add_row(facts, "", f"layout {target.layout_id}, TP {target.tp}, EP {target.ep}")
    add_row(facts, "", _configured(prepared))
    add_row(facts, "scales", _decisions(prepared))
    parts: list[RenderableType] = [facts, *findings(prepared.findings, verbose)]
    if verbose:
        parts.append(scale_table(prepared.resolution.input_scales, prepared.resolution.global_scales, {}))
    return Group(*parts)


def _configured(prepared: Prepared) -> str:
    """What the configuration will say."""
    if prepared.options.target != COMPRESSED:
        return f"quant_algo {prepared.quant.algo}, {len(prepared.quant.exclude)} modules excluded by name"
    from nvfp4prep import compressed_tensors

    section = compressed_tensors.quantization_config(prepared.checkpoint, prepared.quant, prepared.job.folds)
    unpacked = len(compressed_tensors.unpacked(prepared.checkpoint, prepared.job.folds))
    return f"format {section['format']}, {len(section['ignore'])} modules ignored" + (
        f", {unpacked} of them quantised before and BF16 now" if unpacked else ""
    )


def _decisions(prepared: Prepared) -> str:
    resolution = prepared.resolution
    unified = sum(len(report.pairs) for report in resolution.global_scales if report.unified)
    apart = sum(len(report.pairs) for report in resolution.global_scales if not report.unified)
    agreed = bool(resolution.global_scales) and not (unified or apart)
    parts = [
        _input_scales(resolution.input_scales),
        f"{unified} groups of unequal weight_scale_2 unified" if unified else "",
        "weight_scale_2 agrees wherever engines share it" if agreed else "",
        f"{apart} gate/up pairs kept apart" if apart else "",
        *_imputed(prepared.plan.imputed),
        *_factors(prepared.job),
    ]
    return "; ".join(part for part in parts if part)


def _imputed(names: Sequence[str]) -> list[str]:
    factors = sum(name.endswith("pre_quant_scale") for name in names)
    counts = ((len(names) - factors, "input_scale imputed"), (factors, "pre_quant_scale of ones added"))
    return [f"{count} {what}" for count, what in counts if count]


def _factors(job: Job) -> Iterator[str]:
    """What becomes of pre_quant_scale."""
    if job.folds:
        rounding = max(fold.rounding for fold in job.folds.values())
        yield f"pre_quant_scale of {len(job.folds)} layers folded into norms, rounded by at most {rounding:.2g}"
    if job.pack is not None and job.pack.factors:
        yield f"pre_quant_scale of {len(job.pack.factors)} layers kept for the kernel"
    if job.pack is not None and job.pack.rows:
        yield f"down's of {len(job.pack.rows)} layers folded into up's scales"


def _input_scales(reports: Sequence[InputScaleReport]) -> str:
    if not reports:
        return "no input_scale (weight-only)"
    experts = [report for report in reports if report.gemm != "input"]
    others = [report for report in reports if report.gemm == "input"]
    parts = [
        f"{sum(map(changes, group))} of {len(group)} {label}"
        for group, label in ((experts, "expert GEMMs"), (others, "other linears or fused groups"))
        if group
    ]
    return f"input_scale normalised in {' and '.join(parts)}"


def scale_table(
    inputs: Sequence[InputScaleReport], globals_: Sequence[GlobalScaleReport], rescaled: Mapping[str, RescaleCounts]
) -> Table:
    """Per layer: spread of input scales, ratio of global scales, and what unifying did to block scales."""
    table = Table(title="scales", title_justify="left", box=None, header_style="bold", padding=(0, 1))
    for column in ("layer", "where", "GEMM", "input_scale min..max", "written", "gate/up ratio", "block scales"):
        table.add_column(column, no_wrap=column != "where")
    by_place = {report.where: report for report in globals_}
    for report in inputs:
        good = report.good
        pairs = by_place.get(report.where) if report.gemm != "w2" else None
        add_row(
            table,
            "" if report.layer is None else str(report.layer),
            report.where.rpartition(f"layers.{report.layer}.")[2],
            report.gemm,
            f"{min(good):.4g}..{max(good):.4g}" if report.spread > 1 else f"{max(good):.4g}",
            "as stored" if report.after is None else f"{report.after:.4g}",
            "" if pairs is None or not pairs.pairs else f"up to {pairs.max_ratio:.3g}",
            "" if pairs is None or not rescaled or not pairs.unified else rescale_text(total_counts(pairs, rescaled)),
        )
    return table


def rescale_text(counts: RescaleCounts) -> str:
    """What unifying did, in a line."""
    if not counts.inexact:
        return f"exact ({counts.blocks:,} blocks)"
    text = f"{counts.inexact:,} of {counts.blocks:,} blocks inexact, largest error {counts.max_relative_error:.2%}"
    lost = [f"{counts.became_subnormal:,} became subnormal"] if counts.became_subnormal else []
    lost += [f"{counts.became_zero:,} became zero"] if counts.became_zero else []
    return ", ".join([text, *lost])


def result(targets_: Sequence[Prepared], done: Result) -> RenderableType:
    """What was written."""
    lines: list[RenderableType] = []
    for number, prepared in enumerate(targets_):
        if len(targets_) > 1:
            lines.append(plain(f"{prepared.options.target}:"))
        lines += _rescaled(prepared, done.outcome.rescaled_by(number))
        lines += _folded(prepared, done.outcome.folded_by(number))
        flushed = sum(done.outcome.flushed_by(number).values())
        if flushed:
            text = f"{flushed:,} block scales are too small for this kernel and became zero; unpack can't restore them"
            lines.append(plain(text, style="yellow"))
    written = sum(entry["bytes"] for manifest in done.manifests for entry in manifest["outputs"].values())
    lines.append(plain(f"Done: {done.out} ({size(written)}); nvfp4prep.json says what was changed.", style="green"))
    if len(targets_) == 1 and (hint := _what_next(targets_[0], done.out)):
        lines.append(plain(hint))
    return Group(*lines)


def _what_next(prepared: Prepared, out: Path) -> str | None:
    """How the output is served, in a sentence."""
    if prepared.job.pack is None:
        return other_targets(prepared.checkpoint) if prepared.options.target == "hf" else None
    target = prepared.job.pack.target
    if prepared.quant.algo == "NVFP4_AWQ" and target.engine == "vllm":
        return None  # a warning of the plan says why
    if target.module.REQUIRES.format is Format.INT4 or target.engine == "flashinfer":
        return "No engine loads this layout yet: nvfp4prep.load_experts gives a kernel what it takes (docs/serving.md)."
    if target.engine == "sglang":
        return f"With its plugin: sglang serve --model-path {out} (docs/serving.md says with which flags)"
    sizes = f" --tensor-parallel-size {target.tp}" if target.ep == 1 and target.tp > 1 else ""
    sizes = f" --tensor-parallel-size {target.ep} --enable-expert-parallel" if target.ep > 1 else sizes
    return f"With its plugin: vllm serve {out} --load-format nvfp4prep{sizes} (docs/serving.md)"


def _rescaled(prepared: Prepared, rescaled: Mapping[str, RescaleCounts]) -> list[Text]:
    lines = []
    for report in prepared.resolution.global_scales:
        if report.unified:
            counts = total_counts(report, rescaled)
            where = report.where if report.layer is None else f"layer {report.layer}: {report.where}"
            lines.append(
                plain(f"{where}: {len(report.pairs)} of {report.total} weight_scale_2 unified, {rescale_text(counts)}")
            )
    return lines


def _folded(prepared: Prepared, folded: Mapping[str, RescaleCounts]) -> list[Text]:
    counts = by_layer(folded, prepared.checkpoint.schema)
    return [
        plain(f"{path}: down's pre_quant_scale folded into up's block scales, {rescale_text(one)}")
        for path, one in counts.items()
    ]


def targets(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """The packed targets, a block each: kernel, GPUs, what it needs, and a line for each engine."""
    lines: list[Text] = []
    before = None
    for row in rows:
        if row["target"] != before:
            before = row["target"]
            lines.append(plain(f"{row['target']}", style="bold"))
            lines.append(plain(f"  kernel {row['kernel']}; experts {row['experts']}; GPUs {row['gpus']}"))
            needs = f"gate/up scales: {row['alphas']}; input_scale: {row['input_scale']}; biases: {row['biases']}"
            lines.append(plain(f"  {needs}; pre_quant_scale: {row['pre_quant_scale']}"))
            lines.append(plain(f"  TP and EP; EPLB: {row['eplb']}"))
        lines.append(plain(f"  {row['engine']} ({row['backend']}): {row['alignment']}; id {row['layout_id']}"))
    return Group(*lines)
