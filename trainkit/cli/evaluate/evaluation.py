"""Runs a validation, a test or a prediction of a run, or as the end of a training."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Checkpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import open_dict

from trainkit.cli.composition import composed
from trainkit.cli.errors import Interrupted, TrainingFailed, is_mistake
from trainkit.cli.evaluate.predictions import Predictions
from trainkit.cli.runs.checkpoint import (
    best_checkpoint,
    does_not_fit,
    step_of,
    was_restoring,
)
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.resume import words_of_run
from trainkit.cli.runs.summary import number
from trainkit.cli.words import key_of, options_first
from trainkit.config.build import Training, build
from trainkit.config.redact import redact
from trainkit.errors import TrainkitError
from trainkit.lit.front.exact_resume import ExactResume, find_stop

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


def refuse_no_test(training: Training) -> None:
    """Refuse a test after a training that has no test_step, loader or checkpoint."""
    refuse_missing("test", training.module, training.data)
    if not training.trainer.checkpoint_callbacks:
        raise TrainkitError(
            "test: needs a checkpoint, and the run writes none "
            "(trainer.enable_checkpointing=false or callbacks=none). Leave test=true "
            "out, or let the run write one."
        )


def test_best(training: Training, folder: RunFolder) -> dict[str, Any] | None:
    """Test the best checkpoint of a training that has come to its end.

    It has the same Trainer and loggers, of which W&B's opens its run again.

    Returns:
        The facts of the test; None if there is no checkpoint.
    """
    is_first, best = training.trainer.is_global_zero, best_checkpoint(folder)
    if best is None:
        if is_first:
            print("trainkit | test: left out, no checkpoint was written")
        return None
    try:
        return evaluate("test", training, best, folder)
    except SystemExit as end:
        if is_first:
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
    if not is_overridden(step, module):
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


# ---- a run's Trainer, module and data, made again ------------------------------------


_ONE_DEVICE = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
"""What makes an evaluation exact: of several ranks the last may get padded rows."""


def configured(verb: str, folder: RunFolder, words: Sequence[str]) -> Training:
    """Make what the run has trained with; the Trainer writes nothing.

    Args:
        verb: of the command.
        folder: of the run.
        words: what the command line changes.

    Raises:
        TrainkitError: a wrong word, or what the configuration names is not there.
    """
    given = options_first(words)
    for word in given:
        is_other = "=" not in word and not word.startswith("~")
        if is_other or key_of(word) == "ckpt_path":
            raise TrainkitError(
                f"trainkit {verb}: after the run stand overrides of trainkit train, "
                f"key=value without dashes, received {word!r}. The checkpoint is the "
                f"first word: trainkit {verb} RUN/checkpoints/last.ckpt"
            )
    own = words_of_run(folder, given, but="logger")
    config = composed(own, folder.path)
    with open_dict(config):
        config.logger = config.ckpt_path = None
        _adapt(verb, config.trainer, {key_of(word) for word in given})
    training = build(config)
    trainer: Any = training.trainer
    trainer.loggers = [_NoLogger(folder)]
    unused = (Checkpoint, ProgressBar)
    kept = [each for each in trainer.callbacks if not isinstance(each, unused)]
    has_bar = trainer.progress_bar_callback is not None and sys.stdout.isatty()
    bar = [TQDMProgressBar()] if has_bar else []
    trainer.callbacks = [*kept, *bar, ExactResume()]
    return training


def _adapt(verb: str, trainer: Any, given: Collection[str]) -> None:
    """Change the configuration of a Trainer, but for what the words say.

    It gets one device, and no profiler, which would write to the run's folder.
    """
    if "trainer.profiler" not in given:
        trainer.profiler = None
    if any(f"trainer.{name}" in given for name in _ONE_DEVICE):
        return
    had = [
        f"trainer.{name}={trainer[name]}"
        for name in ("devices", "num_nodes")
        if trainer.get(name, 1) not in (1, "1", "auto", [0])
    ]
    if had:
        print(
            f"trainkit | {verb}: on one device, which gives each row once; the run had "
            f"{' and '.join(had)}",
            flush=True,
        )
    trainer.update(_ONE_DEVICE)


class _NoLogger(DummyLogger):
    """Logs nothing; a module may still ask it for the folder of the run."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder

    @property
    def save_dir(self) -> str:
        return str(self.folder.path)
