"""Plotly figures of the experts' input scales: a heatmap, and every value. Importing this module needs plotly."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nvfp4prep.report.data import GemmScales, problem, usable
from nvfp4prep.report.markup import escaped
from nvfp4prep.report.traces import (
    BAD,
    BLUE,
    GEMMS,
    GREEN,
    GREY,
    MANY,
    ORANGE,
    WHOSE,
    Points,
    add_bad,
    described,
    finished,
    layer_axis,
    log_axis,
    marker_size,
    place_of,
    segments,
    shown,
    trace_of,
    whose,
)
from nvfp4prep.scalestats import Entry

_DIVERGING = [[0.0, "#1b5fa8"], [0.25, "#7fb0dc"], [0.5, "#eceae4"], [0.75, "#f0b45a"], [1.0, "#a85400"]]
_COLOURS = {"gate": GREY, "up": GREEN, "gate and up": BLUE, "gate/up": BLUE, "down": ORANGE}


@dataclass(frozen=True, slots=True)
class Cell:
    """One expert in the heatmap: log10 of its scale over the layer's median, None where a scale of it is unusable."""

    height: float | None
    text: str


def cells(scales: GemmScales) -> list[Cell]:
    """The heatmap's row of one GEMM; of gate and up the one farther from the median counts."""
    median = scales.median
    owned: dict[int, list[Entry]] = defaultdict(list)
    for entry in scales.entries:
        for expert in range(scales.experts) if entry.expert is None else (entry.expert,):
            owned[expert].append(entry)
    row = []
    for expert in range(scales.experts):
        found = owned[expert]
        values = usable(found)
        both = len(values) == 2 == len(found) and values[0] == values[1]
        text = f"{values[0]:.5g}" if both else ", ".join(f"{entry.projection} {shown(entry)}" for entry in found)
        if median is None or not found or len(values) < len(found):
            row.append(Cell(None, text or "missing"))
        else:
            row.append(Cell(max((math.log10(value / median) for value in values), key=abs), text))
    return row


def input_heatmap(inputs: Sequence[GemmScales]) -> Any:
    """Layer by expert: log10 of the input scale over the layer's median, for w13 and w2; unusable ones in magenta."""
    gemms = [gemm for gemm in GEMMS if any(scales.gemm == gemm for scales in inputs)]
    labels = list(dict.fromkeys(scales.label for scales in inputs))
    figure = make_subplots(
        1, len(gemms), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=[GEMMS[gemm] for gemm in gemms]
    )
    names = [escaped(label) for label in labels]
    drawn = {(scales.label, scales.gemm): cells(scales) for scales in inputs}
    heights = [abs(cell.height) for row in drawn.values() for cell in row if cell.height is not None]
    reach = max([math.log10(1.05), *heights])
    width = max(map(len, drawn.values()))
    many = len(labels) * width > MANY
    for column, gemm in enumerate(gemms, 1):
        z, bad = (np.full((len(labels), width), np.nan, dtype=np.float32) for _ in range(2))
        texts, bad_texts = ([[""] * width for _ in labels] for _ in range(2))
        for y, label in enumerate(labels):
            for x, cell in enumerate(drawn.get((label, gemm), ())):
                if cell.height is None:
                    bad[y, x], bad_texts[y][x] = 1, escaped(cell.text)
                else:
                    z[y, x], texts[y][x] = cell.height, escaped(cell.text)
        common = {"y": names, "hoverongaps": False, "xgap": int(not many), "ygap": int(not many)}
        hover = "layer %{y}, expert %{x}<br>%{text}"
        figure.add_trace(
            go.Heatmap(
                z=z,
                text=texts,
                customdata=10**z,
                zmin=-reach,
                zmax=reach,
                colorscale=_DIVERGING,
                showscale=column == len(gemms),
                colorbar=_factors(reach),
                hovertemplate=hover + "<br>%{customdata:.3~g}× the layer's median<extra></extra>",
                **common,
            ),
            1,
            column,
        )
        if not np.isnan(bad).all():
            figure.add_trace(
                go.Heatmap(
                    z=bad,
                    text=bad_texts,
                    zmin=0,
                    zmax=1,
                    colorscale=[[0, BAD], [1, BAD]],
                    showscale=False,
                    name="missing or bad",
                    showlegend=True,
                    hovertemplate=hover + "<extra>missing or bad</extra>",
                    **common,
                ),
                1,
                column,
            )
        figure.update_xaxes(title_text="expert", showgrid=False, zeroline=False, row=1, col=column)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, zeroline=False, automargin=True)
    figure.update_yaxes(title_text="layer", row=1, col=1)
    return finished(figure, min(900, max(260, 140 + 18 * len(labels))))


