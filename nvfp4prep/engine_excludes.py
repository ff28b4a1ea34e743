"""How each engine matches an exclude list: vLLM 0.33.0, SGLang 0.5.23 and TensorRT-LLM, as docs/engines.md says.

An engine asks for its own modules: a linear, a fused linear (q/k/v, gate/up, q_a/kv_a), or the container of a MoE
layer's experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from nvfp4prep.dialects import FUSION_GROUPS, natural_key
from nvfp4prep.patterns import MAX_PATTERN, Budget, compiled, compiling
from nvfp4prep.schema import Format, Schema

Engine = Literal["vllm", "sglang", "trtllm"]
ENGINES: tuple[Engine, ...] = ("vllm", "sglang", "trtllm")

_FUSED_NAMES: dict[tuple[str, ...], dict[Engine, str]] = {
    ("q_proj", "k_proj", "v_proj"): dict.fromkeys(ENGINES, "qkv_proj"),
    ("gate_proj", "up_proj"): dict.fromkeys(ENGINES, "gate_up_proj"),
    ("w1", "w3"): dict.fromkeys(ENGINES, "gate_up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"): {
        "vllm": "fused_qkv_a_proj",
        "sglang": "fused_qkv_a_proj_with_mqa",
        "trtllm": "kv_a_proj_with_mqa",
    },
}
_SGLANG_TAILS = frozenset({"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"})
_SGLANG_MATCHED_SHARDS = frozenset({"qkv_proj", "gate_up_proj"})


@dataclass(frozen=True, slots=True)
class EngineModule:
    """A module as engines build it.

    `stored` are the modules in the checkpoint that it is made of; `names` is what each engine calls it.
    """

    names: dict[Engine, str]
    stored: tuple[str, ...]
    formats: frozenset[Format]
    is_experts: bool = False

    @property
    def quantized(self) -> bool:
        return Format.UNQUANTIZED not in self.formats


def engine_modules(schema: Schema) -> tuple[EngineModule, ...]:
    """What engines build from a checkpoint's linears; routed experts count once, as their container."""
    modules = []
    routed: set[str] = set()
    for moe in schema.moe_layers:
        stored = tuple(linear.module for linear in (*moe.w13, *moe.w2))
        routed.update(stored)
        modules.append(EngineModule(dict.fromkeys(ENGINES, moe.container), stored, frozenset({moe.format}), True))
    parents: dict[str, dict[str, Format]] = defaultdict(dict)
    for linear in schema.linears.values():
        if linear.module not in routed and ".experts." not in linear.module:
            parent, _, name = linear.module.rpartition(".")
            parents[parent][name] = linear.format
    for parent in sorted(parents, key=natural_key):
        prefix = f"{parent}." if parent else ""
        left = dict(parents[parent])
        for group in FUSION_GROUPS:
            members = [name for name in group if name in left]
            if len(members) > 1 and group in _FUSED_NAMES:
                formats = frozenset(left.pop(name) for name in members)
                names = {engine: prefix + name for engine, name in _FUSED_NAMES[group].items()}
                modules.append(EngineModule(names, tuple(prefix + name for name in members), formats))
        modules += [
            EngineModule(dict.fromkeys(ENGINES, prefix + name), (prefix + name,), frozenset({form}))
            for name, form in left.items()
        ]
    return tuple(modules)


class SomeShards(ValueError):
    """An exclude list names some shards of a fused linear and not the others."""


Matcher = Callable[[EngineModule], bool]


