"""A Hub repo read where it is: small files through huggingface_hub's cache, shards by byte ranges over HTTP.

What is looked at is read by itself; for a run each shard is fetched once, into a `spool`.
"""

from __future__ import annotations

import glob
import mmap
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, RevisionNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    get_session,
    hf_raise_for_status,
)

from nvfp4prep.errors import EnvironmentFault, InputRefused, Stopped
from nvfp4prep.header import HeaderError, header_length, parse_header
from nvfp4prep.ranges import LocalReader, Maps, OpenShards, Reader
from nvfp4prep.schedule import by_shards
from nvfp4prep.source import (
    INDEX,
    MAX_LARGE_JSON_BYTES,
    READ_FILES,
    SIDE_FILE_PIECE,
    FileState,
    HubRepo,
    ShardHeader,
    Source,
    collect_headers,
    hub_advice,
    hub_errors,
    hub_faults,
    listed_files,
    open_snapshot,
    open_unchanged,
    refuse,
    refuse_no_weights,
    refuse_packed,
    shard_names,
    side_files,
)
from nvfp4prep.spool import Spool, SpooledMaps, most_bytes, peak_bytes

T = TypeVar("T")
R = TypeVar("R")

WORKERS = 8
"""Requests at a time; huggingface_hub downloads as many files."""
HEADER_BYTES = 1 << 18
"""Read of a shard at first. Many headers are no longer, and another request takes longer than these bytes."""
GAP_BYTES = 1 << 18
"""Between two tensors that are read together."""
SMALL_FILE_BYTES = 32_000_000
"""Files below this are downloaded. Of larger ones only name and size are of use, but for JSON."""
WAITS: tuple[float, ...] = (1, 2, 4, 8)
"""Seconds before each further attempt at a request."""
MAX_WAIT = 120
"""Seconds that a server may ask to wait; where it asks for more, the run stops and says so."""
LISTING_TIMEOUT = 30
PROGRESS_BYTES = 1 << 20
"""After as many in one attempt, the next begins to count anew: the connection works, if badly."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_RATE_LIMIT_RESET = re.compile(r"\bt=(\d+)")
_PIECE = 1 << 16


# --- a source -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RemoteSource(Source):
    """A Hub repo whose shards are not here, but for those that huggingface_hub's cache already has.

    `root` is its snapshot in that cache, with its small files; `states` are of the shards that are there. `workspace`
    is a folder on whose disk shards may lie while they are read; it has to be there only then.
    """

    files: HubFiles
    workspace: Path | None = None

    def open_shard(self, file: str) -> int:
        """As `Source.open_shard`, of what is here."""
        if file in self.shards and file not in self.states:
            raise EnvironmentFault(f"{file}: not downloaded; fetch {self.spec} with `hf download` first")
        return super().open_shard(file)

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """As `Source.reader`."""
        with _opened(self.files, self.root, self.states) as reader:
            yield reader

    @contextmanager
    def opened(
        self, items: Sequence[int], files_of: Callable[[int], Collection[str]], workers: int, stop: threading.Event
    ) -> Iterator[OpenShards]:
        """As `Source.opened`: shards that are not here are fetched one after another."""
        needs = {number: files_of(number) for number in items}
        with closing(Spool(needs, self._elsewhere, self.open_shard, self._fetch, self._workspace, stop)) as spool:
            yield OpenShards(spool, spool.order, spool.done)

    def passing_bytes(self, needs: Sequence[Collection[str]]) -> int:
        """As `Source.passing_bytes`."""
        by_number = dict(enumerate(needs))
        peak = peak_bytes(by_shards(by_number), by_number, self._elsewhere)
        return most_bytes(peak, self._elsewhere, frozenset().union(*needs))

    def maps(self) -> Maps:
        """As `Source.maps`; what is asked for is fetched then."""
        here, there = super().maps(), SpooledMaps(self._elsewhere, self._fetch, self._workspace)

        def mapped(file: str, start: int, length: int) -> mmap.mmap:
            return (here if file in self.states else there)(file, start, length)

        return mapped

    def side_bytes(self) -> int:
        """As `Source.side_bytes`, by the Hub's listing."""
        return sum(self.files.sizes[name] for name in self.side_files)

    def side_file(self, name: str) -> Iterator[bytes]:
        """As `Source.side_file`; a large one is not in the cache. Raises EnvironmentFault."""
        if (self.root / name).is_file():
            yield from super().side_file(name)
            return
        size = self.files.sizes[name]
        for start in range(0, size, SIDE_FILE_PIECE):
            yield read_remote_range(self.files, name, start, min(SIDE_FILE_PIECE, size - start))

    def verify_unchanged(self) -> None:
        """As `Source.verify_unchanged`; of shards that were read where they are, by their ETags."""
        super().verify_unchanged()
        known = [file for file in self._elsewhere if file in self.files.etags]
        with self.reader() as reader:
            deque(reader.map(lambda file: reader.read(file, 0, 8), known), maxlen=0)

    @property
    def _elsewhere(self) -> dict[str, int]:
        """Sizes of the shards that are not here."""
        return {file: size for file, size in self.shards.items() if file not in self.states}

    @property
    def _workspace(self) -> Path:
        if self.workspace is None:
            raise EnvironmentFault(f"{self.spec}: not downloaded; fetch it with `hf download` first")
        return self.workspace

    def _fetch(
        self, file: str, start: int, length: int, take: Callable[[int, bytes], None], stop: threading.Event
    ) -> None:
        """As `spool.Fetch`."""

        def go_on(position: int, data: bytes) -> None:
            if stop.is_set():
                raise Stopped
            take(position, data)

        def pause(seconds: float) -> None:
            if stop.wait(seconds):
                raise Stopped

        stream_remote_range(self.files, file, start, length, go_on, pause)


