"""The self-test notices every way of breaking a layer that the layer can show, on each target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pack_checks import PAIRS, decide

from nvfp4prep.errors import InputRefused
from nvfp4prep.layouts.logical import Activation
from nvfp4prep.smoke import selftest
from nvfp4prep.smoke.check import Settings, Subject
from nvfp4prep.smoke.layer import PackedLayer
from nvfp4prep.smoke.selftest import MUTATIONS, Mutation, Result, self_test
from nvfp4prep.smoke.subject import Real, from_prepared

SETTINGS = Settings("emulator", "first-last")
NAMES = (
    "dsv3-nvfp4",  # routing factor 2.5
    "gptoss-nvfp4",  # clamp, biases, fused tensors
    "nemotronh-nvfp4",  # not gated
    "qwen3moe-nvfp4-i96",  # padding
    "qwen3moe-w4a16nvfp4",  # no input scales
    "tinymoe-nvfp4-splitscale",  # two scales for gate and up, input scales that differ
)
NOT_GATED = {"halves swapped", "gate's scale on up"}
ONLY = {
    "routing factor twice": "dsv3-nvfp4",
    "padding not zero": "qwen3moe-nvfp4-i96",
    "another expert's input scale": "tinymoe-nvfp4-splitscale",
    "gate's scale on up": "tinymoe-nvfp4-splitscale",
}
"""Mutations that one of these checkpoints alone can show."""
INT4_ALONE = {
    "weights not interleaved",
    "offset of 8 forgotten",
    "16-bit scales misread",
    "scale order by I",
    "pre_quant_scale ignored",
}
"""Mutations that no NVFP4 layer can show."""


def showable(name: str, layout: str) -> set[str]:
    found = {mutation.name for mutation in MUTATIONS if ONLY.get(mutation.name, name) == name} - INT4_ALONE
    if name == "nemotronh-nvfp4":
        found -= NOT_GATED
    if layout not in ("flashinfer-trtllm", "flashinfer-cutedsl") or (
        layout == "flashinfer-cutedsl" and name == "nemotronh-nvfp4"
    ):
        found -= {"rows not shuffled"}
    if layout != "flashinfer-trtllm":
        found -= {"gate's scale on up"}  # unified there
    if layout == "vllm-marlin":
        found -= {"another expert's input scale"}
    return found


def made(path: Path, layout: str, engine: str, **options: int | str) -> Subject:
    return from_prepared(decide(path, layout, engine=engine, **options), Real())


@pytest.mark.parametrize(("layout", "engine"), PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_every_mutation_is_noticed(name: str, layout: str, engine: str, checkpoint: Callable[[str], Path]) -> None:
    try:
        subject = made(checkpoint(name), layout, engine)
    except InputRefused as refused:
        pytest.skip(str(refused))
    results = self_test(subject, SETTINGS)
    assert [result.name for result in results] == [mutation.name for mutation in MUTATIONS]
    assert {result.name for result in results if result.status == "noticed"} == showable(name, layout)
    for result in results:
        if result.status == "not showable":
            assert result.why and not result.how and result.rel_l2 is None, result
            continue
        assert result.tolerance is not None and result.rel_l2 is not None
        # A padded region that kernels multiply by zero shows in the bytes alone; routing is in no bytes.
        assert bool(result.output) == (result.name != "padding not zero"), result
        assert bool(result.data) == (result.name != "routing factor twice"), result
        assert result.rel_l2 > result.tolerance or not result.output, result


@pytest.mark.parametrize("rank", [{"tp": 2}, {"ep": 2}, {"tp": 2, "ep": 2}])
def test_one_rank_of_several(rank: dict[str, int], checkpoint: Callable[[str], Path]) -> None:
    subject = made(checkpoint("dsv3-nvfp4"), "flashinfer-trtllm", "vllm", **rank)
    results = self_test(subject, SETTINGS)
    assert not [result for result in results if result.status == "missed"]
    assert sum(result.status == "noticed" for result in results) >= 7


def test_kept_input_scales(checkpoint: Callable[[str], Path]) -> None:
    subject = made(checkpoint("tinymoe-nvfp4-splitscale"), "vllm-cutlass", "vllm", input_scale="keep")
    results = {result.name: result for result in self_test(subject, SETTINGS)}
    assert all(result.status != "missed" for result in results.values())
    assert results["another expert's input scale"].status == "noticed"


def test_one_chunk_of_each_half_has_no_order_to_lose(checkpoint: Callable[[str], Path]) -> None:
    """With I = 64, up's one chunk of 64 rows and gate's lie as they would without the interleave."""
    subject = made(checkpoint("qwen3moe-nvfp4-perexpert"), "flashinfer-cutedsl", "vllm", tp=2)
    results = {result.name: result for result in self_test(subject, SETTINGS)}
    assert results["rows not shuffled"].status == "not showable"
    assert results["rows not shuffled"].why == "this layer's bytes come out the same"


def one(subject: Subject, monkeypatch: pytest.MonkeyPatch, apply: Callable[[PackedLayer], PackedLayer]) -> Result:
    monkeypatch.setattr(selftest, "MUTATIONS", (Mutation("x", "y", apply),))
    (result,) = self_test(subject, SETTINGS)
    return result


def test_what_nothing_notices_is_missed(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def unread(layer: PackedLayer) -> PackedLayer:
        return replace(layer, scalars={**layer.scalars, "raw_input_scale": torch.zeros(8)})

    result = one(made(checkpoint("dsv3-nvfp4"), "flashinfer-trtllm", "vllm"), monkeypatch, unread)
    assert (result.status, result.how, result.why) == ("missed", "", "neither outputs nor bytes show it")


def test_an_unchanged_layer_is_not_showable(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    result = one(made(checkpoint("dsv3-nvfp4"), "vllm-marlin", "vllm"), monkeypatch, lambda layer: layer)
    assert result.status == "not showable"


def test_a_layer_that_fails_unbroken_shows_nothing(checkpoint: Callable[[str], Path]) -> None:
    subject = made(checkpoint("dsv3-nvfp4"), "flashinfer-cutlass", "vllm")
    pack = subject.pack
    wrong = replace(
        subject,
        pack=lambda moe, rank: replace(pack(moe, rank), activation=Activation("silu", limit=1e-6)),  # type: ignore[type-var]
    )
    (result,) = self_test(wrong, SETTINGS)
    assert result.status == "missed"
    assert result.why.startswith("the layer fails before anything is broken")
