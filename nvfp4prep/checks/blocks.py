"""Every block scale and packed byte: NaN, negative, zero; FP8 weights, int4 group scales, factors, tied heads."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import xxhash

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.checks.model import in_tower
from nvfp4prep.errors import Stopped
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.model_config import is_tied
from nvfp4prep.scales import E4M3_NAN
from nvfp4prep.schema import FLOAT_DTYPES, GROUP_SIZE, Format, Linear
from nvfp4prep.source import opened_shards, read_part
from nvfp4prep.widening import widened

_CHUNK = 1 << 22
"""Bytes looked at in one go: they stay in a CPU's cache from one look to the next."""
_HALF = GROUP_SIZE // 2
_MAGNITUDES = np.uint64(0x7777_7777_7777_7777)
_HALVES = (("gate_proj", "up_proj"), ("w1", "w3"))

Read = Callable[[TensorInfo, int, int], bytes]
"""Bytes of a tensor: from, how many."""


@dataclass
class Counts:
    """Block scales of one expert's linear: how many of each kind, and where the first stands (row, block)."""

    blocks: int = 0
    zero: int = 0
    bad: dict[str, int] = field(default_factory=dict)
    first: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, kind: str, where: npt.NDArray[np.bool_], row: int, block: int, *, transposed: bool = False) -> None:
        """Count the places of a kind in a part that begins at (row, block)."""
        count = int(np.count_nonzero(where))
        if count:
            self.bad[kind] = self.bad.get(kind, 0) + count
            at = np.unravel_index(int(where.argmax()), where.shape)
            place = (int(at[1]), int(at[0])) if transposed else (int(at[0]), int(at[1]))
            self.first.setdefault(kind, (row + place[0], block + place[1]))


def scan(checkpoint: Checkpoint, workers: int, progress: Callable[[int], None]) -> list[Finding]:
    """Every finding about quantised bytes.

    Args:
        checkpoint: as read.
        workers: threads, each with a few buffers of 4 MiB.
        progress: called with bytes read, from any worker.

    Raises:
        EnvironmentFault: I/O.
    """
    source, schema = checkpoint.source, checkpoint.schema
    linears = [linear for linear in schema.linears.values() if linear.format in (Format.NVFP4, Format.INT4)]
    with opened_shards(source) as descriptors:
        lock, stop = threading.Lock(), threading.Event()

        def read(tensor: TensorInfo, start: int, length: int) -> bytes:
            if stop.is_set():
                raise Stopped
            raw = read_part(descriptors[tensor.file], tensor, start, length)
            with lock:
                progress(length)
            return raw

        with ThreadPoolExecutor(workers) as pool:
            try:
                counted = list(pool.map(partial(_count, read), linears))
                factors = list(pool.map(partial(_bad_factors, read), linears))
                factors += pool.map(partial(_fp8_nan, read), schema.of_format(Format.FP8))
                same = _identical_halves(checkpoint, partial(_digest, read), pool)
            except BaseException:  # a failure, or an interrupt: what runs must end soon
                stop.set()
                raise
        findings = [*_block_findings(checkpoint, dict(zip((x.module for x in linears), counted, strict=True)))]
        findings += [finding for finding in factors if finding is not None]
        findings += same
        findings += _tied_head(checkpoint, read)
    return findings


def scanned_bytes(checkpoint: Checkpoint) -> int:
    """About how many bytes `scan` reads."""
    packed = ("weight", "weight_scale", "pre_quant_scale")
    params = {Format.NVFP4: packed, Format.INT4: packed, Format.FP8: ("weight",)}
    return sum(
        linear.params[param].nbytes
        for linear in checkpoint.schema.linears.values()
        for param in params.get(linear.format, ())
        if param in linear.params
    )


# --- counting --------------------------------------------------------------------------------------------------------


def _count(read: Read, linear: Linear) -> list[Counts]:
    """Counts of a linear, one for each expert that it holds."""
    if linear.format is Format.INT4:
        return _count_int4(read, linear)
    if linear.experts is not None:
        return [_count_fused(read, linear, expert) for expert in range(linear.experts)]
    return [_count_rows(read, linear)]


