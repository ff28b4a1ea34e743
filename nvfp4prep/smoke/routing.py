"""Which experts a token goes to: routers by model type, read from a checkpoint, or drawn when it holds none.

All kinds share one shape: logits = x·Wᵀ (+ bias) in F32, scores from logits, selection by scores (+ correction bias, by
groups), weights from the unbiased scores of the selected, renormalised or not, times a factor:

    kind            scores             weights of the selected
    softmax         softmax(logits)    scores, / their sum when renormalised, · scale
    sigmoid         sigmoid(logits)    likewise
    topk-softmax    logits             softmax over the selected logits (gpt-oss)

Groups: experts are cut into `groups` equal runs, the `topk_group` best runs stay. A run's score is the sum of its two
best biased scores (DeepSeek-V3 and its family) or its best score (DeepSeek-V2).

Read from: vLLM 0.33.0 (`model_executor/models/*.py`, `fused_moe/router/grouped_topk_router.py`), Transformers 5.24.0
(`modeling_*.py`). Where these two disagree about a setting, the setting is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts.logical import LayoutError
from nvfp4prep.numerics import floats
from nvfp4prep.schema import FLOAT_DTYPES, MoeLayer
from nvfp4prep.smoke.layer import Routing
from nvfp4prep.source import Source, read_tensor

Kind = Literal["softmax", "sigmoid", "topk-softmax"]

_TINY = 1e-20  # keeps a sum of sigmoids that are all 0 from dividing, as DeepSeek's own code does


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How a model routes.

    `scale` is routed_scaling_factor. `router_bias` is added to the logits; `correction_bias` (e_score_correction_bias)
    takes part in selection only. `scale_inputs`: the weight multiplies the experts' input, not their output (Llama-4).
    """

    kind: Kind
    top_k: int
    groups: int = 1
    topk_group: int = 1
    group_score: Literal["top2", "max"] = "top2"
    renormalise: bool = True
    scale: float = 1.0
    router_bias: bool = False
    correction_bias: bool = False
    scale_inputs: bool = False


class Router(NamedTuple):
    """A layer's router as stored, widened to F32: weight [E, H], bias and correction_bias [E] or None.

    H is the model's hidden size, which a latent MoE's experts don't see (Nemotron-H with moe_latent_size).
    """

    weight: Tensor
    bias: Tensor | None = None
    correction_bias: Tensor | None = None


# --- config.json -> RouterConfig -------------------------------------------------------------------------------------


def _top_k(config: Mapping[str, Any]) -> int:
    return _whole(config, "num_experts_per_tok")


def _softmax(default: bool) -> Callable[[Mapping[str, Any]], RouterConfig]:
    """softmax, top-k, renormalised when norm_topk_prob (absent: the model class's default)."""

    def build(config: Mapping[str, Any]) -> RouterConfig:
        return RouterConfig("softmax", _top_k(config), renormalise=_flag(config, "norm_topk_prob", default))

    return build


def _softmax_fixed(renormalise: bool) -> Callable[[Mapping[str, Any]], RouterConfig]:
    """softmax, top-k; the model's code renormalises always or never, whatever config.json says."""

    def build(config: Mapping[str, Any]) -> RouterConfig:
        _only(config, "norm_topk_prob", renormalise)
        return RouterConfig("softmax", _top_k(config), renormalise=renormalise)

    return build


def _deepseek_v2(config: Mapping[str, Any]) -> RouterConfig:
    _only(config, "scoring_func", "softmax")
    _only(config, "norm_topk_prob", False)  # DeepSeek, vLLM and Transformers each do something else with true
    method = config.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise _unknown(config, "topk_method", method)
    grouped = method == "group_limited_greedy"
    return RouterConfig(
        "softmax",
        _top_k(config),
        groups=_whole(config, "n_group") if grouped else 1,
        topk_group=_whole(config, "topk_group") if grouped else 1,
        group_score="max",
        renormalise=False,
        scale=_number(config, "routed_scaling_factor"),
    )


def _deepseek_v3(config: Mapping[str, Any]) -> RouterConfig:
    _only(config, "scoring_func", "sigmoid")
    _only(config, "topk_method", "noaux_tc")
    return RouterConfig(
        "sigmoid",
        _top_k(config),
        groups=_whole(config, "n_group"),
        topk_group=_whole(config, "topk_group"),
        renormalise=_flag(config, "norm_topk_prob"),
        scale=_number(config, "routed_scaling_factor"),
        correction_bias=True,
    )


def _minimax_m2(config: Mapping[str, Any]) -> RouterConfig:
    _only(config, "scoring_func", "sigmoid")
    return RouterConfig("sigmoid", _top_k(config), correction_bias=_flag(config, "use_routing_bias", True))


def _llama4(config: Mapping[str, Any]) -> RouterConfig:
    _only(config, "num_experts_per_tok", 1)  # with more, each expert would read another input
    return RouterConfig("sigmoid", _top_k(config), renormalise=False, scale_inputs=True)


