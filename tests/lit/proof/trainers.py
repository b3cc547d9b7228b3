"""Trainers to check with, which write nothing."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from tests.helpers import quiet_lightning


def plain_trainer(callbacks: Any = (), **options: Any) -> Trainer:
    with quiet_lightning():
        return Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            callbacks=list(callbacks),
            **options,
        )
