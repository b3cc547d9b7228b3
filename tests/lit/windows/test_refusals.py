"""What cannot be exact is refused, with a text that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.helpers import (
    RankError,
    TokenModule,
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    token_loss,
    trainer,
    weights,
)
from tests.lit.front.test_manual import ManualModule
from tests.lit.windows.several import run_cases
from trainkit import AccumulationCallback, PerToken
from trainkit.errors import TrainkitError
from trainkit.lit.windows import refusals

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")

DATA = ragged_sequences(38)
BATCH, WINDOW = 4, 4


def refused(match: str, module: Any = None, **options: Any) -> None:
    """The fit of a plain module with the callback ends with such a text."""
    options = {"accumulate": WINDOW} | options
    callbacks = [AccumulationCallback(PerToken())]
    fit = trainer(callbacks=callbacks, **options)
    with pytest.raises(TrainkitError, match=match):
        fit.fit(module or TokenModule(), loader(DATA, BATCH))


# ---- backends ------------------------------------------------------------------------


class AccumulatesItself(SingleDeviceStrategy):
    """As DeepSpeed does (transformers#35808, lightning#6170)."""

    handles_gradient_accumulation = True  # type: ignore[assignment]  # a property


def test_backend_that_accumulates_by_itself_is_refused() -> None:
    refused(
        "strategy AccumulatesItself: it accumulates gradients by itself",
        strategy=AccumulatesItself(torch.device("cpu")),
    )


def test_backend_that_averages_weights_is_refused() -> None:
    strategy = DDPStrategy(model_averaging_period=4)
    with pytest.raises(TrainkitError, match="post-local SGD the ranks average weights"):
        refusals.refuse_unknown_backend(SimpleNamespace(strategy=strategy))


def test_ranks_without_torch_distributed_are_refused() -> None:
    """As torch_xla has them."""
    unknown = SimpleNamespace(strategy=SimpleNamespace(), world_size=8)
    with pytest.raises(TrainkitError, match=r"runs 8 ranks without torch.distributed"):
        refusals.refuse_unknown_backend(unknown)


@pytest.fixture(scope="module")
def two() -> dict[Any, list[Any]]:
    """What two ranks end with, where both are refused or none."""
    return run_cases(
        2,
        {
            "static graph, 2": (train_static_graph, 2),
            "static graph, 1": (train_static_graph, 1),
            "static graph, manual": (train_static_manual,),
            "equal streams": (train_stream, [5, 5], {}),
            "cut streams": (train_stream, [4, 6], {"limit_train_batches": 4}),
            "lists": (train_lists, [3, 5]),
        },
    )


def train_static_graph(rank: int, world: int, accumulate: int) -> Tensor:
    module = TokenModule()
    trainer(
        accumulate,
        strategy=DDPStrategy(static_graph=True),
        devices=world,
        callbacks=[AccumulationCallback(PerToken())],
    ).fit(module, loader(DATA, BATCH))
    return weights(module)


def test_static_graph_with_several_micro_batches_is_refused(two: Any) -> None:
    for error in two["static graph, 2"]:
        assert "static_graph=True: DDP cannot run a window of several" in str(error)
        assert "received 2. Make the DDP module, or Lightning" in str(error)


def test_static_graph_with_one_micro_batch_trains(two: Any) -> None:
    ends = raise_rank_errors(two["static graph, 1"])
    assert torch.equal(*ends)


def train_static_manual(rank: int, world: int) -> None:
    module = ManualModule()
    module.every = 2
    fit = trainer(strategy=DDPStrategy(static_graph=True), devices=world)
    fit.fit(module, loader(DATA, BATCH))


def test_static_graph_in_manual_optimization_is_refused(two: Any) -> None:
    for error in two["static graph, manual"]:
        assert "static_graph=True: DDP cannot run a window of several" in str(error)


# ---- modules and optimizers ----------------------------------------------------------


class QuasiNewton(TokenModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


def test_lbfgs_with_several_micro_batches_is_refused() -> None:
    refused("LBFGS: its closure repeats only the last micro-batch", QuasiNewton())


def test_lbfgs_in_a_schedule_is_refused_when_windows_grow() -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    callbacks = [
        AccumulationCallback(PerToken()),
        GradientAccumulationScheduler({1: 2}),
    ]
    fit = trainer(callbacks=callbacks)
    with pytest.raises(TrainkitError, match="accumulate_grad_batches is 2. Set it to"):
        fit.fit(QuasiNewton(), loader(DATA, BATCH))


class Twice(torch.optim.SGD):
    """Looks twice at the gradient, as sharpness-aware optimizers do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


class LooksTwice(TokenModule):
    def configure_optimizers(self) -> Any:
        return Twice(self.parameters(), lr=0.1)


def test_closure_that_runs_twice_is_refused() -> None:
    refused("optimizer: it ran its closure twice in one step", LooksTwice())


def test_closure_that_runs_twice_on_one_micro_batch_trains() -> None:
    fit = trainer(callbacks=[AccumulationCallback(PerToken())])
    fit.fit(LooksTwice(), loader(DATA, BATCH))
    assert fit.global_step == 20


def test_manual_optimization_without_the_mixin_is_refused() -> None:
    module = TokenModule()
    module.automatic_optimization = False
    refused(
        "TokenModule: with automatic_optimization=False it runs", module, accumulate=1
    )


class FetchesItself(TokenModule):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return token_loss(self.net, next(dataloader_iter)[0])


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning")
def test_batches_that_cannot_be_seen_are_refused() -> None:
    refused("it fetches its batches itself, so PerToken cannot", FetchesItself())


class NoneOnLast(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        last = (batch_idx + 1) % WINDOW == 0
        return None if last else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_none_on_the_last_micro_batch_under_a_scaler_is_refused() -> None:
    """Lightning would skip the whole window without a word."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=16.0)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    refused(
        "training_step: it returned None on the last", NoneOnLast(), plugins=[precision]
    )


def test_fused_optimizer_under_a_scaler_is_announced() -> None:
    class Fused(TokenModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, fused=True)

    scaler: Any = torch.amp.GradScaler("cpu", init_scale=16.0)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    callbacks = [AccumulationCallback(PerToken())]
    fit = trainer(WINDOW, plugins=[precision], callbacks=callbacks)
    with pytest.warns(UserWarning, match=r"SGD\(fused=True\) under a gradient scaler"):
        fit.fit(Fused(), loader(DATA, BATCH))


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned")
def test_training_without_an_optimizer_is_refused() -> None:
    class Idle(TokenModule):
        def configure_optimizers(self) -> None: ...

    refused("configure_optimizers: it returned no optimizer", Idle())


def test_batch_without_labels_is_refused() -> None:
    fit = trainer(callbacks=[AccumulationCallback(PerToken(labels="targets.ids"))])
    with pytest.raises(TrainkitError, match=r"path 'targets.ids'.*dict\(ids: int64"):
        fit.fit(TokenModule(), loader(DATA, BATCH))


# ---- ranks that run out of batches ---------------------------------------------------


class Stream(IterableDataset[Any]):
    """Yields so many batches, and does not say how many."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.number):
            yield pad(DATA[index * 2 : index * 2 + 2])


class Announced(Stream):
    """Says that it yields eight, and does not."""

    def __len__(self) -> int:
        return 8


def train_stream(
    rank: int,
    world: int,
    numbers: list[int],
    options: dict[str, Any],
    kind: type[Stream] = Stream,
) -> int:
    if not options and len(set(numbers)) > 1:  # nobody will come
        refusals.PATIENCE = timedelta(seconds=0.4)
    stream = torch.utils.data.DataLoader(kind(numbers[rank]), batch_size=None)
    fit = trainer(
        2,
        strategy="ddp",
        devices=world,
        callbacks=[AccumulationCallback(PerToken())],
        **options,
    )
    fit.fit(TokenModule(), stream)
    return fit.global_step


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (Stream, [6, 3]),
        (Stream, [0, 3]),
        (Announced, [4, 6]),
    ],
)
def test_stream_that_ends_early_on_one_rank_is_refused(
    numbers: list[int], kind: type[Stream]
) -> None:
    """lightning#20404, pytorch#33148: the other ranks waited for ever."""
    ends = run_ranks(train_stream, 2, numbers, {}, kind)
    short = numbers.index(min(numbers))
    text = f"rank {short} has run out of batches after {min(numbers)}, and other ranks"
    assert text in str(ends[short])
    assert isinstance(ends[1 - short], RankError)


def test_streams_of_equal_length_train(two: Any) -> None:
    assert two["equal streams"] == [6, 6]


def test_streams_cut_to_the_same_length_train(two: Any) -> None:
    """What the refusal advises."""
    assert two["cut streams"] == [4, 4]


def train_lists(rank: int, world: int, numbers: list[int]) -> None:
    fit = trainer(
        2,
        strategy="ddp",
        devices=world,
        use_distributed_sampler=False,
        callbacks=[AccumulationCallback(PerToken())],
    )
    fit.fit(TokenModule(), loader(DATA[: 4 * numbers[rank]], BATCH))


def test_loaders_of_different_length_are_refused(two: Any) -> None:
    text = "must have the same number of batches, and they have "
    for error in two["lists"]:
        assert f"{text}{[3, 5]}" in str(error)
    for error in run_ranks(train_lists, 3, [5, 3, 5]):
        assert f"{text}{[5, 3, 5]}" in str(error)


class NoneOnRankOne(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if self.global_rank == 1 else loss


def train_none(rank: int, world: int) -> None:
    fit = trainer(2, strategy="ddp", devices=world, use_distributed_sampler=False)
    callback: pl.Callback = AccumulationCallback(PerToken())
    fit.callbacks.append(callback)  # type: ignore[attr-defined]
    fit.fit(NoneOnRankOne(), loader(DATA, BATCH))


def test_none_on_one_rank_is_refused_by_lightning() -> None:
    """lightning#5243: it hung."""
    ends = run_ranks(train_none, 2)
    assert "by returning None in distributed training is not supported" in str(ends[1])
    assert isinstance(ends[0], RankError)


def test_a_loop_that_is_run_outside_of_fit_is_told_so() -> None:
    module, callback = TokenModule(), AccumulationCallback(PerToken())
    with pytest.raises(TrainkitError, match="TokenModule: .* outside of fit. Call tr"):
        callback.on_before_backward(trainer(2), module, torch.zeros(()))
