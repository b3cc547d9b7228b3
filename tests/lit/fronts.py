"""Ways to train the same thing: by the mixin, the callback, and as big batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import (
    NAIVE,
    OPTIMIZERS,
    TokenNet,
    deviation,
    gradients,
    pad,
    ragged_sequences,
    trainer,
    weights,
)
from tests.zoo.modules import Mixed as Mixed  # for those who train it by these ways
from tests.zoo.modules import Plain, on_front, plain_token_loss, sample_loss
from trainkit import AccumulationStrategy, PerSample, PerToken, Uniform
from trainkit.core.strategies import LossReduction
from trainkit.lit.windows.callback import WindowCallback

Clip = Literal["norm", "value"] | None
Reduction = Literal["mean", "sum"]

CLIP_AT = {"norm": 0.1, "value": 0.01}
WINDOW = 4
RAGGED = (5, 1, 8, 3, 2, 7, 1, 4, 6, 1)
"""Samples in each of 10 micro-batches: two full windows and a short one."""
EQUAL = (4,) * 10
CHOICES = ("strategy", "cut", "options")
"""Arguments of `on_front` that are not the module's own."""


def cut(sequences: Sequence[Any], sizes: Sequence[int]) -> list[list[int]]:
    """The indices of each micro-batch, for `DataLoader(batch_sampler=...)`."""
    indices = iter(range(len(sequences)))
    return [[next(indices) for _ in range(size)] for size in sizes]


def micro_batches(
    sequences: Sequence[Any], sizes: Sequence[int] = RAGGED
) -> DataLoader[Any]:
    """A loader of micro-batches of the given sizes."""
    return DataLoader(
        sequences,  # type: ignore[arg-type]
        batch_sampler=cut(sequences, sizes),
        collate_fn=pad,
    )


def merged(sizes: Sequence[int], window: int = WINDOW) -> list[int]:
    """The sizes of the big batches."""
    return [sum(sizes[i : i + window]) for i in range(0, len(sizes), window)]


LOSSES: dict[str, Callable[..., Tensor]] = {
    "PerSample": sample_loss,
    "PerToken": plain_token_loss,
    "Uniform": sample_loss,
}


def make_strategy(name: str, reduction: Reduction = "mean") -> AccumulationStrategy:
    if name == "Uniform":
        return SumOfEqualBatches() if reduction == "sum" else Uniform()
    made = {"PerSample": PerSample, "PerToken": PerToken}[name]
    return made(loss_reduction=reduction)


class SumOfEqualBatches(AccumulationStrategy):
    """`Uniform` over micro-batches of four, whose training_step returns the sum."""

    loss_reduction: LossReduction = "sum"

    def weight(self, batch: Any) -> int:
        return 4


@dataclass
class Run:
    """What a training went through."""

    start: Tensor
    ends: list[Tensor] = field(default_factory=list)
    """The weights after each epoch."""
    losses: list[float] = field(default_factory=list)
    """The mean loss of each window."""
    gradients: list[Tensor] = field(default_factory=list)
    """Of each step of a big batch, before clipping."""
    clipped: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> Tensor:
        return self.ends[-1]

    def deviations(self, reference: Run) -> list[float]:
        """After each epoch, as a share of the distance travelled."""
        pairs = zip(self.ends, reference.ends, strict=True)
        return [
            float((mine - theirs).norm() / (theirs - self.start).norm())
            for mine, theirs in pairs
        ]


