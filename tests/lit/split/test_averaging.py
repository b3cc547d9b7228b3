"""`StochasticWeightAveraging` ends with an epoch that only computes statistics."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn

from tests.helpers import weights
from tests.lit.split.common import Split, fit
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.lit.split import windows


class Counting(pl.Callback):
    """Keeps the weights before and after each epoch."""

    def __init__(self) -> None:
        self.ends: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.ends.append(weights(pl_module))


class Normalised(Split):
    """Has BatchNorm, whose statistics are those of micro-batches."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.norm(self.net.embed(batch["ids"]).flatten(0, 1))
        logits = self.net.head(hidden)
        return nn.functional.cross_entropy(logits, batch["labels"].flatten())


def test_statistics_epoch_of_weight_averaging_moves_no_weight() -> None:
    """A naive cut trains in the extra epoch that only computes BatchNorm's statistics:
    its backward passes come before Lightning leaves its own out."""
    ends: dict[str, list[Tensor]] = {}
    statistics = []
    for name, cut in (("cut", MicroBatching(size=100)), ("whole", None)):
        module, counting = Normalised(cut=cut), Counting()
        swa = StochasticWeightAveraging(0.1, swa_epoch_start=2, annealing_epochs=1)
        fit(module, swa, counting, max_epochs=4)
        ends[name] = [*counting.ends, weights(module)]
        statistics.append(module.norm.running_mean.clone())  # type: ignore[union-attr]
    torch.testing.assert_close(ends["cut"], ends["whole"])
    torch.testing.assert_close(statistics[0], statistics[1])


class SkippingBackward(pl.Callback):
    """The weights at the beginning and end of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[list[Tensor]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.note(trainer, pl_module)

    def note(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == len(self.epochs):
            self.epochs.append([])
        self.epochs[-1].append(weights(module))


@pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding")
def test_no_micro_batch_of_the_statistics_epoch_moves_a_weight() -> None:
    noting = SkippingBackward()
    swa = StochasticWeightAveraging(0.1, swa_epoch_start=2, annealing_epochs=1)
    module = Normalised(optimizer="momentum")
    fit(module, swa, noting, max_epochs=3)
    *trained, last = noting.epochs
    assert len(trained) == 3
    assert all(not torch.equal(epoch[0], epoch[-1]) for epoch in trained)
    assert all(torch.equal(last[0], each) for each in last)


@pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding")
def test_a_cut_that_knows_of_no_statistics_epoch_moves_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control."""
    monkeypatch.setattr(windows, "skips_backward", lambda trainer: False)
    noting = SkippingBackward()
    swa = StochasticWeightAveraging(0.1, swa_epoch_start=2, annealing_epochs=1)
    fit(Normalised(optimizer="momentum"), swa, noting, max_epochs=3)
    first, *_, end = noting.epochs[-1]
    assert float((end - first).norm()) > 1e-3
