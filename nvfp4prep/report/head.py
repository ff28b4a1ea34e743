"""The head of the page as HTML: what the checkpoint is, and where its bytes are."""

from __future__ import annotations

from nvfp4prep.render import size
from nvfp4prep.report.data import FormatBytes, PageData
from nvfp4prep.report.markup import escaped

_COLOURS = {
    "NVFP4": "#3d7fc4",
    "FP8": "#2b9a72",
    "int4": "#8a63c2",
    "unquantised": "#d97a00",
    "unclassified": "#d3006b",
}
_COLUMNS = (
    '<tr><th>stored as</th><th class="number">linears</th><th class="number">of experts</th>'
    '<th class="number">bytes</th><th class="number">share</th></tr>\n'
)


def head(data: PageData) -> str:
    """Name, facts and bytes by format."""
    facts = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>\n" for name, value in data.facts)
    return (
        f"<h1>{escaped(data.name)}</h1>\n"
        f'<div class="head">\n<dl>\n{facts}</dl>\n<div>\n{_formats(data)}\n</div>\n</div>'
    )


def _formats(data: PageData) -> str:
    total = sum(row.nbytes for row in data.formats) or 1
    bar = "".join(
        f'<span style="width:{row.nbytes / total:.4%};background:{_colour(row)}" title="{escaped(row.label)}"></span>'
        for row in data.formats
    )
    rows = "".join(
        f'<tr><td><span class="swatch" style="background:{_colour(row)}"></span>{escaped(row.label)}</td>'
        f'<td class="number">{"" if row.linears is None else f"{row.linears:,}"}</td>'
        f'<td class="number">{f"{row.routed:,}" if row.routed else ""}</td>'
        f'<td class="number">{size(row.nbytes)}</td><td class="number">{row.nbytes / total:.1%}</td></tr>\n'
        for row in data.formats
    )
    return f'<div class="bar">{bar}</div>\n<table>\n{_COLUMNS}{rows}</table>'


def _colour(row: FormatBytes) -> str:
    return _COLOURS.get(row.label, "#8a8f98")
