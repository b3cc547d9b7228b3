"""The policy that computes running statistics anew before they are used."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainkit.core.batch_norm.layers import BatchNorm, listed
from trainkit.core.batch_norm.recalibration import recalibrate
from trainkit.core.generators import seed_all
from trainkit.core.ranks import find_ranks
from trainkit.errors import TrainkitError
from trainkit.lit._compat import (
    before_batch_transfer,
    combined_loader,
    forget_iterator,
    step_arguments,
)
from trainkit.lit.aside import Kept, muted
from trainkit.lit.batch_norm.policies import Policy, Window
from trainkit.lit.callback.base import has_callback, windows_of

SEED = 20050709
"""Fixed, so that every pass sees equal batches with equal augmentation."""


class Recalibrate(Policy):
    """Computes running statistics anew from the training data.

    `training_step` runs on the first `num_batches` micro-batches of each rank's loader,
    without gradients, in the modes of training. Its logging is muted; metrics, buffers,
    attributes and random generators are put back afterwards. What it sends to a logger
    itself stays.
    """

    def __init__(self, *, num_batches: int, exact: bool) -> None:
        self._num_batches, self._exact = num_batches, exact
        self.end()

    def open_window(self, window: Window) -> None:
        self._layers, trainer = window.layers, window.trainer
        if window.begins_epoch:
            self._modes = {each: each.training for each in window.module.modules()}
        if not window.is_first or not window.layers:
            return
        if not window.module.automatic_optimization:
            raise TrainkitError(
                f"BatchNormGuard('recalibrate'): it runs training_step without "
                f"training, but {type(window.module).__name__} steps its optimizers "
                f"itself (automatic_optimization=False). Take 'momentum', or call "
                f"torch.optim.swa_utils.update_bn before the model is used."
            )
        for loader in combined_loader(trainer).flattened:
            _fresh(loader)  # refuses what can be read only once
        passed_over = [
            type(each).__name__
            for each in trainer.callbacks
            if getattr(each, "save_weights_only", False)
            or has_callback([each], "WeightAveraging")
        ]
        if passed_over:
            warnings.warn(
                f"BatchNormGuard('recalibrate'): it computes the statistics of the "
                f"model under training, when that is saved with its optimizer. Files "
                f"of weights alone, and of an averaged model, may have others: "
                f"received {listed(passed_over)}. Save with save_weights_only=False, "
                f"or call torch.optim.swa_utils.update_bn on the model of the file.",
                stacklevel=2,
            )

    def before_use(self, trainer: Any, module: Any) -> None:
        now = trainer.global_step, trainer.fit_loop.epoch_loop.total_batch_idx
        if not self._layers or now == self._done_at:
            return
        self._done_at = now

        def batches() -> Iterator[Any]:
            seed_all(SEED)
            # From the beginning of all loaders, combined as in training.
            combined = copy.copy(combined_loader(trainer))
            combined.flattened = list(map(_fresh, combined.flattened))
            for index, (batch, _, _) in enumerate(combined):
                yield on_device(trainer, module, batch), index
                if index + 1 == self._num_batches:
                    return
                # Batches draw from their numbers, whatever a forward pass has drawn.
                seed_all(SEED + index + 1)

        with (
            Kept(module, device=module.device),
            muted(module),
            self._as_in_training(trainer, module),
            trainer.strategy.precision_plugin.train_step_context(),
        ):
            recalibrate(
                self._layers,
                batches,
                lambda pair: self._run(module, *pair),
                exact=self._exact,
                ranks=find_ranks(trainer.strategy, "mean"),
            )
            layers = self._layers.values()
            both = (b for x in layers for b in (x.running_mean, x.running_var))
            running = [each for each in both if each is not None]
            found = [each.clone() for each in running]
        for each, value in zip(running, found, strict=True):
            each.copy_(value)

    def save(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.before_use(trainer, module)
        state = checkpoint["state_dict"]
        for name, layer in self._layers.items():
            for key in ("running_mean", "running_var"):
                if f"{name}.{key}" in state:
                    state[f"{name}.{key}"] = getattr(layer, key).detach().clone()

    def end(self) -> None:
        self._layers: dict[str, BatchNorm] = {}
        self._modes: dict[Any, bool] = {}
        self._done_at: tuple[int, int] | None = None

    def summary(self, num_layers: int) -> str:
        over = f"over up to {self._num_batches} batches a rank, before each use"
        if self._exact:
            return (
                f"recalibrated in up to {num_layers} passes {over} (exact=False makes "
                f"one, exact for the first layer only)"
            )
        return f"recalibrated in one pass {over} (exact for the first layer only)"

    def _run(self, module: Any, batch: Any, batch_idx: int) -> object:
        windows = windows_of(module.trainer)
        # It may say weights, which count nothing.
        with contextlib.nullcontext() if windows is None else windows.said.open():
            return module.training_step(*step_arguments(module, batch, batch_idx))

    @contextlib.contextmanager
    def _as_in_training(self, trainer: Any, module: Any) -> Iterator[None]:
        """Let module and Trainer be in training, also if validation is about to run.

        In evaluation mode `training_step` may do something else, and so may a hook if
        `trainer.training` is False.
        """
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


# ---- the training data, read without the loader that trains --------------------------


def on_device(trainer: Any, module: Any, batch: Any) -> Any:
    """A batch as `training_step` gets it."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = before_batch_transfer(module, batch)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _fresh(loader: Any) -> Any:
    """A copy of a loader that can be iterated without effect on the original."""
    try:
        again = copy.copy(loader)
    except TypeError as error:
        raise TrainkitError(
            f"BatchNormGuard('recalibrate'): the training data are a "
            f"{type(loader).__name__}, which can be read only once, so training would "
            f"miss what is read here. Give a loader that can be iterated again."
        ) from error
    if not isinstance(loader, DataLoader):
        return again
    forget_iterator(again)
    keep = [loader.collate_fn, loader.worker_init_fn, loader.multiprocessing_context]
    memo = {id(each): each for each in keep}
    data = loader.dataset
    # A stream may keep its position in an attribute.
    memo[id(data)] = copy.copy(data) if isinstance(data, IterableDataset) else data
    # A sampler may hold the rows without the data set that wraps them.
    counted = getattr(loader.sampler, "dataset", None)
    memo.setdefault(id(counted), counted)
    try:
        # A sampler may draw from its own generator, so it gets a copy.
        return copy.deepcopy(again, memo)
    except (TypeError, RuntimeError):
        return again
