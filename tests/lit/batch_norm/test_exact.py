"""BatchNormGuard("exact") trains as the whole batch does, also on ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

from tests.helpers import RankError, raise_rank_errors, run_cases
from tests.lit.batch_norm.exact_fits import (
    Bare,
    Images,
    Listed,
    Mixed,
    Stem,
    Thawed,
    apart,
    evaluating,
    exact,
    fit,
    images,
    partly_frozen,
    without_statistics,
)
from trainkit import (
    AccumulationCallback,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    NoiseScale,
    PerSample,
    WindowMonitor,
)

pytestmark = pytest.mark.filterwarnings("ignore:Found .* in eval mode")

SPLIT = MicroBatching(size=4)
INSIDE = MicroBatching(inside="net", size=4)


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(
            use_buffers=True,
            avg_fn=lambda average, value, number: (
                average + (value - average) / 2 if value.is_floating_point() else value
            ),
        )

    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return step_idx is not None


@dataclass
class Case:
    """A training in chunks.

    Attributes:
        make: the module.
        cut: the options; None where the module has its own.
        others: makes more callbacks.
        plain: the module that plain Lightning trains, if it is another one.
        naive: whether plain accumulation with the same callbacks is far off.
        options: of the Trainer.
    """

    make: Callable[[], Any] = Images
    cut: MicroBatching | None = SPLIT
    others: Callable[[], list[Any]] = list
    plain: Callable[[], Any] | None = None
    naive: bool = True
    options: Any = None


CASES = {
    "split": Case(),
    "inside, found": Case(cut=MicroBatching(inside="auto", size=3)),
    "no batch exceeds the size": Case(cut=MicroBatching(size=64), naive=False),
    "in the step": Case(Bare),
    "mixin": Case(Mixed, None, plain=Images),
    "list": Case(Listed),
    "layer in the step": Case(Stem, INSIDE, naive=False),
    "frozen": Case(partly_frozen),
    "late": Case(evaluating, others=lambda: [Thawed()]),
    "no statistics": Case(without_statistics, others=lambda: [Thawed()]),
    "averages": Case(others=lambda: [Average()]),
    "schedule of one": Case(others=lambda: [GradientAccumulationScheduler({0: 1})]),
    "clipped, inside": Case(cut=INSIDE, options={"gradient_clip_val": 0.05}),
}


def ours(case: Case) -> list[Any]:
    if case.cut is None:
        return [BatchNormGuard("exact")]
    return exact(case.cut)


@pytest.mark.parametrize("name", CASES)
def test_training_equals_whole_batches_and_plain_accumulation_does_not(
    name: str,
) -> None:
    case = CASES[name]
    options = case.options or {}
    whole, module, naive = (case.plain or case.make)(), case.make(), case.make()
    plain = fit(whole, *case.others(), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran whole")
        fitted = fit(module, *case.others(), *ours(case), **options)
    assert apart(module, whole) <= 1e-10  # buffers too
    assert not [n for n, m in module.named_modules() if "forward" in vars(m)]
    assert list(module.state_dict()) == list(whole.state_dict())
    if case.plain is None:
        logged = {k: float(v) for k, v in fitted.callback_metrics.items()}
        wanted = {k: float(v) for k, v in plain.callback_metrics.items()}
        assert logged == pytest.approx(wanted, rel=1e-6)
    if case.naive:
        parts = AccumulationCallback(PerSample(), micro_batching=SPLIT)
        fit(naive, *case.others(), *([parts] if case.cut else []), **options)
        assert apart(naive, whole) > 1e-3


def test_rates_and_windows_numbers_are_those_of_one_batch(capsys: Any) -> None:
    module, plain = Listed(), Listed()
    monitor = WindowMonitor(every_n_steps=1)
    rate = LRScaling("sqrt", reference_batch=5)
    fitted = fit(module, *exact(SPLIT), rate, monitor)
    plain.configure_optimizers = lambda: torch.optim.SGD(  # type: ignore[method-assign]
        plain.parameters(), lr=0.1 * 2**0.5, momentum=0.9
    )
    fit(plain)
    assert apart(module, plain) <= 1e-10
    assert float(fitted.callback_metrics["window/micro_batches"]) == 1
    assert float(fitted.callback_metrics["window/weight"]) == 6
    assert "blocks.0, blocks.1 in chunks of at most 4 rows" in capsys.readouterr().out


def test_statistics_epoch_of_weight_averaging() -> None:
    """The last epoch takes no step: its statistics are those of loader batches."""
    trained = []
    for callbacks in (
        [],
        [AccumulationCallback(PerSample())],
        exact(SPLIT),
        [AccumulationCallback(PerSample(), micro_batching=SPLIT)],
    ):
        module = Images()
        module.net.last_norm.momentum = 0.2  # type: ignore[union-attr]
        average = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        fit(module, average, *callbacks, epochs=4)
        trained.append(module)
    plain, whole, module, naive = trained  # plain Lightning steps at the epoch's end
    assert apart(module, whole) <= 1e-10
    buffers = [dict(each.net.named_buffers()) for each in (plain, module, naive)]
    for name, value in buffers[0].items():
        assert torch.allclose(buffers[1][name].double(), value.double(), atol=1e-10)
    assert int(module.net.norm.num_batches_tracked) == 3  # type: ignore[union-attr, arg-type]
    name = "norm.running_var"
    assert float((buffers[2][name] - buffers[0][name]).abs().max()) > 1e-4


@pytest.mark.parametrize(
    ("cut", "words"),
    [(SPLIT, "have no gradients of their own"), (None, "so none has a gradient of i")],
)
def test_noise_scale_says_that_it_cannot_measure(cut: Any, words: str) -> None:
    noise = NoiseScale(every_n_steps=1, if_impossible="say")
    fit(Images(), *exact(cut), noise, epochs=1)
    assert noise.why_not is not None
    assert words in noise.why_not


SHARES: dict[int, list[tuple[int, ...]]] = {
    2: [(9, 3, 12), (3, 10, 1)],
    3: [(9, 3, 12), (3, 10, 1), (1, 1, 5)],
}
"""Rows in each rank's loader batches: micro-batches of 4 are 3 against 1, and so on."""

