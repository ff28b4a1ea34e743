"""Targets: a layout for an engine at a TP/EP size, what it asks of a checkpoint, and how its output is named."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nvfp4prep.experts import Slice
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts import LAYOUTS, Layout
from nvfp4prep.layouts.logical import (
    ENGINE_VERSIONS,
    Activation,
    ActivationDtype,
    Engine,
    Geometry,
    LayoutError,
    Requires,
    plan_geometry,
)
from nvfp4prep.options import COMPRESSED
from nvfp4prep.plan import Rank
from nvfp4prep.scales import F32_MIN_NORMAL, InputScalePolicy, W13ScalePolicy
from nvfp4prep.schema import FLOAT_DTYPES, SCALAR_PARAMS, Format, MoeLayer, Schema

Activations = Literal["16-bit", "NVFP4", "E4M3"]
HF = "hf"
IDENTITY = "nvfp4prep"
"""The key of a packed file's metadata that says which layout and rank it is of."""

OWN = ".nvfp4prep."
"""What stands between the experts' module and this project's own tensors."""

GPU_CAPABILITIES: Mapping[str, str] = {
    "b200": "sm100",
    "b300": "sm103",
    "rtx50": "sm120",
    "h200": "sm90",
    "h100": "sm90",
    "a100": "sm80",
}
"""--gpu names and their compute capability."""

_PACKED_PARAMS = frozenset({"weight", "weight_scale", *SCALAR_PARAMS, "bias"})
"""What an expert's linear may hold: layouts have no place for anything else."""

_F32_MAX = 3.4028234663852886e38

_OAI_ALPHA = 1.702  # gpt-oss: the reference implementation's constant, not in config.json
_OAI_BETA = 1.0
_OAI_LIMIT = 7.0


@dataclass(frozen=True, slots=True)
class Target:
    """A packed target."""

    layout: str
    engine: Engine = "vllm"
    tp: int = 1
    ep: int = 1
    activation_dtype: ActivationDtype = "bf16"

    @property
    def module(self) -> Layout:
        return LAYOUTS[self.layout]

    @property
    def layout_id(self) -> str:
        """target/engine/version, as in the manifest."""
        return f"{self.layout}/{self.engine}/{self.module.VERSION}"

    @property
    def activations(self) -> Activations:
        """What the kernel makes of a GEMM's input before it multiplies."""
        requires = self.module.REQUIRES
        if not requires.input_scales:
            return "16-bit"
        return "NVFP4" if requires.format is Format.NVFP4 else "E4M3"

    @property
    def flat(self) -> bool:
        """Everything in one folder with one index: there is one rank."""
        return self.tp == 1 and self.ep == 1

    def layers(self, schema: Schema) -> tuple[MoeLayer, ...]:
        """The MoE layers that are packed: those with experts of the layout's format."""
        return schema.layers_of(self.module.REQUIRES.format)

    def ranks(self) -> Iterator[Rank]:
        """All ranks, TP fastest."""
        return (Rank(tp, ep) for ep in range(self.ep) for tp in range(self.tp))

    def folder(self, rank: Rank) -> str:
        """Where a rank's files lie, relative to the output."""
        return "" if self.flat else f"rank-{rank.tp:02}-of-{self.tp:02}_{rank.ep:02}-of-{self.ep:02}"

    @property
    def common(self) -> str:
        """Where the other tensors lie."""
        return "" if self.flat else "common"

    def identity(self, rank: Rank | None) -> str:
        """What each file of a rank (None: of what all ranks share) says in its metadata under IDENTITY."""
        if rank is None:
            return f"{self.layout_id} common of {self.tp}, {self.ep}"
        return f"{self.layout_id} rank {rank.tp} of {self.tp}, {rank.ep} of {self.ep}"

    def prefix(self, moe: MoeLayer) -> str:
        """What stands before the engine's parameter names. vLLM 0.33 keeps them in a RoutedExperts module."""
        return moe.container + (".routed_experts." if self.engine == "vllm" else ".")

    def own_prefix(self, moe: MoeLayer) -> str:
        """What stands before this project's own scalars."""
        return moe.container + OWN

    def reserved(self, moe: MoeLayer) -> tuple[str, ...]:
        """What only names of ours begin with: SGLang's parameters stand beside what else the experts' module has."""
        return (self.own_prefix(moe), *((self.prefix(moe),) if self.prefix(moe) != moe.container + "." else ()))

    def experts(self, moe: MoeLayer, ep_rank: int) -> range:
        """The contiguous experts of an EP rank."""
        share = moe.expert_count // self.ep
        return range(ep_rank * share, (ep_rank + 1) * share)

    def share(self, moe: MoeLayer, tp_rank: int) -> Slice:
        """A TP rank's part of I. With a padded stride the last ranks may hold less, or nothing."""
        each = moe.intermediate // self.tp
        if self.module.REQUIRES.engines[self.engine].padded_stride:
            each = self._padded(moe).padded_intermediate
        return Slice(min(tp_rank * each, moe.intermediate), min((tp_rank + 1) * each, moe.intermediate))

    def geometry(self, moe: MoeLayer, tp_rank: int) -> Geometry:
        """A rank's sizes. Raises LayoutError."""
        share = self.share(moe, tp_rank)
        return replace(self._padded(moe), intermediate=share.end - share.start)

    def _padded(self, moe: MoeLayer) -> Geometry:
        return plan_geometry(
            self.module.REQUIRES,
            self.engine,
            experts=moe.expert_count // self.ep,
            hidden=moe.hidden,
            intermediate=moe.intermediate // self.tp,
            gated=moe.gated,
            biased=moe.biased,
            group=moe.w2[0].group_size,
            activation_dtype=self.activation_dtype,
        )


