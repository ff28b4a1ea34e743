"""AWQ's pre_quant_scale folded away, for targets without a place for it.

At run time a linear with pre_quant_scale p computes W (p · x). Of routed experts, down's p scales the rows of up, since
the activation is linear in up; gate's and up's p goes into the norm before the MoE block, and every other reader of
that norm (router, shared experts) has its columns divided by the factor that the norm really holds after rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4prep.checkpoint import Checkpoint
from nvfp4prep.errors import InputRefused
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.model_config import sections
from nvfp4prep.numerics import became, floats, unfit
from nvfp4prep.schema import FLOAT_DTYPES, SCALAR_PARAMS, Format, Linear, MoeLayer
from nvfp4prep.source import read_tensor

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

_KEPT = "; --target hf keeps them"
_NORM = "post_attention_layernorm"
_LINEAR_PARAMS = frozenset({"weight", "weight_scale", "weight_scale_inv", *SCALAR_PARAMS, "pre_quant_scale", "bias"})
"""Parameters of a linear of which it is known that, but for the weight, they don't read its input as a matrix does."""
_MODEL_TYPES = frozenset(
    {"deepseek_v2", "deepseek_v3", "glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe", "kimi_k2", "ernie4_5_moe"}
)
"""Models whose MoE block, and nothing else, reads post_attention_layernorm, which multiplies by its weight."""


@dataclass(frozen=True)
class Fold:
    """How gate's and up's pre_quant_scale of one MoE layer goes into its norm.

    `folded` is the norm's new weight in its own dtype, `factor` F32 [H] what that is of the old one, by which the
    columns of `readers` must be divided. `rounding` is the largest relative error of the norm's new weight.
    """

    norm: TensorInfo
    folded: Tensor
    factor: Tensor
    readers: tuple[Linear, ...]
    rounding: float


@dataclass(frozen=True)
class Factors:
    """pre_quant_scale of one MoE layer's experts where the kernel multiplies its inputs by it, the same for all.

    `w13` F32 [H], `w2` F32 [I]; ones where none is stored. `rows`: down's differ and go into the rows of up instead.
    """

    w13: Tensor
    w2: Tensor
    rows: bool


def has_pre_quant_scale(moe: MoeLayer) -> bool:
    """Whether any of a layer's experts has one."""
    return any("pre_quant_scale" in linear.params for linear in (*moe.w13, *moe.w2))


def has_row_factors(moe: MoeLayer) -> bool:
    """Whether any of a layer's downs has a pre_quant_scale, which is folded into the rows of up."""
    return any("pre_quant_scale" in linear.params for linear in moe.w2)


def factors_fit(linear: Linear) -> bool:
    """Whether a linear's pre_quant_scale, if it has one, is a float for each of its inputs."""
    factors = linear.params.get("pre_quant_scale")
    return factors is None or (factors.dtype in FLOAT_DTYPES and factors.shape == (linear.columns,))


def read_floats(checkpoint: Checkpoint, tensor: TensorInfo) -> Tensor:
    """A small float tensor as F32. Raises EnvironmentFault."""
    return floats(tensor.dtype, read_tensor(checkpoint.source, tensor)).view(tensor.shape)


def place_all(checkpoint: Checkpoint, layers: Sequence[MoeLayer], fold: bool) -> dict[str, Factors]:
    """What a kernel with a place for pre_quant_scale multiplies its inputs by, by MoE path.

    Args:
        checkpoint: as read.
        layers: int4 layers.
        fold: whether down's may go into the rows of up where experts differ.

    Raises:
        InputRefused: gate's and up's differ, or down's do and can't move.
        EnvironmentFault: I/O.
    """
    placed: dict[str, Factors] = {}
    refused: list[Finding] = []
    for moe in layers:
        found = _place(checkpoint, moe, fold)
        if isinstance(found, Finding):
            refused.append(found)
        else:
            placed[moe.path] = found
    if refused:
        raise InputRefused(refused)
    return placed


