"""The effective batch of a Trainer: known, or measured, and said which."""

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
from tests.lit.fronts import RAGGED, Mixed, Plain, micro_batches
from tests.lit.schedule.scheduling import (
    FRONTS,
    SEQUENCES,
    batches,
    fitted,
    make,
    rows_of,
    token_counts,
)
from tests.zoo.modules import Sharded, Stream, hooked
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    AccumulationStrategy,
    EffectiveBatch,
    PerSample,
    PerToken,
    ResumableLoader,
    Uniform,
    WindowSampler,
    read_effective_batch,
)
from trainkit.core.ledger import NUM_MEASURED
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size import mean_micro_batch

WINDOW = 4


class Asks(pl.Callback):
    """Asks in every batch; None where it is not known yet."""

    def __init__(self, unit: Any = "samples") -> None:
        self.unit = unit
        self.found: list[EffectiveBatch | None] = []
        self.errors: list[str] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        try:
            self.found.append(read_effective_batch(trainer, unit=self.unit))
        except TrainkitError as error:
            self.found.append(None)
            self.errors.append(str(error))


class Subclass(BatchSampler):
    """May yield anything."""


def asked(
    loader: Any, unit: Any = "samples", accumulate: int = WINDOW, **how: Any
) -> Asks:
    asks = Asks(unit)
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
def test_known_batch_is_exact_from_the_first_batch_on(name: str) -> None:
    asks = asked(KNOWN[name])
    assert asks.errors == []
    assert set(asks.found) == {EffectiveBatch(micro_batch=4, accumulate=WINDOW)}


def test_a_planned_window_is_known_also_where_the_epoch_has_a_shorter_one() -> None:
    """A mean of micro-batches, so that a rate does not follow the number of ranks. The
    control: what the windows measure in tokens, a short one among them."""
    lengths = [len(labels) for _, labels in SEQUENCES]  # 38 of them
    for window, unit in ((10, "samples"), (50, "samples"), (10, "tokens")):
        plan = WindowSampler(lengths, window=window, tokens=50)
        data = ResumableLoader(SEQUENCES, batch_sampler=plan, collate_fn=pad)
        found = asked(data, unit, plan.micro_batches).found[-1]
        assert found is not None
        assert found.is_exact == (unit == "samples")
        if found.is_exact:
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
        said = "the loader does not say it, and the tensors of a batch have no leading"
        assert said in asks.errors[-1]


# ---- measured ------------------------------------------------------------------------


