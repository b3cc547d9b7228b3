"""Weights that only `training_step` knows: windows are the big batch, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torchmetrics import MeanMetric

import trainkit
from tests.helpers import NAIVE, deviation, trainer, weights
from tests.lit.fronts import RAGGED, SEQUENCES, WINDOW, Recorder, Run, big_batch, merged
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.split.common import loader_batches
from tests.zoo.callbacks import Table
from tests.zoo.modules import Manual, Mixed, Plain, hooked, scaled
from trainkit import (
    AccumulationCallback,
    Accumulator,
    BatchNormGuard,
    MicroBatching,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
    Weighed,
    WindowMonitor,
)


def kept_in(batch: Any) -> Tensor:
    """As a random mask, but for each token by itself; short rows may lose all."""
    ids, labels = batch["ids"], batch["labels"]
    return (labels != -100) & (ids % 6 == 1)


def kept_loss(net: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    """NaN where nothing is kept, as any mean over nothing."""
    logits = net(batch["ids"]).transpose(1, 2)
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    kept = losses[kept_in(batch)]
    return kept.mean() if reduction == "mean" else kept.sum()


class Foreign(Plain):
    """Knows nothing of trainkit, and leaves its count behind."""

    num_kept: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_kept = kept_in(batch).sum()
        return self.loss_of(batch)


def count_kept(module: Any, batch: Any) -> Tensor:
    """What `Foreign` has divided by."""
    return module.num_kept


class Keeping(Mixed):
    """Says what it divides by."""

    number: Any = staticmethod(Tensor.sum)

    def __init__(self, *, reduction: Any = "mean", **how: Any) -> None:
        super().__init__(kept_loss, reduction=reduction, **how)
        self.accumulation = Weighed(loss_reduction=reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.weigh(self.number(kept_in(batch)))
        return self.loss_of(batch)


class ByHand(Manual, Keeping):
    """Runs its own windows, and says the weight or passes it.

    Attributes:
        says: whether `weigh` is called.
        passes: whether `accumulate` gets the weight, which comes first.
        times: how often the loss is accumulated.
    """

    says, passes, times = True, False, 1

    def accumulate(self, loss: Tensor, batch: Any = None, **how: Any) -> None:
        number = kept_in(batch).sum()
        if self.says:
            self.weigh(number)
        for _ in range(self.times):
            weight = number if self.passes else None
            super().accumulate(loss, batch, weight=weight, **how)


def run(
    module: Any, *callbacks: Any, sizes: Any = RAGGED, window: int = WINDOW, **how: Any
) -> Run:
    """Train for two epochs."""
    kept = Run(weights(module))
    fitted = trainer(window, callbacks=[*callbacks, Recorder(kept)], **how)
    fitted.fit(module, loader_batches(sizes))
    return kept


BIG = big_batch(SEQUENCES, loss=kept_loss)
FLOAT: dict[str, Any] = {"dtype": torch.float32}
CUT: dict[str, Any] = {"cut": MicroBatching(size=3)}
DOTTED = f"{count_kept.__module__}.count_kept"
WHOLE: dict[str, Any] = {"sizes": merged(RAGGED), "window": 1}
"""Each window is one loader batch."""


def by(function: Any, **options: Any) -> AccumulationCallback:
    return AccumulationCallback(Weighed(by=function), **options)


FOREIGN = partial(Foreign, kept_loss)
CASES: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "tensors": (Keeping, None, {}),
    "numbers": (hooked(Keeping, number=lambda self, kept: int(kept.sum())), None, {}),
    "sums": (lambda: Keeping(reduction="sum"), None, {}),
    "function": (FOREIGN, by(count_kept), {}),
    "dotted path": (FOREIGN, by(DOTTED), {}),
    "by hand": (ByHand, None, {}),
    "split": (lambda: Keeping(**CUT), None, WHOLE),
    "split by tokens": (lambda: Keeping(cut=MicroBatching(tokens=40)), None, WHOLE),
    "split by a function": (FOREIGN, by(DOTTED, micro_batching=CUT["cut"]), WHOLE),
    # The control: what the batch shows is not what this loss divides by.
    **{
        f"off by {type(each).__name__}": (
            lambda: Plain(lambda *args: kept_loss(*args).nan_to_num()),
            AccumulationCallback(each),
            {},
        )
        for each in (Uniform(), PerToken(), PerSample())
    },
}


@pytest.mark.parametrize("name", CASES)
def test_windows_weighed_by_the_module_equal_the_big_batch(name: str) -> None:
    make, callback, how = CASES[name]
    ended = run(make(), *filter(None, [callback]), **how)
    off = ended.deviations(BIG)
    if name.startswith("off"):
        assert min(off) > NAIVE
        return
    assert max(off) <= 1e-10
    assert ended.losses == pytest.approx(BIG.losses, rel=1e-12)
    kept = [int(kept_in(batch).sum()) for batch in loader_batches(RAGGED)]
    assert min(kept) == 0
    assert max(kept) > 5


def test_resumed_inside_a_window_equals_uninterrupted(tmp_path: Path) -> None:
    path, module = tmp_path / "inside.ckpt", Keeping()
    first, second = Resumable(), Resumable()
    first.batches = second.batches = list(loader_batches(RAGGED))
    trainer(WINDOW, callbacks=[Saving(path, 7)]).fit(Keeping(), first)
    trainer(WINDOW).fit(module, second, ckpt_path=path, weights_only=True)
    assert deviation(module, BIG.end, BIG.start) <= 1e-10


@pytest.mark.parametrize("how", [{}, WHOLE], ids=["streamed", "split"])
def test_a_gradient_scaler_changes_nothing(how: dict[str, Any]) -> None:
    big = big_batch(SEQUENCES, loss=kept_loss, **FLOAT)
    module = Keeping(**FLOAT, **(CUT if how else {}))
    ended = run(module, **scaled(), **how)
    assert max(ended.deviations(big)) <= 2e-2  # of float16
    counted = by(lambda module, batch: kept_in(batch).sum())
    plain = run(Plain(kept_loss, **FLOAT), counted)
    assert max(plain.deviations(big)) <= 1e-4


class Logging(Keeping):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("before", loss, on_step=True)
        self.weigh(kept_in(batch).sum())
        self.log("after", 2 * loss, on_step=True)
        self.log_exact("exact", loss)
        return loss


def test_logs_are_weighed_as_the_loss() -> None:
    table, monitor = Table(), WindowMonitor(every_n_steps=1)
    how: dict[str, Any] = {**WHOLE, "logger": table, "log_every_n_steps": 1}
    ended = run(Logging(**CUT), monitor, **how)
    assert table.column("before") == pytest.approx(ended.losses)
    assert table.column("after") == pytest.approx([2 * x for x in ended.losses])
    kept = [float(kept_in(batch).sum()) for batch in loader_batches(WHOLE["sizes"])]
    assert table.column("window/weight") == kept * 2
    assert table.column("window/loss") == pytest.approx(ended.losses)
    total = sum(n * loss for n, loss in zip(kept, ended.losses, strict=False))
    assert table.column("exact")[0] == pytest.approx(total / sum(kept))


class Metered(Keeping):
    def __init__(self, *, weighs: bool, **how: Any) -> None:
        super().__init__(**how)
        self.mean, self.weighs = MeanMetric(), weighs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        how = {"weight": kept_in(batch).sum()} if self.weighs else {}
        self.mean(loss.detach().nan_to_num(), **how)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def test_a_mean_metric_counts_by_rows_or_by_its_own_weight() -> None:
    """The whole batch's mean is that of its weight."""
    modules = [Metered(weighs=weighs, **CUT) for weighs in (False, True)]
    modules.append(Metered(weighs=True))
    for each in modules:
        run(each, **WHOLE, max_epochs=1)
    means = [float(m.trainer.callback_metrics["mean"]) for m in modules]
    by_rows, cut, whole = means
    assert cut == pytest.approx(whole, rel=1e-6)
    assert by_rows != pytest.approx(whole, rel=1e-3)


