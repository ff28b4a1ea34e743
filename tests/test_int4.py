"""int4 exports (W4A16_AWQ, W4A8_AWQ) through target hf: what is kept to the bit, normalised, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import checkpoints
import damage
import oracle
import pytest
import torch
from damage import Damage, Editable
from runner import converted, manifest_of, refused, run

W4A16, W4A8, DSV3 = "qwen3moe-int4awq", "qwen3moe-w4a8awq", "dsv3-int4awq"
SMALL = (W4A16, W4A8)
MLP0 = "model.layers.0.mlp"
UP3 = f"{MLP0}.experts.3.up_proj"
O1 = "model.layers.1.self_attn.o_proj"
EXPERT = re.compile(r"(.+\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.(\w+)")

Fetch = Callable[[str], Path]


@pytest.fixture(params=[*checkpoints.INT4, DSV3])
def source(request: pytest.FixtureRequest, checkpoint: Fetch, full_set: Mapping[str, Path]) -> Path:
    """Each int4 checkpoint, shipped or of the full set."""
    name = request.param
    if name in checkpoints.INT4:
        return checkpoint(name)
    if name not in full_set:
        pytest.skip(f"not available: {name} (NVFP4PREP_CHECKPOINTS)")
    return full_set[name]


def gemm_of(name: str) -> str:
    """What shares an input scale: gate and up of all experts, the downs of all experts, or a linear alone."""
    match = EXPERT.fullmatch(name)
    return name if match is None else f"{match[1]} {'w2' if match[3] == 'down' else 'w13'}"


def check(source: Path, out: Path) -> None:
    """All that target hf promises about an int4 checkpoint."""
    before, after = oracle.read(source), oracle.read(out)
    assert any(stored.dtype == "U8" for stored in before.tensors.values())
    assert after.tensors.keys() == before.tensors.keys()
    inputs: dict[str, list[float]] = {}
    for name, stored in before.tensors.items():
        if name.endswith(".input_scale"):
            inputs.setdefault(gemm_of(name), []).extend(stored.values)
    for name, stored in before.tensors.items():
        written, param = after.tensors[name], name.rpartition(".")[2]
        if param == "input_scale":
            assert (written.dtype, written.shape) == ("F32", ())
            assert written.values.tolist() == [max(inputs[gemm_of(name)])], name
        elif param == "weight_scale_2":
            assert (written.dtype, written.shape) == ("F32", ())
            assert written.values.tolist() == stored.values.tolist(), name
        elif param == "weight_scale":
            assert (written.dtype, written.shape) == ("F32", stored.shape)
            assert written.values.tobytes() == stored.values.tobytes(), name
        else:
            assert written.same(stored), name
    check_configs(before, after, bool(inputs))
    oracle.check_files(before, after)


def check_configs(before: oracle.View, after: oracle.View, scaled: bool) -> None:
    assert before.hf is not None and after.hf is not None
    flat, nested = after.config["quantization_config"], after.hf["quantization"]
    assert flat["quant_algo"] == nested["quant_algo"] == ("W4A8_AWQ" if scaled else "W4A16_AWQ")
    assert flat["quant_method"] == "modelopt"
    assert flat["group_size"] == nested["group_size"] == 128
    assert "config_groups" not in flat  # ModelOpt writes none for AWQ either
    assert set(flat["ignore"]) == set(nested["exclude_modules"]) == oracle.unquantized_modules(after)
    for key in ("has_zero_point", "pre_quant_scale", "kv_cache_quant_algo"):
        assert nested[key] == before.hf["quantization"][key]
    assert after.hf["producer"] == before.hf["producer"]
    assert oracle.without_quantization(before.config) == oracle.without_quantization(after.config)


# --- what is kept, what is normalised --------------------------------------------------------------------------------


def test_converts(source: Path, tmp_path: Path) -> None:
    converted(source, tmp_path / "out")
    check(source, tmp_path / "out")


def test_converting_an_output_again_gives_the_same_shards(source: Path, tmp_path: Path) -> None:
    converted(source, tmp_path / "once", "--max-shard-size", "700KB")
    converted(tmp_path / "once", tmp_path / "twice")
    once, twice = (oracle.relative_files(tmp_path / name) for name in ("once", "twice"))
    shards = {name for name in once if name.endswith(".safetensors")}
    assert len(shards) > 1
    for name in once.keys() - {"nvfp4prep.json"}:
        assert once[name] == twice[name], name
    assert len(manifest_of(tmp_path / "twice")["runs"]) == 2
    check(source, tmp_path / "twice")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_group_scales_in_16_bits_are_widened_by_value(
    name: str, dtype: torch.dtype, checkpoint: Fetch, tmp_path: Path
) -> None:
    source = damage.damaged(checkpoint(name), tmp_path / "source", damage.cast(dtype, "weight_scale"))
    after = converted(source, tmp_path / "out")
    check(source, tmp_path / "out")
    assert after.tensors[f"{UP3}.weight_scale"].dtype == "F32"
    recast = manifest_of(tmp_path / "out")["runs"][0]["changes"]["recast"]
    was = {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert recast["model.layers.*.mlp.experts.*.up_proj.weight_scale: " + f"{was} [128, 2] -> F32 [128, 2]"] == 16


def test_group_scales_of_every_kind_are_kept(checkpoint: Fetch, tmp_path: Path) -> None:
    """Subnormal, huge, negative and zero group scales in F16 and BF16: widening is by value, not by bits."""
    odd = torch.tensor([6e-8, 65504.0, -1.5, 0.0, 2.0**-14, -6e-8, 1.0, 3.140625]).repeat(32).view(128, 2)

    def change(ck: Editable) -> None:
        ck.tensors[f"{UP3}.weight_scale"] = odd.half()
        ck.tensors[f"{MLP0}.experts.3.gate_proj.weight_scale"] = (odd * 2.0**100).bfloat16()

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    after = converted(source, tmp_path / "out")
    check(source, tmp_path / "out")
    assert torch.equal(after.tensors[f"{UP3}.weight_scale"].tensor, odd.half().float())


def test_w4a8_input_scales_become_the_layer_maximum(checkpoint: Fetch, tmp_path: Path) -> None:
    """Over all experts, gate and up together, down apart; other linears keep theirs. The manifest has the raw ones."""
    source = damage.damaged(
        checkpoint(W4A8),
        tmp_path / "source",
        damage.put(7.0, re.escape(f"{MLP0}.experts.5.gate_proj.input_scale")),
        damage.put(9.0, re.escape(f"{MLP0}.experts.6.down_proj.input_scale")),
    )
    after = converted(source, tmp_path / "out")
    check(source, tmp_path / "out")
    written = {name: stored.values[0] for name, stored in after.tensors.items() if name.endswith(".input_scale")}
    layer = {name: value for name, value in written.items() if name.startswith(f"{MLP0}.experts.")}
    assert {value for name, value in layer.items() if ".down_proj." not in name} == {7.0}
    assert {value for name, value in layer.items() if ".down_proj." in name} == {9.0}
    assert not {7.0, 9.0} & {value for name, value in written.items() if name not in layer}
    reports = {
        (entry["where"], entry["gemm"]): entry for entry in manifest_of(tmp_path / "out")["runs"][0]["input_scales"]
    }
    assert reports[MLP0, "w13"]["after"] == 7.0 and len(reports[MLP0, "w13"]["raw"]) == 16
    assert reports[MLP0, "w2"]["after"] == 9.0 and len(reports[MLP0, "w2"]["raw"]) == 8


def test_w4a8_input_scales_can_be_kept(checkpoint: Fetch, tmp_path: Path) -> None:
    before, after = (
        oracle.read(checkpoint(W4A8)),
        converted(checkpoint(W4A8), tmp_path / "out", "--input-scale", "keep"),
    )
    for name in before.tensors:
        assert after.tensors[name].same(before.tensors[name]), name


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_w4a8_scalars_of_other_shapes_and_dtypes(shape: tuple[int, ...], checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", damage.cast(torch.bfloat16), damage.reshape(*shape))
    converted(source, tmp_path / "out")
    check(source, tmp_path / "out")


def test_without_input_scales_the_algorithm_becomes_w4a16(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", damage.drop(r".*\.input_scale"))
    result = run("convert", source, tmp_path / "out", "--json")
    assert result.code == 0
    assert [finding["rule"] for finding in result.json["findings"]] == ["no-input-scales"]
    check(source, tmp_path / "out")  # weight_scale_2 is kept: it says nothing about activations
    assert manifest_of(tmp_path / "out")["runs"][0]["input_scales"] == []


def test_group_size_is_that_of_the_weights_when_no_config_says_it(checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: Editable) -> None:
        assert ck.hf is not None
        del ck.hf["quantization"]["group_size"]

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    converted(source, tmp_path / "out")
    check(source, tmp_path / "out")


def test_another_group_size(checkpoint: Fetch, tmp_path: Path) -> None:
    """Groups of 64: every scale twice."""

    def change(ck: Editable) -> None:
        assert ck.hf is not None
        ck.hf["quantization"]["group_size"] = 64
        for name in ck.scales("weight_scale"):
            ck.tensors[name] = ck.tensors[name].repeat_interleave(2, 1)

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    after = converted(source, tmp_path / "out")
    assert after.hf is not None
    assert after.config["quantization_config"]["group_size"] == after.hf["quantization"]["group_size"] == 64
    assert all(after.tensors[name].same(stored) for name, stored in oracle.read(source).tensors.items())


# --- what is refused -------------------------------------------------------------------------------------------------


def replaced(name: str, value: torch.Tensor) -> Damage:
    return lambda ck: ck.tensors.update({name: value})


def nvfp4_expert(ck: Editable) -> None:
    """Expert 3's up as NVFP4 among int4 ones."""
    ck.tensors[f"{UP3}.weight"] = torch.zeros(128, 128, dtype=torch.uint8)
    ck.tensors[f"{UP3}.weight_scale"] = torch.ones(128, 16).to(torch.float8_e4m3fn)
    ck.tensors[f"{UP3}.weight_scale_2"] = torch.tensor(1.0)