def activation_of(config: Mapping[str, Any], gated: bool) -> Activation:
    """The experts' activation by config.json. Raises LayoutError for one that is not known: it is never guessed."""
    text = config.get("text_config")
    sections = [text, config] if isinstance(text, Mapping) else [config]
    merged: dict[str, Any] = {}
    for section in reversed(sections):
        merged |= section
    limit = _swiglu_limit(merged.get("swiglu_limit"))
    if str(merged.get("model_type", "")).startswith("gpt_oss"):
        return Activation("swiglu-oai", _OAI_LIMIT if limit is None else limit, _OAI_ALPHA, _OAI_BETA)
    name = merged.get("mlp_hidden_act") if not gated else None
    name = name or merged.get("hidden_act") or merged.get("hidden_activation")
    if gated and name in ("silu", "swish"):
        return Activation("silu", limit)
    if not gated and name in ("relu2", "relu^2", "squared_relu"):
        return Activation("relu2")
    kind = "gated" if gated else "not gated"
    raise LayoutError(f"config.json names the activation {_shown(name)} ({kind}), which nvfp4prep does not know")


def _swiglu_limit(value: object) -> float | None:
    """config.json's swiglu_limit, None when there is none. Raises LayoutError for what a kernel can't clamp with."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and F32_MIN_NORMAL <= value <= _F32_MAX:
        return float(value)
    raise LayoutError(
        f"config.json's swiglu_limit is {_shown(value)}; it must be a number above 0 that F32 can hold, or null"
    )


def _shown(value: object) -> str:
    """A value of config.json, cut to what a message can hold."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def layout_of(name: str, schema: Schema) -> str:
    """The layout of a packed target's name: `vllm-marlin` has one for each format of experts."""
    int4 = not schema.nvfp4_layers and bool(schema.layers_of(Format.INT4))
    return "vllm-marlin-int4" if name == "vllm-marlin" and int4 else name


def engine_of(layout: str, asked: Engine | None) -> Engine:
    """The engine asked for, or the first that has the layout's kernel."""
    return asked if asked is not None else next(iter(LAYOUTS[layout].REQUIRES.engines))


def target_for(capability: str | None, schema: Schema) -> str:
    """`--target auto`: the target for a GPU's compute capability (sm100), or hf without a GPU.

    For int4 experts the one that engines load, whatever the GPU.
    """
    if not schema.nvfp4_layers and schema.layers_of(Format.INT4):
        return COMPRESSED
    if capability is None:
        return HF
    if capability in ("sm100", "sm103"):
        return "flashinfer-trtllm"
    if capability in ("sm120", "sm121"):
        return "flashinfer-cutlass"
    return "vllm-marlin" if 75 <= int(capability[2:]) <= 90 else HF


