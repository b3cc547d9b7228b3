"""The lines on a terminal, against what a real terminal shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress
from tqdm import tqdm

from trainkit.cli.runs.screen_text import ScreenText


def lines(*texts: str) -> list[str]:
    screen = ScreenText()
    for text in texts:
        screen.write(text)
    return [line.rstrip() for line in screen.lines]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two", ""]),
        ("10 %\r20 %\r30 %\ndone\n", ["30 %", "done", ""]),
        ("a long line\rshort\n", ["shortg line", ""]),  # as a terminal does
        ("a long line\r\x1b[2Kshort\n", ["short", ""]),
        ("a long line\r\x1b[Kshort\n", ["short", ""]),
        ("\x1b[1;31mred\x1b[0m or \x1b]8;;x\x1b\\link\x1b]8;;\x1b\\", ["red or link"]),
        ("one\ntwo\x1b[1A\r\x1b[2KONE\n\n", ["ONE", "two", ""]),
        ("one\ntwo\n\x1b[2A\x1b[Jnew\n", ["new", ""]),
        ("ab\bc\n", ["ac", ""]),
    ],
)  # fmt: skip
def test_text_and_codes(text: str, expected: list[str]) -> None:
    assert lines(text) == expected
    assert lines(*text) == expected  # also if it comes letter by letter


def test_a_bar_of_rich_leaves_its_last_state() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with Progress(console=console) as bar:
        task = bar.add_task("step", total=50)
        for _ in range(50):
            bar.advance(task)
            bar.refresh()
        bar.print("between")
    found = lines(out.getvalue())
    assert len(found) == 3
    assert found[0] == "between"
    assert "100%" in found[1]
    assert out.getvalue().count("step") > 50  # so many there were


def test_nested_bars_of_tqdm_leave_their_last_states() -> None:
    out = io.StringIO()
    with tqdm(total=5, file=out, mininterval=0, desc="outer", ncols=60) as outer:
        for _ in range(5):
            how = {"desc": "inner", "position": 1, "leave": False}
            inner = tqdm(total=9, file=out, mininterval=0, **how)
            for _ in range(9):
                inner.update()
            inner.close()
            outer.update()
    found = [line for line in lines(out.getvalue()) if line]
    assert len(found) <= 2
    assert "5/5" in found[0]


def test_lines_above_the_last_ones_are_given_away_once() -> None:
    screen = ScreenText()
    screen.write("".join(f"{number}\n" for number in range(30)))
    assert screen.take(20) == [str(number) for number in range(11)]
    assert screen.take(20) == []
    screen.write("30\n")
    assert screen.take(20) == ["11"]
