"""The whole path on real checkpoints and damaged ones, against `oracle`. What must be refused is in test_refused."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import damage
import oracle
import pytest
import torch
import xxhash
from damage import Damage, Editable
from runner import manifest_of, run

from nvfp4prep.convert import Prepared, Result, prepare, write
from nvfp4prep.errors import EnvironmentFault, InputRefused
from nvfp4prep.experts import load_expert
from nvfp4prep.header import TensorInfo
from nvfp4prep.manifest import to_bytes
from nvfp4prep.options import Options
from nvfp4prep.packing import reader
from nvfp4prep.schema import Format, Linear, MoeLayer

QWEN, DENSE, TINY = "qwen3moe-nvfp4-perexpert", "qwen3-dense-nvfp4", "tinymoe-nvfp4-perexpert"
LLAMA4, GPTOSS, DSV3, MIXTRAL = "llama4-nvfp4", "gptoss-nvfp4", "dsv3-nvfp4", "mixtral-nvfp4"
MIXED, W4A16, NEMOTRON, SHARDED = (
    "qwen3moe-mixed-fp8attn",
    "qwen3moe-w4a16nvfp4",
    "nemotronh-nvfp4",
    "qwen3moe-nvfp4-sharded",
)
FUSED = (LLAMA4, GPTOSS)
EXPERTS = 8

Fetch = Callable[[str], Path]


def convert(source: Path, out: Path, *, overwrite: bool = False, workers: int = 2, **options: Any) -> Result:
    prepared = prepare(str(source), Options(**options))
    return write(prepared, out, overwrite=overwrite, workers=workers, progress=lambda _: None)


def digests(folder: Path) -> dict[str, str]:
    return {name: hashlib.sha256(data).hexdigest() for name, data in oracle.relative_files(folder).items()}


# --- what must convert -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A checkpoint, what is damaged in it, and the options to convert it with."""

    base: str
    damages: tuple[Damage, ...] = ()
    options: dict[str, str] = field(default_factory=dict)


IMPUTE = {"impute": "layer-max"}
SPLIT = {"w13_scale": "split"}
KEEP = {"input_scale": "keep"}
UNEVEN = (1.0, 0.5, 0.7738, 1.31, 2.0**-7, 3.1, 0.9999, 2.0**-3)
GATE_UP = r".*experts\.gate_up_proj"
BAD = {
    "zero": 0.0,
    "negative-zero": -0.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "minus-inf": float("-inf"),
    "negative": -0.01,
    "subnormal": 2.0**-130,
}
BAD_GATE = r"model\.layers\.0\.mlp\.experts\.3\.gate_proj\.input_scale"
BAD_DOWN = r"model\.layers\.1\.mlp\.experts\.[05]\.down_proj\.input_scale"
BAD_Q = r"model\.layers\.0\.self_attn\.q_proj\.input_scale"


def fused_cases(base: str) -> Iterator[tuple[str, Case]]:
    """Every form of a fused scale, equal and unequal values, with and without unifying."""
    forms = {"one": (1,), "e": (EXPERTS,), "e1": (EXPERTS, 1)}
    experts = r".*experts\.(?:gate_up|down)_proj"
    for name, shape in forms.items():
        yield f"fused-{name}", Case(base, (damage.reshape(*shape, within=experts),))
    vary = damage.multiply(experts, *UNEVEN, param=damage.SCALARS)
    for name in ("e", "e1"):
        shaped = damage.reshape(*forms[name], within=experts)
        yield f"fused-{name}-distinct", Case(base, (shaped, vary))
        yield f"fused-{name}-distinct-keep", Case(base, (shaped, vary), KEEP | SPLIT)
    halves = damage.reshape(EXPERTS, 2, within=GATE_UP)
    yield "fused-e2-equal", Case(base, (halves,))
    vary = damage.multiply(GATE_UP, *UNEVEN, 1.7, param=damage.SCALARS)
    for name, options in (("unify", {}), ("split", SPLIT), ("keep", KEEP)):
        yield f"fused-e2-{name}", Case(base, (halves, vary, damage.every_code(GATE_UP)), options)
    shaped = damage.reshape(EXPERTS, within=experts, param="input_scale")
    for name in ("nan", "zero", "subnormal"):
        bad = damage.put(BAD[name], r".*layers\.0\..*experts\.(?:gate_up|down)_proj_input_scale")
        yield f"fused-{name}-imputed", Case(base, (shaped, bad), IMPUTE)