def matcher(engine: Engine, entries: Sequence[str]) -> Matcher:
    """A function that says whether `engine` leaves a module unquantised; it raises SomeShards where that would."""
    return {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[engine](entries)


_NAMES, _NAME_LENGTH = 1000, 64  # what the cost of SGLang's regular expressions is estimated for
MAX_COST = 2 * 10**10
"""Of one list for one engine, in nanoseconds. 50,000 names and 1,000 modules come to a third of it."""


def matching_cost(modules: Sequence[EngineModule], entries: Sequence[str]) -> int:
    """About how many nanoseconds a matcher of `entries` takes for all modules: each may be compared with each."""
    names = [
        name for module in modules for name in (module.names["vllm"], *(() if module.is_experts else module.stored))
    ]
    characters = sum(map(len, names))
    special = [entry for entry in entries if re.search(r"[^\w.-]", entry)]
    stars = sum(1 + entry.count("*") for entry in special)
    plain = len(entries) * (100 * len(names) + characters)
    return plain + 20 * sum(map(compiling, special)) + stars * (500 * len(names) + 10 * characters)


def _is_glob(entry: str) -> bool:
    return re.search(r"[*?\[]", entry) is not None and len(entry) <= MAX_PATTERN


def _shards(module: EngineModule, hit: Callable[[str], bool]) -> bool:
    hits = {hit(shard) for shard in module.stored}
    if len(hits) > 1:
        raise SomeShards(module.names["vllm"])
    return hits.pop()


def _vllm(entries: Sequence[str]) -> Matcher:
    exact = frozenset(entries)
    globs = [entry for entry in entries if _is_glob(entry)]
    of_experts = [entry for entry in entries if "experts" in entry]

    def listed(module: EngineModule, name: str) -> bool:
        if len(module.stored) > 1 and not module.is_experts:
            return name in exact or _shards(module, exact.__contains__)
        if "experts" in name:
            return any(name in entry for entry in of_experts)
        return name in exact

    def match(module: EngineModule) -> bool:
        name = module.names["vllm"]
        if listed(module, name):
            return True
        bare = name.removeprefix("language_model.")
        if any(entry in name or (bare != name and entry in bare) for entry in entries if entry != name):
            return True
        return any(fnmatchcase(name, entry) for entry in globs)

    return match


def _sglang_pattern(entry: str, budget: Budget) -> Callable[[str], bool] | None:
    """How SGLang reads an entry: a regular expression whose dots are literal and whose stars stand for anything."""
    if len(entry) > MAX_PATTERN:
        return None
    if re.fullmatch(r"[\w.*-]+", entry):
        return lambda name: fnmatchcase(name, entry)
    found = compiled(entry.replace(".", r"\.").replace("*", r".*"))
    if found is None or not budget.allows(found, _NAMES, _NAME_LENGTH):
        return None
    regex = found.regex
    return lambda name: regex.fullmatch(name) is not None


def _sglang(entries: Sequence[str]) -> Matcher:
    exact = frozenset(entries)
    budget = Budget()
    patterns = [
        found for entry in entries if re.search(r"[^\w.-]", entry) and (found := _sglang_pattern(entry, budget))
    ]
    paths = [f".{entry.rstrip('.')}." for entry in entries]
    tails = {entry.rpartition(".")[2] for entry in entries} & _SGLANG_TAILS

    def below(name: str) -> bool:
        if any(path in f".{name}." for path in paths):
            return True
        return "experts" in name and any(name in entry for entry in entries if "experts" in entry)

    def excluded(name: str) -> bool:
        for prefix in {name, name.removeprefix("language_model.")}:
            parts = [prefix, *prefix.split(".")]
            if not exact.isdisjoint(parts) or any(tail in parts[-1] for tail in tails):
                return True
            if any(pattern(part) for pattern in patterns for part in parts):
                return True
        return False

    def match(module: EngineModule) -> bool:
        name = module.names["sglang"]
        if module.is_experts:
            return excluded(name)
        if name.rpartition(".")[2] in _SGLANG_MATCHED_SHARDS:
            return _shards(module, below) or excluded(name)
        return below(name) or excluded(name)

    return match


def _trtllm(entries: Sequence[str]) -> Matcher:
    exact = frozenset(entries)
    globs = [entry for entry in entries if _is_glob(entry)]

    def hit(name: str) -> bool:
        return name in exact or any(fnmatchcase(name, entry) for entry in globs)

    def match(module: EngineModule) -> bool:
        if not module.is_experts:
            return hit(module.names["trtllm"]) or any(hit(shard) for shard in module.stored)
        name = module.names["trtllm"]
        first = {f"{name}.0.{projection}" for projection in ("gate_proj", "up_proj", "down_proj")}
        return hit(name) or hit(f"{name}.backend") or all(hit(shard) for shard in first)

    return match
