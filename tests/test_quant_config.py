"""Both configuration files into one model and back; exclude lists against what is stored."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from nvfp4prep.engine_excludes import ENGINES, SomeShards, engine_modules, matcher
from nvfp4prep.header import TensorInfo, tensor_bytes
from nvfp4prep.quant_config import (
    ExcludeReport,
    QuantConfig,
    algo_of,
    check_config,
    hf_quant_config,
    quantization_config,
    quantization_section,
    read_quant_config,
    rewrite,
    rewrite_exclude,
    rewritten_config,
    weight_only_modules,
)
from nvfp4prep.schema import Schema, build_schema

# --- small checkpoints -----------------------------------------------------------------------------------------------


def info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, dtype, shape, "f", 0, tensor_bytes(dtype, shape))


def nvfp4(module: str, input_scale: bool = True) -> list[TensorInfo]:
    scales = ["weight_scale_2", *(["input_scale"] if input_scale else [])]
    return [
        info(f"{module}.weight", "U8", 32, 16),
        info(f"{module}.weight_scale", "F8_E4M3", 32, 2),
        *(info(f"{module}.{scale}", "F32") for scale in scales),
    ]


def fp8(module: str) -> list[TensorInfo]:
    return [info(f"{module}.weight", "F8_E4M3", 32, 32), info(f"{module}.weight_scale", "F32")]


def plain(module: str, *shape: int) -> list[TensorInfo]:
    return [info(f"{module}.weight", "BF16", *(shape or (32, 32)))]


def experts(layer: int, *, quantized: bool = True, count: int = 2) -> list[TensorInfo]:
    modules = [f"model.layers.{layer}.mlp.experts.{e}.{p}_proj" for e in range(count) for p in ("gate", "up", "down")]
    return [tensor for module in modules for tensor in (nvfp4(module) if quantized else plain(module))]


def schema_of(*parts: Iterable[TensorInfo], **config: Any) -> Schema:
    schema = build_schema({tensor.name: tensor for part in parts for tensor in part}, config)
    assert not [finding for finding in schema.findings if finding.severity == "error"]
    return schema


def q(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.o_proj"


def excluded(schema: Schema, *entries: str, tied: bool = False) -> ExcludeReport:
    return rewrite_exclude(schema, entries, tied)


def rules(report: ExcludeReport) -> set[str]:
    return {finding.rule for finding in report.findings}


# --- exclude lists ----------------------------------------------------------------------------------------------------

ELEVEN = schema_of(plain("lm_head"), plain(q(1)), *(nvfp4(q(i)) for i in (10, 11)), plain("model.norm", 32))


@pytest.mark.parametrize(
    ("entry", "fate"),
    [
        (q(1), "kept"),
        ("model.layers.1", "kept"),
        ("model.layers.1.*", "kept"),
        ("model.layers.1.self_attn*", "kept"),
        ("*layers.1.*o_proj", "kept"),
        ("model.layers.[1].self_attn.o_proj", "kept"),
        ("model.layers.?.self_attn.o_proj", "kept"),
        (r"re:model\.layers\.1\.", "kept"),
        (r"re:.*layers\.1\..*", "kept"),
        ("model.layers.1*", "contradicted"),
        ("model.layers.*", "contradicted"),
        ("*", "contradicted"),
        ("re:.*layers.1.*", "contradicted"),
        ("model.layers.11.self_attn.o_proj", "contradicted"),
        ("model.layers.2*", "unmatched"),
        ("model.layers.1.self_attn.o", "unmatched"),
        ("layers.1", "unmatched"),
        ("re:[", "unmatched"),
        ("model.norm", "unmatched"),
        ("", "corrupted"),
        ("lm_head.\0x", "corrupted"),
        ("lm_head\n", "corrupted"),
    ],
)
def test_an_old_entry_s_fate(entry: str, fate: str) -> None:
    report = excluded(ELEVEN, "lm_head", entry)
    assert report.names == ("lm_head", q(1))
    found = {name: entry in getattr(report, name) for name in ("corrupted", "unmatched", "contradicted")}
    assert found == {name: name == fate for name in found}
    hits_q1 = fate == "kept" or (fate == "contradicted" and "11.self" not in entry)
    assert report.added == (() if hits_q1 else (q(1),))
    assert (f"exclude-{fate}" in rules(report)) == (fate != "kept")


def test_a_nameless_module_is_not_listed() -> None:
    """An empty entry is a substring of every module's name: vLLM would exclude them all."""
    schema = schema_of(plain("lm_head", 8, 8), [info("weight", "BF16", 2, 2)], nvfp4(q(0)))
    report = excluded(schema, "lm_head")
    assert report.names == ("lm_head",) and "" not in report.added
    assert "exclude-nameless" in rules(report) and "exclude-substring" not in rules(report)


