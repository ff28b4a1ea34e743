"""The sections of the page: head, findings, and each plot with what it tells, or a sentence where it has no data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from plotly.offline import get_plotlyjs

from nvfp4prep.report import changes, figures, input_figures
from nvfp4prep.report.data import GemmScales, PageData
from nvfp4prep.report.head import head
from nvfp4prep.report.history import History
from nvfp4prep.report.markup import escaped, paragraph, table, tiles
from nvfp4prep.report.verdicts import findings
from nvfp4prep.scalestats import Spread, times

_WORST_GEMMS = 8


@dataclass
class Body:
    """The page's HTML and the figures that its script draws, by the id of the element that holds their JSON."""

    html: str
    plots: dict[str, Any] = field(default_factory=dict)

    def plot(self, name: str, figure: Any, caption: str) -> str:
        """A place for a figure, of the height it will have."""
        self.plots[f"figure-{name}"] = figure
        return (
            f'<figure>\n<div class="plot" id="plot-{name}" data-figure="figure-{name}" role="img" '
            f'aria-label="{escaped(caption)}" style="height:{figure.layout.height}px"></div>\n'
            f"<figcaption>{escaped(caption)}</figcaption>\n</figure>"
        )


def plotly_js() -> str:
    """The JavaScript that draws the plots."""
    return str(get_plotlyjs())


def body(data: PageData) -> Body:
    """The whole body."""
    page = Body("")
    parts: tuple[tuple[str, str, Callable[[PageData, Body], Iterable[str]]], ...] = (
        ("findings", "Findings", lambda data, _: findings(data.verdicts)),
        ("inputs", "Input scales of the experts", _inputs),
        ("pairs", "Gate and up: weight_scale_2", _pairs),
        ("fused", "Fused linears outside the experts", _fused),
        ("blocks", "Block scales", _blocks),
        ("history", "Before and after", _history),
    )
    links = "".join(f'<a href="#{name}">{escaped(title)}</a>\n' for name, title, _ in parts)
    written = [head(data), f"<nav>\n{links}</nav>"]
    for name, title, write in parts:
        written += [f'<section id="{name}">\n<h2>{escaped(title)}</h2>', *write(data, page), "</section>"]
    written += [
        "<noscript><p>The plots need JavaScript.</p></noscript>",
        f"<footer>Written by nvfp4prep {escaped(data.version)}. This file is the whole page.</footer>",
    ]
    page.html = "\n".join(written)
    return page


def _no_experts(data: PageData) -> str | None:
    """Why there is nothing to say about NVFP4 experts, or None."""
    if data.quantized_moe:
        return None
    if data.moe_layers:
        return "The experts of this checkpoint are not stored as NVFP4: nvfp4prep validate looks at their scales."
    return "This checkpoint has no MoE layers."


# --- input scales ----------------------------------------------------------------------------------------------------


def _inputs(data: PageData, page: Body) -> Iterable[str]:
    nothing = _no_experts(data)
    if nothing is None and not data.inputs:
        nothing = "The experts have no input scales: only weights are quantised (W4A16), activations stay 16-bit."
    if nothing is not None:
        yield paragraph(nothing, "note")
        return
    spreads = [(scales, scales.spread) for scales in data.inputs]
    yield paragraph(
        "Each expert has an input_scale for gate and up (w13) and one for down (w2). Engines that take the layer's "
        "maximum, a rank's, or each expert's own give different answers where these differ."
    )
    yield paragraph(_verdict_on_inputs(spreads), "note")
    if any(found.ratio > 1 or found.faulty for _, found in spreads):
        yield page.plot(
            "input-heatmap",
            input_figures.input_heatmap(data.inputs),
            "Colour: an expert's scale over the median of its layer, on a logarithmic scale. Orange experts saw larger "
            "activations than the others, blue ones smaller. Magenta: missing or unusable.",
        )
    yield page.plot(
        "input-strip",
        input_figures.input_strip(data.inputs),
        "Every stored value. The dotted line is the layer's maximum, which convert writes to all experts by default. "
        "Crosses on the lower line have no usable value.",
    )
    worst = sorted(spreads, key=lambda pair: (pair[1].faulty, pair[1].ratio), reverse=True)[:_WORST_GEMMS]
    if any(found.ratio > 1 or found.faulty for _, found in worst):
        title = "All layers" if len(worst) == len(spreads) else "The worst: bad values first, then the widest"
        yield f"<h3>{title}</h3>"
        yield _spread_table(worst)


