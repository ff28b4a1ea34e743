"""What must be refused: the exit code, a message that says where, nothing written, the source as it was."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import checkpoints
import damage
import pytest
import torch
from damage import Damage, Editable
from runner import Run, run, snapshot

from nvfp4prep import writer

QWEN, DENSE, SHARDED = "qwen3moe-nvfp4-perexpert", "qwen3-dense-nvfp4", "qwen3moe-nvfp4-sharded"
LLAMA4, GPTOSS, DSV3, AWQ = "llama4-nvfp4", "gptoss-nvfp4", "dsv3-nvfp4", "qwen3moe-nvfp4-awqlite"
IMPUTE = ("--impute", "layer-max")
MLP0 = "model.layers.0.mlp"
GATE3 = f"{MLP0}.experts.3.gate_proj"
Q0 = "model.layers.0.self_attn.q_proj"

Fetch = Callable[[str], Path]


def refused(source: Path, *options: str, code: int = 3) -> Run:
    """A `convert` that must end with `code`, write nothing and leave the source alone."""
    out = source.parent / "refused-out"
    before = snapshot(source.parent)
    result = run("convert", source, out, "--json", *options)
    assert result.code == code, result.stderr
    assert snapshot(source.parent) == before
    assert result.json["error"]["exit_code"] == code
    assert result.stderr.startswith("error")
    return result


# --- scales, formats, experts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A damage, and what the first finding of `rule` must say."""

    base: str
    damage: Damage
    rule: str
    tensor: str | None = None
    layer: int | None = None
    experts: tuple[int, ...] = ()
    says: str = ""
    options: tuple[str, ...] = field(default=())


def exact(*names: str) -> tuple[str, ...]:
    return tuple(map(re.escape, names))


def replace(name: str, value: torch.Tensor | Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    def change(ck: Editable) -> None:
        ck.tensors[name] = value(ck.tensors[name]) if callable(value) else value

    return change


def with_config(**keys: Any) -> Damage:
    return lambda ck: ck.config.update(keys)


def algo(name: str) -> Damage:
    return lambda ck: ck.set_algo(name)


def both(*damages: Damage) -> Damage:
    def change(ck: Editable) -> None:
        for one in damages:
            one(ck)

    return change


def unquantize(module: str) -> Damage:
    def change(ck: Editable) -> None:
        rows, half = ck.tensors[f"{module}.weight"].shape
        ck.remove(ck.names(re.escape(module) + r"\.\w*scale(?:_2)?"))
        ck.tensors[f"{module}.weight"] = torch.ones(rows, half * 2, dtype=torch.bfloat16)

    return change


def fp8(module: str) -> Damage:
    def change(ck: Editable) -> None:
        unquantize(module)(ck)
        ck.tensors[f"{module}.weight"] = ck.tensors[f"{module}.weight"].to(torch.float8_e4m3fn)
        ck.tensors[f"{module}.weight_scale"] = torch.tensor(1.0)

    return change


def scale_refusals() -> dict[str, Refusal]:
    gate = f"{GATE3}.input_scale"
    missing = damage.drop(*exact(gate))
    found = {
        "missing": Refusal(QWEN, missing, "input-scale-missing", gate, 0, (3,), "--impute layer-max"),
        "missing-two": Refusal(
            QWEN,
            damage.drop(rf"{MLP0}\.experts\.[25]\.down_proj\.input_scale"),
            "input-scale-missing",
            f"{MLP0}.experts.2.down_proj.input_scale",
            0,
            (2, 5),
            "2 of 8",
        ),
    }
    bad = {"zero": 0.0, "NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf"), "negative": -1.0}
    for kind, value in (bad | {"subnormal": 2.0**-127}).items():
        put = damage.put(value, *exact(gate))
        found[kind] = Refusal(QWEN, put, "input-scale-bad", gate, 0, (3,), f"1 of 16 input_scale {kind}")
        put = damage.put(value, *exact(f"{Q0}.input_scale"))
        found[f"dense-{kind}"] = Refusal(DENSE, put, "input-scale-bad", f"{Q0}.input_scale", 0, (), f"1 of 3 .* {kind}")
        put = damage.put(value, *exact(f"{GATE3}.weight_scale_2"))
        found[f"global-{kind}"] = Refusal(QWEN, put, "global-scale-bad", f"{GATE3}.weight_scale_2", 0, (3,), kind)
        whole = both(
            damage.reshape(8, within=r".*experts\.gate_up_proj"), damage.put(value, r".*1.*up_proj_input_scale")
        )
        fused = "model.layers.1.mlp.experts.gate_up_proj_input_scale"
        found[f"fused-{kind}"] = Refusal(GPTOSS, whole, "input-scale-bad", fused, 1, (1,), f"1 of 8 input_scale {kind}")
    for param, rule in (("input_scale", "input-scale-bad"), ("weight_scale_2", "global-scale-bad")):
        halves = both(damage.reshape(8, 2, within=r".*gate_up_proj"), damage.put(0.0, rf".*0.*gate_up_proj_{param}"))
        name = f"model.layers.0.feed_forward.experts.gate_up_proj_{param}"
        found[f"fused-half-{param}"] = Refusal(LLAMA4, halves, rule, name, 0, (0,), "zero")
    for name, pattern, count, experts in (
        ("w13", rf"{MLP0}\.experts\.\d+\.(?:gate|up)_proj\.input_scale", 16, tuple(range(8))),
        ("w2", rf"{MLP0}\.experts\.\d+\.down_proj\.input_scale", 8, tuple(range(8))),
        ("qkv", r"model\.layers\.0\.self_attn\.[qkv]_proj\.input_scale", 3, ()),
        ("single", r"model\.layers\.0\.self_attn\.o_proj\.input_scale", 1, ()),
    ):
        says = rf"{count} of {count} input_scale missing \(0 calibrated\).*calibrate again"
        for options in ((), IMPUTE):
            found[f"none-calibrated-{name}{len(options)}"] = Refusal(
                QWEN, damage.drop(pattern), "input-scale-missing", None, 0, experts, says, options
            )
    zero = damage.put(0.0, rf"{MLP0}\.experts\.\d+\.down_proj\.input_scale")
    found["none-usable"] = Refusal(QWEN, zero, "input-scale-bad", None, 0, tuple(range(8)), "0 calibrated", IMPUTE)
    return found


