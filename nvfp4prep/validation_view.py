"""What `validate` prints for people: findings by rule, the fix once, and one line that sums up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from nvfp4prep.findings import Finding, cut
from nvfp4prep.render import STYLE, plain
from nvfp4prep.rules import SEVERITIES
from nvfp4prep.validation import Report

_SHOWN = 10
_PLURALS = {"error": "errors", "warning": "warnings", "info": "infos"}


def report(found: Report) -> RenderableType:
    """Each rule's findings, one line each, worst first; then the count."""
    return Group(*_rules(found), *_end(found))


def _rules(found: Report) -> Iterator[Text]:
    for (severity, rule), group in groupby(found.findings, key=lambda finding: (finding.severity, finding.entry)):
        findings = list(group)
        count = f" ({len(findings)})" if len(findings) > 1 else ""
        yield plain(f"{rule.id} {severity} {rule.name}{count}: {rule.summary}", STYLE[severity])
        for finding in findings[:_SHOWN]:
            yield plain(f"  {_line(finding)}")
        if len(findings) > _SHOWN:
            yield plain(f"  ... and {len(findings) - _SHOWN} more; --format json lists all", "dim")
        if rule.fix:
            yield plain(f"  fix: {rule.fix}", "dim")


def _line(finding: Finding) -> str:
    target = f" [{finding.target}]" if finding.target else ""
    return (f"{finding.place}: " if finding.place else "") + cut(finding.message) + target


def _end(found: Report) -> Iterator[Text]:
    counts = [(found.count(severity), severity) for severity in SEVERITIES]
    told = ", ".join(f"{count} {severity if count == 1 else _PLURALS[severity]}" for count, severity in counts if count)
    of = f" for {', '.join(found.targets)}" if found.targets else ""
    known = f"; {len(found.known)} known by the baseline" if found.known else ""
    if found.stopped:
        yield plain("nothing else was judged: what is above has to be put right first", "yellow")
        yield plain(f"{found.source}: {told}", "bold")
        return
    summary = f"{found.source}: {told or 'nothing found'}{known} ({len(found.judged)} rules, level {found.level}{of})"
    yield plain(summary, "bold" if told else "green")