def _verdict_on_inputs(spreads: list[tuple[GemmScales, Spread]]) -> str:
    differing = [found for _, found in spreads if found.ratio > 1]
    faulty = sum(found.faulty for _, found in spreads)
    layers = len({scales.label for scales, _ in spreads})
    if differing:
        scales, widest = max(spreads, key=lambda pair: pair[1].ratio)
        of = "" if widest.top is None else f" (the maximum is expert {widest.top}'s)"
        text = (
            f"They differ in {len(differing)} of {len(spreads)} GEMMs of {layers} layers, at most by "
            f"{times(widest.ratio)}: layer {scales.label}, {scales.gemm}{of}."
        )
    else:
        text = f"They are equal within each of {len(spreads)} GEMMs of {layers} layers."
    bad = f" {_are(faulty)} missing or unusable." if faulty else " None is missing or unusable."
    return text + bad


def _spread_table(spreads: list[tuple[GemmScales, Spread]]) -> str:
    rows = [
        (
            scales.label,
            scales.gemm,
            "none usable" if found.low is None else f"{found.low:.5g}",
            "" if found.high is None else f"{found.high:.5g}",
            times(found.ratio) if found.ratio > 1 else "equal",
            "" if found.top is None else str(found.top),
            ", ".join(f"{count} {kind}" for kind, (count, _) in found.faults.items()) or "none",
        )
        for scales, found in spreads
    ]
    columns = ("layer", "GEMM", "smallest", "largest", "apart", "largest at expert", "missing or bad")
    return table(columns, rows, frozenset({2, 3, 4, 5}))


# --- gate and up -----------------------------------------------------------------------------------------------------


def _pairs(data: PageData, page: Body) -> Iterable[str]:
    nothing = _no_experts(data)
    layers = [layer for layer in data.pairs if layer.pairs]
    if nothing is None and not layers:
        if any(layer.gated for layer in data.pairs):
            nothing = "Gate and up are stored as one tensor with one weight_scale_2, so nothing can differ."
        else:
            nothing = "The experts have no gate, so there are no pairs to compare."
    if nothing is not None:
        yield paragraph(nothing, "note")
        return
    pairs = [pair for layer in layers for pair in layer.pairs]
    ratios = [max(pair.ratio, 1 / pair.ratio) for pair in pairs if pair.ratio is not None and pair.ratio != 1]
    bad = sum(pair.ratio is None for pair in pairs)
    yield paragraph(
        "Engines run gate and up as one GEMM. Where an expert's two weight_scale_2 differ, some engines read both "
        "halves with one of them."
    )
    text = (
        f"{len(ratios):,} of {len(pairs):,} pairs differ, at most by {times(max(ratios))}."
        if ratios
        else f"All {len(pairs) - bad:,} pairs are equal."
    )
    yield paragraph(text + (f" {_are(bad)} missing or unusable." if bad else ""), "note")
    yield page.plot(
        "pair-ratios",
        figures.pair_ratios(layers),
        "One point per expert: weight_scale_2 of up over that of gate. 1 is what every engine reads alike.",
    )