def format_refusals() -> dict[str, Refusal]:
    scale, scale_2, weight = (f"{GATE3}.{param}" for param in ("weight_scale", "weight_scale_2", "weight"))
    fused = "model.layers.0.feed_forward.experts.gate_up_proj"
    unequal = both(damage.reshape(8, 2, within=r".*gate_up_proj"), damage.multiply(r".*gate_up_proj", 1.0, 0.5))
    gate_only = both(damage.drop(rf"{MLP0}\.experts\.4\.up_proj\..*"))
    return {
        "global-missing": Refusal(
            QWEN, damage.drop(*exact(scale_2)), "global-scale-missing", weight, 0, (3,), "weight_scale_2"
        ),
        "global-missing-dense": Refusal(
            DENSE, damage.drop(*exact(f"{Q0}.weight_scale_2")), "global-scale-missing", f"{Q0}.weight", 0
        ),
        "global-missing-fused": Refusal(
            LLAMA4, damage.drop(*exact(f"{fused}_weight_scale_2")), "global-scale-missing", fused, 0
        ),
        "block-scale-missing": Refusal(QWEN, damage.drop(*exact(scale)), "block-scale-missing", weight, 0, (3,)),
        "block-scale-padded": Refusal(
            QWEN,
            replace(scale, lambda s: torch.cat([s.view(torch.uint8)] * 2).view(torch.float8_e4m3fn)),
            "block-scale-shape",
            scale,
            0,
            (3,),
            r"\[256, 16\] where \[128, 16\].*swizzled",
        ),
        "block-scale-flat": Refusal(
            QWEN, replace(scale, lambda s: s.reshape(-1)), "block-scale-shape", scale, 0, (3,), r"\[2048\]"
        ),
        "block-scale-swizzled-fused": Refusal(
            LLAMA4,
            replace(f"{fused}_weight_scale", lambda s: s.transpose(1, 2).contiguous()),
            "block-scale-shape",
            f"{fused}_weight_scale",
            0,
            (),
            r"\[8, 256, 16\] where \[8, 16, 256\]",
        ),
        "block-scale-u8": Refusal(
            QWEN, replace(scale, lambda s: s.view(torch.uint8)), "block-scale-dtype", scale, 0, (3,), "U8 .*logical"
        ),
        "scale-two-values": Refusal(
            QWEN,
            replace(scale_2, torch.ones(2)),
            "scale-shape",
            scale_2,
            0,
            (3,),
            r"\[2\].*expected one of \[\], \[1\]",
        ),
        "scale-f64": Refusal(
            QWEN, replace(scale_2, torch.tensor(1.0).double()), "scale-dtype", scale_2, 0, (3,), "F64"
        ),
        "scale-i32": Refusal(QWEN, replace(scale_2, torch.tensor(7).int()), "scale-dtype", scale_2, 0, (3,), "I32"),
        "fused-three": Refusal(
            LLAMA4, replace(f"{fused}_input_scale", torch.ones(8, 3)), "scale-shape", f"{fused}_input_scale", 0
        ),
        "fused-seven": Refusal(
            LLAMA4, replace(f"{fused}_input_scale", torch.ones(7)), "scale-shape", f"{fused}_input_scale", 0
        ),
        "down-two-halves": Refusal(
            LLAMA4, damage.reshape(8, 2, within=r".*experts\.down_proj"), "scale-shape", None, 0, (), r"\[8, 2\]"
        ),
        "odd-columns": Refusal(
            QWEN, replace(weight, torch.zeros(128, 124, dtype=torch.uint8)), "weight-shape", weight, 0, (3,), "248"
        ),
        "expert-shape": Refusal(
            QWEN,
            both(
                replace(weight, torch.zeros(64, 128, dtype=torch.uint8)),
                replace(scale, torch.ones(64, 16).to(torch.float8_e4m3fn)),
            ),
            "expert-shape",
            None,
            0,
            (3,),
        ),
        "expert-missing": Refusal(
            QWEN, damage.drop(rf"{MLP0}\.experts\.5\..*"), "expert-missing", None, 0, (5,), "7 experts stored, 8"
        ),
        "last-expert-missing": Refusal(
            QWEN, damage.drop(rf"{MLP0}\.experts\.7\..*"), "expert-missing", None, 0, (7,), "missing: 7"
        ),
        "too-many-experts": Refusal(
            QWEN, with_config(num_experts=6), "expert-missing", None, 0, (), "8 experts stored, 6 .*correct"
        ),
        "fused-experts-missing": Refusal(
            LLAMA4, with_config(num_local_experts=16), "expert-missing", None, 0, (), "8 experts stored, 16"
        ),
        "up-missing": Refusal(QWEN, gate_only, "projection-missing", None, 0, (4,), "no usable up"),
        "fused-down-missing": Refusal(
            LLAMA4, damage.drop(r".*layers\.0\..*experts\.down_proj.*"), "projection-missing", fused, 0, (), "down"
        ),
        "weight-missing": Refusal(QWEN, damage.drop(*exact(weight)), "scale-without-weight", scale, 0, (3,)),
        "bf16-beside-scales": Refusal(
            QWEN, replace(weight, torch.ones(128, 256).bfloat16()), "scale-without-weight", scale, 0, (3,), "BF16"
        ),
        "one-bf16-expert": Refusal(
            QWEN, unquantize(GATE3), "mixed-experts", weight, 0, (), "23 NVFP4, 1 unquantized|1 unq"
        ),
        "one-fp8-expert": Refusal(QWEN, fp8(GATE3), "mixed-experts", weight, 0, (), "FP8"),
        "bf16-k": Refusal(
            DENSE,
            unquantize("model.layers.0.self_attn.k_proj"),
            "mixed-fusion-group",
            f"{Q0}.weight",
            0,
            (),
            "k_proj unq",
        ),
        "fp8-v": Refusal(
            DENSE, fp8("model.layers.0.self_attn.v_proj"), "mixed-fusion-group", f"{Q0}.weight", 0, (), "v_proj FP8"
        ),
        "bf16-kv-a": Refusal(
            DSV3, unquantize("model.layers.1.self_attn.kv_a_proj_with_mqa"), "mixed-fusion-group", None, 1
        ),
        "pre-quant-scale-on-some": Refusal(
            AWQ,
            damage.drop(*exact(f"{GATE3}.pre_quant_scale")),
            "pre-quant-scale-missing",
            f"{GATE3}.pre_quant_scale",
            0,
            (3,),
            "1 of 16",
        ),
        "unknown-order": Refusal(
            LLAMA4,
            both(unequal, with_config(model_type="novel")),
            "unknown-gate-up-order",
            f"{fused}_weight_scale_2",
            0,
        ),
        "declared-fp8": Refusal(QWEN, algo("FP8"), "algo-contradicts-weights", None, None, (), "quant_algo is FP8"),
        "fp8-linear-not-mixed": Refusal(
            QWEN, fp8("model.layers.0.self_attn.o_proj"), "algo-contradicts-weights", None, None, (), "MIXED_PRECISION"
        ),
        "other-method": Refusal(
            QWEN,
            lambda ck: ck.config["quantization_config"].update(quant_method="compressed-tensors"),
            "not-modelopt",
            None,
            None,
            (),
            "compressed-tensors",
        ),
        "packed-already": Refusal(
            QWEN, lambda ck: ck.config["quantization_config"].update(quant_method="nvfp4prep"), "already-packed"
        ),
    }