def _factors(reach: float) -> dict[str, Any]:
    """A colour bar that reads in factors of the median."""
    levels = [-reach, -reach / 2, 0.0, reach / 2, reach]
    return {
        "title": {"text": "of the layer's median", "side": "right"},
        "tickvals": levels,
        "ticktext": [f"{10**level:.3g}×" for level in levels],
        "thickness": 14,
    }


def input_strip(inputs: Sequence[GemmScales]) -> Any:
    """Every input scale: layers along x with their experts in order, the value along y, and the layer's maximum."""
    gemms = [gemm for gemm in GEMMS if any(scales.gemm == gemm for scales in inputs)]
    labels = list(dict.fromkeys(scales.label for scales in inputs))
    many = sum(len(scales.entries) for scales in inputs) > MANY
    figure = make_subplots(
        len(gemms), 1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=[GEMMS[gemm] for gemm in gemms]
    )
    for row, gemm in enumerate(gemms, 1):
        here = [scales for scales in inputs if scales.gemm == gemm]
        good: dict[str, Points] = defaultdict(Points)
        bad = Points()
        tops = []
        stored = [entry for scales in here for entry in scales.entries]
        values = usable(stored)
        axis = log_axis(values, len(values) < len(stored))
        size = marker_size(len(stored))
        for scales in here:
            position = labels.index(scales.label)
            high = scales.spread.high
            if high is not None:
                tops.append((position - 0.45, position + 0.45, high))
            for entry, projection in _merged(scales.entries):
                x = place_of(position, entry.expert, scales.experts)
                if entry.value is None or problem(entry):
                    who = described(scales.label, entry.expert, projection)
                    bad.add(x, axis.rail, f"{who}<br>input_scale {shown(entry)}")
                else:
                    good[projection].add(x, entry.value, *whose(scales.label, entry.expert))
        if tops:
            hover = "the layer's maximum %{y:.7~g}<extra></extra>"
            figure.add_trace(segments(tops, "layer's maximum", GREY, "dot", hover), row, 1)
        for projection, points in good.items():
            marker = {"color": _COLOURS.get(projection, BLUE), "size": size}
            hover = f"{WHOSE}, {projection}<br>input_scale %{{y:.7~g}}"
            figure.add_trace(trace_of(points, many, projection, hover, **marker), row, 1)
        add_bad(figure, bad, many, row)
        figure.update_yaxes(**axis.layout("input_scale"), row=row, col=1)
    figure.update_xaxes(**{**layer_axis(labels), "title": None})
    figure.update_xaxes(title_text="layer (its experts from left to right)", row=len(gemms), col=1)
    return finished(figure, 130 + 260 * len(gemms))


def _merged(found: Sequence[Entry]) -> Iterable[tuple[Entry, str]]:
    """Each scale with its projection; an expert's gate and up are one where they are equal, as they mostly are."""
    for number, entry in enumerate(found):
        before, after = found[number - 1] if number else None, found[number + 1] if number + 1 < len(found) else None
        if entry.projection == "gate" and after is not None and _same(entry, after):
            yield entry, "gate and up"
        elif entry.projection != "up" or before is None or not _same(before, entry):
            yield entry, entry.projection


def _same(gate: Entry, up: Entry) -> bool:
    return (gate.projection, up.projection, gate.expert, gate.value) == ("gate", "up", up.expert, up.value)
