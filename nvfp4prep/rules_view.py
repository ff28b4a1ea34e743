"""The catalogue of rules for people, and a rule as JSON. Data in, renderable out; `cli` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvfp4prep.render import STYLE, add_row, plain
from nvfp4prep.rules import Rule


def table(rules: Sequence[Rule]) -> RenderableType:
    """One line a rule."""
    shown = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("id", "name", "severity", "level", "summary"):
        shown.add_column(column, no_wrap=column != "summary")
    for rule in rules:
        add_row(shown, rule.id, rule.name, _severity(rule), rule.level, rule.summary)
    return shown


def detail(rule: Rule) -> RenderableType:
    """All that the catalogue says of a rule."""
    parts: list[RenderableType] = [
        plain(f"{rule.id} {rule.name}", style="bold"),
        Text.assemble("severity ", _severity(rule, " or "), f", found at level {_levels(rule)}"),
    ]
    for title, text in (("What", rule.summary), ("Why", rule.why), ("Fix", rule.fix), ("Example", rule.example)):
        parts += [Text(), plain(title, style="bold"), plain(text)]
    return Group(*parts)


def to_json(rule: Rule) -> dict[str, Any]:
    """A rule as JSON."""
    return asdict(rule)


def _severity(rule: Rule, between: str = "/") -> Text:
    """The worst that its findings have, and the mildest."""
    worst = plain(rule.severity, style=STYLE[rule.severity])
    return worst if rule.mildest is None else worst + plain(between) + plain(rule.mildest, style=STYLE[rule.mildest])


def _levels(rule: Rule) -> str:
    """The first level that looks for it; those after it do too."""
    return rule.level if rule.level == "full" else f"{rule.level} and above"
