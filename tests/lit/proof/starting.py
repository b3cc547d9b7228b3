"""Trainings that begin with a proof, for its tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import QUIET, quiet_lightning, trainer
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
            callbacks=list(callbacks), **{**QUIET, "max_epochs": 1, **options}
        )


def tokens(size: int = 16, collate: Any = causes.padded, rows: Any = None) -> Any:
    data: Any = rows or causes.sequences()
    return DataLoader(data, batch_size=size, collate_fn=collate)


def images(size: int = 16) -> Any:
    return DataLoader(causes.image_loader().dataset, batch_size=size)


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
