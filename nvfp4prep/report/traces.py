"""What the figures share: points, lines, axes, colours. Importing this module needs plotly.

Colours of text, grid and background are left to the page, which has a light and a dark theme.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import plotly.graph_objects as go

from nvfp4prep.report.data import problem
from nvfp4prep.report.markup import escaped
from nvfp4prep.scalestats import Entry

BLUE, GREEN, ORANGE, GREY, BAD = "#3d7fc4", "#2b9a72", "#d97a00", "#8a8f98", "#d3006b"
MANY = 3000
"""Points from which WebGL draws them; SVG stays sharp in print, and works everywhere."""
GEMMS = {"w13": "w13 (gate and up)", "w2": "w2 (down)"}
_MOST_TICKS = 32
_LEAST_SPAN = 0.15
_BAD_HOVER = "%{customdata[0]}"


@dataclass
class Points:
    """Points to be drawn as one trace: positions, values, and what the pointer shows besides, in columns."""

    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    about: list[tuple[float | str, ...]] = field(default_factory=list)

    def add(self, x: float, y: float, *about: float | str) -> None:
        self.x.append(x)
        self.y.append(y)
        self.about.append(about)


def trace_of(points: Points, many: bool, name: str, hover: str, **marker: Any) -> Any:
    """Markers; `hover` is what the pointer shows, with what is said about a point as customdata."""
    kind = go.Scattergl if many else go.Scatter
    numbers = all(isinstance(value, int | float) for about in points.about for value in about)
    return kind(
        x=np.asarray(points.x, dtype=np.float32),
        y=np.asarray(points.y, dtype=np.float64),  # a ratio of F32 values may be no F32
        customdata=np.asarray(points.about, dtype=np.float32) if numbers else points.about,  # numbers take less space
        mode="markers",
        name=name,
        hovertemplate=hover + "<extra></extra>",
        marker=marker,
        legendgroup=name,
    )


def segments(levels: Iterable[tuple[float, float, float]], name: str, colour: str, dash: str, hover: str) -> Any:
    """Horizontal lines, each from x to x at y."""
    x: list[float | None] = []
    y: list[float | None] = []
    for left, right, level in levels:
        x += [left, right, None]
        y += [level, level, None]
    line = {"color": colour, "width": 2, "dash": dash}
    return go.Scatter(x=x, y=y, mode="lines", name=name, line=line, hovertemplate=hover, legendgroup=name)


def ticks(labels: Sequence[str]) -> dict[str, Any]:
    """Ticks of an axis whose positions 0, 1, 2 ... stand for layers."""
    step = math.ceil(len(labels) / _MOST_TICKS) or 1
    shown = range(0, len(labels), step)
    short = [label if len(label) <= 24 else "…" + label[-23:] for label in labels]
    return {
        "tickmode": "array",
        "tickvals": list(shown),
        "ticktext": [escaped(short[position]) for position in shown],
        "zeroline": False,
    }


def layer_axis(labels: Sequence[str]) -> dict[str, Any]:
    """The x axis of plots with a column for each layer."""
    return {**ticks(labels), "title": {"text": "layer"}, "range": [-0.6, len(labels) - 0.4], "showgrid": False}


def place_of(position: int, expert: int | None, experts: int) -> float:
    """Where an expert stands inside its layer's column: all in order, over four fifths of it."""
    return position + (0.0 if expert is None or experts < 2 else 0.8 * expert / (experts - 1) - 0.4)


WHOSE = "layer %{customdata[0]}, expert %{customdata[1]}"
"""What the pointer says of points about which `whose` was added first."""
PAIR_HOVER = WHOSE + "<br>up/gate %{y:.6~g}: gate %{customdata[2]:.5~g}, up %{customdata[3]:.5~g}"


def whose(label: str, expert: int | None) -> tuple[int | str, int | str]:
    """Layer and expert for the pointer."""
    return int(label) if label.isdecimal() else escaped(label), "all" if expert is None else expert


