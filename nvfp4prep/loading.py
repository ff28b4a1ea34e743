"""Packed outputs as a program reads them: open one, then load a layer's experts of one rank as a kernel takes them."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.findings import cut
from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts import LAYOUTS
from nvfp4prep.layouts.logical import Activation, ActivationDtype, Engine, Geometry
from nvfp4prep.packing import DTYPES, packed_names, projections, raw_bias_names, stacked_names
from nvfp4prep.plan import Rank, key_of
from nvfp4prep.schema import SCALAR_PARAMS, MoeLayer
from nvfp4prep.source import Source
from nvfp4prep.targets import activation_of
from nvfp4prep.unpack import Packed, read_packed_output

_READ_BYTES = 1 << 30
_MOST_NAMED = 8


@dataclass(frozen=True)
class PackedExperts:
    """One MoE layer's experts on one rank, as they are stored.

    `experts` are their global ids, in order; `geometry` the rank's sizes before and after padding.

    `parameters` are the engine's, by its names below the module. `tensors` are the layout's, by the names of its
    `shapes`, each stacked over `experts`: the same tensors, and biases, which no engine has parameters for. Block
    scales are float8_e4m3fn, whatever a layout's bytes mean (Marlin's are S0E5M3). `scalars` are the kernel's, F32 [E].
    `logical` are the scales that scalars were made from, the stored input scales, and biases kept as they were.
    """

    path: str
    layer: int | None
    layout: str
    engine: Engine
    rank: tuple[int, int]
    experts: range
    geometry: Geometry
    activation: Activation
    parameters: Mapping[str, Tensor] = field(repr=False)
    tensors: Mapping[str, Tensor] = field(repr=False)
    scalars: Mapping[str, Tensor] = field(repr=False)
    logical: Mapping[str, Tensor] = field(repr=False)

    def kernel_args(self, **activations: Any) -> dict[str, Any]:
        """What the layout's kernel takes, by the names that `kernel_args` of the layout's module documents.

        Args:
            activations: the kernel's other arguments (input, its block scales, routing, sizes), passed through.

        Raises:
            UsageFault: flashinfer-cutlass has biases to cast, and no `output_dtype` says to what.
        """
        if "fc1_expert_biases" in self.tensors and "output_dtype" not in activations:
            raise UsageFault(f"{self.path}: the kernel takes biases in its output's dtype; give output_dtype too")
        return LAYOUTS[self.layout].kernel_args(self.tensors, self.scalars, activations)


@dataclass(frozen=True)
class PackedLayer:
    """A MoE layer of a packed output: the number in its path, if it has one, and sizes before any split or padding."""

    path: str
    layer: int | None
    experts: int
    hidden: int
    intermediate: int
    gated: bool


@dataclass(frozen=True)
class PackedCheckpoint:
    """A packed output of `convert`, its manifest and headers read and checked; tensors are read when asked for.

    `layout` is the target's name and `layout_id` that with engine and version of the layout; `engine_version` is the
    version that parameter names and padding were read from.
    """

    path: Path
    layout: str
    layout_id: str
    engine: Engine
    engine_version: str
    kernel: str
    tp: int
    ep: int
    activation_dtype: ActivationDtype
    layers: tuple[PackedLayer, ...]
    config: Mapping[str, Any] = field(repr=False)
    manifest: Mapping[str, Any] = field(repr=False)
    packed: Packed = field(repr=False)

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """All (tp, ep), TP fastest."""
        return tuple((rank.tp, rank.ep) for rank in self.packed.target.ranks())

    @property
    def others(self) -> tuple[TensorInfo, ...]:
        """Tensors that are not of packed experts: all ranks share them."""
        target = self.packed.target
        ours = tuple(start for moe in self.packed.layers for start in (target.prefix(moe), target.own_prefix(moe)))
        return tuple(
            info
            for key, info in self.packed.source.tensors.items()
            if key == key_of(target.common, info.name) and not info.name.startswith(ours)
        )

    def load_experts(
        self, layer: int | str, rank: Sequence[int] = (0, 0), device: str | int | torch.device = "cpu"
    ) -> PackedExperts:
        """One layer's experts on one rank.

        Args:
            layer: its number, or its path.
            rank: tp and ep.
            device: where the tensors go, as PyTorch names devices.

        Raises:
            UsageFault: no such layer, rank or kind of device; the message names the layers and ranks that are there.
            EnvironmentFault: a file can't be read, or changed since it was opened; the device is not there or has too
                little memory.
        """
        moe, place = self._layer(layer), self._rank(rank)
        target = self.packed.target
        folder, prefix, own = target.folder(place), target.prefix(moe), target.own_prefix(moe)
        named = packed_names(moe, target, self.config)
        here = {name: key_of(folder, name) for name in named}
        here |= {name: key_of(folder, name) for name in self._own_names(folder, own)}
        found = {name: key for name, key in here.items() if key in self.packed.source.tensors}
        loaded = load_tensors(self.packed.source, found.values(), device)
        stored = {name: loaded[key] for name, key in found.items()}
        stacked = {name: tensor for tensor, name in stacked_names(moe, target).items()}
        behind = _logical_names(moe) | {name.removeprefix(own) for name in raw_bias_names(moe, target).values()}
        ours = [name for name in stored if name.startswith(own) and name not in stacked]
        small = {name.removeprefix(own): stored[name] for name in ours}
        return PackedExperts(
            moe.path,
            moe.layer,
            target.layout,
            target.engine,
            (place.tp, place.ep),
            target.experts(moe, place.ep),
            target.geometry(moe, place.tp),
            activation_of(self.config, moe.gated),
            {name.removeprefix(prefix): stored[name] for name in sorted(stored) if not name.startswith(own)},
            {tensor: stored[name] for name, tensor in stacked.items() if name in stored},
            {name: value for name, value in small.items() if name not in behind},
            {name: value for name, value in small.items() if name in behind},
        )

    def _own_names(self, folder: str, own: str) -> list[str]:
        start = key_of(folder, own)
        return [info.name for key, info in self.packed.source.tensors.items() if key.startswith(start)]

    def _layer(self, layer: int | str) -> MoeLayer:
        wanted = layer if isinstance(layer, str) else _whole(layer)
        found = [moe for moe in self.packed.layers if wanted is not None and wanted in (moe.path, moe.layer)]
        if len(found) == 1:
            return found[0]
        if found:
            paths = [moe.path for moe in found]
            raise _no(f"{self.path}: {len(found)} MoE layers have the number {layer}; give the path of one:", paths)
        numbers = [moe.path if moe.layer is None else moe.layer for moe in self.packed.layers]
        raise _no(f"{self.path}: no packed MoE layer {layer!r}; there are", numbers)

    def _rank(self, rank: object) -> Rank:
        whole = tuple(_whole(number) for number in rank) if isinstance(rank, Iterable) else None
        if whole in self.ranks:
            return Rank(*whole)
        raise _no(f"{self.path}: no rank {rank!r}; packed for TP {self.tp} and EP {self.ep}: (tp, ep) is", self.ranks)


def open_packed(path: str | os.PathLike[str]) -> PackedCheckpoint:
    """Open a packed output of `convert`: `nvfp4prep.open`.

    Every file's header is read and compared with the manifest; the bytes of tensors are not (`validate --level full`
    does).

    Raises:
        InputRefused: no packed output, or something of it is missing or damaged.
        EnvironmentFault: I/O.
    """
    try:
        root = Path(path).absolute()  # the program may go elsewhere before it loads
    except OSError as error:
        raise EnvironmentFault(f"{os.fspath(path)!r}: there is no current folder: {error.strerror}") from None
    packed = read_packed_output(root)
    target, entry = packed.target, packed.manifest["packed"]
    return PackedCheckpoint(
        root,
        target.layout,
        target.layout_id,
        target.engine,
        str(entry["engine_version"]),
        target.module.REQUIRES.kernel,
        target.tp,
        target.ep,
        target.activation_dtype,
        tuple(
            PackedLayer(moe.path, moe.layer, moe.expert_count, moe.hidden, moe.intermediate, moe.gated)
            for moe in packed.layers
        ),
        packed.config,
        packed.manifest,
        packed,
    )


def load_experts(
    path: str | os.PathLike[str],
    layer: int | str,
    rank: Sequence[int] = (0, 0),
    device: str | int | torch.device = "cpu",
) -> PackedExperts:
    """`open_packed(path).load_experts(layer, rank, device)`, for one layer. To load several, open once.

    Raises:
        InputRefused, UsageFault, EnvironmentFault: as those two.
    """
    return open_packed(path).load_experts(layer, rank, device)


def load_tensors(source: Source, keys: Iterable[str], device: str | int | torch.device) -> dict[str, Tensor]:
    """Tensors by key, in memory of their own, each with its stored dtype.

    Raises:
        UsageFault: no kind of device that PyTorch knows.
        EnvironmentFault: a file can't be read, or changed since its header was; the device is not there or has too
            little memory.
    """
    place = _device(device)
    descriptors: dict[str, int] = {}
    loaded = {}
    try:
        for key in sorted(keys, key=lambda key: (source.tensors[key].file, source.tensors[key].start)):
            info = source.tensors[key]
            if info.file not in descriptors:
                descriptors[info.file] = source.open_shard(info.file)
            with _told(f"{info.file}: {info.name}: {info.nbytes:,} bytes on device {place}"):
                loaded[key] = _read(descriptors[info.file], info).to(place)
    except EnvironmentFault as fault:
        raise EnvironmentFault(f"{source.root}: {fault}") from None
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    return loaded


def _device(device: str | int | torch.device) -> torch.device:
    """A device that something can be put on. Raises UsageFault, EnvironmentFault."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise UsageFault(f"device {device!r}: {_first_line(error)}; give cpu or cuda:0, for one") from None
    with _told(f"device {device!r}"):
        torch.empty(1, dtype=torch.uint8, device=found)
    return found


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What PyTorch says of a device that is not there or full, as an EnvironmentFault."""
    try:
        yield
    except (RuntimeError, AssertionError, ImportError, MemoryError) as error:
        raise EnvironmentFault(f"{what}: {_first_line(error)}") from None


def _first_line(error: BaseException) -> str:
    return cut((str(error) or type(error).__name__).partition("\n")[0])


def _whole(number: object) -> int | None:
    """An integer of any kind as Python's, None for what is none."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