REFUSALS = scale_refusals() | format_refusals()


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    case = REFUSALS[name]
    source = damage.damaged(checkpoint(case.base), tmp_path / "source", case.damage)
    result = refused(source, *case.options)
    finding = next(found for found in result.findings if found["rule"] == case.rule)
    assert case.tensor is None or finding["tensor"] == case.tensor
    assert finding.get("layer") == case.layer
    assert tuple(finding.get("experts", ())) == case.experts
    assert re.search(case.says, finding["message"]), finding["message"]
    for part in (f"[{case.rule}]", finding["message"], finding.get("tensor", "")):
        assert part in result.stderr


@pytest.mark.parametrize("name", sorted(name for name in checkpoints.full_set() if "bf16" in name))
def test_unquantised_checkpoints_are_refused(name: str, full_set: dict[str, Path], tmp_path: Path) -> None:
    result = run("convert", full_set[name], tmp_path / "out", "--json")
    assert result.code == 3
    assert {finding["rule"] for finding in result.findings} == {"no-quant-config"}
    assert not list(tmp_path.iterdir())


def test_all_errors_are_told_at_once(checkpoint: Fetch, tmp_path: Path) -> None:
    damages = [damage.drop(*exact(name)) for name in (f"{GATE3}.weight_scale_2", f"{Q0}.weight_scale_2")]
    result = refused(damage.damaged(checkpoint(QWEN), tmp_path / "source", *damages))
    assert {finding["tensor"] for finding in result.findings} == {f"{GATE3}.weight", f"{Q0}.weight"}


