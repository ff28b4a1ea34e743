"""Subjects of the check: a packed output on disk, a logical checkpoint packed in memory, or an output being written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nvfp4prep import packing
from nvfp4prep.convert import Prepared
from nvfp4prep.experts import Read, Slice, join_slices, load_expert, slice_expert
from nvfp4prep.findings import cut
from nvfp4prep.layouts.logical import Expert, LayerFacts, Scales
from nvfp4prep.manifest import MANIFEST
from nvfp4prep.packing import DTYPES, PackJob, projections
from nvfp4prep.plan import Rank, key_of
from nvfp4prep.scales import Resolution
from nvfp4prep.schema import FLOAT_DTYPES, Format, MoeLayer
from nvfp4prep.smoke.check import BF16, Reference, Subject
from nvfp4prep.smoke.layer import LogicalLayer, PackedLayer, Weights
from nvfp4prep.smoke.reference import reference_norm, reference_weights, weights_of
from nvfp4prep.smoke.routing import read_router, router_config
from nvfp4prep.source import Source, refuse
from nvfp4prep.targets import Target, activation_of
from nvfp4prep.unpack import Packed

UNPACKED: Reference = "its own unpacked bytes: neither errors before packing nor changes since are seen"
SOURCE: Reference = "source, dequantised"


@dataclass(frozen=True)
class Real:
    """Where real weights come from: a BF16 checkpoint, or a decided conversion's source."""

    reference: Source | None = None
    config: Mapping[str, Any] | None = None
    source: Prepared | None = None


# --- reading ----------------------------------------------------------------------------------------------------------


class Mapped:
    """Tensors of a Source through memory maps: only what is looked at becomes resident."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._maps = source.maps()

    def __call__(self, key: str, index: int | None = None) -> Tensor:
        """A tensor by key, or its slice along the first dimension; E4M3 as U8 codes."""
        info = self._source.tensors[key]
        dtype = DTYPES[info.dtype]
        shape = info.shape if index is None else info.shape[1:]
        if info.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        length = info.nbytes if index is None else info.nbytes // info.shape[0]
        start = info.start if index is None else info.start + index * length
        mapped = self._maps(info.file, start, length)
        flat = torch.frombuffer(mapped, dtype=torch.uint8, offset=start, count=length)
        return (flat if start % dtype.itemsize == 0 else flat.clone()).view(dtype).view(shape)


def _copied(read: Callable[[str, int | None], Tensor]) -> Read:
    """A Read whose tensors may be changed in place."""
    return lambda key, index: read(key, index).clone()


# --- a logical checkpoint, packed in memory ---------------------------------------------------------------------------


def from_prepared(prepared: Prepared, real: Real) -> Subject:
    """A checkpoint decided for a packed target: each layer is packed in memory when it is looked at.

    Args:
        prepared: decided for a packed target.
        real: where the reference's weights come from; the source itself when empty.

    Raises:
        LayoutError: routing or activation that is not known.
    """
    job = prepared.job.pack
    assert job is not None
    checkpoint = prepared.checkpoint
    read = Mapped(checkpoint.source)

    def pack(moe: MoeLayer, rank: Rank) -> PackedLayer:
        return pack_in_memory(moe, rank, job, prepared.resolution, _copied(read))

    def norm(moe: MoeLayer) -> tuple[str, Tensor] | None:
        fold = prepared.job.folds.get(moe.path)
        return None if fold is None else (fold.norm.name, fold.folded.to(torch.float32))

    known = _real_of(real if real.reference or real.source else replace(real, source=prepared), norm)
    return Subject(
        job.target,
        checkpoint.config,
        job.target.layers(checkpoint.schema),
        pack,
        lambda moe: _source_layer(moe, prepared, read),
        known.weights,
        known.label,
        router=lambda moe: read_router(checkpoint.source, moe),
        router_config=router_config(checkpoint.config),
        rescaled=_rescaled_by(real.source or prepared),
        folded=_folded_by(prepared),
        norm_factors=known.norm_factors,
    )


def pack_in_memory(moe: MoeLayer, rank: Rank, job: PackJob, resolution: Resolution, read: Read) -> PackedLayer:
    """A rank's packed layer, from stored tensors."""
    target = job.target
    geometry, share = target.geometry(moe, rank.tp), target.share(moe, rank.tp)
    facts = job.facts.get((moe.path, rank), LayerFacts(target.engine, target.activation_dtype))
    experts = target.experts(moe, rank.ep)
    scales = packing.with_factors(packing.rank_scales(moe, experts, resolution), job.factors.get(moe.path), share)
    scalars = target.module.scalars(scales, job.activation(moe), facts)
    stacked: dict[str, list[Tensor]] = {}
    for position, e in enumerate(experts):
        part = slice_expert(packing.logical_expert(moe, e, job, resolution, read)[0], share, rank.tp == 0)
        mine = packing.expert_facts(facts, scalars, position) if geometry.biased else facts
        for name, value in target.module.pack(part, geometry, mine).items():
            stacked.setdefault(name, []).append(value)
    packed = {name: torch.stack(values) for name, values in stacked.items()}
    own = packing.own_scalars(moe, experts, job, resolution, scales, scalars)  # as a packed output stores them
    return PackedLayer(target, geometry, job.activation(moe), facts, experts, packed, own, scales)


