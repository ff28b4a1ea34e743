#!/usr/bin/env python3
"""Measure planning on a checkpoint of DeepSeek-R1's shape: wall time and peak memory, each in a fresh process.

Usage: bench_plan.py [--layers N] [--experts N] [--runs N] [--keep DIR] [--profile]

The checkpoint has real safetensors headers over sparse files: some 400 GB in size, a few MB on disk. Only the scalar
scales are really written. Every input scale and every gate/up pair differs, the most work that scales can make. Routed
and shared experts and dense MLPs are NVFP4; attention, router, embeddings and the MTP layer's own projections are BF16.

Exit codes: 0 the goal is met, or the size is not the default one; 1 it is missed, or a command failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOAL_SECONDS, GOAL_BYTES = 15.0, 1 << 30
LAYERS, EXPERTS, DENSE = 61, 256, 3
HIDDEN, INTERMEDIATE, MOE_INTERMEDIATE, VOCABULARY = 7168, 18432, 2048, 129280
HEADS, Q_RANK, KV_RANK, ROPE, NOPE, VALUE = 128, 1536, 512, 64, 128, 128
SHARD_BYTES = 2_530_000_000
ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "U8": 1}
INDEX = "model.safetensors.index.json"
PRODUCER = {"name": "modelopt", "version": "0.47.0"}

Spec = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


# --- the checkpoint --------------------------------------------------------------------------------------------------


def nvfp4(module: str, rows: int, columns: int) -> Iterator[Spec]:
    """An NVFP4 linear, as ModelOpt stores it."""
    yield f"{module}.input_scale", "F32", ()
    yield f"{module}.weight", "U8", (rows, columns // 2)
    yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{module}.weight_scale_2", "F32", ()


def mlp(module: str, intermediate: int) -> Iterator[Spec]:
    yield from nvfp4(f"{module}.down_proj", HIDDEN, intermediate)
    yield from nvfp4(f"{module}.gate_proj", intermediate, HIDDEN)
    yield from nvfp4(f"{module}.up_proj", intermediate, HIDDEN)


def attention(module: str) -> Iterator[Spec]:
    """MLA, left in BF16."""
    for name, shape in (
        ("kv_a_layernorm", (KV_RANK,)),
        ("kv_a_proj_with_mqa", (KV_RANK + ROPE, HIDDEN)),
        ("kv_b_proj", (HEADS * (NOPE + VALUE), KV_RANK)),
        ("o_proj", (HIDDEN, HEADS * VALUE)),
        ("q_a_layernorm", (Q_RANK,)),
        ("q_a_proj", (Q_RANK, HIDDEN)),
        ("q_b_proj", (HEADS * (NOPE + ROPE), Q_RANK)),
    ):
        yield f"{module}.{name}.weight", "BF16", shape


def model(layers: int, experts: int) -> Iterator[Spec]:
    """All tensors: `layers` layers, dense ones first, then one MTP layer."""
    yield "model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)
    for layer in range(layers + 1):
        path = f"model.layers.{layer}"
        yield f"{path}.input_layernorm.weight", "BF16", (HIDDEN,)
        yield f"{path}.post_attention_layernorm.weight", "BF16", (HIDDEN,)
        yield from attention(f"{path}.self_attn")
        if layer < min(DENSE, layers):
            yield from mlp(f"{path}.mlp", INTERMEDIATE)
            continue
        yield f"{path}.mlp.gate.weight", "BF16", (experts, HIDDEN)
        yield f"{path}.mlp.gate.e_score_correction_bias", "F32", (experts,)
        for expert in range(experts):
            yield from mlp(f"{path}.mlp.experts.{expert}", MOE_INTERMEDIATE)
        yield from mlp(f"{path}.mlp.shared_experts", MOE_INTERMEDIATE)
    mtp = f"model.layers.{layers}"
    yield f"{mtp}.eh_proj.weight", "BF16", (HIDDEN, 2 * HIDDEN)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{mtp}.{norm}.weight", "BF16", (HIDDEN,)
    for copy in ("embed_tokens", "shared_head.head"):
        yield f"{mtp}.{copy}.weight", "BF16", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCABULARY, HIDDEN)


def tensor_bytes(spec: Spec) -> int:
    return ITEM_BYTES[spec[1]] * math.prod(spec[2])


def shards(tensors: Sequence[Spec], limit: int) -> list[list[Spec]]:
    """Cut in order of the model; inside a shard in safetensors' order, larger dtypes first, then by name."""
    cut: list[list[Spec]] = [[]]
    held = 0
    for spec in tensors:
        if cut[-1] and held + tensor_bytes(spec) > limit:
            cut.append([])
            held = 0
        cut[-1].append(spec)
        held += tensor_bytes(spec)
    for shard in cut:
        shard.sort(key=lambda spec: (-ITEM_BYTES[spec[1]], spec[1], spec[0]))
    return cut


