"""Reports as JSON, JUnit, SARIF and GitHub annotations: valid by the formats' own schemas, whatever a name holds."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import jsonschema
import pytest
import xmlschema
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4prep import __version__
from nvfp4prep.findings import Finding, printable
from nvfp4prep.formats import FORMATS
from nvfp4prep.rules import BY_NAME, RULES, SEVERITIES
from nvfp4prep.validation import Report, fingerprints

SCHEMAS = Path(__file__).parent / "data" / "schemas"
HOSTILE = 'a\x1b[31m\x00\r\n::error::b]]><x y="&quot;">&amp;%0A%250A\u202e\ufffe{0} [me](http://x) ##[add-mask]c, d: é'

MISSING = Finding(
    "input-scale-missing",
    "error",
    "gate and up of 3 experts have no input_scale",
    file="model-00001-of-00002.safetensors",
    layer=3,
    experts=(0, 1, 7),
    projection="w13",
)
DIFFERS = Finding(
    "input-scale-differs",
    "warning",
    "0.5 to 2",
    tensor="model.layers.0.mlp.experts.0.up_proj.input_scale",
    values={"min": 0.5, "max": float("inf")},
    target="flashinfer-trtllm/vllm tp2",
)
ONE = Finding("kv-scale-one", "info", "all 8 are 1")
AWFUL = Finding("bad-shard", "error", HOSTILE, file=f"rank 0/{HOSTILE}.safetensors", tensor=HOSTILE, target=HOSTILE)

EXPLAINED = replace(
    BY_NAME["input-scale-missing"],
    why="Engines <b>divide</b> by `a<b>` {0}: [see](http://x).",
    fix="Calibrate: 100%, or\nsay `--impute layer-max`",
    example="NVP401 <b>{0}</b>",
)
"""A rule of the catalogue with texts that hold what is special in some format."""


def report(*findings: Finding, **fields: Any) -> Report:
    whole: dict[str, Any] = {
        "source": "models/mine",
        "revision": None,
        "level": "scales",
        "targets": ("hf", "vllm-marlin/vllm"),
        "findings": findings,
        "known": (),
        "judged": tuple(rule for rule in RULES if rule.level != "full" and not rule.id.startswith("NVP9")),
    }
    return Report(**(whole | fields))


REPORTS = {
    "findings": report(MISSING, MISSING, DIFFERS, ONE),
    "none": report(),
    "nothing judged": report(judged=()),
    "stopped": report(AWFUL, stopped=str(AWFUL)),
    "stopped, all filtered": report(judged=(), stopped=HOSTILE),
    "known": report(MISSING, known=(DIFFERS, AWFUL)),
    "only known": report(known=(ONE,)),
    "hostile": report(AWFUL, DIFFERS, source=HOSTILE, revision=HOSTILE, targets=(HOSTILE,)),
    "lone surrogate": report(Finding("bad-shard", "error", "\udcff", file="\udcff", tensor="\ud800"), source="\udcff"),
    "a rule not judged": report(MISSING, judged=()),
    "explained": report(MISSING, judged=(EXPLAINED,)),
    "many": report(*[MISSING] * 40, *[DIFFERS] * 11, *[ONE] * 25),
}
TEXT = st.text(max_size=60) | st.text(
    "%\r\n:,;=]<>&'\"{}[]()\\/.0A25D3C \x00\x1b\x85\u2028\ufffe\U0001f600", max_size=60
)


@pytest.fixture(params=REPORTS)
def any_report(request: pytest.FixtureRequest) -> Report:
    return REPORTS[request.param]


def test_formats_are_named_as_on_the_command_line() -> None:
    assert set(FORMATS) == {"json", "junit", "sarif", "github"}


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_whole_lines_that_any_terminal_may_see(name: str, any_report: Report) -> None:
    text = FORMATS[name](any_report)
    assert text.endswith("\n") or (name == "github" and text == "")
    assert all(line.isprintable() for line in text.split("\n"))
    text.encode("utf-8")
    assert FORMATS[name](any_report) == text


# --- JSON ------------------------------------------------------------------------------------------------------------


def test_json_holds_the_whole_report(any_report: Report, tmp_path: Path) -> None:
    text = FORMATS["json"](any_report)
    assert json.loads(text) == {
        "tool": {"name": "nvfp4prep", "version": __version__},
        "source": any_report.source,
        "revision": any_report.revision,
        "level": "scales",
        "targets": list(any_report.targets),
        "counts": {severity: any_report.count(severity) for severity in SEVERITIES},
        "findings": [finding.to_json() for finding in any_report.findings],
        "known": [finding.to_json() for finding in any_report.known],
        "stopped": any_report.stopped,
        "judged": [rule.id for rule in any_report.judged],
    }
    (tmp_path / "baseline.json").write_text(text)
    every = {finding.fingerprint for finding in (*any_report.findings, *any_report.known)}
    assert fingerprints(tmp_path / "baseline.json") == every


# --- JUnit -----------------------------------------------------------------------------------------------------------


@cache
def xsd() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(SCHEMAS / "junit-10.xsd")


def junit(found: Report) -> ElementTree.Element:
    """The one suite, by the schema; its counts are right."""
    text = FORMATS["junit"](found)
    xsd().validate(text)
    root = ElementTree.fromstring(text)
    (suite,) = root.findall("testsuite")
    cases = suite.findall("testcase")
    assert suite.get("tests") == root.get("tests") == str(len(cases))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(attribute) == str(len(suite.findall(f"testcase/{tag}")))
    assert all(len(case.findall("failure")) <= 1 for case in cases)
    return suite


def outcome(suite: ElementTree.Element, rule: str) -> ElementTree.Element:
    entry = BY_NAME[rule]
    (case,) = [case for case in suite.findall("testcase") if case.get("name") == f"{entry.id} {rule}"]
    assert case.get("classname") == f"nvfp4prep.{entry.level}"
    return case


def test_junit_is_valid(any_report: Report) -> None:
    suite = junit(any_report)
    assert suite.get("name") == "nvfp4prep"
    names = {case.get("name") for case in suite.findall("testcase")}
    assert names >= {f"{rule.id} {rule.name}" for rule in any_report.judged}


def test_junit_puts_a_rules_findings_into_one_failure() -> None:
    suite = junit(REPORTS["findings"])
    failure = outcome(suite, "input-scale-missing").find("failure")
    assert failure is not None and failure.get("type") == "error"
    assert (failure.get("message") or "").startswith("2 findings: experts or linears without an input_scale")
    line = (
        "error: layer 3, experts 0-1, 7, model-00001-of-00002.safetensors: gate and up of 3 experts have no input_scale"
    )
    assert failure.text == f"{line}\n{line}"
    warned = outcome(suite, "input-scale-differs").find("failure")
    assert warned is not None and warned.get("type") == "warning"
    assert (warned.text or "").endswith("0.5 to 2 [flashinfer-trtllm/vllm tp2]")
    told = outcome(suite, "kv-scale-one")
    assert told.find("failure") is None and told.findtext("system-out") == "info: all 8 are 1"
    assert len(outcome(suite, "bad-shard")) == 0


def test_junit_says_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4prep.findings.BY_NAME", {MISSING.rule: EXPLAINED})
    case = outcome(junit(REPORTS["explained"]), "input-scale-missing")
    failure = case.find("failure")
    assert failure is not None and (failure.get("message") or "").endswith("; fix: " + printable(EXPLAINED.fix))


def test_junit_known_findings_do_not_fail() -> None:
    case = outcome(junit(REPORTS["known"]), "input-scale-differs")
    assert [child.tag for child in case] == ["system-out"]
    assert (case.findtext("system-out") or "").startswith("known: ")


def test_junit_stopped_passes_no_rule() -> None:
    suite = junit(REPORTS["stopped"])
    (error,) = suite.findall("testcase/error")
    assert error.text == str(AWFUL)
    assert all(len(case) for case in suite.findall("testcase")), "a rule that may not have been judged passed"


def test_junit_does_not_skip_what_found_something() -> None:
    suite = junit(report(ONE, known=(DIFFERS,), stopped="no"))
    for rule in ("kv-scale-one", "input-scale-differs"):
        assert [child.tag for child in outcome(suite, rule)] == ["system-out"]


def test_junit_says_what_was_judged() -> None:
    properties = {each.get("name"): each.get("value") for each in junit(REPORTS["none"]).findall("properties/property")}
    assert properties == {"source": "models/mine", "level": "scales", "targets": "hf, vllm-marlin/vllm"}


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, TEXT)
def test_junit_holds_any_text(message: str, tensor: str, source: str) -> None:
    finding = Finding("bad-shard", "error", message, tensor=tensor or None)
    suite = junit(report(finding, finding, source=source, judged=(finding.entry,), stopped=message))
    lines = (suite.findtext("testcase/failure") or "").split("\n")
    assert len(lines) == 2
    assert all(printable(message) in line and printable(tensor) in line for line in lines)
    assert suite.findtext("testcase/error", "") == printable(message)


# --- SARIF -----------------------------------------------------------------------------------------------------------


@cache
def sarif_schema() -> jsonschema.Draft4Validator:
    schema = json.loads((SCHEMAS / "sarif-schema-2.1.0.json").read_text("utf-8"))
    jsonschema.Draft4Validator.check_schema(schema)
    return jsonschema.Draft4Validator(schema)


def sarif(found: Report) -> dict[str, Any]:
    """The one run, by the schema and by what GitHub asks for beyond it."""
    log = json.loads(FORMATS["sarif"](found))
    sarif_schema().validate(log)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        parts = urlsplit(uri)
        assert uri and uri.isascii() and parts.path == uri and not uri.startswith("/") and ".." not in uri.split("/")
    return run


def test_sarif_is_valid(any_report: Report) -> None:
    run = sarif(any_report)
    driver = run["tool"]["driver"]
    assert (driver["name"], driver["version"]) == ("nvfp4prep", __version__)
    assert {rule["id"] for rule in driver["rules"]} >= {rule.id for rule in any_report.judged}
    assert len(run["results"]) == len(any_report.findings) + len(any_report.known)


def test_sarif_results() -> None:
    first, second, third, fourth = sarif(REPORTS["findings"])["results"]
    assert first == second
    assert first["ruleId"] == "NVP401" and first["level"] == "error"
    assert first["message"]["text"].endswith("gate and up of 3 experts have no input_scale")
    (location,) = first["locations"]
    assert location == {
        "physicalLocation": {"artifactLocation": {"uri": "models/mine/model-00001-of-00002.safetensors"}},
        "logicalLocations": [{"fullyQualifiedName": "layer 3", "kind": "layer"}],
    }
    assert first["partialFingerprints"]["nvfp4prep/v1"] == MISSING.fingerprint
    assert first["properties"] == {"layer": 3, "experts": [0, 1, 7], "projection": "w13"}
    assert third["level"] == "warning"
    assert third["locations"][0]["logicalLocations"][0]["fullyQualifiedName"] == DIFFERS.tensor
    assert third["properties"] == {"values": {"min": 0.5, "max": "inf"}, "target": "flashinfer-trtllm/vllm tp2"}
    assert fourth["level"] == "note"
    assert fourth["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "models/mine/config.json"
    assert all("baselineState" not in result for result in (first, third, fourth))


@pytest.mark.parametrize(
    ("fields", "uri"),
    [
        ({"source": "models/mine"}, "models/mine/model-00001-of-00002.safetensors"),
        ({"source": "./a b/../ü/"}, "model-00001-of-00002.safetensors"),
        ({"source": "./a:b/ü/"}, "a%3Ab/%C3%BC/model-00001-of-00002.safetensors"),
        ({"source": "."}, "model-00001-of-00002.safetensors"),
        ({"source": "/data/mine"}, "model-00001-of-00002.safetensors"),
        ({"source": "../mine"}, "model-00001-of-00002.safetensors"),
        ({"source": "~/mine"}, "model-00001-of-00002.safetensors"),
        ({"source": "org/name", "revision": "0123abc"}, "model-00001-of-00002.safetensors"),
    ],
)
def test_sarif_files_are_as_seen_from_where_it_ran(fields: dict[str, str], uri: str) -> None:
    (result,) = sarif(report(MISSING, **fields))["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == uri


@pytest.mark.parametrize("file", ["/etc/passwd", "../../x", "a/../../x", "//host/x", ""])
def test_sarif_names_no_file_outside(file: str) -> None:
    (result,) = sarif(report(Finding("bad-shard", "error", "no", file=file)))["results"]
    assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "models/mine/config.json"


def test_sarif_rules_explain_themselves() -> None:
    run = sarif(report(judged=RULES))
    for rule, told in zip(sorted(RULES, key=lambda rule: rule.id), run["tool"]["driver"]["rules"], strict=True):
        assert told["name"] == rule.name
        assert told["shortDescription"]["text"] and told["fullDescription"]["text"]
        assert rule.fix.replace("{", "{{").replace("}", "}}") in told["help"]["text"]
        prose = "".join(told["help"]["markdown"].split("```")[::2]).split("`")[::2]
        assert "<" not in "".join(prose), f"{rule.id}: HTML"
        assert told["defaultConfiguration"]["level"] == {"info": "note"}.get(rule.severity, rule.severity)
        assert told["properties"]["level"] == rule.level and len(told["properties"]["tags"]) == 2


def test_sarif_help_is_neither_html_nor_placeholder() -> None:
    (told,) = sarif(REPORTS["explained"])["tool"]["driver"]["rules"]
    assert told["fullDescription"]["text"] == "Engines <b>divide</b> by `a<b>` {{0}}: [see] (http://x)."
    assert "**Why**: Engines &lt;b>divide&lt;/b> by `a<b>` {{0}}" in told["help"]["markdown"]
    assert "```text\nNVP401 <b>{{0}}</b>\n```" in told["help"]["markdown"]
    assert "Fix: Calibrate: 100%, or\nsay" in told["help"]["text"]


def test_sarif_marks_what_the_baseline_knows() -> None:
    assert [result["baselineState"] for result in sarif(REPORTS["known"])["results"]] == [
        "new",
        "unchanged",
        "unchanged",
    ]
    assert [result["baselineState"] for result in sarif(REPORTS["only known"])["results"]] == ["unchanged"]


def test_sarif_stopped_did_not_succeed() -> None:
    (invocation,) = sarif(REPORTS["stopped"])["invocations"]
    assert invocation["executionSuccessful"] is False
    (notification,) = invocation["toolExecutionNotifications"]
    assert "bad-shard" in notification["message"]["text"]
    assert sarif(REPORTS["none"])["invocations"] == [{"executionSuccessful": True}]


@settings(max_examples=60, deadline=None)
@given(TEXT, TEXT, TEXT, TEXT)
def test_sarif_holds_any_text(message: str, file: str, tensor: str, source: str) -> None:
    finding = Finding("bad-shard", "error", message, file=file or None, tensor=tensor or None)
    run = sarif(report(finding, source=source, judged=(), stopped=message))
    (result,) = run["results"]
    text = result["message"]["text"]
    assert "](" not in text
    assert "{" not in text.replace("{{", "") and "}" not in text.replace("}}", "")
    assert printable(message).replace("](", "] (") in text.replace("{{", "{").replace("}}", "}")
    if tensor:
        (logical,) = result["locations"][0]["logicalLocations"]
        assert logical["fullyQualifiedName"] == printable(tensor)


@given(st.text("aé %:?#[]@\\\x00\n&", min_size=1))
def test_sarif_uri_gives_the_name_back(file: str) -> None:
    (result,) = sarif(report(Finding("bad-shard", "error", "no", file=file)))["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri) == f"models/mine/{file}"


# --- GitHub ----------------------------------------------------------------------------------------------------------


def commands(found: Report) -> list[tuple[str, dict[str, str], str]]:
    """Commands as GitHub's runner reads them, line by line: name, properties, message."""
    read = []
    for line in FORMATS["github"](found).splitlines():
        assert line.startswith("::")
        information, message = line[2:].split("::", 1)
        name, _, told = information.partition(" ")
        properties = dict(each.split("=", 1) for each in told.split(","))
        unescaped = {key: unescape(value, {"%3A": ":", "%2C": ","}) for key, value in properties.items()}
        read.append((name, unescaped, unescape(message, {})))
    return read


