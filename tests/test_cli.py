"""The command line as others see it: exit codes, what goes to stdout and stderr, imports, interruption."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import damage
import oracle
import pytest
from runner import run, snapshot, strict_json

from nvfp4prep import __version__, cli
from nvfp4prep.layouts import LAYOUTS
from nvfp4prep.layouts.logical import ENGINES
from nvfp4prep.rules import BY_NAME
from nvfp4prep.smoke.kernels import BACKENDS

DENSE, QWEN, SPLIT = "qwen3-dense-nvfp4", "qwen3moe-nvfp4-perexpert", "tinymoe-nvfp4-splitscale"
NAN_SCALE = damage.put(float("nan"), r"model\.layers\.0\.mlp\.experts\.3\.gate_proj\.input_scale")

Fetch = Callable[[str], Path]


def test_choices_are_those_there_are() -> None:
    """The command line lists them itself, so that it starts without torch."""
    assert tuple(LAYOUTS) == cli._LAYOUTS
    assert ENGINES == cli._ENGINES
    assert set(cli._BACKENDS) == {"auto", "emulator", *BACKENDS}


@pytest.mark.parametrize("option", [("--tp", "1"), ("--engine", "vllm"), ("--activation-dtype", "bf16")])
def test_options_of_packed_targets_without_one(option: tuple[str, str], checkpoint: Fetch, tmp_path: Path) -> None:
    for targets in ((), ("--target", "compressed-tensors", "--target", "hf")):
        refused = run("convert", checkpoint(QWEN), tmp_path / "out", *targets, *option, "--dry-run")
        assert refused.code == 2 and f"{option[0]} is for packed targets" in refused.stderr
    assert run("convert", checkpoint(QWEN), tmp_path / "out", "--target", "auto", *option, "--dry-run").code == 0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (QWEN, ("--target", "flashinfer-trtllm"), "vllm serve {} --load-format nvfp4prep (docs"),
        (QWEN, ("--target", "vllm-marlin", "--tp", "2"), "--load-format nvfp4prep --tensor-parallel-size 2 (docs"),
        (QWEN, ("--target", "vllm-marlin", "--ep", "2"), "--tensor-parallel-size 2 --enable-expert-parallel (docs"),
        (QWEN, ("--target", "flashinfer-trtllm", "--engine", "sglang"), "sglang serve --model-path {}"),
        ("qwen3moe-int4awq", ("--target", "moe-wna16"), "No engine loads this layout yet"),
        ("qwen3moe-nvfp4-awqlite", ("--target", "vllm-marlin"), "vLLM refuses it, with its plugin too"),
    ],
)
def test_what_comes_next_is_said(
    name: str, options: tuple[str, ...], words: str, checkpoint: Fetch, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run("convert", checkpoint(name), out, *options, "--no-smoke", "--pre-quant-scale", "fold")
    assert done.code == 0 and words.format(out) in " ".join(done.stdout.split())
    assert ("vllm serve" in done.stdout) == ("--load-format" in words or "parallel" in words)


def test_a_refusal_of_many_layers_is_told_once(checkpoint: Fetch, tmp_path: Path) -> None:
    refused = run("convert", checkpoint(QWEN), tmp_path / "out", "--target", "vllm-marlin", "--tp", "3", "--json")
    [finding] = refused.findings
    assert finding["layer"] == 0 and "model.layers.0.mlp and 1 more: intermediate size" in finding["message"]


def test_findings_of_inspect_are_whole_in_a_pipe(checkpoint: Fetch) -> None:
    shown = run("inspect", checkpoint("qwen3moe-nvfp4-awqlite")).stdout
    assert "and SGLang ignores pre_quant_scale on experts, which then compute wrong\n" in shown


# --- --json -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DENSE, QWEN, SPLIT, "qwen3moe-mixed-fp8attn", "nemotronh-nvfp4"])
def test_json_of_a_conversion(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("convert", checkpoint(name), out, "--json")
    assert (result.code, result.stderr) == (0, "")
    assert result.json["dry_run"] is False and result.json["out"] == str(out)
    assert result.json["manifest"] == strict_json((out / "nvfp4prep.json").read_text())
    sizes = {path.name: path.stat().st_size for path in out.glob("*.safetensors")}
    assert {file["file"]: file["bytes"] for file in result.json["outputs"]} == sizes
    assert result.json["bytes"] == sum(sizes.values())


def test_json_of_a_dry_run_is_the_plan_and_nothing_is_written(checkpoint: Fetch, tmp_path: Path) -> None:
    arguments = ("convert", checkpoint(QWEN), tmp_path / "out", "--max-shard-size", "300KB", "--json")
    dry = run(*arguments, "--dry-run")
    assert (dry.code, dry.stderr) == (0, "")
    assert not list(tmp_path.iterdir())
    plan = dry.json
    assert plan.pop("dry_run") is True
    assert plan["options"]["max_shard_bytes"] == 300_000 and len(plan["outputs"]) > 3
    done = run(*arguments).json
    assert {key: done[key] for key in plan} == plan
    assert plan["disk_needed"] >= sum(path.stat().st_size for path in tmp_path.glob("out/*.safetensors"))


def test_dry_run_does_not_look_at_out(checkpoint: Fetch, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert run("convert", checkpoint(DENSE), tmp_path / "out", "--dry-run", "-q").code == 0


def test_json_with_scales_that_are_no_numbers(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", NAN_SCALE)
    done = run("convert", source, tmp_path / "out", "--json", "--impute", "layer-max")
    entry = next(entry for entry in done.json["input_scales"] if entry["layer"] == 0 and entry["gemm"] == "w13")
    assert entry["raw"].count(None) == 1 and entry["imputed"] == {"3.gate_proj": "NaN"}
    assert run("inspect", source, "--json").json
    assert run("inspect", source, "--json", "--layer", 0).json


def test_json_of_a_refusal(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", NAN_SCALE)
    for options in ((), ("--dry-run",)):
        result = run("convert", source, tmp_path / "out", "--json", *options)
        assert result.code == 3 and set(result.json) == {"error"}
        assert result.json["error"]["exit_code"] == 3
        (finding,) = result.findings
        assert finding == {
            "id": "NVP402",
            "rule": "input-scale-bad",
            "severity": "error",
            "message": finding["message"],
            "file": "model.safetensors",
            "tensor": "model.layers.0.mlp.experts.3.gate_proj.input_scale",
            "layer": 0,
            "experts": [3],
            "expert_ranges": "3",
            "fix": BY_NAME["input-scale-bad"].fix,
            "fingerprint": finding["fingerprint"],
        }
        place = f"layer 0, expert 3, {finding['tensor']}, model.safetensors"
        assert result.stderr == f"error NVP402 [input-scale-bad] {place}: {finding['message']}\n"


def test_json_of_a_usage_fault(checkpoint: Fetch, tmp_path: Path) -> None:
    result = run("convert", checkpoint(DENSE), tmp_path, "--json")
    assert result.code == 2
    assert result.json["error"]["exit_code"] == 2 and "--overwrite" in result.json["error"]["message"]


@pytest.mark.parametrize("name", [DENSE, QWEN, "llama4-nvfp4"])
def test_json_of_inspect(name: str, checkpoint: Fetch) -> None:
    result = run("inspect", checkpoint(name), "--json")
    assert (result.code, result.stderr) == (0, "")
    assert result.json["source"]["name"] == name
    missing = run("inspect", checkpoint(name) / "absent", "--json")
    assert missing.code == 3 and missing.json["error"]["exit_code"] == 3


# --- for people -------------------------------------------------------------------------------------------------------


def test_quiet_prints_nothing(checkpoint: Fetch, tmp_path: Path) -> None:
    result = run("convert", checkpoint(SPLIT), tmp_path / "out", "-q")
    assert (result.code, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("option", [[], ["-v"]])
def test_plain_lines_when_not_on_a_terminal(
    option: list[str], checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nvfp4prep.cli._LINE_SECONDS", 0.002)
    result = run("convert", checkpoint(SPLIT), tmp_path / "out", *option)
    assert result.code == 0 and result.stdout
    assert "\x1b" not in result.stdout + result.stderr and "\r" not in result.stderr
    lines = [re.match(r"written ([\d,]+) of ([\d,]+) bytes \((\d+)%\)", line) for line in result.stderr.splitlines()]
    numbers = [[int(part.replace(",", "")) for part in line.groups()] for line in lines if line]
    assert len(numbers) == len(lines) >= 2
    assert numbers == sorted(numbers)
    data = sum(entry.raw.size for entry in oracle.read(tmp_path / "out").tensors.values())
    assert all(total == data and percent == round(100 * done / total) for done, total, percent in numbers)


def test_dry_run_says_so(checkpoint: Fetch, tmp_path: Path) -> None:
    result = run("convert", checkpoint(DENSE), tmp_path / "out", "--dry-run")
    assert result.stdout.endswith("Dry run: nothing was written.\n")
    assert not list(tmp_path.iterdir())


def test_inspect_prints_for_people(checkpoint: Fetch) -> None:
    result = run("inspect", checkpoint(QWEN))
    assert result.code == 0 and "Qwen3MoeForCausalLM" in result.stdout
    for engine in ("vLLM", "SGLang", "TensorRT-LLM"):
        assert engine in result.stdout


def test_names_in_messages_cannot_move_the_cursor(checkpoint: Fetch, tmp_path: Path) -> None:
    """A tensor's name comes from an untrusted file."""
    evil = "model.\x1b[2J\x1b[31mevil.weight_scale"
    source = damage.damaged(
        checkpoint(DENSE), tmp_path / "source", lambda ck: ck.tensors.update({evil: ck.tensors["lm_head.weight"]})
    )
    result = run("convert", source, tmp_path / "out")
    assert result.code == 3
    assert "\x1b" not in result.stdout + result.stderr


