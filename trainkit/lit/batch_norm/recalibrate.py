"""Statistics computed anew before they are used or kept."""

from __future__ import annotations

import contextlib
import copy
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchmetrics import Metric, MetricCollection

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.batch_norm.recalibrate import recalibrate
from trainkit.core.ranks import find_ranks
from trainkit.errors import TrainkitError
from trainkit.lit.base import has_callback
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_norm.samples import (
    loader_of_samples,
    on_device,
    refuse_unreadable,
)

SEED = 20050709
"""Every pass sees the same batches, with the same augmentation."""


class Recalibrate(Policy):
    """Running statistics computed anew, over up to `num_batches` micro-batches of the
    training data on each rank.

    `training_step` is what runs, without gradients: its logging is muted, its metrics
    and all random numbers are as they were afterwards.
    """

    def __init__(
        self,
        *,
        num_batches: int,
        exact: bool,
        forward: Callable[[Any, Any], object] | None,
    ) -> None:
        self._num_batches = num_batches
        self._exact = exact
        self._forward = forward
        self._forget()

    def _forget(self) -> None:
        self._layers: dict[str, BatchNorm] = {}
        self._modes: dict[Any, bool] = {}
        self._done_at: tuple[int, int] | None = None

    def start(self, trainer: Any, module: Any, layers: dict[str, BatchNorm]) -> None:
        self._layers = layers
        self._modes = {m: m.training for m in module.modules()}
        if not layers:
            return
        if self._forward is None:
            _refuse_unusable_step(module)
        refuse_unreadable(trainer)
        if has_callback(trainer.callbacks, "WeightAveraging"):
            warnings.warn(
                "BatchNormGuard('recalibrate'): it computes the statistics of the "
                "model under training, and WeightAveraging validates and saves the "
                "averaged one, whose statistics it averages too. Recalibrate that one "
                "after training, with torch.optim.swa_utils.update_bn.",
                stacklevel=2,
            )

    def before_use(self, trainer: Any, module: Any) -> None:
        now = trainer.global_step, trainer.fit_loop.epoch_loop.total_batch_idx
        if not self._layers or now == self._done_at:
            return
        self._done_at = now
        loader = loader_of_samples(trainer, self._num_batches, seed=SEED)

        def batches() -> Iterator[Any]:
            _seed(SEED)
            for index, batch in enumerate(loader()):
                yield on_device(trainer, module, batch), index
                if index + 1 == self._num_batches:
                    return
                # Passes end at different layers, and have drawn more or fewer.
                _seed(SEED + index + 1)

        with (
            isolate_rng(),
            _muted(module),
            _other_buffers_kept(module, self._layers),
            self._as_in_training(trainer, module),
        ):
            with trainer.strategy.precision_plugin.train_step_context():
                recalibrate(
                    self._layers,
                    batches,
                    lambda pair: self._run(module, *pair),
                    exact=self._exact,
                    ranks=find_ranks(trainer.strategy, "mean"),
                )

    def save(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.before_use(trainer, module)
        state = checkpoint["state_dict"]
        for name, layer in self._layers.items():
            for key in ("running_mean", "running_var"):
                if f"{name}.{key}" in state:
                    state[f"{name}.{key}"] = getattr(layer, key).detach().clone()

    def end(self) -> None:
        self._forget()

    def summary(self, num_layers: int) -> str:
        over = f"over up to {self._num_batches} batches a rank, before each use"
        if self._exact:
            return (
                f"recalibrated layer by layer ({num_layers} passes {over}; exact=False "
                f"makes one, exact for the first layer only)"
            )
        return f"recalibrated in one pass {over} (exact for the first layer only)"

    def _run(self, module: Any, batch: Any, batch_idx: int) -> object:
        if self._forward is not None:
            return self._forward(module, batch)
        parameters = inspect.signature(module.training_step).parameters
        several = len(parameters) > 1 or any(
            p.kind is p.VAR_POSITIONAL for p in parameters.values()
        )
        return module.training_step(*((batch, batch_idx) if several else (batch,)))

    @contextlib.contextmanager
    def _as_in_training(self, trainer: Any, module: Any) -> Iterator[None]:
        """Validation has put the model in evaluation mode, in which `training_step` may
        do something else; hooks ask `trainer.training`."""
        stage = trainer.state.stage
        modes = {m: m.training for m in module.modules()}
        trainer.training = True
        for each, mode in modes.items():
            each.training = self._modes.get(each, mode)
        try:
            yield
        finally:
            trainer.state.stage = stage
            for each, mode in modes.items():
                each.training = mode


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextlib.contextmanager
def _other_buffers_kept(module: Any, layers: dict[str, BatchNorm]) -> Iterator[None]:
    """Queues, centres, codebooks: what a forward pass in training moves."""
    concerned = set(layers.values())
    kept = [
        (each, name, buffer, buffer.clone())
        for each in module.modules()
        if each not in concerned
        for name, buffer in each.named_buffers(recurse=False)
        if not is_lazy(buffer)
    ]
    try:
        yield
    finally:
        for each, name, buffer, copied in kept:
            buffer.copy_(copied)
            setattr(each, name, buffer)


@contextlib.contextmanager
def _muted(module: Any) -> Iterator[None]:
    """Nothing is logged, and metrics count nothing."""
    names = [n for n in ("log", "log_dict", "log_exact") if hasattr(module, n)]
    overridden = {n: vars(module)[n] for n in names if n in vars(module)}
    metrics = _outermost_metrics(module)
    for name in names:
        setattr(module, name, _say_nothing)
    for path, metric in metrics.items():
        module.set_submodule(path, copy.deepcopy(metric, _detached(metric)))
    try:
        yield
    finally:
        for path, metric in metrics.items():
            module.set_submodule(path, metric)
        for name in names:
            delattr(module, name)
        for name, value in overridden.items():
            setattr(module, name, value)


def _detached(metric: Any) -> dict[int, Tensor]:
    """What `deepcopy` is to take for values that hang on a graph, which it refuses: a
    metric keeps the loss that it was given."""
    found: dict[int, Tensor] = {}

    def note(value: Any) -> None:
        if isinstance(value, Tensor):
            if not value.is_leaf:
                found[id(value)] = value.detach().clone()
        elif isinstance(value, list | tuple):
            for each in value:
                note(each)
        elif isinstance(value, dict):
            note(list(value.values()))

    for each in metric.modules():
        note(vars(each))
    return found


def _outermost_metrics(module: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        inside = any(path.startswith(f"{other}.") for other in found)
        if path and not inside and isinstance(each, Metric | MetricCollection):
            found[path] = each
    return found


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _refuse_unusable_step(module: Any) -> None:
    why = None
    if not module.automatic_optimization:
        why = "steps its optimizers itself (automatic_optimization=False)"
    elif "dataloader_iter" in inspect.signature(module.training_step).parameters:
        why = "fetches its own batches (dataloader_iter)"
    if why is not None:
        raise TrainkitError(
            f"BatchNormGuard('recalibrate'): it runs training_step without training, "
            f"and that of {type(module).__name__} {why}. Say what to run: "
            f"BatchNormGuard('recalibrate', forward=lambda module, batch: "
            f"module(batch[0]))."
        )
