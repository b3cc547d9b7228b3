"""Several ranks train what one process with the big batch trains."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    train_on_windows,
    trainer,
    weights,
    windows_over_ranks,
)
from tests.lit.windows.several import Case, run_cases
from trainkit import AccumulationCallback, AccumulationMixin, PerToken
from trainkit.core import division as references
from trainkit.errors import TrainkitError

EXACT = TOLERANCE[torch.float64]
DATA = ragged_sequences(36)  # on 2 and on 3 ranks the epoch ends with a short window
BATCH, WINDOW = 4, 2


class MixinModule(AccumulationMixin, TokenModule):
    accumulation = PerToken()


def train(rank: int, world: int, front: str, **options: Any) -> Tensor:
    """Two epochs on this rank's share, float64."""
    chosen = {"strategy": "ddp", "data": DATA, "loss": "mean", "optimizer": "sgd"}
    chosen |= options
    data, strategy = chosen.pop("data"), chosen.pop("strategy")
    kind = MixinModule if front == "mixin" else TokenModule
    reduction = chosen.pop("loss")
    module = kind(
        dtype=torch.float64, reduction=reduction, optimizer=chosen.pop("optimizer")
    )
    callbacks = chosen.pop("callbacks", [])
    if front == "callback":
        callbacks = [
            AccumulationCallback(PerToken(loss_reduction=reduction)),
            *callbacks,
        ]
    fit = trainer(
        WINDOW,
        strategy=strategy,
        devices=world,
        use_distributed_sampler=False,
        callbacks=callbacks,
        **chosen,
    )
    fit.fit(module, rank_loader(data, BATCH, rank, world))
    return weights(module)


def deviations(
    ends: list[Any],
    *,
    data: list[tuple[Tensor, Tensor]] = DATA,
    optimizer: str = "sgd",
    clip: float | None = None,
) -> list[float]:
    """How far each rank's weights are from those of the big batch on one process."""
    start = TokenModule(dtype=torch.float64)
    windows = windows_over_ranks(data, BATCH, WINDOW, len(ends))
    reference = TokenModule(dtype=torch.float64, optimizer=optimizer)
    train_on_windows(reference, windows, clip=clip)
    return [deviation(end, reference, start) for end in raise_rank_errors(ends)]


def silenced(number: int, keep: int) -> list[tuple[Tensor, Tensor]]:
    """Every rank's labels are ignored, save those of rank `keep`."""
    return [
        (ids, labels if i % number == keep else torch.full_like(labels, -100))
        for i, (ids, labels) in enumerate(DATA)
    ]


GRID = [
    ("mixin", "sgd", None),
    ("callback", "sgd", 0.05),
    ("mixin", "momentum", 0.05),
    ("callback", "momentum", None),
    ("mixin", "adamw", None),
    ("callback", "adamw", 0.05),
]
"""Each pair of a front, an optimizer and a clip."""


def case(front: str, **options: Any) -> Case:
    return partial(train, **options), front


@pytest.fixture(scope="module")
def two() -> dict[Any, list[Any]]:
    """What two ranks end with in each case."""
    cases = {
        (front, optimizer, clip): case(
            front, optimizer=optimizer, gradient_clip_val=clip
        )
        for front, optimizer, clip in GRID
    }
    more: dict[Any, Case] = {
        "plain": case("plain"),
        "sum": case("callback", loss="sum"),
        0: case("callback", data=silenced(2, 0)),
        1: case("callback", data=silenced(2, 1)),
        "two heads": (train_two_heads,),
        "compressed": (train_compressed,),
        "without a reference": (train_compressed, 1.0),
        "collectives": (count_collectives,),
        "late": (train_nan, "late"),
        "now": (train_nan, "now"),
    }
    return run_cases(2, {**cases, **more})


@pytest.fixture(scope="module")
def three() -> dict[Any, list[Any]]:
    """What three ranks end with in each case."""
    return run_cases(
        3,
        {
            "mixin": case("mixin"),
            "callback": case("callback"),
            "plain": case("plain"),
            2: case("callback", data=silenced(3, 2)),
        },
    )


@pytest.mark.parametrize(("front", "optimizer", "clip"), GRID)
def test_two_ranks_equal_one_process(
    two: Any, front: str, optimizer: str, clip: float | None
) -> None:
    """transformers#34242, torchtune#2172: the mean of rank means is not the mean."""
    off = deviations(two[front, optimizer, clip], optimizer=optimizer, clip=clip)
    assert max(off) <= EXACT


@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_three_ranks_equal_one_process(three: Any, front: str) -> None:
    assert max(deviations(three[front])) <= EXACT


def test_plain_lightning_does_not_equal_one_process(two: Any, three: Any) -> None:
    for ends in (two, three):
        assert min(deviations(ends["plain"])) > NAIVE


def test_sum_of_losses_on_two_ranks_equals_one_process(two: Any) -> None:
    """transformers#37110: a loss of one's own, averaged once more by DDP."""
    assert max(deviations(two["sum"])) <= EXACT


@pytest.mark.parametrize(("world", "keep"), [(2, 0), (2, 1), (3, 2)])
def test_rank_that_weighs_nothing_equals_one_process(
    two: Any, three: Any, world: int, keep: int
) -> None:
    """torchtitan divides by its local count; miles#2796 clamps it on each rank."""
    ends = {2: two, 3: three}[world][keep]
    assert max(deviations(ends, data=silenced(world, keep))) <= EXACT


# ---- parameters that not every micro-batch uses --------------------------------------


