"""A run with `ExactResume` alone ends as it would have without an interruption; what it
refuses, and what it says is missing."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old_pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.helpers import loader, quiet_lightning, trainer
from tests.lit.resume.interrupting import (
    TRAIN,
    Dropping,
    KillAt,
    Killed,
    ask,
    close,
    differing,
    rows,
    shuffled,
    state_of,
    train,
)
from tests.zoo.callbacks import SENT, told
from tests.zoo.modules import old_trainer
from trainkit import (
    AccumulationCallback,
    ExactResume,
    MetricsCSVLogger,
    PerToken,
    TrainkitError,
)
from trainkit.lit.front.exact_resume import add_exact_resume, find_stop

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    # Killed before its first checkpoint, a run begins again.
    pytest.mark.filterwarnings("ignore:.*held the rows of another:UserWarning"),
]


WITHOUT: dict[str, Any] = {"without": ["ExactResume"]}
BARE = {"without": ["AccumulationCallback", "WindowMonitor"]}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Any:
    with quiet_lightning():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state and the rows of the run that nobody interrupted, without callbacks
    that save anything."""
    folder = tmp_path_factory.mktemp("whole")
    return state_of(*train(folder, **WITHOUT)), rows(folder)


def is_whole(whole: Any, found: Any, folder: Path) -> bool:
    """Whether a run has ended as the whole one, to the bit, with the same rows."""
    state = differing(whole[0], state_of(*found))
    return not state and not close(whole[1], rows(folder))


def test_without_it_the_resumed_run_differs(whole: Any, tmp_path: Path) -> None:
    """Negative control: Lightning's own checkpoint of the very same place."""

    def run(**how: Any) -> Any:
        last: dict[str, Any] = {"save_last": True, "save_top_k": 0}
        saver = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, **last)
        return train(tmp_path, **WITHOUT, others=[saver], **how)

    with pytest.raises(Killed):
        run(kill=KillAt("on_train_batch_start", 6))
    found = run(resume=True)
    assert ".weights.net.head.weight" in differing(whole[0], state_of(*found))
    assert close(whole[1], rows(tmp_path)) != []


