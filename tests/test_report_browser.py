"""The report in a real browser, without a word on its console: NVFP4PREP_CHROMIUM, or a Chromium on the PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import damage
import pytest
from report_pages import collected, converted, large

from nvfp4prep.report import page

Fetch = Callable[[str], Path]
TINY, SPLIT, MOE = "tinymoe-nvfp4-perexpert", "tinymoe-nvfp4-splitscale", "qwen3moe-nvfp4-perexpert"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("NVFP4PREP_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium (set NVFP4PREP_CHROMIUM): the report was not tried in a browser"
)
HOVER = """<script>
(async () => {
  while (!document.body.dataset.plots) await new Promise((resolve) => setTimeout(resolve, 20));
  const said = [];
  for (const [plot, curve, point] of POINTS) {
    const place = document.getElementById("plot-" + plot);
    const subplot = place._fullData[curve].xaxis + place._fullData[curve].yaxis;
    Plotly.Fx.hover(place, [{ curveNumber: curve, pointNumber: point }], subplot);
    await new Promise((resolve) => setTimeout(resolve, 200));
    said.push(place.querySelector(".hoverlayer").textContent);
  }
  document.body.dataset.said = said.join("; ");
})();
</script>
</body>"""


class Shown:
    """What a browser made of a page: its document once all is drawn, and what it wrote to the console."""

    def __init__(self, text: str, folder: Path, *flags: str) -> None:
        assert CHROMIUM is not None
        path = folder / "report.html"
        path.write_text(text, encoding="utf-8")
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-unsafe-swiftshader",  # WebGL without a graphics card
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1280,1000",
            "--virtual-time-budget=30000",
            "--enable-logging=stderr",
            "--dump-dom",
            *flags,
            path.as_uri(),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        self.dom = result.stdout
        lines = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
        self.console = [line for line in lines if "GPU stall due to ReadPixels" not in line]

    def body(self, name: str) -> str | None:
        found = re.search(rf'<body[^>]* data-{name}="([^"]*)"', self.dom)
        return found[1] if found else None

    def plot(self, name: str) -> str:
        """The markup of one plot."""
        start = self.dom.index(f'id="plot-{name}"')
        return self.dom[start : self.dom.index("<figcaption", start)]


def points(markup: str) -> int:
    return len(re.findall(r'<path class="point[" ]', markup))


def test_the_console_is_listened_to(tmp_path: Path) -> None:
    policy = "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; script-src 'unsafe-inline'\">"
    shown = Shown(f"<!DOCTYPE html>{policy}<body><script>console.error('heard'); nowhere();</script></body>", tmp_path)
    assert any("heard" in line for line in shown.console)
    assert any("nowhere is not defined" in line for line in shown.console)


def test_every_plot_is_drawn(checkpoint: Fetch, tmp_path: Path) -> None:
    text = page.render(collected(checkpoint(TINY)))
    where = '[["input-strip", 1, 3], ["pair-ratios", 0, 5], ["blocks", 2, 110]]'
    shown = Shown(text.replace("</body>", HOVER.replace("POINTS", where)), tmp_path)
    assert shown.console == []
    assert shown.body("plots") == "4"
    assert shown.plot("input-heatmap").count('<g class="hm"') == 2
    assert points(shown.plot("input-strip")) == 2 * 64, "gate and up are equal: one point, and one for down"
    assert points(shown.plot("pair-ratios")) == 64
    assert shown.plot("blocks").count('<g class="point"') >= 30
    said = shown.body("said") or ""
    assert "layer 0, expert 3, gate and upinput_scale 0.00203450" in said
    assert "layer 0, expert 5up/gate 1: gate" in said
    assert "(code 0x76)" in said


def test_before_and_after_are_drawn(checkpoint: Fetch, tmp_path: Path) -> None:
    shown = Shown(page.render(collected(converted(checkpoint(SPLIT), tmp_path / "out"))), tmp_path)
    assert shown.console == []
    assert shown.body("plots") == "4"
    assert points(shown.plot("history")) == 128 + 64 + 2 * 64, "w13, w2, and gate/up before and after"


def test_bad_values_are_drawn(checkpoint: Fetch, tmp_path: Path) -> None:
    folder = damage.damaged(
        checkpoint(MOE), tmp_path / "bad", damage.put(0.0, r".*layers\.0.*experts\.[34]\.down_proj\.input_scale")
    )
    shown = Shown(page.render(collected(folder)), tmp_path)
    assert shown.console == []
    assert "missing or bad" in shown.plot("input-strip") and "missing or bad" in shown.plot("input-heatmap")
    assert shown.plot("input-heatmap").count('<g class="hm"') == 3


def test_pages_without_plots_need_no_script(checkpoint: Fetch, tmp_path: Path) -> None:
    shown = Shown(page.render(collected(checkpoint("qwen3moe-int4awq"))), tmp_path)
    assert shown.console == [] and "<script" not in shown.dom


def test_a_large_model_is_drawn_by_webgl(checkpoint: Fetch, tmp_path: Path) -> None:
    shown = Shown(page.render(large(collected(checkpoint(TINY)))), tmp_path)
    assert shown.console == []
    assert shown.body("plots") == "5"
    for name in ("input-strip", "pair-ratios", "history"):
        markup = shown.plot(name)
        assert "gl-canvas" in markup and "WebGL is not supported" not in markup
        assert points(markup) == 0


def test_without_webgl_it_is_drawn_all_the_same(checkpoint: Fetch, tmp_path: Path) -> None:
    text = page.render(large(collected(checkpoint(TINY)), layers=5))
    assert '"scattergl"' in text.rpartition("plotly.js v")[0]
    shown = Shown(text, tmp_path, "--disable-3d-apis")
    assert shown.console == []
    assert points(shown.plot("input-strip")) == 5 * 256 * 2
    assert points(shown.plot("pair-ratios")) == 5 * 256
