"""Manual optimization in a pass: backward calls are seen, and no optimizer steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainkit.core.strategies import Weight
from trainkit.errors import TrainkitError
from trainkit.lit._compat import replaced


class Plain(float):
    """The weight of a loss that a module with the mixin gives to `manual_backward`,
    which divides nothing."""


def has_mixin(module: Any) -> bool:
    """Whether the module has `AccumulationMixin`."""
    return hasattr(module, "accumulate") and hasattr(module, "finish_window")


@contextlib.contextmanager
def by_hand(
    module: Any, add: Callable[[Tensor, Any, Weight | None], None]
) -> Iterator[None]:
    """Each backward call of `training_step` is a term; no optimizer steps.

    Args:
        module: with manual optimization, attached to its Trainer.
        add: gets the loss, the batch, and the weight, where `accumulate` gets them.
    """
    plain = Plain(1) if has_mixin(module) else None

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        add(loss, None, plain)

    def accumulate(
        loss: Tensor, batch: Any = None, *, weight: Weight | None = None, **_: Any
    ) -> None:
        add(loss, batch, weight)

    idle = [_Idle(each) for each in module.trainer.optimizers]
    one_or_all = idle if len(idle) != 1 else idle[0]
    replacing = {
        "manual_backward": backward,
        "optimizers": lambda *args, **kwargs: one_or_all,
        "lr_schedulers": lambda: _Idle(None),
        "clip_gradients": _nothing,
        "toggle_optimizer": _nothing,
        "untoggle_optimizer": _nothing,
        # of a mixin, whose callback is not here
        "accumulate": accumulate,
        "window_ends": lambda *args, **kwargs: False,
        "finish_window": _nothing,
    }
    here = {name: it for name, it in replacing.items() if hasattr(module, name)}
    refusing = register_optimizer_step_pre_hook(_refuse_step)
    try:
        with replaced(module, **here):
            yield
    finally:
        refusing.remove()


def _refuse_step(*args: Any) -> None:
    raise TrainkitError(
        "training_step steps an optimizer that it does not take from "
        "self.optimizers(), so a pass would change the weights. Take it from there."
    )


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class _Idle:
    """An optimizer or scheduler whose methods do nothing."""

    def __init__(self, of: Any) -> None:
        self._of = of
        self.param_groups = getattr(of, "param_groups", [])
        self.state: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: contextlib.nullcontext()

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return None if closure is None else closure()

    def __iter__(self) -> Iterator[Any]:
        return iter([self, self])