def _place(checkpoint: Checkpoint, moe: MoeLayer, fold: bool) -> Factors | Finding:
    odd = _odd_factors(moe)
    if odd is not None:
        return odd
    bad = _unusable(checkpoint, moe)
    if bad is not None:
        return bad
    first, differing = _shared_factors(checkpoint, moe.w13, moe.hidden)
    if differing:
        return _not_one(moe, _differ(differing, moe.w13, "gate/up") + _KEPT, differing)
    second, differing = _shared_factors(checkpoint, moe.w2, moe.intermediate)
    if not differing:
        return Factors(first, second, False)
    if not fold:
        message = f"{_differ(differing, moe.w2, 'down')}; --pre-quant-scale fold moves them into up's scales"
        return _not_one(moe, message, differing)
    problem = _immovable(checkpoint, moe, activation_kind(checkpoint))
    return problem or Factors(first, torch.ones(moe.intermediate, dtype=torch.float32), True)


def _unusable(checkpoint: Checkpoint, moe: MoeLayer) -> Finding | None:
    """The first pre_quant_scale of a layer that holds what nothing can be multiplied by."""
    for linear in (*moe.w13, *moe.w2):
        tensor = linear.params.get("pre_quant_scale")
        if tensor is None:
            continue
        values = read_floats(checkpoint, tensor)
        if not bool(torch.isfinite(values).all()) or bool((values == 0).any()):
            experts = () if linear.expert is None else (linear.expert,)
            text = f"{moe.path}: {tensor.name} holds zero, inf or NaN"
            return Finding("target-refused", "error", text, tensor.file, tensor.name, moe.layer, experts)
    return None


def _not_one(moe: MoeLayer, message: str, differing: Sequence[Linear]) -> Finding:
    text = f"{moe.path}: the kernel takes one pre_quant_scale for all experts: {message}"
    return Finding("target-refused", "error", text, layer=moe.layer, experts=_experts_of(differing))


def _shared_factors(checkpoint: Checkpoint, linears: Sequence[Linear], size: int) -> tuple[Tensor, list[Linear]]:
    """The first pre_quant_scale (ones where no linear has one), F32, and the linears that have another."""
    tensors = (linear.params["pre_quant_scale"] for linear in linears if "pre_quant_scale" in linear.params)
    tensor = next(tensors, None)
    first = torch.ones(size, dtype=torch.float32) if tensor is None else read_floats(checkpoint, tensor)
    return first, _other_factors(checkpoint, linears, first)


def _other_factors(checkpoint: Checkpoint, linears: Sequence[Linear], first: Tensor) -> list[Linear]:
    """The linears with another pre_quant_scale than `first`; none counts as ones."""
    ones = torch.ones_like(first)

    def factors(linear: Linear) -> Tensor:
        tensor = linear.params.get("pre_quant_scale")
        return ones if tensor is None else read_floats(checkpoint, tensor)

    return [linear for linear in linears if not torch.equal(factors(linear), first)]


def _differ(differing: Sequence[Linear], linears: Sequence[Linear], what: str) -> str:
    return f"{len(differing)} of {len(linears)} {what} linears have another than the first"


def _experts_of(linears: Sequence[Linear]) -> tuple[int, ...]:
    return tuple(sorted({linear.expert for linear in linears if linear.expert is not None}))


def activation_kind(checkpoint: Checkpoint) -> str | None:
    """The experts' activation, None for one that is not known."""
    from nvfp4prep import targets
    from nvfp4prep.layouts.logical import LayoutError

    gated = all(moe.gated for moe in checkpoint.schema.moe_layers)
    with suppress(LayoutError):
        return targets.activation_of(checkpoint.config, gated).kind
    return None


def fold_all(checkpoint: Checkpoint, layers: Sequence[MoeLayer]) -> dict[str, Fold]:
    """How pre_quant_scale of each of the MoE layers is folded away.

    Raises:
        InputRefused: it can't be.
        EnvironmentFault: I/O.
    """
    folds, refused = fold_layers(checkpoint, activation_kind(checkpoint), layers)
    if refused:
        raise InputRefused(refused)
    return folds


