"""Two calls of the C library that Python has no name for. Where the library lacks one, nothing happens."""

from __future__ import annotations

import ctypes
from typing import Any

_SYNC_FILE_RANGE_WRITE = 2
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 26
_LARGEST_BLOCK = 1 << 25
"""Glibc's own limit for blocks that come from the heap."""


def _function(name: str, *types: Any) -> Any:
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return lambda *_: 0
    found.argtypes = types
    return found


_sync_file_range = _function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_mallopt = _function("mallopt", ctypes.c_int, ctypes.c_int)


def start_writeback(descriptor: int) -> None:
    """Have the kernel begin to write a file's dirty pages to disk. Failures are left for fsync to report."""
    _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


def keep_freed_memory() -> None:
    """Have malloc keep up to 64 MiB of what is freed at the end of each thread's heap.

    By default it goes back to the kernel at once, and buffers of a few MB are zeroed page by page each time anew.
    """
    _mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)
    _mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
