"""The check itself: run packed layers on a backend, compare with references, and say what differs. No printing.

Two comparisons for each layer, rank and token count: the kernel against the exact emulation of the same quantisation
(layout errors show here) and the whole layer against real weights (quantisation noise). Besides, the packed bytes
themselves are read by the kernel's index formulas and compared with the logical weights, exactly; so that no byte of a
layer is left out, they are also compared with what packing writes, and small tensors with what scales make of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nvfp4prep import layer_facts, packing
from nvfp4prep.errors import EnvironmentFault, InputRefused, UsageFault
from nvfp4prep.experts import Slice, slice_expert
from nvfp4prep.findings import Finding
from nvfp4prep.layouts import vllm_marlin
from nvfp4prep.layouts.logical import Expert, LayerFacts, LayoutError, Scales
from nvfp4prep.numerics import E2M1_MAX
from nvfp4prep.plan import Rank, key_of
from nvfp4prep.schema import Format, MoeLayer
from nvfp4prep.smoke import emulator, kernels
from nvfp4prep.smoke.choice import chosen_layers
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
from nvfp4prep.smoke.reference import column_factors, engine_scales, exact, plain, scale_change, unevenness, weights_of
from nvfp4prep.smoke.rounding import away_from_ties, rounding_of
from nvfp4prep.smoke.routing import Router, RouterConfig, random_routing, route, scale_inputs
from nvfp4prep.targets import Target

EMULATOR = "emulator"
Reference = Literal[
    "BF16 checkpoint",
    "source, dequantised",
    "its own unpacked bytes: neither errors before packing nor changes since are seen",
]
BF16: Reference = "BF16 checkpoint"

_MOST_UNEVEN = 2.0
"""Beyond it the tolerance would be so wide that the comparison says little."""


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
    mean; `real(moe)` the real weights by expert; `reference` says where those are from; `router(moe)` the stored
    router. `parameters(moe, rank)` gives the small tensors as stored and as they should be, by full name; None when
    nothing is stored. `independent` is False when `logical` is what the packed bytes themselves say; `rescaled(moe)`
    True when block scales were rounded once more since the reference (unified gate and up scales, factors folded into
    up's). `folded` are the paths of layers whose pre_quant_scale was folded away; what activations they expect is not
    known, so that no bound holds for the error of quantising them. `norm_factors(moe)` are [H] that the layer's inputs
    have in them and those of the real weights as stored had not (`real` divides by them), or why they are not known.
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
    parameters: Callable[[MoeLayer, Rank], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] | None = None
    independent: bool = True
    rescaled: Callable[[MoeLayer], bool] = lambda moe: False
    folded: frozenset[str] = frozenset()
    norm_factors: Callable[[MoeLayer], Tensor | str | None] = lambda moe: None


@dataclass(frozen=True)
class Expectation:
    """What a layer should give for one set of inputs, by rank with the rank's own routing, and by the real weights.

    `real` is None where the layer is not compared; `uneven` as in `metrics.quantisation_error`.
    """

    x: Tensor
    routing: Routing
    label: str
    exact: Mapping[Rank, tuple[Tensor, Routing]]
    real: Tensor | None
    uneven: tuple[float, float] = (1.0, 1.0)


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
class NotCompared:
    """A layer that was not compared with real weights, and why."""

    layer: int | None
    path: str
    why: str


@dataclass(frozen=True)
class Report:
    """Everything a run found. `kernel_ran` is False for the emulator.

    `reference` is what layers were compared with, but for those `not_compared`; see `compared`.
    """

    target: str
    backend: str
    kernel_ran: bool
    why_not: str | None
    versions: Mapping[str, str]
    reference: str
    rows: tuple[Row, ...]
    byte_problems: tuple[str, ...]
    notes: tuple[str, ...] = field(default=())
    not_compared: tuple[NotCompared, ...] = ()

    @property
    def layers(self) -> frozenset[str]:
        """Paths of the layers that ran."""
        return frozenset(row.path for row in self.rows)

    @property
    def compared(self) -> bool:
        """Whether any layer was compared with real weights."""
        return any(row.against == "reference" for row in self.rows)

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
        if target.layout not in backend.LAYOUTS:
            runs = " and ".join(backend.LAYOUTS)
            raise UsageFault(f"--backend {asked} runs {runs}, not {target.layout}; name the target")
        reason = backend.available()
        if reason is not None:
            raise EnvironmentFault(f"--backend {asked}: {reason}")
        return asked, backend.run, None, backend.VERSIONS()
    reason = f"no kernel backend for {target.layout}" if backend is None else backend.available()
    if backend is None or reason is not None:
        return EMULATOR, emulator.emulate, reason, {"torch": torch.__version__}
    return backend.NAME, backend.run, None, backend.VERSIONS()


def check(subject: Subject, settings: Settings, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Run the check.

    Raises:
        InputRefused: a layer that can't be packed, or whose routing or inputs are not known.
        UsageFault, EnvironmentFault: see `choose_backend` and `choice.chosen_layers`.
    """
    name, run, why_not, versions = choose_backend(subject.target, settings.backend)
    rows: list[Row] = []
    problems: list[str] = []
    apart: list[NotCompared] = []
    for moe in chosen_layers(subject.layers, settings.layers):
        progress(moe.path)
        before = len(problems)
        try:
            if subject.reference == BF16:
                subject.real(moe)  # refuses another model's, compared or not
            ranks = {rank: packed for rank in subject.target.ranks() if (packed := subject.pack(moe, rank)) is not None}
            logical = subject.logical(moe)
            for rank, packed in ranks.items():
                problems += layer_problems(subject, moe, rank, packed, logical)
            known = comparable(subject, moe, tuple(ranks), logical)
            if isinstance(known, str):
                apart.append(NotCompared(moe.layer, moe.path, known))
            for expected in expectations(subject, settings, moe, tuple(ranks), logical, known):
                outputs = {rank: run(packed, expected.x, expected.routing).cpu() for rank, packed in ranks.items()}
                rows += judged(subject, settings, moe, logical, expected, outputs)
        except LayoutError as error:
            message = f"{subject.target.layout_id}: {_in_layer(moe, str(error))}"
            if len(problems) > before:  # damage, which is told
                problems.append(message)
                continue
            raise InputRefused([Finding("smoke-refused", "error", message, layer=moe.layer)]) from None
    return Report(
        subject.target.layout_id,
        name,
        why_not is None,
        why_not,
        versions,
        subject.reference,
        tuple(rows),
        tuple(problems),
        not_compared=tuple(apart),
    )


