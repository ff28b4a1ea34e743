"""The plotly figure of scales before and after a conversion. Importing this module needs plotly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from plotly.subplots import make_subplots

from nvfp4prep.report.data import problem, usable
from nvfp4prep.report.history import History, InputChange
from nvfp4prep.report.markup import escaped
from nvfp4prep.report.traces import (
    BLUE,
    GEMMS,
    MANY,
    ORANGE,
    PAIR_HOVER,
    WHOSE,
    Points,
    add_bad,
    described,
    finished,
    group_places,
    layer_axis,
    log_axis,
    marker_size,
    place_of,
    segments,
    trace_of,
    whose,
)
from nvfp4prep.scales import fault


def before_after(history: History, labels: Mapping[str, str]) -> Any:
    """Scales before the conversion as points, those stored now as lines (one value) or rings (several).

    `labels` maps a MoE layer's path to its name in plots.
    """
    kinds = (("w13", GEMMS["w13"]), ("w2", GEMMS["w2"]), ("input", "fused linears outside the experts"))
    rows: list[tuple[str, str]] = [
        (kind, f"input_scale: {title}") for kind, title in kinds if any(c.gemm == kind for c in history.inputs)
    ]
    if history.pairs:
        rows.append(("pairs", "weight_scale_2: up / gate"))
    many = sum(len(change.before) for change in history.inputs) + len(history.pairs) > MANY
    spacing = 0.3 / len(rows)
    figure = make_subplots(len(rows), 1, vertical_spacing=spacing, subplot_titles=[title for _, title in rows])
    for row, (kind, _) in enumerate(rows, 1):
        if kind == "pairs":
            _pairs_row(figure, row, history, labels, many)
        else:
            _inputs_row(figure, row, [c for c in history.inputs if c.gemm == kind], labels, many)
    figure.update_xaxes(title=None)
    figure.update_xaxes(title_text="layer", row=len(rows), col=1)
    return finished(figure, 110 + 270 * len(rows))


def _inputs_row(figure: Any, row: int, changes: Sequence[InputChange], labels: Mapping[str, str], many: bool) -> None:
    names = [labels.get(change.where, "?" if change.layer is None else str(change.layer)) for change in changes]
    columns = list(dict.fromkeys(names))
    routed = changes[0].gemm != "input"
    whom = WHOSE if routed else "%{customdata[0]}"
    places = group_places([change.where for change in changes], [columns.index(name) for name in names])
    before: dict[str, Points] = defaultdict(Points)
    after: dict[str, Points] = defaultdict(Points)
    bad = Points()
    lines: list[tuple[float, float, float]] = []
    known = [scale for change in changes for scale in change.before]
    good = [scale.value for scale in known if scale.value is not None and scale.problem is None]
    now = usable(entry for change in changes for entry in change.after)
    axis = log_axis([*good, *now], len(good) < len(known))
    for change, name in zip(changes, names, strict=True):
        left, right = places[change.where]
        label = name if routed else change.where
        for number, scale in enumerate(change.before):
            x = left + (right - left) * (number + 0.5) / len(change.before)
            if scale.value is None or scale.problem:
                place = (label, scale.expert, scale.projection)
                who = described(*place) if routed else escaped(f"{label}: {scale.projection}")
                bad.add(x, axis.rail, f"{who}<br>before: {escaped(scale.problem)}")
            else:
                before[scale.projection].add(x, scale.value, *whose(label, scale.expert))
        values = usable(change.after)
        if len(set(values)) == 1:
            lines.append((left, right, values[0]))
            continue
        for number, entry in enumerate(change.after):
            if entry.value is not None and problem(entry) is None:
                x = left + (right - left) * (number + 0.5) / len(change.after)
                after[entry.projection].add(x, entry.value, *whose(label, entry.expert))
    size = marker_size(len(known))
    for projection, points in before.items():
        hover = f"{whom}, {escaped(projection)}<br>before: %{{y:.7~g}}"
        figure.add_trace(trace_of(points, many, "before", hover, color=BLUE, size=size, opacity=0.75), row, 1)
    if lines:
        figure.add_trace(segments(lines, "after", ORANGE, "solid", "after: %{y:.7~g}<extra></extra>"), row, 1)
    for projection, points in after.items():
        marker = {"color": ORANGE, "size": size + 4, "symbol": "circle-open"}
        hover = f"{whom}, {escaped(projection)}<br>after: %{{y:.7~g}}"
        figure.add_trace(trace_of(points, many, "after, each its own", hover, **marker), row, 1)
    add_bad(figure, bad, many, row)
    figure.update_xaxes(**layer_axis(columns), row=row, col=1)
    figure.update_yaxes(**axis.layout("input_scale"), row=row, col=1)


def _pairs_row(figure: Any, row: int, history: History, labels: Mapping[str, str], many: bool) -> None:
    paths = list(dict.fromkeys(pair.where for pair in history.pairs))
    before, after = Points(), Points()
    experts = max(pair.expert for pair in history.pairs) + 1
    for pair in history.pairs:
        x = place_of(paths.index(pair.where), pair.expert, experts)
        who = whose(labels.get(pair.where, pair.where), pair.expert)
        gate, up = pair.before
        before.add(x, up / gate, *who, gate, up)
        new_gate, new_up = pair.after
        if new_gate and new_up and not fault(new_gate) and not fault(new_up):
            after.add(x, new_up / new_gate, *who, new_gate, new_up)
    size = marker_size(len(before.x))
    figure.add_trace(trace_of(before, many, "before", PAIR_HOVER, color=BLUE, size=size, opacity=0.75), row, 1)
    marker = {"color": ORANGE, "size": size + 1, "symbol": "line-ew-open", "line": {"width": 2}}
    figure.add_trace(trace_of(after, many, "after", PAIR_HOVER, **marker), row, 1)
    figure.update_xaxes(**layer_axis([labels.get(path, path) for path in paths]), row=row, col=1)
    axis = log_axis([*before.y, *after.y], False, around_one=True)
    figure.update_yaxes(**axis.layout("up / gate"), row=row, col=1)