def write_shard(path: Path, specs: Sequence[Spec], values: random.Random) -> None:
    """A sparse file: the header, scalar F32 scales, and zeros that take no space."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    scalars: list[tuple[int, float]] = []
    for spec in specs:
        name, dtype, shape = spec
        if not shape:
            scalars.append((position, math.exp(values.gauss(-7, 1))))
        end = position + tensor_bytes(spec)
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": (position, end)}
        position = end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for offset, value in scalars:
            file.seek(8 + len(header) + offset)
            file.write(struct.pack("<f", value))
        file.truncate(8 + len(header) + position)


def write_configs(folder: Path, layers: int, experts: int, excluded: list[str]) -> None:
    args = {"dynamic": False, "group_size": 16, "num_bits": 4, "type": "float"}
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "first_k_dense_replace": min(DENSE, layers),
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "kv_lora_rank": KV_RANK,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": MOE_INTERMEDIATE,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": Q_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "tie_word_embeddings": False,
        "v_head_dim": VALUE,
        "vocab_size": VOCABULARY,
        "quantization_config": {
            "config_groups": {"group_0": {"input_activations": args, "weights": args, "targets": ["Linear"]}},
            "ignore": excluded,
            "quant_algo": "NVFP4",
            "producer": PRODUCER,
            "quant_method": "modelopt",
        },
    }
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": excluded}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": PRODUCER, "quantization": quantization}))


def generate(folder: Path, layers: int, experts: int, shard_bytes: int = SHARD_BYTES) -> None:
    """Write the checkpoint into an existing, empty folder."""
    tensors = list(model(layers, experts))
    cut = shards(tensors, shard_bytes)
    values = random.Random(0)
    weight_map = {}
    for number, specs in enumerate(cut, 1):
        file = f"model-{number:05}-of-{len(cut):05}.safetensors"
        write_shard(folder / file, specs, values)
        weight_map |= {spec[0]: file for spec in specs}
    index = {"metadata": {"total_size": sum(map(tensor_bytes, tensors))}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    excluded = [name.removesuffix(".weight") for name, dtype, shape in tensors if dtype == "BF16" and len(shape) == 2]
    write_configs(folder, layers, experts, excluded)


def is_generated(folder: Path, layers: int, experts: int) -> bool:
    """Whether `generate` finished in this folder with these sizes; it writes the configs last."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    sizes = (config.get("num_hidden_layers"), config.get("n_routed_experts"), config.get("hidden_size"))
    return sizes == (layers, experts, HIDDEN) and (folder / "hf_quant_config.json").is_file()


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Best wall time and largest peak memory of some runs of a command; `error` is its last line when it failed."""

    seconds: float
    peak_bytes: int
    output: str
    error: str | None


# A forked child starts with its parent's peak memory, so the command is started from a process as small as can be.
_TRAMPOLINE = """
import json, resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(sys.argv[1:], capture_output=True)
seconds = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
sizes = [done.returncode, seconds, peak]
sys.stdout.buffer.write(json.dumps(sizes).encode() + b"\\n" + (done.stderr if done.returncode else done.stdout))
"""


def measure(command: Sequence[str], runs: int) -> Measured:
    """Run a command `runs` times, each in a fresh process."""
    times, peaks, output = [], [], ""
    for _ in range(runs):
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRAMPOLINE, *command], stdout=subprocess.PIPE, check=True
        )
        sizes, _, rest = ran.stdout.partition(b"\n")
        output = rest.decode(errors="replace")
        code, seconds, peak = json.loads(sizes)
        times.append(seconds)
        peaks.append(peak * (1 if sys.platform == "darwin" else 1024))
        if code:
            last = (output.strip().splitlines() or [""])[-1]
            return Measured(seconds, max(peaks), "", f"exit {code}: {last[:200]}")
    return Measured(min(times), max(peaks), output, None)


def plan_stages(folder: Path) -> dict[str, float]:
    """Headers, schema and plan alone, in this process; seconds of each."""
    begin = time.perf_counter()
    from nvfp4prep.plan import DEFAULT_SHARD_BYTES, make_plan
    from nvfp4prep.scales import ScalePolicy
    from nvfp4prep.schema import build_schema
    from nvfp4prep.source import read_directory

    seconds: dict[str, float] = {}

    def lap(stage: str) -> None:
        seconds[stage] = time.perf_counter() - begin - sum(seconds.values())

    lap("imports")
    source = read_directory(folder, spec=folder.name, revision=None)
    lap("headers")
    schema = build_schema(source.tensors, json.loads((folder / "config.json").read_bytes()))
    lap("schema")
    make_plan(source.tensors, source.metadata, schema, ScalePolicy(), frozenset(), DEFAULT_SHARD_BYTES)
    lap("plan")
    return seconds


def commands(folder: Path) -> dict[str, list[str]]:
    cli = [sys.executable, "-m", "nvfp4prep"]
    dry = [*cli, "convert", "--dry-run", "--json", str(folder), str(folder) + "-out"]
    return {
        "headers, schema, plan": [sys.executable, __file__, "--stages", str(folder)],
        "convert --dry-run": dry,
        "  --target flashinfer-trtllm": [*dry, "--target", "flashinfer-trtllm", "--w13-scale", "unify"],
        "  --target compressed-tensors": [*dry, "--target", "compressed-tensors"],
        "validate --level headers": [*cli, "validate", "--level", "headers", str(folder)],
        "validate": [*cli, "validate", str(folder)],
        "inspect --json": [*cli, "inspect", "--json", str(folder)],
    }


def machine() -> str:
    """CPU model and count, and the Python version."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line[:10] == "model name"]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} CPUs, Python {platform.python_version()}"


