"""What was noticed about a checkpoint: one `Finding` each, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing noticed: what was found, what was expected, and what to do next, with where it is.

    `rule` is a stable kebab-case id; `experts` are expert ids of `layer`.
    """

    rule: str
    severity: Severity
    message: str
    file: str | None = None
    tensor: str | None = None
    layer: int | None = None
    experts: tuple[int, ...] = ()

    def __str__(self) -> str:
        place = [f"layer {self.layer}"] if self.layer is not None else []
        if self.experts:
            place.append(f"expert{'s' if len(self.experts) > 1 else ''} {ranges(self.experts)}")
        place += [part for part in (self.tensor, self.file) if part]
        return printable(f"{self.severity} [{self.rule}] {', '.join(place) + ': ' if place else ''}{self.message}")

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON, without empty places."""
        return {key: value for key, value in asdict(self).items() if value not in (None, ())}


def printable(text: str) -> str:
    """Text with control characters escaped: names come from files, and must not steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def ranges(numbers: Iterable[int]) -> str:
    """Ids as a person reads them: (0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Only the findings that refuse a checkpoint."""
    return [finding for finding in findings if finding.severity == "error"]