HOSTILE = [
    "a{99999999999999999999}",
    "(" * 3000,
    r"(\w+\.?)+!",
    r"(a|a)*b",
    r"(?x)(\w+) *!",
    r"(\w+)(?#x)*!",
    r"((?:\w+))+?!",
    r"(?:\w*){2,}!",
    "[" * 50,
    ".*" * 40 + "!",
    "[a-z.]?" * 60 + "!",
    "(?:m|m)" * 60 + "!",
    r"(\w+)\1\1!",
    "a" * 100_000,
    "*" * 10,
]


@pytest.mark.parametrize("entry", HOSTILE, ids=lambda entry: entry[:12])
@pytest.mark.filterwarnings("error")
def test_hostile_patterns_match_nothing_and_are_told(entry: str) -> None:
    schema = schema_of(plain("model." + "m" * 80, 8, 8), nvfp4(q(0)))
    begun = time.monotonic()
    report = excluded(schema, f"re:{entry}")
    assert time.monotonic() - begun < 2
    assert report.unmatched == (f"re:{entry}",) and "exclude-pattern" in rules(report)
    assert max(len(finding.message) for finding in report.findings) < 500


@pytest.mark.parametrize("entry", HOSTILE, ids=lambda entry: entry[:12])
@pytest.mark.filterwarnings("error")
def test_hostile_patterns_in_the_engines_eyes(entry: str) -> None:
    schema = schema_of(plain("model." + "m" * 80, 8, 8), nvfp4(q(0)))
    begun = time.monotonic()
    for engine in ENGINES:
        matches = matcher(engine, [entry, f"re:{entry}"])
        for module in engine_modules(schema):
            with suppress(SomeShards):
                matches(module)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize(
    "entry",
    [
        r"re:.*self_attn.*",
        r"re:model\.layers\.\d+\.self_attn\.o_proj$",
        r"re:(?:lm_head|model\.layers\.[0-9]+\..*)",
        r"re:^(?!.*mlp).*o_proj",
    ],
)
def test_ordinary_patterns_match(entry: str) -> None:
    schema = schema_of(*(nvfp4(q(layer)) for layer in range(60)), plain("lm_head", 8, 8))
    assert excluded(schema, entry).contradicted == (entry,)


def test_over_match_says_how_many_and_which() -> None:
    finding = next(f for f in excluded(ELEVEN, "model.layers.1*").findings if f.rule == "exclude-contradicted")
    assert f"excludes 2 modules stored quantised ({q(10)})" in finding.message


def test_every_unquantised_module_with_a_matrix_is_named() -> None:
    schema = schema_of(
        plain("model.embed_tokens", 64, 32),
        plain("model.layers.0.mlp.gate", 2, 32),
        plain("model.layers.0.mixer.conv1d", 64, 1, 4),
        plain("model.layers.0.norm", 32),
        plain("vision.patch", 4, 3, 2, 2),
        [info("model.layers.0.mixer.A_log", "F32", 8), info("model.layers.0.attn.sinks", "BF16", 4, 4)],
        fp8("model.layers.0.fp8"),
        nvfp4("model.layers.0.o_proj"),
        [info("model.table.weight", "I32", 4, 4), info("model.double.weight", "F64", 2, 2)],
    )
    expected = {
        "model.embed_tokens",
        "model.layers.0.mlp.gate",
        "model.layers.0.mixer.conv1d",
        "vision.patch",
        "model.double",
    }
    assert set(excluded(schema).names) == expected
    assert excluded(schema).names == excluded(schema, *expected, "x").names


