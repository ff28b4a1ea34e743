"""Tensor names of routed experts: one table row per naming dialect.

To add a dialect, add a row to DIALECTS; the schema needs nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Projection = Literal["gate", "up", "down", "gate_up"]

QUANT_PARAMS = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")
"""Sidecars of a quantised weight, in ModelOpt's names."""

_NUMBER = "(?:0|[1-9][0-9]{0,8})"
"""A number as exporters write it: ASCII, no leading zero, so that one id has one spelling."""
_MOE = "(?P<moe>(?s:.+))"
_EXPERT = f"(?P<expert>{_NUMBER})"
_PARAM = r"(?P<param>[A-Za-z_]\w*)"
_GATED: Mapping[str, Projection] = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_MIXTRAL: Mapping[str, Projection] = {"w1": "gate", "w3": "up", "w2": "down"}
_FUSED: Mapping[str, Projection] = {"gate_up_proj": "gate_up", "down_proj": "down"}


@dataclass(frozen=True, slots=True, eq=False)
class Dialect:
    """One way to name an expert's tensors.

    `pattern` has the groups moe (path of the MoE block), projection and param, and expert unless `fused`; `module` is
    the same read backwards, for a linear's path. `separator` stands between that and a parameter's name; `weight` is
    the parameter of an empty param.
    """

    name: str
    pattern: re.Pattern[str]
    module: str
    projections: Mapping[str, Projection]
    fused: bool = False
    separator: str = "."

    def tensor_name(self, moe: str, projection: Projection, expert: int | None, param: str) -> str:
        """The name of an expert's tensor: the inverse of `role_of`."""
        label = next(name for name, value in self.projections.items() if value == projection)
        module = self.module.format(moe=moe, projection=label, expert=expert)
        return module if self.fused and param == "weight" else module + self.separator + param


def _names(projections: Mapping[str, Projection]) -> str:
    return rf"(?P<projection>{'|'.join(projections)})"


_EXPERT_FIRST = "{moe}.experts.{expert}.{projection}"
DIALECTS: tuple[Dialect, ...] = (
    # Qwen3-MoE, DeepSeek, GLM, Nemotron-H: experts.3.gate_proj.weight
    Dialect(
        "per-expert",
        re.compile(rf"{_MOE}\.experts\.{_EXPERT}\.{_names(_GATED)}\.{_PARAM}"),
        _EXPERT_FIRST,
        _GATED,
    ),
    # Mixtral: experts.3.w1.weight
    Dialect(
        "mixtral",
        re.compile(rf"{_MOE}\.experts\.{_EXPERT}\.{_names(_MIXTRAL)}\.{_PARAM}"),
        _EXPERT_FIRST,
        _MIXTRAL,
    ),
    # Projection before expert: experts.gate_proj.3.weight
    Dialect(
        "projection-first",
        re.compile(rf"{_MOE}\.experts\.{_names(_GATED)}\.{_EXPERT}\.{_PARAM}"),
        "{moe}.experts.{projection}.{expert}",
        _GATED,
    ),
    # Llama-4, gpt-oss: experts.gate_up_proj, experts.gate_up_proj_weight_scale, experts.gate_up_proj_bias
    Dialect(
        "fused",
        re.compile(rf"{_MOE}\.experts\.{_names(_FUSED)}(?:_(?P<param>{'|'.join(QUANT_PARAMS)}|bias))?"),
        "{moe}.experts.{projection}",
        _FUSED,
        fused=True,
        separator="_",
    ),
)


_ANY_ID = re.compile(rf"(?P<moe>.*)\.experts\.(?:(?:{'|'.join((*_GATED, *_MIXTRAL))})\.)?(?P<id>[^.]+)\..+", re.DOTALL)


def odd_expert_id(name: str) -> tuple[str, str] | None:
    """(path of the MoE block, id) of a name that counts an expert in a way no dialect does: `00`, `+1`, `٣`.

    Such a tensor belongs to an expert, and must not pass for an ordinary module.
    """
    match = _ANY_ID.fullmatch(name) if ".experts." in name else None
    if match is None or re.fullmatch(_NUMBER, match["id"]):
        return None
    a_count = any(c.isnumeric() for c in match["id"]) and not any(c.isalpha() for c in match["id"])
    return (match["moe"], match["id"]) if a_count else None


@dataclass(frozen=True, slots=True)
class Role:
    """What a tensor's name says. `module` + separator + `param` is the name (fused weights: `module` alone)."""

    module: str
    param: str
    moe: str | None = None
    projection: Projection | None = None
    expert: int | None = None
    dialect: Dialect | None = None


def role_of(name: str) -> Role:
    """The role of a tensor: an expert's by the first dialect that matches, else split at the last dot."""
    if ".experts." in name:
        for dialect in DIALECTS:
            match = dialect.pattern.fullmatch(name)
            if match is None:
                continue
            param = match["param"] or "weight"
            module = name if dialect.fused and match["param"] is None else name[: -len(dialect.separator + param)]
            expert = None if dialect.fused else int(match["expert"])
            return Role(module, param, match["moe"], dialect.projections[match["projection"]], expert, dialect)
    module, _, param = name.rpartition(".")
    return Role(module, param)


FUSION_GROUPS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Sibling linears that engines fuse into one GEMM with one scale (vLLM 0.33: `packed_modules_mapping`)."""


def natural_key(name: str) -> str:
    """Sort key that puts layer 2 before layer 10, and numbers before anything else.

    A number becomes NUL, its length as a character, and its digits: a million keys are not much larger than the names.
    """
    return _DIGITS.sub(lambda found: f"\0{chr(len(found[1]))}{found[1]}", name)


_DIGITS = re.compile("0*([0-9]+)")


def layer_number(path: str) -> int | None:
    """The layer number in a module path, or None."""
    match = re.search(rf"\.(?:layers|blocks|h)\.({_NUMBER})(?:\.|$)", "." + path)
    return int(match[1]) if match else None