# ---- refused -------------------------------------------------------------------------


class Saying(Keeping):
    """Says what a function does."""

    say: Any

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.say()
        return self.loss_of(batch)


SAID: dict[str, tuple[Callable[[Any], Any], str]] = {
    "never": (lambda m: None, "Saying.training_step: .*was not called for this loss"),
    "twice": (
        lambda m: (m.weigh(2), m.weigh(torch.tensor(3.0))),
        r"self.weigh\(3\): this loss was weighed already, with 2",
    ),
    "negative": (lambda m: m.weigh(-1), r"must be finite .* received -1"),
    "nan": (lambda m: m.weigh(torch.tensor(torch.nan)), "not negative, received nan"),
    "several": (lambda m: m.weigh(torch.ones(3)), r"torch.float32 and shape \[3\]"),
    "complex": (lambda m: m.weigh(torch.tensor(1j)), "a 0-d tensor, received complex"),
    "text": (lambda m: m.weigh("many"), "a number or a 0-d tensor, received str"),
}
TERMS = "a batch does not show its weight.* of several terms must be known"


def weighed_by(strategy: Any, **how: Any) -> Any:
    module = Keeping(**how)
    module.accumulation = strategy
    return module


def says_in_hook(trainer: Any, module: Any, *args: Any) -> None:
    module.weigh(1)


