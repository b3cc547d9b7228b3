"""Makes a training from its configuration."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.errors import HydraException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Checkpoint,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ProgressBar,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainkit.config.attach import (
    attach_accumulation,
    attach_optimizer,
    is_lightnings,
)
from trainkit.config.check import check_all, refuse_no_end
from trainkit.config.groups import (
    CALLBACK_GROUPS,
    entries_of,
    is_empty,
)
from trainkit.config.targets import TARGET, instantiate
from trainkit.errors import TRACEBACK, TrainkitError
from trainkit.lit.front.mixin import AccumulationMixin
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger
from trainkit.lit.logs.monitor import WindowMonitor
from trainkit.lit.proof.denominators import line_of
from trainkit.lit.proof.report import checked_proof

_KINDS = {
    "model": ("LightningModule", "automatic_optimization"),
    "data": ("LightningDataModule", "prepare_data_per_node", "__iter__"),
    "logger": ("Logger", "log_metrics"),
}
"""What some groups make, and what it, or a loader, has: in either package of
Lightning."""


@dataclass(frozen=True)
class Training:
    """A training that is ready to run."""

    trainer: Trainer
    module: LightningModule
    data: Any

    def fit(self, ckpt_path: str | None = None) -> None:
        self.trainer.fit(self.module, self.data, ckpt_path=ckpt_path)


def build(
    config: DictConfig,
    *,
    callbacks: Sequence[Callback] = (),
    metrics: MetricsCSVLogger | None = None,
    trains: bool = False,
) -> Training:
    """Check a configuration, then make its training.

    Args:
        config: the configuration that `conf/train.yaml` composes.
        callbacks: more callbacks than the configuration names.
        metrics: the logger that it has whatever loggers the configuration names.
        trains: whether it will run to its end, which must then be given.

    Raises:
        TrainkitError: a wrong key, type or target, before anything is built.
    """
    check_all(config)
    if trains:
        refuse_no_end(config.trainer)
    if config.seed is not None:
        seed_everything(config.seed, workers=True, verbose=False)
    module = _make(config, "model")
    _refuse_no_data(config, module)
    data = _make(config, "data")
    keys = [*entries_of(config, "callbacks"), *CALLBACK_GROUPS]
    made = [each for each in (_make(config, key) for key in keys) if each is not None]
    made += _accumulation(config, module, made)
    attach_optimizer(
        module,
        _make(config, "optimizer"),
        _make(config, "scheduler"),
        interval=config.scheduling.interval,
        monitor=config.scheduling.monitor,
    )
    loggers = [_make(config, key) for key in entries_of(config, "logger")]
    if metrics and all(getattr(each, "path", None) != metrics.path for each in loggers):
        loggers.append(metrics)
    useless = _useless(config, module, loggers)
    made = [each for each in made if not isinstance(each, useless)]
    trainer = _make(
        config, "trainer", callbacks=[*made, *callbacks], logger=loggers or False
    )
    return Training(trainer, module, data)


def _refuse_no_data(config: DictConfig, module: LightningModule) -> None:
    if is_empty(config.data) and is_lightnings(module, "train_dataloader"):
        raise TrainkitError(
            f"data: must be given, since {type(module).__name__} has no "
            f"train_dataloader. Choose data=..., or write "
            f"data._target_=my_module.MyData."
        )


def _useless(
    config: DictConfig, module: LightningModule, loggers: list[Any]
) -> tuple[type[Callback], ...]:
    """Kinds of callbacks that have nothing to do in this training, and would fail."""
    off = {key for key, value in config.trainer.items() if value is False}
    is_plain = not config.accumulation and not isinstance(module, AccumulationMixin)
    conditions = {
        LearningRateMonitor: not loggers,
        ProgressBar: "enable_progress_bar" in off,
        Checkpoint: "enable_checkpointing" in off,
        WindowMonitor: is_plain,
    }
    return tuple(kind for kind, is_useless in conditions.items() if is_useless)


def _make(config: DictConfig, key: str, **kwargs: Any) -> Any:
    """The object that a node describes; None for an empty node, such as `none`."""
    node = OmegaConf.select(config, key)
    if is_empty(node):
        return None
    try:
        made = instantiate(node, _convert_="all", **kwargs)
        _refuse_other(made, node.get(TARGET), key)
        return made
    except (TrainkitError, OmegaConfBaseException):
        raise  # its text names the key
    except Exception as error:
        reason: BaseException = error
        if isinstance(error, HydraException) and error.__cause__ is not None:
            reason = error.__cause__  # Hydra wraps what a constructor raises
        if isinstance(reason, TrainkitError):
            raise reason from None
        raise _cannot_make(error, reason, config, key) from reason


def _refuse_other(made: Any, target: str, key: str) -> None:
    """Refuse an object that does not belong in its group."""
    kind, *attributes = _KINDS.get(key.partition(".")[0], ("",))
    if kind and not any(hasattr(made, each) for each in attributes):
        raise TrainkitError(
            f"{key}.{TARGET}: must make a {kind}, and {target} has made one of "
            f"{type(made).__name__}. Name a class or function that makes one."
        )


def _cannot_make(
    error: Exception, reason: BaseException, config: DictConfig, key: str
) -> TrainkitError:
    inner = re.search(r"^full_key: (\S+)$", str(error), re.MULTILINE)
    key = inner[1] if inner else key
    target = OmegaConf.select(config, f"{key}.{TARGET}")
    return TrainkitError(
        f"{key}: {target} could not be made: {type(reason).__name__}: {reason}\n"
        f"{TRACEBACK}=1 in the environment shows where."
    )


def _accumulation(
    config: DictConfig, module: LightningModule, callbacks: Sequence[Callback]
) -> list[Callback]:
    strategy = _make(config, "accumulation")
    own = getattr(module, "accumulation", None)
    if strategy is None and not isinstance(module, AccumulationMixin):
        _refuse_uncounted(config.trainer, module, callbacks)
    is_own = own is not AccumulationMixin.accumulation
    if strategy is not None and own is not None and is_own and own != strategy:
        warnings.warn(
            f"{type(module).__name__}: its own strategy {line_of(own)} is "
            f"replaced by the configuration's {line_of(strategy)}. "
            f"accumulation=none keeps it.",
            stacklevel=2,
        )
    return attach_accumulation(
        module,
        strategy,
        micro_batching=_make(config, "micro_batching"),
        wide_gradients=config.wide_gradients,
        checks=config.checks,
        proof=checked_proof(config.proof),
    )


def _refuse_uncounted(
    trainer: DictConfig, module: LightningModule, callbacks: Sequence[Callback]
) -> None:
    """Refuse several micro-batches in a step if nothing says what they weigh."""
    numbers = {"trainer.accumulate_grad_batches": trainer.accumulate_grad_batches}
    for each in callbacks:  # Lightning's own schedule says how many too
        if isinstance(each, GradientAccumulationScheduler):
            numbers[type(each).__name__] = max(each.scheduling.values())
    key, number = max(numbers.items(), key=lambda item: item[1])
    if number > 1 and module.automatic_optimization:
        raise TrainkitError(
            f"accumulation: must be chosen where a step has several micro-batches "
            f"({key}={number}), since it says what they weigh. Choose "
            f"accumulation=per_sample or per_token; trainkit check train ... measures "
            f"which one is exact."
        )
