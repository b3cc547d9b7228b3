"""Manual optimization: windows that the module closes itself, for each optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    loader,
    pad,
    train_on_windows,
    trainer,
    windows_over_ranks,
)
from tests.lit.fronts import SEQUENCES, WINDOW
from tests.zoo.callbacks import told
from tests.zoo.modules import Gan, Manual, hooked, scaled
from trainkit import AccumulationMixin, PerSample, PerToken
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")
EXACT = TOLERANCE[torch.float64]
BATCH = 4  # ten batches of four, the last of two
WINDOWS = windows_over_ranks(SEQUENCES, BATCH, WINDOW, 1)


def fitted(module: Any, accumulate: int = WINDOW, **options: Any) -> Any:
    trainer(accumulate, **options).fit(module, loader(SEQUENCES, BATCH))
    return module


def off(module: Any, epochs: int = 2) -> float:
    """How far it is from the big batches."""
    name = module.optimizer_name
    start, big = (TokenModule(dtype=torch.float64, optimizer=name) for _ in range(2))
    train_on_windows(big, WINDOWS, clip=module.clip, epochs=epochs)
    return deviation(module, big, start)


def own_weight(self: Any, loss: Tensor, batch: Any, **how: Any) -> None:
    """Counts for itself, where the strategy would count something else."""
    Manual.accumulate(self, loss, weight=(batch["labels"] != -100).sum(), **how)


def two_losses(self: Any, loss: Tensor, batch: Any, **how: Any) -> None:
    """Both hang on one graph; their sum over two is the mean."""
    Manual.accumulate(self, loss, batch, retain_graph=True, **how)
    Manual.accumulate(self, loss, batch, **how)


def as_documented(self: Any, loss: Tensor, batch: Any, **how: Any) -> None:
    """What Lightning's documentation shows for manual accumulation."""
    self.manual_backward(loss / WINDOW)


def clips_late(self: Any, *args: Any, late: bool = False, **options: Any) -> None:
    if late:
        Manual.clip_gradients(self, *args, **options)


def clips(self: Any, optimizer: Any) -> None:
    self.clip_gradients(optimizer, gradient_clip_val=self.clip, late=True)


LATE = hooked(Manual, clip_gradients=clips_late, on_before_optimizer_step=clips)
SUM: Any = {"reduction": "sum", "strategy": PerToken(loss_reduction="sum")}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (Manual, {"optimizer": name}) for name in ("sgd", "momentum", "adamw")},
    "sums": (Manual, SUM),
    "own weight": (hooked(Manual, accumulate=own_weight, accumulation=PerSample()), {}),
    "two losses": (hooked(Manual, accumulate=two_losses), {}),
    "as documented": (
        hooked(Manual, accumulate=as_documented, finish_window=lambda self: None),
        {},
    ),
    # lightning#18089: clipped in training_step before the gradients are unscaled, or
    # in the hook, where Lightning has unscaled already.
    "scaled": (Manual, {}),
    "scaled, late": (LATE, {}),
}


@pytest.mark.filterwarnings("ignore:optimizer 0. it stepped with")
@pytest.mark.parametrize(
    ("name", "clip"), [*zip(CASES, cycle([None, 0.05]), strict=False), ("scaled", None)]
)
def test_manual_windows_equal_big_batches(name: str, clip: float | None) -> None:
    """Also the epoch's short last window, of two batches where others have four; but
    not as documented."""
    kind, made = CASES[name]
    module = kind(**made)
    module.clip = clip
    how = scaled(1024.0) if name.startswith("scaled") else {}
    fitted(module, WINDOW, **how)
    # clip_grad_norm_ adds 1e-6 to the norm, here to one that is 1024 times as large
    tolerance = 1e-5 if clip and name == "scaled" else EXACT
    assert off(module) > NAIVE if name == "as documented" else off(module) <= tolerance


def test_window_of_the_trainer_is_given_back_after_each_fit() -> None:
    """After an exception, too, in training or before it."""

    def fail(self: Any, *args: Any) -> None:
        raise KeyError("a user's mistake")

    fit = trainer(WINDOW, max_epochs=1)
    for _ in range(2):
        fit.fit(module := Manual(), loader(SEQUENCES, BATCH))
        assert fit.accumulate_grad_batches == WINDOW
        assert off(module, epochs=1) <= EXACT
        fit.fit_loop.epoch_progress.reset()
    for hook in ("training_step", "prepare_data"):
        with pytest.raises(KeyError, match="a user's mistake"):
            fit.fit(hooked(Manual, **{hook: fail})(), loader(SEQUENCES, BATCH))
        assert fit.accumulate_grad_batches == WINDOW


def accumulates(self: Any, batch: Any, **options: Any) -> None:
    self.accumulate(self.loss_of(batch), batch, **options)


def steps(self: Any, batch: Any, batch_idx: int) -> None:
    accumulates(self, batch)
    self.optimizers().step()


def foreign(self: Any, batch: Any, batch_idx: int) -> None:
    accumulates(self, batch, optimizer=torch.optim.SGD(self.parameters(), lr=1.0))


def automatic(self: Any, batch: Any, batch_idx: int) -> None:
    self.automatic_optimization = True
    accumulates(self, batch)


def empty(self: Any, batch: Any, batch_idx: int) -> None:
    self.finish_window()


def nameless(self: Any, batch: Any, batch_idx: int) -> None:
    self.accumulate(self.loss(batch, 0), batch)


def taken_out(self: Any, batch: Any, batch_idx: int) -> None:
    """As lr_find does."""
    self.trainer.callbacks = []
    accumulates(self, batch)


