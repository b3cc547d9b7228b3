"""The page in a real browser: no error, lines to be seen, in light and in dark."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.cli.report.runs import WINDOW, page_of, run_folder, titles

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

PROBE = """
<script>
const found = {colours: [], charts: [], outside: [], overlaps: []};
const style = getComputedStyle(document.body);
const soon = () => new Promise(done => setTimeout(done, 60));
const texts = new Map();  // what stands on each canvas
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const {e, f} = this.getTransform(), width = this.measureText(text).width;
  const before = {left: 0, start: 0, center: width / 2, right: width, end: width};
  const left = e + x - before[this.textAlign];
  const written = texts.get(this.canvas) ?? [];
  const one = {text, left, right: left + width, x: e + x, y: f + y};
  texts.set(this.canvas, [...written, one]);
  write.call(this, text, x, y);
};
function inked(plot, name) {  // how many pixels are about of a line's colour
  const {left, top, width, height} = plot.bbox;
  const copy = document.createElement("canvas");
  [copy.width, copy.height] = [plot.ctx.canvas.width, plot.ctx.canvas.height];
  const pixels = copy.getContext("2d", {willReadFrequently: true});
  pixels.drawImage(plot.ctx.canvas, 0, 0);
  const {data} = pixels.getImageData(left, top, width, height);
  const [r, g, b] = [1, 3, 5].map(at => parseInt(colour(name).slice(at, at + 2), 16));
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    count += Math.abs(data[i] - r) + Math.abs(data[i + 1] - g)
      + Math.abs(data[i + 2] - b) < 120;
  return count;
}
function mouse(plot, kind, x) {
  const {left, top, height} = plot.over.getBoundingClientRect();
  const at = {clientX: left + x, clientY: top + height / 2, movementX: 1};
  plot.over.dispatchEvent(new MouseEvent(kind, {...at, bubbles: true}));
}
const legend = plot => [...plot.root.querySelectorAll(".u-series:not(.unlisted)")]
  .map(row => row.textContent);