def damaged_cases() -> Iterator[tuple[str, Case]]:
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        for base in (QWEN, LLAMA4, GPTOSS, DENSE, W4A16):
            scales = damage.SCALARS if base != W4A16 else "weight_scale_2"
            yield f"{name}-{base}", Case(base, (damage.cast(dtype, scales),))
        yield f"{name}-uneven", Case(QWEN, (damage.multiply(".*up_proj", *UNEVEN), damage.cast(dtype)))
    for shape in ((1,), (1, 1)):
        yield f"shape-{len(shape)}d-{QWEN}", Case(QWEN, (damage.reshape(*shape),))
    yield "shape-1d-w4a16", Case(W4A16, (damage.reshape(1, param="weight_scale_2"),))
    for base in FUSED:
        for name, case in fused_cases(base):
            yield f"{name}-{base}", case
    for base in (DENSE, DSV3, LLAMA4, GPTOSS, NEMOTRON, W4A16):
        scales = damage.SCALARS if base != W4A16 else "weight_scale_2"
        attention = damage.multiply(r".*(?:self_attn|mixer)\.\w+", *UNEVEN, param=scales)
        yield f"uneven-attention-{base}", Case(base, (attention,))
    yield "uneven-dense-mlp", Case(DENSE, (damage.multiply(r".*mlp\.\w+", *UNEVEN), damage.every_code(r".*gate_proj")))
    yield "uneven-shared-experts", Case(DSV3, (damage.multiply(r".*mlp\.(?:shared_experts\.)?\w+", *UNEVEN),))
    yield "uneven-shared-split", Case(DSV3, (damage.multiply(r".*mlp\.(?:shared_experts\.)?\w+", *UNEVEN),), SPLIT)
    for base, projection in ((QWEN, "up_proj"), (QWEN, "gate_proj"), (MIXTRAL, "w[13]"), (MIXED, "up_proj")):
        uneven = damage.multiply(rf".*experts\.\d+\.{projection}", *UNEVEN)
        codes = damage.every_code(rf".*experts\.\d+\.{projection}")
        for name, options in (("unify", {}), ("split", SPLIT)):
            yield f"uneven-{projection}-{name}-{base}", Case(base, (uneven, codes), options)
    exact = damage.multiply(r".*experts\.\d+\.up_proj", 0.5)
    yield "uneven-power-of-two", Case(QWEN, (exact,))
    lost = damage.multiply(r".*experts\.\d+\.gate_proj", 2.0**-17)
    yield "uneven-lost", Case(QWEN, (lost,))
    for name, value in BAD.items():
        yield f"{name}-imputed", Case(QWEN, (damage.put(value, BAD_GATE, BAD_DOWN, BAD_Q),), IMPUTE)
        yield f"{name}-imputed-keep", Case(QWEN, (damage.put(value, BAD_GATE, BAD_DOWN, BAD_Q),), IMPUTE | KEEP)
    yield "missing-imputed", Case(QWEN, (damage.drop(BAD_GATE, BAD_DOWN, BAD_Q),), IMPUTE)
    yield "missing-imputed-keep", Case(QWEN, (damage.drop(BAD_GATE, BAD_DOWN, BAD_Q),), IMPUTE | KEEP)
    yield "missing-most", Case(QWEN, (damage.drop(r".*mlp\.experts\.[0-6]\.\w+\.input_scale"),), IMPUTE)
    yield "impute-for-nothing", Case(DSV3, (), IMPUTE)
    yield "impute-w4a16", Case(W4A16, (), IMPUTE)
    yield "keep-" + QWEN, Case(QWEN, (), KEEP)
    yield "no-input-scales", Case(QWEN, (damage.drop(r".*\.input_scale"),))
    yield "no-input-scales-mixed", Case(MIXED, (damage.drop(r".*experts.*\.input_scale"),))
    yield (
        "projection-first",
        Case(QWEN, (lambda ck: ck.rename(projection_first), damage.multiply(".*up_proj.*", *UNEVEN))),
    )
    yield "nested-config", Case(LLAMA4, (nest,))
    yield "tied", Case(DENSE, (damage.drop(r"lm_head\.weight"), tie))
    yield "odd-tensors", Case(QWEN, (odd_tensors,))
    yield "bf16-experts-in-one-layer", Case(QWEN, (unquantize_layer_0,))


def projection_first(name: str) -> str:
    return re.sub(r"experts\.(\d+)\.(\w+_proj)\.", r"experts.\2.\1.", name)


def nest(ck: Editable) -> None:
    """The form of multimodal models: the language model's config below text_config, names with a longer prefix."""
    ck.rename(lambda name: f"language_model.{name}")
    section = ck.config.pop("quantization_config")
    ck.config = {
        "model_type": "llama4",
        "text_config": ck.config | {"quantization_config": section},
        "vision": {"x": 1},
    }
    ck.hf = None
    ck.tensors["vision_tower.patch.weight"] = torch.arange(48, dtype=torch.bfloat16).view(4, 3, 2, 2)


