"""The page of a check: what it says, and that nothing in it is markup or a link."""

from __future__ import annotations

import inspect
import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from trainkit.lit.proof.findings import Cause, Cut, Gradient
from trainkit.lit.proof.page import page, write_page

from trainkit.lit.proof import of_draws, remedies
from trainkit.lit.proof import page as page_module
from trainkit.lit.proof.report import Report

EXACT = Report(
    exact=True,
    deviation=2e-16,
    rounding=1e-8,
    num_rows=24,
    precision="float64",
    cuts=(
        Cut("parts", (2, 22), 2e-16),
        Cut("single rows", (1,) * 24, 1e-16),
        Cut("plain accumulation", (2, 22), 0.25),
    ),
    gradients=(
        Gradient("net.0.weight", 0.8, 2e-16),
        Gradient("net.0.bias", 0.6, 1e-17),
        Gradient("token", 0.1, 1e-19),
        Gradient("unused.weight", 0.0, 0.0),
    ),
)
OFF = replace(
    EXACT,
    exact=False,
    deviation=0.5,
    cuts=(Cut("parts", (2, 22), 0.5), Cut("single rows", (1,) * 24, None, "it fails")),
    causes=(
        Cause("denominator", "", "the loss divides", ("accumulation = PerToken()",)),
        Cause("rows", "net.0", "BatchNorm", ("f(1), or words", "words")),
    ),
    gradients=(
        Gradient("net.0.weight", 0.8, 0.3),
        Gradient("net.0.bias", 0.6, 0.4),
        Gradient("token", 0.1, 0.02),
    ),
    notes=("dropout was left out",),
)
VOID = {"meta", "wbr"}


class Balance(HTMLParser):
    """Raises where an element is not closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def texts(html: str) -> str:
    """What stands on a page, without its markup."""
    body = re.sub(r"<(style|script)>.*?</\1>", "", html, flags=re.DOTALL)
    return unescape(re.sub(r"<wbr>", "", re.sub(r"<(?!wbr).*?>", "|", body)))


def widths(html: str, title: str) -> list[tuple[str, float]]:
    """The style and the width of each bar of a section."""
    section = html.partition(f"<h2>{title}</h2>")[2].partition("</section>")[0]
    found = re.findall(r'<i class="(\w+)" style="width:([\d.]+)%">', section)
    return [(style, float(width)) for style, width in found]


def line_at(html: str) -> float:
    (at, *_) = re.findall(r"--threshold:([\d.]+)%", html)
    return float(at)


def test_an_exact_report_has_its_bars_below_the_line() -> None:
    html = page(EXACT, command="trainkit check train seed=1")
    said = texts(html)
    assert (
        "|Exact on 24 rows: off by 2.0e-16 (rounding: up to 1e-08, float64).|" in said
    )
    assert "|trainkit check train seed=1|" in said
    assert "|1 more layer has no gradient on these rows.|" in said
    assert "Cut: parts. The scale is logarithmic." in said
    assert "of its own gradient" not in said
    assert "|Why|" not in said
    layers = html.partition("<h2>Deviation by layer</h2>")[2]
    for style, width in widths(html, "Deviation by layer"):
        assert style == "other1"
        assert 0 < width < line_at(layers)
    parts, rows, plain = widths(html, "Cuts")
    assert parts[1] < line_at(html) < plain[1]
    assert (rows[0], plain[0]) == ("other1", "validation")


def test_a_report_that_is_off_says_where_why_and_what_to_do() -> None:
    html = page(OFF)
    said = texts(html)
    assert "|Not the big batch on 24 rows: off by 5.0e-01" in said
    layer, token = widths(html, "Deviation by layer")
    assert layer == ("validation", pytest.approx(100.0))  # both parameters: 0.5 of 0.5
    assert token[1] == pytest.approx(4.0)
    assert "|net.0 |cause 2|" in said
    assert "|5.0e-01||50.0%|" in said
    assert "|it fails|" in said
    assert "|24 x 1|" in said
    assert "|2. rows see each other at |net.0|" in said
    assert "Each module's outputs for a part were compared" in said
    assert "|dropout was left out|" in said
    codes = re.findall(r'<code class="line">(.*?)</code>', html)
    assert codes == ["accumulation = PerToken()", "f(1)"]
    assert html.count('<button class="copy"') == 2
    assert "There is no strategy" in said
    assert "No experiment has found a cause" in texts(page(replace(OFF, causes=())))


def test_many_layers_are_folded_and_nothing_is_lost() -> None:
    layers = [Gradient(f"net.{n}.weight", 0.1, 0.1 / (n + 1)) for n in range(200)]
    html = page(replace(OFF, gradients=tuple(layers)))
    assert "160 more layers, each off by at most 2.4e-03" in texts(html)
    bars = widths(html, "Deviation by layer")
    assert len(bars) == 200
    assert bars == sorted(bars, key=lambda bar: -bar[1])


@pytest.mark.parametrize(
    "report",
    [
        EXACT,
        OFF,
        replace(OFF, gradients=()),
        replace(OFF, deviation=math.inf, cuts=(Cut("parts", (1, 1), math.inf),)),
        replace(OFF, gradients=(Gradient("a", 0.0, math.inf), Gradient("b", 1, 0.0))),
        replace(EXACT, gradients=(Gradient("a.b", 1.0, 0.0),)),
        replace(EXACT, gradients=(Gradient("a.b", 1.0, 1e-30),)),
    ],
)
def test_its_elements_are_closed_and_its_bars_are_on_the_page(report: Report) -> None:
    html = page(report)
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    found = re.findall(
        r"(?:width|left|--threshold):([^%;\"]*)%", html.split("<body>")[1]
    )
    assert found
    assert all(0 <= float(share) <= 100 for share in found)
    elsewhere = r"\b(src|href)=|url\(|@import|https?://"
    assert not re.search(elsewhere, html)
    assert "default-src 'none'" in html


def test_names_and_messages_are_no_markup() -> None:
    odd = "</script><img src=x onerror=alert(1)>&{0}.b"
    report = replace(
        OFF,
        cuts=(Cut(odd, (1, 1), 0.5), Cut("single rows", (1, 1), None, odd)),
        causes=(Cause(odd, odd, odd, (odd, f'f("{odd}")')),),
        gradients=(Gradient(odd, 1.0, 0.5),),
        notes=(odd,),
    )
    html = page(report, command=odd)
    assert "<img" not in html
    assert html.count("</script>") == 1
    assert texts(html).count(odd) == 11


def test_it_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "check.html"
    OFF.to_html(path, command="seed=\udcff")  # bytes that are no text
    assert "seed=\\udcff" in path.read_text(encoding="utf-8")
    before = path.read_bytes()
    monkeypatch.setattr(page_module, "framed", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_page(EXACT, path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["check.html"]


@pytest.mark.parametrize("kind", page_module._FOUND_BY)
def test_an_experiment_is_of_a_kind_that_exists(kind: str) -> None:
    sources = inspect.getsource(remedies) + inspect.getsource(of_draws)
    assert f'"{kind}"' in sources
