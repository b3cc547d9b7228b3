"""What plain accumulation would have done, measured beside the exact training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import trainer as quiet_trainer
from trainkit import AccumulationCallback, PerSample, PlainComparison, Uniform
from trainkit.lit.logs.summary import WindowSummary, facts_of_windows

RAGGED = [1, 9, 2, 4, 7, 1, 1, 3, 5, 2]  # windows of four; the last one is short


class Branches(LightningModule):
    """Layers that only some micro-batches use, and one with sparse gradients."""

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


def gradients() -> tuple[list[Tensor], Callback]:
    """Those of each step, and the callback that keeps them."""
    seen: list[Tensor] = []

    def keep(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pairs = [(p, p.grad) for p in pl_module.parameters()]
        grads = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in pairs]
        seen.append(torch.cat([grad.flatten() for grad in grads]))

    return seen, LambdaCallback(on_before_optimizer_step=keep)


def batches(sizes: list[int], first: int = 0) -> Any:
    torch.manual_seed(1)
    rows = [torch.randn(size, 3, dtype=torch.float64) for size in sizes]
    return DataLoader(rows[first:], batch_size=None)  # type: ignore[arg-type]


def fit(
    *callbacks: Callback,
    sizes: list[int] = RAGGED,
    first: int = 0,
    resume: Any = None,
    **options: Any,
) -> Trainer:
    how = {"max_epochs": 1, "callbacks": list(callbacks), **options}
    fitted = quiet_trainer(4, **how)
    data = batches(sizes, first)
    fitted.fit(Branches(), data, ckpt_path=resume, weights_only=True)
    return fitted


def by_sample(**options: Any) -> AccumulationCallback:
    # The rows of a batch see how many they are, of which the proof would warn.
    return AccumulationCallback(PerSample(**options), proof="off")


def test_it_measures_the_distance_of_plain_lightnings_gradients() -> None:
    """And the exact gradients stay as they are without it."""
    comparison = PlainComparison()
    exact, plain, alone = (gradients() for _ in range(3))
    fit(by_sample(), comparison, exact[1])
    fit(plain[1])
    fit(by_sample(), alone[1])
    pairs = zip(plain[0], exact[0], strict=True)
    off = [float((p - e).norm() / e.norm()) for p, e in pairs]
    assert len(off) == 3
    assert min(off) > 0.05
    assert comparison.deviation == pytest.approx((sum(off) / 3, max(off)), rel=1e-9)
    assert all(map(torch.equal, exact[0], alone[0]))
    where_it_is_exact = PlainComparison()
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
    callbacks: list[Callback], most: int, options: dict[str, Any]
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
    def trained(epochs: int, resume: Any = None) -> Trainer:
        return fit(by_sample(), WindowSummary(), max_epochs=epochs, resume=resume)

    assert facts_of_windows(quiet_trainer(callbacks=[by_sample()])) == {}
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
    resumed.test(Branches(), batches(RAGGED), ckpt_path=path, weights_only=True)
    assert facts_of_windows(resumed) == again == facts_of_windows(trained(2))
