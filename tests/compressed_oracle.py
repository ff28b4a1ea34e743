"""What target compressed-tensors must have written, worked out again from the files alone.

Codes and scales are read bit by bit with numpy, exact values are float64; nothing of nvfp4prep is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from oracle import E2M1, E4M3, Stored, View, check_files, read, unquantized_modules, without_quantization

EXPERT = re.compile(r"(?P<moe>.+)\.experts\.(?P<expert>\d+)\.(?P<name>gate_proj|up_proj|down_proj|w1|w2|w3)")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
READERS = (
    "gate",
    "shared_expert_gate",
    "shared_expert.gate_proj",
    "shared_expert.up_proj",
    "shared_experts.gate_proj",
    "shared_experts.up_proj",
)
"""Names below a MoE block of what reads its input, beside gate and up of the routed experts."""
KV_SCALES = ("k_scale", "v_scale")


# --- BF16 ------------------------------------------------------------------------------------------------------------


def bf16(values: np.ndarray) -> np.ndarray:
    """F32 rounded to BF16, half to even, as F32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def nearest_bf16(written: np.ndarray, exact: np.ndarray, slack: float = 2.0**-12) -> bool:
    """Whether BF16 values are at most half a unit in the last place (and a little) off exact ones; zeros stay zeros."""
    exact, written = np.asarray(exact, np.float64), np.asarray(written, np.float64)
    half = np.exp2(np.floor(np.log2(np.abs(np.where(exact == 0, 1, exact)))) - 8)
    allowed = np.where(exact == 0, 0, half * (1 + slack))
    return bool(
        (np.abs(written - exact) <= allowed).all() and (np.signbit(written) == np.signbit(exact))[exact != 0].all()
    )


# --- the source ------------------------------------------------------------------------------------------------------


def int4_codes(stored: Stored) -> np.ndarray:
    """ModelOpt's U8 [N/2, K]: row 2r in the low nibble of byte row r, row 2r + 1 in the high one, two's complement."""
    packed = stored.codes.astype(np.int16)
    codes = np.empty((2 * packed.shape[0], packed.shape[1]), np.int16)
    codes[0::2], codes[1::2] = packed & 15, packed >> 4
    return np.where(codes > 7, codes - 16, codes)


def nvfp4_values(weight: Stored, blocks: Stored) -> np.ndarray:
    """e2m1 · E4M3 of U8 [N, K/2], even column in the low nibble; exact."""
    packed = weight.codes
    values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)]
    return values * np.repeat(E4M3[blocks.codes], 16, -1)


@dataclass(frozen=True)
class Source:
    """A ModelOpt checkpoint as files say it."""

    view: View

    @property
    def tensors(self) -> Mapping[str, Stored]:
        return self.view.tensors

    @cached_property
    def forms(self) -> Mapping[str, str]:
        """int4 or nvfp4, by quantised module."""
        found = {}
        for name, stored in self.tensors.items():
            module = name.removesuffix(".weight")
            if module != name and stored.dtype == "U8":
                found[module] = "nvfp4" if self.tensors[f"{module}.weight_scale"].dtype == "F8_E4M3" else "int4"
        return found

    def floats(self, name: str) -> np.ndarray:
        stored = self.tensors[name]
        return stored.values.reshape(stored.shape)

    def factors(self, module: str) -> np.ndarray | None:
        name = f"{module}.pre_quant_scale"
        return self.floats(name) if name in self.tensors else None

    def weight(self, module: str) -> np.ndarray:
        """float64 [N, K], without pre_quant_scale."""
        weight = self.tensors[f"{module}.weight"]
        if module not in self.forms:
            return self.floats(f"{module}.weight")
        blocks = self.tensors[f"{module}.weight_scale"]
        if self.forms[module] == "nvfp4":
            return nvfp4_values(weight, blocks) * self.floats(f"{module}.weight_scale_2").reshape(())
        codes, scale = int4_codes(weight), self.floats(f"{module}.weight_scale")
        return codes * np.repeat(scale, codes.shape[1] // scale.shape[1], 1)

    def smoothed(self, module: str) -> np.ndarray:
        """float64 [N, K]: what multiplies the input at run time."""
        factors = self.factors(module)
        return self.weight(module) if factors is None else self.weight(module) * factors

    @cached_property
    def blocks(self) -> Mapping[str, list[str]]:
        """Modules of the routed experts by the path of their MoE block."""
        found: dict[str, list[str]] = {}
        for module in sorted({name.rpartition(".")[0] for name in self.tensors}):
            match = EXPERT.fullmatch(module)
            if match:
                found.setdefault(match["moe"], []).append(module)
        return found


@dataclass(frozen=True)
class Fold:
    """What folding does to a norm, by brute force; `factor` is F32."""

    norm: str
    written: np.ndarray
    factor: np.ndarray


def fold_of(source: Source, block: str) -> Fold | None:
    """The fold of a MoE block whose gate and up have a pre_quant_scale."""
    inputs = [module for module in source.blocks[block] if module.rpartition(".")[2] not in DOWN]
    factors = [source.factors(module) for module in inputs]
    if factors[0] is None:
        assert all(one is None for one in factors)
        return None
    assert all(one is not None and np.array_equal(one, factors[0]) for one in factors)
    norm = f"{block.rpartition('.')[0]}.post_attention_layernorm.weight"
    old, first = source.floats(norm).astype(np.float32), factors[0].astype(np.float32)
    product = old * first
    written = {"BF16": bf16, "F32": np.float32, "F16": np.float16}[source.tensors[norm].dtype](product)
    written = written.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(old == 0, first, written / old)
    return Fold(norm, written, factor.astype(np.float32))


# --- the output ------------------------------------------------------------------------------------------------------


def packed_codes(stored: Stored) -> np.ndarray:
    """compressed-tensors' I32 [N, K/8]: code + 8, the first of eight in the lowest nibble."""
    assert stored.dtype == "I32"
    words = stored.raw.view("<u4").astype(np.int64).reshape(stored.shape)
    return ((words[..., None] >> (4 * np.arange(8))) & 15).reshape(stored.shape[0], -1) - 8


def written_weight(view: View, module: str) -> np.ndarray:
    """float64 [N, K] of an output's module: what the library makes of it, but for its rounding."""
    if f"{module}.weight" in view.tensors:
        stored = view.tensors[f"{module}.weight"]
        return stored.values.reshape(stored.shape)
    packed, scale = view.tensors[f"{module}.weight_packed"], view.tensors[f"{module}.weight_scale"]
    if packed.dtype == "I32":
        codes = packed_codes(packed)
        return codes * np.repeat(scale.values.reshape(scale.shape), codes.shape[1] // scale.shape[1], 1)
    return nvfp4_values(packed, scale) / view.tensors[f"{module}.weight_global_scale"].values


# --- checks ----------------------------------------------------------------------------------------------------------


def fused(source: Source, modules: Iterable[str]) -> set[str]:
    """Quantised modules that engines fuse with one of some modules."""
    groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))
    found = set()
    for module in modules:
        parent, _, last = module.rpartition(".")
        found |= {f"{parent}.{name}" for group in groups if last in group for name in group}
    return found & source.forms.keys()


