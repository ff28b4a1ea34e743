"""Names, roles and formats: which tensors are experts, and what can't be one layer. Synthetic headers only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from nvfp4prep.dialects import layer_number, natural_key, odd_expert_id, role_of
from nvfp4prep.findings import Finding
from nvfp4prep.header import TensorInfo
from nvfp4prep.schema import Format, Schema, build_schema

HIDDEN, INNER, EXPERTS = 64, 32, 4
MLP = "model.layers.3.mlp"
Spec = tuple[str, tuple[int, ...]]


def nvfp4(module: str, rows: int, columns: int) -> dict[str, Spec]:
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def expert(label: str | int, mlp: str = MLP, order: str = "experts.{0}.{1}") -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        sizes = (HIDDEN, INNER) if projection == "down_proj" else (INNER, HIDDEN)
        found |= nvfp4(f"{mlp}.{order.format(label, projection)}", *sizes)
    return found


def experts(labels: Iterable[str | int] = range(EXPERTS)) -> dict[str, Spec]:
    return {name: spec for label in labels for name, spec in expert(label).items()}


def fused() -> dict[str, Spec]:
    base = f"{MLP}.experts"
    return {
        f"{base}.gate_up_proj": ("U8", (EXPERTS, HIDDEN // 2, 2 * INNER)),
        f"{base}.gate_up_proj_weight_scale": ("F8_E4M3", (EXPERTS, HIDDEN // 16, 2 * INNER)),
        f"{base}.gate_up_proj_weight_scale_2": ("F32", ()),
        f"{base}.down_proj": ("U8", (EXPERTS, INNER // 2, HIDDEN)),
        f"{base}.down_proj_weight_scale": ("F8_E4M3", (EXPERTS, INNER // 16, HIDDEN)),
        f"{base}.down_proj_weight_scale_2": ("F32", ()),
    }


def schema(specs: Mapping[str, Spec], **config: Any) -> Schema:
    return build_schema({name: TensorInfo(name, *spec, "f", 0, 0) for name, spec in specs.items()}, config)


def errors(specs: Mapping[str, Spec], **config: Any) -> dict[str, Finding]:
    return {f.rule: f for f in schema(specs, **config).findings if f.severity == "error"}


def test_what_is_right() -> None:
    for specs in (experts(), fused()):
        found = schema(specs, model_type="llama4")
        assert found.findings == ()
        assert [(moe.path, moe.format, moe.expert_count) for moe in found.moe_layers] == [(MLP, Format.NVFP4, EXPERTS)]


# --- an expert that is passed over would switch off its layer ---------------------------------------------------------

ODD_WEIGHTS: dict[str, Spec] = {
    "I8": ("I8", (HIDDEN, INNER // 2)),
    "I64 1-D": ("I64", (4,)),
    "I32 0-d": ("I32", ()),
    "BF16 1-D": ("BF16", (64,)),
    "FP8 1-D": ("F8_E4M3", (64,)),
    "E8M0": ("F8_E8M0", (HIDDEN, INNER)),
}


@pytest.mark.parametrize("sidecars", [True, False])
@pytest.mark.parametrize("form", ODD_WEIGHTS)
def test_one_odd_expert(form: str, sidecars: bool) -> None:
    module = f"{MLP}.experts.2.down_proj"
    specs = experts()
    if not sidecars:
        specs = {name: spec for name, spec in specs.items() if not name.startswith(module)}
    specs[f"{module}.weight"] = ODD_WEIGHTS[form]
    found = schema(specs)
    assert found.moe_layers == ()
    told = [f for f in found.findings if f.severity == "error" and f.tensor and f.tensor.startswith(module)]
    assert told and all((f.layer, f.experts) == (3, (2,)) for f in told if f.rule != "mixed-experts")
    assert any(f.rule != "mixed-experts" for f in told)


@pytest.mark.parametrize("specs", [experts(), fused()], ids=["per-expert", "fused"])
@pytest.mark.parametrize("form", ODD_WEIGHTS)
def test_all_experts_odd(form: str, specs: dict[str, Spec]) -> None:
    """Alone, too: the layer would be copied with no word about it."""
    odd = {name: ODD_WEIGHTS[form] for name in specs if name.endswith(("_proj", ".weight"))}
    finding = errors(odd)["unclassified"]
    assert finding.layer == 3 and finding.tensor in odd
    assert finding.experts == (() if "gate_up" in str(specs) else tuple(range(EXPERTS)))


def test_experts_without_a_weight() -> None:
    """As other quantisers store them; one finding for a layer, not one for each expert."""
    specs = {
        f"{MLP}.experts.{i}.{p}_proj.weight_packed": ("U8", (4, 4)) for i in range(9) for p in ("gate", "up", "down")
    }
    found = [f for f in schema(specs).findings if f.severity == "error"]
    assert [(f.rule, f.experts) for f in found] == [("unclassified", tuple(range(9)))]
    assert "27 of the experts' linears hold no weight but weight_packed" in found[0].message


def test_odd_weights_elsewhere_stay_warnings() -> None:
    found = schema(experts() | {"model.layers.3.odd.weight": ("I8", (4, 4)), "model.ids.weight": ("I64", (4,))})
    assert [(f.rule, f.severity) for f in found.findings] == [("unclassified", "warning")]
    assert len(found.moe_layers) == 1


# --- ids -------------------------------------------------------------------------------------------------------------

ODD_IDS = ["00", "03", "٣", "３", "１２", "1_0", "+1", "-1", "²", "1\u200b", "12345678901", " 1"]


@pytest.mark.parametrize("order", ["experts.{0}.{1}", "experts.{1}.{0}"])
@pytest.mark.parametrize("label", ODD_IDS)
def test_an_id_has_one_spelling(label: str, order: str) -> None:
    for own in (range(EXPERTS), (0, 1, 2)):
        specs = {name: spec for i in own for name, spec in expert(i, order=order).items()}
        finding = errors(specs | expert(label, order=order))["expert-id"]
        assert finding.layer == 3 and finding.tensor and f".{label}." in finding.tensor
        assert ascii(label) in finding.message and "12 such names" in finding.message


@pytest.mark.parametrize("name", ["a.experts.shared_0.up_proj.weight", "a.experts.3.up_proj.weight", "a.experts.x.1"])
def test_names_with_other_ids(name: str) -> None:
    assert odd_expert_id(name) is None


def test_roles_are_of_canonical_ids_only() -> None:
    assert role_of(f"{MLP}.experts.10.gate_proj.weight").expert == 10
    assert role_of("a\nb.experts.0.up_proj.weight").moe == "a\nb"
    for label in ODD_IDS:
        assert role_of(f"{MLP}.experts.{label}.gate_proj.weight").moe is None
    numbers = {"layers.0.x": 0, "layers.12": 12, "layers.01.x": None, "layers.١.x": None, "layers.1234567890.x": None}
    assert {name: layer_number(name) for name in numbers} == numbers


def test_natural_order_of_any_digits() -> None:
    names = ["layer2", "layer10", "１" * 5000, "²", "9" * 5000]
    assert sorted(names, key=natural_key).index("layer2") < sorted(names, key=natural_key).index("layer10")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (f"{MLP}.experts.down_proj", f"{MLP}.experts.down_proj.weight"),
        (f"{MLP}.experts.down_proj", f"{MLP}.experts.down_proj.weight_scale"),
        ("weight", ".weight"),
    ],
)
def test_two_names_for_one_module(one: str, other: str) -> None:
    for first, second in ((one, other), (other, one)):
        found = errors({first: ("BF16", (4, 8, 8)), second: ("BF16", (4, 8, 8))})
        assert found["module-named-twice"].tensor == second and first in found["module-named-twice"].message


def test_a_module_without_a_path() -> None:
    (linear,) = schema({"weight": ("BF16", (4, 4))}).linears.values()
    assert (linear.tensor_name("weight"), linear.tensor_name("input_scale")) == ("weight", "input_scale")


# --- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [3 * 10**8, 10**18, 10**4000])
def test_an_absurd_number_of_experts(count: int) -> None:
    start = time.perf_counter()
    finding = errors(experts(), num_experts=count)["expert-missing"]
    assert time.perf_counter() - start < 5
    assert finding.experts == tuple(range(EXPERTS, EXPERTS + 64))
    assert f"missing: {EXPERTS}-{count - 1}" in finding.message


def test_an_absurd_expert_id() -> None:
    finding = errors(experts([0, 1, 999_999_999]))["expert-missing"]
    assert "missing: 2-999999998" in finding.message and len(finding.experts) == 64
    assert "missing: 1, 3, 5" in errors(experts([0, 2, 4]), num_experts=6)["expert-missing"].message


# --- biases ----------------------------------------------------------------------------------------------------------


def with_biases(specs: dict[str, Spec], change: Mapping[str, Spec | None]) -> dict[str, Spec]:
    """Biases on every expert's linear, but for those of `change`, by the end of their names."""
    biases: dict[str, Spec] = {}
    for name, (_, shape) in specs.items():
        if name.endswith(".weight"):
            biases[name.removesuffix("weight") + "bias"] = ("F32", (shape[0],))
        elif name.endswith("_proj"):
            biases[f"{name}_bias"] = ("BF16", (shape[0], shape[2]))
    for end, spec in change.items():
        for name in [name for name in biases if name.endswith(end)]:
            del biases[name]
            if spec is not None:
                biases[name] = spec
    return specs | biases


