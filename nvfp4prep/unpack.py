"""Back from a packed output to the `hf` checkpoint it stands for: the same bytes in every file but the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from nvfp4prep import manifest as manifests
from nvfp4prep import quant_config as qc
from nvfp4prep.dialects import DIALECTS
from nvfp4prep.digests import differing_files, read_header
from nvfp4prep.errors import CheckFailed, EnvironmentFault, InputRefused
from nvfp4prep.execute import Job, execute, shard_digests
from nvfp4prep.findings import Finding, cut, errors
from nvfp4prep.folding import factors_fit
from nvfp4prep.header import DTYPE_BITS, MAX_TENSORS, HeaderError, TensorInfo, parse_header, tensor_bytes
from nvfp4prep.journal import plan_id
from nvfp4prep.layouts.logical import LayerFacts, Scales
from nvfp4prep.model_config import is_tied
from nvfp4prep.numerics import raw_bytes
from nvfp4prep.packing import (
    DTYPES,
    FLOAT_NAMES,
    PackJob,
    fact_names,
    manifest_entry,
    packed_names,
    projections,
    read_whole,
    stacked_names,
    stacked_specs,
)
from nvfp4prep.plan import (
    PIECE_BYTES,
    Constant,
    Fill,
    Plan,
    Rank,
    Spec,
    Step,
    Unpack,
    copies,
    gather,
    index_of,
    key_of,
    outputs_of,
    place,
)
from nvfp4prep.scales import Resolution
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear, MoeLayer, Schema, build_schema
from nvfp4prep.source import INDEX, Source, read_json, read_packed, refuse
from nvfp4prep.targets import IDENTITY, OWN, Target, activation_of, expert_problem
from nvfp4prep.writer import PartialOutput, check_destination, check_names, check_space

_OF_TENSORS = frozenset(
    {"quant_method", "quant_algo", "group_size", "config_groups", "quantized_layers", "ignore", "exclude_modules"}
)
"""Keys of a quantisation config that follow from what is stored."""
_MAX_RANKS = 1024
_MAX_EXPERTS = 1 << 16
"""More than any model or cluster has: a damaged manifest must not make loops of a number."""
_OWN = ".experts" + OWN


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
    try:
        there = path.is_dir()
    except OSError as error:
        raise EnvironmentFault(f"{path}: can't be read: {error.strerror}") from None
    if not there:
        refuse("not-packed", "no such directory; give a packed output of convert", file=str(path))
    config = read_json(path, qc.CONFIG)
    manifest, ignored = manifests.read_manifest(path)
    if config is None or manifest is None or "packed" not in manifest:
        why = f" (it was ignored: {ignored[0].message})" if ignored else ""
        message = (
            "no packed output of convert: there must be a config.json, and an nvfp4prep.json with a `packed` entry"
        )
        refuse("not-packed", message + why, file=str(path))
    try:
        target = _target(manifest["packed"])
        engine_version = manifest["packed"]["engine_version"]
        _require(isinstance(engine_version, str), f"engine_version {engine_version}")
        experts = _expert_specs(manifest["logical"])
        _check_facts(manifest)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, HeaderError) as error:
        _refuse_manifest(f"its packed or logical entry can't be read ({type(error).__name__}: {error})")
    if target.layout_id != manifest["packed"]["layout"]:
        refuse(
            "layout-unknown",
            f"packed as {manifest['packed']['layout']}; this version knows {target.layout_id}",
            file=manifests.MANIFEST,
        )
    section = config.get("quantization_config")
    if not isinstance(section, Mapping) or any(
        section.get(key) != value
        for key, value in (manifests.packed_config(target) | {"engine_version": engine_version}).items()
    ):
        refuse("manifest-bad", f"packed as {target.layout_id} by {manifests.MANIFEST}, but not by this", file=qc.CONFIG)
    folders = [target.folder(rank) for rank in target.ranks()]
    source = read_packed(path, folders if target.flat else [target.common, *folders])
    shells = {
        name: TensorInfo(name, dtype, shape, "", 0, tensor_bytes(dtype, shape))
        for name, (dtype, shape) in experts.items()
    }
    schema = build_schema(shells, config)
    if any(finding.severity == "error" for finding in schema.findings):
        _refuse_manifest(f"its logical entry makes no sense: {schema.findings[0]}")
    try:
        _check_layers(manifest, target, schema)
        for moe in schema.moe_layers:
            activation_of(config, moe.gated)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        _refuse_manifest(f"its packed and logical entries don't belong together ({error})")
    packed = Packed(source, config, manifest, target, schema.moe_layers, experts)
    _check_tensors(packed)
    _check_configs(packed, shells)
    _check_files(packed)
    return packed


def _refuse_manifest(message: str) -> NoReturn:
    refuse("manifest-bad", message, file=manifests.MANIFEST)


# --- the manifest is a file that anybody may have changed: everything that is used of it is checked ------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_count(value: Any, largest: int) -> bool:
    return type(value) is int and 1 <= value <= largest


def _target(entry: Mapping[str, Any]) -> Target:
    layout, engine, _ = str(entry["layout"]).split("/")
    tp, ep, dtype = entry["tp"], entry["ep"], entry["activation_dtype"]
    _require(_is_count(tp, _MAX_RANKS) and _is_count(ep, _MAX_RANKS), f"tp {tp}, ep {ep}")
    _require(dtype in ("bf16", "fp16"), f"activation_dtype {dtype}")
    target = Target(layout, engine, tp, ep, dtype)  # type: ignore[arg-type]
    target.module.REQUIRES.engines[target.engine]
    return target


def _check_facts(manifest: Mapping[str, Any]) -> None:
    """What is copied to the new manifest and configs, and how files are split."""
    logical = manifest["logical"]
    metadata = logical["metadata"]
    text = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    _require(text, "metadata is no table of strings")
    _require(_is_count(logical["max_shard_bytes"], 1 << 62), f"max_shard_bytes {logical['max_shard_bytes']}")
    for name, table in (
        ("quantization_config", logical["quantization_config"]),
        ("hf_quant_config", logical["hf_quant_config"]),
        ("geometry", manifest.get("geometry", {})),
    ):
        _require(isinstance(table, dict), f"{name} is no object")


def _expert_specs(logical: Mapping[str, Any]) -> dict[str, Spec]:
    specs: dict[str, Spec] = {}
    _require(isinstance(logical["moe"], list) and bool(logical["moe"]), "moe is no list of layers")
    for entry in logical["moe"]:
        dialect = next((dialect for dialect in DIALECTS if dialect.name == entry["dialect"]), None)
        if dialect is None:
            raise ValueError(f"dialect {entry['dialect']}")
        _require(isinstance(entry["path"], str), f"path {entry['path']}")
        _require(_is_count(entry["experts"], _MAX_EXPERTS), f"{entry['experts']} experts")
        for projection, params in entry["projections"].items():
            _require(projection in dialect.projections.values(), f"projection {projection}")
            for param, (dtype, shape) in params.items():
                _require(dtype in DTYPE_BITS, f"dtype {dtype}")
                _require(all(_is_count(size, 1 << 40) for size in shape), f"shape {shape}")
                for expert in range(1 if dialect.fused else entry["experts"]):
                    name = dialect.tensor_name(entry["path"], projection, None if dialect.fused else expert, param)
                    _require(name not in specs, f"{name} twice")
                    _require(len(specs) < MAX_TENSORS, f"over {MAX_TENSORS:,} tensors")
                    specs[name] = (dtype, tuple(shape))
    return specs


def _check_layers(manifest: Mapping[str, Any], target: Target, schema: Schema) -> None:
    """The logical entry gives the layers that the packed entry lists, and they can have been packed so."""
    layers = {moe.path: moe for moe in schema.moe_layers}
    listed = [(entry["path"], entry["experts"]) for entry in manifest["logical"]["moe"]]
    _require(sorted(listed) == sorted((path, moe.expert_count) for path, moe in layers.items()), "other layers")
    for moe in layers.values():
        wanted = target.module.REQUIRES.format
        _require(moe.format is wanted, f"{moe.path} is not {wanted.value}")
        _require(moe.gate_up is None or moe.order is not None, f"model_type says nothing about {moe.path}'s order")
        problem = expert_problem(moe, target)
        if problem is not None:
            raise ValueError(f"{moe.path}: {problem}")
        for linear in (*moe.w13, *moe.w2):
            _require(factors_fit(linear), f"{moe.path} pre_quant_scale")
            scale = linear.params["weight_scale"].dtype
            _require(moe.format is not Format.INT4 or scale == "F32", f"{moe.path} weight_scale in {scale}, not F32")
            for param in SCALAR_PARAMS:
                info = linear.params.get(param)
                shapes: tuple[tuple[int, ...], ...] = ((),)
                if linear.experts is not None:
                    shapes = ((), (linear.experts,), (linear.experts, 2))
                _require(info is None or (info.dtype == "F32" and info.shape in shapes), f"{moe.path} {param}")
    entry, expected = manifest["packed"], manifest_entry(PackJob(target, "", {}, {}, {}), schema)
    for key in ("layout", "engine", "tp", "ep", "activation_dtype", "layers"):
        _require(entry[key] == expected[key], f"packed.{key}")


def _check_configs(packed: Packed, shells: Mapping[str, TensorInfo]) -> None:
    """The logical configs are those that convert writes for the logical checkpoint's tensors: unpack writes them.

    Args:
        packed: with tensors that fit the manifest.
        shells: the experts' own tensors.
    """
    logical = packed.manifest["logical"]
    config = qc.rewritten_config(packed.config, logical["quantization_config"])
    schema = build_schema({**{tensor.name: tensor for tensor in _common(packed).values()}, **shells}, config)
    quant, findings = qc.read_quant_config(config, logical["hf_quant_config"])
    wrong = errors([*findings, *(() if quant is None else qc.check_config(schema, quant))])
    if wrong or quant is None:
        _refuse_manifest(f"its logical configs can't be those of these tensors: {wrong[0].message}")
    written = qc.rewrite(schema, quant, qc.rewrite_exclude(schema, quant.exclude, is_tied(config)))
    for name, stored, made in (
        ("quantization_config", logical["quantization_config"], qc.quantization_config(written)),
        (
            "hf_quant_config",
            logical["hf_quant_config"].get("quantization"),
            qc.hf_quant_config(written)["quantization"],
        ),
    ):
        for key in sorted(_OF_TENSORS):
            found = stored.get(key) if isinstance(stored, Mapping) else None
            if found != made.get(key):
                found, expected = cut(repr(found)), cut(repr(made.get(key)))
                _refuse_manifest(f"{key} of its logical {name} is {found}; for these tensors convert writes {expected}")


def _common(packed: Packed) -> dict[str, TensorInfo]:
    """The tensors that are not of packed experts, by key."""
    target = packed.target
    ours: set[str] = set()
    for moe in packed.layers if target.flat else ():
        ours |= packed_names(moe, target, packed.config)
        prefix = target.own_prefix(moe)
        ours |= {name for name in packed.source.tensors if name.startswith(prefix)}
    return {
        key: tensor
        for key, tensor in packed.source.tensors.items()
        if key == key_of(target.common, tensor.name) and key not in ours
    }


def _check_tensors(packed: Packed) -> None:
    """Every tensor that unpacking reads is there with the dtype and shape that the manifest implies."""
    target, tensors = packed.target, packed.source.tensors
    findings = []

    def find(name: str, message: str, folder: str) -> None:
        findings.append(Finding("packed-tensor-bad", "error", message, file=folder or None, tensor=name))

    keys: dict[str, list[str]] = {}
    for key in tensors:
        path, experts, name = key.partition(".experts.")
        keys.setdefault(f"{path}{experts}{name.partition('.')[0]}.", []).append(key)
    for moe in packed.layers:
        columns = [f"{projection}_{param}" for projection in ("gate", "up", "down") for param in SCALAR_PARAMS]
        stored = {
            f"{projection}_{param}"
            for projection in projections(moe)
            for param in SCALAR_PARAMS
            if param in _linear(moe, projection).params
        }
        for rank in target.ranks():
            folder = target.folder(rank)
            wanted = stacked_specs(moe, rank, target)
            count = len(target.experts(moe, rank.ep))
            for name in (*sorted(stored), *fact_names(moe, target)):
                wanted[target.own_prefix(moe) + name] = ("F32", (count,))
            if target.module.REQUIRES.pre_quant_scale:
                for gemm, size in (("w13", moe.hidden), ("w2", target.geometry(moe, rank.tp).intermediate)):
                    wanted[f"{target.own_prefix(moe)}{gemm}_pre_quant_scale"] = ("F32", (size,))
            for name, (dtype, shape) in wanted.items():
                found = tensors.get(key_of(folder, name))
                if found is None:
                    find(name, "not there; copy the whole output", folder)
                elif (found.dtype, found.shape) != (dtype, shape):
                    find(name, f"{found.dtype} {list(found.shape)} where {dtype} {list(shape)} belongs", folder)
            small = _small_specs(moe, rank, target, packed.config)
            for name, (dtype, shape) in small.items():
                found = tensors.get(key_of(folder, name))
                if name not in wanted and found is not None and (found.dtype, found.shape) != (dtype, shape):
                    find(name, f"{found.dtype} {list(found.shape)} where {dtype} {list(shape)} belongs", folder)
            for prefix in target.reserved(moe):
                for name in (tensors[key].name for key in keys.get(key_of(folder, prefix), ())):
                    if name not in wanted and name not in small:
                        find(name, "nvfp4prep stores no such tensor; remove it", folder)
            for name in set(columns) - stored:
                if key_of(folder, target.own_prefix(moe) + name) in tensors:
                    find(target.own_prefix(moe) + name, "the manifest knows no such scale", folder)
    known = {target.own_prefix(moe) for moe in packed.layers}
    for key, tensor in tensors.items():
        path, found_, _ = tensor.name.partition(_OWN)
        if found_ and path + found_ not in known:
            find(key, "the manifest does not name this layer", "")
    if findings:
        raise InputRefused(findings)


def _small_specs(moe: MoeLayer, rank: Rank, target: Target, config: Mapping[str, Any]) -> dict[str, Spec]:
    """Specs of every small tensor that packing may store for a layer and rank; of input scales, not all are stored."""
    count, geometry = len(target.experts(moe, rank.ep)), target.geometry(moe, rank.tp)
    ones = torch.ones(count, dtype=torch.float32)
    factors = (torch.ones(moe.hidden, dtype=torch.float32), torch.ones(geometry.intermediate, dtype=torch.float32))
    scales = Scales(
        ones if moe.gated else None,
        *[ones] * 4,
        *(factors if target.module.REQUIRES.pre_quant_scale else (None, None)),
    )
    facts = LayerFacts(target.engine, target.activation_dtype)
    kernel = target.module.scalars(scales, activation_of(config, moe.gated), facts)
    own = kernel | {"raw_input_scale": ones, "raw_w2_input_scale": ones}
    own |= {f"{projection}_{param}": ones for projection in projections(moe) for param in SCALAR_PARAMS}
    named = {target.own_prefix(moe) + name: value for name, value in own.items()}
    named |= {
        target.prefix(moe) + name: value for name, value in target.module.parameters(scales, kernel, facts).items()
    }
    return {name: (FLOAT_NAMES[value.dtype], tuple(value.shape)) for name, value in named.items()}


def _check_files(packed: Packed) -> None:
    """Every file is the one that the manifest lists under its name: of that size, and of that layout and rank."""
    source, target, outputs = packed.source, packed.target, _outputs(packed.manifest)
    ranks = {target.folder(rank): target.identity(rank) for rank in target.ranks()}
    findings = [
        Finding("packed-file-bad", "error", "the manifest lists it, but it is not there; copy the whole output", file)
        for file in sorted(outputs.keys() - source.shards.keys())
    ]
    for file, size in source.shards.items():
        folder = file.rpartition("/")[0]
        expected = ranks.get(folder) or target.identity(None)
        listed, found = outputs.get(file), _identity(source.root / file, size)
        if listed is None:
            message = "the manifest does not list this file; remove it"
        elif found != expected:
            message = f"says it is of {found or 'no packed output'}; {expected} belongs here; copy the whole output"
        elif listed[0] != size:
            message = f"{size:,} bytes; the manifest says {listed[0]:,}; copy it again"
        else:
            continue
        findings.append(Finding("packed-file-bad", "error", message, file))
    if findings:
        raise InputRefused(findings)


def _outputs(manifest: Mapping[str, Any]) -> Mapping[str, tuple[int, str]]:
    """Size and digest of each file by the manifest."""
    outputs = manifests.listed_outputs(manifest)
    if outputs is None:
        _refuse_manifest(manifests.NO_OUTPUTS)
    return outputs


def _identity(path: Path, size: int) -> str | None:
    """What a file's metadata says it is of."""
    return parse_header(read_header(path, size)[8:], path.name, size)[1].get(IDENTITY)