def _read(descriptor: int, info: TensorInfo) -> Tensor:
    dtype = torch.float8_e4m3fn if info.dtype == "F8_E4M3" else DTYPES[info.dtype]
    data = torch.empty(info.nbytes, dtype=torch.uint8)
    view, position = data.numpy().data, 0
    while position < info.nbytes:
        try:
            got = os.preadv(descriptor, [view[position : position + _READ_BYTES]], info.start + position)
        except OSError as error:
            raise EnvironmentFault(f"{info.file}: reading {info.name} failed: {error.strerror}") from None
        if not got:
            raise EnvironmentFault(
                f"{info.file}: {info.name} ends {info.nbytes - position} bytes early; the file changed; copy it again"
            )
        position += got
    return data.view(dtype).view(info.shape)


def _logical_names(moe: MoeLayer) -> set[str]:
    """Names below `nvfp4prep.` that are no kernel's scalars, but what those were made from."""
    scales = {f"{projection}_{param}" for projection in projections(moe) for param in SCALAR_PARAMS}
    return scales | {"raw_input_scale", "raw_w2_input_scale"}


def _no(message: str, there: Iterable[object]) -> UsageFault:
    names = [str(name) for name in there]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return UsageFault(f"{message} {', '.join(names[:_MOST_NAMED])}{more}")
