"""A run that has finished goes on for longer as if it had been meant to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.training import SMALL, same_weights, the_run, train, weights_of

# 3 optimizer steps an epoch, the last of one batch; a rate that does not depend on how
# long training is.
RUN = [
    *[word for word in SMALL if "max_steps" not in word],
    "data.num_train=14",
    "trainer.accumulate_grad_batches=3",
    "trainer.val_check_interval=7",
    "callbacks.checkpoint.every_n_train_steps=3",  # never at a stop within an epoch
    "scheduler=none",
]


def run_in(where: Path, *words: str, status: int = 0) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["trainkit"])
        assert train(*words, small=[]) == status
    return the_run(where)


def test_it_ends_as_one_long_run(tmp_path: Path) -> None:
    """It stops at the end of an epoch, within one, and at the end of all."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole = run_in(tmp_path / "whole", *RUN, "trainer.max_steps=9")
    where, steps = tmp_path / "parts", "trainer.max_steps="
    run = run_in(where, *RUN, f"{steps}-1", "trainer.max_epochs=1")
    last = f"ckpt_path={run / 'checkpoints' / 'last.ckpt'}"
    run_in(where, last, f"{steps}5", "trainer.max_epochs=null")
    run_in(where, last, f"{steps}-1", "trainer.max_epochs=3")
    assert same_weights(weights_of(run), weights_of(whole))
    rows = (run / "metrics.csv").read_text().splitlines()
    assert rows == (whole / "metrics.csv").read_text().splitlines()


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_metric_is_not_looked_for_where_nothing_is_left_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_in(tmp_path, *RUN, "trainer.max_steps=1")
    nope = ["metric=nope", "callbacks.best=null"]
    run_in(tmp_path, "ckpt_path=last", *nope)
    assert "nope" not in capsys.readouterr().out
    run_in(tmp_path, "ckpt_path=last", *nope, "trainer.max_steps=2", status=2)
    assert "metric: nope is logged by nothing" in capsys.readouterr().err
