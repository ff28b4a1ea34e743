"""`nvfp4prep validate`: each rule fails and passes, real exports get what they deserve, exit codes hold."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import damage
import pytest
import torch
from rule_cases import CASES, EXPERTS, Case, codes
from runner import Run, run, snapshot
from test_refused import DENSE, QWEN

from nvfp4prep.options import Options
from nvfp4prep.rules import LEVELS, RULES
from nvfp4prep.validation import validate

Fetch = Callable[[str], Path]
BASES = {"scale-reciprocal": QWEN}


def findings(folder: Path, *options: object, level: str = "full") -> list[dict[str, Any]]:
    result = run("validate", folder, "--format", "json", "--level", level, *options)
    assert result.code in (0, 1), result.stderr
    return result.json["findings"]


def test_every_rule_has_a_case() -> None:
    report = validate(str(checkpoints.DATA / QWEN), "full", [Options("vllm-marlin")])
    assert {rule.name for rule in report.judged} == {"no-such-checkpoint", "not-a-directory", "no-weights", *CASES}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """Found from its level on and not before, once the damage is done and not without it."""
    case = CASES[name]
    sound = case.sound(checkpoint(case.base), tmp_path / "sound")
    failing = case.failing(checkpoint(case.base), tmp_path / "failing")
    before = snapshot(failing) if name != "undecodable-name" else None
    for level in LEVELS:
        assert name not in {found["rule"] for found in findings(sound, *case.options, level=level)}
        found = [one for one in findings(failing, *case.options, level=level) if one["rule"] == name]
        assert bool(found) == (LEVELS.index(level) >= LEVELS.index(case.level)), level  # type: ignore[arg-type]
        assert all(one["severity"] == case.severity for one in found)
        assert not found or re.search(case.says, found[0]["message"]), found
    assert before is None or snapshot(failing) == before
    rule = next(rule for rule in RULES if rule.name == name)
    assert rule.level == case.level


# --- real exports ----------------------------------------------------------------------------------------------------

EXPECTED: dict[str, dict[str, int]] = {
    "dsv3-int4awq": {"router-bias-dtype": 1, "shared-expert-folded": 1},
    "nemotronh-nvfp4": {"exclude-corrupted": 1, "exclude-added": 1},
    "qwen3moe-int4awq": {"int4-gate-up-identical": 2},
    "qwen3moe-mixed-fp8attn": {"exclude-added": 1},
    "qwen3moe-nvfp4-awqlite": {"nvfp4-awq": 1, "input-scale-differs": 4},
    "qwen3moe-nvfp4-perexpert": {"input-scale-differs": 4},
    "tinymoe-int4awq": {"int4-gate-up-identical": 4},
    "tinymoe-nvfp4-perexpert": {"input-scale-differs": 8},
    "tinymoe-w4a8awq": {"input-scale-differs": 8},
    "qwen3moe-w4a8awq": {"input-scale-differs": 4},
    "tinymoe-nvfp4-fewtokens": {"input-scale-differs": 8},
    "tinymoe-nvfp4-splitscale": {"input-scale-differs": 8, "gate-up-scale-differs": 4},
}
"""Findings of real exports at level full, by rule; those not named have none."""


@pytest.mark.parametrize("name", [*checkpoints.NVFP4, *checkpoints.INT4, *checkpoints.OVERLAYS])
def test_shipped_exports(name: str, checkpoint: Fetch) -> None:
    _compare(name, checkpoint(name))


@pytest.mark.parametrize("name", sorted(checkpoints.full_set()))
def test_full_set(name: str, full_set: dict[str, Path]) -> None:
    if "bf16" in name:
        assert {one["rule"] for one in findings(full_set[name])} - {"router-bias-dtype"} == {"no-quant-config"}
    else:
        _compare(name, full_set[name])


def _compare(name: str, folder: Path) -> None:
    counts: dict[str, int] = {}
    for found in findings(folder):
        assert found["severity"] in ("warning", "info"), found
        counts[found["rule"]] = counts.get(found["rule"], 0) + 1
    assert counts == EXPECTED.get(name, {})


@pytest.mark.parametrize("target", ["hf", "flashinfer-trtllm", "vllm-marlin"])
@pytest.mark.parametrize("name", checkpoints.NVFP4)
def test_what_convert_writes_has_no_findings_left(name: str, target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", checkpoint(name), out, "--target", target, "--no-smoke", "-q")
    if done.code == 3:
        assert target != "hf"
        return
    assert done.code == 0, done.stderr
    left = {found["rule"] for found in findings(out)}
    assert left <= {"nvfp4-awq"}, left


# --- targets ---------------------------------------------------------------------------------------------------------


def test_what_depends_on_a_target(checkpoint: Fetch, tmp_path: Path) -> None:
    """Marlin does without an input_scale; for kernels that need one an expert without it is an error."""
    source = damage.damaged(
        checkpoint(QWEN), tmp_path / "source", damage.drop(rf"{EXPERTS}\.3\.gate_proj\.input_scale")
    )
    for target, severity in (("vllm-marlin", "warning"), ("flashinfer-cutlass", "error"), ("hf", "error")):
        found = [one for one in findings(source, "--target", target) if one["rule"].startswith("input-scale-")]
        assert ("error" in {one["severity"] for one in found}) == (severity == "error")
        done = run("convert", source, tmp_path / target, "--target", target, "--no-smoke", "-q")
        assert done.code == (3 if severity == "error" else 0)
    both = findings(source, "--target", "vllm-marlin", "--target", "flashinfer-cutlass")
    named = {(one["rule"], one["target"]) for one in both if "target" in one}
    assert named == {
        ("input-scale-missing", "flashinfer-cutlass/vllm"),
        ("input-scale-imputed", "vllm-marlin/vllm"),
    }


def test_marlin_takes_layers_without_any_input_scale(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", damage.drop(rf"{EXPERTS}\..*\.input_scale"))
    assert not [one for one in findings(source, "--target", "vllm-marlin") if one["severity"] == "error"]
    packed = tmp_path / "packed"
    assert run("convert", source, packed, "--target", "vllm-marlin", "-q").code == 0
    assert run("unpack", packed, tmp_path / "back", "-q").code == 0
    rules = {one["rule"] for one in findings(tmp_path / "back") if one["severity"] == "error"}
    assert rules == {"input-scale-missing"}


@pytest.mark.parametrize(("tp", "refused"), [(1, False), (16, True)])
def test_alignment_by_tp(tp: int, refused: bool, checkpoint: Fetch) -> None:
    found = findings(checkpoint(QWEN), "--target", "flashinfer-trtllm", "--tp", tp)
    assert ("target-refused" in {one["rule"] for one in found}) == refused
    if refused:
        (one,) = [one for one in found if one["rule"] == "target-refused" and one["layer"] == 0]
        assert "--tp 1, 2" in one["message"] and one["target"] == "flashinfer-trtllm/vllm tp16"


# --- what comes out --------------------------------------------------------------------------------------------------


@pytest.fixture
def bad(checkpoint: Fetch, tmp_path: Path) -> Path:
    """Two NaN block scales (an error) and differing input scales (warnings)."""
    return damage.damaged(
        checkpoint(QWEN), tmp_path / "bad", codes(rf"{EXPERTS}\.[35]\.up_proj\.weight_scale", 0xFF, 1)
    )


def test_a_finding_says_where_and_what_to_do(bad: Path) -> None:
    (found,) = [one for one in findings(bad) if one["rule"] == "block-scale-nan"]
    assert found["id"] == "NVP501" and found["severity"] == "error"
    assert (found["layer"], found["experts"], found["expert_ranges"]) == (0, [3, 5], "3, 5")
    assert found["tensor"] == "model.layers.0.mlp.experts.3.up_proj.weight_scale"
    assert found["projection"] == "up_proj" and found["file"] == "model.safetensors"
    assert found["values"] == {"count": 2, "of": 8 * 128 * 16} and found["fix"]
    assert "row 0, block 0" in found["message"]


def test_exit_codes(bad: Path, checkpoint: Fetch, tmp_path: Path) -> None:
    assert run("validate", bad).code == 0  # the NaN is found at level full
    assert run("validate", bad, "--level", "full").code == 1
    assert run("validate", bad, "--fail-on", "warning").code == 1
    assert run("validate", bad, "--level", "full", "--ignore", "NVP5").code == 0
    assert run("validate", bad, "--level", "full", "--select", "NVP4,input-scale-bad").code == 0
    assert run("validate", bad, "--select", "NVP999").code == 2
    assert run("validate", bad, "--baseline", checkpoint(QWEN) / "config.json").code == 2
    assert run("validate", tmp_path / "absent").code == 3
    assert run("validate", checkpoint(QWEN) / "config.json").code == 3
    (tmp_path / "empty").mkdir()
    assert run("validate", tmp_path / "empty", "--format", "sarif").code == 3


def test_hiding_mild_findings_does_not_pass_them(bad: Path) -> None:
    result = run("validate", bad, "--severity", "error", "--fail-on", "warning", "--format", "json")
    assert result.code == 1 and result.json["findings"] == []


def test_a_baseline_only_lets_known_findings_pass(bad: Path, checkpoint: Fetch, tmp_path: Path) -> None:
    base = tmp_path / "baseline.json"
    assert run("validate", bad, "--level", "full", "--format", "json", "--output", base).code == 1
    known = len(json.loads(base.read_text())["findings"])
    again = run("validate", bad, "--level", "full", "--format", "json", "--baseline", base, "--fail-on", "warning")
    assert again.code == 0 and again.json["findings"] == [] and len(again.json["known"]) == known
    base.write_text(again.stdout)
    worse = damage.damaged(bad, tmp_path / "worse", damage.drop(rf"{EXPERTS}\.2\.up_proj\.input_scale"))
    result = run("validate", worse, "--level", "full", "--format", "json", "--baseline", base)
    assert result.code == 1
    assert "input-scale-missing" in {one["rule"] for one in result.json["findings"]}


def test_text(bad: Path) -> None:
    result = run("validate", bad, "--level", "full")
    assert (
        "NVP501 error block-scale-nan: NaN among block scales\n  layer 0, experts 3, 5, model.layers.0" in result.stdout
    )
    assert "NVP404 warning input-scale-differs (4)" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"{bad}: 1 error, 4 warnings (")
    assert result.stderr == ""


def test_stopped_reports_say_so(checkpoint: Fetch, tmp_path: Path) -> None:
    case = CASES["bad-shard"]
    folder = case.failing(checkpoint(case.base), tmp_path / "cut")
    result = run("validate", folder)
    assert result.code == 1 and "nothing else was judged" in result.stdout
    assert json.loads(run("validate", folder, "--format", "json").stdout)["stopped"]


@pytest.mark.parametrize("form", ["text", "json", "junit", "sarif", "github"])
def test_output_file(form: str, bad: Path, tmp_path: Path) -> None:
    direct: Run = run("validate", bad, "--format", form)
    out = tmp_path / "report"
    result = run("validate", bad, "--format", form, "--output", out)
    assert (result.code, result.stdout) == (0, "")
    assert out.read_text() == direct.stdout
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report"]
    missing = run("validate", bad, "--format", form, "--output", tmp_path / "no" / "such" / "folder")
    assert missing.code == 4 and "no/such" in missing.stderr


# --- convert goes by the same rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [name for name, case in CASES.items() if case.severity == "error" and case.level != "full" and not case.convert],
)
def test_convert_refuses_what_is_an_error(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    case: Case = CASES[name]
    failing = case.failing(checkpoint(case.base), tmp_path / "failing")
    result = run("convert", failing, tmp_path / "out", "--json", *case.options)
    assert result.code == 3
    refused = {found["rule"] for found in result.findings}
    assert refused & {name, "already-packed"}, refused
    assert not (tmp_path / "out").exists()


def test_convert_validates_what_it_wrote(checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale that is written wrong keeps the output from its name; nothing that loads is left."""
    from nvfp4prep import execute

    encode = execute.encode_floats
    monkeypatch.setattr(execute, "encode_floats", lambda values: encode([0.0 for _ in values]))
    result = run("convert", checkpoint(DENSE), tmp_path / "out", "--no-smoke")
    assert result.code == 1
    assert "does not pass nvfp4prep validate" in result.stderr and "NVP4" in result.stderr
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("config.json"))


