"""Training with cut loader batches equals training with the whole ones."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, deviation, weights
from tests.lit.fronts import (
    LOSSES,
    Recorder,
    Run,
    big_batch,
    clip_options,
    make_strategy,
    windows_of,
)
from tests.lit.split.common import (
    CUTS,
    FIXED,
    SEQUENCES,
    SIZES,
    START,
    Split,
    assert_as_whole,
    fit,
    loader_batches,
    relabelled,
    samples,
)
from tests.lit.windows.moving import ONCE, Moving
from tests.lit.windows.test_modules import Partial
from tests.lit.windows.test_refusals import lbfgs
from tests.zoo.modules import Rows, hooked, on_front, pad_and_mask, sample_loss
from trainkit import AccumulationSchedule, MicroBatching, PerSample, PerToken, Uniform

MANY = (6, 3, 9, 1, 8, 4, 9)
"""Loader batches, of which several make a window; the last window is short."""

NARROW = {torch.float64: (1e-10, 1e-9), torch.float32: (2e-5, 1e-4)}
"""Of a dtype: how far off weights and losses may be."""

F32, F64 = torch.float32, torch.float64
OPTIMIZERS = ("sgd", "momentum", "adamw", "momentum", "sgd")
CLIPS: Any = ("norm", "value", None)
MEAN_OR_SUM: Any = ("mean", "sum", "sum", "mean")
STRATEGIES = ("PerSample", "PerToken")
# Every cut meets every window, every strategy both, and the rest takes turns.
TURNS = [
    (STRATEGIES[(n + n // 2) % 2], *each, MEAN_OR_SUM[n // 2 % 4])
    for n, each in enumerate(product(CUTS, (1, 3)))
]
CASES = [
    (strategy, cut, window, OPTIMIZERS[n % 5], CLIPS[n % 3], reduction, F64)
    for n, (strategy, cut, window, reduction) in enumerate(TURNS)
] + [
    (STRATEGIES[n % 2], cut, 1, "sgd", None, MEAN_OR_SUM[n], F32)
    for n, cut in enumerate(("size", "tokens", "auto"))
]


@cache
def reference(strategy: str, window: int = 1, **how: Any) -> Run:
    """A loop of torch alone, with each window as one batch."""
    sizes = SIZES if window == 1 else MANY
    return big_batch(SEQUENCES, sizes, LOSSES[strategy], window=window, **how)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_cut_equals_big_batch(case: Any) -> None:
    """Weights after each epoch, and every window's loss."""
    strategy, cut, window, optimizer, clip, reduction, dtype = case
    how: Any = {"optimizer": optimizer, "dtype": dtype}
    expected = reference(strategy, window, clip=clip, **how)
    right = {"strategy": make_strategy(strategy, reduction), "reduction": reduction}
    module = Split(LOSSES[strategy], cut=CUTS[cut], **right, **how)
    run = recorded(module, window, **clip_options(clip))
    tolerance, of_losses = NARROW[dtype]
    assert max(run.deviations(expected)) <= tolerance
    assert run.losses == pytest.approx(expected.losses, rel=of_losses)


def recorded(module: Split, window: int, **options: Any) -> Run:
    """What a training goes through whose windows are cut."""
    run, sizes = Run(START), SIZES if window == 1 else MANY
    fitted = fit(module, Recorder(run), window=window, sizes=sizes, **options)
    last = windows_of(fitted).last_window
    assert last is not None
    assert int(last.num_micro_batches) >= 2
    return run


@pytest.mark.filterwarnings("ignore:trainkit . micro_batching. Uniform")
@pytest.mark.parametrize(("strategy", "window"), [*product(STRATEGIES, (1, 3))])
def test_micro_batches_that_count_alike_train_something_else(
    strategy: str, window: int
) -> None:
    """The control of the test above."""
    run = recorded(Split(LOSSES[strategy], strategy=Uniform()), window)
    assert max(run.deviations(reference(strategy, window))) > NAIVE


@pytest.mark.parametrize("cut", ["size", "auto"])
def test_with_the_callback_no_line_of_somebody_elses_module_changes(cut: str) -> None:
    module, ours = on_front("callback", cut=CUTS[cut], optimizer="adamw")
    fit(module, *ours)
    expected = reference("PerToken", optimizer="adamw").end
    assert deviation(module, expected, START) <= 1e-10


@pytest.mark.parametrize("size", [1, 16, 100])
def test_any_size_takes_one_step_for_each_loader_batch(size: int) -> None:
    fitted = fit(module := Split(cut=MicroBatching(size=size), optimizer="adamw"))
    counters = {float(s["step"]) for s in fitted.optimizers[0].state.values()}
    assert fitted.global_step == 2 * len(SIZES)
    assert counters == {2.0 * len(SIZES)}
    assert deviation(module, reference("PerToken", optimizer="adamw").end, START) < 1e-9


# ---- whatever the module is ----------------------------------------------------------


class Checkpointed(Split):
    """Computes its activations again in the backward pass, with dropout."""

    def __init__(self, *, again: bool = True, p: float = 0.0, **how: Any) -> None:
        super().__init__(**how)
        self.again, self.drop = again, nn.Dropout(p)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def logits(ids: Tensor) -> Any:
            return self.drop(self.net(ids))

        def net(ids: Tensor) -> Any:
            return checkpoint(logits, ids, use_reentrant=False)

        return self.loss(net if self.again else logits, batch)