def open_remote(repo: HubRepo, workspace: Path | None = None) -> Source:
    """Open a Hub repo at one commit without downloading its shards. `workspace` is as in `RemoteSource`.

    Where the Hub can't be asked, or must not be (HF_HUB_OFFLINE), a snapshot in huggingface_hub's cache is opened
    instead, if it has all shards.

    Raises:
        InputRefused: it is no checkpoint, or a file in it is damaged.
        EnvironmentFault: it can't be read.
    """
    found = _find(repo)
    if isinstance(found, Source):
        return found
    names = listed_files(found.sizes)
    root = _fetch_small(found, names)
    refuse_packed(root)
    shards = {name: found.sizes[name] for name in shard_names(names)}
    if not shards and INDEX not in names:
        refuse_no_weights(repo.name)
    states = _states_here(root, shards)
    with _opened(found, root, states) as reader:
        tensors, metadata, findings = collect_headers(root, list(shards), _headers(reader, shards))
    return RemoteSource(
        root,
        repo.name,
        found.commit,
        shards,
        metadata,
        tensors,
        side_files(names),
        findings,
        states,
        files=found,
        workspace=workspace,
    )


def _find(repo: HubRepo) -> HubFiles | Source:
    """The repo's files at the commit that its revision is now; or its snapshot here, see `open_remote`."""
    with hub_faults(repo):
        for number in range(len(WAITS) + 1):
            try:
                return _list(repo)
            except hub_errors() as error:
                if number == 0 and not isinstance(error, RevisionNotFoundError):
                    snapshot = _snapshot_here(repo)
                    if snapshot is not None:
                        return snapshot
                if number == len(WAITS) or isinstance(error, OfflineModeIsEnabled) or not _may_pass(error):
                    raise
                time.sleep(WAITS[number])
    raise AssertionError


def _list(repo: HubRepo) -> HubFiles:
    """Raises one of `hub_errors`."""
    try:
        info = huggingface_hub.HfApi().model_info(
            repo.name, revision=repo.revision, files_metadata=True, timeout=LISTING_TIMEOUT
        )
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
    except (HFValidationError, HfHubHTTPError):  # some are ValueErrors too
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"it does not answer as a Hub does: {error}") from None
    known = {name: size for name, size in sizes.items() if size is not None}
    if info.sha is None or not _COMMIT.fullmatch(info.sha) or len(known) < len(sizes):
        raise OSError("it does not answer as a Hub does: the commit or the sizes of files are not told")
    return HubFiles(repo, info.sha, known)


def _snapshot_here(repo: HubRepo) -> Source | None:
    try:
        return open_snapshot(repo, local=True)
    except EnvironmentFault:
        return None
    except InputRefused as refused:
        if {finding.rule for finding in refused.findings} <= {"no-weights", "shard-missing"}:
            return None
        raise


def _fetch_small(files: HubFiles, names: Sequence[str]) -> Path:
    """The snapshot in huggingface_hub's cache, with all small files and all JSON."""
    small = []
    for name in names:
        size, is_json = files.sizes[name], name.endswith(".json")
        if name in READ_FILES and size > MAX_LARGE_JSON_BYTES:
            refuse("bad-json", f"{size} bytes, over the limit of {MAX_LARGE_JSON_BYTES}", file=name)
        if not name.endswith(".safetensors") and size < (MAX_LARGE_JSON_BYTES if is_json else SMALL_FILE_BYTES):
            small.append(glob.escape(name))
    with hub_faults(files.repo), _no_bars():
        return Path(huggingface_hub.snapshot_download(files.repo.name, revision=files.commit, allow_patterns=small))


