"""From what a person names to a run of the check: checkpoints on disk, and outputs that are being written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from nvfp4prep import quant_config as qc
from nvfp4prep.checkpoint import Checkpoint, read_checkpoint
from nvfp4prep.convert import Prepared, decide
from nvfp4prep.errors import InputRefused, UsageFault
from nvfp4prep.findings import Finding, cut
from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts import LAYOUTS
from nvfp4prep.layouts.logical import LayoutError
from nvfp4prep.manifest import MANIFEST
from nvfp4prep.options import Options, W13Choice
from nvfp4prep.scales import ImputePolicy, InputScalePolicy
from nvfp4prep.schema import build_schema
from nvfp4prep.smoke.check import Subject, unjudged
from nvfp4prep.smoke.reference import kind_of
from nvfp4prep.smoke.subject import Real, from_packed, from_prepared
from nvfp4prep.source import Source, open_source, read_json, refuse
from nvfp4prep.targets import HF, Target, check_target, layout_of, present_capability, target_for
from nvfp4prep.unpack import Packed, read_packed_output

_ASKED = {
    "input_scale": get_args(InputScalePolicy),
    "w13_scale": get_args(W13Choice),
    "impute": get_args(ImputePolicy),
}
"""Options of a run that a packed output's source is decided by again, as its manifest may have them."""


class NotChecked(Exception):
    """An output that the check can't run on; the message says why."""


# --- checkpoints on disk ---------------------------------------------------------------------------------------------


def subject_of(ckpt: str, options: Options | None, reference: str | None, source: str | None) -> Subject:
    """The subject that a person names.

    Args:
        ckpt: a packed output, or a logical checkpoint, which is packed in memory.
        options: how a logical one is packed; None chooses the target as `--target auto` does.
        reference: a BF16 checkpoint.
        source: the ModelOpt checkpoint that a packed output was made from.

    Raises:
        InputRefused: one of them can't be used, or routing or activation are not known.
        UsageFault: options that don't fit.
    """
    real = Real()
    if reference is not None:
        opened = open_source(reference)
        real = replace(real, reference=opened, config=read_json(opened.root, qc.CONFIG) or {})
    try:
        if _is_packed(Path(ckpt)):
            return from_packed(*_packed(Path(ckpt), options, real, source))
        if source is not None:
            raise UsageFault("--source is for packed outputs; a logical checkpoint is its own source")
        checkpoint = read_checkpoint(ckpt)
        chosen = replace(options or Options(default_target(checkpoint)), pre_quant_scale="fold")
        if chosen.target == HF:
            raise InputRefused([Finding("nothing-to-check", "error", "no experts that a packed target takes")])
        return from_prepared(decide(checkpoint, chosen), real)
    except LayoutError as error:
        raise InputRefused([Finding("smoke-refused", "error", str(error))]) from None


def _is_packed(path: Path) -> bool:
    section = (read_json(path, qc.CONFIG) or {}).get("quantization_config") if path.is_dir() else None
    return isinstance(section, Mapping) and section.get("quant_method") == "nvfp4prep"


def _packed(path: Path, options: Options | None, real: Real, source: str | None) -> tuple[Packed, Real]:
    packed = read_packed_output(path)
    layout = packed.target.layout
    if options is not None and options.target not in (layout, layout.removesuffix("-int4")):
        raise UsageFault(f"{path} is packed as {packed.target.layout_id}; leave --target out")
    if source is None:
        return packed, real
    checkpoint = read_checkpoint(source)
    _check_source(checkpoint, packed)
    return packed, replace(real, source=decide(checkpoint, _options_of(packed)))


def _check_source(checkpoint: Checkpoint, packed: Packed) -> None:
    """Refuse a source with other MoE layers than the packed ones, in number, sizes or kind."""
    spec, target = checkpoint.source.spec, packed.target
    theirs = {moe.path: moe for moe in target.layers(checkpoint.schema)}
    ours = {moe.path: moe for moe in packed.layers}
    for path in sorted(theirs.keys() ^ ours.keys()):
        wanted = f"{target.module.REQUIRES.format.value} experts under {path}"
        message = f"the source {spec} has no {wanted}" if path in ours else f"{path} of the source {spec} is not packed"
        refuse("reference-layer", f"{message}; give the checkpoint that it was packed from")
    for path, moe in ours.items():
        found, wanted = kind_of(theirs[path]), kind_of(moe)
        if found != wanted:
            message = f"{path} of the source has {found}; what is packed has {wanted}; give what it was packed from"
            refuse("reference-shape", message, file=spec)


