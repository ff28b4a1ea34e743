"""int4 checkpoints through every int4 target: what is written, and what comes back; which are refused, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import damage
import int4_oracle
import numpy as np
import pack_checks as packs
import pytest
import torch
from damage import Editable
from int4_checks import (
    EXPERT3,
    GROUP,
    LAYOUT,
    MLP0,
    MXINT4,
    NORM,
    SM90,
    TARGETS,
    W4A8,
    W4A16,
    W4AFP8,
    WNA16,
    check,
    count_of,
    factors_of,
    hidden_of,
    refused,
)
from runner import run, snapshot
from safetensors.torch import load_file

from nvfp4prep.checkpoint import read_checkpoint
from nvfp4prep.errors import InputRefused

Fetch = Callable[[str], Path]

CHECKPOINTS = ("tinymoe-int4awq", "tinymoe-w4a8awq", "qwen3moe-int4awq", "qwen3moe-w4a8awq", "dsv3-int4awq")


@pytest.fixture
def source(request: pytest.FixtureRequest, checkpoint: Fetch, full_set: Mapping[str, Path]) -> Path:
    """A checkpoint by the name that the test is parametrised with."""
    name = request.param
    if name == "dsv3-int4awq":
        if name not in full_set:
            pytest.skip(f"not available: {name} (NVFP4PREP_CHECKPOINTS)")
        return full_set[name]
    return checkpoint(name)


# --- every shipped checkpoint and target -----------------------------------------------------------------------------

RANKS = ((1, 1), (2, 1), (1, 2), (1, 4), (2, 2))


def reason(name: str, target: str, fold: bool, tp: int) -> str | None:
    """A part of the refusal, or None where packing works. From the facts about checkpoints and kernels alone."""
    if target in (SM90, W4AFP8) and "int4awq" in name:
        return "have no input_scale (W4A16); weight-only targets work: vllm-marlin-int4, moe-wna16, flashinfer-mxint4"
    if target == MXINT4:
        if tp > 1:
            return "per rank is no multiple of 256; no TP size works" if tp == 9 else "; no TP size works"
        return "intermediate size 128 per rank is no multiple of 256; no TP size works"
    if tp > 1:
        return "intermediate size 64 per rank cuts int4's groups of 128; --tp 1 works"
    if target != SM90 and not fold:
        return "no place for the experts' pre_quant_scale (AWQ); --pre-quant-scale fold folds it away"
    if name == "dsv3-int4awq":
        return "pre_quant_scale can't be folded: 10 of 16 gate/up linears have another than the first"
    return None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", CHECKPOINTS, indirect=True)
def test_every_checkpoint_and_target(source: Path, target: str, tmp_path: Path) -> None:
    """Packed and read back by the oracle, or refused in these words; nothing is written then."""
    checkpoint = read_checkpoint(str(source))
    for fold in (False, True):
        for tp, ep in RANKS:
            options = {"pre_quant_scale": "fold" if fold else "refuse", "tp": tp, "ep": ep}
            words = reason(source.name, target, fold, tp)
            if words is None:
                whole = (tp, ep) in ((1, 1), (1, 4)) and (fold or target == SM90)
                prepared = packs.decide(checkpoint, target, **options)
                if not whole or (ep > 1 and source.name.startswith("tinymoe")):
                    continue
                out = tmp_path / f"{fold}-{tp}-{ep}"
                packs.write(prepared, out)
                check(source, out, target, tp=tp, ep=ep)
                continue
            with pytest.raises(InputRefused) as stop:
                packs.decide(checkpoint, target, **options)
            assert {finding.rule for finding in stop.value.findings} == {"target-refused"}
            assert all(words in finding.message for finding in stop.value.findings), stop.value.findings


def test_the_expectations_are_of_both_kinds() -> None:
    works = {
        (name, target, fold)
        for name in CHECKPOINTS
        for target in TARGETS
        for fold in (False, True)
        if reason(name, target, fold, 1) is None
    }
    folded = {
        (name, target, True) for name in CHECKPOINTS[:4] for target in ("vllm-marlin", WNA16)
    } | {(name, W4AFP8, True) for name in ("tinymoe-w4a8awq", W4A8)}  # fmt: skip
    assert works == folded | {(name, SM90, fold) for name in ("tinymoe-w4a8awq", W4A8) for fold in (False, True)}


def test_experts_with_factors_of_their_own_are_named(full_set: Mapping[str, Path]) -> None:
    if "dsv3-int4awq" not in full_set:
        pytest.skip("not available: dsv3-int4awq (NVFP4PREP_CHECKPOINTS)")
    with pytest.raises(InputRefused) as stop:
        packs.decide(full_set["dsv3-int4awq"], WNA16, pre_quant_scale="fold")
    (finding,) = stop.value.findings
    assert (finding.layer, finding.experts) == (1, (2, 3, 4, 5, 6))


# --- a model that every target takes ---------------------------------------------------------------------------------

WIDE = 512


def wide(ck: Editable) -> None:
    """Experts of I = 512 (H is 256) with random codes, which MxInt4 takes at one and two TP ranks.

    gate and up share pre_quant_scale over all experts, as do the downs; all scales differ, some are negative.
    """
    generator = torch.Generator().manual_seed(5)
    ck.config["moe_intermediate_size"] = WIDE

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.5

    for path in int4_oracle.moe_paths(ck.tensors):
        hidden, factors = hidden_of(ck.tensors, path), positive(256).bfloat16()
        down_factors = positive(WIDE).bfloat16()
        for expert in range(count_of(ck.tensors, path)):
            for kind, (rows, columns), own in (
                ("gate", (WIDE, hidden), factors),
                ("up", (WIDE, hidden), factors),
                ("down", (hidden, WIDE), down_factors),
            ):
                module = f"{path}.experts.{expert}.{kind}_proj"
                codes = torch.randint(0, 256, (rows // 2, columns), dtype=torch.uint8, generator=generator)
                ck.tensors[f"{module}.weight"] = codes
                ck.tensors[f"{module}.weight_scale"] = 0.01 * positive(rows, columns // GROUP)
                ck.tensors[f"{module}.weight_scale"][::7, 0] *= -1
                ck.tensors[f"{module}.pre_quant_scale"] = own
                largest = 0.2 if kind == "down" else 0.05  # what such weights make of inputs of that size
                ck.tensors[f"{module}.input_scale"] = torch.tensor(largest * (0.8 + 0.01 * expert))


@pytest.fixture(scope="module")
def wide_source(checkpoint: Fetch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.damaged(checkpoint(W4A8), tmp_path_factory.mktemp("wide") / "wide", wide)


EVERY = [*int4_oracle.PAIRS]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("layout", "engine"), EVERY)
def test_every_target_takes_the_wide_model(
    layout: str, engine: str, tp: int, wide_source: Path, tmp_path: Path
) -> None:
    """Pack, read back, unpack; the unpacked checkpoint packs to the same bytes again."""
    options: dict[str, Any] = {"engine": engine, "tp": tp, "ep": 2 if tp == 2 else 1, "pre_quant_scale": "fold"}
    if layout == MXINT4 and tp == 4:
        with pytest.raises(InputRefused, match=r"size 128 per rank is no multiple of 256; --tp 1, 2 works"):
            packs.decide(wide_source, layout, **options)
        return
    out = packs.pack(wide_source, tmp_path / "packed", layout, **options)
    target = "vllm-marlin" if layout == "vllm-marlin-int4" else layout
    check(wide_source, out, target, engine=engine, tp=tp, ep=options["ep"])
    back = packs.unpacked(out, tmp_path / "back")
    if tp > 1:
        flat = packs.pack(wide_source, tmp_path / "flat", layout, engine=engine, pre_quant_scale="fold")
        assert packs.differences(packs.contents(back), packs.contents(packs.unpacked(flat, tmp_path / "b"))) == []
    assert_packs_alike(packs.pack(back, tmp_path / "again", layout, **options), out)


def assert_packs_alike(again: Path, out: Path) -> None:
    """The same tensors in the same files; what was stored as raw input scales is the normalised ones by then."""
    files = {path.relative_to(out) for path in out.rglob("*.safetensors")}
    assert {path.relative_to(again) for path in again.rglob("*.safetensors")} == files
    for file in files:
        ours, theirs = load_file(again / file), load_file(out / file)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert "raw_" in name or packs.same_bytes(ours[name], tensor), name


@pytest.mark.parametrize(("layout", "engine"), EVERY)
def test_the_smoke_check_passes(layout: str, engine: str, wide_source: Path, tmp_path: Path) -> None:
    out = packs.pack(wide_source, tmp_path / "packed", layout, engine=engine, pre_quant_scale="fold", ep=2)
    for of in ((), ("--source", wide_source)):
        result = run("smoke", out, "--tokens", "5", "--layers", "0", "--json", "-", *of)
        assert result.code == 0, result.stderr
        assert result.json["target"] == f"{layout}/{engine}/1"


# --- unpacked --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "target", "fold"),
    [(W4A16, "vllm-marlin", True), (W4A16, WNA16, True), (W4A8, SM90, False), (W4A8, W4AFP8, True)],
)
def test_unpacked_is_an_int4_checkpoint_of_what_was_packed(
    name: str, target: str, fold: bool, checkpoint: Fetch, tmp_path: Path
) -> None:
    """Codes and scales to the bit; factors that the kernel keeps come back, folded ones do not; all else as hf."""
    source, choice = checkpoint(name), "fold" if fold else "refuse"
    out = packs.pack(source, tmp_path / "packed", target, pre_quant_scale=choice)
    back = packs.unpacked(out, tmp_path / "back")
    before, after = packs.tensors_of(source), packs.tensors_of(back)
    hf = packs.tensors_of(packs.pack(source, tmp_path / "hf", "hf"))
    dropped = {name for name in hf if ".experts." in name and name.endswith("pre_quant_scale")} if fold else set()
    assert after.keys() == hf.keys() - dropped and bool(dropped) == fold
    touched = {f"{path.rpartition('.')[0]}.{NORM}" for path in int4_oracle.moe_paths(before)}
    touched |= {f"{path}.gate.weight" for path in int4_oracle.moe_paths(before)}
    for tensor in after:
        if ".experts." in tensor and tensor.endswith(".weight_scale"):
            continue
        assert packs.same_bytes(after[tensor], hf[tensor]) == (not fold or tensor not in touched), tensor
    for path in int4_oracle.moe_paths(before):
        for expert in range(count_of(before, path)):
            stored = int4_oracle.source_expert(before, path, expert, rows=fold)
            for kind, matrix in stored.items().items():
                module = f"{path}.experts.{expert}.{kind}_proj"
                scale = np.repeat(int4_oracle.floats_of(matrix.scale).astype(np.float64), GROUP, axis=1)
                factors = factors_of(before, path, expert, kind)
                exact = matrix.codes * scale * (1.0 if fold or factors is None else factors.astype(np.float64))
                assert (int4_oracle.dequantised(after, module) == exact).all(), module
                assert after[f"{module}.weight_scale"].dtype == torch.float32
    assert run("validate", back, "--level", "full", "--fail-on", "error").code == 0
    config = packs.read_json(back / "config.json")["quantization_config"]
    assert (config["quant_method"], config["group_size"]) == ("modelopt", GROUP)


def test_weights_compute_the_same_after_folding(checkpoint: Fetch, tmp_path: Path) -> None:
    """down(W·p·h) = W'·(p·h): the products of scales and factors stay what they were, within two roundings."""
    source = checkpoint("tinymoe-int4awq")
    out = packs.unpacked(packs.pack(source, tmp_path / "p", WNA16, pre_quant_scale="fold"), tmp_path / "back")
    before, after = packs.tensors_of(source), packs.tensors_of(out)
    path = MLP0
    for expert in (0, 15):
        module = f"{path}.experts.{expert}"
        first, second = factors_of(before, path, expert, "up"), factors_of(before, path, expert, "down")
        assert first is not None and second is not None
        old, new = (
            int4_oracle.dequantised(before, f"{module}.up_proj"),
            int4_oracle.dequantised(after, f"{module}.up_proj"),
        )
        expected = old / first * second[:, None]
        assert np.abs(new - expected).max() <= 2.0**-8 * np.abs(expected).max()
        assert not np.allclose(new, old, rtol=2.0**-7)
        gate = int4_oracle.dequantised(before, f"{module}.gate_proj") / first
        assert np.allclose(int4_oracle.dequantised(after, f"{module}.gate_proj"), gate, rtol=2.0**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_nothing_is_lost_of_16_bit_scales(dtype: torch.dtype, checkpoint: Fetch, tmp_path: Path) -> None:
    """Scales in BF16 already: no rounding, and the way back is hf to the last byte, factors in their own dtype."""

    def change(ck: Editable) -> None:
        for name in ck.scales("weight_scale"):
            ck.tensors[name] = ck.tensors[name].bfloat16()
        for name in ck.scales("pre_quant_scale"):
            ck.tensors[name] = ck.tensors[name].to(dtype)

    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", change)
    out = packs.pack(source, tmp_path / "out", SM90, ep=2)
    assert "rounding" not in packs.read_json(out / packs.MANIFEST)["runs"][-1]
    back, hf = packs.unpacked(out, tmp_path / "back"), packs.pack(source, tmp_path / "hf", "hf")
    assert packs.differences(packs.contents(back), packs.contents(hf)) == []
    assert packs.tensors_of(back)[f"{EXPERT3}.up_proj.weight_scale"].dtype == torch.float32
    assert packs.tensors_of(back)[f"{EXPERT3}.up_proj.pre_quant_scale"].dtype == dtype


def without_gate(ck: Editable) -> None:
    ck.remove(ck.names(r".*\.experts\.\d+\.gate_proj\..*"))
    ck.config["hidden_act"] = "relu2"


def test_experts_without_gate(checkpoint: Fetch, tmp_path: Path) -> None:
    """relu(p·up)² is not p·relu(up)²: down's factors can't move; without them Marlin takes such experts."""
    options = ("--target", "vllm-marlin", "--pre-quant-scale", "fold")
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", without_gate)
    found = refused(source, *options).findings
    assert all("down's can't move through the activation relu2" in one["message"] for one in found) and len(found) == 2
    plain = damage.drop(r".*\.experts\.\d+\.down_proj\.pre_quant_scale")
    source = damage.damaged(source, tmp_path / "plain", plain)
    out = packs.pack(source, tmp_path / "out", "vllm-marlin", pre_quant_scale="fold")
    before, tensors = packs.tensors_of(source), packs.Packed(out, "vllm-marlin-int4", "vllm", 1, 1).ranks[0, 0].tensors
    for expert in range(8):
        names = [f"{MLP0}.experts.routed_experts.{name}" for name in int4_oracle.NAMES["vllm-marlin-int4"]]
        stored = tuple(tensors[name][expert] for name in names)
        ours = int4_oracle.unpacked("vllm-marlin-int4", stored, 256, 128, GROUP, gated=False)
        int4_oracle.assert_same(ours, int4_oracle.source_expert(before, MLP0, expert), expert)
    back = packs.unpacked(out, tmp_path / "back")
    again = packs.pack(back, tmp_path / "again", "vllm-marlin")
    assert packs.differences(packs.contents(again), packs.contents(out)) == []
    assert run("smoke", out, "--tokens", "5", "--source", source).code == 0
    with pytest.raises(InputRefused, match="vllm has no relu2 on this kernel"):
        packs.decide(source, WNA16, pre_quant_scale="fold")


def test_an_hf_output_packs_to_the_same_bytes(checkpoint: Fetch, tmp_path: Path) -> None:
    hf = packs.pack(checkpoint(W4A16), tmp_path / "hf", "hf")
    options: dict[str, Any] = {"pre_quant_scale": "fold", "ep": 2}
    out = packs.pack(checkpoint(W4A16), tmp_path / "out", "vllm-marlin", **options)
    again = packs.pack(hf, tmp_path / "again", "vllm-marlin", **options)
    assert packs.differences(packs.contents(again), packs.contents(out)) == []


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["vllm-marlin", WNA16])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_fp16_scales(target: str, engine: str, checkpoint: Fetch, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pre_quant_scale": "fold", "activation_dtype": "fp16", "engine": engine}
    out = packs.pack(checkpoint(W4A16), tmp_path / "packed", target, **options)
    check(checkpoint(W4A16), out, target, engine=engine, dtype="fp16")
    back = packs.unpacked(out, tmp_path / "back")
    again = packs.pack(back, tmp_path / "again", target, **options)
    assert packs.differences(packs.contents(again), packs.contents(out)) == []


@pytest.mark.parametrize("target", [SM90, W4AFP8, MXINT4])
def test_bf16_kernels_refuse_fp16(target: str, wide_source: Path) -> None:
    with pytest.raises(InputRefused, match="the kernel does not compute in fp16; use bf16"):
        packs.decide(wide_source, target, pre_quant_scale="fold", activation_dtype="fp16")


@pytest.mark.parametrize(("target", "engine"), [(SM90, "vllm"), (W4AFP8, "vllm"), (MXINT4, "flashinfer")])
def test_engines_without_the_kernel(target: str, engine: str, wide_source: Path) -> None:
    with pytest.raises(InputRefused, match=r"has no such int4 experts; use --engine "):
        packs.decide(wide_source, target, pre_quant_scale="fold", engine=engine)


def half_groups(ck: Editable) -> None:
    """Groups of 64: every scale twice."""
    assert ck.hf is not None
    ck.hf["quantization"]["group_size"] = 64
    for name in ck.scales("weight_scale"):
        ck.tensors[name] = ck.tensors[name].repeat_interleave(2, 1)


def test_groups_of_64(wide_source: Path, tmp_path: Path) -> None:
    """Kernels of 128 refuse them; the others give the codes and scales that groups of 128 give, twice."""
    source = damage.damaged(wide_source, tmp_path / "source", half_groups)
    for target in (SM90, W4AFP8):
        with pytest.raises(InputRefused, match="groups of 64 columns share a scale; this kernel takes 128"):
            packs.decide(source, target, pre_quant_scale="fold")
    for target in ("vllm-marlin", WNA16, MXINT4):
        out = packs.pack(source, tmp_path / target, target, pre_quant_scale="fold", tp=2)
        tensors = packs.Packed(out, LAYOUT[target], "vllm", 2, 1).ranks
        assert packs.read_json(out / packs.MANIFEST)["packed"]["layers"][MLP0]["group_size"] == 64
        parts = [
            int4_oracle.stored_expert(tensors[tp, 0].tensors, MLP0, LAYOUT[target], "vllm", 5, 256, WIDE // 2, 64)
            for tp in (0, 1)
        ]
        expected = int4_oracle.source_expert(packs.tensors_of(source), MLP0, 5, rows=True)
        int4_oracle.assert_same(int4_oracle.joined(parts), expected)
        back = packs.tensors_of(packs.unpacked(out, tmp_path / f"{target}-back"))
        assert back[f"{MLP0}.experts.5.down_proj.weight_scale"].shape == (256, WIDE // 64)


def test_two_targets_in_one_run_are_two_runs(checkpoint: Fetch, tmp_path: Path) -> None:
    common = ("--pre-quant-scale", "fold", "--no-smoke", "-q")
    both = ("--target", "vllm-marlin", "--target", WNA16, "--target", SM90)
    with packs.unsynced():
        assert run("convert", checkpoint(W4A8), tmp_path / "both", *both, *common).code == 0
        for target in ("vllm-marlin", WNA16, SM90):
            assert run("convert", checkpoint(W4A8), tmp_path / target, "--target", target, *common).code == 0
            assert snapshot(tmp_path / "both" / target) == snapshot(tmp_path / target)
    assert len(list((tmp_path / "both").iterdir())) == 3


@pytest.mark.parametrize("target", ["vllm-marlin", SM90])
def test_the_same_twice(target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    options = ("--target", target, "--pre-quant-scale", "fold", "--ep", 2, "--no-smoke", "-q")
    with packs.unsynced():
        assert run("convert", checkpoint(W4A8), tmp_path / "a", *options, "--workers", 1).code == 0
        assert run("convert", checkpoint(W4A8), tmp_path / "b", *options, "--workers", 5).code == 0
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_shards_do_not_change_what_is_stored(checkpoint: Fetch, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pre_quant_scale": "fold", "max_shard_bytes": 200_000}
    out = packs.pack(checkpoint(W4A16), tmp_path / "out", "vllm-marlin", **options)
    assert len(list(out.glob("*.safetensors"))) > 4
    check(checkpoint(W4A16), out, "vllm-marlin")
    back = packs.unpacked(out, tmp_path / "back")
    assert len(list(back.glob("*.safetensors"))) > 4


@pytest.mark.parametrize("name", [W4A16, W4A8])
def test_vllm_marlin_is_the_int4_layout(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source, options = checkpoint(name), ("--target", "vllm-marlin")
    fold = ("--pre-quant-scale", "fold")
    dry = run("convert", source, tmp_path / "out", *options, *fold, "--dry-run", "--json")
    assert dry.code == 0 and not list(tmp_path.iterdir())
    with packs.unsynced():
        done = run("convert", source, tmp_path / "out", *options, *fold, "--json", "--no-smoke")
    assert done.code == 0, done.stderr
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors")}
    assert {one["file"]: one["bytes"] for one in dry.json["outputs"]} == sizes
    assert packs.read_json(tmp_path / "out" / packs.MANIFEST)["packed"]["layout"] == "vllm-marlin-int4/vllm/1"
    assert packs.read_json(tmp_path / "out" / "config.json")["quantization_config"]["quant_method"] == "nvfp4prep"
    assert run("validate", source, *options, *fold, "--fail-on", "error").code == 0
    refused = run("validate", source, *options, "--format", "json")
    assert refused.code == 1
    found = [finding for finding in refused.json["findings"] if finding["severity"] == "error"]
    assert {finding["rule"] for finding in found} == {"target-refused"} and "vllm-marlin-int4" in found[0]["message"]
    smoke = run("smoke", source, *options, "--tokens", "3", "--layers", "0", "--json", "-")
    assert smoke.code == 0 and smoke.json["target"] == "vllm-marlin-int4/vllm/1"
    for target in ("vllm-marlin", "vllm-marlin-int4"):
        again = run("smoke", tmp_path / "out", "--target", target, "--tokens", "3", "--layers", "0", "--json", "-")
        assert again.code == 0 and again.json["target"] == "vllm-marlin-int4/vllm/1"
    assert run("smoke", tmp_path / "out", "--target", WNA16).code == 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("name", [W4A16, W4A8])
def test_validate_says_what_convert_does(name: str, fold: bool, target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """At every level that reads scales; full looks at group scales too and must not fall over."""
    choice = ("--pre-quant-scale", "fold") if fold else ()
    wanted = reason(name, target, fold, 1)
    for level in ("scales", "full"):
        result = run("validate", checkpoint(name), "--target", target, "--level", level, *choice, "--format", "json")
        errors = [finding for finding in result.json["findings"] if finding["severity"] == "error"]
        assert (result.code, bool(errors)) == ((0, False) if wanted is None else (1, True)), (level, errors)
        assert all(wanted is not None and wanted in finding["message"] for finding in errors)


def test_convert_with_its_smoke_check(checkpoint: Fetch, tmp_path: Path) -> None:
    """One channel of layer 0 has a factor of 24: what activations a folded layer sees is not known."""
    factors = factors_of(packs.tensors_of(checkpoint(W4A8)), MLP0, 0, "gate")
    assert factors is not None and factors.max() > 20
    for target in (W4AFP8, SM90):
        result = run(
            "convert", checkpoint(W4A8), tmp_path / target, "--target", target, "--pre-quant-scale", "fold", "-q"
        )
        assert result.code == 0, result.stderr
