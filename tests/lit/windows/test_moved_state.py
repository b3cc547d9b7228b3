"""What `training_step` moves in streamed windows is named, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection

from tests.helpers import NAIVE, deviation, trainer, weights
from tests.lit.fronts import EQUAL, RAGGED, WINDOW, fit, merged, micro_batches
from tests.lit.split.common import SEQUENCES
from tests.lit.windows.moving import NAMES, ONCE, WAYS, Moving
from tests.recording import told
from tests.zoo import Plain, hooked

SAID = "training_step has changed "
LATER = ("training_step", "on_train_batch_end")


def trained(
    where: str, way: str, sizes: Any = RAGGED, window: int = WINDOW, **how: Any
) -> tuple[Moving, list[str]]:
    """The module, and what was said of its state."""
    module = Moving(where, way, **how)
    with told(SAID) as said:
        trainer(window).fit(module, micro_batches(SEQUENCES, sizes))
    return module, said


@pytest.mark.parametrize(
    ("way", "sizes", "wrong"),
    [(way, (RAGGED, EQUAL)[i % 2], LATER[i % 3 > 0]) for i, way in enumerate(WAYS)],
)
def test_moved_before_the_step_equals_the_big_batch_in_streamed_windows(
    way: str, sizes: Any, wrong: str
) -> None:
    """As the warning says; in each batch, and at its end, they move too often."""
    whole, _ = trained(ONCE, way, merged(sizes), 1)
    start = weights(Moving(ONCE, way))
    ours, said = trained(ONCE, way, sizes)
    assert deviation(ours, whole, start) < 1e-7
    assert not said
    assert deviation(trained(wrong, way, sizes)[0], whole, start) > NAIVE
    (text,) = trained("training_step", way, sizes)[1]
    assert text.startswith(f"{SAID}{NAMES.get(way, 'follower.')}")
    assert ONCE in text


def test_windows_of_one_micro_batch_are_not_spoken_of() -> None:
    assert not trained("training_step", "buffer", window=1)[1]


# ---- what is state, and what is none -------------------------------------------------


class Holder(Plain):
    """Has all sorts of state; a change is made in one micro-batch."""

    change: Callable[[Any], object]
    at: Callable[[int], bool] = staticmethod(lambda batch: batch == 0)

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Parameter(torch.ones(3))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.norm = nn.BatchNorm1d(2)
        self.instance = nn.InstanceNorm1d(2, track_running_stats=True)
        self.metric = MeanMetric()
        self.metrics = MetricCollection([MeanMetric()])
        self.attribute = torch.arange(4)
        self.maybe = torch.tensor([float("nan"), 1])
        self.attention = torch.zeros(2, 2)
        self.register_buffer("brief", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("nothing", None)
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        self.steps, self.rate = 0, 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if type(self).at(batch_idx):
            with torch.no_grad():
                type(self).change(self)
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=1.0)


def after(change: Callable[[Any], object], **attributes: Any) -> list[str]:
    """What is said where a training_step makes this change."""
    kind = hooked(Holder, change=change, **attributes)
    sizes = (1,) * 20
    with told(SAID) as said:
        fit("callback", kind, sizes=sizes, window=2, max_epochs=1)
    return said


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
    """Only on the first rank: DDP sends the others its buffers in each forward pass."""
    (said,) = after(CHANGES[name])
    assert f"has changed {name}, which" in said
    assert not after(CHANGES[name], global_rank=1)


def test_three_are_named() -> None:
    (said,) = after(lambda m: [change(m) for change in CHANGES.values()])
    assert " and 5 more, which no optimizer moves" in said


def run_parts(m: Any) -> None:
    m.norm(torch.randn(4, 2))
    m.instance(torch.randn(4, 2, 3))
    m.metric.update(3.0)
    m.metrics.update(3.0)


def attend(m: Any) -> None:
    with torch.enable_grad():
        m.attention = m.net.head(torch.ones(2, 8).double())[:, :2].float()


QUIET: dict[str, Callable[[Any], object]] = {
    "what is trained": lambda m: m.net.head.weight.add_(1),
    "statistics and metrics": run_parts,
    "a cache as long as the input": lambda m: setattr(m, "attribute", torch.arange(9)),
    "a cache made anew": lambda m: setattr(m, "brief", m.brief.clone()),
    "another dtype": lambda m: setattr(m, "brief", torch.zeros(3)),
    "the first value": lambda m: setattr(m, "new", torch.ones(2)),
    "taken away": lambda m: delattr(m, "maybe"),
    "counters": lambda m: setattr(m, "steps", 7),
    "activations with their graph": attend,
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_no_state_is_not_named(case: str) -> None:
    assert not after(QUIET[case])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.int8, torch.float8_e4m3fn]
)
def test_values_of_each_dtype_are_compared(dtype: torch.dtype) -> None:
    def write(m: Any) -> None:
        m.attribute.copy_(torch.tensor([0.0, 1, 2, 4]).to(dtype))

    def make(self: Any, *values: float) -> None:
        Holder.__init__(self)
        self.attribute = torch.tensor(values).to(dtype)

    assert len(after(write, __init__=lambda self: make(self, 0, 1, 2, 3))) == 1
    assert not after(write, __init__=lambda self: make(self, 0, 1, 2, 4))


def test_windows_are_looked_at_more_and_more_rarely_until_something_moves() -> None:
    """What begins to move later is said too, once."""
    change = CHANGES["attribute"]
    looks = [n for n in range(10) if after(change, at=lambda b, n=n: b == 2 * n)]
    assert looks == [0, 1, 2, 4, 8]
    assert len(after(change, at=lambda batch: batch >= 6)) == 1
