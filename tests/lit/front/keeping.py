"""Losses over what `training_step` alone knows: the tokens that it has kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import trainer, weights
from tests.lit.fronts import RAGGED, SEQUENCES, WINDOW, Recorder, Run, cut
from tests.zoo import Manual, Mixed, Plain, pad_and_mask
from trainkit import Weighed


def kept_in(batch: Any) -> Tensor:
    """As a random mask, but for each token by itself; short rows may lose all."""
    ids, labels = batch["ids"], batch["labels"]
    return (labels != -100) & (ids % 6 == 1)


def kept_loss(net: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    """NaN where nothing is kept, as any mean over nothing."""
    logits = net(batch["ids"]).transpose(1, 2)
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    kept = losses[kept_in(batch)]
    return kept.mean() if reduction == "mean" else kept.sum()


class Foreign(Plain):
    """Knows nothing of trainkit, and leaves its count behind."""

    def __init__(self, **how: Any) -> None:
        super().__init__(kept_loss, **how)
        self.num_kept: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_kept = kept_in(batch).sum()
        return self.loss_of(batch)


def count_kept(module: Any, batch: Any) -> Tensor:
    """What `Foreign` has divided by."""
    return module.num_kept


class Keeping(Mixed):
    """Says what it divides by."""

    number: Any = staticmethod(Tensor.sum)

    def __init__(self, *, reduction: Any = "mean", **how: Any) -> None:
        super().__init__(kept_loss, reduction=reduction, **how)
        self.accumulation = Weighed(loss_reduction=reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.weigh(self.number(kept_in(batch)))
        return loss


class ByHand(Keeping, Manual):
    """Runs its own windows, and says the weight or passes it.

    Attributes:
        says: whether `weigh` is called.
        passes: whether `accumulate` gets the weight, which comes first.
        times: how often the loss is accumulated.
    """

    says, passes, times = True, False, 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, number = self.loss_of(batch), kept_in(batch).sum()
        if self.says:
            self.weigh(number)
        for _ in range(self.times):
            self.accumulate(loss, batch, weight=number if self.passes else None)
        if self.window_ends(batch_idx, WINDOW):
            self.finish_window()
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def batches(sizes: Sequence[int] = RAGGED) -> DataLoader[Any]:
    return DataLoader(
        SEQUENCES,  # type: ignore[arg-type]
        batch_sampler=cut(SEQUENCES, sizes),
        collate_fn=pad_and_mask,
    )


def run(
    module: Plain,
    *callbacks: Callback,
    sizes: Sequence[int] = RAGGED,
    window: int = WINDOW,
    **options: Any,
) -> Run:
    """Train for two epochs."""
    kept = Run(weights(module))
    if not module.automatic_optimization:
        window = 1
    fitted = trainer(window, callbacks=[*callbacks, Recorder(kept)], **options)
    fitted.fit(module, batches(sizes))
    return kept