class Hidden(Tensor):
    """Hides its value, as if it were on a device; nothing waits for it."""

    is_cpu = False


def negative(module: Any, batch: Any) -> Tensor:
    return (-kept_in(batch).sum()).as_subclass(Hidden)


LOGS_WITHOUT_NUMBER = hooked(
    Keeping,
    validation_step=lambda m, batch, _: m.log_exact("val", m.loss_of(batch), batch),
)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"loss_reduction": "total"}, "loss_reduction: must be 'mean' or"),
    ({"loss_reduction": "rms"}, r"loss_reduction: must be one of \['mean', 'sum'"),
    ({"by": 3}, "by: must be a function .* received 3"),
    ({"by": "math.pi"}, "by: must be a function"),
    ({"by": "nowhere.count"}, "by: .*received 'nowhere.count' .No module named"),
    ({"by": ""}, "by: must be the dotted path"),
]
IN_TERMS = partial(weighed_by, {"box": Weighed(), "l2": PerSample()}, **CUT)
ROWS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"{name}{', split' if cut else ''}": (
            lambda say=say, cut=cut: run(hooked(Saying, say=say)(**cut), window=2),
            text,
        )
        for name, (say, text) in SAID.items()
        for cut in (({}, CUT) if name in ("never", "twice") else ({},))
    },
    "nobody asked": (
        lambda: run(weighed_by(PerToken())),
        r"in training_step with accumulation=PerToken\(.* would be lost",
    ),
    "a function is asked": (
        lambda: run(weighed_by(Weighed(by=count_kept))),
        r"in training_step with accumulation=Weighed\(by=<function",
    ),
    **{
        hook: (
            lambda hook=hook: run(Keeping(), LambdaCallback(**{hook: says_in_hook})),
            rf"called in {hook} with accumulation=Weighed\(.*, so this",
        )
        for hook in ("on_train_batch_start", "on_train_epoch_end")
    },
    "without a mixin": (
        lambda: run(Plain(kept_loss), AccumulationCallback(Weighed())),
        r"Plain.training_step: .*was not called for this loss.*Weighed\(by=",
    ),
    "counted wrongly": (
        lambda: run(Plain(kept_loss), by(lambda module, batch: None)),
        "Weighed by=<lambda>: .*received NoneType",
    ),
    "counted wrongly on a device": (
        lambda: run(Plain(kept_loss), by(negative)),
        r"finite and not negative.*self.weigh\(\)",
    ),
    "terms": (lambda: run(IN_TERMS(), window=1), TERMS),
    "terms, checked": (lambda: trainkit.check(IN_TERMS(), loader_batches()), TERMS),
    # By hand each number is for one loss: `weight=` comes first, and a number that no
    # loss has taken is an error.
    **{
        f"by hand, {name}": (lambda how=how: run(hooked(ByHand, **how)()), text)
        for name, how, text in (
            ("both", {"passes": True}, "no loss took this weight"),
            ("late", {"says": False}, "was not called for this loss"),
            ("lost", {"times": 2}, "was not called for this"),
        )
    },
    "logged": (
        lambda: trainer().fit(
            LOGS_WITHOUT_NUMBER(), loader_batches(), loader_batches()
        ),
        r"log_exact\(\): .* pass weight=n",
    ),
    "without a Trainer": (lambda: Keeping().weigh(-1), "received -1"),
    "a loop of one's own": (
        lambda: Accumulator(Weighed()).backward(torch.ones(()), {}),
        "a batch does not show its weight",
    ),
    **{
        str(how): (lambda how=how: Weighed(**how), f"Weighed {text}")
        for how, text in WRONG
    },
}


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_number_or_option_is_refused_by_name(name: str) -> None:
    act, text = ROWS[name]
    with pytest.raises(TrainkitError, match=text):
        act()


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
    module.training_step(next(iter(loader_batches(RAGGED))), 0)
    guard = BatchNormGuard("recalibrate", num_batches=2)
    fitted = trainer(2, callbacks=[guard], max_epochs=2)  # the second hears them again
    fitted.fit(module, loader_batches(RAGGED), loader_batches())
    assert fitted.global_step == 10