@contextmanager
def _no_bars() -> Iterator[None]:
    """huggingface_hub's progress bars, which are for large files, stay away."""
    shown = not are_progress_bars_disabled()
    with warnings.catch_warnings():  # HF_HUB_DISABLE_PROGRESS_BARS=0 wants them, and says so
        warnings.simplefilter("ignore")
        disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def _states_here(root: Path, shards: Mapping[str, int]) -> dict[str, FileState]:
    """Of the shards that are whole in the cache."""
    states = {}
    for name, size in shards.items():
        try:
            state = FileState.of((root / name).stat())
        except OSError:
            continue
        if state.size == size:
            states[name] = state
    return states


def _headers(reader: Reader, shards: Mapping[str, int]) -> Iterator[ShardHeader | HeaderError]:
    """Of each shard. They are fetched side by side, but parsed one by one, which bounds the memory that takes."""

    def fetch(name: str) -> bytes | HeaderError:
        size = shards[name]
        first = reader.read(name, 0, min(HEADER_BYTES, size))
        try:
            end = 8 + header_length(first[:8], size)
        except HeaderError as error:
            return error
        rest = reader.read(name, len(first), end - len(first)) if end > len(first) else b""
        return first[8:end] + rest

    for name, raw in zip(shards, reader.map(fetch, shards), strict=True):
        try:
            yield raw if isinstance(raw, HeaderError) else parse_header(raw, name, shards[name])
        except HeaderError as error:
            yield error


# --- reading ------------------------------------------------------------------------------------------------------


