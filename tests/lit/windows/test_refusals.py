"""What cannot be exact is refused; finders leave no trace, or are refused as well."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LambdaCallback,
    LearningRateFinder,
)
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner.tuning import Tuner

from tests.helpers import NAIVE, deviation, loader, ragged_sequences, trainer, weights
from tests.lit.fronts import SEQUENCES, WINDOW, fit
from tests.lit.windows.test_windows import without
from tests.zoo.modules import Manual, Plain, hooked, on_front, pad_and_mask, scaled
from trainkit import MicroBatching, PerToken
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` ret"),
    pytest.mark.filterwarnings("ignore:.*Lightning takes all other callbacks"),
]
START = weights(Plain())


class AccumulatesItself(SingleDeviceStrategy):
    """As DeepSpeed does (transformers#35808, lightning#6170)."""

    handles_gradient_accumulation = True  # type: ignore[assignment]  # a property


class Fetching(Plain):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return self.loss_of(next(dataloader_iter)[0])


class Twice(torch.optim.SGD):
    """Looks at its closure again, as line searches and SAM do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure()
        return super().step(closure)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    """Its closure runs several times in a step."""
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)


def twice(parameters: Any) -> torch.optim.Optimizer:
    return Twice(parameters, lr=0.5)


def bypasses(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
    """Steps with the torch optimizer itself, past Lightning's hooks."""
    closure()
    optimizer.optimizer.step()


def sidesteps(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
    optimizer.optimizer.step(closure=closure)


NONE_LAST = {"kind": without(3), "max_epochs": 1, **scaled(16.0)}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "backend": (
        "strategy AccumulatesItself: it accumulates gradients by itself",
        {"strategy": AccumulatesItself},
    ),
    "LBFGS": (
        "^LBFGS: it ran its closure twice .* the last of the window's 2 .* or cut",
        {"made": {"optimizer": lbfgs}, "window": 2},
    ),
    "closure": (
        "^Twice: it ran its closure twice in one step",
        {"made": {"optimizer": twice}, "window": 2},
    ),
    **{
        step.__name__: (
            r"SGD.step\(\): its window of 4 micro-batches has not been divided",
            {"kind": hooked(Plain, optimizer_step=step)},
        )
        for step in (bypasses, sidesteps)
    },
    "batches unseen": (
        "PerToken labels: path 'labels': the batch has nothing at 'labels'",
        {"kind": Fetching, "window": 1},
    ),
    # Lightning would skip the whole window without a word.
    "None on the last": ("training_step: it returned None on the last", NONE_LAST),
    "no optimizer": (
        "configure_optimizers: it returned no optimizer",
        {"kind": hooked(Plain, configure_optimizers=lambda self: None)},
    ),
    "no labels": (
        r"path 'targets.ids'.*dict\(ids: int64",
        {"made": {"strategy": PerToken(labels="targets.ids")}},
    ),
}


@pytest.mark.parametrize(
    ("name", "front"), [*zip(ROWS, cycle(["mixin", "callback"]), strict=False)]
)
def test_what_cannot_be_exact_is_refused(name: str, front: str) -> None:
    """Plain Lightning trains on in silence."""
    text, how = ROWS[name]
    if "strategy" in how:
        how = {"strategy": how["strategy"](torch.device("cpu"))}
    with pytest.raises(TrainkitError, match=text):
        fit(front, **how)
    if "strategy" not in how:
        made = {k: v for k, v in how.get("made", {}).items() if k != "strategy"}
        fit("plain", **{**how, "made": made})


def test_an_undivided_step_is_refused_before_it_moves_a_weight() -> None:
    module, ours = on_front("callback", hooked(Plain, optimizer_step=bypasses))
    with pytest.raises(TrainkitError, match="has not been divided"):
        trainer(2, callbacks=ours).fit(module, loader(SEQUENCES, 4))
    assert torch.equal(weights(module), START)


def test_manual_optimization_without_the_mixin_is_refused() -> None:
    by_hand = hooked(Plain, automatic_optimization=False)
    with pytest.raises(TrainkitError, match="Plain: with automatic_optimization=False"):
        fit("callback", by_hand, window=1)


def test_ranks_without_torch_distributed_are_refused(monkeypatch: Any) -> None:
    """As torch_xla has them."""
    monkeypatch.setattr(Trainer, "world_size", 8)
    with pytest.raises(TrainkitError, match="it runs 8 ranks without torch.distribu"):
        fit("callback")


@pytest.mark.parametrize("make", [lbfgs, twice])
def test_closure_that_repeats_in_windows_of_one_equals_plain_lightning(
    make: Any,
) -> None:
    fits = [
        fit(front, made={"optimizer": make}, window=1, max_epochs=1)
        for front in ("mixin", "callback", "plain")
    ]
    *ours, plain = (each.lightning_module for each in fits)
    assert max(deviation(each, plain, START) for each in ours) <= 1e-10


def test_a_loop_that_is_run_outside_of_fit_is_told_so() -> None:
    module, ours = on_front("callback")
    with pytest.raises(TrainkitError, match="Plain: .* outside of fit. Call tr"):
        ours[0].on_train_epoch_start(trainer(2), module)


ZEROINGS: dict[str, Callable[[Any], None]] = {
    "module": lambda m: m.zero_grad(set_to_none=False),
    "net": lambda m: m.net.zero_grad(),
    "optimizer": lambda m: m.optimizers().zero_grad(set_to_none=False),
}
GONE = r"the gradients of the \d micro-batches in it are gone"


@pytest.mark.parametrize(
    ("front", "zeroing"),
    [*zip(["callback", "mixin", "split"], ZEROINGS, strict=True), ("manual", "net")],
)
def test_zeroing_inside_a_window_is_refused(front: str, zeroing: str) -> None:
    """In automatic optimization 1.9 of the distance travelled, in manual 0.52."""
    is_manual = front == "manual"
    kind = Manual if is_manual else Plain

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if self.calls == 3:
            ZEROINGS[zeroing](self)
        return kind.training_step(self, batch, batch_idx)

    zeroes = hooked(kind, training_step=training_step, calls=0)
    cut = MicroBatching(size=2) if front == "split" else None
    name = "mixin" if cut else front
    module, ours = (zeroes(), []) if is_manual else on_front(name, zeroes, cut=cut)
    fitted = trainer(1 if cut else WINDOW, callbacks=ours)
    with pytest.raises(TrainkitError, match=GONE):
        fitted.fit(module, loader(SEQUENCES, 8 if cut else 4))


def test_zeroing_after_the_last_backward_is_refused_too() -> None:
    zeroes = LambdaCallback(
        on_after_backward=lambda trainer, module: module.zero_grad(set_to_none=False)
    )
    with pytest.raises(TrainkitError, match=GONE):
        fit("callback", Plain, zeroes, window=1)


# ---- Lightning's finders take callbacks out ------------------------------------------

MANY = ragged_sequences(58)
CUT = MicroBatching(size=1)
FRONTS = [("mixin", None), ("callback", CUT)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finders write a checkpoint into the current one."""
    monkeypatch.chdir(tmp_path)


class Tuned(Plain):
    """Has what the finders look for, and counts their trials."""

    lr = 0.1
    batch_size = 2
    searches = False
    num_trials = 0

    def train_dataloader(self) -> Any:
        return loader(MANY, self.batch_size, collate=pad_and_mask)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.num_trials += self.searches


class RateInTraining(LearningRateFinder):
    """As `FineTuneLearningRateFinder` of Lightning's documentation."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.searches = True
            self.lr_find(trainer, pl_module)
            pl_module.searches = False


class SizeInTraining(BatchSizeFinder):
    """Its trials take no step once `global_step` is beyond theirs."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 0 and not pl_module.searches:
            pl_module.searches = True
            self.scale_batch_size(trainer, pl_module)
            pl_module.searches = False


class RateInsideWindow(RateInTraining):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


def train(of: str, cut: Any, *callbacks: Any, window: int, **changed: Any) -> Any:
    module, mine = on_front(of, Tuned, cut=cut)
    vars(module).update(changed)
    fitted = trainer(window, callbacks=[*mine, *callbacks], max_epochs=3)
    fitted.fit(module)
    return module


@pytest.mark.parametrize(("front", "cut"), FRONTS)
def test_rate_finder_in_training_equals_its_rate_by_hand(front: str, cut: Any) -> None:
    def by_hand(trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = found.lr

    how: dict[str, Any] = {"min_lr": 0.01, "early_stop_threshold": None}
    finder = RateInTraining(num_training_steps=14, **how)
    found = train(front, cut, finder, window=2)
    assert found.num_trials == 14 * 2
    assert found.lr != 0.1
    hand = LambdaCallback(on_train_epoch_start=by_hand)
    expected = train(front, cut, hand, window=2)
    assert deviation(found, expected, START) <= 1e-12
    assert found.trainer.global_step == expected.trainer.global_step
    assert deviation(train(front, cut, window=2), expected, START) > NAIVE


@pytest.mark.parametrize(("front", "cut"), FRONTS)
def test_size_finder_in_training_equals_its_size_by_hand(front: str, cut: Any) -> None:
    finder = SizeInTraining(steps_per_trial=2, max_trials=3)
    found = train(front, cut, finder, window=1)
    assert found.num_trials == 6
    assert found.batch_size == 8
    by_hand = train(front, cut, window=1, batch_size=8)
    assert deviation(found, by_hand, START) <= 1e-12


def finds_rate(tuner: Any, module: Any) -> None:
    tuner.lr_find(module, num_training=8, update_attr=True)


def finds_size(tuner: Any, module: Any) -> None:
    tuner.scale_batch_size(module, max_trials=2)


@pytest.mark.parametrize(
    ("tune", "name"),
    [(finds_rate, "LearningRateFinder"), (finds_size, "BatchSizeFinder")],
)
def test_tuners_run_on_whole_batches(tune: Any, name: str) -> None:
    """Before training. Lightning's finders leave callbacks out, and so the cut: their
    trial steps are plain Lightning's, which is said."""
    module, ours = on_front("mixin", Tuned, cut=CUT)
    tuner = Tuner(fitted := trainer(1, callbacks=ours, max_epochs=1))
    text = f"^{name}: Lightning takes all other callbacks"
    with pytest.warns(UserWarning, match=text):
        tune(tuner, module)
    assert torch.equal(weights(module), START)
    fitted.fit(module)
    assert not torch.equal(weights(module), START)


def take_out(trainer: Any, module: Any) -> None:
    """Without a search, for good."""
    if trainer.current_epoch == 1:
        trainer.callbacks = []


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
@pytest.mark.parametrize(
    ("takes", "window", "text"),
    [
        (
            RateInsideWindow(num_training_steps=19),
            2,
            "Callback was taken out of it, .*inside a window of 1 micro-b",
        ),
        (
            LambdaCallback(on_train_epoch_start=take_out),
            1,
            "leave trainkit's callback in",
        ),
    ],
)
def test_a_callback_that_is_taken_out_is_refused(
    takes: Any, window: int, text: str
) -> None:
    """Inside a window, or by nobody who searches."""
    with pytest.raises(TrainkitError, match=text):
        train("callback", CUT, takes, window=window)