# --- digests ----------------------------------------------------------------------------------------------------------


def changed_files(packed: Packed, workers: int) -> list[str]:
    """The files that are not the bytes that were written, by their digests. Raises EnvironmentFault."""
    source, target = packed.source, packed.target
    stacked = {
        key_of(target.folder(rank), name)
        for rank in target.ranks()
        for moe in packed.layers
        for name in stacked_specs(moe, rank, target)
    }

    def piece_bytes(key: str, tensor: TensorInfo) -> int:
        return tensor.nbytes // tensor.shape[0] if key in stacked else PIECE_BYTES

    digests = {file: digest for file, (_, digest) in _outputs(packed.manifest).items()}
    return differing_files(source, digests, workers, piece_bytes)


def verify_digests(packed: Packed, workers: int) -> None:
    """Compare every file with its digest in the manifest.

    Raises:
        CheckFailed: with the files that differ.
        EnvironmentFault: I/O.
    """
    wrong = changed_files(packed, workers)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        message = f"{', '.join(wrong[:3])}{more}: not the bytes that were written (their digest is not the manifest's)"
        raise CheckFailed(f"{message}; copy again")


def _linear(moe: MoeLayer, projection: str) -> Linear:
    """The linear that holds a projection of a layer's first expert."""
    if moe.gate_up is not None and moe.down is not None:
        return moe.down if projection == "down" else moe.gate_up
    linear = getattr(moe.experts[0], projection)
    assert isinstance(linear, Linear)
    return linear


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
    _check_biases(packed)
    plan = _plan(packed, logical["metadata"], logical["max_shard_bytes"])
    check_space(out, plan.nbytes + source.side_bytes())
    return Prepared(packed, plan)