def fold_layers(
    checkpoint: Checkpoint, activation: str | None, layers: Sequence[MoeLayer]
) -> tuple[dict[str, Fold], list[Finding]]:
    """The fold of each MoE layer whose gate and up have a pre_quant_scale, by path, and what keeps others from it.

    Args:
        checkpoint: as read.
        activation: the experts' activation, None for an unknown one; down's is folded only where it is linear in up.
        layers: NVFP4 or int4; those of another target's stay as they are.

    Raises:
        EnvironmentFault: I/O.
    """
    folds: dict[str, Fold] = {}
    findings: list[Finding] = []
    for moe in layers:
        if not has_pre_quant_scale(moe):
            continue
        problem = _problem(checkpoint, moe, activation)
        found = problem or _fold(checkpoint, moe)
        if isinstance(found, Fold):
            folds[moe.path] = found
        elif found is not None:
            findings.append(found)
    return folds, findings


def _refused(moe: MoeLayer, message: str, experts: tuple[int, ...] = ()) -> Finding:
    text = f"{moe.path}: pre_quant_scale can't be folded: {message}"
    return Finding("target-refused", "error", text, layer=moe.layer, experts=experts)


def _problem(checkpoint: Checkpoint, moe: MoeLayer, activation: str | None) -> Finding | None:
    model_type = str(checkpoint.config.get("model_type", ""))
    if model_type not in _MODEL_TYPES:
        return _refused(moe, f"what reads the norms of model_type {model_type!r} is not known; use --target hf")
    return _odd_factors(moe) or _immovable(checkpoint, moe, activation)


def _odd_factors(moe: MoeLayer) -> Finding | None:
    odd = next((linear for linear in (*moe.w13, *moe.w2) if not factors_fit(linear)), None)
    if odd is None:
        return None
    factors = odd.params["pre_quant_scale"]
    message = f"{factors.name} is {factors.dtype} {list(factors.shape)} where {odd.columns} floats are needed"
    return _refused(moe, message, () if odd.expert is None else (odd.expert,))


def _immovable(checkpoint: Checkpoint, moe: MoeLayer, activation: str | None) -> Finding | None:
    """Why down's factors can't go into the rows of up; None when they can, or there are none."""
    on_down = has_row_factors(moe)
    if on_down and activation != "silu":
        return _refused(
            moe, f"down's can't move through the activation {activation or 'in config.json'}; use --target hf"
        )
    if on_down and any(section.get("swiglu_limit") is not None for section in sections(checkpoint.config)):
        return _refused(moe, "down's can't move through an up that is clamped (swiglu_limit); use --target hf")
    if on_down and any("bias" in linear.params for linear in moe.w13):
        return _refused(moe, "down's would need other biases of up; use --target hf")
    if on_down and moe.gate_up is not None:
        return _refused(moe, "down's can't move into experts that are fused in one tensor; use --target hf")
    if on_down and moe.format is Format.NVFP4:
        negative = [linear for linear in moe.w2 if _any_negative(checkpoint, linear)]
        if negative:
            message = "down's are negative, and kernels read block scales without sign; use --target hf"
            return _refused(moe, message, _experts_of(negative))
    return None


def _any_negative(checkpoint: Checkpoint, linear: Linear) -> bool:
    tensor = linear.params.get("pre_quant_scale")
    return tensor is not None and bool((read_floats(checkpoint, tensor) < 0).any())


