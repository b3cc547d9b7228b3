"""Trainings that begin with a proof, for its tests."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.helpers import trainer
from tests.lit.proof import zoo
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    PerClassWeight,
)

SPLIT = MicroBatching(size=6)
UNTRIMMED = MicroBatching(size=6, trim=False)
CLASSES = PerClassWeight(weight=[float(n) for n in range(1, zoo.VOCABULARY + 1)])
ALARM = "not the big batch"


def tokens(size: int = 16) -> DataLoader[Any]:
    rows = zoo.sequences()
    return DataLoader(rows, batch_size=size, collate_fn=zoo.padded)  # type: ignore[arg-type]


def images(size: int = 16) -> DataLoader[Any]:
    return DataLoader(zoo.image_loader().dataset, batch_size=size)


def fit(
    module: Any,
    data: Any,
    accumulation: Any,
    split: MicroBatching | None = None,
    *,
    accumulate: int | None = None,
    callbacks: tuple[Any, ...] = (),
    proof: Any = "warn",
    **options: Any,
) -> Any:
    """Train one epoch, and return the callback."""
    callback = AccumulationCallback(accumulation, micro_batching=split, proof=proof)
    every = accumulate or (4 if split is None else 1)
    options = {"max_epochs": 1, "limit_train_batches": 4} | options
    pl = trainer(every, callbacks=[callback, *callbacks], **options)
    pl.fit(module, data)
    return callback


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = re.findall(r"^trainkit \| proof: (.*)$", capsys.readouterr().out, re.M)
    return "; ".join(found)
