"""int4 checkpoints and packed outputs that must be refused: scales, factors, configurations, manifests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import damage
import int4_oracle
import numpy as np
import pack_checks as packs
import pytest
import torch
from damage import Damage, Editable
from int4_checks import (
    ENGINE,
    EXPERT3,
    GROUP,
    LAYOUT,
    MLP0,
    SM90,
    W4A8,
    W4A16,
    W4AFP8,
    WNA16,
    check,
    check_small,
    refused,
)
from runner import Run, run, snapshot
from safetensors.torch import load_file, save_file

Fetch = Callable[[str], Path]

# --- scales that no kernel can use -----------------------------------------------------------------------------------


def put_scale(value: float, kind: str = "gate", at: tuple[int, int] = (5, 1)) -> Damage:
    def change(ck: Editable) -> None:
        name = f"{EXPERT3}.{kind}_proj.weight_scale"
        ck.tensors[name] = ck.tensors[name].clone()
        ck.tensors[name][at] = value

    return change


def put_factor(ck: Editable, kind: str, at: int, value: float, experts: range = range(8)) -> None:
    for expert in experts:
        for projection in ("gate", "up") if kind == "gate" else (kind,):
            name = f"{MLP0}.experts.{expert}.{projection}_proj.pre_quant_scale"
            ck.tensors[name] = ck.tensors[name].clone()
            ck.tensors[name][at] = value


def put_product(scale: float, factor: float) -> Damage:
    """A scale of up's row 5, which down's factor 5 is multiplied into."""

    def change(ck: Editable) -> None:
        put_scale(scale, "up")(ck)
        put_factor(ck, "down", 5, factor)

    return change


BAD: dict[str, tuple[Damage, str, str]] = {
    "fp16 overflow": (put_scale(7e4), "fp16", r"gate's group scale 70000 at \[5, 1\] does not fit float16"),
    "fp16 overflow of a negative": (
        put_scale(-2e5, "up", (127, 0)), "fp16", r"up's group scale -[\d.e+]+ at \[127, 0\] does not fit float16",
    ),
    "fp16 underflow": (
        put_scale(2.0**-26, "down", (0, 0)), "fp16", r"down's group scale 1.49012e-08 at \[0, 0\] does not fit float16",
    ),
    "fp16 subnormal": (
        put_scale(1e-7, "down", (0, 0)), "fp16",
        r"down's group scale 1e-07 at \[0, 0\] .* subnormal .*--activation-dtype bf16",
    ),
    "bf16 overflow": (put_scale(3.4e38), "bf16", r"gate's group scale 3.4e\+38 at \[5, 1\] does not fit bfloat16"),
    "bf16 underflow": (
        put_scale(2.0**-140), "bf16", r"gate's group scale 7.17\d*e-43 at \[5, 1\] does not fit bfloat16",
    ),
    "bf16 subnormal": (
        put_scale(2.3e-40), "bf16", r"gate's group scale 2\.[23]\d*e-40 at \[5, 1\] .* subnormal .*--target hf",
    ),
    "a product that overflows": (
        put_product(3e38, 8.0), "bf16",
        r"up's group scale 3e\+38 times down's pre_quant_scale 8 at \[5, 1\] does not fit float32",
    ),
    "a product that underflows": (
        put_product(2.0**-120, 2.0**-60), "bf16",
        r"up's group scale 7.5\d*e-37 times down's pre_quant_scale 8.6\d*e-19 at \[5, 1\] does not fit float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_scale_that_does_not_fit_is_named(case: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """By convert, and by `validate --level full`; the other dtype takes what is only too large or small for FP16."""
    change, dtype, says = BAD[case]
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    options = ("--target", WNA16, "--pre-quant-scale", "fold")
    (finding,) = refused(source, *options, "--activation-dtype", dtype).findings
    assert (finding["rule"], finding["layer"], finding["experts"]) == ("kernel-scale-bad", 0, [3])
    assert re.search(says, finding["message"]), finding["message"]
    if dtype == "fp16":
        out = packs.pack(source, tmp_path / "bf16", WNA16, pre_quant_scale="fold")
        stored = packs.Packed(out, WNA16, "vllm", 1, 1).ranks[0, 0].tensors
        ours = int4_oracle.stored_expert(stored, MLP0, WNA16, "vllm", 3, 256, 128, GROUP)
        int4_oracle.assert_same(ours, int4_oracle.source_expert(packs.tensors_of(source), MLP0, 3, rows=True))
        return
    full = run("validate", source, *options, "--level", "full", "--format", "json")
    (told,) = [one for one in full.json["findings"] if one["severity"] == "error"]
    assert (told["rule"], told["layer"], told["experts"]) == ("kernel-scale-bad", 0, [3])
    assert re.search(says, told["message"])
    smoke = run("smoke", source, "--target", WNA16, "--tokens", "3")
    assert smoke.code == 3 and "Traceback" not in smoke.stderr and "group scale" in smoke.stderr


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("target", ["vllm-marlin", SM90])
def test_inf_and_nan_have_their_own_rule(value: float, target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(
        checkpoint(W4A8), tmp_path / "source", put_scale(value, "up"), put_scale(value, "down", (2, 0))
    )
    options = ("--target", target, "--pre-quant-scale", "fold")
    (finding,) = refused(source, *options).findings
    assert (finding["rule"], finding["layer"], finding["experts"]) == ("int4-scale-bad", 0, [3])
    assert f"{MLP0}: 2 group scales are inf or NaN" in finding["message"]
    both = refused(source, "--target", WNA16, *options)
    assert [one["message"] for one in both.findings] == [finding["message"]], "counted once for several targets"
    full = run("validate", source, *options, "--level", "full", "--format", "json")
    assert {one["rule"] for one in full.json["findings"] if one["severity"] == "error"} == {"int4-scale-bad"}


@pytest.mark.parametrize("target", ["vllm-marlin", WNA16, SM90])
def test_negative_and_zero_scales_keep_their_sign(target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    def negate(ck: Editable) -> None:
        for name in ck.names(r".*\.experts\.\d+\.(gate|up|down)_proj\.weight_scale"):
            scale = ck.tensors[name].clone()
            scale[::3] *= -1
            scale[1, 0] = 0.0
            ck.tensors[name] = scale
        put_factor(ck, "down", 7, -2.0)

    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", negate)
    if target == SM90:
        source = damage.damaged(source, tmp_path / "plain", lambda ck: put_factor(ck, "down", 7, 2.0))
    out = packs.pack(source, tmp_path / "out", target, pre_quant_scale="fold")
    check(source, out, target)
    packed = packs.Packed(out, LAYOUT[target], ENGINE.get(target, "vllm"), 1, 1)
    stored = packed.ranks[0, 0].tensors
    up = int4_oracle.stored_expert(stored, MLP0, packed.layout, packed.engine, 0, 256, 128, GROUP).up
    sign = np.sign(int4_oracle.floats_of(up.scale))
    assert (sign[3] == -1).all() and sign[1, 0] == 0 and (sign[4] == 1).all()
    assert (sign[7] == (1 if target == SM90 else -1)).all()


# --- pre_quant_scale that can't be folded or placed ------------------------------------------------------------------


def other_factor(kind: str, experts: range = range(3, 5)) -> Damage:
    return lambda ck: put_factor(ck, kind, 9, 3.0, experts)


@pytest.mark.parametrize("target", ["vllm-marlin", W4AFP8, SM90, "compressed-tensors"])
def test_gate_and_up_of_other_factors(target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", other_factor("gate"))
    (finding,) = refused(source, "--target", target, "--pre-quant-scale", "fold").findings
    assert (finding["rule"], finding["layer"], finding["experts"]) == ("target-refused", 0, [3, 4])
    assert "4 of 16 gate/up linears have another than the first" in finding["message"]
    kept = "the kernel takes one pre_quant_scale for all experts" if target == SM90 else "can't be folded"
    assert kept in finding["message"]
    told = run("validate", source, "--target", target, "--pre-quant-scale", "fold", "--format", "json")
    assert finding["message"] in [one["message"] for one in told.json["findings"]]


def test_downs_of_other_factors_move_into_up(checkpoint: Fetch, tmp_path: Path) -> None:
    """Where the kernel takes one for all experts: only with fold. Where it takes none it makes no difference."""
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", other_factor("down"))
    (finding,) = refused(source, "--target", SM90).findings
    assert (finding["rule"], finding["layer"], finding["experts"]) == ("target-refused", 0, [3, 4])
    assert "2 of 8 down linears have another than the first; --pre-quant-scale fold moves them" in finding["message"]
    out = packs.pack(source, tmp_path / "sm90", SM90, pre_quant_scale="fold", ep=2)
    before = packs.tensors_of(source)
    packed = packs.Packed(out, SM90, "flashinfer", 1, 2)
    check_small(before, packed, MLP0, rows=True)
    check_small(before, packed, "model.layers.1.mlp", rows=False)
    for expert in range(8):
        stored = packed.ranks[0, expert // 4].tensors
        ours = int4_oracle.stored_expert(stored, MLP0, SM90, "flashinfer", expert % 4, 256, 128, GROUP)
        int4_oracle.assert_same(ours, int4_oracle.source_expert(before, MLP0, expert, rows=True), expert)
    back = packs.tensors_of(packs.unpacked(out, tmp_path / "back"))
    gone = {name for name in before if name.startswith(f"{MLP0}.experts") and "down_proj.pre_quant_scale" in name}
    assert before.keys() - back.keys() == gone and len(gone) == 8
    assert run("smoke", out, "--tokens", "5", "--source", source).code == 0
    whole = packs.pack(source, tmp_path / "marlin", "vllm-marlin", pre_quant_scale="fold")
    check(source, whole, "vllm-marlin")


@pytest.mark.parametrize("target", ["vllm-marlin", SM90])
@pytest.mark.parametrize("kind", ["up", "down"])
def test_an_expert_without_factors(target: str, kind: str, checkpoint: Fetch, tmp_path: Path) -> None:
    missing = f"{EXPERT3}.{kind}_proj.pre_quant_scale"
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", damage.drop(re.escape(missing)))
    found = refused(source, "--target", target, "--pre-quant-scale", "fold").findings
    assert [(one["rule"], one["tensor"], one["experts"]) for one in found] == [
        ("pre-quant-scale-missing", missing, [3])
    ]


@pytest.mark.parametrize("target", ["vllm-marlin", WNA16, W4AFP8, SM90, "compressed-tensors"])
def test_downs_without_factors_count_as_ones_when_asked(target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """The same bytes as from factors of ones that are stored."""
    names = [f"{MLP0}.experts.{expert}.down_proj.pre_quant_scale" for expert in (0, 3)]
    options = ("--target", target, "--pre-quant-scale", "fold", "-q")

    def with_ones(ck: Editable) -> None:
        ck.tensors |= {name: torch.ones_like(ck.tensors[name]) for name in names}

    lacking = damage.damaged(checkpoint(W4A8), tmp_path / "lacking", lambda ck: ck.remove(names))
    stored = damage.damaged(checkpoint(W4A8), tmp_path / "stored", with_ones)
    assert run("convert", lacking, tmp_path / "a", *options, "--impute", "ones").code == 0
    assert run("convert", stored, tmp_path / "b", *options).code == 0
    ours, expected = packs.tensors_of(tmp_path / "a"), packs.tensors_of(tmp_path / "b")
    assert ours.keys() == expected.keys()
    assert all(packs.same_bytes(ours[name], expected[name]) for name in ours)
    assert packs.read_json(tmp_path / "a" / packs.MANIFEST)["runs"][-1]["options"]["impute"] == "ones"
    told = {
        impute: run("validate", lacking, *options[:-1], "--impute", impute, "--format", "json").json["findings"]
        for impute in ("layer-max", "ones")
    }
    severities = {
        impute: [one["severity"] for one in found if one["rule"] == "pre-quant-scale-missing"]
        for impute, found in told.items()
    }
    assert severities == {"layer-max": ["error"], "ones": ["warning"]}
    assert not [one for one in told["ones"] if one["severity"] == "error"]


@pytest.mark.parametrize("target", ["vllm-marlin", SM90, "compressed-tensors"])
@pytest.mark.parametrize("expert", [0, 3])
def test_ones_for_up_are_other_factors(target: str, expert: int, checkpoint: Fetch, tmp_path: Path) -> None:
    """Neither a norm nor a kernel has a place for them beside the factors of the others."""
    missing = f"{MLP0}.experts.{expert}.up_proj.pre_quant_scale"
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", lambda ck: ck.remove([missing]))
    (finding,) = refused(source, "--target", target, "--pre-quant-scale", "fold", "--impute", "ones").findings
    assert (finding["rule"], finding["experts"]) == ("target-refused", [expert])
    assert "1 of 16 gate/up linears have another" in finding["message"]


def test_missing_factors_of_a_kernel_with_a_place_come_back_as_ones(checkpoint: Fetch, tmp_path: Path) -> None:
    """Beside factors that are ones: the kernel takes them, and unpack writes them for every expert."""
    missing = [f"{MLP0}.experts.0.{name}_proj.pre_quant_scale" for name in ("gate", "down")]

    def change(ck: Editable) -> None:
        for name in ck.names(rf"{re.escape(MLP0)}\.experts\..*\.pre_quant_scale"):
            ck.tensors[name] = torch.ones_like(ck.tensors[name])
        ck.remove(missing)

    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", change)
    back = packs.tensors_of(packs.unpacked(packs.pack(source, tmp_path / "p", SM90, impute="ones"), tmp_path / "back"))
    assert back.keys() == {*packs.tensors_of(source), *missing}
    assert all(bool((back[name] == 1).all()) and back[name].dtype == torch.bfloat16 for name in missing)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("target", ["vllm-marlin", SM90])
@pytest.mark.parametrize("kind", ["gate", "down"])
def test_factors_that_are_no_factors(kind: str, target: str, value: float, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", lambda ck: put_factor(ck, kind, 9, value))
    found = refused(source, "--target", target, "--pre-quant-scale", "fold").findings
    assert all(one["layer"] == 0 for one in found)
    assert re.search("zero, inf or NaN", found[0]["message"]), found


def test_a_negative_factor_has_a_place_and_a_remedy(checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: Editable) -> None:
        for name in ck.names(rf"{re.escape(MLP0)}\.experts\.\d+\.(gate|up)_proj\.pre_quant_scale"):
            ck.tensors[name][5] = -1.5

    (found,) = refused(damage.damaged(checkpoint(W4A8), tmp_path / "source", change), "--target", SM90).findings
    assert (found["rule"], found["layer"]) == ("kernel-scale-bad", 0)
    assert re.search(r"fc1_act_scale would be negative at \[5\]; .* above zero; use --target hf", found["message"])


SHARED = {
    f"{MLP0}.shared_expert.up_proj.weight": torch.zeros(64, 256, dtype=torch.uint8),
    f"{MLP0}.shared_expert.up_proj.weight_scale": torch.ones(128, 2),
}
CONFIGS: dict[str, tuple[Damage, str]] = {
    "another activation": (
        lambda ck: ck.config.update(hidden_act="gelu"), "activation 'gelu' .gated., which nvfp4prep does not know",
    ),
    "a clamp": (lambda ck: ck.config.update(swiglu_limit=7.0), "clamp"),
    "another architecture": (
        lambda ck: ck.config.update(model_type="mystery"), "what reads the norms of model_type 'mystery' is not known",
    ),
    "a quantised reader of the norm": (
        lambda ck: ck.tensors.update(SHARED),
        rf"{MLP0}.shared_expert.up_proj reads the norm and is quantised",
    ),
    "act-order": (
        lambda ck: ck.tensors.update({f"{EXPERT3}.up_proj.g_idx": torch.arange(256, dtype=torch.int32)}),
        "the experts have g_idx, which this kernel has no place for",
    ),
    "a biased norm": (
        lambda ck: ck.tensors.update({"model.layers.0.post_attention_layernorm.bias": torch.ones(256)}), "has a bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_models_that_nothing_can_be_folded_in(case: str, checkpoint: Fetch, tmp_path: Path) -> None:
    change, says = CONFIGS[case]
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    options = ("--target", "vllm-marlin", "--pre-quant-scale", "fold")
    found = refused(source, *options).findings
    assert {one["rule"] for one in found} == {"target-refused"}
    assert re.search(says, found[0]["message"]), found[0]["message"]
    told = run("validate", source, *options, "--format", "json").json["findings"]
    assert {one["message"] for one in found} <= {one["message"] for one in told}


def test_a_kernel_with_a_place_needs_no_known_norm(checkpoint: Fetch, tmp_path: Path) -> None:
    """Nothing is folded there: convert takes an architecture that is not known, and validate says so too."""
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", CONFIGS["another architecture"][0])
    assert packs.pack(source, tmp_path / "out", SM90).is_dir()
    told = run("validate", source, "--target", SM90, "--format", "json")
    assert not [one for one in told.json["findings"] if one["rule"] == "target-refused"]


def test_only_the_targets_own_layers_are_folded(checkpoint: Fetch, tmp_path: Path) -> None:
    """Layer 0 int4, layer 1 NVFP4 without factors: a target for NVFP4 leaves layer 0 as it is, to the bit."""
    nvfp4 = damage.load(checkpoint("qwen3moe-nvfp4-perexpert"))

    def mixed(ck: Editable) -> None:
        own = [name for name in ck.tensors if name.startswith("model.layers.1.")]
        ck.remove(own)
        ck.tensors |= {name: value for name, value in nvfp4.tensors.items() if name.startswith("model.layers.1.")}
        ck.set_algo("MIXED_PRECISION")
        modules = {name.removesuffix(".weight_scale"): ck.tensors[name] for name in ck.scales("weight_scale")}
        layers = {
            module: {"quant_algo": "NVFP4", "group_size": 16}
            if scale.dtype == torch.float8_e4m3fn
            else {"quant_algo": "W4A16_AWQ", "group_size": 128}
            for module, scale in modules.items()
        }
        for section in ck.sections:
            section.pop("group_size", None)
            section["quantized_layers"] = layers

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", mixed)
    out = packs.pack(source, tmp_path / "out", "flashinfer-cutlass")
    before, after = packs.tensors_of(source), packs.tensors_of(out)
    for name in before:
        if "layers.0." in name:
            assert packs.same_bytes(after[name], before[name]), name
    assert "folded" not in packs.read_json(out / packs.MANIFEST)["runs"][-1]


def test_only_the_experts_quantised(checkpoint: Fetch, tmp_path: Path) -> None:
    """Once the experts' factors are folded away there are none, and the configuration of the way back says so."""

    def experts_only(ck: Editable) -> None:
        for name in ck.names(r".*self_attn\.\w+_proj\.weight"):
            module = name.removesuffix(".weight")
            dense = int4_oracle.dequantised(ck.tensors, module)
            ck.tensors[name] = torch.from_numpy(dense).bfloat16()
            ck.remove([one for one in list(ck.tensors) if one.startswith(module) and one != name])
        names = [name.removesuffix(".weight") for name in ck.names(r".*(self_attn\.\w+_proj|mlp\.gate)\.weight")]
        ck.set_exclude([*names, "lm_head", "model.embed_tokens"])

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", experts_only)
    out = packs.pack(source, tmp_path / "out", "vllm-marlin", pre_quant_scale="fold")
    check(source, out, "vllm-marlin")
    back = packs.unpacked(out, tmp_path / "back")
    assert not [name for name in packs.tensors_of(back) if name.endswith("pre_quant_scale")]
    for file, section in (("config.json", "quantization_config"), ("hf_quant_config.json", "quantization")):
        assert packs.read_json(back / file)[section]["pre_quant_scale"] is False
    assert run("validate", back, "--level", "full").code == 0


