"""BatchNormGuard("exact") trains as the whole batch does."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor

from tests.lit.batch_norm.exact_fits import (
    Bare,
    Counts,
    Images,
    Listed,
    Mixed,
    OwnBackward,
    Said,
    Stem,
    Thawed,
    apart,
    evaluating,
    exact,
    fit,
    partly_frozen,
    without_statistics,
)
from trainkit import (
    AccumulationCallback,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    NoiseScale,
    PerSample,
    Weighed,
    WindowMonitor,
)

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")

SPLIT = MicroBatching(size=4)
INSIDE = MicroBatching(inside="net", size=4)
COUNTED = Weighed(by=lambda module, batch: module.number)


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(
            use_buffers=True,
            avg_fn=lambda average, value, number: (
                average + (value - average) / 2 if value.is_floating_point() else value
            ),
        )

    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return step_idx is not None


@dataclass
class Case:
    """A training in chunks.

    Attributes:
        make: the module.
        cut: the options; None where the module has its own.
        others: makes more callbacks.
        strategy: what counts.
        plain: the module that plain Lightning trains, if it is another one.
        naive: whether plain accumulation with the same callbacks is far off.
        options: of the Trainer.
    """

    make: Callable[[], Any] = Images
    cut: MicroBatching | None = SPLIT
    others: Callable[[], list[Any]] = list
    strategy: Any = None
    plain: Callable[[], Any] | None = None
    naive: bool = True
    options: Any = None


CASES = {
    "split": Case(),
    "inside, found": Case(cut=MicroBatching(inside="auto", size=3)),
    "no batch exceeds the size": Case(cut=MicroBatching(size=64), naive=False),
    "in the step": Case(Bare),
    "mixin": Case(Mixed, None, plain=Images),
    "list": Case(Listed),
    "own backward": Case(OwnBackward),
    "layer in the step": Case(Stem, INSIDE, naive=False),
    "counted": Case(Counts, strategy=COUNTED),
    "said": Case(Said, None, plain=Counts),
    "frozen": Case(partly_frozen),
    "late": Case(evaluating, others=lambda: [Thawed()]),
    "no statistics": Case(without_statistics, others=lambda: [Thawed()]),
    "averages": Case(others=lambda: [Average()]),
    "schedule of one": Case(others=lambda: [GradientAccumulationScheduler({0: 1})]),
    "clipped, inside": Case(cut=INSIDE, options={"gradient_clip_val": 0.05}),
}


def ours(case: Case) -> list[Any]:
    if case.cut is None:
        return [BatchNormGuard("exact")]
    return exact(case.cut, case.strategy)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_whole_batches_and_plain_accumulation_does_not(
    name: str,
) -> None:
    case = CASES[name]
    options = case.options or {}
    whole, module, naive = (case.plain or case.make)(), case.make(), case.make()
    plain = fit(whole, *case.others(), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran whole")
        fitted = fit(module, *case.others(), *ours(case), **options)
    assert apart(module, whole) <= 1e-10  # buffers too
    assert not [n for n, m in module.named_modules() if "forward" in vars(m)]
    assert list(module.state_dict()) == list(whole.state_dict())
    if case.plain is None:
        logged = {k: float(v) for k, v in fitted.callback_metrics.items()}
        wanted = {k: float(v) for k, v in plain.callback_metrics.items()}
        assert logged == pytest.approx(wanted, rel=1e-6)
    if case.naive:
        parts = AccumulationCallback(case.strategy or PerSample(), micro_batching=SPLIT)
        fit(naive, *case.others(), *([parts] if case.cut else []), **options)
        assert apart(naive, whole) > 1e-3


def test_rates_and_windows_numbers_are_those_of_one_batch(capsys: Any) -> None:
    module, plain = Listed(), Listed()
    monitor = WindowMonitor(every_n_steps=1)
    rate = LRScaling("sqrt", reference_batch=5)
    fitted = fit(module, *exact(SPLIT), rate, monitor)
    plain.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        plain.parameters(), lr=0.1 * 2**0.5, momentum=0.9
    )
    fit(plain)
    assert apart(module, plain) <= 1e-10
    assert float(fitted.callback_metrics["window/micro_batches"]) == 1
    assert float(fitted.callback_metrics["window/weight"]) == 6
    assert "blocks.0, blocks.1 in chunks of at most 4 rows" in capsys.readouterr().out


def test_statistics_epoch_of_weight_averaging() -> None:
    """The last epoch takes no step: its statistics are those of loader batches."""
    trained = []
    for callbacks in (
        [],
        [AccumulationCallback(PerSample())],
        exact(SPLIT),
        [AccumulationCallback(PerSample(), micro_batching=SPLIT)],
    ):
        module = Images()
        module.net.last_norm.momentum = 0.2  # type: ignore[union-attr]
        average = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        fit(module, average, *callbacks, epochs=4)
        trained.append(module)
    plain, whole, module, naive = trained  # plain Lightning steps at the epoch's end
    assert apart(module, whole) <= 1e-10
    buffers = [dict(each.net.named_buffers()) for each in (plain, module, naive)]
    for name, value in buffers[0].items():
        assert torch.allclose(buffers[1][name].double(), value.double(), atol=1e-10)
    assert int(module.net.norm.num_batches_tracked) == 3  # type: ignore[union-attr, arg-type]
    name = "norm.running_var"
    assert float((buffers[2][name] - buffers[0][name]).abs().max()) > 1e-4


class Looks(pl.Callback):
    """Notes what each hook around a step sees."""

    def __init__(self) -> None:
        self.before, self.after = 0, 0
        self.norms: list[float] = []
        self.logits: list[Tensor] = []
        self.names: list[list[str]] = []

    def on_before_backward(self, *of: Any, **named: Any) -> None:
        self.before += 1

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.after += 1

    def on_before_optimizer_step(self, *of: Any, **named: Any) -> None:
        self.norms.append(float(of[1].net.first.weight.grad.norm()))

    def on_train_batch_end(self, *of: Any, **named: Any) -> None:
        self.names.append(list(of[1].state_dict()))
        self.logits.append(of[2]["logits"].detach().clone())


def test_hooks_and_outputs_are_those_of_a_step() -> None:
    plain, looks = Looks(), Looks()
    fit(Images(), plain, epochs=1)
    fit(Images(), *exact(SPLIT), looks, epochs=1)
    assert (looks.before, looks.after) == (plain.before, plain.after) == (3, 3)
    assert looks.norms == pytest.approx(plain.norms, rel=1e-9)
    assert looks.names == plain.names
    for one, other in zip(plain.logits, looks.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


def test_noise_scale_says_that_it_cannot_measure() -> None:
    noise = NoiseScale(every_n_steps=1, if_impossible="say")
    fit(Images(), *exact(SPLIT), noise, epochs=1)
    assert noise.why_not is not None
    assert "have no gradient of their own" in noise.why_not
