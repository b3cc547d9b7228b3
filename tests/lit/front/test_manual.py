"""Manual optimization: windows that the module closes itself."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    loader,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    token_loss,
    train_on_windows,
    trainer,
    weights,
    windows_over_ranks,
)
from trainkit import AccumulationMixin, PerSample, PerToken
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(38)  # ten batches of four, the last of two
BATCH, WINDOW = 4, 4
WINDOWS = windows_over_ranks(DATA, BATCH, WINDOW, 1)


class ManualModule(AccumulationMixin, TokenModule):
    """One optimizer, its window as long as the Trainer says."""

    accumulation = PerToken()
    every: int | None = None
    clip: float | None = None
    apart = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        ends = self.window_ends(batch_idx, self.every)
        self.accumulate(self.loss(batch), batch, sync=ends or not self.apart)
        if ends:
            self.finish_window()
            if self.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip)
            optimizer.step()
            optimizer.zero_grad()

    def loss(self, batch: Any) -> Tensor:
        return token_loss(self.net, batch, self.reduction)


def fitted(module: Any, accumulate: int = WINDOW, **options: Any) -> Any:
    trainer(accumulate, **options).fit(module, loader(DATA, BATCH))
    return module


def off_big_batch(module: TokenModule, *, clip: float | None = None) -> float:
    start, reference = (
        TokenModule(dtype=torch.float64, optimizer=module.optimizer_name)
        for _ in range(2)
    )
    train_on_windows(reference, WINDOWS, clip=clip)
    return deviation(module, reference, start)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_manual_window_equals_the_big_batch(optimizer: str, clip: float | None) -> None:
    """Also the epoch's short last window, of two batches where others have four."""
    module = ManualModule(dtype=torch.float64, optimizer=optimizer)
    module.clip = clip
    assert off_big_batch(fitted(module), clip=clip) <= EXACT


def test_manual_window_of_its_own_length_equals_the_big_batch() -> None:
    module = ManualModule(dtype=torch.float64)
    module.every = WINDOW
    assert off_big_batch(fitted(module, accumulate=1)) <= EXACT


def test_manual_sum_of_losses_equals_the_big_batch() -> None:
    module = ManualModule(dtype=torch.float64, reduction="sum")
    module.accumulation = PerToken(loss_reduction="sum")
    assert off_big_batch(fitted(module)) <= EXACT


class WeightModule(ManualModule):
    """Counts for itself, where the strategy would count something else."""

    accumulation = PerSample()

    def accumulate(self, loss: Tensor, batch: Any = None, **options: Any) -> None:
        count = (batch["labels"] != -100).sum()
        super().accumulate(loss, weight=count, **options)


def test_manual_weight_of_its_own_equals_the_big_batch() -> None:
    assert off_big_batch(fitted(WeightModule(dtype=torch.float64))) <= EXACT


class NaiveModule(ManualModule):
    """What Lightning's documentation shows for manual accumulation."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / WINDOW)
        if self.window_ends(batch_idx):
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:optimizer 0. it stepped with")
def test_naive_manual_accumulation_does_not_equal_the_big_batch() -> None:
    assert off_big_batch(fitted(NaiveModule(dtype=torch.float64))) > NAIVE


def scaled() -> MixedPrecision:
    """A real scaler; autocast leaves float64 alone."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return MixedPrecision("16-mixed", device="cpu", scaler=scaler)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("late", [False, True])
def test_manual_window_under_a_gradient_scaler_equals_the_big_batch(
    clip: float | None, late: bool
) -> None:
    """lightning#18089: clipped in training_step before the gradients are unscaled."""
    module = (
        ClipsLate(dtype=torch.float64) if late else ManualModule(dtype=torch.float64)
    )
    module.clip = clip
    fitted(module, plugins=[scaled()])
    # clip_grad_norm_ adds 1e-6 to the norm, here to one that is 1024 times as large
    tolerance = 1e-5 if clip and not late else EXACT
    assert off_big_batch(module, clip=clip) <= tolerance


class ClipsLate(ManualModule):
    """Clips in the hook, where Lightning has unscaled already."""

    def clip_gradients(self, *args: Any, late: bool = False, **options: Any) -> None:
        if late:
            super().clip_gradients(*args, **options)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=self.clip, late=True)


# ---- the Trainer's window, taken over and given back ---------------------------------


def test_window_of_the_trainer_is_given_back_after_each_fit() -> None:
    fit = trainer(WINDOW, max_epochs=1)
    for _ in range(2):
        module = ManualModule(dtype=torch.float64)
        fit.fit(module, loader(DATA, BATCH))
        assert fit.accumulate_grad_batches == WINDOW
        reference = train_on_windows(
            TokenModule(dtype=torch.float64), WINDOWS, epochs=1
        )
        start = TokenModule(dtype=torch.float64)
        assert deviation(module, reference, start) <= EXACT
        fit.fit_loop.epoch_progress.reset()


