"""Manifests that were changed: whatever would switch a check off, or make unpacking write something else, is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import Editable, damaged
from runner import manifest_of, run

import nvfp4prep
from nvfp4prep.errors import InputRefused

QWEN, INT4, W4A8, MIXED = (
    "qwen3moe-nvfp4-perexpert",
    "qwen3moe-int4awq",
    "qwen3moe-w4a8awq",
    "qwen3moe-mixed-fp8attn",
)
MADE = {
    "hf": (QWEN, "hf"),
    "compressed": (INT4, "compressed-tensors"),
    "nvfp4": (QWEN, "vllm-marlin"),
    "int4": (INT4, "vllm-marlin"),
    "w4a8": (W4A8, "flashinfer-sm90-w4a8"),
    "mixed": (MIXED, "flashinfer-cutlass"),
}
GONE = "(removed)"

Fetch = Callable[[str], Path]
Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(checkpoint: Fetch, tmp_path_factory: pytest.TempPathFactory) -> Made:
    done: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in done:
            source, target = MADE[name]
            done[name] = tmp_path_factory.mktemp("made") / name
            options = ("--pre-quant-scale", "fold", "--no-smoke", "-q")
            result = run("convert", checkpoint(source), done[name], "--target", target, *options)
            assert result.code == 0, result.stderr
        return done[name]

    return of


def tampered(out: Path, folder: Path, path: tuple[Any, ...], value: Any) -> Path:
    """A copy with one entry of its manifest set, or removed."""
    shutil.copytree(out, folder)
    manifest = table = manifest_of(folder)
    for key in path[:-1]:
        table = table[key]
    if value == GONE:
        del table[path[-1]]
    else:
        table[path[-1]] = value
    (folder / "nvfp4prep.json").write_text(json.dumps(manifest))
    return folder


def flip(folder: Path) -> None:
    path = min(folder.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def shard_of(out: Path) -> str:
    return min(manifest_of(out)["outputs"])


# --- what is listed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["headers", "full"])
@pytest.mark.parametrize("outputs", [[], None, "x", GONE, 5, {"a": 1}], ids=str)
@pytest.mark.parametrize("name", ["hf", "compressed", "nvfp4"])
def test_outputs_that_are_no_table(name: str, outputs: Any, level: str, made: Made, tmp_path: Path) -> None:
    folder = tampered(made(name), tmp_path / "out", ("outputs",), outputs)
    flip(folder)
    done = run("validate", folder, "--level", level, "--format", "json")
    assert done.code == 1
    assert ("NVP801", "error") in {(f["id"], f["severity"]) for f in done.json["findings"]}


@pytest.mark.parametrize("entry", [5, None, GONE, [], {"bytes": "1", "digest": "x"}, {"bytes": True}], ids=str)
@pytest.mark.parametrize("key", ["digest", "bytes", None])
@pytest.mark.parametrize("name", ["hf", "compressed", "nvfp4"])
def test_entries_that_say_nothing(name: str, key: str | None, entry: Any, made: Made, tmp_path: Path) -> None:
    """Of a file, its digest, or its size."""
    out = made(name)
    place = ("outputs", shard_of(out), *([] if key is None else [key]))
    folder = tampered(out, tmp_path / "out", place, entry)
    flip(folder)
    done = run("validate", folder, "--level", "full", "--format", "json")
    assert done.code == 1
    assert {f["rule"] for f in done.json["findings"]} & {"manifest-bad", "output-file-changed", "packed-file-bad"}


@pytest.mark.parametrize("name", ["hf", "compressed", "nvfp4"])
def test_no_file_is_listed(name: str, made: Made, tmp_path: Path) -> None:
    done = run("validate", tampered(made(name), tmp_path / "out", ("outputs",), {}), "--level", "headers")
    assert done.code == 1 and "does not list" in done.stdout


def test_convert_refuses_what_validate_does(made: Made, tmp_path: Path) -> None:
    folder = tampered(made("hf"), tmp_path / "in", ("outputs",), [])
    assert run("convert", folder, tmp_path / "out").code == 3
    (folder / "nvfp4prep.json").unlink()
    assert run("convert", folder, tmp_path / "out", "-q").code == 0


# --- what unpacking writes --------------------------------------------------------------------------------------------

FLAT, NESTED = ("logical", "quantization_config"), ("logical", "hf_quant_config")
SECTION = (*NESTED, "quantization")
MOE = ("logical", "moe", 0, "projections")

CHANGES: list[tuple[str, tuple[Any, ...], Any]] = [
    *(
        ("int4", (*place, "quant_algo"), algo)
        for place in (FLAT, SECTION)
        for algo in ("NVFP4", "W4A8_AWQ", "FP8", None, 5)
    ),
    *(
        ("nvfp4", (*place, "quant_algo"), algo)
        for place in (FLAT, SECTION)
        for algo in ("W4A16_NVFP4", "W4A16_AWQ", "")
    ),
    *(("w4a8", (*place, "quant_algo"), "W4A16_AWQ") for place in (FLAT, SECTION)),
    *((name, place, {}) for name in ("int4", "nvfp4", "mixed") for place in (FLAT, NESTED, SECTION)),
    *(("nvfp4", SECTION, value) for value in (None, 5, [], GONE)),
    *(("nvfp4", (*SECTION, "exclude_modules"), value) for value in (None, [], "lm_head", ["lm_head"], 5, GONE, ["*"])),
    *(("nvfp4", (*FLAT, "ignore"), value) for value in (None, [], ["lm_head"], GONE)),
    *(("int4", (*place, "group_size"), value) for place in (FLAT, SECTION) for value in (64, None, GONE, "128")),
    *(("mixed", (*place, "quantized_layers"), value) for place in (FLAT, SECTION) for value in (None, {}, [], GONE)),
    *(("nvfp4", (*FLAT, "quant_method"), value) for value in ("compressed-tensors", "fp8", GONE, "nvfp4prep")),
    *(("int4", (*MOE, part, "weight_scale"), ["F16", [128, 2]]) for part in ("gate", "up")),
    *(("int4", (*MOE, part, "weight_scale"), ["BF16", [128, 2]]) for part in ("gate", "up")),
    ("w4a8", (*MOE, "down", "weight_scale"), ["F16", [256, 1]]),
]


@pytest.mark.parametrize(("name", "path", "value"), CHANGES)
def test_another_logical_checkpoint(name: str, path: tuple[Any, ...], value: Any, made: Made, tmp_path: Path) -> None:
    folder = tampered(made(name), tmp_path / "out", path, value)
    done = run("unpack", folder, tmp_path / "hf", "--json")
    assert done.code == 3, done.stderr
    assert {finding["rule"] for finding in done.findings} == {"manifest-bad"}
    assert not (tmp_path / "hf").exists()
    assert run("validate", folder, "--level", "headers").code == 1
    with pytest.raises(InputRefused, match="manifest-bad"):
        nvfp4prep.open(folder)


def test_factors_in_a_dtype_that_would_round_them(checkpoint: Fetch, tmp_path: Path) -> None:
    """F32 in the source, BF16 by the manifest."""

    def wide(ck: Editable) -> None:
        for name in ck.names(r".*\.experts\..*\.pre_quant_scale"):
            ck.tensors[name] = ck.tensors[name].float() * 1.001

    source, out = damaged(checkpoint(W4A8), tmp_path / "source", wide), tmp_path / "out"
    options = ("--target", "flashinfer-sm90-w4a8", "--pre-quant-scale", "fold", "--no-smoke", "-q")
    assert run("convert", source, out, *options).code == 0
    for dtype, code in (("F32", 0), ("BF16", 3)):
        manifest = manifest_of(out)
        found = [params["pre_quant_scale"] for moe in manifest["logical"]["moe"] for params in _with_factors(moe)]
        assert found and all(spec[0] == "F32" for spec in found)
        for spec in found:
            spec[0] = dtype
        (out / "nvfp4prep.json").write_text(json.dumps(manifest))
        done = run("unpack", out, tmp_path / "hf", "--json")
        assert done.code == code, done.stderr
        shutil.rmtree(tmp_path / "hf", ignore_errors=True)
    assert {finding["rule"] for finding in done.findings} == {"manifest-bad"}


def _with_factors(moe: dict[str, Any]) -> list[dict[str, Any]]:
    return [params for params in moe["projections"].values() if "pre_quant_scale" in params]


@pytest.mark.parametrize("target", ["vllm-marlin", "flashinfer-cutlass"])
@pytest.mark.parametrize("linear", ["gate_up", "down"])
def test_biases_in_a_dtype_that_would_round_them(target: str, linear: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """BF16 values that F16 has no room for."""

    def tiny(ck: Editable) -> None:
        for name in ck.names(r".*\.experts\..*_bias"):
            ck.tensors[name] = ck.tensors[name] * 1e-7

    source, out = damaged(checkpoint("gptoss-nvfp4"), tmp_path / "source", tiny), tmp_path / "out"
    assert run("convert", source, out, "--target", target, "--no-smoke", "-q").code == 0
    assert run("unpack", out, tmp_path / "hf").code == 0
    manifest = manifest_of(out)
    for moe in manifest["logical"]["moe"]:
        moe["projections"][linear]["bias"][0] = "F16"
    (out / "nvfp4prep.json").write_text(json.dumps(manifest))
    done = run("unpack", out, tmp_path / "again", "--json")
    assert done.code == 3, done.stderr
    assert {finding["rule"] for finding in done.findings} == {"manifest-bad"}


@pytest.mark.parametrize("name", ["nvfp4", "int4", "w4a8", "mixed"])
def test_what_is_as_it_was_is_unpacked(name: str, made: Made, tmp_path: Path) -> None:
    assert run("unpack", made(name), tmp_path / "hf", "-q").code == 0
    assert run("validate", tmp_path / "hf").code == 0
