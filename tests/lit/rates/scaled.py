"""Trainings and schedulers whose learning rates are written down."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader

from tests.helpers import trainer
from trainkit import LRScaling

TORCH_SAYS = pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
)
"""Of schedulers that are stepped or read by hand."""

# ---- torch's schedulers, one of each way in which a scheduler keeps its curve --------

MAKERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 0.9**step),
    "StepLR": lambda o: lrs.StepLR(o, 3, 0.5),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 7, 1e-3),
    "CyclicLR-triangular2": lambda o: cyclic(o, "triangular2"),
    "OneCycleLR-cos": lambda o: one_cycle(o),
    "OneCycleLR-linear": lambda o: one_cycle(o, **THREE_PHASES),
    "SWALR": lambda o: SWALR(o, 0.01, 5),
    "ReduceLROnPlateau": lambda o: plateau(o),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, 1, 3), lrs.CosineAnnealingLR(o, 6, 1e-3)], [3]
    ),
    "SequentialLR-nested": lambda o: lrs.SequentialLR(
        o, [two(o), restarts(o, 4, 1, 1e-3), lrs.ExponentialLR(o, 0.8)], [5, 12]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([two(o), lrs.StepLR(o, 6, 0.5)]),
}
restarts = lrs.CosineAnnealingWarmRestarts
THREE_PHASES = {"anneal_strategy": "linear", "three_phase": True}
ABSOLUTE = [
    "LambdaLR",  # draws its curve from base_lrs
    *("CosineAnnealingLR", "CyclicLR-triangular2", "OneCycleLR-cos"),
    *("OneCycleLR-linear", "SWALR", "ReduceLROnPlateau"),
]
"""Those that hold rates of their own beside the group's."""


def cyclic(optimizer: Any, mode: Any = "triangular", **how: Any) -> Any:
    bottoms = [rate / 5 for rate in rates(optimizer)]
    how = {"cycle_momentum": False, **how}
    return lrs.CyclicLR(optimizer, bottoms, peaks(optimizer), 3, 4, mode, 0.9, **how)


def one_cycle(optimizer: Any, **how: Any) -> Any:
    return lrs.OneCycleLR(optimizer, peaks(optimizer), 30, cycle_momentum=False, **how)


def two(optimizer: Any) -> Any:
    """Two schedulers, one after the other."""
    first = lrs.LinearLR(optimizer, 0.2, 1, 3)
    return lrs.SequentialLR(optimizer, [first, lrs.ConstantLR(optimizer, 0.2, 9)], [4])


def plateau(optimizer: Any) -> Any:
    """Stopped by its `min_lr`, one for each group, and at the end by its `eps`."""
    least, eps = [rate / 17 for rate in rates(optimizer)], min(rates(optimizer)) / 100
    how: dict[str, Any] = {"min_lr": least, "eps": eps}
    return lrs.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, **how)


def peaks(optimizer: Any) -> list[float]:
    return [3 * rate for rate in rates(optimizer)]


def rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


class Curve:
    """An optimizer, with a rate for each group, and its scheduler, stepped by hand."""

    def __init__(self, name: str, first: Sequence[Any] = (0.05, 0.2)) -> None:
        self.made_of = name, copy.deepcopy(first)
        groups = [{"params": [parameter()], "lr": rate} for rate in first]
        self.optimizer = SGD(groups, lr=1.0)
        self.scheduler = MAKERS[name](self.optimizer)
        self.step = 0

    def go(self, steps: int) -> list[list[float]]:
        """Each group's rate before each of the next steps, twice: as the group holds
        it, and as `get_last_lr()` says."""
        found = []
        for _ in range(steps):
            said = [float(rate) for rate in self.scheduler.get_last_lr()]
            found.append([*rates(self.optimizer), *said])
            self.optimizer.step()
            # Never better than the first, but for one step.
            is_metric = isinstance(self.scheduler, lrs.ReduceLROnPlateau)
            self.scheduler.step(*[0.5 if self.step == 2 else 1.0] * is_metric)
            self.step += 1
        return found

    def resumed(self, saved: Any) -> Curve:
        """Made anew at the first rates, with the state loaded, as by a new process."""
        curve = Curve(*self.made_of)
        curve.optimizer.load_state_dict(copy.deepcopy(saved))
        curve.scheduler.load_state_dict(copy.deepcopy(self.scheduler.state_dict()))
        curve.step = self.step
        return curve


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2, dtype=torch.float64))


