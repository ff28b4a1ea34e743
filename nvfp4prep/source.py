"""A checkpoint to read: a local directory or a Hub snapshot. Headers, byte ranges and side files; never writes."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, NoReturn

from nvfp4prep.errors import EnvironmentFault, InputRefused
from nvfp4prep.findings import Finding, counted
from nvfp4prep.header import HeaderError, Tally, TensorInfo, check_metadata_size, header_length, parse_header
from nvfp4prep.ranges import LocalMaps, LocalReader, Maps, OpenShards, Reader, read_into, read_range
from nvfp4prep.schedule import apart

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 32_000_000
"""Of a config: the largest MIXED_PRECISION ones have about 5 MB."""
MAX_LARGE_JSON_BYTES = 128_000_000
"""Of files that grow with the number of tensors: an index of 1,000,000 tensors has about 110 MB."""
MAX_JSON_VALUES = 4_000_000
"""Commas, colons and opening brackets of a JSON file: no value comes without one, and an index has two for each tensor.

A value takes up to 100 bytes in memory, whatever it is. Measured: the worst file within the limits, 128 MB of keys with
a wide character each, peaks at 1.2 GB; 4,000,000 nested lists and objects at 0.4 GB; a real index of 100 MB too.
"""
MAX_JSON_DEPTH = 100
"""Of objects and lists in each other; a config.json has about five."""
_MAX_STRING = 1_000_000
_MAX_NUMBER = 1 << 128
_LARGE_JSON = frozenset({INDEX, "nvfp4prep.json"})
PARTIAL_MARKER = ".nvfp4prep-partial"
"""In outputs that the first version of `writer` did not finish."""
READ_FILES = frozenset({INDEX, "config.json", "hf_quant_config.json", "nvfp4prep.json"})
"""What is read beside the shards."""
_HUB_SPEC = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
# Bookkeeping of git and of huggingface_hub's local folders: not part of the model.
_NOT_MODEL = frozenset({".git", ".cache", ".huggingface", "__pycache__"})
SIDE_FILE_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells a file from the same one changed or replaced."""

    size: int
    mtime_ns: int
    inode: int

    @staticmethod
    def of(found: os.stat_result) -> FileState:
        return FileState(found.st_size, found.st_mtime_ns, found.st_ino)


@dataclass(frozen=True)
class Source:
    """A checkpoint's headers and where its bytes are.

    `tensors` maps each name to its TensorInfo in file order; `side_files` are all other files, relative, sorted.
    `states` is what each shard was when its header was read: a file that changes later must not be read on.
    """

    root: Path
    spec: str
    revision: str | None
    shards: Mapping[str, int]
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    side_files: tuple[str, ...]
    findings: tuple[Finding, ...]
    states: Mapping[str, FileState] = field(default_factory=dict)

    def open_shard(self, file: str) -> int:
        """A read-only file descriptor of a shard or side file; the caller closes it.

        Raises:
            EnvironmentFault: it can't be opened, or is another file than when its header was read.
        """
        return open_unchanged(self.root, file, self.states.get(file))

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Reads byte ranges of the shards, whether they are here or not; what it opened is closed at the end.

        Its reads raise as `open_shard` and `read_range`.
        """
        local = LocalReader(self.open_shard)
        try:
            yield local
        finally:
            local.close()

    @contextmanager
    def opened(
        self, items: Sequence[int], files_of: Callable[[int], Collection[str]], workers: int, stop: threading.Event
    ) -> Iterator[OpenShards]:
        """The shards open for a run over `items`, closed at the end.

        Args:
            items: numbers, in the order of the plan.
            files_of: the shards that an item reads.
            workers: how many items run at a time.
            stop: set when the run is to end; nobody then waits for a shard any longer.

        Raises:
            EnvironmentFault: as `open_shard`, here or where a descriptor is asked for.
        """
        with opened_shards(self) as descriptors:
            yield OpenShards(descriptors, apart(items, workers), lambda number: None)

    def passing_bytes(self, needs: Sequence[Collection[str]]) -> int:
        """The most bytes of shards on disk at a time only while a run over items with these needs reads them."""
        return 0

    def maps(self) -> Maps:
        """Memory maps of the shards as they are now, not as they were when their headers were read."""
        return LocalMaps(lambda file: open_unchanged(self.root, file, None))

    def side_bytes(self) -> int:
        """Bytes of all side files together. Raises OSError."""
        return sum((self.root / name).stat().st_size for name in self.side_files)

    def side_file(self, name: str) -> Iterator[bytes]:
        """A side file's bytes, in pieces. Raises OSError."""
        with (self.root / name).open("rb") as file:
            while piece := file.read(SIDE_FILE_PIECE):
                yield piece

    def identity(self) -> Iterator[str]:
        """What tells these shards from others, and from themselves once they were changed.

        Of a Hub repo that is the commit, wherever its files are now.
        """
        if self.revision is not None:
            yield f"{self.spec}\0{self.revision}"
        for file, size in sorted(self.shards.items()):
            yield f"{file}\0{size if self.revision is not None else self.states.get(file)}"

    def verify_unchanged(self) -> None:
        """Raise EnvironmentFault, naming the file, when a shard is no longer what it was when its header was read."""
        for file, before in self.states.items():
            try:
                found = (self.root / file).stat()
            except OSError as error:
                raise EnvironmentFault(f"{file}: gone since its header was read: {error.strerror}") from None
            _compare_state(file, before, found)