class Recorder(pl.Callback):
    """Writes down a `Run`; its losses are those of windows."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        for each in drivers_of(trainer):
            assert each.last_window is not None
            self.run.losses.append(float(each.last_window.loss))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.run.ends.append(weights(pl_module))


def windows_of(trainer: Any) -> WindowCallback:
    """The callback that divides."""
    return drivers_of(trainer)[0]


def drivers_of(trainer: Any) -> list[WindowCallback]:
    """All callbacks that divide: there may be one."""
    return [c for c in trainer.callbacks if isinstance(c, WindowCallback)]


def clip_(net: nn.Module, clip: Clip) -> None:
    if clip == "norm":
        nn.utils.clip_grad_norm_(net.parameters(), CLIP_AT["norm"])
    elif clip == "value":
        nn.utils.clip_grad_value_(net.parameters(), CLIP_AT["value"])


def clip_options(clip: Clip) -> dict[str, Any]:
    """The same, for a Trainer."""
    if clip is None:
        return {}
    return {"gradient_clip_val": CLIP_AT[clip], "gradient_clip_algorithm": clip}


def batches_of(
    sequences: Sequence[Any], sizes: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    return iter(micro_batches(sequences, sizes))


def big_batch(
    sequences: Sequence[Any],
    sizes: Sequence[int] = RAGGED,
    loss: Callable[..., Tensor] = plain_token_loss,
    *,
    window: int = WINDOW,
    optimizer: str = "sgd",
    clip: Clip = None,
    epochs: int = 2,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """The reference: every window as one batch, in a loop of torch alone."""
    net = TokenNet(dtype=dtype)
    run = Run(weights(net))
    stepper = OPTIMIZERS[optimizer](net.parameters())
    for _ in range(epochs):
        for batch in batches_of(sequences, merged(sizes, window)):
            stepper.zero_grad()
            value = loss(net, batch)
            value.backward()
            run.gradients.append(gradients(net))
            clip_(net, clip)
            run.clipped.append(gradients(net))
            stepper.step()
            run.losses.append(value.item())
        run.ends.append(weights(net))
    return run


# ---- any module, in windows and in big batches ---------------------------------------


SEQUENCES = ragged_sequences(sum(RAGGED))


def ragged(sizes: Sequence[int]) -> DataLoader[Any]:
    """Micro-batches of these sizes."""
    return micro_batches(SEQUENCES, sizes)


def fit(
    front: str,
    kind: Callable[..., Any] = Plain,
    *callbacks: Any,
    batches: Callable[[Sequence[int]], Any] = ragged,
    validation: Any = None,
    sizes: Sequence[int] = RAGGED,
    window: int = WINDOW,
    made: Mapping[str, Any] | None = None,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    """Train a module, and return its Trainer.

    Args:
        front: as for `on_front`.
        kind: knows nothing of trainkit.
        *callbacks: that stand before ours.
        batches: makes a loader of micro-batches of given sizes.
        validation: a loader.
        sizes: of the micro-batches.
        window: how many make a window.
        made: other arguments of `on_front`.
        ckpt_path: from which it resumes.
        **options: of the Trainer.
    """
    module, ours = on_front(front, kind, **made or {})
    fitted = trainer(window, callbacks=[*callbacks, *ours], **options)
    fitted.fit(module, batches(sizes), validation, ckpt_path=ckpt_path)
    return fitted


def train(
    front: str,
    strategy: AccumulationStrategy,
    sequences: Sequence[Any],
    sizes: Sequence[int] = RAGGED,
    loss: Callable[..., Tensor] = plain_token_loss,
    *,
    clip: Clip = None,
    **how: Any,
) -> Run:
    """Train by a Trainer: with the mixin, with the callback, or without trainkit."""
    made = {"loss": loss, "reduction": strategy.loss_reduction, **how}
    run = Run(weights(Plain(**made)))
    fit(
        front,
        Plain,
        Recorder(run),
        batches=lambda sizes: micro_batches(sequences, sizes),
        sizes=sizes,
        made={"strategy": strategy, **made} if front != "plain" else made,
        **clip_options(clip),
    )
    return run


def assert_big_batch(
    kind: Callable[..., Any] = Plain,
    *,
    callbacks: Callable[[], list[Any]] = list,
    fronts: Sequence[str] = ("mixin", "callback"),
    tolerance: float = 1e-10,
    naive: float = NAIVE,
    made: Mapping[str, Any] | None = None,
    in_windows: Mapping[str, Any] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Check that windows equal the big batches of plain Lightning, by each front; and
    that by plain Lightning itself, which is the control, they do not.

    Args:
        kind: as for `fit`.
        callbacks: makes those of one `fit`.
        fronts: by which it trains.
        tolerance: the largest deviation by a front.
        naive: the least deviation by plain Lightning.
        made: as for `fit`.
        in_windows: more arguments of `fit`, where a batch is a part of a window.
        **how: more arguments of each `fit`.

    Returns:
        The Trainers, by front.
    """
    arguments = {n: v for n, v in (made or {}).items() if n not in CHOICES}
    start = weights(kind(**arguments))
    how = {"sizes": RAGGED, "window": WINDOW, **how}
    whole = {**how, "sizes": merged(how["sizes"], how["window"]), "window": 1}
    big = fit("plain", kind, *callbacks(), made=arguments, **whole).lightning_module
    how |= in_windows or {}
    fits = {
        front: fit(front, kind, *callbacks(), made=chosen, **how)
        for front, chosen in {**dict.fromkeys(fronts, made), "plain": arguments}.items()
    }
    ends = {f: deviation(fits[f].lightning_module, big, start) for f in fits}
    assert all(ends[front] <= tolerance for front in fronts), ends
    assert ends["plain"] > naive, ends
    return fits
