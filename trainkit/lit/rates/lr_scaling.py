"""Learning rates that follow the effective batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainkit.core.noise.advice import read_noise_scale
from trainkit.core.plan.effective_batch import (
    EffectiveBatch,
    Unit,
    brief,
    check_size,
    check_unit,
)
from trainkit.core.plan.options import check_whole_number, is_positive_number
from trainkit.core.plan.scaling import RuleName, WeightDecayName, check_rules
from trainkit.errors import TrainkitError
from trainkit.lit._compat import logged_step, skips_backward
from trainkit.lit.batch_size import (
    find_effective_batch,
    longest_window,
    steps_taken,
)
from trainkit.lit.callback.base import OrderedCallback, windows_of
from trainkit.lit.callback.table import Row
from trainkit.lit.rates.scaled_optimizer import (
    ScaledOptimizer,
    leave_scaled,
    release_left,
)


class LRScaling(OrderedCallback):
    """Scales learning rates, and what belongs to them, to the effective batch.

        LRScaling("linear", reference_batch=256)  # lr=0.1 is meant for 256 samples

    k is the effective batch (micro-batch x accumulation x ranks) divided by the
    reference batch. Every learning rate curve, from any scheduler, is multiplied by
    factor(k), and follows when the window changes. Checkpoints hold the rates of the
    reference batch, so that a run may resume with other scaling, or none.

    - `"linear"`: lr * k. Goyal et al. 2017, for SGD.
    - `"sqrt"`: lr * sqrt(k). For Adam and its kin.
    - `"adam-sde"`: also 1 - k (1 - beta) and eps / sqrt(k). Malladi et al. 2022.
    - `"half-life"`: beta2 ** k; the rate does not change. Marek et al. 2025.
    - `"gain"`: lr * gain for SGD, lr * sqrt(gain) for the Adam family, where gain is
      (1 + noise_scale / reference_batch) / (1 + noise_scale / effective batch): near k
      well below the noise scale, level above it. After McCandlish et al. 2018.
    - `"none"`: changes nothing, but still computes and logs k.
    - `"auto"`: linear for SGD, sqrt for the Adam family; the table names the choice.
    - a callable: takes k, returns the rate's factor.

    Args:
        rule: one of these.
        reference_batch: the batch that the configured rates are meant for, in `unit`;
            for a rate that `lr_find` has found, the batch with which it has searched.
        unit: `"samples"`, or `"tokens"`.
        micro_batch: how much a micro-batch holds on one rank, on average; where loader
            batches are cut, how much one of these does. It must be given in tokens, and
            in samples where the loader has no batch size.
        warmup_steps: the number of optimizer steps over which the rate's factor rises
            evenly from 1 (Goyal et al. 2017, section 2.2).
        weight_decay: `"linear"`, `"sqrt"` or a callable multiply it by a factor of k;
            `"time-scale"` by k / factor, so that weights decay as fast per sample (Wang
            and Aitchison 2024); `"none"` leaves it.
        noise_scale: the gradient noise scale, for `"gain"` only: a number of samples,
            or the folder of an earlier run that has measured it (`NoiseScale`).

    Attributes:
        effective_batch: how much one optimizer step sees; None before it is known.
        k: the effective batch divided by the reference batch.
        scaled: for each optimizer, what was scaled and by how much.
        noise_scale: the number, also if a folder was given; None without `"gain"`.
    """

    order = 2

    def __init__(
        self,
        rule: RuleName | Callable[[float], float] = "auto",
        *,
        reference_batch: float,
        unit: Unit = "samples",
        micro_batch: float | None = None,
        warmup_steps: int = 0,
        weight_decay: WeightDecayName | Callable[[float], float] = "none",
        noise_scale: float | str | Path | None = None,
    ) -> None:
        super().__init__()
        check_rules(rule, weight_decay)
        check_size("LRScaling reference_batch", reference_batch)
        check_unit("LRScaling", unit)
        self.noise_scale = _checked_noise_scale(rule, noise_scale, unit)
        if micro_batch is not None:
            check_size("LRScaling micro_batch", micro_batch)
        check_whole_number(
            "LRScaling warmup_steps", warmup_steps, least=0, hint="0 scales at once."
        )
        self.rule = rule
        self.reference_batch = float(reference_batch)
        self.unit: Unit = unit
        self.micro_batch = None if micro_batch is None else float(micro_batch)
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        is_read = isinstance(noise_scale, str | Path)
        self._noise_from = f" from {noise_scale}" if is_read else ""
        self._forget()

    def _forget(self) -> None:
        self.effective_batch: EffectiveBatch | None = None
        self.scaled: list[ScaledOptimizer] = []
        self._followed: tuple[int, int] | None = None  # window size, warm-up step
        self._logged_k: float | None = None

    @property
    def k(self) -> float:
        """The effective batch divided by the reference batch."""
        if self.effective_batch is None:
            raise TrainkitError(
                "LRScaling k: the effective batch is not known yet. Ask when training "
                "has begun."
            )
        return self.effective_batch.over(self.reference_batch)

    # ---- before training -------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if sum(isinstance(c, LRScaling) for c in trainer.callbacks) > 1:
            raise TrainkitError("LRScaling: there are two of them. Keep one.")
        if stage == "fit":
            self._forget()
            self.move_to_front(trainer)
            release_left()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.scaled = [
            ScaledOptimizer(
                optimizer,
                rule=self.rule,
                weight_decay=self.weight_decay,
                noise_scale=self.noise_scale,
                reference_batch=self.reference_batch,
            )
            for optimizer in trainer.optimizers
        ]
        self._follow(trainer)
        self.show_table(trainer, pl_module)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        reference = f"reference {brief(self.reference_batch)}"
        if self.unit != "samples":
            reference += f" {self.unit}"
        if self.noise_scale is not None:
            noise = f"noise scale {brief(self.noise_scale)}{self._noise_from}"
            reference = f"{noise}, {reference}"
        several = len(self.scaled) > 1
        rows = []
        if windows_of(trainer) is None:  # otherwise that callback shows this row
            rows.append(("step", str(self.effective_batch)))
        for index, scaled in enumerate(self.scaled):
            label = f"optimizer {index}" if several else "learning rate"
            rule = (
                f"auto: {scaled.rule.name}" if self.rule == "auto" else scaled.rule.name
            )
            text = f"{scaled.summary()} ({rule}, {reference})"
            if self.warmup_steps and scaled.target > 1:
                text += f", over {self.warmup_steps} steps"
            rows.append((label, text))
        return rows

    # ---- while training --------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._followed = None  # the epoch may have another loader
        self._follow(trainer)  # before others read the rates of the epoch

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._follow(trainer)

    def _follow(self, trainer: Any) -> None:
        """Scale what is there by now to the window under way."""
        for scaled in self.scaled:
            scaled.adopt(trainer.lr_scheduler_configs)
        step = steps_taken(trainer)
        now = longest_window(trainer), min(step, self.warmup_steps)
        if now == self._followed or skips_backward(trainer):
            return
        how: Any = {"unit": self.unit, "micro_batch": self.micro_batch}
        batch = find_effective_batch(trainer, **how)
        if batch is None:
            why = "the training loader has no batch size"
            if self.unit != "samples":
                why = "no loader knows it"
            raise TrainkitError(
                f"LRScaling micro_batch: must say how many {self.unit} a micro-batch "
                f"holds on one rank, since {why}, received None. Give the mean: "
                f"LRScaling(micro_batch=...)."
            )
        self._followed, self.effective_batch = now, batch
        for scaled in self.scaled:
            scaled.follow(self.k, step=step, warmup_steps=self.warmup_steps)
        if self._logged_k != self.k:
            self._log(trainer)

    def _log(self, trainer: Any) -> None:
        """Log the effective batch, k, and each value before and after scaling.

        They are logged as hyperparameters once, since some loggers refuse a second
        value. A later k is logged as a metric.
        """
        assert self.effective_batch is not None
        is_first, self._logged_k = self._logged_k is None, self.k
        known = {"k": self.k, "effective_batch": self.effective_batch.size}
        if not is_first:
            changed = {f"lr_scaling/{name}": value for name, value in known.items()}
            for logger in trainer.loggers:
                logger.log_metrics(changed, step=logged_step(trainer))
            return
        values = {**known, "reference_batch": self.reference_batch, "unit": self.unit}
        if self.noise_scale is not None:
            values["noise_scale"] = self.noise_scale
        for index, scaled in enumerate(self.scaled):
            values[f"optimizer_{index}/rule"] = scaled.rule.name
            for name, (before, after) in scaled.values().items():
                values[f"optimizer_{index}/{name}/before"] = before
                values[f"optimizer_{index}/{name}/after"] = after
        for logger in trainer.loggers:
            logger.log_hyperparams({"lr_scaling": values})

    # ---- afterwards ------------------------------------------------------------------

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        leave_scaled(self.scaled)

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        states = checkpoint.get("optimizer_states", [])
        for scaled, state in zip(self.scaled, states, strict=False):
            scaled.unscale(state)


def _checked_noise_scale(rule: object, noise_scale: object, unit: Unit) -> float | None:
    """The noise scale of the rule `"gain"`, as a number; None for any other rule.

    Raises:
        TrainkitError: the rule and the noise scale do not go together, or the noise
            scale is neither a positive number nor the folder of a run that knows it.
    """
    if rule != "gain":
        if noise_scale is not None:
            raise TrainkitError(
                f"LRScaling noise_scale: belongs to rule='gain', received "
                f"{noise_scale!r} for rule={rule!r}. Write rule='gain', or leave it "
                f"out (null in a configuration)."
            )
        return None
    if unit != "samples":
        raise TrainkitError(
            f"LRScaling unit: must be 'samples' for rule='gain', received {unit!r}. "
            f"The tokens of a sample are alike, so that noise does not fall as one "
            f"over their number. Give reference_batch in samples."
        )
    if isinstance(noise_scale, str | Path):
        return read_noise_scale(Path(noise_scale).expanduser()).samples
    if not is_positive_number(noise_scale):
        raise TrainkitError(
            f"LRScaling noise_scale: must be a positive number of samples for "
            f"rule='gain', or the folder of a run that has measured it, received "
            f"{noise_scale!r}."
        )
    return float(noise_scale)  # type: ignore[arg-type]
