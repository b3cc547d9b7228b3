"""The page in a real browser: no error, lines to be seen, in light and in dark."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
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
const found = {colours: [], charts: [], outside: []};
const style = getComputedStyle(document.body);
const colour = () => found.colours.push(style.backgroundColor);
colour();
document.getElementById("theme").click();
colour();
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), around = svg.getBoundingClientRect();
  const lengths = [...svg.querySelectorAll(".line")].map(l => l.getTotalLength());
  for (const text of svg.querySelectorAll("text")) {
    const box = text.getBoundingClientRect();
    if (box.left < around.left - 1 || box.right > around.right + 1)
      found.outside.push(text.textContent);
  }
  const tip = figure.querySelector(".tip"), hidden = tip.hidden;
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: around.right - 20}));
  const last = tip.textContent, box = tip.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointerleave"));
  const left = tip.hidden;
  svg.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
  found.charts.push({
    title: figure.querySelector("h2").textContent, lengths, hidden, last, left,
    inside: box.left >= 0 && box.right <= innerWidth && box.height > 20,
    first: tip.textContent,
  });
}
document.body.dataset.found = JSON.stringify(found);
</script></body>
"""


def browse(page: str, folder: Path, *options: str) -> tuple[str, list[str]]:
    """What the page has become, and what its scripts said on the console."""
    assert CHROMIUM is not None
    path = folder / "probed.html"
    path.write_text(page, encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={folder / 'profile'}", "--window-size=1200,900"]
    command += ["--enable-logging=stderr", "--dump-dom", *options, path.as_uri()]
    done = subprocess.run(
        command,
        env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


def probed(page: str, folder: Path, *options: str) -> tuple[dict[str, Any], list[str]]:
    dom, said = browse(page.replace("</body>", PROBE), folder, *options)
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None, said
    return json.loads(unescape(found[1])), said


def brightness(colour: str) -> int:
    return sum(map(int, re.findall(r"\d+", colour)[:3]))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of 3,000 long steps, with a gap, far apart values and an odd name."""
    rows = [
        {
            "step": 1000 * n,
            **WINDOW,
            "window/loss": math.nan if 50 < n < 60 else 40 * math.exp(-n / 300) + 0.1,
            "window/weight": 4000 + 100 * (n % 9),
            "val/<b>&": n % 2,
        }
        for n in range(3000)
    ]
    return page_of(run_folder(tmp_path_factory.mktemp("page"), rows))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_chart_has_data_and_nothing_complains(
    scheme: str, page: str, tmp_path: Path
) -> None:
    options = ["--force-dark-mode"] if scheme == "dark" else []
    found, said = probed(page, tmp_path, *options)
    assert said == []
    is_bright = [brightness(colour) > 600 for colour in found["colours"]]
    assert is_bright == ([True, False] if scheme == "light" else [False, True])
    assert found["outside"] == []  # no label is cut off
    shown = [chart["title"] for chart in found["charts"]]
    assert shown == [unescape(title) for title in titles(page)]
    for chart in found["charts"]:
        assert max(chart["lengths"]) > 300, chart
        assert chart["hidden"], chart
        assert chart["left"], chart
        assert chart["inside"], chart
        assert re.match(r"step 2,\d{3},000", chart["last"]), chart
        assert re.match(r"step \d", chart["first"]), chart


def test_an_error_of_a_script_would_be_seen(tmp_path: Path) -> None:
    """The control."""
    _, said = browse("<!doctype html><script>nothing()</script>", tmp_path)
    assert "nothing is not defined" in said[0]
