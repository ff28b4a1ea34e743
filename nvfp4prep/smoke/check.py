"""The check itself: run packed layers on a backend, compare with references, and say what differs. No printing.

Two comparisons for each layer, rank and token count: the kernel against the exact emulation of the same quantisation
(layout errors show here) and the whole layer against real weights (quantisation noise). Besides, the packed bytes
themselves are read by the kernel's index formulas and compared with the logical weights, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.experts import slice_expert
from nvfp4prep.layouts import vllm_marlin
from nvfp4prep.layouts.logical import Activation, Expert, Scales
from nvfp4prep.plan import Rank
from nvfp4prep.schema import MoeLayer
from nvfp4prep.smoke import emulator, kernels
from nvfp4prep.smoke.inputs import hidden_states
from nvfp4prep.smoke.layer import LogicalLayer, PackedLayer, Routing, Run, Weights
from nvfp4prep.smoke.metrics import (
    Comparison,
    Tolerances,
    compare,
    exact_tolerances,
    reference_tolerances,
    verdict,
)
from nvfp4prep.smoke.reference import engine_scales, exact, plain, weights_of
from nvfp4prep.smoke.rounding import rounding_of
from nvfp4prep.smoke.routing import Router, RouterConfig, random_routing, route, scale_inputs
from nvfp4prep.targets import Target

EMULATOR = "emulator"
Reference = Literal[
    "BF16 checkpoint", "source, dequantised", "its own unpacked bytes: cannot see errors made before packing"
]


@dataclass(frozen=True)
class Settings:
    """What to run. `layers` "all", "first-last" or layer numbers; `tolerance` scales all derived tolerances."""

    backend: str = "auto"
    layers: str | tuple[int, ...] = "all"
    tokens: tuple[int, ...] = (1, 7, 64, 1024)
    seed: int = 0
    tolerance: float = 1.0


@dataclass(frozen=True)
class Subject:
    """A checkpoint to check, packed on disk or in memory.

    `pack(moe, rank)` gives a rank's packed layer, None when its files are not there; `logical(moe)` what it should
    mean; `real(moe)` the real weights by expert; `reference` says where those are from; `router(moe)` the stored router.
    """

    target: Target
    config: Mapping[str, Any]
    layers: tuple[MoeLayer, ...]
    pack: Callable[[MoeLayer, Rank], PackedLayer | None]
    logical: Callable[[MoeLayer], LogicalLayer]
    real: Callable[[MoeLayer], Callable[[int], Weights]]
    reference: Reference
    router: Callable[[MoeLayer], Router | None]
    router_config: RouterConfig


@dataclass(frozen=True)
class Row:
    """One comparison. `against` is exact or reference; `problems` is empty when it passed."""

    layer: int | None
    path: str
    rank: str
    tokens: int
    routing: str
    against: Literal["exact", "reference"]
    comparison: Comparison
    tolerances: Tolerances
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything a run found. `kernel_ran` is False for the emulator."""

    target: str
    backend: str
    kernel_ran: bool
    why_not: str | None
    versions: Mapping[str, str]
    reference: str
    rows: tuple[Row, ...]
    byte_problems: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return not self.byte_problems and bool(self.rows) and not any(row.problems for row in self.rows)


def choose_backend(target: Target, asked: str) -> tuple[str, Run, str | None, Mapping[str, str]]:
    """(name, run, why no kernel runs, versions). `auto` takes the layout's real kernel where this machine has it.

    Raises:
        UsageFault: the backend is for another layout.
        EnvironmentFault: a named backend's GPU or library is not here.
    """
    if asked == EMULATOR:
        return EMULATOR, emulator.emulate, "the emulator was asked for", {"torch": torch.__version__}
    backend = kernels.for_layout(target.layout) if asked == "auto" else kernels.BACKENDS[asked]
    if asked != "auto":
        assert backend is not None
        if target.layout != backend.LAYOUT:
            raise UsageFault(f"--backend {asked} runs {backend.LAYOUT}, not {target.layout}; name the target")
        reason = backend.available()
        if reason is not None:
            raise EnvironmentFault(f"--backend {asked}: {reason}")
        return asked, backend.run, None, backend.VERSIONS()
    reason = f"no kernel backend for {target.layout}" if backend is None else backend.available()
    if backend is None or reason is not None:
        return EMULATOR, emulator.emulate, reason, {"torch": torch.__version__}
    return backend.NAME, backend.run, None, backend.VERSIONS()