def unjudged(subject: Subject) -> str | None:
    """Why the check can't judge a layer of these, the first if there are several; None when it can judge all.

    Routers and scales are read for it, no weights.
    """
    for moe in subject.layers:
        try:
            for _ in _inputs(subject, Settings(tokens=(1,)), moe, subject.logical(moe)):
                pass
        except LayoutError as error:
            return _in_layer(moe, str(error))
    return None


def _in_layer(moe: MoeLayer, message: str) -> str:
    return message if message.startswith(moe.path) else f"{moe.path}: {message}"


# --- bytes ------------------------------------------------------------------------------------------------------------


def layer_problems(
    subject: Subject, moe: MoeLayer, rank: Rank, packed: PackedLayer, logical: LogicalLayer
) -> list[str]:
    """Everything that a rank's stored bytes of a layer have wrong."""
    return [
        *byte_problems(subject, moe, rank, packed, logical),
        *parameter_problems(subject, moe, rank, packed, logical),
    ]


def byte_problems(subject: Subject, moe: MoeLayer, rank: Rank, packed: PackedLayer, logical: LogicalLayer) -> list[str]:
    """Experts whose packed bytes, read by the kernel's formulas, are not their logical weights; non-zero padding.

    Where all that is right, bytes that packing would write differently: zeros of another sign, nibbles that a block
    scale of 0 hides, digits of a bias that a kernel rounds away.
    """
    found = []
    for position, expert in enumerate(packed.experts):
        part = slice_expert(logical.expert(expert), subject.target.share(moe, rank.tp), rank.tp == 0)
        wanted, stored = _as_packed(part, packed, position), _cropped(emulator.read_weights(packed, position), packed)
        wrong = [
            label
            for label in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
            if not _same(getattr(stored, label), getattr(wanted, label), exactly="bias" not in label)
        ]
        where = f"{moe.path} expert {expert}{_in_rank(subject.target, rank)}"
        if wrong:
            found.append(f"{where}: packed {', '.join(wrong)} differ from the logical weights")
        stray = {name: count for name, count in emulator.stray_padding(packed, position).items() if count}
        found += [f"{where}: {count} values of padding in {name} are not zero" for name, count in stray.items()]
        if not wrong and not stray:
            other = _other_bytes(subject, packed, part, position)
            found += [f"{where}: {name} has other bytes than packing writes, of the same value" for name in other]
    return found


