"""A run with `ExactResume` alone ends as it would have without an interruption; what it
refuses, and what it says is missing."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from contextlib import suppress
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
    FIVE,
    TRAIN,
    Dropping,
    KillAt,
    Killed,
    alone,
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
    EpochSums,
    ExactResume,
    GracefulStop,
    MetricRows,
    MetricsCSVLogger,
    PerToken,
    RandomState,
    RunCheckpoint,
    TrainkitError,
)
from trainkit.lit.front.exact_resume import find_stop, without_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    # Killed before its first checkpoint, a run begins again.
    pytest.mark.filterwarnings("ignore:.*held the rows of another:UserWarning"),
]


BARE = [*FIVE, "AccumulationCallback", "WindowMonitor"]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Any:
    with quiet_lightning():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state and the rows of the run that nobody interrupted, without callbacks
    that save anything."""
    folder = tmp_path_factory.mktemp("whole")
    return state_of(*train(folder, without=FIVE)), rows(folder)


def is_whole(whole: Any, found: Any, folder: Path) -> bool:
    """Whether a run has ended as the whole one, to the bit, with the same rows."""
    state = differing(whole[0], state_of(*found))
    return not state and not close(whole[1], rows(folder))


@pytest.mark.parametrize(
    ("hook", "batch", "dies"),
    [
        ("on_train_batch_start", 8, True),  # inside a window, as most of them
        ("on_after_backward", 4, False),
        ("on_train_batch_end", 6, True),
        ("on_validation_end", 8, True),
        ("on_train_epoch_end", 10, False),
    ],
)
def test_interrupted_run_equals_the_whole_one(
    whole: Any, tmp_path: Path, hook: str, batch: int, dies: bool
) -> None:
    """Killed or asked to stop, in every hook. Each way in each hook is for the parts
    that it brings, which are tested by themselves."""
    kill, every = (KillAt(hook, batch), 1) if dies else (ask(hook, batch), 100)
    with suppress(Killed, SystemExit):  # a run may have ended by itself
        train(kill=kill, **alone(tmp_path, every))
    assert kill.has_died
    assert is_whole(whole, train(resume=True, **alone(tmp_path, every)), tmp_path)


def test_without_it_the_resumed_run_differs(whole: Any, tmp_path: Path) -> None:
    """Negative control: Lightning's own checkpoint of the very same place."""

    def run(**how: Any) -> Any:
        last: dict[str, Any] = {"save_last": True, "save_top_k": 0}
        saver = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, **last)
        return train(tmp_path, without=FIVE, others=[saver], **how)

    with pytest.raises(Killed):
        run(kill=KillAt("on_train_batch_start", 6))
    found = run(resume=True)
    assert ".weights.net.head.weight" in differing(whole[0], state_of(*found))
    assert close(whole[1], rows(tmp_path)) != []


@pytest.mark.parametrize("is_first", [True, False], ids=["then-five", "after-five"])
def test_checkpoints_of_the_five_are_its_own(
    whole: Any, tmp_path: Path, is_first: bool
) -> None:
    """With the same keys; either way resumes what the other has saved."""
    ways: list[dict[str, Any]] = [alone(tmp_path), {"folder": tmp_path}]
    first, second = ways if is_first else ways[::-1]
    with warnings.catch_warnings():
        # Lightning's, of a callback whose state is there and which is not
        warnings.filterwarnings("error", message=".*callbacks used to create")
        with pytest.raises(SystemExit):
            train(kill=ask("on_after_backward", 7), **first)
        keys = keys_in(tmp_path)
        found = train(resume=True, **second)
    assert is_whole(whole, found, tmp_path)
    assert keys == keys_in(tmp_path)


def keys_in(folder: Path) -> Any:
    path = folder / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    return sorted(checkpoint), sorted(checkpoint["callbacks"])


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
def test_it_brings_its_parts_once_and_in_their_places(tmp_path: Path) -> None:
    """Also where the module makes it anew for each fit."""

    class Brings(Dropping):
        def configure_callbacks(self) -> Any:
            return [ExactResume(dirpath=tmp_path / "brought", every_n_train_steps=1)]

    order = [*("EpochSums", "RandomState", "MetricRows"), "ExactResume", "GracefulStop"]
    fit: Any = train(**alone(tmp_path))[1]
    with pytest.warns(UserWarning, match="the run begins anew, and will replace"):
        fit.fit(Dropping(), shuffled())
    names = [type(each).__name__ for each in fit.callbacks]
    assert names[-5:] == order
    assert len(names) == 7
    fit = train(tmp_path / "other", kind=Brings, without=FIVE)[1]
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
    train(tmp_path / "first", without=FIVE, others=[own], max_epochs=1)
    sent = SENT[way](own)
    sent.dirpath = str(tmp_path / "second" / "checkpoints")
    found = train(tmp_path / "second", without=FIVE, others=[sent])
    assert is_whole(whole, found, tmp_path / "second")
    assert (tmp_path / "second" / "checkpoints" / "last.ckpt").exists()


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_it_knows_by_what_it_was_stopped(
    tmp_path: Path, number: str, status: int
) -> None:
    own, sent = ExactResume(dirpath=tmp_path), signal.Signals[number]
    kill = ask("on_train_batch_start", 3, sent)
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, without=FIVE, others=[own], kill=kill)
    assert caught.value.code == status
    assert own.stop.stopped_by is sent
    assert own.stop.checkpoint_path == str(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert "windows" in saved["trainkit"]  # its gradients so far


def test_commands_bring_what_is_missing() -> None:
    def kinds(*present: Any) -> set[str]:
        return {type(each).__name__ for each in without_checkpoint(present)}

    rest = {"EpochSums", "MetricRows", "RandomState", "GracefulStop"}
    assert kinds() == rest
    assert kinds(RunCheckpoint(), RandomState()) == rest - {"RandomState"}
    assert kinds(ExactResume()) == set()
    own, stop = ExactResume(), GracefulStop()
    assert find_stop(pl.Trainer(callbacks=[own], logger=False)) is own.stop
    assert find_stop(pl.Trainer(callbacks=[stop], logger=False)) is stop


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
    make, expected = CASES[name]
    found = complaints(**{**alone(tmp_path), **make(tmp_path)})
    assert len(found) == len(expected)
    assert all(part in said for part, said in zip(expected, found, strict=True))


def test_a_checkpoint_that_will_be_replaced_is_said(tmp_path: Path) -> None:
    train(**alone(tmp_path, max_epochs=1))
    (said,) = complaints(**alone(tmp_path))
    assert "will replace" in said
    assert complaints(**alone(tmp_path, resume=True, max_epochs=2)) == []


@pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable")
def test_hooks_that_lightning_leaves_out_are_said_without_a_window_callback(
    tmp_path: Path,
) -> None:
    class Sets(Dropping):
        def on_train_epoch_start(self) -> None: ...

    how: dict[str, Any] = {"kind": Sets, "without": BARE, "accumulate_grad_batches": 1}
    with pytest.raises(SystemExit):
        train(kill=ask("on_train_batch_start", 5), **{**alone(tmp_path), **how})
    with pytest.warns(UserWarning, match="what Sets sets there is missing"):
        train(resume=True, **{**alone(tmp_path), **how})
