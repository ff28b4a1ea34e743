"""The findings as HTML, rule by rule; long groups are folded."""

from __future__ import annotations

from collections.abc import Iterable

from nvfp4prep.findings import Finding
from nvfp4prep.report.data import RuleGroup, Verdicts
from nvfp4prep.report.markup import escaped, paragraph, tiles
from nvfp4prep.rules import SEVERITIES, Severity

_OPEN = 4
"""Findings of a rule that are shown unfolded."""
_MOST = 400
"""Findings of a rule on the page at all: it must stay small enough to open."""
_PLURAL = {"error": "errors", "warning": "warnings", "info": "info"}


def findings(verdicts: Verdicts) -> Iterable[str]:
    """The section's content."""
    yield tiles(
        (f"{verdicts.counts[severity]:,}", _PLURAL[severity], severity if verdicts.counts[severity] else "good")
        for severity in SEVERITIES
    )
    against = f" Targets: {', '.join(verdicts.targets)}." if verdicts.targets else ""
    yield paragraph(f"{verdicts.judged} rules were looked at, up to the level {verdicts.level}.{against}", "dim")
    if verdicts.known:
        yield paragraph(f"Known to the baseline and not shown: {verdicts.known:,}.", "dim")
    if verdicts.stopped:
        yield paragraph(f"Not everything could be looked at: {verdicts.stopped}", "note")
    if not verdicts.groups:
        yield paragraph("Nothing was found.", "note")
    for group in verdicts.groups:
        yield _group(group)


def _group(group: RuleGroup) -> str:
    rule, found = group.rule, group.findings
    about = "".join(
        f"<p><b>{title}</b> {escaped(text)}</p>\n" for title, text in (("Why:", rule.why), ("Fix:", rule.fix)) if text
    )
    if len(found) <= _OPEN + 1:
        listed = _list(found)
    else:
        rest = found[_OPEN:_MOST]
        more = len(found) - _MOST
        cut = paragraph(f"and {more:,} more; nvfp4prep validate --format json lists all") if more > 0 else ""
        listed = (
            f"{_list(found[:_OPEN])}\n<details>\n<summary>{len(found) - _OPEN:,} more</summary>\n"
            f"{_list(rest)}\n{cut}</details>"
        )
    return (
        f'<article class="rule {group.worst}">\n<header>{_badge(group.worst)} <b>{escaped(rule.id)}</b> '
        f"<code>{escaped(rule.name)}</code> <span>{escaped(rule.summary)}</span> "
        f'<span class="count">{len(found):,}×</span></header>\n{about}{listed}\n</article>'
    )


def _list(found: Iterable[Finding]) -> str:
    return f"<ul>\n{''.join(map(_item, found))}</ul>"


def _item(finding: Finding) -> str:
    target = f" (target {escaped(finding.target)})" if finding.target else ""
    place = f'<span class="place">{escaped(finding.place)}</span>' if finding.place else ""
    return f"<li>{_badge(finding.severity)}<span>{escaped(finding.message)}{target}{place}</span></li>\n"


def _badge(severity: Severity) -> str:
    return f'<span class="badge {severity}">{severity}</span>'