def check(folder: Path, out: Path, resolved: Path | None = None) -> None:
    """All that target compressed-tensors promises.

    Args:
        folder: the source.
        out: what was written.
        resolved: the same source converted with target hf, whose scales an NVFP4 output must have; for NVFP4 only.
    """
    source, after = Source(read(folder)), read(out)
    scales = read(resolved) if resolved else None
    assert source.forms, "a test without a quantised linear proves nothing"
    folds = {block: fold for block in source.blocks if (fold := fold_of(source, block)) is not None}
    divided = {f"{block}.{name}": fold for block, fold in folds.items() for name in READERS}
    routed = {module for modules in source.blocks.values() for module in modules}
    own = {m for m in source.forms.keys() - routed if source.factors(m) is not None or m in divided}
    plain = own | (fused(source, own) - routed)
    expected: set[str] = set()
    for module, form in source.forms.items():
        fold = divided.get(module)
        if module in plain:
            exact = source.smoothed(module) / (1 if fold is None else fold.factor.astype(np.float64))
            stored = after.tensors[f"{module}.weight"]
            assert (stored.dtype, stored.shape) == ("BF16", exact.shape), module
            assert nearest_bf16(written_weight(after, module), exact), module
            expected.add(f"{module}.weight")
        elif form == "int4":
            expected |= check_int4(source, after, module)
        else:
            assert scales is not None
            expected |= check_nvfp4(source, after, module, scales)
    for name, stored in source.tensors.items():
        module, _, param = name.rpartition(".")
        if module in source.forms and param not in ("bias", *KV_SCALES):
            continue
        expected.add(name)
        fold = next((one for one in folds.values() if one.norm == name), None)
        if fold is not None:
            check_rounded(after.tensors[name], stored, fold.written)
        elif name.endswith(".weight") and module in divided:
            check_rounded(
                after.tensors[name],
                stored,
                stored.values.astype(np.float32).reshape(stored.shape) / divided[module].factor,
            )
        else:
            assert after.tensors[name].same(stored), name
    assert after.tensors.keys() == expected
    check_config(source, after, plain)
    check_side_files(source.view, after)
    check_manifest(source, out, folds, divided, plain)


def check_rounded(written: Stored, old: Stored, values: np.ndarray) -> None:
    """The exact bytes of F32 values in the dtype that was stored."""
    assert (written.dtype, written.shape) == (old.dtype, old.shape)
    rounded = {"BF16": bf16, "F32": np.float32, "F16": np.float16}[old.dtype](values)
    assert np.array_equal(written.values.reshape(written.shape), rounded.astype(np.float64))
    assert np.array_equal(np.signbit(written.values), np.signbit(rounded).reshape(-1))