def present_capability() -> str | None:
    """The compute capability of this machine's first GPU, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm{major}{minor}"


def w13_policy(target: Target, asked: str, activation: Activation) -> W13ScalePolicy:
    """`--w13-scale` resolved: split stays exact with two alphas and no clamp; everything else needs one shared scale.

    Raises LayoutError when split is asked of a kernel that would misread it.
    """
    exact = target.module.REQUIRES.alphas == 2 and activation.limit is None
    if asked == "auto":
        return "split" if exact else "unify"
    if asked == "split" and not exact:
        why = (
            "clamps raw accumulators of both halves alike"
            if activation.limit is not None
            else "takes one alpha for both"
        )
        raise LayoutError(f"--w13-scale split: {target.layout} {why}; use unify or auto")
    return "split" if asked == "split" else "unify"


def w13_policy_of(schema: Schema, config: Mapping[str, Any], target: Target, asked: str) -> W13ScalePolicy:
    """The one policy for all layers: unify as soon as one layer needs it. `check_target` has passed."""
    policies = {w13_policy(target, asked, activation_of(config, moe.gated)) for moe in target.layers(schema)}
    return "unify" if "unify" in policies else "split"


def check_target(
    schema: Schema,
    config: Mapping[str, Any],
    weight_only: frozenset[str],
    target: Target,
    w13_scale: str,
    input_scale: InputScalePolicy,
    pre_quant_scale: str,
) -> list[Finding]:
    """Everything that keeps a checkpoint from being packed for a target, as errors with what would work."""
    requires = target.module.REQUIRES
    if target.engine not in requires.engines:
        engine, names = f"{target.engine} {ENGINE_VERSIONS[target.engine]}", ", ".join(requires.engines)
        return [_error(f"{engine} has no such {requires.format.value} experts; use --engine {names}", target)]
    if target.activation_dtype not in requires.activation_dtypes:
        dtypes = ", ".join(requires.activation_dtypes)
        return [_error(f"the kernel does not compute in {target.activation_dtype}; use {dtypes}", target)]
    layers = target.layers(schema)
    if not layers:
        return [_error(_no_layers(schema, requires.format), target)]
    findings, refused = [], defaultdict(list)
    for moe in layers:
        problem = _problem(moe, config, weight_only, target, w13_scale)
        scaled = any("pre_quant_scale" in linear.params for linear in (*moe.w13, *moe.w2))
        if problem is None and scaled and pre_quant_scale != "fold" and not requires.pre_quant_scale:
            problem = "no place for the experts' pre_quant_scale (AWQ); --pre-quant-scale fold folds it away"
        if problem:
            refused[problem].append(moe)
    for problem, alike in refused.items():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        findings.append(_error(f"{alike[0].path}{more}: {problem}", target, alike[0]))
    if input_scale == "keep" and requires.input_scales and not requires.input_scale_per_expert:
        findings.append(
            _error("the kernel takes one input scale per layer: --input-scale keep is for vllm-cutlass", target)
        )
    return findings


def taken_names(tensors: Mapping[str, TensorInfo], schema: Schema, target: Target) -> list[Finding]:
    """Tensors of a checkpoint under names that are nvfp4prep's own in the packed output, as errors."""
    ours = {prefix: moe for moe in target.layers(schema) for prefix in target.reserved(moe)}
    below = {prefix.removeprefix(moe.path) for prefix, moe in ours.items()}
    suspect = re.compile("|".join(map(re.escape, below)))
    findings = []
    for name, tensor in tensors.items():
        if suspect.search(name) is None:
            continue
        place = next((start for start in _starts(name) if start in ours), None)
        if place is not None:
            moe = ours[place]
            message = f"{target.layout}: {name}: names under {place} are nvfp4prep's own; rename or remove it"
            findings.append(Finding("target-refused", "error", message, tensor.file, name, moe.layer))
    return findings


def _starts(name: str) -> Iterator[str]:
    """Every beginning of a name that ends with a dot."""
    return (name[: at + 1] for at, letter in enumerate(name) if letter == ".")


def _no_layers(schema: Schema, wanted: Format) -> str:
    """That there is nothing for a target to pack, and which targets there are for what is there."""
    for present in (Format.NVFP4, Format.INT4):
        if present is not wanted and schema.layers_of(present):
            names = [layout.NAME for layout in LAYOUTS.values() if layout.REQUIRES.format is present]
            return f"the kernel is for {wanted.value} experts, these are {present.value}; use {', '.join(names)}, or hf"
    return f"no MoE layer with {wanted.value} experts to pack; use --target hf"


def _problem(
    moe: MoeLayer, config: Mapping[str, Any], weight_only: frozenset[str], target: Target, w13_scale: str
) -> str | None:
    requires = target.module.REQUIRES
    rules = requires.engines[target.engine]
    problem = _stored_problem(moe)
    if problem is not None:
        return problem
    if requires.input_scales and any(linear.module in weight_only for linear in (*moe.w13, *moe.w2)):
        names = [layout.NAME for layout in LAYOUTS.values() if _weight_only(layout, requires.format)]
        return f"the experts have no input_scale (W4A16); weight-only targets work: {', '.join(names)}"
    if moe.gate_up is not None and moe.order is None:
        return f"model_type {config.get('model_type')!r} does not say how gate and up columns are ordered"
    if moe.expert_count % target.ep:
        sizes = [n for n in (1, 2, 4, 8, 16, 32, 64) if moe.expert_count % n == 0]
        return f"{moe.expert_count} experts can't be split over --ep {target.ep}; these work: {_list(sizes)}"
    try:
        activation = activation_of(config, moe.gated)
        if activation.kind not in rules.activations and activation.limit is None:
            return f"{target.engine} has no {activation.kind} on this kernel"
        if activation.kind not in rules.activations or (activation.limit and "swiglu-oai" not in rules.activations):
            return f"{target.engine} ignores the clamp of {activation.kind} on this kernel"
        w13_policy(target, w13_scale, activation)
    except LayoutError as error:
        return str(error)
    problem = _tp_problem(moe, target)
    if problem is None:
        return None
    sizes = [n for n in (1, 2, 4, 8, 16, 32) if _tp_problem(moe, replace(target, tp=n)) is None]
    return f"{problem}; " + (f"--tp {_list(sizes)} works" if sizes else "no TP size works")