@pytest.mark.parametrize(
    ("training_step", "text"),
    [
        (steps, r"optimizer 0: step\(\) was called while its window is open"),
        (foreign, "must be one that configure_optimizers returned, received SGD"),
        (automatic, r"accumulate\(\): it is for manual optimization"),
        (empty, r"finish\(\): the window is empty"),
        (taken_out, "the callback that its AccumulationMixin brings is not among tra"),
        (nameless, "must be named where there are several, and there are 2"),
    ],
)
def test_what_manual_optimization_cannot_do_is_refused(
    training_step: Any, text: str
) -> None:
    kind = Gan if training_step is nameless else Manual
    with pytest.raises(TrainkitError, match=text):
        fitted(hooked(kind, training_step=training_step)(), 1)


@pytest.mark.parametrize("first_is_ours", [False, True])
def test_step_with_gradients_that_no_window_has_divided_is_told(
    first_is_ours: bool,
) -> None:
    """Once: from the start, or once the module has stopped to accumulate."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        if first_is_ours and batch_idx == 0:
            accumulates(self, batch)
            self.finish_window()
        else:
            self.manual_backward(self.loss_of(batch))
        self.optimizers().step()
        self.optimizers().zero_grad()

    with told("optimizer 0: it stepped with gradients that") as said:
        fitted(hooked(Manual, training_step=training_step)(), max_epochs=1)
    assert len(said) == 1


# ---- several optimizers --------------------------------------------------------------


def big_batch_gan(batches: Sequence[Any], epochs: int = 2) -> Gan:
    """In order of batches; each window's gradient is a sum over its tokens, divided
    once. Weights move inside the other optimizer's window, as they do in training."""
    gan = Gan()
    optimizers = gan.configure_optimizers()
    sums: list[list[Tensor]] = [[], []]
    counts = [0, 0]
    for number, batch in [*enumerate(batches, 1)] * epochs:
        count = int((batch["labels"] != -100).sum())
        for index, part in enumerate((gan.generator, gan.discriminator)):
            loss = gan.loss(batch, index) * count
            new = torch.autograd.grad(loss, list(part.parameters()))
            old = sums[index] or [torch.zeros_like(g) for g in new]
            sums[index] = [a + b for a, b in zip(old, new, strict=True)]
            counts[index] += count
            if number % gan.lengths[index] == 0 or number == len(batches):
                for p, g in zip(part.parameters(), sums[index], strict=True):
                    p.grad = g / counts[index]
                optimizers[index].step()
                sums[index], counts[index] = [], 0
    return gan


@pytest.mark.parametrize("toggles", [True, False])
def test_two_optimizers_with_windows_of_their_own_equal_big_batches(
    toggles: bool,
) -> None:
    """lightning#8284: a toggle left over from the other optimizer lost gradients. Not
    toggled, the generator's loss adds to the discriminator's window."""
    nothing = lambda self, optimizer: None  # noqa: E731
    untoggled = hooked(Gan, toggle_optimizer=nothing, untoggle_optimizer=nothing)
    gan = fitted((Gan if toggles else untoggled)(), 1)
    batches = [pad(SEQUENCES[i : i + BATCH]) for i in range(0, len(SEQUENCES), BATCH)]
    found = deviation(gan, big_batch_gan(batches), Gan())
    assert found <= EXACT if toggles else found > NAIVE
    assert all(p.requires_grad for p in gan.parameters())


class Scalars(AccumulationMixin, pl.LightningModule):
    """Two weights, each with an optimizer and a window of its own; the gradient of each
    window is 2 by the law, whatever a scaler does."""

    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.both = nn.ParameterList([torch.ones(()), torch.ones(())])
        self.seen: list[list[float]] = [[], []]

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([p], lr=0.0) for p in self.both]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            self.accumulate(2 * self.both[index], batch, optimizer=optimizer)
            if (batch_idx + 1) % (2, 4)[index] == 0:
                self.finish_window(optimizer)
                self.take(index)

    def take(self, *indices: int) -> None:
        optimizers: Any = self.optimizers()
        for index in indices:
            optimizers[index].step()
            optimizers[index].zero_grad()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        (parameter,) = optimizer.param_groups[0]["params"]
        self.seen[parameter is self.both[1]].append(float(parameter.grad))


class OneLoss(Scalars):
    """One loss trains the parameters of both optimizers."""

    closed = 2

    def training_step(self, batch: Any, batch_idx: int) -> None:
        both: Any = self.optimizers()
        loss = 2 * batch.mean() * (self.both[0] + self.both[1])
        self.accumulate(loss, batch, optimizer=both[0])
        if self.window_ends(batch_idx):
            self.finish_window(both[: self.closed])
            self.take(0, 1)


def uneven(*sizes: int) -> Any:
    return DataLoader([torch.ones(n, 1) for n in sizes], batch_size=None)  # type: ignore[arg-type]


def test_windows_that_share_a_scaler_equal_the_law() -> None:
    """The scaler's factor changes inside the longer window when the other one steps."""
    how, module = scaled(16.0, growth_interval=1), Scalars()
    trainer(max_epochs=1, **how).fit(module, uneven(*[3] * 8))
    assert module.seen == [[2.0] * 4, [2.0] * 2]


@pytest.mark.parametrize("closed", [2, 1])
def test_one_loss_for_two_optimizers_equals_the_law(closed: int) -> None:
    """An optimizer that is left out of the division is told."""
    module = hooked(OneLoss, closed=closed)()
    with told("optimizer 1: it stepped with gradients that") as said:
        trainer(4, max_epochs=1).fit(module, uneven(3, 50, 50, 50))
    assert len(said) == 2 - closed
    assert (module.seen == [[2.0], [2.0]]) is (closed == 2)
