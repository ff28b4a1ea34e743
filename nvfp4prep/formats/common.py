"""What several formats need to know of a report."""

from __future__ import annotations

import posixpath

from nvfp4prep.findings import Finding, cut
from nvfp4prep.rules import SEVERITIES, Rule
from nvfp4prep.validation import Report

_PLURALS = {"error": "errors", "warning": "warnings", "info": "infos"}


def rules_of(report: Report) -> tuple[Rule, ...]:
    """The rules that were judged, and any other that a finding is of, by id."""
    found = [finding.entry for finding in (*report.findings, *report.known)]
    rules = {rule.id: rule for rule in (*found, *report.judged)}
    return tuple(rules[number] for number in sorted(rules))


def path(report: Report, file: str | None) -> str | None:
    """A checkpoint's file as seen from the directory that nvfp4prep ran in, with slashes.

    Only a relative source is a place that others know too: below an absolute one or a Hub repo it is the file's own
    name. None for what does not lie inside the checkpoint.
    """
    if not file or not _inside(file):
        return None
    root = report.source
    if not root or report.revision is not None or root.startswith("~") or not _inside(root):
        return posixpath.normpath(file)
    return posixpath.normpath(posixpath.join(root, file))


def _inside(name: str) -> bool:
    return not name.startswith("/") and ".." not in name.split("/")


def one_line(finding: Finding) -> str:
    """Place and message, with the target it is about; not yet escaped."""
    target = f" [{finding.target}]" if finding.target else ""
    return (f"{finding.place}: " if finding.place else "") + cut(finding.message) + target


def counted(report: Report) -> str:
    """How many findings of each severity there are: 2 errors, 1 warning."""
    counts = [(report.count(severity), severity) for severity in SEVERITIES]
    return ", ".join(f"{count} {severity if count == 1 else _PLURALS[severity]}" for count, severity in counts if count)
