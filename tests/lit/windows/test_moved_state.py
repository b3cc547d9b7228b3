"""What `training_step` moves is found by its values, and nothing else is named."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection

from tests.helpers import NAIVE, deviation, trainer, weights
from tests.lit.fronts import EQUAL, RAGGED, WINDOW, merged, micro_batches
from tests.lit.split.common import SEQUENCES
from tests.lit.windows.moving import ONCE, WAYS, Moving
from trainkit.lit.callback.moved_state import NOT_DUE, MovedState


def trained(module: Moving, sizes: Any, window: int) -> Moving:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "training_step has changed")
        trainer(window).fit(module, micro_batches(SEQUENCES, sizes))
    return module


@pytest.mark.parametrize(
    ("way", "sizes", "wrong"),
    list(
        zip(
            WAYS,
            itertools.cycle([RAGGED, EQUAL]),
            itertools.cycle(["training_step", *["on_train_batch_end"] * 2]),
            strict=False,
        )
    ),
)
def test_moved_before_the_step_equals_the_big_batch_in_streamed_windows(
    way: str, sizes: Any, wrong: str
) -> None:
    """As the warning says; in each batch, and at its end, they move too often."""
    whole = trained(Moving(ONCE, way), merged(sizes), 1)
    start = weights(Moving(ONCE, way))
    assert deviation(trained(Moving(ONCE, way), sizes, WINDOW), whole, start) < 1e-7
    ours = trained(Moving(wrong, way), sizes, WINDOW)
    assert deviation(ours, whole, start) > NAIVE


class Holder(nn.Module):
    """Stands for a LightningModule with all sorts of state."""

    global_rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.free = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.metric = MeanMetric()
        self.metrics = MetricCollection([MeanMetric()])
        self.attribute = torch.arange(4)
        self.maybe = torch.tensor([float("nan"), 1])
        self.register_buffer("brief", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("nothing", None)
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.steps, self.rate = 0, 1.0
        optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.trainer = SimpleNamespace(optimizers=[optimizer])


def after(change: Callable[[Any], object], holder: Holder | None = None) -> list[str]:
    """What is said where a training_step makes this change."""
    holder = holder or Holder()
    moved = MovedState(holder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.no_grad(), moved.watch():
            change(holder)
    return [str(each.message) for each in told]


CHANGES: dict[str, Callable[[Any], object]] = {
    "free": lambda m: m.free.add_(1),
    "frozen.weight": lambda m: m.frozen.weight.data.mul_(1.001),
    "frozen.bias": lambda m: setattr(m.frozen.bias, "data", torch.ones(2)),
    "attribute": lambda m: m.attribute.add_(1),
    "brief": lambda m: m.brief[0].add_(1),
    "flags": lambda m: m.flags[0].logical_not_(),
    "rate": lambda m: setattr(m, "rate", 0.9 * m.rate),
    "turns": lambda m: setattr(m, "turns", m.turns * 2j),
}


@pytest.mark.parametrize("name", CHANGES)
def test_each_kind_of_state_is_named(name: str) -> None:
    (said,) = after(CHANGES[name])
    assert f"has changed {name}, which" in said


def test_three_are_named() -> None:
    (said,) = after(lambda m: [change(m) for change in CHANGES.values()])
    assert " and 5 more, which no optimizer moves" in said


def run_parts(m: Any) -> None:
    m.norm(torch.randn(4, 2))
    m.instance(torch.randn(4, 2, 3))
    m.metric.update(3.0)
    m.metrics.update(3.0)


QUIET: dict[str, Callable[[Any], object]] = {
    "what is trained": lambda m: m.net.weight.add_(1),
    "statistics and metrics": run_parts,
    "a cache as long as the input": lambda m: setattr(m, "attribute", torch.arange(9)),
    "a cache made anew": lambda m: setattr(m, "brief", m.brief.clone()),
    "another dtype": lambda m: setattr(m, "brief", torch.zeros(3)),
    "the first value": lambda m: setattr(m, "new", torch.ones(2)),
    "taken away": lambda m: delattr(m, "maybe"),
    "counters": lambda m: setattr(m, "steps", 7),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_no_state_is_not_named(case: str) -> None:
    assert not after(QUIET[case])


def test_kept_activations_with_their_graph_are_not_named() -> None:
    holder = Holder()
    holder.attention = torch.zeros(2, 2)

    def attend(m: Any) -> None:
        with torch.enable_grad():
            m.attention = m.net(torch.ones(2, 2))

    assert not after(attend, holder)


def test_only_the_first_rank_looks() -> None:
    """DDP sends the others its buffers in each forward pass."""
    holder = Holder()
    holder.global_rank = 1
    assert not after(CHANGES["brief"], holder)


def test_windows_are_looked_at_more_and_more_rarely_until_something_moves() -> None:
    holder = Holder()
    moved = MovedState(holder)
    looks = [moved.watch() is not NOT_DUE for _ in range(20)]
    assert [number for number in range(20) if looks[number]] == [0, 1, 2, 4, 8, 16]
    moved = MovedState(holder)
    told = []
    for number in range(9):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with moved.watch():
                holder.attribute += int(number >= 3)
        told += [number] * len(said)
    assert told == [4]


def test_print_of_each_dtype_is_that_of_its_values() -> None:
    for dtype in (torch.float64, torch.float16, torch.int8, torch.float8_e4m3fn):
        holder = Holder()
        holder.attribute = torch.arange(4.0).to(dtype)

        def write(m: Any, dtype: Any = dtype) -> None:
            m.attribute.copy_(torch.tensor([0.0, 1, 2, 4]).to(dtype))

        assert len(after(write, holder)) == 1
        assert not after(write, holder)
        assert isinstance(holder.attribute, Tensor)
