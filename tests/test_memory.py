"""Peak memory by the operating system's own figures: bounded, and the same for four times the input."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import bench
import pytest

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
