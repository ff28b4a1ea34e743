"""Packed outputs as their files say: what each rank holds, put together again by the kernels' index formulas.

Files are read with safetensors' own library. Where things lie comes from `layout_emulator`'s index functions and from
the tables below; nothing here calls nvfp4prep's pack, unpack or permutations. nvfp4prep says which layouts there
are, and converts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import layout_emulator as emulator
import numpy as np
import torch
from layout_emulator import E4M3, Ints
from numpy.typing import NDArray
from safetensors import safe_open

from nvfp4prep import convert, layouts, unpack
from nvfp4prep.checkpoint import Checkpoint, read_checkpoint
from nvfp4prep.convert import Prepared, Result
from nvfp4prep.options import Options
from nvfp4prep.schema import Format

PAIRS = tuple(
    (name, engine)
    for name, layout in layouts.LAYOUTS.items()
    if layout.REQUIRES.format is Format.NVFP4
    for engine in layout.REQUIRES.engines
)
"""Every NVFP4 layout for every engine that takes it."""
LAYOUTS = tuple(dict.fromkeys(layout for layout, _ in PAIRS))
ENGINES = tuple(dict.fromkeys(engine for _, engine in PAIRS))
INDEX = "model.safetensors.index.json"
MANIFEST = "nvfp4prep.json"

Bytes = NDArray[np.uint8]


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


# --- running nvfp4prep ---


@contextmanager
def unsynced() -> Iterator[None]:
    """Without fsync, which takes most of the time of small conversions."""
    with patch.object(os, "fsync", lambda descriptor: None):
        yield


def decide(source: Path | Checkpoint, target: str, **options: Any) -> Prepared:
    checkpoint = read_checkpoint(str(source)) if isinstance(source, Path) else source
    return convert.decide(checkpoint, Options(target, **options))


def write(prepared: Prepared, out: Path) -> Result:
    with unsynced():
        return convert.write(prepared, out, overwrite=False, workers=1, progress=lambda _: None)


def pack(source: Path | Checkpoint, out: Path, target: str, **options: Any) -> Path:
    write(decide(source, target, **options), out)
    return out


def unpacked(packed: Path, out: Path) -> Path:
    with unsynced():
        prepared = unpack.prepare(packed, out, overwrite=False)
        unpack.write(prepared, out, overwrite=False, workers=1, progress=lambda _: None)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the manifest."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST
    }


def differences(ours: Mapping[str, bytes], expected: Mapping[str, bytes]) -> list[str]:
    """Names of files that are not the same in both."""
    return sorted(name for name in ours.keys() | expected.keys() if ours.get(name) != expected.get(name))


# --- reading ---


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's files; each name once, each file as its index says."""
    found: dict[str, torch.Tensor] = {}
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in found, name
                found[name], files[name] = file.get_tensor(name), path.name
    if (folder / INDEX).is_file():
        assert json.loads((folder / INDEX).read_text())["weight_map"] == files
    else:
        assert len(set(files.values())) == 1
    return found


def same_bytes(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Same dtype, shape and bytes: NaN equals itself."""
    alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return alike and torch.equal(ours.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@dataclass(frozen=True)
class Matrices:
    """One expert's bytes: nibbles [N, K] and E4M3 codes [N, K/16] of gate (None when not gated), up and down."""

    gate: tuple[Bytes, Bytes] | None
    up: tuple[Bytes, Bytes]
    down: tuple[Bytes, Bytes]

    def pairs(self, other: Matrices) -> Iterator[tuple[str, tuple[Bytes, Bytes] | None, tuple[Bytes, Bytes] | None]]:
        yield "gate", self.gate, other.gate
        yield "up", self.up, other.up
        yield "down", self.down, other.down


def assert_same(ours: Matrices, expected: Matrices, label: str) -> None:
    for name, mine, theirs in ours.pairs(expected):
        assert (mine is None) == (theirs is None), (label, name)
        if mine is not None and theirs is not None:
            for what, a, b in zip(("nibbles", "scales"), mine, theirs, strict=True):
                assert a.shape == b.shape, (label, name, what, a.shape, b.shape)
                assert (a == b).all(), (label, name, what, f"{(a != b).sum()} differ")


def nibbles_of(weight: torch.Tensor) -> Bytes:
    """U8 [N, K/2], low nibble first, as [N, K]."""
    codes = weight.contiguous().view(torch.uint8).numpy()
    return np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)