def test_unquantised_experts_are_named_with_their_container() -> None:
    schema = schema_of(experts(0, quantized=False), experts(1))
    per_expert = {f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up", "down")}
    assert set(excluded(schema).names) == {"model.layers.0.mlp.experts", *per_expert}
    assert excluded(schema, "model.layers.0.mlp.experts").added == ()
    assert excluded(schema, "model.layers.0*").contradicted == ()
    assert excluded(schema, "*.experts").contradicted == ("*.experts",)


def test_unquantised_fused_experts_are_named_by_their_container() -> None:
    base = "model.layers.0.mlp.experts"
    schema = schema_of([info(f"{base}.gate_up_proj", "BF16", 2, 32, 64), info(f"{base}.down_proj", "BF16", 2, 32, 32)])
    assert excluded(schema).names == (base,)


def test_natural_order_without_duplicates() -> None:
    schema = schema_of(*(plain(q(i)) for i in (10, 9, 1)))
    assert excluded(schema, q(9), q(9), q(1)).names == (q(1), q(9), q(10))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored", ["absent", "plain", "quantized"])
def test_lm_head(tied: bool, stored: str) -> None:
    head = {"absent": [], "plain": plain("lm_head"), "quantized": nvfp4("lm_head")}[stored]
    report = excluded(schema_of(plain("model.embed_tokens"), head), "lm_head", tied=tied)
    kept = stored == "plain" or (tied and stored == "absent")
    assert ("lm_head" in report.names) == kept
    assert report.unmatched == (("lm_head",) if stored == "absent" and not tied else ())
    assert report.contradicted == (("lm_head",) if stored == "quantized" else ())


@pytest.mark.parametrize(
    ("name", "quantized", "warns"),
    [
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_proj", True),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate_up_proj", True),
        ("model.layers.1.mlp.gate", "model.layers.11.mlp.gate_proj", False),
        ("model.layers.1.mlp.gate", "model.layers.1.mlp.gate.inner", True),
        ("model.layers.1.mlp.router", "model.layers.1.mlp.gate_proj", False),
        ("lm_head", "lm_head2", True),
    ],
)
def test_names_that_vllm_takes_for_more(name: str, quantized: str, warns: bool) -> None:
    report = excluded(schema_of(plain(name), nvfp4(quantized)), name)
    assert ("exclude-substring" in rules(report)) == warns
    assert report.names == (name,)


def test_a_shared_prefix_hides_no_substring_hit() -> None:
    """`gate.inner` sorts between `gate` and `gate_proj`: the hit is not the first quantised name after the entry."""
    base = "model.layers.1.mlp"
    report = excluded(schema_of(plain(f"{base}.gate"), nvfp4(f"{base}.gate.inner"), nvfp4(f"{base}.gate_proj")))
    assert "exclude-substring" in rules(report)


@pytest.mark.parametrize("tail", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"])
def test_tails_that_sglang_takes_for_every_layer(tail: str) -> None:
    names = [f"model.layers.{i}.self_attn.{tail}" for i in (0, 1)]
    report = excluded(schema_of(plain(names[0]), nvfp4(names[1])), names[0])
    assert ("exclude-tail" in rules(report)) == (tail != "o_proj")


# --- read -------------------------------------------------------------------------------------------------------------


def flat(**keys: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], **keys}}


def nested(**keys: Any) -> dict[str, Any]:
    section = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
    return {"producer": {"name": "modelopt"}, "quantization": section | keys}


def read(config: Mapping[str, Any], hf: Mapping[str, Any] | None) -> tuple[QuantConfig, dict[str, str]]:
    quant, findings = read_quant_config(config, hf)
    assert quant is not None, findings
    return quant, {finding.rule: finding.message for finding in findings}


def test_either_file_may_be_missing() -> None:
    alone, findings = read(flat(group_size=16), None)
    assert (alone.algo, alone.exclude, alone.group_size) == ("NVFP4", ("lm_head",), 16)
    assert set(findings) == {"quant-config-missing"}
    other, findings = read({"model_type": "x"}, nested())
    assert (other.algo, other.exclude, other.group_size) == ("NVFP4", ("lm_head",), 16)
    assert other.producer == {"name": "modelopt"} and set(findings) == {"quant-config-missing"}
    both, findings = read(flat(), nested())
    assert both.group_size == 16 and findings == {}


