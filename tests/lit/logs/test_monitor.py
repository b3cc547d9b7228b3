"""What is measured of windows: by WindowMonitor and PlainComparison."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.core.test_accumulator import Waits
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
from trainkit import (
    AccumulationCallback,
    PerSample,
    PerToken,
    PlainComparison,
    Uniform,
    WindowMonitor,
)
from trainkit.core.checks import LateReading
from trainkit.errors import TrainkitError
from trainkit.lit.logs import monitor
from trainkit.lit.logs.summary import facts_of_windows

DATA = ragged_sequences(38)  # ten batches of four, the last of two
BATCH, WINDOW = 4, 4
ONE_EPOCH: dict[str, Any] = {"max_epochs": 1}


def recorded(
    module: pl.LightningModule,
    strategy: Any = None,
    /,
    *,
    data: Any = None,
    **options: Any,
) -> dict[int, dict[str, float]]:
    """The rows of windows, by step."""
    table = Table()
    ours = [AccumulationCallback(strategy)] if strategy else []
    options = {"accumulate": WINDOW, "log_every_n_steps": 1} | options
    fit = trainer(logger=table, callbacks=[*ours, WindowMonitor(1)], **options)
    fit.fit(module, loader(DATA, BATCH) if data is None else data)
    found = [row for row in table.rows if any("window" in name for name in row)]
    return {int(row.pop("step")): row for row in found}


def expected(batches: list[Any], module: TokenModule) -> dict[str, float]:
    """A window's numbers, from the big batch and from counting."""
    counts = [int((b["labels"] != -100).sum()) for b in batches]
    total, number = sum(counts), len(counts)
    size = sum(b["labels"].numel() for b in batches)
    module.zero_grad()
    sums = [token_loss(module.net, b, "sum") for b in batches]
    mean = torch.stack(sums).sum() / total
    mean.backward()
    return {
        "window/loss": mean.item(),
        "window/weight": total,
        "window/micro_batches": number,
        "window/imbalance": max(counts) / total * number,
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


double = partial(TokenModule, dtype=torch.float64)
SUMS, FUSED = partial(double, reduction="sum"), partial(Fused, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:SGD.fused=True. under a gradient scaler")
@pytest.mark.parametrize(
    ("make", "strategy", "options", "most", "rel"),
    [
        # lightning#13243: callbacks saw loss / N; transformers#35204: norms times N.
        (double, PerToken(), dict, 3, 1e-12),
        # The norm is that before clipping, after which the next window is another.
        (double, PerToken(), lambda: {"gradient_clip_val": 1e-3}, 1, 1e-12),
        (SUMS, PerToken(loss_reduction="sum"), dict, 1, 1e-12),
        # A fused optimizer's gradients are still scaled when the hook runs.
        (double, PerToken(), lambda: scaled(256.0), 3, 1e-6),
        (FUSED, PerToken(), lambda: scaled(256.0), 3, 1e-6),
        (Manual, None, dict, 3, 1e-12),
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


def record_ranks(rank: int, world: int) -> list[dict[str, float]]:
    ddp: Any = {"strategy": "ddp", "devices": world, "use_distributed_sampler": False}
    data = rank_loader(ragged_sequences(36), BATCH, rank, world)
    return [*recorded(double(), PerToken(), data=data, **ddp, **ONE_EPOCH).values()]


def test_every_key_on_two_ranks_equals_the_number_computed_by_hand() -> None:
    """transformers#46204 and others: gradient right, log times world."""
    for rows in raise_rank_errors(run_ranks(record_ranks, 2)):
        for row, numbers in zip(rows, by_hand(2, ragged_sequences(36)), strict=True):
            assert row == pytest.approx(numbers, rel=1e-12)


def test_monitor_does_not_wait_for_a_tensor() -> None:
    """torchtitan#4099: `.item()` for each micro-batch."""

    def num_waits(*callbacks: pl.Callback) -> int:
        how: dict[str, Any] = {"logger": Table(), "log_every_n_steps": 1}
        fit = trainer(WINDOW, callbacks=[*callbacks], **how)
        with Waits() as waits:
            fit.fit(TokenModule(), loader(DATA, BATCH))
        return len(waits.found)

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


# ---- what plain accumulation would have done, and all windows together ---------------


RAGGED = [1, 9, 2, 4, 7, 1, 1, 3, 5, 2]  # windows of four; the last one is short


class Branches(pl.LightningModule):
    """Some micro-batches use all layers; one layer has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.rows = nn.Embedding(5, 1, sparse=True, dtype=torch.float64)
        self.late = nn.Linear(3, 1, dtype=torch.float64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch) + self.rows(torch.arange(len(batch)) % 5)
        if len(batch) % 3 == 1:
            out = out + self.late(batch)
        return (out - batch.sum(1, keepdim=True)).square().mean()

    def test_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        # A rate of 0: the plain training sees the very weights of the exact one.
        return torch.optim.SGD(self.parameters(), lr=0.0)


def kept_gradients() -> tuple[list[Tensor], pl.Callback]:
    """Those of each step, and the callback that keeps them."""
    seen: list[Tensor] = []

    def keep(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pairs = [(p, p.grad) for p in pl_module.parameters()]
        grads = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in pairs]
        seen.append(torch.cat([grad.flatten() for grad in grads]))

    return seen, LambdaCallback(on_before_optimizer_step=keep)


def unequal(sizes: list[int], first: int = 0) -> Any:
    """Batches of these sizes, from one of them on."""
    torch.manual_seed(1)
    rows = [torch.randn(size, 3, dtype=torch.float64) for size in sizes]
    return DataLoader(rows[first:], batch_size=None)  # type: ignore[arg-type]


def fit(
    *callbacks: pl.Callback,
    sizes: list[int] = RAGGED,
    first: int = 0,
    resume: Any = None,
    **options: Any,
) -> pl.Trainer:
    fitted = trainer(WINDOW, callbacks=list(callbacks), **ONE_EPOCH | options)
    data = unequal(sizes, first)
    fitted.fit(Branches(), data, ckpt_path=resume, weights_only=True)
    return fitted


def by_sample(**options: Any) -> AccumulationCallback:
    # The rows of a batch see how many they are, of which the proof would warn.
    return AccumulationCallback(PerSample(**options), proof="off")


def test_it_measures_the_distance_of_plain_lightnings_gradients() -> None:
    """And the exact gradients stay as they are without it."""
    comparison, where_it_is_exact = PlainComparison(), PlainComparison()
    exact, plain, alone = (kept_gradients() for _ in range(3))
    fit(by_sample(), comparison, exact[1])
    fit(plain[1])
    fit(by_sample(), alone[1])
    pairs = zip(plain[0], exact[0], strict=True)
    off = [float((p - e).norm() / e.norm()) for p, e in pairs]
    assert len(off) == 3
    assert min(off) > 0.05
    assert comparison.deviation == pytest.approx((sum(off) / 3, max(off)), rel=1e-9)
    assert all(map(torch.equal, exact[0], alone[0]))
    fit(by_sample(), where_it_is_exact, sizes=[4] * 8)
    assert where_it_is_exact.deviation == pytest.approx((0, 0), abs=1e-12)


@pytest.mark.parametrize(
    ("callbacks", "most", "options"),
    [
        ([], 1000, {}),  # no windows of ours
        ([by_sample()], 10, {}),  # a model that is too large
        # What plain Lightning makes of sums is no mean to be compared.
        ([by_sample(loss_reduction="sum")], 1000, {}),
        ([by_sample(loss_reduction="total")], 1000, {}),
        # Its only batch is a whole window, of which plain Lightning would take a part.
        ([by_sample()], 1000, {"fast_dev_run": True}),
        # It would say that plain accumulation is off by nothing.
        ([AccumulationCallback(Uniform(), proof="off")], 1000, {}),
    ],
)
def test_what_it_leaves_out(
    callbacks: list[pl.Callback], most: int, options: dict[str, Any]
) -> None:
    comparison = PlainComparison(max_parameters=most)
    fit(*callbacks, comparison, **options)
    assert not comparison.is_measuring
    assert comparison.deviation is None


def test_it_goes_on_where_a_checkpoint_was_taken() -> None:
    whole, first, second = PlainComparison(), PlainComparison(), PlainComparison()
    fit(by_sample(), whole)
    fit(by_sample(), first, sizes=RAGGED[:4])
    second.load_state_dict(first.state_dict())
    fit(by_sample(), second, first=4)
    assert whole.deviation is not None
    assert second.deviation == pytest.approx(whole.deviation, rel=1e-12)


def test_the_summary_of_all_windows(tmp_path: Path) -> None:
    def trained(epochs: int, resume: Any = None) -> pl.Trainer:
        return fit(by_sample(), max_epochs=epochs, resume=resume)

    assert facts_of_windows(trainer(callbacks=[by_sample()])) == {}
    first = trained(1)
    facts = facts_of_windows(first)
    assert facts["windows"] == 3
    assert (facts["smallest"], facts["largest"], facts["weight"]) == (7, 16, 35)
    path = tmp_path / "last.ckpt"
    first.save_checkpoint(path)
    resumed = trained(2, path)
    again = facts_of_windows(resumed)
    assert (again["windows"], again["weight"]) == (6, 70)
    assert again["first_loss"] == facts["first_loss"]
    resumed.test(Branches(), unequal(RAGGED), ckpt_path=path, weights_only=True)
    assert facts_of_windows(resumed) == again == facts_of_windows(trained(2))