def _gpt_oss(config: Mapping[str, Any]) -> RouterConfig:
    return RouterConfig("topk-softmax", _top_k(config), router_bias=True)


_MODEL_TYPES: Mapping[str, Callable[[Mapping[str, Any]], RouterConfig]] = {
    "qwen2_moe": _softmax(default=False),
    "qwen3_moe": _softmax(default=False),
    "qwen3_next": _softmax(default=True),
    "qwen3_vl_moe_text": _softmax_fixed(renormalise=True),
    "qwen3_5_moe": _softmax_fixed(renormalise=True),
    "qwen3_5_moe_text": _softmax_fixed(renormalise=True),
    "mixtral": _softmax_fixed(renormalise=True),
    "olmoe": _softmax_fixed(renormalise=False),
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe": _deepseek_v3,
    "glm4_moe_lite": _deepseek_v3,
    "glm4v_moe_text": _deepseek_v3,
    "glm_moe_dsa": _deepseek_v3,
    "nemotron_h": _deepseek_v3,
    "minimax_m2": _minimax_m2,
    "llama4_text": _llama4,
    "gpt_oss": _gpt_oss,
}


def router_config(config: Mapping[str, Any]) -> RouterConfig:
    """How the model of a config.json routes; a multimodal model's text_config counts before what stands around it.

    Raises:
        LayoutError: a model type, scoring function or setting that is not known, or one that is missing.
    """
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, Mapping) else dict(config)
    build = _MODEL_TYPES.get(str(merged.get("model_type")))
    if build is None:
        raise LayoutError(
            f"config.json names the model_type {merged.get('model_type')!r}, whose routing nvfp4prep does not know"
        )
    found = build(merged)
    if found.topk_group > found.groups:
        raise LayoutError(f"config.json: topk_group {found.topk_group} of n_group {found.groups}")
    return found


def _unknown(config: Mapping[str, Any], key: str, value: Any) -> LayoutError:
    return LayoutError(
        f"config.json: {key} {value!r} of model_type {config.get('model_type')!r}: nvfp4prep does not know this routing"
    )


def _only(config: Mapping[str, Any], key: str, value: Any) -> None:
    """Refuses any other value than `value`; absent (or null) is fine, the model's code knows no other."""
    found = config.get(key)
    if found is not None and (type(found) is not type(value) or found != value):
        raise _unknown(config, key, found)


def _whole(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _unknown(config, key, value)
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise _unknown(config, key, value)
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise _unknown(config, key, value)
    return value


# --- routing ---------------------------------------------------------------------------------------------------------


def route(
    config: RouterConfig, x: Tensor, weight: Tensor, bias: Tensor | None = None, correction_bias: Tensor | None = None
) -> Routing:
    """Routes tokens; `route(config, x, *router)` with a Router.

    Args:
        config: how.
        x: floating [T, H], what the router reads (see Router about H).
        weight: floating [E, H].
        bias: [E], exactly when `config.router_bias`.
        correction_bias: [E], exactly when `config.correction_bias`.

    Returns:
        ids [T, top_k], best first, equal scores by the lower id; weights [T, top_k]. With `config.scale_inputs` the
        weights are for the inputs: `scale_inputs` applies them.

    Raises:
        LayoutError: a bias that is missing or not known, a weight for another H, or numbers of experts, groups and
            top_k that don't fit.
    """
    if weight.shape[1] != x.shape[1]:
        raise LayoutError(
            f"the router reads {weight.shape[1]} values and the experts {x.shape[1]}: "
            "what makes one of the other is not known"
        )
    for name, tensor, wanted in (
        ("bias", bias, config.router_bias),
        ("e_score_correction_bias", correction_bias, config.correction_bias),
    ):
        if wanted != (tensor is not None):
            raise LayoutError(f"the router has {'no' if wanted else 'a'} {name}, against what its model type says")
    tokens, experts = x.shape[0], weight.shape[0]
    per_group = experts // config.groups
    if experts % config.groups or config.top_k > config.topk_group * per_group:
        raise LayoutError(
            f"{experts} experts in {config.groups} groups, {config.topk_group} of them kept, top_k {config.top_k}: "
            "these don't fit"
        )
    if config.groups > 1 and config.group_score == "top2" and per_group < 2:
        raise LayoutError(f"{experts} experts in {config.groups} groups: a group's score takes two experts")
    logits = x.float() @ weight.float().T
    if bias is not None:
        logits = logits + bias.float()
    if config.kind == "softmax":
        scores = logits.softmax(-1)
    elif config.kind == "sigmoid" and not config.scale_inputs:
        scores = logits.sigmoid()
    else:
        scores = logits  # selection by logits; weights below
    ranking = scores if correction_bias is None else scores + correction_bias.float()
    if config.groups > 1:
        grouped = ranking.reshape(tokens, config.groups, per_group)
        best = grouped.topk(2, -1).values.sum(-1) if config.group_score == "top2" else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _best(best, config.topk_group), True)
        ranking = grouped.masked_fill(~kept[..., None], float("-inf")).reshape(tokens, experts)
    ids = _best(ranking, config.top_k)
    weights = scores.gather(1, ids)
    if config.kind == "topk-softmax":
        weights = weights.softmax(-1)
    elif config.scale_inputs:
        weights = weights.sigmoid()
    elif config.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return Routing(ids, weights * config.scale)


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last dimension, equal ones by the lower index: the same everywhere."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def scale_inputs(config: RouterConfig, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
    """What the experts get: (x, routing) as they are, or for Llama-4 (x · score in x's dtype, all weights 1).

    vLLM and Transformers both round the score to the input's dtype, then the product. x: [T, H].
    """
    if not config.scale_inputs:
        return x, routing
    return x * routing.weights[:, :1].to(x.dtype), Routing(routing.ids, torch.ones_like(routing.weights))