def write(
    prepared: Prepared,
    out: Path,
    *,
    overwrite: bool,
    workers: int,
    progress: Callable[[int], None],
    verify: bool = True,
) -> dict[str, Any]:
    """Write the `hf` checkpoint that a packed output was made from; returns its manifest.

    Every packed file is compared with its digest first, unless `verify` is off. Block scales that Marlin flushed come
    back as zero; the packed manifest says how many there were.

    Raises:
        CheckFailed: a packed file is not what was written.
        EnvironmentFault: as convert.
    """
    packed, plan = prepared.packed, prepared.plan
    if verify:
        verify_digests(packed, workers)
    source = packed.source
    values = {name: value for moe in packed.layers for name, value in _scale_values(packed, moe).items()}
    job = Job(Resolution(values, {}, (), (), ()), PackJob(packed.target, "", packed.config, {}, {}))
    side_files = [name for name in source.side_files if name not in (qc.CONFIG, manifests.MANIFEST)]
    planned = [*(shard.file for shard in plan.shards), INDEX, qc.HF_QUANT_CONFIG, qc.CONFIG, manifests.MANIFEST]
    check_names({name: name for name in side_files}, planned)
    with PartialOutput(out, plan_id(source, plan, [values])) as output:
        for name in side_files:
            output.copy_side_file(source.side_file(name), name)
        outcome = execute(source, plan, [job], output, workers, progress)
        output.seal()
        source.verify_unchanged()
        digests = shard_digests(plan, outcome)
        manifest = _manifest(packed, plan, digests)
        output.publish(_small_files(packed, plan, manifest), overwrite=overwrite)
    return manifest