def chosen_layers(layers: Sequence[MoeLayer], asked: str | tuple[int, ...]) -> list[MoeLayer]:
    """The MoE layers to check. Raises UsageFault for a number that is none."""
    if asked == "all":
        return list(layers)
    if asked == "first-last":
        return [layers[0], layers[-1]] if len(layers) > 1 else list(layers)
    numbers = {moe.layer: moe for moe in layers}
    unknown = [number for number in asked if number not in numbers]
    if unknown:
        raise UsageFault(f"--layers: {unknown[0]} is no MoE layer here; these are: {', '.join(map(str, numbers))}")
    return [numbers[int(number)] for number in asked]


def check(subject: Subject, settings: Settings, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Run the check."""
    name, run, why_not, versions = choose_backend(subject.target, settings.backend)
    rows: list[Row] = []
    problems: list[str] = []
    for moe in chosen_layers(subject.layers, settings.layers):
        progress(moe.path)
        ranks = {rank: packed for rank in subject.target.ranks() if (packed := subject.pack(moe, rank)) is not None}
        logical = subject.logical(moe)
        problems += [
            problem for rank, packed in ranks.items() for problem in byte_problems(subject, moe, rank, packed, logical)
        ]
        rows += _layer_rows(subject, settings, moe, ranks, logical, run)
    return Report(
        subject.target.layout_id,
        name,
        why_not is None,
        why_not,
        versions,
        subject.reference,
        tuple(rows),
        tuple(problems),
    )


# --- bytes ------------------------------------------------------------------------------------------------------------


def byte_problems(subject: Subject, moe: MoeLayer, rank: Rank, packed: PackedLayer, logical: LogicalLayer) -> list[str]:
    """Experts whose packed bytes, read by the kernel's formulas, are not their logical weights; non-zero padding."""
    found = []
    for position, expert in enumerate(packed.experts):
        part = slice_expert(logical.expert(expert), subject.target.share(moe, rank.tp), rank.tp == 0)
        wanted, stored = _as_packed(part, packed, position), _cropped(emulator.read_weights(packed, position), packed)
        wrong = [
            label
            for label in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
            if not _same(getattr(stored, label), getattr(wanted, label), exactly="bias" not in label)
        ]
        where = f"{moe.path} expert {expert}" + ("" if subject.target.flat else f", {subject.target.folder(rank)}")
        if wrong:
            found.append(f"{where}: packed {', '.join(wrong)} differ from the logical weights")
        stray = emulator.stray_padding(packed, position)
        found += [
            f"{where}: {count} values of padding in {name} are not zero" for name, count in stray.items() if count
        ]
    return found


def _as_packed(part: Expert, packed: PackedLayer, position: int) -> Weights:
    """Logical weights without global scales, with what the layout does to them: flushed scales, biases over alphas."""
    target, facts = packed.target, packed.facts
    if target.module.REQUIRES.block_scale_maximum:
        part = vllm_marlin.kept(part, facts)
    wanted = weights_of(part, None)
    if target.module.REQUIRES.alphas < 2 or wanted.down_bias is None or wanted.up_bias is None:
        return wanted
    g1, g1_up, g2 = (packed.scalars[name][position] for name in ("g1_alphas", "g1_alphas_up", "g2_alphas"))
    gate_bias = None if wanted.gate_bias is None else wanted.gate_bias / g1
    return replace(wanted, gate_bias=gate_bias, up_bias=wanted.up_bias / g1_up, down_bias=wanted.down_bias / g2)


def _cropped(stored: Weights, packed: PackedLayer) -> Weights:
    """Without padding."""
    inner, hidden = packed.geometry.intermediate, packed.geometry.hidden
    return Weights(
        None if stored.gate is None else stored.gate[:inner, :hidden],
        stored.up[:inner, :hidden],
        stored.down[:hidden, :inner],
        None if stored.gate_bias is None else stored.gate_bias[:inner],
        None if stored.up_bias is None else stored.up_bias[:inner],
        None if stored.down_bias is None else stored.down_bias[:hidden],
    )


def _same(stored: Tensor | None, wanted: Tensor | None, *, exactly: bool) -> bool:
    if stored is None or wanted is None:
        return stored is wanted
    if stored.shape != wanted.shape:
        return False
    wanted = wanted.to(stored.device)
    return torch.equal(stored, wanted) if exactly else torch.allclose(stored, wanted, rtol=1e-5, atol=1e-30)


# --- outputs -----------------------------------------------------------------------------------------------------------


def _layer_rows(
    subject: Subject,
    settings: Settings,
    moe: MoeLayer,
    ranks: Mapping[Rank, PackedLayer],
    logical: LogicalLayer,
    run: Run,
) -> Iterator[Row]:
    target = subject.target
    weight_only = not target.module.REQUIRES.input_scales
    factor = settings.tolerance
    tight = _scaled(exact_tolerances(not weight_only), factor)
    kind = logical.activation.kind
    quantised = subject.reference == "BF16 checkpoint"
    loose = _scaled(
        reference_tolerances(kind, quantised_weights=quantised, quantised_activations=not weight_only), factor
    )
    whole = replace(logical, scales=engine_scales(logical.scales, target))
    for x, routing, label in _inputs(subject, settings, moe, logical):
        outputs = []
        for rank, packed in ranks.items():
            out = run(packed, x, routing).cpu()
            outputs.append(out)
            part, local = _rank_part(target, moe, rank, whole, routing)
            expected = exact(part, x, local, weight_only, rounding_of(target))
            yield _row(moe, _label(target, rank), x, label, "exact", compare(out, expected, local), tight, local)
        if len(ranks) == target.tp * target.ep:
            real = plain(subject.real(moe), logical.activation, x, routing)
            summed = torch.stack(outputs).sum(0)
            rank_label = "all ranks" if len(ranks) > 1 else _label(target, next(iter(ranks)))
            yield _row(moe, rank_label, x, label, "reference", compare(summed, real, routing), loose, routing)


def _row(
    moe: MoeLayer,
    rank: str,
    x: Tensor,
    routing_label: str,
    against: Literal["exact", "reference"],
    comparison: Comparison,
    tolerances: Tolerances,
    routing: Routing,
) -> Row:
    empty = comparison.tokens == 0 and not bool((routing.ids >= 0).any())  # no token for this rank's experts
    problems = () if empty and not comparison.nonfinite else tuple(verdict(comparison, tolerances))
    return Row(moe.layer, moe.path, rank, x.shape[0], routing_label, against, comparison, tolerances, problems)


def _scaled(tolerances: Tolerances, factor: float) -> Tolerances:
    return Tolerances(tolerances.rel_l2 * factor, tolerances.token * factor)


def _label(target: Target, rank: Rank) -> str:
    return target.folder(rank) or "one rank"


def _inputs(
    subject: Subject, settings: Settings, moe: MoeLayer, logical: LogicalLayer
) -> Iterator[tuple[Tensor, Routing, str]]:
    """Hidden states and routing for each token count, and once every expert reached at random."""
    scale = logical.scales.w13_input
    a1 = None if scale is None else float(scale.max())
    router = subject.router(moe)
    config = subject.router_config
    for number, tokens in enumerate(settings.tokens):
        x = hidden_states(tokens, logical.hidden, settings.seed + number, a1)
        if router is not None:
            yield *scale_inputs(config, x, route(config, x, *router)), "router"
    most = max(settings.tokens)
    x = hidden_states(most, logical.hidden, settings.seed + len(settings.tokens), a1)
    yield x, random_routing(logical.expert_count, config.top_k, most, settings.seed, config.scale), "random"


def _rank_part(
    target: Target, moe: MoeLayer, rank: Rank, logical: LogicalLayer, routing: Routing
) -> tuple[LogicalLayer, Routing]:
    """What a rank alone should give: its experts, its share of I; other ranks' experts become -1 in the routing."""
    if target.flat:
        return logical, routing
    share, experts = target.share(moe, rank.tp), target.experts(moe, rank.ep)
    part = replace(
        logical,
        intermediate=share.end - share.start,
        expert=lambda e: slice_expert(logical.expert(e), share, rank.tp == 0),
    )
    mine = (routing.ids >= experts.start) & (routing.ids < experts.stop)
    return part, Routing(torch.where(mine, routing.ids, -1), torch.where(mine, routing.weights, 0.0))


def logical_layer(moe: MoeLayer, activation: Activation, scales: Scales, expert: Callable[[int], Any]) -> LogicalLayer:
    """A LogicalLayer with the sizes of `moe`."""
    return LogicalLayer(moe.hidden, moe.intermediate, moe.expert_count, activation, expert, scales)
