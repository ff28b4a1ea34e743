"""What a rule is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""From worst to mildest. error: `convert` refuses as it is asked; some it repairs when asked otherwise (`--impute`,
`--pre-quant-scale`), and the fix says so. warning: engines disagree or read it wrong as it stands; `convert` repairs it
or says that it can't. info: worth knowing."""

Level = Literal["headers", "scales", "full"]
LEVELS: tuple[Level, ...] = ("headers", "scales", "full")
"""What is read: headers and JSON files; scalar scales too; every byte and scale of quantised weights."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `severity` is the worst that its findings have, `mildest` the mildest where that differs; `level` the
    first that looks for it.

    `summary` says what is found, in a few words; `why` what goes wrong for whom; `fix` what a person can do about it;
    `example` is a finding as it is printed. Backticks in `why` and `fix` mark what is typed or stands in a file.
    """

    id: str
    name: str
    severity: Severity
    level: Level
    summary: str
    why: str
    fix: str
    example: str
    mildest: Severity | None = None
