"""The GitHub Action, the pre-commit hook and the snippets of docs/ci.md: valid, and no input is run as code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from runner import run

ROOT = Path(__file__).parent.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "run" in step}
SNIPPETS = re.findall(
    r"^```yaml\n(# (\S+)\n.*?)^```$", (ROOT / "docs/ci.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
)
BASH = shutil.which("bash")
HOSTILE = "a b; touch stolen; $(touch stolen) `touch stolen` \"' * ~ \\ && exit 0 #"


def check(*command: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr


def test_action_is_valid(tmp_path: Path) -> None:
    check("check_jsonschema", "--builtin-schema", "vendor.github-actions", str(ROOT / "action.yml"), cwd=tmp_path)


def test_hook_is_valid(tmp_path: Path) -> None:
    check("pre_commit", "validate-manifest", str(ROOT / ".pre-commit-hooks.yaml"), cwd=tmp_path)


def test_every_file_is_in_the_docs() -> None:
    names = [name for _, name in SNIPPETS]
    assert names == [
        ".github/workflows/checkpoint.yml",
        ".pre-commit-config.yaml",
        ".pre-commit-config.yaml",
        ".gitlab-ci.yml",
    ]


@pytest.mark.parametrize(("text", "name"), SNIPPETS)
def test_snippet_is_valid(text: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / Path(name).name
    file.write_text(text, "utf-8")
    if "pre-commit" in name:
        check("pre_commit", "validate-config", str(file), cwd=tmp_path)
    else:
        schema = "vendor.gitlab-ci" if "gitlab" in name else "vendor.github-workflows"
        check("check_jsonschema", "--builtin-schema", schema, str(file), cwd=tmp_path)


def test_snippets_use_what_there_is() -> None:
    workflow, hooks, *_ = (yaml.safe_load(text) for text, _ in SNIPPETS)
    (given,) = [step["with"] for step in workflow["jobs"]["validate"]["steps"] if "nvfp4prep@" in step["uses"]]
    assert set(given) <= set(ACTION["inputs"])
    assert [hook["id"] for hook in hooks["repos"][0]["hooks"]] == [hook["id"] for hook in HOOKS]


def test_docs_list_the_inputs() -> None:
    table = (ROOT / "docs/ci.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \| (?:`(\S+)`|none|required|PyTorch's CPU builds) \|", table, re.MULTILINE)
    defaults = {name: default for name, default in rows if name in ACTION["inputs"]}
    assert set(defaults) == set(ACTION["inputs"])
    for name, entry in ACTION["inputs"].items():
        assert defaults[name] == ("" if name == "torch-index" else entry.get("default", ""))


# --- the action's scripts --------------------------------------------------------------------------------------------

RECORD = """#!{python}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
codes = os.environ["CODES"].split()
seen = sum(1 for _ in open(os.environ["RECORD"]))
sys.exit(int(codes[min(seen, len(codes)) - 1]))
"""


class Ran:
    """What a step did: exit code, what it called, and what it set as outputs."""

    def __init__(self, code: int, folder: Path) -> None:
        record, output = folder / "record", folder / "output"
        self.code = code
        self.calls = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        self.outputs = output.read_text() if output.exists() else ""


def perform(name: str, folder: Path, codes: str = "0", **inputs: str) -> Ran:
    """Run a step as GitHub's runner does, with its commands replaced by ones that write down how they were called."""
    assert BASH is not None
    step = STEPS[name]
    (folder / "bin").mkdir()
    (folder / "work").mkdir()
    for command in ("nvfp4prep", "python"):
        (folder / "bin" / command).write_text(RECORD.format(python=sys.executable))
        (folder / "bin" / command).chmod(0o755)
    given = {key: entry.get("default", "") for key, entry in ACTION["inputs"].items()}
    given |= {key.replace("_", "-"): value for key, value in inputs.items()}
    variables = {
        key: re.sub(r"^\$\{\{ inputs\.([\w-]+) }}$", lambda m: given[m[1]], v) for key, v in step["env"].items()
    }
    (folder / "script.sh").write_text(step["run"])
    environment = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "RECORD": str(folder / "record"),
        "CODES": codes,
        "GITHUB_OUTPUT": str(folder / "output"),
        "GITHUB_ACTION_PATH": "/the action/v1",
        **variables,
    }
    command = [BASH, "--noprofile", "--norc", "-eo", "pipefail", str(folder / "script.sh")]
    done = subprocess.run(command, cwd=folder / "work", env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert not list((folder / "work").iterdir()), "an input was run"
    return Ran(done.returncode, folder)


needs_bash = pytest.mark.skipif(BASH is None, reason="no bash")


def test_action_gives_inputs_to_scripts_as_variables_only() -> None:
    assert set(STEPS) == {"Install nvfp4prep", "Validate"}
    for step in STEPS.values():
        assert step["shell"] == "bash"
        assert "${{" not in step["run"]
    used = re.findall(r"inputs\.([\w-]+)", json.dumps(ACTION["runs"]))
    assert sorted(used) == sorted(ACTION["inputs"])


@needs_bash
def test_action_installs_its_own_checkout(tmp_path: Path) -> None:
    ran = perform("Install nvfp4prep", tmp_path)
    index = "--extra-index-url=https://download.pytorch.org/whl/cpu"
    assert ran.calls == [["python", "-m", "pip", "install", "--disable-pip-version-check", index, "/the action/v1"]]


@needs_bash
@pytest.mark.parametrize("index", ["", HOSTILE])
def test_action_takes_another_index_or_none(index: str, tmp_path: Path) -> None:
    ran = perform("Install nvfp4prep", tmp_path, torch_index=index)
    options = [f"--extra-index-url={index}"] if index else []
    assert ran.calls == [["python", "-m", "pip", "install", "--disable-pip-version-check", *options, "/the action/v1"]]


SARIF = ["--format=sarif", "--output=out.sarif"]
VALIDATE: dict[str, tuple[dict[str, str], list[str], list[list[str]]]] = {
    "defaults": ({"source": "models/mine"}, [], [["--format=github"]]),
    "sarif": ({"source": "models/mine", "sarif": "out.sarif"}, [], [["--format=github"], SARIF]),
    "targets": (
        {"source": "org/name@main", "targets": "\n  vllm-marlin\nflashinfer-trtllm  \n\n"},
        ["--target=vllm-marlin", "--target=flashinfer-trtllm"],
        [["--format=github"]],
    ),
    "everything": (
        {
            "source": "a b",
            "baseline": "the baseline.json",
            "extra_args": "--engine=sglang\n--ignore\nNVP2",
            "sarif": "out.sarif",
        },
        ["--baseline=the baseline.json", "--engine=sglang", "--ignore", "NVP2"],
        [["--format=github"], SARIF],
    ),
    "an option for a source": ({"source": "--help"}, [], [["--format=github"]]),
    "hostile": (
        {"source": HOSTILE, "targets": HOSTILE, "baseline": HOSTILE, "extra_args": HOSTILE, "sarif": HOSTILE},
        [f"--target={HOSTILE}", f"--baseline={HOSTILE}", HOSTILE],
        [["--format=github"], ["--format=sarif", f"--output={HOSTILE}"]],
    ),
}


@needs_bash
@pytest.mark.parametrize("name", VALIDATE)
def test_action_validates(name: str, tmp_path: Path) -> None:
    inputs, options, formats = VALIDATE[name]
    ran = perform("Validate", tmp_path, **inputs)
    common = ["nvfp4prep", "validate", "--level=scales", "--fail-on=error", *options]
    assert ran.calls == [[*common, *form, "--", inputs["source"]] for form in formats]
    assert (ran.code, ran.outputs) == (0, "exit-code=0\n")


@needs_bash
@pytest.mark.parametrize("key", ["level", "fail_on"])
def test_action_takes_a_hostile_choice_for_a_value(key: str, tmp_path: Path) -> None:
    (call,) = perform("Validate", tmp_path, source="x", **{key: HOSTILE}).calls
    assert f"--{key.replace('_', '-')}={HOSTILE}" in call


@needs_bash
@pytest.mark.parametrize(("codes", "expected"), [("1 1", 1), ("3 3", 3), ("0 4", 4), ("1 4", 4), ("1 0", 1)])
def test_action_ends_with_the_worse_exit_code(codes: str, expected: int, tmp_path: Path) -> None:
    ran = perform("Validate", tmp_path, codes, source="x", sarif="out.sarif")
    assert len(ran.calls) == 2, "no SARIF file for a checkpoint that has findings"
    assert (ran.code, ran.outputs) == (expected, f"exit-code={expected}\n")


@needs_bash
def test_action_calls_the_command_that_there_is(tmp_path: Path) -> None:
    """The real command takes what the action gives it."""
    source = str(ROOT / "tests/data/qwen3moe-nvfp4-perexpert")
    (tmp_path / "step").mkdir()
    sarif = tmp_path / "out.sarif"
    ran = perform("Validate", tmp_path / "step", source=source, targets="vllm-marlin", sarif=str(sarif))
    for call in ran.calls:
        result = run(*call[1:])
        assert result.code in (0, 1), result.stderr
        assert all(line.startswith("::") for line in result.stdout.splitlines())
    assert json.loads(sarif.read_text("utf-8"))["version"] == "2.1.0"


# --- the hook --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "runs"),
    [
        ("config.json", True),
        ("models/mine/config.json", True),
        ("models/mine/hf_quant_config.json", True),
        ("models/mine/nvfp4prep.json", True),
        ("models/mine/model-00001-of-00002.safetensors", True),
        ("model.safetensors.index.json", True),
        ("myconfig.json", False),
        ("models/mine/tokenizer.json", False),
        ("models/mine/model.safetensors.py", False),
    ],
)
def test_hook_runs_for_files_of_checkpoints(file: str, runs: bool) -> None:
    (hook,) = HOOKS
    assert bool(re.search(hook["files"], file)) == runs


def test_hook_calls_the_command_that_there_is() -> None:
    (hook,) = HOOKS
    source = ROOT / "tests/data/qwen3moe-nvfp4-perexpert"
    command, *arguments = hook["entry"].split()
    assert command == "nvfp4prep" and not hook["pass_filenames"]
    assert run(*arguments, source).code == 0
    assert run(*arguments, "--level", "scales", source).code == 0
    assert run(*arguments).code == 2