def _options_of(packed: Packed) -> Options:
    """The options of the run that packed it, from its manifest. Raises InputRefused for what convert can't be asked."""
    run = next((run for run in reversed(packed.manifest["runs"]) if isinstance(run, dict)), {})
    asked = run.get("options", {})
    if not isinstance(asked, dict):
        refuse("manifest-bad", "the options of its last run are no object; copy the whole output", file=MANIFEST)
    for key, values in _ASKED.items():
        if asked.get(key, values[0]) not in values:
            message = f"{key} of its last run is {cut(repr(asked[key]))}, none of {', '.join(values)}"
            refuse("manifest-bad", f"{message}; copy the whole output", file=MANIFEST)
    target = packed.target
    return Options(
        target.layout,
        asked.get("input_scale", "layer-max"),
        asked.get("w13_scale", "auto"),
        asked.get("impute", "none"),
        engine=target.engine,
        tp=target.tp,
        ep=target.ep,
        activation_dtype=target.activation_dtype,
        pre_quant_scale="fold",  # where there is nothing to fold, nothing is
    )


def default_target(checkpoint: Checkpoint) -> str:
    """As `--target auto`, but flashinfer-trtllm without a GPU; vllm-marlin where that does not fit; else hf."""
    wanted = target_for(present_capability(), checkpoint.schema)
    others = ("flashinfer-trtllm", "vllm-marlin")
    for name in dict.fromkeys((wanted, *others) if wanted in LAYOUTS else others):
        layout = layout_of(name, checkpoint.schema)
        target = Target(layout)
        if not check_target(
            checkpoint.schema, checkpoint.config, checkpoint.weight_only, target, "auto", "layer-max", "fold"
        ):
            return layout
    return HF


# --- outputs being written -------------------------------------------------------------------------------------------


def subject_of_output(prepared: Prepared, root: Path) -> Subject:
    """The subject of a conversion whose shards are complete under `root`, without config or index yet.

    Raises:
        NotChecked: there are no experts to check, or what a layer's routing or inputs are is not known.
    """
    subject = _subject_of_output(prepared, root)
    reason = unjudged(subject)
    if reason is not None:
        raise NotChecked(reason)
    return subject


def _subject_of_output(prepared: Prepared, root: Path) -> Subject:
    checkpoint, pack = prepared.checkpoint, prepared.job.pack
    source = _written(prepared, root)
    try:
        if pack is not None:
            layers = pack.target.layers(checkpoint.schema)
            packed = Packed(source, checkpoint.config, {}, pack.target, layers, {})
            return from_packed(packed, Real(source=prepared))
        schema = build_schema(source.tensors, checkpoint.config)
        output = replace(checkpoint, source=source, schema=schema, quant=prepared.quant, findings=(), manifest=None)
        target = default_target(output)
        if target == HF:
            raise NotChecked("no NVFP4 experts that a packed target takes")
        return from_prepared(decide(output, Options(target, prepared.policy.input_scale)), Real(source=prepared))
    except LayoutError as error:
        raise NotChecked(str(error)) from None
    except InputRefused as refused:
        raise NotChecked(refused.findings[0].message) from None


def _written(prepared: Prepared, root: Path) -> Source:
    """The written shards as a Source, keyed as `read_directory` or `read_packed` would."""
    skip = len(prepared.folder) + 1 if prepared.folder else 0
    tensors: dict[str, TensorInfo] = {}
    for key, tensor in prepared.plan.outputs.items():
        tensors[key[skip:]] = replace(tensor, file=tensor.file[skip:])
    shards = {shard.file[skip:]: shard.nbytes for shard in prepared.plan.shards}
    place = root / prepared.folder if prepared.folder else root
    return Source(place, prepared.checkpoint.source.spec, None, shards, {}, tensors, (), ())
