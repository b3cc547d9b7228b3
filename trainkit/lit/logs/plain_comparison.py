"""A comparison with the gradients that plain Lightning would have made."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from trainkit.core.gradients import parameters_of
from trainkit.core.plan.options import check_whole_number
from trainkit.core.strategies import Uniform
from trainkit.lit.callback.base import windows_of


class PlainComparison(Callback):
    """Measures how far plain Lightning's gradient is from the exact one.

    Lightning divides each micro-batch's mean loss by `accumulate_grad_batches`,
    whatever its samples or tokens, and also in a short window. With d_i the share of
    micro-batch i in the exact gradient, w_i its weight and N that divisor,

        plain gradient = sum_i d_i (sum_j w_j) / (N w_i)

    so no second backward pass is needed. The two are compared before clipping, and the
    step is taken with the exact one.

    This needs memory for two more copies of the gradient, so models with more than
    `max_parameters` are not measured. Nor are several ranks, manual optimization,
    losses that are not means, split windows, which plain Lightning does not have, and
    `fast_dev_run`, which cuts its only window short. Nor is `Uniform()`: it does what
    plain Lightning does, except in short windows, so the result would not show how far
    both are from the big batch.

    Args:
        max_parameters: the largest number of parameters that is measured.

    Attributes:
        is_measuring: whether this training is measured.
    """

    def __init__(self, *, max_parameters: int = 10_000_000) -> None:
        super().__init__()
        check_whole_number(
            "PlainComparison max_parameters",
            max_parameters,
            least=0,
            hint="0 never measures.",
        )
        self.max_parameters = max_parameters
        self.is_measuring = False
        self._forget_window()
        self._kept: Tensor | None = None  # sum, largest and number of deviations

    def _forget_window(self) -> None:
        self._seen: Tensor | None = None  # the gradient so far
        self._unweighted: Tensor | None = None  # the sum of d_i / w_i so far
        self._num_seen = 0

    @property
    def deviation(self) -> tuple[float, float] | None:
        """Mean and largest distance from the exact gradient, as a share of its norm.

        Reading it waits for the device. None if no window was measured.
        """
        if self._kept is None:
            return None
        total, largest, count = self._kept.tolist()
        return (total / count, largest) if count else None

    # ---- hooks -----------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trained = [p for p in pl_module.parameters() if p.requires_grad]
        windows = windows_of(trainer)
        self.is_measuring = (
            windows is not None
            and not isinstance(windows.strategy, Uniform)
            and windows.strategy.loss_reduction == "mean"
            and not windows.is_split
            and pl_module.automatic_optimization
            and not trainer.fast_dev_run
            and trainer.world_size == 1
            and len({p.device for p in trained}) == 1
            and sum(p.numel() for p in trained) <= self.max_parameters
        )
        self._forget_window()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if not self.is_measuring:
            return
        windows = windows_of(trainer)
        assert windows is not None
        self._num_seen += 1
        now = _flat(trainer.optimizers[0])
        share = now if self._seen is None else now - self._seen
        weight = torch.as_tensor(windows.weight, device=now.device).to(now.dtype)
        share = torch.where(weight == 0, torch.zeros_like(share), share / weight)
        self._seen = now
        self._unweighted = (
            share if self._unweighted is None else self._unweighted + share
        )

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        if not self.is_measuring or self._seen is None:
            return
        assert self._unweighted is not None
        windows = windows_of(trainer)
        assert windows is not None
        stats = windows.windows[0]
        exact = _flat(optimizer)
        # The whole window was divided by one number.
        divided = exact.norm() / self._seen.norm()
        factor = divided * stats.weight / trainer.accumulate_grad_batches
        plain = self._unweighted * factor.to(exact.dtype)
        off = (plain - exact).norm() / exact.norm()
        # A window from a checkpoint has micro-batches that were not seen here.
        is_whole = stats.num_micro_batches == self._num_seen
        new = torch.stack([off, off, torch.ones_like(off)]).double()
        new = torch.where(is_whole & off.isfinite(), new, torch.zeros_like(new))
        if self._kept is not None:
            kept = self._kept.to(new)
            new = torch.stack(
                [kept[0] + new[0], torch.maximum(kept[1], new[1]), kept[2] + new[2]]
            )
        self._kept = new
        self._forget_window()

    # ---- checkpoints -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._kept = state_dict["kept"]


def _flat(optimizer: Any) -> Tensor:
    """All gradients as one vector, with zeros for parameters without a gradient."""
    found = [
        torch.zeros_like(p) if p.grad is None else p.grad.detach()
        for p in parameters_of(optimizer)
    ]
    return torch.cat([(g.to_dense() if g.is_sparse else g).flatten() for g in found])