def test_many_errors_are_cut_on_stderr_and_whole_in_json(checkpoint: Fetch, tmp_path: Path) -> None:
    drop = damage.drop(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight_scale_2")
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", drop)
    result = run("convert", source, tmp_path / "out", "--json")
    assert len(result.findings) == 48
    assert result.stderr.count("error NVP306 [global-scale-missing]") == 40
    assert result.stderr.endswith("... and 8 more; --json lists all\n")


# --- usage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert"],
        ["convert", "a"],
        ["convert", "a", "b", "c"],
        ["convert", "a", "b", "--target", "novel"],
        ["convert", "a", "b", "--input-scale", "mean"],
        ["convert", "a", "b", "--impute", "twos"],
        ["convert", "a", "b", "--workers", "0"],
        ["convert", "a", "b", "-q", "-v"],
        ["convert", "a", "b", "--max-shard-size", "0"],
        ["convert", "a", "b", "--max-shard-size", "big"],
        ["convert", "a", "b", "--max-shard-size", "-5GB"],
        ["convert", "a", "b", "--max-shard-size", "5XB"],
        ["inspect"],
        ["inspect", "a", "--layer", "-1"],
        ["novel"],
    ],
)
def test_usage(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.code == 2 and "Usage:" in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("300", 300),
        ("5GB", 5 * 10**9),
        ("5g", 5 * 10**9),
        ("1.5MB", 1_500_000),
        ("512MiB", 512 << 20),
        ("2 KiB", 2048),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int, checkpoint: Fetch, tmp_path: Path) -> None:
    result = run("convert", checkpoint(DENSE), tmp_path / "out", "--dry-run", "--json", "--max-shard-size", text)
    assert result.json["options"]["max_shard_bytes"] == size