def _other_bytes(subject: Subject, packed: PackedLayer, part: Expert, position: int) -> list[str]:
    """Tensors of an expert that are not, byte for byte, what packing the logical expert gives."""
    facts = packing.expert_facts(packed.facts, packed.scalars, position)
    wanted = packed.target.module.pack(part, packed.geometry, facts)
    return [
        name
        for name, value in wanted.items()
        if not _same_bits(packed.packed[name][position], value)
        # A bias from its own quotient may be one step of F32 away (flashinfer_trtllm.unpack).
        and (
            subject.independent or "bias" not in name or not _same(packed.packed[name][position], value, exactly=False)
        )
    ]


def parameter_problems(
    subject: Subject, moe: MoeLayer, rank: Rank, packed: PackedLayer, logical: LogicalLayer
) -> list[str]:
    """Small tensors that are not what the logical scales make of them, bit for bit.

    The kernel's scalars, computed again from the logical layer; and where a packed output is stored, every small tensor
    of it, the engine's parameters and those that no kernel reads too.
    """
    target, where = packed.target, moe.path + _in_rank(subject.target, rank)
    try:
        facts = _facts(moe, rank, packed, logical)
        part = _part_of(logical.scales, packed.experts, target.share(moe, rank.tp))
        wanted = target.module.scalars(part, packed.activation, facts)
        wrong = {name for name, value in wanted.items() if not _same_bits(packed.scalars.get(name), value)}
        found = [f"{where}: {_values(name, packed.scalars.get(name), wanted[name])}" for name in sorted(wrong)]
        stored, every = ({}, {}) if subject.parameters is None else subject.parameters(moe, rank)
    except LayoutError as error:
        return [f"{where}: {error}"]
    own = key_of(target.folder(rank), target.own_prefix(moe))
    for name, value in sorted(every.items()):
        if name.removeprefix(own) not in wrong and not _same_bits(stored.get(name), value):
            found.append(f"{where}: {_values(name, stored.get(name), value)}")
    return found


def _facts(moe: MoeLayer, rank: Rank, packed: PackedLayer, logical: LogicalLayer) -> LayerFacts:
    """The layer's facts again, from the logical experts where they depend on block scales."""
    target, plain = packed.target, LayerFacts(packed.target.engine, packed.target.activation_dtype)
    if not target.module.REQUIRES.block_scale_maximum:
        return plain
    w13 = w2 = 0
    for expert in packed.experts:
        part = slice_expert(logical.expert(expert), target.share(moe, rank.tp), rank.tp == 0)
        own = layer_facts.largest_codes(part)
        w13, w2 = max(w13, own[0]), max(w2, own[1])
    return vllm_marlin.with_factors(plain, w13, w2)


def _part_of(scales: Scales, experts: range, share: Slice) -> Scales:
    """The scales of some of a layer's experts, for a rank's share of I."""

    def part(scale: Tensor | None) -> Tensor | None:
        return None if scale is None else scale[experts.start : experts.stop]

    up, down = scales.up[experts.start : experts.stop], scales.down[experts.start : experts.stop]
    factors = None if scales.w2_factors is None else scales.w2_factors[share.start : share.end]
    inputs = part(scales.w13_input), part(scales.w2_input)
    return Scales(part(scales.gate), up, down, *inputs, scales.w13_factors, factors)


