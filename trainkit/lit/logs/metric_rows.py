"""The callback that lets `metrics.csv` continue exactly when a run resumes."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback

from trainkit.lit._compat import logged_at_batch_end, pending_metrics
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger, row_of
from trainkit.lit.logs.rows import row_step
from trainkit.lit.resume.between_steps import put_in_order

KEY = "trainkit_rows"
"""The entry in a checkpoint."""


class MetricRows(Callback):
    """Cuts the file of a `MetricsCSVLogger` to the rows that a checkpoint knows.

    A checkpoint at a batch's end is saved before Lightning logs that batch, and the
    resumed run begins with the next batch. So the row is written before the checkpoint,
    and a run that is killed in between loses nothing. (What the module itself logs in
    `on_train_batch_end` is not known so early.)

    Rows that were logged after the checkpoint are cut off, also the row of a
    `trainer.test()` between two trainings: give tests their own logger.

    A training that does not resume, in a folder with the file of another training,
    renames that file to `metrics.1.csv`.
    """

    late_place = 1  # after all callbacks that log rows while a checkpoint is made

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        put_in_order(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.is_global_zero:
            return
        for logger in _loggers(trainer):
            logger.make_folder()
            if trainer.ckpt_path is not None:
                continue
            if logger.num_rows and not logger.has_written:
                renamed = logger.set_aside()
                warnings.warn(
                    f"MetricsCSVLogger: {logger.path} held the rows of another "
                    f"training, which are now in {renamed.name}. To continue that "
                    f"training, resume from its checkpoint.",
                    stacklevel=2,
                )

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._logged = logged_at_batch_end(trainer)

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        pending = pending_metrics(trainer)  # on every rank, since it may communicate
        if not trainer.is_global_zero:
            return
        if pending is not None:
            metrics, step = pending
            for name, count in logged_at_batch_end(trainer).items():
                if count == self._logged.get(name):  # from the previous batch
                    metrics.pop(name, None)
            for logger in _loggers(trainer):
                logger.append(row_of(metrics, row_step(trainer, step)))
        checkpoint[KEY] = [logger.num_rows for logger in _loggers(trainer)]

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            for logger, number in zip(
                _loggers(trainer), checkpoint.get(KEY, []), strict=False
            ):
                _cut(logger, number)


def _loggers(trainer: Any) -> list[MetricsCSVLogger]:
    return [each for each in trainer.loggers if isinstance(each, MetricsCSVLogger)]


def _cut(logger: MetricsCSVLogger, number: int) -> None:
    """Leave the rows of a checkpoint, with all that has joined them since."""
    rows = logger.rows()
    if len(rows) < number:
        warnings.warn(
            f"MetricsCSVLogger: {logger.path} has {len(rows)} of the {number} rows "
            f"that the checkpoint knows; the others are missing. Resume in the folder "
            f"of the run.",
            stacklevel=2,
        )
    logger.replace(rows[:number])
