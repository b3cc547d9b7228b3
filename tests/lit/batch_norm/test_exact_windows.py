"""Exact BatchNorm: on ranks, where memory runs out; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import RankError, raise_rank_errors, run_cases
from tests.lit.batch_norm.test_exact import (
    CLASSES,
    SPLIT,
    Images,
    Stem,
    Thawed,
    apart,
    evaluating,
    exact,
    fit,
    images,
    loader,
)
from tests.zoo.modules import by_hand
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationSchedule,
    BatchNormGuard,
    MicroBatching,
    PerSample,
)
from trainkit.core.tape.forward import TapedForward

pytestmark = [
    pytest.mark.filterwarnings("ignore:Found .* in eval mode"),
    pytest.mark.filterwarnings("ignore:.*open window .* was dropped"),
]


def unproven(cut: MicroBatching) -> list[Any]:
    """The proof at the start would meet a refusal first, and its passes would count."""
    return exact(cut, "off")


# ---- ranks ---------------------------------------------------------------------------


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
        gloo = DDPStrategy(process_group_backend="gloo")
        how: Any = {"devices": world_size, "use_distributed_sampler": False}
        how["batches"] = batches(SHARES[world_size], rank)
        fit(module, *WAYS[way](), strategy=gloo, **how)
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


# ---- memory --------------------------------------------------------------------------


def run_short(
    monkeypatch: Any, most: int, **options: Any
) -> tuple[Images, Any, list[int]]:
    """A training in which no more rows than `most` fit into memory: the module, its
    callback, and the sizes that failed."""
    failed: list[int] = []
    run = TapedForward._run

    def short(self: Any, *args: Any) -> Any:
        if (rows := self.sizes.limit or args[-1]) > most:
            failed.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 byte")
        return run(self, *args)

    monkeypatch.setattr(TapedForward, "_run", short)
    module, callbacks = Images(), unproven(MicroBatching(**options))
    fit(module, *callbacks, epochs=2)
    return module, callbacks[0], failed


def test_finer_chunks_once_memory_has_run_out(monkeypatch: Any) -> None:
    """But with a size of the user's the run ends."""
    module, callback, failed = run_short(monkeypatch, 3)
    assert failed == [10, 5]
    assert callback.micro_batch_size == 2
    whole = Images()
    fit(whole, epochs=2)
    assert apart(module, whole) <= 1e-10
    with pytest.raises(torch.OutOfMemoryError):
        run_short(monkeypatch, 3, size=4)


# ---- refusals ------------------------------------------------------------------------


def larger(trainer: Any, module: Any) -> None:
    """Makes windows of several batches, without saying so before."""
    trainer.accumulate_grad_batches = 1 + trainer.current_epoch


class MixedImages(AccumulationMixin, Images):
    accumulation = PerSample()


class Wanders(nn.Module):
    """How often it calls its layer depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(len(x)):
            x = self.norm(x)
        return self.head(x.mean((2, 3)))


def one_value() -> Images:
    """Has one value for a channel in a batch of one row."""
    flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return Images(nn.Sequential(*flat, nn.BatchNorm1d(3), nn.Linear(3, CLASSES)))


LARGER = LambdaCallback(on_train_epoch_start=larger)
ONE_BATCH = (
    r"a window must be one loader batch.*MicroBatching\(size=4\), which is "
    r"MicroBatching\(inside='net', size=4\) here"
)
ROWS = r"20 in place of 10 rows \(batch_size\), set accumulate_grad_batches=1"
TWO = "made by 2 loader batches"
REFUSED: dict[str, tuple[str, Any, list[Any], dict[str, Any]]] = {
    "window": (ONE_BATCH, Images, exact(None), {"window": 2}),
    "window, split": (ROWS, Images, exact(SPLIT), {"window": 2}),
    "without the callback": (TWO, Images, [BatchNormGuard("exact")], {"window": 2}),
    "late": (TWO, evaluating, [Thawed(), *exact(SPLIT)], {"window": 2}),
    "grows": (ONE_BATCH, Images, [*exact(SPLIT), LARGER], {}),
    "schedule": (TWO, Images, [*exact(SPLIT), AccumulationSchedule({0: 1, 1: 2})], {}),
    "Lightning's": (
        TWO,
        *(Images, [*exact(None), GradientAccumulationScheduler({0: 1, 1: 2})], {}),
    ),
    "by hand": (
        "by manual optimization",
        by_hand(MixedImages),
        [BatchNormGuard("exact")],
        {},
    ),
    "in the step": (
        "Stem calls stem in its own step.*Here net can be named",
        *(Stem, exact(SPLIT), {}),
    ),
    "shared": (
        r"received tokens=None, shared=\['x'\]",
        *(Images, unproven(MicroBatching(inside="net", size=4, shared=("x",))), {}),
    ),
    "tokens": ("by rows alone, received", Images, exact(MicroBatching(tokens=8)), {}),
    "collate": (
        "by rows alone, received",
        *(Images, exact(MicroBatching(size=4, collate=list)), {}),
    ),
    "tokens, inside": (
        "with its padding, received tokens=8",
        *(Images, unproven(MicroBatching(inside="net", tokens=8)), {}),
    ),
    "by the data": (
        "must not use __len__ on values of the batch",
        *(lambda: Images(Wanders()), unproven(SPLIT), {}),
    ),
    "one value": (
        "more than 1 value per channel",
        *(one_value, exact(SPLIT), {"batches": loader(batch_size=1, number=3)}),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    said, make, callbacks, options = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        fit(make(), *callbacks, **options)


def test_on_one_rank_whole_batches_run_the_layers_as_they_are() -> None:
    replaced = []

    def note(trainer: Any, module: Any, *more: Any) -> None:
        replaced.append("forward" in vars(module.net.norm))

    notes = LambdaCallback(on_train_batch_start=note)
    fit(Images(), *exact(None), notes, epochs=1)
    assert replaced == [False] * 3


def test_two_values_of_a_channel_are_enough() -> None:
    fit(one_value(), *exact(MicroBatching(size=1)), batches=loader(2, 4))


@pytest.mark.parametrize("cut", [None, SPLIT])
def test_modules_without_batch_norm_are_not_refused(cut: MicroBatching | None) -> None:
    callbacks: Any = exact(cut)
    net = nn.Sequential(nn.Flatten(), nn.Linear(108, CLASSES))
    fit(Images(net), *callbacks, window=2)
    assert callbacks[0].cut is cut
