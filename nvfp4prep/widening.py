"""16-bit floats to F32, by value."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def widened(dtype: str, raw: bytes | memoryview) -> npt.NDArray[np.float32]:
    """F32, BF16 or F16 bytes as F32, each value exactly: BF16 is the upper half of an F32; F16 is IEEE binary16.

    Raises:
        ValueError: another dtype.
    """
    import numpy as np

    if dtype == "F32":
        return np.frombuffer(raw, "<f4")
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    if dtype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"{dtype} is no float scale dtype")