@pytest.mark.parametrize(
    "config", [{}, {"quantization_config": None}, {"quantization_config": {}}, flat(quant_algo=None)]
)
@pytest.mark.parametrize("hf", [None, {}, {"quantization": None}, {"quantization": []}, nested(quant_algo=None)])
def test_null_and_empty_sections(config: Mapping[str, Any], hf: Mapping[str, Any] | None) -> None:
    quant, findings = read_quant_config(config, hf)
    assert quant is None
    assert findings[-1].rule == "no-quant-config" and findings[-1].severity == "error"
    assert read(config, nested())[0].algo == "NVFP4"
    assert read(flat(), hf)[0].algo == "NVFP4"


@pytest.mark.parametrize(
    ("keys", "hf", "label"),
    [
        ({"quant_algo": "FP8"}, {}, "quant_algo: FP8 here, NVFP4"),
        ({}, {"kv_cache_quant_algo": "FP8"}, "KV cache: None here, FP8"),
        ({"group_size": 32}, {}, "group_size: 32 here, 16"),
        ({"ignore": ["lm_head", "a"]}, {}, "exclude lists differ: only one of them has 'a'"),
        ({"ignore": []}, {}, "exclude lists differ: only one of them has 'lm_head'"),
        ({"quantized_layers": {"a": {"quant_algo": "FP8"}}}, {}, "quantized_layers: differ"),
    ],
)
def test_disagreement_is_told(keys: dict[str, Any], hf: dict[str, Any], label: str) -> None:
    _, findings = read(flat(**keys), nested(**hf))
    assert findings["configs-disagree"].startswith(label)


def test_exclude_lists_are_joined() -> None:
    quant, _ = read(flat(ignore=["b", "a"]), nested(exclude_modules=["a", "c", 7, None]))
    assert quant.exclude == ("b", "a", "c")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "FP8"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "NVFP4"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None),
        ({"kv_cache_scheme": {"num_bits": [8], "type": "float"}}, None),
        ({"kv_cache_scheme": "FP8"}, "FP8"),
        ({"kv_cache_quant_algo": "FP8"}, "FP8"),
        ({"kv_cache_scheme": None}, None),
        ({}, None),
    ],
)
def test_kv_cache_forms(keys: dict[str, Any], expected: str | None) -> None:
    assert read(flat(**keys), None)[0].kv_cache == expected


@pytest.mark.parametrize("algo", ["FP8", "NVFP4"])
def test_kv_cache_is_written_in_both_forms(algo: str) -> None:
    section = quantization_config(QuantConfig("NVFP4", kv_cache=algo, group_size=16))
    assert section["kv_cache_scheme"]["num_bits"] == {"FP8": 8, "NVFP4": 4}[algo]
    assert hf_quant_config(QuantConfig("NVFP4", kv_cache=algo))["quantization"]["kv_cache_quant_algo"] == algo
    stored = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "tensor"}
    assert quantization_config(read(flat(kv_cache_scheme=stored), None)[0])["kv_cache_scheme"] == stored
    assert "kv_cache_scheme" not in quantization_config(QuantConfig("NVFP4"))


def test_spellings() -> None:
    assert read(flat(quant_algo="nvfp4"), None)[0].algo == "NVFP4"
    inner = {"quantization_config": {"quant_method": "modelopt_fp4", **nested()}}
    assert read(inner, None)[0].exclude == ("lm_head",)
    groups = {"group_0": {"weights": {"group_size": 16}}, "odd": None}
    assert read(flat(config_groups=groups), None)[0].group_size == 16
    swapped = flat()
    swapped["quantization_config"]["exclude_modules"] = swapped["quantization_config"].pop("ignore")
    assert read(swapped, None)[0].exclude == ("lm_head",)


@pytest.mark.parametrize(
    ("method", "rule"), [("nvfp4prep", "not-modelopt"), ("fp8", "not-modelopt"), ("awq", "not-modelopt")]
)
def test_other_methods(method: str, rule: str) -> None:
    quant, findings = read_quant_config(flat(quant_method=method), nested())
    assert quant is None and [finding.rule for finding in findings] == [rule]