def codes_of(scale: torch.Tensor) -> Bytes:
    codes: Bytes = scale.contiguous().view(torch.uint8).numpy()
    return codes


_KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_EXPERT = re.compile(r"(?P<moe>.+)\.experts\.(?P<expert>\d+)\.(?P<kind>\w+)\.weight_scale")
_FUSED = re.compile(r"(?P<moe>.+)\.experts\.(?P<kind>gate_up_proj|down_proj)_weight_scale")


@dataclass
class Logical:
    """The experts of a checkpoint in its own form (an `hf` output), by MoE path."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    names: dict[str, dict[tuple[int | None, str], str]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Logical:
        found = cls(tensors_of(folder), read_json(folder / "config.json"))
        for name, tensor in found.tensors.items():
            if tensor.dtype != torch.float8_e4m3fn:
                continue
            module = (
                name.removesuffix("_weight_scale") if _FUSED.fullmatch(name) else name.removesuffix(".weight_scale")
            )
            if match := _EXPERT.fullmatch(name):
                found.names.setdefault(match["moe"], {})[int(match["expert"]), _KINDS[match["kind"]]] = module
            elif match := _FUSED.fullmatch(name):
                found.names.setdefault(match["moe"], {})[None, match["kind"].removesuffix("_proj")] = module
        return found

    @property
    def interleaved(self) -> bool:
        return str(self.config["model_type"]).startswith("gpt_oss")

    def fused(self, moe: str) -> bool:
        return (None, "down") in self.names[moe]

    def gated(self, moe: str) -> bool:
        return self.fused(moe) or (0, "gate") in self.names[moe]

    def count(self, moe: str) -> int:
        if self.fused(moe):
            return self.tensors[self.names[moe][None, "down"]].shape[0]
        return 1 + max(expert for expert, _ in self.names[moe] if expert is not None)

    def _half(self, tensor: torch.Tensor, half: int) -> torch.Tensor:
        """Columns of gate (0) or up (1) of a fused tensor, [.., 2I]."""
        inner = tensor.shape[-1] // 2
        return tensor[..., half::2] if self.interleaved else tensor[..., half * inner : (half + 1) * inner]

    def _matrix(self, moe: str, expert: int, kind: str) -> tuple[Bytes, Bytes]:
        names = self.names[moe]
        if not self.fused(moe):
            module = names[expert, kind]
            return nibbles_of(self.tensors[f"{module}.weight"]), codes_of(self.tensors[f"{module}.weight_scale"])
        module = names[None, "down" if kind == "down" else "gate_up"]
        parts = [self.tensors[module][expert], self.tensors[f"{module}_weight_scale"][expert].view(torch.uint8)]
        if kind != "down":
            parts = [self._half(part, int(kind == "up")) for part in parts]
        return nibbles_of(parts[0].T), codes_of(parts[1].T)

    def matrices(self, moe: str, expert: int) -> Matrices:
        gate = self._matrix(moe, expert, "gate") if self.gated(moe) else None
        return Matrices(gate, self._matrix(moe, expert, "up"), self._matrix(moe, expert, "down"))

    def scale(self, moe: str, expert: int, kind: str, param: str = "weight_scale_2") -> float:
        if not self.fused(moe):
            return float(self.tensors[f"{self.names[moe][expert, kind]}.{param}"])
        module = self.names[moe][None, "down" if kind == "down" else "gate_up"]
        tensor = self.tensors[f"{module}_{param}"]
        if tensor.ndim == 2:
            return float(tensor[expert, int(kind == "up")])
        return float(tensor[expert] if tensor.ndim else tensor)

    def bias(self, moe: str, expert: int, kind: str) -> NDArray[np.float64] | None:
        if not self.fused(moe):
            tensor = self.tensors.get(f"{self.names[moe][expert, kind]}.bias")
            return None if tensor is None else emulator.reals(tensor)
        module = self.names[moe][None, "down" if kind == "down" else "gate_up"]
        tensor = self.tensors.get(f"{module}_bias")
        if tensor is None:
            return None
        tensor = tensor[expert]
        return emulator.reals(tensor if kind == "down" else self._half(tensor, int(kind == "up")))


# --- packed files ---


@dataclass(frozen=True)
class Sizes:
    """What a rank's tensors are sized for, from the logical sizes: the engines' rules, written again here."""

    layout: str
    engine: str
    hidden: int
    total: int
    gated: bool
    tp: int

    @property
    def padded_hidden(self) -> int:
        vllm_pads = self.engine == "vllm" and self.layout in ("flashinfer-trtllm", "flashinfer-cutedsl")
        return up(self.hidden, 256) if vllm_pads else self.hidden

    @property
    def multiple(self) -> int:
        if self.layout == "vllm-marlin" and self.engine == "vllm":
            return 64 if self.hidden % 128 == 0 else 128
        return 64 if self.gated else 128

    @property
    def padded(self) -> int:
        """I of a rank after padding."""
        return up(self.total // self.tp, self.multiple)

    def share(self, rank: int) -> tuple[int, int]:
        """Rows of gate and up that a TP rank holds; SGLang's TRT-LLM loader steps by the padded size."""
        step = self.padded if (self.layout, self.engine) == ("flashinfer-trtllm", "sglang") else self.total // self.tp
        return min(rank * step, self.total), min((rank + 1) * step, self.total)

    @property
    def w13_rows(self) -> int:
        return self.padded * (2 if self.gated else 1)