def test_window_of_the_trainer_is_given_back_after_an_exception() -> None:
    class Fails(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("a user's mistake")

    fit = trainer(WINDOW)
    with pytest.raises(KeyError, match="a user's mistake"):
        fit.fit(Fails(), loader(DATA, BATCH))
    assert fit.accumulate_grad_batches == WINDOW


# ---- several ranks -------------------------------------------------------------------

SHARED = ragged_sequences(36)


def train_ranks(rank: int, world: int, apart: bool) -> Tensor:
    module = ManualModule(dtype=torch.float64, optimizer="adamw")
    module.apart = apart
    trainer(2, strategy="ddp", devices=world, use_distributed_sampler=False).fit(
        module, rank_loader(SHARED, BATCH, rank, world)
    )
    return weights(module)


@pytest.mark.parametrize("apart", [False, True])
def test_manual_windows_on_two_ranks_equal_one_process(apart: bool) -> None:
    start, reference = (
        TokenModule(dtype=torch.float64, optimizer="adamw") for _ in range(2)
    )
    train_on_windows(reference, windows_over_ranks(SHARED, BATCH, 2, 2))
    ends = raise_rank_errors(run_ranks(train_ranks, 2, apart))
    assert max(deviation(end, reference, start) for end in ends) <= EXACT


class CountExchanges(pl.Callback):
    """Counts how often DDP brings the ranks' gradients together."""

    number = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.model.register_comm_hook(None, self.counted)

    def counted(self, state, bucket):  # torch refuses other annotations than its own
        self.number += 1
        return allreduce_hook(state, bucket)


def count_exchanges(rank: int, world: int, apart: bool) -> int:
    module, counter = ManualModule(), CountExchanges()
    module.apart = apart
    trainer(
        2,
        strategy="ddp",
        devices=world,
        use_distributed_sampler=False,
        callbacks=[counter],
    ).fit(module, rank_loader(SHARED, BATCH, rank, world))
    return counter.number


@pytest.mark.parametrize(("apart", "expected"), [(False, 10), (True, 6)])
def test_ranks_kept_apart_exchange_once_a_window(apart: bool, expected: int) -> None:
    """Five batches and three windows in each epoch."""
    assert run_ranks(count_exchanges, 2, apart) == [expected, expected]


# ---- refusals ------------------------------------------------------------------------


def refused(module: Any, match: str) -> None:
    with pytest.raises(TrainkitError, match=match):
        fitted(module)


def test_step_on_an_open_window_is_refused() -> None:
    class Steps(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate(self.loss(batch), batch)
            self.optimizers().step()  # type: ignore[union-attr]

    refused(Steps(), r"optimizer 0: step\(\) was called while its window is open")


def test_foreign_optimizer_is_refused() -> None:
    class Foreign(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            mine = torch.optim.SGD(self.parameters(), lr=1.0)
            self.accumulate(self.loss(batch), batch, optimizer=mine)

    refused(Foreign(), "must be one that configure_optimizers returned, received SGD")


def test_window_whose_ranks_are_apart_is_refused() -> None:
    class Apart(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate(self.loss(batch), batch, sync=False)
            self.finish_window()

    refused(Apart(), r"finish_window\(\): the last micro-batch of optimizer 0 was")


def test_accumulate_in_automatic_optimization_is_refused() -> None:
    class Automatic(ManualModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.accumulate(self.loss(batch), batch)

    refused(Automatic(), r"accumulate\(\): it is for manual optimization")


def test_finish_of_an_empty_window_is_refused() -> None:
    class Empty(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.finish_window()

    refused(Empty(), r"finish\(\): the window is empty")


def test_gradients_zeroed_inside_a_window_are_refused() -> None:
    class Zeroes(ManualModule):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()  # type: ignore[union-attr]
            super().training_step(batch, batch_idx)

    refused(Zeroes(), "gradients of the 1 micro-batches in it are gone")


class TwoLosses(ManualModule):
    """Both losses of a batch hang on one graph; their sum over two is the mean."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        self.accumulate(loss, batch, retain_graph=True)
        self.accumulate(loss, batch)
        if self.window_ends(batch_idx):
            self.finish_window()
            optimizer.step()
            optimizer.zero_grad()


def test_backward_options_reach_the_backward_pass() -> None:
    assert off_big_batch(fitted(TwoLosses(dtype=torch.float64))) <= EXACT


class ByItself(ManualModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def test_manual_module_that_weighs_nothing_is_told() -> None:
    with pytest.warns(
        UserWarning, match="optimizer 0: it stepped with gradients that no window"
    ):
        fitted(ByItself())


class StopsAccumulating(ManualModule):
    """Closes one window, and then steps by itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.accumulate(self.loss(batch), batch)
            self.finish_window()
        else:
            self.manual_backward(self.loss(batch))
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()


def test_step_after_the_windows_have_stopped_is_told() -> None:
    with pytest.warns(UserWarning, match="optimizer 0: it stepped with gradients that"):
        fitted(StopsAccumulating(), max_epochs=1)
