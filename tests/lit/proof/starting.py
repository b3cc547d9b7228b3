"""Trainings that begin with a proof, for its tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import quiet_lightning, trainer
from tests.zoo import causes, wrongs
from tests.zoo.modules import Stream
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    MicroBatching,
    PerClassWeight,
)

SPLIT = MicroBatching(size=6)
CLASSES = PerClassWeight(weight=[float(n) for n in range(1, causes.VOCABULARY + 1)])
INSIDE = MicroBatching(inside="net", size=4)
ALARM = "not the big batch"
IMAGES = partial(causes.Images, causes.classified)
BATCH_NORM = partial(causes.Images, causes.classified, nn.BatchNorm2d)


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


def tokens(size: int = 16, collate: Any = causes.padded, rows: Any = None) -> Any:
    data: Any = rows or causes.sequences()
    return DataLoader(data, batch_size=size, collate_fn=collate)


def images(size: int = 16) -> Any:
    return DataLoader(causes.image_loader().dataset, batch_size=size)


def images_by_class() -> Any:
    rows = sorted(causes.image_loader().dataset, key=lambda row: int(row[1]))  # type: ignore[call-overload]
    return DataLoader(rows, batch_size=10)  # type: ignore[arg-type]


def padded_to_14(rows: list[Any]) -> Any:
    """To one width, on the left."""
    batch = causes.padded(rows, left=True)
    more = 14 - batch["ids"].shape[1]
    return {
        name: F.pad(value, (more, 0), value=-100 if name == "labels" else 0)
        for name, value in batch.items()
    }


def fit(
    module: Any,
    data: Any,
    accumulation: Any = None,
    cut: MicroBatching | None = None,
    *,
    accumulate: int = 2,
    callbacks: tuple[Any, ...] = (),
    proof: Any = "warn",
    **options: Any,
) -> Any:
    """Train one epoch, and return the callback."""
    own: Any = []
    if not isinstance(module, AccumulationMixin):
        own = [AccumulationCallback(accumulation, micro_batching=cut, proof=proof)]
    options = {"max_epochs": 1, "limit_train_batches": 4} | options
    accumulate = accumulate if cut is None else 1
    pl = trainer(accumulate, callbacks=[*own, *callbacks], **options)
    pl.fit(module, data)
    return own[0] if own else None


def said(capsys: Any) -> str:
    found = re.findall(r"^trainkit \| proof: (.*)$", capsys.readouterr().out, re.M)
    return "; ".join(found)


def stream(rows: Iterable[Any], size: int = 4) -> Any:
    data = Stream(rows)
    return DataLoader(data, batch_size=size, collate_fn=causes.padded)


def packed() -> list[Any]:
    """Rows of one length."""
    return wrongs.all_labels()[:6] * 4
