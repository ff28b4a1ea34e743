"""Peak memory by the operating system's own figures: bounded, and the same for four times the input."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import bench
import pytest
from runner import run

from nvfp4prep import convert, memory
from nvfp4prep.checkpoint import read_checkpoint
from nvfp4prep.options import Options
from nvfp4prep.plan import Pack

MIB, GIB = 1 << 20, 1 << 30
WORKERS = 2
SIZES = (GIB // 4, GIB)
ALIKE = 1.1
SLACK = 24 * MIB  # the larger header and plan


SMALL_PARENT = """
import os, sys
pid = os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def peak(command: list[str]) -> int:
    """Peak RSS of a command, in bytes. Of a process this large it would inherit the figure from before its exec."""
    done = subprocess.run([sys.executable, "-c", SMALL_PARENT, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A quarter of a GiB and a GiB of real geometry, deleted at the end."""
    folder = tmp_path_factory.mktemp("sizes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "EXPERTS", 32)
        patch.setattr(bench, "VOCABULARY", 1024)
        for size in SIZES:
            bench.generate(folder / str(size), size, split=False)
    small, large = (folder / str(size) for size in SIZES)
    stored = [sum(path.stat().st_size for path in one.iterdir()) for one in (small, large)]
    assert stored[0] < 0.3 * GIB and stored[1] > 0.95 * GIB
    yield small, large
    shutil.rmtree(folder)


@pytest.mark.parametrize("target", ["hf", "compressed-tensors", "flashinfer-trtllm", "vllm-marlin"])
def test_peak_memory_does_not_grow_with_the_input(sources: tuple[Path, Path], tmp_path: Path, target: str) -> None:
    command = [sys.executable, "-m", "nvfp4prep", "convert", "-q", "--no-smoke", "--workers", str(WORKERS)]
    peaks = []
    for source in sources:
        peaks.append(peak([*command, str(source), str(tmp_path / "out"), "--target", target]))
        shutil.rmtree(tmp_path / "out")
    small, large = peaks
    assert large < ALIKE * small + SLACK, [peak // MIB for peak in peaks]
    expert = 3 * bench.INTERMEDIATE * bench.HIDDEN * 9 // 16
    assert large < 600 * MIB + 3 * WORKERS * expert
    packed = convert.decide(read_checkpoint(str(sources[1])), Options(target))
    assert large < memory.needed(packed.plan, WORKERS), "the preflight tells an upper bound"


# --- before the first byte -------------------------------------------------------------------------------------------


def test_too_little_memory(checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the numbers, and with a number of workers that would do."""
    source = checkpoint("qwen3moe-nvfp4-perexpert")
    plan = convert.decide(read_checkpoint(str(source)), Options("flashinfer-trtllm")).plan
    arguments = ("convert", source, tmp_path / "out", "--target", "flashinfer-trtllm", "--no-smoke", "--workers", "64")
    monkeypatch.setattr(memory, "available", lambda: memory.needed(plan, 3))
    refused = run(*arguments)
    assert refused.code == 4
    numbers = f"{memory.needed(plan, 3) >> 20:,} MiB available, up to {memory.needed(plan, 64) >> 20:,} MiB needed"
    assert numbers in refused.stderr and "use --workers 3" in refused.stderr
    monkeypatch.setattr(memory, "available", lambda: memory.needed(plan, 1) - 1)
    assert "even one worker needs" in run(*arguments).stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-perexpert", "llama4-nvfp4"])
def test_a_worker_holds_one_expert(checkpoint: Callable[[str], Path], name: str) -> None:
    source = read_checkpoint(str(checkpoint(name)))
    plan = convert.decide(source, Options("vllm-marlin")).plan
    moe = source.schema.moe_layers[0]
    layer = sum(linear.params[param].nbytes for linear in (*moe.w13, *moe.w2) for param in ("weight", "weight_scale"))
    items = [item for item in plan.items if isinstance(item.steps[0], Pack)]
    assert len(items) == sum(moe.expert_count for moe in source.schema.moe_layers)
    one = replace(plan, items=tuple(items))
    assert memory.needed(one, 5) - memory.needed(one, 2) == 3 * 3 * (layer // moe.expert_count)


def test_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller of the system's and the control group's figures, whose page cache gives way."""
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.available() is None
    (tmp_path / "meminfo").write_text("MemTotal: 4096 kB\nMemAvailable:    1024 kB\n")
    assert memory.available() == MIB
    for name, text in (("max", "900000\n"), ("current", "800000\n"), ("stat", "anon 1\nfile 100000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert memory.available() == 200_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() == MIB
