"""`trainkit train test=true`: the test of the best checkpoint that ends a training."""

from __future__ import annotations

from typing import Any

from trainkit.cli.evaluate.evaluation import evaluate, refuse_missing
from trainkit.cli.runs.checkpoint import about_checkpoint, best_checkpoint
from trainkit.cli.runs.folder import RunFolder
from trainkit.config.build import Training
from trainkit.errors import TrainkitError


class TestAtEnd:
    """Tests the best checkpoint after training, with the same Trainer and loggers.

    Args:
        training: the training.
        folder: of the run.

    Attributes:
        error: what ended the test, if it failed; the summary is written first.

    Raises:
        TrainkitError: there is nothing to test: no test_step, loader or checkpoint.
    """

    __test__ = False  # not a test of pytest

    def __init__(self, training: Training, folder: RunFolder) -> None:
        self.training, self.folder = training, folder
        self.error: BaseException | None = None
        refuse_missing("test", training.module, training.data)
        if not training.trainer.checkpoint_callbacks:
            raise TrainkitError(
                "test: needs a checkpoint, and the run writes none "
                "(trainer.enable_checkpointing=false or callbacks=none). Leave "
                "test=true out, or let the run write one."
            )
        # These can wait for the test, and would else end with the training.
        loggers = training.trainer.loggers
        self._waiting: Any = [each for each in loggers if hasattr(each, "stays_open")]
        for logger in self._waiting:
            logger.stays_open = True

    def run(self, *, is_wanted: bool) -> dict[str, Any] | None:
        """The facts of the test, or None if it failed.

        Args:
            is_wanted: whether training has come to its end.
        """
        trainer: Any = self.training.trainer
        best = best_checkpoint(self.folder) if is_wanted else None
        for logger in self._waiting:
            logger.stays_open = False  # it ends with the test
            if best is None:
                logger.finish()
        if best is None:
            if is_wanted and trainer.is_global_zero:
                print("trainkit | test: left out, no checkpoint was written")
            return None
        checkpoint = about_checkpoint(best, self.folder)
        if trainer.is_global_zero:
            shown = str(checkpoint)
            if trainer.world_size > 1:
                shown += (
                    f"; on {trainer.world_size} ranks some rows may count twice, so "
                    f"that each rank has as many; trainkit test RUN counts each once"
                )
            print(f"trainkit | test: {shown}", flush=True)
        try:
            return evaluate("test", self.training, checkpoint, self.folder)
        except (SystemExit, Exception) as error:
            self.error = error
            if isinstance(error, SystemExit) and not trainer.is_global_zero:
                self.error = SystemExit(0)  # else Lightning kills the first rank
        return None
