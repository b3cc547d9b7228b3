"""BatchNorm under accumulation: said, refused, or remedied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkit.core.batch_norm.layers import (
    BatchNorm,
    every_layer,
    is_training,
    num_sharing_ranks,
)
from trainkit.core.batch_norm.renorm import BatchRenorm
from trainkit.errors import TrainkitError
from trainkit.lit._compat import saves_weights_now
from trainkit.lit.batch_norm.announce import (
    Announce,
    look_at_last_batch,
    rows_of_last_batch,
)
from trainkit.lit.batch_norm.freeze import Freeze
from trainkit.lit.batch_norm.momentum import Momentum
from trainkit.lit.batch_norm.options import PolicyName, check_options
from trainkit.lit.batch_norm.policy import Policy
from trainkit.lit.batch_norm.recalibrate import Recalibrate
from trainkit.lit.batch_norm.structure import GroupNormInstead, Renorm, Sync
from trainkit.lit.batch_norm.watch import ShapeWatch
from trainkit.lit.batch_size.effective import (
    longest_window,
    micro_batch_of,
    window_size,
)
from trainkit.lit.callback.base import OrderedCallback
from trainkit.lit.callback.table import Row
from trainkit.lit.callback.window_end import window_ends

KEY = "trainkit_batch_norm"
"""The entry in a checkpoint."""


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
      a checkpoint is written, and at the end of training. Not before what
      `trainer.save_checkpoint(weights_only=True)` writes in mid-epoch: it asks nobody.
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

    order = 3

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
        check_options(
            policy,
            min_samples=min_samples,
            freeze_affine=freeze_affine,
            num_batches=num_batches,
            exact=exact,
            forward=forward,
            groups=groups,
            r_max=r_max,
            d_max=d_max,
            ramp_steps=ramp_steps,
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
        self._layers: dict[str, BatchNorm] = {}
        self._num_layers = 0
        self._watch: ShapeWatch | None = None
        self._window: int | None = None
        self._num_batches = self._num_parts = 1
        self._chunks = 1.0
        self._is_training = self._has_started = False

    def __getstate__(self) -> dict[str, Any]:
        """Without the layers that it looks at in a `fit`."""
        return {**super().__getstate__(), "_layers": {}, "_watch": None}

    def convert(self, module: Any, trainer: Any = None) -> None:
        """Replace the layers of a module, where the policy is one that does.

        Called in `setup`, and after the own `setup` and `configure_model` of an
        `AccumulationMixin` module.
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
        self.convert(pl_module, trainer)
        if stage == "fit":
            self.move_to_front(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._is_training, self._has_started = True, False
        self._window, self._num_parts, self._chunks = None, 1, 1.0

    def _start(self, trainer: Any, pl_module: Any) -> None:
        """With the first batch: by now the module's own hooks have said which of its
        parts train."""
        layers = self._training_layers()
        self._num_layers = len(layers)
        self._policy.start(trainer, pl_module, layers)
        if self.policy != "ignore" and self._policy.computes_from_micro_batches:
            self._watch = ShapeWatch(layers)
        self.show_table(trainer, pl_module)

    def _training_layers(self) -> dict[str, BatchNorm]:
        return {name: x for name, x in self._layers.items() if is_training(x)}

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        num_layers = self._num_layers
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
        is_first, self._has_started = not self._has_started, True
        if is_first or batch_idx == 0:
            self._layers = every_layer(pl_module)
            self._policy.note_modes(pl_module)
        if is_first:
            self._start(trainer, pl_module)
        size = window_size(trainer)
        inside = batch_idx % size
        if inside == 0 or size != self._window:
            self._window = size
            left = trainer.num_training_batches - (batch_idx - inside)
            self._num_batches = int(max(min(size, left), 1))
            self._open_window()

    def on_cut(self, num_micro_batches: int) -> None:
        # As if all batches of the window were cut so: then each of them forgets its
        # own share of a step, be they cut into more parts or fewer. Ranks may differ;
        # each forgets once a step, and rank 0's statistics are what DDP keeps.
        self._num_parts = num_micro_batches
        self._open_window()

    def _open_window(self) -> None:
        num_micro_batches = self._num_micro_batches(self._num_batches)
        self._policy.open_window(num_micro_batches, self._training_layers())

    def _num_micro_batches(self, num_batches: int) -> int:
        """In so many loader batches, if all are cut as this one; a module may run its
        micro-batches in chunks by itself."""
        return round(num_batches * self._num_parts * self._chunks)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watch is not None and self._watch.values:
            watch, self._watch = self._watch, None
            watch.close()
            self._judge(trainer, watch)
        # A checkpoint of weights alone asks nobody.
        if any(saves_weights_now(c, trainer.global_step) for c in trainer.callbacks):
            if window_ends(trainer, batch_idx, window_size(trainer)):
                self._policy.before_use(trainer, pl_module)

    def _judge(self, trainer: Any, watch: ShapeWatch) -> None:
        """By what the layers have really seen: their micro-batch may be a part of what
        the loader yields, and no loader may have said how large it is."""
        how = "error" if self.policy == "error" else "warn"
        num_rows = rows_of_last_batch(trainer)
        micro_batch = micro_batch_of(trainer.train_dataloader)
        seen = min(watch.rows.values())
        self._chunks = max(watch.num_parts(micro_batch) / self._num_parts, 1)
        if self._chunks > 1:
            self._window = None  # the next batch opens a window that counts them
        if num_rows is not None and micro_batch is not None and seen == micro_batch:
            # Batch renormalisation accepts one value, which torch refuses.
            values = {
                name: value * num_sharing_ranks(self._layers[name])
                for name, value in watch.values.items()
                if not isinstance(self._layers[name], BatchRenorm)
            }
            look_at_last_batch(how, trainer, values, num_rows)
        if isinstance(self._policy, Announce):
            num_micro_batches = self._num_micro_batches(longest_window(trainer))
            self._policy.judge(
                trainer, self._training_layers(), seen, num_micro_batches
            )

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
        checkpoint[KEY] = self._policy.state_dict()

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self._policy.load_state_dict(checkpoint.get(KEY, {}))

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