def _source_layer(moe: MoeLayer, prepared: Prepared, read: Mapped) -> LogicalLayer:
    """What a layer means, from the source's tensors and the resolution."""
    job = prepared.job.pack
    assert job is not None
    activation = activation_of(prepared.checkpoint.config, moe.gated)
    scales = packing.rank_scales(moe, range(moe.expert_count), prepared.resolution)
    scales = packing.with_factors(scales, job.factors.get(moe.path), Slice(0, moe.intermediate))

    def expert(e: int) -> Expert:
        return packing.logical_expert(moe, e, job, prepared.resolution, _copied(read))[0]

    return LogicalLayer(moe.hidden, moe.intermediate, moe.expert_count, activation, expert, scales)


@dataclass(frozen=True)
class _Known:
    """Real weights by layer and expert, what to call them, and `Subject.norm_factors`."""

    weights: Callable[[MoeLayer], Callable[[int], Weights]]
    label: Reference
    norm_factors: Callable[[MoeLayer], Tensor | str | None] = lambda moe: None


Norm = Callable[[MoeLayer], tuple[str, Tensor] | None]
"""The norm, name and F32 [H], that a layer's factors were folded into; None for a layer whose norm is as it was."""


def _of_reference(source: Source, config: Mapping[str, Any], norm: Norm) -> _Known:
    """The weights of a BF16 checkpoint, for inputs from the norms that factors were folded into.

    Such a norm gives x·f where the checkpoint's own gives x: f is the one over the other, and W·x = (W / f)·(x·f).
    """

    known: dict[str, Tensor | str | None] = {}

    def factors(moe: MoeLayer) -> Tensor | str | None:
        if moe.path not in known:
            known[moe.path] = factors_of(moe)
        return known[moe.path]

    def factors_of(moe: MoeLayer) -> Tensor | str | None:
        ours = norm(moe)
        if ours is None:
            return None
        name, folded = ours
        own = reference_norm(source, config, moe, name.removeprefix(moe.path.rpartition(".")[0] + "."))
        if own is None:
            return f"the reference has no {name}, which says what was folded into it"
        factor = torch.where((own == 0) & (folded == 0), 1.0, folded / own)
        if not bool((factor.isfinite() & (factor != 0)).all()):
            return f"{name} is zero or not finite where the reference's is not, or the other way round"
        return factor

    def weights(moe: MoeLayer) -> Callable[[int], Weights]:
        found, factor = reference_weights(source, config, moe), factors(moe)
        if not isinstance(factor, Tensor):
            return found
        return lambda e: _with_columns(found(e), 1 / factor, torch.ones(moe.intermediate, dtype=torch.float32))

    return _Known(weights, BF16, factors)


