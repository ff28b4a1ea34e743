"""The self-test on int4 layouts: real checkpoints, one that MxInt4 takes, and a padded layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import damage
import int4_oracle
import pytest
import torch
from damage import Editable
from layout_layers import SILU, Case, make_int4_layer
from pack_checks import decide
from smoke_layers import distance, inputs, packed_layer

from nvfp4prep.smoke import emulator, selftest, selftest_int4
from nvfp4prep.smoke.check import Settings, Subject
from nvfp4prep.smoke.layer import PackedLayer
from nvfp4prep.smoke.selftest import MUTATIONS, Result, self_test
from nvfp4prep.smoke.subject import Real, from_prepared

SETTINGS = Settings("emulator", "first-last")
MARLIN, WNA16, SM90, W4AFP8, MXINT4 = int4_oracle.LAYOUTS

ALWAYS = {"halves swapped", "nibbles swapped", "one expert zeroed", "offset of 8 forgotten", "16-bit scales misread"}
SHOWN = {
    MARLIN: ALWAYS | {"scales not swizzled", "weights not interleaved", "scale order by I"},
    WNA16: ALWAYS,
    SM90: ALWAYS
    | {
        "scales not swizzled",
        "weights not interleaved",
        "another expert's input scale",
        "pre_quant_scale ignored",
    },
    W4AFP8: ALWAYS | {"scales not swizzled", "another expert's input scale"},
    MXINT4: ALWAYS | {"scales not swizzled", "rows not shuffled"},
}
"""What a layer of H > group = I shows; MxInt4's has several groups in I too."""


def made(path: Path, layout: str, engine: str) -> Subject:
    fold = "refuse" if layout == SM90 else "fold"
    return from_prepared(decide(path, layout, engine=engine, pre_quant_scale=fold), Real())


def checked(results: tuple[Result, ...], shown: set[str]) -> None:
    assert [result.name for result in results] == [mutation.name for mutation in MUTATIONS]
    assert {result.name for result in results if result.status == "noticed"} == shown
    assert not [result for result in results if result.status == "missed"]
    for result in results:
        if result.status == "not showable":
            assert result.why and not result.how and result.rel_l2 is None, result
        else:
            assert result.output and result.data and result.rel_l2 is not None and result.tolerance is not None, result
            assert result.rel_l2 > result.tolerance, result


@pytest.mark.parametrize(
    ("name", "layout", "engine"),
    [
        (name, layout, engine)
        for name in ("tinymoe-int4awq", "tinymoe-w4a8awq", "qwen3moe-w4a8awq")
        for layout, engine in int4_oracle.PAIRS
        if layout != MXINT4 and (name != "tinymoe-int4awq" or layout in (MARLIN, WNA16))
    ],
)
def test_every_mutation_is_noticed(name: str, layout: str, engine: str, checkpoint: Callable[[str], Path]) -> None:
    shown = SHOWN[layout]
    if (name, layout) == ("tinymoe-w4a8awq", W4AFP8):  # four groups in H, one in I: packed as stored
        shown = shown - {"scales not swizzled"}
    checked(self_test(made(checkpoint(name), layout, engine), SETTINGS), shown)


def wide(ck: Editable) -> None:
    """Experts of I = 512 with random codes and no pre_quant_scale."""
    generator = torch.Generator().manual_seed(5)
    ck.config["moe_intermediate_size"] = 512
    for name in [name for name in ck.tensors if ".experts." in name]:
        module, _, parameter = name.rpartition(".")
        rows, columns = (256, 512) if module.endswith("down_proj") else (512, 256)
        if parameter == "weight":
            ck.tensors[name] = torch.randint(0, 256, (rows // 2, columns), dtype=torch.uint8, generator=generator)
        elif parameter == "weight_scale":
            ck.tensors[name] = 0.01 * (torch.rand(rows, columns // 128, generator=generator) + 0.5)
        elif parameter == "pre_quant_scale":
            ck.tensors[name] = torch.ones(columns, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def wide_source(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damage.damaged(checkpoint("qwen3moe-w4a8awq"), tmp_path_factory.mktemp("wide") / "wide", wide)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_mxint4(engine: str, wide_source: Path) -> None:
    checked(self_test(made(wide_source, MXINT4, engine), SETTINGS), SHOWN[MXINT4])


def test_several_groups_in_both_matrices_have_one_order(wide_source: Path) -> None:
    results = {result.name: result for result in self_test(made(wide_source, MARLIN, "vllm"), SETTINGS)}
    assert results["scale order by I"].status == "not showable"
    assert results["scale order by I"].why == "this layer's bytes come out the same"
    assert results["scales not swizzled"].status == "noticed"


def padded(dtype: str = "bf16") -> PackedLayer:
    """I = 96 in groups of 32, which Marlin pads to 128."""
    case = Case(MARLIN, "vllm", 256, 96, True, dtype="fp16" if dtype == "fp16" else "bf16", group=32)
    return packed_layer(make_int4_layer(case, experts=4), SILU)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dirty_padding_of_groups_of_32(dtype: str) -> None:
    layer = padded(dtype)
    assert (layer.geometry.intermediate, layer.geometry.padded_intermediate) == (96, 128)
    broken = selftest._dirty_padding(layer)
    assert isinstance(broken, PackedLayer)
    for position in range(4):
        assert not any(emulator.stray_padding(layer, position).values())
        stray = emulator.stray_padding(broken, position)
        assert set(stray) == {"w1", "w2", "w1_scale", "w2_scale"} and all(stray.values())
        before, after = (emulator.read_weights(one, position) for one in (layer, broken))
        assert before.gate is not None and after.gate is not None
        assert torch.equal(before.gate[:96], after.gate[:96]) and torch.equal(before.up[:96], after.up[:96])
        assert torch.equal(before.down[:, :96], after.down[:, :96])
    case = Case(MARLIN, "vllm", 256, 96, True, group=32)
    x, routing = inputs(case, 7, 2, 4)
    assert distance(emulator.emulate(broken, x, routing), emulator.emulate(layer, x, routing)) > 1


def test_misread_scales_of_fp16() -> None:
    layer = padded("fp16")
    broken = selftest_int4.scales_of_the_other_type(layer)
    assert isinstance(broken, PackedLayer)
    scale = broken.packed["w13_weight_scale"]
    assert scale.dtype == torch.float16 and not torch.equal(scale, layer.packed["w13_weight_scale"])


def test_reasons_are_those_of_the_layout() -> None:
    tried = {mutation.name: mutation.apply(padded()) for mutation in MUTATIONS}
    assert {name: found for name, found in tried.items() if isinstance(found, str)} == {
        "gate's scale on up": selftest_int4.NO_GLOBAL_SCALE,
        "rows not shuffled": "no row order of its own: see weights not interleaved",
        "reciprocal weight_scale_2": selftest_int4.NO_GLOBAL_SCALE,
        "another expert's input scale": "weight-only: the kernel takes no input scale",
        "F16 bits read as F32": selftest_int4.NO_GLOBAL_SCALE,
        "pre_quant_scale ignored": "the kernel takes no pre_quant_scale: it was folded away before packing, "
        "or there was none",
    }
