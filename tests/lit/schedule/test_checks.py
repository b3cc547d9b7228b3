"""What an accumulation schedule cannot work with is refused or named, beforehand."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import lr_scheduler as schedulers
from transformers import get_cosine_schedule_with_warmup

from tests.helpers import run_ranks, trainer
from tests.lit.fronts import Mixed, Plain, micro_batches
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.schedule.scheduling import SEQUENCES, Manual, fitted, schedule_of
from trainkit import AccumulationCallback, AccumulationSchedule, PerSample, Uniform
from trainkit.errors import TrainkitError

PLAN = {0: 4, 1: 2}  # over epochs of ten batches: 3 + 5 + 5 steps


def refused(
    match: str,
    *callbacks: Any,
    module: Any = None,
    ours: Any = None,
    loader: Any = None,
    **how: Any,
) -> None:
    fit = trainer(callbacks=[ours or AccumulationSchedule(PLAN), *callbacks], **how)
    with pytest.raises(TrainkitError, match=match):
        fit.fit(module or Mixed(), loader or micro_batches(SEQUENCES))


def test_schedule_beside_lightnings_own_is_refused() -> None:
    other = GradientAccumulationScheduler({0: 2})
    refused("GradientAccumulationScheduler is there too. Keep one of them", other)


class Another(AccumulationSchedule):
    """Two of one type are refused by Lightning itself, for their state's sake."""


def test_two_schedules_are_refused() -> None:
    refused("Another is there too. Keep one", Another({0: 2}))


@pytest.mark.parametrize("make", [Mixed, Plain])
def test_schedule_beside_a_number_of_the_trainer_is_refused(make: Any) -> None:
    match = r"Trainer\(accumulate_grad_batches=3\) says one too.*write .0: 3"
    refused(match, module=make(), accumulate=3)


def test_schedule_beside_a_number_of_a_manual_trainer_is_refused() -> None:
    refused("accumulate_grad_batches", module=Manual(), accumulate=3)


def test_schedule_without_windows_is_refused() -> None:
    refused("needs the callback that weighs and divides", module=Plain())


class Meddles(pl.Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.meddle)

    def meddle(self, trainer: Any, *args: Any) -> None:
        trainer.accumulate_grad_batches = 3


@pytest.mark.parametrize(
    "hook", ["on_fit_start", "on_train_start", "on_train_batch_end"]
)
def test_another_hand_on_the_number_is_refused(hook: str) -> None:
    """MultimediaTechLab/YOLO#225 sets it in a callback, for each batch."""
    match = "AccumulationSchedule sets it, and somebody else has set it to 3"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "accumulation: an open window")
        refused(match, Meddles(hook))


@pytest.mark.parametrize("strategy", [PerSample(), Uniform()])
def test_tokens_that_nobody_weighs_are_refused(strategy: Any) -> None:
    refused(
        f"{type(strategy).__name__} does not weigh tokens",
        AccumulationCallback(strategy),
        module=Plain(),
        ours=AccumulationSchedule(PLAN, unit="tokens"),
    )


class Closes(Mixed):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_lbfgs_is_refused_before_its_first_long_window() -> None:
    """The first windows have one micro-batch, and would pass."""
    ours = AccumulationSchedule({0: 1, 1: 2})
    refused("LBFGS: .* accumulate_grad_batches is 2", module=Closes(), ours=ours)


class Fetches(Plain):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_fetching_by_oneself_is_refused_before_the_first_long_window() -> None:
    refused(
        r"training_step\(dataloader_iter\).*accumulate_grad_batches is 2",
        AccumulationCallback(Uniform()),
        module=Fetches(),
        ours=AccumulationSchedule({0: 1, 1: 2}),
    )


def train_static(rank: int, world: int) -> None:
    ours = AccumulationSchedule({0: 1, 1: 2})
    trainer(
        strategy=DDPStrategy(static_graph=True),
        devices=world,
        use_distributed_sampler=False,
        callbacks=[ours],
    ).fit(Mixed(), micro_batches(SEQUENCES))


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

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        ours = schedule_of(self)
        total = int(self.trainer.estimated_stepping_batches)
        if self.true:
            total = ours.total_steps(self.trainer)
        scheduler = self.make(optimizer, total)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


