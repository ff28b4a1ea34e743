"""What goes into a layout and comes out of it: one expert's logical tensors, scales, geometry. Padding lives here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_zeros

from nvfp4prep.schema import GROUP_SIZE

Engine = Literal["vllm", "sglang"]
ActivationDtype = Literal["bf16", "fp16"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
ENGINE_VERSIONS: Mapping[Engine, str] = {"vllm": "0.33.0", "sglang": "0.5.23"}
"""The versions that layouts, padding and parameter names were read from."""


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
    """An NVFP4 weight. `weight` U8 [N, K/2], low nibble = even k; `scale` U8 codes of E4M3 [N, K/16]."""

    weight: Tensor
    scale: Tensor


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

    `backend` is the engine's own name of it. H must be a multiple of `hidden_multiple`; then I (gated or plain; another
    multiple when H % 128 != 0) and H are padded up to multiples of `pad_*`. `padded_stride`: with TP, rank r begins at
    row r times the padded I per rank.
    """

    backend: str
    hidden_multiple: int
    pad_gated: int
    pad_plain: int
    pad_hidden: int = 1
    pad_odd_hidden: int | None = None
    padded_stride: bool = False
    activations: tuple[str, ...] = ("silu", "swiglu-oai", "relu2")
    note: str = ""


@dataclass(frozen=True, slots=True)
class Requires:
    """What a layout asks of a model.

    `alphas` is 2 when unequal gate/up global scales stay exact. `biases`: the kernel has a place for them.
    `block_scale_maximum`: packing needs the largest block scale of the rank's experts first.
    """

    kernel: str
    gpus: tuple[str, ...]
    engines: Mapping[Engine, EngineRules]
    input_scales: bool = True
    alphas: int = 1
    biases: bool = False
    block_scale_maximum: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of one rank's experts, before and after padding."""

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    biased: bool
    padded_hidden: int
    padded_intermediate: int

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
    input_scale of both GEMMs (None: weight-only)."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    w13_input: Tensor | None
    w2_input: Tensor | None


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
    requires: Requires, engine: Engine, *, experts: int, hidden: int, intermediate: int, gated: bool, biased: bool
) -> Geometry:
    """Geometry of one rank in a layout, padded as the engine pads. `intermediate` is the rank's share.

    Raises:
        LayoutError: the layout can't hold it.
    """
    rules = requires.engines[engine]
    if hidden % rules.hidden_multiple:
        raise LayoutError(f"hidden size {hidden} is no multiple of {rules.hidden_multiple}")
    if intermediate % GROUP_SIZE:
        raise LayoutError(f"intermediate size {intermediate} per rank cuts NVFP4's groups of {GROUP_SIZE}")
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
        round_up(intermediate, pad),
    )


# --- padding: each half on its own, zeros in weights and scales ------------------------------------------------------


def pad_matrix(matrix: Matrix, rows: int, columns: int) -> Matrix:
    """Zero nibbles and zero block scales up to rows x columns; contiguous."""
    weight, scale = matrix.weight, matrix.scale
    below = rows - weight.shape[0]
    return Matrix(
        pad_zeros(weight, (0, columns // 2 - weight.shape[1], 0, below)).contiguous(),
        pad_zeros(scale, (0, columns // GROUP_SIZE - scale.shape[1], 0, below)).contiguous(),
    )


def crop_matrix(matrix: Matrix, rows: int, columns: int) -> Matrix:
    """The inverse of pad_matrix."""
    return Matrix(matrix.weight[:rows, : columns // 2], matrix.scale[:rows, : columns // GROUP_SIZE])


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
    return pad_zeros(bias, (0, size - bias.shape[0]))


# --- gate and up joined ---------------------------------------------------------------------------------------------


def join(expert: Expert, first: Literal["gate", "up"]) -> Matrix:
    """gate and up stacked along rows, `first` on top; up alone when not gated. [2I, H] or [I, H]."""
    if expert.gate is None:
        return expert.up
    top, bottom = (expert.gate, expert.up) if first == "gate" else (expert.up, expert.gate)
    return Matrix(torch.cat([top.weight, bottom.weight]), torch.cat([top.scale, bottom.scale]))


def split(joined: Matrix, gated: bool, first: Literal["gate", "up"]) -> tuple[Matrix | None, Matrix]:
    """The inverse of join: (gate, up)."""
    if not gated:
        return None, joined
    half = joined.weight.shape[0] // 2
    top = Matrix(joined.weight[:half], joined.scale[:half])
    bottom = Matrix(joined.weight[half:], joined.scale[half:])
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
