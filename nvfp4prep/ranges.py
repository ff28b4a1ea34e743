"""Byte ranges of files: read whole or not at all, from descriptors, through a `Reader`, or as memory maps."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from nvfp4prep.errors import EnvironmentFault

T = TypeVar("T")
R = TypeVar("R")


def read_range(descriptor: int, file: str, start: int, length: int) -> bytes:
    """`length` bytes at `start`. Raises EnvironmentFault when the file ends before or can't be read."""
    parts: list[bytes] = []
    while length:
        try:
            part = os.pread(descriptor, length, start)
        except OSError as error:
            raise _failed(file, start, error) from None
        if not part:
            raise _ended(file, start, length)
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_into(descriptor: int, file: str, start: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes from `start`. Raises as `read_range`."""
    while buffer:
        try:
            count = os.preadv(descriptor, [buffer], start)
        except OSError as error:
            raise _failed(file, start, error) from None
        if not count:
            raise _ended(file, start, len(buffer))
        buffer = buffer[count:]
        start += count


def _failed(file: str, start: int, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(f"{file}: reading at byte {start} failed: {error.strerror}")


def _ended(file: str, start: int, missing: int) -> EnvironmentFault:
    return EnvironmentFault(f"{file}: nothing at byte {start}, {missing} bytes missing; it changed while being read")


class Reader(Protocol):
    """Reads byte ranges of a source's shards, from any thread, wherever the shards are."""

    gap: int
    """Up to how many bytes between two ranges cost less to read along than a second read."""

    def read(self, file: str, start: int, length: int) -> bytes:
        """`length` bytes of a shard at `start`. Raises EnvironmentFault."""

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """What `work` makes of each item, in order; several at a time where reads take long to answer."""


class LocalReader:
    """A Reader of files on disk. The first few stay open until the end, others are opened for each read: there may be
    more of them than a process may have open."""

    gap = 1 << 16
    _KEPT = 16

    def __init__(self, open_shard: Callable[[str], int]) -> None:
        self._open_shard = open_shard
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def read(self, file: str, start: int, length: int) -> bytes:
        """As `Reader.read`."""
        with self._lock:
            if file not in self._descriptors and len(self._descriptors) < self._KEPT:
                self._descriptors[file] = self._open_shard(file)
            kept = self._descriptors.get(file)
        if kept is not None:
            return read_range(kept, file, start, length)
        descriptor = self._open_shard(file)
        try:
            return read_range(descriptor, file, start, length)
        finally:
            os.close(descriptor)

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """As `Reader.map`, one at a time."""
        return map(work, items)

    def close(self) -> None:
        """Close every file."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()


class Descriptors(Protocol):
    """File descriptors of shards, by name."""

    def __getitem__(self, file: str, /) -> int: ...


@dataclass(frozen=True)
class OpenShards:
    """Shards open for the items of a run.

    `order` are the numbers of the items as they best begin; `done` is told each that ended, from any thread.
    """

    descriptors: Descriptors
    order: Sequence[int]
    done: Callable[[int], None]


class Maps(Protocol):
    """Memory maps of shards: only what is looked at becomes resident."""

    def __call__(self, file: str, start: int, length: int) -> mmap.mmap:
        """A map of the whole shard, in which at least these bytes are there. Raises EnvironmentFault."""


class LocalMaps:
    """Maps of files on disk."""

    def __init__(self, open_shard: Callable[[str], int]) -> None:
        self._open_shard = open_shard
        self._maps: dict[str, mmap.mmap] = {}

    def __call__(self, file: str, start: int, length: int) -> mmap.mmap:
        """As `Maps.__call__`."""
        if file not in self._maps:
            descriptor = self._open_shard(file)
            try:
                self._maps[file] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
            finally:
                os.close(descriptor)
        return self._maps[file]
