"""What a checkpoint holds: linears by format, MoE layers, fusion groups, from names, dtypes and shapes alone.

What is stored decides a module's format; the configuration is compared with it elsewhere (`quant_config`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import chain, islice
from typing import Any, Literal

from nvfp4prep.dialects import (
    FUSION_GROUPS,
    QUANT_PARAMS,
    Dialect,
    Role,
    layer_number,
    natural_key,
    odd_expert_id,
    role_of,
)
from nvfp4prep.findings import Finding, counted, gaps
from nvfp4prep.header import TensorInfo, short
from nvfp4prep.model_config import expert_count

GROUP_SIZE = 16
"""NVFP4: one E4M3 block scale for 16 values along the input dimension."""

MAX_SIDE = 1 << 24
"""Rows or columns of a quantised linear: one row of it is always in memory."""
MAX_EXPERTS = 1 << 14
"""Of a fused tensor: there are scalars of each in memory."""
MAX_EXPERT_WEIGHTS = 1 << 29
"""Rows times columns of one expert's linear, which is packed as a whole. Six times the largest of today."""

FLOAT_DTYPES = frozenset({"F32", "BF16", "F16"})
_MAX_LISTED = 64
SCALAR_PARAMS = ("weight_scale_2", "input_scale")


class Format(Enum):
    """How a linear's weight is stored."""

    NVFP4 = "NVFP4"
    FP8 = "FP8"
    INT4 = "int4"
    UNQUANTIZED = "unquantized"
    UNCLASSIFIED = "unclassified"


GateUpOrder = Literal["halves", "interleaved"]
"""Columns of a fused gate_up tensor: all gates then all ups (Llama-4), or gate, up, gate, up (gpt-oss)."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A module with a weight.

    `params` maps weight, weight_scale, weight_scale_2, input_scale, pre_quant_scale, bias, ... to what is stored.
    `rows` x `columns` is the logical weight (outputs x inputs) of one expert; `experts` is E for a fused tensor.
    `expert` is the expert's id in the name, if any.
    """

    module: str
    format: Format
    params: Mapping[str, TensorInfo]
    rows: int = 0
    columns: int = 0
    experts: int | None = None
    separator: str = "."
    expert: int | None = None

    @property
    def layer(self) -> int | None:
        return layer_number(self.module)

    @property
    def group_size(self) -> int:
        """Columns that share a block scale (NVFP4) or group scale (int4)."""
        return self.columns // self.params["weight_scale"].shape[1] if self.format is Format.INT4 else GROUP_SIZE

    def tensor_name(self, param: str) -> str:
        """The name of a parameter in the checkpoint's dialect, also of one that is not stored."""
        if param in self.params:
            return self.params[param].name
        return self.module + self.separator + param if self.module else param


@dataclass(frozen=True, slots=True)
class Expert:
    """The linears of one routed expert; `gate` is None when not gated."""

    id: int
    gate: Linear | None
    up: Linear
    down: Linear

    @property
    def w13(self) -> tuple[Linear, ...]:
        return (self.gate, self.up) if self.gate else (self.up,)


@dataclass(frozen=True)  # no slots: what all experts say is asked for each of them, and kept
class MoeLayer:
    """One MoE block: per-expert linears in `experts`, or `gate_up` and `down` fused over all experts.

    `intermediate` is I and `hidden` is H of the routed experts.
    """

    path: str
    format: Format
    expert_count: int
    hidden: int
    intermediate: int
    gated: bool
    experts: tuple[Expert, ...] = ()
    gate_up: Linear | None = None
    down: Linear | None = None
    order: GateUpOrder | None = None

    @property
    def layer(self) -> int | None:
        return layer_number(self.path)

    @property
    def container(self) -> str:
        """The module that holds the experts; engines look it up in exclude lists and quantized_layers."""
        return self.path + ".experts"

    @cached_property
    def w13(self) -> tuple[Linear, ...]:
        """All linears that read the MoE block's input."""
        return (self.gate_up,) if self.gate_up else tuple(linear for expert in self.experts for linear in expert.w13)

    @cached_property
    def w2(self) -> tuple[Linear, ...]:
        """All down projections."""
        return (self.down,) if self.down else tuple(expert.down for expert in self.experts)

    @cached_property
    def biased(self) -> bool:
        """Whether any of the experts' linears has a bias."""
        return any("bias" in linear.params for linear in (*self.w13, *self.w2))


