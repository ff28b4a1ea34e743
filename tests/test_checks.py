"""What rules of headers and scales pass over, and what they find beyond the smallest case of `rule_cases`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from damage import Damage, Editable
from rule_cases import DSV3, INT4, KV, MIXED, codes, rename, store
from test_refused import DENSE, QWEN, both, replace, unquantize, with_config
from test_validate import findings

from nvfp4prep.checks import blocks

Fetch = Callable[[str], Path]
GATE = "model.layers.0.mlp.gate"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.experts.3.down_proj"
NORM = r"model\.layers\.1\.input_layernorm\.weight"


@pytest.fixture
def found(checkpoint: Fetch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Findings of one rule about a damaged checkpoint."""

    def find(rule: str, base: str, change: Damage) -> list[dict[str, Any]]:
        folder = damage.damaged(checkpoint(base), tmp_path / "source", change)
        return [one for one in findings(folder) if one["rule"] == rule]

    return find


def more_rows(ck: Editable) -> None:
    for name in ck.names(r".*\.mlp\.gate\.weight"):
        ck.tensors[name] = torch.cat([ck.tensors[name], ck.tensors[name][:2]])


# --- routers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "change", "severity", "says"),
    [
        (QWEN, both(more_rows, with_config(zero_expert_num=2)), None, ""),
        (QWEN, both(more_rows, with_config(zero_expert_num=3)), "warning", "scores 10 experts, 8 are stored"),
        (QWEN, more_rows, "warning", "scores 10 experts, 8 are stored"),
        (QWEN, replace(f"{GATE}.weight", lambda t: t[:7]), "error", "fetch the whole checkpoint"),
        (QWEN, store(f"{GATE}.bias", torch.zeros(7)), "error", r"a bias [7] for 8 experts"),
        (QWEN, store(f"{GATE}.bias", torch.zeros(8)), None, ""),
        (QWEN, both(more_rows, store(f"{GATE}.bias", torch.zeros(10))), "warning", "scores 10"),
        (DSV3, replace(BIAS, lambda t: t[1:]), "error", "a bias"),
    ],
)
def test_router(found: Any, base: str, change: Damage, severity: str | None, says: str) -> None:
    got = found("router-shape", base, change)
    assert {one["severity"] for one in got} == ({severity} if severity else set())
    assert all(says in one["message"] for one in got)
    assert severity == "error" or not any("fetch" in one["message"] for one in got)


def test_longcats_router(found: Any) -> None:
    change = rename(r"mlp\.gate\.", "mlp.router.classifier.")
    cut = replace("model.layers.0.mlp.router.classifier.weight", lambda t: t[:7])
    (one,) = found("router-shape", QWEN, both(change, cut))
    assert one["severity"] == "error" and one["layer"] == 0


# --- layers and towers -----------------------------------------------------------------------------------------------


def tower(ck: Editable) -> None:
    for number in range(40):
        ck.tensors[f"model.visual.blocks.{number}.norm.weight"] = torch.ones(4)
        ck.tensors[f"vision_tower.encoder.layers.{number}.norm.weight"] = torch.ones(4)
    ck.tensors["audio_tower.embed_tokens.weight"] = torch.ones(3, 4)


@pytest.mark.parametrize("base", [QWEN, DENSE])
@pytest.mark.parametrize("rule", ["layers-missing", "layer-incomplete", "config-shape", "tied-head-differs"])
def test_towers_are_not_the_language_model(found: Any, base: str, rule: str) -> None:
    assert not found(rule, base, tower)


def test_layers_named_h(found: Any) -> None:
    change = both(rename(r"^model\.layers\.", "transformer.h."), tower, with_config(num_hidden_layers=3))
    (one,) = found("layers-missing", DENSE, change)
    assert "2" in one["message"]


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        (QWEN, damage.drop(NORM, r"model\.layers\.1\.mlp\.gate\.weight"), "input_layernorm.weight, mlp.gate.weight;"),
        (QWEN, damage.drop(r"model\.layers\.1\.mlp\.experts\..*"), "mlp.experts;"),
        (QWEN, damage.drop(r"model\.layers\.1\.(?!mlp\.experts).*"), " more;"),
        (DSV3, damage.drop(NORM), None),  # one dense layer, one MoE layer
        (QWEN, both(damage.drop(NORM), with_config(layer_types=["full_attention", "sliding_attention"])), None),
        (QWEN, store("model.layers.2.eh_proj.weight", torch.ones(2, 2)), None),  # above num_hidden_layers
        (DENSE, unquantize(Q), None),
        (KV, damage.drop(r"model\.layers\.1.*[kv]_scale"), None),
    ],
)
def test_incomplete_layers(found: Any, base: str, change: Damage, says: str | None) -> None:
    got = found("layer-incomplete", base, change)
    assert len(got) == (says is not None)
    assert says is None or says in got[0]["message"]


# --- scales ----------------------------------------------------------------------------------------------------------


def test_w4a8_needs_weight_scale_2(found: Any) -> None:
    name = "model.layers.0.mlp.experts.3.up_proj"
    got = found("global-scale-missing", INT4, damage.drop(name.replace(".", r"\.") + r"\.weight_scale_2"))
    assert [(one["severity"], one["tensor"]) for one in got] == [("error", f"{name}.weight")]


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones((), dtype=torch.int32), torch.ones(0)])
def test_kv_scales_are_one_float(found: Any, value: torch.Tensor) -> None:
    def change(ck: Editable) -> None:
        ck.tensors[ck.names(r".*layers\.0.*k_scale")[0]] = value

    (one,) = found("kv-scale-bad", KV, change)
    assert "one float" in one["message"]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("param", ["weight_scale", "input_scale"])
def test_fp8_scales(found: Any, param: str, value: float) -> None:
    (one,) = found("fp8-scale-bad", MIXED, damage.put(value, rf"model\.layers\.0\.self_attn\.q_proj\.{param}"))
    assert one["tensor"] == f"{Q}.{param}"


def test_fp8_with_an_inverse_scale(found: Any) -> None:
    assert not found("fp8-scale-missing", MIXED, rename(r"q_proj\.weight_scale$", "q_proj.weight_scale_inv"))


def test_fp8_nan_is_counted_over_chunks(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CHUNK", 1000)

    def change(ck: Editable) -> None:
        codes(rf"{Q}\.weight", 0x7F, 3000)(ck)
        raw = ck.tensors[f"{Q}.weight"].view(torch.uint8)
        raw.view(-1)[:2100] = 0

    (one,) = found("fp8-nan", MIXED, change)
    columns = 256
    assert one["values"]["count"] == 900
    assert f"[{2100 // columns}, {2100 % columns}]" in one["message"]


@pytest.mark.parametrize("change", [lambda t: t.to(torch.int8), lambda t: t.view(1, -1), lambda t: t[:1]])
def test_pre_quant_scale_of_int4(found: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    (one,) = found("pre-quant-scale-shape", INT4, replace(f"{DOWN}.pre_quant_scale", change))
    assert one["tensor"] == f"{DOWN}.pre_quant_scale"
