"""What a run says of its noise scale: in `summary.json`, the table and the report."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.training import run_dirs, summary_of, the_run, train
from trainkit.cli.main import main
from trainkit.cli.runs.summary import _noise
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.core.noise.from_run import read_noise_scale
from trainkit.lit.noise.callback import NoiseScale

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
        self,
        samples: float = 0,
        why_not: str | None = None,
        bounded: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.why_not, self._samples, self._bounded = why_not, samples, bounded
        self._seen = 0

    @property
    def estimate(self) -> NoiseEstimate | None:  # type: ignore[override]
        if not self._samples:
            return None
        ends = (self._samples / 1.3, self._samples * 1.3)
        if not self._bounded:
            ends = (ends[0], float("inf"))
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
    return f"+callbacks.noise={{_target_: tests.cli.train.test_noise.Given{pairs}}}"


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


GAIN = [
    "lr_scaling=gain",
    "lr_scaling.reference_batch=2",
    "scheduler=none",
    "trainer.log_every_n_steps=1",
]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (GAIN, "lr_scaling.noise_scale: must be given. Add lr_scaling.noise_scale=..."),
        ([*GAIN, "lr_scaling.noise_scale=run"], "number of samples, .* received 'run'"),
        ([*GAIN, "lr_scaling.noise_scale=0"], "must be a positive number of samples"),
    ],
)
def test_a_wrong_line_is_refused_and_leaves_no_run(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(*words) == 2
    assert re.search(said, capsys.readouterr().err)
    assert run_dirs(tmp_path) == []


def test_a_number_is_that_of_the_rates(capsys: pytest.CaptureFixture[str]) -> None:
    """The control of what is refused."""
    assert train(*GAIN, "lr_scaling.noise_scale=9", "trainer.max_steps=1") == 0
    assert "noise scale 9, reference 2)" in capsys.readouterr().out
