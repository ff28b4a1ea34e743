"""Pieces of HTML. Whatever comes from a checkpoint goes through `escaped`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from nvfp4prep.findings import printable


def escaped(value: object) -> str:
    """Text as HTML shows it: no tag in it counts, and control characters are visible."""
    return html.escape(printable(str(value)))


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f"<p{_class(kind)}>{escaped(text)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: frozenset[int] = frozenset()) -> str:
    """A table of plain text; the columns in `numbers` are aligned right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{_class('number' if position in numbers else '')}>{escaped(cell)}</{tag}>"
            for position, cell in enumerate(cells)
        )

    body = "".join(f"<tr>{line('td', row)}</tr>\n" for row in rows)
    return f"<table>\n<tr>{line('th', columns)}</tr>\n{body}</table>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""


def tiles(entries: Iterable[tuple[str, str, str]]) -> str:
    """Numbers to be seen at once: (number, what it counts, error, warning, info, good or nothing)."""
    cells = "".join(
        f'<div class="tile {kind}"><b>{escaped(number)}</b>{escaped(what)}</div>\n' for number, what, kind in entries
    )
    return f'<div class="tiles">\n{cells}</div>'
