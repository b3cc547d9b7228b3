"""The same training with the cut and without it, on one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, deviation, ragged_sequences, trainer, weights
from tests.lit.fronts import cut as parted
from tests.zoo.callbacks import Table
from tests.zoo.modules import Mixed, Plain, hooked, pad_and_mask, plain_token_loss
from trainkit import MicroBatching, PerToken, Uniform

SIZES = (14, 17, 9)
"""Samples in each loader batch; the last is short."""

SEQUENCES = ragged_sequences(sum(SIZES))
START = weights(Plain())
EXACT = 1e-9

FIXED = MicroBatching(size=4)
AUTO = MicroBatching("auto")
CUTS = {
    "size": FIXED,
    "tokens": MicroBatching(tokens=48),
    "size and tokens": MicroBatching(size=5, tokens=40),
    "rows": MicroBatching(size=1),
    "auto": AUTO,
}


class Split(Mixed):
    """Cuts its loader batches, and is exact."""

    def __init__(
        self,
        loss: Callable[..., Tensor] = plain_token_loss,
        *,
        cut: MicroBatching | None = FIXED,
        **how: Any,
    ) -> None:
        super().__init__(loss, cut=cut, **how)


class Summing(Split):
    """Its loss is a sum."""

    def __init__(self, **how: Any) -> None:
        strategy = PerToken(loss_reduction="sum")
        super().__init__(**{"reduction": "sum", "strategy": strategy, **how})


def fit(
    module: Any,
    *callbacks: pl.Callback,
    window: int = 1,
    sizes: Sequence[int] = SIZES,
    data: Any = None,
    validation: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> pl.Trainer:
    """Train on loader batches of these sizes, or on other data."""
    fitted = trainer(window, callbacks=list(callbacks), **options)
    data = loader_batches(sizes) if data is None else data
    fitted.fit(module, data, validation, ckpt_path=ckpt_path)
    return fitted


def loader_batches(sizes: Sequence[int] = SIZES) -> DataLoader[Any]:
    return DataLoader(
        SEQUENCES,  # type: ignore[arg-type]
        batch_sampler=parted(SEQUENCES, sizes),
        collate_fn=pad_and_mask,
    )


def samples(size: int = 16, collate: Any = list) -> DataLoader[Any]:
    """Loader batches that are lists of samples, or what is made of these."""
    return DataLoader(SEQUENCES, size, collate_fn=collate)  # type: ignore[arg-type]


def off(module: Any, whole: Any, *callbacks: pl.Callback, **how: Any) -> float:
    """How far one module ends from another that is trained likewise."""
    fit(module, *callbacks, **how)
    fit(whole, **how)
    return deviation(module, whole, START)


class Seen(pl.Callback):
    """Writes down what callbacks are told of the loop: each hook and at which step it
    came; the rows of batches, the outputs of steps, and the weights after them."""

    per_micro_batch = ("on_before_backward", "on_after_backward")

    def __init__(self) -> None:
        self.hooks: list[tuple[str, int]] = []
        self.rows: list[int] = []
        self.outputs: list[Any] = []
        self.weights: list[Tensor] = []
        for name in dir(pl.Callback):
            if name.startswith("on_"):
                setattr(self, name, partial(self._note, name))

    def _note(self, name: str, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if name not in self.per_micro_batch:
            self.hooks.append((name, trainer.global_step))
        if name == "on_train_batch_end":
            self.outputs += tree_leaves(args[1])
            self.weights.append(weights(args[0]))
            self.rows.append(len(args[2]["ids"]) if "ids" in args[2] else 0)


def both(
    kind: Callable[..., Any] = Split,
    cut: MicroBatching | None = FIXED,
    *,
    callbacks: Callable[[], Sequence[Any]] = list,
    made: Mapping[str, Any] | None = None,
    **how: Any,
) -> list[pl.Trainer]:
    """Train twice, with the cut and without it.

    Args:
        kind: makes the module.
        cut: of the first training.
        callbacks: makes those of one training.
        made: other arguments of the module.
        **how: arguments of `fit`.
    """
    modules = [kind(cut=each, **made or {}) for each in (cut, None)]
    return [fit(module, *callbacks(), **how) for module in modules]


CONTROLLED: dict[Any, Any] = {}
"""Which modules, windows and data have had their control in `assert_as_whole`."""


def assert_as_whole(
    kind: Callable[..., Any] = Split,
    cut: MicroBatching | None = FIXED,
    *,
    callbacks: Callable[[], Sequence[Any]] = list,
    tolerance: float = 1e-10,
    naive: float = NAIVE,
    made: Mapping[str, Any] | None = None,
    **how: Any,
) -> pl.Trainer:
    """Check that the cut trains what whole loader batches train, and shows what they
    show: steps, hooks in their order, batches, outputs, all that is logged, rates; and
    that micro-batches which all count alike, the control, train something else. That is
    seen once for each module, window and data; what else the Trainer is told moves none
    of the weights of micro-batches.

    Args:
        kind: as for `both`.
        cut: as for `both`.
        callbacks: as for `both`.
        tolerance: the largest deviation of the cut.
        naive: the least deviation of the control; 0 leaves it out.
        made: as for `both`.
        **how: arguments of `fit`.
    """
    alike = {**(made or {}), "strategy": Uniform(), "reduction": "mean"}
    data = how.get("data")
    of = kind, id(data), repr((made, how.get("window"), how.get("sizes")))
    has_control = naive > 0 and of not in CONTROLLED
    runs = []
    for each, arguments in ((None, made), (cut, made), (FIXED, alike)):
        if arguments is alike and not has_control:
            continue
        module, seen, table = kind(cut=each, **arguments or {}), Seen(), Table()
        start = weights(module)
        options = {"logger": table, "log_every_n_steps": 1, **how}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "trainkit . micro_batching: Uniform")
            fitted = fit(module, seen, *callbacks(), **options)
        runs.append((fitted, seen, table))
    (whole, theirs, their_table), (ours, mine, my_table), *control = runs
    ends = [weights(each.lightning_module) for each, *_ in runs]
    assert deviation(ends[1], ends[0], start) <= tolerance
    for mid, other in zip(mine.weights, theirs.weights, strict=True):
        off = (mid - other).norm() / (ends[0] - start).norm()
        assert float(off) <= tolerance
    if control:
        assert not deviation(ends[2], ends[0], start) <= naive  # it may be NaN
        CONTROLLED[of] = data
    assert ours.global_step == whole.global_step > 0
    assert mine.hooks == theirs.hooks
    assert mine.rows == theirs.rows
    rates = [each.optimizers[0].param_groups[0]["lr"] for each in (ours, whole)]
    assert rates[0] == rates[1]
    if len(mine.rows) > ours.global_step:
        return ours  # the last loader batch of a window shows what all of them make
    for output, other in zip(mine.outputs, theirs.outputs, strict=True):
        if isinstance(output, Tensor):
            assert not output.requires_grad
            torch.testing.assert_close(output, other.detach())
        else:
            assert output == other
    for fitted, table in ((ours, my_table), (whole, their_table)):
        last = {k: float(v) for k, v in fitted.callback_metrics.items()}
        table.rows.append(last)
    for row, other in zip(my_table.rows, their_table.rows, strict=True):
        assert row == pytest.approx(other, rel=1e-6, nan_ok=True)
    return ours


def logging_loss(name: str = "loss", **options: Any) -> Any:
    """A `training_step` that also logs its loss."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log(name, loss, **options)
        return loss

    return training_step


