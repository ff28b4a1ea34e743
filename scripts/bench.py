#!/usr/bin/env python3
"""Measure conversion as ratios to `cp -r` of the same checkpoint, on the same disk, in the same run.

Usage: bench.py [--size GIB] [--runs N] [--dir DIR] [--format FORMAT] [--split] [--only NAME]...

Generates checkpoints of about the size asked for, one NVFP4, one int4 (W4A8_AWQ, which all int4 targets take): a
Qwen3-MoE's geometry, random codes, every input scale different. NVFP4: gate and up share their weight_scale_2, as
ModelOpt exports them; with --split no pair does, and the block scales of half of them are rescaled. int4: each down
has its own pre_quant_scale, which goes into the rows of up; those of gate and up are the layer's.

Commands take turns with `cp -r`, each in a fresh process; the best of N counts. Both sides end with their files on disk
(`cp` is followed by `sync`, convert syncs itself), the source is in the page cache, and as much memory as the output
takes was used a moment ago: a virtual machine's host may have to find it first. Peak RSS is of the command's own
process. `naive` is a script that loads everything, shuffles rows and saves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 128
VOCABULARY, HEADS, KV_HEADS, HEAD = 32768, 32, 4, 128
SHARD_BYTES = 2_000_000_000
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
GROUP = 128
TARGETS = {
    "nvfp4": ("flashinfer-trtllm", "flashinfer-cutlass", "flashinfer-cutedsl", "vllm-cutlass", "vllm-marlin"),
    "int4": ("vllm-marlin-int4", "moe-wna16", "flashinfer-sm90-w4a8", "sglang-w4afp8", "flashinfer-mxint4"),
}
ALGORITHM = {
    "nvfp4": {"quant_algo": "NVFP4", "group_size": 16},
    "int4": {"quant_algo": "W4A8_AWQ", "group_size": GROUP, "has_zero_point": False, "pre_quant_scale": True},
}

Spec = tuple[str, str, tuple[int, ...]]

NAIVE = """
import sys, torch
from pathlib import Path
from typing import Any
from safetensors.torch import load_file, save_file
source, out = map(Path, sys.argv[1:])
out.mkdir()
for path in sorted(source.glob("*.safetensors")):
    tensors = load_file(path)
    for name in list(tensors):
        if ".experts." in name and tensors[name].dim() == 2:
            tensors[name] = tensors[name][torch.arange(tensors[name].shape[0] - 1, -1, -1)].contiguous()
    save_file(tensors, out / path.name)