def tie(ck: Editable) -> None:
    ck.config["tie_word_embeddings"] = True


def odd_tensors(ck: Editable) -> None:
    """Dtypes, shapes and values that a careless copy loses."""
    nan_bits = torch.tensor([0x7F800001, 0x7FC12345, -0x400000, 1], dtype=torch.int32).repeat(2)
    ck.tensors |= {
        "model.layers.0.mlp.gate.e_score_correction_bias": nan_bits.view(torch.float32),
        "model.empty.table": torch.empty(0, 7, dtype=torch.float32),
        "model.position_ids": torch.arange(1000, dtype=torch.int64),
        "model.mask": torch.tensor([True, False, True]),
        "model.double.weight": torch.full((2, 2), 0.1, dtype=torch.float64),
        "mtp.layers.0.eh_proj.weight": torch.ones(3, 5, dtype=torch.bfloat16),
        "model.layers.10.ümlaut.bias": torch.tensor(1.0, dtype=torch.float16),
    }


def unquantize_layer_0(ck: Editable) -> None:
    """Experts of layer 0 in BF16: the exclude list must name them and their container."""
    experts = r"model\.layers\.0\.mlp\.experts\..*"
    for name in ck.names(experts + r"\.weight"):
        rows, half = ck.tensors[name].shape
        ck.tensors[name] = torch.ones(rows, half * 2, dtype=torch.bfloat16)
    ck.remove(ck.names(experts + "scale(?:_2)?"))


CASES = {name: Case(name) for name in (*checkpoints.NVFP4, *checkpoints.OVERLAYS)} | dict(damaged_cases())


def source_of(case: Case, checkpoint: Fetch, folder: Path) -> Path:
    base = checkpoint(case.base)
    return damage.damaged(base, folder / "source", *case.damages) if case.damages else base


@pytest.mark.parametrize("name", CASES)
def test_means_the_same_and_converting_again_changes_nothing(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    case = CASES[name]
    source, out, again = source_of(case, checkpoint, tmp_path), tmp_path / "out", tmp_path / "again"
    before = digests(source)
    convert(source, out, **case.options)
    assert digests(source) == before
    oracle.check(source, out, oracle.Choices(**case.options))
    convert(out, again, **case.options)
    check_unchanged(out, again)


def check_unchanged(first: Path, second: Path) -> None:
    """The second run changed the manifest and nothing else, and knows the first source."""
    one, two = manifest_of(first), manifest_of(second)
    assert {**digests(first), "nvfp4prep.json": ""} == {**digests(second), "nvfp4prep.json": ""}
    assert two["source"] == one["source"]
    assert two["outputs"] == one["outputs"]
    assert len(two["runs"]) == len(one["runs"]) + 1 and two["runs"][:-1] == one["runs"]
    changes = two["runs"][-1]["changes"]
    assert changes.pop("imputed") == []
    assert changes.pop("recast") == {}
    assert changes.pop("exclude_list") == {"corrupted": [], "unmatched": [], "contradicted": [], "added": []}
    assert set(changes.values()) <= {0}, changes


@pytest.mark.parametrize("name", sorted(set(checkpoints.full_set()) & set(checkpoints.NVFP4)))
def test_full_set(name: str, full_set: dict[str, Path], tmp_path: Path) -> None:
    convert(full_set[name], tmp_path / "out")
    oracle.check(full_set[name], tmp_path / "out", oracle.Choices())


# --- forms of the output ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 100_000, 1_000_000])
def test_shard_size(size: int, checkpoint: Fetch, tmp_path: Path) -> None:
    """Other files, the same tensors; the size is kept through the manifest when it is not given again."""
    source, out, again = checkpoint(QWEN), tmp_path / "out", tmp_path / "again"
    convert(source, out, max_shard_bytes=size)
    oracle.check(source, out, oracle.Choices())
    for path in out.glob("*.safetensors"):
        with path.open("rb") as file:
            data = path.stat().st_size - 8 - struct.unpack("<Q", file.read(8))[0]
        alone = sum(stored.file == path.name for stored in oracle.read(out).tensors.values()) == 1
        assert data <= size or alone
    convert(out, again)
    check_unchanged(out, again)
    convert(out, tmp_path / "one", max_shard_bytes=10**9)
    convert(source, tmp_path / "direct")
    assert digests(tmp_path / "one")["model.safetensors"] == digests(tmp_path / "direct")["model.safetensors"]


def test_shards_are_as_few_as_fit(checkpoint: Fetch, tmp_path: Path) -> None:
    convert(checkpoint(QWEN), tmp_path / "out", max_shard_bytes=600_000)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("out/*.safetensors"))]
    assert len(sizes) > 2
    assert all(one + two > 600_000 for one, two in itertools.pairwise(sizes))


