"""BatchNorm under accumulation: said, refused, or remedied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

from trainkit.core.batch_norm.layers import num_sharing_ranks, training_layers
from trainkit.core.batch_norm.renorm import BatchRenorm
from trainkit.errors import TrainkitError
from trainkit.lit._compat import saves_weights_now
from trainkit.lit.base import OrderedCallback, has_callback
from trainkit.lit.batch_norm.announce import (
    Announce,
    look_at_last_batch,
    rows_of_last_batch,
)
from trainkit.lit.batch_norm.freeze import Freeze
from trainkit.lit.batch_norm.momentum import Momentum
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_norm.recalibrate import Recalibrate
from trainkit.lit.batch_norm.structure import GroupNormInstead, Renorm, Sync
from trainkit.lit.batch_norm.watch import ShapeWatch
from trainkit.lit.callback import window_ends
from trainkit.lit.effective import micro_batch_of
from trainkit.lit.plan import Row

PolicyName = Literal[
    "warn",
    "error",
    "ignore",
    "freeze",
    "momentum",
    "recalibrate",
    "sync",
    "group_norm",
    "renorm",
]


class BatchNormGuard(OrderedCallback):
    """Deals with BatchNorm, whose statistics no accumulation can make the big batch's.

    Each of N micro-batches is normalised by its own mean and variance, and the running
    statistics move N times a step. The guard looks at the layers that really train.

    - `"warn"`: one warning that names them, how many samples each statistic comes from,
      and the remedies. Silent where nothing accumulates or micro-batches are large.
    - `"error"`: refuses instead. `"ignore"`: silent.
    - `"momentum"`: m' = 1 - (1 - m)^(1/N), so that running statistics forget as slowly
      as the big batch's. Their variance still misses what lies between micro-batches.
    - `"recalibrate"`: computes them anew from training data, before validation, before
      a checkpoint is written, and at the end of training.
    - `"freeze"`: keeps them, for fine-tuning.
    - `"sync"`: SyncBatchNorm, where there are several ranks.
    - `"group_norm"`: GroupNorm in their place, weights carried over.
    - `"renorm"`: Batch Renormalization in their place (Ioffe 2017).

    The last three change the module before its optimizer is made, in every stage, so
    that a checkpoint fits. For a module outside of a Trainer call `convert`.

    Args:
        policy: one of these.
        min_samples: a statistic from so many samples or more is not complained of.
        freeze_affine: with `"freeze"`: weights and biases stay as well.
        num_batches: with `"recalibrate"`: over how many micro-batches, on each rank.
        exact: with `"recalibrate"`: layer by layer, which is what all data as one batch
            would give, with a pass for each layer; False makes one pass, which is exact
            for the first layer only.
        forward: with `"recalibrate"`: runs the model on a batch, `(module, batch)`;
            default: `training_step`.
        groups: with `"group_norm"`: how many at most; of at least 4 channels each.
        r_max: with `"renorm"`: the largest correction of the scale.
        d_max: with `"renorm"`: the largest correction of the mean.
        ramp_steps: with `"renorm"`: over how many optimizer steps both open.
    """

    place = 3

    def __init__(
        self,
        policy: PolicyName = "warn",
        *,
        min_samples: int = 16,
        freeze_affine: bool = False,
        num_batches: int = 200,
        exact: bool = True,
        forward: Callable[[Any, Any], object] | None = None,
        groups: int = 32,
        r_max: float = 3.0,
        d_max: float = 5.0,
        ramp_steps: int = 1000,
    ) -> None:
        super().__init__()
        if policy not in get_args(PolicyName):
            raise TrainkitError(
                f"BatchNormGuard policy: must be one of {list(get_args(PolicyName))}, "
                f"received {policy!r}."
            )
        at_least = {
            "min_samples": (min_samples, 1),
            "num_batches": (num_batches, 1),
            "groups": (groups, 1),
            "r_max": (r_max, 1),
            "d_max": (d_max, 0),
            "ramp_steps": (ramp_steps, 0),
        }
        for name, (value, least) in at_least.items():
            if not value >= least:
                raise TrainkitError(
                    f"BatchNormGuard {name}: must be at least {least}, received "
                    f"{value!r}."
                )
        made: dict[str, Callable[[], Policy]] = {
            "warn": lambda: Announce("warn", min_samples=min_samples),
            "error": lambda: Announce("error", min_samples=min_samples),
            "ignore": Policy,
            "freeze": lambda: Freeze(affine=freeze_affine),
            "momentum": Momentum,
            "recalibrate": lambda: Recalibrate(
                num_batches=num_batches, exact=exact, forward=forward
            ),
            "sync": Sync,
            "group_norm": lambda: GroupNormInstead(groups=groups),
            "renorm": lambda: Renorm(r_max=r_max, d_max=d_max, ramp_steps=ramp_steps),
        }
        self.policy = policy
        self._policy = made[policy]()
        self._layers: dict[str, Any] = {}
        self._watch: ShapeWatch | None = None
        self._is_training = self._has_opened = False

    def convert(self, module: Any, trainer: Any = None) -> None:
        """Replace the layers of a module, where the policy is one that does.

        Called in `setup`, and after `configure_model` of an `AccumulationMixin` module.
        """
        self._policy.convert(module, trainer)

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        guards = [c for c in trainer.callbacks if isinstance(c, BatchNormGuard)]
        if len(guards) > 1:
            raise TrainkitError(
                f"BatchNormGuard: one guard at a time, and {len(guards)} are among the "
                f"Trainer's callbacks: {[g.policy for g in guards]}. Keep one."
            )
        self._refuse_earlier_copies(trainer)
        self.convert(pl_module, trainer)
        if stage == "fit":
            self.take_place(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._layers = training_layers(pl_module)
        self._policy.start(trainer, pl_module, self._layers)
        self._is_training, self._has_opened = True, False
        if self.policy != "ignore" and self._policy.computes_from_micro_batches:
            self._watch = ShapeWatch(self._layers)
        self.show_plan(trainer, pl_module)

    def plan(self, trainer: Any, pl_module: Any) -> list[Row]:
        num_layers = len(self._layers)
        text = self._policy.summary(num_layers)
        if not text or not (num_layers or self.policy == "group_norm"):
            return []
        if num_layers:
            text = f"{num_layers} layer{'s' * (num_layers != 1)} {text}"
        return [("BatchNorm", text)]

    # ---- while training --------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        inside = batch_idx % trainer.accumulate_grad_batches
        if inside == 0 or not self._has_opened:
            self._has_opened = True
            left = trainer.num_training_batches - (batch_idx - inside)
            size = min(trainer.accumulate_grad_batches, left)
            self._policy.open_window(int(max(size, 1)))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is not None and self._watch.values:
            watch, self._watch = self._watch, None
            watch.close()
            self._judge(trainer, watch)
        # A checkpoint of weights alone asks nobody.
        if any(saves_weights_now(c, trainer.global_step) for c in trainer.callbacks):
            if window_ends(trainer, batch_idx, trainer.accumulate_grad_batches):
                self._policy.before_use(trainer, pl_module)

    def _judge(self, trainer: Any, watch: ShapeWatch) -> None:
        """By what the layers have really seen: their micro-batch may be a part of what
        the loader yields, and no loader may have said how large it is."""
        how = "error" if self.policy == "error" else "warn"
        num_rows = rows_of_last_batch(trainer)
        micro_batch = micro_batch_of(trainer.train_dataloader)
        seen = min(watch.rows.values())
        if num_rows is not None and micro_batch is not None and seen == micro_batch:
            # Batch renormalisation goes on with one value, where torch refuses.
            values = {
                name: value * num_sharing_ranks(self._layers[name])
                for name, value in watch.values.items()
                if not isinstance(self._layers[name], BatchRenorm)
            }
            look_at_last_batch(how, trainer, values, num_rows)
        if isinstance(self._policy, Announce):
            cut = 1.0 if micro_batch is None else max(micro_batch / seen, 1)
            accumulate = int(trainer.accumulate_grad_batches)
            self._policy.judge(trainer, self._layers, seen, accumulate * cut)

    # ---- where statistics are used or kept -------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._is_training:
            self._policy.before_use(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # As above.
        if any(getattr(c, "save_weights_only", False) for c in trainer.callbacks):
            self._policy.before_use(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if self._is_training and not trainer.interrupted:
            self._policy.save(trainer, pl_module, checkpoint)

    # ---- afterwards ------------------------------------------------------------------

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._policy.before_use(trainer, pl_module)
        self._is_training = False

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        self._is_training = False
        self._policy.end()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def _refuse_earlier_copies(self, trainer: Any) -> None:
        """WeightAveraging copies the module in its `setup`."""
        before = trainer.callbacks[: trainer.callbacks.index(self)]
        replaces = self.policy in ("group_norm", "renorm", "sync")
        if replaces and has_callback(before, "WeightAveraging"):
            raise TrainkitError(
                f"BatchNormGuard({self.policy!r}): it replaces layers, and a "
                f"WeightAveraging before it among the Trainer's callbacks copies the "
                f"module as it was. Put BatchNormGuard first."
            )
