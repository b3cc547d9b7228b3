"""A run that goes on: what it may change, and what leaves it as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.training import SMALL, run_dirs, summary_of, the_run, train
from trainkit.cli.runs.only_one import only_one
from trainkit.config import allow_targets

allow_targets("tests")

TEXTS = ("config.yaml", "overrides.yaml", "summary.json", "metrics.csv")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])


def texts(run: Path) -> dict[str, str]:
    return {name: (run / name).read_text() for name in TEXTS}


def go_on(*overrides: str) -> int:
    return train("ckpt_path=last", *overrides, small=[])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("model.d_model=16", "size mismatch for token.weight"),
        (
            "optimizer=sgd",
            "optimizer: must be of the type that the checkpoint was written with, "
            "received SGD",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_run_as_it_was(
    change: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    run = the_run(tmp_path)
    before = texts(run)
    assert go_on("trainer.max_steps=5", change) == 2
    shown = capsys.readouterr().err
    assert text in shown
    assert len(shown.splitlines()) <= 2
    assert texts(run) == before
    assert go_on("trainer.max_steps=5") == 0  # which does not inherit the change
    assert summary_of(run)["steps"] == 5
    assert texts(run) != before  # the control


def test_a_finished_run_says_so_and_stays_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    run = the_run(tmp_path)
    before = texts(run)
    for words in ([], [], ["trainer.max_steps=3"]):
        assert go_on(*words) == 0
        shown = capsys.readouterr().out
        assert "the run had finished after 4 optimizer steps" in shown
        assert "trainer.max_steps=8" in shown
        assert texts(run) == before
    assert go_on("trainer.max_steps=6", "trainer.accumulate_grad_batches=2") == 0
    assert "2 x accumulation 2" in capsys.readouterr().out
    assert summary_of(run)["steps"] == 6


def test_a_run_that_came_to_nothing_is_not_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    run = the_run(tmp_path)
    (tmp_path / "no.ckpt").write_text("this is no checkpoint")
    assert train("ckpt_path=no.ckpt") == 2
    assert (
        "no.ckpt does not fit this configuration, or is not" in capsys.readouterr().err
    )
    assert len(run_dirs(tmp_path)) == 2
    assert go_on("trainer.max_steps=5") == 0
    assert summary_of(run)["steps"] == 5


def test_files_of_ones_own_need_not_be_named_again(tmp_path: Path) -> None:
    groups = tmp_path / "my conf"
    (groups / "model").mkdir(parents=True)
    (groups / "model" / "mine.yaml").write_text(
        "_target_: tests.cli.train.test_main.Foreign\nwidth: 3\n"
    )
    words = [word for word in SMALL if not word.startswith("model.")]
    own = ["model=mine", "optimizer=none", "scheduler=none"]
    assert train("--config-dir=my conf", *own, *words, small=[]) == 0
    run = the_run(tmp_path)
    assert go_on("trainer.max_steps=5") == 0
    assert summary_of(run)["steps"] == 5
    assert go_on("--config-dir=my conf", "trainer.max_steps=6") == 0
    assert summary_of(run)["steps"] == 6


def test_a_configuration_of_ones_own_goes_on_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [train, _self_]\nname: my\n"
    )
    assert train("--config-dir=conf", "--config-name=mine") == 0
    run = the_run(tmp_path)
    assert run.parent.name == "my"
    named = ["--config-dir=conf", "--config-name=mine"]
    assert go_on(*named, "trainer.max_steps=5") == 0
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert train(f"ckpt_path={checkpoint}", "trainer.max_steps=6", small=[]) == 0
    assert summary_of(run)["steps"] == 6


def test_a_run_under_way_is_nobody_elses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    run = the_run(tmp_path)
    before = texts(run)
    with only_one(run, what="a run"):
        assert go_on("trainer.max_steps=6") == 2
        assert "paths.run_dir: " in capsys.readouterr().err
        assert texts(run) == before
    assert go_on("trainer.max_steps=6") == 0
