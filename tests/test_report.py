"""The report: its data against the files, its page against what a browser would load and run."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import damage
import pytest
import torch
from checkpoints import INT4, NVFP4, OVERLAYS
from report_pages import collected, converted, large, report_of
from safetensors.torch import load_file

from nvfp4prep import validation
from nvfp4prep.checkpoint import read_checkpoint
from nvfp4prep.errors import EnvironmentFault
from nvfp4prep.findings import Finding
from nvfp4prep.report import data, histogram, page
from nvfp4prep.report.data import PageData, collect
from nvfp4prep.report.histogram import block_scale_histogram, block_scales
from nvfp4prep.report.history import UNKNOWN, Before

Fetch = Callable[[str], Path]
TINY, SPLIT, MOE, DENSE = (
    "tinymoe-nvfp4-perexpert",
    "tinymoe-nvfp4-splitscale",
    "qwen3moe-nvfp4-perexpert",
    "qwen3-dense-nvfp4",
)
MAX_PAGE = 12_000_000


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


class Page(HTMLParser):
    """What a browser would make of a page: tags with their attributes, balanced, and the text of scripts apart."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, text: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += text
        elif not self._open or self._open[-1] != "style":
            self.text += text

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def figures(self) -> dict[str, Any]:
        bodies = [
            (attributes, text)
            for attributes, text in zip(self.all("script"), self.scripts, strict=True)
            if attributes.get("type") == "application/json"
        ]
        return {str(attributes["id"]): json.loads(text) for attributes, text in bodies}


def rendered(found: PageData) -> Page:
    return Page(page.render(found))


# --- scales ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NVFP4, *OVERLAYS])
def test_every_input_scale_of_the_experts_is_collected(checkpoint: Fetch, name: str) -> None:
    folder = checkpoint(name)
    found = collected(folder, read_blocks=False)
    stored = [
        tensor.double().flatten().tolist()
        for key, tensor in tensors_of(folder).items()
        if re.search(r"\.experts\..*input_scale$|\.experts\.\w+_input_scale$", key)
    ]
    values = [entry.value for scales in found.inputs for entry in scales.entries]
    assert sorted(values) == sorted(value for listed in stored for value in listed)
    assert bool(found.inputs) == (name not in ("qwen3-dense-nvfp4", "qwen3moe-w4a16nvfp4"))