def _plan(packed: Packed, metadata: Mapping[str, str], max_shard_bytes: int) -> Plan:
    common = _common(packed)
    specs: dict[str, Spec] = {tensor.name: (tensor.dtype, tensor.shape) for tensor in common.values()}
    specs |= packed.experts
    steps: list[tuple[str, Step]] = [step for tensor in common.values() for step in copies(tensor, tensor.name, "")]
    for moe in packed.layers:
        steps += [(f"{moe.path} expert {expert}", Unpack(moe, expert, 0)) for expert in range(moe.expert_count)]
        steps += _factor_steps(packed, moe)
    for name in packed.experts:
        if name.endswith(SCALAR_PARAMS):
            steps.append((name, Fill(name, name, 0)))
    shards = place(specs, metadata, max_shard_bytes, "")
    fused = [linear for moe in packed.layers for linear in (moe.gate_up, moe.down) if linear is not None]
    stacked = {info.name for linear in fused for param, info in linear.params.items() if param not in SCALAR_PARAMS}
    return Plan(shards, outputs_of(shards, ""), gather(steps), (), frozenset(stacked))


def _check_biases(packed: Packed) -> None:
    """Biases that are stored as they were, widened to F32, fit the dtype that the manifest says they had.

    Raises:
        InputRefused: one does not.
        EnvironmentFault: I/O.
    """
    target = packed.target
    if target.module.REQUIRES.alphas == 2:  # divided by them, or beside that in F32 as they were
        return
    for moe in packed.layers:
        for tensor, name in stacked_names(moe, target).items():
            linear = _linear(moe, "down" if "2" in tensor else "up")
            if "bias" not in tensor or "bias" not in linear.params:
                continue
            info = linear.params["bias"]
            for rank in target.ranks():
                stored = read_whole(packed.source, key_of(target.folder(rank), name)).to(torch.float32)
                if not torch.equal(stored.to(DTYPES[info.dtype]).to(torch.float32), stored):
                    _refuse_manifest(f"{info.name} is no {info.dtype}, which what is stored of it does not fit")


