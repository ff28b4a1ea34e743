"""Prepare ModelOpt NVFP4 checkpoints so that inference engines agree on what they mean.

`open` and `load_experts` read packed outputs. They are imported, and PyTorch with them, when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nvfp4prep.loading import PackedCheckpoint, PackedExperts, PackedLayer, load_experts
    from nvfp4prep.loading import open_packed as open  # noqa: A004 - it is nvfp4prep.open

__version__ = "0.1.0"

__all__ = ["PackedCheckpoint", "PackedExperts", "PackedLayer", "__version__", "load_experts", "open"]


def __getattr__(name: str) -> Any:
    if name == "__version__" or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nvfp4prep import loading

    return getattr(loading, "open_packed" if name == "open" else name)
