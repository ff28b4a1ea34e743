"""The page as one HTML text: no template engine, nothing loaded from elsewhere, names escaped."""

from __future__ import annotations

import html
from importlib.resources import files
from types import ModuleType
from typing import Any

from nvfp4prep.errors import EnvironmentFault
from nvfp4prep.findings import printable
from nvfp4prep.report.data import PageData

INSTALL = "pip install 'nvfp4prep[report]' (in a clone: '.[report]')"
# Plotly's WebGL traces compile functions, hence unsafe-eval. Nothing may be fetched, whatever a name in the page says.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)


def render(data: PageData) -> str:
    """The whole page.

    Raises:
        EnvironmentFault: plotly is not installed; the message says how to install it.
    """
    sections = _sections()
    body = sections.body(data)
    title = html.escape(printable(f"{data.name} – nvfp4prep report"))
    scripts = ""
    if body.plots:
        plots = "".join(
            f'<script type="application/json" id="{name}">{_json(figure)}</script>\n'
            for name, figure in body.plots.items()
        )
        scripts = f"{plots}<script>{sections.plotly_js()}</script>\n<script>\n{_asset('page.js')}</script>\n"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f"{body.html}\n{scripts}</body>\n</html>\n"
    )


def _sections() -> ModuleType:
    """The module that writes the sections, which draws with plotly. Raises EnvironmentFault without it."""
    try:
        from nvfp4prep.report import sections
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "plotly":
            raise
        raise EnvironmentFault(f"the report's plots need plotly, which is not installed: {INSTALL}") from None
    return sections


def _json(figure: Any) -> str:
    """A figure as JSON that can't end the script element it stands in."""
    text: str = figure.to_json()
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return files("nvfp4prep.report").joinpath(name).read_text(encoding="utf-8")