@pytest.mark.parametrize("name", ["tinymoe-nvfp4-splitscale", SHARDED])
def test_the_same_bytes_with_any_number_of_workers(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    for workers in (1, 7):
        convert(checkpoint(name), tmp_path / str(workers), workers=workers)
    assert digests(tmp_path / "1") == digests(tmp_path / "7")


def test_tensors_are_aligned(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", odd_tensors, damage.cast(torch.bfloat16))
    convert(source, tmp_path / "out")
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + length])
    assert table.pop("__metadata__") == {"format": "pt"}
    width = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2}
    assert length % 8 == 0
    assert all(entry["data_offsets"][0] % width.get(entry["dtype"], 1) == 0 for entry in table.values())


def test_side_files_of_all_kinds(checkpoint: Fetch, tmp_path: Path) -> None:
    """Also below folders, and other safetensors there; not git's and huggingface_hub's bookkeeping."""
    source = shutil.copytree(checkpoint(QWEN), tmp_path / "source")
    (source / "tokenizer.json").write_bytes(bytes(range(256)))
    (source / "vision" / "deep").mkdir(parents=True)
    (source / "vision" / "deep" / "model.safetensors").write_bytes(b"not looked into")
    (source / "linked.txt").symlink_to("tokenizer.json")
    (source / ".gitattributes").write_text("*.safetensors filter=lfs")
    for folder in (".git", ".cache/huggingface"):
        (source / folder).mkdir(parents=True)
        (source / folder / "x").write_text("x")
    convert(source, tmp_path / "out")
    out = oracle.relative_files(tmp_path / "out")
    expected = {
        "tokenizer.json",
        "linked.txt",
        "vision/deep/model.safetensors",
        ".gitattributes",
        "generation_config.json",
    }
    assert out.keys() - oracle.REWRITTEN == {"model.safetensors", *expected}
    assert all(out[name] == (source / name).read_bytes() for name in expected)
    assert not (tmp_path / "out" / "linked.txt").is_symlink()


def test_tensors_outside_the_index_are_kept_and_indexed(checkpoint: Fetch, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint(SHARDED), tmp_path / "source")
    torch_tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    damage.save_file({"mtp.fc.weight": torch_tensor}, source / "mtp.safetensors")
    prepared = prepare(str(source), Options(max_shard_bytes=300_000))
    finding = next(finding for finding in prepared.findings if finding.rule == "unindexed-tensors")
    assert (finding.severity, finding.file, finding.tensor) == ("warning", "mtp.safetensors", "mtp.fc.weight")
    convert(source, tmp_path / "out", max_shard_bytes=300_000)
    oracle.check(source, tmp_path / "out", oracle.Choices())


# --- what is said ----------------------------------------------------------------------------------------------------


def plan_of(source: Path, **options: Any) -> Prepared:
    return prepare(str(source), Options(**options))


def rules(source: Path, **options: Any) -> dict[str, str]:
    return {finding.rule: finding.message for finding in plan_of(source, **options).findings}


@pytest.mark.parametrize("name", sorted(set(checkpoints.NVFP4) - {NEMOTRON, MIXED, "qwen3moe-nvfp4-awqlite"}))
def test_an_export_as_it_should_be_gives_no_warning(name: str, checkpoint: Fetch) -> None:
    assert rules(checkpoint(name)) == {}


def test_awq_is_warned_about_and_keeps_its_scales(checkpoint: Fetch, tmp_path: Path) -> None:
    source = checkpoint("qwen3moe-nvfp4-awqlite")
    assert re.search("vLLM refuses it, and SGLang ignores", rules(source)["nvfp4-awq"])
    convert(source, tmp_path / "out")
    before, after = oracle.read(source), oracle.read(tmp_path / "out")
    names = [name for name in before.tensors if name.endswith("pre_quant_scale")]
    assert len(names) == 34 and all(before.tensors[name].same(after.tensors[name]) for name in names)
    assert after.config["quantization_config"]["quant_algo"] == "NVFP4_AWQ"
    assert after.hf and after.hf["quantization"]["pre_quant_scale"] is True


def test_split_halves_are_warned_about(checkpoint: Fetch) -> None:
    source = checkpoint("tinymoe-nvfp4-splitscale")
    split = [finding for finding in plan_of(source, **SPLIT).findings if finding.rule == "gate-up-split"]
    assert [finding.layer for finding in split] == [0, 1, 2, 3]
    assert all(re.search("vLLM reads the up half.*TensorRT-LLM.*SGLang", finding.message) for finding in split)
    assert "gate-up-split" not in rules(source)


