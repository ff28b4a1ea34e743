"""Routing of each kind against an independent scalar implementation; what is refused; routers of real checkpoints."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts.logical import LayoutError
from nvfp4prep.schema import Format, MoeLayer, build_schema
from nvfp4prep.smoke.routing import (
    Router,
    RouterConfig,
    random_routing,
    read_router,
    route,
    router_config,
    scale_inputs,
)
from nvfp4prep.source import Source, open_source

DATA = Path(__file__).parent / "data"

DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "softmax renormalised": {"model_type": "qwen3_moe", "num_experts_per_tok": 4, "norm_topk_prob": True},
    "softmax as it is": {"model_type": "qwen2_moe", "num_experts_per_tok": 4, "norm_topk_prob": False},
    "qwen3_next by default": {"model_type": "qwen3_next", "num_experts_per_tok": 3},
    "mixtral": {"model_type": "mixtral", "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3 named": DEEPSEEK | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "kimi_k2, one group": DEEPSEEK | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1},
    "glm4_moe, not renormalised": DEEPSEEK | {"model_type": "glm4_moe", "norm_topk_prob": False},
    "nemotron_h": DEEPSEEK | {"model_type": "nemotron_h", "n_group": 2, "topk_group": 1},
    "deepseek_v2": DEEPSEEK
    | {
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v2 greedy": DEEPSEEK
    | {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False, "n_group": None},
    "minimax_m2": {"model_type": "minimax_m2", "num_experts_per_tok": 4, "scoring_func": "sigmoid"},
    "minimax_m2, no bias": {"model_type": "minimax_m2", "num_experts_per_tok": 4, "use_routing_bias": False},
    "llama4": {"text_config": {"model_type": "llama4_text", "num_experts_per_tok": 1}, "model_type": "llama4"},
    "gpt_oss": {"model_type": "gpt_oss", "num_experts_per_tok": 4},
}


# --- one token, in plain Python, written per architecture ------------------------------------------------------------


def best(scores: Sequence[float], count: int, among: Sequence[int]) -> list[int]:
    return sorted(among, key=lambda index: (-scores[index], index))[:count]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def softmax(values: Sequence[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


def surviving(scores: Sequence[float], groups: int, kept: int, best_of_group: int) -> list[int]:
    """Experts in the groups that stay; a group's score is the sum of its `best_of_group` best."""
    size = len(scores) // groups
    members = [list(range(group * size, (group + 1) * size)) for group in range(groups)]
    totals = [sum(sorted((scores[index] for index in group), reverse=True)[:best_of_group]) for group in members]
    return [index for group in best(totals, kept, range(groups)) for index in members[group]]


def scalar_route(config: dict[str, Any], logits: Sequence[float], correction: Sequence[float]) -> dict[int, float]:
    config = config | config.get("text_config", {})
    model, k, everyone = config["model_type"], config["num_experts_per_tok"], range(len(logits))
    if model == "gpt_oss":
        chosen = best(logits, k, everyone)
        return dict(zip(chosen, softmax([logits[index] for index in chosen]), strict=True))
    if model == "llama4_text":
        return {index: sigmoid(logits[index]) for index in best(logits, 1, everyone)}
    if model in ("qwen2_moe", "qwen3_moe", "qwen3_next", "mixtral"):
        scores = softmax(logits)
        chosen = best(scores, k, everyone)
        total = sum(scores[index] for index in chosen) if config.get("norm_topk_prob", True) else 1
        return {index: scores[index] / total for index in chosen}
    if model == "deepseek_v2":
        scores = softmax(logits)
        greedy = config["topk_method"] == "greedy"
        among = everyone if greedy else surviving(scores, config["n_group"], config["topk_group"], 1)
        return {index: scores[index] * config["routed_scaling_factor"] for index in best(scores, k, among)}
    scores = [sigmoid(logit) for logit in logits]
    biased = scores if config.get("use_routing_bias") is False else list(map(sum, zip(scores, correction, strict=True)))
    among = surviving(biased, config["n_group"], config["topk_group"], 2) if "n_group" in config else everyone
    chosen = best(biased, k, among)
    total = sum(scores[index] for index in chosen) if config.get("norm_topk_prob", True) else 1
    return {index: scores[index] / total * config.get("routed_scaling_factor", 1.0) for index in chosen}


