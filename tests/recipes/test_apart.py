"""How far apart runs ended, read from the folders that they leave."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.apart import main, weights_at_end, weights_at_start
from tests.recipes.debugging import small

SMALL = [*small("completions"), "trainer.max_steps=2", "callbacks.plain=null"]
SMALL += ["trainer.accumulate_grad_batches=4"]


@pytest.mark.filterwarnings("ignore:CompletionLM. its own strategy PerToken")
@pytest.mark.filterwarnings("ignore:proof. a window:UserWarning")  # of the control
def test_a_run_is_compared_with_the_first(
    run_train: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = ["data.batch_size=16", "trainer.accumulate_grad_batches=1"]
    big = run_train(*SMALL, *one, "trainer.val_check_interval=2", name="big")
    ours = [*SMALL, "data.batch_size=4"]
    cut = run_train(*ours, name="cut")
    uniform = run_train(*ours, "accumulation=uniform", name="uniform")
    assert not weights_at_start(big).equal(weights_at_end(big))
    assert weights_at_start(big).equal(weights_at_start(cut))
    monkeypatch.setattr(sys, "argv", ["apart.py", *map(str, (big, cut, uniform))])
    capsys.readouterr()
    main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["big", "cut", "uniform"]
    assert rows[0][4].strip() == ""
    assert float(rows[1][4]) < 1e-2  # AdamW divides by the gradient's own size
    assert rows[2][4].strip().endswith("%")
