"""Plotly figures of gate and up, block scales, and fused linears outside the experts. Importing it needs plotly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from nvfp4prep.report.data import BlockScales, FusedScales, LayerPairs, problem, usable
from nvfp4prep.report.markup import escaped
from nvfp4prep.report.traces import (
    BAD,
    BLUE,
    GREEN,
    GREY,
    MANY,
    ORANGE,
    PAIR_HOVER,
    Points,
    add_bad,
    finished,
    group_places,
    layer_axis,
    log_axis,
    log_layout,
    marker_size,
    place_of,
    shown,
    trace_of,
    whose,
)
from nvfp4prep.scales import E4M3_SMALLEST_NORMAL_CODE, E4M3_VALUES

# --- gate and up -----------------------------------------------------------------------------------------------------


def pair_ratios(layers: Sequence[LayerPairs]) -> Any:
    """weight_scale_2 of up over that of gate, for every expert."""
    labels = [layer.label for layer in layers]
    count = sum(len(layer.pairs) for layer in layers)
    equal, different, bad = Points(), Points(), Points()
    ratios = [pair.ratio for layer in layers for pair in layer.pairs if pair.ratio is not None]
    axis = log_axis(ratios, len(ratios) < count, around_one=True)
    for position, layer in enumerate(layers):
        for pair in layer.pairs:
            x = place_of(position, pair.expert, len(layer.pairs))
            gate, up, ratio = pair.gate.value, pair.up.value, pair.ratio
            if gate is None or up is None or ratio is None:
                who = escaped(f"layer {layer.label}, expert {pair.expert}")
                bad.add(x, axis.rail, f"{who}<br>gate {shown(pair.gate)}, up {shown(pair.up)}")
            else:
                (equal if ratio == 1 else different).add(x, ratio, *whose(layer.label, pair.expert), gate, up)
    figure = make_subplots(1, 1)
    many = count > MANY
    for points, name, colour in ((equal, "equal", BLUE), (different, "different", ORANGE)):
        if points.x:
            figure.add_trace(trace_of(points, many, name, PAIR_HOVER, color=colour, size=marker_size(count)))
    add_bad(figure, bad, many, 1)
    figure.add_hline(y=1, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_xaxes(**layer_axis(labels))
    figure.update_yaxes(**axis.layout("up / gate"))
    return finished(figure, 340 if different.x or bad.x else 240)


# --- block scales ----------------------------------------------------------------------------------------------------


def block_histogram(blocks: BlockScales) -> Any:
    """Block scales by E4M3 code, counts on a logarithmic axis; NaN, negative and -0 as bars of their own."""
    total = blocks.total or 1
    edge = E4M3_SMALLEST_NORMAL_CODE
    codes = range(len(E4M3_VALUES))
    figure = make_subplots(1, 1)
    parts: tuple[tuple[str, str, Callable[[int], bool]], ...] = (
        ("zero", GREY, lambda code: code == 0),
        ("subnormal", ORANGE, lambda code: 0 < code < edge),
        ("normal", BLUE, lambda code: code >= edge),
    )
    for name, colour, belongs in parts:
        chosen = [code for code in codes if belongs(code)]
        text = [
            [f"value {E4M3_VALUES[code]:.7g} (code 0x{code:02X})", f"{blocks.counts[code] / total:.3%}"]
            for code in chosen
        ]
        figure.add_trace(_bars(chosen, [blocks.counts[code] for code in chosen], text, name, colour))
    last = len(E4M3_VALUES)
    own = (("−0", blocks.negative_zero), ("negative", blocks.negative), ("NaN", blocks.nan))
    places = [last + 8 + 13 * number for number in range(len(own))]
    text = [[name, f"{count / total:.3%}"] for name, count in own]
    figure.add_trace(_bars(places, [count for _, count in own], text, "no sound value", BAD, 7))
    for place, (_, count) in zip(places, own, strict=True):
        if not count:
            figure.add_annotation(
                x=place, y=0, yref="paper", text="none", showarrow=False, yanchor="bottom", font={"size": 11}
            )
    figure.add_vline(x=last + 1, line={"color": GREY, "width": 1, "dash": "dot"})
    marks = [0, edge, *range(24, last - 8, 16), last - 1]
    names = [f"{E4M3_VALUES[code]:.3g}" for code in marks]
    figure.update_xaxes(
        tickmode="array",
        tickangle=0,
        tickvals=[*marks, *places],
        ticktext=[*names, *(name for name, _ in own)],
        title={"text": "block scale (one step is one E4M3 code)"},
        range=[-2, places[-1] + 8],
        zeroline=False,
        showgrid=False,
    )
    top = math.log10(max([10, *blocks.counts])) + 0.2
    figure.update_yaxes(**log_layout("blocks", "~s"), dtick=1, range=[-0.3, top])
    figure.update_layout(bargap=0.1, barmode="overlay")
    return finished(figure, 380)


def _bars(
    x: Sequence[int], counts: Sequence[int], text: list[list[str]], name: str, colour: str, width: float = 0.9
) -> Any:
    return go.Bar(
        x=list(x),
        y=[count or None for count in counts],
        customdata=text,
        name=name,
        width=width,
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate="%{customdata[0]}<br>%{y:,} blocks, %{customdata[1]}<extra></extra>",
    )


# --- fused linears outside the experts -------------------------------------------------------------------------------


def fused_scales(groups: Sequence[FusedScales]) -> Any:
    """input_scale and weight_scale_2 of fused linears outside the experts, over the largest of their group."""
    labels = list(dict.fromkeys(map(_of, groups)))
    rows = [
        (name, scales)
        for name, scales in (
            ("input_scale", [(group, group.inputs) for group in groups if group.inputs]),
            ("weight_scale_2", [(group, group.globals) for group in groups]),
        )
        if scales
    ]
    many = sum(len(entries) for _, scales in rows for _, entries in scales) > MANY
    figure = make_subplots(len(rows), 1, shared_xaxes=True, vertical_spacing=0.12)
    for row, (name, scales) in enumerate(rows, 1):
        good, bad = Points(), Points()
        faulty: list[tuple[float, str]] = []
        places = group_places([group.label for group, _ in scales], [labels.index(_of(group)) for group, _ in scales])
        for group, entries in scales:
            values = usable(entries)
            left, right = places[group.label]
            for number, entry in enumerate(entries):
                x = left + (right - left) * (number + 1) / (len(entries) + 1)
                text = escaped(f"{group.label}: {entry.projection}") + f"<br>{name} {shown(entry)}"
                if entry.value is None or problem(entry):
                    faulty.append((x, text))
                else:
                    good.add(x, entry.value / max(values), text)
        axis = log_axis(good.y, bool(faulty))
        for x, text in faulty:
            bad.add(x, axis.rail, text)
        size = marker_size(len(good.x))
        hover = "%{customdata[0]}<br>%{y:.6~g} of the group's largest"
        figure.add_trace(trace_of(good, many, name, hover, color=(BLUE, GREEN)[row - 1], size=size), row, 1)
        add_bad(figure, bad, many, row)
        figure.update_yaxes(**axis.layout(f"{name} / largest"), row=row, col=1)
    figure.update_xaxes(**{**layer_axis(labels), "title": None})
    figure.update_xaxes(title_text="layer", row=len(rows), col=1)
    return finished(figure, 130 + 190 * len(rows))


def _of(group: FusedScales) -> str:
    return "?" if group.layer is None else str(group.layer)