def _values(name: str, stored: Tensor | None, wanted: Tensor) -> str:
    """What is wrong with a small tensor."""
    if stored is None or stored.shape != wanted.shape or stored.dtype != wanted.dtype:
        shapes = ["nothing" if v is None else f"{v.dtype} {list(v.shape)}" for v in (stored, wanted)]
        return f"{name} is {shapes[0]}, not {shapes[1]}"
    at = int((_bits(stored) != _bits(wanted)).view(-1, stored.dtype.itemsize).any(1).nonzero()[0])
    index = f"[{at}]" if stored.dim() else ""
    return f"{name}{index} is {float(stored.reshape(-1)[at]):.9g}, not {float(wanted.reshape(-1)[at]):.9g}"


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _same_bits(stored: Tensor | None, wanted: Tensor) -> bool:
    """The same dtype, shape and bytes: NaN is itself, and zeros have a sign."""
    if stored is None or stored.dtype != wanted.dtype or stored.shape != wanted.shape:
        return False
    return torch.equal(_bits(stored.cpu()), _bits(wanted))


def _in_rank(target: Target, rank: Rank) -> str:
    return "" if target.flat else f", {target.folder(rank)}"


def _as_packed(part: Expert, packed: PackedLayer, position: int) -> Weights:
    """Logical weights without global scales, with what the layout does to them: flushed scales, biases over alphas."""
    target, facts = packed.target, packed.facts
    if target.module.REQUIRES.block_scale_maximum:
        part = vllm_marlin.acting(part, facts)
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


# --- outputs ----------------------------------------------------------------------------------------------------------


Uneven = tuple[float, float]


def comparable(subject: Subject, moe: MoeLayer, ranks: Collection[Rank], logical: LogicalLayer) -> Uneven | str:
    """How much more a layer may differ from the real weights for AWQ's factors (1, 1: no more), or why it can't be
    compared with them."""
    target = subject.target
    if len(ranks) != target.tp * target.ep:
        return "not all ranks are there"
    folded = moe.path in subject.folded
    if folded and target.activations != "16-bit":
        return (
            "its pre_quant_scale is folded away: which activations it expects is not known, nor what quantising others "
            "may cost"
        )
    if subject.reference != BF16:
        return 1.0, 1.0
    inside = subject.norm_factors(moe)
    if isinstance(inside, str):
        return inside
    found = _uneven(subject, moe, logical, inside)
    if not max(found) <= _MOST_UNEVEN:
        return f"AWQ's factors differ too much within a group of weights ({max(found):.3g} times the error)"
    return found


def _uneven(subject: Subject, moe: MoeLayer, logical: LogicalLayer, inside: Tensor | None) -> Uneven:
    """GEMM1's inputs have the factors `inside`, and lack those that the kernel multiplies by.

    GEMM2's always lack them; those that were moved into up's scales are told from down's columns.
    """
    group, scales = moe.w2[0].group_size, logical.scales
    first = 1.0 if inside is None else unevenness(inside, group, folded=True)
    if scales.w13_factors is not None:
        first = unevenness(scales.w13_factors, group)
    if scales.w2_factors is not None and not bool((scales.w2_factors == 1).all()):
        return first, unevenness(scales.w2_factors, group)
    if moe.path not in subject.folded and moe.format is not Format.INT4:
        return first, 1.0
    real = subject.real(moe)

    def of_down(e: int) -> float:
        return unevenness(column_factors(real(e).down, weights_of(logical.expert(e), scales, e).down), group)

    return first, max(map(of_down, range(moe.expert_count)))


def expectations(
    subject: Subject,
    settings: Settings,
    moe: MoeLayer,
    ranks: Collection[Rank],
    logical: LogicalLayer,
    known: Uneven | str,
) -> Iterator[Expectation]:
    """What a layer should give for each of the inputs; `known` is what `comparable` says of it."""
    target = subject.target
    whole = replace(logical, scales=engine_scales(logical.scales, target))
    for x, routing, label in _inputs(subject, settings, moe, logical):
        by_rank = {}
        for rank in ranks:
            part, local = _rank_part(target, moe, rank, whole, routing)
            by_rank[rank] = exact(part, x, local, target.activations, rounding_of(target)), local
        if isinstance(known, str):
            yield Expectation(x, routing, label, by_rank, None)
        else:
            real = plain(subject.real(moe), logical.activation, x, routing)
            yield Expectation(x, routing, label, by_rank, real, known)