# --- files -----------------------------------------------------------------------------------------------------------


def header_change(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    return lambda folder: damage.rewrite_header(folder / "model.safetensors", change)


def shard_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return edit


def lie_about_dtype(table: dict[str, Any]) -> None:
    table["lm_head.weight"]["dtype"] = "F32"


def lie_about_shape(table: dict[str, Any]) -> None:
    table["lm_head.weight"]["shape"] = [512, 257]


def overlap(table: dict[str, Any]) -> None:
    table["model.norm.weight"]["data_offsets"] = [0, 512]


FILE_DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "truncated": (shard_bytes(lambda raw: raw[:-1]), "bad-shard", r"cut short.* \d{6,} bytes, the file has \d{6,}"),
    "truncated-header": (shard_bytes(lambda raw: raw[:1000]), "bad-shard", "ends after 1000"),
    "five-bytes": (shard_bytes(lambda raw: raw[:5]), "bad-shard", "5 bytes"),
    "empty": (shard_bytes(lambda raw: b""), "bad-shard", "0 bytes"),
    "zeros": (shard_bytes(lambda raw: bytes(len(raw))), "bad-shard", "header length is 0"),
    "trailing": (shard_bytes(lambda raw: raw + b"\0"), "bad-shard", "bytes that no tensor names"),
    "html": (shard_bytes(lambda raw: b"<!DOCTYPE html><html>" + raw), "bad-shard", "HTML"),
    "lfs": (shard_bytes(lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "bad-shard", "LFS"),
    "huge-header": (
        shard_bytes(lambda raw: struct.pack("<Q", 1 << 40) + raw[8:]),
        "bad-shard",
        "over the format's limit",
    ),
    "not-json": (shard_bytes(lambda raw: raw[:8] + b"?" + raw[9:]), "bad-shard", "not JSON"),
    "lying-dtype": (
        header_change(lie_about_dtype),
        "bad-shard",
        "'lm_head.weight' .F32 .* needs 524288 bytes.* 262144",
    ),
    "lying-shape": (header_change(lie_about_shape), "bad-shard", "'lm_head.weight'"),
    "overlap": (header_change(overlap), "bad-shard", "overlap"),
    "no-config": (lambda folder: (folder / "config.json").unlink(), "no-config", "config.json"),
    "bad-config": (lambda folder: (folder / "config.json").write_text("{"), "bad-json", "not valid JSON"),
    "list-config": (lambda folder: (folder / "config.json").write_text("[]"), "bad-json", "a JSON list"),
    "bad-quant-config": (lambda folder: (folder / "hf_quant_config.json").write_text("\x00"), "bad-json", "not valid"),
    "no-weights": (lambda folder: (folder / "model.safetensors").unlink(), "no-weights", "no .*safetensors"),
    "fifo": (lambda folder: os.mkfifo(folder / "pipe"), "not-a-file", "remove"),
    "dangling-link": (lambda folder: (folder / "x").symlink_to("nowhere"), "not-a-file", "remove"),
}


@pytest.mark.parametrize("name", FILE_DAMAGES)
def test_damaged_file(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    change, rule, says = FILE_DAMAGES[name]
    source = tmp_path / "source"
    shutil.copytree(checkpoint(QWEN), source)
    change(source)
    (finding,) = refused(source).findings
    assert finding["rule"] == rule
    assert re.search(says, f"{finding['message']} {finding.get('file')}"), finding
    assert finding.get("file")


def without_quantization(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = None
    damage.write_json(folder / "config.json", config)


@pytest.mark.parametrize("nested", [None, {}, {"quantization": None}, {"quantization": {"quant_algo": None}}])
def test_no_quantisation_config_anywhere(nested: Any, checkpoint: Fetch, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint(QWEN), source)
    without_quantization(source)
    if nested is None:
        (source / "hf_quant_config.json").unlink()
    else:
        damage.write_json(source / "hf_quant_config.json", nested)
    assert "no-quant-config" in {finding["rule"] for finding in refused(source).findings}


def edit_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        table = json.loads((folder / damage.INDEX).read_text())
        change(table["weight_map"])
        damage.write_json(folder / damage.INDEX, table)

    return edit


def shard_name(name: str) -> Callable[[Path], None]:
    return edit_index(lambda weight_map: weight_map.update({"lm_head.weight": name}))


def unlink_shard(folder: Path) -> None:
    (folder / "model-00003-of-00006.safetensors").unlink()


def second_copy(folder: Path) -> None:
    shutil.copy(folder / "model-00002-of-00006.safetensors", folder / "model.safetensors")


INDEX_DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "absolute": (shard_name("/etc/passwd"), "unsafe-shard-name", "'/etc/passwd'"),
    "parent": (shard_name("../model-00001-of-00006.safetensors"), "unsafe-shard-name", "'\\.\\./model"),
    "dots": (shard_name(".."), "unsafe-shard-name", "'\\.\\.'"),
    "subfolder": (shard_name("a/b.safetensors"), "unsafe-shard-name", "beside the index"),
    "backslash": (shard_name("..\\a.safetensors"), "unsafe-shard-name", "beside the index"),
    "control": (shard_name("a\x1b[31m.safetensors"), "unsafe-shard-name", r"\\x1b"),
    "empty-name": (shard_name(""), "unsafe-shard-name", "beside the index"),
    "not-a-shard": (shard_name("config.json"), "shard-missing", "fetch it"),
    "shard-missing": (unlink_shard, "shard-missing", r"\d+ tensors"),
    "tensor-missing": (
        edit_index(lambda weight_map: weight_map.update({"model.x.weight": "model-00001-of-00006.safetensors"})),
        "indexed-tensor-missing",
        "the shard does not have it",
    ),
    "two-shards": (second_copy, "tensor-in-two-shards", "also in model-00002-of-00006.safetensors"),
    "no-map": (lambda folder: damage.write_json(folder / damage.INDEX, {}), "bad-index", "weight_map"),
    "odd-map": (edit_index(lambda weight_map: weight_map.update({"a": 1})), "bad-index", "weight_map"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", INDEX_DAMAGES)
def test_damaged_index(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    change, rule, says = INDEX_DAMAGES[name]
    source = tmp_path / "source"
    shutil.copytree(checkpoint(SHARDED), source)
    change(source)
    for finding in refused(source).findings:
        assert finding["rule"] == rule
        assert re.search(says, finding["message"]) and finding["file"]


def test_source_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "file").findings[0]["rule"] == "not-a-directory"
    assert refused(tmp_path / "absent" / "deep").findings[0]["rule"] == "no-such-checkpoint"


# --- destinations ----------------------------------------------------------------------------------------------------


@pytest.fixture
def source(checkpoint: Fetch, tmp_path: Path) -> Path:
    """A copy that a test may endanger."""
    return shutil.copytree(checkpoint(DENSE), tmp_path / "box" / "source")


def usage(*arguments: object, around: Path) -> Run:
    before = snapshot(around)
    result = run("convert", *arguments, "--json")
    assert result.code == 2, result.stderr
    assert snapshot(around) == before
    return result


def test_out_that_exists(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert "--overwrite" in usage(source, out, around=tmp_path).stderr


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("place", ["source", "source/out", "source/a/b", "source/../source/x", "."])
def test_out_and_source_inside_each_other(place: str, overwrite: list[str], source: Path, tmp_path: Path) -> None:
    result = usage(source, source.parent / place, *overwrite, around=tmp_path)
    assert "source" in result.json["error"]["message"]


def test_out_inside_the_source_through_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    usage(source, tmp_path / "link" / "out", around=tmp_path)
    usage(tmp_path / "link", source / "out", around=tmp_path)
    usage(source, tmp_path / "link", "--overwrite", around=tmp_path)


def test_overwrite_spares_what_is_no_checkpoint(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "photos"
    out.mkdir()
    (out / "cat.jpg").write_bytes(b"cat")
    assert "no checkpoint" in usage(source, out, "--overwrite", around=tmp_path).stderr
    usage(source, out / "cat.jpg", "--overwrite", around=tmp_path)


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
@pytest.mark.parametrize("exists", [False, True])
def test_the_names_it_works_under_may_not_be_the_source(
    suffix: str, exists: bool, source: Path, tmp_path: Path
) -> None:
    """OUT.partial and OUT.replaced are deleted in the course of a run."""
    out = tmp_path / "model"
    source = source.rename(tmp_path / f"model{suffix}")
    if exists:
        shutil.copytree(source, out)
    before = snapshot(source)
    result = run("convert", source, out, "--json", "--overwrite")
    assert snapshot(source) == before
    assert result.code in (0, 2)


@pytest.mark.parametrize("suffix", [".partial", ".replaced"])
def test_folders_of_others_are_not_deleted(suffix: str, source: Path, tmp_path: Path) -> None:
    other = tmp_path / f"out{suffix}"
    other.mkdir()
    (other / "cat.jpg").write_bytes(b"cat")
    run("convert", source, tmp_path / "out", "-q")
    assert (other / "cat.jpg").read_bytes() == b"cat"


@pytest.mark.parametrize("out", [".", "..", "/", "sub/.."])
def test_out_without_a_name_of_its_own(out: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a directory that holds other things: usage, not a crash."""
    folder = tmp_path / "work" / "here"
    (folder / "sub").mkdir(parents=True)
    (folder / "note").write_text("n")
    (folder.parent / "note").write_text("n")
    monkeypatch.chdir(folder)
    for overwrite in ([], ["--overwrite"]):
        usage(source, out, *overwrite, around=tmp_path)


@pytest.mark.parametrize("form", ["{}", "{}/", "{}/../out", "."])
def test_out_is_replaced_when_asked(form: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert run("convert", source, out, "-q").code == 0
    expected = snapshot(out)
    (out / "stale.txt").write_text("old")
    monkeypatch.chdir(out)
    assert run("convert", source, form.format(out), "-q", "--overwrite").code == 0
    assert snapshot(out) == expected
    assert {path.name for path in tmp_path.iterdir()} == {"box", "out"}


# --- failing disks ---------------------------------------------------------------------------------------------------


def failing(code: int, after: int = 0, times: int = 1_000_000) -> Callable[..., Any]:
    """Replaces an os function: real for `after` calls, then OSError for `times` calls."""

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            if after < calls <= after + times:
                raise OSError(code, os.strerror(code))
            return real(*arguments, **keywords)

        return call

    return wrap


FAULTS = {
    "first write": ("pwrite", failing(errno.ENOSPC), "No space left.*free space"),
    "later write": ("pwrite", failing(errno.ENOSPC, 40), "No space left.*free space"),
    "write error": ("pwrite", failing(errno.EIO, 40), "Input/output error"),
    "preallocation": ("posix_fallocate", failing(errno.ENOSPC), "No space left.*free space"),
    "read error": ("pread", failing(errno.EIO, 5), "Input/output error"),
    "sync": ("fsync", failing(errno.EIO, 1), "Input/output error"),
    "last sync": ("fsync", failing(errno.EIO, 3), "Input/output error"),
    "rename": ("rename", failing(errno.EXDEV), "cross-device"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_failing_disk_leaves_nothing(name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, wrap, says = FAULTS[name]
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, function, wrap(getattr(os, function)))
    result = run("convert", source, tmp_path / "out", "--json", "--workers", "2")
    monkeypatch.undo()
    assert result.code == 4
    assert snapshot(tmp_path) == before
    assert re.search(says, result.json["error"]["message"], re.IGNORECASE), result.json
    assert re.search(r"\.safetensors|out", result.json["error"]["message"])


@pytest.mark.parametrize("name", [*FAULTS, "second rename"])
def test_failing_disk_keeps_the_output_to_be_replaced(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, wrap, _ = FAULTS.get(name) or ("rename", failing(errno.EIO, 1, 1), "")
    out = tmp_path / "out"
    assert run("convert", source, out, "-q").code == 0
    (out / "mark.txt").write_text("the old one")
    before = snapshot(tmp_path)
    monkeypatch.setattr(os, function, wrap(getattr(os, function)))
    result = run("convert", source, out, "--json", "--overwrite", "--workers", "2")
    monkeypatch.undo()
    assert result.code == 4
    assert snapshot(tmp_path) == before


def test_full_disk_is_seen_before_the_first_byte(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(tmp_path)

    def no_write(*_: Any) -> NoReturn:
        raise AssertionError("written before the check")

    usage_now = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage_now._replace(free=1_000_000))
    monkeypatch.setattr(os, "pwrite", no_write)
    result = run("convert", source, tmp_path / "out", "--json")
    assert result.code == 4
    assert snapshot(tmp_path) == before
    message = result.json["error"]["message"]
    free, needed, short = (
        int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d{3},\d{3}|\d[\d,]+(?= bytes)", message)
    )
    assert free == 1_000_000 and short == needed - free
    assert needed >= sum(path.stat().st_size for path in source.glob("*.safetensors"))
