"""What a kernel needs to know of a whole layer before its experts are packed, and what of it the kernel can't take.

Read from the source before anything is written: nothing for most layouts, all block scales for Marlin, all biases for
kernels with two alphas. `group_scale_findings` looks at all int4 scales, for `validate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4prep.errors import InputRefused
from nvfp4prep.experts import Read, load_expert, slice_expert
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts import flashinfer_trtllm, vllm_marlin
from nvfp4prep.layouts.logical import Expert, LayerFacts, LayoutError
from nvfp4prep.packing import (
    PackJob,
    expert_facts,
    kernel_refused,
    loaded_expert,
    logical_expert,
    rank_scales,
    raw_bias_names,
    reader,
    scalar_findings,
)
from nvfp4prep.plan import Rank
from nvfp4prep.ranges import Reader
from nvfp4prep.scales import E4M3_NAN, Resolution
from nvfp4prep.schema import Format, MoeLayer, Schema
from nvfp4prep.source import Source, read_slice
from nvfp4prep.targets import Target


def with_facts(job: PackJob, source: Source, schema: Schema, resolution: Resolution, workers: int) -> PackJob:
    """The job with its layers' facts, for which block scales may have to be read.

    Raises:
        InputRefused: block scales, biases or scalars that the kernel can't compute with.
    """
    with source.reader() as ranges:
        from_source = reader(_from(ranges), source.tensors)
        found = replace(job, facts=facts_of_layers(schema, job, resolution, from_source, workers))
        refused = scalar_findings(job.target.layers(schema), found, resolution) or bias_findings(
            schema, found, resolution, from_source, workers
        )
    if refused:
        raise InputRefused(refused)
    return found


def group_scale_findings(
    source: Source, schema: Schema, job: PackJob, resolution: Resolution, workers: int
) -> list[Finding]:
    """Experts with a scale that the kernel's dtype, or after a fold E4M3, can't hold, but inf and NaN: one for each."""
    layers = [moe for moe in job.target.layers(schema) if moe.format is Format.INT4 or moe.path in job.rows]
    with source.reader() as ranges:
        stored = _but_weights(layers, reader(_from(ranges), source.tensors))

        def usable(name: str, index: int | None) -> Tensor:
            """As stored, but 1 for inf and NaN, of which another rule tells."""
            values = stored(name, index)
            if values.dtype == torch.uint8:
                return values.masked_fill(values & 0x7F == E4M3_NAN, 0)
            return values.masked_fill(~torch.isfinite(values), 1.0)

        def problem(moe: MoeLayer, expert: int) -> Finding | None:
            try:
                logical_expert(moe, expert, job, resolution, usable)
            except LayoutError as error:
                return kernel_refused(moe, job.target, str(error), [expert])
            return None

        with ThreadPoolExecutor(workers) as pool:
            found = pool.map(lambda pair: problem(*pair), [(moe, e) for moe in layers for e in range(moe.expert_count)])
            return [finding for finding in found if finding is not None]


def bias_findings(schema: Schema, job: PackJob, resolution: Resolution, read: Read, workers: int) -> list[Finding]:
    """Layers with biases that their alphas can't divide: no finite quotient, or none that gives them back."""
    target = job.target
    if target.module.REQUIRES.alphas != 2:
        return []
    layers = [moe for moe in target.layers(schema) if moe.biased]
    activation = {moe.path: job.activation(moe) for moe in layers}
    plain = LayerFacts(target.engine, target.activation_dtype)
    tables = {
        moe.path: target.module.scalars(
            rank_scales(moe, range(moe.expert_count), resolution), activation[moe.path], plain
        )
        for moe in layers
    }

    def biases_alone(name: str, index: int | None) -> Tensor:
        """Biases as stored; empty weights and block scales, which nobody looks at here."""
        return read(name, index) if name.endswith("bias") else torch.empty(0, 0, dtype=torch.uint8)

    def wrong(moe: MoeLayer, expert: int) -> bool:
        facts = expert_facts(plain, tables[moe.path], expert)
        exact = not raw_bias_names(moe, target)
        return flashinfer_trtllm.bias_lost(load_expert(moe, expert, biases_alone, {})[0], facts, exact)

    with ThreadPoolExecutor(workers) as pool:
        work = [(moe, expert) for moe in layers for expert in range(moe.expert_count)]
        lost = [pair for pair, bad in zip(work, pool.map(lambda pair: wrong(*pair), work), strict=True) if bad]
    message = "biases divided by the expert's alpha, as the kernel wants them, do not fit F32"
    return [
        kernel_refused(moe, target, message, [expert for owner, expert in lost if owner is moe])
        for moe in layers
        if any(owner is moe for owner, _ in lost)
    ]


