"""Output that appears under its final name only when complete: `OUT.partial`, positional writes, fsync, rename.

Phases: open (partial folder, preallocated shards), `write`, `seal` (data on disk), `publish` (index and config last,
rename). A marker beside OUT.partial holds the lock and says which folder is ours; it is made first and removed last,
so that a run killed at any moment leaves nothing that the next one can't tell from the folder of somebody else.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import resource
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Self

from nvfp4prep.errors import CheckFailed, EnvironmentFault, InputRefused, UsageFault
from nvfp4prep.findings import Finding
from nvfp4prep.libc import start_writeback
from nvfp4prep.plan import Shard
from nvfp4prep.source import read_json

_WRITEBACK_BYTES = 1 << 25
"""Written to a shard before its way to disk begins: the disk then works beside the run, not after it."""
_MOST_LINKS = 40
_MOST_FILES = 128
_MARKER_TEXT = re.compile(rb"(?:nvfp4prep (\d+)\n(?:plan ([0-9a-f]{32})\n(?P<journal>.*))?)?", re.DOTALL)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
"""What a path begins with that was a URL."""

Identity = tuple[int, int]
"""Device and inode."""


def check_destination(out: Path, source_root: Path, *, overwrite: bool) -> None:
    """Refuse a destination that would touch the source or destroy what is not a checkpoint.

    Raises:
        UsageFault: OUT can't be used.
        InputRefused: the source is a link that leads to itself.
    """
    out = destination(out)
    if not out.name:
        raise UsageFault(f"{out}: has no name of its own; choose another OUT")
    parent = next(folder for folder in out.parents if folder.exists())
    if not parent.is_dir():
        raise UsageFault(f"{out}: {parent} is a file; choose another OUT")
    most = os.pathconf(parent, "PC_NAME_MAX") - len(share_path(Path("x"), "99999-of-99999").name)
    if len(os.fsencode(out.name)) > most:
        raise UsageFault(f"{out.name}: a name of {len(os.fsencode(out.name))} bytes; it may have {most}")
    if _is_loop(source_root):
        message = f"{source_root}: a symbolic link that leads to itself; give the checkpoint's directory"
        raise InputRefused([Finding("no-such-checkpoint", "error", message)])
    partial, replaced = partial_path(out), replaced_path(out)
    if source_root.exists():
        _check_source(out, source_root, {out.resolve(), partial, replaced})
    if in_the_way(partial, marker_path(out)):
        raise UsageFault(f"{not_known(partial)}, or choose another OUT")
    if os.path.lexists(replaced):
        raise UsageFault(
            f"{replaced}: is in the way: the former {out.name} of a run that was killed; "
            + (f"{out.name} is there, so delete it" if os.path.lexists(out) else "rename or delete it")
        )
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise UsageFault(f"{out}: exists and is no directory; choose another OUT")
    if not overwrite:
        raise UsageFault(f"{out}: exists; choose another OUT, or replace it with --overwrite")
    if not _may_be_replaced(out):
        raise UsageFault(f"{out}: holds no checkpoint, so --overwrite will not delete it; choose another OUT")


def _check_source(out: Path, source_root: Path, places: Collection[Path]) -> None:
    """Refuse when the source is one of `places`, holds one, lies in one, or reaches into one through any link."""
    source = source_root.resolve()
    for place in places:
        if place == source or source in place.parents:
            raise UsageFault(f"{out}: is the source or lies inside it; choose another OUT")
    if any(step in places for step in _route(source_root)):
        raise UsageFault(f"{out}: the source lies inside it; choose another OUT")
    if not any(os.path.lexists(place) for place in places):
        return
    for folder, folders, names in os.walk(source):
        for name in (*folders, *names):
            link = Path(folder, name)
            inside = next((step for step in _route(link) if step in places), None) if link.is_symlink() else None
            if inside is not None:
                raise UsageFault(f"{link}: a file of the source that lies inside {inside}; choose another OUT")


def _route(path: Path) -> Iterator[Path]:
    """Every place on the way to `path`, free of links: its folders, itself, and the same of each link's target."""
    path = path.absolute()
    todo, here, links = list(reversed(path.parts[1:])), Path(path.anchor), 0
    while todo:
        part = todo.pop()
        step = here.parent if part == ".." else here / part
        yield step
        try:
            target = step.readlink()
        except OSError:
            here = step
            continue
        links += 1
        if links > _MOST_LINKS:
            return
        if target.is_absolute():
            here = Path(target.anchor)
        todo += reversed([part for part in target.parts if part != target.anchor])


