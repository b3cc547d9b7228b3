"""Runs a validation, a test or a prediction, and writes what came of it."""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.model_helpers import is_overridden

from trainkit.cli._compat import loaders_by_position
from trainkit.cli.evaluate.predictions import Predictions
from trainkit.cli.runs.checkpoint import Checkpoint
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.runs.summary import show_written
from trainkit.config.redact import redact
from trainkit.errors import TRACEBACK, TrainkitError

STEPS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
LOADERS = {
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


class NoLogger(DummyLogger):
    """Logs nothing; a module may still ask it for the folder of the run."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = str(folder)

    @property
    def save_dir(self) -> str:
        return self.folder

    @property
    def log_dir(self) -> str:
        return self.folder


@dataclass(frozen=True)
class Evaluation:
    """What a command evaluates.

    Args:
        verb: `validate`, `test` or `predict`.
        trainer: a Trainer.
        module: the module, without the checkpoint's weights.
        data: a data module, or None for the module's own loaders.
        checkpoint: the weights.
        folder: of the run.
        words: the overrides of the command line.
    """

    verb: str
    trainer: Any
    module: LightningModule
    data: Any
    checkpoint: Checkpoint
    folder: RunFolder
    words: Sequence[str]

    def run(self) -> dict[str, Any]:
        """Evaluate, write the result, and return its facts."""
        refuse_missing(self.verb, self.module, self.data)
        writer = Predictions(self.folder.path) if self.verb == "predict" else None
        if writer is not None:
            _refuse_several_ranks(self.trainer)
            self.trainer.callbacks.append(writer)
        own = {"return_predictions": False} if writer else {"verbose": False}
        owner = self.module if self.data is None else self.data
        try:
            with loaders_by_position(owner, LOADERS[self.verb]):
                getattr(self.trainer, self.verb)(
                    self.module,
                    datamodule=self.data,
                    ckpt_path=str(self.checkpoint.path),
                    **own,
                )
        except Exception as error:
            _explain(error, self.verb, self.module)
            raise
        finally:
            if writer is not None:
                writer.close()
        self._refuse_no_batch()
        facts = self._facts(writer)
        if self.trainer.is_global_zero:
            self.folder.write(f"{self.verb}.json", _as_json(facts))
        return facts

    def show(self, facts: Mapping[str, Any]) -> None:
        """Print the result."""
        rows = [(name, _brief(value)) for name, value in facts["metrics"].items()]
        files = [f"{self.verb}.json"]
        if self.verb != "predict" and not rows:
            rows.append((self.verb, f"{STEPS[self.verb]} has logged nothing"))
        if "rows" in facts:
            counted = f"{facts['rows']:,} rows"
            if facts["file"] is None:
                counted = "predict_step has returned nothing, so there are no rows"
            else:
                files.append(facts["file"])
            rows.append(("predictions", counted))
        show_written(rows, self.folder.path, sorted(files))

    def _facts(self, writer: Predictions | None) -> dict[str, Any]:
        found = self.trainer.callback_metrics.items()
        facts = {
            "checkpoint": self.checkpoint.name(self.folder.path),
            "step": self.checkpoint.step,
            "metrics": {
                name: number(value)
                for name, value in found
                if not isinstance(value, torch.Tensor) or value.numel() == 1
            },
            "overrides": redact(self.words),
        }
        if writer is not None:
            facts["rows"] = writer.num_rows
            facts["file"] = writer.path and writer.path.name
        return facts

    def _refuse_no_batch(self) -> None:
        kind = "val" if self.verb == "validate" else self.verb
        if not sum(getattr(self.trainer, f"num_{kind}_batches")):
            raise TrainkitError(
                f"{LOADERS[self.verb]}: must give at least one batch to {self.verb}, "
                f"and gave none. Look at the rows of the data, and at "
                f"trainer.limit_{kind}_batches."
            )


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
        has_val = verb == "test" and is_overridden(LOADERS["validate"], owner)
        other = " trainkit validate runs on its val_dataloader." if has_val else ""
        raise TrainkitError(
            f"data: {type(owner).__name__} has no {loader}. Write {loader}(self), or "
            f"choose other data: data._target_=my_module.MyData.{other}"
        )


def does_not_fit(evaluation: Evaluation, error: BaseException) -> TrainkitError:
    """A short error in place of torch's, which may list every tensor."""
    lines = [line.strip() for line in str(error).splitlines()] or ["?"]
    more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
    return TrainkitError(
        f"checkpoint: {evaluation.checkpoint.path} does not fit the configuration: "
        f"{' '.join(lines[:2])}{more}\n"
        f"Undo what has changed since the run began: overrides, files in conf/, or the "
        f"code of {type(evaluation.module).__name__}. The run's config.yaml shows its "
        f"values."
    )


def number(value: Any) -> float | None:
    """A number for JSON; None if it is not finite."""
    plain = float(value)
    return plain if math.isfinite(plain) else None


def _refuse_several_ranks(trainer: Any) -> None:
    if trainer.world_size > 1:
        raise TrainkitError(
            f"trainer.devices: must be 1 to predict, so that each row is written once "
            f"and in the order of the data, received {trainer.world_size} ranks. Leave "
            f"trainer.devices, trainer.num_nodes and trainer.strategy out."
        )


def _explain(error: Exception, verb: str, module: LightningModule) -> None:
    """Raise what a user can do about an error, if that is known."""
    loader = LOADERS[verb]
    if "more than one `__init__` argument" in str(error):
        raise TrainkitError(
            f"{loader}: Lightning makes this loader again in order to {verb}, which "
            f"fails if batch_size is given by position. Give it by name: "
            f"DataLoader(rows, batch_size=8)."
        ) from error
    frames = [f.f_code.co_name for f, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, AttributeError) and loader in frames:
        raise TrainkitError(
            f"{loader}: it must find what it reads, and failed: {error}. To {verb}, "
            f'Lightning calls setup with the stage "{verb}" alone, without "fit". '
            f"Make it there too. {TRACEBACK}=1 in the environment shows where."
        ) from error
    if "predict_step" in frames and not is_overridden("predict_step", module):
        raise TrainkitError(
            f"model: must have predict_step to predict on these data, and "
            f"{type(module).__name__} has none. Lightning then calls forward with the "
            f"whole batch of {loader}, which failed: {type(error).__name__}: {error}\n"
            f"Write predict_step(self, batch, batch_idx), for example: inputs, _ = "
            f"batch; return self(inputs). {TRACEBACK}=1 in the environment shows where."
        ) from error


def _as_json(facts: Mapping[str, Any]) -> str:
    return json.dumps(dict(facts), indent=2, allow_nan=False) + "\n"


def _brief(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.6g}"
