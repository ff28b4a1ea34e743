"""Output that appears under its final name only when complete: `OUT.partial`, positional writes, fsync, rename.

Phases: open (partial folder, preallocated shards), `write`, `seal` (data on disk), `publish` (index and config last,
rename).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from nvfp4prep.errors import CheckFailed, EnvironmentFault, UsageFault
from nvfp4prep.plan import Shard

MARKER = ".nvfp4prep-partial"
"""In OUT.partial until it is published, so that nothing else is ever taken for one of ours."""
_CHUNK = 1 << 24


def check_destination(out: Path, source_root: Path, *, overwrite: bool) -> None:
    """Refuse a destination that would touch the source or destroy what is not a checkpoint. Raises UsageFault."""
    out = destination(out)
    if not out.name:
        raise UsageFault(f"{out}: has no name of its own; choose another OUT")
    parent = next(folder for folder in out.parents if folder.exists())
    if not parent.is_dir():
        raise UsageFault(f"{out}: {parent} is a file; choose another OUT")
    source = source_root.resolve()
    for place in (out.resolve(), partial_path(out), replaced_path(out)):
        if place == source or source in place.parents:
            raise UsageFault(f"{out}: is the source or lies inside it; choose another OUT")
        if place in source.parents:
            raise UsageFault(f"{out}: the source lies inside it; choose another OUT")
    partial, replaced = partial_path(out), replaced_path(out)
    if partial.exists() and not (partial / MARKER).exists():
        raise UsageFault(f"{partial}: is in the way and was not left by nvfp4prep; move it, or choose another OUT")
    if replaced.exists():
        raise UsageFault(
            f"{replaced}: is in the way, the former {out.name} of a run that was killed; rename or delete it"
        )
    if not out.exists() and not out.is_symlink():
        return
    if out.is_symlink() or not out.is_dir():
        raise UsageFault(f"{out}: exists and is no directory; choose another OUT")
    if not overwrite:
        raise UsageFault(f"{out}: exists; choose another OUT, or replace it with --overwrite")
    if any(out.iterdir()) and not ((out / "config.json").exists() or (out / "nvfp4prep.json").exists()):
        raise UsageFault(f"{out}: holds no checkpoint, so --overwrite will not delete it; choose another OUT")


def destination(out: Path) -> Path:
    """OUT as an absolute path without `..` or links in its parents."""
    return out.absolute() if out.is_symlink() else out.resolve()


def replaced_path(out: Path) -> Path:
    """Where an existing OUT waits while the new one takes its name."""
    return out.with_name(out.name + ".replaced")


def partial_path(out: Path) -> Path:
    """Where an unfinished OUT is built: beside it, so that the rename stays on one file system."""
    return out.with_name(out.name + ".partial")


def check_space(out: Path, needed: int) -> None:
    """Raise EnvironmentFault when the disk that will hold `out` has less than `needed` bytes free."""
    folder = destination(out).parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentFault(
            f"{folder}: {free:,} bytes free, {needed:,} needed; free {needed - free:,} bytes or choose another disk"
        )


class PartialOutput:
    """An output being written. Leaving the context without `publish` deletes it, unless a check failed on it."""

    def __init__(self, out: Path) -> None:
        self.out = destination(out)
        self.partial = partial_path(self.out)
        self._descriptors: dict[str, int] = {}
        self._published = False
        self._lock = -1

    def __enter__(self) -> PartialOutput:
        try:
            if self.partial.exists():  # left by a run that was killed, unless that run holds the lock
                os.close(_locked(self.partial))
                shutil.rmtree(self.partial)
            self.partial.mkdir(parents=True)
            self._lock = _locked(self.partial)
            (self.partial / MARKER).touch()
        except OSError as error:
            raise fault(self.partial, "can't be made", error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        if not self._published and not isinstance(value, CheckFailed):
            shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self._lock)

    def open_shard(self, shard: Shard) -> None:
        """Create a shard at its final size with its header."""
        path = self.partial / shard.file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
            self._descriptors[shard.file] = descriptor
            _preallocate(descriptor, shard.nbytes)
        except OSError as error:
            raise fault(path, "can't be created", error) from None
        self.write(shard.file, 0, shard.header)

    def write(self, file: str, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at `position`; safe from several threads. Raises EnvironmentFault when it can't."""
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._descriptors[file], view, position)
                view = view[written:]
                position += written
        except OSError as error:
            raise fault(self.partial / file, f"writing at byte {position} failed", error) from None

    def copy_side_file(self, source: Path, name: str) -> None:
        """Copy a file that is not converted, bytes and nothing else."""
        path = self.partial / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with source.open("rb") as reader, path.open("xb") as writer:
                shutil.copyfileobj(reader, writer, _CHUNK)
                writer.flush()
                os.fsync(writer.fileno())
        except OSError as error:
            raise fault(path, "can't be copied", error) from None

    def seal(self) -> None:
        """Force all shards to disk and close them."""
        for file, descriptor in list(self._descriptors.items()):
            try:
                os.fsync(descriptor)
                os.close(self._descriptors.pop(file))
            except OSError as error:
                raise fault(self.partial / file, "can't be synced", error) from None

    def _take_name(self) -> None:
        replaced = replaced_path(self.out)
        if self.out.exists():
            self.out.rename(replaced)
        try:
            self.partial.rename(self.out)
        except OSError:
            if replaced.exists():
                replaced.rename(self.out)
            raise

    def publish(self, small_files: Sequence[tuple[str, bytes]], *, overwrite: bool) -> None:
        """Write the small files in the order given, sync, and rename to the final name.

        An existing OUT is moved aside first and deleted last, so that one of the two is complete at every moment.
        """
        try:
            for name, data in small_files:
                with (self.partial / name).open("xb") as writer:
                    writer.write(data)
                    writer.flush()
                    os.fsync(writer.fileno())
            (self.partial / MARKER).unlink()
            _sync_folder(self.partial)
            if self.out.exists() and not overwrite:
                raise UsageFault(f"{self.out}: appeared during the run; nothing of it was touched")
            self._take_name()
            self._published = True
            _sync_folder(self.out.parent)
            if replaced_path(self.out).exists():
                shutil.rmtree(replaced_path(self.out))
        except OSError as error:
            raise fault(self.out, "can't be finished", error) from None


def _locked(folder: Path) -> int:
    """A descriptor of `folder` with an exclusive lock, held until it is closed or the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise EnvironmentFault(
            f"{folder}: another nvfp4prep is writing here; wait for it or choose another OUT"
        ) from None
    return descriptor


def _preallocate(descriptor: int, size: int) -> None:
    """Reserve the blocks where the file system can, so that a full disk shows before the work."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(descriptor, size)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault(path: Path, what: str, error: OSError) -> EnvironmentFault:
    """An EnvironmentFault for an OSError, with what to do when the disk is full."""
    advice = "; free space and run again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return EnvironmentFault(f"{path}: {what}: {error.strerror or error}{advice}")


def file_sizes(folder: Path, names: Sequence[str]) -> Mapping[str, int]:
    """Bytes of each side file."""
    return {name: (folder / name).stat().st_size for name in names}
