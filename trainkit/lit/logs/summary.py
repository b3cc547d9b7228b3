"""What a run sums up: its windows, and how far plain accumulation would be."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from trainkit.core.gradients import parameters_of
from trainkit.core.strategies import Uniform
from trainkit.lit.callback.base import windows_of


def facts_of_windows(trainer: Any) -> dict[str, float]:
    """The number of windows, their weights and their losses; empty before the first."""
    windows = windows_of(trainer)
    account = None if windows is None else windows.ledger.of()
    if account is None:
        return {}
    names = "smallest", "largest", "first_loss", "last_loss"
    return {
        "windows": account.num_windows,
        "weight": float(account.weight),
        **dict(zip(names, account.extremes.tolist(), strict=True)),
    }


class PlainComparison(Callback):
    """Measures how far plain Lightning's gradient is from the exact one.

    Lightning divides each mean loss by N = `accumulate_grad_batches`, also in a short
    window. With d_i the share of micro-batch i in the exact gradient and w_i its weight
    that is sum_i d_i (sum_j w_j) / (N w_i): no second backward pass, but two copies of
    the gradient, so at most `max_parameters` are measured. It compares before clipping,
    streamed windows of mean losses in one process, and not `Uniform()`.
    """

    def __init__(self, *, max_parameters: int = 10_000_000) -> None:
        super().__init__()
        self.max_parameters, self.is_measuring = max_parameters, False
        self._kept = torch.zeros(3, dtype=torch.float64)  # sum, largest and number
        self._window: tuple[Any, Any, int] = (0.0, 0.0, 0)  # gradient, shares, number

    @property
    def deviation(self) -> tuple[float, float] | None:
        """Mean and largest distance from the exact gradient, as a share of its norm."""
        total, largest, count = self._kept.tolist()  # waits for the device
        return (total / count, largest) if count else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trained = [p for p in pl_module.parameters() if p.requires_grad]
        windows = windows_of(trainer)
        self.is_measuring = (
            windows is not None
            and not (isinstance(windows.strategy, Uniform) or windows.is_split)
            and windows.strategy.loss_reduction == "mean"
            and (pl_module.automatic_optimization and trainer.world_size == 1)
            and not trainer.fast_dev_run  # which cuts its only window short
            and len({p.device for p in trained}) == 1
            and sum(p.numel() for p in trained) <= self.max_parameters
        )
        self._kept, self._window = self._kept.to(pl_module.device), (0.0, 0.0, 0)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        windows = windows_of(trainer)
        if self.is_measuring and windows is not None:
            (seen, shares, number), now = self._window, _flat(trainer)
            weight = torch.as_tensor(windows.weight).to(now)
            share = torch.where(weight == 0, 0, (now - seen) / weight)
            self._window = (now, shares + share, number + 1)

    def on_before_optimizer_step(self, trainer: Any, *args: Any, **how: Any) -> None:
        (seen, shares, number), self._window = self._window, (0.0, 0.0, 0)
        windows = windows_of(trainer)
        if number and windows is not None:
            exact, stats = _flat(trainer), windows.windows[0]
            divided = exact.norm() / seen.norm()  # one number for the whole window
            factor = divided * stats.weight / trainer.accumulate_grad_batches
            off = (shares * factor.to(exact) - exact).norm() / exact.norm()
            # A window from a checkpoint has micro-batches that were not seen here.
            counts = (stats.num_micro_batches == number) & off.isfinite()
            new, (total, largest, count) = torch.where(counts, off, 0), self._kept
            most = torch.maximum(largest, new)
            self._kept = torch.stack([total + new, most, count + counts])

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict["kept"]


def _flat(trainer: Any) -> Tensor:
    """All gradients as one vector, with zeros for parameters without a gradient."""
    found = [(p, p.grad) for p in parameters_of(trainer.optimizers[0])]
    grads = [torch.zeros_like(p) if grad is None else grad for p, grad in found]
    return torch.cat([grad.detach().to_dense().flatten() for grad in grads])