def closure(optimizer: Any, total: int) -> Any:
    table = torch.linspace(1, 0, 100)  # compared with, it would be no yes or no
    return schedulers.LambdaLR(
        optimizer, lambda step: max(0.0, 1 - step / total) + 0 * float(table[0])
    )


def default(optimizer: Any, total: int) -> Any:
    return schedulers.LambdaLR(optimizer, lambda s, total=total: 1 / (1 + s / total))


def _linear(step: int, *, total: int) -> float:
    return max(0.0, 1 - step / total)


def partial(optimizer: Any, total: int) -> Any:
    return schedulers.LambdaLR(optimizer, functools.partial(_linear, total=total))


def nested(optimizer: Any, total: int) -> Any:
    parts = [
        schedulers.ConstantLR(optimizer),
        schedulers.CosineAnnealingLR(optimizer, total),
    ]
    sequence = schedulers.SequentialLR(optimizer, parts, [2])
    return schedulers.ChainedScheduler([sequence])


def warmed(optimizer: Any, total: int) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, total_iters=2),
        schedulers.CosineAnnealingLR(optimizer, total - 2),
    ]
    return schedulers.SequentialLR(optimizer, parts, [2])


class Falls:
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, step: int) -> float:
        return max(0.0, 1 - step / self.length)


class OneOfOnesOwn(schedulers.LRScheduler):
    def __init__(self, optimizer: Any, iterations: int) -> None:
        self.iterations = iterations
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return list(self.base_lrs)


WRONG: dict[str, tuple[Make, str]] = {
    "cosine": (schedulers.CosineAnnealingLR, "CosineAnnealingLR: its T_max is 9"),
    "polynomial": (schedulers.PolynomialLR, "PolynomialLR: its total_iters is 9"),
    "transformers": (
        lambda o, n: get_cosine_schedule_with_warmup(o, 2, n),
        "LambdaLR: its num_training_steps is 9",
    ),
    "partial": (partial, "LambdaLR: its total is 9"),
    "closure": (closure, "LambdaLR: its total is 9"),
    "default": (default, "LambdaLR: its total is 9"),
    "nested": (nested, "CosineAnnealingLR: its T_max is 9"),
    "warmed": (warmed, r"SequentialLR: its CosineAnnealingLR.T_max \+ 2 is 9"),
    "object": (
        lambda o, n: schedulers.LambdaLR(o, Falls(n)),
        "LambdaLR: its length is 9",
    ),
    "method": (
        lambda o, n: schedulers.LambdaLR(o, Falls(n).__call__),
        "LambdaLR: its length is 9",
    ),
    "own": (OneOfOnesOwn, "OneOfOnesOwn: its iterations is 9"),
    "one cycle": (
        lambda o, n: schedulers.OneCycleLR(o, 0.5, total_steps=n),
        "OneCycleLR: its total_steps is 9.*It would raise at step 10",
    ),
}


class EndsSoon(pl.Callback):
    """Ends training with its first window: schedulers are looked at before it."""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.global_step > 0


@pytest.mark.parametrize("name", WRONG)
def test_scheduler_made_for_the_estimate_is_named(name: str) -> None:
    make, match = WRONG[name]
    module = Scheduled(make, true=False)
    if name == "one cycle":
        with pytest.raises(TrainkitError, match=match):
            fitted("mixin", AccumulationSchedule(PLAN), module=module)
        return
    with pytest.warns(UserWarning, match=match) as said:
        fitted("mixin", AccumulationSchedule(PLAN), EndsSoon(), module=module)
    named = [w for w in said if "schedule.total_steps" in str(w.message)]
    assert len(named) == 1
    assert "training takes 13 optimizer steps" in str(named[0].message)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")
def test_scheduler_made_for_the_true_number_is_not_named(name: str) -> None:
    """Filters turn any warning into an error. One cycle runs to its end."""
    fitted(
        "mixin",
        AccumulationSchedule(PLAN),
        *([] if name == "one cycle" else [EndsSoon()]),
        module=Scheduled(WRONG[name][0], true=True),
    )


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore:Tried to step")
def test_scheduler_made_for_the_estimate_is_named_under_tokens(name: str) -> None:
    """Nobody knows the true number beforehand, so that nothing is refused."""
    make, match = WRONG[name]
    ours = AccumulationSchedule({0: 4, 5000: 2}, unit="tokens")
    module = Scheduled(make, true=False)
    with pytest.warns(UserWarning, match=match.split(".*")[0]) as said:
        fitted("mixin", ours, EndsSoon(), module=module)
    named = [str(w.message) for w in said if "tokens_per_micro_batch" in str(w.message)]
    assert len(named) == 1
    assert "AccumulationSchedule changes that with the tokens it counts" in named[0]


