"""What an accumulation schedule cannot work with is refused or named, beforehand."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    LambdaCallback,
)
from lightning.pytorch.strategies import DDPStrategy
from transformers import get_cosine_schedule_with_warmup

from tests.helpers import run_ranks
from tests.lit.fronts import Mixed, Plain
from tests.lit.schedule.scheduling import Manual, fitted, schedule_of
from trainkit import AccumulationCallback, AccumulationSchedule, PerSample, Uniform
from trainkit.errors import TrainkitError

PLAN = {0: 4, 1: 2}  # over epochs of ten batches: 3 + 5 + 5 steps
PLANNED = AccumulationSchedule(PLAN)
BY_TOKENS = AccumulationSchedule(PLAN, unit="tokens")
GROWS = AccumulationSchedule({0: 1, 1: 2})  # its first windows would pass


class Another(AccumulationSchedule):
    """Two of one type are refused by Lightning itself, for their state's sake."""


def meddles(hook: str) -> pl.Callback:
    """MultimediaTechLab/YOLO#225 sets the number in a callback, for each batch."""
    return LambdaCallback(
        **{hook: lambda trainer, *_: setattr(trainer, "accumulate_grad_batches", 3)}
    )


class Fetches(Plain):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.parametrize(
    ("make", "callbacks", "text"),
    [
        (Mixed, [GradientAccumulationScheduler({0: 2})], "onScheduler says one too"),
        (Mixed, [Another({0: 2})], "and Another says one too. Keep one of them"),
        (Plain, [], "needs the callback that weighs and divides"),
        *(
            (Mixed, [meddles(hook)], "it, and somebody else has set it to 3. Leave it")
            for hook in ("on_fit_start", "on_train_start", "on_train_batch_end")
        ),
        (Plain, [BY_TOKENS, AccumulationCallback(PerSample())], "PerSample does not w"),
        (Plain, [BY_TOKENS, AccumulationCallback(Uniform())], "Uniform does not weig"),
        (Fetches, [GROWS, AccumulationCallback(Uniform())], "ader_iter.*_batches is 2"),
    ],
)
@pytest.mark.filterwarnings("ignore:accumulation. an op", "ignore:.*`dataloader_iter`")
def test_what_a_schedule_cannot_work_with_is_refused(
    make: Any, callbacks: list[Any], text: str
) -> None:
    is_there = any(each in callbacks for each in (BY_TOKENS, GROWS))
    with pytest.raises(TrainkitError, match=text):
        fitted("mixin", *([] if is_there else [PLANNED]), *callbacks, module=make())


@pytest.mark.parametrize("make", [Mixed, Plain, Manual])
def test_schedule_beside_a_number_of_the_trainer_is_refused(make: Any) -> None:
    text = r"Trainer\(accumulate_grad_batches=3\) says one too. Keep one"
    text = "accumulate_grad_batches" if make is Manual else text
    with pytest.raises(TrainkitError, match=text):
        fitted("mixin", PLANNED, module=make(), accumulate=3)


def train_static(rank: int, world: int) -> None:
    strategy = DDPStrategy(static_graph=True)
    how = {"devices": world, "use_distributed_sampler": False}
    fitted("mixin", GROWS, strategy=strategy, **how)


def test_static_graph_is_refused_before_the_first_long_window() -> None:
    (error,) = run_ranks(train_static, 1)
    assert "static_graph=True: DDP cannot run a window of several" in str(error)


# ---- schedulers made for another number of steps -------------------------------------


class Scheduled(Mixed):
    """Makes a scheduler for the estimated or for the true number of steps."""

    def __init__(self, asks: str, *, interval: str = "step") -> None:
        super().__init__(optimizer="sgd")
        self.asks = asks
        self.interval = interval

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = 7
        if "estimated" in self.asks:
            total = int(self.trainer.estimated_stepping_batches)
        if "true" in self.asks:
            total = schedule_of(self).total_steps(self.trainer)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 2, total)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


def said_of(
    asks: str,
    plan: Any = PLAN,
    unit: Any = "epoch",
    *,
    interval: str = "step",
    **how: Any,
) -> list[str]:
    """What is said of a scheduler. Filters turn any other warning into an error."""
    module = Scheduled(asks, interval=interval)
    ours = AccumulationSchedule(plan, unit=unit)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", ".*estimated_stepping_batches: it was read")
        # Schedulers are looked at before the first window.
        fitted("mixin", ours, module=module, max_steps=1, **how)
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize(
    ("plan", "unit", "asks_for"),
    [
        (PLAN, "epoch", r"self.trainer\)"),
        ({0: 4, 5000: 2}, "tokens", r"self.trainer, tokens_per_micro_batch=...\)"),
    ],
)
def test_who_asks_for_the_estimate_alone_is_told_whom_to_ask(
    plan: Any, unit: Any, asks_for: str
) -> None:
    (said,) = said_of("estimated", plan, unit)
    assert "takes windows of the first size, 4, for all" in said
    assert re.search(rf"take schedule.total_steps\({asks_for}", said)


@pytest.mark.parametrize(
    ("asks", "plan", "how"),
    [
        ("true", PLAN, {}),
        ("estimated and true", PLAN, {}),
        ("neither", PLAN, {}),
        ("estimated", PLAN, {"interval": "epoch"}),
        ("estimated", {0: 4}, {}),
    ],
)
def test_nobody_else_is_told(asks: str, plan: Any, how: Any) -> None:
    assert said_of(asks, plan, **how) == []
