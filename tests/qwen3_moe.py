"""Qwen3-MoE in plain float64, from weights given by name: what a checkpoint computes, without any library's model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Callable[[str], np.ndarray]
"""float64 weight of a module: a matrix, or a norm's vector."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@dataclass(frozen=True)
class Qwen3Moe:
    """The model; `weights` may come from any checkpoint of the architecture."""

    config: Mapping[str, Any]
    weights: Weights
    _read: dict[str, Tensor] = field(default_factory=dict)

    def get(self, module: str) -> Tensor:
        if module not in self._read:
            self._read[module] = torch.from_numpy(np.ascontiguousarray(self.weights(module), np.float64))
        return self._read[module]

    @property
    def eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    def rotated(self, x: Tensor) -> Tensor:
        """Rotary embedding of [heads, T, D], halves rotated."""
        half = x.shape[-1] // 2
        inverse = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * inverse
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def attention(self, x: Tensor, path: str) -> Tensor:
        config, size = self.config, x.shape[0]
        width = config["head_dim"]

        def heads(name: str, norm: str | None) -> Tensor:
            split = (x @ self.get(f"{path}.{name}_proj").T).view(size, -1, width)
            return (split if norm is None else rms_norm(split, self.get(f"{path}.{norm}"), self.eps)).transpose(0, 1)

        q, k, v = self.rotated(heads("q", "q_norm")), self.rotated(heads("k", "k_norm")), heads("v", None)
        groups = config["num_attention_heads"] // config["num_key_value_heads"]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        mask = torch.full((size, size), float("-inf"), dtype=torch.float64).triu(1)
        mixed = (q @ k.transpose(1, 2) / width**0.5 + mask).softmax(-1) @ v
        return mixed.transpose(0, 1).reshape(size, -1) @ self.get(f"{path}.o_proj").T

    def routed(self, x: Tensor, path: str) -> tuple[Tensor, Tensor]:
        """Weights and ids [T, k] of the experts of each token."""
        probabilities = (x @ self.get(f"{path}.gate").T).softmax(-1)
        weights, ids = probabilities.topk(self.config["num_experts_per_tok"], -1)
        if self.config["norm_topk_prob"]:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, ids

    def moe(self, x: Tensor, path: str) -> Tensor:
        weights, ids = self.routed(x, path)
        out = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            tokens, places = (ids == expert).nonzero(as_tuple=True)
            gate, up, down = (self.get(f"{path}.experts.{expert}.{name}_proj") for name in ("gate", "up", "down"))
            hidden = F.silu(x[tokens] @ gate.T) * (x[tokens] @ up.T)
            out.index_add_(0, tokens, hidden @ down.T * weights[tokens, places, None])
        return out

    def block(self, x: Tensor, layer: int) -> Tensor:
        """The MoE half of a layer: norm, router, experts, without the residual."""
        path = f"model.layers.{layer}"
        return self.moe(rms_norm(x, self.get(f"{path}.post_attention_layernorm"), self.eps), f"{path}.mlp")

    def logits(self, ids: Tensor) -> Tensor:
        """[T, vocabulary] for the tokens of one sequence."""
        x = self.get("model.embed_tokens")[ids]
        for layer in range(self.config["num_hidden_layers"]):
            path = f"model.layers.{layer}"
            x = x + self.attention(rms_norm(x, self.get(f"{path}.input_layernorm"), self.eps), f"{path}.self_attn")
            x = x + self.block(x, layer)
        return rms_norm(x, self.get("model.norm"), self.eps) @ self.get("lm_head").T