def _real_of(real: Real, norm: Norm) -> _Known:
    """The reference's weights where there is one, else the source's, dequantised."""
    if real.reference is not None and real.config is not None:
        return _of_reference(real.reference, real.config, norm)
    assert real.source is not None
    prepared = real.source
    read = Mapped(prepared.checkpoint.source)
    layers = {moe.path: moe for moe in prepared.checkpoint.schema.moe_layers}
    stored = Resolution(prepared.checkpoint.scale_values, {}, (), (), ())
    job = prepared.job.pack

    def of_layer(moe: MoeLayer) -> Callable[[int], Weights]:
        own = layers[moe.path]
        scales = packing.rank_scales(own, range(own.expert_count), stored)
        factors = None if job is None else job.factors.get(own.path)

        def weights(e: int) -> Weights:
            expert = load_expert(own, e, _copied(read), {})[0]
            weights = weights_of(expert, scales, e)
            stored_factors = own.experts[e].down.params.get("pre_quant_scale") if own.experts else None
            if job is not None and own.path in job.rows and stored_factors is not None:
                weights = replace(weights, up=weights.up * read(stored_factors.name).to(torch.float32)[:, None])
            return weights if factors is None else _with_columns(weights, factors.w13, factors.w2)

        return weights

    return _Known(of_layer, SOURCE)


def _with_columns(weights: Weights, w13: Tensor, w2: Tensor) -> Weights:
    """Weights for inputs that no factors, [H] and [I], have been multiplied into."""
    gate = None if weights.gate is None else weights.gate * w13
    return replace(weights, gate=gate, up=weights.up * w13, down=weights.down * w2)


def _rescaled_by(prepared: Prepared | None) -> Callable[[MoeLayer], bool]:
    """Whether a conversion rounds a layer's block scales, by the layer's path."""
    if prepared is None:
        return lambda moe: False
    rescales = prepared.resolution.rescales
    paths = {
        moe.path
        for moe in prepared.checkpoint.schema.nvfp4_layers  # the only ones with block scales that change
        if any(linear.params["weight_scale"].name in rescales for linear in (*moe.w13, *moe.w2))
    } | _row_folds(prepared)
    return lambda moe: moe.path in paths


def _row_folds(prepared: Prepared) -> frozenset[str]:
    """Layers where down's pre_quant_scale goes into block scales of up, which rounds them."""
    rows = frozenset() if prepared.job.pack is None else prepared.job.pack.rows
    return frozenset(moe.path for moe in prepared.checkpoint.schema.nvfp4_layers if moe.path in rows)


def _folded_by(prepared: Prepared) -> frozenset[str]:
    """Layers whose pre_quant_scale a conversion folds away."""
    return frozenset(prepared.job.folds) | _row_folds(prepared)


# --- a packed output on disk ------------------------------------------------------------------------------------------


def from_packed(packed: Packed, real: Real) -> Subject:
    """A packed output. Without a BF16 checkpoint or source, its own unpacked bytes are the reference.

    Raises:
        LayoutError: routing or activation that is not known.
    """
    target, source = packed.target, packed.source
    read = Mapped(source)

    def pack(moe: MoeLayer, rank: Rank) -> PackedLayer | None:
        return stored_layer(moe, rank, target, packed.config, source, read)

    def own(moe: MoeLayer) -> LogicalLayer:
        return _unpacked_layer(moe, target, packed.config, source, read)

    if real.source is not None:
        prepared = real.source
        mapped = Mapped(prepared.checkpoint.source)
        layers = {moe.path: moe for moe in prepared.checkpoint.schema.moe_layers}

        def logical(moe: MoeLayer) -> LogicalLayer:
            return _source_layer(layers[moe.path], prepared, mapped)
    else:
        logical = own
    folded, rescaled = _folded(packed, real.source), _rescaled_by(real.source)
    if real.reference is not None or real.source is not None:
        known = _real_of(real, lambda moe: _folded_norm(moe, packed, real.source, read))
    else:
        known = _Known(_dequantised(own), UNPACKED)
    if real.source is None and real.reference is not None:
        rows = _of_last_run(packed, "block_scales_folded")
        rescaled = lambda moe: moe.path in rows  # noqa: E731
    return Subject(
        target,
        packed.config,
        packed.layers,
        pack,
        logical,
        known.weights,
        known.label,
        router=lambda moe: read_router(source, moe),
        router_config=router_config(packed.config),
        parameters=_parameters_of(packed, real.source, read),
        independent=real.source is not None,
        rescaled=rescaled,
        folded=folded,
        norm_factors=known.norm_factors,
    )