def _factor_steps(packed: Packed, moe: MoeLayer) -> Iterator[tuple[str, Step]]:
    """The steps that write the experts' pre_quant_scale, which the packed layer holds once for all."""
    target = packed.target

    def stored(gemm: str, rank: Rank) -> Tensor:
        key = key_of(target.folder(rank), f"{target.own_prefix(moe)}{gemm}_pre_quant_scale")
        return read_whole(packed.source, key)

    if not any("pre_quant_scale" in linear.params for linear in (*moe.w13, *moe.w2)):
        return
    w13, w2 = stored("w13", Rank(0, 0)), torch.cat([stored("w2", Rank(tp, 0)) for tp in range(target.tp)])
    for linears, factors in ((moe.w13, w13), (moe.w2, w2)):
        in_dtype: dict[str, bytes] = {}  # one copy for all experts; they were widened from that dtype
        for linear in linears:
            info = linear.params.get("pre_quant_scale")
            if info is not None:
                if info.dtype not in in_dtype:
                    narrow = factors.to(DTYPES[info.dtype])
                    if not torch.equal(narrow.to(torch.float32), factors):
                        _refuse_manifest(f"{info.name} is no {info.dtype}, which what is stored of it does not fit")
                    in_dtype[info.dtype] = bytes(raw_bytes(narrow))
                yield info.name, Constant(info.name, in_dtype[info.dtype])


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
        "options": {
            "target": "hf",
            "unpacked_from": packed.target.layout_id,
            "max_shard_bytes": packed.manifest["logical"]["max_shard_bytes"],
        },
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
