"""down's pre_quant_scale of NVFP4_AWQ (exports before ModelOpt 0.47) in the rows of up's block scales.

No shipped checkpoint has it: it is attached here. What must be written is worked out with exact fractions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import astuple
from fractions import Fraction
from functools import cache
from pathlib import Path

import damage
import numpy as np
import pack_checks as packs
import pytest
import torch
from damage import Damage, Editable
from oracle import E2M1, E4M3
from runner import run
from safetensors.torch import load_file

from nvfp4prep import blockscales
from nvfp4prep.blockscales import check_fold, fold_codes
from nvfp4prep.journal import Outcome, finished, line
from nvfp4prep.layouts.logical import LayoutError
from nvfp4prep.scales import Rescale, RescaleCounts
from nvfp4prep.smoke.run import subject_of

Fetch = Callable[[str], Path]
Tensors = Mapping[str, torch.Tensor]

AWQ = "qwen3moe-nvfp4-awqlite"
PACKED = ("flashinfer-trtllm", "flashinfer-cutlass", "flashinfer-cutedsl", "vllm-cutlass", "vllm-marlin")
FOLD = ("--pre-quant-scale", "fold")
MLP0 = "model.layers.0.mlp"
EXPERTS = 8
DOWNS = r".*\.experts\.\d+\.down_proj\.pre_quant_scale"
W13 = r".*\.experts\.\d+\.(gate|up)_proj\.pre_quant_scale"
VALUES = [Fraction(float(value)) for value in E4M3[:127]]


# --- the oracle ------------------------------------------------------------------------------------------------------


@cache
def folded(code: int, factor: float, old: float = 1.0, new: float = 1.0) -> int | None:
    """The code of the E4M3 value nearest to value · factor · old / new, half to even; None beyond 448."""
    exact = VALUES[code & 127] * abs(Fraction(factor)) * Fraction(old) / Fraction(new)
    steps = [*VALUES, Fraction(480)]
    nearest = min(range(128), key=lambda one: (abs(steps[one] - exact), one % 2))
    return None if nearest == 127 else nearest | ((code & 128) ^ (128 if factor < 0 else 0))


def folded_rows(
    codes: torch.Tensor, factors: torch.Tensor, old: float = 1.0, new: float = 1.0
) -> tuple[torch.Tensor, RescaleCounts]:
    """A matrix of codes, and what rounding did to it."""
    stored, rows = codes.view(torch.uint8).tolist(), factors.to(torch.float32).tolist()
    inexact = subnormal = zero = 0
    worst = Fraction(0)
    written = [[folded(code, rows[r], old, new) for code in row] for r, row in enumerate(stored)]
    for r, row in enumerate(stored):
        for code, after in zip(row, written[r], strict=True):
            assert after is not None
            before, now = code & 127, after & 127
            exact = VALUES[before] * abs(Fraction(rows[r])) * Fraction(old) / Fraction(new)
            inexact += VALUES[now] != exact
            subnormal += before >= 8 and 0 < now < 8
            zero += before > 0 and now == 0
            worst = max(worst, abs(VALUES[now] - exact) / exact if exact else Fraction(0))
    counts = RescaleCounts(codes.numel(), inexact, subnormal, zero, float(worst))
    return torch.tensor(written, dtype=torch.uint8), counts


def same_counts(ours: RescaleCounts, expected: RescaleCounts) -> bool:
    return astuple(ours)[:4] == astuple(expected)[:4] and ours.max_relative_error == pytest.approx(
        expected.max_relative_error, rel=1e-12
    )


# --- the product -----------------------------------------------------------------------------------------------------

CODES = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
FACTORS = [1.0, 0.5, 0.3, 0.0625, 2.0**-9, 2.0**-20, 1.0357, 0.8125, -0.7, *(0.5 + i / 77 for i in range(40))]


@pytest.mark.parametrize("rescale", [None, Rescale(((0.0011,),), (0.0017,)), Rescale(((2.0**-10,),), (2.0**-8,))])
def test_products_are_rounded_once(rescale: Rescale | None) -> None:
    factors = torch.tensor(FACTORS, dtype=torch.float32)
    old, new = (1.0, 1.0) if rescale is None else (rescale.old[0][0], rescale.new[0])
    limit = min(1.0, new / old)
    factors = torch.where(factors > limit, factors / 2, factors)
    codes = CODES.repeat(len(FACTORS), 1)
    ours, counts = fold_codes(codes.clone(), factors, rescale)
    expected, told = folded_rows(codes, factors, old, new)
    assert torch.equal(ours, expected)
    assert same_counts(counts, told) and 0 < told.inexact < codes.numel() and told.became_zero > 100


def test_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of whole rows: the same codes and counts, and places counted from the first row."""
    codes = torch.randint(0, 0x70, (37, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    factors = torch.linspace(0.1, 1, 37)
    whole = fold_codes(codes, factors, None)
    monkeypatch.setattr(blockscales, "_FOLDED_AT_ONCE", 12)
    parts = fold_codes(codes, factors, None)
    assert torch.equal(parts[0], whole[0]) and parts[1] == whole[1] and whole[1].blocks == 185
    factors[33] = float("nan")
    with pytest.raises(LayoutError, match=r"at \[33, 0\]"):
        fold_codes(codes, factors, None)


def test_ties_go_to_the_even_code() -> None:
    """Halves of odd subnormals."""
    ours, counts = fold_codes(torch.tensor([[1, 3, 5, 7, 0x83]], dtype=torch.uint8), torch.tensor([0.5]), None)
    assert ours.tolist() == [[0, 2, 2, 4, 0x82]]
    assert (counts.inexact, counts.became_zero, counts.became_subnormal) == (5, 1, 0)


@pytest.mark.parametrize(("code", "factor", "after"), [(0x7E, 1.03125, 0x7E), (0x78, 1.8125, 0x7E), (0x7E, 1.0, 0x7E)])
def test_what_is_nearest_to_448_is_448(code: int, factor: float, after: int) -> None:
    ours, _ = fold_codes(torch.tensor([[code]], dtype=torch.uint8), torch.tensor([factor]), None)
    assert ours.tolist() == [[after]] and folded(code, factor) == after


@pytest.mark.parametrize(
    ("code", "factor"),
    [(0x7E, 1.0625), (0x78, 1.8126), (0x7F, 1.0), (0xFF, 0.5), (8, float("nan")), (8, float("inf")), (0, float("inf"))],
)
def test_overflow_and_nan_have_a_place(code: int, factor: float) -> None:
    codes = torch.full((3, 4), 0x30, dtype=torch.uint8)
    codes[2, 1] = code
    with pytest.raises(LayoutError, match=rf"down's pre_quant_scale {factor:g} at \[2, [01]\] does not fit E4M3"):
        fold_codes(codes, torch.tensor([1.0, 1.0, factor]), None)


def after_fold(change: Callable[[torch.Tensor, torch.Tensor], None]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of 200 rows of 5 blocks, all 1.0 with factors 1.0 but for a change; after a fold; and the factors."""
    codes, factors = torch.full((200, 5), 0x38, dtype=torch.uint8), torch.ones(200)
    change(codes, factors)
    return codes, fold_codes(codes, factors, None)[0], factors


def test_a_row_that_becomes_zero_is_refused() -> None:
    def change(codes: torch.Tensor, factors: torch.Tensor) -> None:
        codes[7], factors[7] = torch.tensor([0, 1, 8, 1, 0]), 2.0**-8  # one is normal, 2^-6

    says = (
        r"all of up's block scales in row 7 \(1 such rows of 200\) times down's pre_quant_scale 0\.00391 round to zero"
    )
    with pytest.raises(LayoutError, match=says):
        check_fold(*after_fold(change))


def test_a_dead_row_may_become_zero() -> None:
    """Exporters leave the smallest code where all weights of a row are next to nothing."""

    def change(codes: torch.Tensor, factors: torch.Tensor) -> None:
        codes[7], factors[7] = 0x81, 0.4

    before, after, factors = after_fold(change)
    assert not bool((after[7] & 0x7F).any())
    check_fold(before, after, factors)


@pytest.mark.parametrize(("rows", "refuses"), [(10, False), (11, True)])
def test_one_in_a_hundred_may_become_zero(rows: int, refuses: bool) -> None:
    def change(codes: torch.Tensor, factors: torch.Tensor) -> None:
        codes[:rows, 0], factors[:rows] = 1, 0.25

    case = after_fold(change)
    if not refuses:
        check_fold(*case)
        return
    with pytest.raises(LayoutError, match=r"11 of 1,000 .*factors from 0\.25\) round to zero in E4M3; up to 1% may"):
        check_fold(*case)


# --- conversions -----------------------------------------------------------------------------------------------------


def factors_of(expert: int, layer: int) -> torch.Tensor:
    """BF16 [128], others for each expert, none above 1: the largest block scale is 448 already."""
    made = torch.rand(128, generator=torch.Generator().manual_seed(100 * layer + expert))
    return (0.02 + 0.98 * made).to(torch.bfloat16)


def attach(ck: Editable) -> None:
    for name in ck.names(r".*\.experts\.\d+\.down_proj\.weight"):
        layer, expert = (int(number) for number in re.findall(r"\.(\d+)\.", name))
        ck.tensors[name.replace("weight", "pre_quant_scale")] = factors_of(expert, layer)


def attach_small(ck: Editable) -> None:
    attach(ck)
    for name in ck.names(DOWNS):
        ck.tensors[name] = ck.tensors[name] / 8


def fold_in(ck: Editable) -> None:
    """The attached factors where they must go."""
    for name in ck.names(DOWNS):
        scale = name.replace("down_proj.pre_quant_scale", "up_proj.weight_scale")
        codes, _ = folded_rows(ck.tensors[scale], ck.tensors[name])
        ck.tensors[scale] = codes.view(torch.float8_e4m3fn)
    ck.remove(ck.names(DOWNS))


def quiet_gates(ck: Editable) -> None:
    """So that the largest block scale of w13 is one of up's, which the fold makes smaller."""
    for name in ck.names(r".*\.experts\.\d+\.gate_proj\.weight_scale"):
        ck.tensors[name] = torch.full_like(ck.tensors[name].float(), 2.0**-3).to(torch.float8_e4m3fn)
    for name in ck.names(r".*\.experts\.\d+\.up_proj\.weight_scale"):
        ck.tensors[name] = (ck.tensors[name].float() / 16).to(torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def sources(checkpoint: Fetch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint with factors on down, and with those folded by the oracle. Read only."""
    folder = tmp_path_factory.mktemp("rows")
    made = {
        "attached": (attach,),
        "folded": (attach, fold_in),
        "quiet": (quiet_gates, attach_small),
        "quiet folded": (quiet_gates, attach_small, fold_in),
    }
    return {name: damage.damaged(checkpoint(AWQ), folder / name, *changes) for name, changes in made.items()}


def converted(source: Path, out: Path, target: str, *options: object) -> dict[str, torch.Tensor]:
    done = run("convert", source, out, "--target", target, *FOLD, "-q", *options)
    assert done.code == 0, done.stderr
    return {
        f"{path.relative_to(out)} {name}": value
        for path in sorted(out.rglob("*.safetensors"))
        for name, value in load_file(path).items()
    }


@pytest.mark.parametrize("ranks", [(), ("--tp", 2, "--ep", 2)])
@pytest.mark.parametrize("target", [*PACKED, "compressed-tensors"])
def test_writes_what_folded_sources_give(
    target: str, ranks: tuple[object, ...], sources: Mapping[str, Path], tmp_path: Path
) -> None:
    """Byte for byte, Marlin's largest block scale and its factors included."""
    if ranks and target in ("compressed-tensors", "flashinfer-trtllm"):
        pytest.skip("no ranks, or 64 rows that the kernel does not take")
    for kind in ("attached", "quiet") if target == "vllm-marlin" else ("attached",):
        folded_ = sources["folded" if kind == "attached" else "quiet folded"]
        ours = converted(sources[kind], tmp_path / f"ours {kind}", target, *ranks)
        expected = converted(folded_, tmp_path / f"expected {kind}", target, *ranks)
        assert ours.keys() == expected.keys()
        assert [key for key in ours if not packs.same_bytes(ours[key], expected[key])] == []


def test_marlin_sees_the_folded_maximum(sources: Mapping[str, Path], checkpoint: Fetch, tmp_path: Path) -> None:
    plain = damage.damaged(checkpoint(AWQ), tmp_path / "plain", quiet_gates)
    tables = [
        converted(source, tmp_path / name, "vllm-marlin") for source, name in ((plain, "a"), (sources["quiet"], "b"))
    ]
    before, after = (
        next(value for key, value in table.items() if key.endswith(f"{MLP0}.experts.nvfp4prep.w13_scale_factor"))
        for table in tables
    )
    scales = [packs.tensors_of(plain)[f"{MLP0}.experts.{e}.up_proj.weight_scale"] for e in range(EXPERTS)]
    largest = max(float(E4M3[folded_rows(scale, factors_of(e, 0) / 8)[0].max()]) for e, scale in enumerate(scales))
    assert float(after[0]) == 8 * float(before[0]), "or the fold does not change the maximum, and this tests nothing"
    assert largest * float(after[0]) <= 448 < 2 * largest * float(after[0])


@pytest.mark.parametrize("target", [*PACKED, "compressed-tensors"])
def test_a_rescale_and_the_fold_are_one_rounding(target: str, sources: Mapping[str, Path], tmp_path: Path) -> None:
    """up's global scale smaller than the gate's; the manifest counts the product's rounding."""
    options = () if target == "compressed-tensors" else ("--w13-scale", "unify")
    harm = damage.multiply(rf"{re.escape(MLP0)}\.experts\.\d\.up_proj", 0.61, param="weight_scale_2")
    source = damage.damaged(sources["attached"], tmp_path / "source", harm)
    before, out = packs.tensors_of(source), tmp_path / "out"
    converted(source, out, target, *options)
    if target == "compressed-tensors":
        after = {name.replace("weight_packed", "weight"): value for name, value in packs.tensors_of(out).items()}
    else:
        after = packs.tensors_of(packs.unpacked(out, tmp_path / "back"))
    entry = packs.read_json(out / packs.MANIFEST)["runs"][-1]["block_scales_folded"]
    assert list(entry) == [MLP0, "model.layers.1.mlp"]
    for layer, path in enumerate(entry):
        total = RescaleCounts()
        for expert in range(EXPERTS):
            gate, up, down = (f"{path}.experts.{expert}.{name}_proj" for name in ("gate", "up", "down"))
            old, other = (float(before[f"{module}.weight_scale_2"]) for module in (up, gate))
            codes, counts = folded_rows(before[f"{up}.weight_scale"], factors_of(expert, layer), old, max(old, other))
            total += counts
            assert torch.equal(after[f"{up}.weight_scale"].view(torch.uint8), codes), up
            for module in (gate, up, down):
                assert packs.same_bytes(after[f"{module}.weight"], before[f"{module}.weight"])
            assert packs.same_bytes(after[f"{down}.weight_scale"], before[f"{down}.weight_scale"])
            assert f"{down}.pre_quant_scale" not in after
        told = entry[path]
        keys = ("blocks", "inexact", "became_subnormal", "became_zero", "max_relative_error")
        assert same_counts(RescaleCounts(*(told[key] for key in keys)), total)
        assert told["max_relative_error"] > 0.01


def dequantised(tensors: Tensors, module: str) -> np.ndarray:
    packed = tensors[f"{module}.weight"].numpy()
    values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)]
    blocks = E4M3[tensors[f"{module}.weight_scale"].view(torch.uint8).numpy()]
    return values * np.repeat(blocks, 16, 1) * float(tensors[f"{module}.weight_scale_2"])


def test_experts_compute_what_they_did(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """down(p · silu(gate) · up) of the source against down(silu(gate) · up') as written, within the reported error."""
    out = tmp_path / "out"
    converted(sources["attached"], out, "vllm-cutlass")
    before, after = packs.tensors_of(sources["attached"]), packs.tensors_of(packs.unpacked(out, tmp_path / "back"))
    error = packs.read_json(out / packs.MANIFEST)["runs"][-1]["block_scales_folded"][MLP0]["max_relative_error"]
    x = np.random.default_rng(0).standard_normal((256, 16))
    off = []
    for expert in range(EXPERTS):
        gate, up, down = (f"{MLP0}.experts.{expert}.{name}_proj" for name in ("gate", "up", "down"))
        p = factors_of(expert, 0).double().numpy()[:, None]
        g = dequantised(before, gate) @ x
        act = g / (1 + np.exp(-g))
        first, second = dequantised(before, up), dequantised(before, down)
        expected = second @ (p * act * (first @ x))
        ours = dequantised(after, down) @ (act * (dequantised(after, up) @ x))
        bound = np.abs(second) @ (p * np.abs(act) * (error * np.abs(first) @ np.abs(x)))
        assert (np.abs(ours - expected) <= bound * (1 + 1e-9) + 1e-12).all()
        off.append(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
        assert np.linalg.norm(second @ (act * (first @ x)) - expected) > 0.3 * np.linalg.norm(expected)
    assert 0.001 < max(off) < 0.05


def test_downs_alone(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """Norm and router stay, the configuration says NVFP4 once no factors are left."""

    def only_experts(ck: Editable) -> None:
        ck.remove(ck.names(W13))
        ck.remove([name for name in ck.tensors if name.endswith("pre_quant_scale") and ".experts." not in name])

    source = damage.damaged(sources["attached"], tmp_path / "source", only_experts)
    out = packs.pack(source, tmp_path / "out", "vllm-cutlass", pre_quant_scale="fold")
    before, back = packs.tensors_of(source), packs.unpacked(out, tmp_path / "back")
    after = packs.tensors_of(back)
    for name in ("model.layers.0.post_attention_layernorm.weight", f"{MLP0}.gate.weight"):
        assert packs.same_bytes(after[name], before[name])
    last = packs.read_json(out / packs.MANIFEST)["runs"][-1]
    assert "folded" not in last and list(last["block_scales_folded"]) == [MLP0, "model.layers.1.mlp"]
    assert packs.read_json(back / "hf_quant_config.json")["quantization"]["quant_algo"] == "NVFP4"


def test_exports_without_them_report_nothing(checkpoint: Fetch, tmp_path: Path) -> None:
    out = packs.pack(checkpoint(AWQ), tmp_path / "out", "vllm-marlin", pre_quant_scale="fold")
    assert "block_scales_folded" not in packs.read_json(out / packs.MANIFEST)["runs"][-1]


def test_a_resumed_run_knows_what_was_counted(sources: Mapping[str, Path]) -> None:
    plan = packs.decide(sources["attached"], "vllm-cutlass", pre_quant_scale="fold").plan
    outcome = Outcome(folded={(0, MLP0): RescaleCounts(8, 5, 2, 1, 0.03)}, written=4)
    assert finished([line(1, outcome, {})], plan) == {1: outcome}


# --- refused ---------------------------------------------------------------------------------------------------------


def factor(value: float, expert: int = 3, row: int = 9) -> Damage:
    def change(ck: Editable) -> None:
        ck.tensors[f"{MLP0}.experts.{expert}.down_proj.pre_quant_scale"][row] = value

    return change


@pytest.mark.parametrize("target", ["vllm-marlin", "flashinfer-cutlass", "compressed-tensors"])
def test_overflow(target: str, sources: Mapping[str, Path], tmp_path: Path) -> None:
    source = damage.damaged(sources["attached"], tmp_path / "source", factor(2.0**20))
    done = run("convert", source, tmp_path / "out", "--target", target, *FOLD, "--json", "--no-smoke")
    (found,) = done.findings
    assert (done.code, found["rule"], found["layer"], found["experts"]) == (3, "kernel-scale-bad", 0, [3])
    assert re.search(r"times down's pre_quant_scale 1\.04858e\+06 at \[9, 0\] does not fit E4M3", found["message"])
    assert not (tmp_path / "out").exists()
    told = run("validate", source, "--target", target, *FOLD, "--level", "full", "--format", "json").json
    assert [one["message"] for one in told["findings"] if one["severity"] == "error"] == [found["message"]]


@pytest.mark.parametrize("target", ["vllm-marlin", "flashinfer-cutlass", "compressed-tensors"])
def test_a_lost_row(target: str, sources: Mapping[str, Path], tmp_path: Path) -> None:
    """One row of 128, fewer block scales than one in a hundred."""
    source = damage.damaged(sources["attached"], tmp_path / "source", factor(2.0**-20))
    done = run("convert", source, tmp_path / "out", "--target", target, *FOLD, "--json", "--no-smoke")
    (found,) = done.findings
    assert (done.code, found["rule"], found["layer"], found["experts"]) == (3, "kernel-scale-bad", 0, [3])
    assert "all of up's block scales in row 9" in found["message"] and not (tmp_path / "out").exists()
    told = run("validate", source, "--target", target, *FOLD, "--level", "full", "--format", "json").json
    assert [one["message"] for one in told["findings"] if one["severity"] == "error"] == [found["message"]]


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("target", ["flashinfer-cutlass", "compressed-tensors"])
def test_factors_that_are_no_factors(target: str, value: float, sources: Mapping[str, Path], tmp_path: Path) -> None:
    source = damage.damaged(sources["attached"], tmp_path / "source", factor(value))
    done = run("convert", source, tmp_path / "out", "--target", target, *FOLD, "--json", "--no-smoke")
    (found,) = done.findings
    assert (done.code, found["layer"], found["experts"]) == (3, 0, [3])
    assert found["rule"] == ("target-refused" if value == -1 else "pre-quant-scale-bad")
    assert value != -1 or "kernels read block scales without sign" in found["message"]


# --- smoke -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["vllm-marlin", "flashinfer-cutlass"])
def test_smoke_passes(target: str, sources: Mapping[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted(sources["attached"], out, target)
    for more in ((), ("--source", sources["attached"])):
        assert run("smoke", out, "--tokens", "5", *more).code == 0


def test_smoke_compares_with_exact_products(sources: Mapping[str, Path], checkpoint: Fetch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    converted(sources["attached"], out, "vllm-marlin")
    subject = subject_of(str(out), None, None, str(sources["attached"]))
    before = packs.tensors_of(sources["attached"])
    moe = subject.layers[0]
    for expert in (0, 5):
        up = dequantised(before, f"{MLP0}.experts.{expert}.up_proj") * factors_of(expert, 0).double().numpy()[:, None]
        ours = subject.real(moe)(expert).up.double().numpy()
        assert np.abs(ours - up).max() <= 2.0**-22 * np.abs(up).max()
    assert subject.rescaled(moe) and subject.folded == {MLP0, "model.layers.1.mlp"}
    converted(checkpoint(AWQ), tmp_path / "plain", "vllm-marlin")
    other = subject_of(str(tmp_path / "plain"), None, None, str(checkpoint(AWQ)))
    assert not other.rescaled(other.layers[0])