def _folded(packed: Packed, prepared: Prepared | None) -> frozenset[str]:
    """Layers whose pre_quant_scale was folded away: by the conversion at hand, or by the manifest."""
    if prepared is not None:
        return _folded_by(prepared)
    return frozenset(path for key in ("folded", "block_scales_folded") for path in _of_last_run(packed, key))


def _of_last_run(packed: Packed, key: str) -> Mapping[str, Any]:
    """A table by MoE path of the manifest's last run, empty when there is none."""
    runs = packed.manifest.get("runs")
    last = runs[-1] if isinstance(runs, list) and runs else None
    entry = last.get(key) if isinstance(last, dict) else None
    return entry if isinstance(entry, dict) else {}


def _folded_norm(moe: MoeLayer, packed: Packed, prepared: Prepared | None, read: Mapped) -> tuple[str, Tensor] | None:
    """The stored norm that gate's and up's factors went into, by the conversion at hand or the manifest.

    Raises:
        InputRefused: the manifest names none that there is.
    """
    if prepared is not None:
        fold = prepared.job.folds.get(moe.path)
        name: Any = None if fold is None else fold.norm.name
    else:
        entry = _of_last_run(packed, "folded").get(moe.path)
        name = entry.get("norm") if isinstance(entry, dict) else entry
    if name is None:
        return None
    info = packed.source.tensors.get(key_of(packed.target.common, str(name)))
    if info is None or info.dtype not in FLOAT_DTYPES or info.shape != (moe.hidden,):
        message = (
            f"factors of {moe.path} went into {cut(str(name))}, it says; there is no such norm of {moe.hidden} values"
        )
        refuse("manifest-bad", f"{message}; copy the whole output", file=MANIFEST)
    return info.name, read(key_of(packed.target.common, info.name)).to(torch.float32)


def _parameters_of(
    packed: Packed, prepared: Prepared | None, read: Mapped
) -> Callable[[MoeLayer, Rank], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]:
    """A layer's small tensors as stored, and as the source (else the stored logical scales) makes them."""
    target, tensors = packed.target, packed.source.tensors
    job = None if prepared is None else prepared.job.pack
    layers = {} if prepared is None else {moe.path: moe for moe in prepared.checkpoint.schema.moe_layers}

    def parameters(moe: MoeLayer, rank: Rank) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        folder = target.folder(rank)
        if job is not None and prepared is not None:
            made = packing.rank_parameters(layers[moe.path], rank, job, prepared.resolution)
        else:
            stored = _stored_scalars(moe, rank, target, packed.source, read)
            scales = _stored_scales(moe, len(target.experts(moe, rank.ep)), stored)
            facts = packing.stored_facts(moe, rank, 0, target, read)
            kernel = target.module.scalars(scales, activation_of(packed.config, moe.gated), facts)
            made = {
                target.prefix(moe) + name: value
                for name, value in target.module.parameters(scales, kernel, facts).items()
            }
        wanted = {key_of(folder, name): value for name, value in made.items()}
        return {key: read(key) for key in wanted if key in tensors}, wanted

    return parameters


def _dequantised(own: Callable[[MoeLayer], LogicalLayer]) -> Callable[[MoeLayer], Callable[[int], Weights]]:
    def of_layer(moe: MoeLayer) -> Callable[[int], Weights]:
        layer = own(moe)
        w13, w2 = layer.scales.w13_factors, layer.scales.w2_factors

        def weights(e: int) -> Weights:
            found = weights_of(layer.expert(e), layer.scales, e)
            return found if w13 is None or w2 is None else _with_columns(found, w13, w2)

        return weights

    return of_layer


