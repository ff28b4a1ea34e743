"""Nothing that a checkpoint's directory holds ends in a traceback, a hang, or much memory.

Spoiled copies of shipped checkpoints are read in this process; what could take the machine with it, in another one
whose memory is limited.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import checkpoints
import damage
import hostile
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runner import run, snapshot, strict_json

from nvfp4prep.cli import main
from nvfp4prep.header import DTYPE_BITS

COMMANDS: dict[str, Callable[[Path, Path], tuple[object, ...]]] = {
    "inspect": lambda source, out: ("inspect", source),
    "inspect, JSON": lambda source, out: ("inspect", source, "--json"),
    "inspect, a layer": lambda source, out: ("inspect", source, "--layer", 0),
    "convert, dry": lambda source, out: ("convert", source, out, "--dry-run"),
    "convert": lambda source, out: ("convert", source, out, "--no-smoke", "--workers", 1),
    "convert, imputing": lambda source, out: ("convert", source, out, "--no-smoke", "--impute", "layer-max", "--json"),
    "convert, packing": lambda source, out: (
        *("convert", source, out, "--no-smoke", "--workers", 1, "--impute", "layer-max"),
        *("--target", "flashinfer-cutlass"),
    ),
    "validate": lambda source, out: ("validate", source, "--level", "full", "--workers", 1),
    "validate, JSON": lambda source, out: ("validate", source, "--level", "full", "--format", "json"),
}
"""What every spoiled checkpoint is given to, by turns: arguments for a source and a place for an output."""
ALWAYS = ("inspect", "convert, dry", "validate")
BASES = (
    "qwen3-dense-nvfp4",
    "qwen3moe-nvfp4-sharded",
    "dsv3-nvfp4",
    "qwen3moe-int4awq",
    "llama4-nvfp4",
    "qwen3moe-mixed-fp8attn",
    "qwen3moe-nvfp4-awqlite",
    "gptoss-nvfp4",
)
_FIND_ALL = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
randoms = st.randoms(use_true_random=False)
bases = st.sampled_from(BASES)
extras = st.sampled_from(sorted(set(COMMANDS) - set(ALWAYS)))


def test_the_commands_that_read_checkpoints_are_tried() -> None:
    assert {"inspect", "convert", "validate"} <= main.commands.keys()
    assert {str(arguments(Path(), Path())[0]) for arguments in COMMANDS.values()} == {"inspect", "convert", "validate"}


@contextmanager
def box_of(base: str) -> Iterator[Path]:
    """A folder with a copy of a checkpoint in it, to be spoiled."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(checkpoints.DATA / base, Path(folder) / "source")
        yield Path(folder)


def survives(box: Path, names: Sequence[str]) -> None:
    """Every command ends in one of its exit codes, says why, leaves nothing behind and the source alone."""
    source, out = box / "source", box / "out"
    before = snapshot(box)
    for name in names:
        arguments = COMMANDS[name](source, out)
        result = run(*arguments)  # raises what the command line does not expect
        assert result.code in (0, 1, 2, 3, 4), (name, result)
        told = result.stdout + result.stderr
        if result.code:
            assert (result.stdout if result.code == 1 else result.stderr).strip(), name
        assert "Traceback" not in told, told
        assert not re.search(r"[^\n -~\u00a0-\U0010ffff]", told), f"{name}: control characters in {told!r}"
        if "--json" in arguments or ("json" in arguments and result.code < 2):
            strict_json(result.stdout)
        if result.code == 0 and out.exists():
            assert arguments[0] == "convert" and "--dry-run" not in arguments
            shutil.rmtree(out)
        assert snapshot(box) == before, f"{name} changed the source or left something behind"


def files_of(source: Path) -> tuple[list[Path], list[Path]]:
    """Shards, and the JSON files that are read."""
    jsons = [path for path in source.glob("*.json") if path.name != "generation_config.json"]
    return sorted(source.glob("*.safetensors")), sorted(jsons)


