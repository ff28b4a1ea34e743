"""What packed int4 outputs must hold, worked out from the source's files and read by tests/int4_oracle.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import int4_oracle
import numpy as np
import pack_checks as packs
import pytest
import torch
from int4_oracle import Floats
from runner import Run, run, snapshot

Tensors = Mapping[str, torch.Tensor]

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


def refused(source: Path, *options: object) -> Run:
    """A conversion that must end with exit code 3 and leave nothing."""
    before = snapshot(source.parent)
    with packs.unsynced():
        result = run("convert", source, source.parent / "out", "--no-smoke", "--json", *options)
    assert result.code == 3, result.stderr
    assert "Traceback" not in result.stderr and snapshot(source.parent) == before
    return result