def random_routing(expert_count: int, top_k: int, tokens: int, seed: int, scale: float = 1.0) -> Routing:
    """Routing for a layer whose router is not stored, or to reach every expert: drawn evenly.

    Experts are dealt from shuffled decks, so every expert is hit when tokens·top_k >= expert_count, and no expert is
    hit twice before all are hit once, but for the cards a token has already. Weights are positive, at least half and at
    most one and a half times 1/top_k before their sum is brought to `scale`.

    Returns:
        ids [T, top_k], distinct for each token; weights [T, top_k].

    Raises:
        ValueError: top_k is not in 1..expert_count.
    """
    if not 1 <= top_k <= expert_count:
        raise ValueError(f"top_k {top_k} of {expert_count} experts")
    generator = torch.Generator().manual_seed(seed)
    deck: list[int] = []
    rows = []
    for _ in range(tokens):
        if len(deck) < top_k:
            held = set(deck)
            fresh: list[int] = torch.randperm(expert_count, generator=generator).tolist()
            deck += [card for card in fresh if card not in held] + [card for card in fresh if card in held]
        rows.append(deck[:top_k])
        del deck[:top_k]
    ids = torch.tensor(rows, dtype=torch.int64).reshape(tokens, top_k)
    weights = 0.5 + torch.rand(tokens, top_k, generator=generator, dtype=torch.float32)
    return Routing(ids, weights * (scale / weights.sum(-1, keepdim=True)))


# --- the checkpoint's own router -------------------------------------------------------------------------------------

_WEIGHTS = ("gate.weight", "router.weight")
_BIASES = ("gate.bias", "router.bias")
_CORRECTIONS = ("gate.e_score_correction_bias", "e_score_correction_bias")
_FOLDERS = ("", "common/")  # a packed output of several ranks keeps other tensors in common/


def read_router(source: Source, moe: MoeLayer) -> Router | None:
    """The router of a layer from any Source, logical or packed, or None when no router weight is stored.

    Names beside the layer's path: mlp.gate, block_sparse_moe.gate, mixer.gate, mlp.router, feed_forward.router, with
    weight, bias and e_score_correction_bias (MiniMax-M2 keeps that one beside the gate).

    Raises:
        LayoutError: a router that is quantised, has other sizes than the layer, or is stored twice.
        EnvironmentFault: the file can't be read.
    """
    weight, bias, correction = (_stored(source, moe, names) for names in (_WEIGHTS, _BIASES, _CORRECTIONS))
    if weight is None:
        return None
    if len(weight.shape) != 2 or weight.shape[0] != moe.expert_count:
        raise LayoutError(f"{_placed(weight)}: {list(weight.shape)} where [{moe.expert_count}, hidden] was expected")
    vectors = []
    for tensor in (bias, correction):
        if tensor is not None and tensor.shape != (moe.expert_count,):
            raise LayoutError(f"{_placed(tensor)}: {list(tensor.shape)} where [{moe.expert_count}] was expected")
        vectors.append(None if tensor is None else _read(source, tensor))
    return Router(_read(source, weight), *vectors)


def _stored(source: Source, moe: MoeLayer, names: tuple[str, ...]) -> TensorInfo | None:
    keys = [f"{folder}{moe.path}.{name}" for folder in _FOLDERS for name in names]
    found = [source.tensors[key] for key in keys if key in source.tensors]
    if len(found) > 1:
        raise LayoutError(f"{moe.path} has two routers: {found[0].name} and {found[1].name}")
    return found[0] if found else None


def _read(source: Source, tensor: TensorInfo) -> Tensor:
    if tensor.dtype not in FLOAT_DTYPES:
        raise LayoutError(f"{_placed(tensor)}: a router stored as {tensor.dtype}; F32, BF16 or F16 was expected")
    return floats(tensor.dtype, read_tensor(source, tensor)).reshape(tensor.shape)


def _placed(tensor: TensorInfo) -> str:
    return f"{tensor.file}: {tensor.name}"
