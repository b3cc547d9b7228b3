"""`last.ckpt`, and when it is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.helpers import TokenModule, loader, pad, ragged_sequences, trainer
from tests.lit.resume.interrupting import KillAt, Killed, train, unlike
from trainkit.data.resumable import ResumableLoader
from trainkit.errors import TrainkitError
from trainkit.lit.logs.metrics_csv import MetricRows
from trainkit.lit.resume.graceful_stop import GracefulStop
from trainkit.lit.resume.run_checkpoint import (
    RunCheckpoint,
    _put_in_place,
    put_in_order,
)

pytestmark = pytest.mark.usefixtures("quiet")
SEQUENCES = ragged_sequences(40)
"""Ten batches of four."""


class Validated(TokenModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))


class Steps(RunCheckpoint):
    """Notes when it is written."""

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.written: list[tuple[int, int]] = []

    def save(self, trainer: Any) -> None:
        before = self._saved_batch
        super().save(trainer)
        if self._saved_batch != before:
            self.written.append((trainer.global_step, self._saved_batch + 1))


def fit(
    saver: RunCheckpoint,
    *others: Callback,
    module: Any = None,
    ckpt_path: Any = None,
    **how: Any,
) -> Any:
    module = module or TokenModule()
    val = loader(SEQUENCES, 20) if isinstance(module, Validated) else None
    how = {"enable_checkpointing": True, **how}
    each = trainer(callbacks=[saver, *others], **how)
    each.fit(module, loader(SEQUENCES, 4), val, ckpt_path=ckpt_path)
    return each


@pytest.mark.parametrize(
    ("accumulate", "every", "written"),
    [
        (1, 4, [(4, 4), (8, 8), (12, 12), (16, 16), (20, 20)]),
        (1, 5, [(5, 5), (11, 11), (16, 16), (20, 20)]),  # 10 ends an epoch
        (3, 2, [(2, 6), (5, 13), (7, 19), (8, 20)]),  # 4 does, with its tenth batch
        (10, 1, [(1, 11), (2, 20)]),  # every window ends an epoch
    ],
)
def test_it_is_written_at_clean_moments(
    tmp_path: Path, accumulate: int, every: int, written: list[Any]
) -> None:
    saver = Steps(tmp_path, every_n_train_steps=every)
    fit(saver, accumulate=accumulate)
    assert saver.written == written
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_lightning_says_nothing_at_each_checkpoint(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """It would say which kind of checkpoint it has chosen, where nobody says one."""
    kinds, save = [], Trainer.save_checkpoint

    def heard(self: Trainer, path: Any, weights_only: Any = None, **how: Any) -> None:
        kinds.append(weights_only)
        save(self, path, weights_only, **how)

    monkeypatch.setattr(Trainer, "save_checkpoint", heard)
    fit(Steps(tmp_path), max_epochs=1)
    assert kinds == [False]


def test_it_waits_for_a_validation(tmp_path: Path) -> None:
    saver, order = Steps(tmp_path, every_n_train_steps=4), []

    class Watch(Callback):
        late_place = 9

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking:
                order.append((trainer.global_step, list(saver.written)))

    fit(saver, Watch(), module=Validated(), val_check_interval=4, max_epochs=1)
    assert order == [(4, [(4, 4)]), (8, [(4, 4), (8, 8)])]


def test_epoch_of_one_batch_is_saved_at_its_end(tmp_path: Path) -> None:
    saver = Steps(tmp_path, every_n_train_steps=1)
    fit(saver, limit_train_batches=1, max_epochs=3)
    steps = [step for step, _ in saver.written]
    assert steps == [1, 2, 3, 3]  # what the last epoch's end has changed, too


def test_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    whole = TokenModule(optimizer="adamw")
    fit(RunCheckpoint(tmp_path / "whole"), module=whole, max_epochs=3)
    fit(RunCheckpoint(tmp_path), module=TokenModule(optimizer="adamw"))
    longer = TokenModule(optimizer="adamw")
    each = fit(RunCheckpoint(tmp_path), module=longer, max_epochs=3, ckpt_path="last")
    assert each.global_step == 30
    pairs = zip(whole.parameters(), longer.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_best_checkpoint_is_known_to_the_last(tmp_path: Path) -> None:
    def run(max_steps: int, **how: Any) -> str:
        best = ModelCheckpoint(tmp_path / "best", monitor="val/loss")
        saver = RunCheckpoint(tmp_path, every_n_train_steps=1)
        how |= {"module": Validated(), "val_check_interval": 4}
        each = fit(saver, best, max_steps=max_steps, **how)
        assert each.global_step == max_steps
        return best.best_model_path

    found = run(4)
    assert found
    assert run(6, ckpt_path=tmp_path / "last.ckpt") == found


def test_savers_come_last() -> None:
    rows, best, saver, stop, other = (
        *(MetricRows(), ModelCheckpoint(), RunCheckpoint(), GracefulStop(), Callback()),
    )
    each = SimpleNamespace(callbacks=[stop, saver, best, rows, other])
    put_in_order(each)
    assert each.callbacks == [other, rows, best, saver, stop]


def test_exception_leaves_the_one_before(tmp_path: Path) -> None:
    """And a `fast_dev_run` writes nothing. The interval is checked."""
    fit(RunCheckpoint(tmp_path, every_n_train_steps=1), fast_dev_run=3)
    assert not list(tmp_path.iterdir())
    for value in (0, -1, 1.5, True, None):
        with pytest.raises(TrainkitError, match="every_n_train_steps: must be a whole"):
            RunCheckpoint(every_n_train_steps=value)  # type: ignore[arg-type]
    with pytest.raises(TrainkitError, match="dirpath: must be a folder, received 3"):
        RunCheckpoint(3)  # type: ignore[arg-type]
    saver = RunCheckpoint(tmp_path, every_n_train_steps=2)
    with pytest.raises(Killed):
        fit(saver, KillAt("on_after_backward", 5))
    assert torch.load(saver.path, weights_only=True)["global_step"] == 4


def test_checkpoint_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(
        "lightning.pytorch.Trainer.save_checkpoint", lambda *args, **how: None
    )
    with pytest.raises(TrainkitError, match="must be written when it has been saved"):
        fit(RunCheckpoint(tmp_path, every_n_train_steps=1))


def test_sharded_checkpoint_takes_the_place_of_another(tmp_path: Path) -> None:
    """A folder in place of a file, and of a folder."""
    part, last = tmp_path / "last.ckpt.part", tmp_path / "last.ckpt"
    last.write_text("of another backend")
    for content in "abc":
        part.mkdir()
        (part / "shard").write_text(content)
        _put_in_place(part, last)
        assert (last / "shard").read_text() == content
        assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize(("num_rows", "stops"), [(38, [3, 4, 5, 9]), (4, [1, 2, 4])])
def test_a_limit_that_is_raised_again_ends_as_one_long_run(
    num_rows: int, stops: list[int], tmp_path: Path
) -> None:
    """A run that resumes at the last batch of an epoch may end with that epoch."""
    rows = ragged_sequences(num_rows)
    how: dict[str, Any] = {"max_epochs": -1, "limit_val_batches": 0}
    if num_rows == 4:
        how |= {"accumulate_grad_batches": 1, "val_check_interval": 1}

    def run(folder: Path, stop: int, *, resume: bool = False) -> Any:
        loader = ResumableLoader(rows, 4, collate_fn=pad)
        return train(folder, resume=resume, loader=loader, max_steps=stop, **how)

    whole = run(tmp_path / "whole", stops[-1])
    *_, last = [run(tmp_path / "resumed", stop, resume=True) for stop in stops]
    assert unlike(whole, last) == []
