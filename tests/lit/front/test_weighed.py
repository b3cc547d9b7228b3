"""Weights that only `training_step` knows: windows are the big batch all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torchmetrics import MeanMetric

from tests.helpers import NAIVE, deviation, gradients, trainer
from tests.lit.front.keeping import (
    SEQUENCES,
    ByHand,
    Foreign,
    Keeping,
    batches,
    count_kept,
    kept_in,
    kept_loss,
    run,
)
from tests.lit.fronts import RAGGED, WINDOW, Plain, big_batch, merged
from tests.lit.resume.resuming import Resumable, Saving
from tests.lit.split.common import Table
from trainkit import (
    AccumulationCallback,
    PerSample,
    PerToken,
    PlainComparison,
    Uniform,
    Weighed,
    WindowMonitor,
)
from trainkit.core.split.micro_batching import MicroBatching

EXACT = 1e-10
BIG = big_batch(SEQUENCES, loss=kept_loss)
SIZE, AUTO = MicroBatching(size=3), MicroBatching("auto")
DOTTED = f"{count_kept.__module__}.count_kept"
WHOLE = {"sizes": merged(RAGGED), "window": 1}
"""Each window is one loader batch."""


def test_some_micro_batches_keep_nothing() -> None:
    kept = [int(kept_in(batch).sum()) for batch in batches()]
    assert min(kept) == 0
    assert max(kept) > 5


def by(function: Any, **options: Any) -> AccumulationCallback:
    return AccumulationCallback(Weighed(by=function), **options)


@pytest.mark.parametrize(
    ("module", "callbacks", "how"),
    [
        (Keeping(), [], {}),
        (Keeping(number=lambda kept: int(kept.sum())), [], {}),
        (Keeping(reduction="sum"), [], {}),
        (Foreign(), [by(count_kept)], {}),
        (Foreign(), [by(DOTTED)], {}),
        (ByHand(), [], {}),
        (Keeping(split=SIZE), [], WHOLE),
        (Keeping(split=SIZE, reduction="sum"), [], WHOLE),
        (Keeping(split=MicroBatching(tokens=40)), [], WHOLE),
        (Keeping(split=AUTO), [], WHOLE),
        (Keeping(split=SIZE), [], {}),
        (Foreign(), [by(DOTTED, micro_batching=SIZE)], WHOLE),
    ],
    ids=[
        "tensors",
        "numbers",
        "sums",
        "by a function",
        "by a dotted path",
        "by hand",
        "split",
        "split sums",
        "split by tokens",
        "split as fits",
        "split, windows of four",
        "split by a function",
    ],
)
def test_windows_weighed_by_the_module_equal_the_big_batch(
    module: Any, callbacks: list[Callback], how: dict[str, Any]
) -> None:
    ended = run(module, *callbacks, **how)
    assert max(ended.deviations(BIG)) <= EXACT
    assert ended.losses == pytest.approx(BIG.losses, rel=1e-12)


@pytest.mark.parametrize("strategy", [Uniform(), PerToken(), PerSample()], ids=str)
def test_no_count_of_the_batch_equals_the_big_batch(strategy: Any) -> None:
    """The control: what the batch shows is not what this loss divides by."""

    def loss(*args: Any) -> Tensor:
        return kept_loss(*args).nan_to_num()

    ended = run(Plain(loss), AccumulationCallback(strategy))
    assert min(ended.deviations(BIG)) > NAIVE


def test_accumulate_takes_its_own_weight_first() -> None:
    module = ByHand()
    module.says = False
    assert max(run(module).deviations(BIG)) <= EXACT


# ---- resume, scaler, logs ------------------------------------------------------------


@pytest.mark.parametrize("at", [2, 7])
def test_resumed_inside_a_window_equals_uninterrupted(tmp_path: Path, at: int) -> None:
    path = tmp_path / "inside.ckpt"
    trainer(WINDOW, callbacks=[Saving(path, at)]).fit(Keeping(), resumable())
    module = Keeping()
    trainer(WINDOW).fit(module, resumable(), ckpt_path=path, weights_only=True)
    assert deviation(module, BIG.end, BIG.start) <= EXACT


def resumable() -> Resumable:
    loader = Resumable()
    loader.batches = list(batches())
    return loader


@pytest.mark.parametrize("how", [{}, WHOLE], ids=["streamed", "split"])
def test_a_gradient_scaler_changes_nothing(how: dict[str, Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    big = big_batch(SEQUENCES, loss=kept_loss, dtype=torch.float32)
    split = SIZE if how else None
    module = Keeping(split=split, dtype=torch.float32)
    ended = run(module, plugins=plugin, **how)
    assert max(ended.deviations(big)) <= 2e-2  # of float16
    plain = run(Plain(kept_loss, dtype=torch.float32), by(kept_of))
    assert max(plain.deviations(big)) <= 1e-4


def kept_of(module: Any, batch: Any) -> Tensor:
    return kept_in(batch).sum()


class Logging(Keeping):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = kept_loss(self.net, batch)
        self.log("before", loss, on_step=True)
        self.weigh(kept_in(batch).sum())
        self.log("after", 2 * loss, on_step=True)
        self.log_exact("exact", loss)
        return loss


def test_logs_are_weighed_as_the_loss() -> None:
    table, numbers = Table(), Table()
    options = {"logger": table, "log_every_n_steps": 1}
    ended = run(Logging(split=SIZE), **WHOLE, **options)
    monitor = WindowMonitor(every_n_steps=1)
    run(Logging(split=SIZE), monitor, **WHOLE, logger=numbers, log_every_n_steps=1)
    before = [row["before"] for row in table.rows if "before" in row]
    after = [row["after"] for row in table.rows if "after" in row]
    assert before == pytest.approx(ended.losses)
    assert after == pytest.approx([2 * loss for loss in ended.losses])
    kept = [float(kept_in(batch).sum()) for batch in batches(WHOLE["sizes"])]
    rows = [row for row in numbers.rows if "window/weight" in row]
    assert [row["window/weight"] for row in rows] == kept * 2
    assert [row["window/loss"] for row in rows] == pytest.approx(ended.losses)
    assert all(0 < row["window/uniform_gap"] < 1 for row in rows)
    exact = next(row["exact"] for row in table.rows if "exact" in row)
    total = sum(n * loss for n, loss in zip(kept, ended.losses, strict=False))
    assert exact == pytest.approx(total / sum(kept))


def test_the_comparison_with_plain_lightning_uses_what_was_said() -> None:
    found = PlainComparison()
    one = RAGGED[2:4]  # with no micro-batch of weight 0
    run(Keeping(), found, sizes=one, window=2, max_epochs=1)
    start = Keeping()
    counts, each = [], []
    for batch in batches(one):
        start.zero_grad()
        kept_loss(start.net, batch).backward()
        counts.append(float(kept_in(batch).sum()))
        each.append(gradients(start))
    shares = torch.tensor(counts, dtype=torch.float64) / sum(counts)
    exact, plain = shares @ torch.stack(each), torch.stack(each).mean(0)
    assert found.deviation is not None
    expected = float((plain - exact).norm() / exact.norm())
    assert found.deviation[0] == pytest.approx(expected)
    assert expected > NAIVE


class Metered(Keeping):
    def __init__(self, *, weighs: bool, **how: Any) -> None:
        super().__init__(**how)
        self.mean, self.weighs = MeanMetric(), weighs

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        count = kept_in(batch).sum()
        value = loss.detach().nan_to_num()
        self.mean(value, weight=count) if self.weighs else self.mean(value)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


def test_a_mean_metric_counts_by_rows_or_by_its_own_weight() -> None:
    with pytest.warns(UserWarning, match=r"self.mean.value, weight=n."):
        run(Metered(weighs=False, split=SIZE), **WHOLE, max_epochs=1)
    modules = [Metered(weighs=True, split=cut) for cut in (SIZE, None)]
    for each in modules:
        run(each, **WHOLE, max_epochs=1)
    cut, whole = (float(m.trainer.callback_metrics["mean"]) for m in modules)
    assert cut == pytest.approx(whole, rel=1e-6)