@pytest.mark.parametrize(
    ("name", "projections"),
    [
        (TINY, {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
        ("mixtral-nvfp4", {"gate": "w1", "up": "w3", "down": "w2"}),
    ],
)
def test_each_value_is_its_experts(checkpoint: Fetch, name: str, projections: dict[str, str]) -> None:
    folder = checkpoint(name)
    stored, found = tensors_of(folder), collected(folder, read_blocks=False)
    seen = 0
    for scales in found.inputs:
        for entry in scales.entries:
            assert (entry.projection == "down") == (scales.gemm == "w2")
            key = f"{scales.path}.experts.{entry.expert}.{projections[entry.projection]}.input_scale"
            assert entry.value == stored[key].item()
            seen += 1
        good = sorted(entry.value for entry in scales.entries if entry.value is not None)
        assert scales.median == pytest.approx((good[(len(good) - 1) // 2] + good[len(good) // 2]) / 2, rel=1e-12)
    for layer in found.pairs:
        for pair in layer.pairs:
            gate, up = (
                stored[f"{layer.path}.experts.{pair.expert}.{projections[half]}.weight_scale_2"].item()
                for half in ("gate", "up")
            )
            assert (pair.gate.value, pair.up.value, pair.ratio) == (gate, up, up / gate)
    assert seen == sum(key.endswith("input_scale") and ".experts." in key for key in stored)


def test_differing_halves_have_their_ratios(checkpoint: Fetch) -> None:
    pairs = [pair for layer in collected(checkpoint(SPLIT)).pairs for pair in layer.pairs]
    ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
    assert len(ratios) == 64
    assert min(ratios) < 0.85 and max(ratios) > 1.2


def test_bad_values_stay_visible(checkpoint: Fetch, tmp_path: Path) -> None:
    folder = damage.damaged(
        checkpoint(TINY),
        tmp_path / "bad",
        damage.put(0.0, r".*layers\.0\.mlp\.experts\.3\.down_proj\.input_scale"),
        damage.put(math.nan, r".*layers\.1\.mlp\.experts\.[57]\.(?:gate|up)_proj\.input_scale"),
        damage.drop(r".*layers\.2\.mlp\.experts\.9\.down_proj\.input_scale"),
        damage.put(-0.1, r".*layers\.3\.mlp\.experts\.2\.up_proj\.weight_scale_2"),
    )
    found = collected(folder)
    faults = {
        (scales.label, scales.gemm, kind): (count, experts)
        for scales in found.inputs
        for kind, (count, experts) in scales.spread.faults.items()
    }
    assert faults == {
        ("0", "w2", "zero"): (1, (3,)),
        ("1", "w13", "NaN"): (4, (5, 7)),
        ("2", "w2", "missing"): (1, (9,)),
    }
    (bad,) = [(layer.label, pair) for layer in found.pairs for pair in layer.pairs if pair.ratio is None]
    assert (bad[0], bad[1].expert, bad[1].problem) == ("3", 2, "negative")
    shown = rendered(found)
    figures = shown.figures
    crosses = [trace for trace in figures["figure-input-strip"]["data"] if trace["name"] == "missing or bad"]
    said = [about[0] for trace in crosses for about in trace["customdata"]]
    assert "layer 0, expert 3, down<br>input_scale 0 (zero)" in said
    assert "layer 2, expert 9, down<br>input_scale missing" in said
    assert len(said) == 6
    assert "missing or bad" in [trace["name"] for trace in figures["figure-input-heatmap"]["data"] if "name" in trace]
    assert "missing or bad" in [trace["name"] for trace in figures["figure-pair-ratios"]["data"]]
    assert "6 are missing or unusable." in shown.text


def test_layers_with_one_number_are_told_apart(checkpoint: Fetch, tmp_path: Path) -> None:
    def again(ck: damage.Editable) -> None:
        ck.rename(lambda name: name.replace("model.layers.1.", "mtp.layers.0."))

    found = collected(damage.damaged(checkpoint(MOE), tmp_path / "mtp", again))
    assert {scales.label for scales in found.inputs} == {"model.layers.0.mlp", "mtp.layers.0.mlp"}
    assert "layer model.layers.0.mlp" in page.render(found)


# --- block scales ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [TINY, DENSE, "gptoss-nvfp4", "qwen3moe-mixed-fp8attn", "qwen3moe-nvfp4-sharded", *INT4]
)
@pytest.mark.parametrize("piece", [histogram.PIECE, 1001])
def test_the_histogram_counts_every_byte(
    checkpoint: Fetch, name: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histogram, "PIECE", piece)
    folder = checkpoint(name)
    expected = torch.zeros(256, dtype=torch.int64)
    for key, tensor in tensors_of(folder).items():
        if key.endswith("weight_scale") and tensor.dtype == torch.float8_e4m3fn:
            expected += torch.bincount(tensor.view(torch.uint8).flatten().long(), minlength=256)
    read: list[int] = []
    found = read_checkpoint(str(folder))
    counts = block_scale_histogram(found.source, block_scales(found.schema), read.append)
    assert counts == expected.tolist()
    assert sum(read) == sum(counts)
    assert all(count <= piece for count in read)
    assert (sum(counts) == 0) == (name in INT4)


def test_codes_of_every_kind(checkpoint: Fetch, tmp_path: Path) -> None:
    codes = torch.tensor([0, 0x80, 0x7F, 0xFF, 0x81, 0xFE, 1, 7, 8, 126], dtype=torch.uint8)

    def change(ck: damage.Editable) -> None:
        for name in ck.scales("weight_scale"):
            shape = ck.tensors[name].shape
            ck.tensors[name] = torch.full(shape, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
        raw = ck.tensors[ck.scales("weight_scale")[0]].view(torch.uint8)
        raw.view(-1)[: len(codes)] = codes

    found = collected(damage.damaged(checkpoint(MOE), tmp_path / "codes", change))
    blocks = found.blocks
    assert blocks is not None
    counted = (blocks.zero, blocks.negative_zero, blocks.nan, blocks.negative, blocks.subnormal, blocks.largest)
    assert counted == (1, 1, 2, 2, 2, 1)
    assert blocks.total == sum(blocks.counts)
    bars = {trace["name"]: trace for trace in rendered(found).figures["figure-blocks"]["data"]}
    assert bars["no sound value"]["y"] == [1, 2, 2]
    assert bars["zero"]["y"] == [1]


def test_a_histogram_of_another_length_is_refused(checkpoint: Fetch) -> None:
    with pytest.raises(ValueError, match="256"):
        collect(read_checkpoint(str(checkpoint(MOE))), report_of(checkpoint(MOE)), [0] * 128)


# --- before and after ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [(TINY, {}), (SPLIT, {}), (SPLIT, {"w13_scale": "split"}), (TINY, {"input_scale": "keep"}), ("llama4-nvfp4", {})],
)
def test_before_and_after_are_those_of_the_files(
    checkpoint: Fetch, tmp_path: Path, name: str, options: dict[str, str]
) -> None:
    source = collected(checkpoint(name))
    out = collected(converted(checkpoint(name), tmp_path / "out", **options))
    assert source.history is None
    history = out.history
    assert history is not None and (history.source, history.runs, history.passed_over) == (name, 1, 0)
    before, after = ({(scales.path, scales.gemm): scales for scales in found.inputs} for found in (source, out))
    moe = [change for change in history.inputs if change.gemm != "input"]
    assert {(change.where, change.gemm) for change in moe} == set(before)
    for change in moe:
        stored = before[change.where, change.gemm].entries
        assert [(b.expert, b.projection, b.value) for b in change.before] == [
            (entry.expert, entry.projection, entry.value) for entry in stored
        ]
        assert change.after == after[change.where, change.gemm].entries
        assert change.changed == (len({entry.value for entry in stored}) > 1 and options.get("input_scale") != "keep")
    old, new = (
        {(layer.path, pair.expert): pair for layer in found.pairs for pair in layer.pairs} for found in (source, out)
    )
    shown = {(pair.where, pair.expert): pair for pair in history.pairs}
    assert set(old) <= set(shown)
    for key, pair in old.items():
        assert shown[key].before == (pair.gate.value, pair.up.value)
        assert shown[key].after == (new[key].gate.value, new[key].up.value)
        assert shown[key].changed == (pair.ratio != 1 and options.get("w13_scale") != "split")
    text = rendered(out).text
    assert ("Changed: no scale" in text) == (not any(c.changed for c in (*history.inputs, *history.pairs)))


def test_bad_values_before(checkpoint: Fetch, tmp_path: Path) -> None:
    source = damage.damaged(
        checkpoint(TINY),
        tmp_path / "bad",
        damage.put(math.inf, r".*layers\.0\.mlp\.experts\.3\.gate_proj\.input_scale"),
        damage.put(0.0, r".*layers\.0\.mlp\.experts\.4\.up_proj\.input_scale"),
        damage.drop(r".*layers\.1\.mlp\.experts\.5\.down_proj\.input_scale"),
    )
    out = converted(source, tmp_path / "out", impute="layer-max")
    history = collected(out).history
    assert history is not None
    bad = [
        (change.layer, change.gemm, before.expert, before.projection, before.problem)
        for change in history.inputs
        for before in change.before
        if before.problem
    ]
    assert bad == [(0, "w13", 3, "gate", "inf"), (0, "w13", 4, "up", "zero"), (1, "w2", 5, "down", "missing")]
    again = collected(converted(out, tmp_path / "again")).history
    assert again is not None and again.runs == 2
    assert replace(again, runs=1) == history, "the first run knows what was before"
    assert "3 were missing or unusable" in rendered(collected(out)).text


@pytest.mark.parametrize(
    ("runs", "passed_over"),
    [
        ([], 0),
        (["no run"], 0),
        ([{"input_scales": "none", "weight_scale_2": [3]}], 0),
        ([{"input_scales": [{"where": "model.layers.0.mlp", "gemm": "w13", "raw": [1.0]}]}], 1),
        ([{"input_scales": [{"where": "model.layers.0.mlp", "gemm": "w13", "count": 10**12, "max": 1.0}]}], 1),
        ([{"input_scales": [{"where": "model.layers.0.mlp", "gemm": "w13", "raw": ["a"] * 32}]}], 1),
        ([{"input_scales": [{"where": "model.layers.0.mlp", "gemm": "w13", "raw": [1e305] * 32}]}], 1),
        ([{"input_scales": [{"where": "model.layers.0.mlp", "gemm": "w13", "raw": [1e-300] * 32}]}], 1),
        ([{"input_scales": [{"where": ["a list"], "gemm": {}}]}], 0),
        ([{"input_scales": [{"where": "elsewhere", "gemm": "w13", "raw": [1.0]}]}], 0),
        ([{"weight_scale_2": [{"where": "model.layers.0.mlp", "before": {"0": [1.0]}}]}], 1),
        ([{"weight_scale_2": [{"where": "model.layers.0.mlp", "before": [1.0]}]}], 1),
        ([{"weight_scale_2": [{"where": "model.layers.0.mlp", "before": {"0": [0.0, 1.0]}}]}], 1),
    ],
)
def test_a_manifest_of_another_shape_is_passed_over(
    checkpoint: Fetch, tmp_path: Path, runs: list[Any], passed_over: int
) -> None:
    out = converted(checkpoint(TINY), tmp_path / "out")
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    damage.write_json(out / "nvfp4prep.json", manifest | {"runs": runs, "source": {"name": ["x"], "revision": 3}})
    found = collected(out, read_blocks=False)
    assert found.history is not None
    assert (found.history.passed_over, found.history.inputs, found.history.pairs) == (passed_over, (), ())
    assert rendered(found)


def test_what_the_manifest_does_not_tell_of_a_bad_value(checkpoint: Fetch, tmp_path: Path) -> None:
    out = converted(checkpoint(TINY), tmp_path / "out")
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    manifest["runs"][0]["input_scales"][1]["raw"][7] = None
    damage.write_json(out / "nvfp4prep.json", manifest)
    history = collected(out, read_blocks=False).history
    assert history is not None
    assert [b for change in history.inputs for b in change.before if b.problem] == [Before(7, "down", None, UNKNOWN)]


# --- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NVFP4, *OVERLAYS, *INT4])
def test_the_page_stands_alone(checkpoint: Fetch, name: str) -> None:
    folder = checkpoint(name)
    findings = validation.validate(str(folder), "scales").findings
    found = collected(folder, *findings)
    text = page.render(found)
    assert text == page.render(found)
    shown = Page(text)
    assert len(text.encode()) < MAX_PAGE
    assert [tag for tag, attributes in shown.tags if "src" in attributes or "srcset" in attributes] == []
    links = [attributes["href"] for _, attributes in shown.tags if "href" in attributes]
    assert links and all(link is not None and link.startswith("#") for link in links)
    ids = Counter(attributes["id"] for _, attributes in shown.tags if "id" in attributes)
    assert set(ids.values()) == {1}
    assert {f"#{place}" for place in ids} >= set(links)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    (policy,) = [tag["content"] for tag in shown.all("meta") if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'") and "http" not in policy
    places = [tag["data-figure"] for tag in shown.all("div") if tag.get("class") == "plot"]
    assert places == list(shown.figures)
    assert len(re.findall(r"plotly\.js v\d", text)) == bool(places)
    assert len(shown.scripts) == len(places) + 2 * bool(places)
    for rule in {finding.entry for finding in findings}:
        assert rule.id in shown.text and rule.name in shown.text
    assert all(finding.message in " ".join(shown.text.split()) for finding in findings if "  " not in finding.message)


@pytest.mark.parametrize(
    ("name", "plots", "said"),
    [
        (TINY, {"input-heatmap", "input-strip", "pair-ratios", "blocks"}, "at most by 18x: layer 0, w2"),
        (SPLIT, {"input-heatmap", "input-strip", "pair-ratios", "blocks"}, "63 of 64 pairs differ"),
        (DENSE, {"blocks"}, "This checkpoint has no MoE layers."),
        ("qwen3moe-int4awq", set(), "not stored as NVFP4"),
        ("qwen3moe-w4a16nvfp4", {"pair-ratios", "blocks"}, "only weights are quantised (W4A16)"),
        ("nemotronh-nvfp4", {"input-strip", "blocks"}, "The experts have no gate"),
        ("gptoss-nvfp4", {"input-strip", "blocks"}, "one tensor with one weight_scale_2"),
    ],
)
def test_sections_have_a_plot_or_a_sentence(checkpoint: Fetch, name: str, plots: set[str], said: str) -> None:
    shown = rendered(collected(checkpoint(name)))
    assert set(shown.figures) == {f"figure-{plot}" for plot in plots}
    assert said in shown.text
    assert "there is no before" in shown.text


def test_block_scales_that_were_not_read(checkpoint: Fetch) -> None:
    shown = rendered(collected(checkpoint(TINY), read_blocks=False))
    assert "figure-blocks" not in shown.figures
    assert "Block scales were not read" in shown.text


def test_differing_fused_linears_are_drawn(checkpoint: Fetch, tmp_path: Path) -> None:
    change = damage.multiply(r".*self_attn\.k_proj", 0.5, 0.25, param=("weight_scale_2", "input_scale"))
    folder = damage.damaged(checkpoint(DENSE), tmp_path / "fused", change)
    figure = rendered(collected(folder)).figures["figure-fused"]
    assert {trace["name"] for trace in figure["data"]} == {"input_scale", "weight_scale_2"}
    history = collected(converted(folder, tmp_path / "out")).history
    assert history is not None and [change.gemm for change in history.shown.inputs] == ["input"] * len(history.inputs)


def test_the_head_tells_what_it_is(checkpoint: Fetch, tmp_path: Path) -> None:
    found = collected(checkpoint(TINY))
    facts = dict(found.facts)
    assert facts["architecture"] == "Qwen3MoeForCausalLM"
    assert facts["experts"] == "16, top-4"
    assert facts["sizes"] == "hidden 512, expert intermediate 128"
    stored = tensors_of(checkpoint(TINY))
    assert sum(row.nbytes for row in found.formats) == sum(t.numel() * t.element_size() for t in stored.values())
    assert {row.label: row.linears for row in found.formats}["NVFP4"] == 208
    out = collected(converted(checkpoint(TINY), tmp_path / "out"))
    assert dict(out.facts)["converted from"] == TINY
    pinned = read_checkpoint(str(checkpoint(TINY)))
    pinned = replace(pinned, source=replace(pinned.source, spec="org/name", revision="0123abc"))
    shown = rendered(collect(pinned, report_of(checkpoint(TINY)), None))
    assert "org/name" in shown.text and "0123abc" in shown.text


# --- findings --------------------------------------------------------------------------------------------------------


def test_findings_are_grouped_and_long_groups_folded(checkpoint: Fetch) -> None:
    many = [Finding("input-scale-differs", "warning", f"message {n}", layer=n, experts=(1, 2)) for n in range(1000)]
    few = [
        Finding("configs-disagree", "info", "a mild one", "config.json"),
        Finding("configs-disagree", "warning", "a worse one", "config.json"),
        Finding("bad-shard", "error", "the worst"),
    ]
    found = collected(checkpoint(MOE), *many, *few)
    verdicts = found.verdicts
    assert [group.rule.name for group in verdicts.groups] == ["bad-shard", "configs-disagree", "input-scale-differs"]
    assert [finding.message for finding in verdicts.groups[1].findings] == ["a worse one", "a mild one"]
    assert verdicts.counts == {"error": 1, "warning": 1001, "info": 1}
    shown = rendered(found)
    assert len(shown.all("details")) == 1
    assert "1,000×" in shown.text and "996 more" in shown.text and "600 more; nvfp4prep validate" in shown.text
    assert "layer 3, experts 1-2" in shown.text
    told = replace(verdicts.groups[0], rule=replace(verdicts.groups[0].rule, why="it <matters>", fix="do <that>"))
    shown = rendered(replace(found, verdicts=replace(verdicts, groups=(told,))))
    assert "Why: it <matters>" in shown.text and "Fix: do <that>" in shown.text
    assert "Nothing was found" in rendered(collected(checkpoint(MOE))).text


def test_what_was_not_judged_is_said(checkpoint: Fetch) -> None:
    folder = checkpoint(MOE)
    known = (Finding("bad-shard", "error", "an old one"),)
    report = report_of(folder, known=known, targets=("vllm-marlin",), stopped="the shards can't be read")
    shown = rendered(collect(read_checkpoint(str(folder)), report, None))
    assert "Known to the baseline and not shown: 1." in shown.text
    assert "the shards can't be read" in shown.text and "vllm-marlin" in shown.text
    assert "an old one" not in shown.text


# --- names from outside ----------------------------------------------------------------------------------------------

HOSTILE = "<img src=x onerror=alert(1)>"


def test_hostile_names_are_escaped(checkpoint: Fetch, tmp_path: Path) -> None:
    def change(ck: damage.Editable) -> None:  # two layers with one number: plots name them by their paths
        ck.rename(lambda name: name.replace("model.layers.1.", f"{HOSTILE}</script><b>.layers.0."))
        ck.config |= {"architectures": [HOSTILE], "num_hidden_layers": 1}
        for section in ck.sections:
            section["producer"] = {"name": HOSTILE, "version": "</script>"}

    folder = damage.damaged(
        checkpoint(MOE),
        tmp_path / "source",
        change,
        damage.put(0.0, r".*onerror.*experts\.3\.down_proj\.input_scale"),
        damage.multiply(r".*self_attn\.k_proj", 0.5, param=("weight_scale_2", "input_scale")),
    )
    finding = Finding("bad-shard", "error", f"{HOSTILE}\x1b[31m", f"{HOSTILE}.safetensors", "</script><script>alert(2)")
    out = converted(folder, tmp_path / "out", impute="layer-max")
    manifest = json.loads((out / "nvfp4prep.json").read_text())
    manifest["source"]["name"] = HOSTILE
    damage.write_json(out / "nvfp4prep.json", manifest)
    for place in (folder, out):
        found = replace(collected(place, finding), name=f"</title>{HOSTILE}", revision=HOSTILE)
        text = page.render(found)
        shown = Page(text)
        assert shown.all("img") == []
        assert not [name for _, attributes in shown.tags for name in attributes if name.startswith("on")]
        ours = text.replace(shown.scripts[-2], "")  # without plotly's
        assert HOSTILE in shown.text and "\\x1b[31m" in shown.text and "\x1b" not in ours
        assert not re.search(r"<img|<script>alert", ours)
        assert all("<" not in script for script in shown.scripts[:-2])
        assert all("<img" not in label for label in labels_of(list(shown.figures.values())))


def labels_of(value: Any) -> list[str]:
    """All text in figures, where plotly reads tags."""
    if isinstance(value, str):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [label for child in children for label in labels_of(child)]


# --- size, and what is needed ----------------------------------------------------------------------------------------


def test_a_large_model_stays_small_enough(checkpoint: Fetch) -> None:
    finding = Finding("input-scale-missing", "error", "x" * 200, "f" * 50, "t" * 100, 1, tuple(range(0, 256, 2)))
    found = large(collected(checkpoint(TINY), *([finding] * 20_000)))
    text = page.render(found)
    assert len(text.encode()) < MAX_PAGE
    figures = Page(text).figures
    for name in ("input-strip", "pair-ratios", "history"):
        kinds = {trace["type"] for trace in figures[f"figure-{name}"]["data"] if trace.get("mode") == "markers"}
        assert kinds == {"scattergl"}, name


def test_without_plotly_the_message_says_what_to_install(checkpoint: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    found = collected(checkpoint("qwen3moe-int4awq"))
    for name in [name for name in sys.modules if name.startswith(("plotly", "nvfp4prep.report."))]:
        if name not in ("nvfp4prep.report.data", "nvfp4prep.report.page"):
            monkeypatch.delitem(sys.modules, name)
    import nvfp4prep.report as package

    for name in ("sections", "figures", "input_figures", "changes", "traces"):
        monkeypatch.delattr(package, name, raising=False)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(EnvironmentFault, match=re.escape("pip install 'nvfp4prep[report]'")):
        page.render(found)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys; from nvfp4prep.report import data, histogram, page; "
        "print([name for name in ('plotly', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
    assert data.collect is collect
