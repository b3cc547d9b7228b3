"""What a run leaves: `metrics.csv`, `train.log`, and its noise scale."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.train.test_mistakes import is_one_message
from tests.cli.training import run_dirs, summary_of, the_run, train
from trainkit.cli.main import main
from trainkit.cli.runs.summary import _noise
from trainkit.core.noise.advice import read_noise_scale
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.lit.logs.metric_file import Row, read_rows
from trainkit.lit.noise import NoiseScale


@pytest.fixture(autouse=True)
def _without_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")


def log_of(where: Path) -> list[str]:
    return (the_run(where) / "train.log").read_text().splitlines()


def rows_of(where: Path) -> list[Row]:
    return read_rows(the_run(where) / "metrics.csv")


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    found = capsys.readouterr()
    return [*found.out.splitlines(), *found.err.splitlines()]


def test_a_run_that_has_finished_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may be trained longer; and begun anew, the control, once it is gone."""
    here = f"paths.run_dir={tmp_path / 'run'}"
    assert train(here) == 0
    last = the_run(tmp_path) / "checkpoints" / "last.ckpt"
    saved = last.read_bytes()
    capsys.readouterr()
    assert train(here, "seed=1") == 2
    assert is_one_message("has a run that has finished", capsys.readouterr().err)
    assert last.read_bytes() == saved
    assert train(here, "ckpt_path=auto", "trainer.max_steps=3") == 0
    assert summary_of(the_run(tmp_path))["steps"] == 3
    shutil.rmtree(tmp_path / "run")
    assert train(here) == 0
    assert summary_of(the_run(tmp_path))["steps"] == 2


def test_a_run_has_all_lines_and_a_row_for_each_step_and_a_resumed_one_appends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train("logger=none") == 0
    first = log_of(tmp_path)
    assert sorted(first) == sorted(shown(capsys))
    for text in ("step: per-device", "windows: ", "step 2 of 2: ", "written to: "):
        assert sum(f"trainkit | {text}" in line for line in first) == 1
    where = f"ckpt_path={the_run(tmp_path)}/checkpoints/last.ckpt"
    assert train(where, "trainer.max_steps=3", small=[]) == 0
    whole = log_of(tmp_path)
    assert whole[: len(first)] == first
    assert sorted(whole[len(first) :]) == sorted(shown(capsys))
    assert [row["step"] for row in rows_of(tmp_path)] == ["1", "2", "3"]
    assert train(where, "trainer.max_steps=3", small=[]) == 0  # nothing is left to do
    assert log_of(tmp_path) == whole


def test_a_fault_stands_in_it_and_in_the_summary_and_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "model._target_=tests.cli.training.Breaks"
    assert train(broken, "report=true", "pictures=false") == 1
    lines = log_of(tmp_path)
    assert lines[-1] == "RuntimeError: my own fault"
    assert lines[-1] == shown(capsys)[-1]
    assert lines.count("RuntimeError: my own fault") == 1
    run = the_run(tmp_path)
    assert summary_of(run)["status"] == "failed"
    assert "failed after 1 optimizer step" in (run / "report.html").read_text()


def test_a_mistake_that_shows_while_training_stands_in_it(tmp_path: Path) -> None:
    """One before training leaves no log."""
    wrong = "+callbacks.stop={_target_: lightning.pytorch.callbacks.EarlyStopping,"
    assert train(f"{wrong} monitor: nope, check_on_train_epoch_end: false}}") != 0
    assert "nope" in log_of(tmp_path)[-1]
    assert train("model.width=3", "name=other") == 2
    assert len(run_dirs(tmp_path)) == 1
    assert len(list(tmp_path.rglob("train.log"))) == 1


OWN = "logger.csv.filename=mine.csv"
NO_LOGGER = ["logger=none", "+trainer.logger=false", "report=true", "pictures=false"]


@pytest.mark.parametrize("words", [["logger=several", OWN], NO_LOGGER])
def test_each_run_has_one_row_for_each_step(words: list[str], tmp_path: Path) -> None:
    """Also beside a file of one's own, or if the Trainer is told to have no logger."""
    assert train(*words) == 0
    run, found = the_run(tmp_path), rows_of(tmp_path)
    assert [row["step"] for row in found] == ["1", "2"]
    for name in ("window/loss", "window/grad_norm", "lr-AdamW", "epoch", "val/loss"):
        assert all(name in row for row in found)
    assert (run / "report.html").exists() == (words is NO_LOGGER)
    if OWN in words:
        assert read_rows(run / "mine.csv") == found


def test_a_try_of_a_few_batches_has_neither_rows_nor_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning's fast_dev_run has no loggers."""
    assert train("trainer.fast_dev_run=true") == 0
    names = {path.name for path in the_run(tmp_path).iterdir()}
    assert not names & {"metrics.csv", "report.html"}
    assert "report" not in capsys.readouterr().out


def test_tensorboard_has_the_same_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train("logger=tensorboard", "metric=window/loss") == 0
    run = the_run(tmp_path)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    for name in ("window/loss", "lr-AdamW", "val/loss"):
        assert [each.step for each in events.Scalars(name)] == [1, 2]
    # The window is a metric, of the last one; and best.ckpt goes by it.
    last = rows_of(tmp_path)[-1]
    assert summary_of(run)["metrics"]["window/loss"] == float(last["window/loss"])
    assert (run / "checkpoints" / "best.ckpt").exists()