class TwoHeads(TokenModule):
    """Short batches go through one head, long ones through the other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        torch.manual_seed(5)
        self.other = nn.Linear(8, 13, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        head = self.net.head if self.is_first(batch_idx) else self.other
        hidden = torch.tanh(self.net.embed(batch["ids"]))
        logits = head(hidden).flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def is_first(self, batch_idx: int) -> bool:
        return batch_idx % 2 == 0


def train_two_heads(rank: int, world: int) -> Tensor:
    module = TwoHeads(dtype=torch.float64)
    trainer(
        WINDOW,
        strategy="ddp_find_unused_parameters_true",
        devices=world,
        use_distributed_sampler=False,
        callbacks=[AccumulationCallback(PerToken())],
    ).fit(module, rank_loader(DATA, BATCH, rank, world))
    return weights(module)


def test_parameters_unused_in_some_micro_batches_equal_one_process(two: Any) -> None:
    """The first head is used in a window's first micro-batch alone, whose gradient
    the ranks do not exchange before the last one, which does not use it."""
    start, reference = (TwoHeads(dtype=torch.float64) for _ in range(2))
    optimizer = reference.configure_optimizers()
    for _ in range(2):
        for first in range(0, 18, BATCH * WINDOW):
            optimizer.zero_grad()
            total = 0
            for index in range(WINDOW):
                low = first + index * BATCH
                shares = [DATA[r::2][low : min(low + BATCH, 18)] for r in range(2)]
                if not shares[0]:
                    continue
                batch = pad(shares[0] + shares[1])
                count = int((batch["labels"] != -100).sum())
                (reference.training_step(batch, index) * count).backward()
                total += count
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter.grad /= total
            optimizer.step()
    ends = raise_rank_errors(two["two heads"])
    assert max(deviation(end, reference, start) for end in ends) <= EXACT


# ---- a communication hook in half precision ------------------------------------------


class Compress(pl.Callback):
    """Lightning registers `ddp_comm_hook` on CUDA only."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.model.register_comm_hook(None, fp16_compress_hook)


class HeavyToken(PerToken):
    """Windows that weigh some 800,000, beyond half precision."""

    def weight(self, batch: Any) -> Any:
        return 10_000 * super().weight(batch)


def train_compressed(rank: int, world: int, reference: float | None = None) -> Tensor:
    module = TokenModule()
    fit = trainer(
        WINDOW,
        strategy="ddp",
        devices=world,
        use_distributed_sampler=False,
        callbacks=[AccumulationCallback(HeavyToken()), Compress()],
    )
    with pytest.MonkeyPatch.context() as patch:
        if reference is not None:
            fixed = torch.tensor(reference)
            patch.setattr(references, "power_of_two", lambda number, before: fixed)
        fit.fit(module, rank_loader(DATA, BATCH, rank, world))
    return weights(module)


def test_half_precision_communication_equals_one_process(two: Any) -> None:
    """Up to the rounding of half precision, weights of 800,000 notwithstanding."""
    start = TokenModule()
    reference = train_on_windows(
        TokenModule(), windows_over_ranks(DATA, BATCH, WINDOW, 2)
    )
    ends = raise_rank_errors(two["compressed"])
    off = max(deviation(end, reference, start) for end in ends)
    assert 1e-8 < off <= 2e-3
    assert torch.equal(ends[0], ends[1])


def test_half_precision_communication_without_a_reference_overflows(two: Any) -> None:
    """Why micro-batches are weighted by w / r while the window is open."""
    for error in two["without a reference"]:
        assert "one was NaN or infinite" in str(error)


# ---- what it costs, and how it stops -------------------------------------------------


class CountCollectives(pl.Callback):
    """Counts all-reduces that trainkit starts, batch by batch."""

    def __init__(self) -> None:
        self.in_batches: list[int] = []

    def count(self, patch: pytest.MonkeyPatch) -> None:
        def counted(*args: Any, **kwargs: Any) -> Any:
            caller = inspect.stack()[1].filename
            if "trainkit" in caller and self.in_batches:
                self.in_batches[-1] += 1
            return original(*args, **kwargs)

        original = dist.all_reduce
        patch.setattr(dist, "all_reduce", counted)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.in_batches.append(0)


def count_collectives(rank: int, world: int) -> list[int]:
    counter = CountCollectives()
    with pytest.MonkeyPatch.context() as patch:
        counter.count(patch)
        train(rank, world, "callback", callbacks=[counter], max_epochs=1)
    return counter.in_batches


def test_collectives_equal_one_for_each_window(two: Any) -> None:
    """torchtune#1917: reduce once per window. The first also agrees on r."""
    for counted in raise_rank_errors(two["collectives"]):
        assert counted == [1, 1, 0, 1, 1]


class NanOnRankOne(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        bad = self.global_rank == 1 and batch_idx == 1
        return loss * torch.nan if bad else loss


def train_nan(rank: int, world: int, checks: Any) -> tuple[int, str]:
    fit = trainer(
        2,
        strategy="ddp",
        devices=world,
        use_distributed_sampler=False,
        callbacks=[AccumulationCallback(PerToken(), checks=checks)],
    )
    text = ""
    try:
        fit.fit(NanOnRankOne(), rank_loader(DATA, BATCH, rank, world))
    except TrainkitError as error:
        text = str(error)
    return fit.global_step, text


@pytest.mark.parametrize(("checks", "taken"), [("late", 1), ("now", 0)])
def test_nan_on_one_rank_is_named_on_all_ranks(
    two: Any, checks: str, taken: int
) -> None:
    """One window late for nothing, or before the step for one wait."""
    for steps, text in raise_rank_errors(two[checks]):
        assert steps == taken
        assert text.startswith("optimizer step 0 (counted from 0), rank 1: the loss")
