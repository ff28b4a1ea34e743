"""Ways to break an int4 layer: mistakes that int4's codes, group scales and orders invite. See `selftest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from nvfp4prep.layouts import (
    flashinfer_mxint4,
    flashinfer_sm90_w4a8,
    marlin_repack,
    moe_wna16,
    sglang_w4afp8,
    vllm_marlin_int4,
)
from nvfp4prep.layouts.permutations import (
    block_major,
    put_rows,
    row_major,
    row_shuffle,
    separate_sm90,
    swizzle,
    unswizzle,
)
from nvfp4prep.schema import Format
from nvfp4prep.smoke.breaking import mapped, on_bytes, with_scales, with_weights
from nvfp4prep.smoke.layer import PackedLayer

NO_GLOBAL_SCALE = "int4 has no weight_scale_2"
OTHER_ORDER: Mapping[str, str] = {
    flashinfer_sm90_w4a8.NAME: "no row order of its own: see weights not interleaved",
    vllm_marlin_int4.NAME: "no row order of its own: see weights not interleaved",
}
"""Why rows have no shuffle to forget where weights have another order."""
_NOT_INT4 = "not int4"


def is_int4(layer: PackedLayer) -> bool:
    return layer.target.module.REQUIRES.format is Format.INT4


# --- orders -----------------------------------------------------------------------------------------------------------


def scales_as_stored(layer: PackedLayer) -> PackedLayer | str:
    """Group scales in their logical order, in the packed tensor's shape."""
    if layer.target.layout == moe_wna16.NAME:
        return "no scale order to forget: this kernel reads scales as they are"
    return with_scales(layer, lambda name, packed: _logical_scale(layer, name, packed).reshape(packed.shape))


def _logical_scale(layer: PackedLayer, name: str, packed: Tensor) -> Tensor:
    """[N, K/g]; of Marlin [K/g, N], whose transpose every loader makes."""
    geometry = layer.geometry
    rows = geometry.w13_rows if name.startswith("w13") else geometry.padded_hidden
    if layer.target.layout == vllm_marlin_int4.NAME:
        return marlin_repack.restore_columns(packed, marlin_repack.scale_order(packed.shape[0]))
    if layer.target.layout == flashinfer_sm90_w4a8.NAME:
        return packed.permute(0, 3, 2, 1).reshape(rows, -1)
    if layer.target.layout == sglang_w4afp8.NAME:
        return packed.reshape(packed.shape[0], rows, -1).transpose(0, 1).reshape(rows, -1)
    groups = packed.numel() // rows  # flashinfer-mxint4
    return unswizzle(packed.view(rows, groups), rows, groups)


def order_by_inner(layer: PackedLayer) -> PackedLayer | str:
    """Marlin's w13 scales in the order that the number of groups in I asks for, as vLLM 0.33 chooses it."""
    if layer.target.layout != vllm_marlin_int4.NAME:
        return "Marlin's int4 alone has two orders of group scales"
    chosen = marlin_repack.scale_order(layer.packed["w2_weight_scale"].shape[1])

    def again(name: str, packed: Tensor) -> Tensor:
        if not name.startswith("w13"):
            return packed
        natural = marlin_repack.restore_columns(packed, marlin_repack.scale_order(packed.shape[0]))
        return marlin_repack.permute_columns(natural, chosen)

    return with_scales(layer, again)


def rows_as_stored(layer: PackedLayer) -> PackedLayer:
    """flashinfer-mxint4 without its row shuffle, in weights and under the scales' swizzle."""

    def plain(name: str, value: Tensor) -> Tensor:
        if name.endswith("_weight"):
            return block_major(put_rows(row_major(value), row_shuffle(value.shape[1])))
        rows = layer.packed[name.removesuffix("_scale")].shape[2]
        groups = value.numel() // rows
        scale = unswizzle(value.view(rows, groups), rows, groups)
        return swizzle(put_rows(scale, row_shuffle(rows))).flatten()

    return mapped(layer, plain)


def weights_as_stored(layer: PackedLayer) -> PackedLayer | str:
    """Without the order of Hopper's mixed-input GEMM, or Marlin's repack."""
    if layer.target.layout == flashinfer_sm90_w4a8.NAME:
        return with_weights(layer, separate_sm90)
    if layer.target.layout == vllm_marlin_int4.NAME:

        def plain(words: Tensor) -> Tensor:
            return marlin_repack.unpack(words).contiguous().view(torch.int32).reshape(words.shape)

        return with_weights(layer, plain)
    if layer.target.layout == flashinfer_mxint4.NAME:
        return "this kernel's order is one of rows: see rows not shuffled"
    return "no order inside rows to forget: this kernel reads weights as they are" if is_int4(layer) else _NOT_INT4


# --- numbers ----------------------------------------------------------------------------------------------------------


def scales_of_the_other_type(layer: PackedLayer) -> PackedLayer | str:
    """The bits of BF16 group scales read as FP16, or of FP16 as BF16."""
    if not is_int4(layer):
        return "block scales are E4M3, not of 16 bits"

    def misread(name: str, packed: Tensor) -> Tensor:
        other = torch.float16 if packed.dtype == torch.bfloat16 else torch.bfloat16
        return packed.view(other).to(packed.dtype)

    return with_scales(layer, misread)


def codes_without_offset(layer: PackedLayer) -> PackedLayer | str:
    """Two's complement where the kernel reads code + 8, or the other way round: the top bit of every nibble flips."""
    if not is_int4(layer):
        return _NOT_INT4
    return with_weights(layer, lambda weight: on_bytes(weight, lambda pairs: pairs ^ 0x88))


def another_input_scale(layer: PackedLayer) -> PackedLayer | str:
    """The smallest expert's input scale where the kernel takes the layer's, the largest.

    FlashInfer's kernel quantises with the largest and multiplies that expert by its own; SGLang's has one scale for
    both, which then clips what the others were calibrated for.
    """
    scalars = dict(layer.scalars)
    if layer.scales.w13_input is None or not layer.target.module.REQUIRES.input_scales:
        return "weight-only: the kernel takes no input scale"
    raw = scalars.get("raw_input_scale", layer.scales.w13_input)
    usable = raw[raw.isfinite() & (raw > 0)]
    if usable.numel() == 0 or float(usable.min()) == float(usable.max()):
        return "all experts were calibrated to the same input scale"
    if layer.target.layout == flashinfer_sm90_w4a8.NAME:
        alphas = scalars["fc1_alpha"].clone()
        alphas[int(raw.nan_to_num(-torch.inf).argmax())] = usable.min()
        return replace(layer, scalars={**scalars, "fc1_alpha": alphas})
    return replace(layer, scalars={**scalars, "g1_alphas": torch.full_like(scalars["g1_alphas"], float(usable.min()))})


def factors_ignored(layer: PackedLayer) -> PackedLayer | str:
    """pre_quant_scale left out of what FlashInfer's kernel multiplies its inputs by: 1 / a alone."""
    if layer.target.layout != flashinfer_sm90_w4a8.NAME:
        return "the kernel takes no pre_quant_scale: it was folded away before packing, or there was none"
    plain = {
        f"fc{i}_act_scale": torch.full_like(
            layer.scalars[f"fc{i}_act_scale"], float(1 / layer.scalars[f"fc{i}_alpha"].max())
        )
        for i in (1, 2)
    }
    return replace(layer, scalars={**layer.scalars, **plain})
