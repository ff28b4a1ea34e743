"""Peak memory by the operating system's own figures: bounded, and the same for four times the input."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import bench
import pytest
from runner import run

from nvfp4prep import convert, memory
from nvfp4prep.checkpoint import read_checkpoint
from nvfp4prep.options import Options

MIB, GIB = 1 << 20, 1 << 30
WORKERS = 2
SIZES = (GIB // 4, GIB)
ALIKE = 1.1
SLACK = 24 * MIB  # the larger header and plan


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
        peaks.append(bench.measure([*command, str(source), str(tmp_path / "out"), "--target", target]).peak)
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