def _is_loop(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def _may_be_replaced(out: Path) -> bool:
    """Whether a directory is empty or a checkpoint, or holds nothing but the outputs of a run with several targets."""
    if not any(out.iterdir()) or _is_output(out):
        return True
    config = _json_object(out, "config.json")
    if "model_type" in config or "architectures" in config:
        return any(out.glob("*.safetensors"))
    return all(not path.is_symlink() and path.is_dir() and _is_output(path) for path in out.iterdir())


def _is_output(folder: Path) -> bool:
    return isinstance(_json_object(folder, "nvfp4prep.json").get("runs"), list)


def _json_object(folder: Path, name: str) -> Mapping[str, object]:
    try:
        return read_json(folder, name) or {}
    except InputRefused:
        return {}


def destination(out: Path) -> Path:
    """OUT as an absolute path without `..` or links in its parents.

    Raises:
        UsageFault: its links lead nowhere, or it is a URL: shards are written at offsets, in any order, gone on with
            after a crash, and renamed when all is well. No object store can do that.
    """
    scheme = out.parts[0] if out.parts and not out.is_absolute() else ""
    if _SCHEME.fullmatch(scheme) and not Path(scheme).exists():
        raise UsageFault(
            f"{scheme}//{Path(*out.parts[1:])}: OUT must be a folder on a disk, where files are written in any order "
            "and renamed; give one, and upload it when it is complete (to the Hub with --push-to)"
        )
    if _is_loop(out):
        raise UsageFault(f"{out}: a symbolic link on it leads to itself; choose another OUT")
    return out.absolute() if out.is_symlink() else out.resolve()


def replaced_path(out: Path) -> Path:
    """Where an existing OUT waits while the new one takes its name."""
    return out.with_name(out.name + ".replaced")


def partial_path(out: Path) -> Path:
    """Where an unfinished OUT is built: beside it, so that the rename stays on one file system."""
    return out.with_name(out.name + ".partial")


def marker_path(out: Path) -> Path:
    """The file that a run locks, and that holds the inode of the OUT.partial it made."""
    return out.with_name(f".{out.name}.partial.nvfp4prep")


def share_path(out: Path, what: str) -> Path:
    """A file beside the marker that processes which share OUT.partial keep (`sharing`)."""
    return out.with_name(f"{marker_path(out).name}.{what}")


def share_paths(out: Path) -> list[Path]:
    """All such files that are there."""
    prefix = marker_path(out).name + "."
    return sorted(path for path in out.parent.iterdir() if path.name.startswith(prefix))


def in_the_way(partial: Path, marker: Path) -> bool:
    """Whether `partial` is there and neither empty nor the one that the marker names."""
    found = identity(partial)
    if found is None:
        return False
    try:
        text = _MARKER_TEXT.fullmatch(marker.read_bytes())
    except OSError:
        text = None
    if text is not None and text[1] is not None and int(text[1]) == found[1]:
        return False
    return partial.is_symlink() or not partial.is_dir() or any(partial.iterdir())


def not_known(partial: Path) -> str:
    """The message where `in_the_way`."""
    marker = partial.with_name(f".{partial.name}.nvfp4prep")
    return (
        f"{partial}: is in the way, and {marker.name} beside it does not say that nvfp4prep left it; move or delete it"
    )


def other_shares(partial: Path) -> str:
    """The message where OUT.partial is of shares of another plan."""
    return (
        f"{partial}: shares of something else are here (the source was changed since, or other options, or another "
        "version of nvfp4prep); nothing of them was touched. Complete them as they were begun, or delete it and its "
        ".nvfp4prep files"
    )


def identity(path: Path) -> Identity | None:
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def check_names(side_files: Mapping[str, str], planned: Collection[str], folders: Collection[str] = ()) -> None:
    """Refuse side files that can't lie beside the planned files. Raises InputRefused with every one.

    Args:
        side_files: names in the source -> in the output.
        planned: files that will be written, relative to the output.
        folders: folders of the output that no side file may enter.
    """
    taken = set(planned) | set(folders)
    inner = {str(parent) for name in planned for parent in PurePosixPath(name).parents}
    findings = []
    for name, target in side_files.items():
        within = {target, *map(str, PurePosixPath(target).parents)}
        clash = min(within & taken, default=target if target in inner else None)
        if clash is not None:
            message = f"the output has its own {clash}; rename or remove this file"
            findings.append(Finding("name-taken", "error", message, file=name))
    if findings:
        raise InputRefused(findings)


def check_space(out: Path, lasting: int, passing: int = 0) -> None:
    """Raise EnvironmentFault when the disk that will hold `out` has less free than both together.

    Args:
        out: the destination.
        lasting: bytes of the output.
        passing: bytes of the source's shards that lie beside it for a while (`spool`).
    """
    needed = lasting + passing
    folder = destination(out).parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free + _held(partial_path(destination(out)))
    if free < needed:
        of_them = f", {passing:,} of them for shards until they are converted" if passing else ""
        raise EnvironmentFault(
            f"{folder}: {free:,} bytes free, {needed:,} needed{of_them}; "
            f"free {needed - free:,} bytes or choose another disk"
        )


def _held(partial: Path) -> int:
    """Bytes on disk of what an earlier run left, which is gone on with or deleted."""
    files = partial.rglob("*") if partial.is_dir() and not partial.is_symlink() else ()
    return sum(path.lstat().st_blocks * 512 for path in files)


class _OpenFiles:
    """Files under a folder, of which a bounded number is open; one that nobody uses is closed for another."""

    def __init__(self, folder: Path, inode: int | None = None) -> None:
        """`inode`: a descriptor of the folder; files are then those of that one, whatever has its name by now."""
        self._folder, self._inode = folder, inode
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._limit = _MOST_FILES if soft == resource.RLIM_INFINITY else max(2, min(_MOST_FILES, soft // 4))
        self._descriptors: dict[str, int] = {}
        self._uses: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._closed = False

    @contextmanager
    def use(self, file: str, flags: int = 0) -> Iterator[int]:
        """A descriptor to read and write; safe from several threads, and never closed while it is used."""
        descriptor = self._take(file, os.O_RDWR | os.O_CLOEXEC | flags)
        try:
            yield descriptor
        finally:
            with self._changed:
                self._uses[file] -= 1
                if self._closed and not self._uses[file]:
                    os.close(self._descriptors.pop(file))
                self._changed.notify()

    def _take(self, file: str, flags: int) -> int:
        with self._changed:
            while True:
                if self._closed:
                    raise EnvironmentFault(f"{file}: the run has ended")
                descriptor = self._descriptors.pop(file, None)
                if descriptor is None and len(self._descriptors) < self._limit:
                    place = self._folder / file if self._inode is None else file
                    descriptor = os.open(place, flags, 0o644, dir_fd=self._inode)
                if descriptor is not None:
                    self._descriptors[file] = descriptor  # at the end: the one used last
                    self._uses[file] += 1
                    return descriptor
                idle = next((name for name in self._descriptors if not self._uses[name]), None)
                if idle is None:
                    self._changed.wait()
                else:
                    os.close(self._descriptors.pop(idle))

    def close(self) -> None:
        """Close all; those in use as soon as they no longer are."""
        with self._changed:
            self._closed = True
            for file in [name for name in self._descriptors if not self._uses[name]]:
                os.close(self._descriptors.pop(file))
            self._changed.notify_all()


class PartialOutput:
    """An output being written. Leaving the context without `publish` deletes it, unless a check failed on it, or its
    journal has what another run with the same plan can go on with.

    An exception that leaves the context gets a note of what is on disk, where that is anything. `journalled` are the
    lines of an earlier run with this plan, whose files are still there. `is_share`: others write parts of it too.
    """

    is_share = False

    def __init__(self, out: Path, plan: str) -> None:
        self.journalled: tuple[bytes, ...] = ()
        self._plan = plan
        self._journal_end = 0
        self._committed = False
        self.out = destination(out)
        self.partial = partial_path(self.out)
        self._replaced, self._marker = replaced_path(self.out), marker_path(self.out)
        self._files = _OpenFiles(self.partial)
        self._shards: list[str] = []
        self._side_files: list[str] = []
        self._fresh: Counter[str] = Counter()
        self._parents: list[Path] = []
        self._former: Identity | None = None
        self._own: Identity | None = None
        self._lock = -1

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self._leave(error)
            if isinstance(error, OSError):
                raise fault(self.partial, "can't be made", error) from None
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(value)

    def _open(self) -> None:
        missing = [folder for folder in self.out.parents if not folder.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):
                folder.mkdir()
                self._parents.append(folder)
        self._lock = locked(
            self._marker,
            f"{self.partial}: another nvfp4prep is writing here; wait for it or choose another OUT",
        )
        if _MARKER_TEXT.fullmatch(os.pread(self._lock, os.fstat(self._lock).st_size, 0)) is None:
            raise UsageFault(f"{self._marker}: is in the way and is no note of nvfp4prep's; move it")
        self._former = identity(self.out)
        if in_the_way(self.partial, self._marker):
            raise UsageFault(not_known(self.partial))
        if os.path.lexists(self.partial):  # left by a run that was killed, or by shares
            self.journalled = self._read_journal()
            if self.journalled:
                self._own, self._committed = identity(self.partial), True
                return
            if share_paths(self.out) and plan_of(self._lock, self.partial.lstat().st_ino) != self._plan:
                raise UsageFault(other_shares(self.partial))
            shutil.rmtree(self.partial)
        self._forget_shares()
        self.partial.mkdir()
        self._begin_journal()

    @contextmanager
    def joined(self) -> Iterator[Self]:
        """As a worker of the run that has OUT.partial: it may write there while the run's plan is this one.

        Files are those of the folder as it is now: should a later run delete it and make another, a worker that nobody
        waits for any longer can't write to that one.

        Raises:
            EnvironmentFault: OUT.partial is not there, or of another plan.
        """
        try:
            with ExitStack() as stack:
                inode = os.open(self.partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, inode)
                marker = os.open(self._marker, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, marker)
                if plan_of(marker, os.fstat(inode).st_ino) != self._plan:
                    raise EnvironmentFault(f"{self.partial}: is another run's by now")
                self._files = _OpenFiles(self.partial, inode)
                stack.callback(self._files.close)
                yield self
        except OSError as error:
            raise fault(self.partial, "can't be written to", error) from None

    def _read_journal(self) -> tuple[bytes, ...]:
        """The whole lines of a journal of the same plan, and of those of shares of it."""
        text = os.pread(self._lock, os.fstat(self._lock).st_size, 0)
        found = _MARKER_TEXT.fullmatch(text)
        if found is None or found[2] is None or found[2].decode() != self._plan:
            return ()
        lines = found["journal"].split(b"\n")
        self._journal_end = len(text) - len(lines[-1])
        shares = [journal_lines(path.read_bytes(), self._plan) for path in share_paths(self.out)]
        return (*lines[:-1], *(line for share in shares for line in share))

    def _forget_shares(self) -> None:
        for path in share_paths(self.out):
            with suppress(OSError):
                path.unlink()

    def _begin_journal(self) -> None:
        self._own = identity(self.partial)
        assert self._own is not None
        text = b"nvfp4prep %d\nplan %s\n" % (self._own[1], self._plan.encode())
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, text, 0)
        os.fsync(self._lock)
        self._journal_end, self._committed = len(text), False

    def commit(self, lines: bytes) -> None:
        """Sync the shards, then note in the journal what is on disk now. Raises EnvironmentFault."""
        self._sync_shards()
        try:
            os.ftruncate(self._lock, self._journal_end)
            os.pwrite(self._lock, lines, self._journal_end)
            os.fsync(self._lock)
        except OSError as error:
            raise fault(self._marker, "can't be written", error) from None
        self._journal_end += len(lines)
        self._committed = True

    @property
    def _published(self) -> bool:
        return self._own is not None and identity(self.out) == self._own

    def _leave(self, value: BaseException | None) -> None:
        """Delete what is not wanted, data first and the marker last, and note on `value` what is left."""
        try:
            self._files.close()
            if self._lock >= 0:
                self._clean(value)
            if not self._published:
                for folder in reversed(self._parents):
                    with suppress(OSError):
                        folder.rmdir()
        except BaseException as second:  # interrupted once more
            second.add_note(self._left())
            raise
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1
        left = self._left()
        if value is not None and left and not isinstance(value, CheckFailed):
            value.add_note(left)

    def _clean(self, value: BaseException | None) -> None:
        if self._published:
            if isinstance(value, KeyboardInterrupt):  # between the renames and the end of `publish`
                self._delete_former()
        elif isinstance(value, CheckFailed):
            self._begin_journal()  # the next run writes it again
        elif self._committed and not isinstance(value, InputRefused):
            self._roll_back()
        else:
            self._roll_back()
            if self._own is not None and identity(self.partial) == self._own:
                shutil.rmtree(self.partial, ignore_errors=True)
            else:
                with suppress(OSError):
                    self.partial.rmdir()  # made, but not yet known to be
        if not os.path.lexists(self.partial) or in_the_way(self.partial, self._marker):
            self._forget_shares()
            with suppress(OSError):
                self._marker.unlink()

    def _left(self) -> str:
        """What of this run is on disk, for the message that ends it; empty when nothing is."""
        found = []
        if self._published:
            found.append(f"{self.out} is complete")
        elif self._own is not None and identity(self.partial) == self._own:
            then = "the same command goes on from there" if self._committed else "the next run deletes it"
            if share_paths(self.out):
                then = "its shares go on from there"
            found.append(f"{self.partial} is left; {then}")
        if self._former is not None and identity(self._replaced) == self._former:
            advice = "delete it" if self._published else f"rename it to {self.out.name}"
            found.append(f"the former {self.out.name} is left as {self._replaced}; {advice}")
        return "; ".join(found)

    def open_shards(self, shards: Sequence[Shard]) -> bool:
        """Create shards at their final size with their headers; True when an earlier run's are gone on with."""
        kept = bool(self.journalled) and all(self._is_kept(shard) for shard in shards)
        if self.journalled and not kept:
            self._begin_journal()
        for shard in shards:
            if kept:
                self._shards.append(shard.file)
            else:
                self._create(shard)
        return kept

    def _is_kept(self, shard: Shard) -> bool:
        path = self.partial / shard.file
        try:
            if path.is_symlink() or path.stat().st_size != shard.nbytes:
                return False
            with path.open("rb") as file:
                return file.read(len(shard.header)) == shard.header
        except OSError:
            return False

    def _create(self, shard: Shard) -> None:
        path = self.partial / shard.file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with self._files.use(shard.file, os.O_CREAT | os.O_EXCL) as descriptor:
                self._shards.append(shard.file)
                _preallocate(descriptor, shard.nbytes)
        except OSError as error:
            raise fault(path, "can't be created", error) from None
        self.write(shard.file, 0, shard.header)

    def write(self, file: str, position: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of `data` at `position`; safe from several threads. Raises EnvironmentFault when it can't."""
        view = memoryview(data)
        try:
            with self._files.use(file) as descriptor:
                self._fresh[file] += len(view)
                while view:
                    written = os.pwrite(descriptor, view, position)
                    view = view[written:]
                    position += written
                if self._fresh[file] >= _WRITEBACK_BYTES:
                    self._fresh[file] = 0  # threads may count past each other: it only says when
                    start_writeback(descriptor)
        except OSError as error:
            raise fault(self.partial / file, f"writing at byte {position} failed", error) from None

    def copy_side_file(self, pieces: Iterable[bytes], name: str) -> None:
        """Write a file that is not converted, bytes and nothing else."""
        path = self.partial / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with path.open("xb") as writer:
                for piece in pieces:
                    writer.write(piece)
                writer.flush()
                os.fsync(writer.fileno())
            self._side_files.append(name)
        except OSError as error:
            raise fault(path, "can't be copied", error) from None

    def sync_written(self) -> None:
        """Force the shards that were written to onto disk, and close them: for a process that is not the run's own."""
        self._shards = list(self._fresh)
        self.seal()

    def seal(self) -> None:
        """Force all shards to disk and close them."""
        self._sync_shards()
        self._files.close()

    def _sync_shards(self) -> None:
        for file in self._shards:
            try:
                with self._files.use(file) as descriptor:
                    os.fsync(descriptor)
            except OSError as error:
                raise fault(self.partial / file, "can't be synced", error) from None

    def publish(
        self,
        small_files: Sequence[tuple[str, bytes]],
        *,
        overwrite: bool,
        check: Callable[[Path], None] = lambda folder: None,
    ) -> None:
        """Write the small files in the order given, sync, check what was written, and rename to the final name.

        Files that are not part of the output are deleted: an earlier run may have left them. An existing OUT is moved
        aside first and deleted last, so that one of the two is complete at every moment. Where `check` raises, the
        small files, without which nothing loads the rest, are taken away again.
        """
        try:
            self._delete_strays()
            for name, data in small_files:
                (self.partial / name).unlink(missing_ok=True)
                with (self.partial / name).open("xb") as writer:
                    writer.write(data)
                    writer.flush()
                    os.fsync(writer.fileno())
            try:
                check(self.partial)
            except BaseException:
                for name, _ in small_files:
                    (self.partial / name).unlink()
                raise
            _sync_folder(self.partial)
            self._check_unchanged(self.out)
            if self._former is not None and not (overwrite and self.out.is_dir() and _may_be_replaced(self.out)):
                raise UsageFault(f"{self.out}: is in the way; nothing of it was touched")
            self._take_name()
            _sync_folder(self.out.parent)
            self._delete_former()
        except OSError as error:
            raise fault(self.out, "can't be finished", error) from None

    def _delete_strays(self) -> None:
        known = {self.partial / name for name in (*self._shards, *self._side_files)}
        folders = {folder for path in known for folder in path.parents}
        for path in sorted(self.partial.rglob("*"), reverse=True):  # what is in a folder before the folder
            if path not in known and path not in folders:
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()

    def _check_unchanged(self, place: Path) -> None:
        if identity(place) != self._former:
            raise UsageFault(f"{self.out}: appeared or was changed during the run; nothing of it was touched")

    def _take_name(self) -> None:
        try:
            if self._former is not None:
                self.out.rename(self._replaced)
                self._check_unchanged(self._replaced)
            self.partial.rename(self.out)
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        """Give an OUT that was moved aside its name back, unless the new one has it."""
        if self._former is not None and not os.path.lexists(self.out) and os.path.lexists(self._replaced):
            self._replaced.rename(self.out)

    def _delete_former(self) -> None:
        if self._former is not None and identity(self._replaced) == self._former:
            shutil.rmtree(self._replaced)


def plan_of(descriptor: int, inode: int | None) -> str | None:
    """The plan that an open marker names for the OUT.partial of this inode, or None."""
    text = _MARKER_TEXT.fullmatch(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    if text is None or text[2] is None or int(text[1]) != inode:
        return None
    return text[2].decode()


def journal_lines(text: bytes, plan: str) -> tuple[bytes, ...]:
    """The whole lines of a share's journal, without its head; none of another plan's."""
    head = journal_head(plan)
    return tuple(text[len(head) :].split(b"\n")[:-1]) if text.startswith(head) else ()


def journal_head(plan: str) -> bytes:
    """What a share's journal begins with."""
    return b"plan %s\n" % plan.encode()


def locked(marker: Path, refusal: str) -> int:
    """A descriptor of a file with an exclusive lock, held until it is closed or the process ends.

    Raises:
        EnvironmentFault: another process has it.
    """
    while True:
        descriptor = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if identity(marker) == (found.st_dev, found.st_ino):  # not one that its owner has just removed
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise EnvironmentFault(refusal) from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


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
    """An EnvironmentFault for an OSError, with what to do when the disk is full or too many files are open."""
    advice = ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "; free space and run again"
    elif error.errno in (errno.EMFILE, errno.ENFILE):
        advice = "; raise the limit (ulimit -n), or use a larger --max-shard-size"
    elif error.errno == errno.EFBIG:
        advice = "; raise the limit (ulimit -f), or use a smaller --max-shard-size"
    return EnvironmentFault(f"{path}: {what}: {error.strerror or error}{advice}")
