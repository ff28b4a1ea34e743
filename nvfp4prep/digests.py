"""Digests of an output's files as its manifest lists them: over the header and each tensor's pieces, in file order."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from nvfp4prep.errors import EnvironmentFault
from nvfp4prep.header import TensorInfo, header_length
from nvfp4prep.plan import PIECE_BYTES
from nvfp4prep.ranges import read_range
from nvfp4prep.source import Source

_READ_BYTES = 1 << 23


def differing_files(
    source: Source,
    digests: Mapping[str, str],
    workers: int,
    piece_bytes: Callable[[str, TensorInfo], int] = lambda key, tensor: PIECE_BYTES,
) -> list[str]:
    """The files whose bytes have another digest than the one given for them.

    Args:
        source: the output; files that are no shards of it are left out.
        digests: `xxh3-128:...` by file.
        workers: threads.
        piece_bytes: how long the pieces of a tensor are; its key in the source comes along.

    Raises:
        EnvironmentFault: I/O.
    """
    by_file: dict[str, list[tuple[TensorInfo, int]]] = {file: [] for file in source.shards}
    for key, tensor in source.tensors.items():
        by_file[tensor.file].append((tensor, max(1, piece_bytes(key, tensor))))
    wrong = []
    with ThreadPoolExecutor(workers) as pool:
        for file in (file for file in digests if file in source.shards):
            whole = xxhash.xxh3_128(xxhash.xxh3_128_digest(read_header(source.root / file, source.shards[file])))
            descriptor = source.open_shard(file)
            try:
                pieces = [
                    (at, min(length, tensor.end - at))
                    for tensor, length in sorted(by_file[file], key=lambda pair: (pair[0].start, pair[0].end))
                    for at in range(tensor.start, tensor.end, length)
                ]
                for batch in (pieces[at : at + 4 * workers] for at in range(0, len(pieces), 4 * workers)):
                    for part in pool.map(lambda piece: _piece_digest(descriptor, file, *piece), batch):  # noqa: B023
                        whole.update(part)
            finally:
                os.close(descriptor)
            if f"xxh3-128:{whole.hexdigest()}" != digests[file]:
                wrong.append(file)
    return wrong


def read_header(path: Path, size: int) -> bytes:
    """A file's header with its length bytes. Raises EnvironmentFault, HeaderError."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            return start + file.read(header_length(start, size))
    except OSError as error:
        raise EnvironmentFault(f"{path}: can't be read: {error.strerror}") from None


def _piece_digest(descriptor: int, file: str, start: int, length: int) -> bytes:
    hasher = xxhash.xxh3_128()
    for at in range(start, start + length, _READ_BYTES):
        hasher.update(read_range(descriptor, file, at, min(_READ_BYTES, start + length - at)))
    return hasher.digest()
