"""The plan: every output tensor with its place, and the work items that fill them. From headers and options alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nvfp4prep.dialects import natural_key
from nvfp4prep.header import DTYPE_BITS, HeaderError, TensorInfo, build_header, tensor_bytes
from nvfp4prep.scales import ScalePolicy, output_shape
from nvfp4prep.schema import SCALAR_PARAMS, Format, Linear, Schema
from nvfp4prep.source import refuse

PIECE_BYTES = 1 << 26
"""Tensors are copied, and hashed, in pieces of at most 64 MiB."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes `start`..`start + length` of the source tensor, unchanged, to the same place of `name`'s output."""

    tensor: TensorInfo
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Fill:
    """F32 values of scale tensor `name`, from the resolution."""

    name: str


@dataclass(frozen=True, slots=True)
class RescaleBlocks:
    """E4M3 block scales, through the resolution's rescale for this tensor; unchanged when it has none."""

    tensor: TensorInfo


Step = Copy | Fill | RescaleBlocks


@dataclass(frozen=True, slots=True)
class Item:
    """Work done by one worker in one go: an expert, a linear, or one other tensor's piece."""

    label: str
    steps: tuple[Step, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """An output file: header bytes, then tensors (name, dtype, shape) one after another."""

    file: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    header: bytes = field(repr=False)
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """Everything that will be written except the configs and side files.

    `outputs` maps each output tensor to its TensorInfo (file and absolute offsets in the output); `imputed` are names
    that the source does not have.
    """

    shards: tuple[Shard, ...]
    outputs: Mapping[str, TensorInfo]
    items: tuple[Item, ...]
    imputed: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def nbytes_of_tensors(self) -> int:
        """Bytes that the items write."""
        return sum(shard.nbytes - len(shard.header) for shard in self.shards)


def make_plan(
    tensors: Mapping[str, TensorInfo],
    metadata: Mapping[str, str],
    schema: Schema,
    policy: ScalePolicy,
    weight_only: frozenset[str],
    max_shard_bytes: int,
) -> Plan:
    """The plan for target `hf`: the source's names and formats, scales F32 and canonical.

    Args:
        tensors, metadata: from the source's headers.
        schema: without errors.
        policy: how scales are resolved, which decides their shapes.
        weight_only: modules that need no input_scale, so that none is imputed for them.
        max_shard_bytes: bytes of tensors per file, exceeded only by a single larger tensor.
    """
    steps: dict[str, Step | None] = dict.fromkeys(tensors)
    specs = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    owner: dict[str, str] = {}
    imputed: list[str] = []
    rescalable = _rescalable(schema, policy)
    for linear in schema.of_format(Format.NVFP4):
        path, expert = schema.expert_of.get(linear.module, (None, None))
        label = linear.module if path is None else f"{path} expert {expert}"
        for param, tensor in linear.params.items():
            owner[tensor.name] = label
            if param == "weight_scale" and linear.module in rescalable:
                steps[tensor.name] = RescaleBlocks(tensor)
        for param in SCALAR_PARAMS:
            name = linear.tensor_name(param)
            if param not in linear.params:
                if linear.module in weight_only or policy.impute == "none":
                    continue
                imputed.append(name)
                owner[name] = label
            steps[name] = Fill(name)
            specs[name] = ("F32", output_shape(linear, param, policy))
    shards = _shards(specs, metadata, max_shard_bytes)
    outputs = {tensor.name: tensor for shard in shards for tensor in _placed(shard)}
    return Plan(shards, outputs, _items(outputs, tensors, steps, owner), tuple(imputed))


def _rescalable(schema: Schema, policy: ScalePolicy) -> frozenset[str]:
    """Modules whose block scales may change: members of a pair or group with several global scales."""
    members: list[Linear] = [member for group in schema.fusion_groups for member in group.members]
    if policy.w13_scale == "unify":
        for moe in schema.moe_layers:
            if moe.gate_up is None and moe.gated:
                members += moe.w13
            elif moe.gate_up is not None:
                scale = moe.gate_up.params.get("weight_scale_2")
                if scale is not None and scale.shape == (moe.expert_count, 2):
                    members.append(moe.gate_up)
    return frozenset(member.module for member in members)


def _shards(
    specs: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str], limit: int
) -> tuple[Shard, ...]:
    """Fill files in natural order of names; inside a file larger dtypes come first, so that all tensors are aligned."""
    files: list[list[str]] = [[]]
    held = 0
    sizes = {name: tensor_bytes(dtype, shape) for name, (dtype, shape) in specs.items()}
    for name in sorted(specs, key=natural_key):
        if files[-1] and held + sizes[name] > limit:
            files.append([])
            held = 0
        files[-1].append(name)
        held += sizes[name]
    shards = []
    for number, names in enumerate(files, 1):
        names.sort(key=lambda name: -DTYPE_BITS[specs[name][0]])  # stable: natural order within a dtype size
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = tuple((name, *specs[name]) for name in names)
        try:
            header = build_header(tensors, metadata)
        except HeaderError as error:
            refuse("header-too-large", str(error), file=file)
        shards.append(Shard(file, tensors, header, len(header) + sum(sizes[name] for name in names)))
    return tuple(shards)


def _placed(shard: Shard) -> Iterable[TensorInfo]:
    position = len(shard.header)
    for name, dtype, shape in shard.tensors:
        end = position + tensor_bytes(dtype, shape)
        yield TensorInfo(name, dtype, shape, shard.file, position, end)
        position = end


def _items(
    outputs: Mapping[str, TensorInfo],
    tensors: Mapping[str, TensorInfo],
    steps: Mapping[str, Step | None],
    owner: Mapping[str, str],
) -> tuple[Item, ...]:
    """One item per expert or linear, in natural order; large plain copies are cut into pieces of their own."""
    gathered: dict[str, list[Step]] = defaultdict(list)
    for name in outputs:
        step = steps[name]
        if step is not None:
            gathered[owner[name]].append(step)
            continue
        tensor = tensors[name]
        pieces = [Copy(tensor, at, min(PIECE_BYTES, tensor.nbytes - at)) for at in range(0, tensor.nbytes, PIECE_BYTES)]
        if len(pieces) > 1:
            for number, piece in enumerate(pieces, 1):
                gathered[f"{name} piece {number}"].append(piece)
        else:
            gathered[owner.get(name, name)] += pieces
    return tuple(Item(label, tuple(parts), sum(map(_step_bytes, parts))) for label, parts in gathered.items() if parts)


def _step_bytes(step: Step) -> int:
    match step:
        case Copy():
            return step.length
        case RescaleBlocks():
            return step.tensor.nbytes
        case Fill():
            return 0


def largest_item(items: Sequence[Item]) -> int:
    """Bytes of the largest item."""
    return max((item.nbytes for item in items), default=0)
