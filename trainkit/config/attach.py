"""Apply a configured strategy, optimizer and scheduler to an existing module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from lightning.pytorch import Callback

from trainkit.config.check import AUTO
from trainkit.config.groups import LIGHTNING
from trainkit.core.checks import Checks
from trainkit.core.split.micro_batching import MicroBatching, is_inside
from trainkit.core.strategies import AccumulationStrategy, check_strategy
from trainkit.errors import TrainkitError
from trainkit.lit.front.callbacks import AccumulationCallback
from trainkit.lit.front.mixin import AccumulationMixin
from trainkit.lit.proof.report import Proof
from trainkit.lit.schedule import total_steps

Interval = Literal["epoch", "step"]
MakeOptimizer = Callable[[Iterable[Any]], Any]
MakeScheduler = Callable[[Any], Any]


def attach_accumulation(
    module: Any,
    strategy: AccumulationStrategy | None,
    *,
    micro_batching: MicroBatching | None = None,
    wide_gradients: bool = False,
    checks: Checks = "late",
    proof: Proof = "warn",
) -> list[Callback]:
    """Let a module with or without `AccumulationMixin` accumulate by a strategy.

    A module with the mixin gets the strategy as `module.accumulation`, in place of its
    own. Any other module does not change, and needs a callback.

    Args:
        module: a `LightningModule`, of either of Lightning's namespaces.
        strategy: the weight of a micro-batch; None keeps the module's own strategy.
        micro_batching: how to cut loader batches; None keeps the module's own way.
        wide_gradients: keep the window's gradient in float32.
        checks: when a loss that is not finite ends the training: one window late, or
            `"now"`, before its step; `"late"` keeps the module's own.
        proof: what follows if a window is found not to be the big batch; `"warn"` keeps
            the module's own.

    Returns:
        The callbacks that the Trainer needs.

    Raises:
        TrainkitError: the weight of a micro-batch must be known, and is not.
    """
    if strategy is not None:
        check_strategy(strategy)
    options = {
        "micro_batching": micro_batching,
        "wide_gradients": wide_gradients or None,
        "checks": None if checks == "late" else checks,
        "proof": None if proof == "warn" else proof,
    }
    asked = {name: value for name, value in options.items() if value is not None}
    if isinstance(module, AccumulationMixin):
        if strategy is not None:
            module.accumulation = strategy
        for name, value in asked.items():
            setattr(module, name, value)
        return []
    if strategy is not None or is_inside(micro_batching):
        return [AccumulationCallback(strategy, **asked)]  # type: ignore[arg-type]
    for name, value in asked.items():
        if value != "off":
            raise TrainkitError(
                f"{name}: the weight of a micro-batch must be known, but "
                f"{type(module).__name__} has no AccumulationMixin with a strategy, "
                f"and no accumulation was chosen, received {value!r}. Choose "
                f"accumulation=per_sample or per_token."
            )
    return []


def attach_optimizer(
    module: Any,
    make_optimizer: MakeOptimizer | None,
    make_scheduler: MakeScheduler | None = None,
    *,
    interval: Interval = "step",
    monitor: str | None = None,
) -> None:
    """Give `configure_optimizers` to a module that does not define it.

    Both are made when Lightning asks for them, since `module.trainer` then knows the
    number of steps, which is also what `auto` stands for in an option of the scheduler.
    (Lightning's own CLI makes them at once, without a Trainer, and counts a scheduler's
    epochs.)

    Args:
        module: a `LightningModule`, of either of Lightning's namespaces.
        make_optimizer: takes the module's parameters; None keeps the module's own.
        make_scheduler: takes the optimizer.
        interval: the unit in which the scheduler counts, `"step"` or `"epoch"`.
        monitor: the logged metric that a scheduler such as ReduceLROnPlateau reads.

    Raises:
        TrainkitError: none is there, or the module defines `configure_optimizers` too.
    """
    name, is_own = type(module).__name__, has_own_optimizer(module)
    if make_optimizer is None and make_scheduler is not None:
        raise TrainkitError(
            "scheduler: needs an optimizer of the configuration, received "
            "optimizer=none. Choose scheduler=none, or an optimizer."
        )
    if make_optimizer is None and not is_own:
        raise TrainkitError(
            f"optimizer: must be chosen, since {name} has no configure_optimizers. "
            f"Choose optimizer=adamw, adam or sgd."
        )
    if make_optimizer is not None and is_own:
        raise TrainkitError(
            f"{name}: it defines configure_optimizers itself, so an optimizer of the "
            f"configuration would never be used. Choose optimizer=none and "
            f"scheduler=none, or remove configure_optimizers from the class."
        )
    if make_optimizer is not None:
        # Lightning sees through a partial, and it is pickled and copied with the
        # module, which a bound method of the instance would not be.
        module.configure_optimizers = partial(
            _configure, module, make_optimizer, make_scheduler, interval, monitor
        )


def has_own_optimizer(module: Any) -> bool:
    """Whether a module defines `configure_optimizers` itself."""
    if "configure_optimizers" in vars(module):
        return True
    return not is_lightnings(module, "configure_optimizers")


def is_lightnings(module: Any, method: str) -> bool:
    """Whether a module has a method of Lightning, and none of its own."""
    owner = next(cls for cls in type(module).__mro__ if method in vars(cls))
    return owner.__module__.startswith(tuple(f"{name}." for name in LIGHTNING))


def _configure(
    module: Any,
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
    interval: Interval,
    monitor: str | None,
) -> dict[str, Any]:
    optimizer = _made("optimizer", make_optimizer, module.parameters())
    if make_scheduler is None:
        return {"optimizer": optimizer}
    given = getattr(make_scheduler, "keywords", {})
    unknown = [name for name, value in given.items() if value == AUTO]
    steps = total_steps(module.trainer) if unknown else 0
    if steps == float("inf"):
        raise TrainkitError(
            f"scheduler.{unknown[0]}: `auto` needs an end of training, received "
            f"neither trainer.max_steps nor trainer.max_epochs. Set one of them."
        )
    total = dict.fromkeys(unknown, int(steps))
    scheduler = _made("scheduler", make_scheduler, optimizer, **total)
    about = {"scheduler": scheduler, "interval": interval, "monitor": monitor}
    return {"optimizer": optimizer, "lr_scheduler": about}


def _made(key: str, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a constructor makes; a value that it refuses is reported with its key."""
    try:
        return make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise TrainkitError(f"{key}: {error}") from error
