"""The check: clean checkpoints pass on every target; whatever is done to a packed output's layer from outside fails."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import NVFP4, OVERLAYS, full_set
from pack_checks import PAIRS, decide, write
from runner import run
from torch import Tensor

from nvfp4prep.checkpoint import read_checkpoint
from nvfp4prep.convert import Prepared
from nvfp4prep.errors import InputRefused
from nvfp4prep.header import TensorInfo
from nvfp4prep.layouts.logical import Activation
from nvfp4prep.smoke import emulator
from nvfp4prep.smoke.check import Report, Settings, Subject, check
from nvfp4prep.smoke.choice import chosen_layers
from nvfp4prep.smoke.layer import PackedLayer, Routing, Run
from nvfp4prep.smoke.metrics import RESCALE_NOISE
from nvfp4prep.smoke.subject import BF16, SOURCE, UNPACKED, Real, from_packed, from_prepared
from nvfp4prep.unpack import Packed, read_packed_output

Find = Callable[[str], Path]

SETTINGS = Settings("emulator", "first-last", (1, 16))
QUICK = Settings("emulator", (0,), (1,))
RANKS = Settings("emulator", "first-last", (1, 7))
REFERENCES = {name: "tinymoe-bf16" for name in NVFP4 + OVERLAYS if name.startswith("tinymoe")}


@cache
def reference_of(name: str) -> Real:
    """The BF16 checkpoint where the full set has it."""
    path = full_set().get(REFERENCES.get(name, f"{name}-bf16"))
    if path is None:
        return Real()
    found = read_checkpoint(str(path))
    return Real(found.source, found.config)


def decided(path: Path, layout: str, engine: str, **options: object) -> Prepared:
    try:
        return decide(path, layout, engine=engine, **options)
    except InputRefused as refused:
        pytest.skip(str(refused))


def assert_passed(report: Report) -> None:
    assert report.byte_problems == ()
    assert [problem for row in report.rows for problem in row.problems] == []
    assert report.passed


@pytest.mark.parametrize(("layout", "engine"), PAIRS)
@pytest.mark.parametrize("name", [*NVFP4, *OVERLAYS])
def test_clean_checkpoints_pass(name: str, layout: str, engine: str, checkpoint: Find) -> None:
    prepared, reference = decided(checkpoint(name), layout, engine), reference_of(name)
    report = check(from_prepared(prepared, reference), SETTINGS)
    assert_passed(report)
    assert report.reference == (SOURCE if reference.reference is None else BF16)
    assert not report.kernel_ran and report.backend == "emulator"
    assert {row.against for row in report.rows} == {"exact", "reference"}
    layers = 2 if len(prepared.checkpoint.schema.moe_layers) > 1 else 1
    assert len({row.path for row in report.rows}) == layers
    assert {row.routing for row in report.rows} == {"router", "random"}


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_marlins_activations(kind: str, engine: str, checkpoint: Find) -> None:
    prepared = decided(checkpoint("qwen3moe-w4a16nvfp4"), "vllm-marlin", engine, activation_dtype=kind)
    assert_passed(check(from_prepared(prepared, Real()), SETTINGS))


def test_rounding_block_scales_once_more_costs_what_is_allowed() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0x20, 0x70, (1, 1 << 16), generator=generator, dtype=torch.uint8)
    scale = codes.view(torch.float8_e4m3fn).float() * (1 + torch.rand(codes.shape, generator=generator))
    error = (scale.to(torch.float8_e4m3fn).float() / scale - 1).square().mean().sqrt()
    assert float(error) == pytest.approx(RESCALE_NOISE, rel=0.1)


# --- packed outputs, and damage to them -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, checkpoint: Find) -> Callable[..., tuple[Path, Prepared]]:
    done: dict[str, tuple[Path, Prepared]] = {}

    def of(name: str, layout: str, engine: str, **options: object) -> tuple[Path, Prepared]:
        key = json.dumps([name, layout, engine, options])
        if key not in done:
            prepared = decided(checkpoint(name), layout, engine, **options)
            out = tmp_path_factory.mktemp("packed") / "out"
            write(prepared, out)
            done[key] = out, prepared
        return done[key]

    return of


def tensors_of_layer(output: Packed, layer: int = 0) -> list[tuple[str, TensorInfo]]:
    prefix = output.layers[layer].container
    found = [(key, info) for key, info in output.source.tensors.items() if f"{prefix}." in key]
    assert len(found) > 10
    return found


@contextmanager
def flipped(path: Path, offset: int, mask: int) -> Iterator[None]:
    """Some bits of one byte of a file turned over, and back."""
    with path.open("r+b") as file:
        file.seek(offset)
        (before,) = file.read(1)
        for value in (before ^ mask, before):
            file.seek(offset)
            file.write(bytes([value]))
            file.flush()
            if value != before:
                yield


def unnoticed(out: Path, real: Real, seed: int, times: int) -> list[str]:
    """Tensors of the first layer in which a flipped bit leaves the check as it is; every tensor is tried."""
    output, draw = read_packed_output(out), random.Random(seed)
    assert check(from_packed(output, real), QUICK).passed
    missed = []
    for key, info in tensors_of_layer(output):
        for _ in range(times):
            byte, mask = draw.randrange(info.nbytes), 1 << draw.randrange(8)
            with flipped(out / info.file, info.start + byte, mask):
                if check(from_packed(output, real), QUICK).passed:
                    missed.append(f"{key} byte {byte} mask {mask:#x}")
    return missed


@pytest.mark.parametrize(("layout", "engine"), PAIRS)
@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-i96", "gptoss-nvfp4"])
def test_a_flipped_bit_anywhere_in_a_layer_fails(
    name: str, layout: str, engine: str, packed: Callable[..., tuple[Path, Prepared]]
) -> None:
    """Weights, scales, biases, padding, the engine's parameters, kernel scalars, stored logical and raw scales."""
    out, prepared = packed(name, layout, engine)
    assert unnoticed(out, Real(source=prepared), seed=len(layout), times=2) == []


