"""Shards that are elsewhere, on disk for as long as a run needs them: fetched in order, read ahead, given up when done.

They lie in files without names, on the disk of OUT: the space is free again when the process ends, however it ends,
and nothing is left to clean up.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from nvfp4prep.errors import EnvironmentFault, Stopped
from nvfp4prep.schedule import by_shards

FETCHERS = 8
"""Requests at a time."""
PIECE_BYTES = 1 << 27
"""Of a shard asked for at once. Each piece takes a request to the Hub, which limits them."""
BLOCK_BYTES = 1 << 23
"""Of a map fetched at once: a layer is a few gigabytes, and what lies beside a tensor is looked at next."""
_POLL = 0.1
"""Seconds after which one who waits for a shard looks whether the run has ended."""


class Fetch(Protocol):
    """Brings bytes of a file from elsewhere."""

    def __call__(
        self, file: str, start: int, length: int, take: Callable[[int, bytes], None], stop: threading.Event
    ) -> None:
        """Hand `length` bytes at `start` to `take`, in pieces with the place of each. Raises EnvironmentFault."""


# --- for a run --------------------------------------------------------------------------------------------------------


def peak_bytes(order: Sequence[int], needs: Mapping[int, Collection[str]], sizes: Mapping[str, int]) -> int:
    """The most bytes of shards that are needed at a time, one item after another.

    Args:
        order: of the items.
        needs: the shards that each item reads.
        sizes: of shards that have to be fetched; all others take no room.
    """
    left = Counter(file for files in needs.values() for file in files)
    held = peak = 0
    seen: set[str] = set()
    for number in order:
        for file in needs[number]:
            if file not in seen:
                seen.add(file)
                held += sizes.get(file, 0)
        peak = max(peak, held)
        for file in needs[number]:
            left[file] -= 1
            if not left[file]:
                held -= sizes.get(file, 0)
    return peak


def most_bytes(peak: int, sizes: Mapping[str, int], needed: Collection[str]) -> int:
    """The most bytes that a Spool holds: what a run needs at a time, and one shard read ahead."""
    wanted = [sizes[file] for file in needed if file in sizes]
    return min(peak + max(wanted, default=0), sum(wanted))


class Spool:
    """Descriptors of shards for the items of a run. Asking for one waits until all of the shard is there.

    Shards are fetched in the order in which `order` first needs them, each once, and only while there is room for
    it beside those that unfinished items still need. That is always so for the next one that the first unfinished item
    waits for: all that are held then are needed by it or by items after it, which is within the order's peak.
    """

    def __init__(
        self,
        needs: Mapping[int, Collection[str]],
        sizes: Mapping[str, int],
        open_here: Callable[[str], int],
        fetch: Fetch,
        folder: Path,
        stop: threading.Event,
    ) -> None:
        """
        Args:
            needs: the shards that each item reads.
            sizes: of the shards to fetch.
            open_here: opens any other.
            fetch: brings bytes.
            folder: on whose disk they lie meanwhile.
            stop: set when the run is to end.
        """
        self.order = by_shards(needs)
        self._needs, self._sizes = needs, sizes
        self._open_here, self._fetch, self._folder, self._stop = open_here, fetch, folder, stop
        self._uses = Counter(file for files in needs.values() for file in files)
        self._limit = most_bytes(peak_bytes(self.order, needs, sizes), sizes, self._uses)
        self._waiting = deque(dict.fromkeys(file for number in self.order for file in sorted(needs[number])))
        self._changed = threading.Condition()
        self._descriptors: dict[str, int] = {}
        self._missing: dict[str, int] = {}
        """Pieces yet to come of each shard that was begun."""
        self._failure: BaseException | None = None
        self._held = 0
        self._pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="nvfp4prep-fetch")
        with self._changed:
            self._admit()

    def __getitem__(self, file: str, /) -> int:
        """A shard's descriptor, once all of it is there.

        Raises:
            EnvironmentFault: it, or one before it, can't be had.
            Stopped: the run has ended.
            ValueError: no unfinished item reads it.
        """
        with self._changed:
            if not self._uses[file]:
                raise ValueError(f"{file}: read by an item that is not known to need it")
            while file not in self._descriptors or self._missing[file]:
                if self._stop.is_set():
                    raise Stopped
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(_POLL)
            return self._descriptors[file]

    def done(self, number: int) -> None:
        """Give up the shards that no other unfinished item needs."""
        with self._changed:
            for file in self._needs[number]:
                self._uses[file] -= 1
                self._give_up(file)
            self._admit()

    def close(self) -> None:
        """Give up all of them, and what is still on its way. Waits no longer than a request takes."""
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        with self._changed:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def _give_up(self, file: str) -> None:
        """Close a shard, unless it is needed, or not begun, or pieces of it are on their way."""
        if not self._uses[file] and not self._missing.get(file, 1):
            os.close(self._descriptors.pop(file))
            del self._missing[file]
            self._held -= self._sizes.get(file, 0)

    def _admit(self) -> None:
        """Begin to fetch shards, as many as there is room for."""
        while self._waiting and self._failure is None and not self._stop.is_set():
            file = self._waiting[0]
            size = self._sizes.get(file, 0)
            if self._uses[file] and self._held + size > self._limit:
                return
            self._waiting.popleft()
            if self._uses[file]:
                try:
                    self._begin(file, size)
                except EnvironmentFault as error:
                    self._fail(error)

    def _begin(self, file: str, size: int) -> None:
        if file not in self._sizes:
            self._descriptors[file], self._missing[file] = self._open_here(file), 0
            return
        self._descriptors[file] = descriptor = unnamed_file(self._folder)
        self._held += size
        pieces = [(at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]
        self._missing[file] = len(pieces)
        for start, length in pieces:
            self._pool.submit(self._bring, file, descriptor, start, length)

    def _bring(self, file: str, descriptor: int, start: int, length: int) -> None:
        try:
            if self._uses[file] and self._failure is None and not self._stop.is_set():
                self._fetch(file, start, length, writer_to(descriptor, file, self._folder), self._stop)
        except BaseException as error:
            with self._changed:
                self._fail(error)
            return
        with self._changed:
            self._missing[file] -= 1
            self._give_up(file)
            self._admit()
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Note why a shard can't be had. No other is begun, and whoever waits for one is told."""
        if self._failure is None:
            self._failure = error
        self._changed.notify_all()