def check_int4(source: Source, after: View, module: str) -> set[str]:
    codes, scale = int4_codes(source.tensors[f"{module}.weight"]), source.floats(f"{module}.weight_scale")
    packed, shape, written = (after.tensors[f"{module}.weight_{name}"] for name in ("packed", "shape", "scale"))
    assert packed.shape == (codes.shape[0], codes.shape[1] // 8)
    assert np.array_equal(packed_codes(packed), codes), module
    assert (shape.dtype, shape.tensor.tolist()) == ("I64", list(codes.shape))
    assert (written.dtype, written.shape) == ("BF16", scale.shape)
    rows = row_factors(source, module)
    assert np.array_equal(written.values.reshape(scale.shape), bf16(scale.astype(np.float32) * rows)), module
    assert nearest_bf16(written.values.reshape(scale.shape), scale * rows), module
    return {f"{module}.weight_{name}" for name in ("packed", "shape", "scale")}


def row_factors(source: Source, module: str) -> np.ndarray:
    """F32 [N, 1]: down's pre_quant_scale for the rows of an up, else ones."""
    match = EXPERT.fullmatch(module)
    if match and match["name"] in UP:
        down = DOWN[UP.index(match["name"])]
        factors = source.factors(f"{module.rpartition('.')[0]}.{down}")
        if factors is not None:
            return factors.astype(np.float32)[:, None]
    return np.ones((1, 1), np.float32)


def check_nvfp4(source: Source, after: View, module: str, resolved: View) -> set[str]:
    packed, scale = after.tensors[f"{module}.weight_packed"], after.tensors[f"{module}.weight_scale"]
    assert packed.same(source.tensors[f"{module}.weight"]), module
    assert scale.same(resolved.tensors[f"{module}.weight_scale"]), module
    names = {f"{module}.weight_packed", f"{module}.weight_scale"}
    for old, new in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale")):
        if f"{module}.{old}" not in resolved.tensors:
            continue
        stored = after.tensors[f"{module}.{new}"]
        assert (stored.dtype, stored.shape) == ("F32", (1,))
        reciprocal = np.float32(1 / resolved.tensors[f"{module}.{old}"].values[0])
        assert stored.values.tolist() == [float(reciprocal)], module
        names.add(f"{module}.{new}")
    return names


def check_config(source: Source, after: View, plain: set[str]) -> None:
    assert after.hf is None, "hf_quant_config.json would say ModelOpt's names"
    section = after.config["quantization_config"]
    forms = set(source.forms.values())
    assert len(forms) == 1
    form = {"int4": "pack-quantized", "nvfp4": "nvfp4-pack-quantized"}[forms.pop()]
    assert (section["quant_method"], section["format"]) == ("compressed-tensors", form)
    assert section["quantization_status"] == "compressed"
    (group,) = section["config_groups"].values()
    heads = [module for module in source.forms if module == "lm_head" and module not in plain]
    assert (group["targets"], group["format"], group["output_activations"]) == (["Linear", *heads], form, None)
    assert len(section["ignore"]) == len(set(section["ignore"]))
    unquantized = unquantized_modules(after)
    assert plain <= unquantized
    assert set(section["ignore"]) == unquantized
    if form == "pack-quantized":
        module = next(iter(source.forms))
        columns, groups = source.tensors[f"{module}.weight"].shape[1], source.tensors[f"{module}.weight_scale"].shape[1]
        assert (group["weights"]["type"], group["weights"]["strategy"]) == ("int", "group")
        assert group["weights"]["group_size"] == columns // groups
        assert group["input_activations"] is None
    else:
        assert (group["weights"]["type"], group["weights"]["strategy"]) == ("float", "tensor_group")
        assert group["weights"]["group_size"] == 16
        scaled = any(name.endswith(".input_global_scale") for name in after.tensors)
        assert (group["input_activations"] is not None) == scaled
    assert (group["weights"]["num_bits"], group["weights"]["symmetric"]) == (4, True)
    assert without_quantization(source.view.config) == without_quantization(after.config)


def check_side_files(before: View, after: View) -> None:
    check_files(before, after)
    assert not (after.folder / "hf_quant_config.json").exists()


def check_manifest(
    source: Source, out: Path, folds: Mapping[str, Fold], divided: Mapping[str, Fold], plain: set[str]
) -> None:
    manifest: dict[str, Any] = json.loads((out / "nvfp4prep.json").read_text())
    run = manifest["runs"][-1]
    assert manifest["target"] == run["options"]["target"] == "compressed-tensors"
    assert set(run.get("folded", {})) == set(folds)
    for block, entry in run.get("folded", {}).items():
        fold = folds[block]
        assert entry["norm"] == fold.norm
        assert set(entry["divided"]) == {
            module for module, one in divided.items() if one is fold and f"{module}.weight" in source.tensors
        }
        assert 0 <= entry["norm_rounding"] <= 2.0**-8
    kinds = {"scales"} if "int4" in source.forms.values() else set()
    kinds |= {"unpacked"} if plain else set()
    kinds |= {"readers"} if folds else set()
    rounding = run.get("rounding", {})
    assert set(rounding) == kinds
    assert all(0 <= value <= 2.0**-8 for value in rounding.values())
