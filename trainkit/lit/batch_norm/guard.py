"""The callback that deals with BatchNorm under accumulation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from trainkit.core.batch_norm.layers import BatchNorm, every_layer, is_training
from trainkit.core.plan.options import check_choice, check_kind, check_whole_number
from trainkit.core.strategies import num_samples
from trainkit.core.tape.forward import warn_of_memory
from trainkit.errors import TrainkitError
from trainkit.lit.batch_norm.announce import Announce
from trainkit.lit.batch_norm.exact import ExactStatistics
from trainkit.lit.batch_norm.policies import (
    Freeze,
    GroupNormInstead,
    Momentum,
    Policy,
    Window,
)
from trainkit.lit.batch_norm.recalibrate import Recalibrate
from trainkit.lit.batch_size import micro_batch_of
from trainkit.lit.callback.base import OrderedCallback
from trainkit.lit.callback.table import Row

PolicyName = Literal[
    "warn",
    "error",
    "ignore",
    "exact",
    "freeze",
    "momentum",
    "recalibrate",
    "group_norm",
]

ELSEWHERE = {
    "sync": "Lightning does it: Trainer(sync_batchnorm=True)",
}
"""Where to go for what might be taken for a policy."""

POLICIES: dict[str, Callable[..., Policy]] = {
    "warn": Announce,
    "error": partial(Announce, "error"),
    "ignore": Policy,
    "exact": ExactStatistics,
    "freeze": Freeze,
    "momentum": Momentum,
    "recalibrate": Recalibrate,
    "group_norm": GroupNormInstead,
}
"""What makes a policy; the options are those of the guard that it takes by name."""


def make_policy(policy: str, options: dict[str, Any]) -> Policy:
    """A policy of this name, with those of the guard's options that belong to it.

    Raises:
        TrainkitError: there is no such policy, an option is not a number as it should
            be, or it belongs to another policy.
    """
    check_kind("BatchNormGuard policy", policy, str, "the name of one")
    if policy in ELSEWHERE:
        raise TrainkitError(f"BatchNormGuard({policy!r}): {ELSEWHERE[policy]}.")
    check_choice("BatchNormGuard policy", policy, list(POLICIES))
    for name in ("min_samples", "num_batches", "groups"):
        check_whole_number(f"BatchNormGuard {name}", options[name])
    defaults = inspect.signature(BatchNormGuard).parameters
    own = {name: inspect.signature(make).parameters for name, make in POLICIES.items()}
    for name, value in options.items():
        # `min_samples` does no harm beside any policy.
        is_given = value != defaults[name].default and name != "min_samples"
        if is_given and name not in own[policy]:
            owner = next(each for each, takes in own.items() if name in takes)
            raise TrainkitError(
                f"BatchNormGuard {name}: it belongs to the policy {owner!r}, and the "
                f"policy is {policy!r}. Leave it out, or take that policy."
            )
    return POLICIES[policy](**{n: x for n, x in options.items() if n in own[policy]})


class BatchNormGuard(OrderedCallback):
    """Deals with BatchNorm, which no division of gradients can make exact.

    Each of N micro-batches is normalised by its own mean and variance, and the running
    statistics move N times a step. The guard looks only at layers that train.

    - `"exact"`: normalises by the statistics of the whole window, on all ranks: the big
      batch's, with its gradient. A window must be one loader batch, which
      `MicroBatching` cuts.
    - `"warn"`: one warning with the names of the layers, the number of samples behind
      each statistic, and the remedies, if windows have several small micro-batches.
    - `"error"`: an error instead. `"ignore"`: does nothing.
    - `"momentum"`: m' = 1 - (1 - m)^(1/N), so that running statistics forget as slowly
      as the big batch's. Their variance still lacks the differences between
      micro-batches.
    - `"recalibrate"`: computes the statistics anew from training data: before
      validation, before a checkpoint is written, and at the end of training. No
      callback is called where weights alone are written (`save_weights_only=True`,
      `trainer.save_checkpoint(weights_only=True)`): such a file has the statistics of
      the last use.
    - `"freeze"`: keeps the statistics, for fine-tuning. The layers' weights train,
      unless you take their gradients off: `layer.requires_grad_(False)`.
    - `"group_norm"`: replaces the layers by GroupNorm, with their weights.

    The last one changes the module before its optimizer is made. It does so in every
    stage, so that checkpoints fit. Without a Trainer, call `convert`.

    Args:
        policy: one of these.
        min_samples: there is no warning about statistics from so many samples or more.
        num_batches: with `"recalibrate"`: the number of micro-batches on each rank.
        exact: with `"recalibrate"`: as many passes as layers follow each other, for
            the statistics of all data as one batch. False makes one pass, which is
            exact for the first layer only.
        groups: with `"group_norm"`: the most groups; each has at least 4 channels.
        memory: has no effect any more.
    """

    order = 3

    def __init__(
        self,
        policy: PolicyName = "warn",
        *,
        min_samples: int = 16,
        num_batches: int = 200,
        exact: bool = True,
        groups: int = 32,
        memory: Any = None,
    ) -> None:
        super().__init__()
        warn_of_memory("BatchNormGuard", memory)
        self.policy = policy
        options = {
            "min_samples": min_samples,
            "num_batches": num_batches,
            "exact": exact,
            "groups": groups,
        }
        self._policy = make_policy(policy, options)
        self._forget()
        self._num_layers = 0
        self._rows = math.nan  # of the first loader batch
        self._num_batches = 1  # loader batches in the window under way

    def _forget(self) -> None:
        self._layers: dict[str, BatchNorm] = {}
        self._run: tuple[Any, Any] | None = None  # in training: Trainer and module
        self._size: int | None = None  # loader batches in a full window; none came yet

    def convert(self, module: Any, trainer: Any = None) -> None:
        """Replace the layers of a module, if the policy does that.

        This is called in the guard's `setup`. Layers that the module's own `setup` or
        `configure_model` makes come later: call it there.
        """
        self._policy.convert(module, trainer)

    @property
    def is_exact(self) -> bool:
        """Whether the layers see whole windows."""
        return self.policy == "exact"

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        guards = [c for c in trainer.callbacks if isinstance(c, BatchNormGuard)]
        if len(guards) > 1:
            raise TrainkitError(
                f"BatchNormGuard: one guard at a time, and {len(guards)} are among the "
                f"Trainer's callbacks: {[g.policy for g in guards]}. Keep one."
            )
        self.convert(pl_module, trainer)
        if stage == "fit":
            self.move_to_front(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._size, self._run = None, (trainer, pl_module)
        self._policy.begin(trainer, pl_module)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        num_layers = self._num_layers
        text = "" if self._size is None else self._policy.summary(num_layers)
        if not text or not (num_layers or self.policy == "group_norm"):
            return []
        if num_layers:
            text = f"{num_layers} layer{'s' * (num_layers != 1)} {text}"
        return [("BatchNorm", text)]

    # ---- while training --------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        is_first = self._size is None
        begins_epoch = is_first or batch_idx == 0
        if begins_epoch:
            self._layers = every_layer(pl_module)
        if is_first:
            self._rows = float(num_samples(batch))
            if math.isnan(self._rows):  # lists of samples do not tell: the loader does
                self._rows = micro_batch_of(trainer.train_dataloader) or math.nan
        size = trainer.accumulate_grad_batches
        inside = batch_idx % size
        if inside == 0 or size != self._size:
            self._size = size
            left = trainer.num_training_batches - (batch_idx - inside)
            self._num_batches = int(max(min(size, left), 1))
            how: Any = {"is_first": is_first, "begins_epoch": begins_epoch}
            self._open_window(self._num_batches, **how)
        if is_first:
            self.show_table(trainer, pl_module, is_late=True)

    def on_cut(self, num_micro_batches: int) -> None:
        # Each batch forgets its share of a step, however finely it is cut. Ranks may
        # cut differently: each forgets once a step, and DDP keeps rank 0's statistics.
        self._open_window(num_micro_batches)

    def _open_window(
        self, number: int, *, is_first: bool = False, begins_epoch: bool = False
    ) -> None:
        assert self._run is not None
        layers = {name: x for name, x in self._layers.items() if is_training(x)}
        self._num_layers = len(layers) if is_first else self._num_layers
        samples = self._rows * self._num_batches / number
        of = layers, number, samples, is_first, begins_epoch
        self._policy.open_window(Window(*self._run, *of))

    # ---- where statistics are used or kept -------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._run is not None:
            self._policy.before_use(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if self._run is not None and not trainer.interrupted:
            self._policy.save(trainer, pl_module, checkpoint)

    # ---- afterwards ------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._policy.before_use(trainer, pl_module)
        self._run = None

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._run = None
        self._policy.end()
