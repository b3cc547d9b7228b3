"""What `ExactResume` refuses, and what it says is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.helpers import pad, quiet_lightning
from tests.lit.resume.interrupting import FIVE, TRAIN, Dropping, alone, ask, train
from tests.recording import told
from trainkit import (
    EpochSums,
    ExactResume,
    GracefulStop,
    MetricRows,
    RandomState,
    RunCheckpoint,
    TrainkitError,
)

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    # Killed before its first checkpoint, a run begins again.
    pytest.mark.filterwarnings("ignore:.*held the rows of another:UserWarning"),
]
BARE = [*FIVE, "AccumulationCallback", "WindowMonitor"]


@pytest.fixture
def quiet(capsys: pytest.CaptureFixture[str]) -> Any:
    with quiet_lightning():
        yield


# ---- what stands twice ---------------------------------------------------------------


@pytest.mark.parametrize(
    "make", [RandomState, EpochSums, MetricRows, GracefulStop, RunCheckpoint, None]
)
def test_what_it_does_itself_is_refused_beside_it(make: Any, tmp_path: Path) -> None:
    other = make() if make else ExactResume(every_n_train_steps=9)
    text = f"received another {type(other).__name__} beside it"
    with pytest.raises(TrainkitError, match=text):
        train(**alone(tmp_path, others=[other]))


@pytest.mark.parametrize("how", [{"save_last": True}, {"filename": "last"}])
def test_another_that_writes_the_same_file_is_refused(how: Any, tmp_path: Path) -> None:
    """A second one of its kind is refused by Lightning."""
    other = ModelCheckpoint(tmp_path / "checkpoints", **how)
    with pytest.raises(TrainkitError, match="may write .*last.ckpt, and ModelCheckpo"):
        train(**alone(tmp_path, others=[other]))
    elsewhere = ModelCheckpoint(tmp_path / "best", **how)
    train(**alone(tmp_path, others=[elsewhere], max_epochs=1))
    with pytest.raises(RuntimeError, match="one stateful callback of type `ExactRes"):
        pl.Trainer(callbacks=[ExactResume(), ExactResume()])


@pytest.mark.parametrize("value", [0, 1.5])
def test_its_interval_is_checked(value: Any) -> None:
    text = "every_n_train_steps: must be a whole number"
    with pytest.raises(TrainkitError, match=text):
        ExactResume(every_n_train_steps=value)


# ---- what is missing -----------------------------------------------------------------


def complaints(**options: Any) -> list[str]:
    with told("ExactResume: ") as said:
        train(**{"max_epochs": 1, "limit_train_batches": 4, **options})
    return said


def plain_loader() -> Any:
    return DataLoader(TRAIN, 4, collate_fn=pad)  # type: ignore[arg-type]


ANEW = "starts again at its first batch, since it has no load_state_dict"
LOST = "leave out the gradients that a window has summed up so far"
CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], list[str]]] = {
    "nothing": (lambda path: {}, []),
    "loader": (lambda path: {"loader": plain_loader()}, [ANEW]),
    "trial run": (lambda path: {"loader": plain_loader(), "fast_dev_run": 2}, []),
    "windows": (lambda path: {"without": BARE}, [LOST]),
    "no windows": (lambda path: {"without": BARE, "accumulate_grad_batches": 1}, []),
    "numbered folder": (
        lambda path: {"logger": CSVLogger(path)},
        [
            "CSVLogger numbers a new folder at each start",
            "CSVLogger begins its file anew when a run is resumed",
        ],
    ),
    "its own folder": (
        lambda path: {
            "logger": CSVLogger(path),
            "others": [ExactResume(dirpath=path / "mine")],
        },
        ["CSVLogger begins its file anew when a run is resumed"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*many workers")
@pytest.mark.parametrize("name", CASES)
def test_what_is_missing_is_said(name: str, tmp_path: Path) -> None:
    how, expected = CASES[name]
    found = complaints(**{**alone(tmp_path), **how(tmp_path)})
    assert len(found) == len(expected)
    assert all(part in said for part, said in zip(expected, found, strict=True))


def test_a_checkpoint_that_will_be_replaced_is_said(tmp_path: Path) -> None:
    train(**alone(tmp_path, max_epochs=1))
    (said,) = complaints(**alone(tmp_path))
    assert "will replace" in said
    assert complaints(**alone(tmp_path, resume=True, max_epochs=2)) == []


def test_a_thread_that_hears_no_signals_is_said(tmp_path: Path) -> None:
    found: list[str] = []
    run = lambda: found.extend(complaints(**alone(tmp_path)))  # noqa: E731
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(240)
    assert ["not in the main thread" in text for text in found] == [True]


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_hooks_that_lightning_leaves_out_are_said_without_a_window_callback(
    tmp_path: Path,
) -> None:
    class Sets(Dropping):
        def on_train_epoch_start(self) -> None:
            pass

    how: dict[str, Any] = {"kind": Sets, "without": BARE, "accumulate_grad_batches": 1}
    with pytest.raises(SystemExit):
        train(kill=ask("on_train_batch_start", 5), **{**alone(tmp_path), **how})
    with pytest.warns(UserWarning, match="what Sets sets there is missing"):
        train(resume=True, **{**alone(tmp_path), **how})