async function probe(figure, plot) {
  const place = figure.querySelector(".plot"), lines = charts[place.id].lines;
  const ink = () => lines.map(line => inked(plot, line.style));
  const chart = {title: figure.querySelector("h2").textContent, lines: ink()};
  plot.hooks.drawClear = [() => texts.delete(plot.ctx.canvas)];
  plot.redraw(false, true);
  await soon();
  chart.texts = texts.get(plot.ctx.canvas);
  for (const one of chart.texts) {
    if (one.left < -1 || one.right > plot.ctx.canvas.width + 1)
      found.outside.push(one.text);
    for (const other of chart.texts)
      if (one !== other && Math.abs(one.y - other.y) < 11
          && one.left < other.right && other.left < one.right)
        found.overlaps.push([one.text, other.text]);
  }
  chart.points = lines.map(line => line.steps.map((step, i) => [
    plot.valToPos(step, "x", true), plot.valToPos(line.values[i], "y", true)]));
  chart.idle = legend(plot);
  mouse(plot, "mousemove", plot.over.clientWidth / 2);
  await soon();
  chart.middle = legend(plot);
  mouse(plot, "mouseleave", -5);
  await soon();
  chart.left = legend(plot);
  place.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
  await soon();
  chart.first = legend(plot);
  place.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
  const names = plot.root.querySelectorAll(".u-series:not(.unlisted) th");
  for (const name of names) name.click();
  await soon();
  chart.off = ink();
  for (const name of names)
    name.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
  await soon();
  chart.on = ink();
  const {min, max} = plot.scales.x;
  mouse(plot, "mousemove", 50);
  mouse(plot, "mousedown", 50);
  mouse(plot, "mousemove", 150);
  mouse(plot, "mouseup", 150);
  await soon();
  chart.zoom = (plot.scales.x.max - plot.scales.x.min) / (max - min);
  mouse(plot, "dblclick", 100);
  await soon();
  chart.whole = [plot.scales.x.min, plot.scales.x.max].join() === [min, max].join();
  chart.axes = {};
  for (const button of figure.querySelectorAll(".axes button")) {
    button.click();
    await soon();
    const {distr, max} = plots[place.id].scales.y;
    chart.axes[button.textContent] = [distr, max];
  }
  found.charts.push(chart);
}
(async () => {
  await soon();
  found.colours.push(style.backgroundColor);
  document.getElementById("theme").click();
  await soon();
  found.colours.push(style.backgroundColor);
  const figures = [...document.querySelectorAll("figure")];
  for (const figure of figures)
    await probe(figure, plots[figure.querySelector(".plot").id]);
  found.isNarrow = innerWidth < 600;
  found.wide = document.documentElement.scrollWidth > innerWidth;
  window.name = JSON.stringify([...JSON.parse(window.name || "[]"), found]);
  location.href = "NEXT";
})();
</script></body>
"""
LAST = "<!doctype html><script>document.documentElement.dataset.found=name</script>"


@dataclass
class Visit:
    """What a page was like, and what its scripts said on the console."""

    found: Any
    said: list[str]


def visited(
    pages: Mapping[str, str], folder: Path, *options: str
) -> tuple[dict[str, Visit], list[str]]:
    """The pages one after the other in one browser, and what else it said.

    A window's name stays while pages come and go: it holds what was found.
    """
    assert CHROMIUM is not None
    names = [*pages, "last"]
    (folder / "last.html").write_text(LAST, encoding="utf-8")
    for page, name, after in zip(pages.values(), pages, names[1:], strict=True):
        whole = page.replace("</body>", PROBE).replace("NEXT", f"{after}.html")
        (folder / f"{name}.html").write_text(whole, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1200,900"]
    command += ["--enable-logging=stderr", "--dump-dom", *options]
    command += ["--virtual-time-budget=600000", (folder / f"{names[0]}.html").as_uri()]
    done = subprocess.run(
        command,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"CONSOLE.*", done.stderr)
    dom = re.search(r'data-found="([^"]*)"', done.stdout)
    assert dom is not None, said
    found = zip(pages, json.loads(unescape(dom[1])), strict=True)
    by_page = {name: Visit(each, []) for name, each in found}
    others = []
    for line in said:
        of = re.search(r"source: file://.*/(.*)\.html ", line)
        (by_page[of[1]].said if of and of[1] in by_page else others).append(line)
    return by_page, others


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


BROKEN = """<!doctype html><script>nothing()</script>
<script>window.name = JSON.stringify([...JSON.parse(window.name), null]);
location.href = "NEXT"</script>"""
LOSSES = [1.0, 3.0, math.nan, 2.0, math.nan, 2.0, 2.0]
NAME = "</script><img src=x onerror=console.log(1)>&{0}"
AXES = [
    ([1e250, -1e250], ["-1e+250", "-5e+249", "0", "5e+249", "1e+250"]),
    ([0.5, 20.0], ["0.5", "1", "2", "5", "10", "20"]),
    ([1e-4, 10.0], ["0.0001", "0.001", "0.01", "0.1", "1", "10"]),
    ([1.0, 1 + 1e-9], ["0.9", "0.95", "1", "1.05", "1.1"]),  # one number, as written
    ([2e6, 1e6], [f"1,{n}00,000" for n in "02468"] + ["2,000,000"]),
]


def long_run() -> list[dict[str, Any]]:
    """3,000 long steps, with a gap, far apart values and an odd name."""
    return [
        {
            "step": 1000 * n,
            **WINDOW,
            "window/loss": math.nan if 50 < n < 60 else 40 * math.exp(-n / 300) + 0.1,
            "window/weight": 4000 + 100 * (n % 9),
            "val/<b>&": n % 2,
        }
        for n in range(3000)
    ]


def losses(values: Sequence[float], *, step: int = 1) -> list[dict[str, Any]]:
    return [{"step": step * n, "val/loss": value} for n, value in enumerate(values)]


def measured() -> list[dict[str, Any]]:
    """2,000 windows of 64 samples, of which every tenth is measured."""
    scale = {"window/noise_scale": 200.0, "window/noise_scale_low": 150.0}
    scale["window/noise_scale_high"] = 280.0
    return [
        {"step": n, "window/samples_seen": 64 * n, **(scale if n % 10 == 0 else {})}
        for n in range(1, 2001)
    ]


RUNS: dict[str, list[dict[str, Any]]] = {
    "long": long_run(),
    "points": [*losses(LOSSES, step=10), {"step": 25, "valid/loss": 2.5}],
    "single": [{"step": 7, "val/loss": 2.0}],
    "name": [{"step": 0, NAME: 1}],
    "noise": measured(),
    **{f"axis{n}": losses(values) for n, (values, _) in enumerate(AXES)},
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    return {
        name: page_of(run_folder(folder / name, rows)) for name, rows in RUNS.items()
    }


@pytest.fixture(scope="module")
def light(
    pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Visit]:
    """All pages in a wide window, in light."""
    every = {**pages, "broken": BROKEN}
    visits, others = visited(every, tmp_path_factory.mktemp("light"))
    assert others == []
    return visits


@pytest.mark.parametrize("scheme", ["light", "dark and narrow"])
def test_every_chart_has_data_and_nothing_complains(
    scheme: str, pages: dict[str, str], light: dict[str, Visit], tmp_path: Path
) -> None:
    long = light["long"]
    if scheme != "light":
        only = {"long": pages["long"]}
        options = ["--force-dark-mode", "--window-size=500,900"]
        visits, others = visited(only, tmp_path, *options)
        assert others == []
        long = visits["long"]
    found = long.found
    assert long.said == []
    is_bright = [brightness(colour) > 600 for colour in found["colours"]]
    assert is_bright == ([True, False] if scheme == "light" else [False, True])
    assert found["isNarrow"] == (scheme != "light")
    assert found["outside"] == []  # no label is cut off
    assert found["overlaps"] == []
    assert not found["wide"]
    shown = [chart["title"] for chart in found["charts"]]
    assert shown == [unescape(title) for title in titles(pages["long"])]
    for chart in found["charts"]:
        assert min(chart["lines"]) > 200, chart
        assert len(chart["texts"]) > 5, chart  # numbers along both axes
        assert max(chart["off"]) == 0, chart  # switched off by a click
        assert chart["on"] == chart["lines"], chart  # and on by a key
        for text, step in (
            ("idle", "2,999,000"),
            ("left", "2,999,000"),
            ("first", "0"),
        ):
            assert chart[text][0].endswith(f" at step {step}"), chart
        assert re.search(r" at step 1,\d{3},000$", chart["middle"][0]), chart
        assert 0.05 < chart["zoom"] < 0.5, chart
        assert chart["whole"], chart


def test_the_noise_scale_lies_in_its_band_over_samples(light: dict[str, Visit]) -> None:
    assert light["noise"].said == []
    found = light["noise"].found
    assert (found["outside"], found["overlaps"]) == ([], [])
    (chart,) = found["charts"]
    assert chart["title"] == "Noise scale"
    scale = "200 (150 to 280) at 128,000 samples seen"
    window = "size of the window64 at 128,000 samples seen"
    assert chart["idle"] == [f"window/noise_scale{scale}", window]
    assert "samples seen" in [each["text"] for each in chart["texts"]]
    assert [distr for distr, _ in chart["axes"].values()] == [1, 3]
    assert min(chart["lines"]) > 100
    assert max(chart["off"]) == 0  # with its band


def test_buttons_choose_the_axis(light: dict[str, Visit]) -> None:
    axes = light["long"].found["charts"][0]["axes"]
    assert list(axes) == ["linear", "log", "start clipped"]
    assert [distr for distr, _ in axes.values()] == [1, 3, 1]
    assert axes["linear"][1] > 40  # the largest value
    assert axes["start clipped"][1] < 5  # what it is after a quarter of the steps
    assert light["single"].found["charts"][0]["axes"] == {}  # the control


def test_points_are_where_the_axes_say(light: dict[str, Visit]) -> None:
    """And where there is a gap no line is."""
    assert light["points"].said == []
    (chart,) = light["points"].found["charts"]
    ticks = {text["text"]: text for text in chart["texts"]}
    for n, loss in enumerate(LOSSES):
        if not math.isnan(loss):
            x, y = chart["points"][0][n]
            assert x == pytest.approx(ticks[str(10 * n)]["x"], abs=1)
            assert y == pytest.approx(ticks[f"{loss:g}"]["y"], abs=1)
    assert chart["idle"] == ["val/loss2 at step 60", "valid/loss2.5 at step 25"]
    # 100 steps of the line from 1 to 3 and of the level one are far more than dots
    assert chart["lines"][0] > 100


def test_a_single_point_is_drawn(light: dict[str, Visit]) -> None:
    assert light["single"].said == []
    (chart,) = light["single"].found["charts"]
    assert chart["lines"][0] > 5
    assert chart["idle"] == ["val/loss2 at step 7"]
    assert [text["text"] for text in chart["texts"]].count("7") == 1


@pytest.mark.parametrize("number", range(len(AXES)))
def test_numbers_along_the_axis_are_round(number: int, light: dict[str, Visit]) -> None:
    texts = light[f"axis{number}"].found["charts"][0]["texts"]
    left = min(text["x"] for text in texts)
    assert [text["text"] for text in texts if text["x"] == left] == AXES[number][1]


def test_a_name_is_no_markup_in_the_legend(light: dict[str, Visit]) -> None:
    assert light["name"].said == []
    assert light["name"].found["charts"][0]["idle"] == [f"{NAME}1 at step 0"]


def test_an_error_of_a_script_would_be_seen(light: dict[str, Visit]) -> None:
    """The control."""
    assert "nothing is not defined" in light["broken"].said[0]
