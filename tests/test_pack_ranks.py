"""The ranks' files together are the logical tensors, and the kernels compute from them what the logical layer does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import layout_emulator as emulator
import numpy as np
import pack_checks as packs
import pytest
import torch
from damage import Editable, damaged
from layout_emulator import Floats, Swiglu
from pack_checks import Logical, Packed, Rank

# name, TP and EP: every convertible real checkpoint, every kind of split
CASES: tuple[tuple[str, int, int], ...] = (
    ("dsv3-nvfp4", 2, 2),
    ("gptoss-nvfp4", 2, 4),
    ("llama4-nvfp4", 4, 2),
    ("mixtral-nvfp4", 1, 4),
    ("nemotronh-nvfp4", 2, 2),
    ("qwen3moe-mixed-fp8attn", 4, 1),
    ("qwen3moe-nvfp4-expertsonly-fp8kv", 1, 1),
    ("qwen3moe-nvfp4-i96", 1, 2),
    ("qwen3moe-nvfp4-i96", 2, 1),
    ("qwen3moe-nvfp4-i192", 1, 1),
    ("qwen3moe-nvfp4-i192", 2, 2),
    ("qwen3moe-nvfp4-i192", 4, 1),
    ("qwen3moe-nvfp4-perexpert", 4, 4),
    ("qwen3moe-nvfp4-sharded", 1, 2),
    ("qwen3moe-w4a16nvfp4", 2, 2),
    ("tinymoe-nvfp4-splitscale", 2, 2),
)
TOKENS = 2
OAI = Swiglu(limit=7.0, alpha=1.702, beta=1.0)


def twice_as_wide(ck: Editable) -> None:
    """I = 96 to 192: rows and columns of the next expert behind each expert's own, so that no half repeats."""
    ck.config["moe_intermediate_size"] = 192
    before = dict(ck.tensors)
    for name in ck.names(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight(_scale)?"):
        head, tail = name.split(".experts.")
        expert, rest = tail.split(".", 1)
        other = before[f"{head}.experts.{(int(expert) + 1) % 8}.{rest}"]
        dimension = 1 if rest.startswith("down") else 0
        pair = [tensor.view(torch.uint8) for tensor in (before[name], other)]
        ck.tensors[name] = torch.cat(pair, dimension).view(before[name].dtype)


def allowed(name: str, layout: str) -> bool:
    """Whether the kernel takes this checkpoint: W4A16 is for Marlin, biases are for kernels with a place for them."""
    if name == "qwen3moe-w4a16nvfp4":
        return layout == "vllm-marlin"
    return name != "gptoss-nvfp4" or layout not in ("flashinfer-cutedsl", "vllm-cutlass")


PACKABLE = [(*case, *pair) for case in CASES for pair in packs.PAIRS if allowed(case[0], pair[0])]
"""The refused ones are in test_pack_roundtrip."""

Make = Callable[..., tuple[Packed, Logical]]


@pytest.fixture(scope="session")
def sources(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def path_of(name: str) -> Path:
        if name != "qwen3moe-nvfp4-i192":
            return checkpoint(name)
        if name not in made:
            folder = tmp_path_factory.mktemp("i192") / name
            made[name] = damaged(checkpoint("qwen3moe-nvfp4-i96"), folder, twice_as_wide)
        return made[name]

    return path_of


@pytest.fixture(scope="session")
def logical(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Logical]:
    """`logical(name, w13_scale)`: the hf output."""
    made: dict[tuple[str, str], Logical] = {}

    def read(name: str, w13_scale: str) -> Logical:
        if (name, w13_scale) not in made:
            out = tmp_path_factory.mktemp("hf") / "hf"
            made[name, w13_scale] = Logical.read(packs.pack(sources(name), out, "hf", w13_scale=w13_scale))
        return made[name, w13_scale]

    return read


@pytest.fixture
def make(sources: Callable[[str], Path], logical: Callable[[str, str], Logical], tmp_path: Path) -> Make:
    """`make(name, layout, engine, (tp, ep), dtype)`: a packed output, and the hf output it should equal."""

    def packed(
        name: str, layout: str, engine: str, ranks: tuple[int, int], dtype: str = "bf16"
    ) -> tuple[Packed, Logical]:
        tp, ep = ranks
        out = tmp_path / f"{layout}-{engine}-{dtype}"
        packs.pack(sources(name), out, layout, engine=engine, tp=tp, ep=ep, activation_dtype=dtype)
        split = layout == "flashinfer-trtllm" and name != "gptoss-nvfp4"
        return Packed(out, layout, engine, tp, ep, dtype), logical(name, "split" if split else "unify")

    return packed


def some_experts(count: int, ep: int) -> list[int]:
    """All of a small layer; of a larger one the first and last of each EP rank."""
    each = count // ep
    return list(range(count)) if count <= 8 else sorted({e for r in range(ep) for e in (r * each, (r + 1) * each - 1)})


# --- the concatenation ---


@pytest.mark.parametrize(("name", "tp", "ep", "layout", "engine"), PACKABLE)
def test_ranks_together_are_the_logical_tensors(
    name: str,
    tp: int,
    ep: int,
    layout: str,
    engine: str,
    make: Make,
) -> None:
    packed, expected = make(name, layout, engine, (tp, ep))
    assert expected.names
    for moe in expected.names:
        count = expected.count(moe)
        assert all(rank.big(moe, "w13_weight").shape[0] == count // ep for rank in packed.ranks.values())
        for expert in some_experts(count, ep):
            ours = packed.whole(moe, expert, expected)
            packs.assert_same(ours, expected.matrices(moe, expert), f"{moe} expert {expert}")


@pytest.mark.parametrize("inner", [96, 192])
def test_the_gate_up_boundary(inner: int, sources: Callable[[str], Path], tmp_path: Path) -> None:
    """A change of the last row of gate or the first of up shows in the half and row it belongs to, on its own rank."""
    source = sources(f"qwen3moe-nvfp4-i{inner}")
    module = "model.layers.0.mlp.experts.3"
    for half, row in (("gate", inner - 1), ("up", 0), ("up", inner - 1), ("gate", inner // 2)):

        def invert(ck: Editable, half: str = half, row: int = row) -> None:
            weight = ck.tensors[f"{module}.{half}_proj.weight"]
            weight[row] = ~weight[row]

        changed = damaged(source, tmp_path / f"{half}{row}", invert)
        for layout, engine in packs.PAIRS:
            parts = {}
            for label, path in (("before", source), ("after", changed)):
                out = tmp_path / f"{half}{row}-{layout}-{engine}-{label}"
                packed = Packed(packs.pack(path, out, layout, engine=engine, tp=2), layout, engine, 2, 1)
                sizes = packs.Sizes(layout, engine, 256, inner, True, 2)
                parts[label] = [packed.ranks[tp, 0].matrices("model.layers.0.mlp", 3, sizes) for tp in (0, 1)]
            for tp, (before, after) in enumerate(zip(parts["before"], parts["after"], strict=True)):
                start, end = sizes.share(tp)
                for name, mine, theirs in before.pairs(after):
                    assert mine is not None and theirs is not None
                    rows = np.flatnonzero((mine[0] != theirs[0]).any(1)).tolist()
                    here = [row - start] if name == half and start <= row < end else []
                    assert rows == here, (layout, engine, half, row, tp, name)


@pytest.mark.parametrize(
    ("inner", "tp", "shares"),
    [
        (96, 2, [(0, 64), (64, 96)]),
        (192, 2, [(0, 128), (128, 192)]),
        (192, 4, [(0, 64), (64, 128), (128, 192), (192, 192)]),
    ],
)
def test_sglang_trtllm_steps_by_the_padded_size(
    inner: int, tp: int, shares: list[tuple[int, int]], sources: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where I/tp is no multiple of 64, ranks hold rows by the padded size; the last may hold nothing but zeros."""
    out = packs.pack(sources(f"qwen3moe-nvfp4-i{inner}"), tmp_path / "out", "flashinfer-trtllm", engine="sglang", tp=tp)
    packed = Packed(out, "flashinfer-trtllm", "sglang", tp, 1)
    expected = Logical.read(packs.pack(sources(f"qwen3moe-nvfp4-i{inner}"), tmp_path / "hf", "hf"))
    sizes = packs.Sizes("flashinfer-trtllm", "sglang", 256, inner, True, tp)
    assert [sizes.share(rank) for rank in range(tp)] == shares
    layers = packs.read_json(out / packs.MANIFEST)["packed"]["layers"]
    for moe in expected.names:
        assert layers[moe]["intermediate_per_rank"] == [end - start for start, end in shares]
        assert layers[moe]["padded_intermediate_per_rank"] == sizes.padded
        for rank, (start, end) in enumerate(shares):
            part = packed.ranks[rank, 0].matrices(moe, 5, sizes)
            whole = expected.matrices(moe, 5)
            for name, ours, theirs in part.pairs(whole):
                assert ours is not None and theirs is not None
                for values, wanted, block in zip(ours, theirs, (1, 16), strict=True):
                    if name == "down":
                        want = wanted[:, start // block : end // block]
                        have, rest = values[:, : want.shape[1]], values[:, want.shape[1] :]
                    else:
                        want = wanted[start:end]
                        have, rest = values[: end - start], values[end - start :]
                    assert (have == want).all() and not rest.any(), (moe, rank, name)


# --- the kernels ---


def kernel(packed: Packed, rank: Rank, moe: str, config: Mapping[str, Any], gated: bool) -> Callable[..., Floats]:
    """(local expert, x [T, H']) -> what the rank's kernel gives, from what an engine of this name would pass to it.

    vLLM multiplies a·s at start-up where its parameters hold them raw; on TRT-LLM and Marlin they hold the products.
    """
    oai = config["model_type"] == "gpt_oss"
    real = OAI if oai else Swiglu()
    layout, vllm = packed.layout, packed.engine == "vllm"

    def same(ours: torch.Tensor, name: str) -> torch.Tensor:
        assert torch.equal(ours, rank.own(moe, name)), (moe, name)
        return ours

    def scalar(name: str) -> torch.Tensor:
        return rank.engine(moe, name)

    def optional(name: str) -> torch.Tensor | None:
        return rank.own(moe, name) if rank.has_own(moe, name) else None

    big = {name: rank.big(moe, name) for name in ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")}
    if layout == "vllm-marlin":
        args: dict[str, Any] = {
            "w1": big["w13_weight"],
            "w1_scale": big["w13_weight_scale"],
            "w2": big["w2_weight"],
            "w2_scale": big["w2_weight_scale"],
            "global_scale1": same(scalar("w13_weight_scale_2").float(), "g1_alphas"),
            "global_scale2": same(scalar("w2_weight_scale_2").float(), "g2_alphas"),
            "bias1": optional("w13_bias"),
            "bias2": optional("w2_bias"),
        }
        return lambda e, x: emulator.run_marlin(args, e, x, gated, real, packed.dtype)
    if layout == "flashinfer-trtllm":
        names = ("gemm1_clamp_limit", "gemm1_alpha", "gemm1_beta")
        args = {
            "gemm1_weights": big["w13_weight"],
            "gemm1_weights_scale": big["w13_weight_scale"],
            "gemm2_weights": big["w2_weight"],
            "gemm2_weights_scale": big["w2_weight_scale"],
            "gemm1_bias": optional("gemm1_bias"),
            "gemm2_bias": optional("gemm2_bias"),
            "output1_scale_scalar": same(scalar("g1_scale_c"), "g1_scale_c"),
            "output1_scale_gate_scalar": same(scalar("w13_weight_scale_2" if vllm else "g1_alphas"), "g1_alphas"),
            "output2_scale_scalar": same(scalar("w2_weight_scale_2" if vllm else "g2_alphas"), "g2_alphas"),
            **{name: same(scalar(name), name) if oai else None for name in names},
        }
        quantise = emulator.reals(rank.own(moe, "w13_input_scale_quant"))
        if not vllm:
            assert scalar("w13_input_scale_quant").shape == () and float(scalar("w13_input_scale_quant")) == quantise[0]
        return lambda e, x: emulator.run_trtllm(args, e, x, gated, quantise)
    if vllm:
        w13_input, w2_input = scalar("w13_input_scale"), scalar("w2_input_scale")
        alphas = scalar("w13_weight_scale_2") * w13_input, scalar("w2_weight_scale_2") * w2_input
        first, second = 1 / w13_input, 1 / w2_input
        for name, value in zip(("g1_alphas", "g2_alphas"), alphas, strict=True):
            same(value, name)
    else:
        count = big["w13_weight"].shape[0]
        alphas = scalar("g1_alphas"), scalar("g2_alphas")
        first, second = (scalar(f"{gemm}_input_scale_quant").expand(count) for gemm in ("w13", "w2"))
    swiglu = {f"swiglu_{n}": rank.own(moe, f"swiglu_{n}") for n in ("limit", "alpha", "beta")} if oai else {}
    if layout == "flashinfer-cutlass":
        args = {
            "fc1_expert_weights": big["w13_weight"].view(torch.int64),
            "fc2_expert_weights": big["w2_weight"].view(torch.int64),
            "quant_scales": [
                first,
                big["w13_weight_scale"].view(torch.int32),
                alphas[0],
                second,
                big["w2_weight_scale"].view(torch.int32),
                alphas[1],
            ],
            **{
                name: rank.own(moe, name)
                for name in ("fc1_expert_biases", "fc2_expert_biases")
                if rank.has_own(moe, name)
            },
            **swiglu,
        }
        return lambda e, x: emulator.run_flashinfer_cutlass(args, e, x, gated)
    if layout == "vllm-cutlass":
        args = {
            "w1_fp4": big["w13_weight"],
            "w1_blockscale": big["w13_weight_scale"],
            "w1_alphas": alphas[0],
            "a1_gscale": first,
            "w2_fp4": big["w2_weight"],
            "w2_blockscale": big["w2_weight_scale"],
            "w2_alphas": alphas[1],
            "a2_gscale": second,
        }
        return lambda e, x: emulator.run_vllm_cutlass(args, e, x, gated, real)

    def view(scale: torch.Tensor) -> torch.Tensor:
        experts, rows, columns = scale.shape
        tiles = scale.view(torch.uint8).view(experts, rows // 128, columns // 4, 32, 4, 4)
        return tiles.permute(3, 4, 1, 5, 2, 0)

    args = {
        "w1_weight": big["w13_weight"],
        "w1_weight_sf": view(big["w13_weight_scale"]),
        "w1_alpha": alphas[0],
        "w2_weight": big["w2_weight"],
        "w2_weight_sf": view(big["w2_weight_scale"]),
        "w2_alpha": alphas[1],
        "fc2_input_scale": second[:1],
    }
    return lambda e, x: emulator.run_cutedsl(args, e, x, gated, real, emulator.reals(first))


def expected_output(
    logical: Logical, moe: str, expert: int, x: Floats, rounded: torch.dtype | None
) -> tuple[Floats, Floats]:
    """The logical expert's output and its size, the sum of |terms|. `rounded`: dtype that global scales go through."""

    def scale(kind: str) -> float:
        value = torch.tensor(logical.scale(moe, expert, kind), dtype=torch.float32)
        return float(value if rounded is None else value.to(rounded))

    def matrix(kind: str, pair: tuple[packs.Bytes, packs.Bytes]) -> Floats:
        return emulator.E2M1[pair[0]] * np.repeat(emulator.E4M3[pair[1]], 16, 1) * scale(kind)

    def bias(kind: str) -> Floats | float:
        found = logical.bias(moe, expert, kind)
        return 0.0 if found is None else found

    found = logical.matrices(moe, expert)
    real = OAI if logical.interleaved else Swiglu()
    gate = None if found.gate is None else x @ matrix("gate", found.gate).T + bias("gate")
    between = real(gate, x @ matrix("up", found.up).T + bias("up"))
    down = matrix("down", found.down)
    return between @ down.T + bias("down"), np.abs(between) @ np.abs(down).T + np.abs(bias("down"))


@pytest.mark.parametrize(("name", "tp", "ep", "layout", "engine"), PACKABLE)
def test_kernels_compute_the_logical_layer(
    name: str,
    tp: int,
    ep: int,
    layout: str,
    engine: str,
    make: Make,
) -> None:
    """Both GEMMs of each expert from the files of its ranks, TP ranks added up. Activations stay unquantised."""
    packed, expected = make(name, layout, engine, (tp, ep))
    rounded = torch.bfloat16 if (layout, engine) == ("vllm-marlin", "sglang") else None
    rng = np.random.default_rng(11)
    for moe in expected.names:
        sizes, count = packed.sizes(expected, moe), expected.count(moe)
        run = {at: kernel(packed, rank, moe, expected.config, sizes.gated) for at, rank in packed.ranks.items()}
        for expert in some_experts(count, ep):
            x = 4 * rng.standard_normal((TOKENS, sizes.hidden))
            padded = np.pad(x, ((0, 0), (0, sizes.padded_hidden - sizes.hidden)))
            of_rank, local = divmod(expert, count // ep)
            ours = sum((run[tp_rank, of_rank](local, padded) for tp_rank in range(tp)), np.zeros(1))
            want, size = expected_output(expected, moe, expert, x, rounded)
            assert np.abs(want).max() > 1e-6
            error = np.abs(ours[:, : sizes.hidden] - want)
            assert (error <= 2e-6 * size).all(), (moe, expert, (error / size).max())
            assert not ours[:, sizes.hidden :].any()


@pytest.mark.parametrize("engine", packs.ENGINES)
def test_marlin_for_fp16_activations(engine: str, make: Make) -> None:
    """The other exponent bias and no layer factor."""
    packed, expected = make("qwen3moe-w4a16nvfp4", "vllm-marlin", engine, (2, 1), dtype="fp16")
    rounded = torch.float16 if engine == "sglang" else None
    for moe in expected.names:
        stored = packed.ranks[0, 0].engine(moe, "w13_weight_scale_2")
        assert stored.dtype == (torch.float32 if engine == "vllm" else torch.float16)
        assert packed.ranks[0, 0].own(moe, "w13_scale_factor").tolist() == [1.0] * 8
        run = [kernel(packed, packed.ranks[rank, 0], moe, expected.config, True) for rank in (0, 1)]
        for expert in range(8):
            x = np.random.default_rng(expert).standard_normal((TOKENS, 256))
            want, size = expected_output(expected, moe, expert, x, rounded)
            error = np.abs(sum(part(expert, x) for part in run) - want)
            assert (error <= 2e-6 * size).all(), (moe, expert, (error / size).max())


# --- unequal gate and up ---


def test_unequal_halves_are_exact_on_trtllm_only(
    sources: Callable[[str], Path], logical: Callable[[str, str], Logical], make: Make
) -> None:
    """Bytes and scales of the source itself on TRT-LLM; elsewhere those of hf's unified output, which are others."""
    name, moe = "tinymoe-nvfp4-splitscale", "model.layers.1.mlp"
    source = Logical.read(sources(name))
    unified = logical(name, "unify")
    changed = differ = 0
    for layout, engine in packs.PAIRS:
        packed, _ = make(name, layout, engine, (1, 2))
        expected = source if layout == "flashinfer-trtllm" else unified
        for expert in (0, 3, 5, 7, 8, 10, 12, 15):
            ours = packed.whole(moe, expert, expected)
            packs.assert_same(ours, expected.matrices(moe, expert), f"{layout} {expert}")
            rank, local = packed.ranks[0, expert // 8], expert % 8
            for kind in ("gate", "up", "down"):
                stored = float(rank.own(moe, f"{kind}_weight_scale_2")[local])
                assert stored == expected.scale(moe, expert, kind), (layout, expert, kind)
            gate, up = (source.scale(moe, expert, kind) for kind in ("gate", "up"))
            assert unified.scale(moe, expert, "gate") == unified.scale(moe, expert, "up") == max(gate, up)
            differ += gate != up
            both = source.matrices(moe, expert), unified.matrices(moe, expert)
            assert both[0].gate is not None and both[1].gate is not None
            changed += (both[0].gate[1] != both[1].gate[1]).any() or (both[0].up[1] != both[1].up[1]).any()
            if layout == "flashinfer-trtllm":
                ratio = rank.own(moe, "g1_alphas")[local] / rank.own(moe, "g1_alphas_up")[local]
                assert float(ratio) == pytest.approx(gate / up, rel=1e-6)
    assert 4 * len(packs.PAIRS) < changed <= differ  # a ratio near 1 may round to the same codes
