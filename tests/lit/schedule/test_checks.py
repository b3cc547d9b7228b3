"""What an accumulation schedule cannot work with is refused or named, beforehand."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import lr_scheduler as lrs
from transformers import get_cosine_schedule_with_warmup

from tests.helpers import run_ranks
from tests.lit.fronts import Mixed, Plain
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.schedule.scheduling import Manual, fitted, schedule_of
from trainkit import AccumulationCallback, AccumulationSchedule, PerSample, Uniform
from trainkit.errors import TrainkitError

PLAN = {0: 4, 1: 2}  # over epochs of ten batches: 3 + 5 + 5 steps
PLANNED = AccumulationSchedule(PLAN)
BY_TOKENS = AccumulationSchedule(PLAN, unit="tokens")
GROWS = AccumulationSchedule({0: 1, 1: 2})  # its first windows would pass


class Another(AccumulationSchedule):
    """Two of one type are refused by Lightning itself, for their state's sake."""


class Meddles(pl.Callback):
    """MultimediaTechLab/YOLO#225 sets the number in a callback, for each batch."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.meddle)

    def meddle(self, trainer: Any, *args: Any) -> None:
        trainer.accumulate_grad_batches = 3


class Closes(Mixed):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Fetches(Plain):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.parametrize(
    ("make", "callbacks", "text"),
    [
        (Mixed, [GradientAccumulationScheduler({0: 2})], "Scheduler is there too. K"),
        (Mixed, [Another({0: 2})], "Another is there too. Keep one of them"),
        (Plain, [], "needs the callback that weighs and divides"),
        *(
            (Mixed, [Meddles(hook)], "it, and somebody else has set it to 3. Leave it")
            for hook in ("on_fit_start", "on_train_start", "on_train_batch_end")
        ),
        (Plain, [BY_TOKENS, AccumulationCallback(PerSample())], "PerSample does not w"),
        (Plain, [BY_TOKENS, AccumulationCallback(Uniform())], "Uniform does not weig"),
        (Closes, [GROWS], "LBFGS: .* accumulate_grad_batches is 2"),
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
    text = r"Trainer\(accumulate_grad_batches=3\) says one too.*write .0: 3"
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

Make = Callable[[Any, int], Any]


class Scheduled(Mixed):
    """Makes its scheduler for the estimated or for the true number of steps."""

    def __init__(self, make: Make, *, interval: str = "step", true: bool) -> None:
        super().__init__(optimizer="sgd")
        self.make = make
        self.interval = interval
        self.true = true

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total = int(self.trainer.estimated_stepping_batches)
        if self.true:
            total = schedule_of(self).total_steps(self.trainer)
        config = {"interval": self.interval, "monitor": "loss"}
        return [optimizer], [{"scheduler": self.make(optimizer, total), **config}]


class EndsSoon(pl.Callback):
    """Ends training with its first window: schedulers are looked at before it."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.global_step > 0


def said_of(
    make: Make,
    plan: Any = PLAN,
    unit: Any = "epoch",
    *,
    callback: Any = None,
    interval: str = "step",
    true: bool = False,
    **how: Any,
) -> list[str]:
    """What is said of a scheduler. Filters turn any other warning into an error."""
    module = Scheduled(make, interval=interval, true=true)
    ours = AccumulationSchedule(plan, unit=unit)
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", ".*estimated_stepping_batches says")
        fitted("mixin", ours, callback or EndsSoon(), module=module, **how)
    return [str(warning.message) for warning in said]


def closure(optimizer: Any, total: int) -> Any:
    table = torch.linspace(1, 0, 100)  # compared with, it would be no yes or no
    return lrs.LambdaLR(
        optimizer, lambda step: max(0.0, 1 - step / total) + 0 * float(table[0])
    )


def falls(step: int, *, total: int) -> float:
    return max(0.0, 1 - step / total)


class Falls:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        return falls(step, total=self.length)


class OneOfOnesOwn(lrs.LRScheduler):
    def __init__(self, optimizer: Any, iterations: int) -> None:
        self.iterations = iterations
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return list(self.base_lrs)


def one_cycle(optimizer: Any, total: int) -> Any:
    return lrs.OneCycleLR(optimizer, 0.5, total_steps=total)


def warmed(optimizer: Any, total: int) -> Any:
    rest = lrs.CosineAnnealingLR(optimizer, total - 2)
    return lrs.SequentialLR(
        optimizer, [lrs.LinearLR(optimizer, total_iters=2), rest], [2]
    )


def nested(optimizer: Any, total: int) -> Any:
    parts = [lrs.ConstantLR(optimizer), lrs.CosineAnnealingLR(optimizer, total)]
    return lrs.ChainedScheduler([lrs.SequentialLR(optimizer, parts, [2])])


