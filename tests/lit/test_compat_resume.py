"""Lightning's private names by which a run goes on: what each of them is today."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger

from tests.helpers import TokenModule, loader, pad, ragged_sequences, trainer
from trainkit.data.resumable import ResumableLoader
from trainkit.lit import _compat

DATA = loader(ragged_sequences(24), 4)  # six batches


def fit(module: Any, *callbacks: Any, accumulate: int = 1, **options: Any) -> Any:
    options = {"max_epochs": 1, **options}
    each = trainer(accumulate, callbacks=list(callbacks), **options)
    each.fit(module, DATA, DATA if hasattr(module, "validates") else None)
    return each


def looking(**hooks: Any) -> Callback:
    """A callback that is made of functions of (trainer, module, ...)."""
    callback = Callback()
    for name, function in hooks.items():
        setattr(callback, name, function)
    return callback


class Validated(TokenModule):
    validates = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("how", [{"val_check_interval": 2}, {"max_epochs": 2}])
def test_follows_validation_says_after_which_batches_it_comes(how: Any) -> None:
    said: list[int] = []
    came: list[int] = []

    def ends(trainer: Any, *args: Any) -> None:
        if _compat.follows_validation(trainer):
            said.append(trainer.global_step)

    def validates(trainer: Any, module: Any) -> None:
        came.append(trainer.global_step)

    looks = looking(on_train_batch_end=ends, on_validation_start=validates)
    fit(Validated(), looks, num_sanity_val_steps=0, **how)
    assert said == came != []


class Logs(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for name in ("mean", "sum", "max", "min"):
            value = float((batch_idx * 5) % 7)
            self.log(
                name, value, reduce_fx=name, on_epoch=True, batch_size=batch_idx + 1
            )
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", 1.0, on_step=True, on_epoch=True, batch_size=1)


def test_logged_at_batch_end_counts_what_that_hook_logs() -> None:
    counts: list[dict[str, int]] = []

    def starts(trainer: Any, *args: Any) -> None:
        counts.append(_compat.logged_at_batch_end(trainer))

    fit(Logs(), looking(on_train_batch_start=starts))
    assert counts == [{}, *({"late_step": n} for n in range(1, 6))]


class Recorder(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = []

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append((dict(kwargs["metrics"]), kwargs["step"]))


class OnlyInSteps(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss


def test_pending_metrics_are_what_lightning_logs_next() -> None:
    logger, pending = Recorder(), []

    def look(trainer: Any, *args: Any) -> None:
        found = _compat.pending_metrics(trainer)
        if found is not None:
            pending.append(found)

    looks = looking(on_train_batch_end=look, on_train_epoch_end=look)
    each = {"logger": logger, "log_every_n_steps": 2, "max_epochs": 2}
    fit(OnlyInSteps(), looks, accumulate=2, **each)
    assert len(pending) == 5  # at steps 2, 4 and 6, and at the end of two epochs
    assert pending == logger.rows


def test_epoch_sums_taken_apart_and_added_are_those_of_the_whole() -> None:
    def interrupts(adds: bool) -> Callback:
        states: dict[str, Any] = {}

        def ends(trainer: Any, module: Any, *args: Any) -> None:
            sums = _compat.epoch_sums(trainer)
            if args[-1] == 2:
                states.update({k: _compat.sum_state(each) for k, each in sums.items()})
                for each in sums.values():
                    each.reset()
            if args[-1] == 5 and adds:
                for key, each in sums.items():
                    _compat.add_sum_state(each, states[key])

        return looking(on_train_batch_end=ends)

    names = ("mean", "sum", "max", "min")
    whole, added, lost = (
        {name: float(each.callback_metrics[name]) for name in names}
        for each in (
            fit(Logs()),
            fit(Logs(), interrupts(adds=True)),
            fit(Logs(), interrupts(adds=False)),
        )
    )
    assert added == pytest.approx(whole, rel=1e-6)
    assert lost != pytest.approx(whole, rel=1e-3)


def test_restored_metrics_are_those_of_the_trainer() -> None:
    seen = []

    def begins(trainer: Any, module: Any) -> None:
        _compat.add_callback_metrics(trainer, {"x": torch.tensor(2.0)})

    def starts(trainer: Any, *args: Any) -> None:
        seen.append(float(trainer.callback_metrics["x"]))

    fit(TokenModule(), looking(on_train_start=begins, on_train_batch_start=starts))
    assert seen == [2.0] * 6


def test_end_restart_is_what_the_loop_calls_restarting() -> None:
    each: Any = trainer()
    each.fit_loop.restarting = True
    _compat.end_restart(each)
    assert not each.fit_loop.restarting


@pytest.mark.parametrize(("batch", "within"), [(2, True), (6, False)])
def test_is_within_epoch_tells_where_a_run_goes_on(
    batch: int, within: bool, tmp_path: Path
) -> None:
    seen: list[bool] = []

    def saves(trainer: Any, *args: Any) -> None:
        if trainer.global_step == batch:
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    def begins(trainer: Any, module: Any) -> None:
        seen.append(_compat.is_within_epoch(trainer))

    hook = "on_train_batch_end" if within else "on_train_end"
    fit(TokenModule(), looking(on_train_start=begins, **{hook: saves}))
    each = trainer(callbacks=[looking(on_train_start=begins)], max_epochs=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the loader cannot resume
        each.fit(TokenModule(), DATA, ckpt_path=tmp_path / "last.ckpt")
    assert seen == [False, within]


@pytest.mark.parametrize("restores", [True, False])
def test_restore_loaders_brings_the_batch_that_comes_next(
    restores: bool, tmp_path: Path
) -> None:
    """A module that counts its steps early has Lightning forget where loaders were."""
    samples = ragged_sequences(24)
    seen: list[Any] = []

    class CountsEarly(TokenModule):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 6
            return super().configure_optimizers()

    def run(*callbacks: Any, **how: Any) -> None:
        batches = ResumableLoader(samples, 4, collate_fn=pad)
        each = trainer(callbacks=list(callbacks), max_epochs=1)
        each.fit(CountsEarly(), batches, **how)

    def saves(trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(tmp_path / "last.ckpt")

    def begins(trainer: Any, *args: Any) -> None:
        if restores:
            _compat.restore_loaders(trainer)

    def sees(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        seen.append((batch_idx, batch["ids"]))

    run(looking(on_train_batch_end=saves, on_train_batch_start=sees))
    whole, seen = seen[2:], []
    looks = looking(on_train_start=begins, on_train_batch_start=sees)
    run(looks, ckpt_path=tmp_path / "last.ckpt")
    same = [
        one == other and torch.equal(ids, others)
        for (one, ids), (other, others) in zip(whole, seen, strict=False)
        if ids.shape == others.shape
    ]
    assert (all(same) and len(same) == len(whole)) is restores


@pytest.mark.parametrize(("least", "ending"), [({}, True), ({"min_epochs": 2}, False)])
def test_is_ending_tells_whether_a_stop_ends_it_now(
    least: dict[str, int], ending: bool
) -> None:
    seen: list[bool] = []

    def ends(trainer: Any, *args: Any) -> None:
        seen.append(_compat.is_ending(trainer))
        trainer.should_stop = True
        seen.append(_compat.is_ending(trainer))

    fit(TokenModule(), looking(on_train_batch_end=ends), max_epochs=2, **least)
    assert seen[:2] == [False, ending]
    assert len(seen) == (2 if ending else 24)


def test_end_validation_gives_the_modes_back() -> None:
    seen: list[list[bool]] = []

    def modes(module: Any) -> list[bool]:
        return [part.training for part in module.modules()]

    def begins(trainer: Any, module: Any) -> None:
        module.net.eval()  # on purpose
        seen.append(modes(module))

    def ends(trainer: Any, module: Any) -> None:
        _compat.end_validation(trainer)
        seen.append(modes(module))

    looks = looking(on_train_start=begins, on_validation_end=ends)
    fit(Validated(), looks, num_sanity_val_steps=0)
    assert seen[0] == seen[1]
    assert len(set(seen[0])) == 2


@pytest.mark.parametrize("ahead", [True, False])
def test_reads_ahead_is_what_the_fetcher_does(ahead: bool) -> None:
    """The control: how many batches have been read when the first is trained on."""
    count, seen = [0], []

    class Read:
        def __iter__(self) -> Any:
            for batch in DATA:
                count[0] += 1
                yield batch

    class Counted(Read):
        def __len__(self) -> int:
            return len(DATA)

    def starts(trainer: Any, *args: Any) -> None:
        seen.append((_compat.reads_ahead(trainer), count[0]))

    each = trainer(callbacks=[looking(on_train_batch_start=starts)], max_epochs=1)
    each.fit(TokenModule(), Read() if ahead else Counted())
    assert seen[0] == (ahead, 1 + ahead)


@pytest.mark.parametrize(("leaves", "first"), [(True, (1, 0)), (False, (1, 6))])
def test_an_epoch_that_had_ended_is_left(
    leaves: bool, first: tuple[int, int], tmp_path: Path
) -> None:
    """Without it Lightning counts on in the epoch that is over."""
    path = tmp_path / "end.ckpt"
    seen: list[tuple[int, int]] = []

    def saves(trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(path)

    def begins(trainer: Any, module: Any) -> None:
        if leaves:
            _compat.leave_ended_epoch(trainer)

    def starts(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        seen.append((trainer.current_epoch, batch_idx))

    fit(TokenModule(), looking(on_train_end=saves))
    looks = looking(on_train_start=begins, on_train_batch_start=starts)
    each = trainer(callbacks=[looks], max_epochs=-1, max_steps=12)
    each.fit(TokenModule(), DATA, ckpt_path=path)
    assert seen[0] == first
    assert len(seen) == 6


@pytest.mark.parametrize(
    ("interval", "found"), [("step", [False, True] * 3), ("epoch", [False] * 6)]
)
def test_steps_by_metric_is_when_such_a_scheduler_moves(
    interval: str, found: list[bool]
) -> None:
    said: list[bool] = []

    class ByMetric(TokenModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, on_step=True, on_epoch=True, batch_size=1)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": scheduler,
                    "interval": interval,
                    "monitor": "x",
                },
            }

    def ends(trainer: Any, *args: Any) -> None:
        said.append(_compat.steps_by_metric(trainer))

    fit(ByMetric(), looking(on_train_batch_end=ends), accumulate=2)
    assert said == found