def bad_input(value: float) -> Damage:
    return damage.put(value, re.escape(f"{UP3}.input_scale"))


REFUSALS: dict[str, tuple[str, Damage, str, str | None, str]] = {
    "group scales for other columns": (
        W4A16, replaced(f"{UP3}.weight_scale", torch.ones(128, 3)), "block-scale-shape", f"{UP3}.weight_scale",
        r"\[128, 3\].*\[128, 256 / group size\]",
    ),
    "group scales for half the rows": (
        W4A16, replaced(f"{UP3}.weight_scale", torch.ones(64, 2)), "block-scale-shape", f"{UP3}.weight_scale",
        "two rows to a byte",
    ),
    "group scales in one dimension": (
        W4A16, replaced(f"{UP3}.weight_scale", torch.ones(256)), "block-scale-shape", f"{UP3}.weight_scale", r"\[256\]",
    ),
    "no group scales": (
        W4A16, replaced(f"{UP3}.weight_scale", torch.ones(128, 0)), "block-scale-shape", f"{UP3}.weight_scale",
        r"\[128, 0\]",
    ),
    "another group size of an expert": (
        W4A16, replaced(f"{UP3}.weight_scale", torch.ones(128, 4)), "group-size", f"{UP3}.weight_scale",
        r"groups of 64, not 128 \(1 linear\)",
    ),
    "another group size of a dense linear": (
        W4A16, replaced(f"{O1}.weight_scale", torch.ones(256, 8)), "group-size", f"{O1}.weight_scale",
        r"groups of 32, not 128 \(1 linear\)",
    ),
    "another group size in the config": (
        W4A16, lambda ck: ck.hf["quantization"].update(group_size=64), "group-size",  # type: ignore[index]
        None, r"groups of 128, not 64 \(56 linears\).* correct group_size to 128",
    ),
    "quant_algo NVFP4": (
        W4A16, lambda ck: ck.set_algo("NVFP4"), "algo-contradicts-weights", None, "NVFP4, but 56 linears .* int4",
    ),
    "quant_algo FP8": (W4A8, lambda ck: ck.set_algo("FP8"), "algo-contradicts-weights", None, "FP8, but 56 linears"),
    "an NVFP4 expert": (W4A16, nvfp4_expert, "mixed-experts", None, "23 int4, 1 NVFP4|1 NVFP4, 23 int4"),
    "a BF16 expert": (
        W4A16, replaced(f"{UP3}.weight", torch.zeros(128, 256, dtype=torch.bfloat16)), "mixed-experts", None,
        "1 unquant",
    ),
    "a weight_scale_2 in W4A16": (
        W4A16, replaced(f"{UP3}.weight_scale_2", torch.tensor(3.0)), "global-scale-missing", f"{UP3}.weight_scale_2",
        "1 of 24 linears have weight_scale_2: all have one",
    ),
    "no scalar scales in W4A8": (
        W4A8, damage.drop(re.escape(UP3) + r"\.(weight_scale_2|input_scale)"), "global-scale-missing",
        f"{UP3}.weight_scale_2", "1 of 24 linears lack weight_scale_2",
    ),
    "a bias of one expert": (
        W4A16, replaced(f"{UP3}.bias", torch.zeros(128)), "expert-bias", f"{UP3}.bias", "1 of 24 linears have a bias",
    ),
    "input_scale NaN": (W4A8, bad_input(float("nan")), "input-scale-bad", f"{UP3}.input_scale", "1 of 16.* NaN"),
    "input_scale inf": (W4A8, bad_input(float("inf")), "input-scale-bad", f"{UP3}.input_scale", "1 of 16.* inf"),
    "input_scale zero": (W4A8, bad_input(0.0), "input-scale-bad", f"{UP3}.input_scale", "1 of 16.* zero"),
    "input_scale negative": (W4A8, bad_input(-1.0), "input-scale-bad", f"{UP3}.input_scale", "1 of 16.* negative"),
    "input_scale missing": (
        W4A8, damage.drop(re.escape(f"{UP3}.input_scale")), "input-scale-missing", f"{UP3}.input_scale",
        "1 of 16.* missing",
    ),
    "weight_scale_2 zero": (
        W4A8, damage.put(0.0, re.escape(f"{UP3}.weight_scale_2")), "global-scale-bad", f"{UP3}.weight_scale_2", "zero",
    ),
    "weight_scale_2 of two values": (
        W4A8, replaced(f"{UP3}.weight_scale_2", torch.ones(2)), "scale-shape", f"{UP3}.weight_scale_2", r"\[2\]",
    ),
    "an expert without pre_quant_scale": (
        W4A16, damage.drop(re.escape(f"{UP3}.pre_quant_scale")), "pre-quant-scale-missing", f"{UP3}.pre_quant_scale",
        "1 of 16 linears",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    base, change, rule, tensor, says = REFUSALS[name]
    source = damage.damaged(checkpoint(base), tmp_path / "source", change)
    finding = next(finding for finding in refused(source).findings if finding["rule"] == rule)
    assert finding["severity"] == "error"
    assert re.search(says, finding["message"]), finding["message"]
    assert tensor is None or finding["tensor"] == tensor
    if tensor and tensor.startswith(UP3):
        assert finding["layer"] == 0 and finding.get("experts", [3]) == [3]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_imputes_input_scales_when_asked(value: float, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", bad_input(value))
    after = converted(source, tmp_path / "out", "--impute", "layer-max")
    others = [
        stored.values[0]
        for name, stored in oracle.read(checkpoint(W4A8)).tensors.items()
        if name.startswith(f"{MLP0}.experts.") and name.endswith(("gate_proj.input_scale", "up_proj.input_scale"))
        if name != f"{UP3}.input_scale"
    ]
    assert len(others) == 15
    assert after.tensors[f"{UP3}.input_scale"].values.tolist() == [max(others)]


def test_imputes_missing_input_scales_when_asked(checkpoint: Fetch, tmp_path: Path) -> None:
    missing = f"{UP3}.input_scale"
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", damage.drop(re.escape(missing)))
    after = converted(source, tmp_path / "out", "--impute", "layer-max")
    assert after.tensors.keys() == oracle.read(checkpoint(W4A8)).tensors.keys()
    assert manifest_of(tmp_path / "out")["runs"][0]["changes"]["imputed"] == [missing]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_factors_of_ones_are_written_when_asked(dtype: torch.dtype, checkpoint: Fetch, tmp_path: Path) -> None:
    """In dtype and shape of the siblings; the input scale is imputed beside them, as with layer-max."""
    missing = [f"{MLP0}.experts.{name}_proj.pre_quant_scale" for name in ("0.gate", "0.up", "5.down")]

    def change(ck: Editable) -> None:
        for name in ck.names(r".*\.pre_quant_scale"):
            ck.tensors[name] = ck.tensors[name].to(dtype)
        ck.remove([*missing, f"{UP3}.input_scale"])

    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", change)
    for options in ((), ("--impute", "layer-max")):
        found = [one for one in refused(source, *options).findings if one["rule"] == "pre-quant-scale-missing"]
        assert [(one["experts"], one["projection"], one["tensor"]) for one in found] == [
            ([0], "w13", missing[0]), ([5], "w2", missing[2])
        ]  # fmt: skip
        assert all("--impute ones" in one["message"] for one in found)
    after, before = converted(source, tmp_path / "out", "--impute", "ones"), oracle.read(source)
    for name, size in zip(missing, (256, 256, 128), strict=True):
        written = after.tensors[name].tensor
        assert (written.dtype, written.tolist()) == (dtype, [1.0] * size)
    assert after.tensors.keys() == {*before.tensors, *missing, f"{UP3}.input_scale"}
    for name, stored in before.tensors.items():
        assert not name.endswith("pre_quant_scale") or after.tensors[name].same(stored)
    run_ = manifest_of(tmp_path / "out")["runs"][0]
    assert set(run_["changes"]["imputed"]) == {*missing, f"{UP3}.input_scale"}
    assert run_["options"]["impute"] == "ones"
    told = [one for one in run_["findings"] if one["rule"] == "pre-quant-scale-missing"]
    assert [one["severity"] for one in told] == ["warning", "warning"]
    assert all("counts as ones" in one["message"] for one in told)
    again = run("validate", tmp_path / "out", "--format", "json").json["findings"]
    assert "pre-quant-scale-missing" not in {one["rule"] for one in again}


@pytest.mark.parametrize("options", [(), ("--impute", "layer-max")])
def test_all_input_scales_of_a_gemm_missing(options: tuple[str, ...], checkpoint: Fetch, tmp_path: Path) -> None:
    """There is nothing to impute from."""
    pattern = re.escape(MLP0) + r"\.experts\.\d+\.down_proj\.input_scale"
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", damage.drop(pattern))
    (finding,) = refused(source, *options).findings
    assert (finding["rule"], finding["layer"], finding["experts"]) == ("input-scale-missing", 0, list(range(8)))
    assert "8 of 8" in finding["message"]


@pytest.mark.parametrize("target", ["flashinfer-trtllm", "flashinfer-cutedsl"])
def test_nvfp4_targets_refuse_int4(target: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source")
    (finding,) = refused(source, "--target", target).findings
    assert finding["rule"] == "target-refused"
    assert "NVFP4" in finding["message"] and "vllm-marlin-int4, moe-wna16" in finding["message"]