"""


# --- the checkpoint --------------------------------------------------------------------------------------------------


def nvfp4(module: str, rows: int, columns: int) -> Iterator[Spec]:
    yield f"{module}.input_scale", "F32", ()
    yield f"{module}.weight", "U8", (rows, columns // 2)
    yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{module}.weight_scale_2", "F32", ()


def int4(module: str, rows: int, columns: int) -> Iterator[Spec]:
    yield f"{module}.input_scale", "F32", ()
    if ".experts." in module:
        yield f"{module}.pre_quant_scale", "BF16", (columns,)
    yield f"{module}.weight", "U8", (rows // 2, columns)
    yield f"{module}.weight_scale", "F32", (rows, columns // GROUP)
    yield f"{module}.weight_scale_2", "F32", ()


LINEAR = {"nvfp4": nvfp4, "int4": int4}


def layer(number: int, form: str) -> Iterator[Spec]:
    linear = LINEAR[form]
    path = f"model.layers.{number}"
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{path}.{norm}.weight", "BF16", (HIDDEN,)
    for name, rows, columns in (
        ("q_proj", HEADS * HEAD, HIDDEN),
        ("k_proj", KV_HEADS * HEAD, HIDDEN),
        ("v_proj", KV_HEADS * HEAD, HIDDEN),
        ("o_proj", HIDDEN, HEADS * HEAD),
    ):
        yield from linear(f"{path}.self_attn.{name}", rows, columns)
    yield f"{path}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
    for expert in range(EXPERTS):
        base = f"{path}.mlp.experts.{expert}"
        yield from linear(f"{base}.gate_proj", INTERMEDIATE, HIDDEN)
        yield from linear(f"{base}.up_proj", INTERMEDIATE, HIDDEN)
        yield from linear(f"{base}.down_proj", HIDDEN, INTERMEDIATE)


def nbytes(spec: Spec) -> int:
    return BYTES[spec[1]] * math.prod(spec[2])


def generate(folder: Path, size: int, split: bool, form: str = "nvfp4") -> None:
    """Write the checkpoint: as many layers as fit the size."""
    import numpy as np

    from nvfp4prep.header import build_header

    per_layer = sum(map(nbytes, layer(0, form)))
    layers = max(1, round((size - 4 * VOCABULARY * HIDDEN) / per_layer))
    specs: list[Spec] = [("model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN))]
    for number in range(layers):
        specs += layer(number, form)
    specs += [("model.norm.weight", "BF16", (HIDDEN,)), ("lm_head.weight", "BF16", (VOCABULARY, HIDDEN))]
    shards: list[list[Spec]] = [[]]
    held = 0
    for spec in specs:
        if shards[-1] and held + nbytes(spec) > SHARD_BYTES:
            shards.append([])
            held = 0
        shards[-1].append(spec)
        held += nbytes(spec)
    folder.mkdir()
    noise = np.random.default_rng(0)
    weight_map = {}
    for position, shard in enumerate(shards):
        name = f"model-{position + 1:05}-of-{len(shards):05}.safetensors"
        shard.sort(key=lambda spec: (-BYTES[spec[1]], spec[1], spec[0]))
        weight_map |= dict.fromkeys((spec[0] for spec in shard), name)
        with (folder / name).open("wb") as file:
            file.write(build_header(shard, {"format": "pt"}))
            for spec in shard:
                file.write(_values(spec, noise, split))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    write_configs(folder, layers, form)


def _values(spec: Spec, noise: Any, split: bool) -> bytes:
    import numpy as np

    name, dtype, shape = spec
    if not shape and name.endswith("weight_scale_2") and not split:
        return struct.pack("<f", 2.0**-12)
    if not shape:
        return struct.pack("<f", float(np.exp(noise.normal(-7, 0.3))))
    if dtype == "F32":
        return np.exp(noise.normal(-5, 0.3, shape)).astype("<f4").tobytes()
    if name.endswith("pre_quant_scale") and not name.endswith("down_proj.pre_quant_scale"):
        noise = np.random.default_rng(int(name.split(".")[2]))  # the layer's own
    raw = noise.bytes(nbytes(spec))
    if name.endswith("pre_quant_scale"):  # 0.5 to 1
        return ((np.frombuffer(raw, "<u2") & 0x7F) | 0x3F00).astype("<u2").tobytes()
    if dtype == "F8_E4M3":  # 0.25 to 448: no zero, no NaN
        return (np.frombuffer(raw, np.uint8) % 88 + 0x27).astype(np.uint8).tobytes()
    if dtype == "BF16":  # small and finite
        return ((np.frombuffer(raw, "<u2") & 0x807F) | 0x3C00).astype("<u2").tobytes()
    return raw


def write_configs(folder: Path, layers: int, form: str) -> None:
    ignore = ["lm_head", "model.embed_tokens", *(f"model.layers.{n}.mlp.gate" for n in range(layers))]
    quantised = {**ALGORITHM[form], "kv_cache_quant_algo": None, "exclude_modules": ignore}
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTERMEDIATE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        "quantization_config": {"quant_method": "modelopt", **ALGORITHM[form], "ignore": ignore},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": quantised}))


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """The best run's seconds, and the largest peak RSS in bytes."""

    seconds: float
    peak: int


def measure(command: list[str]) -> Measured:
    """Run a command to its end, with its files on disk. Exits when it fails."""
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    message = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if command[0] == "cp" or NAIVE in command:
        os.sync()
    seconds = time.perf_counter() - begun
    if os.waitstatus_to_exitcode(status):
        sys.exit(f"{' '.join(command[:4])} ... failed: {message.decode()[-400:]}")
    return Measured(seconds, usage.ru_maxrss * 1024)