def test_options_reach_the_manifest(checkpoint: Fetch, tmp_path: Path) -> None:
    options = ["--input-scale", "keep", "--w13-scale", "split", "--impute", "layer-max", "--workers", "1"]
    result = run("convert", checkpoint(SPLIT), tmp_path / "out", "--json", *options)
    found = result.json["manifest"]["runs"][0]["options"]
    expected = {"target": "hf", "input_scale": "keep", "w13_scale": "split", "impute": "layer-max"}
    assert {key: found[key] for key in expected} == expected


def test_version_and_help() -> None:
    assert run("--version").stdout.strip().endswith(__version__)
    text = run("--help").stdout
    assert "convert" in text and "inspect" in text and "130 interrupted" in text
    options = run("convert", "-h").stdout
    for option in (
        "--target",
        "--input-scale",
        "--w13-scale",
        "--impute",
        "--max-shard-size",
        "--workers",
        "--dry-run",
    ):
        assert option in options


# --- imports ----------------------------------------------------------------------------------------------------------


def imported(*arguments: object) -> set[str]:
    """Top-level modules that are loaded after a command in a fresh interpreter."""
    code = "import sys; from nvfp4prep.cli import main; main(sys.argv[1:], standalone_mode=False); print(*sys.modules)"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_torch_is_imported_only_when_needed(checkpoint: Fetch, tmp_path: Path) -> None:
    assert not {"torch", "numpy", "rich", "huggingface_hub", "safetensors"} & imported("--help")
    assert not {"torch", "numpy", "huggingface_hub"} & imported("inspect", checkpoint(QWEN))
    assert not {"torch", "numpy", "huggingface_hub"} & imported(
        "convert", checkpoint(QWEN), tmp_path / "out", "--no-smoke"
    )