def test_vectors_that_no_engine_loads_are_warned_about(checkpoint: Fetch, tmp_path: Path) -> None:
    experts = r".*experts\.(?:gate_up|down)_proj"
    source = damage.damaged(checkpoint(LLAMA4), tmp_path / "source", damage.reshape(EXPERTS, within=experts))
    assert re.search("vLLM.*SGLang.*TensorRT-LLM", rules(source)["fused-scale-vector"])
    assert "fused-scale-vector" not in rules(checkpoint(LLAMA4))


def test_imputing_is_told_with_ids_and_the_value(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", damage.put(0.0, BAD_DOWN), damage.drop(BAD_GATE))
    told = [finding for finding in plan_of(source, **IMPUTE).findings if finding.rule == "input-scale-imputed"]
    assert [(finding.layer, finding.experts) for finding in told] == [(0, (3,)), (1, (0, 5))]
    assert "1 missing" in told[0].message and "2 zero" in told[1].message


def test_the_corrupted_exclude_list_of_nemotron(checkpoint: Fetch, tmp_path: Path) -> None:
    source = checkpoint(NEMOTRON)
    convert(source, tmp_path / "out")
    after = oracle.read(tmp_path / "out")
    names = [
        "backbone.embeddings",
        *(f"backbone.layers.{i}.mixer.{m}" for i, m in ((0, "conv1d"), (1, "gate"), (3, "gate"))),
    ]
    assert after.config["quantization_config"]["ignore"] == [*names, "lm_head"]
    report = manifest_of(tmp_path / "out")["runs"][0]["changes"]["exclude_list"]
    assert report["added"] == [*names, "lm_head"]
    assert report["corrupted"] == oracle.read(source).config["quantization_config"]["ignore"]
    assert all("\0" in entry for entry in report["corrupted"]) and report["unmatched"] == report["contradicted"] == []


def test_mixed_has_an_entry_for_every_linear_and_container(checkpoint: Fetch, tmp_path: Path) -> None:
    convert(checkpoint(MIXED), tmp_path / "out")
    section = oracle.read(tmp_path / "out").config["quantization_config"]
    layers = section["quantized_layers"]
    assert len(layers) == 2 * (4 + 8 * 3 + 1)
    assert layers["model.layers.1.mlp.experts"] == layers["model.layers.1.mlp.experts.7.up_proj"]
    assert layers["model.layers.0.self_attn.q_proj"] == {"quant_algo": "FP8"}
    groups = {
        tuple(sorted(group["targets"])): group["weights"]["num_bits"] for group in section["config_groups"].values()
    }
    fp8, nvfp4 = (tuple(sorted(n for n, e in layers.items() if e["quant_algo"] == algo)) for algo in ("FP8", "NVFP4"))
    assert groups == {fp8: 8, nvfp4: 4}
    assert section["kv_cache_scheme"] is None


def test_nvfp4_without_any_input_scale_becomes_w4a16(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", damage.drop(r".*\.input_scale"))
    assert "W4A16_NVFP4" in rules(source)["no-input-scales"]
    convert(source, tmp_path / "out")
    after = oracle.read(tmp_path / "out")
    assert after.config["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    assert after.hf and after.hf["quantization"]["quant_algo"] == "W4A16_NVFP4"


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "bits", "expected"),
    [
        (torch.bfloat16, 0x3A83, 0x3A830000),
        (torch.bfloat16, 0x0080, 0x00800000),  # the smallest normal value
        (torch.float16, 0x3C00, 0x3F800000),  # 1.0
        (torch.float16, 0x0C83, 0x39906000),
        (torch.float16, 0x0001, 0x33800000),  # subnormal in F16, 2**-24
        (torch.float16, 0x03FF, 0x387FC000),
    ],
)
def test_scales_are_widened_by_value(
    dtype: torch.dtype, bits: int, expected: int, checkpoint: Fetch, tmp_path: Path
) -> None:
    """Bits written by hand: a reinterpreted, rounded or flushed scale has others."""

    def change(ck: Editable) -> None:
        for name in ck.scales(within=r".*o_proj"):
            ck.tensors[name] = torch.tensor([bits], dtype=torch.int16).view(dtype)

    convert(damage.damaged(checkpoint(QWEN), tmp_path / "source", change), tmp_path / "out")
    after = oracle.read(tmp_path / "out").tensors
    scales = [stored for name, stored in after.items() if re.search(r"o_proj\.(?:weight_scale_2|input_scale)$", name)]
    assert len(scales) == 4
    for stored in scales:
        assert (stored.dtype, stored.shape) == ("F32", ())
        assert stored.raw.tobytes() == struct.pack("<I", expected)


@pytest.mark.parametrize(
    ("base", "where"), [(QWEN, r".*experts\.\d+\.up_proj"), (GPTOSS, GATE_UP), (DENSE, r".*k_proj")]
)
@pytest.mark.parametrize(
    ("factor", "severity"), [(2.0**-9, None), (2.0**-10, "warning"), (2.0**-18, "warning"), (2.0**-19, "error")]
)
def test_global_scales_too_far_apart(
    base: str, where: str, factor: float, severity: str | None, checkpoint: Fetch, tmp_path: Path
) -> None:
    """Unifying them takes the block scales of the smaller out of E4M3's range."""
    equal = damage.put(1.0, r".*(?:gate_proj|up_proj|gate_up_proj|[qkv]_proj)[._]weight_scale_2")
    halves = [damage.reshape(EXPERTS, 2, within=GATE_UP)] if base == GPTOSS else []
    factors = (1.0, factor) if base == GPTOSS else (factor,)
    damages = [equal, *halves, damage.multiply(where, *factors)]
    source = damage.damaged(checkpoint(base), tmp_path / "source", *damages)
    try:
        findings = plan_of(source).findings
    except InputRefused as refused:
        findings = refused.findings
    found = [finding for finding in findings if finding.rule == "global-scale-ratio"]
    assert {finding.severity for finding in found} == ({severity} if severity else set())
    for finding in found:
        assert finding.layer is not None and finding.tensor and f"{1 / factor:.3g}x" in finding.message
        assert finding.experts == (() if base == DENSE else tuple(range(EXPERTS)))


def test_far_global_scales_may_stay_apart(checkpoint: Fetch, tmp_path: Path) -> None:
    uneven = damage.multiply(r".*experts\.\d+\.up_proj", 2.0**-20)
    assert "global-scale-ratio" not in rules(damage.damaged(checkpoint(QWEN), tmp_path / "source", uneven), **SPLIT)


@pytest.mark.parametrize("target", ["hf", "flashinfer-trtllm"])
@pytest.mark.parametrize("form", ["i8", "i64"])
def test_one_odd_expert_does_not_pass_for_none(form: str, target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.0.down_proj.weight"

    def change(ck: Editable) -> None:
        if form == "i8":
            ck.tensors[name] = ck.tensors[name].view(torch.int8)
            return
        ck.remove(ck.names(r"model\.layers\.0\.mlp\.experts\.0\.down_proj\..*"))
        ck.tensors[name] = torch.zeros(4, dtype=torch.int64)

    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", change)
    result = run("convert", source, tmp_path / "out", "--target", target, "--json")
    assert result.code == 3
    finding = next(finding for finding in result.findings if finding["rule"] == "unclassified")
    assert (finding["tensor"], finding["layer"], finding["experts"]) == (name, 0, [0])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("target", ["hf", "flashinfer-trtllm"])
@pytest.mark.parametrize(
    "change",
    [lambda bias: bias[:-1], lambda bias: bias[:, :-1], lambda bias: bias.double(), lambda bias: bias[0]],
    ids=["experts", "rows", "dtype", "flat"],
)
def test_biases_that_do_not_fit(
    change: Callable[[torch.Tensor], torch.Tensor], target: str, checkpoint: Fetch, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.experts.down_proj_bias"
    edit: Damage = lambda ck: ck.tensors.update({name: change(ck.tensors[name])})  # noqa: E731
    source = damage.damaged(checkpoint(GPTOSS), tmp_path / "source", edit)
    result = run("convert", source, tmp_path / "out", "--target", target, "--json")
    assert result.code == 3
    (finding,) = result.findings
    assert (finding["rule"], finding["tensor"], finding["layer"]) == ("expert-bias", name, 1)


def test_an_expert_is_read_from_its_own_bytes() -> None:
    """Should a check of the schema be missing, the next tensor's bytes are not taken for a bias."""
    weight = TensorInfo("w", "U8", (2, 8, 16), "f", 0, 256)
    short = TensorInfo("b", "F32", (1, 16), "f", 256, 320)
    linear = Linear("l", Format.NVFP4, {"weight": weight, "weight_scale": weight, "bias": short}, 16, 16, 2)
    moe = MoeLayer("m", Format.NVFP4, 2, 16, 8, True, (), linear, linear, "halves")
    read = reader(lambda tensor, start, length: bytearray(length), {"w": weight, "b": short})
    load_expert(moe, 0, read, {})
    with pytest.raises(ValueError, match=r"b: \[1, 16\] has no expert 1"):
        load_expert(moe, 1, read, {})


def test_infinities_that_transformers_writes(checkpoint: Fetch, tmp_path: Path) -> None:
    """nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B's config.json has "time_step_limit": [0.0, Infinity]."""
    source = shutil.copytree(checkpoint(NEMOTRON), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    damage.write_json(source / "config.json", config | {"time_step_limit": [0.0, float("inf")]})
    assert "Infinity\n" in (source / "config.json").read_text()
    convert(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["time_step_limit"] == [0.0, float("inf")]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("nan")]])
def test_what_json_does_not_have_is_not_written(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_bytes({"runs": [{"a": value}]})


def test_a_source_whose_name_is_no_utf_8(checkpoint: Fetch, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint(DENSE), tmp_path / os.fsdecode(b"src\xff"))
    convert(source, tmp_path / "out")
    assert manifest_of(tmp_path / "out")["source"]["name"] == "src\\xff"


# --- manifest --------------------------------------------------------------------------------------------------------


def file_digest(path: Path, piece: int = 1 << 26) -> str:
    """The digest as the manifest describes it, computed from the file alone."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    table = json.loads(raw[8 : 8 + length])
    table.pop("__metadata__", None)
    whole = xxhash.xxh3_128(xxhash.xxh3_128_digest(raw[: 8 + length]))
    for start, end in sorted(entry["data_offsets"] for entry in table.values()):
        for at in range(start, end, piece):
            whole.update(xxhash.xxh3_128_digest(raw[8 + length + at : 8 + length + min(at + piece, end)]))
    return f"xxh3-128:{whole.hexdigest()}"


@pytest.mark.parametrize("name", ["tinymoe-nvfp4-splitscale", SHARDED, GPTOSS])
def test_manifest_s_outputs(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    convert(checkpoint(name), tmp_path / "out", max_shard_bytes=2_000_000)
    outputs = manifest_of(tmp_path / "out")["outputs"]
    assert outputs == {
        path.name: {"bytes": path.stat().st_size, "digest": file_digest(path)}
        for path in (tmp_path / "out").glob("*.safetensors")
    }


def test_digests_of_tensors_in_several_pieces(
    checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small pieces and buffers, so that copies and rescales are cut."""
    piece, buffer = 3000, 1000
    for module in ("plan", "execute"):
        monkeypatch.setattr(f"nvfp4prep.{module}.PIECE_BYTES", piece)
    monkeypatch.setattr("nvfp4prep.execute.READ_BYTES", buffer)
    monkeypatch.setattr("nvfp4prep.execute._RESCALE_BYTES", buffer)
    halves = damage.reshape(EXPERTS, 2, within=GATE_UP)
    source = damage.damaged(checkpoint(GPTOSS), tmp_path / "source", halves, damage.multiply(GATE_UP, 1.0, 0.3))
    convert(source, tmp_path / "out")
    oracle.check(source, tmp_path / "out", oracle.Choices())
    path = tmp_path / "out" / "model.safetensors"
    assert manifest_of(tmp_path / "out")["outputs"][path.name]["digest"] == file_digest(path, piece)


def test_manifest_says_what_was_read_and_done(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(
        checkpoint(QWEN), tmp_path / "some-model", damage.cast(torch.bfloat16), damage.drop(BAD_DOWN)
    )
    convert(source, tmp_path / "out", **IMPUTE)
    manifest = manifest_of(tmp_path / "out")
    view = oracle.read(source)
    assert manifest["source"]["name"] == "some-model"
    assert manifest["source"]["tensors"] == len(view.tensors)
    assert manifest["source"]["bytes"] == (source / "model.safetensors").stat().st_size
    assert manifest["geometry"] == {
        "architecture": "Qwen3MoeForCausalLM",
        "model_type": "qwen3_moe",
        "moe_layers": [0, 1],
        "experts": 8,
        "hidden_size": 256,
        "intermediate_size": 128,
        "gated": True,
        "fused_gate_up": None,
    }
    (run,) = manifest["runs"]
    assert run["options"] == {
        "target": "hf",
        "input_scale": "layer-max",
        "w13_scale": "unify",
        "impute": "layer-max",
        "max_shard_bytes": 5_000_000_000,
    }
    assert run["changes"]["scales_widened_to_f32"] == 2 * 56 * 2 // 2 - 2
    assert run["source_fingerprint"] == manifest["source"]["fingerprint"]
    assert str(tmp_path) not in (tmp_path / "out" / "nvfp4prep.json").read_text()


def test_fingerprint_depends_on_contents_not_on_the_place(checkpoint: Fetch, tmp_path: Path) -> None:
    def fingerprint(label: str, *damages: Damage) -> str:
        convert(damage.damaged(checkpoint(QWEN), tmp_path / label / "model", *damages), tmp_path / label / "out")
        return manifest_of(tmp_path / label / "out")["source"]["fingerprint"]

    same = {fingerprint("one"), fingerprint("two")}
    others = {
        fingerprint("config", lambda ck: ck.config.update(rope_theta=1.0)),
        fingerprint("name", lambda ck: ck.rename(lambda name: name.replace("model.norm", "model.last_norm"))),
        fingerprint("dtype", damage.cast(torch.bfloat16)),
        fingerprint("shape", damage.reshape(1)),
    }
    assert len(same) == 1 and len(same | others) == 5


MANIFEST_OF_HALF_A_PAIR = '{"format": 1, "source": {"a": "\\ud800"}, "runs": []}'
MANIFEST_WITH_NAN = '{"format": 1, "source": {"a": NaN}, "runs": [1e999]}'


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        MANIFEST_OF_HALF_A_PAIR,
        MANIFEST_WITH_NAN,
        '{"format": 99, "source": {}, "runs": []}',
        '{"format": 1}',
    ],
)
def test_a_manifest_that_is_none_is_ignored(content: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint(DENSE), tmp_path / "source")
    (source / "nvfp4prep.json").write_text(content)
    assert "manifest-bad" in rules(source)
    convert(source, tmp_path / "out")
    assert len(manifest_of(tmp_path / "out")["runs"]) == 1


# --- while it runs ---------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(5_000)


def write_into(path: Path) -> None:
    """The last bytes, so that what is written first is as it was."""
    with path.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(1000))


def replace_by_a_copy(path: Path) -> None:
    """With the times of the original: another inode only."""
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def fails_and_leaves_nothing(prepared: Prepared, folder: Path, says: str, progress: Callable[[int], None]) -> None:
    with pytest.raises(EnvironmentFault, match=says):
        write(prepared, folder / "out", overwrite=False, workers=1, progress=progress)
    assert {path.name for path in folder.iterdir()} == {"source"}


@pytest.mark.parametrize("change", [cut, write_into, replace_by_a_copy])
def test_source_that_changes_after_planning(change: Callable[[Path], None], checkpoint: Fetch, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint(DENSE), tmp_path / "source")
    prepared = plan_of(source)
    change(source / "model.safetensors")
    says = r"model\.safetensors: changed since its header was read"
    fails_and_leaves_nothing(prepared, tmp_path, says, lambda _: None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (cut, r"model\.safetensors: nothing at byte \d+, \d+ bytes missing"),
        (write_into, r"model\.safetensors: changed since its header was read: it was written to or replaced"),
        (replace_by_a_copy, r"model\.safetensors: changed since its header was read: it was written to or replaced"),
        (Path.unlink, r"model\.safetensors: gone since its header was read"),
    ],
)
def test_source_that_changes_during_the_run(
    change: Callable[[Path], None], says: str, checkpoint: Fetch, tmp_path: Path
) -> None:
    source = shutil.copytree(checkpoint(DENSE), tmp_path / "source")
    changes = [change]

    def progress(_: int) -> None:
        if changes:
            changes.pop()(source / "model.safetensors")

    fails_and_leaves_nothing(plan_of(source), tmp_path, says, progress)


def test_nothing_loadable_before_the_end(checkpoint: Fetch, tmp_path: Path) -> None:
    """While tensors are written, OUT does not exist and OUT.partial has neither config nor index."""
    seen: list[set[str]] = []

    def progress(_: int) -> None:
        assert not (tmp_path / "out").exists()
        seen.append({path.name for path in (tmp_path / "out.partial").iterdir()})

    prepared = plan_of(checkpoint(SHARDED), max_shard_bytes=600_000)
    write(prepared, tmp_path / "out", overwrite=False, workers=2, progress=progress)
    assert len(seen) > 100
    assert not any(names & oracle.REWRITTEN for names in seen)


def test_progress_adds_up_to_the_planned_bytes(checkpoint: Fetch, tmp_path: Path) -> None:
    for name in ("tinymoe-nvfp4-splitscale", GPTOSS):
        prepared, counts = plan_of(checkpoint(name)), []
        write(prepared, tmp_path / name, overwrite=False, workers=2, progress=counts.append)
        assert sum(counts) == prepared.plan.nbytes_of_tensors
        written = sum(path.stat().st_size for path in (tmp_path / name).glob("*.safetensors"))
        assert written == prepared.plan.nbytes