def _weight_only(layout: Layout, wanted: Format) -> bool:
    return layout.REQUIRES.format is wanted and not layout.REQUIRES.input_scales


def expert_problem(moe: MoeLayer, target: Target) -> str | None:
    """Why a layer's experts, as they are stored, can't be what a target packs; None when they can."""
    if moe.expert_count % target.ep:
        return f"{moe.expert_count} experts over {target.ep} ranks"
    scaled = any("pre_quant_scale" in linear.params for linear in (*moe.w13, *moe.w2))
    if scaled and not target.module.REQUIRES.pre_quant_scale:
        return "experts with pre_quant_scale, which this layout has no place for"
    return _stored_problem(moe) or _tp_problem(moe, target)


def _stored_problem(moe: MoeLayer) -> str | None:
    """Parameters of the experts that packing would lose, or that no kernel takes."""
    linears = (*moe.w13, *moe.w2)
    unknown = sorted({param for linear in linears for param in linear.params} - _PACKED_PARAMS - {"pre_quant_scale"})
    if unknown:
        return f"the experts have {', '.join(unknown)}, which this kernel has no place for"
    groups = sorted({linear.group_size for linear in linears})
    if len(groups) > 1:
        return f"group sizes {' and '.join(map(str, groups))} in one layer; kernels take one"
    biases = [linear.params["bias"] for linear in linears if "bias" in linear.params]
    if biases and len(biases) < len(linears):
        return f"{len(biases)} of the experts' {len(linears)} linears have a bias; kernels take all or none"
    odd = sorted({bias.dtype for bias in biases} - FLOAT_DTYPES)
    return f"biases of dtype {', '.join(odd)}; F32, BF16 and F16 work" if odd else None


def _tp_problem(moe: MoeLayer, target: Target) -> str | None:
    if moe.intermediate % target.tp:
        return f"intermediate size {moe.intermediate} can't be split over --tp {target.tp}"
    try:
        for rank in range(target.tp):
            target.geometry(moe, rank)
    except LayoutError as error:
        return str(error)
    return None


def _list(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes))


def _error(message: str, target: Target, moe: MoeLayer | None = None) -> Finding:
    return Finding(
        "target-refused",
        "error",
        f"{target.layout}/{target.engine}: {message}",
        layer=None if moe is None else moe.layer,
    )


def _alphas(requires: Requires) -> str:
    if requires.format is Format.INT4:
        return "of groups only"
    return "two, exact" if requires.alphas == 2 else "one, unified"


def target_table() -> list[dict[str, Any]]:
    """One row per layout and engine, for people and JSON."""
    rows = []
    for layout in LAYOUTS.values():
        requires = layout.REQUIRES
        for engine, rules in requires.engines.items():
            odd = f" ({rules.pad_odd_hidden} if H % 128)" if rules.pad_odd_hidden else ""
            hidden = f"H % {rules.hidden_multiple}" + (f", H to {rules.pad_hidden}" if rules.pad_hidden > 1 else "")
            padded = f"I to {rules.pad_gated}{odd}, not gated {rules.pad_plain}" if rules.pad_gated > 1 else ""
            exact = f"I % {rules.inner_multiple}" if rules.inner_multiple > 1 else ""
            groups = "groups of " + ", ".join(map(str, requires.groups)) if requires.format is Format.INT4 else ""
            rows.append(
                {
                    "target": layout.NAME,
                    "kernel": requires.kernel,
                    "gpus": " ".join(gpu.upper() for gpu in requires.gpus),
                    "engine": f"{engine} {ENGINE_VERSIONS[engine]}",
                    "backend": rules.backend,
                    "layout_id": f"{layout.NAME}/{engine}/{layout.VERSION}",
                    "experts": requires.format.value,
                    "alignment": "; ".join(part for part in (hidden, padded, exact, groups) if part),
                    "alphas": _alphas(requires),
                    "input_scale": "needed" if requires.input_scales else "not used",
                    "biases": "yes" if requires.biases else "no",
                    "pre_quant_scale": "kept" if requires.pre_quant_scale else "folded",
                    "tp_ep": "both",
                    "eplb": "expert-major",
                }
            )
    return rows
