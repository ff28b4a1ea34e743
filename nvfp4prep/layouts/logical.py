"""What goes into a layout and comes out of it: one expert's logical tensors, scales, geometry. Padding lives here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from nvfp4prep.schema import GROUP_SIZE, Format

Engine = Literal["vllm", "sglang", "flashinfer"]
ActivationDtype = Literal["bf16", "fp16"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang", "flashinfer")
ENGINE_VERSIONS: Mapping[Engine, str] = {"vllm": "0.33.0", "sglang": "0.5.23", "flashinfer": "0.7.2.post1"}
"""The versions that layouts, padding and parameter names were read from. `flashinfer` is called without an engine."""


class LayoutError(ValueError):
    """A layout can't hold this model; the message says why and what would work.

    `positions` are those of the experts concerned, among the rank's; empty for all.
    """

    def __init__(self, message: str, positions: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.positions = positions


def positions_where(wrong: Tensor) -> tuple[int, ...]:
    """The experts for which a bool [E] is set."""
    return tuple(wrong.nonzero().flatten().tolist())


@dataclass(frozen=True, slots=True)
class Matrix:
    """A 4-bit weight. `weight` U8 [N, K/2], low nibble = even k; `group` columns share a scale.

    NVFP4: nibbles e2m1, `scale` U8 codes of E4M3 [N, K/16]. int4: two's complement, `scale` floats [N, K/group].
    """

    weight: Tensor
    scale: Tensor
    group: int = GROUP_SIZE

    @property
    def is_int4(self) -> bool:
        return self.scale.is_floating_point()


@dataclass(frozen=True, slots=True)
class Expert:
    """One routed expert after any TP slice. gate, up: [I, H]; down: [H, I]. `gate` is None when not gated.

    Biases are F32: gate and up [I], down [H].
    """

    gate: Matrix | None
    up: Matrix
    down: Matrix
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Activation:
    """The function between the GEMMs.

    silu: silu(gate)·up. swiglu-oai: gate clamped to <= limit, up to ±limit, then gate·sigmoid(alpha·gate)·(up + beta).
    relu2: relu(up)², not gated.
    """

    kind: Literal["silu", "swiglu-oai", "relu2"]
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None


@dataclass(frozen=True, slots=True)
class EngineRules:
    """How one engine feeds a layout.

    `backend` is the engine's own name of it. H must be a multiple of `hidden_multiple` and a rank's I of
    `inner_multiple`; then I (gated or plain; another multiple when H % 128 != 0) and H are padded up to multiples of
    `pad_*`. `padded_stride`: with TP, rank r begins at row r times the padded I per rank.
    """

    backend: str
    hidden_multiple: int
    pad_gated: int = 1
    pad_plain: int = 1
    pad_hidden: int = 1
    inner_multiple: int = 1
    pad_odd_hidden: int | None = None
    padded_stride: bool = False
    activations: tuple[str, ...] = ("silu", "swiglu-oai", "relu2")
    note: str = ""


@dataclass(frozen=True, slots=True)
class Requires:
    """What a layout asks of a model.

    `format` is that of the experts, `groups` the sizes of group that the kernel knows. `alphas` is 2 when unequal
    gate/up global scales stay exact. `biases`: the kernel has a place for them. `block_scale_maximum`: packing needs
    the largest block scale of the rank's experts first. `input_scale_per_expert`: the kernel takes one for each expert,
    others one for the layer. `pre_quant_scale`: the kernel multiplies inputs by factors.
    `activation_dtypes`: what it computes in; int4 group scales are of that dtype.
    """

    kernel: str
    gpus: tuple[str, ...]
    engines: Mapping[Engine, EngineRules]
    input_scales: bool = True
    alphas: int = 1
    biases: bool = False
    block_scale_maximum: bool = False
    input_scale_per_expert: bool = False
    format: Format = Format.NVFP4
    groups: tuple[int, ...] = (GROUP_SIZE,)
    pre_quant_scale: bool = False
    activation_dtypes: tuple[ActivationDtype, ...] = ("bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one rank's experts, before and after padding; `group` columns share a scale of `scale_dtype`."""

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    biased: bool
    padded_hidden: int
    padded_intermediate: int
    group: int = GROUP_SIZE
    scale_dtype: str = "F8_E4M3"

    @property
    def w13_rows(self) -> int:
        """Rows of the joined gate and up weight after padding."""
        return (2 if self.gated else 1) * self.padded_intermediate


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What packing one expert needs besides its tensors.

    The engine, the activations' dtype, power-of-two factors on the rank's block scales (vllm-marlin), and the expert's
    alphas, F32 values, that biases are divided by (flashinfer-trtllm).
    """

    engine: Engine = "vllm"
    activation_dtype: ActivationDtype = "bf16"
    w13_factor: float = 1.0
    w2_factor: float = 1.0
    g1_alpha: float = 1.0
    g1_alpha_up: float = 1.0
    g2_alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class Scales:
    """Global scales of a rank's experts, F32 [E] each: weight_scale_2 of gate (None when not gated), up and down, and
    input_scale of both GEMMs (None: weight-only). int4 has no global scales: ones.

    `w13_factors` and `w2_factors`: pre_quant_scale of all experts, F32 [H] and [I of the rank], where the kernel
    multiplies its inputs by it; None elsewhere.
    """

    gate: Tensor | None
    up: Tensor
    down: Tensor
    w13_input: Tensor | None
    w2_input: Tensor | None
    w13_factors: Tensor | None = None
    w2_factors: Tensor | None = None


def one_w13_scale(scales: Scales) -> Tensor:
    """The weight_scale_2 that gate and up share, F32 [E].

    Raises:
        LayoutError: they differ.
    """
    if scales.gate is not None and not torch.equal(scales.gate, scales.up):
        raise LayoutError(
            "the kernel has one scale for gate and up, and their weight_scale_2 differ: unify them first",
            positions_where(scales.gate != scales.up),
        )
    return scales.up


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple >= value."""
    return -(-value // multiple) * multiple


def plan_geometry(
    requires: Requires,
    engine: Engine,
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    gated: bool,
    biased: bool,
    group: int = GROUP_SIZE,
    activation_dtype: ActivationDtype = "bf16",
) -> Geometry:
    """Geometry of one rank in a layout, padded as the engine pads. `intermediate` is the rank's share.

    Raises:
        LayoutError: the layout can't hold it.
    """
    rules = requires.engines[engine]
    if hidden % rules.hidden_multiple:
        raise LayoutError(f"hidden size {hidden} is no multiple of {rules.hidden_multiple}")
    if group not in requires.groups:
        sizes = " or ".join(map(str, requires.groups))
        raise LayoutError(f"groups of {group} columns share a scale; this kernel takes {sizes}")
    if hidden % group:
        raise LayoutError(f"hidden size {hidden} cuts {requires.format.value}'s groups of {group}")
    if intermediate % group:
        raise LayoutError(f"intermediate size {intermediate} per rank cuts {requires.format.value}'s groups of {group}")
    if intermediate % rules.inner_multiple:
        raise LayoutError(f"intermediate size {intermediate} per rank is no multiple of {rules.inner_multiple}")
    if biased and not requires.biases:
        raise LayoutError("the experts have biases, and this kernel has no place for them")
    pad = rules.pad_gated if gated else rules.pad_plain
    if rules.pad_odd_hidden is not None and hidden % 128:
        pad = rules.pad_odd_hidden
    return Geometry(
        experts,
        hidden,
        intermediate,
        gated,
        biased,
        round_up(hidden, rules.pad_hidden),
        round_up(intermediate, math.lcm(pad, group)),
        group,
        "F8_E4M3" if requires.format is Format.NVFP4 else {"bf16": "BF16", "fp16": "F16"}[activation_dtype],
    )


# --- padding: each half on its own, zeros in weights and scales ------------------------------------------------------


def pad_zeros(values: Tensor, rows: int, columns: int) -> Tensor:
    """Zeros up to [rows, columns]; contiguous, and `values` itself where it is so already."""
    below, beside = rows - values.shape[0], columns - values.shape[1]
    return (pad(values, (0, beside, 0, below)) if below or beside else values).contiguous()


def pad_matrix(matrix: Matrix, rows: int, columns: int) -> Matrix:
    """Zero nibbles and zero scales up to rows x columns; contiguous."""
    return replace(
        matrix,
        weight=pad_zeros(matrix.weight, rows, columns // 2),
        scale=pad_zeros(matrix.scale, rows, columns // matrix.group),
    )


def crop_matrix(matrix: Matrix, rows: int, columns: int) -> Matrix:
    """The inverse of pad_matrix."""
    weight, scale = matrix.weight[:rows, : columns // 2], matrix.scale[:rows, : columns // matrix.group]
    return replace(matrix, weight=weight, scale=scale)


def pad_expert(expert: Expert, geometry: Geometry) -> Expert:
    """An expert with every matrix and bias at its padded size."""
    inner, hidden = geometry.padded_intermediate, geometry.padded_hidden
    return Expert(
        None if expert.gate is None else pad_matrix(expert.gate, inner, hidden),
        pad_matrix(expert.up, inner, hidden),
        pad_matrix(expert.down, hidden, inner),
        None if expert.gate_bias is None else pad_bias(expert.gate_bias, inner),
        None if expert.up_bias is None else pad_bias(expert.up_bias, inner),
        None if expert.down_bias is None else pad_bias(expert.down_bias, hidden),
    )


def crop_expert(expert: Expert, geometry: Geometry) -> Expert:
    """The inverse of pad_expert."""
    inner, hidden = geometry.intermediate, geometry.hidden
    return Expert(
        None if expert.gate is None else crop_matrix(expert.gate, inner, hidden),
        crop_matrix(expert.up, inner, hidden),
        crop_matrix(expert.down, hidden, inner),
        None if expert.gate_bias is None else expert.gate_bias[:inner],
        None if expert.up_bias is None else expert.up_bias[:inner],
        None if expert.down_bias is None else expert.down_bias[:hidden],
    )


def pad_bias(bias: Tensor, size: int) -> Tensor:
    """Zeros up to `size`."""
    return pad(bias, (0, size - bias.shape[0]))


# --- gate and up joined ---------------------------------------------------------------------------------------------


def join(expert: Expert, first: Literal["gate", "up"]) -> Matrix:
    """gate and up stacked along rows, `first` on top; up alone when not gated. [2I, H] or [I, H]."""
    if expert.gate is None:
        return expert.up
    top, bottom = (expert.gate, expert.up) if first == "gate" else (expert.up, expert.gate)
    return replace(top, weight=torch.cat([top.weight, bottom.weight]), scale=torch.cat([top.scale, bottom.scale]))


def split(joined: Matrix, gated: bool, first: Literal["gate", "up"]) -> tuple[Matrix | None, Matrix]:
    """The inverse of join: (gate, up)."""
    if not gated:
        return None, joined
    half = joined.weight.shape[0] // 2
    top = replace(joined, weight=joined.weight[:half], scale=joined.scale[:half])
    bottom = replace(joined, weight=joined.weight[half:], scale=joined.scale[half:])
    return (top, bottom) if first == "gate" else (bottom, top)


def join_bias(expert: Expert, first: Literal["gate", "up"]) -> Tensor:
    """Biases of gate and up in the order of `join`, F32 [2I] or [I]."""
    assert expert.up_bias is not None
    if expert.gate_bias is None:
        return expert.up_bias
    return torch.cat([expert.gate_bias, expert.up_bias] if first == "gate" else [expert.up_bias, expert.gate_bias])


def split_bias(joined: Tensor, gated: bool, first: Literal["gate", "up"]) -> tuple[Tensor | None, Tensor]:
    """The inverse of join_bias: (gate, up)."""
    if not gated:
        return None, joined
    top, bottom = joined.chunk(2)
    return (top, bottom) if first == "gate" else (bottom, top)