def destination_rows(layout: str, inner: int, gated: bool) -> tuple[Ints | None, Ints]:
    """Rows of the stored w13 that hold row i of gate and of up."""
    i = np.arange(inner)
    if layout == "flashinfer-trtllm":
        if not gated:
            return None, emulator.shuffled_row(i)
        return emulator.shuffled_row(2 * i + 1), emulator.shuffled_row(2 * i)
    if layout == "flashinfer-cutlass":
        return emulator.up_first(gated)(inner)
    if layout == "flashinfer-cutedsl":
        return emulator.chunks_of_64(gated)(inner)
    return emulator.gate_first(gated)(inner)


def _marlin_codes(stored: Bytes, factor: float) -> Bytes:
    """E4M3 codes of S0E5M3 bytes: the byte is bits 14 to 7 of half(value · factor · 2^7)."""
    values = (stored.astype(np.uint16) << 7).view(np.float16).astype(np.float64) / 2**7 / factor
    table = {value: code for code, value in enumerate(E4M3[:127])}
    return np.array([table[value] for value in values.reshape(-1).tolist()], dtype=np.uint8).reshape(stored.shape)


@dataclass(frozen=True)
class Rank:
    """One rank's tensors of one packed output, read back."""

    packed: Packed
    tp: int
    ep: int
    tensors: Mapping[str, torch.Tensor]

    def engine(self, moe: str, name: str) -> torch.Tensor:
        """The engine's parameter."""
        middle = ".routed_experts." if self.packed.engine == "vllm" else "."
        return self.tensors[f"{moe}.experts{middle}{name}"]

    def own(self, moe: str, name: str) -> torch.Tensor:
        return self.tensors[f"{moe}.experts.nvfp4prep.{name}"]

    def has_own(self, moe: str, name: str) -> bool:
        return f"{moe}.experts.nvfp4prep.{name}" in self.tensors

    def big(self, moe: str, name: str) -> torch.Tensor:
        """w13_weight, w13_weight_scale, w2_weight or w2_weight_scale, whatever the engine calls it."""
        swizzled = self.packed.engine == "sglang" and self.packed.layout in ("flashinfer-cutlass", "flashinfer-cutedsl")
        return self.engine(moe, name.replace("weight_scale", "blockscale_swizzled") if swizzled else name)

    def _plain(self, moe: str, gemm: str, local: int, rows: Ints, columns: int) -> tuple[Bytes, Bytes]:
        weight, scale = self.big(moe, f"{gemm}_weight"), self.big(moe, f"{gemm}_weight_scale")
        flat, k = emulator.raw(weight), np.arange(columns)
        assert weight.dtype == torch.uint8 and weight.shape[2] * 2 == columns, (weight.dtype, weight.shape, columns)
        at = (local * weight.shape[1] + rows[:, None]) * columns + k
        per_expert = scale[0].numel()
        block = np.arange(columns // 16)
        offset = local * per_expert + emulator.swizzled_offset(rows[:, None], block, columns // 16)
        return flat[at // 2] >> (4 * (at % 2)).astype(np.uint8) & 15, emulator.raw(scale)[offset]

    def _marlin(self, moe: str, gemm: str, local: int, rows: Ints, columns: int) -> tuple[Bytes, Bytes]:
        weight, scale = self.big(moe, f"{gemm}_weight"), self.big(moe, f"{gemm}_weight_scale")
        assert weight.dtype == torch.int32 and weight.shape[1] * 16 == columns, (weight.dtype, weight.shape, columns)
        width = weight.shape[2] // 2
        flat, k, block = emulator.raw(weight), np.arange(columns), np.arange(columns // 16)
        at = local * columns * width + emulator.marlin_nibble(k, rows[:, None], width)
        scale_at = (local * (columns // 16) + block) * width + emulator.marlin_scale_column(rows[:, None])
        factor = float(self.own(moe, f"{gemm}_scale_factor")[local])
        stored = emulator.raw(scale)[scale_at]
        return flat[at // 2] >> (4 * (at % 2)).astype(np.uint8) & 15, _marlin_codes(stored, factor)

    def matrices(self, moe: str, local: int, sizes: Sizes) -> Matrices:
        """One expert's part at its padded size."""
        read = self._marlin if self.packed.layout == "vllm-marlin" else self._plain
        gate_rows, up_rows = destination_rows(self.packed.layout, sizes.padded, sizes.gated)
        out = np.arange(sizes.padded_hidden)
        w2_rows = emulator.shuffled_row(out) if self.packed.layout == "flashinfer-trtllm" else out
        return Matrices(
            None if gate_rows is None else read(moe, "w13", local, gate_rows, sizes.padded_hidden),
            read(moe, "w13", local, up_rows, sizes.padded_hidden),
            read(moe, "w2", local, w2_rows, sizes.padded),
        )


@dataclass(frozen=True)
class Packed:
    """A packed output, read back."""

    folder: Path
    layout: str
    engine: str
    tp: int
    ep: int
    dtype: str = "bf16"

    def rank_folder(self, tp: int, ep: int) -> Path:
        if self.tp == self.ep == 1:
            return self.folder
        return self.folder / f"rank-{tp:02d}-of-{self.tp:02d}_{ep:02d}-of-{self.ep:02d}"

    @cached_property
    def ranks(self) -> dict[tuple[int, int], Rank]:
        return {
            (tp, ep): Rank(self, tp, ep, tensors_of(self.rank_folder(tp, ep)))
            for tp in range(self.tp)
            for ep in range(self.ep)
        }

    def sizes(self, logical: Logical, moe: str) -> Sizes:
        nibbles = logical.matrices(moe, 0).up[0]
        return Sizes(self.layout, self.engine, nibbles.shape[1], nibbles.shape[0], logical.gated(moe), self.tp)

    def whole(self, moe: str, expert: int, logical: Logical) -> Matrices:
        """One expert over all TP ranks, padding checked to be zero and taken off."""
        sizes, each = self.sizes(logical, moe), logical.count(moe) // self.ep
        ep, local = divmod(expert, each)
        ups, gates, downs = [], [], []
        for tp in range(self.tp):
            part = self.ranks[tp, ep].matrices(moe, local, sizes)
            start, end = sizes.share(tp)
            mine, hidden = end - start, sizes.hidden
            for matrix, rows, columns in (
                (part.gate, mine, hidden),
                (part.up, mine, hidden),
                (part.down, hidden, mine),
            ):
                if matrix is not None:
                    for values, width in zip(matrix, (columns, columns // 16), strict=True):
                        assert not values[rows:].any() and not values[:, width:].any(), (moe, expert, tp, "padding")
            ups.append([values[:mine, :width] for values, width in zip(part.up, (hidden, hidden // 16), strict=True)])
            if part.gate is not None:
                gates.append(
                    [values[:mine, :width] for values, width in zip(part.gate, (hidden, hidden // 16), strict=True)]
                )
            downs.append([values[:hidden, :width] for values, width in zip(part.down, (mine, mine // 16), strict=True)])
        return Matrices(
            (np.concatenate([g[0] for g in gates]), np.concatenate([g[1] for g in gates])) if gates else None,
            (np.concatenate([u[0] for u in ups]), np.concatenate([u[1] for u in ups])),
            (np.concatenate([d[0] for d in downs], 1), np.concatenate([d[1] for d in downs], 1)),
        )