# ---- the noise scale: in `summary.json`, the table and the report --------------------


DRAWN = ["report=true", "pictures=false"]
FEW = ["~callbacks.noise_scale", "data.batch_size=2", "trainer.max_steps=4"]


class Given(NoiseScale):
    """Logs one noise scale in the rows of every second step.

    Args:
        samples: the noise scale; its interval is 30 % wide on either side.
        why_not: why there is none.
        bounded: whether the interval has an upper end.
    """

    def __init__(
        self, samples: float = 0, why_not: str | None = None, bounded: bool = True
    ) -> None:
        super().__init__()
        self.why_not, self._samples, self._bounded = why_not, samples, bounded
        self._seen = 0

    @property
    def estimate(self) -> NoiseEstimate | None:  # type: ignore[override]
        if not self._samples:
            return None
        high = self._samples * 1.3 if self._bounded else float("inf")
        ends = (self._samples / 1.3, high)
        return NoiseEstimate(self._samples, *ends, 8.0, 100.0, 10 * self._seen)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.show_table(trainer, pl_module)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[tuple[str, str]]:
        return super().table_rows(trainer, pl_module) if self.why_not else []

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        self._seen += 1
        if self._seen % 2 == 0 and self._samples:
            found = {"window/noise_scale": self._samples}
            trainer.loggers[0].log_metrics(found, step=trainer.global_step + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen = state_dict["windows"]


def given(**values: Any) -> str:
    pairs = "".join(f", {name}: {value}" for name, value in values.items())
    return f"+callbacks.noise={{_target_: tests.cli.train.test_files.Given{pairs}}}"


def test_the_lines_are_everywhere_and_a_resumed_run_continues_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(given(samples=10), *FEW, "trainer.max_steps=2") == 0
    run = the_run(tmp_path)
    assert summary_of(run)["noise_scale"]["num_windows"] == 20
    capsys.readouterr()
    assert train("ckpt_path=last", *DRAWN, "trainer.max_steps=4", small=[]) == 0
    out = capsys.readouterr().out
    facts = summary_of(run)
    assert NoiseEstimate.of_facts(facts["noise_scale"]) == read_noise_scale(run)
    assert facts["noise_scale"]["num_windows"] == 40
    assert [label for label, _ in facts["advice"]] == ["noise scale", "window of 8"]
    (run / "report.html").unlink()  # drawn again, it has them too
    assert main(["report", "--no-pictures", str(run)]) == 0
    page = (run / "report.html").read_text()
    for label, text in facts["advice"]:
        assert f"trainkit | {label}: {text}" in out
        assert label in page
    assert "10 samples (7.69 to 13, 90 %), 1,000 tokens (769 to 1,300, 90 %)" in page
    assert "near the noise scale, so keep it: twice as large takes" in page


def test_what_could_not_measure_says_why_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "a window has one micro-batch"
    assert train(given(why_not=f"'{why}'"), *FEW, *DRAWN, "trainer.max_steps=1") == 0
    said = f"trainkit | noise scale: not measured: {why}"
    out = capsys.readouterr().out
    assert out.count(said) == 1  # before training, and not again
    assert out.index(said) < out.index("training: finished")
    assert why in (the_run(tmp_path) / "report.html").read_text()


@pytest.mark.parametrize(
    ("callbacks", "number", "said"),
    [
        ([], None, []),
        ([Given(why_not="why")], None, ["not measured: why"]),
        ([Given()], None, ["no estimate: it takes 50 steps or more"]),
        ([Given(50, bounded=False)], 50, ["at least 38.5 samples", "window of 8"]),
        ([Given(50)], 50, ["50 samples (38.5 to 65, 90 %)", "window of 8"]),
    ],
)
def test_the_summary_has_the_number_or_why_there_is_none(
    callbacks: list[Any], number: float | None, said: list[str]
) -> None:
    found = _noise(SimpleNamespace(callbacks=callbacks, global_step=1))
    assert (found["noise_scale"] or {}).get("samples") == number
    lines = [": ".join(line) for line in found["advice"]]
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True))
    is_open = bool(number) and found["noise_scale"]["high"] is None
    assert is_open == any("at least" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "lr_scaling.noise_scale: must be given. Add lr_scaling.noise_scale=..."),
        (["lr_scaling.noise_scale=run"], "number of samples, .* received 'run'"),
        (["lr_scaling.noise_scale=0"], "must be a positive number of samples"),
        (["lr_scaling.noise_scale=9"], None),  # the control
    ],
)
def test_a_wrong_noise_scale_is_refused_and_leaves_no_run(
    tmp_path: Path,
    words: list[str],
    said: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gain = ["lr_scaling=gain", "lr_scaling.reference_batch=2", "scheduler=none"]
    status = train(*gain, "trainer.max_steps=1", *words)
    out, err = capsys.readouterr()
    if said is None:
        assert status == 0
        assert "noise scale 9, reference 2)" in out
    else:
        assert status == 2
        assert re.search(said, err)
        assert run_dirs(tmp_path) == []
