"""What is asked for one target, and the scale policy that follows from it for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.scales import ImputePolicy, InputScalePolicy, ScalePolicy
from nvfp4prep.schema import Format, Linear, MoeLayer, Schema

if TYPE_CHECKING:
    from nvfp4prep.layouts.logical import ActivationDtype, Engine
    from nvfp4prep.targets import Target

W13Choice = Literal["auto", "split", "unify"]
PreQuantChoice = Literal["refuse", "fold"]
COMPRESSED = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for, for one target. `max_shard_bytes` None: the previous run's, or 5 GB.

    `engine` (None: the first that has the kernel), `tp`, `ep` and `activation_dtype` are for packed targets.
    """

    target: str = "hf"
    input_scale: InputScalePolicy = "layer-max"
    w13_scale: W13Choice = "auto"
    impute: ImputePolicy = "none"
    pre_quant_scale: PreQuantChoice = "refuse"
    max_shard_bytes: int | None = None
    engine: Engine | None = None
    tp: int = 1
    ep: int = 1
    activation_dtype: ActivationDtype = "bf16"


@dataclass(frozen=True, slots=True)
class Ask:
    """A target with its scale policy for one checkpoint; `target` is None where nothing is packed for a kernel.

    `weight_only` are the modules that need no input_scale there.
    """

    policy: ScalePolicy
    weight_only: frozenset[str]
    target: Target | None = None


def ask(checkpoint: Checkpoint, options: Options) -> Ask:
    """How a target wants a checkpoint's scales.

    `hf` unifies gate and up, since no engine reads two global scales right everywhere. A kernel without input scales
    does not need them: missing ones are filled in from the others, for the way back.

    Raises:
        InputRefused: the target can't take the checkpoint.
    """
    if options.target == "hf":
        w13 = "unify" if options.w13_scale == "auto" else options.w13_scale
        return Ask(ScalePolicy(options.input_scale, w13, options.impute), checkpoint.weight_only)
    if options.target == COMPRESSED:
        from nvfp4prep import compressed_tensors

        if options.w13_scale == "split":
            message = "--w13-scale split: engines read one global scale for gate and up of it; use unify or auto"
            raise InputRefused([Finding("target-refused", "error", f"{COMPRESSED}: {message}")])
        refused = compressed_tensors.refusals(checkpoint, options.pre_quant_scale == "fold")
        if refused:
            raise InputRefused(refused)
        # int4's input scales have no place there: neither those that are missing, nor what is told of them, matter.
        int4 = frozenset(linear.module for linear in checkpoint.schema.of_format(Format.INT4))
        impute_ = "layer-max" if int4 and options.impute == "none" else options.impute
        return Ask(ScalePolicy(options.input_scale, "unify", impute_), checkpoint.weight_only | int4)
    from nvfp4prep import targets

    schema, config = checkpoint.schema, checkpoint.config
    layout = targets.layout_of(options.target, schema)
    engine = targets.engine_of(layout, options.engine)
    target = targets.Target(layout, engine, options.tp, options.ep, options.activation_dtype)
    refused = targets.check_target(
        schema,
        config,
        checkpoint.weight_only,
        target,
        options.w13_scale,
        options.input_scale,
        options.pre_quant_scale,
    )
    refused += targets.taken_names(checkpoint.source.tensors, schema, target)
    if refused:
        raise InputRefused(refused)
    w13 = targets.w13_policy_of(schema, config, target, options.w13_scale)
    if target.module.REQUIRES.input_scales:
        return Ask(ScalePolicy(options.input_scale, w13, options.impute), checkpoint.weight_only, target)
    unscaled = frozenset(
        linear.module
        for linears in _sharing(schema, target.layers(schema))
        if _none_stored(linears)
        for linear in linears
    )
    impute: ImputePolicy = "ones" if options.impute == "ones" else "layer-max"
    policy = ScalePolicy(options.input_scale, w13, impute)
    return Ask(policy, checkpoint.weight_only | unscaled, target)


def _sharing(schema: Schema, packed: Sequence[MoeLayer]) -> Iterator[tuple[Linear, ...]]:
    """Linears by what their input scales are resolved with: a packed MoE layer, an NVFP4 fusion group, itself."""
    layers = [(*moe.w13, *moe.w2) for moe in packed]
    groups = [group.members for group in schema.nvfp4_groups]
    yield from layers
    yield from groups
    taken = {linear.module for linears in (*layers, *groups) for linear in linears}
    yield from ((linear,) for linear in schema.of_format(Format.NVFP4) if linear.module not in taken)


def _none_stored(linears: tuple[Linear, ...]) -> bool:
    return not any("input_scale" in linear.params for linear in linears)