def failing(at: int, error: BaseException | None = None) -> type[Split]:
    """A module that fails in one micro-batch, counted from 1 over the training; without
    an error to raise, it adds what cannot be added."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if self.calls != at:
            return self.loss_of(batch)
        if error is None:
            return torch.zeros(3) + torch.zeros(4)
        raise error

    return hooked(Split, training_step=training_step, calls=0)


TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


def on_the_way(hook: str, change: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """One of the hooks on the way to the device; it lets `change(module, batch)` return
    another batch."""

    def before_or_after(self: Any, batch: Any, dataloader_idx: int) -> Any:
        return change(self, batch)

    def transfer(self: Any, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return change(self, batch)

    return {hook: transfer if hook == TRANSFER_HOOKS[1] else before_or_after}


def relabelled(kind: Callable[..., Any], *tokens: int) -> Any:
    """Rows that begin with these tokens have no labels; `rows` keeps them."""

    def change(self: Any, batch: Any) -> Any:
        labels = batch["labels"].clone()
        labels[torch.isin(batch["ids"][:, 0], torch.tensor(tokens))] = -100
        return {**batch, "rows": batch["labels"], "labels": labels}

    return hooked(kind, **on_the_way(TRANSFER_HOOKS[0], change))  # type: ignore[type-var]


def data_module(hooks: dict[str, Any]) -> Any:
    """A data module with these hooks, which take the place of the module's."""
    module = hooked(pl.LightningDataModule, **hooks)()
    module.train_dataloader = loader_batches  # type: ignore[method-assign]
    return module
