"""What an engine must be running as, to load a packed output. Shared by the engines' plugins; imports neither."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from nvfp4prep import manifest as manifests
from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.findings import cut
from nvfp4prep.layouts import LAYOUTS
from nvfp4prep.loading import PackedCheckpoint, PackedLayer
from nvfp4prep.schema import Format
from nvfp4prep.source import read_json

METHOD = "nvfp4prep"
"""The quantisation that config.json of a packed output names, and the load format."""


@dataclass(frozen=True, slots=True)
class Running:
    """An engine as it is running: `backend` by its own name of the MoE backend, `dtype` of activations bf16 or fp16."""

    engine: str
    version: str
    backend: str
    tp: int
    ep: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Module:
    """A module of experts as an engine made it: sizes of the whole model, before any padding."""

    experts: int
    hidden: int
    intermediate: int
    gated: bool


_VERSION_PARTS = {"vllm": 2, "sglang": 3}
"""How much of a version names a range whose loading code is taken for alike: SGLang changes it in patch releases."""


def check_version(engine: str, version: str, packed_for: str, read_from: str, place: str) -> None:
    """Refuse an engine, or a version of it, that an output is not packed for.

    Raises:
        UsageFault: with both.
    """
    if engine != packed_for:
        raise UsageFault(
            f"{place}: packed for {packed_for}, and this is {engine}; convert again with --engine {engine}"
        )
    parts = _VERSION_PARTS[engine]
    found, wanted = ([part.partition("+")[0] for part in text.split(".")[:parts]] for text in (version, read_from))
    if found != wanted:
        known = ".".join(wanted)
        raise UsageFault(
            f"{place}: packed for {engine} {known}, and this is {version}; install {engine} {known}, or unpack and "
            "serve the hf checkpoint"
        )


def check_running(packed: PackedCheckpoint, running: Running) -> None:
    """Refuse an engine that runs otherwise than a packed output is packed for.

    Raises:
        UsageFault: with every difference, both values, and what to do.
    """
    place = str(packed.path)
    check_version(running.engine, running.version, packed.engine, packed.engine_version, place)
    rules = packed.packed.target.module.REQUIRES.engines[packed.engine]
    wrong = []
    if running.backend != rules.backend:
        wrong.append(
            f"packed for the MoE backend {rules.backend} ({packed.layout}), and {running.backend} is chosen: ask for "
            f"{rules.backend}, or convert for another target"
        )
    if (running.tp, running.ep) != (packed.tp, packed.ep):
        wrong.append(
            f"packed for TP {packed.tp} and EP {packed.ep}, and the experts run with TP {running.tp} and EP "
            f"{running.ep}: convert again with --tp {running.tp} --ep {running.ep}, or start the engine as packed for"
        )
    if packed.layout == "vllm-marlin" and running.dtype != packed.activation_dtype:
        wrong.append(
            f"packed for {packed.activation_dtype} activations, and the model runs in {running.dtype}: convert again "
            f"with --activation-dtype {running.dtype}, or start the engine with the other"
        )
    if wrong:
        raise UsageFault(f"{place}: " + "; ".join(wrong))


def check_module(packed: PackedCheckpoint, layer: PackedLayer, module: Module) -> None:
    """Refuse a module of other sizes than a packed layer's.

    Raises:
        UsageFault: with both.
    """
    ours = Module(layer.experts, layer.hidden, layer.intermediate, layer.gated)
    if module != ours:
        raise UsageFault(f"{packed.path}: {layer.path} is packed as {ours}, and the engine's model has {module}")


def logical_quantization(path: str) -> dict[str, Any]:
    """The quantization_config that the `hf` checkpoint behind a packed output has. Reads the manifest alone.

    Raises:
        UsageFault: not a local directory, no manifest of a packed output in it, or one of int4, which no plugin loads.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UsageFault(f"{path}: packed outputs are served from a local directory; download it first (hf download)")
    manifest = read_json(folder, manifests.MANIFEST)
    logical = manifest.get("logical") if manifest else None
    section = logical.get("quantization_config") if isinstance(logical, dict) else None
    if not isinstance(section, dict):
        found = "not there" if manifest is None else cut(f"its logical entry is {logical!r:.60}")
        raise UsageFault(f"{path}/{manifests.MANIFEST}: {found}; copy the whole output of convert")
    packed = manifest.get("packed") if manifest else None
    layout = str(packed.get("layout") if isinstance(packed, dict) else None).partition("/")[0]
    if layout not in LAYOUTS or LAYOUTS[layout].REQUIRES.format is not Format.NVFP4:
        raise UsageFault(
            f"{path}: packed as {cut(layout)}, which this plugin does not load; serve int4 as compressed-tensors"
        )
    return section


def other_tensors(packed: PackedCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Everything that all ranks share, by name: what is not of packed experts.

    Raises:
        EnvironmentFault: a file can't be read.
    """
    names: dict[str, list[str]] = {}
    for info in packed.others:
        names.setdefault(info.file, []).append(info.name)
    for file in sorted(names):
        try:
            with safe_open(packed.path / file, "pt") as opened:
                for name in names[file]:
                    yield name, opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EnvironmentFault(f"{packed.path / file}: can't be read: {error}; copy it again") from None


def mapped(mapper: Any, name: str) -> str:
    """A name of the checkpoint as an engine's model has it, by the model's WeightsMapper, if it has one."""
    found = None if mapper is None else mapper._map_name(name)
    return name if found is None else str(found)
