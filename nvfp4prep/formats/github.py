"""`--format github`: workflow commands, which GitHub Actions shows as annotations."""

from __future__ import annotations

from nvfp4prep.findings import Finding, printable
from nvfp4prep.formats.common import counted, one_line, path
from nvfp4prep.rules import SEVERITIES
from nvfp4prep.validation import Report

_COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
_SHOWN = 10
"""Annotations of each severity that GitHub shows of a step."""


def render(report: Report) -> str:
    """One command a line; nothing for a report without findings.

    Where GitHub would not show all of them, a last notice gives the counts; it comes before infos that would crowd it
    out. Control characters are escaped as Python does.
    """
    lines = [_finding(report, finding) for finding in report.findings if finding.severity != "info"]
    if report.stopped is not None:
        message = f"later rules were not judged: {printable(report.stopped)}"
        lines.insert(0, _command("error", {"title": "nvfp4prep"}, message))
    notices = [_finding(report, finding) for finding in report.findings if finding.severity == "info"]
    if any(report.count(severity) > _SHOWN for severity in SEVERITIES):
        notices.insert(_SHOWN - 1, _command("notice", {"title": "nvfp4prep"}, _summary(report)))
    return "".join(f"{line}\n" for line in lines + notices)


def _finding(report: Report, finding: Finding) -> str:
    file = path(report, finding.file)
    properties = {"file": printable(file)} if file else {}
    properties["title"] = f"{finding.id} {finding.rule}"
    fix = f"\nfix: {finding.entry.fix}" if finding.entry.fix else ""
    return _command(_COMMANDS[finding.severity], properties, printable(one_line(finding)) + fix)


def _summary(report: Report) -> str:
    return (
        f"{printable(report.source)}: {counted(report)}; GitHub shows at most {_SHOWN} annotations of a severity: "
        "the log has all of them"
    )


def _command(name: str, properties: dict[str, str], message: str) -> str:
    told = ",".join(
        f"{key}={_escape(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in properties.items()
    )
    return f"::{name} {told}::{_escape(message)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
