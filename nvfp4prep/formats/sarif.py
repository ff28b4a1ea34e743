"""`--format sarif`: SARIF 2.1.0 (OASIS), as GitHub's code scanning takes it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from nvfp4prep import __version__
from nvfp4prep.findings import Finding, json_number, printable
from nvfp4prep.formats.common import one_line, path, rules_of
from nvfp4prep.rules import Rule
from nvfp4prep.validation import Report

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_GROUPS = {
    "0": "path",
    "1": "shards",
    "2": "configuration",
    "3": "modules",
    "4": "scales",
    "5": "block-scales",
    "6": "int4",
    "7": "targets",
    "8": "outputs",
    "9": "smoke",
}
"""Tags by the first digit of a rule's id."""
_OF_THE_WHOLE = "config.json"
"""Where findings about no file in particular are put: GitHub rejects a report with a result that has no file."""


def render(report: Report) -> str:
    """The report as SARIF, in ASCII. Known findings are there too, as `unchanged` against the baseline.

    In messages `{` and `}` are doubled, as SARIF has it, and `](` becomes `] (`, so that a name can't be a link.
    """
    rules = rules_of(report)
    indices = {rule.name: index for index, rule in enumerate(rules)}
    results = [_result(report, finding, indices) for finding in report.findings]
    known = [_result(report, finding, indices) | {"baselineState": "unchanged"} for finding in report.known]
    if known:  # a baseline was given
        results = [result | {"baselineState": "new"} for result in results]
    driver = {
        "name": "nvfp4prep",
        "version": __version__,
        "semanticVersion": __version__,
        "rules": [_rule(rule) for rule in rules],
    }
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(report)],
        "results": results + known,
        "properties": {
            "source": printable(report.source),
            "revision": report.revision,
            "level": report.level,
            "targets": list(report.targets),
        },
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2, allow_nan=False) + "\n"


def _invocation(report: Report) -> dict[str, Any]:
    if report.stopped is None:
        return {"executionSuccessful": True}
    text = f"later rules were not judged: {printable(report.stopped)}"
    return {
        "executionSuccessful": False,
        "toolExecutionNotifications": [{"level": "error", "message": {"text": _literal(text)}}],
    }


# --- rules -----------------------------------------------------------------------------------------------------------


def _rule(rule: Rule) -> dict[str, Any]:
    told = [(title, text) for title, text in (("Why", rule.why), ("Fix", rule.fix)) if text]
    plain = [rule.summary, *(f"{title}: {text}" for title, text in told)]
    marked = [_markdown(rule.summary), *(f"**{title}**: {_markdown(text)}" for title, text in told)]
    if rule.example:
        plain.append(f"Example: {rule.example}")
        marked.append(f"**Example**:\n\n```text\n{rule.example}\n```")
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": _literal(rule.summary)},
        "fullDescription": {"text": _literal(rule.why or rule.summary)},
        "help": {"text": _literal("\n\n".join(plain)), "markdown": _braces("\n\n".join(marked))},
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
        "properties": {"tags": ["nvfp4", _GROUPS[rule.id.removeprefix("NVP")[0]]], "level": rule.level},
    }


def _markdown(text: str) -> str:
    """Text of the catalogue, which marks code with backticks, without HTML: SARIF forbids it."""
    parts = text.split("`")
    return "`".join(part if index % 2 else part.replace("<", "&lt;") for index, part in enumerate(parts))


# --- results ---------------------------------------------------------------------------------------------------------


def _result(report: Report, finding: Finding, indices: dict[str, int]) -> dict[str, Any]:
    return {
        "ruleId": finding.id,
        "ruleIndex": indices[finding.rule],
        "level": _LEVELS[finding.severity],
        "message": {"text": _literal(printable(one_line(finding)))},
        "locations": [_location(report, finding)],
        "partialFingerprints": {
            "nvfp4prep/v1": finding.fingerprint,
            "primaryLocationLineHash": f"{finding.fingerprint}:1",  # the one by which GitHub tells alerts apart
        },
        "properties": _properties(finding),
    }


def _location(report: Report, finding: Finding) -> dict[str, Any]:
    """The file as a whole: without a region GitHub does not hash shards as if they were source code."""
    file = path(report, finding.file) or path(report, _OF_THE_WHOLE) or _OF_THE_WHOLE
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": {"uri": _uri(file)}}}
    logical = []
    if finding.tensor is not None:
        logical.append({"fullyQualifiedName": printable(finding.tensor), "kind": "tensor"})
    if finding.layer is not None:
        logical.append({"fullyQualifiedName": f"layer {finding.layer}", "kind": "layer"})
    return location | ({"logicalLocations": logical} if logical else {})


def _properties(finding: Finding) -> dict[str, Any]:
    values = {key: json_number(value) for key, value in finding.values.items()}
    told = {
        "layer": finding.layer,
        "experts": list(finding.experts) or None,
        "projection": finding.projection,
        "values": values or None,
        "target": finding.target,
    }
    return {key: value for key, value in told.items() if value is not None}


def _uri(file: str) -> str:
    """A relative reference: everything but unreserved characters and slashes is percent-encoded."""
    return quote(file.encode("utf-8", "backslashreplace"), safe="/")


def _literal(text: str) -> str:
    """Text that has neither placeholders nor links."""
    return _braces(text.replace("](", "] ("))


def _braces(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
