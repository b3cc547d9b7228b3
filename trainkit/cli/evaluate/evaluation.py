"""Runs a validation, a test or a prediction, also as the end of a training."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainkit.cli.errors import Interrupted, TrainingFailed, is_mistake
from trainkit.cli.evaluate.predictions import Predictions
from trainkit.cli.runs.checkpoint import (
    best_checkpoint,
    does_not_fit,
    step_of,
    was_restoring,
)
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary import number
from trainkit.config.build import Training
from trainkit.config.redact import redact
from trainkit.errors import TRACEBACK, TrainkitError
from trainkit.lit.front.exact_resume import find_stop

STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
LOADERS = {verb: f"{verb.removesuffix('idate')}_dataloader" for verb in STEPS}


def evaluate(
    verb: str,
    training: Training,
    checkpoint: Path,
    folder: RunFolder,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluate, write the result, and return its facts.

    Args:
        verb: `validate`, `test` or `predict`.
        training: the Trainer, the module without the weights, and the data.
        checkpoint: the weights.
        folder: of the run.
        words: the overrides of the command line.

    Raises:
        TrainkitError: a mistake in what was asked.
        TrainingFailed: another error.
        Interrupted: a signal has stopped it.
    """
    trainer: Any = training.trainer
    name, step = str(checkpoint.relative_to(folder.path)), step_of(checkpoint)
    _say(verb, name, step, trainer)
    refuse_missing(verb, training.module, training.data)
    writer = Predictions(folder.path) if verb == "predict" else None
    if writer is not None:
        _refuse_several_ranks(trainer)
        trainer.callbacks.append(writer)
    own = {"return_predictions": False} if writer else {"verbose": False}
    source = {"datamodule": training.data, "ckpt_path": str(checkpoint)}
    try:
        getattr(trainer, verb)(training.module, **source, **own)
    except SystemExit as end:
        stopped = find_stop(trainer).stopped_by
        if stopped is None:
            raise
        print(f"trainkit | stopped by {stopped.name}; no {verb}.json", flush=True)
        raise Interrupted(stopped) from end
    except Exception as error:
        _explain(error, verb, training.module)
        if is_mistake(error):
            raise
        if was_restoring(error):
            raise does_not_fit("checkpoint", checkpoint, error) from error
        raise TrainingFailed.by(error) from error
    finally:
        if writer is not None:
            writer.close()
    _refuse_no_batch(verb, trainer)
    facts = {
        "checkpoint": name,
        "step": step,
        "metrics": {
            metric: number(value)
            for metric, value in trainer.callback_metrics.items()
            if not isinstance(value, torch.Tensor) or value.numel() == 1
        },
        "overrides": redact(list(words)),
    }
    if writer is not None:
        facts["rows"] = writer.num_rows
        facts["file"] = writer.path and writer.path.name
    if trainer.is_global_zero:
        folder.write_json(f"{verb}.json", facts)
    return facts


class TestAtEnd:
    """Tests the best checkpoint after training, with the same Trainer and loggers.

    Args:
        training: the training.
        folder: of the run.

    Raises:
        TrainkitError: there is nothing to test: no test_step, loader or checkpoint.
    """

    __test__ = False  # not a test of pytest

    def __init__(self, training: Training, folder: RunFolder) -> None:
        self.training, self.folder = training, folder
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
        """The facts of the test, or None if there was none.

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
        try:
            return evaluate("test", self.training, best, self.folder)
        except SystemExit as end:
            if trainer.is_global_zero:
                raise
            raise SystemExit(0) from end  # else Lightning kills the first rank


def _say(verb: str, name: str, step: int | None, trainer: Any) -> None:
    """Say which checkpoint is evaluated, and what several ranks do to its rows."""
    if not trainer.is_global_zero:
        return
    text = name if step is None else f"{name} of step {step:,}"
    if trainer.world_size > 1:
        text += (
            f"; on {trainer.world_size} ranks some rows may count twice, so that each "
            f"rank has as many; on one device each counts once"
        )
    print(f"trainkit | {verb}: {text}", flush=True)


def refuse_missing(verb: str, module: LightningModule, data: Any) -> None:
    """Refuse a module without the verb's step, and data without its loader."""
    name, step, loader = type(module).__name__, STEPS[verb], LOADERS[verb]
    can_forward = verb == "predict" and is_overridden("forward", module)
    if not can_forward and not is_overridden(step, module):
        other = {"test": " trainkit validate runs validation_step."}.get(verb, "")
        raise TrainkitError(
            f"model: must have {step} to {verb}, and {name} has none. Write "
            f"{step}(self, batch, batch_idx).{other}"
        )
    if data is not None and not isinstance(data, LightningDataModule):
        raise TrainkitError(
            f"data: must be a LightningDataModule with {loader} to {verb}, received "
            f"{type(data).__name__}, which holds the rows to train on."
        )
    owner = module if data is None else data
    if not is_overridden(loader, owner):
        raise TrainkitError(
            f"data: {type(owner).__name__} has no {loader}. Write {loader}(self), or "
            f"choose other data: data._target_=my_module.MyData."
        )


def _refuse_no_batch(verb: str, trainer: Any) -> None:
    kind = verb.removesuffix("idate")
    if not sum(getattr(trainer, f"num_{kind}_batches")):
        raise TrainkitError(
            f"{LOADERS[verb]}: must give at least one batch to {verb}, and gave none. "
            f"Look at the rows of the data, and at trainer.limit_{kind}_batches."
        )


def _refuse_several_ranks(trainer: Any) -> None:
    if trainer.world_size > 1:
        raise TrainkitError(
            f"trainer.devices: must be 1 to predict, so that each row is written once "
            f"and in the order of the data, received {trainer.world_size} ranks. Leave "
            f"trainer.devices, trainer.num_nodes and trainer.strategy out."
        )


def _explain(error: Exception, verb: str, module: LightningModule) -> None:
    """Raise what a user can do about an error of a module without `predict_step`."""
    frames = [f.f_code.co_name for f, _ in traceback.walk_tb(error.__traceback__)]
    if "predict_step" in frames and not is_overridden("predict_step", module):
        raise TrainkitError(
            f"model: must have predict_step to predict on these data, and "
            f"{type(module).__name__} has none. Lightning then calls forward with the "
            f"whole batch of {LOADERS[verb]}, which failed: {type(error).__name__}: "
            f"{error}\nWrite predict_step(self, batch, batch_idx), for example: "
            f"inputs, _ = batch; return self(inputs). {TRACEBACK}=1 in the environment "
            f"shows where."
        ) from error