def default(optimizer: Any, total: int) -> Any:
    return lrs.LambdaLR(optimizer, lambda s, total=total: falls(s, total=total))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lrs.CosineAnnealingLR, "CosineAnnealingLR: its T_max"),
        (nested, "CosineAnnealingLR: its T_max"),
        (warmed, "SequentialLR: its CosineAnnealingLR.T_max + 2"),
        (lrs.PolynomialLR, "PolynomialLR: its total_iters"),
        (
            lambda o, n: get_cosine_schedule_with_warmup(o, 2, n),
            "LambdaLR: its num_training_steps",
        ),
        (
            lambda o, n: lrs.LambdaLR(o, functools.partial(falls, total=n)),
            "LambdaLR: its total",
        ),
        (closure, "LambdaLR: its total"),
        (default, "LambdaLR: its total"),
        (lambda o, n: lrs.LambdaLR(o, Falls(n)), "LambdaLR: its length"),
        (lambda o, n: lrs.LambdaLR(o, Falls(n).__call__), "LambdaLR: its length"),
        (OneOfOnesOwn, "OneOfOnesOwn: its iterations"),
        (one_cycle, "OneCycleLR: its total_steps"),
    ],
)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_scheduler_made_for_the_estimate_is_named_and_for_the_true_number_is_not(
    make: Make, named: str
) -> None:
    """One cycle would raise, and is refused. By tokens, nobody knows the true number
    beforehand, so that nothing is."""
    text = f"{named} is 9"
    if make is one_cycle:
        with pytest.raises(TrainkitError, match=f"{text}.*It would raise at step 10"):
            said_of(make)
        assert said_of(make, true=True, callback=pl.Callback()) == []  # to its end
    else:
        (said,) = said_of(make)
        assert text in said
        assert "training takes 13 optimizer steps. In configure_optimizers" in said
        assert said_of(make, true=True) == []
    (said,) = said_of(make, {0: 4, 5000: 2}, "tokens")
    assert text in said
    assert "AccumulationSchedule changes that with the tokens it counts" in said
    assert "tokens_per_micro_batch" in said


PERIODS: dict[str, Make] = {
    "StepLR": lrs.StepLR,
    "CosineAnnealingWarmRestarts": lrs.CosineAnnealingWarmRestarts,
    "ConstantLR": lambda o, n: lrs.ConstantLR(o, total_iters=n),
    "ExponentialLR": lambda o, n: lrs.ExponentialLR(o, gamma=n),
    "LambdaLR": lambda o, n: lrs.LambdaLR(o, abs),  # which holds nothing
    "SequentialLR": lambda o, n: lrs.SequentialLR(
        o, [lrs.ConstantLR(o), lrs.StepLR(o, 2)], [n]
    ),
    "ReduceLROnPlateau": lambda o, n: lrs.ReduceLROnPlateau(o, patience=n),
}


@pytest.mark.parametrize("name", PERIODS)
def test_period_that_is_the_estimate_is_not_named(name: str) -> None:
    """It says how often, and not how long."""
    assert said_of(PERIODS[name]) == []
    assert said_of(PERIODS[name], {0: 4, 100: 2}, "tokens") == []


def test_only_a_scheduler_that_would_be_wrong_is_named(tmp_path: Path) -> None:
    """Not one that steps by epochs, or under one size, or whose last_epoch, in a
    checkpoint, is what the estimate is. With `max_steps` the estimate is that."""
    cosine, fewer = lrs.CosineAnnealingLR, {0: 1, 1: 2}
    assert said_of(cosine, interval="epoch") == []
    assert said_of(cosine, {0: 4}) == []
    (said,) = said_of(one_cycle, fewer, callback=pl.Callback())  # it is too long
    assert re.search("OneCycleLR: its total_steps is 30.*takes 20", said)
    (said,) = said_of(cosine, fewer, max_steps=25)
    assert re.search("T_max is 25.*takes 20 optimizer steps", said)
    path, how = tmp_path / "at.ckpt", {"plan": {0: 4, 1: 1}, "true": True}
    saving = Saving(path, 15)
    assert said_of(cosine, **how, callback=saving, loader=Resumable()) == []
    (state,) = torch.load(path, weights_only=True)["lr_schedulers"]
    assert state["last_epoch"] == 9
    assert said_of(cosine, **how, resume=path, loader=Resumable()) == []


def test_one_cycle_would_raise_where_the_refusal_says() -> None:
    """Negative control: without the check, at step 10."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = one_cycle(optimizer, 9)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    with pytest.raises(ValueError, match="Tried to step 10 times"):
        scheduler.step()