def facts_of_layers(
    schema: Schema, job: PackJob, resolution: Resolution, read: Read, workers: int
) -> dict[tuple[str, Rank], LayerFacts]:
    """LayerFacts of every layer and rank; reads all block scales once where the layout needs their maximum.

    The maximum is over the rank's own experts and rows, as an engine sees it while loading.

    Raises:
        InputRefused: block scales that the layout has no code for, or that E4M3 can't hold after a fold.
    """
    target = job.target
    plain = LayerFacts(target.engine, target.activation_dtype)
    layers = target.layers(schema)
    if not target.module.REQUIRES.block_scale_maximum:
        return {(moe.path, rank): plain for moe in layers for rank in target.ranks()}

    scales_alone = _but_weights(layers, read)
    unusable: dict[str, dict[int, dict[str, int]]] = {}
    unfit: dict[tuple[str, int], str] = {}

    def largest(moe: MoeLayer, expert: int) -> dict[Rank, tuple[int, int]]:
        try:
            logical = loaded_expert(moe, expert, job.rows, resolution, scales_alone)[0]
        except LayoutError as error:
            unfit[moe.path, expert] = str(error)
            return {}
        matrices = [matrix for matrix in (logical.gate, logical.up, logical.down) if matrix is not None]
        if bad := sum((Counter(vllm_marlin.unusable_blocks(matrix.scale)) for matrix in matrices), Counter()):
            unusable.setdefault(moe.path, {})[expert] = bad
        ep_rank = expert // (moe.expert_count // target.ep)
        found = {}
        for tp_rank in range(target.tp):
            part = slice_expert(logical, target.share(moe, tp_rank), tp_rank == 0)
            found[Rank(tp_rank, ep_rank)] = largest_codes(part)
        return found

    maxima: dict[tuple[str, Rank], tuple[int, int]] = {}
    with ThreadPoolExecutor(workers) as pool:
        work = [(moe, expert) for moe in layers for expert in range(moe.expert_count)]
        for (moe, _), found in zip(work, pool.map(lambda pair: largest(*pair), work), strict=True):
            for rank, (w13, w2) in found.items():
                before = maxima.get((moe.path, rank), (0, 0))
                maxima[moe.path, rank] = max(before[0], w13), max(before[1], w2)
    if unfit:
        raise InputRefused(
            [kernel_refused(moe, target, unfit[moe.path, e], [e]) for moe, e in work if (moe.path, e) in unfit]
        )
    if unusable:
        raise InputRefused([_unusable(moe, target, unusable[moe.path]) for moe in layers if moe.path in unusable])
    return {key: vllm_marlin.with_factors(plain, *codes) for key, codes in maxima.items()}


def _unusable(moe: MoeLayer, target: Target, found: Mapping[int, Mapping[str, int]]) -> Finding:
    kinds = [(kind, sum(counts.get(kind, 0) for counts in found.values())) for kind in ("negative", "NaN")]
    text = " and ".join(f"{count:,} {kind}" for kind, count in kinds if count)
    message = f"{moe.path}: {text} block scales, which Marlin's form has no code for; use another target"
    place = f"{target.layout}/{target.engine}: "
    return Finding("block-scale-bad", "error", place + message, layer=moe.layer, experts=tuple(sorted(found)))


def largest_codes(expert: Expert) -> tuple[int, int]:
    """The largest positive E4M3 codes of an expert's w13 and w2 block scales, NaN left out; 0 for no codes."""

    def largest(codes: Tensor) -> int:
        top = int(codes.max()) if codes.numel() else 0
        return top if top < E4M3_NAN else int(torch.where(codes < E4M3_NAN, codes, 0).max())

    halves = [half.scale for half in (expert.gate, expert.up) if half is not None]
    return max(map(largest, halves)), largest(expert.down.scale)


# --- reading ---------------------------------------------------------------------------------------------------------


def _from(ranges: Reader) -> Callable[[TensorInfo, int, int], bytearray]:
    return lambda tensor, start, length: bytearray(read_slice(ranges, tensor, start, length))


def _but_weights(layers: Sequence[MoeLayer], read: Read) -> Read:
    """`read`, but weights without rows (int4 has columns in pairs): for those who look at scales alone."""
    weights = {linear.params["weight"].name for moe in layers for linear in (*moe.w13, *moe.w2)}
    return lambda name, index: torch.empty(0, 2, dtype=torch.uint8) if name in weights else read(name, index)
