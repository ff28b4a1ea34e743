"""A checkpoint to read: a local directory or a Hub snapshot. Headers, byte ranges and side files; never writes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from nvfp4prep.errors import EnvironmentFault, InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.header import HeaderError, TensorInfo, check_metadata_size, header_length, parse_header

INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 32_000_000
"""Of a config: the largest MIXED_PRECISION ones have about 5 MB."""
MAX_LARGE_JSON_BYTES = 128_000_000
"""Of files that grow with the number of tensors: an index of 1,000,000 tensors has about 110 MB."""
MAX_JSON_VALUES = 4_000_000
"""Commas, colons and opening brackets of a JSON file: no value comes without one, and an index has two for each tensor.

A value takes up to 100 bytes in memory, whatever it is. Measured: the worst file within the limits, 128 MB of keys with a
wide character each, peaks at 1.2 GB; 4,000,000 nested lists and objects at 0.4 GB; a real index of 100 MB too.
"""
MAX_JSON_DEPTH = 100
"""Of objects and lists in each other; a config.json has about five."""
_MAX_STRING = 1_000_000
_MAX_NUMBER = 1 << 128
_LARGE_JSON = frozenset({INDEX, "nvfp4prep.json"})
PARTIAL_MARKER = ".nvfp4prep-partial"
"""In outputs that the first version of `writer` did not finish."""
_NEVER_FOLDERS = frozenset({INDEX, "config.json", "hf_quant_config.json", "nvfp4prep.json"})
_HUB_SPEC = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
# Bookkeeping of git and of huggingface_hub's local folders: not part of the model.
_NOT_MODEL = frozenset({".git", ".cache", ".huggingface", "__pycache__"})


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
        try:
            descriptor = os.open(self.root / file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise EnvironmentFault(f"{file}: can't be opened: {error.strerror}") from None
        try:
            self._compare_state(file, os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _compare_state(self, file: str, found: os.stat_result) -> None:
        before, now = self.states.get(file), FileState.of(found)
        if before is None or before == now:
            return
        if before.size != now.size:
            what = f"it had {before.size} bytes and has {now.size}"
        else:
            what = "it was written to or replaced"
        raise EnvironmentFault(
            f"{file}: changed since its header was read: {what}; run again when nothing writes to it"
        )


def verify_unchanged(source: Source) -> None:
    """Raise EnvironmentFault, naming the file, when a shard is no longer what it was when its header was read."""
    for file in source.states:
        try:
            found = (source.root / file).stat()
        except OSError as error:
            raise EnvironmentFault(f"{file}: gone since its header was read: {error.strerror}") from None
        source._compare_state(file, found)


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
    """A stored tensor's bytes, or some of them. Raises as `Source.open_shard` and `read_part`."""
    descriptor = source.open_shard(tensor.file)
    try:
        return read_part(descriptor, tensor, start, tensor.nbytes - start if length is None else length)
    finally:
        os.close(descriptor)


def read_part(descriptor: int, tensor: TensorInfo, start: int, length: int) -> bytes:
    """`length` bytes of a tensor from its byte `start`; never bytes of its neighbours.

    Raises:
        EnvironmentFault: as read_range.
        ValueError: the tensor has no such bytes; a check on its shape is missing.
    """
    if start < 0 or length < 0 or start + length > tensor.nbytes:
        raise ValueError(f"{tensor.name}: bytes {start} to {start + length} asked for, it has {tensor.nbytes}")
    return read_range(descriptor, tensor.file, tensor.start + start, length)


