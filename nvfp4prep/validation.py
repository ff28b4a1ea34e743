"""`validate`: every rule that a level reaches, on one checkpoint, as data. No printing."""

from __future__ import annotations

from dataclasses import dataclass

from nvfp4prep.findings import Finding
from nvfp4prep.rules import LEVELS, RULES, SEVERITIES, Level, Rule, Severity


@dataclass(frozen=True, slots=True)
class Report:
    """What `validate` found.

    `source` is as it was asked for; `targets` are layout ids; `findings` are those of the rules selected, worst
    first; `known` are the ones that the baseline has already, which don't count; `judged` are the rules that were
    looked at, whether they found something or not. `stopped` says why later rules could not be judged, if so.
    """

    source: str
    revision: str | None
    level: Level
    targets: tuple[str, ...]
    findings: tuple[Finding, ...]
    known: tuple[Finding, ...]
    judged: tuple[Rule, ...]
    stopped: str | None = None

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, fail_on: Severity) -> bool:
        """Whether a finding is at least as bad as `fail_on`."""
        limit = SEVERITIES.index(fail_on)
        return any(SEVERITIES.index(finding.severity) <= limit for finding in self.findings)