def test_a_kv_scale_of_another_dtype_is_read_by_value(checkpoint: Fetch, tmp_path: Path) -> None:
    case = CASES["kv-scale-one"]

    def ones(ck: damage.Editable) -> None:
        for name in ck.names(r".*[kv]_scale"):
            ck.tensors[name] = torch.ones((), dtype=torch.bfloat16)

    source = damage.damaged(checkpoint(case.base), tmp_path / "source", ones)
    assert "kv-scale-one" in {one["rule"] for one in findings(source)}


@pytest.mark.parametrize("target", ["hf", "flashinfer-trtllm", "vllm-cutlass"])
@pytest.mark.parametrize("base", [QWEN, "llama4-nvfp4"])
def test_convert_lets_no_nan_block_scale_through(base: str, target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    pattern = r".*layers\.1\..*experts.*down_proj[._]weight_scale"
    source = damage.damaged(checkpoint(base), tmp_path / "source", codes(pattern, 0xFF, 2))
    result = run("convert", source, tmp_path / "out", "--target", target, "--no-smoke", "--json")
    assert result.code == 3
    (found,) = result.findings
    assert found["rule"] == "block-scale-nan" and found["layer"] == 1
    assert f" {16 if base == QWEN else 2} block scales" in found["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


@pytest.mark.parametrize(
    ("base", "pattern", "change", "rule"),
    [
        (QWEN, r".*layers\.1\..*experts\.2\.up_proj\.weight_scale", 0xB8, "block-scale-negative"),
        ("qwen3moe-int4awq", r".*layers\.1\..*experts\.2\.up_proj\.weight_scale", float("nan"), "int4-scale-bad"),
        ("qwen3moe-int4awq", r".*layers\.1\..*o_proj\.pre_quant_scale", 0.0, "pre-quant-scale-bad"),
    ],
)
@pytest.mark.parametrize("target", ["hf", "compressed-tensors"])
def test_convert_refuses_unusable_scales_that_it_comes_across(
    base: str, pattern: str, change: float, rule: str, target: str, checkpoint: Fetch, tmp_path: Path
) -> None:
    harm = codes(pattern, change, 1) if isinstance(change, int) else damage.put(change, pattern)
    source = damage.damaged(checkpoint(base), tmp_path / "source", harm)
    options = ("--target", target, "--pre-quant-scale", "fold", "--no-smoke", "--json")
    result = run("convert", source, tmp_path / "out", *options)
    assert result.code == 3
    assert {found["rule"] for found in result.findings} == {rule}
    assert result.findings[0]["layer"] == 1 and " 1 " in result.findings[0]["message"]
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


# --- what a report file may not do -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "new.json"])
@pytest.mark.parametrize("command", [("validate", "--output"), ("report", "-o")])
def test_reports_spare_the_checkpoint(name: str, command: tuple[str, str], checkpoint: Fetch, tmp_path: Path) -> None:
    source = Path(shutil.copytree(checkpoint(QWEN), tmp_path / "source"))
    before = snapshot(source)
    (tmp_path / "link").symlink_to(source / name)
    for output in (source / name, tmp_path / "link"):
        result = run(command[0], source, command[1], output)
        assert result.code == 2 and "write it elsewhere" in result.stderr
    assert snapshot(source) == before


def test_reports_go_through_links_and_into_pipes(bad: Path, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("old")
    link.symlink_to(target)
    assert run("validate", bad, "--output", link).code == 0
    assert link.is_symlink() and "warning" in target.read_text()
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True) as reader:
        assert run("validate", bad, "--output", pipe).code == 0
        assert reader.communicate(timeout=20)[0] == target.read_text()
    assert stat.S_ISFIFO(pipe.stat().st_mode)


# --- what can't be judged does not pass ------------------------------------------------------------------------------


def test_a_stopped_run_never_passes(checkpoint: Fetch, tmp_path: Path) -> None:
    case, base = CASES["bad-shard"], tmp_path / "base.json"
    folder = case.failing(checkpoint(case.base), tmp_path / "cut")
    assert run("validate", folder, "--format", "json", "--output", base).code == 1
    for options in (("--ignore", "NVP102"), ("--select", "NVP4"), ("--baseline", base)):
        result = run("validate", folder, "--format", "json", *options)
        assert result.code == 1
        assert [one["rule"] for one in result.json["findings"]] == ["bad-shard"]
        assert result.json["judged"] == []


@pytest.mark.parametrize("text", ["[1]", '{"findings": [{"fingerprint": null}], "known": []}', "{", "[" * 100_000])
def test_baselines_that_are_none(text: str, bad: Path, tmp_path: Path) -> None:
    (tmp_path / "base.json").write_text(text)
    result = run("validate", bad, "--baseline", tmp_path / "base.json")
    assert result.code == 2 and "no report of nvfp4prep validate" in result.stderr


# --- our own outputs in another form ---------------------------------------------------------------------------------


def test_outputs_in_compressed_tensors_form(checkpoint: Fetch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--target", "compressed-tensors", "--pre-quant-scale", "fold", "-q")
    assert run("convert", checkpoint("qwen3moe-int4awq"), out, *options).code == 0
    assert findings(out) == []
    again = run("convert", out, tmp_path / "again", "--json")
    assert again.code == 3 and [one["rule"] for one in again.findings] == ["already-packed"]
    path = out / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    assert {one["rule"] for one in findings(out)} == {"digest-differs"}
    assert findings(out, level="scales") == []


def test_validate_takes_convert_s_options(checkpoint: Fetch, tmp_path: Path) -> None:
    """What passes with an option is what convert does with it."""
    awq = checkpoint("qwen3moe-nvfp4-awqlite")
    for target in ("vllm-marlin", "compressed-tensors"):
        assert run("validate", awq, "--target", target).code == 1
        assert run("validate", awq, "--target", target, "--pre-quant-scale", "fold").code == 0
    source = damage.damaged(
        checkpoint(QWEN), tmp_path / "source", damage.drop(rf"{EXPERTS}\.3\.gate_proj\.input_scale")
    )
    assert run("validate", source).code == 1
    assert run("validate", source, "--impute", "layer-max").code == 0


def test_w4a8_shares_input_scales_of_fused_linears(checkpoint: Fetch, tmp_path: Path) -> None:
    harm = damage.multiply(r".*layers\.0\.self_attn\.q_proj", 2.0, param="input_scale")
    source = damage.damaged(checkpoint("qwen3moe-w4a8awq"), tmp_path / "source", harm)
    assert "fused-linear-scale-differs" in {one["rule"] for one in findings(source)}
    assert run("convert", source, tmp_path / "out", "-q").code == 0
    assert findings(tmp_path / "out") == []
    tensors = damage.load(tmp_path / "out").tensors
    before = damage.load(source).tensors
    names = [f"model.layers.0.self_attn.{part}_proj.input_scale" for part in "qkv"]
    assert {float(tensors[name]) for name in names} == {max(float(before[name]) for name in names)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_scan_soon(number: int, tmp_path: Path) -> None:
    """Of a checkpoint that takes minutes to scan: one sparse fused tensor of 16 GB."""
    folder = tmp_path / "huge"
    shutil.copytree(checkpoints.DATA / "gptoss-nvfp4", folder)

    def widen(table: dict[str, Any]) -> None:
        table.clear()
        position = 0
        for name, dtype, shape in (
            ("model.layers.0.mlp.experts.down_proj", "U8", [512, 2048, 4096]),
            ("model.layers.0.mlp.experts.down_proj_weight_scale", "F8_E4M3", [512, 256, 4096]),
            ("model.layers.0.mlp.experts.down_proj_weight_scale_2", "F32", []),
            ("model.layers.0.mlp.experts.gate_up_proj", "U8", [512, 2048, 8192]),
            ("model.layers.0.mlp.experts.gate_up_proj_weight_scale", "F8_E4M3", [512, 256, 8192]),
            ("model.layers.0.mlp.experts.gate_up_proj_weight_scale_2", "F32", []),
        ):
            size = math.prod(shape) * (4 if dtype == "F32" else 1)
            table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
            position += size
        sizes.append(position)

    sizes: list[int] = []
    path = folder / "model.safetensors"
    damage.rewrite_header(path, widen)
    with path.open("r+b") as file:
        header = int.from_bytes(file.read(8), "little")
        file.truncate(8 + header)
        file.truncate(8 + header + sizes[0])
    command = [sys.executable, "-m", "nvfp4prep", "validate", "--level", "full", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        time.sleep(4)
        assert process.poll() is None
        begun = time.monotonic()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert time.monotonic() - begun < 20 and "Traceback" not in stderr


def test_messages_are_cut(checkpoint: Fetch, tmp_path: Path) -> None:
    """They may quote a value of any size."""
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", lambda ck: ck.set_algo("X" * 900_000))
    (found,) = [one for one in findings(source, level="headers") if one["rule"] == "algo-contradicts-weights"]
    assert len(found["message"]) < 2100 and found["message"].endswith(" characters)")
    assert len(run("validate", source).stdout) < 20_000
