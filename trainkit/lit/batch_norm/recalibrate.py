"""Running statistics that are computed anew before they are used or kept."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.utilities.seed import isolate_rng

from trainkit.core.batch_norm.layers import BatchNorm
from trainkit.core.batch_norm.recalibration import recalibrate
from trainkit.core.ranks import find_ranks
from trainkit.errors import TrainkitError
from trainkit.lit._compat import saves_weights_by_time
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_norm.samples import (
    loader_of_samples,
    on_device,
    refuse_unreadable,
)
from trainkit.lit.callback.base import has_callback
from trainkit.lit.rerun.quietly import muted, seed
from trainkit.lit.rerun.snapshot import kept

SEED = 20050709
"""Every pass sees the same batches, with the same augmentation."""


class Recalibrate(Policy):
    """Running statistics computed anew, over up to `num_batches` micro-batches of the
    training data on each rank.

    `training_step` is what runs, without gradients, as it last ran in training: its
    logging is muted, its metrics, buffers and all random numbers are as they were
    afterwards. What it appends to lists of its own, or tells a logger itself, stays;
    `forward` runs less.
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
        if any(map(saves_weights_by_time, trainer.callbacks)):
            warnings.warn(
                "BatchNormGuard('recalibrate'): a checkpoint of weights alone that is "
                "due by time (ModelCheckpoint(save_weights_only=True, "
                "train_time_interval=...)) asks nobody before it is written, so that "
                "it holds fading statistics. Save by steps or epochs, or the whole.",
                stacklevel=2,
            )

    def note_modes(self, module: Any) -> None:
        self._modes = {m: m.training for m in module.modules()}

    def open_window(self, num_micro_batches: int, layers: dict[str, BatchNorm]) -> None:
        self._layers = layers

    def before_use(self, trainer: Any, module: Any) -> None:
        now = trainer.global_step, trainer.fit_loop.epoch_loop.total_batch_idx
        if not self._layers or now == self._done_at:
            return
        self._done_at = now
        loader = loader_of_samples(trainer, self._num_batches, seed=SEED)

        def batches() -> Iterator[Any]:
            seed(SEED)
            for index, batch in enumerate(loader()):
                yield on_device(trainer, module, batch), index
                if index + 1 == self._num_batches:
                    return
                # Passes end at different layers, and have drawn more or fewer.
                seed(SEED + index + 1)

        with (
            isolate_rng(),
            muted(module),
            kept(module, leave_out=self._layers.values(), only_buffers=True),
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
