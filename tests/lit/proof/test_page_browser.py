"""The page of a check in a real browser, wide and narrow."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from trainkit.lit.proof.findings import Gradient
from trainkit.lit.proof.page import page

from tests.cli.report.test_browser import CHROMIUM
from tests.lit.proof.test_page import OFF

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

PROBE = """<script>
const box = each => each.getBoundingClientRect();
document.getElementById("theme").click();
document.documentElement.dataset.found = JSON.stringify({
  wide: document.documentElement.scrollWidth > innerWidth,
  theme: root.dataset.theme,
  copied: [...document.querySelectorAll("button.copy")].filter(b => !b.hidden).length,
  bars: [...document.querySelectorAll(".bar i")].map(
    bar => box(bar).width / box(bar.parentElement).width),
  covered: [...document.querySelectorAll(".bars tbody tr")].filter(row => {
    const [name, bar] = row.children;
    return box(name).right > box(bar).left + 1 && box(name).bottom > box(bar).top + 1;
  }).length,
});
</script></body>"""


@pytest.mark.parametrize("size", ["1200,900", "500,900"])
def test_bars_have_their_lengths_and_nothing_overflows(
    size: str, tmp_path: Path
) -> None:
    assert CHROMIUM is not None
    names = ["net.0.weight", "a" * 200 + ".bias", ".".join(["long_name"] * 30)]
    shares = [0.5, 0.25, 0.05]
    layers = tuple(map(Gradient, names, [1.0] * 3, shares))
    html = page(replace(OFF, gradients=layers), command="x" * 300)
    (tmp_path / "check.html").write_text(html.replace("</body>", PROBE), "utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}"]
    command += ["--enable-logging=stderr", (tmp_path / "check.html").as_uri()]
    done = subprocess.run(
        command,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert re.findall(r"CONSOLE.*", done.stderr) == []
    dom = re.search(r'data-found="([^"]*)"', done.stdout)
    assert dom is not None
    found = json.loads(unescape(dom[1]))
    assert not found["wide"]
    assert found["theme"] == "dark"
    assert found["copied"] == 2
    assert found["covered"] == 0
    assert found["bars"][1:] == pytest.approx([1.0, 0.5, 0.1], abs=0.01)