# --- interruption -----------------------------------------------------------------------------------------------------

SLOW = """
    import os, sys, time
    real = os.pwrite
    def slow(*arguments):
        time.sleep(0.02)
        return real(*arguments)
    os.pwrite = slow
    from nvfp4prep.cli import main
    main(sys.argv[1:])
"""


@pytest.fixture
def slow_run(checkpoint: Fetch, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `convert` with slow writes, and returns when it has begun to write."""
    started: list[subprocess.Popen[str]] = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(SLOW), "convert", str(checkpoint(QWEN)), str(tmp_path / "out")]
        process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        deadline = time.monotonic() + 30
        while not (tmp_path / "out.partial" / "model.safetensors").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("options", [[], ["--json"], ["-q", "--workers", "1"]])
def test_interrupted(options: list[str], slow_run: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    process = slow_run(*options)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert not list(tmp_path.iterdir())
    assert "interrupted" in stderr and "Traceback" not in stderr
    if "--json" in options:
        assert strict_json(stdout)["error"]["exit_code"] == 130


def test_interrupted_while_replacing_keeps_the_old_output(
    checkpoint: Fetch, slow_run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint(DENSE), tmp_path / "out")
    before = snapshot(tmp_path)
    process = slow_run("--overwrite")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert snapshot(tmp_path) == before


def test_what_a_killed_run_leaves_does_not_load_and_does_not_stop_the_next(
    checkpoint: Fetch, slow_run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = slow_run()
    process.kill()
    process.communicate()
    left = {path.name for path in (tmp_path / "out.partial").iterdir()}
    assert not left & {"config.json", damage.INDEX, "nvfp4prep.json"}
    assert not (tmp_path / "out").exists()
    assert run("convert", checkpoint(QWEN), tmp_path / "out", "-q").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert json.loads((tmp_path / "out" / "nvfp4prep.json").read_text())["runs"]


def test_closed_stdout_is_no_crash(checkpoint: Fetch, tmp_path: Path) -> None:
    command = f"{sys.executable} -m nvfp4prep inspect {checkpoint(QWEN)} | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", ["", "-q", "--json"])
@pytest.mark.parametrize("stdout", ["| true", ">&-", ">/dev/full", "2>&1 | true", ">&- 2>&-"])
def test_stdout_that_takes_nothing(options: str, stdout: str, checkpoint: Fetch, tmp_path: Path) -> None:
    command = f"{sys.executable} -m nvfp4prep convert {checkpoint(DENSE)} {tmp_path / 'out'} {options} {stdout}"
    shell = ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    lost = "full" in stdout and options != "-q"
    assert done.returncode == (4 if lost else 0), done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"out"} and (tmp_path / "out" / "config.json").exists()
    if lost:
        assert f"stdout: can't be written: No space left on device; {tmp_path / 'out'} is complete" in done.stderr


@pytest.mark.parametrize("arguments", ["--help", "convert --json", "inspect nowhere --json", "targets"])
def test_full_stdout_is_no_crash(arguments: str) -> None:
    command = f"{sys.executable} -m nvfp4prep {arguments} >/dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (2, 3, 4)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr and done.stderr


@pytest.mark.parametrize("size", ["9" * 400, "9" * 5000 + "GB", str((1 << 63) + 1), "9e9"])
def test_sizes_that_no_file_has(size: str) -> None:
    result = run("convert", "a", "b", "--max-shard-size", size)
    assert result.code == 2 and "Usage:" in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("module", ["click", "nvfp4prep.convert", "nvfp4prep.unpack"])
def test_signal_during_an_import(number: signal.Signals, code: int, module: str, tmp_path: Path) -> None:
    """The import turns what the signal raises into something else, as C extensions do."""
    text = f"""
        import os, runpy, sys
        class Finder:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    os.kill(os.getpid(), {int(number)})
        sys.meta_path.insert(0, Finder())
        runpy.run_module("nvfp4prep", run_name="__main__")
    """
    command = "unpack" if "unpack" in module else "convert"
    arguments = [sys.executable, "-c", textwrap.dedent(text), command, "a", str(tmp_path / "out")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert re.fullmatch(r"error: (interrupted|terminated); nothing was left behind\n", done.stderr)
