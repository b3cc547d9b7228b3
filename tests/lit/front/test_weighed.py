"""Weights that only `training_step` knows: windows are the big batch all the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers import NAIVE, deviation, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    SEQUENCES,
    WINDOW,
    Recorder,
    Run,
    big_batch,
    cut,
    merged,
)
from tests.lit.resume.resuming import Resumable, Saving
from tests.zoo.callbacks import Table
from tests.zoo.modules import Manual, Mixed, Plain, hooked, pad_and_mask, scaled
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    PerSample,
    PerToken,
    Uniform,
    Weighed,
    WindowMonitor,
)


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


EXACT = 1e-10
BIG = big_batch(SEQUENCES, loss=kept_loss)
FLOAT: dict[str, Any] = {"dtype": torch.float32}
CUT = {"cut": MicroBatching(size=3)}
DOTTED = f"{count_kept.__module__}.count_kept"
WHOLE: dict[str, Any] = {"sizes": merged(RAGGED), "window": 1}
"""Each window is one loader batch."""


def by(function: Any, **options: Any) -> AccumulationCallback:
    return AccumulationCallback(Weighed(by=function), **options)


def loss_without_nan(*args: Any) -> Tensor:
    return kept_loss(*args).nan_to_num()


def count(module: Any, batch: Any) -> Tensor:
    return kept_in(batch).sum()


def whole_number(kept: Tensor) -> int:
    return int(kept.sum())


CASES: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "tensors": (Keeping, None, {}),
    "numbers": (hooked(Keeping, number=staticmethod(whole_number)), None, {}),
    "sums": (lambda: Keeping(reduction="sum"), None, {}),
    "function": (Foreign, by(count_kept), {}),
    "dotted path": (Foreign, by(DOTTED), {}),
    "by hand": (ByHand, None, {}),
    "split": (lambda: Keeping(**CUT), None, WHOLE),
    "split by tokens": (lambda: Keeping(cut=MicroBatching(tokens=40)), None, WHOLE),
    "split by a function": (Foreign, by(DOTTED, micro_batching=CUT["cut"]), WHOLE),
    # The control: what the batch shows is not what this loss divides by.
    **{
        f"off by {type(each).__name__}": (
            lambda: Plain(loss_without_nan),
            AccumulationCallback(each),
            {},
        )
        for each in (Uniform(), PerToken(), PerSample())
    },
}


@pytest.mark.parametrize("name", CASES)
def test_windows_weighed_by_the_module_equal_the_big_batch(name: str) -> None:
    make, callback, how = CASES[name]
    ended = run(make(), *filter(None, [callback]), **how)
    off = ended.deviations(BIG)
    if name.startswith("off"):
        assert min(off) > NAIVE
        return
    assert max(off) <= EXACT
    assert ended.losses == pytest.approx(BIG.losses, rel=1e-12)
    kept = [int(kept_in(batch).sum()) for batch in batches()]
    assert min(kept) == 0
    assert max(kept) > 5


# ---- resume, scaler, logs ------------------------------------------------------------


def test_resumed_inside_a_window_equals_uninterrupted(tmp_path: Path) -> None:
    path, module = tmp_path / "inside.ckpt", Keeping()
    trainer(WINDOW, callbacks=[Saving(path, 7)]).fit(Keeping(), resumable())
    trainer(WINDOW).fit(module, resumable(), ckpt_path=path, weights_only=True)
    assert deviation(module, BIG.end, BIG.start) <= EXACT


def resumable() -> Resumable:
    loader = Resumable()
    loader.batches = list(batches())
    return loader


@pytest.mark.parametrize("how", [{}, WHOLE], ids=["streamed", "split"])
def test_a_gradient_scaler_changes_nothing(how: dict[str, Any]) -> None:
    big = big_batch(SEQUENCES, loss=kept_loss, **FLOAT)
    module = Keeping(**FLOAT, **(CUT if how else {}))
    ended = run(module, **scaled(), **how)
    assert max(ended.deviations(big)) <= 2e-2  # of float16
    plain = run(Plain(kept_loss, **FLOAT), by(count))
    assert max(plain.deviations(big)) <= 1e-4


class Logging(Keeping):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("before", loss, on_step=True)
        self.weigh(kept_in(batch).sum())
        self.log("after", 2 * loss, on_step=True)
        self.log_exact("exact", loss)
        return loss


def test_logs_are_weighed_as_the_loss() -> None:
    table, numbers = Table(), Table()
    how: dict[str, Any] = {**WHOLE, "log_every_n_steps": 1}
    ended = run(Logging(**CUT), logger=table, **how)
    monitor = WindowMonitor(every_n_steps=1)
    run(Logging(**CUT), monitor, logger=numbers, **how)
    assert table.column("before") == pytest.approx(ended.losses)
    assert table.column("after") == pytest.approx([2 * x for x in ended.losses])
    kept = [float(kept_in(batch).sum()) for batch in batches(WHOLE["sizes"])]
    assert numbers.column("window/weight") == kept * 2
    assert numbers.column("window/loss") == pytest.approx(ended.losses)
    assert all(0 < gap < 1 for gap in numbers.column("window/uniform_gap"))
    total = sum(n * loss for n, loss in zip(kept, ended.losses, strict=False))
    assert table.column("exact")[0] == pytest.approx(total / sum(kept))


class Metered(Keeping):
    def __init__(self, *, weighs: bool, **how: Any) -> None:
        super().__init__(**how)
        self.mean, self.weighs = MeanMetric(), weighs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        how = {"weight": kept_in(batch).sum()} if self.weighs else {}
        self.mean(loss.detach().nan_to_num(), **how)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def test_a_mean_metric_counts_by_rows_or_by_its_own_weight() -> None:
    with pytest.warns(UserWarning, match=r"self.mean.value, weight=n."):
        run(Metered(weighs=False, **CUT), **WHOLE, max_epochs=1)
    modules = [Metered(weighs=True, **how) for how in (CUT, {})]
    for each in modules:
        run(each, **WHOLE, max_epochs=1)
    cut, whole = (float(m.trainer.callback_metrics["mean"]) for m in modules)
    assert cut == pytest.approx(whole, rel=1e-6)