def test_a_flipped_bit_of_any_rank_fails(packed: Callable[..., tuple[Path, Prepared]]) -> None:
    out, prepared = packed("qwen3moe-nvfp4-i96", "flashinfer-trtllm", "sglang", tp=2, ep=2)
    assert unnoticed(out, Real(source=prepared), seed=5, times=1) == []


def first_zero(path: Path, info: TensorInfo) -> int:
    raw = path.read_bytes()[info.start : info.end]
    return info.start + raw.index(0)


@pytest.mark.parametrize(("layout", "engine"), PAIRS)
def test_damage_that_no_kernel_could_feel_fails_too(
    layout: str, engine: str, packed: Callable[..., tuple[Path, Prepared]]
) -> None:
    """A zero that becomes -0: in a weight, a block scale, or padding."""
    out, prepared = packed("qwen3moe-nvfp4-i96", layout, engine)
    output = read_packed_output(out)
    for key, info in tensors_of_layer(output):
        if info.dtype in ("U8", "I32", "F8_E4M3"):
            path = out / info.file
            with flipped(path, first_zero(path, info), 0x80):
                report = check(from_packed(output, Real(source=prepared)), QUICK)
            assert report.byte_problems, key


def test_byte_problems_name_expert_rank_and_tensor(packed: Callable[..., tuple[Path, Prepared]]) -> None:
    out, prepared = packed("qwen3moe-nvfp4-i96", "flashinfer-trtllm", "vllm")
    output, real = read_packed_output(out), Real(source=prepared)
    moe = output.layers[0]

    def problems(suffix: str, offset: int) -> tuple[str, ...]:
        info = next(info for key, info in tensors_of_layer(output) if key.endswith(suffix))
        with flipped(out / info.file, info.start + offset, 1):
            return check(from_packed(output, real), QUICK).byte_problems

    assert problems("routed_experts.w2_weight", 0) == (
        f"{moe.path} expert 0: packed down differ from the logical weights",
    )
    (problem,) = problems("routed_experts.g1_scale_c", 4)
    assert problem.startswith(f"{moe.path}: {moe.container}.routed_experts.g1_scale_c[1] is ")
    (problem,) = problems("nvfp4prep.raw_input_scale", 0)
    assert ".nvfp4prep.raw_input_scale[0] is " in problem
    (problem, *_) = problems("nvfp4prep.g2_alphas", 0)
    assert problem.startswith(f"{moe.path}: g2_alphas[0] is ")