def test_biases_that_fit() -> None:
    for specs in (experts(), fused()):
        for dtype in ("F32", "BF16", "F16"):
            biased = {n: (dtype if n.endswith("bias") else s[0], s[1]) for n, s in with_biases(specs, {}).items()}
            found = schema(biased, model_type="llama4")
            assert found.findings == () and len(found.moe_layers) == 1


@pytest.mark.parametrize(
    ("end", "spec"),
    [
        (".2.down_proj.bias", None),
        (".gate_proj.bias", None),
        (".2.down_proj.bias", ("F64", (HIDDEN,))),
        (".2.down_proj.bias", ("I64", (HIDDEN,))),
        (".2.down_proj.bias", ("F32", (HIDDEN - 1,))),
        (".2.down_proj.bias", ("F32", (1, HIDDEN))),
        (".2.down_proj.bias", ("F32", ())),
        (".2.up_proj.bias", ("F32", (HIDDEN,))),
    ],
)
def test_biases_of_experts_that_do_not_fit(end: str, spec: Spec | None) -> None:
    finding = errors(with_biases(experts(), {end: spec}))["expert-bias"]
    assert finding.layer == 3 and finding.tensor and finding.tensor.endswith(end)
    assert finding.experts == (tuple(range(EXPERTS)) if end == ".gate_proj.bias" else (2,))


@pytest.mark.parametrize(
    ("end", "spec"),
    [
        ("down_proj_bias", None),
        ("gate_up_proj_bias", None),
        ("down_proj_bias", ("I32", (EXPERTS, HIDDEN))),
        ("down_proj_bias", ("F32", (EXPERTS - 1, HIDDEN))),
        ("down_proj_bias", ("F32", (EXPERTS, HIDDEN + 1))),
        ("down_proj_bias", ("F32", (HIDDEN,))),
        ("gate_up_proj_bias", ("F32", (EXPERTS, INNER))),
    ],
)
def test_biases_of_fused_experts_that_do_not_fit(end: str, spec: Spec | None) -> None:
    finding = errors(with_biases(fused(), {f"experts.{end}": spec}), model_type="llama4")["expert-bias"]
    assert (finding.layer, finding.tensor) == (3, f"{MLP}.experts.{end}")