@pytest.mark.parametrize("name", CONFIGS)
def test_against_scalar(name: str) -> None:
    config = CONFIGS[name]
    found = router_config(config)
    rng = random.Random(name)
    tokens, hidden, experts = 40, 24, 16
    x, weight = (
        torch.tensor([[rng.gauss(0, 0.4) for _ in range(hidden)] for _ in range(rows)]) for rows in (tokens, experts)
    )
    bias, correction = (torch.tensor([rng.gauss(0, 0.3) for _ in range(experts)]) for _ in range(2))
    routing = route(
        found, x, weight, bias if found.router_bias else None, correction if found.correction_bias else None
    )
    assert routing.ids.dtype is torch.int64
    assert routing.weights.dtype is torch.float32
    assert routing.ids.shape == routing.weights.shape == (tokens, found.top_k)
    logits = x.double() @ weight.double().T + (bias.double() if found.router_bias else 0)
    for token in range(tokens):
        expected = scalar_route(config, logits[token].tolist(), correction.tolist())
        actual = dict(zip(routing.ids[token].tolist(), routing.weights[token].tolist(), strict=True))
        assert actual == pytest.approx(expected, rel=1e-4)


def test_correction_bias_selects_but_does_not_weigh() -> None:
    config = replace(router_config(DEEPSEEK), groups=1, topk_group=1, top_k=1, renormalise=False, scale=1.0)
    correction = torch.tensor([0.0, 5.0, 0.0])
    routing = route(config, torch.ones(1, 1), torch.tensor([[2.0], [-1.0], [0.0]]), None, correction)
    assert routing.ids.tolist() == [[1]]
    assert routing.weights.item() == pytest.approx(sigmoid(-1.0))


def test_equal_scores_go_to_the_lower_id() -> None:
    config = router_config(CONFIGS["mixtral"])
    assert route(config, torch.ones(3, 4), torch.ones(300, 4)).ids.tolist() == [[0, 1]] * 3


def test_llama4_scales_inputs() -> None:
    config = router_config(CONFIGS["llama4"])
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    routing = route(config, x, torch.eye(8, 16))
    scaled, inner = scale_inputs(config, x, routing)
    assert torch.equal(scaled, x * routing.weights.to(torch.bfloat16))
    assert scaled.dtype is torch.bfloat16
    assert torch.equal(inner.ids, routing.ids)
    assert bool((inner.weights == 1).all())
    plain = router_config(CONFIGS["mixtral"])
    assert scale_inputs(plain, x, routing) == (x, routing)


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "phimoe"}, "model_type 'phimoe'"),
        ({"model_type": None}, "model_type None"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"scoring_func": "sqrtsoftplus"}, "scoring_func"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": False, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ({"model_type": "deepseek_v2", "topk_method": "greedy"}, "norm_topk_prob True"),
        ({"model_type": "llama4_text"}, "num_experts_per_tok 4"),
        ({"model_type": "qwen3_5_moe", "norm_topk_prob": False}, "norm_topk_prob False"),
        ({"model_type": "olmoe"}, "norm_topk_prob True"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        ({"num_experts_per_tok": True}, "num_experts_per_tok True"),
        ({"n_group": None}, "n_group None"),
        ({"topk_group": 5}, "topk_group 5 of n_group 4"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor"),
        ({"norm_topk_prob": 1}, "norm_topk_prob 1"),
    ],
)
def test_unknown_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        router_config(DEEPSEEK | changes)


def test_router_that_does_not_fit() -> None:
    config = router_config(DEEPSEEK)
    x, bias = torch.ones(2, 8), torch.zeros(16)
    with pytest.raises(LayoutError, match="no e_score_correction_bias"):
        route(config, x, torch.ones(16, 8))
    with pytest.raises(LayoutError, match="a bias"):
        route(config, x, torch.ones(16, 8), bias, bias)
    for experts in (18, 4):
        with pytest.raises(LayoutError, match="experts in 4 groups"):
            route(config, x, torch.ones(experts, 8), None, torch.zeros(experts))


# --- drawn routing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(8, 2, 64), (16, 5, 23), (7, 7, 3), (128, 8, 16), (5, 3, 1)])
def test_random_routing(experts: int, top_k: int, tokens: int) -> None:
    routing = random_routing(experts, top_k, tokens, 3, scale=2.5)
    assert all(len(set(row)) == top_k for row in routing.ids.tolist())
    hits = routing.ids.flatten().bincount(minlength=experts)
    assert int(hits.max() - hits.min()) <= 1
    assert torch.allclose(routing.weights.sum(1), torch.tensor(2.5))
    assert routing.weights.min().item() > 0.33 * 2.5 / top_k
    again = random_routing(experts, top_k, tokens, 3, scale=2.5)
    assert torch.equal(routing.ids, again.ids)
    assert torch.equal(routing.weights, again.weights)