PERIODS: dict[str, Make] = {
    "StepLR": schedulers.StepLR,
    "CosineAnnealingWarmRestarts": schedulers.CosineAnnealingWarmRestarts,
    "ConstantLR": lambda o, n: schedulers.ConstantLR(o, total_iters=n),
    "ExponentialLR": lambda o, n: schedulers.ExponentialLR(o, gamma=n),
    "LambdaLR": lambda o, n: schedulers.LambdaLR(o, abs),  # which holds nothing
    "SequentialLR": lambda o, n: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.StepLR(o, 2)], [n]
    ),
    "ReduceLROnPlateau": lambda o, n: schedulers.ReduceLROnPlateau(o, patience=n),
}


@pytest.mark.parametrize("unit", ["epoch", "tokens"])
@pytest.mark.parametrize("name", PERIODS)
def test_period_that_is_the_estimate_is_not_named(name: str, unit: Any) -> None:
    """It says how often, and not how long. Filters turn any warning into an error."""

    class Logs(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizers, configs = super().configure_optimizers()
            return optimizers, [{**configs[0], "monitor": "loss"}]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss, batch_size=1)
            return loss

    plan = {0: 4, (1 if unit == "epoch" else 100): 2}
    fitted(
        "mixin",
        AccumulationSchedule(plan, unit=unit),
        EndsSoon(),
        module=Logs(PERIODS[name], true=False),
    )


def test_one_cycle_that_is_too_long_is_only_said() -> None:
    make, _ = WRONG["one cycle"]
    with pytest.warns(UserWarning, match="OneCycleLR: its total_steps is 30.*takes 20"):
        fitted(
            "mixin",
            AccumulationSchedule({0: 1, 1: 2}),
            module=Scheduled(make, true=False),
        )


def test_estimate_that_max_steps_bounds_is_named() -> None:
    """It is 25 then, and not the 30 of all epochs."""
    module = Scheduled(schedulers.CosineAnnealingLR, true=False)
    ours = AccumulationSchedule({0: 1, 1: 2})
    with pytest.warns(UserWarning, match="T_max is 25.*takes 20 optimizer steps"):
        fitted("mixin", ours, module=module, max_steps=25)


def test_one_cycle_would_raise_where_the_refusal_says() -> None:
    """Negative control: without the check, at step 10."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scheduler = schedulers.OneCycleLR(optimizer, 0.5, total_steps=9)
    for _ in range(9):
        optimizer.step()
        scheduler.step()
    with pytest.raises(ValueError, match="Tried to step 10 times"):
        scheduler.step()


SILENT: dict[str, dict[str, Any]] = {
    "by epoch": {"interval": "epoch"},
    "one size": {"plan": {0: 4}},
}


@pytest.mark.parametrize("name", SILENT)
def test_scheduler_that_cannot_be_wrong_is_not_named(name: str) -> None:
    how = {"plan": PLAN, "interval": "step", **SILENT[name]}
    fitted(
        "mixin",
        AccumulationSchedule(how["plan"]),
        module=Scheduled(
            schedulers.CosineAnnealingLR, true=False, interval=how["interval"]
        ),
    )


def test_scheduler_that_is_resumed_at_the_estimate_is_not_named(tmp_path: Any) -> None:
    """Its last_epoch is 9, as the estimate is."""
    path = tmp_path / "at.ckpt"

    def run(*callbacks: Any, resume: Any = None) -> Any:
        module = Scheduled(schedulers.CosineAnnealingLR, true=True)
        ours = AccumulationSchedule({0: 4, 1: 1})
        fitted(
            "mixin", ours, *callbacks, module=module, loader=Resumable(), resume=resume
        )

    run(Saving(path, 15))
    (state,) = torch.load(path, weights_only=True)["lr_schedulers"]
    assert state["last_epoch"] == 9
    run(resume=path)
