"""Random MoE layers for the tests of layouts, and every (layout, engine, geometry) that the layouts allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4prep import layouts
from nvfp4prep.layouts import vllm_marlin
from nvfp4prep.layouts.logical import (
    Activation,
    ActivationDtype,
    Engine,
    Expert,
    Geometry,
    LayerFacts,
    LayoutError,
    Matrix,
    Scales,
    plan_geometry,
)
from nvfp4prep.schema import GROUP_SIZE, Format

LAYOUTS = {name: layout for name, layout in layouts.LAYOUTS.items() if layout.REQUIRES.format is Format.NVFP4}
"""Those for NVFP4 experts."""

SILU = Activation("silu")
OAI = Activation("swiglu-oai", limit=7.0, alpha=1.702, beta=1.0)
RELU2 = Activation("relu2")


@dataclass(frozen=True)
class Case:
    """A layout as an engine uses it, for one geometry."""

    layout: str
    engine: Engine
    hidden: int
    intermediate: int
    gated: bool
    biased: bool = False
    dtype: ActivationDtype = "bf16"
    group: int = GROUP_SIZE

    def __str__(self) -> str:
        gated = "gated" if self.gated else "plain"
        biased = "-biased" if self.biased else ""
        dtype = f"-{self.dtype}" if self.layout.startswith("vllm-marlin") else ""
        group = f"-g{self.group}" if self.group != GROUP_SIZE else ""
        return f"{self.layout}-{self.engine}-H{self.hidden}-I{self.intermediate}-{gated}{biased}{dtype}{group}"

    def geometry(self, experts: int) -> Geometry:
        return plan_geometry(
            layouts.LAYOUTS[self.layout].REQUIRES,
            self.engine,
            experts=experts,
            hidden=self.hidden,
            intermediate=self.intermediate,
            gated=self.gated,
            biased=self.biased,
            group=self.group,
            activation_dtype=self.dtype,
        )

    def allowed(self) -> bool:
        try:
            self.geometry(1)
        except LayoutError:
            return False
        return True


def cases(hidden: tuple[int, ...], intermediate: tuple[int, ...]) -> Iterator[Case]:
    """Every case of these sizes that the layout and the engine allow."""
    for name, layout in LAYOUTS.items():
        dtypes: tuple[ActivationDtype, ...] = ("bf16", "fp16") if name == "vllm-marlin" else ("bf16",)
        for engine in layout.REQUIRES.engines:
            for h in hidden:
                for i in intermediate:
                    for gated in (True, False):
                        for biased in (False, True):
                            for dtype in dtypes:
                                case = Case(name, engine, h, i, gated, biased, dtype)
                                if case.allowed():
                                    yield case


@dataclass(frozen=True)
class Layer:
    """Experts of one rank, their scales, and what packing each of them needs."""

    case: Case
    experts: list[Expert]
    scales: Scales
    facts: list[LayerFacts]


def _matrix(rows: int, columns: int, lowest: int, highest: int, generator: torch.Generator) -> Matrix:
    weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(lowest, highest + 1, (rows, columns // 16), dtype=torch.uint8, generator=generator)
    return Matrix(weight, scale)


def make_layer(
    case: Case,
    experts: int = 2,
    activation: Activation = SILU,
    split: bool = False,
    codes: tuple[int, int] = (8, 126),
    seed: int = 0,
) -> Layer:
    """A layer whose GEMMs give numbers around 1. `codes`: range of the E4M3 codes; `split`: gate and up scales differ.

    Biases are BF16 values, as gpt-oss has them. Input scales are a layer's; vllm-cutlass has one per expert.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(experts):
        gate = _matrix(case.intermediate, case.hidden, *codes, generator) if case.gated else None
        up = _matrix(case.intermediate, case.hidden, *codes, generator)
        down = _matrix(case.hidden, case.intermediate, *codes, generator)
        expert = Expert(gate, up, down)
        if case.biased:
            sizes = (case.intermediate, case.intermediate, case.hidden)
            gate_bias, up_bias, down_bias = (
                torch.randn(n, generator=generator).to(torch.bfloat16).to(torch.float32) for n in sizes
            )
            expert = replace(expert, gate_bias=gate_bias if case.gated else None, up_bias=up_bias, down_bias=down_bias)
        made.append(expert)

    def positive(scale: float) -> Tensor:
        return scale * (0.5 + torch.rand(experts, generator=generator))

    up_scale = positive(3e-4)
    gate_scale = positive(3e-4) if split else up_scale
    weight_only = not LAYOUTS[case.layout].REQUIRES.input_scales
    w13_input, w2_input = positive(2e-3), positive(5e-3)
    if case.layout != "vllm-cutlass":
        w13_input, w2_input = w13_input.max().expand(experts).clone(), w2_input.max().expand(experts).clone()
    scales = Scales(
        gate_scale if case.gated else None,
        up_scale,
        positive(3e-4),
        None if weight_only else w13_input,
        None if weight_only else w2_input,
    )
    facts = LayerFacts(engine=case.engine, activation_dtype=case.dtype)
    if LAYOUTS[case.layout].REQUIRES.block_scale_maximum:
        w13 = max(int(m.scale.max()) for e in made for m in (e.gate, e.up) if m is not None)
        w2 = max(int(e.down.scale.max()) for e in made)
        facts = replace(
            facts,
            w13_factor=vllm_marlin.scale_factor(w13, facts),
            w2_factor=vllm_marlin.scale_factor(w2, facts),
        )
    per_expert = [facts] * experts
    if case.layout == "flashinfer-trtllm":
        table = LAYOUTS[case.layout].scalars(scales, activation, facts)
        per_expert = [
            replace(
                facts,
                g1_alpha=float(table["g1_alphas"][e]),
                g1_alpha_up=float(table["g1_alphas_up"][e]),
                g2_alpha=float(table["g2_alphas"][e]),
            )
            for e in range(experts)
        ]
    return Layer(case, made, scales, per_expert)


def make_int4_layer(case: Case, experts: int = 2, seed: int = 0) -> Layer:
    """As make_layer, of int4: two's complement codes, group scales of the activations' dtype, no other scale."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Matrix:
        weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
        scale = 0.01 * (0.5 + torch.rand(rows, columns // case.group, generator=generator))
        return Matrix(weight, scale.to(torch.bfloat16 if case.dtype == "bf16" else torch.float16), case.group)

    made = [
        Expert(
            matrix(case.intermediate, case.hidden) if case.gated else None,
            matrix(case.intermediate, case.hidden),
            matrix(case.hidden, case.intermediate),
        )
        for _ in range(experts)
    ]
    ones = torch.ones(experts)
    scales = Scales(ones if case.gated else None, ones, ones, None, None)
    return Layer(case, made, scales, [LayerFacts(case.engine, case.dtype)] * experts)