def deviation(curve: Any, reference: Any) -> float:
    """The largest, as a share of the reference, which may end at 0."""
    found, expected = torch.tensor([curve, reference], dtype=torch.float64)
    return float(((found - expected).abs() / expected.clamp(min=1e-9)).max())


def tensor_rate(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# ---- trainings -----------------------------------------------------------------------

EXACT = 1e-12
BATCH, BATCHES, WINDOW = 3, 10, 2
STEPS = BATCHES // WINDOW
"""Optimizer steps in an epoch."""
REFERENCE = 1.5
"""A window of two micro-batches of three is four times as large."""
FIRST = {"one": (0.1,), "two": (0.05, 0.2)}


def adamw(parameters: Any, **how: Any) -> AdamW:
    return AdamW(parameters, **{"betas": (0.99, 0.999), "eps": 1e-4, **how})


class Scheduled(pl.LightningModule):
    """Two weights, perhaps in two groups with rates of their own.

    Attributes:
        curve: before each step the groups' rates, then those of `get_last_lr()`.
        groups: before each step the groups' other numbers.
    """

    def __init__(
        self,
        name: str | None = None,
        first: Sequence[Any] = FIRST["two"],
        *,
        optimizer: Callable[..., Any] = SGD,
        interval: str = "step",
        **config: Any,
    ) -> None:
        super().__init__()
        self.name, self.first, self.make = name, first, optimizer
        self.config = {"interval": interval, "monitor": "loss", **config}
        self.weight = nn.ParameterList(
            nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in first
        )
        self.curve: list[list[float]] = []
        self.groups: list[dict[str, Any]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = sum(batch.mean() * (w**2).sum() for w in self.weight)
        assert isinstance(loss, Tensor)
        # ReduceLROnPlateau sees it get better once, as `Curve` does.
        best = self.trainer.global_step == 2
        self.log("loss", 0.5 if best else 1.0, on_step=True)
        return loss

    def configure_optimizers(self) -> Any:
        pairs = zip(self.weight, self.first, strict=True)
        optimizer = self.make([{"params": [w], "lr": lr} for w, lr in pairs], lr=1.0)
        if self.name is None:
            return optimizer
        config = {"scheduler": MAKERS[self.name](optimizer), **self.config}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        scheduler: Any = self.lr_schedulers() if self.name else None
        said = scheduler.get_last_lr() if scheduler is not None else rates
        self.curve.append([*rates, *map(float, said)])
        group = optimizer.param_groups[0]
        self.groups.append({k: v for k, v in group.items() if k != "params"})


def data(batch: int = BATCH, batches: int = BATCHES) -> DataLoader[Any]:
    return DataLoader(torch.ones(batch * batches, 1, dtype=torch.float64), batch)  # type: ignore[arg-type]


def fit(
    module: Any,
    *callbacks: Any,
    window: int = WINDOW,
    loader: Any = None,
    ckpt_path: Path | None = None,
    **how: Any,
) -> Any:
    """Train for two epochs, and return the module."""
    loader = data() if loader is None else loader
    made = trainer(window, callbacks=list(callbacks), **how)
    made.fit(module, loader, ckpt_path=ckpt_path, weights_only=True)
    return module


def plain(
    name: str | None, steps: int, first: Sequence[float] = FIRST["two"]
) -> list[list[float]]:
    """The curve of torch's scheduler by itself, in a bare loop."""
    if name is None:
        return [[*first, *first]] * steps
    return Curve(name, first).go(steps)


def times(curve: Any, factors: Sequence[float]) -> list[list[float]]:
    pairs = zip(curve, factors, strict=True)
    return [[factor * rate for rate in row] for row, factor in pairs]


def cube_root(k: float) -> float:
    return k ** (1 / 3)


def linear(**how: Any) -> LRScaling:
    return LRScaling("linear", **{"reference_batch": REFERENCE, **how})
