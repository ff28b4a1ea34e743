"""The model card of an output that goes to the Hub: the source's own, and a section on what convert did."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nvfp4prep.errors import EnvironmentFault, UsageFault
from nvfp4prep.manifest import MANIFEST, read_manifest

README = "README.md"
_BEGIN, _END = "<!-- nvfp4prep: begin -->", "<!-- nvfp4prep: end -->"
_SECTION = re.compile(f"\n*{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", re.DOTALL)
_CHANGES = (
    ("input_scales_normalised", "input_scale set to one value per layer and GEMM: {} GEMMs"),
    ("pairs_unified", "weight_scale_2 unified, with rescaled block scales: {} gate/up pairs and fusion groups"),
    ("scales_widened_to_f32", "scales widened to fp32: {}"),
    ("scales_reshaped", "scales reshaped: {}"),
)


def read_manifests(out: Path) -> dict[str, Mapping[str, Any]]:
    """The manifest of an output of convert, under "", or of each target's folder in it.

    Raises:
        UsageFault: it is no output of convert.
    """
    if not out.is_dir():
        raise UsageFault(f"{out}: no such directory; give an output of convert")
    folders = [out, *sorted(path for path in out.iterdir() if path.is_dir())]
    found = {path: manifest for path in folders if (manifest := read_manifest(path)[0]) is not None}
    if out in found:
        return {"": found[out]}
    if not found:
        raise UsageFault(f"{out}: holds no {MANIFEST}, so it is no output of convert")
    return {path.name: manifest for path, manifest in found.items()}


def card(out: Path) -> str:
    """The text of README.md for an output of convert. Raises as `read_manifests`, and EnvironmentFault."""
    found = read_manifests(out)
    own = next((path for folder in ("", *found) if (path := out / folder / README).is_file()), None)
    try:
        text = None if own is None else own.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{own}: can't be read: {error}") from None
    section = f"{_BEGIN}\n{_section(found)}\n{_END}\n"
    if text is None:
        return f"{_front_matter(found)}\n# {_title(found)}\n\n{section}"
    kept = _SECTION.sub("\n\n", text).rstrip()
    return f"{kept}\n\n{section}" if kept else section


def _front_matter(found: Mapping[str, Mapping[str, Any]]) -> str:
    source = next(iter(found.values()))["source"]
    lines = ["---"]
    if source.get("revision") and "/" in str(source.get("name")):
        lines += [f"base_model: {source['name']}", "base_model_relation: quantized"]
    tags = dict.fromkeys(["nvfp4prep", *(str(manifest["target"]) for manifest in found.values())])
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""])


def _title(found: Mapping[str, Mapping[str, Any]]) -> str:
    return f"{_plain(next(iter(found.values()))['source'].get('name'))}, converted with nvfp4prep"


def _section(found: Mapping[str, Mapping[str, Any]]) -> str:
    parts = ["## Converted with nvfp4prep"]
    for folder, manifest in found.items():
        if folder:
            parts.append(f"### {_plain(folder)}")
        parts += [_facts(manifest), *_runs(manifest)]
    place = MANIFEST if "" in found else f"each folder's {MANIFEST}"
    parts.append(f"{place} has every scale before and after, all findings, and the digest of each file.")
    return "\n\n".join(parts)


def _facts(manifest: Mapping[str, Any]) -> str:
    source, packed = manifest["source"], manifest.get("packed")
    revision = f" at `{_plain(source['revision'])}`" if source.get("revision") else ""
    rows = [("Source", f"{_plain(source.get('name'))}{revision}"), ("Target", f"`{_plain(manifest.get('target'))}`")]
    if isinstance(packed, Mapping):
        rows += [
            ("Layout", f"`{_plain(packed.get('layout'))}`, kernel `{_plain(packed.get('kernel'))}`"),
            ("Engine", f"{_plain(packed.get('engine'))} {_plain(packed.get('engine_version'))}"),
            ("Ranks", f"TP {_plain(packed.get('tp'))}, EP {_plain(packed.get('ep'))}"),
            ("Activations", _plain(packed.get("activation_dtype"))),
        ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _runs(manifest: Mapping[str, Any]) -> list[str]:
    """What each run did, the last one last."""
    parts = []
    for run in manifest["runs"]:
        if not isinstance(run, Mapping):
            continue
        options = _mapping(run.get("options"))
        chosen = ", ".join(f"{key} {_plain(value)}" for key, value in options.items() if key != "target")
        lines = [f"nvfp4prep {_plain(run.get('nvfp4prep'))}, target {_plain(options.get('target'))} ({chosen}):", ""]
        done = _done(run)
        parts.append("\n".join([*lines, *(f"- {line}" for line in done or ["no value was changed"])]))
    return parts


def _done(run: Mapping[str, Any]) -> list[str]:
    changes = _mapping(run.get("changes"))
    lines = [text.format(f"{changes[key]:,}") for key, text in _CHANGES if _count(changes.get(key))]
    recast = _mapping(changes.get("recast"))
    lines += [f"{_plain(what)}: {_plain(count)} tensors" for what, count in recast.items()]
    imputed = _sequence(changes.get("imputed"))
    ones = sum(str(name).endswith("pre_quant_scale") for name in imputed)
    if scales := len(imputed) - ones:
        lines.append(f"input_scale filled in, the layer's maximum: {scales:,}")
    if ones:
        lines.append(f"pre_quant_scale filled in, ones: {ones:,}")
    if folded := _mapping(run.get("folded")):
        lines.append(f"pre_quant_scale folded into norms and scales: {len(folded):,} MoE layers")
    if rows := _mapping(run.get("block_scales_folded")):
        told = [_mapping(one).get("inexact") for one in rows.values()]
        inexact = sum(count for count in told if type(count) is int)
        lines.append(
            f"down's pre_quant_scale folded into block scales of {len(rows):,} MoE layers: {inexact:,} rounded"
        )
    if flushed := _mapping(run.get("block_scales_flushed")):
        lost = sum(count for count in flushed.values() if _count(count))
        lines.append(f"block scales that the layout has no code for, written as zero: {lost:,}")
    rounding = _mapping(run.get("rounding"))
    lines += [f"rounded, {_plain(kind)}: largest relative error {_plain(error)}" for kind, error in rounding.items()]
    exclude = _mapping(changes.get("exclude_list"))
    if any(_sequence(names) for names in exclude.values()):
        counts = ", ".join(f"{len(_sequence(names))} {_plain(kind)}" for kind, names in exclude.items() if names)
        lines.append(f"exclude list rebuilt ({counts})")
    return lines


def _count(value: object) -> bool:
    return type(value) is int and value > 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _plain(value: object) -> str:
    """A value of a manifest as one line of text that no table or tag can break."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
