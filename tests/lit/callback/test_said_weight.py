"""A weight that the module says wrongly, twice, elsewhere or not at all is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

import trainkit
from tests.helpers import trainer
from tests.lit.front.keeping import (
    ByHand,
    Keeping,
    batches,
    count_kept,
    kept_in,
    kept_loss,
    run,
)
from tests.lit.fronts import Plain
from trainkit import (
    AccumulationCallback,
    Accumulator,
    BatchNormGuard,
    MicroBatching,
    PerSample,
    PerToken,
    TrainkitError,
    Weighed,
)
from trainkit.core.strategies import weigh_alike

# Each of these errors ends a training within a window.
pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")


class Saying(Keeping):
    """Says what a function does."""

    def __init__(self, say: Callable[[Any], None], **how: Any) -> None:
        super().__init__(**how)
        self.say = say

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.say(self)
        return kept_loss(self.net, batch)


def twice(module: Any) -> None:
    module.weigh(2)
    module.weigh(torch.tensor(3.0))


@pytest.mark.parametrize("split", [None, MicroBatching(size=4)], ids=["", "split"])
@pytest.mark.parametrize(
    ("say", "text"),
    [
        (lambda module: None, "Saying.training_step: .*was not called for this loss"),
        (twice, r"self.weigh\(3\): this loss was weighed already, with 2"),
        (lambda m: m.weigh(-1), r"self.weigh\(n\): must be finite .* received -1"),
        (lambda m: m.weigh(torch.tensor(float("nan"))), "not negative, received nan"),
        (lambda m: m.weigh(torch.ones(3)), r"torch.float32 and shape \[3\]"),
        (lambda m: m.weigh(torch.tensor(1j)), "a 0-d tensor, received complex"),
        (lambda m: m.weigh("many"), "a number or a 0-d tensor, received str"),
    ],
    ids=["never", "twice", "negative", "nan", "several", "complex", "text"],
)
def test_a_wrong_number_is_refused_by_name(say: Any, text: str, split: Any) -> None:
    with pytest.raises(TrainkitError, match=text):
        run(Saying(say, split=split), window=2)


@pytest.mark.parametrize(
    ("accumulation", "text"),
    [
        (PerToken(), "weighed by PerToken, which asks the batch"),
        (Weighed(by=count_kept), r"Weighed\(by=...\) is set"),
    ],
)
def test_a_number_that_nobody_asked_for_is_refused(
    accumulation: Any, text: str
) -> None:
    module = Keeping()
    module.accumulation = accumulation
    with pytest.raises(TrainkitError, match=text):
        run(module)


class Calling(pl.Callback):
    """Says a weight in a hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.call)

    def call(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        pl_module.weigh(1)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_epoch_end"])
def test_a_number_outside_of_training_step_is_refused(hook: str) -> None:
    with pytest.raises(TrainkitError, match="called outside of training_step"):
        run(Keeping(), Calling(hook))


def test_validation_may_call_training_step() -> None:
    class Validating(Keeping):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    fitting = trainer(2, max_epochs=1)
    fitting.fit(Validating(), batches(), batches())
    assert fitting.state.finished


def test_without_a_trainer_a_number_is_only_checked() -> None:
    module = Keeping()
    module.training_step(next(iter(batches())), 0)
    with pytest.raises(TrainkitError, match="received -1"):
        module.weigh(-1)


def test_a_plain_module_needs_a_function() -> None:
    with pytest.raises(TrainkitError, match=r"Plain has no Accum.*Weighed\(by=count\)"):
        run(Plain(kept_loss), AccumulationCallback(Weighed()))
    wrong = AccumulationCallback(Weighed(by=lambda module, batch: None))
    with pytest.raises(TrainkitError, match="Weighed by=<lambda>: .*received NoneType"):
        run(Plain(kept_loss), wrong)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"loss_reduction": "total"}, "Weighed loss_reduction: must be 'mean' or"),
        ({"loss_reduction": "rms"}, "Weighed loss_reduction: must be 'mean', 'sum'"),
        ({"by": 3}, "Weighed by: must be a function .* received 3"),
        ({"by": "math.pi"}, "Weighed by: must be a function"),
        ({"by": "nowhere.count"}, "received 'nowhere.count' .No module named"),
        ({"by": ""}, "Weighed by: must be the dotted path"),
    ],
)
def test_wrong_options_are_refused(how: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        Weighed(**how)


def test_strategies_with_one_function_weigh_alike() -> None:
    path = f"{count_kept.__module__}.count_kept"
    assert weigh_alike(Weighed(by=path), Weighed(by=path))
    assert not weigh_alike(Weighed(by=path), Weighed())


def test_a_loop_of_ones_own_passes_the_weight() -> None:
    accumulator, weight = Accumulator(Weighed()), torch.ones(1, requires_grad=True)
    with pytest.raises(TrainkitError, match="a batch does not show its weight"):
        accumulator.backward(weight.sum(), {"ids": torch.ones(2)})
    accumulator.backward(weight.sum(), weight=torch.tensor(3))
    accumulator.backward((4 * weight).sum(), weight=1)
    stats = accumulator.finish([weight])
    assert weight.grad is not None
    assert (float(stats.weight), float(weight.grad)) == (4, (3 + 4) / 4)


def test_terms_cannot_be_said() -> None:
    module = Keeping(split=MicroBatching(size=4))
    module.accumulation = {"box": Weighed(), "l2": PerSample()}
    with pytest.raises(TrainkitError, match=r"Weighed\(\) of \['box'\] is known after"):
        run(module, window=1)
    with pytest.raises(TrainkitError, match=r"Weighed\(\) of \['box'\] is known after"):
        trainkit.check(module, batches())


@pytest.mark.parametrize("name", ["both", "late", "lost"])
def test_by_hand_each_number_is_for_one_loss(name: str) -> None:
    """`weight=` comes first; a number that no loss has taken is an error."""

    class Both(ByHand):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            number = kept_in(batch).sum() + 1
            if name != "late":
                self.weigh(number)
            loss = self.net(batch["ids"]).square().mean()
            self.accumulate(loss, batch, weight=number if name == "both" else None)
            if name == "lost":
                self.accumulate(loss, batch)

    text = {"both": "no loss took this weight", "late": "was not called for this loss"}
    with pytest.raises(TrainkitError, match=text.get(name, "was not called for this")):
        run(Both())


class Evaluating(Keeping):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_exact("val", torch.tensor(1.0), batch)


def test_a_log_outside_of_training_step_needs_the_number() -> None:
    with pytest.raises(TrainkitError, match=r"log_exact\(\): .* Pass weight=n"):
        trainer().fit(Evaluating(), batches(), batches())


class Normed(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.norm(self.net.embed(batch["ids"]).flatten(0, 1))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def test_runs_aside_may_say_numbers() -> None:
    """`training_step` runs once more to compute BatchNorm's statistics."""
    guard = BatchNormGuard("recalibrate", num_batches=2)
    fitted = trainer(2, callbacks=[guard], max_epochs=1, num_sanity_val_steps=0)
    fitted.fit(Normed(), batches(), batches())
    assert fitted.global_step == 5


def test_a_number_on_the_device_is_refused_one_window_late() -> None:
    """Here by a function whose tensor hides its value; nothing waits for it."""

    class Hidden(Tensor):
        is_cpu = False

    def negative(module: Any, batch: Any) -> Tensor:
        return (-kept_in(batch).sum()).as_subclass(Hidden)

    with pytest.raises(TrainkitError, match=r"finite and not negative.*self.weigh\(\)"):
        run(Plain(kept_loss), AccumulationCallback(Weighed(by=negative)))
