"""An inspection as rich renderables, for people. Data in, renderable out; `cli` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nvfp4prep.engines import TITLES, Outcome, Reason, Verdict
from nvfp4prep.findings import Finding, ranges
from nvfp4prep.inspection import Detail, Inspection, Outlook, linear_scales, other_targets
from nvfp4prep.render import add_row, plain, size
from nvfp4prep.render import findings as finding_lines
from nvfp4prep.scales import fault
from nvfp4prep.scalestats import GroupScales, LayerScales, Pairs, Spread, times
from nvfp4prep.schema import Format

_SHOWN_LAYERS = 12
_FIRST_LAYERS = 3
_WORST_LAYERS = 5
_STYLES: Mapping[Outcome, str] = {"yes": "green", "unknown": "magenta", "wrong": "bold red", "refuses": "yellow"}
_WORDS: Mapping[Outcome, str] = {
    "yes": "yes",
    "unknown": "unknown",
    "wrong": "loads but computes wrong",
    "refuses": "refuses",
}
_FORMATS: Mapping[Format, str] = {Format.UNQUANTIZED: "unquantised", Format.UNCLASSIFIED: "unclassified"}


def inspection(found: Inspection) -> RenderableType:
    """Everything `inspect` shows; one layer's scales instead of all layers' when it was asked for."""
    parts: list[RenderableType] = [_head(found), Text(), _inventory(found)]
    if found.detail is not None:
        parts += [Text(), *_detail(found.detail)]
    elif found.layers or found.groups:
        parts += [Text(), *_scales(found)]
    parts += [Text(), *_engines(found), Text(), *_outlook(found.outlook)]
    if (hint := other_targets(found.checkpoint)) and not (found.outlook.refused and found.outlook.remedy is None):
        parts += [Text(), Text(hint)]
    lines = finding_lines(_other_findings(found), verbose=False)
    if lines:
        parts += [Text(), Text("findings", style="bold"), *map(_Indented, lines)]
    return Group(*parts)


def _other_findings(found: Inspection) -> list[Finding]:
    """Findings that the other sections do not show already."""
    shown = set(map(id, found.outlook.refused))
    return [finding for finding in found.checkpoint.findings if id(finding) not in shown]


@dataclass(frozen=True, slots=True)
class _Indented:
    """A part, indented; where nothing is wrapped (a pipe), whole lines too."""

    part: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        if console.soft_wrap and isinstance(self.part, Text):
            yield Text("  ").append_text(self.part)
        else:
            yield Padding(self.part, (0, 0, 0, 2), expand=False)


def _grid() -> Table:
    return Table.grid(padding=(0, 2))


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


# --- what it is -------------------------------------------------------------------------------------------------------


def _head(found: Inspection) -> RenderableType:
    source, facts, quant = found.checkpoint.source, found.geometry, found.checkpoint.quant
    revision = f"@{source.revision}" if source.revision else ""
    total = size(sum(source.shards.values()))
    files = f"{len(source.shards)} file{'s' if len(source.shards) != 1 else ''}"
    grid = _grid()
    add_row(grid, plain(source.spec + revision, style="bold"), f"{len(source.tensors):,} tensors in {files}, {total}")
    add_row(grid, "architecture", str(facts["architecture"] or facts["model_type"] or "not named by config.json"))
    add_row(grid, "algorithm", _algorithm(found) if quant else "no ModelOpt quantisation config")
    add_row(grid, "layers", f"{facts['layers']}, {len(facts['moe_layers'])} of them MoE")
    if facts["moe_layers"]:
        top = f", top-{facts['top_k']}" if facts["top_k"] else ""
        gated = "" if facts.get("gated", True) else ", not gated"
        fused = f", fused ({facts['fused_gate_up'] or 'gate/up order unknown'})" if _is_fused(found) else ""
        add_row(grid, "experts", f"{facts['experts']}{top}{gated}{fused}")
        add_row(grid, "sizes", f"hidden {facts['hidden_size']}, expert intermediate {facts['intermediate_size']}")
    elif facts["hidden_size"]:
        add_row(grid, "sizes", f"hidden {facts['hidden_size']}")
    if found.checkpoint.manifest is not None:
        add_row(grid, "made by", "nvfp4prep convert; nvfp4prep.json says from what")
    return grid


def _is_fused(found: Inspection) -> bool:
    return any(moe.gate_up is not None for moe in found.checkpoint.schema.moe_layers)


def _algorithm(found: Inspection) -> str:
    quant = found.checkpoint.quant
    assert quant is not None
    cache = f", KV cache {quant.kv_cache}" if quant.kv_cache else ""
    producer = quant.producer or {}
    by = f", by {producer['name']} {producer.get('version', '')}".rstrip() if producer.get("name") else ""
    return f"{quant.algo}{cache}{by}"


def _inventory(found: Inspection) -> RenderableType:
    inventory = found.inventory
    table = _table("stored as", "linears", "of experts", "bytes", "")
    for column in table.columns[1:4]:
        column.justify = "right"
    notes = {
        Format.UNQUANTIZED: f"{inventory.excluded} excluded by the config, {inventory.not_excluded} not"
        if found.checkpoint.exclude is not None
        else "",
        Format.NVFP4: f"{inventory.missing_input_scales} without the input_scale they need"
        if inventory.missing_input_scales
        else "",
    }
    for row in inventory.formats:
        label = _FORMATS.get(row.format, row.format.value)
        add_row(table, label, f"{row.linears:,}", f"{row.routed:,}", size(row.nbytes), notes.get(row.format, ""))
    add_row(
        table,
        "other tensors",
        "",
        "",
        size(inventory.other_bytes),
        f"{inventory.other_tensors:,}: norms, biases, KV scales and the like",
    )
    if not inventory.unclassified:
        add_row(table, "unclassified", "0", "", "", "")
    return table


# --- scales -----------------------------------------------------------------------------------------------------------


def _scales(found: Inspection) -> Iterator[RenderableType]:
    if found.layers:
        weight_only = all(layer.w13.stored == layer.w2.stored == 0 for layer in found.layers)
        yield Text("scales of MoE layers" + (", without input_scale" if weight_only else ""), style="bold")
        shown, hidden = _choose(found.layers)
        yield _pairs_only(shown) if weight_only else _layer_table(shown)
        if hidden:
            yield _rest(hidden)
        yield from _bad_values(found.layers, weight_only)
    if found.groups:
        if found.layers:
            yield Text()
        yield Text("scales of fused linears outside the experts", style="bold")
        yield _groups(found.groups)


def _choose(layers: Sequence[LayerScales]) -> tuple[list[LayerScales], list[LayerScales]]:
    """(layers to show, the rest): all when they are few, else the first three and the five worst."""
    if len(layers) <= _SHOWN_LAYERS:
        return list(layers), []
    worst = sorted(range(_FIRST_LAYERS, len(layers)), key=lambda i: _badness(layers[i]), reverse=True)[:_WORST_LAYERS]
    shown = [*range(_FIRST_LAYERS), *sorted(i for i in worst if _badness(layers[i]) > (0, 1.0, 1.0))]
    return [layers[i] for i in shown], [layer for i, layer in enumerate(layers) if i not in shown]


def _badness(layer: LayerScales) -> tuple[int, float, float]:
    ratio = layer.gate_up.max_ratio if layer.gate_up else 1.0
    return layer.faulty, ratio, max(layer.w13.ratio, layer.w2.ratio)


def _rest(layers: Sequence[LayerScales]) -> Text:
    faulty, ratio, spread = (max(values) for values in zip(*map(_badness, layers), strict=True))
    text = f"and {len(layers)} layers more: "
    if (faulty, ratio, spread) == (0, 1.0, 1.0):
        return Text(text + "input_scale equal in each, gate/up equal, none bad", style="dim")
    return plain(f"{text}input_scale up to {times(spread)} apart, gate/up up to {times(ratio)}", style="dim")


def _name(layer: LayerScales) -> str:
    return layer.moe.path if layer.moe.layer is None else str(layer.moe.layer)


def _layer_table(layers: Sequence[LayerScales]) -> Table:
    spread = ("input_scale", "\nratio", "\nmax at")
    columns = [f"{gemm} {name}" if name == "input_scale" else name for gemm in ("w13", "w2") for name in spread]
    table = _table("\nlayer", *columns, "gate/up\nweight_scale_2")
    for layer in layers:
        add_row(table, _name(layer), *_spread(layer.w13), *_spread(layer.w2), _pairs(layer.gate_up))
    return table


def _pairs_only(layers: Sequence[LayerScales]) -> Table:
    table = _table("layer", "gate/up weight_scale_2")
    for layer in layers:
        add_row(table, _name(layer), _pairs(layer.gate_up))
    return table


def _spread(spread: Spread) -> tuple[str, str, str]:
    """Range, ratio, and the expert of the maximum."""
    if spread.low is None or spread.high is None:
        return ("none" if spread.stored == 0 else "none usable"), "", ""
    if spread.ratio == 1:
        return f"{spread.high:.3g}", "equal" if spread.count > 1 else "", ""
    return f"{spread.low:.3g}..{spread.high:.3g}", times(spread.ratio), "" if spread.top is None else str(spread.top)


def _pairs(pairs: Pairs | None) -> str | Text:
    if pairs is None:
        return "not gated"
    if not pairs.differing:
        return "equal" if pairs.total else "one for both"
    top = f", {times(pairs.max_ratio)} at {pairs.worst}"
    return plain(f"{len(pairs.differing)} of {pairs.total} differ{top}", style="yellow")


def _bad_values(layers: Sequence[LayerScales], weight_only: bool) -> Iterator[Text]:
    lines = [
        f"  layer {_name(layer)}: {fault_}"
        for layer in layers
        for fault_ in (
            *(() if weight_only else _faults("w13 input_scale", layer.w13.faults)),
            *(() if weight_only else _faults("w2 input_scale", layer.w2.faults)),
            *_faults("weight_scale_2", layer.global_faults),
        )
    ]
    if lines:
        yield Text("bad values", style="bold red")
    yield from (plain(line, style="red") for line in lines[:_SHOWN_LAYERS])
    if len(lines) > _SHOWN_LAYERS:
        yield plain(f"  and {len(lines) - _SHOWN_LAYERS} lines more; --json lists all", style="dim")


def _faults(what: str, faults: Mapping[str, tuple[int, tuple[int, ...]]]) -> Iterator[str]:
    for kind, (count, ids) in faults.items():
        where = f", expert{'s' if len(ids) > 1 else ''} {_short(ids)}" if ids else ""
        yield f"{what} {kind} {count}{where}"


def _short(ids: Sequence[int]) -> str:
    """Expert ids, cut after eight runs."""
    runs = ranges(ids).split(", ")
    return ", ".join(runs[:8]) + (" ..." if len(runs) > 8 else "")


def _groups(groups: Sequence[GroupScales]) -> Table:
    table = _table("linears", "groups", "input_scale", "weight_scale_2", "")
    for kind, members in groupby(sorted(groups, key=lambda group: group.kind), key=lambda group: group.kind):
        same = list(members)
        bad = sum(group.input.faulty for group in same if group.input.stored)
        bad += sum(group.globals.faulty for group in same)
        add_row(
            table,
            kind.replace("_proj", ""),
            str(len(same)),
            _agreement([group.input for group in same]),
            _agreement([group.globals for group in same]),
            plain(f"{bad} missing or bad", style="red") if bad else "",
        )
    return table


def _agreement(spreads: Sequence[Spread]) -> str | Text:
    if not any(spread.stored for spread in spreads):
        return "none"
    ratios = [spread.ratio for spread in spreads if spread.ratio > 1]
    if not ratios:
        return "equal in each"
    return plain(f"differs in {len(ratios)}, up to {times(max(ratios))}", style="yellow")


# --- one layer, expert by expert --------------------------------------------------------------------------------------


def _detail(detail: Detail) -> Iterator[RenderableType]:
    yield plain(f"layer {detail.layer}", style="bold")
    if detail.experts:
        yield _expert_table(detail)
        yield Text("* the maximum of its GEMM   ! bad, left out of maxima", style="dim")
    if detail.linears:
        table = _table("linear", "stored as", "input_scale", "weight_scale_2")
        for linear in detail.linears:
            found = linear_scales(detail, linear)
            cells = [
                Text(", ").join([_value(entry.value, None) for entry in found[param]])
                for param in ("input_scale", "weight_scale_2")
            ]
            name = linear.module.partition(f".{detail.layer}.")[2] or linear.module
            add_row(table, name, _FORMATS.get(linear.format, linear.format.value), *cells)
        yield table


def _expert_table(detail: Detail) -> Table:
    inputs = list(dict.fromkeys(name for _, scales, _ in detail.experts for name in scales))
    globals_ = list(dict.fromkeys(name for _, _, scales in detail.experts for name in scales))
    tops = {name: _top(detail, "w2" if name == "down" else "w13") for name in inputs}
    columns = [f"input_scale\n{inputs[0]}", *(f"\n{name}" for name in inputs[1:])] if inputs else []
    columns += [f"weight_scale_2\n{globals_[0]}", *(f"\n{name}" for name in globals_[1:])] if globals_ else []
    table = _table("\nexpert", *columns, "\nup/gate")
    for expert, own, both in detail.experts:
        ratio = _ratio(both)
        add_row(
            table,
            "all" if expert is None else str(expert),
            *(_value(own[name], tops[name]) if name in own else Text() for name in inputs),
            *(_value(both[name], None) if name in both else Text() for name in globals_),
            plain(f"{ratio:.4g}", style="yellow") if ratio not in (None, 1) else "",
        )
    return table


def _top(detail: Detail, gemm: str) -> float | None:
    values = [
        value
        for _, scales, _ in detail.experts
        for name, value in scales.items()
        if (name == "down") == (gemm == "w2") and value is not None and fault(value) is None
    ]
    return max(values) if values and min(values) < max(values) else None


def _ratio(scales: Mapping[str, float | None]) -> float | None:
    gate, up = scales.get("gate"), scales.get("up")
    return None if gate is None or up is None or fault(gate) or fault(up) else up / gate


def _value(value: float | None, top: float | None) -> Text:
    if value is None:
        return Text("missing !", style="bold red")
    if fault(value):
        return plain(f"{value:.4g} !", style="bold red")
    return plain(f"{value:.4g} *", style="bold") if value == top else plain(f"{value:.4g}")


# --- engines and convert ----------------------------------------------------------------------------------------------


def _engines(found: Inspection) -> Iterator[RenderableType]:
    after = {verdict.engine: verdict for verdict in found.outlook.after}
    if all(verdict.outcome == "unknown" for verdict in found.verdicts):
        yield Text("engines", style="bold")
        texts = dict.fromkeys(reason.text for verdict in found.verdicts for reason in verdict.reasons[:1])
        yield plain(f"  {', '.join(TITLES.values())}: unknown; {'; '.join(texts)}", style="magenta")
        return
    option = f" {found.outlook.remedy}" if found.outlook.remedy else ""
    table = _table("engine", "as it stands", f"after convert{option}")
    for verdict in found.verdicts:
        later = after.get(verdict.engine)
        add_row(table, verdict.title, _outcome(verdict), _outcome(later) if later else Text("-", style="dim"))
    yield table
    yield from _reasons(found.verdicts, "")
    left = [verdict for verdict in found.outlook.after if verdict.outcome != "yes"]
    before = {(verdict.engine, reason.id) for verdict in found.verdicts for reason in verdict.reasons}
    fresh = [v for v in left if any((v.engine, r.id) not in before for r in v.reasons if r.outcome == v.outcome)]
    yield from _reasons(fresh, " after convert")
    yield Text("ids as in docs/engines.md; read from the engines' code, not run; ? marks a best reading", style="dim")


def left_after(after: Sequence[Verdict]) -> Iterator[RenderableType]:
    """What engines still do wrong with an output, or refuse; nothing when all say yes."""
    left = [verdict for verdict in after if verdict.outcome != "yes"]
    if left:
        yield Text("This output still can't be served right by every engine (docs/engines.md):", style="yellow")
        yield from _reasons(left, "")


def _outcome(verdict: Verdict) -> Text:
    unsure = "" if verdict.sure or verdict.outcome == "unknown" else "?"
    varies = ", but engines differ" if verdict.varies and verdict.outcome == "yes" else ""
    return Text(_WORDS[verdict.outcome] + unsure + varies, style=_STYLES[verdict.outcome])


def _reasons(verdicts: Iterable[Verdict], when: str) -> Iterator[RenderableType]:
    """The reasons of each engine in short lines: those that are not yes, else what a yes depends on."""
    grid = _grid()
    rows = 0
    for verdict in verdicts:
        chosen = [reason for reason in verdict.reasons if reason.outcome != "yes"]
        chosen = chosen or [reason for reason in verdict.reasons if reason.why]
        for number, reason in enumerate(chosen):
            title = (verdict.title + when) if number == 0 else ""
            add_row(grid, plain(f"  {title}"), _reason(reason))
            rows += 1
    if rows:
        yield grid


def _reason(reason: Reason) -> Text:
    text = Text(reason.outcome + ("" if reason.sure else "?"), style=_STYLES[reason.outcome])
    text.append(f"  {reason.id}", style="bold")
    return text.append(plain(f": {reason.text}") if reason.text else "")


def _outlook(outlook: Outlook) -> Iterator[RenderableType]:
    if outlook.refused and outlook.remedy is None:
        yield Text("convert would refuse it", style="bold")
    elif outlook.refused:
        yield plain(f"convert would refuse it without {outlook.remedy}", style="bold")
    for line in finding_lines(outlook.refused, verbose=False):
        yield _Indented(line)
    if outlook.refused and outlook.remedy is None:
        return
    if outlook.remedy:
        yield plain(f"convert {outlook.remedy} would change", style="bold")
    else:
        yield Text("convert would change", style="bold")
    for change in outlook.changes or ("nothing but the layout of files and configs, and the manifest",):
        yield _Indented(plain(f"- {change}"))
