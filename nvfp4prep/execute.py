"""Runs a plan's items on a thread pool: read, transform, write at the planned offset, one bounded buffer per worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field

import xxhash

from nvfp4prep.errors import EnvironmentFault
from nvfp4prep.header import TensorInfo
from nvfp4prep.plan import PIECE_BYTES, Copy, Fill, Item, Plan, RescaleBlocks, Step
from nvfp4prep.scales import RescaleCounts, Resolution
from nvfp4prep.source import Source, read_range
from nvfp4prep.survey import encode_floats
from nvfp4prep.writer import PartialOutput

_READ_BYTES = 1 << 23
_RESCALE_BYTES = 1 << 21


@dataclass
class Outcome:
    """What the workers report: digests by (tensor, piece number), and what rescaling did by tensor."""

    digests: dict[tuple[str, int], bytes] = field(default_factory=dict)
    rescaled: dict[str, RescaleCounts] = field(default_factory=dict)


class Stopped(Exception):
    """A worker saw that another one failed, or that the user interrupted."""


@dataclass(frozen=True)
class _Context:
    source: Source
    plan: Plan
    resolution: Resolution
    output: PartialOutput
    descriptors: Mapping[str, int]
    progress: Callable[[int], None]
    stop: threading.Event
    outcome: Outcome


def execute(
    source: Source,
    plan: Plan,
    resolution: Resolution,
    output: PartialOutput,
    workers: int,
    progress: Callable[[int], None],
) -> Outcome:
    """Run every item.

    Args:
        source, plan, resolution: what to read, where to write it, which values.
        output: opened; its shards are created here.
        workers: threads.
        progress: called with bytes done, from any worker.

    Raises:
        EnvironmentFault: reading or writing failed; the first failure stops the others.
    """
    with ExitStack() as stack:
        descriptors: dict[str, int] = {}
        for file in source.shards:
            descriptors[file] = source.open_shard(file)
            stack.callback(os.close, descriptors[file])
        for shard in plan.shards:
            output.open_shard(shard)
        context = _Context(source, plan, resolution, output, descriptors, progress, threading.Event(), Outcome())
        with ThreadPoolExecutor(workers, thread_name_prefix="nvfp4prep") as pool:
            futures = [pool.submit(_run_item, context, item) for item in plan.items]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                context.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
            failures = [error for future in done if (error := future.exception()) is not None]
            for error in sorted(failures, key=lambda error: isinstance(error, Stopped)):
                raise error
        return context.outcome


def _run_item(context: _Context, item: Item) -> None:
    try:
        for step in item.steps:
            _run_step(context, step)
    except MemoryError:
        raise EnvironmentFault(f"{item.label}: out of memory; use fewer --workers") from None


def _run_step(context: _Context, step: Step) -> None:
    match step:
        case Copy():
            _copy(context, step)
        case Fill():
            data = encode_floats(context.resolution.values[step.name])
            target = context.plan.outputs[step.name]
            context.output.write(target.file, target.start, data)
            context.outcome.digests[step.name, 0] = digest(data)
            context.progress(len(data))
        case RescaleBlocks():
            if step.tensor.name in context.resolution.rescales:
                _rescale(context, step.tensor)
            else:
                for at in range(0, step.tensor.nbytes, PIECE_BYTES):
                    _copy(context, Copy(step.tensor, at, min(PIECE_BYTES, step.tensor.nbytes - at)))


def _copy(context: _Context, step: Copy) -> None:
    tensor, target = step.tensor, context.plan.outputs[step.tensor.name]
    hasher = xxhash.xxh3_128()
    for at in range(step.start, step.start + step.length, _READ_BYTES):
        if context.stop.is_set():
            raise Stopped
        length = min(_READ_BYTES, step.start + step.length - at)
        data = read_range(context.descriptors[tensor.file], tensor.file, tensor.start + at, length)
        context.output.write(target.file, target.start + at, data)
        hasher.update(data)
        context.progress(length)
    context.outcome.digests[tensor.name, step.start // PIECE_BYTES] = hasher.digest()


def _rescale(context: _Context, tensor: TensorInfo) -> None:
    import torch

    from nvfp4prep.blockscales import rescale_codes

    rescale, target = context.resolution.rescales[tensor.name], context.plan.outputs[tensor.name]
    experts = len(rescale.new)
    columns = tensor.shape[-1]
    per_expert = tensor.nbytes // experts
    chunk = max(1, _RESCALE_BYTES // columns) * columns
    counts = RescaleCounts()
    pieces = PieceHasher()
    for expert in range(experts):
        for at in range(expert * per_expert, (expert + 1) * per_expert, chunk):
            if context.stop.is_set():
                raise Stopped
            length = min(chunk, (expert + 1) * per_expert - at)
            data = bytearray(read_range(context.descriptors[tensor.file], tensor.file, tensor.start + at, length))
            counts += rescale_codes(torch.frombuffer(data, dtype=torch.uint8).view(-1, columns), rescale, expert)
            context.output.write(target.file, target.start + at, data)
            pieces.update(data)
            context.progress(length)
    for number, piece in enumerate(pieces.digests()):
        context.outcome.digests[tensor.name, number] = piece
    context.outcome.rescaled[tensor.name] = counts


# --- digests --------------------------------------------------------------------------------------------------------


def digest(data: bytes) -> bytes:
    """XXH3-128 of bytes."""
    return xxhash.xxh3_128_digest(data)


class PieceHasher:
    """Hashes a tensor's bytes, given in order, in pieces of PIECE_BYTES."""

    def __init__(self) -> None:
        self._done: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._held = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        while view:
            part = view[: PIECE_BYTES - self._held]
            self._open.update(part)
            self._held += len(part)
            view = view[len(part) :]
            if self._held == PIECE_BYTES:
                self._done.append(self._open.digest())
                self._open, self._held = xxhash.xxh3_128(), 0

    def digests(self) -> list[bytes]:
        return [*self._done, self._open.digest()] if self._held else list(self._done)


def shard_digest(plan: Plan, outcome: Outcome, file: str) -> str:
    """A file's digest: XXH3-128 over the digests of its header and of its tensors' pieces, in file order."""
    shard = next(shard for shard in plan.shards if shard.file == file)
    whole = xxhash.xxh3_128(digest(shard.header))
    for name, _, _ in shard.tensors:
        for number in range(-(-plan.outputs[name].nbytes // PIECE_BYTES)):
            whole.update(outcome.digests[name, number])
    return f"xxh3-128:{whole.hexdigest()}"