READY: Any = list(micro_batches(SEQUENCES))
BY_SUBCLASS = Subclass(IN_ORDER, 4, False)
UNKNOWN: dict[str, Any] = {
    "a batch sampler": (micro_batches(SEQUENCES), RAGGED),
    "a subclass of torch's": (
        DataLoader(SAMPLES, batch_sampler=BY_SUBCLASS, collate_fn=pad),
        [4] * 9 + [2],
    ),
    "ready batches": (DataLoader(Stream(READY), batch_size=None), RAGGED),
    "batches as a data set": (DataLoader(READY, batch_size=None), RAGGED),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_batch_equals_the_mean_over_the_windows_so_far(name: str) -> None:
    loader, sizes = UNKNOWN[name]
    asks = asked(loader)
    assert asks.found[:WINDOW] == [None] * WINDOW
    assert "Ask again after the first window" in asks.errors[0]
    for at, found in enumerate(asks.found[WINDOW:], WINDOW):
        assert found is not None
        closed = at // WINDOW
        mean = sum(sizes[: closed * WINDOW]) / (closed * WINDOW)
        assert found.micro_batch == pytest.approx(mean)
        assert (found.windows_measured, found.accumulate) == (closed, WINDOW)
        assert f"(measured over {closed} window" in str(found)


@pytest.mark.parametrize(
    ("is_known", "unit", "window", "measured"),
    [(False, "samples", 1, 8), (True, "tokens", 4, 2), (False, "tokens", 4, 2)],
)
def test_tokens_and_samples_equal_the_mean_over_the_first_windows(
    is_known: bool, unit: str, window: int, measured: int
) -> None:
    sizes = (4,) * 9 + (2,) if is_known else RAGGED
    data = batches(4) if is_known else micro_batches(SEQUENCES)
    asks = asked(data, unit, accumulate=window)
    assert asks.found[0] is None
    found = asks.found[-1]
    assert found is not None
    counted = sizes if unit == "samples" else token_counts(rows_of(sizes))
    assert found.micro_batch == pytest.approx(sum(counted[:8]) / 8)
    assert (found.unit, found.windows_measured) == (unit, measured)
    assert NUM_MEASURED == 8


@pytest.mark.parametrize(
    ("strategy", "unit", "said"),
    [
        (PerSample(), "tokens", "in tokens: PerSample does not weigh tokens. Use PerT"),
        (Uniform(), "tokens", "in tokens: Uniform does not weigh tokens. Use PerToken"),
        (None, "samples", "nothing measures windows. Add AccumulationCallback"),
        (None, "pixels", "read_effective_batch unit: must be one of"),
    ],
)
def test_what_nobody_measures_is_refused(strategy: Any, unit: str, said: str) -> None:
    asks = Asks(unit)
    ours = [] if strategy is None else [AccumulationCallback(strategy)]
    fitted("mixin", *ours, asks, module=Plain(), max_epochs=1)
    assert set(asks.found) == {None}
    assert said in asks.errors[-1]


def test_module_falls_back_on_tokens_where_samples_cannot_be_counted() -> None:
    found = []

    def ask(trainer: Any, pl_module: Any, *args: Any) -> None:
        if args[-1] == 0:
            with pytest.raises(TrainkitError, match="not known in samples: .* Ask aga"):
                _ = pl_module.effective_batch
        if args[-1] == WINDOW:
            found.append(pl_module.effective_batch)

    ready: Any = [{**b, "odd": torch.zeros(1)} for b in micro_batches(SEQUENCES)]
    data = DataLoader(ready, batch_size=None)
    asks = LambdaCallback(on_train_batch_end=ask)
    fitted("mixin", asks, loader=data, accumulate=WINDOW, max_epochs=1)
    assert found[0].unit == "tokens"
    assert found[0].micro_batch == sum(token_counts()[:WINDOW]) / WINDOW


def test_schedule_changes_the_window_and_not_the_micro_batch() -> None:
    asks = Asks()
    ours = AccumulationSchedule({0: 4, 1: 3, 3: 1}, unit="step")
    fitted("mixin", ours, asks, loader=batches(4), max_epochs=1)
    sizes = [4, 4, 4, 4, 3, 3, 3, 3, 3, 3]
    assert [found and found.size for found in asks.found] == [4 * n for n in sizes]


# ---- several ranks -------------------------------------------------------------------

SHARED = ragged_sequences(36)


def ask_on_ranks(rank: int, world: int, kind: str) -> list[Any]:
    asks, tokens = Asks(), Asks("tokens")
    module, callbacks, strategy = Mixed(), [asks, tokens], "ddp"
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
    return [asks.found[-1], tokens.found[-1], fit.num_training_batches]


@cache
def on_both() -> dict[str, list[Any]]:
    kinds = ("ddp", "tensor parallel")
    return run_cases(2, {kind: (ask_on_ranks, kind) for kind in kinds})


@pytest.mark.parametrize(("kind", "replicas"), [("ddp", 2), ("tensor parallel", 1)])
def test_replicas_equal_the_ranks_with_own_data(kind: str, replicas: int) -> None:
    """World size is not the number of replicas."""
    first, second = raise_rank_errors(on_both()[kind])
    assert first == second
    samples, tokens, num_batches = first
    assert num_batches == 9 // replicas + (replicas == 2)
    assert samples == EffectiveBatch(micro_batch=4, accumulate=2, replicas=replicas)
    assert (tokens.replicas, tokens.unit) == (replicas, "tokens")
    total = sum(len(ids) for ids, _ in SHARED)
    assert tokens.micro_batch == pytest.approx(total / 9, rel=0.25)
