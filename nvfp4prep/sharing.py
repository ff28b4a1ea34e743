"""One conversion by several processes that share OUT.partial: each does its share, and `finish` gives OUT its name.

The first process makes OUT.partial, with every shard at its size, and notes what is being made in a file beside it. All
hold the marker's lock together, so that a run that wants it alone is refused meanwhile. Each has a journal of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.options import Options
from nvfp4prep.plan import Shard
from nvfp4prep.writer import (
    PartialOutput,
    destination,
    fault,
    identity,
    in_the_way,
    journal_head,
    journal_lines,
    locked,
    not_known,
    other_shares,
    partial_path,
    plan_of,
    share_path,
)

_PATIENCE = 600.0
"""Seconds to wait for the process that makes OUT.partial: file systems without fallocate take a while."""
_PAUSE = 0.1


@dataclass(frozen=True, slots=True)
class Share:
    """Share `index` of `count`, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


# --- what is being made ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SharedJob:
    """What `finish` must know: the source as named, each target's options, how many shares, whether OUT is replaced."""

    source: str
    targets: tuple[Options, ...]
    shares: int
    overwrite: bool


def job_path(out: Path) -> Path:
    """The file that says what a shared OUT.partial is made of."""
    return share_path(out, "job")


def read_job(out: Path) -> SharedJob:
    """What the first process noted. Raises UsageFault where there is nothing to finish."""
    out = destination(out)
    path = job_path(out)
    try:
        entry = json.loads(path.read_bytes())
        targets = tuple(Options(**one) for one in entry["targets"])
        return SharedJob(entry["source"], targets, entry["shares"], entry["overwrite"])
    except FileNotFoundError:
        there = f"{out} is there already" if os.path.lexists(out) else "there is none"
        raise UsageFault(f"{out}: no conversion by shares to finish (--shard i/n): {there}") from None
    except OSError as error:
        raise fault(path, "can't be read", error) from None
    except (ValueError, KeyError, TypeError):
        raise UsageFault(f"{path}: is no note of this version's; delete {partial_path(out)}, run all shares") from None


# --- the output of one share -----------------------------------------------------------------------------------------


class SharedOutput(PartialOutput):
    """OUT.partial as one of several processes writes it. Leaving it deletes nothing: others may be at work in it."""

    is_share = True

    def __init__(self, out: Path, plan: str, share: Share, job: SharedJob) -> None:
        super().__init__(out, plan)
        self._share, self._job = share, job
        self._journal = share_path(self.out, f"{share.index}-of-{share.count}")
        self._journal_lock = -1
        self.makes_files = False

    def _open(self) -> None:
        for folder in reversed([folder for folder in self.out.parents if not folder.exists()]):
            with suppress(FileExistsError):
                folder.mkdir()
        self._lock = self._joined()
        self._journal_lock = locked(self._journal, f"{self.partial}: share {self._share} is being written already")
        text, head = os.pread(self._journal_lock, os.fstat(self._journal_lock).st_size, 0), journal_head(self._plan)
        self.journalled = journal_lines(text, self._plan)
        if not text.startswith(head):
            os.ftruncate(self._journal_lock, 0)
            os.pwrite(self._journal_lock, head, 0)
        self._journal_end = len(head) + sum(len(line) + 1 for line in self.journalled)
        self._own = identity(self.partial)

    def _joined(self) -> int:
        """The marker's descriptor, locked together with the other shares; alone while OUT.partial is to be made."""
        patience = time.monotonic() + _PATIENCE
        while True:
            descriptor = os.open(self._marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                alone = _try_lock(descriptor, fcntl.LOCK_EX)
                if (alone or _try_lock(descriptor, fcntl.LOCK_SH)) and _is(self._marker, descriptor):
                    found = identity(self.partial)
                    if plan_of(descriptor, found and found[1]) == self._plan:
                        self.makes_files = alone and not job_path(self.out).exists()
                        if alone and not self.makes_files:
                            fcntl.flock(descriptor, fcntl.LOCK_SH)
                        return descriptor
                    if alone and not job_path(self.out).exists():
                        self._begin(descriptor)
                        return descriptor
                    raise UsageFault(other_shares(self.partial))
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
            if time.monotonic() > patience:
                raise EnvironmentFault(f"{self.partial}: another nvfp4prep is writing here; wait for it") from None
            time.sleep(_PAUSE)

    def _begin(self, descriptor: int) -> None:
        """Make OUT.partial anew, alone."""
        if in_the_way(self.partial, self._marker):
            raise UsageFault(not_known(self.partial))
        self._forget_shares()
        if os.path.lexists(self.partial):
            shutil.rmtree(self.partial)
        self.partial.mkdir()
        self._lock = descriptor
        self._begin_journal()
        self.makes_files = True

    def open_shards(self, shards: Sequence[Shard]) -> bool:
        """Create the shards, or find them as the first process made them; True when this share's journal holds."""
        if not self.makes_files:
            if all(self._is_kept(shard) for shard in shards):
                self._shards = [shard.file for shard in shards]
                return True
            raise EnvironmentFault(f"{self.partial}: files are missing or were changed; delete it and run all shares")
        for shard in shards:
            self._create(shard)
        _sync_text(job_path(self.out), json.dumps(asdict(self._job)).encode())
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        return True

    def commit(self, lines: bytes) -> None:
        """As `PartialOutput.commit`, in this share's journal."""
        self._sync_shards()
        try:
            os.ftruncate(self._journal_lock, self._journal_end)
            os.pwrite(self._journal_lock, lines, self._journal_end)
            os.fsync(self._journal_lock)
        except OSError as error:
            raise fault(self._journal, "can't be written", error) from None
        self._journal_end += len(lines)

    def _leave(self, value: BaseException | None) -> None:
        self._files.close()
        for descriptor in (self._journal_lock, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._journal_lock = self._lock = -1
        if value is not None and self._own is not None:
            value.add_note(f"{self.partial} is left for the other shares; the same command goes on from there")


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether a descriptor is of the file that has this name now."""
    found = os.fstat(descriptor)
    return identity(path) == (found.st_dev, found.st_ino)


def _sync_text(path: Path, data: bytes) -> None:
    """Write a file that appears whole."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)


def unfinished(out: Path, done: set[int], owners: Sequence[int], count: int) -> str | None:
    """Which shares have items left, for a message, from each item's share; None when all are done."""
    left = [owner for number, owner in enumerate(owners) if number not in done]
    if not left:
        return None
    shares = sorted(set(left))
    names = ", ".join(f"{index}/{count}" for index in shares[:8]) + (" and more" if len(shares) > 8 else "")
    partial = partial_path(destination(out))
    return f"{partial}: {len(left)} of {len(owners)} work items are not done: run --shard {names}, then finish again"
