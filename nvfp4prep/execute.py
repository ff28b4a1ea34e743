"""Runs a plan's items on a thread pool: read, transform, write at the planned offset, one bounded buffer per worker."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import xxhash

from nvfp4prep.errors import CheckFailed, EnvironmentFault, InputRefused, Stopped
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.journal import Outcome, finished, line
from nvfp4prep.libc import keep_freed_memory
from nvfp4prep.plan import (
    PIECE_BYTES,
    READ_BYTES,
    Compress,
    Constant,
    Copy,
    Dequantize,
    Divide,
    Fill,
    Item,
    Pack,
    Parameters,
    Plan,
    RescaleBlocks,
    Step,
    Unpack,
    Widen,
    shards_read,
)
from nvfp4prep.ranges import Descriptors
from nvfp4prep.scales import RescaleCounts, Resolution
from nvfp4prep.source import Source, opened_shards, read_part, read_part_into
from nvfp4prep.survey import encode_floats
from nvfp4prep.unusable import unusable
from nvfp4prep.widening import widened
from nvfp4prep.writer import PartialOutput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from nvfp4prep.folding import Fold
    from nvfp4prep.packing import PackJob

_RESCALE_BYTES = 1 << 21
"""Of block scales in one go: their counts take eight times that."""
COMMIT_SECONDS = 5.0
"""Between two moments from which a killed run goes on."""


@dataclass(frozen=True)
class Job:
    """One target of a run: how its scales were resolved, how it packs experts (None: not), folds by MoE path."""

    resolution: Resolution
    pack: PackJob | None = None
    folds: Mapping[str, Fold] = field(default_factory=dict)


class Output(Protocol):
    """Where steps write."""

    def write(self, file: str, position: int, data: bytes | bytearray | memoryview) -> None: ...


class _Nowhere:
    def write(self, file: str, position: int, data: bytes | bytearray | memoryview) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Context:
    """What a step may use: where to read, where to write, what to report to."""

    source: Source
    plan: Plan
    jobs: Sequence[Job]
    output: Output
    descriptors: Descriptors
    progress: Callable[[int], None]
    stop: threading.Event
    outcome: Outcome
    lock: threading.Lock
    local: threading.local

    def read(self, tensor: TensorInfo, start: int, length: int) -> bytes:
        """Bytes of a source tensor, read once per item for all targets. Raises Stopped when the run ends."""
        if self.stop.is_set():
            raise Stopped
        shared: dict[tuple[str, int, int], bytes] | None = self.local.shared
        key = (tensor.name, start, length)
        if shared is not None and key in shared:
            return shared[key]
        data = read_part(self.descriptors[tensor.file], tensor, start, length)
        self._note_unusable(tensor, start, data)
        if shared is not None:
            shared[key] = data
        return data

    def read_own(self, tensor: TensorInfo, start: int, length: int) -> NDArray[np.uint8]:
        """As `read`, in memory that the caller may change."""
        import numpy as np

        if self.local.shared is not None:
            return np.frombuffer(bytearray(self.read(tensor, start, length)), np.uint8)
        if self.stop.is_set():
            raise Stopped
        data = np.empty(length, np.uint8)
        read_part_into(self.descriptors[tensor.file], tensor, start, data.data)
        self._note_unusable(tensor, start, data.data)
        return data

    def _note_unusable(self, tensor: TensorInfo, start: int, data: bytes | memoryview) -> None:
        for rule, count in unusable(tensor, data).items():
            self.outcome.unusable[rule, tensor.name, start] = count

    def put(self, key: str, data: bytes | bytearray | memoryview, piece: int = 0) -> None:
        """Write and hash a whole output tensor, or slice `piece` of a stacked one."""
        target = self.plan.outputs[key]
        self.output.write(target.file, target.start + piece * len(data), data)
        step = len(data) if key in self.plan.stacked else PIECE_BYTES
        view = memoryview(data).cast("B")
        for number, at in enumerate(range(0, len(data), step or 1)):
            self.outcome.digests[key, piece + number] = xxhash.xxh3_128_digest(view[at : at + step])
        self.wrote(len(data))

    def wrote(self, count: int) -> None:
        """Bytes that a step wrote."""
        self.outcome.written += count
        self.progress(count)


def execute(
    source: Source,
    plan: Plan,
    jobs: Sequence[Job],
    output: PartialOutput,
    workers: int,
    progress: Callable[[int], None],
    mine: Collection[int] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Outcome:
    """Run every item that an earlier run did not finish.

    Args:
        source, plan, jobs: what to read, where to write it, which values.
        output: opened; its shards are created here.
        workers: threads.
        progress: called with bytes written, from any worker.
        mine: the items, by number, that are to be run at all; None: all.
        elsewhere: runs items on other machines; None runs them here.

    Raises:
        EnvironmentFault: reading or writing failed; the first failure stops the others.
    """
    kept = output.open_shards(plan.shards)
    done = finished(output.journalled if kept else (), plan)
    whole = Outcome()
    for outcome in done.values():
        whole.add(outcome)
    if whole.written:
        progress(whole.written)
    positions = {key: number for number, key in enumerate(plan.outputs)}
    todo = [number for number in range(len(plan.items)) if number not in done and (mine is None or number in mine)]
    if elsewhere is not None:
        _collect(_with_progress(elsewhere(todo), progress), whole, output, positions)
        return whole
    with reported(source, plan, jobs, output, workers, progress, todo) as reports:
        _collect(reports, whole, output, positions)
    return whole


def rehearse(
    source: Source, plan: Plan, jobs: Sequence[Job], workers: int, kinds: tuple[type[Step], ...]
) -> list[Finding]:
    """What steps of some kinds would refuse: they compute as in a run, and nothing is written.

    Scales that are unusable in themselves are left out; other rules tell of them.

    Args:
        source, plan, jobs, workers: as for `execute`.
        kinds: of steps; all others are left out.

    Raises:
        EnvironmentFault: I/O.
    """
    rest = [replace(item, steps=tuple(step for step in item.steps if isinstance(step, kinds))) for item in plan.items]
    stop, lock, local = threading.Event(), threading.Lock(), threading.local()

    with opened_shards(source) as descriptors, one_thread_each(), ThreadPoolExecutor(workers) as pool:

        def refused(item: Item) -> tuple[Finding, ...]:
            context = Context(
                source, plan, jobs, _Nowhere(), descriptors, lambda count: None, stop, Outcome(), lock, local
            )
            try:
                _run_item(context, item)
            except InputRefused as error:
                return error.findings
            return ()

        return [finding for found in pool.map(refused, [item for item in rest if item.steps]) for finding in found]


Elsewhere = Callable[[Sequence[int]], Iterator[tuple[int, Outcome]]]
"""Items by number -> what each reported, in any order, once it is on disk."""


def _with_progress(
    reports: Iterator[tuple[int, Outcome]], progress: Callable[[int], None]
) -> Iterator[tuple[int, Outcome]]:
    for number, outcome in reports:
        progress(outcome.written)
        yield number, outcome


@contextmanager
def reported(
    source: Source,
    plan: Plan,
    jobs: Sequence[Job],
    output: PartialOutput,
    workers: int,
    progress: Callable[[int], None],
    todo: Sequence[int],
) -> Iterator[Iterator[tuple[int, Outcome]]]:
    """Run items here, and give what each reported as it ends. The iterator raises the first failure."""
    keep_freed_memory()
    stop = threading.Event()
    with source.opened(todo, lambda number: shards_read(plan.items[number]), workers, stop) as shards:
        lock, local = threading.Lock(), threading.local()
        context = Context(source, plan, jobs, output, shards.descriptors, progress, stop, Outcome(), lock, local)
        queue: SimpleQueue[tuple[int, Outcome | BaseException]] = SimpleQueue()
        with one_thread_each(), ThreadPoolExecutor(workers, thread_name_prefix="nvfp4prep") as pool:
            for number in shards.order:
                pool.submit(_report, context, number, queue, shards.done)
            try:
                yield _succeeded(queue, len(todo))
            finally:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)


def _succeeded(queue: SimpleQueue[tuple[int, Outcome | BaseException]], count: int) -> Iterator[tuple[int, Outcome]]:
    for _ in range(count):
        number, report = queue.get()
        if isinstance(report, Stopped):
            continue  # another one says why
        if isinstance(report, BaseException):
            raise report
        yield number, report


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Threads started inside compute on their own: torch would give each as many more as there are CPUs."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _report(
    context: Context,
    number: int,
    reports: SimpleQueue[tuple[int, Outcome | BaseException]],
    done: Callable[[int], None],
) -> None:
    """Run an item, and put what it reported, or why it failed, into the queue."""
    outcome = Outcome()
    try:
        _run_item(replace(context, outcome=outcome), context.plan.items[number])
        done(number)
    except BaseException as error:
        reports.put((number, error))
    else:
        reports.put((number, outcome))


def _collect(
    reports: Iterator[tuple[int, Outcome]], whole: Outcome, output: PartialOutput, positions: Mapping[str, int]
) -> None:
    """Gather what items reported; now and then sync what they wrote and journal it.

    What was written is on disk before the journal says so: a machine that loses power must not believe it was. Of a
    share the journal is all that is left.
    """
    fresh: list[bytes] = []
    begun = last = monotonic()
    for number, report in reports:
        whole.add(report)
        fresh.append(line(number, report, positions))
        if monotonic() - last >= COMMIT_SECONDS:
            output.commit(b"".join(fresh))
            fresh.clear()
            last = monotonic()
    if fresh and (output.is_share or last - begun >= COMMIT_SECONDS):
        output.commit(b"".join(fresh))


def _run_item(context: Context, item: Item) -> None:
    shared = len(item.steps) > 1 and any(isinstance(step, Pack) for step in item.steps)
    context.local.shared = {} if shared else None
    try:
        for step in item.steps:
            _run_step(context, step)
    except MemoryError:
        raise EnvironmentFault(f"{item.label}: out of memory; use fewer --workers") from None
    finally:
        context.local.shared = None


def _run_step(context: Context, step: Step) -> None:
    match step:
        case Copy():
            _copy(context, step)
        case Fill():
            context.put(step.key, encode_floats(context.jobs[step.job].resolution.values[step.name]))
        case RescaleBlocks():
            _rescale(context, step)
        case Widen():
            _widen(context, step)
        case Constant():
            context.put(step.key, step.data)
        case Compress() | Dequantize() | Divide():
            from nvfp4prep import compressed_tensors

            compressed_tensors.run(context, step)
        case Pack() | Parameters() | Unpack():
            from nvfp4prep import packing  # torch, only where experts are packed

            packing.run(context, step)


def _copy(context: Context, step: Copy) -> None:
    hasher = xxhash.xxh3_128()
    chunk = READ_BYTES if context.local.shared is None else max(step.length, 1)
    for at in range(step.start, step.start + step.length, chunk):
        data = context.read(step.tensor, at, min(chunk, step.start + step.length - at))
        hasher.update(data)
        for key in step.keys:
            target = context.plan.outputs[key]
            context.output.write(target.file, target.start + at, data)
            context.wrote(len(data))
    for key in step.keys:
        context.outcome.digests[key, step.start // PIECE_BYTES] = hasher.digest()


def _rescale(context: Context, step: RescaleBlocks) -> None:
    tensor, target = step.tensor, context.plan.outputs[step.key]
    rescale = context.jobs[step.job].resolution.rescales.get(tensor.name)
    if rescale is None:
        for at in range(0, tensor.nbytes, PIECE_BYTES):
            _copy(context, Copy(tensor, at, min(PIECE_BYTES, tensor.nbytes - at), (step.key,)))
        return
    import torch

    from nvfp4prep.blockscales import rescale_codes

    experts = len(rescale.new)
    columns = tensor.shape[-1]
    per_expert = tensor.nbytes // experts
    chunk = max(1, _RESCALE_BYTES // columns) * columns
    counts = RescaleCounts()
    pieces = PieceHasher()
    for expert in range(experts):
        for at in range(expert * per_expert, (expert + 1) * per_expert, chunk):
            data = context.read_own(tensor, at, min(chunk, (expert + 1) * per_expert - at))
            counts += rescale_codes(torch.from_numpy(data).view(-1, columns), rescale, expert)
            context.output.write(target.file, target.start + at, data.data)
            pieces.update(data.data)
            context.wrote(len(data))
    for number, piece in enumerate(pieces.digests()):
        context.outcome.digests[step.key, number] = piece
    context.outcome.rescaled[step.job, tensor.name] = counts


def _widen(context: Context, step: Widen) -> None:
    tensor, target = step.tensor, context.plan.outputs[step.key]
    pieces = PieceHasher()
    for at in range(0, tensor.nbytes, READ_BYTES):
        data = widened(tensor.dtype, context.read(tensor, at, min(READ_BYTES, tensor.nbytes - at))).tobytes()
        context.output.write(target.file, target.start + 2 * at, data)
        pieces.update(data)
        context.wrote(len(data))
    for number, piece in enumerate(pieces.digests()):
        context.outcome.digests[step.key, number] = piece


# --- digests --------------------------------------------------------------------------------------------------------


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


def shard_digests(plan: Plan, outcome: Outcome) -> dict[str, str]:
    """Each file's digest: XXH3-128 over the digests of its header and of its tensors' pieces, in file order.

    Pieces are 64 MiB; of tensors stacked over experts, one expert each.

    Raises:
        CheckFailed: a piece was not reported, though its item was: the journal of an earlier run is damaged.
    """
    by_file: dict[str, list[str]] = {shard.file: [] for shard in plan.shards}
    for key, tensor in plan.outputs.items():
        by_file[tensor.file].append(key)
    digests = {}
    for shard in plan.shards:
        whole = xxhash.xxh3_128(xxhash.xxh3_128_digest(shard.header))
        for key in by_file[shard.file]:
            tensor = plan.outputs[key]
            pieces = tensor.shape[0] if key in plan.stacked else -(-tensor.nbytes // PIECE_BYTES)
            for number in range(pieces):
                if (key, number) not in outcome.digests:
                    raise CheckFailed(
                        f"{shard.file}: nobody noted what was written of {tensor.name}: the journal of an earlier run "
                        "is damaged; run again, which begins anew"
                    )
                whole.update(outcome.digests[key, number])
        digests[shard.file] = f"xxh3-128:{whole.hexdigest()}"
    return digests