def stored_layer(
    moe: MoeLayer, rank: Rank, target: Target, config: Mapping[str, Any], source: Source, read: Mapped
) -> PackedLayer | None:
    """A rank's packed layer as stored, or None when its files are not there."""
    folder = target.folder(rank)
    names = packing.stacked_names(moe, target)
    present = {tensor: key_of(folder, name) for tensor, name in names.items() if key_of(folder, name) in source.tensors}
    if "w13_weight" not in present:
        return None
    experts = target.experts(moe, rank.ep)
    scalars = _stored_scalars(moe, rank, target, source, read)
    facts = packing.stored_facts(moe, rank, 0, target, read)
    scales = _stored_scales(moe, len(experts), scalars)
    activation = activation_of(config, moe.gated)
    geometry = target.geometry(moe, rank.tp)
    packed = {tensor: read(key) for tensor, key in present.items()}
    return PackedLayer(target, geometry, activation, facts, experts, packed, scalars, scales)


def _stored_scalars(moe: MoeLayer, rank: Rank, target: Target, source: Source, read: Mapped) -> dict[str, Tensor]:
    """Everything stored under `nvfp4prep.` for a layer and rank, without prefix."""
    prefix = key_of(target.folder(rank), target.own_prefix(moe))
    return {
        key[len(prefix) :]: read(key)
        for key, info in source.tensors.items()
        if key.startswith(prefix) and info.dtype in DTYPES
    }


def _stored_scales(moe: MoeLayer, experts: int, scalars: Mapping[str, Tensor]) -> Scales:
    """The logical global scales stored beside the packed tensors; int4 has none."""
    inputs = [scalars[f"{p}_input_scale"] for p in projections(moe)[:-1] if f"{p}_input_scale" in scalars]
    gate, up, down = (scalars.get(f"{p}_weight_scale_2") for p in ("gate", "up", "down"))
    if moe.format is Format.INT4:
        up = down = torch.ones(experts, dtype=torch.float32)
        gate = up if moe.gated else None
    assert up is not None and down is not None
    return Scales(
        gate,
        up,
        down,
        torch.stack(inputs).amax(0) if inputs else None,
        scalars.get("down_input_scale"),
        scalars.get("w13_pre_quant_scale"),
        scalars.get("w2_pre_quant_scale"),
    )


def _unpacked_layer(
    moe: MoeLayer, target: Target, config: Mapping[str, Any], source: Source, read: Mapped
) -> LogicalLayer:
    """What a packed layer means, by the layout's unpack; all ranks must be there."""
    share = moe.expert_count // target.ep
    parts = [_stored_own(moe, target, source, read, ep) for ep in range(target.ep)]
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    scales = _stored_scales(moe, moe.expert_count, joined | _stored_factors(moe, target, read))

    @lru_cache(maxsize=2)
    def expert(e: int) -> Expert:
        ep_rank, position = divmod(e, share)
        return join_slices(
            [
                packing.unpack_part(moe, Rank(tp, ep_rank), position, target, source.tensors, read)
                for tp in range(target.tp)
            ]
        )

    return LogicalLayer(
        moe.hidden, moe.intermediate, moe.expert_count, activation_of(config, moe.gated), expert, scales
    )


def _stored_factors(moe: MoeLayer, target: Target, read: Mapped) -> dict[str, Tensor]:
    """What the kernel multiplies all experts' inputs by, w2's joined over the TP ranks."""

    def stored(gemm: str, tp: int) -> Tensor:
        return read(key_of(target.folder(Rank(tp, 0)), f"{target.own_prefix(moe)}{gemm}_pre_quant_scale"))

    if not target.module.REQUIRES.pre_quant_scale:
        return {}
    w2 = torch.cat([stored("w2", tp) for tp in range(target.tp)])
    return {"w13_pre_quant_scale": stored("w13", 0), "w2_pre_quant_scale": w2}


def _stored_own(moe: MoeLayer, target: Target, source: Source, read: Mapped, ep_rank: int) -> dict[str, Tensor]:
    prefix = key_of(target.folder(Rank(0, ep_rank)), target.own_prefix(moe))
    wanted = [f"{p}_{param}" for p in projections(moe) for param in ("weight_scale_2", "input_scale")]
    return {name: read(prefix + name) for name in wanted if prefix + name in source.tensors}
