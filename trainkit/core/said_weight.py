"""A strategy whose weights the module says while it trains."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.core.strategies import (
    AccumulationStrategy,
    LossReduction,
    Weight,
    check_reduction,
    checked_weight,
)
from trainkit.errors import TrainkitError


@dataclass(frozen=True, kw_only=True)
class Weighed(AccumulationStrategy):
    """The weight of a micro-batch is the number that the module gives to `weigh`.

        class Detector(AccumulationMixin, LightningModule):
            accumulation = Weighed()

            def training_step(self, batch, batch_idx):
                losses = self.losses(batch)  # one for each matched box
                self.weigh(len(losses))
                return losses.mean()

    It is for a denominator that only `training_step` knows: matched boxes, or tokens
    that a random mask has kept. Windows are then divided when they close.

    Args:
        by: for a module that does not call `weigh`: a function of the module and the
            batch that returns the denominator, or its dotted path. It is called right
            after `training_step`, so the module may have left the number on itself.
        loss_reduction: what `training_step` returns: `"mean"`; or `"sum"`, which is
            divided by the window's weight. A `"total"` is divided by nothing, so there
            is nothing to say.
    """

    by: Callable[..., Any] | str | None = None
    loss_reduction: LossReduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self)
        if self.loss_reduction == "total":
            raise TrainkitError(
                "Weighed loss_reduction: must be 'mean' or 'sum', received 'total', "
                "which no weight divides. Use PerSample(loss_reduction='total'), and "
                "leave self.weigh() out."
            )
        if self.by is not None and not callable(_function(self.by)):
            raise TrainkitError(
                f"Weighed by: must be a function of the module and the batch, or its "
                f"dotted path, received {self.by!r}. For example "
                f"by='my_project.count_boxes'."
            )

    @property
    def is_said(self) -> bool:
        """Whether the module calls `weigh`; otherwise `by` counts."""
        return self.by is None

    def weight(self, batch: Any) -> Weight:
        raise TrainkitError(
            "Weighed: a batch does not show its weight, which only training_step "
            "knows. Call self.weigh(n) in training_step, or set Weighed(by=...). In a "
            "loop of your own, and in log_exact(), pass the number as weight=. Totals "
            "of several terms must be known before: let the batch hold what such a "
            "term divides by, PerSample(mask=...)."
        )

    def counted(self, module: Any, batch: Any) -> Weight:
        """What `by` returns for a batch that the module's `training_step` has seen."""
        count: Any = _function(self.by)
        return said_weight(count(module, batch), f"Weighed by={_named(self.by)}")


def said_weight(number: Any, name: str) -> Weight:
    """A weight that a module has said, checked as far as nothing waits for a device.

    Args:
        number: a Python number or a 0-d tensor.
        name: where it was said, for an error.
    """
    is_near = isinstance(number, Tensor) and number.is_cpu and number.numel() == 1
    if is_near and not torch.compiler.is_compiling():  # where it would break the graph
        number = number.item()
    hint = "Give it what the mean divides by, such as mask.sum()."
    return checked_weight(number, name=name, hint=hint)


def _function(by: Any) -> Any:
    return _located(by) if isinstance(by, str) else by


def _located(path: str) -> Any:
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise TrainkitError(
            f"Weighed by: must be the dotted path of a function that can be imported, "
            f"received {path!r} ({error}). For example by='my_project.count_boxes'."
        ) from error


def _named(by: Any) -> str:
    return by if isinstance(by, str) else getattr(by, "__name__", repr(by))