def test_text_config() -> None:
    section = flat()["quantization_config"]
    assert quantization_section({"text_config": {"quantization_config": section}}) == section
    assert (
        quantization_section({"quantization_config": None, "text_config": {"quantization_config": section}}) == section
    )
    assert quantization_section({"quantization_config": None, "text_config": None}) is None


@pytest.mark.parametrize("top", [False, True])
def test_rewritten_where_it_stood(top: bool) -> None:
    old = {"text_config": {"hidden": 1, "quantization_config": {"quant_algo": "OLD"}}, "x": [1]}
    config = old | ({"quantization_config": {"quant_algo": "OLD"}} if top else {})
    quant = QuantConfig("NVFP4", ("lm_head",), group_size=16)
    section = quantization_config(quant)
    written = rewritten_config(config, section)
    text = {"hidden": 1} if top else {"hidden": 1, "quantization_config": section}
    assert written == {"text_config": text, "x": [1], **({"quantization_config": section} if top else {})}
    assert config["text_config"]["quantization_config"] == {"quant_algo": "OLD"}


# --- written back -----------------------------------------------------------------------------------------------------

MODELS = {
    "nvfp4": QuantConfig("NVFP4", ("lm_head", "a"), group_size=16, producer={"name": "modelopt", "version": "1"}),
    "kv": QuantConfig("NVFP4", ("lm_head",), "FP8", group_size=16),
    "w4a16": QuantConfig("W4A16_NVFP4", (), group_size=16),
    "awq": QuantConfig("NVFP4_AWQ", ("x",), group_size=16, extras={"has_zero_point": False, "pre_quant_scale": True}),
    "mixed": QuantConfig(
        "MIXED_PRECISION",
        ("lm_head",),
        layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_both_files_parse_to_the_model_they_were_written_from(name: str) -> None:
    model = MODELS[name]
    config, hf = {"quantization_config": quantization_config(model)}, hf_quant_config(model)
    for quant, findings in (read(config, hf), read(config, None), read({}, hf)):
        assert "configs-disagree" not in findings
        for key in ("algo", "exclude", "kv_cache", "layers", "producer"):
            assert getattr(quant, key) == getattr(model, key), key
        assert quant.extras == (model.extras or {})
        assert quant.group_size == model.group_size or name == "mixed"
    assert {"kv_cache_quant_algo", "exclude_modules"} <= hf["quantization"].keys()
    assert ("group_size" in hf["quantization"]) == (name != "mixed")


def test_config_groups() -> None:
    group = quantization_config(MODELS["nvfp4"])["config_groups"]["group_0"]
    args = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert group == {"input_activations": args, "weights": args, "targets": ["Linear"]}
    assert quantization_config(MODELS["w4a16"])["config_groups"]["group_0"] == {"weights": args, "targets": ["Linear"]}
    mixed = quantization_config(MODELS["mixed"])
    assert {g["targets"][0]: g["weights"].get("group_size") for g in mixed["config_groups"].values()} == {
        "a": None,
        "b": 16,
    }
    assert mixed["kv_cache_scheme"] is None


def rewritten(schema: Schema, quant: QuantConfig) -> QuantConfig:
    return rewrite(schema, quant, rewrite_exclude(schema, quant.exclude, False))


def test_mixed_layers_are_written_anew() -> None:
    """From a sparse list with a container, a stale name and an FP8 entry with details of its own."""
    layers = {
        "model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.o_proj": {"quant_algo": "FP8", "note": 1},
        "model.layers.9.gone": {"quant_algo": "FP8"},
    }
    schema = schema_of(
        experts(0), experts(1), fp8("model.layers.0.o_proj"), fp8("model.layers.1.o_proj"), plain("lm_head")
    )
    found = rewritten(schema, QuantConfig("MIXED_PRECISION", layers=layers)).layers
    assert found is not None
    containers = {f"model.layers.{i}.mlp.experts" for i in (0, 1)}
    linears = {f"{c}.{e}.{p}_proj" for c in containers for e in (0, 1) for p in ("gate", "up", "down")}
    assert found.keys() == containers | linears | {"model.layers.0.o_proj", "model.layers.1.o_proj"}
    assert {found[name]["quant_algo"] for name in containers | linears} == {"NVFP4"}
    assert found["model.layers.0.o_proj"] == layers["model.layers.0.o_proj"]
    assert found["model.layers.1.o_proj"] == {"quant_algo": "FP8"}


@pytest.mark.parametrize("declared", ["NVFP4", "W4A16_NVFP4", None])
@pytest.mark.parametrize("stored", [True, False])
def test_mixed_says_whether_activations_are_quantised(declared: str | None, stored: bool) -> None:
    """An entry NVFP4 without any input_scale in the checkpoint would make engines read scales that are not there."""
    module = "model.layers.0.o_proj"
    layers = {module: {"quant_algo": declared}} if declared else None
    schema = schema_of(nvfp4(module, stored), fp8("model.layers.1.o_proj"))
    found = rewritten(schema, QuantConfig("MIXED_PRECISION", layers=layers)).layers
    expected = "W4A16_NVFP4" if not stored or declared == "W4A16_NVFP4" else "NVFP4"
    assert found and found[module] == {"quant_algo": expected, "group_size": 16}


def test_algo_of_a_module() -> None:
    quant = QuantConfig(
        "MIXED_PRECISION", layers={"a": {"quant_algo": "fp8"}, "m.experts": {"quant_algo": "W4A16_NVFP4"}}
    )
    assert algo_of("a", quant) == "FP8"
    assert algo_of("m.experts.0.up_proj", quant, "m.experts") == "W4A16_NVFP4"
    assert algo_of("b", quant) == "MIXED_PRECISION"


def test_weight_only_modules() -> None:
    with_scale, without = nvfp4("a.o_proj"), nvfp4("b.o_proj", input_scale=False)
    nv, w16 = QuantConfig("NVFP4"), QuantConfig("W4A16_NVFP4")
    assert weight_only_modules(schema_of(with_scale, without), nv) == frozenset()
    assert weight_only_modules(schema_of(without), nv) == {"b.o_proj"}
    assert weight_only_modules(schema_of(with_scale, without), w16) == {"a.o_proj", "b.o_proj"}
    mixed = QuantConfig("MIXED_PRECISION", layers={"b.o_proj": {"quant_algo": "W4A16_NVFP4"}})
    assert weight_only_modules(schema_of(with_scale, without), mixed) == {"b.o_proj"}


@pytest.mark.parametrize(
    ("parts", "quant", "rule", "severity"),
    [
        ([nvfp4("a.o_proj")], QuantConfig("NVFP4"), None, None),
        ([nvfp4("a.o_proj")], QuantConfig("FP8"), "algo-contradicts-weights", "error"),
        ([nvfp4("a.o_proj"), fp8("b.o_proj")], QuantConfig("NVFP4"), "algo-contradicts-weights", "error"),
        ([nvfp4("a.o_proj"), fp8("b.o_proj")], QuantConfig("MIXED_PRECISION", layers={"b.o_proj": {}}), None, None),
        ([nvfp4("a.o_proj"), fp8("b.o_proj")], QuantConfig("MIXED_PRECISION"), "quantized-layers-missing", "warning"),
        ([plain("a.o_proj")], QuantConfig("NVFP4"), "nothing-to-convert", "error"),
        ([nvfp4("a.o_proj")], QuantConfig("NVFP4", group_size=32), "group-size", "warning"),
        ([nvfp4("a.o_proj", False)], QuantConfig("NVFP4"), "no-input-scales", "warning"),
        ([nvfp4("a.o_proj", False)], QuantConfig("W4A16_NVFP4"), None, None),
        ([nvfp4("a.o_proj")], QuantConfig("NVFP4_AWQ"), "nvfp4-awq", "warning"),
    ],
)
def test_config_against_what_is_stored(
    parts: list[list[TensorInfo]], quant: QuantConfig, rule: str | None, severity: str | None
) -> None:
    found = [(finding.rule, finding.severity) for finding in check_config(schema_of(*parts), quant)]
    assert found == ([(rule, severity)] if rule else [])
