"""Variants of a shipped checkpoint: load one, change its tensors and configs, save it elsewhere."""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
SCALARS = ("weight_scale_2", "input_scale")


@dataclass
class Editable:
    """A checkpoint in memory. `files` says which shard holds a tensor; a new tensor goes to the first shard."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    files: dict[str, str]
    config: dict[str, Any]
    hf: dict[str, Any] | None
    order: Callable[[str], Any] | None = None

    def names(self, pattern: str) -> list[str]:
        """Tensors whose whole name matches; never empty, so that a damage can't silently do nothing."""
        found = [name for name in self.tensors if re.fullmatch(pattern, name)]
        assert found, f"no tensor of {self.folder.name} matches {pattern}"
        return found

    def scales(self, param: str | Sequence[str] = SCALARS, within: str = ".*") -> list[str]:
        params = [param] if isinstance(param, str) else param
        return self.names(rf"{within}[._](?:{'|'.join(params)})")

    def rename(self, change: Callable[[str], str]) -> None:
        self.tensors = {change(name): tensor for name, tensor in self.tensors.items()}
        self.files = {change(name): file for name, file in self.files.items()}

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            del self.tensors[name]

    @property
    def sections(self) -> list[dict[str, Any]]:
        """The quantisation sections of both configs."""
        return [self.config["quantization_config"], *([self.hf["quantization"]] if self.hf else [])]

    def set_algo(self, algo: str) -> None:
        for section in self.sections:
            section["quant_algo"] = algo

    def set_exclude(self, entries: Sequence[str]) -> None:
        for section, key in zip(self.sections, ("ignore", "exclude_modules"), strict=False):
            section[key] = list(entries)

    def save(self, folder: Path) -> Path:
        """Write it; the source's other files come along unless `folder` has them already."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if path.suffix not in (".safetensors", ".json") or path.name == "generation_config.json":
                shutil.copy(path, folder / path.name)
        shards: dict[str, dict[str, torch.Tensor]] = {}
        first = min(self.files.values())
        for name, tensor in self.tensors.items():
            shards.setdefault(self.files.get(name, first), {})[name] = tensor.contiguous().clone()
        for file, tensors in shards.items():
            save_file(tensors, folder / file, {"format": "pt"})
        if len(shards) > 1:
            weight_map = {name: self.files.get(name, first) for name in self.tensors}
            write_json(folder / INDEX, {"metadata": {"total_size": 0}, "weight_map": weight_map})
        write_json(folder / "config.json", self.config)
        if self.hf is not None:
            write_json(folder / "hf_quant_config.json", self.hf)
        return folder


Damage = Callable[[Editable], None]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2))


def load(folder: Path) -> Editable:
    tensors: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            tensors[name], files[name] = tensor, path.name
    hf = folder / "hf_quant_config.json"
    return Editable(
        folder,
        tensors,
        files,
        json.loads((folder / "config.json").read_text()),
        json.loads(hf.read_text()) if hf.is_file() else None,
    )


def damaged(source: Path, target: Path, *damages: Damage) -> Path:
    """`source` with damages done to it, at `target`."""
    editable = load(source)
    for damage in damages:
        damage(editable)
    return editable.save(target)


# --- damages ---------------------------------------------------------------------------------------------------------


def cast(dtype: torch.dtype, param: str | Sequence[str] = SCALARS) -> Damage:
    """Store scales in another float dtype, by value. None may become zero, or the case would test something else."""

    def change(ck: Editable) -> None:
        for name in ck.scales(param):
            ck.tensors[name] = ck.tensors[name].to(dtype)
            assert bool((ck.tensors[name] > 0).all()), name

    return change


def reshape(*shape: int, param: str | Sequence[str] = SCALARS, within: str = ".*") -> Damage:
    """Give scalar scales another shape, the value repeated."""

    def change(ck: Editable) -> None:
        for name in ck.scales(param, within):
            ck.tensors[name] = ck.tensors[name].expand(shape)

    return change


def multiply(within: str, *factors: float, param: str | Sequence[str] = "weight_scale_2") -> Damage:
    """Multiply scales by factors in turn, in F32; a scale of several values gets a factor for each value."""

    def change(ck: Editable) -> None:
        for position, name in enumerate(ck.scales(param, within)):
            scale = ck.tensors[name]
            picked = [factors[(position + i) % len(factors)] for i in range(scale.numel())]
            ck.tensors[name] = scale * torch.tensor(picked, dtype=torch.float32).view(scale.shape)

    return change


def put(value: float, *patterns: str) -> Damage:
    """Set scales to a value; of several values only the second, so that the rest stays usable."""

    def change(ck: Editable) -> None:
        for name in (name for pattern in patterns for name in ck.names(pattern)):
            scale = ck.tensors[name].clone()
            scale.view(-1)[min(1, scale.numel() - 1)] = value
            ck.tensors[name] = scale

    return change


def drop(*patterns: str) -> Damage:
    """Remove tensors."""
    return lambda ck: ck.remove([name for pattern in patterns for name in ck.names(pattern)])


def every_code(within: str) -> Damage:
    """Fill block scales with all E4M3 codes that kernels read in turn: 0 to 448, and -0."""
    codes = torch.tensor([*range(0x7F), 0x80], dtype=torch.uint8)

    def change(ck: Editable) -> None:
        for name in ck.scales("weight_scale", within):
            scale = ck.tensors[name]
            cycle = codes.repeat(math.ceil(scale.numel() / len(codes)))[: scale.numel()]
            ck.tensors[name] = cycle.view(scale.shape).view(torch.float8_e4m3fn)

    return change


def add(**tensors: torch.Tensor) -> Damage:
    """Add tensors; two underscores in a keyword stand for a dot."""
    return lambda ck: ck.tensors.update({name.replace("__", "."): tensor for name, tensor in tensors.items()})


def quantised_head(ck: Editable) -> None:
    """lm_head in the format of the other linears, NVFP4 or int4, with made-up codes and scales of one value."""
    rows, columns = ck.tensors["lm_head.weight"].shape
    size = rows * columns // 2
    codes = (torch.arange(size) * 37 % 251).to(torch.uint8)
    if ck.names(r".*\.o_proj\.weight_scale") and any(name.endswith("o_proj.weight_scale_2") for name in ck.tensors):
        ck.tensors["lm_head.weight"] = codes.view(rows, columns // 2)
        ck.tensors["lm_head.weight_scale"] = torch.full((rows, columns // 16), 32.0).to(torch.float8_e4m3fn)
        ck.tensors["lm_head.weight_scale_2"] = ck.tensors["lm_head.input_scale"] = torch.tensor(2.0**-10)
    else:
        ck.tensors["lm_head.weight"] = codes.view(rows // 2, columns)
        ck.tensors["lm_head.weight_scale"] = torch.full((rows, columns // 128), 2.0**-5)
    for section, key in zip(ck.sections, ("ignore", "exclude_modules"), strict=False):
        section[key].remove("lm_head")


# --- raw files -------------------------------------------------------------------------------------------------------


def rewrite_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a shard's header and nothing else; the data follow the new header."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + length])
    change(table)
    header = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])
