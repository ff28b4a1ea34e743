"""Target compressed-tensors against `compressed_oracle`: int4 and NVFP4, AWQ's factors folded away, and refusals."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import compressed_oracle
import damage
import numpy as np
import oracle
import pytest
import torch
from compressed_oracle import Source, bf16, fold_of, nearest_bf16, packed_codes, written_weight
from damage import Damage, Editable
from qwen3_moe import Qwen3Moe
from runner import converted, manifest_of, refused, run
from safetensors.torch import load_file, save_file

W4A16, W4A8, AWQ = "qwen3moe-int4awq", "qwen3moe-w4a8awq", "qwen3moe-nvfp4-awqlite"
QWEN, TINY_INT4 = "qwen3moe-nvfp4-perexpert", "tinymoe-int4awq"
DSV3, DSV3_INT4 = "dsv3-nvfp4", "dsv3-int4awq"
REFUSED_NVFP4 = {"gptoss-nvfp4", "llama4-nvfp4", "qwen3moe-mixed-fp8attn"}
TARGET = ("--target", "compressed-tensors")
FOLD = (*TARGET, "--pre-quant-scale", "fold")
MLP0 = "model.layers.0.mlp"
NORM0 = "model.layers.0.post_attention_layernorm.weight"
GATE3, UP3, DOWN3 = (f"{MLP0}.experts.3.{name}_proj" for name in ("gate", "up", "down"))
Q0, O0 = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"
W13 = r".*\.experts\.\d+\.(gate|up)_proj\.pre_quant_scale"
DOWNS = r".*\.experts\.\d+\.down_proj\.pre_quant_scale"

Fetch = Callable[[str], Path]


def checked(source: Path, folder: Path, *options: object) -> oracle.View:
    """Convert with --pre-quant-scale fold, and check everything against the oracle."""
    after = converted(source, folder / "out", *FOLD, *options)
    resolved = None
    if "nvfp4" in Source(oracle.read(source)).forms.values():
        resolved = folder / "hf"
        converted(source, resolved)
    compressed_oracle.check(source, folder / "out", resolved)
    return after


def changed(name: str, value: torch.Tensor | Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Replace one tensor."""

    def change(ck: Editable) -> None:
        ck.tensors[name] = value(ck.tensors[name]) if callable(value) else value

    return change