def _classify(
    counts: Counts,
    scale: npt.NDArray[np.uint8],
    data: npt.NDArray[np.bool_],
    row: int,
    block: int,
    *,
    transposed: bool = False,
) -> None:
    """E4M3 codes of block scales, and whether any code below each is not zero."""
    magnitude = scale & 0x7F
    zero = magnitude == 0
    counts.blocks += scale.size
    counts.zero += int(np.count_nonzero(zero))
    for kind, where in (
        ("block-scale-nan", magnitude == E4M3_NAN),
        ("block-scale-negative", (scale > 0x80) & (scale != 0xFF)),
        ("block-scale-zero", zero & data),
    ):
        counts.add(kind, where, row, block, transposed=transposed)


def _count_rows(read: Read, linear: Linear) -> Counts:
    """Weight U8 [N, K/2], block scales E4M3 [N, K/16]: eight bytes for each scale, next to each other."""
    counts = Counts()
    half, blocks = linear.columns // 2, linear.columns // GROUP_SIZE
    step = max(1, _CHUNK // half)
    for row in range(0, linear.rows, step):
        rows = min(step, linear.rows - row)
        weight = np.frombuffer(read(linear.params["weight"], row * half, rows * half), np.uint64)
        scale = np.frombuffer(read(linear.params["weight_scale"], row * blocks, rows * blocks), np.uint8)
        data = (weight & _MAGNITUDES) != 0
        _classify(counts, scale.reshape(rows, blocks), data.reshape(rows, blocks), row, 0)
    return counts


def _count_fused(read: Read, linear: Linear, expert: int) -> Counts:
    """One expert of weight U8 [E, K/2, N], block scales E4M3 [E, K/16, N]: eight rows of bytes for a row of scales."""
    counts = Counts()
    columns, blocks = linear.rows, linear.columns // GROUP_SIZE
    step = max(1, _CHUNK // (columns * _HALF))
    for block in range(0, blocks, step):
        taken = min(step, blocks - block)
        at = (expert * blocks + block) * columns
        weight = np.frombuffer(read(linear.params["weight"], at * _HALF, taken * _HALF * columns), np.uint8)
        scale = np.frombuffer(read(linear.params["weight_scale"], at, taken * columns), np.uint8)
        data = np.bitwise_or.reduce(weight.reshape(taken, _HALF, columns), axis=1) & 0x77 != 0
        _classify(counts, scale.reshape(taken, columns), data, 0, block, transposed=True)
    return counts


def _count_int4(read: Read, linear: Linear) -> list[Counts]:
    """Weight U8 [N/2, K], row 2r in the low nibble; group scales [N, K/g], floats. Other shapes are left alone."""
    weight, scale = linear.params["weight"], linear.params["weight_scale"]
    if len(weight.shape) != 2 or len(scale.shape) != 2 or scale.shape[0] != weight.shape[0] * 2:
        return []
    pairs, columns = weight.shape
    groups = scale.shape[1]
    if not groups or columns % groups or not pairs:
        return []
    counts = Counts()
    step = max(1, _CHUNK // columns)
    width = scale.nbytes // (scale.shape[0] * groups)
    for pair in range(0, pairs, step):
        taken = min(step, pairs - pair)
        values = widened(scale.dtype, read(scale, 2 * pair * groups * width, 2 * taken * groups * width))
        values = values.reshape(2 * taken, groups)
        codes = np.frombuffer(read(weight, pair * columns, taken * columns), np.uint8)
        joined = np.bitwise_or.reduce(codes.reshape(taken, groups, columns // groups), axis=2)
        data = np.stack([joined & 0x0F, joined >> 4], axis=1).reshape(2 * taken, groups) != 0
        zero = values == 0
        counts.blocks += values.size
        counts.zero += int(np.count_nonzero(zero))
        counts.add("int4-scale-bad", ~np.isfinite(values), 2 * pair, 0)
        counts.add("block-scale-zero", zero & data, 2 * pair, 0)
    return [counts]


# --- findings --------------------------------------------------------------------------------------------------------

_TEXTS: Mapping[str, tuple[str, str]] = {
    "block-scale-nan": ("NaN", "outputs become NaN; export these weights again"),
    "block-scale-negative": ("negative", "kernels read block scales without sign; export these weights again"),
    "block-scale-zero": ("zero over codes that are not", "these weights act as zero: they were lost when quantised"),
    "int4-scale-bad": ("inf or NaN", "export these weights again"),
}


def _block_findings(checkpoint: Checkpoint, counted: Mapping[str, Sequence[Counts]]) -> Iterator[Finding]:
    routed: set[str] = set()
    for moe in checkpoint.schema.moe_layers:
        for projection, linears in _projections(moe.w13, moe.w2):
            routed.update(linear.module for linear in linears)
            yield from _findings(linears, counted, f"{moe.path} {projection}", projection)
        yield from _all_zero([*moe.w13, *moe.w2], counted, moe.path)
    for linear in checkpoint.schema.linears.values():
        if linear.module in counted and linear.module not in routed:
            yield from _findings([linear], counted, linear.module, None)


def _projections(w13: Sequence[Linear], w2: Sequence[Linear]) -> Iterator[tuple[str, list[Linear]]]:
    """Linears of a MoE layer by the name of their projection."""
    named: dict[str, list[Linear]] = defaultdict(list)
    for linear in (*w13, *w2):
        parts = linear.module.split(".")
        named[parts[-2] if parts[-1].isdecimal() else parts[-1]].append(linear)
    yield from named.items()


def _findings(
    linears: Sequence[Linear], counted: Mapping[str, Sequence[Counts]], where: str, projection: str | None
) -> Iterator[Finding]:
    """One finding for each kind, over all experts of a projection."""
    for kind, (what, then) in _TEXTS.items():
        hit = [
            (linear, linear.expert if linear.experts is None else number, counts)
            for linear in linears
            for number, counts in enumerate(counted.get(linear.module, ()))
            if kind in counts.bad
        ]
        if not hit:
            continue
        first, _, counts = hit[0]
        row, block = counts.first[kind]
        tensor = first.params["weight_scale"]
        bad = sum(counts.bad[kind] for _, _, counts in hit)
        blocks = sum(counts.blocks for linear in linears for counts in counted.get(linear.module, ()))
        yield Finding(
            kind,
            "warning" if kind == "block-scale-zero" else "error",
            f"{where}: {bad:,} of {blocks:,} block scales are {what} (the first in row {row}, block {block}); {then}",
            tensor.file,
            tensor.name,
            first.layer,
            tuple(sorted({expert for _, expert, _ in hit if expert is not None})),
            projection,
            {"count": bad, "of": blocks},
        )


def _all_zero(linears: Sequence[Linear], counted: Mapping[str, Sequence[Counts]], path: str) -> Iterator[Finding]:
    """Experts one of whose linears has zero block scales only: an error when it is all experts of the layer."""
    zero: set[int] = set()
    every: set[int] = set()
    for linear in linears:
        for number, counts in enumerate(counted.get(linear.module, ())):
            expert = number if linear.experts is not None or linear.expert is None else linear.expert
            every.add(expert)
            if counts.blocks and counts.zero == counts.blocks:
                zero.add(expert)
    if zero:
        tensor = linears[0].params["weight"]
        message = f"{path}: {len(zero)} of {len(every)} experts have a linear whose block scales are all zero: "
        message += "the layer computes nothing, and the text stays fluent but wrong; export it again"
        yield Finding(
            "experts-zero",
            "error" if zero == every else "warning",
            message,
            tensor.file,
            layer=linears[0].layer,
            experts=tuple(sorted(zero)),
        )


def _bad_factors(read: Read, linear: Linear) -> Finding | None:
    """NVP604: a pre_quant_scale with which the input can't be multiplied."""
    tensor = linear.params.get("pre_quant_scale")
    if tensor is None or tensor.dtype not in FLOAT_DTYPES:
        return None
    values = widened(tensor.dtype, read(tensor, 0, tensor.nbytes))
    bad = ~np.isfinite(values) | (values == 0)
    if not bad.any():
        return None
    at = int(bad.argmax())
    message = f"{int(bad.sum())} of {values.size} factors are zero, inf or NaN ({values[at]} at {at}); export again"
    return Finding(
        "pre-quant-scale-bad",
        "error",
        message,
        tensor.file,
        tensor.name,
        linear.layer,
        () if linear.expert is None else (linear.expert,),
        values={"value": float(values[at])},
    )


def _fp8_nan(read: Read, linear: Linear) -> Finding | None:
    """NVP506: NaN among the codes of an FP8 weight."""
    tensor = linear.params["weight"]
    count, first = 0, 0
    for start in range(0, tensor.nbytes, _CHUNK):
        codes = np.frombuffer(read(tensor, start, min(_CHUNK, tensor.nbytes - start)), np.uint8)
        bad = (codes & 0x7F) == E4M3_NAN
        hits = int(np.count_nonzero(bad))
        if hits and not count:
            first = start + int(bad.argmax())
        count += hits
    if not count:
        return None
    place = [int(i) for i in np.unravel_index(first, tensor.shape)]
    return Finding(
        "fp8-nan",
        "error",
        f"{count:,} of {tensor.nbytes:,} FP8 weights are NaN (the first at {place}); export them again",
        tensor.file,
        tensor.name,
        linear.layer,
        () if linear.expert is None else (linear.expert,),
        values={"count": count, "of": tensor.nbytes},
    )


def _digest(read: Read, tensor: TensorInfo) -> bytes:
    hasher = xxhash.xxh3_128()
    for start in range(0, tensor.nbytes, _CHUNK):
        hasher.update(read(tensor, start, min(_CHUNK, tensor.nbytes - start)))
    return hasher.digest()


def _identical_halves(
    checkpoint: Checkpoint, digest: Callable[[TensorInfo], bytes], pool: ThreadPoolExecutor
) -> list[Finding]:
    """NVP606: int4 gate and up with the same scales, of different weights: a fault of ModelOpt 0.47 on Qwen3."""
    linears = checkpoint.schema.linears
    pairs: list[tuple[Linear, Linear]] = []
    for linear in checkpoint.schema.of_format(Format.INT4):
        for gate, up in _HALVES:
            sibling = linears.get(f"{linear.module.removesuffix('.' + gate)}.{up}")
            if linear.module.endswith("." + gate) and sibling is not None and sibling.format is Format.INT4:
                pairs.append((linear, sibling))
    scales = list(pool.map(digest, [x.params["weight_scale"] for pair in pairs for x in pair]))
    same: dict[str, list[Linear]] = defaultdict(list)
    for number, (gate_linear, _) in enumerate(pairs):
        if scales[2 * number] == scales[2 * number + 1]:
            same[_block(checkpoint, gate_linear)].append(gate_linear)
    return [
        Finding(
            "int4-gate-up-identical",
            "warning",
            f"{path}: gate and up of {len(found)} have the same scales, which different weights don't: one of them was "
            "quantised with the other's and lost accuracy; export again with another ModelOpt version",
            found[0].params["weight_scale"].file,
            found[0].params["weight_scale"].name,
            found[0].layer,
            tuple(sorted(x.expert for x in found if x.expert is not None)),
        )
        for path, found in same.items()
    ]


def _block(checkpoint: Checkpoint, linear: Linear) -> str:
    """The MoE block of an expert's linear, or the MLP that it is in."""
    return checkpoint.schema.expert_of.get(linear.module, (linear.module.rpartition(".")[0], 0))[0]


def _tied_head(checkpoint: Checkpoint, read: Read) -> Iterable[Finding]:
    """NVP505: an lm_head that is stored, and is not the embedding that config.json says it is."""
    linears = checkpoint.schema.linears
    named = [(module.rpartition(".")[2], linear) for module, linear in linears.items() if not in_tower(module)]
    head = next((linear for name, linear in named if name == "lm_head"), None)
    embedding = next((linear for name, linear in named if name == "embed_tokens"), None)
    if not is_tied(checkpoint.config) or head is None or embedding is None:
        return
    stored, tied = head.params["weight"], embedding.params["weight"]
    same = (stored.dtype, stored.shape) == (tied.dtype, tied.shape)
    if not (same and _digest(read, stored) == _digest(read, tied)):
        message = f"config.json ties it to {tied.name}, but its values differ: engines drop one of the two"
        yield Finding("tied-head-differs", "warning", message, stored.file, stored.name)