# --- bytes -----------------------------------------------------------------------------------------------------------


@given(bases, randoms, extras)
@settings(_FIND_ALL, max_examples=100)
def test_bytes_of_headers_and_json_files(base: str, random: Random, extra: str) -> None:
    with box_of(base) as box:
        shards, jsons = files_of(box / "source")
        path = random.choice([*shards, *jsons])
        hostile.spoil_bytes(path, random, end=hostile.header_bytes(path) if path in shards else None)
        survives(box, (*ALWAYS, extra))


@given(bases, randoms, extras)
@settings(_FIND_ALL, max_examples=50)
def test_bytes_of_tensors(base: str, random: Random, extra: str) -> None:
    """Those of a scalar scale, or any."""
    with box_of(base) as box:
        path = random.choice(files_of(box / "source")[0])
        begin, end = random.choice(hostile.scale_ranges(path) or [(hostile.header_bytes(path), 1 << 40)])
        if random.randrange(3):
            raw = bytearray(path.read_bytes())
            for at in range(begin, min(end, begin + 4)):
                raw[at] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
            path.write_bytes(raw)
        else:
            hostile.spoil_bytes(path, random, hostile.header_bytes(path))
        survives(box, (*ALWAYS, extra))


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json", damage.INDEX, "model.safetensors"])
def test_every_byte_cut_off(name: str, tmp_path: Path) -> None:
    """A file of any length that it can have when it is cut off: every step of 1/20, and both ends byte by byte."""
    base = "qwen3moe-nvfp4-sharded" if name == damage.INDEX else "qwen3-dense-nvfp4"
    box = tmp_path / "box"
    shutil.copytree(checkpoints.DATA / base, box / "source")
    path = box / "source" / name
    raw = path.read_bytes()
    for length in sorted({*range(12), *range(0, len(raw), len(raw) // 20), *range(len(raw) - 3, len(raw))}):
        path.write_bytes(raw[:length])
        survives(box, ("inspect",))


# --- structure -------------------------------------------------------------------------------------------------------


@given(bases, randoms, extras)
@settings(_FIND_ALL, max_examples=150)
def test_values_of_json_files(base: str, random: Random, extra: str) -> None:
    with box_of(base) as box:
        source = box / "source"
        path = random.choice(files_of(source)[1])
        hostile.spoil_json(path, random)
        if random.randrange(3) == 0:  # so that the other file counts
            if path.name == "config.json":
                (source / "hf_quant_config.json").unlink(missing_ok=True)
            elif path.name == "hf_quant_config.json":
                config = json.loads((source / "config.json").read_text())
                del config["quantization_config"]
                damage.write_json(source / "config.json", config)
        survives(box, (*ALWAYS, extra))


@given(bases, randoms, extras)
@settings(_FIND_ALL, max_examples=60)
def test_values_of_headers(base: str, random: Random, extra: str) -> None:
    with box_of(base) as box:
        hostile.spoil_header(random.choice(files_of(box / "source")[0]), random)
        survives(box, (*ALWAYS, extra))


@given(bases, randoms, extras)
@settings(_FIND_ALL, max_examples=200)
def test_tensors(base: str, random: Random, extra: str) -> None:
    with box_of(base) as box:
        shards, jsons = files_of(box / "source")
        for path in shards if random.randrange(4) == 0 else [random.choice(shards)]:
            hostile.spoil_tensors(path, random)
        (box / "source" / damage.INDEX).unlink(missing_ok=True)
        if random.randrange(3) == 0:
            hostile.spoil_json(random.choice([path for path in jsons if path.exists()]), random)
        survives(box, (*ALWAYS, extra))


@given(randoms, st.sampled_from(["hf", "flashinfer-cutlass", "vllm-marlin"]))
@settings(_FIND_ALL, max_examples=60)
def test_outputs_of_convert(outputs: Callable[[str], Path], random: Random, target: str) -> None:
    """Their manifest is a file that anybody may have changed, too."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shutil.copytree(outputs(target), source)
        jsons = sorted(source.rglob("*.json"))
        hostile.spoil_json(random.choice([source / "nvfp4prep.json", random.choice(jsons)]), random)
        if random.randrange(4) == 0:
            hostile.spoil_tensors(random.choice(sorted(source.rglob("*.safetensors"))), random)
        survives(Path(folder), ("validate", "inspect", "convert"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``outputs(target)``: a checkpoint converted to it."""
    made: dict[str, Path] = {}

    def path_of(target: str) -> Path:
        if target not in made:
            made[target] = tmp_path_factory.mktemp("outputs") / target
            source = checkpoints.DATA / "llama4-nvfp4"
            assert run("convert", source, made[target], "--target", target, "--no-smoke", "-q").code == 0
        return made[target]

    return path_of


# --- values that were too much once ----------------------------------------------------------------------------------


def config_of(**keys: Any) -> Callable[[Path], None]:
    """config.json with other values."""

    def change(source: Path) -> None:
        config = json.loads((source / "config.json").read_text())
        damage.write_json(source / "config.json", config | keys)

    return change


def section_of(name: str, **keys: Any) -> Callable[[Path], None]:
    """The quantisation section of a config with other values."""

    def change(source: Path) -> None:
        config = json.loads((source / name).read_text())
        config["quantization" if name == "hf_quant_config.json" else "quantization_config"] |= keys
        damage.write_json(source / name, config)

    return change


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """Every tensor with a part of its name replaced."""

    def change(source: Path) -> None:
        for path in files_of(source)[0]:
            table, data = hostile.split(path.read_bytes())
            path.write_bytes(hostile.joined({name.replace(old, new): entry for name, entry in table.items()}, data))

    return change


def all_of(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        for one in changes:
            one(source)

    return change


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda source: (source / name).write_text(text) and None


SPOILED: dict[str, Callable[[Path], None]] = {
    "no hidden size": config_of(hidden_size=0, intermediate_size=0, vocab_size=0, moe_intermediate_size=0),
    "negative sizes": config_of(hidden_size=-1, num_experts=-1, num_hidden_layers=-1, num_nextn_predict_layers=-1),
    "numbers without end": config_of(hidden_size=10**37, num_experts=10**37, vocab_size=10**37, n_layer=10**37),
    "another method beside it": section_of("hf_quant_config.json", quant_method="x", quantization={}, producer=[]),
    "a section in the section": section_of("config.json", quantization=3, quant_method="modelopt"),
    "an algorithm that is no text": section_of("hf_quant_config.json", quant_algo="\0"),
    "an escape for the terminal": section_of("config.json", quant_algo="\x1b[2J", kv_cache_quant_algo="\x1b]0;x\x07"),
    "markup": section_of("config.json", quant_algo="[bold]", producer={"name": "[/]", "version": "[red]"}),
    "half a pair before a number": section_of("config.json", **{"\ud800": 10**40}),
    "a manifest with half a pair": write("nvfp4prep.json", '{"format": 1, "\\ud800": 1' + "0" * 40 + "}"),
    "a manifest of nothing": write("nvfp4prep.json", '{"format": 1, "source": {}, "runs": [{"options": []}]}'),
    "a manifest of tiny shards": write(
        "nvfp4prep.json", '{"format": 1, "source": {}, "runs": [{"options": {"max_shard_bytes": 1}}]}'
    ),
    "layers without end": all_of(config_of(num_hidden_layers=10**37), renamed("layers.1.", "layers.999999999.")),
    "experts without end": all_of(config_of(num_experts=10**37), renamed("experts.1.", "experts.999999999.")),
    "no layers": renamed("layers.", "l"),
    "names of dots": renamed(".", ".."),
    "names of digits": renamed("model.layers.", "1" * 700 + "."),
}


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled(name: str, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoints.DATA / "qwen3moe-nvfp4-sharded", tmp_path / "box" / "source")
    if name.startswith(("names", "no layers")) or "without end" in name:
        (source / damage.INDEX).unlink()
    SPOILED[name](source)
    if "without end" in name:
        outside(source, ALWAYS, peak=GIB)
    survives(source.parent, tuple(COMMANDS))


# --- in a process of its own -----------------------------------------------------------------------------------------

_CHILD = """
import json, re, resource, sys
from pathlib import Path
paths, limit, commands = json.loads(sys.argv[1])
sys.path[:0] = paths
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
from runner import run
results = [run(*command) for command in commands]
status = Path("/proc/self/status")
if status.exists():
    peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", status.read_text())[1]) * 1024
else:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([peak, [[result.code, result.stdout[:2000], result.stderr[:2000]] for result in results]]))
"""
GIB = 1 << 30


def outside(source: Path, names: Sequence[str], *, peak: int, seconds: float = 300.0) -> list[tuple[int, str]]:
    """Run commands in another process: exit codes and what was told. Its memory must stay below `peak`."""
    out = source.parent / "out"
    commands = [[str(part) for part in COMMANDS[name](source, out)] for name in names]
    told = json.dumps([sys.path, max(4 * peak, 3 * GIB), commands])
    child = subprocess.run([sys.executable, "-c", _CHILD, told], capture_output=True, text=True, timeout=seconds)
    assert child.returncode == 0, child.stderr[-2000:]
    measured, results = json.loads(child.stdout)
    for name, (code, stdout, stderr) in zip(names, results, strict=True):
        assert code in (0, 1, 2, 3, 4), (name, code)
        assert "Traceback" not in stdout + stderr
        assert "out of memory" not in stderr, (name, stderr)
        assert not code or (stdout if code == 1 else stderr).strip()
    assert measured < peak, f"{measured / GIB:.2f} GiB of memory"
    assert not out.exists()
    return [(code, stdout + stderr) for code, stdout, stderr in results]


def replace_by(name: str, target: str) -> Callable[[Path], None]:
    """A link in place of a file, which keeps its content elsewhere."""

    def change(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(target)

    return change


def fifo(name: str) -> Callable[[Path], None]:
    def change(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        os.mkfifo(source / name)

    return change


SHARD = "model-00002-of-00006.safetensors"
LINKS: dict[str, Callable[[Path], None]] = {
    "shard, itself": replace_by(SHARD, SHARD),
    "shard, a folder": replace_by(SHARD, "."),
    "shard, zeros": replace_by(SHARD, "/dev/zero"),
    "shard, a pipe": fifo(SHARD),
    "shard, nothing": replace_by(SHARD, "nowhere"),
    "shard, an endless file": replace_by(SHARD, "/proc/self/mem"),
    "index, a loop": all_of(replace_by(damage.INDEX, "other"), replace_by("other", damage.INDEX)),
    "index, zeros": replace_by(damage.INDEX, "/dev/zero"),
    "index, a pipe": fifo(damage.INDEX),
    "config, itself": replace_by("config.json", "config.json"),
    "config, zeros": replace_by("config.json", "/dev/zero"),
    "config, a pipe": fifo("config.json"),
    "config, random": replace_by("config.json", "/dev/urandom"),
    "quantisation, zeros": replace_by("hf_quant_config.json", "/dev/zero"),
    "quantisation, a folder": replace_by("hf_quant_config.json", ".."),
    "manifest, a pipe": fifo("nvfp4prep.json"),
    "side file, zeros": replace_by("tokenizer.json", "/dev/zero"),
    "side file, a pipe": fifo("chat_template.jinja"),
    "a folder, itself": replace_by("assets", "."),
}


@pytest.mark.parametrize("name", LINKS)
def test_links_and_special_files(name: str, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoints.DATA / "qwen3moe-nvfp4-sharded", tmp_path / "source")
    LINKS[name](source)
    for code, told in outside(source, ("inspect", "convert", "validate"), peak=GIB // 2):
        assert code in (1, 3, 4), told


def sparse(tensors: Sequence[tuple[str, str, Sequence[int]]], path: Path) -> None:
    """A shard with tensors (name, dtype, shape) of zeros that take no place on disk."""
    table, position = {}, 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * DTYPE_BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    header = hostile.joined(table)
    path.write_bytes(header)
    try:
        os.truncate(path, len(header) + position)
    except OSError:
        pytest.skip("this file system has no files that large")


def nvfp4(module: str, rows: int, columns: int) -> list[tuple[str, str, Sequence[int]]]:
    return [
        (f"{module}.weight", "U8", (rows, columns // 2)),
        (f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)),
        (f"{module}.weight_scale_2", "F32", ()),
        (f"{module}.input_scale", "F32", ()),
    ]


Q = "model.layers.0.self_attn.q_proj"
FUSED = "model.layers.0.feed_forward.experts"
TB = 1 << 40
SPARSE: dict[str, list[tuple[str, str, Sequence[int]]]] = {
    "a terabyte": [*nvfp4(Q, 16, 16), ("b.weight", "BF16", (TB // 2,))],
    "k_scale": [*nvfp4(Q, 16, 16), ("model.layers.0.self_attn.k_scale", "F32", (TB // 4,))],
    "pre_quant_scale": [*nvfp4(Q, 16, 16), (f"{Q}.pre_quant_scale", "F32", (TB // 4,))],
    "experts' pre_quant_scale": [
        tensor
        for projection in ("gate_proj", "up_proj", "down_proj")
        for module in [f"model.layers.0.mlp.experts.0.{projection}"]
        for tensor in (*nvfp4(module, 16, 16), (f"{module}.pre_quant_scale", "F32", (TB // 40,)))
    ],
    "a row": nvfp4(Q, 1, TB),
    "a column": nvfp4(Q, TB // 16, 16),
    "an int4 row": [("x.weight", "U8", (1, TB)), ("x.weight_scale", "F32", (2, 1))],
    "an expert": [
        t for p in ("gate_proj", "up_proj", "down_proj") for t in nvfp4(f"x.experts.0.{p}", 1 << 19, 1 << 19)
    ],
    "a finding for each tensor": [t for number in range(10_000) for t in nvfp4(f"model.{number}.up_proj", 1, 16)],
    "experts": [
        tensor
        for name, rows, columns in (("gate_up_proj", 32, 16), ("down_proj", 16, 16))
        for tensor in (
            (f"{FUSED}.{name}", "U8", (1 << 28, columns // 2, rows)),
            (f"{FUSED}.{name}_weight_scale", "F8_E4M3", (1 << 28, columns // 16, rows)),
            (f"{FUSED}.{name}_weight_scale_2", "F32", (1 << 28,)),
            (f"{FUSED}.{name}_input_scale", "F32", (1 << 28,)),
        )
    ],
}


@pytest.mark.parametrize("name", SPARSE)
def test_tensors_larger_than_memory(name: str, tmp_path: Path) -> None:
    """A file can claim terabytes that it does not have."""
    source = tmp_path / "source"
    source.mkdir()
    sparse(SPARSE[name], source / "model.safetensors")
    shutil.copy(checkpoints.DATA / "dsv3-nvfp4" / "config.json", source)
    commands = ("inspect", "convert") if name == "a terabyte" else ("inspect", "convert", "validate")
    outside(source, commands, peak=GIB)


def header(raw: bytes) -> Callable[[Path], None]:
    return lambda source: (source / "model.safetensors").write_bytes(hostile.joined(raw)) and None


def text(name: str, raw: bytes) -> Callable[[Path], None]:
    return lambda source: (source / name).write_bytes(raw) and None


def repeated(part: bytes, size: int) -> bytes:
    return part * (size // len(part))


def many_tensors(source: Path) -> None:
    entry = b'"model.layers.%d.x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    table = b",".join(entry % number for number in range(1_000_100))
    header(b"{" + table + b"}")(source)


def excluded(*entries: str) -> Callable[[Path], None]:
    return section_of("config.json", ignore=list(entries))


HEADER, CONFIG, INDEX = 99_999_000, 31_999_000, 127_999_000
BOMBS: dict[str, Callable[[Path], None]] = {
    "header of lists": header(b"[" + repeated(b"[],", HEADER) + b"0]"),
    "header of lists in an entry": header(b'{"a":[' + repeated(b"[],", HEADER) + b"0]}"),
    "header of lists as a shape": header(b'{"a":{"shape":[' + repeated(b"[],", HEADER) + b"0]}}"),
    "header of objects": header(b"{" + repeated(b'"a":{},', HEADER) + b'"b":{}}'),
    "header of nothing but depth": header(repeated(b'{"a":', HEADER)),
    "header of one name": header(b'{"' + repeated(b"\\n", HEADER) + b'":1}'),
    "header of one number": header(b'{"a":{"shape":[' + repeated(b"1", HEADER) + b"]}}"),
    "header of backslashes": header(b'{"a":{"' + repeated(b"\\", HEADER)),
    "header of metadata": header(b'{"__metadata__":{"a":[' + repeated(b"[],", 3_900_000) + b"0]}}"),
    "header that claims a petabyte": text("model.safetensors", struct.pack("<Q", 10**15) + b"{}"),
    "1,000,001 tensors": many_tensors,
    "config of lists": text("config.json", b'{"a":[' + repeated(b"[],", CONFIG) + b"0]}"),
    "config of some lists": text("config.json", b'{"a":[' + repeated(b"[],", 5_900_000) + b"0]}"),
    "config of objects": text("config.json", b'{"a":[' + repeated(b'{"a":1},', 10_600_000) + b"0]}"),
    "config of depth": text("config.json", b'{"a":[' + b"[" * 98 + b"]" * 98 + b"," + b"[" * 900 + b"]" * 900 + b"]}"),
    "config of one number": text("config.json", b'{"a":' + repeated(b"1", CONFIG) + b"}"),
    "config of one fraction": text("config.json", b'{"a":0.' + repeated(b"1", CONFIG) + b"}"),
    "config of one string": text("config.json", b'{"a":"' + repeated(b"\\u00e9", CONFIG) + b'"}'),
    "index of wide names": text(
        damage.INDEX,
        b'{"weight_map":{'
        + b",".join(b'"\\ud83d\\ude00%07d%s":"x"' % (number, b"x" * 100) for number in range(900_000))
        + b"}}",
    ),
    "index of missing tensors": text(
        damage.INDEX, b'{"weight_map":{' + b",".join(b'"%d":"model.safetensors"' % n for n in range(900_000)) + b"}}"
    ),
    "manifest of runs": text("nvfp4prep.json", b'{"format":1,"runs":[' + repeated(b"{},", 5_900_000) + b"0]}"),
    "exclude list of names": excluded(*(f"z{number}" for number in range(1_000_000))),
    "exclude list of globs": excluded(*(f"model{'*a' * 400}{number}" for number in range(19_000))),
    "exclude list of one glob": excluded("model" + "*a" * 490 + "*b", "*" * 999),
    "exclude list of prefixes": excluded(*("model.layers.0.mlp.experts." + "*" * n for n in range(900))),
    "exclude list of expressions": excluded(*(f"re:model{'(a|b)?' * 150}{number}" for number in range(9_000))),
    "exclude list of nothing": excluded(*("\1" * number for number in range(2_000))),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str, tmp_path: Path) -> None:
    """Files that take far more memory, or time, than their size says."""
    source = shutil.copytree(checkpoints.DATA / "dsv3-nvfp4", tmp_path / "source")
    BOMBS[name](source)
    told = outside(source, ("inspect", "validate") if "one glob" in name else ("inspect",), peak=GIB * 3 // 2)
    if name.startswith(("header", "1,", "index", "config of lists", "config of one n")):
        assert all(code in (1, 3) for code, _ in told), told
