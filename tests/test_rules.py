"""The catalogue of rules: complete, stable, and the only source of the names that findings have."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

import nvfp4prep
from nvfp4prep import rules_view
from nvfp4prep.rules import BY_ID, BY_NAME, LEVELS, RULES, SEVERITIES, Rule, picked

PACKAGE = Path(nvfp4prep.__file__).parent
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
TITLES = ("id", "name", "severity", "level", "summary")

each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)


# --- entries ---------------------------------------------------------------------------------------------------------


def test_ids_and_names_are_unique() -> None:
    assert len(BY_ID) == len(BY_NAME) == len(RULES) > 0
    assert [rule.id for rule in RULES] == sorted(BY_ID)


@each_rule
def test_entry(rule: Rule) -> None:
    assert re.fullmatch(r"NVP\d{3}", rule.id)
    assert NAME.fullmatch(rule.name)
    assert rule.severity in SEVERITIES and rule.level in LEVELS
    for text in (rule.summary, rule.why, rule.fix, rule.example):
        assert text and text == " ".join(text.split()) and text.isprintable()
    assert rule.why.endswith(".") and rule.fix.endswith(".")


@each_rule
def test_example_is_a_finding_as_printed(rule: Rule) -> None:
    match = re.match(r"(\w+) (NVP\d{3}) \[([^]]+)\] \S", rule.example)
    assert match is not None
    assert (match[2], match[3]) == (rule.id, rule.name)
    assert match[1] in SEVERITIES[SEVERITIES.index(rule.severity) :], "worse than the rule"


def test_each_module_of_the_catalogue_has_one_digit() -> None:
    for path in (PACKAGE / "rules").glob("*.py"):
        digits = set(re.findall(r'^ {8}"NVP(\d)\d\d",$', path.read_text(encoding="utf-8"), re.MULTILINE))
        assert len(digits) == (0 if path.stem in ("__init__", "rule") else 1), path.name


# --- names in the code -----------------------------------------------------------------------------------------------


def names_in(path: Path) -> Iterator[tuple[str, int]]:
    """Rules that a module raises findings of, with line numbers: the first argument of what makes a finding, and the
    table of findings in quant_config.rewrite_exclude."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        first: ast.expr | None = None
        if isinstance(node, ast.Call) and node.args:
            called = node.func.id if isinstance(node.func, ast.Name) else ""
            first = node.args[0] if called in ("Finding", "refuse", "find", "error", "_error") else None
        elif isinstance(node, ast.Tuple) and len(node.elts) == 3 and path.name == "quant_config.py":
            second = node.elts[1]
            first = second if isinstance(second, ast.Constant) and str(second.value).startswith("exclude-") else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and NAME.fullmatch(first.value):
            yield first.value, node.lineno


def test_every_name_in_the_code_is_in_the_catalogue() -> None:
    found = {(name, f"{path.name}:{line}") for path in PACKAGE.rglob("*.py") for name, line in names_in(path)}
    assert not sorted(place for place in found if place[0] not in BY_NAME)
    names = {name for name, _ in found}
    assert {"bad-shard", "weight-shape", "expert-shape", "exclude-unmatched", "shard-missing"} <= names, "not looked at"


# --- picked ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        ([], []),
        (["NVP401"], ["NVP401"]),
        (["nvp401"], ["NVP401"]),
        (["input-scale-missing"], ["NVP401"]),
        (["NVP7"], [number for number in BY_ID if number.startswith("NVP7")]),
        (["nvp41", "NVP411", "bad-json"], ["NVP202", *(number for number in BY_ID if number.startswith("NVP41"))]),
        (["NVP"], list(BY_ID)),
    ],
)
def test_picked(words: list[str], ids: list[str]) -> None:
    assert picked(words) == {BY_ID[number].name for number in ids}


def test_picked_by_beginning() -> None:
    assert picked(["NVP4"]) == {rule.name for rule in RULES if rule.id[3] == "4"}


@pytest.mark.parametrize("word", ["", "NVP000", "NVP4010", "401", "input-scale", "Input-Scale-Missing"])
def test_picked_refuses_what_picks_nothing(word: str) -> None:
    with pytest.raises(ValueError) as refused:
        picked(["NVP401", word])
    assert refused.value.args == (word,)


# --- shown -----------------------------------------------------------------------------------------------------------


def lines(shown: RenderableType, width: int, *, soft_wrap: bool = False) -> list[str]:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(shown, soft_wrap=soft_wrap)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_table_has_a_line_for_each_rule() -> None:
    head, *rows = lines(rules_view.table(RULES), 140)
    assert tuple(head.split()) == TITLES
    for rule, row in zip(RULES, rows, strict=True):
        words = row.split(maxsplit=4)
        severity = rule.severity + (f"/{rule.mildest}" if rule.mildest else "")
        assert words == [rule.id, rule.name, severity, rule.level, rule.summary]


def test_table_in_a_narrow_terminal_loses_nothing() -> None:
    shown = lines(rules_view.table(RULES), 80)
    assert all(len(line) <= 80 for line in shown)
    words = " ".join(shown).split()
    assert all(word in words for rule in RULES for word in (rule.id, rule.name, *rule.summary.split()))


@each_rule
def test_detail_says_everything(rule: Rule) -> None:
    head, about, *paragraphs = lines(rules_view.detail(rule), 140, soft_wrap=True)
    assert head == f"{rule.id} {rule.name}"
    severity = rule.severity + (f" or {rule.mildest}" if rule.mildest else "")
    assert f"severity {severity}, " in about and f"level {rule.level}" in about
    told = [("What", rule.summary), ("Why", rule.why), ("Fix", rule.fix), ("Example", rule.example)]
    assert paragraphs == [line for title, text in told for line in ("", title, text)]
    narrow = lines(rules_view.detail(rule), 60)
    assert all(len(line) <= 60 for line in narrow)
    assert "".join("".join(narrow).split()) == "".join("".join([head, about, *paragraphs]).split())


@each_rule
def test_json_has_every_field(rule: Rule) -> None:
    value = json.loads(json.dumps(rules_view.to_json(rule)))
    assert value == {field.name: getattr(rule, field.name) for field in fields(Rule)}
