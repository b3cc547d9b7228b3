"""Around a cut batch: the hooks, counts and callbacks of Lightning's loop as ever, and
trainkit's own callbacks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    WeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, deviation, loader, weights
from tests.lit.split.common import (
    CUTS,
    FIXED,
    SEQUENCES,
    SIZES,
    START,
    Seen,
    Split,
    assert_as_whole,
    fit,
    loader_batches,
    off,
    samples,
)
from tests.zoo.callbacks import Table, told
from tests.zoo.modules import Plain, hooked, on_front, pad_and_mask
from trainkit import BatchNormGuard, LRScaling, MicroBatching, PerSample, WindowMonitor
from trainkit.lit.batch_size import read_effective_batch
from trainkit.lit.logs.summary import PlainComparison

MANY = (6, 8, 5, 7, 9, 4)
SAVES = {"enable_checkpointing": True}
NO_VALIDATION = "ignore:You defined a `validation_step` but"
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


class Scheduled(Split):
    """Has a scheduler by step, validation, and logs."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**{"optimizer": "momentum", **how})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss_of(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        return len(batch["ids"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7)
        config = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": config}


def ending_early(self: Any, batch: Any, batch_idx: int) -> Any:
    return -1 if batch_idx == 2 else None


@pytest.mark.filterwarnings("ignore:`Trainer.overfit_batches:UserWarning")
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=2. the epoch:UserWarning")
@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 8, "val_check_interval": 2, "gradient_clip_val": 0.1},
        {"val_check_interval": 4, "check_val_every_n_epoch": None},
        {"check_val_every_n_epoch": 2, "reload_dataloaders_every_n_epochs": 1},
        {"limit_train_batches": 0.5, "num_sanity_val_steps": 2, **BY_VALUE},
        {"fast_dev_run": 3, "naive": 0},
        {"overfit_batches": 2},
        {"window": 2, "max_steps": 3},
        {"window": 4, "limit_train_batches": 5},
        {"kind": hooked(Scheduled, on_train_batch_start=ending_early)},
        *[
            {"callbacks": make, "max_epochs": 3, **SAVES}
            for make in (
                lambda: [EarlyStopping("loss_step", patience=1)],
                lambda: [EarlyStopping("val", patience=1), LearningRateMonitor("step")],
                lambda: [ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)],
                lambda: [WeightAveraging()],
            )
        ],
    ],
    ids=lambda options: "-".join(options),
)
def test_loop_runs_as_without_the_cut(options: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the Trainer's options and callbacks are."""
    how: Any = {"kind": Scheduled, "sizes": MANY, **options}
    how |= {"default_root_dir": tmp_path}
    ours = assert_as_whole(validation=loader_batches((4, 4)), **how)
    assert "kind" not in options or ours.global_step == 4  # two in an epoch


def test_a_hook_may_add_what_tells_the_lengths() -> None:
    def adds(self: Any, batch: Any, batch_idx: int) -> None:
        batch["own"] = batch["attention_mask"].clone()

    kind = hooked(Split, on_train_batch_start=adds)
    assert_as_whole(kind, MicroBatching(size=4, lengths="own"))


def test_gradient_hooks_run_for_each_micro_batch() -> None:
    """Both run once for each backward pass."""
    calls, names = list[str](), Seen.per_micro_batch
    keep: Any = {name: lambda *args, name=name: calls.append(name) for name in names}
    fit(Split(), LambdaCallback(**keep), sizes=MANY, max_epochs=1)
    for name in names:
        assert calls.count(name) == sum(-(-size // 4) for size in MANY)


@pytest.mark.filterwarnings(NO_VALIDATION)
def test_validate_and_predict_run_whole_batches() -> None:
    fitted = fit(module := Scheduled())
    fitted.validate(module, loader_batches(), verbose=False)
    assert fitted.predict(module, loader(SEQUENCES, 16)) == [16, 16, 8]


def test_a_second_fit_goes_on() -> None:
    ends = []
    for cut in (FIXED, None):
        fitted = fit(module := Split(cut=cut, optimizer="momentum"))
        fitted.fit_loop.max_epochs = 4
        fitted.fit(module, loader_batches())
        assert fitted.global_step == 12
        ends.append(weights(module))
    assert deviation(ends[0], ends[1], START) <= 1e-10


def with_extras(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    ids = batch["ids"]
    extras = {"mean": loss.detach(), "ids": ids[:, 0], "names": ids[:, 0].tolist()}
    return {"loss": loss, **extras, "epoch": 3}


def test_what_is_returned_beside_the_loss_is_as_of_the_whole_batch_or_a_list() -> None:
    seen: list[Any] = []
    keep = LambdaCallback(on_train_batch_end=lambda *args: seen.append(args[2]))
    for cut in (None, FIXED):
        module = hooked(Split, training_step=with_extras)(cut=cut)
        fit(module, keep, max_epochs=1, limit_train_batches=1)
    whole, found = seen
    assert float(found["mean"]) == pytest.approx(float(whole["mean"]), rel=1e-12)
    assert torch.equal(found["ids"], whole["ids"])
    assert found["names"] == whole["names"]
    assert found["epoch"] == [3] * 4


def every_second(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
) -> None:
    """Runs the closure, as Lightning asks, and steps every second time."""
    self.num_calls += 1
    if self.num_calls % 2:
        optimizer_closure()
    else:
        Plain.optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)


HALF = hooked(Plain, optimizer_step=every_second, num_calls=0)
DROPPED = "accumulation: an open window of"


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("front", ["mixin", "callback"])
def test_the_window_of_a_step_left_out_is_dropped_and_said(
    front: str, window: int
) -> None:
    """As often as in streamed windows; the last of an epoch when it ends. Plain batches
    whose steps are all taken are the control."""
    ends, said = [], []
    for cut in (FIXED, None):
        module, ours = on_front(front, HALF, cut=cut)
        with told(DROPPED) as texts:
            fit(module, *ours, window=window)
        said.append([text.partition("since ")[2] for text in texts])
        ends.append(module)
    fit(taken := Plain(), window=window)
    assert said[0] == said[1]
    assert len(said[0]) == {1: 3, 2: 2}[window]
    assert {text.split(" its ")[0] for text in said[0]}
    assert any("optimizer_step left its step out" in text for text in said[0])
    assert any("epoch ended inside it" in text for text in said[0]) == (window == 1)
    assert deviation(ends[0], ends[1], START) <= 1e-10
    assert deviation(taken, ends[1], START) > NAIVE


# ---- trainkit's own callbacks --------------------------------------------------------


def monitored(module: Split, **options: Any) -> list[dict[str, float]]:
    table = Table()
    quiet = {"logger": table, "log_every_n_steps": 1, "max_epochs": 1}
    fit(module, WindowMonitor(every_n_steps=1), **quiet | options)
    rows = [row for row in table.rows if "window/loss" in row]
    return [{k.removeprefix("window/"): v for k, v in row.items()} for row in rows]


@pytest.mark.parametrize("cut", ["size", "tokens", "rows"])
def test_monitor_shows_windows_of_whole_loader_batches(cut: str) -> None:
    """Loss, weight, samples and gradient do not depend on the cut; what the cut is
    shows in the number of micro-batches and in the padding."""
    ours, whole = monitored(Split(cut=CUTS[cut])), monitored(Split(cut=None))
    assert len(ours) == len(whole) == len(SIZES)
    for name in ("loss", "weight", "seen", "samples_seen", "grad_norm", "step"):
        values = [row[name] for row in whole]
        assert [row[name] for row in ours] == pytest.approx(values)
    assert [row["samples_seen"] for row in ours] == [14, 31, 40]
    assert {row["micro_batches"] for row in whole} == {1}
    for row, other in zip(ours, whole, strict=True):
        assert row["micro_batches"] > 2
        assert row["padding"] < other["padding"]
        assert "micro_batch_size" not in row  # it was said


def test_padding_is_that_of_the_micro_batches() -> None:
    """What is computed: rows times the longest of each micro-batch."""
    (row,) = monitored(Split(cut=MicroBatching(size=1)), sizes=(20,))
    assert row["padding"] == 0
    (row,) = monitored(Split(cut=MicroBatching(size=20)), sizes=(20,))
    lengths = [len(x) for x, _ in SEQUENCES[:20]]
    assert row["padding"] == pytest.approx(1 - sum(lengths) / (20 * max(lengths)))


class Normalised(Split):
    """Learns from rows of numbers, which have no padding."""

    def __init__(self, **how: Any) -> None:
        super().__init__(strategy=PerSample(), **how)
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(batch[0]).square().mean()


def images() -> DataLoader[Any]:
    data = torch.randn(32, 3, dtype=torch.float64)
    return DataLoader([(x, 0) for x in data], batch_size=16)  # type: ignore[arg-type]


def test_rows_without_lengths_have_no_padding_to_show() -> None:
    rows = monitored(Normalised(), data=images())
    assert rows
    assert all("padding" not in row for row in rows)


def test_a_row_above_the_budget_trains() -> None:
    module = Split(cut=MicroBatching(tokens=9))
    assert off(module, Split(cut=None), max_epochs=1) <= 1e-9


@pytest.mark.parametrize(("window", "said"), [(1, "is one step, cut"), (2, "is cut")])
def test_the_table_says_what_a_step_is(window: int, said: str, capsys: Any) -> None:
    fit(Split(cut=MicroBatching(size=4, tokens=90)), window=window, max_epochs=1)
    text = f"split: each loader batch {said} into micro-batches of at most 4 rows and"
    assert text in capsys.readouterr().out


@pytest.mark.parametrize("window", [1, 2])
def test_effective_batch_and_rates_are_those_of_loader_batches(window: int) -> None:
    """As the loader says it."""
    found = []
    for cut in (FIXED, None):
        how: Any = {"window": window, "max_epochs": 1}
        scaling = LRScaling("linear", reference_batch=4)
        known = fit(Split(cut=cut), scaling, data=samples(10, pad_and_mask), **how)
        rate = known.optimizers[0].param_groups[0]["lr"]
        found.append((read_effective_batch(known).size, rate))
    assert found == [(10 * window, 0.5 * 10 * window / 4)] * 2


def test_plain_comparison_measures_no_cut_batches() -> None:
    """Plain Lightning would not have cut them; whatever is shown must not be wrong."""
    fit(Split(), comparison := PlainComparison())
    assert not comparison.is_measuring
    assert comparison.deviation is None


def test_guard_says_how_many_samples_a_statistic_comes_from() -> None:
    """Those of a micro-batch, though the loader yields sixteen."""
    module = hooked(Normalised, proof="off")()  # which names BatchNorm too
    with pytest.warns(UserWarning, match="BatchNorm") as said:
        fit(module, BatchNormGuard(), data=images())
    (text,) = [str(w.message) for w in said if "BatchNorm" in str(w.message)]
    assert " 4 samples" in text
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*BatchNorm")
        fit(Normalised(cut=None), BatchNormGuard(), data=images())
