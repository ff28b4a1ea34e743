"""Pages about checkpoints, for tests of the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nvfp4prep import validation
from nvfp4prep.checkpoint import read_checkpoint
from nvfp4prep.convert import Options, prepare, write
from nvfp4prep.findings import Finding
from nvfp4prep.report.data import GemmScales, LayerPairs, PageData, Pair, collect
from nvfp4prep.report.histogram import block_scale_histogram, block_scales
from nvfp4prep.report.history import Before, History, InputChange, PairChange
from nvfp4prep.rules import RULES
from nvfp4prep.scalestats import Entry


def report_of(folder: Path, *findings: Finding, **changes: Any) -> validation.Report:
    """A report of these findings, of every rule."""
    return replace(
        validation.Report(folder.name, None, "scales", (), findings, (), RULES),
        **changes,
    )


def collected(folder: Path, *findings: Finding, read_blocks: bool = True) -> PageData:
    """What a page about a checkpoint would show."""
    checkpoint = read_checkpoint(str(folder))
    counts = block_scale_histogram(checkpoint.source, block_scales(checkpoint.schema)) if read_blocks else None
    return collect(checkpoint, report_of(folder, *findings), counts)


def converted(source: Path, out: Path, **options: Any) -> Path:
    """The `hf` output of a checkpoint."""
    write(prepare(str(source), Options(**options)), out, overwrite=False, workers=2, progress=lambda _: None)
    return out


def large(base: PageData, layers: int = 61, experts: int = 256) -> PageData:
    """A page about a model as large as DeepSeek-V3, every scale different, with its history."""
    inputs, pairs, changes, unified = [], [], [], []
    for layer in range(layers):
        path = f"model.layers.{layer}.mlp"
        values = [1e-3 * (1 + (layer * 7919 + expert * 104729) % 9973 / 997) for expert in range(experts)]
        w13 = [Entry(e, half, value) for e, value in enumerate(values) for half in ("gate", "up")]
        w2 = [Entry(e, "down", value * 3) for e, value in enumerate(values)]
        for gemm, entries in (("w13", w13), ("w2", w2)):
            inputs.append(GemmScales(str(layer), path, gemm, experts, tuple(entries)))
            before = tuple(Before(entry.expert, entry.projection, entry.value, None) for entry in entries)
            changes.append(InputChange(path, layer, gemm, before, tuple(replace(e, value=0.1) for e in entries)))
        scales = [Pair(e, Entry(e, "gate", 1e-4), Entry(e, "up", value / 10)) for e, value in enumerate(values)]
        pairs.append(LayerPairs(str(layer), path, True, tuple(scales)))
        unified += [PairChange(path, layer, e, (1e-4, value / 10), (1.0, 1.0)) for e, value in enumerate(values)]
    return replace(
        base,
        moe_layers=layers,
        quantized_moe=layers,
        inputs=tuple(inputs),
        pairs=tuple(pairs),
        history=History("source", 1, tuple(changes), tuple(unified), 0),
    )