def unescape(text: str, more: dict[str, str]) -> str:
    for code, character in {"%0D": "\r", "%0A": "\n", **more, "%25": "%"}.items():
        text = text.replace(code, character)
    return text


def test_github_annotations() -> None:
    (name, properties, message), _, (second, *_), (third, on, _) = commands(REPORTS["findings"])
    assert name == "error"
    assert properties == {
        "file": "models/mine/model-00001-of-00002.safetensors",
        "title": "NVP401 input-scale-missing",
    }
    assert message.split("\n")[0].endswith(": gate and up of 3 experts have no input_scale")
    assert (second, third) == ("warning", "notice")
    assert on == {"title": "NVP414 kv-scale-one"}
    assert FORMATS["github"](REPORTS["none"]) == FORMATS["github"](REPORTS["only known"]) == ""


def test_github_says_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvfp4prep.findings.BY_NAME", {MISSING.rule: EXPLAINED})
    ((_, _, message),) = commands(REPORTS["explained"])
    assert message.endswith(f"\nfix: {EXPLAINED.fix}")


def test_github_says_that_there_are_more() -> None:
    (*_, last) = commands(report(*[MISSING] * 11, ONE))
    assert last[0] == "notice" and last[2].startswith("models/mine: 11 errors, 1 info; GitHub shows at most 10")
    assert len(commands(report(*[MISSING] * 10, *[DIFFERS] * 10, *[ONE] * 10))) == 30
    notices = [message for name, _, message in commands(REPORTS["many"]) if name == "notice"]
    assert len(notices) == 26 and notices[9].startswith("models/mine: 40 errors, 11 warnings, 25 infos; ")


def test_github_says_that_it_stopped() -> None:
    name, properties, message = commands(REPORTS["stopped, all filtered"])[0]
    assert (name, properties) == ("error", {"title": "nvfp4prep"})
    assert message == f"later rules were not judged: {printable(HOSTILE)}"


@settings(deadline=None)
@given(TEXT, TEXT, TEXT, st.sampled_from(SEVERITIES))
def test_github_holds_any_text(message: str, file: str, source: str, severity: Any) -> None:
    finding = Finding("bad-shard", severity, message, file=file or None)
    ((name, properties, told),) = commands(report(finding, source=source))
    assert name == {"info": "notice"}.get(severity, severity)
    assert set(properties) <= {"file", "title"} and properties["title"] == "NVP102 bad-shard"
    assert printable(message) in told
    if "file" in properties:
        assert properties["file"].isprintable()


@given(st.text("aé %:,;=]\\\x00\n&25A3C", min_size=1))
def test_github_gives_the_name_back(file: str) -> None:
    ((_, properties, _),) = commands(report(Finding("bad-shard", "error", "no", file=file)))
    assert properties["file"] == printable(f"models/mine/{file}")
