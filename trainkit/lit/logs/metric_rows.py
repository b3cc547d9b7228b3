"""Cut `metrics.csv` to the rows that a checkpoint knows, when a run resumes."""

from __future__ import annotations

import warnings
from typing import Any

from lightning.pytorch import Callback

from trainkit.lit._compat import logged_at_batch_end, pending_metrics
from trainkit.lit.logs.metrics_csv import FIRST, MetricsCSVLogger, row_of
from trainkit.lit.resume.between_steps import put_in_order


class MetricRows(Callback):
    """Cuts the file of a `MetricsCSVLogger` back to what a resumed checkpoint knows.

    A checkpoint of a batch's end is written before Lightning logs that batch, and the
    resumed run begins with the next one. So the checkpoint also holds the row that is
    still to come, and a run that is killed in between loses nothing (but what the
    module itself logs in `on_train_batch_end`, which nobody knows yet).

    Whatever else was logged after the checkpoint is cut off as well, such as the row of
    a `trainer.test()` between two trainings: give tests a logger of their own.

    A training that is not resumed, in a folder where another has written, sets that
    one's file aside as `metrics.1.csv`.
    """

    late_place = 1  # after all that log rows while a checkpoint is made

    def __init__(self) -> None:
        super().__init__()
        self._logged: dict[str, int] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        put_in_order(trainer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path is not None or not trainer.is_global_zero:
            return
        for logger in _loggers(trainer):
            if logger.num_rows and not logger.has_written:
                aside = logger.set_aside()
                warnings.warn(
                    f"MetricsCSVLogger: {logger.path} held the rows of another "
                    f"training, which are now in {aside.name}. To go on with that "
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
        pending = pending_metrics(trainer)  # may communicate: on every rank
        if not trainer.is_global_zero:
            return
        row = None
        if pending is not None:
            metrics, step = pending
            for name, count in logged_at_batch_end(trainer).items():
                if count == self._logged.get(name):  # still that of the batch before
                    metrics.pop(name, None)
            row = row_of(metrics, step)
        checkpoint[KEY] = [
            {"num_rows": each.num_rows, "pending": row} for each in _loggers(trainer)
        ]

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit" and trainer.is_global_zero:
            for logger, state in zip(
                _loggers(trainer), checkpoint.get(KEY, []), strict=False
            ):
                _cut(logger, **state)


KEY = "trainkit_rows"
"""The entry in a checkpoint."""


def _loggers(trainer: Any) -> list[MetricsCSVLogger]:
    return [each for each in trainer.loggers if isinstance(each, MetricsCSVLogger)]


def _cut(
    logger: MetricsCSVLogger, *, num_rows: int, pending: dict[str, str] | None
) -> None:
    rows = logger.rows()
    kept = rows[:num_rows]
    if len(kept) < num_rows:
        warnings.warn(
            f"MetricsCSVLogger: {logger.path} has {len(rows)} of the {num_rows} rows "
            f"that the checkpoint knows of; the others are not there. Resume in the "
            f"folder of the run.",
            stacklevel=2,
        )
    if pending is not None:
        # The row that was written has more in it, if the module logged something
        # after the checkpoint was made.
        written = rows[num_rows] if len(rows) > num_rows else {}
        is_it = written.keys() >= pending.keys() and all(
            written.get(name) == pending.get(name) for name in FIRST
        )
        kept.append(written if is_it else pending)
    logger.replace(kept)
