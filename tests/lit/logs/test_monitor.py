"""What WindowMonitor logs equals numbers computed by hand."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import (
    TokenModule,
    gradients,
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_ranks,
    token_loss,
    trainer,
)
from tests.zoo import Gan, Manual
from trainkit import AccumulationCallback, PerSample, PerToken, Uniform, WindowMonitor
from trainkit.core.checks import LateReading
from trainkit.errors import TrainkitError
from trainkit.lit.logs import monitor

DATA = ragged_sequences(38)  # ten batches of four, the last of two
BATCH, WINDOW = 4, 4


class Record(Logger):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, dict[str, float]]] = []

    name = version = "record"  # type: ignore[assignment]  # properties in Logger

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def of_windows(self) -> dict[int, dict[str, float]]:
        """The monitor's own rows, by step."""
        return {step: row for step, row in self.rows if any("window" in k for k in row)}


class LogsToo(TokenModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        return loss


def recorded(
    module: pl.LightningModule,
    strategy: Any = None,
    *,
    every: int = 1,
    collate: Any = pad,
    **options: Any,
) -> Record:
    record = Record()
    windows = [AccumulationCallback(strategy)] if strategy else []
    options = {"accumulate": WINDOW, "log_every_n_steps": 1} | options
    fit = trainer(
        logger=record,
        callbacks=[*windows, WindowMonitor(every)],
        **options,
    )
    fit.fit(module, loader(DATA, BATCH, collate=collate))
    return record


def expected(batches: list[Any], module: TokenModule) -> dict[str, float]:
    """A window's numbers, from the big batch and from counting."""
    counts = [int((b["labels"] != -100).sum()) for b in batches]
    total, number = sum(counts), len(counts)
    size = sum(b["labels"].numel() for b in batches)
    module.zero_grad()
    mean = sum(token_loss(module.net, b, "sum") for b in batches) / total
    assert isinstance(mean, Tensor)
    mean.backward()
    return {
        "window/loss": mean.item(),
        "window/weight": total,
        "window/micro_batches": number,
        "window/imbalance": max(counts) / total * number,
        "window/uniform_gap": sum(abs(c / total - 1 / number) for c in counts) / 2,
        "window/padding": (size - total) / size,
        "window/grad_norm": float(gradients(module).norm()),
        "window/seen": total,
        "window/samples_seen": sum(len(b["labels"]) for b in batches),
    }


def by_hand(world: int = 1, data: Any = DATA) -> list[dict[str, float]]:
    """One epoch of SGD, with every window's numbers on the way."""
    module = TokenModule(dtype=torch.float64)
    optimizer = module.configure_optimizers()
    shares = [data[rank::world] for rank in range(world)]
    found = []
    for first in range(0, len(shares[0]), BATCH * WINDOW):
        cuts = range(first, min(first + BATCH * WINDOW, len(shares[0])), BATCH)
        batches = [pad(share[i : i + BATCH]) for i in cuts for share in shares]
        found.append(expected(batches, module))
        optimizer.step()
    for before, after in pairwise(found):
        for name in ("window/seen", "window/samples_seen"):
            after[name] += before[name]
    return found


class Fused(TokenModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, fused=True)


def manual(every: int | None) -> Manual:
    module = Manual()
    module.every = every
    return module


def scaled() -> dict[str, Any]:
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
    return {"plugins": [MixedPrecision("16-mixed", device="cpu", scaler=scaler)]}


def double(kind: type[TokenModule] = TokenModule, **options: Any) -> TokenModule:
    return kind(dtype=torch.float64, **options)


SUM: dict[str, Any] = {"reduction": "sum"}


@pytest.mark.filterwarnings("ignore:SGD.fused=True. under a gradient scaler")
@pytest.mark.parametrize(
    ("make", "strategy", "options", "most", "rel"),
    [
        # lightning#13243: callbacks saw loss / N; transformers#35204: norms times N.
        (double, PerToken(), dict, 3, 1e-12),
        # The norm is that before clipping, after which the next window is another.
        (double, PerToken(), lambda: {"gradient_clip_val": 1e-3}, 1, 1e-12),
        (lambda: double(**SUM), PerToken(loss_reduction="sum"), dict, 1, 1e-12),
        # A fused optimizer's gradients are still scaled when the hook runs.
        (double, PerToken(), scaled, 3, 1e-6),
        (lambda: double(Fused), PerToken(), scaled, 3, 1e-6),
        (lambda: manual(None), None, dict, 3, 1e-12),
        (lambda: manual(WINDOW), None, lambda: {"accumulate": 1}, 3, 1e-12),
    ],
)
def test_every_key_equals_the_number_computed_by_hand(
    make: Any, strategy: Any, options: Any, most: int, rel: float
) -> None:
    rows = recorded(make(), strategy, max_epochs=1, **options()).of_windows()
    assert len(rows) == 3
    assert strategy is None or list(rows) == [0, 1, 2]
    for row, numbers in zip([*rows.values()][:most], by_hand(), strict=False):
        assert row == pytest.approx(numbers, rel=rel)


def test_first_and_each_nth_window_are_logged_once() -> None:
    """lightning#6359: global_step stays for N batches, and the log fired N times.

    They are the windows with which Lightning logs what the module logs.
    """
    options: Any = {"every": 2, "max_epochs": 3, "log_every_n_steps": 2}
    record = recorded(LogsToo(), PerToken(), **options)
    assert list(record.of_windows()) == [0, 1, 3, 5, 7]
    assert steps_of(record, "mine") == [1, 3, 5, 7]


def steps_of(record: Record, key: str) -> list[int]:
    return [step for step, row in record.rows if key in row]


def test_step_numbers_equal_those_of_lightning() -> None:
    record = recorded(LogsToo(), PerToken())
    assert steps_of(record, "window/loss") == steps_of(record, "mine")


class LogsInGan(Gan):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.log("mine", float(batch_idx))


def test_step_numbers_in_manual_optimization_equal_those_of_lightning() -> None:
    """There Lightning counts batches; the windows are of two and of three."""
    record = recorded(LogsInGan(), accumulate=1, max_epochs=1)
    mine = steps_of(record, "mine")
    assert steps_of(record, "window/0/loss") == [mine[i] for i in (1, 3, 5, 7, 9)]
    assert steps_of(record, "window/1/loss") == [mine[i] for i in (2, 5, 8, 9)]


def test_csv_logger_receives_every_window(tmp_path: Path) -> None:
    fit = trainer(
        WINDOW,
        max_epochs=1,
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path, name="", version=""),
        callbacks=[AccumulationCallback(PerToken()), WindowMonitor(1)],
    )
    fit.fit(TokenModule(dtype=torch.float64), loader(DATA, BATCH))
    with open(tmp_path / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["window/weight"]) for row in rows] == [
        numbers["window/weight"] for numbers in by_hand()
    ]


