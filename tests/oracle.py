"""What `convert` must have done, worked out again from the files alone.

Reads with safetensors' own `safe_open`, computes in float64 (an NVFP4 weight has at most 2 + 4 + 24 significant bits,
so this is exact) and shares no code with nvfp4prep.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3_FINITE = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
E4M3 = np.array([*E4M3_FINITE, np.nan, *(-value for value in E4M3_FINITE), np.nan])
SMALLEST_NORMAL = 2.0**-6
FUSION = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
KINDS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
SIDECARS = ("weight_scale", "weight_scale_2", "input_scale")
REWRITTEN = {"config.json", "hf_quant_config.json", "nvfp4prep.json", "model.safetensors.index.json"}


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it. `values` are float64, for float dtypes only."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    tensor: torch.Tensor

    @cached_property
    def raw(self) -> np.ndarray:
        return self.tensor.reshape(-1).contiguous().view(torch.uint8).numpy()

    @property
    def codes(self) -> np.ndarray:
        return self.raw.reshape(self.shape)

    @property
    def values(self) -> np.ndarray:
        assert self.dtype in ("F32", "BF16", "F16")
        return self.tensor.to(torch.float64).numpy().reshape(-1)

    def same(self, other: Stored) -> bool:
        return (self.dtype, self.shape) == (other.dtype, other.shape) and np.array_equal(self.raw, other.raw)


@dataclass(frozen=True)
class Module:
    """A linear stored as NVFP4. `moe`, `expert`, `kind` are set for routed experts; `fused` is all of them in one."""

    name: str
    separator: str
    moe: str | None = None
    expert: int | None = None
    kind: str | None = None

    @property
    def fused(self) -> bool:
        return self.separator == "_"

    @property
    def weight(self) -> str:
        return self.name if self.fused else self.name + ".weight"

    def param(self, name: str) -> str:
        return self.name + self.separator + name


@dataclass(frozen=True)
class View:
    """A checkpoint as files say it."""

    folder: Path
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any]
    hf: Mapping[str, Any] | None

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        return tuple(
            describe(name, separator)
            for name, separator in self._weights()
            if self.tensors[name if separator == "_" else name + ".weight"].dtype == "U8"
        )

    def _weights(self) -> Iterable[tuple[str, str]]:
        for name, stored in self.tensors.items():
            for separator in "._":
                module = name.removesuffix(separator + "weight_scale")
                if module != name and stored.dtype == "F8_E4M3":
                    yield module, separator

    @property
    def order(self) -> str:
        return "interleaved" if self.config["model_type"].startswith("gpt_oss") else "halves"

    def global_rows(self, module: Module) -> np.ndarray:
        """weight_scale_2 for each row of each expert, [E, N] (E is 1 unless fused)."""
        scale = self.tensors[module.param("weight_scale_2")]
        shape = self.tensors[module.weight].shape
        experts, rows = (shape[0], shape[2]) if module.fused else (1, shape[0])
        values = scale.values
        if values.size == 1:
            return np.full((experts, rows), values[0])
        if values.size == experts:
            return np.repeat(values.reshape(-1, 1), rows, axis=1)
        assert scale.shape == (experts, 2), (module.name, scale.shape)
        if self.order == "interleaved":
            return np.tile(values.reshape(experts, 2), (1, rows // 2))
        return np.repeat(values.reshape(experts, 2), rows // 2, axis=1)

    def block_values(self, module: Module) -> np.ndarray:
        """E4M3 block scales [E, N, K/16]."""
        blocks = E4M3[self.tensors[module.param("weight_scale")].codes]
        return blocks.swapaxes(1, 2) if module.fused else blocks[None]

    def nibbles(self, module: Module) -> np.ndarray:
        """e2m1 values [E, N, K]."""
        packed = self.tensors[module.weight].codes
        packed = packed.swapaxes(1, 2) if module.fused else packed[None]
        return E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1)]

    def dequantized(self, module: Module) -> np.ndarray:
        scale = self.block_values(module) * self.global_rows(module)[..., None]
        return self.nibbles(module) * np.repeat(scale, 16, axis=-1)


def describe(name: str, separator: str) -> Module:
    fused = re.fullmatch(r"(.+)\.experts\.(gate_up|down)_proj", name)
    if separator == "_":
        assert fused, name
        return Module(name, separator, fused[1], None, fused[2])
    match = re.fullmatch(r"(.+)\.experts\.(?:(\d+)\.(\w+)|(\w+)\.(\d+))", name)
    if match is None:
        return Module(name, separator)
    return Module(name, separator, match[1], int(match[2] or match[5]), KINDS[match[3] or match[4]])


def read(folder: Path) -> View:
    """Everything stored, through the safetensors library."""
    tensors: dict[str, Stored] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert name not in tensors, f"{name} is stored twice"
                part = file.get_slice(name)
                tensors[name] = Stored(path.name, part.get_dtype(), tuple(part.get_shape()), file.get_tensor(name))
    hf = folder / "hf_quant_config.json"
    return View(
        folder,
        tensors,
        json.loads((folder / "config.json").read_text()),
        json.loads(hf.read_text()) if hf.is_file() else None,
    )


# --- groups ----------------------------------------------------------------------------------------------------------


def dense_group(view: View, module: Module) -> str | None:
    """The label of the fusion group of a linear outside the experts, or None."""
    parent, _, last = module.name.rpartition(".")
    names = {m.name for m in view.modules}
    for group in FUSION:
        members = [name for name in group if f"{parent}.{name}" in names]
        if last in members and len(members) > 1:
            return f"{parent}.{{{','.join(members)}}}"
    return None


def input_groups(view: View) -> dict[tuple[str, str], list[Module]]:
    """(where, gemm) -> the linears that share an input scale."""
    groups: dict[tuple[str, str], list[Module]] = defaultdict(list)
    for module in view.modules:
        if module.moe is not None:
            groups[module.moe, "w2" if module.kind == "down" else "w13"].append(module)
        else:
            groups[dense_group(view, module) or module.name, "input"].append(module)
    return groups


def global_groups(view: View) -> dict[tuple[str, int | None], list[Module]]:
    """(where, expert) -> the linears of one GEMM, which share a weight_scale_2; a fused gate_up is two halves."""
    groups: dict[tuple[str, int | None], list[Module]] = defaultdict(list)
    for module in view.modules:
        if module.moe is not None and module.kind != "down":
            groups[module.moe, module.expert].append(module)
        elif module.moe is None and (label := dense_group(view, module)):
            groups[label, None].append(module)
    return groups


def in_fusion_order(module: Module) -> int:
    """Gate before up, q before k before v, as engines fuse them."""
    if module.kind is not None:
        return ["gate", "up", "gate_up"].index(module.kind)
    last = module.name.rpartition(".")[2]
    return next(group.index(last) for group in FUSION if last in group)


def usable(value: float) -> bool:
    return math.isfinite(value) and value >= 2.0**-126


def canonical_shape(module: Module, stored: tuple[int, ...], experts: int, merged: bool) -> tuple[int, ...]:
    if not module.fused:
        return ()
    return {
        (): (),
        (1,): (),
        (experts,): (experts,),
        (experts, 1): (experts,),
        (experts, 2): (experts,) if merged else (experts, 2),
    }[stored]


# --- checks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choices:
    """The options a conversion ran with, as far as the result depends on them."""

    input_scale: str = "layer-max"
    w13_scale: str = "auto"
    impute: str = "none"

    @property
    def unify(self) -> bool:
        return self.w13_scale != "split"


def check(source: Path, out: Path, choices: Choices) -> None:
    """All that a conversion promises about tensors, configs and files."""
    before, after = read(source), read(out)
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    assert before.modules, "a test without an NVFP4 linear proves nothing"
    check_names(before, after, manifest)
    check_input_scales(before, after, choices, manifest)
    check_global_scales(before, after, choices)
    check_weights(before, after, choices, manifest)
    check_other_tensors(before, after)
    check_configs(before, after)
    check_files(before, after)


def check_names(before: View, after: View, manifest: Mapping[str, Any]) -> None:
    imputed = set()
    for members in input_groups(before).values():
        names = {module.param("input_scale") for module in members}
        if names & before.tensors.keys():
            imputed |= names - before.tensors.keys()
    assert after.tensors.keys() == before.tensors.keys() | imputed
    assert set(manifest["runs"][-1]["changes"]["imputed"]) == imputed


def check_input_scales(before: View, after: View, choices: Choices, manifest: Mapping[str, Any]) -> None:
    reports = {(entry["where"], entry["gemm"]): entry for entry in manifest["runs"][-1]["input_scales"]}
    checked = set()
    for key, members in input_groups(before).items():
        names = [module.param("input_scale") for module in members]
        raw = [value for name in names if name in before.tensors for value in before.tensors[name].values]
        if not raw:
            assert not set(names) & after.tensors.keys()
            continue
        good = [value for value in raw if usable(value)]
        top = max(good)
        assert choices.impute == "layer-max" or len(good) == len(raw)
        merged = choices.input_scale == "layer-max"
        for module, name in zip(members, names, strict=True):
            written = after.tensors[name]
            old = before.tensors.get(name)
            experts = before.tensors[module.weight].shape[0] if module.fused else 1
            assert written.dtype == "F32"
            assert written.shape == canonical_shape(module, old.shape if old else (), experts, merged), name
            kept = [value if usable(value) else top for value in old.values] if old else [top]
            expected = [top] * written.values.size if merged else kept
            assert written.values.tolist() == expected, name
        report = reports[key]
        missing = sum(name not in before.tensors for name in names)
        assert report["count"] == len(raw) + missing
        assert (report["min"], report["max"]) == (min(good), top)
        assert report["after"] == (top if merged else None)
        assert set(report.get("imputed", {})) == set(unusable_labels(before, members)), key
        checked.add(key)
    assert reports.keys() == checked


def unusable_labels(before: View, members: Iterable[Module]) -> Iterable[str]:
    """How the manifest names input scales that are missing or bad: `3.gate_proj`, `k_proj`, `down_proj`."""
    for module in members:
        last = module.name.rpartition(".")[2]
        if last.isdecimal():  # experts.gate_proj.3
            last = module.name.split(".")[-2]
        scale = before.tensors.get(module.param("input_scale"))
        if scale is None:
            yield last if module.expert is None else f"{module.expert}.{last}"
            continue
        experts = before.tensors[module.weight].shape[0] if module.fused else 1
        for position, value in enumerate(scale.values):
            if not usable(value):
                owner = position * experts // scale.values.size if scale.values.size > 1 else module.expert
                yield last if owner is None else f"{owner}.{last}"


def check_global_scales(before: View, after: View, choices: Choices) -> None:
    shared: dict[str, float] = {}
    for (where, _), members in global_groups(before).items():
        if len(members) > 1 and (choices.unify or "{" in where):
            values = [float(before.tensors[module.param("weight_scale_2")].values[0]) for module in members]
            shared |= {module.name: max(values) for module in members}
    for module in before.modules:
        name = module.param("weight_scale_2")
        old, written = before.tensors[name], after.tensors[name]
        experts = before.tensors[module.weight].shape[0] if module.fused else 1
        merged = old.shape == (experts, 2) and module.fused and choices.unify
        expected = old.values.reshape(experts, 2).max(axis=1) if merged else old.values
        if module.name in shared:
            expected = np.array([shared[module.name]])
        assert (written.dtype, written.shape) == ("F32", canonical_shape(module, old.shape, experts, choices.unify))
        assert written.values.tolist() == expected.tolist(), name


def check_weights(before: View, after: View, choices: Choices, manifest: Mapping[str, Any]) -> None:
    """Every dequantised weight: exact where the global scale stayed, else within every bound, and counted right."""
    entries = {entry["where"]: entry for entry in manifest["runs"][-1]["weight_scale_2"]}
    where_of = {m.name: where for (where, _), members in global_groups(before).items() for m in members}
    counted: dict[str, Counts] = defaultdict(Counts)
    for module in before.modules:
        assert before.tensors[module.weight].same(after.tensors[module.weight]), module.weight
        old_blocks, new_blocks = before.block_values(module), after.block_values(module)
        old_global, new_global = before.global_rows(module), after.global_rows(module)
        old, new = before.dequantized(module), after.dequantized(module)
        same = old_global == new_global
        assert np.array_equal(old[same], new[same], equal_nan=True), module.name
        assert np.array_equal(old_blocks[same], new_blocks[same], equal_nan=True), module.name
        assert np.array_equal(np.signbit(old_blocks), np.signbit(new_blocks)), module.name
        if same.all():
            assert before.tensors[module.param("weight_scale")].same(after.tensors[module.param("weight_scale")])
            continue
        assert (new_global[~same] > old_global[~same]).all()
        where = where_of[module.name]
        counts = Counts.of(old_blocks, new_blocks, old_global, new_global)
        counted[where] += counts
        exact = np.abs(old_blocks * old_global[..., None])
        reported = exact * entries[where]["block_scales"]["max_relative_error"] * (1 + 1e-12)
        nearest = np.maximum(exact * 2.0**-4, new_global[..., None] * 2.0**-10)
        nearest[same] = 0
        assert np.array_equal(np.isnan(old_blocks), np.isnan(new_blocks)), module.name
        error = np.nan_to_num(np.abs(new - old))
        nibbles = np.abs(before.nibbles(module))
        for bound in (reported, nearest):
            assert (error <= nibbles * np.repeat(np.nan_to_num(bound), 16, axis=-1)).all(), module.name
    check_reports(before, choices, entries, counted)


@dataclass(frozen=True)
class Counts:
    """What a rescale did, by brute force."""

    blocks: int = 0
    inexact: int = 0
    max_relative_error: float = 0.0
    became_subnormal: int = 0
    became_zero: int = 0

    @staticmethod
    def of(old: np.ndarray, new: np.ndarray, old_global: np.ndarray, new_global: np.ndarray) -> Counts:
        exact, rounded = np.abs(old * old_global[..., None]), np.abs(new * new_global[..., None])
        off = (exact != rounded) & ~np.isnan(exact)
        error = np.abs(rounded - exact)[off] / exact[off]
        normal = np.abs(old) >= SMALLEST_NORMAL
        small = (np.abs(new) < SMALLEST_NORMAL) & (new != 0)
        return Counts(
            old.size,
            int(off.sum()),
            float(error.max(initial=0)),
            int((normal & small).sum()),
            int(((old != 0) & (new == 0)).sum()),
        )

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.blocks + other.blocks,
            self.inexact + other.inexact,
            max(self.max_relative_error, other.max_relative_error),
            self.became_subnormal + other.became_subnormal,
            self.became_zero + other.became_zero,
        )


def check_reports(
    before: View, choices: Choices, entries: Mapping[str, Mapping[str, Any]], counted: Mapping[str, Counts]
) -> None:
    """The manifest's weight_scale_2 entries: which pairs differed, how far, what became of their blocks."""
    pairs: dict[str, dict[str, tuple[float, ...]]] = defaultdict(dict)
    for (where, expert), members in global_groups(before).items():
        members.sort(key=in_fusion_order)
        scales = [before.tensors[module.param("weight_scale_2")] for module in members]
        if members[0].fused and len(scales[0].shape) == 2 and scales[0].shape[1] == 2:
            pairs[where] = {str(i): tuple(pair) for i, pair in enumerate(scales[0].values.reshape(-1, 2).tolist())}
        elif len(members) > 1:
            label = "/".join(module.name.rpartition(".")[2] for module in members) if expert is None else str(expert)
            pairs[where][label] = tuple(float(scale.values[0]) for scale in scales)
    for where, values in pairs.items():
        differing = {label: pair for label, pair in values.items() if len(set(pair)) > 1}
        entry = entries[where]
        assert (entry["pairs"], entry["differing"]) == (len(values), len(differing))
        if not differing:
            assert "block_scales" not in entry
            continue
        assert entry["unified"] == (choices.unify or "{" in where)
        assert entry["max_ratio"] == max(max(pair) / min(pair) for pair in differing.values())
        assert {label: tuple(pair) for label, pair in entry["before"].items()} == differing
        if entry["unified"]:
            written = entry["block_scales"]
            assert written == vars(counted[where]), where
    assert {where for where, entry in entries.items() if entry["differing"] and entry["unified"]} == counted.keys()


