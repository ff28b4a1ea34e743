"""int4 checkpoints through every int4 target: what is written, what comes back, what is refused and in which words.

Packed bytes are read by tests/int4_oracle.py; what they must hold is worked out here from the source's files.
"""

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
from int4_oracle import Floats
from runner import Run, run, snapshot
from safetensors.torch import load_file, save_file

from nvfp4prep.errors import InputRefused

Fetch = Callable[[str], Path]
Tensors = Mapping[str, torch.Tensor]

CHECKPOINTS = ("tinymoe-int4awq", "tinymoe-w4a8awq", "qwen3moe-int4awq", "qwen3moe-w4a8awq", "dsv3-int4awq")
W4A16, W4A8 = "qwen3moe-int4awq", "qwen3moe-w4a8awq"
SM90, W4AFP8, MXINT4, WNA16 = "flashinfer-sm90-w4a8", "sglang-w4afp8", "flashinfer-mxint4", "moe-wna16"
TARGETS = ("vllm-marlin", WNA16, SM90, W4AFP8, MXINT4)
LAYOUT = {target: target for target in TARGETS} | {"vllm-marlin": "vllm-marlin-int4"}
ENGINE = {SM90: "flashinfer", W4AFP8: "sglang"}
NORM = "post_attention_layernorm.weight"
MLP0 = "model.layers.0.mlp"
EXPERT3 = f"{MLP0}.experts.3"
SCALED = re.compile(r".*\.experts\.\d+\.(gate|up|down)_proj\.\w+")
GROUP = 128


@pytest.fixture
def source(request: pytest.FixtureRequest, checkpoint: Fetch, full_set: Mapping[str, Path]) -> Path:
    """A checkpoint by the name that the test is parametrised with."""
    name = request.param
    if name == "dsv3-int4awq":
        if name not in full_set:
            pytest.skip(f"not available: {name} (NVFP4PREP_CHECKPOINTS)")
        return full_set[name]
    return checkpoint(name)


# --- what an output must hold ----------------------------------------------------------------------------------------


def f32(tensor: torch.Tensor) -> Floats:
    found: Floats = tensor.to(torch.float32).numpy()
    return found


def as_bf16(values: Floats) -> torch.Tensor:
    return torch.from_numpy(int4_oracle.bf16_bits(values).view(np.int16)).view(torch.bfloat16)


def factors_of(tensors: Tensors, path: str, expert: int, projection: str) -> Floats | None:
    found = tensors.get(f"{path}.experts.{expert}.{projection}_proj.pre_quant_scale")
    return None if found is None else f32(found)


def inner_of(tensors: Tensors, path: str) -> int:
    return 2 * tensors[f"{path}.experts.0.up_proj.weight"].shape[0]


def hidden_of(tensors: Tensors, path: str) -> int:
    return tensors[f"{path}.experts.0.up_proj.weight"].shape[1]


def count_of(tensors: Tensors, path: str) -> int:
    return sum(re.fullmatch(re.escape(path) + r"\.experts\.\d+\.up_proj\.weight", name) is not None for name in tensors)


def input_scale(tensors: Tensors, path: str, projections: tuple[str, ...]) -> float | None:
    """The layer's maximum."""
    values = [
        float(tensors[name])
        for name in tensors
        if name.startswith(f"{path}.experts.") and name.endswith(tuple(f"{p}_proj.input_scale" for p in projections))
    ]
    return max(values) if values else None


def folded_away(tensors: Tensors, path: str) -> tuple[dict[str, torch.Tensor], float, float]:
    """Norm and router as folding must write them (BF16 both), and the largest relative errors of their roundings."""
    name = f"{path.rpartition('.')[0]}.{NORM}"
    factors = factors_of(tensors, path, 0, "gate")
    assert factors is not None and tensors[name].dtype == torch.bfloat16
    norm = f32(tensors[name])
    stored = as_bf16(norm * factors)
    factor = f32(stored) / norm
    router = tensors[f"{path}.gate.weight"]
    divided = f32(router) / factor
    exact = norm.astype(np.float64) * factors
    quotient = f32(router).astype(np.float64) / (f32(stored).astype(np.float64) / norm)
    norm_error = np.abs(f32(stored) / exact - 1).max()
    found = {name: stored, f"{path}.gate.weight": as_bf16(divided)}
    return found, float(norm_error), float(np.abs(f32(found[f"{path}.gate.weight"]) / quotient - 1).max())


