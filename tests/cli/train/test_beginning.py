"""A run that goes on: what it may change, and what leaves it as it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.training import SMALL, run_dirs, summary_of, the_run, train
from trainkit.cli.runs.only_one import only_one

TEXTS = ("config.yaml", "overrides.yaml", "summary.json", "metrics.csv")


def texts(run: Path) -> dict[str, str]:
    return {name: (run / name).read_text() for name in TEXTS}


def go_on(*overrides: str, at: Path | None = None) -> int:
    """From the newest run, or the one in a given folder, which is found sooner."""
    where = at / "checkpoints" / "last.ckpt" if at else "last"
    return train(f"ckpt_path={where}", *overrides, small=[])


def test_what_trains_no_step_leaves_the_run_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train() == 0
    run = the_run(tmp_path)
    before = texts(run)

    def is_refused(status: int, text: str) -> bool:
        shown = capsys.readouterr().err
        assert text in shown
        assert len(shown.splitlines()) <= 2
        return status == 2 and texts(run) == before

    longer = "trainer.max_steps=3"
    status = go_on(longer, "model.d_model=16", at=run)
    assert is_refused(status, "size mismatch for token.weight")
    with only_one(run, what="a run"):  # it is under way
        assert is_refused(go_on(longer, at=run), "paths.run_dir: ")

    (tmp_path / "no.ckpt").write_text("this is no checkpoint")
    status = train("ckpt_path=no.ckpt")
    assert is_refused(status, "must be a readable checkpoint, received ")
    cut_off = (run / "checkpoints" / "last.ckpt").read_bytes()[:-100]
    (tmp_path / "no.ckpt").write_bytes(cut_off)
    assert is_refused(train("ckpt_path=no.ckpt"), "no.ckpt, which is damaged or no")
    assert run_dirs(tmp_path) == [run], "what was refused has no folder"

    capsys.readouterr()
    for words in ([], ["trainer.max_steps=1"]):  # it has finished, and says so
        assert go_on(*words, at=run) == 0
        shown = capsys.readouterr().out
        assert "the run had finished after 2 optimizer steps" in shown
        assert "with a larger trainer.max_steps, max_epochs or max_time" in shown
        assert texts(run) == before

    # One that came to nothing is not the last; and no change is inherited.
    assert go_on(longer, "trainer.accumulate_grad_batches=2") == 0
    assert "2 x accumulation 2" in capsys.readouterr().out
    assert summary_of(run)["steps"] == 3
    assert texts(run) != before  # the control


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
    assert go_on("trainer.max_steps=3", at=run) == 0
    assert summary_of(run)["steps"] == 3
    assert go_on("--config-dir=my conf", "trainer.max_steps=4") == 0
    assert summary_of(run)["steps"] == 4


def test_a_configuration_of_ones_own_goes_on_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(
        "defaults: [train, _self_]\nname: my\n"
    )
    assert train("--config-dir=conf", "--config-name=mine") == 0
    run = the_run(tmp_path)
    assert run.parent.name == "my"
    named = ["--config-dir=conf", "--config-name=mine"]
    assert go_on(*named, "trainer.max_steps=3") == 0
    assert go_on("trainer.max_steps=4", at=run) == 0
    assert summary_of(run)["steps"] == 4