def describe(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    count = len(json.loads((folder / INDEX).read_bytes())["weight_map"])
    apparent = sum(file.stat().st_size for file in files)
    on_disk = sum(file.stat().st_blocks * 512 for file in files)
    return f"{count:,} tensors, {len(files)} shards, {apparent / 1e9:.1f} GB ({on_disk / 1e6:.1f} MB on disk)"


def benchmark(folder: Path, runs: int) -> dict[str, Measured]:
    """Measure every command and print the table."""
    print(f"checkpoint: {describe(folder)}")
    print(f"machine:    {machine()}")
    print(f"\n{'':30} {f'best of {runs}':>10} {'peak RSS':>10}")
    found: dict[str, Measured] = {}
    for label, command in commands(folder).items():
        result = found[label] = measure(command, runs)
        if result.error is not None:
            print(f"{label:30} failed, {result.error}")
            continue
        print(f"{label:30} {result.seconds:8.2f} s {result.peak_bytes / 2**20:6.0f} MiB")
        if label.startswith("headers"):
            stages = json.loads(result.output)
            print("  last run: " + ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in stages.items()))
    return found


def profile(folder: Path) -> None:
    """cProfile of the dry run's own work, by own time and by cumulative time."""
    import cProfile
    import pstats

    from nvfp4prep.convert import prepare
    from nvfp4prep.options import Options

    with cProfile.Profile() as profiler:
        prepare(str(folder), Options())
    for order in ("tottime", "cumulative"):
        pstats.Stats(profiler).strip_dirs().sort_stats(order).print_stats(25)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure planning on a generated checkpoint of DeepSeek-R1's shape.")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"layers, the MTP layer not counted [{LAYERS}]")
    parser.add_argument("--experts", type=int, default=EXPERTS, help=f"routed experts of a layer [{EXPERTS}]")
    parser.add_argument("--runs", type=int, default=3, help="runs of each command; the best time counts [3]")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="generate into DIR and keep it; use it when it is there"
    )
    parser.add_argument("--profile", action="store_true", help="profile the dry run as well")
    parser.add_argument("--stages", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stages:
        print(json.dumps(plan_stages(args.stages)))
        return 0
    if min(args.layers, args.experts, args.runs) < 1:
        parser.error("--layers, --experts and --runs are at least 1")
    with tempfile.TemporaryDirectory(prefix="bench-plan-") as scratch:
        folder = args.keep or Path(scratch) / "checkpoint"
        if folder.is_dir() and any(folder.iterdir()):
            if not is_generated(folder, args.layers, args.experts):
                parser.error(f"{folder} is not empty, and holds no checkpoint of this size")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            generate(folder, args.layers, args.experts)
        found = benchmark(folder, args.runs)
        if args.profile:
            profile(folder)
    if any(result.error for result in found.values()):
        return 1
    if (args.layers, args.experts) != (LAYERS, EXPERTS):
        return 0
    plans = [result for label, result in found.items() if not label.startswith("inspect")]
    met = all(result.seconds < GOAL_SECONDS and result.peak_bytes < GOAL_BYTES for result in plans)
    print(f"\ngoal, a plan in under {GOAL_SECONDS:.0f} s and 1 GiB: {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
