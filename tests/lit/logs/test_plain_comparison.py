"""What plain accumulation would have done, measured beside the exact training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit import (
    AccumulationCallback,
    PerSample,
    PlainComparison,
    TrainkitError,
    Uniform,
)
from trainkit.lit.logs.window_summary import WindowSummary, facts_of_windows


class Net(LightningModule):
    def test_step(self, batch: Tensor, batch_idx: int) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        # A rate of 0: the plain training sees the very weights of the exact one.
        return torch.optim.SGD(self.parameters(), lr=0.0)


def batches(sizes: list[int]) -> Any:
    torch.manual_seed(1)
    return DataLoader(
        [torch.randn(size, 3, dtype=torch.float64) for size in sizes],  # type: ignore[arg-type]
        batch_size=None,
    )


class Branches(Net):
    """Layers that only some micro-batches use, and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 1, sparse=True, dtype=torch.float64)
        self.late = nn.Linear(3, 1, dtype=torch.float64)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out = self.net(batch) + self.rows(torch.arange(len(batch)) % 5)
        if batch_idx % 3 == 1:
            out = out + self.late(batch)
        return (out - batch.sum(1, keepdim=True)).square().mean()


class Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any):
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            for p in pl_module.parameters()
        ]
        self.seen.append(torch.cat([grad.flatten() for grad in grads]).clone())


def fit(
    sizes: list[int],
    callbacks: list[Callback],
    module: type[Net] = Net,
    **options: Any,
) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=callbacks,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module(), batches(sizes))


RAGGED = [1, 9, 2, 4, 7, 1, 1, 3, 5, 2]  # the last window is short


@pytest.mark.parametrize("module", [Net, Branches])
def test_it_measures_the_distance_of_plain_lightnings_gradients(
    module: type[Net],
) -> None:
    comparison, exact, plain = PlainComparison(), Gradients(), Gradients()
    fit(RAGGED, [AccumulationCallback(PerSample()), comparison, exact], module)
    fit(RAGGED, [plain], module)
    off = [
        float((p - e).norm() / e.norm())
        for p, e in zip(plain.seen, exact.seen, strict=True)
    ]
    assert len(off) == 3
    assert min(off) > 0.05
    assert comparison.deviation == pytest.approx((sum(off) / 3, max(off)), rel=1e-9)


def test_where_plain_is_exact_the_distance_is_nothing() -> None:
    comparison = PlainComparison()
    fit([4] * 8, [AccumulationCallback(PerSample()), comparison])
    assert comparison.deviation == pytest.approx((0, 0), abs=1e-12)


def test_the_training_stays_as_it_was() -> None:
    alone, beside = Gradients(), Gradients()
    fit(RAGGED, [AccumulationCallback(PerSample()), alone])
    fit(RAGGED, [AccumulationCallback(PerSample()), PlainComparison(), beside])
    for one, other in zip(alone.seen, beside.seen, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("callbacks", [[], [AccumulationCallback(PerSample())]])
def test_what_it_leaves_out(callbacks: list[Callback]) -> None:
    """No windows of ours; a model that is too large."""
    comparison = PlainComparison(max_parameters=10)
    fit(RAGGED, [*callbacks, comparison])
    assert not comparison.is_measuring
    assert comparison.deviation is None


@pytest.mark.parametrize("reduction", ["sum", "total"])
def test_a_loss_that_is_no_mean_is_left_out(reduction: Any) -> None:
    """What plain Lightning makes of sums is no mean to be compared."""
    comparison = PlainComparison()
    ours = AccumulationCallback(PerSample(loss_reduction=reduction))
    fit(RAGGED, [ours, comparison])
    assert not comparison.is_measuring
    assert comparison.deviation is None


def test_a_fast_dev_run_says_nothing_of_windows() -> None:
    """Its only batch is a whole window, of which plain Lightning would take a part."""
    comparison = PlainComparison()
    trainer = Trainer(
        fast_dev_run=True,
        accumulate_grad_batches=4,
        callbacks=[AccumulationCallback(PerSample()), comparison],
        accelerator="cpu",
    )
    trainer.fit(Net(), batches(RAGGED))
    assert comparison.deviation is None


def test_uniform_is_no_measure_of_plain_accumulation() -> None:
    """It would say that plain accumulation is off by nothing."""
    comparison = PlainComparison()
    fit(RAGGED, [AccumulationCallback(Uniform()), comparison])
    assert comparison.deviation is None


def test_it_goes_on_where_a_checkpoint_was_taken() -> None:
    whole, first, second = PlainComparison(), PlainComparison(), PlainComparison()
    fit(RAGGED, [AccumulationCallback(PerSample()), whole])
    fit(RAGGED[:4], [AccumulationCallback(PerSample()), first])
    second.load_state_dict(first.state_dict())
    torch.manual_seed(1)
    loader = batches(RAGGED)
    rest = DataLoader(loader.dataset[4:], batch_size=None)  # type: ignore[index]
    trainer = Trainer(
        max_epochs=1,
        accumulate_grad_batches=4,
        callbacks=[AccumulationCallback(PerSample()), second],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(Net(), rest)
    assert whole.deviation is not None
    assert second.deviation == pytest.approx(whole.deviation, rel=1e-12)


def test_a_wrong_limit_is_refused() -> None:
    with pytest.raises(TrainkitError, match="max_parameters: .* received -1"):
        PlainComparison(max_parameters=-1)


def test_the_summary_of_all_windows(tmp_path: Path) -> None:
    def trained(epochs: int, resume: Any = None) -> Trainer:
        trainer = Trainer(
            max_epochs=epochs,
            accumulate_grad_batches=4,
            callbacks=[AccumulationCallback(PerSample()), WindowSummary()],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        assert facts_of_windows(trainer) == {}
        trainer.fit(Net(), batches(RAGGED), ckpt_path=resume, weights_only=True)
        return trainer

    first = trained(1)
    facts = facts_of_windows(first)
    assert facts["windows"] == 3
    assert (facts["smallest"], facts["largest"], facts["weight"]) == (7, 16, 35)
    path = tmp_path / "last.ckpt"
    first.save_checkpoint(path)
    resumed = trained(2, path)
    again = facts_of_windows(resumed)
    assert again["windows"] == 6
    assert again["weight"] == 70
    assert again["first_loss"] == facts["first_loss"]
    resumed.test(Net(), batches(RAGGED), ckpt_path=path, weights_only=True)
    assert facts_of_windows(resumed) == again
    assert facts_of_windows(trained(2)) == again