# --- unpack: a manifest or files that were tampered with -------------------------------------------------------------


@pytest.fixture(scope="module")
def packed_outputs(checkpoint: Fetch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Read only."""
    folder = tmp_path_factory.mktemp("tampered")
    options: dict[str, dict[str, Any]] = {SM90: {"ep": 2}, "vllm-marlin": {"pre_quant_scale": "fold"}}
    return {target: packs.pack(checkpoint(W4A8), folder / target, target, **kw) for target, kw in options.items()}


def edit(*path: Any, to: Any = None, drop: bool = False) -> Damage:
    """A change of the manifest's entry at a path."""

    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        if drop:
            del manifest[path[-1]]
        else:
            manifest[path[-1]] = to

    return change


FIRST = ("logical", "moe", 0, "projections")
TAMPERED: dict[str, tuple[str, Callable[[Any], None]]] = {
    "factors of an integer dtype": (SM90, edit(*FIRST, "gate", "pre_quant_scale", to=["I64", [256]])),
    "factors of 64 bits": (SM90, edit(*FIRST, "down", "pre_quant_scale", to=["F64", [128]])),
    "factors of another size": (SM90, edit(*FIRST, "gate", "pre_quant_scale", to=["BF16", [255]])),
    "factors of two dimensions": (SM90, edit(*FIRST, "down", "pre_quant_scale", to=["BF16", [1, 128]])),
    "factors where there is no place": ("vllm-marlin", edit(*FIRST, "up", "pre_quant_scale", to=["BF16", [256]])),
    "scales of another group": (SM90, edit(*FIRST, "gate", "weight_scale", to=["F32", [128, 4]])),
    "scales of another group in marlin": ("vllm-marlin", edit(*FIRST, "up", "weight_scale", to=["F32", [128, 8]])),
    "no scales": ("vllm-marlin", edit(*FIRST, "up", "weight_scale", drop=True)),
    "scales of 64 bits": ("vllm-marlin", edit(*FIRST, "down", "weight_scale", to=["F64", [256, 1]])),
    "E4M3 scales": ("vllm-marlin", edit(*FIRST, "down", "weight_scale", to=["F8_E4M3", [256, 1]])),
    "weights of other rows": ("vllm-marlin", edit(*FIRST, "down", "weight", to=["U8", [64, 128]])),
    "weights of another dtype": ("vllm-marlin", edit(*FIRST, "down", "weight", to=["I8", [128, 128]])),
    "another group size": (SM90, edit("packed", "layers", MLP0, "group_size", to=64)),
    "another int4 layout": ("vllm-marlin", edit("packed", "layout", to="moe-wna16/vllm/1")),
    "an NVFP4 layout": ("vllm-marlin", edit("packed", "layout", to="vllm-marlin/vllm/1")),
    "another dtype": ("vllm-marlin", edit("packed", "activation_dtype", to="fp16")),
    "a dtype the kernel does not know": (SM90, edit("packed", "activation_dtype", to="fp16")),
    "no up": ("vllm-marlin", edit(*FIRST, "up", drop=True)),
    "a bias": ("vllm-marlin", edit(*FIRST, "up", "bias", to=["F32", [128]])),
    "zero points": ("vllm-marlin", edit(*FIRST, "up", "zero_point", to=["U8", [128]])),
    "another layer": (SM90, edit("logical", "moe", 0, "path", to="model.layers.7.mlp")),
}  # fmt: skip


def copied(packed: Path, folder: Path) -> Path:
    return Path(shutil.copytree(packed, folder))


def not_unpacked(packed: Path, out: Path) -> Run:
    before = snapshot(packed.parent)
    done = run("unpack", packed, out, "--json")
    assert done.code == 3, done
    assert "Traceback" not in done.stderr and snapshot(packed.parent) == before
    return done


@pytest.mark.parametrize("case", TAMPERED)
def test_a_manifest_that_was_tampered_with(case: str, packed_outputs: Mapping[str, Path], tmp_path: Path) -> None:
    target, change = TAMPERED[case]
    packed = copied(packed_outputs[target], tmp_path / "packed")
    manifest = packs.read_json(packed / packs.MANIFEST)
    change(manifest)
    (packed / packs.MANIFEST).write_text(json.dumps(manifest))
    found = not_unpacked(packed, tmp_path / "out").findings
    assert {one["rule"] for one in found} <= {"manifest-bad", "packed-tensor-bad", "layout-unknown"}, found
    smoke = run("smoke", packed, "--tokens", "2")
    assert smoke.code == 3 and "Traceback" not in smoke.stderr


def tensor_cases() -> Iterator[tuple[str, Callable[[dict[str, torch.Tensor]], Any], str]]:
    own = f"{MLP0}.experts.nvfp4prep."
    for gemm, size in (("w13", 256), ("w2", 128)):
        name = f"{own}{gemm}_pre_quant_scale"
        yield f"no {gemm} factors", lambda t, name=name: t.pop(name), "not there"
        yield (
            f"short {gemm}",
            lambda t, name=name: t.update({name: t[name][:-1].clone()}),
            rf"where F32 \[{size}\] belongs",
        )
        yield (
            f"{gemm} in BF16",
            lambda t, name=name: t.update({name: t[name].bfloat16()}),
            rf"BF16 \[{size}\] where F32",
        )
    weight = f"{MLP0}.experts.fc1_expert_weights"
    yield (
        "fewer experts",
        lambda t: t.update({weight: t[weight][:3].clone()}),
        r"\[3, 256, 128\] where U8 \[4, 256, 128\]",
    )
    scale = f"{MLP0}.experts.fc2_expert_scales"
    yield "scales in F16", lambda t: t.update({scale: t[scale].half()}), r"F16 .* where BF16"
    yield "no input scale", lambda t: t.pop(f"{own}up_input_scale"), "up_input_scale.*not there"


TENSOR_CASES = list(tensor_cases())


@pytest.mark.parametrize(
    ("change", "says"), [case[1:] for case in TENSOR_CASES], ids=[case[0] for case in TENSOR_CASES]
)
def test_tensors_that_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], Any], says: str, packed_outputs: Mapping[str, Path], tmp_path: Path
) -> None:
    packed = copied(packed_outputs[SM90], tmp_path / "packed")
    file = packed / "rank-00-of-01_01-of-02" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, file.name)}
    (file.parent / packs.INDEX).write_text(json.dumps(index))
    done = not_unpacked(packed, tmp_path / "out")
    assert {one["rule"] for one in done.findings} == {"packed-tensor-bad"} and re.search(says, done.stderr)


def test_a_changed_byte_is_seen(packed_outputs: Mapping[str, Path], tmp_path: Path) -> None:
    packed = copied(packed_outputs["vllm-marlin"], tmp_path / "packed")
    file = next(packed.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    done = run("unpack", packed, tmp_path / "out")
    assert done.code == 1 and "not the bytes that were written" in done.stderr
    full = run("validate", packed, "--level", "full", "--format", "json")
    assert {one["rule"] for one in full.json["findings"]} == {"digest-differs"}