def lacking_factors(moe: MoeLayer) -> dict[str, tuple[tuple[Linear, ...], TensorInfo]]:
    """By GEMM, w13 or w2: linears without a pre_quant_scale, and the first that others of the GEMM have.

    GEMMs where all linears have one, or none has, are left out.
    """
    found = {}
    for gemm, linears in (("w13", moe.w13), ("w2", moe.w2)):
        without = tuple(linear for linear in linears if "pre_quant_scale" not in linear.params)
        if without and len(without) < len(linears):
            sibling = next(linear.params["pre_quant_scale"] for linear in linears if "pre_quant_scale" in linear.params)
            found[gemm] = (without, sibling)
    return found


@dataclass(frozen=True, slots=True)
class FusionGroup:
    """Linears outside the experts that engines fuse, all of one 4-bit format."""

    members: tuple[Linear, ...]

    @property
    def format(self) -> Format:
        return self.members[0].format

    @property
    def label(self) -> str:
        parent = self.members[0].module.rpartition(".")[0]
        return f"{parent}.{{{','.join(member.module.rpartition('.')[2] for member in self.members)}}}"


@dataclass(frozen=True, slots=True)
class Schema:
    """Everything the plan needs to know about a checkpoint's contents."""

    linears: Mapping[str, Linear]
    moe_layers: tuple[MoeLayer, ...]
    fusion_groups: tuple[FusionGroup, ...]
    expert_of: Mapping[str, tuple[str, int]]
    findings: tuple[Finding, ...]

    def of_format(self, wanted: Format) -> Iterator[Linear]:
        return (linear for linear in self.linears.values() if linear.format is wanted)

    @property
    def nvfp4_groups(self) -> tuple[FusionGroup, ...]:
        """The fusion groups whose members need one weight_scale_2."""
        return tuple(group for group in self.fusion_groups if group.format is Format.NVFP4)

    def layers_of(self, *formats: Format) -> tuple[MoeLayer, ...]:
        """MoE layers whose experts have one of some formats."""
        return tuple(moe for moe in self.moe_layers if moe.format in formats)

    @property
    def nvfp4_layers(self) -> tuple[MoeLayer, ...]:
        """The MoE layers with NVFP4 experts: those that scales are resolved for, and that are packed."""
        return self.layers_of(Format.NVFP4)


