"""For each rule of `validate` a smallest checkpoint that fails it, made from a shipped one that passes it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import damage
import test_refused as refused
import torch
from damage import Damage, Editable
from runner import run
from safetensors.torch import load_file, save_file
from test_refused import AWQ, DENSE, DSV3, LLAMA4, QWEN, SHARDED, algo, both, replace, unquantize, with_config

Change = Callable[[Path], None]
"""Done to a copy of a checkpoint's folder."""

MIXED, KV, W4A16, INT4 = (
    "qwen3moe-mixed-fp8attn",
    "qwen3moe-nvfp4-expertsonly-fp8kv",
    "qwen3moe-w4a16nvfp4",
    "qwen3moe-w4a8awq",
)
EXPERTS = r"model\.layers\.0\.mlp\.experts"
RANK = "rank-01-of-02_00-of-01"


@dataclass(frozen=True)
class Case:
    """A shipped checkpoint, what is done to it, and from which level on it is found. `packed`: converted first."""

    base: str
    damage: Damage | None = None
    change: Change | None = None
    level: str = "headers"
    severity: str = "error"
    options: tuple[str, ...] = ()
    convert: tuple[str, ...] | None = None
    says: str = field(default="")

    def sound(self, source: Path, folder: Path) -> Path:
        """The checkpoint that passes."""
        if self.convert is None:
            return Path(shutil.copytree(source, folder))
        done = run("convert", source, folder, "--no-smoke", "-q", *self.convert)
        assert done.code == 0, done.stderr
        return folder

    def failing(self, source: Path, folder: Path) -> Path:
        """The checkpoint that fails."""
        if self.damage is not None:
            damage.damaged(source, folder, self.damage)
        else:
            self.sound(source, folder)
        if self.change is not None:
            self.change(folder)
        return folder


def touch(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes(b"x") and None  # type: ignore[func-returns-value]


def edit_json(file: str, change: Callable[[dict[str, Any]], None]) -> Change:
    def edit(folder: Path) -> None:
        value = json.loads((folder / file).read_text())
        change(value)
        damage.write_json(folder / file, value)

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], None], file: str = "model.safetensors") -> Change:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, {"format": "pt"})

    return edit


