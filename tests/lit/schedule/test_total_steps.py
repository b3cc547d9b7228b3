"""How many optimizer steps a schedule makes of a training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from tests.lit.fronts import Mixed, micro_batches
from tests.lit.schedule.scheduling import SEQUENCES, batches, fitted, schedule_of
from trainkit import AccumulationSchedule
from trainkit.errors import TrainkitError

PLAN = {0: 4, 1: 2}  # over epochs of ten batches: 3 + 5 + 5 steps


@pytest.mark.parametrize(
    "known",
    [{}, {"epochs": 3}, {"batches_per_epoch": 10}, {"max_steps": 5}],
)
def test_total_steps_of_an_unknown_length_is_refused(known: dict[str, int]) -> None:
    with pytest.raises(TrainkitError, match="it needs the length of training"):
        AccumulationSchedule(PLAN).total_steps(**known)


@pytest.mark.parametrize("max_steps", [None, -1])
def test_total_steps_of_an_endless_training_is_refused(max_steps: Any) -> None:
    ours = AccumulationSchedule(PLAN)
    with pytest.raises(TrainkitError, match="no end that is known.*max_epochs=-1"):
        ours.total_steps(batches_per_epoch=10, epochs=-1, max_steps=max_steps)
    assert ours.total_steps(batches_per_epoch=10, epochs=-1, max_steps=7) == 7


def test_total_steps_of_tokens_needs_their_mean() -> None:
    ours = AccumulationSchedule(PLAN, unit="tokens")
    with pytest.raises(TrainkitError, match="tokens_per_micro_batch="):
        ours.total_steps(batches_per_epoch=10, epochs=1)


class Asking(Mixed):
    """Asks how many steps there will be, where schedulers are made."""

    total: int | None = None
    estimated: Any = None

    def configure_optimizers(self) -> Any:
        ours = schedule_of(self)
        self.total = ours.total_steps(self.trainer)
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Any]:
        return iter(list(micro_batches(SEQUENCES)))


LENGTHS: dict[str, dict[str, Any]] = {
    "epochs": {"max_epochs": 3},
    "steps": {"max_steps": 7},
    "steps and epochs": {"max_steps": 7, "max_epochs": 3},
    "more steps than epochs have": {"max_steps": 70, "max_epochs": 3},
    "steps without end": {"max_steps": 17, "max_epochs": -1},
    "limited batches": {"max_epochs": 3, "limit_train_batches": 7},
    "limited share": {"max_epochs": 3, "limit_train_batches": 0.55},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run of five": {"fast_dev_run": 5},
}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.. the epoch")
def test_total_steps_equals_global_step(length: str) -> None:
    """pytorch-lightning#19684: also where something else ends training."""
    module = Asking()
    ours = AccumulationSchedule({0: 4, 3: 3, 5: 1}, unit="step")
    _, fit = fitted("mixin", ours, module=module, **LENGTHS[length])
    assert module.total == fit.global_step


def test_estimated_stepping_batches_does_not_equal_global_step() -> None:
    """Negative control: Lightning takes the first size for all."""
    module = Asking()
    _, fit = fitted("mixin", AccumulationSchedule(PLAN), module=module)
    assert (module.estimated, module.total, fit.global_step) == (9, 13, 13)


def test_total_steps_with_dropped_batches_equals_global_step() -> None:
    """pytorch-lightning#19684 and kohya's sd-scripts#251."""
    module = Asking()
    loader = batches(4, drop_last=True)
    ours = AccumulationSchedule(PLAN)
    _, fit = fitted("mixin", ours, module=module, loader=loader, max_steps=7)
    assert (module.total, fit.global_step) == (7, 7)
    module = Asking()
    _, fit = fitted("mixin", AccumulationSchedule(PLAN), module=module, loader=loader)
    assert module.total == fit.global_step == 3 + 5 + 5


def test_total_steps_of_a_stream_equals_max_steps() -> None:
    module = Asking()
    loader = DataLoader(Stream(), batch_size=None)
    ours = AccumulationSchedule({0: 4, 2: 1}, unit="step")
    _, fit = fitted("mixin", ours, module=module, loader=loader, max_steps=9)
    assert (module.total, fit.global_step) == (9, 9)
    with pytest.raises(TrainkitError, match="no end that is known, with inf batches"):
        fitted("mixin", AccumulationSchedule(PLAN), module=Asking(), loader=loader)