def each(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """Change every tensor whose name matches."""
    return lambda ck: ck.tensors.update({name: change(ck.tensors[name]) for name in ck.names(pattern)})


def factors_set(pattern: str, position: int, value: float) -> Damage:
    """Set one factor of each pre_quant_scale that matches."""

    def change(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        new[position] = value
        return new

    return each(pattern, change)


# --- the shipped checkpoints -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*checkpoints.INT4, *(n for n in (*checkpoints.NVFP4, *checkpoints.OVERLAYS) if n not in REFUSED_NVFP4)]
)
def test_converts(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    checked(checkpoint(name), tmp_path)


@pytest.mark.parametrize("name", ["qwen3moe-nvfp4-sharded", TINY_INT4])
def test_several_shards(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """From several files, to several files with an index."""
    after = checked(checkpoint(name), tmp_path, "--max-shard-size", "1MB")
    assert len({stored.file for stored in after.tensors.values()}) > 1
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def test_differing_halves_are_unified(checkpoint: Fetch, tmp_path: Path) -> None:
    """One weight_global_scale for gate and up, whose block scales are rescaled as for hf."""
    after = checked(checkpoint("tinymoe-nvfp4-splitscale"), tmp_path)
    before = oracle.read(checkpoint("tinymoe-nvfp4-splitscale"))
    experts = [module for module in Source(before).forms if module.endswith("gate_proj") and ".experts." in module]
    differing = 0
    for gate in experts:
        pair = (gate, gate.replace("gate_proj", "up_proj"))
        old = [float(before.tensors[f"{module}.weight_scale_2"].values[0]) for module in pair]
        new = [after.tensors[f"{module}.weight_global_scale"].values.tolist() for module in pair]
        assert new[0] == new[1] == [float(np.float32(1 / max(old)))]
        for module, scale in zip(pair, old, strict=True):
            blocks = [view.tensors[f"{module}.weight_scale"] for view in (before, after)]
            if scale == max(old) or scale < 0.9 * max(old):  # nearer than that rounding may keep every code
                assert blocks[0].same(blocks[1]) == (scale == max(old)), module
        differing += old[0] != old[1]
    assert differing > len(experts) / 2


def test_without_fold_nothing_changes_but_the_form(checkpoint: Fetch, tmp_path: Path) -> None:
    """Without pre_quant_scale on the experts, --pre-quant-scale makes no difference."""
    for label, options in (("refuse", TARGET), ("fold", FOLD)):
        converted(checkpoint(QWEN), tmp_path / label, *options)
    files = [oracle.relative_files(tmp_path / label) for label in ("refuse", "fold")]
    assert files[0] == files[1]


def test_int4_without_factors_needs_no_fold(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", damage.drop(r".*\.pre_quant_scale"))
    after = converted(source, tmp_path / "out", *TARGET)
    compressed_oracle.check(source, tmp_path / "out")
    assert not [name for name in after.tensors if name.endswith("_proj.weight")]  # nothing had to be unpacked
    assert "folded" not in manifest_of(tmp_path / "out")["runs"][0]


def test_every_code(checkpoint: Fetch, tmp_path: Path) -> None:
    """All 256 bytes, -8 among the codes, which ModelOpt does not write but its format has."""
    every = torch.arange(256, dtype=torch.uint8)

    def change(ck: Editable) -> None:
        for name in ck.names(r".*(experts\.\d+\.(gate|up|down)|q|k|v|o)_proj\.weight"):
            weight = ck.tensors[name]
            ck.tensors[name] = every.repeat(weight.numel() // 256 + 1)[: weight.numel()].view(weight.shape)

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    after = checked(source, tmp_path)
    assert set(packed_codes(after.tensors[f"{UP3}.weight_packed"]).reshape(-1)) == set(range(-8, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_group_scales_in_16_bits(dtype: torch.dtype, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", damage.cast(dtype, "weight_scale"))
    checked(source, tmp_path)


def test_another_group_size(checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: Editable) -> None:
        assert ck.hf is not None
        ck.hf["quantization"]["group_size"] = 32
        for name in ck.scales("weight_scale"):
            scale = ck.tensors[name].repeat_interleave(4, 1)
            ck.tensors[name] = scale * (1 + torch.arange(scale.numel()).view(scale.shape) / scale.numel())

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    after = checked(source, tmp_path)
    assert after.config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_w4a8_becomes_weight_only(checkpoint: Fetch, tmp_path: Path) -> None:
    """The FP8 scale of the dequantised weight is no factor of it, and activations stay in 16 bits."""
    w4a8 = checked(checkpoint(W4A8), tmp_path)
    assert not [name for name in w4a8.tensors if "input" in name.rpartition(".")[2] or "scale_2" in name]


@pytest.mark.parametrize(
    "lacking",
    [
        r".*\.experts\..*",
        re.escape(MLP0) + r"\.experts\.\d+\.down_proj\.",
        re.escape(UP3) + r"\.",
        re.escape(Q0) + r"\.",
    ],
)
def test_w4a8_needs_no_input_scales(lacking: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """This form has no place for them; `hf` has, and refuses."""
    source = damage.damaged(checkpoint(W4A8), tmp_path / "source", damage.drop(lacking + "input_scale"))
    after = checked(source, tmp_path)
    whole = converted(checkpoint(W4A8), tmp_path / "whole", *FOLD)
    assert all(whole.tensors[name].same(tensor) for name, tensor in after.tensors.items())
    assert after.tensors.keys() == whole.tensors.keys()
    assert run("validate", source, *FOLD, "--level", "full").code == 0
    kept = run("convert", source, tmp_path / "hf", "--json", "--dry-run")
    assert (kept.code, {one["rule"] for one in kept.findings}) == (3, {"input-scale-missing"})


def test_kv_scales_are_kept(checkpoint: Fetch, tmp_path: Path) -> None:
    after = checked(checkpoint("qwen3moe-nvfp4-expertsonly-fp8kv"), tmp_path)
    scheme = after.config["quantization_config"]["kv_cache_scheme"]
    assert scheme == {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def fp8_kv(ck: Editable) -> None:
    """An FP8 KV cache beside quantised attention."""
    assert ck.hf is not None
    ck.hf["quantization"]["kv_cache_quant_algo"] = "FP8"
    ck.config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    for layer in (0, 1):
        for name in "kv":
            ck.tensors[f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale"] = torch.tensor(0.01)


@pytest.mark.parametrize("name", [QWEN, W4A16])
def test_kv_scales_beside_quantised_attention(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(name), tmp_path / "source", fp8_kv)
    after = checked(source, tmp_path)
    assert "model.layers.1.self_attn.v_proj.v_scale" in after.tensors
    assert after.config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8


@pytest.mark.parametrize("name", [W4A16, QWEN])
def test_a_quantised_head_is_named(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """The engines' head is no Linear: they take it for quantised only where a target has its name."""
    source = damage.damaged(checkpoint(name), tmp_path / "source", damage.quantised_head)
    after = checked(source, tmp_path)
    assert "lm_head.weight_packed" in after.tensors


def test_imputed_input_scales(checkpoint: Fetch, tmp_path: Path) -> None:
    missing = f"{UP3}.input_scale"
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", damage.drop(re.escape(missing)))
    refused(source, *TARGET)
    after = converted(source, tmp_path / "out", *TARGET, "--impute", "layer-max")
    converted(source, tmp_path / "hf", "--impute", "layer-max")
    compressed_oracle.check(source, tmp_path / "out", tmp_path / "hf")
    assert f"{UP3}.input_global_scale" in after.tensors
    assert manifest_of(tmp_path / "out")["runs"][0]["changes"]["imputed"] == [f"{UP3}.input_global_scale"]


def test_biases_are_kept(checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: Editable) -> None:
        for layer in (0, 1):
            for name, rows in (("q", 256), ("k", 128), ("v", 128), ("o", 256)):
                bias = torch.arange(rows, dtype=torch.bfloat16)
                ck.tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = bias

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    after = checked(source, tmp_path)
    for module in (Q0, O0):  # one stays packed, one becomes BF16
        assert after.tensors[f"{module}.bias"].same(oracle.read(source).tensors[f"{module}.bias"])


def test_digests_of_tensors_in_several_pieces(
    checkpoint: Fetch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors larger than a piece of the digest, in each way of writing: `validate` finds the digests right."""
    for module in ("plan", "execute", "compressed_tensors"):
        monkeypatch.setattr(f"nvfp4prep.{module}.PIECE_BYTES", 3000)
    checked(checkpoint(W4A16), tmp_path / "int4")
    checked(checkpoint(AWQ), tmp_path / "nvfp4")


# --- folding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [W4A16, AWQ, TINY_INT4])
def test_router_is_divided_by_the_factor_that_the_norm_holds(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """To the bit: router' = bf16(router / (norm' / norm)), norm' = bf16(norm · pre_quant_scale)."""
    before, after = oracle.read(checkpoint(name)), converted(checkpoint(name), tmp_path / "out", *FOLD)
    for layer in range(before.config["num_hidden_layers"]):
        path, norm = f"model.layers.{layer}.mlp", f"model.layers.{layer}.post_attention_layernorm.weight"
        old, new = before.tensors[norm].tensor.float(), after.tensors[norm].tensor
        factors = before.tensors[f"{path}.experts.0.up_proj.pre_quant_scale"].tensor.float()
        assert torch.equal(new, (old * factors).bfloat16())
        router = before.tensors[f"{path}.gate.weight"].tensor.float() / (new.float() / old)
        assert torch.equal(after.tensors[f"{path}.gate.weight"].tensor, router.bfloat16())
        assert not torch.equal(factors, torch.ones_like(factors))


def models(source: Path, out: Path) -> tuple[Qwen3Moe, Qwen3Moe, Qwen3Moe]:
    """What the source computes, what the output computes, and that without the router's compensation."""
    before, after = Source(oracle.read(source)), oracle.read(out)

    def old(module: str) -> np.ndarray:
        return before.smoothed(module) if module in before.forms else before.floats(f"{module}.weight")

    def uncompensated(module: str) -> np.ndarray:
        return old(module) if module.endswith("mlp.gate") else written_weight(after, module)

    config = before.view.config
    return Qwen3Moe(config, old), Qwen3Moe(config, partial(written_weight, after)), Qwen3Moe(config, uncompensated)


def distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Relative distance of each row."""
    return (one - other).norm(dim=1) / other.norm(dim=1)


@pytest.mark.parametrize("name", [W4A16, W4A8, AWQ, TINY_INT4, "tinymoe-w4a8awq"])
def test_blocks_compute_what_the_source_does(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """norm, router and experts on random inputs, exact: off by BF16's rounding; far off without the compensation.

    A rounded router may choose otherwise where two experts are nearly even: for a few tokens.
    """
    converted(checkpoint(name), tmp_path / "out", *FOLD)
    source, output, wrong = models(checkpoint(name), tmp_path / "out")
    config = source.config
    for layer in range(config["num_hidden_layers"]):
        generator = torch.Generator().manual_seed(layer)
        x = torch.randn(160, config["hidden_size"], dtype=torch.float64, generator=generator)
        expected = source.block(x, layer)
        off = distances(output.block(x, layer), expected)
        assert off.median() < 0.006 and (off < 0.012).double().mean() > 0.98, (layer, off.median())
        assert distances(wrong.block(x, layer), expected).median() > 3 * off.median()


@pytest.mark.parametrize("name", [TINY_INT4, "tinymoe-w4a8awq"])
def test_a_trained_model_computes_what_the_source_does(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """Logits on held-out text within 1 %, the loss within 0.002 nats per byte; seven times as far uncompensated."""
    converted(checkpoint(name), tmp_path / "out", *FOLD)
    ids = torch.tensor(list((checkpoints.DATA / "eval.bin").read_bytes()[:160]))
    expected, logits, wrong = (model.logits(ids) for model in models(checkpoint(name), tmp_path / "out"))
    loss = [float(torch.nn.functional.cross_entropy(one[:-1], ids[1:])) for one in (expected, logits)]
    assert abs(loss[1] - loss[0]) < 0.002, loss
    off, wrong_off = (float((one - expected).norm() / expected.norm()) for one in (logits, wrong))
    assert off < 0.01
    assert wrong_off > 2 * off


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_and_router_of_other_dtypes(dtype: torch.dtype, checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: Editable) -> None:
        for name in ck.names(r".*(post_attention_layernorm|mlp\.gate)\.weight"):
            ck.tensors[name] = ck.tensors[name].to(dtype)

    after = checked(damage.damaged(checkpoint(W4A16), tmp_path / "source", change), tmp_path)
    assert after.tensors[NORM0].tensor.dtype == after.tensors[f"{MLP0}.gate.weight"].tensor.dtype == dtype


def test_small_weights_of_an_f16_router(checkpoint: Fetch, tmp_path: Path) -> None:
    """Subnormal in F16, and divided to what is further off than a normal number: nothing beside the rest of the row."""

    def small(old: torch.Tensor) -> torch.Tensor:
        new = old.half()
        new[:, ::17] = 3e-6
        return new

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", each(r".*\.mlp\.gate\.weight", small))
    after = checked(source, tmp_path)
    router = after.tensors[f"{MLP0}.gate.weight"].tensor
    assert bool((router[:, ::17].abs() < 2.0**-14).all())


def test_an_f32_router_beside_a_bf16_norm(checkpoint: Fetch, tmp_path: Path) -> None:
    """It is divided by what the rounded norm holds, not by pre_quant_scale."""
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", each(r".*\.mlp\.gate\.weight", torch.Tensor.float))
    after = checked(source, tmp_path)
    before = oracle.read(source)
    router, norm = (view.tensors[f"{MLP0}.gate.weight"].values.reshape(8, -1) for view in (before, after)), NORM0
    old, new = router
    product = new * after.tensors[norm].values
    assert np.allclose(product, old * before.tensors[norm].values, rtol=2.0**-22, atol=0)


def test_factors_in_f32(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(
        checkpoint(W4A16), tmp_path / "source", each(r".*\.pre_quant_scale", lambda old: old.float() * (1 + 2.0**-12))
    )
    checked(source, tmp_path)


def test_negative_factors_keep_their_sign(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(
        checkpoint(W4A16),
        tmp_path / "source",
        factors_set(W13, 5, -1.5),
        factors_set(DOWNS, 7, -2.0),
        factors_set(r".*\.o_proj\.pre_quant_scale", 3, -0.5),
    )
    after, before = checked(source, tmp_path), oracle.read(source)
    assert (after.tensors[f"{UP3}.weight_scale"].tensor[7] < 0).all()
    assert (after.tensors[f"{UP3}.weight_scale"].tensor[6] > 0).all()
    norms = [view.tensors[NORM0].values[5] for view in (before, after)]
    assert np.sign(norms[1]) == -np.sign(norms[0]) != 0
    source_model, output, _ = models(source, tmp_path / "out")
    x = torch.randn(64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert distances(output.block(x, 1), source_model.block(x, 1)).median() < 0.006


def test_zero_norm_weights(checkpoint: Fetch, tmp_path: Path) -> None:
    """Nothing passes there: the norm stays zero, and the router is divided by pre_quant_scale, not by 0 / 0."""
    at = [0, 17, 255]

    def change(norm: torch.Tensor) -> torch.Tensor:
        norm = norm.clone()
        norm[at] = 0
        return norm

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", each(r".*post_attention_layernorm\.weight", change))
    after, before = checked(source, tmp_path), oracle.read(source)
    assert not after.tensors[NORM0].values[at].any()
    factors = before.tensors[f"{UP3}.pre_quant_scale"].values
    router = before.tensors[f"{MLP0}.gate.weight"].values.reshape(8, -1) / factors
    written = after.tensors[f"{MLP0}.gate.weight"].values.reshape(8, -1)
    assert np.array_equal(written[:, at], bf16(router.astype(np.float32))[:, at])


def test_zero_factors_of_down(checkpoint: Fetch, tmp_path: Path) -> None:
    """An input of down that would count for nothing: no calibration gives that."""
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", factors_set(DOWNS, 9, 0.0))
    assert {finding["rule"] for finding in refused(source, *FOLD).findings} == {"pre-quant-scale-bad"}


def test_down_alone_has_factors(checkpoint: Fetch, tmp_path: Path) -> None:
    """Then no norm is touched."""
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", damage.drop(W13))
    after = checked(source, tmp_path)
    for name in (NORM0, f"{MLP0}.gate.weight"):
        assert after.tensors[name].same(oracle.read(source).tensors[name])


def test_gate_and_up_alone_have_factors(checkpoint: Fetch, tmp_path: Path) -> None:
    checked(damage.damaged(checkpoint(W4A16), tmp_path / "source", damage.drop(DOWNS)), tmp_path)


def shared_expert(ck: Editable) -> None:
    """A shared expert as Qwen2-MoE has one: int4 gate, up and down, and a gate of its own."""
    for layer in (0, 1):
        path = f"model.layers.{layer}.mlp"
        for name in ("gate", "up", "down"):
            for param in ("weight", "weight_scale"):
                copied = ck.tensors[f"{path}.experts.2.{name}_proj.{param}"]
                ck.tensors[f"{path}.shared_expert.{name}_proj.{param}"] = copied.clone()
        down = ck.tensors[f"{path}.experts.1.down_proj.pre_quant_scale"]
        ck.tensors[f"{path}.shared_expert.down_proj.pre_quant_scale"] = down.clone()
        gate = torch.linspace(-1, 1, 256).bfloat16()[None]
        ck.tensors[f"{path}.shared_expert_gate.weight"] = gate
    ck.config["model_type"] = "qwen2_moe"


def test_a_shared_expert_reads_the_folded_norm_too(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", shared_expert)
    after = checked(source, tmp_path)
    for name in ("shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj"):
        assert after.tensors[f"{MLP0}.{name}.weight"].dtype == "BF16"
    assert f"{MLP0}.shared_expert.up_proj" in after.config["quantization_config"]["ignore"]


def test_a_shared_expert_with_factors_of_its_own(checkpoint: Fetch, tmp_path: Path) -> None:
    """Its columns are multiplied by its own and divided by the norm's."""
    own = torch.linspace(0.25, 3, 256).bfloat16()
    names = [
        f"model.layers.{i}.mlp.shared_expert.{part}_proj.pre_quant_scale" for i in (0, 1) for part in ("gate", "up")
    ]
    source = damage.damaged(
        checkpoint(W4A16), tmp_path / "source", shared_expert, lambda ck: ck.tensors.update(dict.fromkeys(names, own))
    )
    checked(source, tmp_path)


def test_a_shared_expert_without_factors_stays_packed(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", shared_expert, damage.drop(r".*\.pre_quant_scale"))
    after = checked(source, tmp_path)
    assert f"{MLP0}.shared_expert.up_proj.weight_packed" in after.tensors


def test_what_engines_fuse_is_unpacked_together(checkpoint: Fetch, tmp_path: Path) -> None:
    """q with a pre_quant_scale of its own: k and v become BF16 too, since engines load the three as one linear."""
    factors = torch.linspace(0.5, 2, 256).bfloat16()
    for name in (W4A16, QWEN):
        added = changed(f"{Q0}.pre_quant_scale", factors)
        source = damage.damaged(checkpoint(name), tmp_path / name / "source", added)
        after = checked(source, tmp_path / name)
        for part in "qkv":
            assert f"model.layers.0.self_attn.{part}_proj.weight" in after.tensors
            assert f"model.layers.1.self_attn.{part}_proj.weight_packed" in after.tensors


def test_mixtral_names(checkpoint: Fetch, tmp_path: Path) -> None:
    """w1, w3 and block_sparse_moe, with factors on gate and up."""
    generator = torch.Generator().manual_seed(0)
    before = oracle.read(checkpoint("mixtral-nvfp4"))
    blocks = Source(before).blocks
    hidden = before.config["hidden_size"]
    new = {}
    for block, modules in blocks.items():
        factors = (0.5 + torch.rand(hidden, generator=generator)).bfloat16()
        new |= {f"{m}.pre_quant_scale": factors for m in modules if not m.endswith("w2")}
        assert block.endswith("block_sparse_moe")
    source = damage.damaged(
        checkpoint("mixtral-nvfp4"), tmp_path / "source", lambda ck: ck.tensors.update(new), damage.cast(torch.float32)
    )
    after = checked(source, tmp_path)
    assert not after.tensors["model.layers.0.post_attention_layernorm.weight"].same(
        before.tensors["model.layers.0.post_attention_layernorm.weight"]
    )


def test_deepseek_names(checkpoint: Fetch, tmp_path: Path) -> None:
    """An NVFP4 shared expert that reads the folded norm becomes BF16; its down stays packed, and so does MLA."""
    before = oracle.read(checkpoint(DSV3))
    hidden = before.config["hidden_size"]
    factors = (0.5 + torch.rand(hidden, generator=torch.Generator().manual_seed(0))).bfloat16()
    (modules,) = Source(before).blocks.values()
    new = {f"{m}.pre_quant_scale": factors for m in modules if not m.endswith("down_proj")}
    source = damage.damaged(checkpoint(DSV3), tmp_path / "source", lambda ck: ck.tensors.update(new))
    after = checked(source, tmp_path)
    shared = "model.layers.1.mlp.shared_experts"
    assert after.tensors[f"{shared}.gate_proj.weight"].dtype == "BF16"
    assert after.tensors[f"{shared}.down_proj.weight_packed"].dtype == "U8"
    assert f"{MLP0}.gate_proj.weight_packed" in after.tensors  # the dense layer's
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert after.tensors[bias].same(before.tensors[bias])


# --- what the oracle itself finds ------------------------------------------------------------------------------------


def rewritten(out: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(out / "model.safetensors")
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def swapped(words: torch.Tensor) -> torch.Tensor:
    """Nibbles of each byte exchanged."""
    raw = words.view(torch.uint8)
    return (raw >> 4 | (raw & 15) << 4).view(torch.int32)


def truncated(values: torch.Tensor) -> torch.Tensor:
    """One unit in the last place nearer to zero."""
    return (values.view(torch.int16) - 1).view(torch.bfloat16)


SABOTAGE: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "nibbles exchanged": (f"{UP3}.weight_packed", swapped),
    "a code off by one": (f"{UP3}.weight_packed", lambda old: old ^ torch.tensor([[1] + [0] * 31])),
    "rows exchanged": (f"{DOWN3}.weight_packed", lambda old: old.flip(0)),
    "a scale off by one": (f"{UP3}.weight_scale", truncated),
    "scales exchanged": (f"{UP3}.weight_scale", lambda old: old.flip(1)),
    "a shape turned round": (f"{UP3}.weight_shape", lambda old: old.flip(0)),
    "the norm off by one": (NORM0, truncated),
    "the router off by one": (f"{MLP0}.gate.weight", truncated),
    "an unpacked weight off by one": (f"{O0}.weight", truncated),
    "another tensor": ("model.embed_tokens.weight", truncated),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_the_oracle_notices(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    tensor, change = SABOTAGE[name]
    converted(checkpoint(W4A16), tmp_path / "out", *FOLD)
    compressed_oracle.check(checkpoint(W4A16), tmp_path / "out")
    rewritten(tmp_path / "out", tensor, change)
    with pytest.raises(AssertionError):
        compressed_oracle.check(checkpoint(W4A16), tmp_path / "out")


def test_own_rounding_is_torch_s() -> None:
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    values = bits.view(torch.float32)
    values = values[values.isfinite() & (values.abs() < 3e38)]
    assert np.array_equal(bf16(values.numpy()), values.bfloat16().float().numpy())
    assert nearest_bf16(bf16(values.numpy())[values.abs() > 1e-37], values.double().numpy()[values.abs() > 1e-37])


# --- refusals --------------------------------------------------------------------------------------------------------


def router(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return changed(f"{MLP0}.gate.weight", change)


def in_config(**keys: Any) -> Damage:
    return lambda ck: ck.config.update(keys)


def negative_downs(ck: Editable) -> None:
    """pre_quant_scale on NVFP4 downs, as ModelOpt before 0.47 leaves them, but for a sign."""
    for name in ck.names(r".*\.experts\.\d+\.down_proj\.weight"):
        ck.tensors[name.replace("weight", "pre_quant_scale")] = torch.ones(128, dtype=torch.bfloat16)
    ck.tensors[f"{MLP0}.experts.5.down_proj.pre_quant_scale"][7] = -1


def nvfp4_kv(ck: Editable) -> None:
    assert ck.hf is not None
    ck.hf["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    ck.config["quantization_config"].pop("kv_cache_scheme", None)


def partly_weight_only(ck: Editable) -> None:
    """MIXED_PRECISION: attention W4A16, experts W4A4."""
    layers = {}
    for name in ck.names(r".*_proj\.weight"):
        module = name.removesuffix(".weight")
        algo = "W4A16_NVFP4" if "self_attn" in module else "NVFP4"
        layers[module] = {"quant_algo": algo, "group_size": 16}
    ck.remove(ck.names(r".*self_attn.*\.input_scale"))
    ck.set_algo("MIXED_PRECISION")
    for section in ck.sections:
        section["quantized_layers"] = layers
        section.pop("config_groups", None)


def biased(layer: int) -> Damage:
    """Every expert's linears with a bias."""

    def change(ck: Editable) -> None:
        for name in ck.names(rf"model\.layers\.{layer}\.mlp\.experts\..*\.weight"):
            ck.tensors[name.replace("weight", "bias")] = torch.ones(256 if "down" in name else 128)

    return change


def beside_router(name: str, *shape: int) -> Damage:
    return lambda ck: ck.tensors.update({f"{MLP0}.{name}": torch.ones(shape, dtype=torch.bfloat16)})


def f16_norm(factors: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    """The first layer's norm in F16, and other factors of its gates and ups."""

    def change(ck: Editable) -> None:
        ck.tensors[NORM0] = ck.tensors[NORM0].half()
        for name in ck.names(re.escape(MLP0) + r"\.experts\.\d+\.(gate|up)_proj\.pre_quant_scale"):
            ck.tensors[name] = factors(ck.tensors[name])

    return change


LAYERS = [0, 1]
REFUSALS: dict[str, tuple[str, Damage, str, list[int], list[int]]] = {
    # checkpoint, damage, what the first finding says, its layers in order, the first one's experts
    "gate and up of two experts differ": (
        W4A16, factors_set(rf"{re.escape(MLP0)}\.experts\.(2|5)\.(gate|up)_proj\.pre_quant_scale", 3, 9.0),
        "4 of 16 gate/up linears have another than the first", [0], [2, 5],
    ),
    "up of an expert differs in the last bit": (
        W4A16, factors_set(rf"{re.escape(UP3)}\.pre_quant_scale", 3, 1.0078125), "1 of 16 gate/up linears", [0], [3],
    ),
    "a factor is zero": (W4A16, factors_set(W13, 3, 0.0), "zero, inf or NaN", LAYERS, []),
    "a factor is NaN": (W4A16, factors_set(W13, 3, float("nan")), "zero, inf or NaN", LAYERS, []),
    "a factor is inf": (AWQ, factors_set(W13, 3, float("inf")), "zero, inf or NaN", LAYERS, []),
    "a model type that is not known": (
        W4A16, in_config(model_type="qwen9_moe"), "norms of model_type 'qwen9_moe' is not known", LAYERS, [],
    ),
    "gelu": (W4A16, in_config(hidden_act="gelu"), "activation", LAYERS, []),
    "a clamped up": (W4A16, in_config(swiglu_limit=7.0), r"clamped \(swiglu_limit\)", LAYERS, []),
    "negative NVFP4 downs": (AWQ, negative_downs, "down's are negative", [0], [5]),
    "biases of up": (
        W4A16, biased(0), "other biases of up", [0], [],
    ),
    "no norm": (W4A16, damage.drop(r".*post_attention_layernorm\.weight"), "no post_attention_layernorm", LAYERS, []),
    "a norm with a bias": (
        W4A16, lambda ck: ck.tensors.update({NORM0.replace("weight", "bias"): torch.ones(256)}), "has a bias", [0], [],
    ),
    "a norm that overflows": (
        W4A16, each(W13, lambda old: torch.full_like(old, 3e38)),
        r"layernorm.weight \(model.*\), .* times 3.*e\+38 at \[0\], does not fit BF16", LAYERS, [],
    ),
    "a norm that underflows": (
        W4A16, each(W13, lambda old: torch.full_like(old, 1e-38) * 2.0**-10), "does not fit|zero, inf", LAYERS, [],
    ),
    "a norm that becomes subnormal": (
        W4A16, f16_norm(lambda old: torch.full_like(old, 1e-7)),
        r"layernorm.weight \(model.*\), .* at \[\d+\], does not fit F16 \(it is subnormal there.*--target hf", [0], [],
    ),
    "a norm that is NaN": (
        W4A16, damage.put(float("nan"), re.escape(NORM0)), r"norm.weight \(model.*\) is nan at \[1\]; export", [0], [],
    ),
    "a gate of the shared expert in one dimension": (
        W4A16, beside_router("shared_expert_gate.weight", 256), "expert_gate.weight .* may read the norm", [0], [],
    ),
    "a stack of matrices": (
        W4A16, beside_router("extra.weight", 4, 8, 256), "extra.weight .* may read the norm", [0], [],
    ),
    "a parameter that is no weight": (
        W4A16, beside_router("latent_w", 64, 256), "latent_w .* may read the norm", [0], [],
    ),
    "a parameter that ends in bias and is none": (
        W4A16, beside_router("unbias", 256), "unbias .* may read the norm", [0], [],
    ),
    "a bias of two dimensions": (W4A16, beside_router("latent_bias", 4, 256), "latent_bias .* may read", [0], []),
    "another parameter of the router": (
        W4A16, beside_router("gate.latent_w", 64, 256), "gate.latent_w .* may read the norm", [0], [],
    ),
    "no router": (W4A16, damage.drop(r"model\.layers\.0\.mlp\.gate\.weight"), "no router of 8 rows", [0], []),
    "a router of integers": (W4A16, router(lambda old: old.to(torch.int8)), "gate reads the norm and is I8", [0], []),
    "a router in float64": (W4A16, router(lambda old: old.double()), "gate reads the norm and is F64", [0], []),
    "an NVFP4 KV cache": (QWEN, nvfp4_kv, "KV cache in NVFP4", [], []),
    "partly weight-only": (QWEN, partly_weight_only, r"8 of 56 linears are weight-only", [0], []),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    base, change, says, layers, experts = REFUSALS[name]
    source = damage.damaged(checkpoint(base), tmp_path / "source", change)
    findings = refused(source, *FOLD).findings
    assert {(finding["rule"], finding["id"], finding["severity"]) for finding in findings} == {
        ("target-refused", "NVP701", "error")
    }
    assert re.search(says, findings[0]["message"]), findings[0]["message"]
    assert [finding["layer"] for finding in findings if finding.get("layer") is not None] == layers
    assert findings[0].get("experts", []) == experts


def tiny_down_factors(ck: Editable) -> None:
    """Factors of all downs: ones, but of expert 3."""
    for name in ck.names(r".*\.experts\.\d+\.down_proj\.weight"):
        ck.tensors[name.replace("weight", "pre_quant_scale")] = torch.ones(128, dtype=torch.bfloat16)
    ck.tensors[f"{DOWN3}.pre_quant_scale"] = torch.full((128,), 2.0**-20, dtype=torch.bfloat16)


def large_factors(ck: Editable) -> None:
    """One that the small norm can take, and the router can't be divided by."""
    factors_set(W13, 1, 3e38)(ck)
    damage.put(1e-38, re.escape(NORM0))(ck)
    router(lambda old: torch.full_like(old, 1e-3))(ck)


UNFIT: dict[str, tuple[str, Damage, str, str, list[int]]] = {
    # checkpoint, damage, the tensor and what is said of it, its experts
    "a group scale": (
        W4A16, damage.put(7e-43, re.escape(f"{UP3}.weight_scale")), f"{UP3}.weight_scale", "does not fit BF16", [3],
    ),
    "a group scale that becomes subnormal": (
        W4A16, damage.put(2.3e-40, re.escape(f"{UP3}.weight_scale")), f"{UP3}.weight_scale",
        "does not fit BF16 .it is subnormal", [3],
    ),
    "a row of o_proj that becomes subnormal": (
        W4A16, changed(f"{O0}.pre_quant_scale", lambda old: torch.full_like(old.float(), 1e-37)), f"{O0}.weight",
        "does not fit BF16 .it is subnormal", [],
    ),
    "a factor of down": (
        W4A16, changed(f"{DOWN3}.pre_quant_scale", lambda old: torch.full_like(old, 1e-39)), f"{UP3}.weight_scale",
        "does not fit BF16", [3],
    ),
    "factors that the router is divided by": (
        W4A16, large_factors, f"{MLP0}.gate.weight",
        "does not fit BF16", [],
    ),
    "a router that is NaN": (
        W4A16, router(lambda old: old * float("nan")), f"{MLP0}.gate.weight", "nan at .* export", [],
    ),
    "a factor of o_proj": (
        W4A16, changed(f"{O0}.pre_quant_scale", lambda old: torch.full_like(old, 1e-39)), f"{O0}.weight",
        "does not fit BF16", [],
    ),
    "block scales that become zero": (
        AWQ, tiny_down_factors, f"{UP3}.weight_scale",
        "of up's block scales .* round to zero", [3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_values_that_do_not_fit_are_told_before(case: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """With tensor, file, layer and expert; by `validate --level full` as by convert."""
    base, change, tensor, says, experts = UNFIT[case]
    source = damage.damaged(checkpoint(base), tmp_path / "source", change)
    full = run("validate", source, *FOLD, "--level", "full", "--format", "json")
    assert full.code == 1
    told = [one for one in full.json["findings"] if one["rule"] == "kernel-scale-bad"]
    for finding in (refused(source, *FOLD).findings[0], told[0]):
        assert (finding["rule"], finding["tensor"], finding["layer"]) == ("kernel-scale-bad", tensor, 0)
        assert finding["file"].endswith(".safetensors") and finding.get("experts", []) == experts
        assert re.search(says, finding["message"]), finding["message"]


MISFITS: dict[str, tuple[Damage, str, list[int]]] = {
    # damage of W4A16, what the first finding says, its experts
    "too few factors of down": (
        changed(f"{DOWN3}.pre_quant_scale", lambda old: old[:64]), r"\[64\] where .* 128 inputs", [3],
    ),
    "one factor of gate": (each(W13, lambda old: old[:1]), r"\[1\] where .* 256 inputs", [0]),
    "factors of another kind": (
        changed(f"{DOWN3}.pre_quant_scale", torch.ones(128, dtype=torch.int32)), r"I32 \[128\]", [3],
    ),
    "too few factors of o_proj": (
        changed(f"{O0}.pre_quant_scale", lambda old: old[:64]), r"BF16 \[64\] where .* 256 inputs", [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_refuses_factors_that_do_not_fit(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """As any target does."""
    change, says, experts = MISFITS[name]
    findings = refused(damage.damaged(checkpoint(W4A16), tmp_path / "source", change), *FOLD).findings
    assert {finding["rule"] for finding in findings} == {"pre-quant-scale-shape"}
    assert re.search(says, findings[0]["message"]), findings[0]["message"]
    assert (findings[0]["layer"], findings[0].get("experts", [])) == (0, experts)


@pytest.mark.parametrize("name", [W4A16, AWQ])
def test_refuses_without_fold(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(name), tmp_path / "source")
    (finding,) = refused(source, *TARGET).findings
    assert finding["rule"] == "target-refused" and "--pre-quant-scale fold" in finding["message"]


def test_refuses_factors_that_differ_between_experts(full_set: Mapping[str, Path], tmp_path: Path) -> None:
    """A real export of DeepSeek-V3 in int4: which experts, and hf takes it."""
    if DSV3_INT4 not in full_set:
        pytest.skip(f"not available: {DSV3_INT4} (NVFP4PREP_CHECKPOINTS)")
    source = tmp_path / "source"
    shutil.copytree(full_set[DSV3_INT4], source)
    (finding,) = refused(source, *FOLD).findings
    stored = Source(oracle.read(source))
    (modules,) = stored.blocks.values()
    first = stored.factors(next(m for m in modules if ".experts.0.gate_proj" in m))
    others = {
        int(m.split(".")[-2])
        for m in modules
        if not m.endswith("down_proj")
        if not np.array_equal(stored.factors(m), first)  # type: ignore[arg-type]
    }
    assert others and finding["experts"] == sorted(others)
    assert finding["layer"] == 1
    converted(source, tmp_path / "hf")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama4-nvfp4", "experts fused in one tensor"),
        ("gptoss-nvfp4", "experts fused in one tensor"),
        ("qwen3moe-mixed-fp8attn", "FP8 and NVFP4 linears in one checkpoint"),
    ],
)
def test_refuses_what_it_has_no_form_for(name: str, says: str, checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(name), tmp_path / "source")
    findings = refused(source, *FOLD).findings
    assert {finding["rule"] for finding in findings} == {"target-refused"}
    assert says in findings[0]["message"] and "--target hf" in findings[0]["message"]


def int4_attention(ck: Editable) -> None:
    """Layer 0's o_proj in int4 beside NVFP4 linears."""
    ck.remove(ck.names(re.escape(O0) + r"\.(weight_scale_2|input_scale)"))
    ck.tensors[f"{O0}.weight"] = torch.zeros(128, 256, dtype=torch.uint8)
    ck.tensors[f"{O0}.weight_scale"] = torch.ones(256, 2)


def test_refuses_int4_beside_nvfp4(checkpoint: Fetch, tmp_path: Path) -> None:
    def mixed(ck: Editable) -> None:
        ck.set_algo("MIXED_PRECISION")
        for section in ck.sections:
            section.pop("group_size", None)
            section.pop("config_groups", None)

    source = damage.damaged(checkpoint(QWEN), tmp_path / "source", int4_attention, mixed)
    findings = refused(source, *FOLD).findings
    assert any("NVFP4 and int4 linears in one checkpoint" in finding["message"] for finding in findings)


def test_refuses_columns_that_don_t_fill_a_word(checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: Editable) -> None:
        assert ck.hf is not None
        del ck.hf["quantization"]["group_size"]
        ck.config["moe_intermediate_size"] = 4
        for name in ck.names(r".*\.experts\.\d+\.down_proj\.(weight|pre_quant_scale)"):
            ck.tensors[name] = ck.tensors[name][..., :4]
        for name in ck.names(r".*\.experts\.\d+\.(gate|up)_proj\.weight"):
            ck.tensors[name] = ck.tensors[name][:2]
        for name in ck.names(r".*\.experts\.\d+\.(gate|up)_proj\.weight_scale"):
            ck.tensors[name] = ck.tensors[name][:4]
        for name in ck.scales("weight_scale"):  # groups of 4 everywhere
            columns = 4 if ".experts." in name and "down" in name else 256
            ck.tensors[name] = ck.tensors[name][:, :1].repeat(1, columns // 4)

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    (finding,) = refused(source, *FOLD).findings
    assert "4 columns are no multiple of 8 codes" in finding["message"]
    assert finding["tensor"].endswith("down_proj.weight")


def test_refuses_split_scales(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(checkpoint(QWEN), tmp_path / "source")
    (finding,) = refused(source, *TARGET, "--w13-scale", "split").findings
    assert "--w13-scale split" in finding["message"]


TOO_LARGE = {
    "a group scale": (f"{DOWN3}.weight_scale", 3.4e38, "weight_scale", r"3\.4e\+38 at \[2, 0\] does not fit BF16"),
    "a group scale of another linear": (f"{Q0}.weight_scale", 3.4e38, "weight_scale", r"at \[2, 1\] does not fit BF16"),
    "a negative group scale": (f"{GATE3}.weight_scale", -3.4e38, "weight_scale", r"-3\.4e\+38 at \[2, 1\]"),
    "a group scale of an unpacked linear": (f"{O0}.weight_scale", 3.4e38, "weight", r"at \[2, 1\d\d\] does not fit"),
    "a router": (f"{MLP0}.gate.weight", 3.3e38, "weight", r"at \[2, 1\] does not fit BF16"),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_refuses_values_that_bf16_can_t_hold(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """Found while writing: with the position, and nothing is left behind."""
    tensor, value, param, says = TOO_LARGE[name]

    def change(ck: Editable) -> None:
        scale = ck.tensors[tensor].clone()
        scale[2, -1 if scale.shape[1] == 1 else 1] = value
        ck.tensors[tensor] = scale
        for other in ck.names(W13):
            ck.tensors[other][1] = 0.25

    source = damage.damaged(checkpoint(W4A16), tmp_path / "source", change)
    (finding,) = refused(source, *FOLD).findings
    assert (finding["rule"], finding["severity"]) == ("kernel-scale-bad", "error")
    assert finding["tensor"] == f"{tensor.rpartition('.')[0]}.{param}"
    assert re.search(says, finding["message"]), finding["message"]


def test_refuses_scales_that_vanish_in_bf16(checkpoint: Fetch, tmp_path: Path) -> None:
    """The product of a small group scale and a small factor, which F32 holds and BF16 does not."""
    source = damage.damaged(
        checkpoint(W4A16),
        tmp_path / "source",
        each(re.escape(UP3) + r"\.weight_scale", lambda old: torch.full_like(old, 2.0**-120)),
        each(re.escape(DOWN3) + r"\.pre_quant_scale", lambda old: torch.full_like(old, 2.0**-20)),
    )
    (finding,) = refused(source, *FOLD).findings
    assert (finding["rule"], finding["tensor"]) == ("kernel-scale-bad", f"{UP3}.weight_scale")


def test_an_output_is_no_modelopt_checkpoint(checkpoint: Fetch, tmp_path: Path) -> None:
    """It can't be converted again."""
    converted(checkpoint(W4A16), tmp_path / "folder" / "source", *FOLD)
    assert [finding["rule"] for finding in refused(tmp_path / "folder" / "source").findings] == ["already-packed"]


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [W4A16, AWQ])
def test_dry_run_writes_nothing_and_says_what_a_run_writes(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    dry = run("convert", checkpoint(name), tmp_path / "out", *FOLD, "--dry-run", "--json")
    assert dry.code == 0 and not list(tmp_path.iterdir())
    wet = run("convert", checkpoint(name), tmp_path / "out", *FOLD, "--json")
    assert (dry.json["dry_run"], wet.json["dry_run"]) == (True, False)
    for key in ("target", "options", "outputs", "tensors", "bytes", "linears", "findings"):
        assert dry.json[key] == wet.json[key], key
    assert dry.json["target"] == "compressed-tensors"
    (file,) = dry.json["outputs"]
    assert file["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    text = run("convert", checkpoint(name), tmp_path / "other", *FOLD, "--dry-run")
    assert text.code == 0 and "Dry run: nothing was written" in text.stderr + text.stdout


def test_dry_run_refuses_what_a_run_refuses(checkpoint: Fetch, tmp_path: Path) -> None:
    result = run("convert", checkpoint(W4A16), tmp_path / "out", *TARGET, "--dry-run", "--json")
    assert result.code == 3
    assert [finding["rule"] for finding in result.findings] == ["target-refused"]


@pytest.mark.parametrize("name", [W4A8, AWQ])
def test_several_targets_in_one_run(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    """Each in its folder, as in a run of its own."""
    both = run("convert", checkpoint(name), tmp_path / "both", "--target", "hf", *FOLD, "--json")
    assert both.code == 0, both.stderr
    assert [target["target"] for target in both.json["targets"]] == ["hf", "compressed-tensors"]
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"hf", "compressed-tensors"}
    converted(checkpoint(name), tmp_path / "hf")
    converted(checkpoint(name), tmp_path / "compressed-tensors", *FOLD)
    for target in ("hf", "compressed-tensors"):
        alone, together = (oracle.relative_files(folder / target) for folder in (tmp_path, tmp_path / "both"))
        for files in (alone, together):
            files.pop("nvfp4prep.json")
        assert alone == together
    compressed_oracle.check(checkpoint(name), tmp_path / "both" / "compressed-tensors", tmp_path / "both" / "hf")


@pytest.mark.parametrize("name", [W4A16, AWQ, QWEN])
def test_outputs_don_t_depend_on_the_workers(name: str, checkpoint: Fetch, tmp_path: Path) -> None:
    for workers in (1, 5):
        converted(checkpoint(name), tmp_path / str(workers), *FOLD, "--workers", workers)
    one, five = (oracle.relative_files(tmp_path / str(workers)) for workers in (1, 5))
    assert one == five


def test_manifest_says_what_was_rounded_and_folded(checkpoint: Fetch, tmp_path: Path) -> None:
    """The largest relative errors, worked out again."""
    before, after = Source(oracle.read(checkpoint(W4A16))), converted(checkpoint(W4A16), tmp_path / "out", *FOLD)
    entry = manifest_of(tmp_path / "out")["runs"][0]
    worst = {"scales": 0.0, "unpacked": 0.0, "readers": 0.0}

    def note(kind: str, written: np.ndarray, exact: np.ndarray) -> None:
        off = np.abs(written - exact)[exact != 0] / np.abs(exact[exact != 0])
        worst[kind] = max(worst[kind], float(off.max()))

    for module in before.forms:
        if f"{module}.weight" in after.tensors:
            note("unpacked", written_weight(after, module), before.smoothed(module))
            continue
        stored = after.tensors[f"{module}.weight_scale"]
        rows = compressed_oracle.row_factors(before, module).astype(np.float64)
        note("scales", stored.values.reshape(stored.shape), before.floats(f"{module}.weight_scale") * rows)
    for block in before.blocks:
        fold = fold_of(before, block)
        assert fold is not None
        router = before.floats(f"{block}.gate.weight") / fold.factor
        note("readers", after.tensors[f"{block}.gate.weight"].values.reshape(router.shape), router)
        norm, first = before.floats(fold.norm), before.factors(f"{block}.experts.0.gate_proj")
        off = np.abs(fold.written - norm * first) / np.abs(norm * first)
        assert entry["folded"][block]["norm_rounding"] == pytest.approx(off.max(), rel=1e-4)
    assert entry["rounding"] == pytest.approx(worst, rel=1e-4)


def test_side_files_and_the_rest_of_config_json(checkpoint: Fetch, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint(W4A16), source)
    (source / "tokenizer.json").write_text('{"kept": true}')
    (source / "code").mkdir()
    (source / "code" / "modeling.py").write_text("# kept\n")
    checked(source, tmp_path)
    assert (tmp_path / "out" / "code" / "modeling.py").read_text() == "# kept\n"
    assert (tmp_path / "out" / "generation_config.json").is_file()
