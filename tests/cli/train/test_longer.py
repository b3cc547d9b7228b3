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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("whole")
    return run_in(where, *RUN, "trainer.max_steps=9")


@pytest.mark.parametrize(
    ("limit", "stops"),
    [
        ("max_steps", [3, 5, 9]),  # at the end of an epoch, and within one
        ("max_epochs", [1, 3]),
    ],
)
def test_it_ends_as_one_long_run(
    limit: str, stops: list[int], whole: Path, tmp_path: Path
) -> None:
    endless = ["trainer.max_steps=-1"] if limit == "max_epochs" else []
    first, *others = [f"trainer.{limit}={stop}" for stop in stops]
    run = run_in(tmp_path, *RUN, *endless, first)
    for each in others:
        run_in(tmp_path, f"ckpt_path={run / 'checkpoints' / 'last.ckpt'}", each)
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