@pytest.mark.parametrize(("layout", "engine"), PAIRS)
@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-i96", "gptoss-nvfp4"])
def test_without_a_source_what_contradicts_itself_fails(
    name: str, layout: str, engine: str, packed: Callable[..., tuple[Path, Prepared]]
) -> None:
    """Weights can't be judged without a source; scalars that don't fit the stored logical scales can."""
    out, _ = packed(name, layout, engine)
    output = read_packed_output(out)
    report = check(from_packed(output, Real()), QUICK)
    assert_passed(report)
    assert report.reference == UNPACKED
    logical = ("weight_scale_2", "_input_scale")
    seen = 0
    for key, info in tensors_of_layer(output):
        own = ".nvfp4prep." in key
        if info.nbytes > 64 or (own and (key.endswith(logical) or "raw" in key)):
            continue
        seen += 1
        with flipped(out / info.file, info.start, 4):
            assert not check(from_packed(output, Real()), QUICK).passed, key
    assert seen >= 4


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout", "engine", "tp", "ep"),
    [
        ("qwen3moe-nvfp4-i96", "flashinfer-trtllm", "sglang", 2, 2),
        ("gptoss-nvfp4", "flashinfer-trtllm", "vllm", 2, 1),
        ("gptoss-nvfp4", "vllm-marlin", "vllm", 2, 2),
        ("nemotronh-nvfp4", "flashinfer-cutlass", "vllm", 1, 4),
        ("dsv3-nvfp4", "vllm-cutlass", "vllm", 2, 2),
        ("mixtral-nvfp4", "flashinfer-cutedsl", "sglang", 1, 2),
    ],
)
def test_ranks_are_checked_alone_and_summed(
    name: str, layout: str, engine: str, tp: int, ep: int, packed: Callable[..., tuple[Path, Prepared]]
) -> None:
    out, prepared = packed(name, layout, engine, tp=tp, ep=ep)
    subject = from_packed(read_packed_output(out), Real(source=prepared))
    report = check(subject, RANKS)
    assert_passed(report)
    folders = {prepared.job.pack.target.folder(rank) for rank in subject.target.ranks()}  # type: ignore[union-attr]
    assert {row.rank for row in report.rows if row.against == "exact"} == folders and len(folders) == tp * ep
    assert {row.rank for row in report.rows if row.against == "reference"} == {"all ranks"}

    first = next(iter(subject.target.ranks()))
    partial = replace(subject, pack=lambda moe, rank: None if rank == first else subject.pack(moe, rank))
    report = check(partial, RANKS)
    assert_passed(report)
    assert {row.rank for row in report.rows} == folders - {subject.target.folder(first)}
    assert {row.against for row in report.rows} == {"exact"}


# --- what kernels get wrong -------------------------------------------------------------------------------------------


def run_as(subject: Subject, run: Run, monkeypatch: pytest.MonkeyPatch, settings: Settings = SETTINGS) -> Report:
    monkeypatch.setattr(emulator, "emulate", run)
    return check(subject, settings)


@pytest.fixture
def subject(checkpoint: Find) -> Subject:
    return from_prepared(decide(checkpoint("gptoss-nvfp4"), "flashinfer-trtllm"), Real())


def test_an_output_of_zeros(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_as(subject, lambda layer, x, routing: torch.zeros(x.shape), monkeypatch)
    assert not report.byte_problems and all(row.problems for row in report.rows)
    assert "tokens have an output of zeros" in report.rows[0].problems[0]


def test_nan_at_many_tokens_only(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    real = emulator.emulate

    def kernel(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
        out = real(layer, x, routing)
        if x.shape[0] > 32:
            out[40:, :8] = torch.nan
        return out

    report = run_as(subject, kernel, monkeypatch, replace(SETTINGS, tokens=(1, 16, 64)))
    assert not report.passed
    assert {row.tokens for row in report.rows if row.problems} == {64}
    assert any("NaN" in problem for row in report.rows for problem in row.problems)


def test_another_activation(subject: Subject, checkpoint: Find, monkeypatch: pytest.MonkeyPatch) -> None:
    """silu where swiglu-oai was meant, and swiglu-oai where silu was."""
    real = emulator.emulate

    def as_silu(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
        kept = {name: value for name, value in layer.scalars.items() if not name.startswith("gemm1_")}
        return real(replace(layer, scalars=kept, activation=Activation("silu")), x, routing)

    assert not run_as(subject, as_silu, monkeypatch).passed

    def as_oai(layer: PackedLayer, x: Tensor, routing: Routing) -> Tensor:
        return real(replace(layer, activation=Activation("swiglu-oai", 7.0, 1.702, 1.0)), x, routing)

    other = from_prepared(decide(checkpoint("mixtral-nvfp4"), "vllm-marlin"), Real())
    assert not run_as(other, as_oai, monkeypatch).passed


def test_without_layers_or_rows_nothing_passes() -> None:
    assert not Report("t", "emulator", False, None, {}, SOURCE, (), ()).passed


@pytest.mark.parametrize("target", ["hf", "vllm-cutlass"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_a_layer_without_experts_is_refused_before_the_work(
    checkpoint: Find, tmp_path: Path, target: str, dry: list[str]
) -> None:
    """DeepSeek's first layers are dense: whoever asks for them must not learn it once 700 GB are written."""
    source = checkpoint("dsv3-nvfp4")
    result = run("convert", source, tmp_path / "out", "--target", target, "--smoke-layers", "0", *dry)
    assert result.code == 2
    assert result.stderr.splitlines()[-1] == "error: layer 0 has no experts for the smoke check; these layers have: 1"
    assert list(tmp_path.iterdir()) == []


def test_layers_are_chosen_by_number(subject: Subject) -> None:
    assert [moe.layer for moe in chosen_layers(subject.layers, (1,))] == [1]