def commands(source: Path, out: Path, form: str) -> dict[str, list[str]]:
    program = [sys.executable, "-m", "nvfp4prep"]
    convert = [*program, "convert", "-q", "--no-smoke", str(source), str(out), "--max-shard-size", str(SHARD_BYTES)]
    found = {"convert hf": convert}
    fold = ["--pre-quant-scale", "fold"] if form == "int4" else []
    for target in ("compressed-tensors", *TARGETS[form]):
        found[f"convert {target}"] = [*convert, "--target", target, *fold]
    found["validate full"] = [*program, "validate", "--level", "full", str(source)]
    found["naive"] = [sys.executable, "-c", NAIVE, str(source), str(out)]
    return found


def warm(source: Path) -> None:
    for path in source.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def touch(size: int) -> None:
    """Use memory, a quarter of all there is at most, and give it back."""
    size = min(size, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
    subprocess.run([sys.executable, "-c", "import sys; b'1' * int(sys.argv[1])", str(size)], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=float, default=4.0, help="GiB of the checkpoint [4]")
    parser.add_argument("--runs", type=int, default=3, help="of each command [3]")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure [the temporary one]")
    parser.add_argument("--format", choices=TARGETS, action="append", help="of the experts; repeated [both]")
    parser.add_argument("--split", action="store_true", help="gate and up with two weight_scale_2 everywhere")
    parser.add_argument("--only", action="append", help="a row's name; repeated")
    parser.add_argument("--generate", type=Path, help="only write the checkpoint, to this folder")
    arguments = parser.parse_args()
    if arguments.generate:
        for form in arguments.format or ["nvfp4"]:
            generate(arguments.generate, int(arguments.size * 2**30), arguments.split, form)
        return 0
    print(f"machine:    {machine()}")
    for form in arguments.format or TARGETS:
        named = commands(Path(), Path(), form).keys()
        if arguments.only and not named & set(arguments.only):
            continue
        with tempfile.TemporaryDirectory(prefix="bench-", dir=arguments.dir) as scratch:
            source = Path(scratch) / "source"
            # In a process of its own: what this one ever held would count as its children's peak.
            make = [sys.executable, __file__, "--generate", str(source), "--size", str(arguments.size)]
            subprocess.run([*make, "--format", form, *(["--split"] if arguments.split else [])], check=True)
            compare(source, Path(scratch) / "out", form, arguments.runs, arguments.only)
    return 0


def compare(source: Path, out: Path, form: str, runs: int, only: list[str] | None) -> None:
    """Print a line for each command, which takes turns with `cp -r`."""
    os.sync()
    size = sum(path.stat().st_size for path in source.iterdir())
    print(f"\n{form + ':':11} {size / 1e9:.2f} GB, {len(list(source.glob('*.safetensors')))} shards")
    print(f"{'':28} {'seconds':>8} {'cp -r':>8} {'speed of cp':>12} {'peak RSS':>10}")
    for label, command in commands(source, out, form).items():
        if only and label not in only:
            continue
        own, copies = [], []
        for _ in range(runs):
            for kept, one in ((copies, ["cp", "-r", str(source), str(out)]), (own, command)):
                warm(source)
                touch(size)
                kept.append(measure(one))
                shutil.rmtree(out, ignore_errors=True)
                os.sync()
        best, copy = min(x.seconds for x in own), min(x.seconds for x in copies)
        peak = max(x.peak for x in own) / 2**20
        print(f"{label:28} {best:8.2f} {copy:8.2f} {copy / best:12.2f} {peak:6.0f} MiB", flush=True)


def machine() -> str:
    """CPU model and count, memory, and the Python version."""
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line[:10] == "model name"]
        name = models[0] if models else name
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{name}, {os.cpu_count()} CPUs, {memory:.0f} GiB, Python {platform.python_version()}"


if __name__ == "__main__":
    sys.exit(main())
