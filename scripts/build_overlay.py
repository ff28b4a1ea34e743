#!/usr/bin/env python3
"""Rebuild a checkpoint that tests/data stores as an overlay: the base checkpoint with some tensors replaced.

Usage: build_overlay.py NAME OUT    NAME is fewtokens or splitscale; OUT must not exist

Replaced tensors have the dtype and shape of the base's, so their bytes are written over the base's in a copy and
the headers stay as they are. Needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
BASE = "tinymoe-nvfp4-perexpert"
NAMES = ("fewtokens", "splitscale")


class OverlayError(Exception):
    """The overlay cannot be built; the message says why."""


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's tensor entries, and where its data begins."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def build(name: str, out: str | Path, data: Path = DATA) -> Path:
    """Write overlay `name`, applied to its base, to the new directory `out`, and return that."""
    out = Path(out)
    if name not in NAMES:
        raise OverlayError(f"unknown overlay {name!r}: choose from {', '.join(NAMES)}")
    if out.exists() or out.is_symlink():
        raise OverlayError(f"{out} exists already: remove it or choose another OUT")
    base, overlay = data / BASE, data / f"tinymoe-nvfp4-{name}.overlay.safetensors"
    for path in (base / "model.safetensors.index.json", overlay):
        if not path.is_file():
            raise OverlayError(f"{path} is missing")

    weight_map = json.loads((base / "model.safetensors.index.json").read_text())["weight_map"]
    entries, start = read_header(overlay)
    by_shard = defaultdict(list)
    for tensor in entries:
        if tensor not in weight_map:
            raise OverlayError(f"{overlay.name} replaces {tensor}, which {BASE} does not have")
        by_shard[weight_map[tensor]].append(tensor)

    partial = out.with_name(out.name + ".partial")
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise OverlayError(f"{partial} exists already, from an interrupted run perhaps: remove it") from None
    try:
        for file in base.iterdir():
            shutil.copyfile(file, partial / file.name)
        with overlay.open("rb") as source:
            for shard, tensors in by_shard.items():
                old_entries, old_start = read_header(partial / shard)
                with (partial / shard).open("r+b") as target:
                    for tensor in tensors:
                        new, old = entries[tensor], old_entries[tensor]
                        if (new["dtype"], new["shape"]) != (old["dtype"], old["shape"]):
                            raise OverlayError(
                                f"{tensor} is {new['dtype']} {new['shape']} in {overlay.name}, "
                                f"{old['dtype']} {old['shape']} in {BASE}/{shard}"
                            )
                        begin, end = new["data_offsets"]
                        source.seek(start + begin)
                        target.seek(old_start + old["data_offsets"][0])
                        target.write(source.read(end - begin))
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Rebuild a test checkpoint that is stored as an overlay.")
    parser.add_argument("name", metavar="NAME", help=" or ".join(NAMES))
    parser.add_argument("out", metavar="OUT", type=Path, help="directory to create; must not exist")
    arguments = parser.parse_args()
    try:
        build(arguments.name, arguments.out)
    except (OverlayError, OSError) as error:
        print(f"build_overlay: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
