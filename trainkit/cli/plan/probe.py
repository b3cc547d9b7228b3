"""`trainkit plan --probe`: the best micro-batch for a training on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, open_dict

from trainkit.cli.composition import Composition
from trainkit.cli.door import spoken
from trainkit.cli.runs.ranks import ranks_of_one_run
from trainkit.cli.words import find_modules_here, options_first
from trainkit.config.build import build
from trainkit.errors import TrainkitError
from trainkit.lit.probe.find import FoundMicroBatch, find_micro_batch
from trainkit.lit.quiet import without_advice


def probe(
    words: Sequence[str], *, target: int, max_micro_batch: int | None
) -> FoundMicroBatch | None:
    """Build what `trainkit train` would train, and measure micro-batches of many sizes.

    The training leaves no files.

    Args:
        words: the words after `trainkit train`.
        target: samples of one optimizer step.
        max_micro_batch: the largest size to try.

    Returns:
        What was found, on the first rank; None on the others.

    Raises:
        TrainkitError: the configuration is wrong, or no size can be found.
    """
    find_modules_here()
    config = Composition(options_first(words)).config
    _refuse_without_key(config)
    folders = tempfile.TemporaryDirectory(prefix="trainkit-plan-")
    with without_advice(), spoken("train"), folders as folder:
        with open_dict(config):
            config.paths.run_dir = folder
        training = build(config)
        trainer: Any = training.trainer
        with ranks_of_one_run(trainer):
            found = find_micro_batch(
                trainer,
                training.module,
                training.data,
                target=target,
                max_micro_batch=max_micro_batch,
                verbose=False,
            )
    return found if trainer.is_global_zero else None


def _refuse_without_key(config: DictConfig) -> None:
    """Refuse a configuration that cannot take the size as an override."""
    if not config.data or "batch_size" not in config.data:
        keys = map(str, config.data or ())
        names = ", ".join(key for key in keys if not key.startswith("_")) or "none"
        raise TrainkitError(
            f"trainkit plan --probe: needs data.batch_size, the size of the training "
            f"loader's batches, and the configuration's data has {names}. Give the "
            f"data module an argument batch_size, and name it in its configuration."
        )
