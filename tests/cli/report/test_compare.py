"""Several runs in one page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.report.runs import drawn, legends, run_folder, titles
from trainkit.cli.main import main

EVIL = "</script><b>&{0}"


def made(path: Path, config: Mapping[str, Any] | None = None, loss: float = 2) -> Path:
    rows = [{"step": n, "window/loss": loss + n, "val/loss": loss} for n in range(3)]
    run_folder(path, rows)
    if config is not None:
        whole = {**config, "paths": {"run_dir": str(path)}, "save": f"{path}/x"}
        (path / "config.yaml").write_text(yaml.safe_dump(whole))
        (path / "overrides.yaml").write_text("[]")
    return path


def page_of(*words: object, to: Path) -> str:
    assert main(["report", *map(str, words), "--to", str(to)]) == 0
    return to.read_text(encoding="utf-8")


def table(page: str) -> dict[str, list[str]]:
    """The table's rows, by their heads."""
    found = re.search(r'<table class="runs">(.*?)</table>', page, re.DOTALL)
    assert found is not None
    rows = re.findall(r"<tr><th[^>]*>(.*?)</th>(.*?)</tr>", found[1])
    return {
        re.sub("<.*?>", "", head): [
            unescape(re.sub("<.*?>", "", cell))
            for cell in re.findall(r"<td.*?>(.*?)</td>", cells)
        ]
        for head, cells in rows
    }


def test_a_line_for_each_run_and_a_table_of_what_differs(tmp_path: Path) -> None:
    one = made(tmp_path / "one", {"model": {"width": 4}, "lr": 0.1, "seed": 0}, loss=2)
    two = made(tmp_path / "two", {"model": {"width": 8}, "seed": 0, "name": EVIL})
    page = page_of(one, two, to=tmp_path / "page.html")
    assert titles(page) == ["Loss: window/loss", "Loss: val/loss"]
    for chart in legends(page).values():
        assert [label.split(":")[0] for label in chart] == ["one", "two"]
    for title in titles(page):
        assert len(drawn(page, title)) == 2
    assert table(page) == {
        "": ["one", "two"],
        "model.width": ["4", "8"],
        "lr": ["0.1", "–"],
        "name": ["–", EVIL],
        "training": ["has not ended, or was killed; its last row is of step 2"] * 2,
    }
    assert EVIL not in page
    assert escape(EVIL) in page


def test_equal_configurations_are_called_equal(tmp_path: Path) -> None:
    """The folders of the runs are no difference."""
    runs = [made(tmp_path / name, {"seed": 0}) for name in "ab"]
    page = page_of(*runs, to=tmp_path / "page.html")
    assert "Their configurations are equal." in page
    assert list(table(page)) == ["", "training"]
    other = made(tmp_path / "c", {"seed": 1})  # the control
    page = page_of(*runs, other, to=tmp_path / "page.html")
    assert "are equal" not in page


@pytest.mark.parametrize("count", [3, 4])
def test_many_bands_would_hide_each_other(count: int, tmp_path: Path) -> None:
    for name in range(count):
        rows = [{"step": n, "val/loss": n % 5} for n in range(1500)]
        run_folder(tmp_path / str(name), rows)
    paths = [tmp_path / str(name) for name in range(count)]
    page = page_of(*paths, to=tmp_path / "page.html")
    assert page.count("fill-opacity: 0.25") == (2 * 3 if count == 3 else 0)
    said = "Lines of up to 1,500 values are shown as the mean of each stretch of steps"
    assert said + (" in a band" if count == 3 else ".") in page


def test_metrics_stand_beside(tmp_path: Path) -> None:
    runs = [made(tmp_path / n, {"seed": i}, loss=i) for i, n in enumerate("abcde")]
    page = page_of(*runs, to=tmp_path / "page.html")
    rows = table(page)  # more than four runs are rows
    assert rows[""] == ["seed", "training", "val/loss"]
    assert [rows[name][2] for name in "abcde"] == [f"{n} at step 2" for n in range(5)]


def test_runs_with_other_units_share_no_chart(tmp_path: Path) -> None:
    for unit in ("tokens", "samples", "more"):
        rows = [{"step": 1, "window/weight": 8, "acc": 1}]
        run_folder(tmp_path / unit, rows)
        plan = json.dumps({"unit": unit.replace("more", "samples")})
        (tmp_path / unit / "learning_rate_plan.json").write_text(plan)
    page = page_of(tmp_path, to=tmp_path / "page.html")
    shown = {title: list(lines) for title, lines in legends(page).items()}
    assert shown["Window weight, in tokens"] == ["tokens"]
    assert shown["Window weight, in samples"] == ["more", "samples"]
    assert shown["acc"] == ["more", "samples", "tokens"]  # the control


def test_many_differences_are_folded_away(tmp_path: Path) -> None:
    one = made(tmp_path / "a", {f"k{n}": 0 for n in range(16)})
    two = made(tmp_path / "b", {f"k{n}": 1 for n in range(16)})
    page = page_of(one, two, to=tmp_path / "page.html")
    assert "<summary>16 values of their configurations differ</summary>" in page
    assert list(table(page)) == ["", "training"]


def test_the_folder_of_a_multirun_stands_for_its_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 2, 10):
        made(tmp_path / "multi" / str(number), {"seed": number})
    crashed = tmp_path / "multi" / "3"
    crashed.mkdir()
    (crashed / "overrides.yaml").write_text("[]")
    other = made(tmp_path / "other" / "2", {"seed": 5})
    page = page_of(tmp_path / "multi", other, to=tmp_path / "page.html")
    assert table(page)[""] == ["multi/0", "multi/2", "multi/10", "other/2"]
    assert f"Left out: {crashed} (no metrics.csv)" in page
    assert f"left out: {crashed} (no metrics.csv)" in capsys.readouterr().out


def test_the_page_is_written_here_unless_it_is_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        made(tmp_path / name)
    assert main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out == (
        f"trainkit | report: 2 runs in {tmp_path / 'runs.html'}\n"
    )
    assert not list(tmp_path.rglob("report.html"))


def test_numbers_of_a_run_that_ended_are_from_its_summary(tmp_path: Path) -> None:
    runs = [made(tmp_path / name, {"seed": 0}) for name in "ab"]
    facts = {"status": "finished", "steps": 3, "metrics": {"test/acc": 0.5}}
    facts |= {"windows": {}, "micro_batching": None, "versions": {}}
    facts |= {"learning_rates": [], "plain_accumulation": None}
    (runs[0] / "summary.json").write_text(json.dumps(facts))
    rows = table(page_of(*runs, to=tmp_path / "page.html"))
    assert rows["training"][0] == "finished after 3 optimizer steps"
    assert rows["test/acc"] == ["0.5", "–"]