def _fold(checkpoint: Checkpoint, moe: MoeLayer) -> Fold | Finding | None:
    with_scale = [linear for linear in moe.w13 if "pre_quant_scale" in linear.params]
    if not with_scale:
        return None
    first = read_floats(checkpoint, with_scale[0].params["pre_quant_scale"])
    if not bool(torch.isfinite(first).all()) or bool((first == 0).any()):
        return _refused(moe, f"{with_scale[0].params['pre_quant_scale'].name} holds zero, inf or NaN")
    other = _other_factors(checkpoint, moe.w13, first)
    if other:
        return _refused(moe, _differ(other, moe.w13, "gate/up") + _KEPT, _experts_of(other))
    norm = checkpoint.source.tensors.get(f"{moe.path.rpartition('.')[0]}.{_NORM}.weight")
    if norm is None or norm.dtype not in FLOAT_DTYPES or norm.shape != (moe.hidden,):
        return _refused(moe, f"no {_NORM}.weight of {moe.hidden} values before the block")
    if norm.name.removesuffix("weight") + "bias" in checkpoint.source.tensors:
        return _refused(moe, f"{_NORM} has a bias")
    divided = tuple(readers(checkpoint, moe))
    unknown = next((linear for linear in divided if not _divisible(linear)), None)
    if unknown is not None:
        stored = unknown.params["weight"]
        return _refused(moe, f"{unknown.module} reads the norm and is {stored.dtype} {list(stored.shape)}")
    stranger = _stranger(checkpoint, moe)
    if stranger is not None:
        where = f"{stranger.name} ({stranger.dtype} {list(stranger.shape)}, {stranger.file})"
        return _refused(moe, f"{where} may read the norm, in a way that is not known; use --target hf")
    if not any(linear.rows == moe.expert_count for linear in divided):
        return _refused(moe, f"no router of {moe.expert_count} rows that reads the norm too is stored")
    weight = read_floats(checkpoint, norm)
    exact = weight * first
    folded = exact.to(DTYPES[norm.dtype])
    kept = folded.float()
    lost = unfit(exact, folded)
    if bool(lost.any()):
        at = int(lost.nonzero()[0])
        product = f"{float(weight[at]):.6g} times {float(first[at]):.6g} at [{at}]"
        if not bool(torch.isfinite(weight[at])):
            return _refused(moe, f"{norm.name} ({norm.file}) is {float(weight[at])} at [{at}]; export it again")
        left = became(float(kept[at]), float(exact[at]))
        return _refused(moe, f"{norm.name} ({norm.file}), {product}, does not fit {norm.dtype}{left}{_KEPT}")
    factor = torch.where(weight == 0, first, kept / weight)
    off = torch.where(exact == 0, 0.0, (kept / exact - 1).abs())
    return Fold(norm, folded, factor, divided, float(off.max()))


def readers(checkpoint: Checkpoint, moe: MoeLayer) -> Iterator[Linear]:
    """Linears of a MoE block beside the routed experts that read its input: router, shared experts, their gate.

    One in a format that is not known, whose columns are not known either, may read it and counts too.
    """
    routed = {linear.module for linear in (*moe.w13, *moe.w2)}
    for linear in checkpoint.linears_under(moe.path):
        reads = linear.columns == moe.hidden or linear.format is Format.UNCLASSIFIED
        if linear.module not in routed and reads and not linear.module.endswith(".down_proj"):
            yield linear


def _stranger(checkpoint: Checkpoint, moe: MoeLayer) -> TensorInfo | None:
    """A tensor of the block with a dimension of H that is no parameter linears have: it may read the block's input."""
    known = {
        tensor.name
        for linear in checkpoint.linears_under(moe.path)
        if len(linear.params["weight"].shape) == 2 or linear.experts is not None
        for param, tensor in linear.params.items()
        if param in _LINEAR_PARAMS
    }
    for tensor in checkpoint.tensors_under(moe.path):
        if tensor.name not in known and moe.hidden in tensor.shape and not _is_bias(tensor):
            return tensor
    return None


def _is_bias(tensor: TensorInfo) -> bool:
    """A bias, or a router's e_score_correction_bias: what is added reads nothing."""
    last = tensor.name.rpartition(".")[2]
    return len(tensor.shape) == 1 and (last == "bias" or last.endswith("_bias"))


def _divisible(linear: Linear) -> bool:
    """Whether the columns of a linear can be divided: a float matrix, or 4-bit codes to be unpacked first."""
    weight = linear.params["weight"]
    plain = linear.format is Format.UNQUANTIZED and weight.dtype in DTYPES and len(weight.shape) == 2
    return plain or linear.format in (Format.NVFP4, Format.INT4)
