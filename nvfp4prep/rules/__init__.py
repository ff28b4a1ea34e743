"""Every rule that a finding can name: stable id, what it is about, why it matters, how to fix it.

Ids are never used again for something else. The first digit says what a rule looks at: 0 the path given, 1 shards and
index, 2 configuration, 3 modules and shapes, 4 values of scales, 5 block scales and packed bytes, 6 int4 and AWQ,
7 targets, 8 outputs of nvfp4prep, 9 the smoke check. Each has a module here. What they say of engines holds for vLLM
0.33.0, SGLang 0.5.23 and TensorRT-LLM as docs/engines.md has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nvfp4prep.rules import blocks, configuration, int4, modules, outputs, paths, scales, shards, smoke, targets
from nvfp4prep.rules.rule import LEVELS, SEVERITIES, Level, Rule, Severity

__all__ = ["BY_ID", "BY_NAME", "LEVELS", "RULES", "SEVERITIES", "Level", "Rule", "Severity", "picked"]

RULES: tuple[Rule, ...] = (
    *paths.RULES,
    *shards.RULES,
    *configuration.RULES,
    *modules.RULES,
    *scales.RULES,
    *blocks.RULES,
    *int4.RULES,
    *targets.RULES,
    *outputs.RULES,
    *smoke.RULES,
)
"""By id, ascending."""

BY_NAME: Mapping[str, Rule] = {rule.name: rule for rule in RULES}
BY_ID: Mapping[str, Rule] = {rule.id: rule for rule in RULES}


def picked(words: Iterable[str]) -> frozenset[str]:
    """Names of the rules that words pick: an id, the beginning of ids (NVP4), or a name.

    Raises:
        ValueError: with the word that picks nothing.
    """
    names: set[str] = set()
    for word in words:
        found = {rule.name for rule in RULES if rule.id.startswith(word.upper()) or rule.name == word}
        if not found or not word:
            raise ValueError(word)
        names |= found
    return frozenset(names)
