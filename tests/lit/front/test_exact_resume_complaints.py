"""What `ExactResume` refuses, and what it says is missing."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.helpers import pad, quiet_lightning
from tests.lit.resume.interrupting import (
    FIVE,
    TRAIN,
    Dropping,
    alone,
    ask,
    train,
)
from trainkit import (
    EpochSums,
    ExactResume,
    GracefulStop,
    MetricRows,
    RandomState,
    ResumableLoader,
    RunCheckpoint,
    TrainkitError,
)
from trainkit.lit.resume.worker_draws import draws_in_workers

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    # Killed before its first checkpoint, a run begins again.
    pytest.mark.filterwarnings("ignore:.*held the rows of another:UserWarning"),
]


@pytest.fixture
def quiet(capsys: pytest.CaptureFixture[str]) -> Any:
    with quiet_lightning():
        yield


# ---- what stands twice ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (RandomState, "RandomState"),
        (EpochSums, "EpochSums"),
        (MetricRows, "MetricRows"),
        (GracefulStop, "GracefulStop"),
        (RunCheckpoint, "RunCheckpoint"),
        (lambda: ExactResume(every_n_train_steps=9), "ExactResume"),
    ],
)
def test_what_it_does_itself_is_refused_beside_it(
    make: Callable[[], Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainkitError, match=f"received another {name} beside it"):
        train(**alone(tmp_path, others=[make()]))


def test_a_second_one_is_refused_by_lightning() -> None:
    with pytest.raises(RuntimeError, match="one stateful callback of type `ExactRes"):
        pl.Trainer(callbacks=[ExactResume(), ExactResume()])


@pytest.mark.parametrize("how", [{"save_last": True}, {"filename": "last"}])
def test_another_that_writes_the_same_file_is_refused(
    how: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    other = ModelCheckpoint(folder, **how)
    with pytest.raises(TrainkitError, match="may write .*last.ckpt, and ModelCheckpo"):
        train(**alone(tmp_path, others=[other]))
    elsewhere = ModelCheckpoint(tmp_path / "best", **how)
    train(**alone(tmp_path, others=[elsewhere], max_epochs=1))


# ---- what is missing -----------------------------------------------------------------


def complaints(**options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(**{"max_epochs": 1, "limit_train_batches": 4, **options})
    said = [str(each.message) for each in caught]
    return [text for text in said if text.startswith("ExactResume: ")]


class Noisy:
    """Rows with noise, drawn from all of Python's generators or from the row's own."""

    def __init__(self, is_seeded: bool) -> None:
        self.is_seeded = is_seeded

    def __len__(self) -> int:
        return len(TRAIN)

    def __getitem__(self, index: int) -> Any:
        draw = random.Random(index) if self.is_seeded else random
        return TRAIN[index][draw.randrange(1) :]


def noisy_collate(sequences: Any) -> Any:
    torch.rand(1)
    return pad(sequences)


def test_nothing_is_missing_where_all_is_there(tmp_path: Path) -> None:
    assert complaints(**alone(tmp_path)) == []


@pytest.mark.parametrize(
    ("rows_of", "collate", "num_workers", "is_said"),
    [
        (Noisy(is_seeded=False), pad, 1, True),
        (TRAIN, noisy_collate, 1, True),
        (Noisy(is_seeded=False), pad, 0, False),  # RandomState keeps these
        (Noisy(is_seeded=True), pad, 1, False),
    ],
    ids=["rows", "collating", "no-workers", "seeded-by-row"],
)
def test_workers_that_draw_are_said(
    rows_of: Any, collate: Any, num_workers: int, is_said: bool, tmp_path: Path
) -> None:
    loader = ResumableLoader(
        rows_of, 4, collate_fn=collate, num_workers=num_workers, seed=5
    )
    before = torch.get_rng_state()
    assert draws_in_workers(loader) == is_said
    assert torch.equal(before, torch.get_rng_state())
    found = complaints(**alone(tmp_path, loader=loader))
    assert ["worker processes draw" in text for text in found] == [True] * is_said


@pytest.mark.filterwarnings("ignore:.*many workers")
def test_a_loader_that_starts_again_is_said(tmp_path: Path) -> None:
    loader = DataLoader(TRAIN, 4, collate_fn=pad)  # type: ignore[arg-type]
    (said,) = complaints(**alone(tmp_path, loader=loader))
    assert "starts again at its first batch, since it has no load_state_dict" in said


def test_windows_that_nobody_saves_are_said(tmp_path: Path) -> None:
    bare = [*FIVE, "AccumulationCallback", "WindowMonitor"]
    (said,) = complaints(**{**alone(tmp_path), "without": bare})
    assert "leave out the gradients that a window has summed up so far" in said
    how = {**alone(tmp_path / "one"), "without": bare}
    assert complaints(**how, accumulate_grad_batches=1) == []


def test_a_folder_that_is_numbered_anew_is_said(tmp_path: Path) -> None:
    def logger() -> CSVLogger:
        return CSVLogger(tmp_path)

    numbered, begins = complaints(**alone(tmp_path, logger=logger()))
    assert "CSVLogger numbers a new folder at each start" in numbered
    assert "CSVLogger begins its file anew when a run is resumed" in begins
    own = {"without": FIVE, "others": [ExactResume(dirpath=tmp_path / "mine")]}
    (said,) = complaints(folder=tmp_path, logger=logger(), **own)
    assert said == begins


def test_a_checkpoint_that_will_be_replaced_is_said(tmp_path: Path) -> None:
    train(**alone(tmp_path, max_epochs=1))
    (said,) = complaints(**alone(tmp_path))
    assert "will replace" in said
    assert complaints(**alone(tmp_path, resume=True, max_epochs=2)) == []


def test_a_thread_that_hears_no_signals_is_said(tmp_path: Path) -> None:
    found: list[str] = []

    def run() -> None:
        found.extend(complaints(**alone(tmp_path)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(240)
    assert ["not in the main thread" in text for text in found] == [True]


def test_a_trial_run_complains_of_nothing(tmp_path: Path) -> None:
    loader = DataLoader(TRAIN, 4, collate_fn=pad)  # type: ignore[arg-type]
    assert complaints(**alone(tmp_path, loader=loader, fast_dev_run=2)) == []


@pytest.mark.parametrize("value", [0, 1.5])
def test_its_interval_is_checked(value: Any) -> None:
    with pytest.raises(
        TrainkitError, match="every_n_train_steps: must be a whole number"
    ):
        ExactResume(every_n_train_steps=value)


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_hooks_that_lightning_leaves_out_are_said_without_a_window_callback(
    tmp_path: Path,
) -> None:
    class Sets(Dropping):
        def on_train_epoch_start(self) -> None:
            pass

    def how(**more: Any) -> dict[str, Any]:
        bare = [*FIVE, "AccumulationCallback", "WindowMonitor"]
        one = {"accumulate_grad_batches": 1, "kind": Sets, "without": bare}
        return {**alone(tmp_path), **one, **more}

    with pytest.raises(SystemExit):
        train(kill=ask("on_train_batch_start", 5), **how())
    with pytest.warns(UserWarning, match="what Sets sets there is missing"):
        train(**how(resume=True))