class RemoteReader:
    """A Reader of a repo's files: those on disk through `local`, all others over HTTP."""

    def __init__(self, files: HubFiles, local: LocalReader, here: Iterable[str]) -> None:
        self.gap = GAP_BYTES
        self._files = files
        self._local = local
        self._here = frozenset(here)
        self._pool = ThreadPoolExecutor(WORKERS)
        self._closed = threading.Event()

    def read(self, file: str, start: int, length: int) -> bytes:
        """As `Reader.read`."""
        if file in self._here:
            return self._local.read(file, start, length)
        return read_remote_range(self._files, file, start, length, self._pause)

    def map(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """As `Reader.map`; no more than WORKERS results are held at a time."""
        rest = iter(items)
        pending: deque[Future[R]] = deque(self._pool.submit(work, item) for item in islice(rest, WORKERS))
        while pending:
            result = pending.popleft().result()
            pending.extend(self._pool.submit(work, item) for item in islice(rest, 1))
            yield result

    def close(self) -> None:
        """Give up what is still being read, and wait no longer than a request takes."""
        self._closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._local.close()

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise EnvironmentFault("stopped")


@contextmanager
def _opened(files: HubFiles, root: Path, states: Mapping[str, FileState]) -> Iterator[RemoteReader]:
    local = LocalReader(lambda file: open_unchanged(root, file, states[file]))
    with closing(RemoteReader(files, local, states)) as reader:
        yield reader


@dataclass(frozen=True)
class HubFiles:
    """A repo's files at one commit: their sizes, and the ETags of those that were read."""

    repo: HubRepo
    commit: str
    sizes: Mapping[str, int]
    etags: dict[str, str] = field(default_factory=dict)


class _Again(Exception):
    """A request failed in a way that may pass: why, and how many seconds the server asks to wait."""

    def __init__(self, why: str, wait: float = 0) -> None:
        super().__init__(why)
        self.wait = wait


def read_remote_range(
    files: HubFiles, file: str, start: int, length: int, pause: Callable[[float], None] = time.sleep
) -> bytes:
    """`length` bytes of a repo's file at `start`. Raises as `stream_remote_range`."""
    data = bytearray()
    stream_remote_range(files, file, start, length, lambda _, piece: data.extend(piece), pause)
    return bytes(data)


def stream_remote_range(
    files: HubFiles,
    file: str,
    start: int,
    length: int,
    take: Callable[[int, bytes], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Hand `length` bytes of a repo's file at `start` to `take`, in order, each piece with its place.

    There are as many attempts as WAITS allows; each goes on where the last one broke off.

    Raises:
        EnvironmentFault: the Hub can't be reached, refuses, answers with other bytes, or has another file than before.
    """
    position, end, failures = start, start + length, 0

    def go_on(piece: bytes) -> None:
        nonlocal position
        take(position, piece)
        position += len(piece)

    while position < end:
        begun = position
        try:
            _request(files, file, position, end - position, go_on)
        except _Again as again:
            if again.wait > MAX_WAIT:
                raise EnvironmentFault(f"{file}: the Hub asks to wait {again.wait:.0f} s ({again})") from None
            failures = 1 if position - begun >= PROGRESS_BYTES else failures + 1
            if failures > len(WAITS):
                raise EnvironmentFault(
                    f"{file}: the Hub can't give bytes {position} to {end}, asked {failures} times ({again})"
                ) from None
            pause(max(WAITS[failures - 1], again.wait))


def _request(files: HubFiles, file: str, start: int, length: int, take: Callable[[bytes], None]) -> None:
    """One attempt. Raises _Again or EnvironmentFault, or what `take` raises."""
    url = huggingface_hub.hf_hub_url(files.repo.name, file, revision=files.commit)
    # Of compressed bytes no range could be told.
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
    came = 0
    try:
        with _streamed(url, headers) as (response, pieces):
            if response.status_code != 206:
                _raise_for_status(response, file)
            _check_range(response, file, start, length, files.sizes[file])
            _check_etag(response, file, files.etags)
            for piece in pieces:
                came += len(piece)
                if came > length:
                    raise EnvironmentFault(f"{file}: asked for {length} bytes, the Hub sends more")
                take(piece)
    except hub_errors() as error:
        raise _Again(hub_advice(error)) from None
    if came < length:
        raise _Again(f"only {came} of {length} bytes came")


@contextmanager
def _streamed(url: str, headers: Mapping[str, str]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """A response of which only the head is read yet, and its body in pieces.

    The session is one of requests, httpx or httpx2, as the version of huggingface_hub has it.
    """
    session: Any = get_session()
    options: dict[str, Any] = {"headers": headers, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
    if callable(getattr(session, "stream", None)):
        with session.stream("GET", url, **options) as response:
            yield response, response.iter_bytes()
    else:
        with session.get(url, stream=True, **options) as response:
            yield response, response.iter_content(_PIECE)


def _raise_for_status(response: Any, file: str) -> None:
    """Raise _Again or EnvironmentFault for a response that is no part of a file."""
    try:
        hf_raise_for_status(response)
    except hub_errors() as error:
        if _may_pass(error):
            raise _Again(hub_advice(error), _asked_wait(response.headers)) from None
        raise EnvironmentFault(f"{file}: the Hub refuses it ({hub_advice(error)})") from None
    raise EnvironmentFault(
        f"{file}: the server gives whole files only (status {response.status_code} to a request for some bytes); "
        "fetch it first with `hf download`"
    )


def _may_pass(error: Exception) -> bool:
    """Whether another attempt may do better: no answer at all, too many requests, or trouble on the server."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is None or status in (408, 429) or status >= 500


def _asked_wait(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks to wait: Retry-After, or the Hub's own `RateLimit: "api";r=0;t=55`."""
    asked = headers.get("Retry-After", "").strip()
    if asked.isdecimal():
        return float(asked)
    reset = _RATE_LIMIT_RESET.search(headers.get("RateLimit", ""))
    return float(reset[1]) if reset else 0.0


def _check_range(response: Any, file: str, start: int, length: int, size: int) -> None:
    told = response.headers.get("Content-Range", "")
    match = _CONTENT_RANGE.fullmatch(told)
    if not match or (int(match[1]), int(match[2])) != (start, start + length - 1):
        raise EnvironmentFault(
            f"{file}: asked for bytes {start}-{start + length - 1}, "
            f"the server sends {told[:100] or 'no Content-Range'}; fetch it first with `hf download`"
        )
    if match[3] not in ("*", str(size)):
        raise EnvironmentFault(f"{file}: changed on the Hub: it had {size} bytes and has {match[3]}; run again")


def _check_etag(response: Any, file: str, etags: dict[str, str]) -> None:
    """Compare the file's ETag with that of the reads before: the Hub's, not that of where it redirects to."""
    linked = (
        answer.headers.get(constants.HUGGINGFACE_HEADER_X_LINKED_ETAG) for answer in (*response.history, response)
    )
    etag = next(filter(None, linked), None) or response.headers.get("ETag")
    if etag is not None and etags.setdefault(file, etag) != etag:
        raise EnvironmentFault(f"{file}: changed on the Hub: its ETag was {etags[file]} and is {etag}; run again")