def read_range(descriptor: int, file: str, start: int, length: int) -> bytes:
    """`length` bytes at `start`. Raises EnvironmentFault when the file ends before or can't be read."""
    parts: list[bytes] = []
    while length:
        try:
            part = os.pread(descriptor, length, start)
        except OSError as error:
            raise EnvironmentFault(f"{file}: reading at byte {start} failed: {error.strerror}") from None
        if not part:
            raise EnvironmentFault(
                f"{file}: nothing at byte {start}, {length} bytes missing; it changed while being read"
            )
        parts.append(part)
        start += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def open_source(spec: str) -> Source:
    """Open a local directory, or a Hub repo `org/name[@revision]` downloaded through huggingface_hub.

    Raises:
        InputRefused: it is no checkpoint, or a file in it is damaged.
        EnvironmentFault: it can't be read or downloaded.
    """
    if not spec:
        refuse("no-such-checkpoint", "SRC is empty; give a directory or a Hub repo")
    path = Path(spec).expanduser()
    if path.is_dir():
        return read_directory(path, spec=_text(path.resolve().name), revision=None)
    match = _HUB_SPEC.fullmatch(spec)
    if path.exists():
        refuse("not-a-directory", f"{spec} is a file; give the checkpoint's directory")
    if not match or spec.startswith((".", "~")):
        refuse("no-such-checkpoint", f"{spec}: no such directory, and not a Hub repo (org/name or org/name@revision)")
    root = _download(match["repo"], match["revision"])
    return read_directory(root, spec=match["repo"], revision=root.name if root.parent.name == "snapshots" else None)


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo, revision=revision))
    except HFValidationError as error:
        refuse("no-such-checkpoint", f"{repo}: {error}")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        at = f"@{revision}" if revision else ""
        advice = " ".join(str(error).replace("\\n", " ").split()) or type(error).__name__
        raise EnvironmentFault(
            f"{repo}{at}: no such directory here, and the Hub can't give it ({advice}); "
            "give a local directory, or fetch it first with `hf download`"
        ) from None


def refuse(rule: str, message: str, **place: Any) -> NoReturn:
    """Raise InputRefused with one finding."""
    raise InputRefused([Finding(rule, "error", message, **place)])


def read_directory(root: Path, *, spec: str, revision: str | None) -> Source:
    """Headers of all shards of a local directory, checked against the index and against each other."""
    if not any(root.glob("*.safetensors")) and not (root / INDEX).exists():
        _refuse_packed(root)
        refuse(
            "no-weights",
            "no *.safetensors file here; nvfp4prep reads safetensors checkpoints only",
            file=_text(str(root)),
        )
    files = sorted(_model_files(root))
    _refuse_packed(root)
    shard_names = [name for name in files if name.endswith(".safetensors") and "/" not in name]
    index = _read_index(root) if INDEX in files else None
    if index is not None:
        _check_shards_exist(index, shard_names)
    findings: list[Finding] = []
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    states: dict[str, FileState] = {}
    duplicates: list[Finding] = []
    for name in shard_names:
        states[name], found, shard_metadata = _read_shard_header(root, name)
        metadata = shard_metadata | metadata
        _check_metadata(metadata, name)
        for tensor in found:
            if tensor.name in tensors:
                duplicates.append(
                    Finding(
                        "tensor-in-two-shards",
                        "error",
                        f"also in {tensors[tensor.name].file}; remove the stray file",
                        file=name,
                        tensor=tensor.name,
                    )
                )
            tensors[tensor.name] = tensor
    if duplicates:
        raise InputRefused(duplicates)
    if index is not None:
        findings += _compare_index(index, tensors)
    side_files = tuple(name for name in files if name not in states and name != INDEX)
    shards = {name: state.size for name, state in states.items()}
    return Source(root, spec, revision, shards, metadata, tensors, side_files, tuple(findings), states)


def _check_metadata(metadata: Mapping[str, str], file: str) -> None:
    """Of all shards together, since each output file gets all of it."""
    try:
        check_metadata_size(metadata)
    except HeaderError as error:
        refuse("bad-shard", f"with the shards before it, {error}", file=file)