# --- for looking at -----------------------------------------------------------------------------------------------


class SpooledMaps:
    """Maps of files of which only those blocks are there, on disk, that were asked for."""

    def __init__(self, sizes: Mapping[str, int], fetch: Fetch, folder: Path) -> None:
        self._sizes, self._fetch, self._folder = sizes, fetch, folder
        self._maps: dict[str, tuple[int, mmap.mmap]] = {}
        self._there: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def __call__(self, file: str, start: int, length: int) -> mmap.mmap:
        """As `ranges.Maps.__call__`."""
        with self._lock:
            descriptor, whole = self._mapped(file)
            blocks = range(start // BLOCK_BYTES, -(-(start + length) // BLOCK_BYTES))
            missing = [block for block in blocks if (file, block) not in self._there]
            if missing:
                self._bring(file, descriptor, missing)
            return whole

    def _mapped(self, file: str) -> tuple[int, mmap.mmap]:
        if file not in self._maps:
            descriptor = unnamed_file(self._folder)
            os.ftruncate(descriptor, self._sizes[file])
            self._maps[file] = descriptor, mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE)
        return self._maps[file]

    def _bring(self, file: str, descriptor: int, blocks: Sequence[int]) -> None:
        stop = threading.Event()
        take = writer_to(descriptor, file, self._folder)

        def bring(block: int) -> None:
            start = block * BLOCK_BYTES
            self._fetch(file, start, min(BLOCK_BYTES, self._sizes[file] - start), take, stop)

        with ThreadPoolExecutor(min(FETCHERS, len(blocks))) as pool:
            coming: list[Future[None]] = [pool.submit(bring, block) for block in blocks]
            try:
                for block, future in zip(blocks, coming, strict=True):
                    future.result()
                    self._there.add((file, block))
            finally:
                stop.set()
                pool.shutdown(cancel_futures=True)

    def __del__(self) -> None:
        for descriptor, _ in self._maps.values():
            os.close(descriptor)


# --- files ------------------------------------------------------------------------------------------------------------


def unnamed_file(folder: Path) -> int:
    """A descriptor of a new file on a folder's disk that no name leads to: it is gone when it is closed.

    Raises:
        EnvironmentFault: it can't be made.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix=".nvfp4prep-spool-") as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise EnvironmentFault(f"{folder}: no file can be made there: {error.strerror}") from None


def writer_to(descriptor: int, file: str, folder: Path) -> Callable[[int, bytes], None]:
    """Writes bytes of a shard to their place in a file. It raises EnvironmentFault."""

    def take(position: int, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(descriptor, view, position)
                view = view[written:]
                position += written
        except OSError as error:
            raise EnvironmentFault(
                f"{file}: can't be kept in {folder} until it is converted: {error.strerror}; free space and run again"
            ) from None

    return take
