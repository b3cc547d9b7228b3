"""`metrics.csv` as a logger, and the callback by which it continues after a resume."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import Logger

from trainkit.core.plan.options import check_kind
from trainkit.lit._compat import logged_at_batch_end, pending_metrics
from trainkit.lit.logs.metric_file import MetricFile, Row
from trainkit.lit.logs.rows import row_step

KEY = "trainkit_rows"
"""The entry in a checkpoint."""


class MetricsCSVLogger(MetricFile, Logger):
    """Writes `metrics.csv`: a row for each step, with a column for each metric.

    What is logged later for the same step joins its row; a second value of one metric
    begins another row. A killed process loses no row, and numbers keep all their
    digits.

    With `ExactResume` among the Trainer's callbacks a resumed run continues after the
    last row that its checkpoint knows: no row is written twice, and none is lost.

    Args:
        save_dir: the folder of the file.
        filename: the name of the file.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str], *, filename: str = "metrics.csv"
    ) -> None:
        check_kind(
            "MetricsCSVLogger save_dir", save_dir, (str, os.PathLike), "a folder"
        )
        Logger.__init__(self)
        MetricFile.__init__(self, Path(save_dir, filename))

    @property
    def name(self) -> str:
        """Empty, since the file lies in `save_dir` itself."""
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @property
    def log_dir(self) -> str:
        return self.save_dir

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Write nothing: hyperparameters are not metrics."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if metrics:
            self.append(row_of(metrics, step))


def row_of(metrics: Mapping[str, Any], step: int | None) -> Row:
    """The cells that the file gets for a call of `log_metrics`.

    >>> row_of({"loss": 0.1, "epoch": 0, "note": None}, 3)
    {'step': '3', 'epoch': '0', 'loss': '0.1'}
    """
    scalars = convert_tensors_to_scalars(dict(metrics))
    cells = {"step": step, "epoch": scalars.pop("epoch", None), **scalars}
    return {name: str(cell) for name, cell in cells.items() if cell is not None}


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

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        for logger in _loggers(trainer):
            logger.make_folder()
            is_new = trainer.ckpt_path is None and not logger.has_written
            if is_new and logger.num_rows:
                renamed = logger.set_aside()
                warnings.warn(
                    f"MetricsCSVLogger: {logger.path} held the rows of another "
                    f"training, which are now in {renamed.name}. To continue that "
                    f"training, resume from its checkpoint.",
                    stacklevel=2,
                )

    def on_train_batch_start(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self._logged = logged_at_batch_end(trainer)

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        pending = pending_metrics(trainer)  # on every rank, since it may communicate
        loggers = _loggers(trainer)
        if pending is not None:
            metrics, step = pending
            for name, count in logged_at_batch_end(trainer).items():
                if count == self._logged.get(name):  # from the previous batch
                    metrics.pop(name, None)
            for logger in loggers:
                logger.append(row_of(metrics, row_step(trainer, step)))
        checkpoint[KEY] = [logger.num_rows for logger in loggers]

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit":
            numbers = checkpoint.get(KEY, [])
            for logger, number in zip(_loggers(trainer), numbers, strict=False):
                _cut(logger, number)


def _loggers(trainer: Any) -> list[MetricsCSVLogger]:
    """The loggers that write a file; the first rank writes."""
    found = trainer.loggers if trainer.is_global_zero else []
    return [each for each in found if isinstance(each, MetricsCSVLogger)]


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