@pytest.mark.parametrize("package", [pl, old_pl], ids=lambda each: each.__name__)
def test_last_is_found_in_both_namespaces(package: Any, tmp_path: Path) -> None:
    class Module(package.LightningModule):
        training_step, _loss = Dropping.training_step, Dropping._loss
        configure_optimizers = Dropping.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.net, self.scheduler = Dropping().net, "step"

    class Asks(package.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 4:
                signal.raise_signal(signal.SIGTERM)

    def fitted(folder: Path, *others: Any, **how: Any) -> Any:
        torch.manual_seed(7)
        make: Any = trainer if package is pl else old_trainer
        callbacks = [AccumulationCallback(PerToken()), ExactResume(), *others]
        options = {"log_every_n_steps": 1, "enable_checkpointing": True}
        fit = make(3, callbacks=callbacks, logger=MetricsCSVLogger(folder), **options)
        fit.fit(module := Module(), shuffled(), weights_only=True, **how)
        return module.state_dict()

    with warnings.catch_warnings():
        # The old package's Trainer adds a ModelCheckpoint of its own.
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists")
        whole = fitted(tmp_path / "whole")
        with pytest.raises(SystemExit):
            fitted(tmp_path, Asks())
        found = fitted(tmp_path, ckpt_path="last")
    assert differing(whole, found) == []
    assert close(rows(tmp_path / "whole"), rows(tmp_path)) == []


# ---- what it brings ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")
def test_it_brings_its_parts_once_and_before_all_that_save(tmp_path: Path) -> None:
    """Also where the module makes it anew for each fit."""

    class Brings(Dropping):
        def configure_callbacks(self) -> Any:
            return [ExactResume(dirpath=tmp_path / "brought", every_n_train_steps=1)]

    saver = ModelCheckpoint(tmp_path / "best", save_top_k=0)
    fit: Any = train(tmp_path, others=[saver])[1]
    with pytest.warns(UserWarning, match="the run begins anew, and will replace"):
        fit.fit(Dropping(), shuffled())
    names = [type(each).__name__ for each in fit.callbacks]
    assert names[-4:] == ["PerRank", "MetricRows", "ModelCheckpoint", "ExactResume"]
    assert len(names) == 6
    fit = train(tmp_path / "other", kind=Brings, **WITHOUT)[1]
    fit.fit_loop.max_epochs = 3
    saved = tmp_path / "brought" / "last.ckpt"
    fit.fit(Brings(), shuffled(), ckpt_path=saved)
    names = [type(each).__name__ for each in fit.callbacks]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("way", SENT)
def test_it_can_be_sent_before_and_after_a_fit(
    way: str, whole: Any, tmp_path: Path
) -> None:
    own = SENT[way](ExactResume(every_n_train_steps=1))
    train(tmp_path / "first", **WITHOUT, others=[own], max_epochs=1)
    sent = SENT[way](own)
    sent.dirpath = str(tmp_path / "second" / "checkpoints")
    found = train(tmp_path / "second", **WITHOUT, others=[sent])
    assert is_whole(whole, found, tmp_path / "second")
    assert (tmp_path / "second" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_it_knows_by_what_it_was_stopped(
    tmp_path: Path, number: str, status: int
) -> None:
    own, sent = ExactResume(dirpath=tmp_path), signal.Signals[number]
    kill = ask("on_train_batch_start", 3, sent)
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, **WITHOUT, others=[own], kill=kill)
    assert caught.value.code == status
    assert own.stopped_by is sent
    assert own.checkpoint_path == str(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert "windows" in saved["trainkit"]  # its gradients so far


def test_commands_add_one_where_there_is_none(tmp_path: Path) -> None:
    own = ExactResume()
    assert add_exact_resume([own], tmp_path) == [own]
    both: Any = add_exact_resume([pl.Callback()], tmp_path)
    assert both[1].num_steps_apart is None
    assert both[1].dirpath == str(tmp_path)
    assert find_stop(pl.Trainer(callbacks=both, logger=False)) is both[1]


@pytest.mark.parametrize("how", [{"save_last": True}, {"filename": "last"}])
def test_another_that_writes_the_same_file_is_refused(how: Any, tmp_path: Path) -> None:
    """A second one of its kind is refused by Lightning."""
    other = ModelCheckpoint(tmp_path / "checkpoints", **how)
    with pytest.raises(TrainkitError, match="may write .*last.ckpt, and ModelCheckpo"):
        train(tmp_path, others=[other])
    elsewhere = ModelCheckpoint(tmp_path / "best", **how)
    train(tmp_path, others=[elsewhere], max_epochs=1)
    with pytest.raises(RuntimeError, match="one stateful callback of type `ExactRes"):
        pl.Trainer(callbacks=[ExactResume(), ExactResume(every_n_train_steps=9)])


# ---- what is missing -----------------------------------------------------------------


def complaints(**options: Any) -> list[str]:
    with told("ExactResume: ") as said:
        train(**{"max_epochs": 1, "limit_train_batches": 4, **options})
    return said


PLAIN_LOADER = {"loader": loader(TRAIN, 4)}
ANEW = "starts again at its first batch, since it has no load_state_dict"
LOST = "leave out the gradients that a window has summed up so far"
CASES: dict[str, tuple[Callable[[Path], dict[str, Any]], list[str]]] = {
    "nothing": (lambda path: {}, []),
    "loader": (lambda path: PLAIN_LOADER, [ANEW]),
    "trial run": (lambda path: {**PLAIN_LOADER, "fast_dev_run": 2}, []),
    "windows": (lambda path: BARE, [LOST]),
    "no windows": (lambda path: {**BARE, "accumulate_grad_batches": 1}, []),
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
            **WITHOUT,
            "others": [ExactResume(dirpath=path / "mine")],
        },
        ["CSVLogger begins its file anew when a run is resumed"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*many workers")
@pytest.mark.parametrize("name", CASES)
def test_what_is_missing_is_said(name: str, tmp_path: Path) -> None:
    make, expected = CASES[name]
    found = complaints(**{"folder": tmp_path, **make(tmp_path)})
    assert len(found) == len(expected)
    assert all(part in said for part, said in zip(expected, found, strict=True))


def test_a_checkpoint_that_will_be_replaced_is_said(tmp_path: Path) -> None:
    train(tmp_path, max_epochs=1)
    (said,) = complaints(folder=tmp_path)
    assert "will replace" in said
    assert complaints(folder=tmp_path, resume=True, max_epochs=2) == []


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_hooks_that_lightning_leaves_out_are_said_without_a_window_callback(
    tmp_path: Path,
) -> None:
    class Sets(Dropping):
        def on_train_epoch_start(self) -> None: ...

    how: dict[str, Any] = {"kind": Sets, **BARE, "accumulate_grad_batches": 1}
    with pytest.raises(SystemExit):
        train(tmp_path, kill=ask("on_train_batch_start", 5), **how)
    with pytest.warns(UserWarning, match="what Sets sets there is missing"):
        train(tmp_path, resume=True, **how)
