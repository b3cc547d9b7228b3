"""A weight that the module says wrongly, twice, elsewhere or not at all is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

import trainkit
from tests.helpers import trainer
from tests.lit.front.test_weighed import (
    ByHand,
    Keeping,
    batches,
    count_kept,
    kept_in,
    kept_loss,
    run,
)
from tests.zoo.modules import Plain, hooked
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

# Each of these errors ends a training within a window.
pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")
CUT = MicroBatching(size=4)


class Saying(Keeping):
    """Says what a function does."""

    def __init__(self, say: Callable[[Any], Any], **how: Any) -> None:
        super().__init__(**how)
        self.say = say

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.say(self)
        return self.loss_of(batch)


def twice(module: Any) -> None:
    module.weigh(2)
    module.weigh(torch.tensor(3.0))


SAID: dict[str, tuple[Callable[[Any], Any], str]] = {
    "never": (lambda m: None, "Saying.training_step: .*was not called for this loss"),
    "twice": (twice, r"self.weigh\(3\): this loss was weighed already, with 2"),
    "negative": (lambda m: m.weigh(-1), r"must be finite .* received -1"),
    "nan": (lambda m: m.weigh(torch.tensor(torch.nan)), "not negative, received nan"),
    "several": (lambda m: m.weigh(torch.ones(3)), r"torch.float32 and shape \[3\]"),
    "complex": (lambda m: m.weigh(torch.tensor(1j)), "a 0-d tensor, received complex"),
    "text": (lambda m: m.weigh("many"), "a number or a 0-d tensor, received str"),
}
TERMS = r"Weighed\(\) of \['box'\] is known after"


def in_terms(cut: MicroBatching | None = CUT) -> Any:
    module = Keeping(cut=cut)
    module.accumulation = {"box": Weighed(), "l2": PerSample()}
    return module


def weighed_by(strategy: Any) -> Any:
    module = Keeping()
    module.accumulation = strategy
    return module


def calling(hook: str) -> LambdaCallback:
    """Says a weight in a hook."""

    def call(trainer: Any, module: Any, *args: Any) -> None:
        module.weigh(1)

    return LambdaCallback(**{hook: call})


def without_number(self: Any, batch: Any, batch_idx: int) -> None:
    self.log_exact("val", torch.tensor(1.0), batch)


class Hidden(Tensor):
    """Hides its value, as if it were on a device; nothing waits for it."""

    is_cpu = False


def negative(module: Any, batch: Any) -> Tensor:
    return (-kept_in(batch).sum()).as_subclass(Hidden)


def plainly(strategy: Any) -> Any:
    return run(Plain(kept_loss), AccumulationCallback(strategy))


WITHOUT_NUMBER = hooked(Keeping, validation_step=without_number)
LATE = hooked(ByHand, says=False)
LOST = hooked(ByHand, times=2)
ROWS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"{name}{', split' if cut else ''}": (
            lambda say=say, cut=cut: run(Saying(say, cut=cut), window=2),
            text,
        )
        for name, (say, text) in SAID.items()
        for cut in (None, CUT)
    },
    "nobody asked": (
        lambda: run(weighed_by(PerToken())),
        "weighed by PerToken, which asks the batch",
    ),
    "a function is asked": (
        lambda: run(weighed_by(Weighed(by=count_kept))),
        r"Weighed\(by=...\) is set",
    ),
    **{
        hook: (
            lambda hook=hook: run(Keeping(), calling(hook)),
            "called outside of training_step",
        )
        for hook in ("on_train_batch_start", "on_train_epoch_end")
    },
    "without a mixin": (
        lambda: plainly(Weighed()),
        r"Plain has no Accum.*Weighed\(by=count\)",
    ),
    "counted wrongly": (
        lambda: plainly(Weighed(by=lambda module, batch: None)),
        "Weighed by=<lambda>: .*received NoneType",
    ),
    "counted wrongly on a device": (
        lambda: plainly(Weighed(by=negative)),
        r"finite and not negative.*self.weigh\(\)",
    ),
    "terms": (lambda: run(in_terms(), window=1), TERMS),
    "terms, checked": (lambda: trainkit.check(in_terms(), batches()), TERMS),
    # By hand each number is for one loss: `weight=` comes first, and a number that no
    # loss has taken is an error.
    "by hand, both": (
        lambda: run(hooked(ByHand, passes=True)()),
        "no loss took this weight",
    ),
    "by hand, late": (lambda: run(LATE()), "was not called for this loss"),
    "by hand, lost": (lambda: run(LOST()), "was not called for this"),
    "logged": (
        lambda: trainer().fit(WITHOUT_NUMBER(), batches(), batches()),
        r"log_exact\(\): .* Pass weight=n",
    ),
    "without a Trainer": (lambda: Keeping().weigh(-1), "received -1"),
    "a loop of one's own": (
        lambda: Accumulator(Weighed()).backward(torch.ones(()), {}),
        "a batch does not show its weight",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_number_is_refused_by_name(name: str) -> None:
    act, text = ROWS[name]
    with pytest.raises(TrainkitError, match=text):
        act()


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


def test_a_loop_of_ones_own_passes_the_weight() -> None:
    accumulator, weight = Accumulator(Weighed()), torch.ones(1, requires_grad=True)
    accumulator.backward(weight.sum(), weight=torch.tensor(3))
    accumulator.backward((4 * weight).sum(), weight=1)
    stats = accumulator.finish([weight])
    assert weight.grad is not None
    assert (float(stats.weight), float(weight.grad)) == (4, (3 + 4) / 4)


class Normed(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8, dtype=torch.float64)

    def loss_of(self, batch: Any) -> Tensor:
        self.norm(self.net.embed(batch["ids"]).flatten(0, 1))
        return super().loss_of(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def test_runs_aside_may_say_numbers() -> None:
    """Without a Trainer, in validation, and where `training_step` runs once more to
    compute BatchNorm's statistics."""
    module = Normed()
    module.training_step(next(iter(batches())), 0)
    guard = BatchNormGuard("recalibrate", num_batches=2)
    fitted = trainer(2, callbacks=[guard], max_epochs=2)  # the second hears them again
    fitted.fit(module, batches(), batches())
    assert fitted.global_step == 10
