"""Golden vectors: what real kernels gave, read from a safetensors file, and how far from it a result is.

For machines that have torch and little else: safetensors is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.header import header_length, parse_header

_STORED: Mapping[str, torch.dtype] = {
    "F8_E4M3": torch.uint8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file; E4M3 as U8 codes."""
    raw = bytearray(path.read_bytes())
    end = 8 + header_length(bytes(raw[:8]), len(raw))
    infos, _ = parse_header(bytes(raw[8:end]), path.name, len(raw))
    return {
        info.name: torch.frombuffer(raw[info.start : info.end], dtype=_STORED[info.dtype]).view(info.shape)
        for info in infos
    }


def case_of(tensors: Mapping[str, Tensor], case: str) -> dict[str, Tensor]:
    """The tensors of one case, `case.name`, by their names."""
    return {name.removeprefix(f"{case}."): tensor for name, tensor in tensors.items() if name.startswith(f"{case}.")}


def difference(ours: Tensor, golden: Tensor) -> dict[str, Any]:
    """Relative L2, and how many elements are not the same."""
    mine, theirs = ours.cpu().to(torch.float64), golden.to(torch.float64)
    return {
        "relative_l2": float((mine - theirs).norm() / theirs.norm()),
        "differing": int((mine != theirs).sum()),
        "elements": mine.numel(),
    }