def check_other_tensors(before: View, after: View) -> None:
    """All that belongs to no NVFP4 linear, and pre_quant_scale, bias and the like: the same bytes."""
    scales = {module.param(param) for module in before.modules for param in SIDECARS}
    for name in before.tensors.keys() - scales:
        assert before.tensors[name].same(after.tensors[name]), name


def unquantized_modules(view: View) -> set[str]:
    """Modules that an exclude list must name, by what is stored."""
    floats = ("F32", "BF16", "F16", "F64")
    found = {
        name.removesuffix(".weight")
        for name, stored in view.tensors.items()
        if name.endswith(".weight") and stored.dtype in floats and len(stored.shape) >= 2
    }
    found |= {name.rpartition(".experts.")[0] + ".experts" for name in found if re.search(r"\.experts\.\w+", name)}
    if view.config.get("tie_word_embeddings") and "lm_head.weight" not in view.tensors:
        found.add("lm_head")
    return found


def check_configs(before: View, after: View) -> None:
    holder = after.config.get("text_config", {})
    flat = after.config.get("quantization_config") or holder["quantization_config"]
    assert after.hf is not None
    nested = after.hf["quantization"]
    assert flat["quant_method"] == "modelopt"
    assert flat["quant_algo"] == nested["quant_algo"]
    assert flat["ignore"] == nested["exclude_modules"]
    assert len(flat["ignore"]) == len(set(flat["ignore"]))
    assert set(flat["ignore"]) == unquantized_modules(after)
    assert flat.get("quantized_layers") == nested.get("quantized_layers")
    assert flat.get("group_size") == nested.get("group_size")
    assert flat.get("producer") == after.hf.get("producer")
    assert (
        nested["kv_cache_quant_algo"]
        == {None: None, 8: "FP8", 4: "NVFP4"}[(flat.get("kv_cache_scheme") or {}).get("num_bits")]
    )
    mixed = flat["quant_algo"] == "MIXED_PRECISION"
    assert (flat.get("group_size") == 16) != mixed
    if mixed:
        check_mixed(after, flat["quantized_layers"])
    else:
        weights_only = not any(module.param("input_scale") in after.tensors for module in after.modules)
        assert (flat["quant_algo"] == "W4A16_NVFP4") == weights_only
        assert ("input_activations" in flat["config_groups"]["group_0"]) != weights_only
    for config in (before.config, after.config):
        assert isinstance(config, dict)
    assert without_quantization(before.config) == without_quantization(after.config)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key != "quantization_config"}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = without_quantization(kept["text_config"])
    return kept