def _fused(data: PageData, page: Body) -> Iterable[str]:
    if not data.fused:
        yield paragraph("No linears outside the experts are stored as NVFP4 and fused by engines.", "note")
        return
    differing = sum(
        len({entry.value for entry in found}) > 1 for group in data.fused for found in (group.inputs, group.globals)
    )
    yield paragraph(
        "Engines fuse q/k/v, gate/up of dense and shared MLPs, and MLA's first projections. Each group then needs one "
        "input_scale and one weight_scale_2."
    )
    if not differing:
        yield paragraph(f"In all {len(data.fused):,} groups they are equal.", "note")
        return
    yield page.plot(
        "fused",
        figures.fused_scales(data.fused),
        "Each member's scale over the largest of its group; 1 everywhere is what engines read alike.",
    )


# --- block scales ----------------------------------------------------------------------------------------------------


def _blocks(data: PageData, page: Body) -> Iterable[str]:
    blocks = data.blocks
    if blocks is None:
        yield paragraph("Block scales were not read for this page.", "note")
        return
    total = blocks.total
    if not total:
        yield paragraph("No NVFP4 block scales are stored.", "note")
        return
    yield paragraph(
        "Each 16 weights of an NVFP4 linear share one block scale in E4M3. Below 2⁻⁶ it is subnormal and has fewer "
        "bits; negative ones and NaN have no place in a sound checkpoint."
    )
    yield tiles(
        [
            (f"{total:,}", "block scales", ""),
            (_share(blocks.largest, total), "at 448, the largest", ""),
            (_share(blocks.subnormal, total), "subnormal", ""),
            (_share(blocks.zero, total), "zero", ""),
            (f"{blocks.negative:,}", "negative", "error" if blocks.negative else "good"),
            (f"{blocks.nan:,}", "NaN", "error" if blocks.nan else "good"),
        ]
    )
    yield page.plot(
        "blocks",
        figures.block_histogram(blocks),
        "How often each E4M3 value occurs among all block scales, counts on a logarithmic axis. Right of the dotted "
        "line: codes that a sound checkpoint does not have.",
    )


def _are(count: int) -> str:
    return f"{count:,} {'is' if count == 1 else 'are'}"


def _share(count: int, total: int) -> str:
    return "none" if not count else f"{count / total:.2%}" if count * 10000 >= total else "< 0.01%"


# --- before and after ------------------------------------------------------------------------------------------------


def _history(data: PageData, page: Body) -> Iterable[str]:
    history = data.history
    if history is None:
        yield paragraph(
            "This checkpoint is no output of nvfp4prep (it has no nvfp4prep.json): there is no before.", "note"
        )
        return
    yield paragraph(_what_changed(history), "note")
    if history.passed_over:
        yield paragraph(
            f"{history.passed_over} entries of nvfp4prep.json fit nothing stored here, and are not shown.", "note"
        )
    shown = history.shown
    if not shown.inputs and not shown.pairs:
        return
    labels = {layer.path: layer.label for layer in data.pairs}
    yield page.plot(
        "history",
        changes.before_after(shown, labels),
        "Blue: the values that the conversion read, expert by expert. Orange: what is stored now; one line where all "
        "of a layer's experts share a value.",
    )


def _what_changed(history: History) -> str:
    inputs = [change for change in history.inputs if change.changed]
    pairs = [pair for pair in history.pairs if pair.changed]
    parts = []
    if inputs:
        widest = max(change.spread for change in inputs)
        parts.append(
            f"input scales of {len(inputs):,} of {len(history.inputs):,} GEMMs, up to {times(widest)} apart before"
        )
    replaced = sum(scale.problem is not None for change in inputs for scale in change.before)
    if replaced:
        parts.append(f"{replaced:,} {'was' if replaced == 1 else 'were'} missing or unusable")
    if pairs:
        parts.append(
            f"weight_scale_2 of {len(pairs):,} of {len(history.pairs):,} gate/up pairs, "
            f"up to {times(max(pair.ratio for pair in pairs))} apart before"
        )
    what = "; ".join(parts) if parts else "no scale of the experts or of fused linears"
    runs = f" ({history.runs} runs)" if history.runs > 1 else ""
    return f"Converted from {history.source}{runs}. Changed: {what}."