def build_schema(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Schema:
    """Classify every tensor.

    Args:
        tensors: from the headers.
        config: config.json, for the expert count and the order of fused gate/up columns.

    Returns:
        A Schema; what is wrong is in its findings, errors among them.
    """
    findings: list[Finding] = []
    stored: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    roles: dict[str, Role] = {}
    for tensor in tensors.values():
        role = role_of(tensor.name)
        twin = stored[role.module].get(role.param)
        if twin is not None or roles.setdefault(role.module, role).dialect is not role.dialect:
            other = twin or next(iter(stored[role.module].values()))
            message = f"stands for the same module as {other.name}; one of the two has to go"
            findings.append(
                Finding("module-named-twice", "error", message, tensor.file, tensor.name, layer_number(role.module))
            )
            continue
        stored[role.module][role.param] = tensor
    strangers = (params.values() for module, params in stored.items() if roles[module].expert is None)
    _odd_ids(chain.from_iterable(strangers), findings)
    linears: dict[str, Linear] = {}
    for module, params in stored.items():
        linear = _classify(roles[module], params, findings)
        if linear is not None:
            linears[module] = linear
    _unusable_experts(stored, roles, linears, findings)
    moe_layers = _moe_layers(linears, roles, config, findings)
    fusion_groups = _fusion_groups(linears, roles, findings)
    expert_of = {
        linear.module: (moe.path, expert.id)
        for moe in moe_layers
        for expert in moe.experts
        for linear in (*expert.w13, expert.down)
    }
    return Schema(linears, moe_layers, fusion_groups, expert_of, tuple(findings))


# --- one module -----------------------------------------------------------------------------------------------------


def _classify(role: Role, params: Mapping[str, TensorInfo], findings: list[Finding]) -> Linear | None:
    """The Linear of a module, or None for a module without a weight matrix. Appends findings."""
    layer = layer_number(role.module)
    experts = () if role.expert is None else (role.expert,)
    separator = role.dialect.separator if role.dialect else "."

    def make(form: Format, rows: int = 0, columns: int = 0, count: int | None = None) -> Linear:
        return Linear(role.module, form, params, rows, columns, count, separator, role.expert)

    def find(rule: str, message: str, tensor: TensorInfo, severity: Literal["error", "warning"] = "error") -> None:
        findings.append(Finding(rule, severity, message, tensor.file, tensor.name, layer, experts))

    weight = params.get("weight")
    sidecars = [params[param] for param in QUANT_PARAMS if param in params]
    if weight is None:
        for tensor in sidecars:
            find("scale-without-weight", "no weight uses this scale; the weight is missing or has another name", tensor)
        return None
    if weight.dtype in FLOAT_DTYPES or weight.dtype == "F64":
        for tensor in sidecars:
            find("scale-without-weight", f"the weight beside this scale is {weight.dtype}, not quantised", tensor)
        if len(weight.shape) < 2:
            return None
        if _is_fused(role) and len(weight.shape) == 3:
            return make(Format.UNQUANTIZED, weight.shape[2], weight.shape[1], weight.shape[0])
        return make(Format.UNQUANTIZED, *weight.shape[:2])
    scale = params.get("weight_scale")
    if weight.dtype == "F8_E4M3":
        return make(Format.FP8, *weight.shape[-2:]) if len(weight.shape) >= 2 else None
    if weight.dtype == "U8" and scale is None:
        if "weight_scale_2" in params or role.moe is not None:
            find("block-scale-missing", "the packed weight has no weight_scale; export or download it again", weight)
        else:
            find("unclassified", "U8 without a weight_scale; kept as it is", weight, "warning")
        return make(Format.UNCLASSIFIED)
    if weight.dtype == "U8" and scale is not None and scale.dtype == "F8_E4M3":
        sizes = _nvfp4_sizes(role, params, find)
        fits = sizes is not None and _fits_memory(role, params, *sizes, find)
        return make(Format.NVFP4, *sizes) if sizes and fits else make(Format.UNCLASSIFIED)
    if weight.dtype == "U8" and scale is not None and scale.dtype in FLOAT_DTYPES:
        fitting = _int4_sizes(params, find)
        fits = fitting is not None and _fits_memory(role, params, *fitting, None, find)
        return make(Format.INT4, *fitting) if fitting and fits else make(Format.UNCLASSIFIED)
    if sidecars and weight.dtype == "U8":
        assert scale is not None
        find(
            "block-scale-dtype",
            f"{scale.dtype} {list(scale.shape)} where NVFP4 has F8_E4M3 and int4 a float; "
            "scales already swizzled for a kernel can't be converted: start from the logical checkpoint",
            scale,
        )
    elif role.moe is None and (sidecars or len(weight.shape) >= 2):  # _unusable_experts tells the others
        find(
            "unclassified",
            f"{weight.dtype} {list(weight.shape)}: a format nvfp4prep does not know; kept as it is",
            weight,
            "warning",
        )
    return make(Format.UNCLASSIFIED)


def _is_fused(role: Role) -> bool:
    return role.dialect is not None and role.dialect.fused


def _nvfp4_sizes(role: Role, params: Mapping[str, TensorInfo], find: Any) -> tuple[int, int, int | None] | None:
    """Rows, columns and expert count of an NVFP4 linear, or None after a finding."""
    weight, scale = params["weight"], params["weight_scale"]
    fused = _is_fused(role)
    if len(weight.shape) != (3 if fused else 2) or 0 in weight.shape:
        find(
            "weight-shape", f"{list(weight.shape)} where {'[E, K/2, N]' if fused else '[N, K/2]'} was expected", weight
        )
        return None
    if fused:
        experts, half, rows = weight.shape
        expected: tuple[int, ...] = (experts, half * 2 // GROUP_SIZE, rows)
    else:
        experts, (rows, half) = None, weight.shape
        expected = (rows, half * 2 // GROUP_SIZE)
    if half * 2 % GROUP_SIZE:
        find("weight-shape", f"{half * 2} inputs are no multiple of NVFP4's group of {GROUP_SIZE}", weight)
        return None
    if scale.shape != expected:
        find(
            "block-scale-shape",
            f"{list(scale.shape)} where {list(expected)} belongs to the weight {list(weight.shape)}; "
            "padded or swizzled block scales can't be converted: start from the logical checkpoint",
            scale,
        )
        return None
    if "weight_scale_2" not in params:
        find(
            "global-scale-missing",
            "no weight_scale_2; without it the weight can't be dequantised: export it again",
            weight,
        )
        return None
    return (rows, half * 2, experts) if _scalars_fit(params, scale_shapes(experts, role.projection), find) else None


def _int4_sizes(params: Mapping[str, TensorInfo], find: Any) -> tuple[int, int] | None:
    """Rows and columns of an int4 linear, or None after a finding: U8 [N/2, K], group scales [N, K/g]."""
    weight, scale = params["weight"], params["weight_scale"]
    if len(weight.shape) != 2 or 0 in weight.shape:
        find("weight-shape", f"{list(weight.shape)} where int4 has [N/2, K]", weight)
        return None
    rows, columns = weight.shape[0] * 2, weight.shape[1]
    if scale.shape == (weight.shape[0], weight.shape[1] * 2 // GROUP_SIZE):
        find("block-scale-dtype", f"{scale.dtype} block scales where NVFP4 has F8_E4M3; export again", scale)
        return None
    if len(scale.shape) != 2 or scale.shape[0] != rows or not scale.shape[1] or columns % scale.shape[1]:
        find(
            "block-scale-shape",
            f"{list(scale.shape)} where [{rows}, {columns} / group size] belongs to the int4 weight "
            f"{list(weight.shape)} (two rows to a byte); only whole groups can be converted",
            scale,
        )
        return None
    if "input_scale" in params and "weight_scale_2" not in params:
        find("global-scale-missing", "an input_scale (W4A8) but no weight_scale_2; export it again", weight)
        return None
    return (rows, columns) if _scalars_fit(params, scale_shapes(None, None), find) else None


def _fits_memory(
    role: Role, params: Mapping[str, TensorInfo], rows: int, columns: int, experts: int | None, find: Any
) -> bool:
    """Whether what is read of a linear in one go is of a size that a model may have; a finding otherwise."""
    weight, factors = params["weight"], params.get("pre_quant_scale")
    whole = role.moe is not None and rows * columns > MAX_EXPERT_WEIGHTS
    if max(rows, columns) > MAX_SIDE or (experts or 0) > MAX_EXPERTS or whole:
        find("weight-shape", f"{list(weight.shape)} is far larger than any model's", weight)
        return False
    if factors is not None and math.prod(factors.shape) > columns * (experts or 1):
        find("scale-shape", f"{list(factors.shape)} for {columns} inputs", factors)
        return False
    return True


def _scalars_fit(params: Mapping[str, TensorInfo], allowed: Sequence[tuple[int, ...]], find: Any) -> bool:
    """Whether weight_scale_2 and input_scale have a dtype and shape that is understood; a finding otherwise."""
    for tensor in (params[param] for param in SCALAR_PARAMS if param in params):
        if tensor.dtype not in FLOAT_DTYPES:
            find("scale-dtype", f"{tensor.dtype} where F32, BF16 or F16 was expected", tensor)
            return False
        if tensor.shape not in allowed:
            shapes = ", ".join(str(list(shape)) for shape in allowed)
            find("scale-shape", f"shape {list(tensor.shape)}; expected one of {shapes}", tensor)
            return False
    return True


def scale_shapes(experts: int | None, projection: str | None) -> tuple[tuple[int, ...], ...]:
    """Shapes in which a weight_scale_2 or input_scale is understood; `experts` is E of a fused tensor, else None."""
    if experts is None:
        return (), (1,), (1, 1)
    shapes: tuple[tuple[int, ...], ...] = (), (1,), (experts,), (experts, 1)
    return (*shapes, (experts, 2)) if projection == "gate_up" else shapes


def _odd_ids(tensors: Iterable[TensorInfo], findings: list[Finding]) -> None:
    """An error for each MoE block with experts counted as `00` or `٣`: engines and we would take them for others.

    Args:
        tensors: of modules that are not one expert's.
    """
    odd: dict[str, list[tuple[TensorInfo, str]]] = defaultdict(list)
    for tensor in tensors:
        found = odd_expert_id(tensor.name)
        if found is not None:
            odd[found[0]].append((tensor, found[1]))
    for path, named in odd.items():
        tensor, label = named[0]
        message = (
            f"{label!a} is no expert id ({counted(len(named), 'such name')}); ids are 0, 1, 2 and so on, without "
            "leading zeros"
        )
        findings.append(Finding("expert-id", "error", message, tensor.file, tensor.name, layer_number(path)))


def _unusable_experts(
    stored: Mapping[str, Mapping[str, TensorInfo]],
    roles: Mapping[str, Role],
    linears: Mapping[str, Linear],
    findings: list[Finding],
) -> None:
    """Errors for experts whose weight has no known format and that no finding names yet, one for each block and form.

    One expert that is passed over would switch off its whole layer: it would be copied with its scales as they are.
    """
    told = {finding.tensor for finding in findings if finding.severity == "error"}
    odd: dict[tuple[str, str], list[tuple[TensorInfo, int | None]]] = defaultdict(list)
    for module, params in stored.items():
        path, linear = roles[module].moe, linears.get(module)
        if path is None or (linear is not None and linear.format is not Format.UNCLASSIFIED):
            continue
        if any(tensor.name in told for tensor in params.values()):
            continue
        weight = params.get("weight")
        form = f"{weight.dtype} {list(weight.shape)}" if weight else f"no weight but {', '.join(sorted(params))}"
        odd[path, form].append((weight or next(iter(params.values())), roles[module].expert))
    for (path, form), members in odd.items():
        tensor = members[0][0]
        experts = tuple(sorted({expert for _, expert in members if expert is not None}))
        message = f"{len(members)} of the experts' linears hold {form}: a format nvfp4prep does not know"
        findings.append(
            Finding("unclassified", "error", message, tensor.file, tensor.name, layer_number(path), experts)
        )


# --- MoE layers ----------------------------------------------------------------------------------------------------


def gate_up_order(config: Mapping[str, Any]) -> GateUpOrder | None:
    """Order of fused gate/up columns by config.json's model_type; None for a model type nvfp4prep does not know."""
    model_type = str(config.get("model_type", ""))
    if model_type.startswith("gpt_oss"):
        return "interleaved"
    return "halves" if model_type.startswith("llama4") else None


def _moe_layers(
    linears: Mapping[str, Linear], roles: Mapping[str, Role], config: Mapping[str, Any], findings: list[Finding]
) -> tuple[MoeLayer, ...]:
    blocks: dict[str, list[Linear]] = defaultdict(list)
    for module, linear in linears.items():
        path = roles[module].moe
        if path is not None:
            blocks[path].append(linear)
    layers = []
    for path in sorted(blocks, key=natural_key):
        dialects = {roles[linear.module].dialect for linear in blocks[path]}
        if len(dialects) > 1:
            names = " and ".join(sorted(dialect.name for dialect in dialects if dialect))
            findings.append(
                Finding(
                    "mixed-dialects", "error", f"experts of {path} use the names of {names}", layer=layer_number(path)
                )
            )
            continue
        dialect = dialects.pop()
        assert dialect is not None
        build = _fused_layer if dialect.fused else _per_expert_layer
        layer = build(path, blocks[path], roles, config, findings)
        if layer is not None:
            layers.append(layer)
    return tuple(layers)


def _one_format(path: str, linears: Sequence[Linear], findings: list[Finding]) -> Format | None:
    formats = defaultdict(list)
    for linear in linears:
        formats[linear.format].append(linear)
    if len(formats) == 1:
        return linears[0].format
    fewest = min(formats.values(), key=len)
    tensor = fewest[0].params["weight"]
    counts = ", ".join(f"{len(members)} {kind.value}" for kind, members in formats.items())
    findings.append(
        Finding(
            "mixed-experts",
            "error",
            f"linears of one MoE layer differ in format ({counts}); one fused kernel can't read them",
            tensor.file,
            tensor.name,
            layer_number(path),
        )
    )
    return None


def _per_expert_layer(
    path: str, linears: Sequence[Linear], roles: Mapping[str, Role], config: Mapping[str, Any], findings: list[Finding]
) -> MoeLayer | None:
    layer = layer_number(path)

    before = len(findings)

    def error(rule: str, message: str, experts: Sequence[int] = ()) -> None:
        findings.append(Finding(rule, "error", f"{path}: {message}", layer=layer, experts=tuple(experts)))

    table: dict[int, dict[str, Linear]] = defaultdict(dict)
    for linear in linears:
        role = roles[linear.module]
        assert role.expert is not None and role.projection is not None
        table[role.expert][role.projection] = linear
    expected = expert_count(config) or max(table) + 1
    absent = gaps(table, max(expected, max(table) + 1))
    if absent or len(table) != expected:
        listed = ", ".join(
            str(gap.start) if gap.stop == gap.start + 1 else f"{gap.start}-{gap.stop - 1}"
            for gap in absent[:_MAX_LISTED]
        )
        if len(absent) > _MAX_LISTED:
            listed += " and more"
        error(
            "expert-missing",
            f"{counted(len(table), 'expert')} stored, {expected} expected"
            + (f"; missing: {listed}" if absent else "; correct config.json, which names fewer"),
            tuple(islice(chain.from_iterable(absent), _MAX_LISTED)),
        )
    gated = any("gate" in projections for projections in table.values())
    wanted = ("gate", "up", "down") if gated else ("up", "down")
    for projection in wanted:
        without = [expert for expert in sorted(table) if projection not in table[expert]]
        if without:
            error("projection-missing", f"no usable {projection} projection", without)
    if len(findings) > before:
        return None
    kind = _one_format(path, linears, findings)
    if kind is None:
        return None
    hidden, intermediate = table[0]["down"].rows, table[0]["up"].rows
    if kind is not Format.UNCLASSIFIED:
        odd = [
            expert
            for expert, projections in table.items()
            if any((projections[p].rows, projections[p].columns) != (intermediate, hidden) for p in wanted[:-1])
            or (projections["down"].rows, projections["down"].columns) != (hidden, intermediate)
        ]
        if odd:
            error(
                "expert-shape",
                f"shapes differ from hidden {hidden} and intermediate {intermediate} of expert 0",
                sorted(odd),
            )
            return None
    ordered = [table[i][p] for i in sorted(table) for p in wanted]
    if kind in (Format.NVFP4, Format.INT4) and not _biases_fit(path, ordered, findings):
        return None
    if kind is Format.INT4 and not _global_scales_alike(path, ordered, findings):
        return None
    experts = tuple(Expert(i, table[i].get("gate"), table[i]["up"], table[i]["down"]) for i in sorted(table))
    return MoeLayer(path, kind, len(experts), hidden, intermediate, gated, experts)


def odd_ones(linears: Sequence[Linear], param: str) -> tuple[list[Linear], bool] | None:
    """The fewer of those that have a parameter and those that lack it, and whether these lack it; None if all agree."""
    without = [linear for linear in linears if param not in linear.params]
    having = [linear for linear in linears if param in linear.params]
    if not without or not having:
        return None
    return (without, True) if len(without) <= len(having) else (having, False)


def _biases_fit(path: str, linears: Sequence[Linear], findings: list[Finding]) -> bool:
    """Whether the experts' linears all have a bias that fits, or none has one; appends a finding otherwise."""
    with_bias = [linear for linear in linears if "bias" in linear.params]

    def error(these: Sequence[Linear], message: str) -> bool:
        ids = tuple(sorted({linear.expert for linear in these if linear.expert is not None}))
        name, file = these[0].tensor_name("bias"), these[0].params["weight"].file
        findings.append(Finding("expert-bias", "error", f"{path}: {message}", file, name, layer_number(path), ids))
        return False

    if uneven := odd_ones(linears, "bias"):
        odd, lacking = uneven
        what = "no" if lacking else "a"
        return error(odd, f"{len(odd)} of {len(linears)} linears have {what} bias; kernels take all or none")
    for linear in with_bias:
        bias = linear.params["bias"]
        shape = (linear.rows,) if linear.experts is None else (linear.experts, linear.rows)
        if bias.dtype not in FLOAT_DTYPES:
            return error([linear], f"a bias of {bias.dtype} where F32, BF16 or F16 was expected")
        if bias.shape != shape:
            return error([linear], f"a bias {short(list(bias.shape))} where {list(shape)} belongs to the weight")
    return True


def _global_scales_alike(path: str, linears: Sequence[Linear], findings: list[Finding]) -> bool:
    """Whether all int4 linears of a layer have a weight_scale_2 (W4A8), or none; appends a finding otherwise."""
    uneven = odd_ones(linears, "weight_scale_2")
    if uneven is None:
        return True
    odd, lacking = uneven
    what = "lack" if lacking else "have"
    ids = tuple(sorted({linear.expert for linear in odd if linear.expert is not None}))
    message = (
        f"{path}: {len(odd)} of {len(linears)} linears {what} weight_scale_2: all have one (W4A8) or none (W4A16); "
        "export again"
    )
    file, name = odd[0].params["weight"].file, odd[0].tensor_name("weight_scale_2")
    findings.append(Finding("global-scale-missing", "error", message, file, name, layer_number(path), ids))
    return False


def _fused_layer(
    path: str, linears: Sequence[Linear], roles: Mapping[str, Role], config: Mapping[str, Any], findings: list[Finding]
) -> MoeLayer | None:
    by_projection = {str(roles[linear.module].projection): linear for linear in linears}
    kind = _one_format(path, linears, findings)
    layer = layer_number(path)
    missing = {"gate_up", "down"} - set(by_projection)
    if missing:
        name = linears[0].params["weight"].name
        findings.append(
            Finding(
                "projection-missing",
                "error",
                f"{path}: no usable {min(missing)} projection beside it",
                tensor=name,
                layer=layer,
            )
        )
    if missing or kind is None:
        return None
    gate_up, down = by_projection["gate_up"], by_projection["down"]
    if kind is Format.NVFP4:
        shape = (gate_up.experts, gate_up.columns, gate_up.rows)
        if (down.experts, down.rows, down.columns * 2) != shape:
            message = (
                f"{path}: gate_up is {list(shape)}, down is {[down.experts, down.columns, down.rows]}; they don't fit"
            )
            findings.append(Finding("expert-shape", "error", message, layer=layer))
            return None
        expected = expert_count(config)
        if expected is not None and expected != gate_up.experts:
            findings.append(
                Finding(
                    "expert-missing",
                    "error",
                    f"{path}: {counted(gate_up.experts or 0, 'expert')} stored, {expected} expected",
                    layer=layer,
                )
            )
        if not _biases_fit(path, [gate_up, down], findings):
            return None
    experts = gate_up.experts or 0
    return MoeLayer(
        path, kind, experts, gate_up.columns, gate_up.rows // 2, True, (), gate_up, down, gate_up_order(config)
    )


# --- fusion groups outside the experts -------------------------------------------------------------------------------


def _fusion_groups(
    linears: Mapping[str, Linear], roles: Mapping[str, Role], findings: list[Finding]
) -> tuple[FusionGroup, ...]:
    parents: dict[str, dict[str, Linear]] = defaultdict(dict)
    for module, linear in linears.items():
        if roles[module].moe is None:
            parent, _, name = module.rpartition(".")
            parents[parent][name] = linear
    groups = []
    for parent in sorted(parents, key=natural_key):
        for names in FUSION_GROUPS:
            members = tuple(parents[parent][name] for name in names if name in parents[parent])
            formats_ = {member.format for member in members}
            if len(members) < 2 or not formats_ & {Format.NVFP4, Format.INT4}:
                continue
            if formats_ in ({Format.NVFP4}, {Format.INT4}):
                groups.append(FusionGroup(members))
            elif len(formats_) > 1:
                formats = ", ".join(f"{m.module.rpartition('.')[2]} {m.format.value}" for m in members)
                weight = members[0].params["weight"]
                findings.append(
                    Finding(
                        "mixed-fusion-group",
                        "error",
                        f"engines fuse these linears, but their formats differ: {formats}; quantise them alike",
                        weight.file,
                        weight.name,
                        layer_number(parent),
                    )
                )
    return tuple(groups)


def dialect_of(moe: MoeLayer) -> Dialect:
    """The naming dialect of a MoE layer."""
    dialect = role_of(moe.w2[0].params["weight"].name).dialect
    assert dialect is not None
    return dialect
