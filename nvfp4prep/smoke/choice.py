"""Which MoE layers the check runs on, by what was asked for."""

from __future__ import annotations

from collections.abc import Sequence

from nvfp4prep.errors import UsageFault
from nvfp4prep.schema import MoeLayer


def chosen_layers(layers: Sequence[MoeLayer], asked: str | tuple[int, ...]) -> list[MoeLayer]:
    """The MoE layers to check.

    Args:
        layers: all that can be.
        asked: "all", "first-last", or layer numbers.

    Raises:
        UsageFault: a number that is none of them.
    """
    if asked == "all":
        return list(layers)
    if asked == "first-last":
        return [layers[0], layers[-1]] if len(layers) > 1 else list(layers)
    numbers = {moe.layer: moe for moe in layers}
    unknown = [number for number in asked if number not in numbers]
    if unknown:
        there = ", ".join(map(str, numbers))
        raise UsageFault(f"layer {unknown[0]} has no experts for the smoke check; these layers have: {there}")
    return [numbers[int(number)] for number in asked]