def described(label: str, expert: int | None, projection: str) -> str:
    """The same as text, with the projection."""
    return escaped(f"layer {label}, {'all experts' if expert is None else f'expert {expert}'}, {projection}")


def marker_size(count: int) -> int:
    """Of a plot with so many points."""
    return 7 if count < 500 else 5 if count < MANY else 3


def finished(figure: Any, height: int) -> Any:
    """The figure with the layout that all share: a legend above, and no colours."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 80, "r": 20, "t": 60, "b": 55},
        hovermode="closest",
        legend={"orientation": "h", "y": 1, "yref": "container", "yanchor": "top", "x": 0, "itemsizing": "constant"},
    )
    if not any(trace.name and trace.showlegend is not False for trace in figure.data):
        figure.update_layout(margin={"t": 40})
    shown: set[str] = set()
    for trace in figure.data:  # one entry for the same thing in several subplots
        if trace.name and trace.showlegend is not False:
            trace.showlegend = trace.name not in shown
            shown.add(trace.name)
    return figure


@dataclass(frozen=True, slots=True)
class LogAxis:
    """The range of a logarithmic axis, as powers of ten. `rail` is where values stand that have no place on it."""

    low: float
    high: float
    bad: bool

    @property
    def rail(self) -> float:
        return float(10 ** (self.low - 0.14 * (self.high - self.low)))

    def layout(self, title: str) -> dict[str, Any]:
        """The axis for plotly, with ticks that read as plain numbers."""
        span = self.high - self.low
        ticks_ = {"nticks": 8} if span < 0.7 else {"dtick": "D2" if span < 3 else 1}
        bottom = self.low - span * (0.22 if self.bad else 0.08)
        return {**log_layout(title), **ticks_, "range": [bottom, self.high + 0.08 * span]}


def log_axis(values: Iterable[float], bad: bool, around_one: bool = False) -> LogAxis:
    """An axis that holds positive values; `around_one` puts 1 in its middle."""
    logs = [math.log10(value) for value in values]
    low, high = min(logs, default=0.0), max(logs, default=0.0)
    if around_one:
        high = max(abs(low), abs(high))
        low = -high
    lacking = max(0.0, _LEAST_SPAN - (high - low)) / 2
    return LogAxis(low - lacking, high + lacking, bad)


def log_layout(title: str, tickformat: str = ".3~g") -> dict[str, Any]:
    """What all logarithmic axes have."""
    heading = {"text": title, "standoff": 12}
    return {"type": "log", "title": heading, "automargin": True, "tickformat": tickformat, "zeroline": False}


def add_bad(figure: Any, points: Points, many: bool, row: int) -> None:
    """Crosses for values that are missing or unusable, on a rail of their own."""
    if points.x:
        trace = trace_of(points, many, "missing or bad", _BAD_HOVER, color=BAD, size=9, symbol="x")
        figure.add_trace(trace, row, 1)
        figure.add_hline(y=points.y[0], line={"color": BAD, "width": 1, "dash": "dot"}, row=row, col=1)


def group_places(names: Sequence[str], positions: Sequence[int]) -> dict[str, tuple[float, float]]:
    """(left, right) of each group: those at one position share four fifths of its column."""
    at: dict[int, list[str]] = defaultdict(list)
    for name, position in zip(names, positions, strict=True):
        at[position].append(name)
    places = {}
    for position, members in at.items():
        width = 0.8 / len(members)
        for number, name in enumerate(members):
            left = position - 0.4 + number * width
            places[name] = (left + 0.05 * width, left + 0.95 * width)
    return places


def shown(entry: Entry) -> str:
    """A scale's value, and what is wrong with it."""
    wrong = problem(entry)
    if entry.value is None or not math.isfinite(entry.value):
        return wrong or ""
    return f"{entry.value:.5g}" + (f" ({wrong})" if wrong else "")