def check_mixed(after: View, layers: Mapping[str, Mapping[str, Any]]) -> None:
    """An entry for each quantised linear and each container of experts, and no other."""
    expected = {}
    for module in after.modules:
        algo = "NVFP4" if module.param("input_scale") in after.tensors else "W4A16_NVFP4"
        if module.moe is not None:
            expected[module.moe + ".experts"] = algo
        if not module.fused:
            expected[module.name] = algo
    for name, stored in after.tensors.items():
        if name.endswith(".weight") and stored.dtype == "F8_E4M3":
            expected[name.removesuffix(".weight")] = "FP8"
    assert {name: entry["quant_algo"] for name, entry in layers.items()} == expected
    assert all(entry["group_size"] == 16 for entry in layers.values() if "NVFP4" in entry["quant_algo"])


def relative_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_files(before: View, after: View) -> None:
    """Side files byte for byte; the index, if any, says what the headers say."""

    def side(folder: Path) -> dict[str, bytes]:
        return {
            name: data
            for name, data in relative_files(folder).items()
            if name not in REWRITTEN and not ("/" not in name and name.endswith(".safetensors"))
        }

    assert side(before.folder) == side(after.folder)
    shards = {stored.file for stored in after.tensors.values()}
    assert {path.name for path in after.folder.glob("*.safetensors")} == shards
    index = after.folder / "model.safetensors.index.json"
    assert index.is_file() == (len(shards) > 1)
    if index.is_file():
        table = json.loads(index.read_text())
        assert table["weight_map"] == {name: stored.file for name, stored in after.tensors.items()}
        assert table["metadata"]["total_size"] == sum(stored.raw.size for stored in after.tensors.values())
        assert shards == {f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)}
    else:
        assert shards == {"model.safetensors"}
