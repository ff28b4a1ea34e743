"""What config.json says about the model itself, looked up in the text config of multimodal models too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The text config, if there is one, then the whole."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        yield text
    yield config


def number_in(config: Mapping[str, Any], *keys: str) -> int | None:
    """The first size or count under one of `keys`, the text config's before the whole's; None without any.

    What is no positive whole number is passed over.
    """
    for key in keys:
        for section in sections(config):
            value = section.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def expert_count(config: Mapping[str, Any]) -> int | None:
    """Routed experts per layer."""
    for section in sections(config):
        for key in ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts"):
            value = section.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether lm_head is tied to the embedding."""
    return any(section.get("tie_word_embeddings") is True for section in sections(config))