def _refuse_packed(root: Path) -> None:
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
    for folder in folders:
        prefix = f"{folder}/" if folder else ""
        if prefix + INDEX not in files:
            refuse("rank-missing", "not there; copy the whole output", file=prefix + INDEX)
        index = {name: prefix + shard for name, shard in _read_index(root / folder).items()}
        here = [name for name in files if name.startswith(prefix) and name.endswith(".safetensors")]
        here = [name for name in here if "/" not in name[len(prefix) :]]
        _check_shards_exist(index, here)
        found: dict[str, TensorInfo] = {}
        for name in here:
            states[name], listed, metadata = _read_shard_header(root, name)
            found |= {tensor.name: tensor for tensor in listed}
        _compare_index(index, found)
        tensors |= {prefix + name: tensor for name, tensor in found.items()}
    indexes = {f"{folder}/{INDEX}" if folder else INDEX for folder in folders}
    side_files = tuple(name for name in files if name not in states and name not in indexes)
    shards = {name: state.size for name, state in states.items()}
    return Source(root, _text(root.resolve().name), None, shards, metadata, tensors, side_files, (), states)


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
            if folder == str(root) and (name in _NEVER_FOLDERS or name.endswith(".safetensors")):
                refuse("not-a-file", "a folder where a file of the model belongs; rename or remove it", file=name)
        for name in names:
            path = Path(folder) / name
            if not path.is_file():
                refuse(
                    "not-a-file", "a broken link or special file; repair or remove it", file=str(path.relative_to(root))
                )
            yield path.relative_to(root).as_posix()


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


def _read_index(root: Path) -> dict[str, str]:
    table = read_json(root, INDEX) or {}
    weight_map = table.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        refuse("bad-index", "weight_map must map tensor names to shard names", file=INDEX)
    for shard in sorted(set(weight_map.values())):
        if not is_safe_name(shard):
            tensor = next(name for name, value in weight_map.items() if value == shard)
            message = f"names the shard {shard!r}; a shard is a file beside the index"
            refuse("unsafe-shard-name", message, file=INDEX, tensor=tensor)
    return weight_map


def is_safe_name(name: str) -> bool:
    """Whether an untrusted file name stays inside its folder: relative, one component, no control characters."""
    return PurePosixPath(name).name == name and name not in ("", ".", "..") and "\\" not in name and name.isprintable()


def _check_shards_exist(index: Mapping[str, str], shard_names: list[str]) -> None:
    missing = sorted(set(index.values()) - set(shard_names))
    if missing:
        raise InputRefused(
            [
                Finding(
                    "shard-missing",
                    "error",
                    f"named by {INDEX} ({sum(s == name for s in index.values())} tensors) but not there; fetch it",
                    file=name,
                )
                for name in missing
            ]
        )


def _read_shard_header(root: Path, name: str) -> tuple[FileState, list[TensorInfo], dict[str, str]]:
    try:
        with (root / name).open("rb") as file:
            state = FileState.of(os.fstat(file.fileno()))
            length = header_length(file.read(8), state.size)
            tensors, metadata = parse_header(file.read(length), name, state.size)
    except OSError as error:
        raise EnvironmentFault(f"{name}: can't be read: {error.strerror}") from None
    except HeaderError as error:
        refuse("bad-shard", str(error), file=name)
    return state, tensors, metadata


def _compare_index(index: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> list[Finding]:
    absent = [name for name in index if name not in tensors]
    if absent:
        raise InputRefused(
            [
                Finding(
                    "indexed-tensor-missing",
                    "error",
                    "in the index but not in the shard; fetch the shard again",
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
                Finding("index-wrong-shard", "warning", f"the index says {shard}", file=tensors[name].file, tensor=name)
            )
    unindexed = [tensor for name, tensor in tensors.items() if name not in index]
    for file in sorted({tensor.file for tensor in unindexed}):
        names = [tensor.name for tensor in unindexed if tensor.file == file]
        if PurePosixPath(file).name.startswith("consolidated"):
            refuse(
                "second-copy", "holds tensors under names that the index does not know; move this file away", file=file
            )
        findings.append(
            Finding(
                "unindexed-tensors",
                "warning",
                f"{len(names)} tensors are not in the index; they are kept and indexed",
                file=file,
                tensor=names[0],
            )
        )
    return findings
