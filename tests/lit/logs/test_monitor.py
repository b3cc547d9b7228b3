"""What WindowMonitor logs equals numbers computed by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
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
from tests.zoo.callbacks import Table
from tests.zoo.modules import Manual, hooked, scaled
from trainkit import AccumulationCallback, PerSample, PerToken, Uniform, WindowMonitor
from trainkit.core.checks import LateReading
from trainkit.errors import TrainkitError
from trainkit.lit.logs import monitor

DATA = ragged_sequences(38)  # ten batches of four, the last of two
BATCH, WINDOW = 4, 4
ONE_EPOCH: dict[str, Any] = {"max_epochs": 1}


def recorded(
    module: pl.LightningModule,
    strategy: Any = None,
    /,
    *,
    every: int = 1,
    data: Any = None,
    **options: Any,
) -> dict[int, dict[str, float]]:
    """The rows of windows, by step."""
    table = Table()
    ours = [AccumulationCallback(strategy)] if strategy else []
    options = {"accumulate": WINDOW, "log_every_n_steps": 1} | options
    fit = trainer(logger=table, callbacks=[*ours, WindowMonitor(every)], **options)
    fit.fit(module, loader(DATA, BATCH) if data is None else data)
    found = [row for row in table.rows if any("window" in name for name in row)]
    return {int(row.pop("step")): row for row in found}


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
        (double, PerToken(), lambda: scaled(256.0), 3, 1e-6),
        (lambda: double(Fused), PerToken(), lambda: scaled(256.0), 3, 1e-6),
        (Manual, None, dict, 3, 1e-12),
        (hooked(Manual, every=WINDOW), None, lambda: {"accumulate": 1}, 3, 1e-12),
    ],
)
def test_every_key_equals_the_number_computed_by_hand(
    make: Any, strategy: Any, options: Any, most: int, rel: float
) -> None:
    rows = recorded(make(), strategy, **ONE_EPOCH, **options())
    assert len(rows) == 3
    assert strategy is None or list(rows) == [0, 1, 2]
    for row, numbers in zip([*rows.values()][:most], by_hand(), strict=False):
        assert row == pytest.approx(numbers, rel=rel)


class NeverThere(LateReading):
    """As on a GPU whose queue is long."""

    arrived = property(lambda self: False)  # type: ignore[assignment]  # was read-only


def test_readings_that_arrive_late_are_logged_at_the_end(monkeypatch: Any) -> None:
    prompt = recorded(TokenModule(), PerToken())
    monkeypatch.setattr(monitor, "LateReading", NeverThere)
    assert recorded(TokenModule(), PerToken()) == prompt


# ---- padding -------------------------------------------------------------------------


def with_mask(samples: Any) -> dict[str, Tensor]:
    """Half of the labels do not count, and yet only the mask tells what pads."""
    batch = pad(samples)
    batch["attention_mask"] = (batch["labels"] != -100).long()
    batch["labels"][:, ::2] = -100
    return batch


def with_counts(samples: Any) -> dict[str, Tensor]:
    batch = pad(samples)
    return {**batch, "counts": (batch["labels"] != -100).double() * 0.5}


@pytest.mark.parametrize(
    ("strategy", "collate"),
    [
        *((each, with_mask) for each in (PerToken(), PerSample(), Uniform())),
        (PerToken(mask="counts"), with_counts),
        (Uniform(), None),
    ],
)
def test_padding_equals_what_the_mask_leaves_out(strategy: Any, collate: Any) -> None:
    """Where nothing tells it, it is not shown."""
    data = loader(DATA, BATCH, collate=collate or pad)
    rows = recorded(double(), strategy, data=data, **ONE_EPOCH)
    for row, numbers in zip(rows.values(), by_hand(), strict=True):
        if collate is None:
            assert "window/padding" not in row
            assert row["window/imbalance"] == 1
        else:
            assert row["window/padding"] == pytest.approx(numbers["window/padding"])
        if collate is with_counts:
            assert row["window/weight"] == numbers["window/weight"] / 2


# ---- several ranks, waiting, refusals ------------------------------------------------

SHARED = ragged_sequences(36)


def record_ranks(rank: int, world: int) -> list[dict[str, float]]:
    ddp: Any = {"strategy": "ddp", "devices": world, "use_distributed_sampler": False}
    data = rank_loader(SHARED, BATCH, rank, world)
    rows = recorded(double(), PerToken(), data=data, **ddp, **ONE_EPOCH)
    return list(rows.values())


def test_every_key_on_two_ranks_equals_the_number_computed_by_hand() -> None:
    """transformers#46204 and others: gradient right, log times world."""
    for rows in raise_rank_errors(run_ranks(record_ranks, 2)):
        for row, numbers in zip(rows, by_hand(2, SHARED), strict=True):
            assert row == pytest.approx(numbers, rel=1e-12)


class CountWaits(TorchDispatchMode):
    """Counts where the host asks for a tensor's value."""

    number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        waits = ("_local_scalar_dense", "is_nonzero", "equal.default", "nonzero")
        self.number += any(f"aten.{wait}" in str(func) for wait in waits)
        return func(*args, **(kwargs or {}))


def test_monitor_does_not_wait_for_a_tensor() -> None:
    """torchtitan#4099: `.item()` for each micro-batch."""

    def num_waits(*callbacks: pl.Callback) -> int:
        how: dict[str, Any] = {"logger": Table(), "log_every_n_steps": 1}
        fit = trainer(WINDOW, callbacks=[*callbacks], **how)
        with CountWaits() as counter:
            fit.fit(TokenModule(), loader(DATA, BATCH))
        return counter.number

    # The proof waits, at the start.
    ours = AccumulationCallback(PerToken(), proof="off")
    assert num_waits(ours, WindowMonitor(1)) == num_waits()


@pytest.mark.filterwarnings("ignore:optimizer 0. it stepped with")
def test_a_step_before_the_first_window_has_no_row() -> None:
    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step:
            Manual.training_step(self, batch, batch_idx)
        else:
            self.manual_backward(self.loss_of(batch))
            self.optimizers().step()

    rows = recorded(hooked(Manual, training_step=training_step)(), accumulate=1)
    assert min(rows) == 1


def test_wrong_use_is_refused() -> None:
    with pytest.raises(TrainkitError, match=r"WindowMonitor: it shows the windows of"):
        recorded(TokenModule())
    for every in (0, -3, True):
        with pytest.raises(TrainkitError, match="every_n_steps: must be a whole numb"):
            WindowMonitor(every)
