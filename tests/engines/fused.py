"""Llama-4's fused tensors as per-expert ones: each engine's own code for that model is not what is tested here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor


def per_expert(tensors: Iterable[tuple[str, Tensor]], experts: int) -> Iterator[tuple[str, Tensor]]:
    """Fused weights and block scales are [E, K, N], gate columns before up columns; scales are one value for all."""
    for name, value in tensors:
        container, _, rest = name.partition(".experts.")
        projection, _, param = rest.partition("_proj")
        if projection not in ("gate_up", "down"):
            yield name, value
            continue
        for expert in range(experts):
            mine = value[expert].T if value.ndim == 3 else value
            halves = {"down": mine}
            if projection == "gate_up":
                columns = mine.shape[0] // 2 if mine.ndim else 0
                halves = {"gate": mine[:columns] if mine.ndim else mine, "up": mine[columns:] if mine.ndim else mine}
            for half, part in halves.items():
                yield f"{container}.experts.{expert}.{half}_proj.{param.removeprefix('_') or 'weight'}", part
