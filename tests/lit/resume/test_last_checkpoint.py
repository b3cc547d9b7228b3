"""`last.ckpt`, when it is written, and what is saved in it of each rank."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.helpers import (
    TokenModule,
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    trainer,
)
from tests.lit.resume.interrupting import (
    KillAt,
    Killed,
    ask,
    close,
    differing,
    interrupted,
    rows,
    train,
    unlike,
)
from trainkit.core.generators import read_states, write_states
from trainkit.data.resumable import ResumableLoader
from trainkit.errors import TrainkitError
from trainkit.lit.front.exact_resume import ExactResume
from trainkit.lit.resume import _compat, per_rank
from trainkit.lit.resume.last_checkpoint import _put_in_place
from trainkit.lit.resume.per_rank import PerRank

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:ExactResume. (the train_data|Lightning)"),
]

SEQUENCES = ragged_sequences(40)
"""Ten batches of four."""


class Validated(TokenModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))


class Steps(ExactResume):
    """Notes when it is written."""

    def __init__(self, folder: Path, **how: Any) -> None:
        super().__init__(dirpath=folder, **how)
        self.written: list[tuple[int, int]] = []

    def save(self, trainer: Any) -> None:
        before = self._saved_batch
        super().save(trainer)
        if self._saved_batch != before:
            self.written.append((trainer.global_step, self._saved_batch + 1))


def fit(
    saver: ExactResume,
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


def test_lightning_is_silent_at_checkpoints(tmp_path: Path, monkeypatch: Any) -> None:
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
    fit(ExactResume(dirpath=tmp_path / "whole"), module=whole, max_epochs=3)
    fit(ExactResume(dirpath=tmp_path), module=TokenModule(optimizer="adamw"))
    longer = TokenModule(optimizer="adamw")
    each = fit(
        ExactResume(dirpath=tmp_path), module=longer, max_epochs=3, ckpt_path="last"
    )
    assert each.global_step == 30
    pairs = zip(whole.parameters(), longer.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_best_checkpoint_is_known_to_the_last(tmp_path: Path) -> None:
    def run(max_steps: int, **how: Any) -> str:
        best = ModelCheckpoint(tmp_path / "best", monitor="val/loss")
        saver = ExactResume(dirpath=tmp_path, every_n_train_steps=1)
        how |= {"module": Validated(), "val_check_interval": 4}
        each = fit(saver, best, max_steps=max_steps, **how)
        assert each.global_step == max_steps
        return best.best_model_path

    found = run(4)
    assert found
    assert run(6, ckpt_path=tmp_path / "last.ckpt") == found


def test_exception_leaves_the_one_before(tmp_path: Path) -> None:
    """And a `fast_dev_run` writes nothing. The interval is checked."""
    fit(ExactResume(dirpath=tmp_path, every_n_train_steps=1), fast_dev_run=3)
    assert not list(tmp_path.iterdir())
    for value in (0, -1, 1.5, True):
        with pytest.raises(TrainkitError, match="every_n_train_steps: must be a whole"):
            ExactResume(every_n_train_steps=value)  # type: ignore[arg-type]
    with pytest.raises(TrainkitError, match="dirpath: must be a folder, received 3"):
        ExactResume(dirpath=3)  # type: ignore[arg-type]
    with pytest.raises(TrainkitError, match="warns: must be True or False, received 1"):
        ExactResume(warns=1)  # type: ignore[arg-type]
    saver = ExactResume(dirpath=tmp_path, every_n_train_steps=2)
    with pytest.raises(Killed):
        fit(saver, KillAt("on_after_backward", 5))
    assert torch.load(saver.path, weights_only=True)["global_step"] == 4


def test_missing_checkpoint_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Trainer, "save_checkpoint", lambda *args, **how: None)
    with pytest.raises(TrainkitError, match="must be written when it has been saved"):
        fit(ExactResume(dirpath=tmp_path, every_n_train_steps=1))


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


# ---- random numbers and sums of an epoch, saved for each rank ------------------------


CPU = torch.device("cpu")


def draw() -> list[Any]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), torch.rand(2)]


def test_states_go_through_a_file_that_nobody_must_trust(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second one behind
    numpy.random.randn()
    torch.save(read_states(CPU), tmp_path / "states")
    expected = draw()
    write_states(torch.load(tmp_path / "states", weights_only=True), CPU)
    assert differing(expected, draw()) == []
    assert differing(expected, draw()) != []


def test_a_rank_that_was_not_there_is_spoken_of(monkeypatch: Any) -> None:
    """A checkpoint without states changes nothing."""
    monkeypatch.setattr(per_rank, "windows_of", bool)
    each, module, before = PerRank(), SimpleNamespace(device=CPU), read_states(CPU)
    state = SimpleNamespace(fn="fit")
    trainer: Any = SimpleNamespace(global_rank=1, world_size=2, state=state)
    saved = [{"random": before, "sums": {}, "metrics": {}}]
    said = pytest.warns(UserWarning, match="of 1 ranks, but not of rank 1")
    for held, told in (({}, nullcontext()), ({PerRank.KEY: saved}, said)):
        each.on_load_checkpoint(trainer, None, held)
        with told:
            each.on_train_start(trainer, module)
        assert differing(before, read_states(CPU)) == []


def test_sums_that_cannot_go_on_are_spoken_of(monkeypatch: Any) -> None:
    each, trainer = PerRank(), SimpleNamespace(global_rank=0, world_size=1)
    monkeypatch.setattr(per_rank, "windows_of", bool)
    monkeypatch.setattr(_compat, "epoch_sums", lambda trainer: {})
    one = {"value": torch.tensor(1.0)}
    each._before = {"training_step.accuracy": [None], "training_step.x": [one]}
    with pytest.warns(UserWarning, match="metric objects of training_step.accuracy"):
        each.on_train_start(trainer, None)
    with pytest.warns(UserWarning, match="training_step.x was logged before the run"):
        each.on_train_epoch_end(trainer, None)


def test_sums_of_ranks_that_are_no_more_are_added(tmp_path: Path) -> None:
    """As if another rank had logged what this one had."""
    ends: list[tuple[float, float, float]] = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        with pytest.raises(SystemExit):
            train(folder, kill=ask("on_train_batch_end", 5))
        path = folder / "checkpoints" / "last.ckpt"
        checkpoint = torch.load(path, weights_only=True)
        (sums,) = checkpoint[PerRank.KEY][0]["sums"]["training_step.train/mean"]
        checkpoint[PerRank.KEY] *= number
        torch.save(checkpoint, path)
        train(folder, resume=True)
        means = [row["train/mean"] for row in rows(folder) if row.get("train/mean")]
        ends.append((float(means[0]), float(sums["value"]), float(sums["weight"])))
    (one, value, weight), (two, *_) = ends
    assert two == pytest.approx((one * 26 + value) / (26 + weight), rel=1e-6)
    assert two != pytest.approx(one, rel=1e-4)


def on_rank(rank: int, world_size: int, folder: str) -> Any:
    how: dict[str, Any] = {"strategy": "ddp", "devices": world_size}
    how |= {"limit_val_batches": 0, "seed": 7 + rank}  # each draws others
    path = Path(folder)
    whole = train(path / "whole", **how)
    found = interrupted(path / "killed", KillAt("on_train_batch_start", 4), **how)
    folders = path / "whole", path / "killed"
    return unlike(whole, found), [] if rank else close(*map(rows, folders))


@pytest.mark.slow
def test_ranks_go_on_exactly(tmp_path: Path) -> None:
    found = raise_rank_errors(run_ranks(on_rank, 2, str(tmp_path)))
    assert found == [([], []), ([], [])]
