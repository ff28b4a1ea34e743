"""`--format json`: the report as one object. It is also what `--baseline` reads."""

from __future__ import annotations

import json

from nvfp4prep import __version__
from nvfp4prep.rules import SEVERITIES
from nvfp4prep.validation import Report


def render(report: Report) -> str:
    """The report as JSON, in ASCII: every other character is escaped."""
    value = {
        "tool": {"name": "nvfp4prep", "version": __version__},
        "source": report.source,
        "revision": report.revision,
        "level": report.level,
        "targets": list(report.targets),
        "counts": {severity: report.count(severity) for severity in SEVERITIES},
        "findings": [finding.to_json() for finding in report.findings],
        "known": [finding.to_json() for finding in report.known],
        "stopped": report.stopped,
        "judged": [rule.id for rule in report.judged],
    }
    return json.dumps(value, indent=2, allow_nan=False) + "\n"