def check(
    source: Path, out: Path, target: str, *, engine: str | None = None, tp: int = 1, ep: int = 1, dtype: str = "bf16",
    rows: bool | None = None,
) -> None:  # fmt: skip
    """All that a packed int4 output promises about tensors and manifest.

    `rows`: down's pre_quant_scale is in the rows of up; unless told, where the kernel has no place for it.
    """
    layout, engine = LAYOUT[target], engine or ENGINE.get(target, "vllm")
    before = packs.tensors_of(source)
    packed = packs.Packed(out, layout, engine, tp, ep, dtype)
    manifest = packs.read_json(out / packs.MANIFEST)
    last, folded, largest = manifest["runs"][-1], target != SM90, 0.0
    rows = folded if rows is None else rows
    assert manifest["packed"]["layout"] == f"{layout}/{engine}/1"
    assert manifest["packed"]["activation_dtype"] == dtype

    experts: set[str] = set()
    changed: dict[str, torch.Tensor] = {}
    for path in int4_oracle.moe_paths(before):
        hidden, inner, count = hidden_of(before, path), inner_of(before, path), count_of(before, path)
        sizes = manifest["packed"]["layers"][path]
        assert (sizes["experts"], sizes["hidden"], sizes["intermediate"]) == (count, hidden, inner)
        assert sizes["group_size"] == GROUP and sizes["intermediate_per_rank"] == [inner // tp] * tp
        for expert in range(count):
            rank, position = divmod(expert, count // ep)
            parts = [
                int4_oracle.stored_expert(
                    packed.ranks[t, rank].tensors, path, layout, engine, position, hidden, inner // tp, GROUP
                )
                for t in range(tp)
            ]
            expected = int4_oracle.source_expert(before, path, expert, dtype, rows)
            int4_oracle.assert_same(int4_oracle.joined(parts), expected, (path, expert))
            largest = max(largest, rounding_of(before, path, expert, expected, dtype, rows))
        experts |= {name for name in before if name.startswith(f"{path}.experts.") and SCALED.fullmatch(name)}
        if folded and factors_of(before, path, 0, "gate") is not None:
            stored, norm_error, reader_error = folded_away(before, path)
            changed |= stored
            entry = last["folded"][path]
            assert entry["norm"] == f"{path.rpartition('.')[0]}.{NORM}" and entry["divided"] == [f"{path}.gate"]
            assert entry["norm_rounding"] == pytest.approx(norm_error, abs=1e-6)
            assert last["rounding"]["readers"] >= reader_error - 1e-6
        check_small(before, packed, path, rows)
    assert ("folded" in last) == bool(changed)
    assert last["rounding"]["scales"] == pytest.approx(largest, abs=1e-6)
    assert 0 < largest <= (2.0**-8 if dtype == "bf16" else 2.0**-11) * 1.001
    assert set(last["rounding"]) == {"scales", *(["readers"] if changed else [])}

    common = packs.tensors_of(out if packed.tp * packed.ep == 1 else out / "common")
    own = {name for name in common if ".experts." in name}
    assert bool(own) == (tp * ep == 1)
    assert common.keys() - own == before.keys() - experts
    for name in common.keys() - own:
        assert packs.same_bytes(common[name], changed.get(name, before[name])), name


def rounding_of(tensors: Tensors, path: str, expert: int, stored: int4_oracle.Expert, dtype: str, rows: bool) -> float:
    """The largest relative error of an expert's stored group scales."""
    largest = 0.0
    for projection, matrix in stored.items().items():
        exact = f32(tensors[f"{path}.experts.{expert}.{projection}_proj.weight_scale"])
        factors = factors_of(tensors, path, expert, "down")
        if projection == "up" and rows and factors is not None:
            exact = exact * factors[:, None]
        wrong = np.abs(int4_oracle.floats_of(matrix.scale, dtype)[exact != 0] / exact[exact != 0] - 1)
        largest = max(largest, float(wrong.max(initial=0)))
    return largest


def check_small(before: Tensors, packed: packs.Packed, path: str, rows: bool) -> None:
    """The engines' small parameters, and our own copies of the logical scales."""
    a1, a2 = input_scale(before, path, ("gate", "up")), input_scale(before, path, ("down",))
    inner, count = inner_of(before, path), count_of(before, path)
    for (tp, ep), rank in packed.ranks.items():
        experts = range(ep * count // packed.ep, (ep + 1) * count // packed.ep)
        mine = {name for name in rank.tensors if name.startswith(f"{path}.experts.")}
        wanted: set[str] = set()

        def value(name: str, own: bool = False, rank: packs.Rank = rank, wanted: set[str] = wanted) -> torch.Tensor:
            middle = "nvfp4prep." if own else "routed_experts." if packed.engine == "vllm" else ""
            wanted.add(f"{path}.experts.{middle}{name}")
            return rank.tensors[f"{path}.experts.{middle}{name}"]

        for name in int4_oracle.NAMES[packed.layout]:
            assert value(name).shape[0] == len(experts)
        if a1 is not None and a2 is not None:
            for kind in ("gate", "up", "down"):
                scale = value(f"{kind}_input_scale", own=True)
                assert scale.tolist() == [a2 if kind == "down" else a1] * len(experts)
                stored = [float(before[f"{path}.experts.{e}.{kind}_proj.weight_scale_2"]) for e in experts]
                assert value(f"{kind}_weight_scale_2", own=True).tolist() == stored
            raw = [
                [float(before[f"{path}.experts.{e}.{kind}_proj.input_scale"]) for kind in ("gate", "up", "down")]
                for e in experts
            ]
            assert value("raw_input_scale", own=True).tolist() == [max(gate, up) for gate, up, _ in raw]
            assert value("raw_w2_input_scale", own=True).tolist() == [down for _, _, down in raw]
        if packed.layout == W4AFP8:
            assert value("w13_input_scale").tolist() == [a1] and value("w2_input_scale").tolist() == [a2]
            assert value("g1_alphas", own=True).tolist() == [a1] * len(experts)
            assert value("g2_alphas", own=True).tolist() == [a2] * len(experts)
        if packed.layout == SM90:
            assert a1 is not None and a2 is not None
            first, second = factors_of(before, path, 0, "gate"), factors_of(before, path, 0, "down")
            assert first is not None and second is not None
            second = np.ones_like(second) if rows else second
            second = second[tp * inner // packed.tp : (tp + 1) * inner // packed.tp]
            for gemm, factors, a in (("1", first, a1), ("2", second, a2)):
                logical = value(f"w{'13' if gemm == '1' else '2'}_pre_quant_scale", own=True)
                assert logical.dtype == torch.float32 and (logical.numpy() == factors).all()
                for own in (False, True):
                    act, alpha = value(f"fc{gemm}_act_scale", own), value(f"fc{gemm}_alpha", own)
                    assert packs.same_bytes(act, as_bf16(factors / np.float32(a)))
                    assert alpha.dtype == torch.float32 and alpha.tolist() == [a] * len(experts)
        assert mine == wanted, mine ^ wanted


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
    checkpoint = packs.read_checkpoint(str(source))
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


# --- scales that no kernel can use -----------------------------------------------------------------------------------


def put_scale(value: float, kind: str = "gate", at: tuple[int, int] = (5, 1)) -> Damage:
    def change(ck: Editable) -> None:
        name = f"{EXPERT3}.{kind}_proj.weight_scale"
        ck.tensors[name] = ck.tensors[name].clone()
        ck.tensors[name][at] = value

    return change


def refused(source: Path, *options: object) -> Run:
    """A conversion that must end with exit code 3 and leave nothing."""
    before = snapshot(source.parent)
    with packs.unsynced():
        result = run("convert", source, source.parent / "out", "--no-smoke", "--json", *options)
    assert result.code == 3, result.stderr
    assert "Traceback" not in result.stderr and snapshot(source.parent) == before
    return result


BAD: dict[str, tuple[Damage, str, str]] = {
    "fp16 overflow": (put_scale(7e4), "fp16", r"gate's group scale 70000 at \[5, 1\] does not fit float16"),
    "fp16 overflow of a negative": (
        put_scale(-2e5, "up", (127, 0)), "fp16", r"up's group scale -[\d.e+]+ at \[127, 0\] does not fit float16",
    ),
    "fp16 underflow": (
        put_scale(2.0**-26, "down", (0, 0)), "fp16", r"down's group scale 1.49012e-08 at \[0, 0\] does not fit float16",
    ),
    "bf16 overflow": (put_scale(3.4e38), "bf16", r"gate's group scale 3.4e\+38 at \[5, 1\] does not fit bfloat16"),
    "bf16 underflow": (
        put_scale(2.0**-140), "bf16", r"gate's group scale 7.17\d*e-43 at \[5, 1\] does not fit bfloat16",
    ),
    "a product that overflows": (
        lambda ck: (put_scale(3e38, "up")(ck), put_factor(ck, "down", 5, 8.0)), "bf16",
        r"up's group scale 3e\+38 times down's pre_quant_scale 8 at \[5, 1\] does not fit float32",
    ),
    "a product that underflows": (
        lambda ck: (put_scale(2.0**-120, "up")(ck), put_factor(ck, "down", 5, 2.0**-60)), "bf16",
        r"up's group scale 7.5\d*e-37 times down's pre_quant_scale 8.6\d*e-19 at \[5, 1\] does not fit float32",
    ),
}  # fmt: skip


def put_factor(ck: Editable, kind: str, at: int, value: float, experts: range = range(8)) -> None:
    for expert in experts:
        for projection in ("gate", "up") if kind == "gate" else (kind,):
            name = f"{MLP0}.experts.{expert}.{projection}_proj.pre_quant_scale"
            ck.tensors[name] = ck.tensors[name].clone()
            ck.tensors[name][at] = value


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


def tensor_cases() -> Iterator[tuple[str, Callable[[dict[str, torch.Tensor]], None], str]]:
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
    change: Callable[[dict[str, torch.Tensor]], None], says: str, packed_outputs: Mapping[str, Path], tmp_path: Path
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
