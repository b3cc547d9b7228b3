"""The effective batch of a Trainer: what its loader says, or nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.helpers import (
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_cases,
    trainer,
)
from tests.lit.fronts import Mixed, micro_batches
from tests.lit.schedule.scheduling import (
    FRONTS,
    SEQUENCES,
    batches,
    fitted,
    make,
)
from tests.zoo.modules import Sharded, Stream, hooked
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    AccumulationStrategy,
    EffectiveBatch,
    PerToken,
    ResumableLoader,
    WindowSampler,
    read_effective_batch,
)
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size import mean_micro_batch

WINDOW = 4


class Asks(pl.Callback):
    """Asks in every batch; None where it is not known."""

    def __init__(self) -> None:
        self.found: list[EffectiveBatch | None] = []
        self.errors: list[str] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        try:
            self.found.append(read_effective_batch(trainer))
        except TrainkitError as error:
            self.found.append(None)
            self.errors.append(str(error))


UNSAID = "effective batch: it must follow from the loader's batch size, and the train"


class Subclass(BatchSampler):
    """May yield anything."""


def asked(loader: Any, accumulate: int = WINDOW, **how: Any) -> Asks:
    asks = Asks()
    fitted("mixin", asks, loader=loader, accumulate=accumulate, max_epochs=1, **how)
    return asks


# ---- known ---------------------------------------------------------------------------


SAMPLES: Any = SEQUENCES
IN_ORDER = SequentialSampler(SAMPLES)
KNOWN: dict[str, Any] = {
    "a batch size": batches(4),
    "the last one dropped": batches(4, drop_last=True),
    "a batch sampler of torch": DataLoader(
        SAMPLES, batch_sampler=BatchSampler(IN_ORDER, 4, False), collate_fn=pad
    ),
    "a stream": DataLoader(Stream(SEQUENCES), batch_size=4, collate_fn=pad),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_batch_is_known_from_the_first_batch_on(name: str) -> None:
    asks = asked(KNOWN[name])
    assert asks.errors == []
    assert set(asks.found) == {EffectiveBatch(micro_batch=4, accumulate=WINDOW)}


def test_a_planned_window_is_known_also_where_the_epoch_has_a_shorter_one() -> None:
    """A mean of micro-batches, so that a rate does not follow the number of ranks."""
    lengths = [len(labels) for _, labels in SEQUENCES]  # 38 of them
    for window in (10, 50):
        plan = WindowSampler(lengths, window=window, tokens=50)
        data = ResumableLoader(SEQUENCES, batch_sampler=plan, collate_fn=pad)
        found = asked(data, plan.micro_batches).found[-1]
        assert found is not None
        assert found.size == pytest.approx(min(window, 38), rel=1e-12)
        assert found.micro_batch == min(window, 38) / plan.micro_batches
    plan = WindowSampler(lengths, window=10, tokens=50, num_replicas=2, rank=1)
    of_two = mean_micro_batch(DataLoader(SEQUENCES, batch_sampler=plan))  # type: ignore[arg-type]
    assert of_two == 10 / (2 * plan.micro_batches)


@pytest.mark.parametrize(
    ("front", "schedule"), [*((front, False) for front in FRONTS), ("manual", True)]
)
def test_known_batch_in_configure_optimizers(front: str, schedule: bool) -> None:
    """Where a learning rate may be made from it. Lightning refuses the Trainer's number
    in manual optimization, so the mixin holds it while Lightning looks; whoever asks
    afterwards reads what the user gave."""
    module, ours = make(front)
    found: list[Any] = []

    def configure_optimizers() -> Any:
        found.append(module.trainer.estimated_stepping_batches)
        found.append(read_effective_batch(module.trainer).size)
        if front != "callback":
            found.append(module.effective_batch.size)
        return torch.optim.SGD(module.parameters(), lr=0.1)

    module.configure_optimizers = configure_optimizers
    if schedule:
        ours = [AccumulationSchedule({0: 3})]
    fit = trainer(1 if schedule else 3, callbacks=ours)
    fit.fit(module, batches(4))
    assert found[0] == fit.global_step == 8
    assert set(found[1:]) == {12}
    assert fit.accumulate_grad_batches == (1 if schedule else 3)


@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=\\d+. the epoch has only")
@pytest.mark.parametrize(("batch", "window", "counted"), [(4, 25, 10), (100, 4, 1)])
def test_window_or_batch_beyond_the_epoch_counts_the_epoch(
    batch: int, window: int, counted: int
) -> None:
    (found,) = set(asked(batches(batch), accumulate=window).found)
    assert found == EffectiveBatch(micro_batch=min(batch, 38), accumulate=counted)


class First(AccumulationStrategy):
    """Weighs the samples of the first loader."""

    def weight(self, batch: Any) -> int:
        return len(first_of(batch)["ids"])


def first_of(batch: Any) -> Any:
    return next(iter(batch.values())) if isinstance(batch, dict) else batch[0]


@pytest.mark.parametrize("second", [4, 2])
@pytest.mark.parametrize("kind", ["dict", "list"])
def test_several_loaders_are_known_if_they_agree(kind: str, second: int) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(first_of(batch))

    module = hooked(Mixed, training_step=step)(strategy=First())
    each = {"a": batches(4), "b": batches(second)}
    asks = asked(each if kind == "dict" else [*each.values()], module=module)
    (found,) = set(asks.found)
    if second == 4:
        assert found == EffectiveBatch(micro_batch=4, accumulate=WINDOW)
    else:
        assert found is None
        assert UNSAID in asks.errors[-1]


# ---- not known -----------------------------------------------------------------------


READY: Any = list(micro_batches(SEQUENCES))
BY_SUBCLASS = Subclass(IN_ORDER, 4, False)
UNKNOWN: dict[str, Any] = {
    "a batch sampler": micro_batches(SEQUENCES),
    "a subclass of torch's": DataLoader(
        SAMPLES, batch_sampler=BY_SUBCLASS, collate_fn=pad
    ),
    "ready batches": DataLoader(Stream(READY), batch_size=None),
    "batches as a data set": DataLoader(READY, batch_size=None),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_batch_that_no_loader_tells_is_not_known(name: str) -> None:
    asks = asked(UNKNOWN[name])
    assert set(asks.found) == {None}
    assert UNSAID in asks.errors[-1]


def test_a_module_that_asks_is_told_that_it_is_not_known() -> None:
    said = []

    def ask(trainer: Any, pl_module: Any, *args: Any) -> None:
        with pytest.raises(TrainkitError, match=UNSAID) as error:
            _ = pl_module.effective_batch
        said.append(error)

    asks = LambdaCallback(on_train_batch_end=ask)
    data = micro_batches(SEQUENCES)
    fitted("mixin", asks, loader=data, accumulate=WINDOW, max_epochs=1)
    assert said


def test_schedule_changes_the_window_and_not_the_micro_batch() -> None:
    asks = Asks()
    ours = AccumulationSchedule({0: 4, 1: 3, 3: 1}, unit="step")
    fitted("mixin", ours, asks, loader=batches(4), max_epochs=1)
    sizes = [4, 4, 4, 4, 3, 3, 3, 3, 3, 3]
    assert [found and found.size for found in asks.found] == [4 * n for n in sizes]


# ---- several ranks -------------------------------------------------------------------

SHARED = ragged_sequences(36)


def ask_on_ranks(rank: int, world: int, kind: str) -> list[Any]:
    asks = Asks()
    module, callbacks, strategy = Mixed(), [asks], "ddp"
    if kind == "tensor parallel":
        module, callbacks = Sharded(), [AccumulationCallback(PerToken()), *callbacks]
        strategy = ModelParallelStrategy(
            data_parallel_size=1,
            tensor_parallel_size=world,
            process_group_backend="gloo",
            save_distributed_checkpoint=False,
        )
    how: dict[str, Any] = {"devices": world, "max_epochs": 1, "strategy": strategy}
    fit = trainer(2, callbacks=callbacks, use_distributed_sampler=True, **how)
    fit.fit(module, loader(SHARED, 4))
    return [asks.found[-1], fit.num_training_batches]


@cache
def on_both() -> dict[str, list[Any]]:
    kinds = ("ddp", "tensor parallel")
    return run_cases(2, {kind: (ask_on_ranks, kind) for kind in kinds})


@pytest.mark.parametrize(("kind", "replicas"), [("ddp", 2), ("tensor parallel", 1)])
def test_replicas_equal_the_ranks_with_own_data(kind: str, replicas: int) -> None:
    """World size is not the number of replicas."""
    first, second = raise_rank_errors(on_both()[kind])
    assert first == second
    samples, num_batches = first
    assert num_batches == 9 // replicas + (replicas == 2)
    assert samples == EffectiveBatch(micro_batch=4, accumulate=2, replicas=replicas)
