"""A report of the check as rich renderables and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from nvfp4prep.findings import printable
from nvfp4prep.render import plain
from nvfp4prep.smoke.check import EMULATOR, Report, Row
from nvfp4prep.smoke.selftest import Result

_SHOWN_PROBLEMS = 12


def report(found: Report) -> RenderableType:
    """What ran, a line for each comparison, and the verdict."""
    return Group(*_lines(found))


def _lines(found: Report) -> Iterator[RenderableType]:
    ran = f"{found.backend} ({', '.join(f'{name} {version}' for name, version in found.versions.items())})"
    against = f"reference: {found.reference}" if found.compared else "not compared with real weights"
    yield plain(f"smoke check of {found.target} on {ran}; {against}", style="bold")
    if not found.kernel_ran:
        yield plain(f"kernel not run: {found.why_not}", style="yellow")
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in (
        "layer",
        "rank",
        "tokens",
        "routing",
        "against",
        "rel. L2",
        "at most",
        "cosine",
        "worst token",
        "worst expert",
        "",
    ):
        table.add_column(column, no_wrap=True)
    for row in found.rows:
        table.add_row(*_cells(row))
    for layer in found.not_compared:
        cells = ["" if layer.layer is None else str(layer.layer), "", "", "", "reference", *[""] * 5, "not compared"]
        table.add_row(*(plain(cell, style="yellow") for cell in cells))
    yield table
    for layer in found.not_compared:
        yield plain(f"  {layer.path}: not compared with real weights: {layer.why}", style="yellow")
    for problem in found.byte_problems[:_SHOWN_PROBLEMS]:
        yield plain(f"  {problem}", style="red")
    if len(found.byte_problems) > _SHOWN_PROBLEMS:
        yield plain(f"  ... and {len(found.byte_problems) - _SHOWN_PROBLEMS} more", style="red")
    for row in found.rows:
        for problem in row.problems:
            place = row.path if row.rank == "one rank" else f"{row.path}, {row.rank}"
            yield plain(f"  {place}, {row.tokens} tokens, {row.routing}, {row.against}: {problem}", style="red")
    for note in found.notes:
        yield plain(note, style="dim")
    what = "the packed bytes compute what the checkpoint means"
    if found.backend == EMULATOR:
        what += ", by the emulator; no GPU kernel was run"
    if found.not_compared:
        what += f"; {len(found.not_compared)} of {len(found.layers)} layers not compared with real weights"
    yield plain(f"passed: {what}" if found.passed else "FAILED", style="green" if found.passed else "bold red")
    yield Text("A smoke check is no substitute for an evaluation.", style="dim")


def _cells(row: Row) -> list[Text]:
    comparison = row.comparison
    token, expert = comparison.worst_token, comparison.worst_expert
    bad = [f"{comparison.zeros} zero"] if comparison.zeros else []
    bad += [f"{comparison.nonfinite} not finite"] if comparison.nonfinite else []
    cells = [
        "" if row.layer is None else str(row.layer),
        row.rank,
        f"{row.tokens:,}",
        row.routing,
        row.against,
        f"{comparison.rel_l2:.2e}",
        f"{row.tolerances.over(max(comparison.tokens, 1)):.2g}",
        f"{comparison.cosine:.6f}",
        "" if token is None else f"{token.index}: {token.rel:.1e}",
        "" if expert is None else f"{expert.index}: {expert.rel:.1e}",
        "ok" if not row.problems else ", ".join(["FAILED", *bad]),
    ]
    return [plain(cell, style="red" if row.problems else "") for cell in cells]


def to_json(found: Report) -> dict[str, Any]:
    """The report for machines; what is infinite is written as null."""
    rows = []
    for row in found.rows:
        entry = asdict(row)
        entry["passed"] = not row.problems
        rows.append(entry)
    value = {
        "passed": found.passed,
        "target": found.target,
        "backend": found.backend,
        "kernel_ran": found.kernel_ran,
        "kernel_not_run_because": found.why_not,
        "versions": dict(found.versions),
        "reference": found.reference if found.compared else None,
        "not_compared": [asdict(layer) for layer in found.not_compared],
        "byte_problems": list(found.byte_problems),
        "rows": rows,
        "notes": list(found.notes),
    }
    cleaned: dict[str, Any] = _finite(value)
    return cleaned


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def self_test(results: Sequence[Result]) -> RenderableType:
    """The table of mutations: what each imitates, and whether the check noticed it."""
    table = Table(
        title="self-test: broken on purpose", title_justify="left", box=None, header_style="bold", padding=(0, 1)
    )
    for column in ("mutation", "status", "rel. L2", "at most", "noticed by"):
        table.add_column(column, no_wrap=column != "noticed by")
    style = {"noticed": "green", "missed": "bold red"}
    for result in results:
        shown = "" if result.rel_l2 is None else f"{result.rel_l2:.2g}"
        limit = "" if result.tolerance is None else f"{result.tolerance:.2g}"
        cells = (result.name, result.status, shown, limit, result.how or result.why)
        table.add_row(*(Text(printable(cell or ""), style=style.get(result.status, "dim")) for cell in cells))
    missed = sum(result.status == "missed" for result in results)
    verdict = (
        f"self-test FAILED: {missed} not noticed"
        if missed
        else "self-test passed: whatever this layer can show is noticed"
    )
    return Group(table, Text(verdict, style="bold red" if missed else "green"))


def self_test_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The table for machines."""
    cleaned: list[dict[str, Any]] = _finite([asdict(result) for result in results])
    return cleaned
