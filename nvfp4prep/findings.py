"""What was noticed about a checkpoint: one `Finding` each, as data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvfp4prep.rules import BY_NAME, Rule, Severity

_MOST_SHOWN = 2000


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing noticed: what was found, what was expected, and what to do next, with where it is.

    `rule` is a name in `rules.RULES`; `experts` are expert ids of `layer`; `projection` is gate, up, down, w13, w2 or a
    linear's name; `values` are the numbers that the message is about; `target` is the target it is about, if not all.
    """

    rule: str
    severity: Severity
    message: str
    file: str | None = None
    tensor: str | None = None
    layer: int | None = None
    experts: tuple[int, ...] = ()
    projection: str | None = None
    values: Mapping[str, float] = field(default_factory=dict, hash=False)
    target: str | None = None

    @property
    def entry(self) -> Rule:
        """The rule in the catalogue."""
        return BY_NAME[self.rule]

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def place(self) -> str:
        """Where it is, for a person: layer 3, experts 0-2, tensor, file."""
        place = [f"layer {self.layer}"] if self.layer is not None else []
        if self.experts:
            place.append(named("expert", self.experts))
        return printable(", ".join([*place, *(part for part in (self.tensor, self.file) if part)]))

    @property
    def fingerprint(self) -> str:
        """The same for the same thing at the same place, whatever its values are: what a baseline remembers."""
        parts = (self.rule, self.file, self.tensor, self.layer, self.projection, self.target, ranges(self.experts))
        return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "backslashreplace")).hexdigest()[:32]

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        return printable(f"{self.severity} {self.id} [{self.rule}] {place}{cut(self.message)}")

    def to_json(self) -> dict[str, Any]:
        """The finding as JSON, without empty places; experts as ids, and as a person reads them."""
        entry: dict[str, Any] = {"id": self.id, "rule": self.rule, "severity": self.severity}
        entry["message"] = cut(self.message)
        for key in ("file", "tensor", "layer", "projection", "target"):
            if getattr(self, key) is not None:
                entry[key] = getattr(self, key)
        if self.experts:
            entry |= {"experts": list(self.experts), "expert_ranges": ranges(self.experts)}
        if self.values:
            entry["values"] = {key: json_number(value) for key, value in self.values.items()}
        return entry | {"fix": self.entry.fix, "fingerprint": self.fingerprint}


def cut(message: str) -> str:
    """A message of a length that can be read: it may quote a value of any size from a file."""
    return message if len(message) <= _MOST_SHOWN else f"{message[:_MOST_SHOWN]}... ({len(message):,} characters)"


def json_number(value: float) -> float | str:
    """A number, or what JSON has no number for as text."""
    return value if math.isfinite(value) else str(value)


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


def named(noun: str, ids: Collection[int]) -> str:
    """layer 3; layers 0-2, 5."""
    return f"{noun}{'s' if len(set(ids)) > 1 else ''} {ranges(ids)}"


def counted(count: int, noun: str) -> str:
    """1 tensor, 2 tensors."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def gaps(ids: Iterable[int], count: int) -> list[range]:
    """The numbers below `count` that are not in `ids`, as ranges: config.json's count may be anything."""
    found, position = [], 0
    for number in (*sorted(ids), count):
        if number > position:
            found.append(range(position, number))
        position = number + 1
    return found


def errors(findings: Iterable[Finding]) -> list[Finding]:
    """Only the findings that refuse a checkpoint."""
    return [finding for finding in findings if finding.severity == "error"]