class NeverThere(LateReading):
    """As on a GPU whose queue is long."""

    arrived = property(lambda self: False)  # type: ignore[assignment]  # was read-only


def test_readings_that_arrive_late_are_logged_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = recorded(TokenModule(), PerToken())
    monkeypatch.setattr(monitor, "LateReading", NeverThere)
    assert recorded(TokenModule(), PerToken()).of_windows() == prompt.of_windows()


# ---- padding -------------------------------------------------------------------------


def with_mask(samples: Any) -> dict[str, Tensor]:
    """Half of the labels do not count, and yet only the mask tells what pads."""
    batch = pad(samples)
    batch["attention_mask"] = (batch["labels"] != -100).long()
    batch["labels"][:, ::2] = -100
    return batch


@pytest.mark.parametrize("strategy", [PerToken(), PerSample(), Uniform()])
def test_padding_equals_what_the_attention_mask_leaves_out(strategy: Any) -> None:
    module = TokenModule(dtype=torch.float64)
    record = recorded(module, strategy, collate=with_mask, max_epochs=1)
    for row, numbers in zip(record.of_windows().values(), by_hand(), strict=True):
        assert row["window/padding"] == pytest.approx(numbers["window/padding"])


def test_padding_by_the_mask_of_the_strategy() -> None:
    def collate(samples: Any) -> dict[str, Tensor]:
        batch = pad(samples)
        batch["counts"] = (batch["labels"] != -100).double() * 0.5
        return batch

    record = recorded(
        TokenModule(), PerToken(mask="counts"), collate=collate, max_epochs=1
    )
    first = record.of_windows()[0]
    assert first["window/padding"] == pytest.approx(by_hand()[0]["window/padding"])
    assert first["window/weight"] == by_hand()[0]["window/weight"] / 2


def test_padding_is_not_shown_where_nothing_tells_it() -> None:
    record = recorded(TokenModule(), Uniform(), max_epochs=1)
    assert "window/padding" not in record.of_windows()[0]
    assert record.of_windows()[0]["window/imbalance"] == 1


# ---- several ranks, scalers, refusals ------------------------------------------------

SHARED = ragged_sequences(36)


def record_ranks(rank: int, world: int) -> list[dict[str, float]]:
    record = Record()
    trainer(
        WINDOW,
        strategy="ddp",
        devices=world,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=record,
        callbacks=[AccumulationCallback(PerToken()), WindowMonitor(1)],
    ).fit(TokenModule(dtype=torch.float64), rank_loader(SHARED, BATCH, rank, world))
    return list(record.of_windows().values())


def test_every_key_on_two_ranks_equals_the_number_computed_by_hand() -> None:
    """transformers#46204 and others: gradient right, log times world."""
    for rows in raise_rank_errors(run_ranks(record_ranks, 2)):
        for row, numbers in zip(rows, by_hand(2, SHARED), strict=True):
            assert row == pytest.approx(numbers, rel=1e-12)


def test_monitor_without_accumulation_is_refused() -> None:
    with pytest.raises(TrainkitError, match=r"WindowMonitor: it shows the windows of"):
        recorded(TokenModule())


@pytest.mark.parametrize("every", [0, -3, True])
def test_monitor_every_n_steps_is_checked(every: int) -> None:
    with pytest.raises(TrainkitError, match="every_n_steps: must be a whole number"):
        WindowMonitor(every)


class CountWaits(TorchDispatchMode):
    """Counts where the host asks for a tensor's value."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        waits = ("_local_scalar_dense", "is_nonzero", "equal.default", "nonzero")
        name = str(func)
        self.number += any(f"aten.{wait}" in name for wait in waits)
        return func(*args, **(kwargs or {}))


def test_monitor_does_not_wait_for_a_tensor() -> None:
    """torchtitan#4099: `.item()` for each micro-batch."""

    def num_waits(*callbacks: pl.Callback) -> int:
        fit = trainer(
            WINDOW,
            logger=Record(),
            log_every_n_steps=1,
            callbacks=list(callbacks),
        )
        with CountWaits() as counter:
            fit.fit(TokenModule(), loader(DATA, BATCH))
        return counter.number

    plain = num_waits()
    ours = AccumulationCallback(PerToken(), proof="off")  # which waits, at the start
    assert num_waits(ours, WindowMonitor(1)) == plain