class Sometimes(Split):
    """Uses a part for long rows alone, so in some micro-batches not at all."""

    def __init__(self, **how: Any) -> None:
        super().__init__(sample_loss, **{"strategy": PerSample(), **how})
        self.bias = nn.Parameter(torch.zeros(13, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        long = (batch["labels"] != -100).sum(1) > 15
        loss = super().training_step(batch, batch_idx)
        if long.any():
            loss = loss + (self.bias.exp().sum() * long.sum()) / len(long)
        return loss


class OfFirst(Split):
    """Learns from the first of two loaders."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"strategy": PerToken(labels="a.labels"), **how})

    def loss_of(self, batch: Any) -> Tensor:
        return super().loss_of(batch["a"])


def closure_twice(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:
    optimizer_closure()
    Split.optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)


TWO_LOADERS = {name: loader_batches((8, 7, 9)) for name in "ab"}
MOMENTUM = {"optimizer": "momentum"}
WITHOUT = {
    "kind": relabelled(Split, 2, 3, 5, 7),
    "cut": MicroBatching(size=1, trim=False),
    "naive": 0,  # its loss is NaN, and so refused
}
SCHEDULES = GradientAccumulationScheduler, AccumulationSchedule
KINDS: dict[str, dict[str, Any]] = {
    "gradient checkpointing": {"kind": Checkpointed},
    "frozen and unused parameters": {
        "kind": lambda **how: on_front("mixin", Partial, **how)[0]
    },
    "a parameter that some micro-batches leave out": {"kind": Sometimes},
    "rows without labels": WITHOUT,
    "and windows of two": {**WITHOUT, "window": 2, "sizes": (9, 8, 12, 11)},
    "no index": {"kind": hooked(Split, training_step=Split.loss_of)},
    "several loaders": {"kind": OfFirst, "data": TWO_LOADERS},
    "an early closure": {"kind": hooked(Split, optimizer_step=closure_twice)},
    # Its closure runs the whole window again; the control does not settle.
    "LBFGS": {"made": {"optimizer": lbfgs}, "tolerance": 1e-9, "naive": 0},
    **{
        f"{kind.__name__} {schedule}": {
            "callbacks": lambda k=kind, s=schedule: [k(s)],
            "made": MOMENTUM,
            "sizes": MANY,
        }
        for kind, schedule in zip(SCHEDULES, ({0: 1, 1: 2}, {0: 2, 1: 1}), strict=True)
    },
}


@pytest.mark.filterwarnings("ignore:accumulation. an open window")
@pytest.mark.parametrize("name", KINDS)
def test_the_cut_equals_whole_batches(name: str) -> None:
    assert_as_whole(**KINDS[name])


@pytest.mark.parametrize("cut", [FIXED, MicroBatching(tokens=60, pool=2)])
def test_a_closure_runs_several_loader_batches_again(cut: MicroBatching) -> None:
    fit(ours := Split(cut=cut, optimizer=lbfgs), window=2, sizes=(9, 7, 8, 16))
    fit(whole := Split(cut=None, optimizer=lbfgs), sizes=(16, 24))
    assert deviation(ours, whole, START) <= 1e-9


def test_gradient_checkpointing_replays_dropout_in_each_micro_batch() -> None:
    ends = []
    for again in (True, False):
        torch.manual_seed(3)
        fit(module := Checkpointed(again=again, p=0.5))
        ends.append(weights(module))
    torch.testing.assert_close(*ends)
    assert float((ends[0] - START).norm()) > 0.1


@pytest.mark.filterwarnings("ignore:.*barebones:UserWarning")
def test_barebones_equals_whole_batches() -> None:
    found = []
    for cut in (FIXED, None):
        module = Split(cut=cut)
        fitted = pl.Trainer(accelerator="cpu", barebones=True, max_epochs=2)
        fitted.fit(module, loader_batches())
        found.append((weights(module), fitted.global_step))
    torch.testing.assert_close(found[0], found[1])


def of_a_list(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.net(torch.stack(list(batch)).double()).square().mean()


def test_lists_of_vectors_are_counted_where_they_are_named() -> None:
    """By default, the control, a list of tensors is one of fields."""
    rows: Any = [torch.tensor([i, -i, 1.0]) for i in range(7)]
    named, ends = PerSample(size=""), []
    for strategy, cut, size, window in (
        (named, None, 7, 1),
        (named, None, 3, 3),
        (named, MicroBatching(size=2), 7, 1),
        (named, MicroBatching(size=2, collate=list), 4, 2),
        (PerSample(), None, 3, 3),
    ):
        kind = hooked(Rows, training_step=of_a_list)
        module, _ = on_front("mixin", kind, strategy=strategy, cut=cut)
        loader: Any = DataLoader(rows, batch_size=size, collate_fn=list)
        fit(module, window=window, data=loader, max_epochs=1)
        ends.append(weights(module))
    whole, *others, wrong = ends
    assert max(deviation(end, whole, Rows()) for end in others) < 1e-12
    assert deviation(wrong, whole, Rows()) > NAIVE


def test_a_list_of_samples_is_collated_by_micro_batch() -> None:
    module = Split(cut=MicroBatching(size=4, collate=pad_and_mask))
    fit(module, data=samples())
    fit(whole := Split(cut=None), data=samples(collate=pad_and_mask))
    assert deviation(module, whole, START) <= 1e-10


@pytest.mark.parametrize(
    ("way", "cut", "where"),
    [
        ("buffer", "size", "training_step"),
        ("in place", "auto", ONCE),
        ("queue", "size", "on_train_batch_end"),
    ],
)
def test_state_is_that_of_whole_batches_if_it_moves_once_a_step(
    way: str, cut: str, where: str
) -> None:
    """The control: moved in `training_step`, it is another training."""
    ends = []
    for each in (CUTS[cut], None):
        module = Moving(where, way, cut=each)
        fit(module)
        ends.append(weights(module.net))
    off = deviation(ends[0], ends[1], weights(Moving("", "").net))
    assert off > NAIVE if where == "training_step" else off < 1e-12