def test_random_routing_of_nothing_and_too_much() -> None:
    assert random_routing(8, 2, 0, 0).ids.shape == (0, 2)
    with pytest.raises(ValueError, match="top_k 9 of 8"):
        random_routing(8, 9, 1, 0)


# --- checkpoints -----------------------------------------------------------------------------------------------------

ROUTERS = {
    "dsv3-nvfp4": ("gate", False, True),
    "gptoss-nvfp4": ("router", True, False),
    "llama4-nvfp4": ("router", False, False),
    "mixtral-nvfp4": ("gate", False, False),
    "nemotronh-nvfp4": ("gate", False, True),
    "qwen3moe-nvfp4-sharded": ("gate", False, False),
    "tinymoe-nvfp4-perexpert": ("gate", False, False),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_checkpoints(name: str) -> None:
    source = open_source(str(DATA / name))
    config = json.loads((DATA / name / "config.json").read_text())
    schema = build_schema(source.tensors, config)
    known = router_config(config)
    stem, bias, correction = ROUTERS[name]
    for moe in schema.moe_layers:
        router = read_router(source, moe)
        assert router is not None
        assert f"{moe.path}.{stem}.weight" in source.tensors
        assert router.weight.shape == (moe.expert_count, moe.hidden)
        assert router.weight.dtype is torch.float32
        assert (router.bias is not None, router.correction_bias is not None) == (bias, correction)
        x = torch.randn(32, moe.hidden, generator=torch.Generator().manual_seed(0))
        routing = route(known, x, *router)
        assert bool(routing.weights.isfinite().all())
        assert int(routing.ids.max()) < moe.expert_count


def layer(experts: int = 4) -> MoeLayer:
    return MoeLayer("model.layers.0.mlp", Format.NVFP4, experts, 8, 16, True)


def stored(root: Path, tensors: dict[str, Tensor]) -> Source:
    """A Source of raw tensors in one file."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
    infos, raw = {}, b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        shape = tuple(tensor.shape)
        infos[name] = TensorInfo(name, names[tensor.dtype], shape, "raw", len(raw), len(raw) + len(data))
        raw += data
    (root / "raw").write_bytes(raw)
    return Source(root, "test", None, {}, {}, infos, (), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("folder", ["", "common/"])
def test_read_router(tmp_path: Path, dtype: torch.dtype, folder: str) -> None:
    weight, correction = torch.arange(32).reshape(4, 8).to(dtype), torch.arange(4).to(dtype)
    path = f"{folder}model.layers.0.mlp"
    for name in ("gate.e_score_correction_bias", "e_score_correction_bias"):
        source = stored(tmp_path, {f"{path}.gate.weight": weight, f"{path}.{name}": correction})
        router = read_router(source, layer())
        assert isinstance(router, Router)
        assert torch.equal(router.weight, weight.float())
        assert router.bias is None
        assert router.correction_bias is not None
        assert torch.equal(router.correction_bias, correction.float())


def test_router_absent_or_unusable(tmp_path: Path) -> None:
    path = "model.layers.0.mlp"
    assert read_router(stored(tmp_path, {f"{path}.gate.bias": torch.ones(4)}), layer()) is None
    wide = read_router(stored(tmp_path, {f"{path}.gate.weight": torch.ones(4, 32)}), layer())
    assert wide is not None, "a latent MoE's router reads wider hidden states than its experts"
    weight = torch.ones(4, 8)
    for tensors, message in (
        ({"gate.weight": torch.ones(4, 4, dtype=torch.uint8)}, "stored as U8"),
        ({"gate.weight": torch.ones(5, 8)}, r"\[5, 8\]"),
        ({"gate.weight": weight, "router.weight": weight}, "two routers"),
        ({"gate.weight": weight, "gate.bias": torch.ones(8)}, r"\[8\] where \[4\]"),
    ):
        with pytest.raises(LayoutError, match=message):
            read_router(stored(tmp_path, {f"{path}.{name}": tensor for name, tensor in tensors.items()}), layer())


def test_config_defaults() -> None:
    assert RouterConfig("softmax", 2) == router_config(CONFIGS["mixtral"])
