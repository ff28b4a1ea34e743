"""How much memory a run may take at most, and how much there is: told before the first byte is written."""

from __future__ import annotations

from pathlib import Path

from nvfp4prep.errors import EnvironmentFault
from nvfp4prep.plan import (
    READ_BYTES,
    Compress,
    Dequantize,
    Divide,
    Item,
    Pack,
    Plan,
    RescaleBlocks,
    Step,
    Widen,
    step_reads,
)

_COPIES = 3
"""Of a worker's largest item: as read, in between, as written. Measured in docs/performance.md."""
_BASE = {False: 120 << 20, True: 400 << 20}
"""Python with its libraries; True: torch too."""
_PLANNED = 1 << 10
"""Of each output tensor in a plan."""
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def needed(plan: Plan, workers: int) -> int:
    """An upper bound of the bytes that running a plan takes: what is loaded, and each worker's largest item."""
    torch = any(not _is_plain(step) for item in plan.items for step in item.steps)
    largest = max((_held(item) for item in plan.items), default=0)
    return _BASE[torch] + _PLANNED * len(plan.outputs) + _COPIES * workers * largest


def available() -> int | None:
    """Bytes that this process may still take, by the kernel's and its control group's account; None if unknown."""
    found = [value for value in (_system(), _group()) if value is not None]
    return min(found, default=None)


def check_memory(plan: Plan, workers: int) -> None:
    """Raise EnvironmentFault when a run would take more memory than there is."""
    there, most = available(), needed(plan, workers)
    if there is not None and there < most:
        fewer = next((count for count in range(workers - 1, 0, -1) if needed(plan, count) <= there), None)
        advice = f"use --workers {fewer}" if fewer else f"even one worker needs up to {needed(plan, 1) >> 20:,} MiB"
        raise EnvironmentFault(
            f"memory: {there >> 20:,} MiB available, up to {most >> 20:,} MiB needed for {workers} workers; {advice}"
        )


def _is_plain(step: Step) -> bool:
    return not isinstance(step, Pack | Compress | Dequantize | Divide | RescaleBlocks)


def _held(item: Item) -> int:
    """Bytes of the source, as tensors in memory, that a worker holds for an item."""
    return max((_held_by(step) for step in item.steps), default=0)


def _held_by(step: Step) -> int:
    match step:
        case Pack() | Compress():
            return step_reads(step)
        case Dequantize():
            return 4 * step.linear.rows * step.linear.columns
        case Divide():
            return 2 * step.tensor.nbytes
        case Widen():
            return 3 * min(step.tensor.nbytes, READ_BYTES)
        case _:
            return READ_BYTES


def _system() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _group() -> int | None:
    """What a control group (version 2) leaves; page cache counts as used there, but gives way."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(stat["file"])
    except (OSError, ValueError, KeyError):
        return None
