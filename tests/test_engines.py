"""The engines' verdicts: the table in code against docs/engines.md, and a detector for each of its conditions."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import damage
import pytest
import torch
from checkpoints import NVFP4
from damage import Damage

from nvfp4prep import inspection
from nvfp4prep.engine_excludes import ENGINES
from nvfp4prep.engines import CONDITIONS, Condition, Verdict

DOCS = Path(__file__).parents[1] / "docs" / "engines.md"
NOT_IN_A_CHECKPOINT = {
    "input-scale-differs-under-ep": "how it is served decides",
    "fused-llama4-tp": "how it is served decides",
    "exclude-over-match-substring": "reported as excluded-but-nvfp4, by vLLM's own rule",
    "exclude-over-match-mla-tail": "reported as excluded-but-nvfp4, by SGLang's own rule",
}

Checkpoint = Callable[[str], Path]


# --- code and docs ---------------------------------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, str, str]]:
    """Id -> the three cells, of every table row and of the verdicts in running text."""
    found: dict[str, tuple[str, str, str]] = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) >= 4 and re.match(r"(yes|refuses|wrong|.*wins)", cells[1]):
            for name in re.findall(r"`([a-z0-9-]+)`", cells[0]):
                found[name] = (cells[1], cells[2], cells[3])
        for name, *verdicts in re.findall(r"`([a-z0-9-]+)`: (\w+\??), (\w+\??), (\w+\??)", line):
            found[name] = (verdicts[0], verdicts[1], verdicts[2])
        for name in re.findall(r"^- `([a-z0-9-]+)`:", line):
            found.setdefault(name, ("", "", ""))
    return found


def test_every_documented_id_is_in_code_or_explained() -> None:
    in_code = {condition.id for condition in CONDITIONS}
    assert len(in_code) == len(CONDITIONS)
    assert set(documented()) == in_code | set(NOT_IN_A_CHECKPOINT)


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.id)
def test_cells_are_those_of_the_docs(condition: Condition) -> None:
    for engine, written in zip(ENGINES, documented()[condition.id], strict=True):
        cell = condition.cells[engine]
        if "wins" in written:
            assert str(cell) == "yes" and cell.why == written
        else:
            assert str(cell) == written


# --- detectors -------------------------------------------------------------------------------------------------------


def verdicts(folder: Path) -> dict[str, Verdict]:
    return {verdict.engine: verdict for verdict in inspection.inspect(str(folder), None).verdicts}


def ids(folder: Path) -> set[str]:
    return {reason.id for verdict in verdicts(folder).values() for reason in verdict.reasons}


def outcomes(folder: Path) -> tuple[str, ...]:
    return tuple(
        verdict.outcome + ("" if verdict.sure or verdict.outcome == "unknown" else "?")
        for verdict in verdicts(folder).values()
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dsv3-nvfp4", ("yes", "yes", "yes")),
        ("gptoss-nvfp4", ("refuses", "wrong?", "refuses")),
        ("llama4-nvfp4", ("refuses", "refuses", "yes?")),
        ("mixtral-nvfp4", ("yes", "yes", "yes")),
        ("nemotronh-nvfp4", ("refuses", "refuses?", "yes?")),
        ("qwen3-dense-nvfp4", ("yes", "yes", "yes")),
        ("qwen3moe-int4awq", ("refuses", "refuses", "yes?")),
        ("qwen3moe-mixed-fp8attn", ("yes", "yes", "yes?")),
        ("qwen3moe-nvfp4-awqlite", ("refuses", "wrong", "yes")),
        ("qwen3moe-nvfp4-expertsonly-fp8kv", ("yes", "yes", "wrong?")),
        ("qwen3moe-nvfp4-perexpert", ("yes", "yes", "yes")),
        ("qwen3moe-w4a16nvfp4", ("yes", "wrong", "yes?")),
        ("qwen3moe-w4a8awq", ("refuses", "refuses", "yes?")),
        ("tinymoe-nvfp4-splitscale", ("wrong", "yes", "wrong")),
    ],
)
def test_verdicts_of_real_checkpoints(checkpoint: Checkpoint, name: str, expected: tuple[str, ...]) -> None:
    assert outcomes(checkpoint(name)) == expected


def without_hf(ck: damage.Editable) -> None:
    ck.hf = None


def without_flat(ck: damage.Editable) -> None:
    del ck.config["quantization_config"]


def flat_without(*keys: str) -> Damage:
    def change(ck: damage.Editable) -> None:
        for key in keys:
            ck.config["quantization_config"].pop(key, None)

    return change


def nested_without(*keys: str) -> Damage:
    def change(ck: damage.Editable) -> None:
        assert ck.hf is not None
        for key in keys:
            ck.hf["quantization"].pop(key, None)

    return change


def architecture(name: str) -> Damage:
    return lambda ck: ck.config.update(architectures=[name])


def weight_only_groups(ck: damage.Editable) -> None:
    for group in ck.config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None


def exclude(*entries: str) -> Damage:
    return lambda ck: ck.set_exclude([*ck.sections[0]["ignore"], *entries])


def exclude_only(*entries: str) -> Damage:
    return lambda ck: ck.set_exclude(entries)


def pre_quant(pattern: str, *, step: float) -> Damage:
    """Give linears a pre_quant_scale, each `step` apart."""

    def change(ck: damage.Editable) -> None:
        for position, name in enumerate(ck.names(pattern)):
            scale = torch.full((4,), 1 + step * position, dtype=torch.bfloat16)
            ck.tensors[name.removesuffix(".weight") + ".pre_quant_scale"] = scale

    return change


def quantized_layers(change_keys: Callable[[damage.Editable], dict[str, dict[str, object]]]) -> Damage:
    def change(ck: damage.Editable) -> None:
        keys = change_keys(ck)
        for section in ck.sections:
            section["quantized_layers"] = keys

    return change


def per_linear_keys(ck: damage.Editable) -> dict[str, dict[str, object]]:
    layers: dict[str, dict[str, object]] = {
        key: entry for key, entry in ck.sections[0]["quantized_layers"].items() if not key.endswith(".experts")
    }
    for name in ck.names(r".*experts\.\d+\..*_proj\.weight"):
        layers[name.removesuffix(".weight")] = {"quant_algo": "NVFP4", "group_size": 16}
    return layers


W13_IN = r"model\.layers\.0\.mlp\.experts\.\d+\.(gate|up)_proj\.input_scale"
W2_IN = r"model\.layers\.0\.mlp\.experts\.\d+\.down_proj\.input_scale"
ONE_W2_IN = r"model\.layers\.0\.mlp\.experts\.3\.down_proj\.input_scale"
EXPERTS = r"model\.layers\.\d+\.mlp\.experts\.\d+\."
MOE = "qwen3moe-nvfp4-perexpert"
MIXED = "qwen3moe-mixed-fp8attn"

CASES: tuple[tuple[str, str, tuple[Damage, ...], tuple[str, str, str]], ...] = (
    # condition that must be found, source, damages, verdicts of the three engines over all conditions
    (
        "nvfp4-declared-weight-only",
        "qwen3moe-w4a16nvfp4",
        (lambda ck: ck.set_algo("NVFP4"),),
        ("yes", "wrong", "refuses"),
    ),
    (
        "mixed-without-layers",
        MIXED,
        (flat_without("quantized_layers"), nested_without("quantized_layers")),
        ("refuses", "refuses?", "refuses"),
    ),
    ("mixed-layers-only-in-hf-quant-config", MIXED, (flat_without("quantized_layers"),), ("yes", "refuses?", "yes?")),
    ("mixed-config-json-only", MIXED, (without_hf,), ("yes", "refuses", "yes?")),
    (
        "mixed-config-json-only",
        MIXED,
        (without_hf, lambda ck: ck.sections[0].update(kv_cache_scheme=None)),
        ("yes", "yes", "yes?"),
    ),
    ("mixed-container-key-only", MIXED, (), ("yes", "yes", "yes?")),
    ("mixed-per-linear-keys-only", MIXED, (quantized_layers(per_linear_keys),), ("yes", "yes", "yes?")),
    ("config-json-only", MOE, (without_hf,), ("yes", "yes", "yes")),
    ("hf-quant-config-only", MOE, (without_flat,), ("yes", "yes", "yes")),
    ("hf-quant-config-only", MOE, (without_flat, nested_without("kv_cache_quant_algo")), ("refuses", "yes", "yes")),
    ("hf-quant-config-only", MOE, (without_flat, nested_without("group_size")), ("refuses", "refuses", "yes")),
    ("hf-quant-config-only-w4a16", "qwen3moe-w4a16nvfp4", (without_flat,), ("refuses", "wrong", "yes?")),
    (
        "config-files-disagree",
        MOE,
        (lambda ck: ck.sections[1].update(kv_cache_quant_algo="FP8"),),
        ("yes", "yes", "yes"),
    ),
    ("input-scale-differs-between-experts", MOE, (), ("yes", "yes", "yes")),
    (
        "input-scale-gate-up-differ",
        MOE,
        (damage.multiply(EXPERTS + "gate_proj", 0.5, param="input_scale"),),
        ("yes", "wrong", "refuses"),
    ),
    ("input-scale-missing-some", MOE, (damage.drop(ONE_W2_IN),), ("wrong", "wrong", "refuses")),
    ("input-scale-missing-all", MOE, (damage.drop(W2_IN),), ("wrong", "wrong", "refuses")),
    ("input-scale-zero-some", MOE, (damage.put(0.0, ONE_W2_IN),), ("yes", "yes", "yes")),
    ("input-scale-zero-all", MOE, (damage.put(0.0, W2_IN),), ("wrong", "wrong", "wrong")),
    ("input-scale-inf", MOE, (damage.put(float("inf"), ONE_W2_IN),), ("wrong", "wrong", "wrong")),
    ("input-scale-nan", MOE, (damage.put(float("nan"), W13_IN),), ("wrong", "wrong", "refuses")),
    ("input-scale-nan", MOE, (damage.put(float("nan"), ONE_W2_IN),), ("wrong", "wrong", "wrong")),
    ("no-row", MOE, (damage.put(-1.0, ONE_W2_IN),), ("unknown", "unknown", "unknown")),
    ("weight-scale-2-gate-up-differ", MOE, (damage.multiply(EXPERTS + "gate_proj", 0.5),), ("wrong", "yes", "wrong")),
    ("scale-shape-1", MOE, (damage.reshape(1, within=EXPERTS + ".*"),), ("yes", "yes", "yes")),
    ("scale-bf16", MOE, (damage.cast(torch.bfloat16),), ("yes", "yes", "wrong")),
    ("linear-scale-16bit", "qwen3-dense-nvfp4", (damage.cast(torch.bfloat16),), ("yes", "yes", "wrong")),
    ("scale-f16", MOE, (damage.cast(torch.float16, "input_scale"),), ("yes", "yes", "wrong")),
    (
        "fused-llama4-scalar",
        "llama4-nvfp4",
        (architecture("Llama4ForConditionalGeneration"),),
        ("yes?", "refuses", "yes"),
    ),
    ("fused-scale-e", "llama4-nvfp4", (damage.reshape(8, within=".*experts.*"),), ("refuses", "refuses", "refuses")),
    (
        "fused-scale-e1",
        "llama4-nvfp4",
        (damage.reshape(8, 1, within=".*experts.*"),),
        ("refuses", "refuses", "refuses"),
    ),
    (
        "fused-scale-e2",
        "llama4-nvfp4",
        (damage.reshape(8, 2, within=".*gate_up_proj"),),
        ("refuses", "refuses", "refuses"),
    ),
    (
        "fused-scale-16bit",
        "llama4-nvfp4",
        (architecture("Llama4ForConditionalGeneration"), damage.cast(torch.bfloat16)),
        ("yes?", "refuses", "wrong"),
    ),
    ("qkv-weight-scale-2-differ", MOE, (damage.multiply(r".*\.k_proj", 0.5),), ("wrong", "wrong", "refuses")),
    (
        "qkv-input-scale-differ",
        MOE,
        (damage.multiply(r".*\.k_proj", 0.5, param="input_scale"),),
        ("yes", "yes", "refuses"),
    ),
    (
        "dense-gate-up-weight-scale-2-differ",
        "qwen3-dense-nvfp4",
        (damage.multiply(r".*\.up_proj", 0.5),),
        ("wrong", "wrong", "refuses"),
    ),
    (
        "dense-gate-up-input-scale-differ",
        "qwen3-dense-nvfp4",
        (damage.multiply(r".*\.up_proj", 0.5, param="input_scale"),),
        ("yes", "yes", "refuses"),
    ),
    (
        "qa-kva-weight-scale-2-differ",
        "dsv3-nvfp4",
        (damage.multiply(r".*\.q_a_proj", 0.5),),
        ("wrong", "wrong", "refuses?"),
    ),
    (
        "qa-kva-input-scale-differ",
        "dsv3-nvfp4",
        (damage.multiply(r".*\.q_a_proj", 0.5, param="input_scale"),),
        ("yes", "wrong", "refuses"),
    ),
    (
        "qa-kva-scale-shape-1",
        "dsv3-nvfp4",
        (damage.reshape(1, within=r".*(q_a_proj|kv_a_proj_with_mqa)"),),
        ("yes", "refuses?", "yes"),
    ),
    ("linear-input-scale-missing", MOE, (damage.drop(r".*\.o_proj\.input_scale"),), ("wrong", "wrong", "wrong?")),
    (
        "pre-quant-scale-linear",
        "qwen3-dense-nvfp4",
        (pre_quant(r".*\.o_proj\.weight", step=0),),
        ("refuses", "yes", "yes"),
    ),
    (
        "pre-quant-scale-experts",
        MOE,
        (pre_quant(r".*experts\..*(gate|up)_proj\.weight", step=0),),
        ("refuses", "wrong", "yes"),
    ),
    (
        "pre-quant-scale-experts-differ",
        MOE,
        (pre_quant(r".*experts\..*(gate|up)_proj\.weight", step=1),),
        ("refuses", "wrong", "refuses"),
    ),
    (
        "pre-quant-scale-experts-down",
        MOE,
        (pre_quant(r".*experts\..*down_proj\.weight", step=0),),
        ("refuses", "wrong", "wrong"),
    ),
    (
        "kv-scale-names-llama4",
        "llama4-nvfp4",
        (
            architecture("Llama4ForConditionalGeneration"),
            damage.add(model__layers__0__self_attn__k_proj__k_scale=torch.tensor(1.0)),
        ),
        ("yes?", "refuses", "wrong?"),
    ),
    (
        "bf16-not-excluded",
        "qwen3moe-nvfp4-expertsonly-fp8kv",
        (exclude_only("lm_head"),),
        ("refuses", "refuses", "refuses"),
    ),
    ("excluded-but-nvfp4", MOE, (exclude("model.layers.0.self_attn.o_proj"),), ("refuses", "refuses", "refuses?")),
    ("excluded-but-nvfp4", "qwen3-dense-nvfp4", (exclude("model.layers.0.mlp.gate"),), ("refuses", "yes", "yes")),
    (
        "excluded-but-nvfp4",
        "dsv3-nvfp4",
        (exclude("model.layers.7.self_attn.kv_a_proj_with_mqa"),),
        ("yes", "refuses", "yes"),
    ),
    ("exclude-some-shards", MOE, (exclude("model.layers.0.self_attn.q_proj"),), ("refuses", "refuses", "refuses")),
)


@pytest.mark.parametrize(
    ("condition", "source", "damages", "expected"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_condition(
    checkpoint: Checkpoint,
    tmp_path: Path,
    condition: str,
    source: str,
    damages: tuple[Damage, ...],
    expected: tuple[str, str, str],
) -> None:
    folder = damage.damaged(checkpoint(source), tmp_path / "damaged", *damages)
    assert condition in ids(folder)
    assert outcomes(folder) == expected


def test_every_condition_occurs(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """No detector is dead: each fires for a shipped checkpoint or a case above."""
    found = {case[0] for case in CASES}
    for name in (*NVFP4, "qwen3moe-int4awq", "qwen3moe-w4a8awq"):
        found |= ids(checkpoint(name))
    mixed_dtypes = damage.damaged(
        checkpoint(MOE),
        tmp_path / "dtypes",
        lambda ck: ck.tensors.update(
            {n: ck.tensors[n].bfloat16() for n in ck.names(EXPERTS + r"gate_proj\.weight_scale_2")}
        ),
    )
    found |= ids(mixed_dtypes)
    assert {condition.id for condition in CONDITIONS} <= found