def flip_last_byte(folder: Path) -> None:
    path = max(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def exclude(*entries: str, only: bool = False) -> Damage:
    def change(ck: Editable) -> None:
        old = [] if only else list(ck.sections[0]["ignore"])
        ck.set_exclude([*old, *entries])

    return change


def rename(old: str, new: str) -> Damage:
    return lambda ck: ck.rename(lambda name: re.sub(old, new, name))


def store(name: str, value: torch.Tensor) -> Damage:
    return lambda ck: ck.tensors.update({name: value})


def codes(pattern: str, code: int, count: int | None = None) -> Damage:
    """Set the first `count` block scales (all without) to an E4M3 code."""

    def change(ck: Editable) -> None:
        for name in ck.names(pattern):
            raw = ck.tensors[name].view(torch.uint8).clone()
            raw.view(-1)[:count] = code
            ck.tensors[name] = raw.view(torch.float8_e4m3fn)

    return change


def section(file: str, **keys: Any) -> Change:
    inner = "quantization_config" if file == "config.json" else "quantization"
    return edit_json(file, lambda value: value[inner].update(keys))


def bf16_experts(layer: int) -> Damage:
    def change(ck: Editable) -> None:
        names = ck.names(rf"model\.layers\.{layer}\.mlp\.experts\.\d+\.\w+\.weight")
        for name in names:
            unquantize(name.removesuffix(".weight"))(ck)
        exclude(*(name.removesuffix(".weight") for name in names))(ck)

    return change


def mixed_dialects(ck: Editable) -> None:
    for param in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        name = f"model.layers.0.mlp.experts.3.gate_proj.{param}"
        ck.tensors[name.replace("3.gate_proj", "gate_proj.3")] = ck.tensors.pop(name)


def biased(ck: Editable) -> None:
    ck.tensors["model.layers.0.mlp.experts.3.gate_proj.bias"] = torch.zeros(128)


def awq_experts(ck: Editable) -> None:
    for name in ck.names(r".*mlp\.experts\.\d+\.\w+\.weight"):
        width = ck.tensors[name].shape[1] * 2
        ck.tensors[name.replace(".weight", ".pre_quant_scale")] = torch.ones(width, dtype=torch.bfloat16)


def tied_with_another_head(ck: Editable) -> None:
    ck.config["tie_word_embeddings"] = True
    ck.tensors["lm_head.weight"] = ck.tensors["lm_head.weight"] + 1


def remove_lm_head_of(ck: Editable) -> None:
    ck.remove(["lm_head.weight"])
    ck.set_exclude([entry for entry in ck.sections[0]["ignore"] if entry != "lm_head"])


def not_utf8(folder: Path) -> None:
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt"))).write_bytes(b"x")


def linked(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    (folder / "link").symlink_to(folder.parent / "elsewhere")


def consolidated(folder: Path) -> None:
    save_file({"another.weight": torch.zeros(1)}, folder / "consolidated.safetensors")


def unindexed(folder: Path) -> None:
    save_file({"model.extra.weight": torch.zeros(2, 2)}, folder / "model-00007-of-00006.safetensors")


def wrong_shard(folder: Path) -> None:
    def change(value: dict[str, Any]) -> None:
        files = sorted(set(value["weight_map"].values()))
        name, file = next(iter(value["weight_map"].items()))
        value["weight_map"][name] = next(other for other in files if other != file)

    edit_json(damage.INDEX, change)(folder)


def without_any_quantization(folder: Path) -> None:
    refused.without_quantization(folder)
    (folder / "hf_quant_config.json").unlink()


def index_total(folder: Path) -> None:
    edit_json(damage.INDEX, lambda value: value.update(metadata={"total_size": 1}))(folder)


def of_refusals(*names: str) -> dict[str, Case]:
    """Cases of test_refused, by rule."""
    found: dict[str, Case] = {}
    for name in names:
        case = refused.REFUSALS[name]
        level = "scales" if case.rule.startswith(("input-scale", "global-scale-bad", "unknown")) else "headers"
        found[case.rule] = Case(case.base, case.damage, level=level, says=case.says)
    return found


def of_files(table: Mapping[str, tuple[Change, str, str]], base: str, *names: str) -> dict[str, Case]:
    return {table[name][1]: Case(base, change=table[name][0]) for name in names}


PACKED = ("--target", "vllm-marlin", "--tp", "2")
CASES: dict[str, Case] = {
    # the path, shards and index
    "unfinished-output": Case(QWEN, change=touch(".nvfp4prep-partial")),
    "undecodable-name": Case(QWEN, change=not_utf8),
    "linked-folder": Case(QWEN, change=linked),
    "stray-file": Case(QWEN, change=touch("model.safetensors.incomplete"), severity="warning"),
    **of_files(refused.FILE_DAMAGES, QWEN, "truncated", "no-config", "bad-config", "fifo"),
    **of_files(refused.INDEX_DAMAGES, SHARDED, "absolute", "shard-missing", "tensor-missing", "two-shards", "no-map"),
    "second-copy": Case(SHARDED, change=consolidated),
    "index-wrong-shard": Case(SHARDED, change=wrong_shard, severity="warning"),
    "unindexed-tensors": Case(SHARDED, change=unindexed, severity="warning"),
    "index-total-size": Case(SHARDED, change=index_total, severity="info"),
    # configuration
    "no-quant-config": Case(QWEN, change=without_any_quantization),
    "quant-config-bad": Case(QWEN, change=section("hf_quant_config.json", quant_algo=None), severity="warning"),
    "quant-config-missing": Case(
        QWEN, change=lambda folder: (folder / "hf_quant_config.json").unlink(), severity="info"
    ),
    "configs-disagree": Case(
        QWEN, change=section("hf_quant_config.json", kv_cache_quant_algo="FP8"), severity="warning"
    ),
    "nothing-to-convert": Case(
        "qwen3-dense-nvfp4",
        lambda ck: (
            [unquantize(name.removesuffix(".weight_scale_2"))(ck) for name in ck.names(r".*\.weight_scale_2")] and None
        ),
    ),
    "no-input-scales": Case(QWEN, damage.drop(r".*\.input_scale"), severity="warning"),
    "group-size": Case(
        QWEN,
        lambda ck: [section.update(group_size=32) for section in ck.sections] and None,
        severity="warning",
    ),
    "quantized-layers-missing": Case(
        MIXED,
        lambda ck: [section.pop("quantized_layers", None) for section in ck.sections] and None,
        severity="warning",
    ),
    "nvfp4-awq": Case(QWEN, algo("NVFP4_AWQ"), severity="warning"),
    "exclude-contradicted": Case(QWEN, exclude("model.layers.1*"), severity="warning"),
    "exclude-added": Case(QWEN, exclude("lm_head", only=True), severity="warning"),
    "exclude-unmatched": Case(QWEN, exclude("model.layers.61*"), severity="info"),
    "exclude-corrupted": Case(QWEN, exclude("lm_head.\0x"), severity="warning"),
    "exclude-pattern": Case(QWEN, exclude("re:("), severity="warning"),
    "exclude-nameless": Case(QWEN, store("weight", torch.ones(2, 2)), severity="warning"),
    "exclude-substring": Case(DENSE, store("model.layers.0.mlp.gate.weight", torch.ones(2, 2)), severity="warning"),
    "exclude-tail": Case(DSV3, unquantize("model.layers.0.self_attn.q_b_proj"), severity="warning"),
    "mtp-missing": Case(DSV3, with_config(num_nextn_predict_layers=1), severity="warning"),
    "layers-missing": Case(QWEN, with_config(num_hidden_layers=3), says="layer 2"),
    "lm-head-missing": Case(QWEN, remove_lm_head_of, severity="warning"),
    "config-shape": Case(QWEN, with_config(moe_intermediate_size=256), severity="warning"),
    "layer-incomplete": Case(
        QWEN,
        damage.drop(r"model\.layers\.1\.input_layernorm\.weight"),
        severity="warning",
        says="layer 1 of model.layers lacks .*: input_layernorm.weight;",
    ),
    "experts-unquantized": Case(QWEN, bf16_experts(1), severity="warning"),
    "shared-expert-unquantized": Case(
        DSV3,
        both(*(unquantize(f"model.layers.1.mlp.shared_experts.{part}_proj") for part in ("gate", "up", "down"))),
        severity="info",
    ),
    # modules and shapes
    **of_refusals(
        "weight-missing",
        "block-scale-missing",
        "block-scale-u8",
        "block-scale-padded",
        "global-missing",
        "odd-columns",
        "scale-i32",
        "scale-two-values",
        "expert-missing",
        "up-missing",
        "expert-shape",
        "one-fp8-expert",
        "bf16-k",
        "declared-fp8",
        "other-method",
        "pre-quant-scale-on-some",
        "unknown-order",
        "missing",
        "zero",
        "global-NaN",
    ),
    "module-named-twice": Case(
        LLAMA4, store("model.layers.0.feed_forward.experts.gate_up_proj.weight_scale", torch.ones(1))
    ),
    "unclassified": Case(QWEN, replace("model.layers.0.mlp.experts.3.gate_proj.weight", lambda t: t.to(torch.int16))),
    "expert-id": Case(QWEN, rename(r"(layers\.0\.mlp\.experts\.)3\.", r"\g<1>03.")),
    "expert-bias": Case(QWEN, biased),
    "expert-parameter-uneven": Case(
        QWEN, store("model.layers.0.mlp.experts.3.up_proj.weight_zero_point", torch.ones(2)), severity="warning"
    ),
    "mixed-dialects": Case(QWEN, mixed_dialects),
    "router-shape": Case(QWEN, replace("model.layers.0.mlp.gate.weight", lambda t: t[:7])),
    "router-bias-dtype": Case(
        DSV3,
        replace("model.layers.1.mlp.gate.e_score_correction_bias", lambda t: t.bfloat16()),
        severity="warning",
    ),
    "fp8-scale-missing": Case(MIXED, damage.drop(r"model\.layers\.0\.self_attn\.q_proj\.weight_scale")),
    "scale-16bit": Case(QWEN, damage.cast(torch.bfloat16), severity="warning"),
    "fused-scale-vector": Case(LLAMA4, damage.reshape(8, within=r".*experts.*"), severity="warning"),
    # values
    "input-scale-differs": Case(
        SHARDED, damage.multiply(EXPERTS + ".*", 1.0, 2.0, param="input_scale"), level="scales", severity="warning"
    ),
    "global-scale-ratio": Case(QWEN, damage.multiply(rf"{EXPERTS}\.3\.gate_proj", 2.0**-20), level="scales"),
    "gate-up-scale-differs": Case(
        QWEN, damage.multiply(rf"{EXPERTS}\.3\.gate_proj", 0.5), level="scales", severity="warning", says="1 of 8"
    ),
    "fused-linear-scale-differs": Case(
        DENSE, damage.multiply(r".*layers\.0\.self_attn\.q_proj", 0.5), level="scales", severity="warning"
    ),
    "scale-reciprocal": Case(
        QWEN,
        lambda ck: ck.tensors.update({name: 1 / ck.tensors[name] for name in ck.scales("weight_scale_2")}),
        level="scales",
    ),
    "input-scale-outlier": Case(
        QWEN,
        damage.multiply(rf"{EXPERTS}\.3\.(gate|up)_proj", 1e6, param="input_scale"),
        level="scales",
        says="2 of 16",
    ),
    "fp8-scale-bad": Case(
        MIXED, damage.put(0.0, r"model\.layers\.0\.self_attn\.q_proj\.input_scale"), level="scales", says="zero"
    ),
    "kv-scale-bad": Case(KV, damage.put(0.0, r".*layers\.0.*k_scale"), level="scales"),
    "kv-scale-unpaired": Case(KV, damage.drop(r".*layers\.0.*v_scale"), severity="warning"),
    "kv-scale-one": Case(KV, damage.put(1.0, r".*[kv]_scale"), level="scales", severity="info"),
    "kv-scale-missing": Case(KV, damage.drop(r".*layers\.1.*[kv]_scale"), severity="warning", says="layer 1 has"),
    # bytes
    "block-scale-nan": Case(QWEN, codes(rf"{EXPERTS}\.3\.up_proj\.weight_scale", 0x7F, 1), level="full", says="1 of "),
    "block-scale-negative": Case(LLAMA4, codes(r".*0.*experts\.down_proj_weight_scale", 0xB8, 2), level="full"),
    "block-scale-zero": Case(
        QWEN, codes(rf"{EXPERTS}\.3\.up_proj\.weight_scale", 0, 3), level="full", severity="warning", says="[1-3] of "
    ),
    "experts-zero": Case(QWEN, codes(rf"{EXPERTS}\.\d+\.down_proj\.weight_scale", 0), level="full"),
    "fp8-nan": Case(
        MIXED, codes(r"model\.layers\.0\.self_attn\.q_proj\.weight", 0xFF, 2), level="full", says=r"^2 of .*\[0, 0\]"
    ),
    "tied-head-differs": Case(QWEN, tied_with_another_head, level="full", severity="warning"),
    # AWQ and int4
    "shared-expert-folded": Case(DSV3, awq_experts, severity="warning"),
    "pre-quant-scale-shape": Case(
        AWQ, replace("model.layers.0.mlp.experts.3.up_proj.pre_quant_scale", lambda t: t[1:])
    ),
    "pre-quant-scale-bad": Case(AWQ, damage.put(0.0, rf"{EXPERTS}\.3\.up_proj\.pre_quant_scale"), level="full"),
    "int4-scale-bad": Case(INT4, damage.put(float("inf"), rf"{EXPERTS}\.3\.up_proj\.weight_scale"), level="full"),
    "int4-gate-up-identical": Case(
        INT4,
        lambda ck: ck.tensors.update(
            {
                name.replace("up_proj", "gate_proj"): ck.tensors[name].clone()
                for name in ck.names(rf"{EXPERTS}\.\d\.up_proj\.weight_scale")
            }
        ),
        level="full",
        severity="warning",
    ),
    # targets
    "target-refused": Case(QWEN, with_config(hidden_act="gelu"), options=("--target", "flashinfer-trtllm")),
    "block-scale-bad": Case(
        QWEN,
        codes(rf"{EXPERTS}\.3\.up_proj\.weight_scale", 0xB8, 1),
        level="full",
        options=("--target", "vllm-marlin"),
    ),
    "kernel-scale-bad": Case(
        QWEN,
        damage.put(
            2.0**-100, rf"{EXPERTS}\.\d\.(gate|up)_proj\.weight_scale_2", rf"{EXPERTS}\.\d\.(gate|up)_proj\.input_scale"
        ),
        level="full",
        options=("--target", "flashinfer-trtllm"),
    ),
    # outputs
    "manifest-bad": Case(QWEN, change=touch("nvfp4prep.json"), severity="warning"),
    "not-packed": Case(QWEN, lambda ck: ck.config["quantization_config"].update(quant_method="nvfp4prep"), options=()),
    "layout-unknown": Case(
        QWEN,
        convert=PACKED,
        change=edit_json("nvfp4prep.json", lambda value: value["packed"].update(layout="vllm-marlin/vllm/99")),
    ),
    "rank-missing": Case(QWEN, convert=PACKED, change=lambda folder: shutil.rmtree(folder / RANK)),
    "packed-file-bad": Case(
        QWEN, convert=PACKED, change=lambda folder: save_file({"x": torch.zeros(1)}, folder / RANK / "z.safetensors")
    ),
    "packed-tensor-bad": Case(
        QWEN,
        convert=PACKED,
        change=edit_tensors(
            lambda tensors: tensors.update(
                {name: value.half() for name, value in tensors.items() if name.endswith("down_weight_scale_2")}
            ),
            f"{RANK}/model.safetensors",
        ),
    ),
    "output-file-changed": Case(
        QWEN, convert=(), change=edit_tensors(lambda tensors: tensors.update(more=torch.zeros(1)))
    ),
    "digest-differs": Case(QWEN, convert=(), change=flip_last_byte, level="full"),
}
