"""Back from a packed output to the `hf` checkpoint it stands for: the same bytes in every file but the manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4prep import manifest as manifests
from nvfp4prep import quant_config as qc
from nvfp4prep.dialects import DIALECTS
from nvfp4prep.errors import InputRefused
from nvfp4prep.execute import Job, execute, shard_digests
from nvfp4prep.findings import Finding
from nvfp4prep.header import HeaderError, TensorInfo, tensor_bytes
from nvfp4prep.packing import PackJob, projections, read_whole
from nvfp4prep.plan import Fill, Plan, Rank, Spec, Step, Unpack, copies, gather, index_of, key_of, outputs_of, place
from nvfp4prep.scales import Resolution
from nvfp4prep.schema import SCALAR_PARAMS, MoeLayer, build_schema
from nvfp4prep.source import INDEX, Source, read_json, read_packed, refuse
from nvfp4prep.targets import Target
from nvfp4prep.writer import PartialOutput, check_destination, check_space, file_sizes


@dataclass(frozen=True)
class Packed:
    """A packed output, read: what it is packed for, and the logical checkpoint that it stands for.

    `experts` are the specs of the experts' own tensors by name, in the checkpoint's dialect.
    """

    source: Source
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    target: Target
    layers: tuple[MoeLayer, ...]
    experts: Mapping[str, Spec]


def read_packed_output(path: Path) -> Packed:
    """Read and check a packed output.

    Raises:
        InputRefused: it is none, or something of it is missing.
        EnvironmentFault: I/O.
    """
    if not path.is_dir():
        refuse("not-packed", "no such directory; give a packed output of convert", file=str(path))
    config = read_json(path, qc.CONFIG)
    manifest, findings = manifests.read_manifest(path)
    if config is None or manifest is None or "packed" not in manifest:
        raise InputRefused(
            [
                *findings,
                Finding(
                    "not-packed",
                    "error",
                    "no packed output of convert: there must be a "
                    "config.json, and an nvfp4prep.json with a `packed` entry",
                    str(path),
                ),
            ]
        )
    try:
        target = _target(manifest["packed"])
        experts = _expert_specs(manifest["logical"])
    except (KeyError, TypeError, ValueError, AttributeError, HeaderError) as error:
        refuse(
            "manifest-bad",
            f"its packed or logical entry can't be read ({type(error).__name__}: {error})",
            file=manifests.MANIFEST,
        )
    if target.layout_id != manifest["packed"]["layout"]:
        refuse(
            "layout-unknown",
            f"packed as {manifest['packed']['layout']}; this version knows {target.layout_id}",
            file=manifests.MANIFEST,
        )
    folders = [target.folder(rank) for rank in target.ranks()]
    source = read_packed(path, folders if target.flat else [target.common, *folders])
    shells = {
        name: TensorInfo(name, dtype, shape, "", 0, tensor_bytes(dtype, shape))
        for name, (dtype, shape) in experts.items()
    }
    schema = build_schema(shells, config)
    if any(finding.severity == "error" for finding in schema.findings):
        refuse("manifest-bad", f"its logical entry makes no sense: {schema.findings[0]}", file=manifests.MANIFEST)
    return Packed(source, config, manifest, target, schema.moe_layers, experts)


def _target(entry: Mapping[str, Any]) -> Target:
    layout, engine, _ = str(entry["layout"]).split("/")
    target = Target(layout, engine, int(entry["tp"]), int(entry["ep"]), entry["activation_dtype"])  # type: ignore[arg-type]
    target.module.REQUIRES.engines[target.engine]
    if not (1 <= target.tp <= 4096 and 1 <= target.ep <= 4096):
        raise ValueError(f"tp {target.tp}, ep {target.ep}")
    return target


def _expert_specs(logical: Mapping[str, Any]) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    for entry in logical["moe"]:
        dialect = next(dialect for dialect in DIALECTS if dialect.name == entry["dialect"])
        for projection, params in entry["projections"].items():
            for expert in range(1 if dialect.fused else entry["experts"]):
                for param, (dtype, shape) in params.items():
                    name = dialect.tensor_name(entry["path"], projection, None if dialect.fused else expert, param)
                    specs[name] = (str(dtype), tuple(int(size) for size in shape))
    return specs


@dataclass(frozen=True)
class Prepared:
    """An unpacking decided in full; nothing is written yet."""

    packed: Packed
    plan: Plan


def prepare(path: Path, out: Path, *, overwrite: bool) -> Prepared:
    """Read a packed output and plan its `hf` checkpoint.

    Raises:
        InputRefused, UsageFault, EnvironmentFault: as convert.
    """
    check_destination(out, path, overwrite=overwrite)
    packed = read_packed_output(path)
    source, logical = packed.source, packed.manifest["logical"]
    plan = _plan(packed, logical["metadata"], int(logical["max_shard_bytes"]))
    check_space(out, plan.nbytes + sum(file_sizes(source.root, source.side_files).values()))
    return Prepared(packed, plan)


def write(
    prepared: Prepared, out: Path, *, overwrite: bool, workers: int, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Write the `hf` checkpoint that a packed output was made from; returns its manifest.

    Block scales that Marlin flushed come back as zero; the packed manifest says how many there were.

    Raises:
        EnvironmentFault: as convert.
    """
    packed, plan = prepared.packed, prepared.plan
    source = packed.source
    values = {name: value for moe in packed.layers for name, value in _scale_values(packed, moe).items()}
    job = Job(Resolution(values, {}, (), (), ()), PackJob(packed.target, "", packed.config, {}, {}))
    with PartialOutput(out) as output:
        for name in source.side_files:
            if name not in (qc.CONFIG, manifests.MANIFEST):
                output.copy_side_file(source.root / name, name)
        outcome = execute(source, plan, [job], output, workers, progress)
        output.seal()
        digests = shard_digests(plan, outcome)
        manifest = _manifest(packed, plan, digests)
        output.publish(_small_files(packed, plan, manifest), overwrite=overwrite)
    return manifest


