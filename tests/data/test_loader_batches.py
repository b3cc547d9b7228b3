"""Batches by length in a ResumableLoader, also through Lightning."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.data.sharing import rank_of
from tests.helpers import TokenModule, ragged_sequences, trainer, weights
from trainkit import (
    AccumulationCallback,
    LengthGroupedSampler,
    PadCollate,
    PerToken,
    ResumableLoader,
    TokenBudgetSampler,
    TrainkitError,
    WeighNothing,
)

ROWS = [{"ids": x, "labels": y} for x, y in ragged_sequences(60)]
LENGTHS = [len(row["ids"]) for row in ROWS]

SAMPLERS: dict[str, Any] = {
    "token budget": lambda **how: TokenBudgetSampler(LENGTHS, tokens=40, **how),
    "length grouped": lambda **how: LengthGroupedSampler(
        LENGTHS, batch_size=4, pool=3, **how
    ),
}


def loader(kind: str, *, num_workers: int = 0, **how: Any) -> ResumableLoader:
    return ResumableLoader(
        ROWS,
        batch_sampler=SAMPLERS[kind](seed=2, **how),
        collate_fn=PadCollate({"labels": -100}),
        num_workers=num_workers,
    )


def read(each: Any, epoch: int = 0, most: int | None = None) -> list[Any]:
    each.sampler.set_epoch(epoch)
    return [b["ids"].tolist() for b in itertools.islice(each, most)]


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_epoch_equals_the_rest(kind: str, num_workers: int) -> None:
    whole, next_epoch = read(loader(kind), epoch=1), read(loader(kind), epoch=2)
    first = loader(kind, num_workers=num_workers)
    assert read(first, epoch=1, most=3) == whole[:3]
    second = loader(kind, num_workers=num_workers)
    second.load_state_dict(first.state_dict())
    assert read(second, epoch=1) == whole[3:]
    assert read(second, epoch=2) == next_epoch


@pytest.mark.parametrize("kind", SAMPLERS)
def test_changes_within_an_epoch_are_refused(kind: str) -> None:
    first = loader(kind)
    read(first, most=2)
    state = first.state_dict()
    with rank_of(0, 2), pytest.raises(TrainkitError, match="ranks: .* was 1 .* is 2"):
        loader(kind).load_state_dict(state)
    with pytest.raises(TrainkitError, match="shuffle: must stay as it was"):
        loader(kind, shuffle=False).load_state_dict(state)
    rows = ResumableLoader(ROWS, 4)
    with pytest.raises(TrainkitError, match="batch_size x ranks: .* another sampler"):
        rows.load_state_dict(state | {"dataset": 60, "seed": 0, "shuffle": False})
    read(first)
    rows.load_state_dict(first.state_dict())  # at an epoch's end whatever you like


class Interrupted(Callback):
    """Ends a training after so many batches, as a kill would."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen: list[Any] = []

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self.after and len(self.seen) == self.after:
            raise KeyboardInterrupt
        self.seen.append(args[2]["ids"].tolist())


def fit(kind: str, folder: Path, *, after: int = 0, resume: Any = None) -> Any:
    torch.manual_seed(0)
    module = TokenModule(dtype=torch.float64)
    seen = Interrupted(after)
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    fitting = trainer(
        2,
        callbacks=[seen, AccumulationCallback(PerToken()), saving],
        enable_checkpointing=True,
    )
    try:
        fitting.fit(module, loader(kind), ckpt_path=resume)
    except (KeyboardInterrupt, SystemExit):
        assert after
    return module, seen.seen


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("kind", SAMPLERS)
def test_lightning_goes_on_at_the_very_batch(kind: str, tmp_path: Path) -> None:
    whole, batches = fit(kind, tmp_path / "whole")
    assert len(batches) == 2 * len(loader(kind))
    assert batches != batches[: len(batches) // 2] * 2
    cut = len(batches) // 2 + 4  # in the second epoch, at a window's end
    _, before = fit(kind, tmp_path / "cut", after=cut)
    resumed, after = fit(kind, tmp_path / "cut", resume=tmp_path / "cut" / "last.ckpt")
    assert before + after == batches
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfit_batches_is_refused_by_lightning(kind: str) -> None:
    """It would replace the order; it says so, and nothing is trained."""
    with pytest.raises(TypeError, match="can't inject"):
        trainer(overfit_batches=1).fit(TokenModule(), loader(kind))


def test_lightning_puts_no_other_sampler_in_its_place() -> None:
    from lightning.pytorch.trainer.connectors.data_connector import (
        _DataConnector,  # what decides it
    )

    fitting: Any = trainer(max_epochs=1)
    connector: Any = _DataConnector(fitting)
    for each in (loader("token budget"), ResumableLoader(ROWS, 4)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(fitting._accelerator_connector), "is_distributed", True)
            assert not connector._requires_distributed_sampler(each)
            assert connector._requires_distributed_sampler(DataLoader(ROWS, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            {"batch_sampler": BatchSampler(SequentialSampler(ROWS), 2, False)},
            "must be a TokenBudgetSampler or a LengthGroupedSampler, received BatchSam",
        ),
        (
            {"batch_sampler": SAMPLERS["token budget"](), "shuffle": True},
            "cuts the batches by itself, .* apply to TokenBudgetSampler",
        ),
        (
            {"batch_sampler": LengthGroupedSampler([1, 2], batch_size=2)},
            "needs the length of every row, received 2 lengths for 60 rows",
        ),
    ],
)
def test_options_are_checked(how: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        ResumableLoader(ROWS, **how)


def test_fillers_where_rows_are_fewer_than_ranks() -> None:
    shares = []
    for rank in range(3):
        with rank_of(rank, 3):
            each = ResumableLoader(
                ROWS[:2],
                batch_sampler=TokenBudgetSampler(LENGTHS[:2], tokens=40),
                weigh_nothing=WeighNothing(labels=-100),
                collate_fn=PadCollate({"labels": -100}),
            )
            shares.append([(b["labels"] != -100).sum().item() for b in each])
    assert sorted(itertools.chain(*shares)) == sorted([0, *LENGTHS[:2]])
