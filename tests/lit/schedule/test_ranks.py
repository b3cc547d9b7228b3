"""A schedule on several ranks trains what one process with the big batch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    NAIVE,
    OPTIMIZERS,
    TokenNet,
    deviation,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    trainer,
    weights,
)
from tests.lit.fronts import plain_token_loss
from tests.lit.schedule.scheduling import EPOCHS, START, Watch, make, windows_of_plan
from trainkit import AccumulationSchedule

DATA = ragged_sequences(36)
BATCH = 4  # five micro-batches an epoch on each rank
PLANS: dict[str, Any] = {
    "epoch": {0: 1, 1: 3, 2: 2},
    "step": {0: 1, 2: 3, 5: 2},
    "tokens": {0: 1, 150: 3, 600: 2},
}


def share(rank: int, index: int) -> list[Any]:
    return DATA[rank::2][index * BATCH : (index + 1) * BATCH]


COUNTS = [
    sum(len(ids) for rank in range(2) for ids, _ in share(rank, index))
    for index in range(5)
]


def big_batch(windows: list[list[range]]) -> Tensor:
    net = TokenNet(dtype=torch.float64)
    stepper = OPTIMIZERS["adamw"](net.parameters())
    for window in (w for ws in windows for w in ws):
        samples = [s for r in range(2) for index in window for s in share(r, index)]
        stepper.zero_grad()
        plain_token_loss(net, pad(samples)).backward()
        stepper.step()
    return weights(net)


def train(rank: int, world: int, front: str, unit: Any) -> Any:
    module, ours = make("mixin" if front == "mixin" else front)
    watch = Watch()
    schedule = AccumulationSchedule(PLANS[unit], unit=unit)
    fit = trainer(
        strategy="ddp",
        devices=world,
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        callbacks=[schedule, *ours, watch],
    )
    fit.fit(module, rank_loader(DATA, BATCH, rank, world))
    return weights(module), watch.stepped, fit.global_step


CASES = [
    ("epoch", "mixin"),
    ("step", "callback"),
    ("step", "manual"),
    ("tokens", "mixin"),
    ("tokens", "manual"),
]


def train_all(rank: int, world: int) -> Any:
    return {(unit, front): train(rank, world, front, unit) for unit, front in CASES}


@pytest.fixture(scope="module")
def trained() -> Any:
    return raise_rank_errors(run_ranks(train_all, 2))


@pytest.mark.parametrize(("unit", "front"), CASES)
def test_schedule_on_two_ranks_equals_one_process(
    trained: Any, unit: str, front: str
) -> None:
    """Their tokens differ, and they count those of both: all switch at one window."""
    windows = windows_of_plan(PLANS[unit], unit, COUNTS)
    (first, steps, number), (second, others, _) = (r[unit, front] for r in trained)
    assert number == sum(map(len, windows))
    if front != "manual" or steps:
        ends = [5 * e + w.stop - 1 for e, ws in enumerate(windows) for w in ws]
        assert steps == others == ends
    exact = big_batch(windows)
    assert max(deviation(end, exact, START) for end in (first, second)) <= 1e-10


def test_ranks_that_count_their_own_tokens_do_not_equal_one_process() -> None:
    """Negative control: they would switch at other windows than both together."""
    own = [
        [sum(len(ids) for ids, _ in share(rank, i)) for i in range(5)]
        for rank in range(2)
    ]
    plans = [windows_of_plan(PLANS["tokens"], "tokens", c) for c in (*own, COUNTS)]
    exact = big_batch(plans[2])
    assert plans[0] != plans[2]
    assert plans[1] != plans[2]
    assert deviation(big_batch(plans[0]), exact, START) > NAIVE
