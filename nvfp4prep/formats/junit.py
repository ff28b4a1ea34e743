"""`--format junit`: JUnit XML as Jenkins and GitLab read it. A rule is a test case; its findings are one failure."""

from __future__ import annotations

from xml.etree import ElementTree

from nvfp4prep.findings import Finding, printable
from nvfp4prep.formats.common import one_line, rules_of
from nvfp4prep.rules import Rule
from nvfp4prep.validation import Report

_NO_TIME = "0"
"""Rules are not timed one by one; some readers insist on a number."""


def render(report: Report) -> str:
    """The report as JUnit XML, in ASCII. Errors and warnings fail a rule; infos and known findings are its output.

    Control characters, most of which XML can't hold, are escaped as Python does: a finding is one line.
    """
    cases = [_case(report, rule) for rule in rules_of(report)]
    if report.stopped is not None:
        cases.append(_stopped(report.stopped))
    totals = {
        "tests": str(len(cases)),
        "failures": _count(cases, "failure"),
        "errors": _count(cases, "error"),
    }
    root = ElementTree.Element("testsuites", {"name": "nvfp4prep", **totals, "time": _NO_TIME})
    attributes = {"name": "nvfp4prep", **totals, "skipped": _count(cases, "skipped"), "time": _NO_TIME}
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    suite.append(_properties(report))
    suite.extend(cases)
    ElementTree.indent(root)
    text = str(ElementTree.tostring(root, encoding="us-ascii"), "ascii")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _count(cases: list[ElementTree.Element], tag: str) -> str:
    return str(sum(case.find(tag) is not None for case in cases))


def _properties(report: Report) -> ElementTree.Element:
    told = {
        "source": report.source,
        "revision": report.revision,
        "level": report.level,
        "targets": ", ".join(report.targets),
    }
    properties = ElementTree.Element("properties")
    for name, value in told.items():
        if value:
            ElementTree.SubElement(properties, "property", {"name": name, "value": printable(value)})
    return properties


def _case(report: Report, rule: Rule) -> ElementTree.Element:
    case = _testcase(f"nvfp4prep.{rule.level}", f"{rule.id} {rule.name}")
    findings = [finding for finding in report.findings if finding.rule == rule.name]
    failing = [finding for finding in findings if finding.severity != "info"]
    output = [f"info: {_line(finding)}" for finding in findings if finding.severity == "info"]
    output += [f"known: {_line(finding)}" for finding in report.known if finding.rule == rule.name]
    if failing:
        _failure(case, rule, failing)
    elif report.stopped is not None and not output:
        # It may not have been looked at: a test that passed would say too much.
        ElementTree.SubElement(case, "skipped", {"message": "the checkpoint could not be judged to the end"})
    if output:
        ElementTree.SubElement(case, "system-out").text = "\n".join(output)
    return case


def _failure(case: ElementTree.Element, rule: Rule, findings: list[Finding]) -> None:
    count = "1 finding" if len(findings) == 1 else f"{len(findings)} findings"
    fix = f"; fix: {rule.fix}" if rule.fix else ""
    worst = "error" if any(finding.severity == "error" for finding in findings) else "warning"
    failure = ElementTree.SubElement(
        case, "failure", {"type": worst, "message": printable(f"{count}: {rule.summary}{fix}")}
    )
    failure.text = "\n".join(f"{finding.severity}: {_line(finding)}" for finding in findings)


def _stopped(reason: str) -> ElementTree.Element:
    case = _testcase("nvfp4prep.run", "all rules were judged")
    error = ElementTree.SubElement(case, "error", {"type": "stopped", "message": "later rules could not be judged"})
    error.text = printable(reason)
    return case


def _testcase(classname: str, name: str) -> ElementTree.Element:
    return ElementTree.Element("testcase", {"classname": classname, "name": name, "time": _NO_TIME})


def _line(finding: Finding) -> str:
    return printable(one_line(finding))