def _plan(packed: Packed, metadata: Mapping[str, str], max_shard_bytes: int) -> Plan:
    target, containers = packed.target, {moe.container for moe in packed.layers}
    common = {
        key: tensor
        for key, tensor in packed.source.tensors.items()
        if key == key_of(target.common, tensor.name) and not _is_packed(tensor.name, containers)
    }
    specs: dict[str, Spec] = {tensor.name: (tensor.dtype, tensor.shape) for tensor in common.values()}
    specs |= packed.experts
    steps: list[tuple[str, Step]] = [step for tensor in common.values() for step in copies(tensor, tensor.name, "")]
    for moe in packed.layers:
        steps += [(f"{moe.path} expert {expert}", Unpack(moe, expert, 0)) for expert in range(moe.expert_count)]
    for name in packed.experts:
        if name.endswith(SCALAR_PARAMS):
            steps.append((name, Fill(name, name, 0)))
    shards = place(specs, metadata, max_shard_bytes, "")
    fused = [linear for moe in packed.layers for linear in (moe.gate_up, moe.down) if linear is not None]
    stacked = {info.name for linear in fused for param, info in linear.params.items() if param not in SCALAR_PARAMS}
    return Plan(shards, outputs_of(shards, ""), gather(steps), (), frozenset(stacked))


def _is_packed(name: str, containers: set[str]) -> bool:
    path, found, _ = name.partition(".experts.")
    return bool(found) and path + ".experts" in containers


def _scale_values(packed: Packed, moe: MoeLayer) -> dict[str, tuple[float, ...]]:
    """The experts' own scalar scales, from those stored beside the packed tensors."""
    values: dict[str, tuple[float, ...]] = {}
    columns = {
        (projection, param): column
        for projection in projections(moe)
        for param in SCALAR_PARAMS
        if (column := _column(packed, moe, f"{projection}_{param}")) is not None
    }
    for param in SCALAR_PARAMS:
        if moe.gate_up is not None and moe.down is not None:
            for linear, owners in ((moe.gate_up, ("gate", "up")), (moe.down, ("down",))):
                if param in linear.params:
                    shape = linear.params[param].shape
                    values[linear.tensor_name(param)] = _fused(shape, [columns[owner, param] for owner in owners])
            continue
        for expert in moe.experts:
            for projection in projections(moe):
                linear_ = getattr(expert, projection)
                if param in linear_.params:
                    values[linear_.tensor_name(param)] = (float(columns[projection, param][expert.id]),)
    return values


def _fused(shape: tuple[int, ...], columns: Sequence[Tensor]) -> tuple[float, ...]:
    if shape == ():
        return (float(columns[0][0]),)
    stacked = torch.stack(list(columns), 1) if len(shape) == 2 else columns[0]
    return tuple(stacked.flatten().tolist())


def _column(packed: Packed, moe: MoeLayer, name: str) -> Tensor | None:
    """One of our own F32 [E] scalars, joined over EP ranks; None when it is not stored."""
    target, tensors = packed.target, packed.source.tensors
    parts = []
    for ep_rank in range(target.ep):
        key = key_of(target.folder(Rank(0, ep_rank)), target.own_prefix(moe) + name)
        if key not in tensors:
            return None
        parts.append(read_whole(packed.source, key))
    return torch.cat(parts)


def _manifest(packed: Packed, plan: Plan, digests: Mapping[str, str]) -> dict[str, Any]:
    run = {
        "options": {"target": "hf", "unpacked_from": packed.target.layout_id},
        "changes": {},
    }
    outputs = {shard.file: {"bytes": shard.nbytes, "digest": digests[shard.file]} for shard in plan.shards}
    return manifests.build_manifest(packed.manifest, {}, run, packed.manifest.get("geometry", {}), outputs)


def _small_files(packed: Packed, plan: Plan, manifest: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    logical = packed.manifest["logical"]
    files = [(manifests.MANIFEST, manifests.to_bytes(manifest))]
    if len(plan.shards) > 1:
        files.append((INDEX, manifests.to_bytes(index_of(plan.outputs.values()))))
    files.append((qc.HF_QUANT_CONFIG, manifests.to_bytes(logical["hf_quant_config"])))
    config = qc.rewritten_config(packed.config, logical["quantization_config"])
    files.append((qc.CONFIG, manifests.to_bytes(config)))
    return files