def judged(
    subject: Subject,
    settings: Settings,
    moe: MoeLayer,
    logical: LogicalLayer,
    expected: Expectation,
    outputs: Mapping[Rank, Tensor],
) -> Iterator[Row]:
    """The comparisons of the ranks' outputs with what was expected."""
    target, factor = subject.target, settings.tolerance
    x, label = expected.x, expected.label
    tight = _scaled(exact_tolerances(target.activations), factor)
    for rank, out in outputs.items():
        wanted, local = expected.exact[rank]
        yield _row(moe, _label(target, rank), x, label, "exact", compare(out, wanted, local), tight, local)
    if expected.real is None:
        return
    loose = reference_tolerances(
        logical.activation.kind,
        weights=target.module.REQUIRES.format if subject.reference == BF16 else None,
        activations=target.activations,
        rescaled=subject.rescaled(moe),
        scale_change=scale_change(logical.scales, engine_scales(logical.scales, target)),
        uneven=expected.uneven,
    )
    summed = torch.stack(list(outputs.values())).sum(0)
    rank_label = "all ranks" if len(outputs) > 1 else _label(target, next(iter(outputs)))
    comparison = compare(summed, expected.real, expected.routing)
    yield _row(moe, rank_label, x, label, "reference", comparison, _scaled(loose, factor), expected.routing)


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
    """Hidden states and routing for each token count, and once every expert reached at random.

    Raises:
        LayoutError: a router, settings of routing or an input scale that nothing can be made of.
    """
    scale, a1 = _input_scale(subject.target, logical.scales)
    router = subject.router(moe)
    config = subject.router_config
    if config.top_k > logical.expert_count:
        raise LayoutError(
            f"config.json: num_experts_per_tok {config.top_k} of {logical.expert_count} experts; correct config.json"
        )

    def states(tokens: int, number: int) -> Tensor:
        try:
            return _untied(hidden_states(tokens, logical.hidden, settings.seed + number, a1), scale)
        except ValueError as error:
            raise LayoutError(f"no hidden states can be made for it: {error}") from None

    for number, tokens in enumerate(settings.tokens):
        x = states(tokens, number)
        if router is not None:
            yield *scale_inputs(config, x, route(config, x, *router)), "router"
    most = max(settings.tokens)
    x = states(most, len(settings.tokens))
    yield x, random_routing(logical.expert_count, config.top_k, most, settings.seed, config.scale), "random"


def _input_scale(target: Target, scales: Scales) -> tuple[Tensor | None, float | None]:
    """The scales that x must not lie on ties of, and the scale that says how large x may be, as `hidden_states` takes
    it; None for what the kernel does not quantise.

    A W4A8 scale is amax / 448 of x times the factors, where the kernel has some.
    """
    scale = scales.w13_input
    if target.activations == "16-bit" or scale is None:
        return None, None
    if target.activations == "NVFP4":
        return scale, float(scale.max())
    largest = 1.0 if scales.w13_factors is None else float(scales.w13_factors.abs().max())
    return None, float(scale.max()) / E2M1_MAX / largest


def _untied(x: Tensor, scale: Tensor | None) -> Tensor:
    """Inputs whose quantisation does not hang on a tie, where kernels with approximate reciprocals go either way."""
    return x if scale is None else away_from_ties(x, scale)


def _rank_part(
    target: Target, moe: MoeLayer, rank: Rank, logical: LogicalLayer, routing: Routing
) -> tuple[LogicalLayer, Routing]:
    """What a rank alone should give: its experts, its share of I; other ranks' experts become -1 in the routing."""
    if target.flat:
        return logical, routing
    share, experts = target.share(moe, rank.tp), target.experts(moe, rank.ep)
    scales = logical.scales
    if scales.w2_factors is not None:
        scales = replace(scales, w2_factors=scales.w2_factors[share.start : share.end])
    part = replace(
        logical,
        scales=scales,
        intermediate=share.end - share.start,
        expert=lambda e: slice_expert(logical.expert(e), share, rank.tp == 0),
    )
    mine = (routing.ids >= experts.start) & (routing.ids < experts.stop)
    return part, Routing(torch.where(mine, routing.ids, -1), torch.where(mine, routing.weights, 0.0))
