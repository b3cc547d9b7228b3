"""A run that has finished goes on for longer as if it had been meant to."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.training import SMALL, same_weights, the_run, train, weights_of

# 7 optimizer steps an epoch; a rate that does not depend on how long training is.
RUN = [
    *[word for word in SMALL if "max_steps" not in word],
    "data.num_train=42",
    "trainer.accumulate_grad_batches=3",
    "trainer.val_check_interval=7",
    "scheduler=none",
]


def run_in(where: Path, *words: str) -> Path:
    where.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setattr(sys, "argv", ["trainkit"])
        assert train(*words, small=[]) == 0
    return the_run(where)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("whole")
    return run_in(where, *RUN, "trainer.max_steps=21")


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("max_steps=5", "max_steps=21"),  # within an epoch
        ("max_steps=7", "max_steps=21"),  # at the end of one
        ("max_steps=14", "max_steps=21"),
        ("max_epochs=1", "max_epochs=3"),
        ("max_epochs=2", "max_epochs=3"),
    ],
)
def test_it_ends_as_one_long_run(
    first: str, then: str, whole: Path, tmp_path: Path
) -> None:
    endless = ["trainer.max_steps=-1"] if "epochs" in first else []
    run_in(tmp_path, *RUN, *endless, f"trainer.{first}")
    run = run_in(tmp_path, "ckpt_path=last", f"trainer.{then}")
    assert same_weights(weights_of(run), weights_of(whole))
    rows = (run / "metrics.csv").read_text().splitlines()
    assert rows == (whole / "metrics.csv").read_text().splitlines()
