"""A run with `ExactResume` alone ends as it would have without an interruption."""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import time
import warnings
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old_pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.helpers import quiet_lightning
from tests.lit.resume.interrupting import (
    FIVE,
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
from trainkit import (
    AccumulationCallback,
    ExactResume,
    GracefulStop,
    MetricsCSVLogger,
    PerToken,
    RandomState,
    RunCheckpoint,
)
from trainkit.lit.front.exact_resume import find_stop, without_checkpoint

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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The state and the rows of the run that nobody interrupted, without callbacks
    that save anything."""
    folder = tmp_path_factory.mktemp("whole")
    with quiet_lightning():
        return state_of(*train(folder, without=FIVE)), rows(folder)


# ---- it resumes exactly --------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "batch", "dies"),
    [
        ("on_train_batch_start", 1, True),  # inside a window, as most of them
        ("on_train_batch_start", 8, False),
        ("on_after_backward", 4, False),
        ("on_train_batch_end", 6, True),
        ("on_train_batch_end", 4, False),
        ("on_validation_end", 8, True),
        ("on_train_epoch_end", 10, False),
    ],
)
def test_interrupted_run_equals_the_whole_one(
    whole: Any, tmp_path: Path, hook: str, batch: int, dies: bool
) -> None:
    """Killed or asked to stop, in every hook. Each way in each hook is for the parts
    that it brings, which are tested by themselves."""
    state, all_rows = whole
    if dies:
        kill, every = KillAt(hook, batch), 1
    else:
        kill, every = ask(hook, batch), 100
    with suppress(Killed, SystemExit):  # a run may have ended by itself
        train(kill=kill, **alone(tmp_path, every))
    assert kill.has_died
    found = train(resume=True, **alone(tmp_path, every))
    assert differing(state, state_of(*found)) == []
    assert close(all_rows, rows(tmp_path)) == []


def test_without_it_the_resumed_run_differs(whole: Any, tmp_path: Path) -> None:
    """Negative control: Lightning's own checkpoint of the very same place."""

    def lightnings() -> dict[str, Any]:
        saver = ModelCheckpoint(
            tmp_path / "checkpoints",
            every_n_train_steps=1,
            save_last=True,
            save_top_k=0,
        )
        return {"without": FIVE, "others": [saver]}

    with pytest.raises(Killed):
        train(tmp_path, kill=KillAt("on_train_batch_start", 6), **lightnings())
    found = train(tmp_path, resume=True, **lightnings())
    assert ".weights.net.head.weight" in differing(whole[0], state_of(*found))
    assert close(whole[1], rows(tmp_path)) != []


@pytest.mark.parametrize("is_first", [True, False], ids=["then-five", "after-five"])
def test_checkpoints_of_the_five_are_its_own(
    whole: Any, tmp_path: Path, is_first: bool
) -> None:
    five: dict[str, Any] = {"folder": tmp_path}
    ways = [alone(tmp_path), five] if is_first else [five, alone(tmp_path)]
    with warnings.catch_warnings():
        # Lightning's, of a callback whose state is there and which is not
        warnings.filterwarnings("error", message=".*callbacks used to create")
        with pytest.raises(SystemExit):
            train(kill=ask("on_after_backward", 7), **ways[0])
        found = train(resume=True, **ways[1])
    assert differing(whole[0], state_of(*found)) == []
    assert close(whole[1], rows(tmp_path)) == []


def test_checkpoint_has_the_keys_of_the_five(tmp_path: Path) -> None:
    keys = []
    five: dict[str, Any] = {"folder": tmp_path / "five"}
    for how in (five, alone(tmp_path / "it")):
        train(max_epochs=1, **how)
        path = how["folder"] / "checkpoints" / "last.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        keys.append((sorted(checkpoint), sorted(checkpoint["callbacks"])))
    assert keys[0] == keys[1]


def _run(folder: Path, begun: Any, sent: Any, at: int) -> None:
    """Waits inside a window for a signal that may come at any moment."""

    class Waits(pl.Callback):
        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if trainer.fit_loop.total_batch_idx == at:
                begun.set()
                assert sent.wait(240)

    torch.set_num_threads(1)
    with quiet_lightning(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(resume=True, **alone(folder, 100, others=[Waits()]))
    os._exit(0)


def test_process_that_gets_sigterm_inside_windows(whole: Any, tmp_path: Path) -> None:
    context, draw = get_context("fork"), random.Random(0)
    for at in (1, 4, 8):
        begun, sent = context.Event(), context.Event()
        args = (tmp_path, begun, sent, at)
        process = context.Process(target=_run, args=args, daemon=True)
        process.start()
        try:
            assert begun.wait(240)
            time.sleep(draw.uniform(0, 0.05))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            sent.set()
            process.join(240)
        finally:
            process.kill()
        assert process.exitcode == 143
        saved = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
        assert "windows" in saved["trainkit"]  # its gradients so far
    found = train(resume=True, **alone(tmp_path, 100))
    assert differing(whole[0], state_of(*found)) == []
    assert close(whole[1], rows(tmp_path)) == []


@pytest.mark.parametrize("package", [pl, old_pl], ids=lambda each: each.__name__)
def test_last_is_found_in_both_namespaces(package: Any, tmp_path: Path) -> None:
    class Module(package.LightningModule):
        training_step = Dropping.training_step
        _loss, configure_optimizers = Dropping._loss, Dropping.configure_optimizers

        def __init__(self) -> None:
            super().__init__()
            self.net, self.scheduler = Dropping().net, "step"

    class Asks(package.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.fit_loop.total_batch_idx == 4:
                signal.raise_signal(signal.SIGTERM)

    def fitted(folder: Path, *others: Any, **how: Any) -> Any:
        torch.manual_seed(7)
        module = Module()
        trainer = package.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            accumulate_grad_batches=3,
            logger=MetricsCSVLogger(folder),
            callbacks=[AccumulationCallback(PerToken()), ExactResume(), *others],
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )
        trainer.fit(module, shuffled(), weights_only=True, **how)
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
    order = [*("EpochSums", "RandomState", "MetricRows"), "ExactResume", "GracefulStop"]
    trainer: Any = train(**alone(tmp_path))[1]

    def names() -> list[str]:
        return [type(each).__name__ for each in trainer.callbacks][-5:]

    assert names() == order
    with pytest.warns(UserWarning, match="the run begins anew, and will replace"):
        trainer.fit(Dropping(), shuffled())
    assert names() == order
    assert len(trainer.callbacks) == 7


@pytest.mark.filterwarnings("ignore:.*no `val_dataloader`")
def test_module_may_make_it_anew_for_each_fit(tmp_path: Path) -> None:
    class Brings(Dropping):
        def configure_callbacks(self) -> Any:
            return [ExactResume(dirpath=tmp_path, every_n_train_steps=1)]

    trainer: Any = train(tmp_path, kind=Brings, without=FIVE)[1]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Brings(), shuffled(), ckpt_path=tmp_path / "last.ckpt")
    counts = [type(each).__name__ for each in trainer.callbacks]
    assert sorted(name for name in counts if counts.count(name) > 1) == []


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("way", [pickled, copy.deepcopy])
def test_it_can_be_sent_before_and_after_a_fit(
    way: Any, whole: Any, tmp_path: Path
) -> None:
    own = way(ExactResume(every_n_train_steps=1))
    train(tmp_path / "first", without=FIVE, others=[own], max_epochs=1)
    sent = way(own)
    sent.dirpath = str(tmp_path / "second" / "checkpoints")
    found = train(tmp_path / "second", without=FIVE, others=[sent])
    assert differing(whole[0], state_of(*found)) == []
    assert (tmp_path / "second" / "checkpoints" / "last.ckpt").exists()
    assert sent.stop.brought_by is sent


def test_it_knows_by_what_it_was_stopped(tmp_path: Path) -> None:
    own = ExactResume(dirpath=tmp_path)
    kill = ask("on_train_batch_start", 2, signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, without=FIVE, others=[own], kill=kill)
    assert caught.value.code == 130
    assert own.stop.stopped_by is signal.SIGINT
    assert own.stop.checkpoint_path == str(tmp_path / "last.ckpt")


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