WAYS: dict[str, Callable[[], list[Any]]] = {
    "split": lambda: exact(SPLIT),
    "whole": lambda: exact(None),
    "control": lambda: [
        AccumulationCallback(PerSample(), micro_batching=SPLIT),
        BatchNormGuard("ignore"),
    ],
    # refused
    "a rank whose memory runs out": lambda: exact(MicroBatching("auto")),
    "on several ranks it needs the callback": lambda: [BatchNormGuard("exact")],
}


def batches(shares: list[tuple[int, ...]], rank: int | None) -> DataLoader[Any]:
    """The loader batches of a rank; of all of them together, without a rank."""
    data, at, found = images(60), 0, []
    for step in zip(*shares, strict=True):
        rows = []
        for index, number in enumerate(step):
            if rank in (None, index):
                rows += range(at, at + number)
            at += number
        found.append(rows)
    return DataLoader(data, batch_sampler=found)


def train(rank: int, world_size: int, way: str) -> tuple[Any, int]:
    """The state after a training, and how often its layers communicated."""
    module, calls, own = Images(), list[Any](), dist.all_reduce

    def counted(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(tensor.shape))
        return own(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        fit(
            module,
            *WAYS[way](),
            batches=batches(SHARES[world_size], rank),
            devices=world_size,
            strategy=DDPStrategy(process_group_backend="gloo"),
            use_distributed_sampler=False,
        )
    finally:
        dist.all_reduce = own
    in_layers = [shape for shape in calls if shape in {(world_size, 13), (2, 6)}]
    return module.state_dict(), len(in_layers)


@cache
def ranks_of(world_size: int) -> dict[str, list[Any]]:
    ways = WAYS if world_size == 2 else ["split"]
    return run_cases(world_size, {way: (train, way) for way in ways})


@pytest.mark.parametrize(
    ("world_size", "name"), [(2, "split"), (2, "whole"), (2, "control"), (3, "split")]
)
def test_ranks_equal_one_batch(world_size: int, name: str) -> None:
    """Plain accumulation, the control, does not."""
    whole = Images()
    fit(whole, batches=batches(SHARES[world_size], None))
    for state, calls in raise_rank_errors(ranks_of(world_size)[name]):
        module = Images()
        module.load_state_dict(state)
        if name == "control":
            assert apart(module, whole) > 0.1 * apart(whole, Images())
        else:
            assert apart(module, whole) <= 1e-10
            assert calls == 6 * 2 * 2  # steps x layers x (forward and backward)


@pytest.mark.parametrize("words", [way for way in WAYS if " " in way])
def test_what_ranks_cannot_do_is_refused(words: str) -> None:
    for error in ranks_of(2)[words]:
        with pytest.raises(RankError, match=f"^TrainkitError: .*{words}"):
            raise error
