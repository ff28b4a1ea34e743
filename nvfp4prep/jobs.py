"""How a run works on a checkpoint for one target: its job, decided step by step, and the plan of its output."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nvfp4prep.errors import InputRefused
from nvfp4prep.execute import Job
from nvfp4prep.findings import Finding
from nvfp4prep.options import COMPRESSED, Ask, Options
from nvfp4prep.plan import Plan, make_plan
from nvfp4prep.scales import Resolution
from nvfp4prep.schema import Format

if TYPE_CHECKING:
    from nvfp4prep.checkpoint import Checkpoint
    from nvfp4prep.layouts.logical import LayoutError
    from nvfp4prep.targets import Target


def job_of(checkpoint: Checkpoint, options: Options, asked: Ask, resolution: Resolution, folder: str = "") -> Job:
    """The job of a target, without the facts that have to be read from block scales and biases (`with_facts`).

    Args:
        checkpoint: as read.
        options, asked: the target.
        resolution: of its scales.
        folder: where its files lie, relative to OUT.

    Raises:
        InputRefused: pre_quant_scale can neither be kept nor folded.
        EnvironmentFault: I/O.
    """
    if options.target == COMPRESSED:
        from nvfp4prep.folding import fold_all

        return Job(resolution, folds=fold_all(checkpoint, checkpoint.schema.layers_of(Format.NVFP4, Format.INT4)))
    if asked.target is None:
        return Job(resolution)
    from nvfp4prep.packing import pack_job

    return Job(resolution, *pack_job(checkpoint, asked.target, folder, options.pre_quant_scale == "fold"))


def with_facts(checkpoint: Checkpoint, job: Job, workers: int) -> Job:
    """The job with what its layout must know of each layer before experts are packed; as it is where nothing is.

    Raises:
        InputRefused: block scales, biases or scalars that the kernel can't compute with.
        EnvironmentFault: I/O.
    """
    if job.pack is None:
        return job
    from nvfp4prep import layer_facts
    from nvfp4prep.layouts.logical import LayoutError

    try:
        pack = layer_facts.with_facts(job.pack, checkpoint.source, checkpoint.schema, job.resolution, workers)
    except LayoutError as error:
        raise _refused(job.pack.target, error) from None
    return replace(job, pack=pack)


def _refused(target: Target, error: LayoutError) -> InputRefused:
    return InputRefused([Finding("target-refused", "error", f"{target.layout}: {error}")])


def plan_of(
    checkpoint: Checkpoint, options: Options, asked: Ask, job: Job, max_shard_bytes: int, folder: str, number: int
) -> Plan:
    """The plan of a target's output.

    Args:
        checkpoint, options, asked: as for `job_of`.
        job: with facts.
        max_shard_bytes: bytes of tensors per file, exceeded only by a single larger tensor.
        folder: where its files lie, relative to OUT.
        number: its index in the run.

    Raises:
        InputRefused: the target can't hold it.
    """
    if options.target == COMPRESSED:
        from nvfp4prep.compressed_tensors import make_compressed_plan

        return make_compressed_plan(checkpoint, job.resolution, job.folds, max_shard_bytes, folder, number)
    if asked.target is None:
        source, schema = checkpoint.source, checkpoint.schema
        return make_plan(
            source.tensors, source.metadata, schema, asked.policy, asked.weight_only, max_shard_bytes, folder, number
        )
    from nvfp4prep.layouts.logical import LayoutError
    from nvfp4prep.packing import make_packed_plan

    try:
        return make_packed_plan(checkpoint, asked, job, max_shard_bytes, number)
    except LayoutError as error:
        raise _refused(asked.target, error) from None