def open_unchanged(root: Path, file: str, before: FileState | None) -> int:
    """A read-only file descriptor of a file; the caller closes it.

    Raises:
        EnvironmentFault: it can't be opened, or is no longer what it was `before`.
    """
    try:
        descriptor = os.open(root / file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        advice = "; raise the limit (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
        raise EnvironmentFault(f"{file}: can't be opened: {error.strerror}{advice}") from None
    try:
        _compare_state(file, before, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _compare_state(file: str, before: FileState | None, found: os.stat_result) -> None:
    now = FileState.of(found)
    if before is None or before == now:
        return
    if before.size != now.size:
        what = f"it had {before.size} bytes and has {now.size}"
    else:
        what = "it was written to or replaced"
    raise EnvironmentFault(f"{file}: changed since its header was read: {what}; run again when nothing writes to it")


@contextmanager
def opened_shards(source: Source) -> Iterator[dict[str, int]]:
    """Descriptors of all shards, closed at the end. Raises as `Source.open_shard`."""
    with ExitStack() as stack:
        descriptors: dict[str, int] = {}
        for file in source.shards:
            descriptors[file] = source.open_shard(file)
            stack.callback(os.close, descriptors[file])
        yield descriptors


def read_tensor(source: Source, tensor: TensorInfo, start: int = 0, length: int | None = None) -> bytes:
    """A stored tensor's bytes, or some of them. Raises as `Source.reader` and `read_part`."""
    with source.reader() as reader:
        return read_slice(reader, tensor, start, tensor.nbytes - start if length is None else length)


def read_slice(reader: Reader, tensor: TensorInfo, start: int, length: int) -> bytes:
    """As `read_part`, through a reader."""
    _check_part(tensor, start, length)
    return reader.read(tensor.file, tensor.start + start, length)


def read_part(descriptor: int, tensor: TensorInfo, start: int, length: int) -> bytes:
    """`length` bytes of a tensor from its byte `start`; never bytes of its neighbours.

    Raises:
        EnvironmentFault: as read_range.
        ValueError: the tensor has no such bytes; a check on its shape is missing.
    """
    _check_part(tensor, start, length)
    return read_range(descriptor, tensor.file, tensor.start + start, length)


def read_part_into(descriptor: int, tensor: TensorInfo, start: int, buffer: memoryview) -> None:
    """As `read_part`, as many bytes as `buffer` holds into it."""
    _check_part(tensor, start, len(buffer))
    read_into(descriptor, tensor.file, tensor.start + start, buffer)


def _check_part(tensor: TensorInfo, start: int, length: int) -> None:
    if start < 0 or length < 0 or start + length > tensor.nbytes:
        raise ValueError(f"{tensor.name}: bytes {start} to {start + length} asked for, it has {tensor.nbytes}")


class HubRepo(NamedTuple):
    """A repo `org/name` and, where given, a branch, tag or commit of it."""

    name: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def open_source(spec: str) -> Source:
    """Open a local directory, or a Hub repo `org/name[@revision]` downloaded through huggingface_hub.

    Raises:
        InputRefused: it is no checkpoint, or a file in it is damaged.
        EnvironmentFault: it can't be read or downloaded.
    """
    found = locate(spec)
    return open_snapshot(found) if isinstance(found, HubRepo) else open_directory(found)


def locate(spec: str) -> Path | HubRepo:
    """The directory or Hub repo that SRC names. Raises InputRefused when it names neither."""
    if not spec:
        refuse("no-such-checkpoint", "SRC is empty; give a directory or a Hub repo")
    path = Path(spec).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        refuse("not-a-directory", f"{spec} is a file; give the checkpoint's directory")
    repo = hub_repo(spec)
    if repo is None:
        refuse("no-such-checkpoint", f"{spec}: no such directory, and not a Hub repo (org/name or org/name@revision)")
    return repo


def hub_repo(spec: str) -> HubRepo | None:
    """The repo that `org/name[@revision]` names, or None where it is not of that form."""
    match = _HUB_SPEC.fullmatch(spec)
    return HubRepo(match["repo"], match["revision"]) if match else None


def open_directory(path: Path) -> Source:
    """Open a local directory. Raises as `open_source`."""
    return read_directory(path, spec=_text(path.resolve().name), revision=None)


def open_snapshot(repo: HubRepo, *, local: bool = False) -> Source:
    """Open a Hub repo after downloading it in full; with `local`, only if huggingface_hub's cache has it.

    Raises:
        InputRefused, EnvironmentFault: as `open_source`.
    """
    import huggingface_hub

    with hub_faults(repo):
        root = Path(huggingface_hub.snapshot_download(repo.name, revision=repo.revision, local_files_only=local))
    return read_directory(root, spec=repo.name, revision=root.name if root.parent.name == "snapshots" else None)


@contextmanager
def hub_faults(repo: HubRepo) -> Iterator[None]:
    """What huggingface_hub raises, as InputRefused for a bad name and else as EnvironmentFault with its own advice."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except HFValidationError as error:
        refuse("no-such-checkpoint", f"{repo.name}: {error}")
    except hub_errors() as error:
        if isinstance(error, OSError) and isinstance(error.filename, str):  # of a file here, not of the Hub
            raise EnvironmentFault(
                f"{error.filename}: {error.strerror}; huggingface_hub keeps files there; HF_HOME names another place"
            ) from None
        raise EnvironmentFault(
            f"{repo}: no such directory here, and the Hub can't give it ({hub_advice(error)}); "
            "give a local directory, or fetch it first with `hf download`"
        ) from None


def hub_errors() -> tuple[type[Exception], ...]:
    """Base classes of all that huggingface_hub raises when the Hub can't be reached or refuses.

    The library under it is requests, httpx or httpx2, as its version has it. Its own error derives from theirs.
    """
    from huggingface_hub.errors import HfHubHTTPError

    return (OSError, *HfHubHTTPError.__bases__)


def hub_advice(error: Exception) -> str:
    """The message of one of `hub_errors` in one line."""
    return " ".join(str(error).replace("\\n", " ").split()) or type(error).__name__


def refuse(rule: str, message: str, **place: Any) -> NoReturn:
    """Raise InputRefused with one finding."""
    raise InputRefused([Finding(rule, "error", message, **place)])


def read_directory(root: Path, *, spec: str, revision: str | None) -> Source:
    """Headers of all shards of a local directory, checked against the index and against each other."""
    if not any(root.glob("*.safetensors")) and not (root / INDEX).exists():
        refuse_packed(root)
        refuse_no_weights(_text(str(root)))
    files = sorted(_model_files(root))
    refuse_packed(root)
    states: dict[str, FileState] = {}

    def read() -> Iterator[ShardHeader | HeaderError]:
        for name in names:
            try:
                states[name], tensors, metadata = _read_shard_header(root, name)
            except HeaderError as error:
                yield error
            else:
                yield tensors, metadata

    names = shard_names(files)
    tensors, metadata, findings = collect_headers(root, names, read())
    shards = {name: state.size for name, state in states.items()}
    return Source(root, spec, revision, shards, metadata, tensors, side_files(files), findings, states)


ShardHeader = tuple[list[TensorInfo], dict[str, str]]
"""A shard's tensors in file order, and its metadata."""


def shard_names(files: Iterable[str]) -> list[str]:
    """Those of a checkpoint's files that are its shards."""
    return [name for name in files if name.endswith(".safetensors") and "/" not in name]


def side_files(files: Sequence[str]) -> tuple[str, ...]:
    """All of a checkpoint's files but its shards and its index."""
    return tuple(sorted(set(files) - {*shard_names(files), INDEX}))


def collect_headers(
    root: Path, names: Sequence[str], headers: Iterable[ShardHeader | HeaderError]
) -> tuple[dict[str, TensorInfo], dict[str, str], tuple[Finding, ...]]:
    """The tensors and metadata of all shards, checked against the index and against each other, and what was noticed.

    Args:
        root: where the index is, if there is one.
        names: the shards that are there.
        headers: of each of them, or what is wrong with it; asked for one after another.

    Raises:
        InputRefused: with every shard that is missing or damaged, and every tensor that is in two of them.
    """
    index, claimed = _read_index(root) if (root / INDEX).is_file() else (None, None)
    refused = _missing_shards(index, names) if index is not None else []
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    tally = Tally()
    for name, header in zip(names, headers, strict=True):
        if isinstance(header, HeaderError):
            refused.append(Finding("bad-shard", "error", str(header), file=name))
            continue
        found, shard_metadata = header
        try:
            tally.add(found)
            # Of all shards together, since each output file gets all of it.
            metadata = shard_metadata | metadata
            check_metadata_size(metadata)
        except HeaderError as error:
            refused.append(Finding("bad-shard", "error", f"with the shards before it, {error}", file=name))
            break
        for tensor in found:
            if tensor.name in tensors:
                message = f"also in {tensors[tensor.name].file}; remove the stray file"
                refused.append(Finding("tensor-in-two-shards", "error", message, file=name, tensor=tensor.name))
            tensors[tensor.name] = tensor
    if refused:
        raise InputRefused(refused)
    if index is None:
        return tensors, metadata, ()
    return tensors, metadata, (*_compare_index(index, tensors), *_compare_size(claimed, tensors))


def refuse_no_weights(place: str) -> NoReturn:
    """Refuse a folder or repo without a single shard."""
    refuse("no-weights", "no *.safetensors file here; nvfp4prep reads safetensors checkpoints only", file=place)


def refuse_packed(root: Path) -> None:
    """Refuse one of our own packed outputs, naming layout and engine."""
    section = (read_json(root, "config.json") or {}).get("quantization_config")
    if isinstance(section, dict) and section.get("quant_method") == "nvfp4prep":
        layout, engine = section.get("layout"), section.get("engine")
        refuse(
            "already-packed",
            f"already packed as {layout} for {engine}; convert its source, or get it back with nvfp4prep unpack",
            file="config.json",
        )


def read_packed(root: Path, folders: Sequence[str]) -> Source:
    """Headers of a packed output, whose folders each have an index; tensors are keyed by folder and name.

    Raises:
        InputRefused: a folder, file or tensor is missing or damaged.
    """
    files = sorted(_model_files(root))
    tensors: dict[str, TensorInfo] = {}
    states: dict[str, FileState] = {}
    metadata: dict[str, str] = {}
    tally = Tally()
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        if prefix + INDEX not in files:
            refuse("rank-missing", "not there; copy the whole output", file=prefix + INDEX)
        index = {name: prefix + shard for name, shard in _read_index(root / folder)[0].items()}
        here = [name for name in files if name.startswith(prefix) and name.endswith(".safetensors")]
        here = [name for name in here if "/" not in name[len(prefix) :]]
        missing = _missing_shards(index, here)
        if missing:
            raise InputRefused(missing)
        found: dict[str, TensorInfo] = {}
        for name in here:
            try:
                states[name], listed, metadata = _read_shard_header(root, name)
                tally.add(listed)
            except HeaderError as error:
                refuse("bad-shard", str(error), file=name)
            found |= {tensor.name: tensor for tensor in listed}
        _compare_index(index, found)
        tensors |= {prefix + name: tensor for name, tensor in found.items()}
    indexes = {f"{folder}/{INDEX}" if folder else INDEX for folder in folders}
    others = tuple(name for name in files if name not in states and name not in indexes)
    shards = {name: state.size for name, state in states.items()}
    return Source(root, _text(root.resolve().name), None, shards, metadata, tensors, others, (), states)


def _text(name: str) -> str:
    """A file name as text that can always be encoded; bytes of it that are no UTF-8 become escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _model_files(root: Path) -> Iterable[str]:
    """Every file of the model, relative to `root`.

    Refuses what can't be copied under the same name: names that are no UTF-8, links to folders (a link to a file is
    followed; behind one to a folder may lie anything, the output itself too), special files, and folders named like
    files that are read or written.
    """

    def fail(error: OSError) -> None:
        raise EnvironmentFault(f"{error.filename}: can't be listed: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = sorted(name for name in folders if name not in _NOT_MODEL)
        for name in (*folders, *names):
            path = (Path(folder) / name).relative_to(root)
            if _text(name) != name:
                refuse("undecodable-name", f"{name!a} is not UTF-8; rename it", file=_text(str(path)))
            if folder == str(root) and name == PARTIAL_MARKER:
                message = "marks an output that nvfp4prep did not finish; convert its source again"
                refuse("unfinished-output", message, file=name)
        for name in folders:
            path = Path(folder) / name
            if path.is_symlink():
                message = "a link to a folder; put the folder in its place, or remove it"
                refuse("linked-folder", message, file=str(path.relative_to(root)))
            if folder == str(root) and (name in READ_FILES or name.endswith(".safetensors")):
                refuse("not-a-file", "a folder where a file of the model belongs; rename or remove it", file=name)
        for name in names:
            path = Path(folder) / name
            if not path.is_file():
                refuse(
                    "not-a-file", "a broken link or special file; repair or remove it", file=str(path.relative_to(root))
                )
            yield path.relative_to(root).as_posix()


def listed_files(paths: Iterable[str]) -> list[str]:
    """The files of the model among those that a repo lists, sorted; refuses what `_model_files` would.

    Raises:
        EnvironmentFault: a path leads out of the repo.
    """
    files = []
    for path in sorted(paths):
        parts = path.split("/")
        if not all(PurePosixPath(part).name == part and part not in ("", "..") for part in parts):
            raise EnvironmentFault(f"the Hub lists a file {path!r}, which is no path inside a repo")
        if len(parts) > 1 and (parts[0] in READ_FILES or parts[0].endswith(".safetensors")):
            message = "a folder where a file of the model belongs; rename or remove it"
            refuse("not-a-file", message, file=parts[0])
        if path == PARTIAL_MARKER:
            message = "marks an output that nvfp4prep did not finish; convert its source again"
            refuse("unfinished-output", message, file=path)
        if not _NOT_MODEL & set(parts[:-1]):
            files.append(path)
    return files


def read_json(root: Path, file: str) -> dict[str, Any] | None:
    """A JSON object of the checkpoint, or None when the file isn't there.

    What is read can be written again: its text can be encoded, its numbers are finite. Only config.json may hold
    Infinity where `may_be_infinite` says so, since transformers itself writes it.

    Raises:
        InputRefused: anything else.
    """
    path = root / file
    if path.is_dir():
        refuse("not-a-file", "a folder where a file of the model belongs; rename or remove it", file=file)
    if not path.is_file():
        return None
    try:
        value = _parse_json(_read_text(path, MAX_LARGE_JSON_BYTES if file in _LARGE_JSON else MAX_JSON_BYTES))
        for number, place in non_finite(value):
            if math.isnan(number) or file != "config.json" or not may_be_infinite(place):
                raise ValueError(f"{_dotted(place)} is {number}, which JSON does not have")
    except OSError as error:
        raise EnvironmentFault(f"{file}: can't be read: {error.strerror}") from None
    except ValueError as error:
        refuse("bad-json", f"not valid JSON: {error}" if isinstance(error, _NOT_JSON) else str(error), file=file)
    if not isinstance(value, dict):
        refuse("bad-json", f"a JSON {type(value).__name__}, not an object", file=file)
    return value


_NOT_JSON = (json.JSONDecodeError, UnicodeDecodeError)


def _read_text(path: Path, limit: int) -> str:
    """A JSON file's text. Raises ValueError where it, or what would be parsed from it, takes too much memory."""
    with path.open("rb") as reader:
        raw = reader.read(limit + 1)
    if len(raw) > limit:
        raise ValueError(f"{max(len(raw), path.stat().st_size)} bytes, over the limit of {limit}")
    if sum(map(raw.count, (b",", b":", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"over {MAX_JSON_VALUES:,} values; no file of a checkpoint has as many")
    return raw.decode(json.detect_encoding(raw))


def _parse_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for what can't be written again, or would stop other code."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's own limit
        raise ValueError("a number of thousands of digits") from None
    except RecursionError:
        raise ValueError(f"objects or lists nested over {MAX_JSON_DEPTH} deep") from None
    surrogates = "\\u" in text  # in pairs they are characters, alone no text
    for key, child, path in _walk(value):
        if len(path) > MAX_JSON_DEPTH:
            raise ValueError(f"objects or lists nested over {MAX_JSON_DEPTH} deep")
        for string in (key, child):
            if isinstance(string, str):
                if len(string) > _MAX_STRING:
                    raise ValueError(f"a string of {len(string)} characters, over the limit of {_MAX_STRING}")
                if surrogates and not string.isascii():
                    _check_surrogates(string)
        if isinstance(child, int) and abs(child) >= _MAX_NUMBER:
            raise ValueError(f"{_dotted((*path, key))} is a number of {len(str(abs(child)))} digits")
    return value


def _check_surrogates(string: str) -> None:
    try:
        string.encode()
    except UnicodeEncodeError:
        raise ValueError("a string holds half a surrogate pair, which is no text") from None


def _dotted(place: Sequence[str | int]) -> str:
    """A place for a message, cut."""
    text = ".".join(str(part) if isinstance(part, int) else part[:100] for part in place)
    return text if len(text) <= 200 else f"{text[:200]}..."


Place = tuple[str | int, ...]
"""Keys and list positions that lead to a value of a JSON object."""


def _walk(value: Any) -> Iterator[tuple[str | int, Any, Sequence[str | int]]]:
    """Every value inside a JSON value: its key or position, itself, and what leads to the object or list it is in.

    The last is one list that changes on the way; it takes no more memory than the value is deep.
    """

    def children(part: Any) -> Iterator[tuple[str | int, Any]]:
        return iter(part.items()) if isinstance(part, dict) else enumerate(part)

    path: list[str | int] = []
    open_ = [children(value)] if isinstance(value, dict | list) else []
    while open_:
        for key, child in open_[-1]:
            yield key, child, path
            if isinstance(child, dict | list):
                path.append(key)
                open_.append(children(child))
                break
        else:
            open_.pop()
            if path:
                path.pop()


def non_finite(value: Any) -> Iterator[tuple[float, Place]]:
    """NaN and infinities of a parsed JSON value, with where they are: literals, and numbers too large such as 1e999."""
    for key, child, path in _walk(value):
        if isinstance(child, float) and not math.isfinite(child):
            yield child, (*path, key)


def may_be_infinite(place: Place) -> bool:
    """Whether config.json may hold an infinity there: in a list of a key that nvfp4prep does not read.

    Nemotron-H's has `"time_step_limit": [0.0, Infinity]`.
    """
    return isinstance(place[-1], int) and not {"quantization_config", "architectures"} & set(place)


def _read_index(root: Path) -> tuple[dict[str, str], Any]:
    """The shard of each tensor by the index, and the total_size that it claims."""
    table = read_json(root, INDEX) or {}
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        refuse("bad-index", "weight_map must map tensor names to shard names", file=INDEX)
    for shard in sorted(set(weight_map.values())):
        if not is_safe_name(shard):
            tensor = next(name for name, value in weight_map.items() if value == shard)
            message = f"names the shard {shard!r}; a shard is a file beside the index"
            refuse("unsafe-shard-name", message, file=INDEX, tensor=tensor)
    metadata = table.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def is_safe_name(name: str) -> bool:
    """Whether an untrusted file name stays inside its folder: relative, one component, no control characters."""
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and "\\" not in name and name.isprintable()


def _missing_shards(index: Mapping[str, str], names: Iterable[str]) -> list[Finding]:
    counts = Counter(index.values())
    return [
        Finding(
            "shard-missing",
            "error",
            f"named by {INDEX} ({counted(counts[name], 'tensor')}) but not there; fetch it",
            file=name,
        )
        for name in sorted(counts.keys() - set(names))
    ]


def _read_shard_header(root: Path, name: str) -> tuple[FileState, list[TensorInfo], dict[str, str]]:
    """Raises HeaderError, or EnvironmentFault."""
    try:
        with (root / name).open("rb") as file:
            state = FileState.of(os.fstat(file.fileno()))
            length = header_length(file.read(8), state.size)
            tensors, metadata = parse_header(file.read(length), name, state.size)
    except OSError as error:
        raise EnvironmentFault(f"{name}: can't be read: {error.strerror}") from None
    return state, tensors, metadata


def _compare_size(claimed: Any, tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    stored = sum(tensor.nbytes for tensor in tensors.values())
    if not isinstance(claimed, int) or claimed == stored:
        return []
    message = f"total_size is {claimed}, the tensors have {stored} bytes; convert writes it anew"
    return [Finding("index-total-size", "info", message, INDEX)]


def _compare_index(index: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    absent = [name for name in index if name not in tensors]
    if absent:
        raise InputRefused(
            [
                Finding(
                    "indexed-tensor-missing",
                    "error",
                    f"{INDEX} names it, but the shard does not have it; fetch both again",
                    file=index[name],
                    tensor=name,
                )
                for name in absent
            ]
        )
    findings = []
    for name, shard in index.items():
        if tensors[name].file != shard:
            findings.append(
                Finding("index-wrong-shard", "warning", f"{INDEX} says {shard}", file=tensors[name].file, tensor=name)
            )
    unindexed = [tensor for name, tensor in tensors.items() if name not in index]
    for file in sorted({tensor.file for tensor in unindexed}):
        names = [tensor.name for tensor in unindexed if tensor.file == file]
        many = len(names) > 1
        if PurePosixPath(file).name.startswith("consolidated"):
            refuse(
                "second-copy", "holds tensors under names that the index does not know; move this file away", file=file
            )
        findings.append(
            Finding(
                "unindexed-tensors",
                "warning",
                f"{counted(len(names), 'tensor')} {'are' if many else 'is'} not in {INDEX}; convert keeps and indexes "
                f"{'them' if many else 'it'}",
                file=file,
                tensor=names[0],
            )
        )
    return findings
