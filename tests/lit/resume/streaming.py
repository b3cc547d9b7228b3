"""Streams that are interrupted: of what they are made, and how they are trained on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tests.helpers import TokenModule, pad, trainer
from tests.lit.resume.interrupting import TRAIN, Dropping


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return len(TRAIN)

    def __getitem__(self, index: int) -> Any:
        return TRAIN[index]


class Stream(IterableDataset[Any]):
    """Says where it is, and goes on there; every worker has its share."""

    rewinds = True

    def __init__(self) -> None:
        self.row, self.goes_on = 0, False
        self.rows, self.first = len(TRAIN), 0

    def __iter__(self) -> Any:
        worker = get_worker_info()
        share = self.share()
        if worker is not None:
            share = share[worker.id :: worker.num_workers]
        self.row, self.goes_on = self.row if self.goes_on else 0, False
        while self.row < len(share):
            self.row += 1
            yield share[self.row - 1]
        if worker is None and self.rewinds:
            self.row = 0  # in a worker: its share is read, also after it is resumed

    def share(self) -> Sequence[Any]:
        return TRAIN[self.first : self.rows]

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.row, self.goes_on = state["row"], True


class Ordered(Stream):
    """In the order of an epoch. Where a state is that of its end, nothing follows in
    the pass that goes on, as of a Hugging Face stream."""

    epoch = 0
    rewinds = False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def share(self) -> Sequence[Any]:
        draw = torch.Generator().manual_seed(self.epoch)
        return [TRAIN[n] for n in torch.randperm(len(TRAIN), generator=draw)]


class Counted(Stream):
    def __len__(self) -> int:
        return self.rows


def _number(row: dict[str, Any]) -> Any:
    return TRAIN[row["number"]]


def hugging_face() -> Any:
    """A stream in two shards. (What a shuffle's buffer holds is in no state.)"""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"number": list(range(len(TRAIN)))})
    return rows.to_iterable_dataset(num_shards=2)


def collate(rows: Sequence[Any]) -> Any:
    return pad([_number(row) if isinstance(row, dict) else row for row in rows])


KINDS: dict[str, Any] = {
    "map": Rows,
    "stream": Stream,
    "counted": Counted,
    "ordered": Ordered,
    "hugging face": hugging_face,
}


def litdata(folder: Path, **options: Any) -> Any:
    """litData's loader of rows that it has written to a folder."""
    streaming = pytest.importorskip("litdata.streaming")
    if not folder.exists():
        writer = streaming.writer.BinaryWriter(str(folder), chunk_size=5)
        for number in range(len(TRAIN)):
            writer[number] = {"number": number}
        writer.done()
        writer.merge()
    rows = streaming.StreamingDataset(str(folder), shuffle=True)
    options |= {"collate_fn": collate, "generator": torch.Generator()}
    return streaming.StreamingDataLoader(rows, batch_size=4, **options)


def grain(folder: Path, **options: Any) -> Any:
    """Batches of Grain, in the class that the page of `trainkit.data` shows."""
    from tests.test_readme import DATA, block_with, run

    library = pytest.importorskip("grain")
    rows = library.MapDataset.source(range(len(TRAIN))).shuffle(seed=5)
    batches = rows.batch(4, batch_fn=lambda numbers: pad([TRAIN[n] for n in numbers]))
    return run(block_with(DATA, "get_state"))["Grain"](batches.to_iter_dataset())


class Plain(DataLoader[Any]):
    """torch's loader, whose state is that of its stream."""

    def __init__(self, kind: str) -> None:
        stream = KINDS[kind]()
        super().__init__(stream, 4, collate_fn=collate)
        self.state_dict = stream.state_dict
        self.load_state_dict = stream.load_state_dict


def stateful(kind: str, **options: Any) -> Any:
    """torchdata's loader, which saves the states of its workers too."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        torch.manual_seed(5)  # of the order of the rows
        options |= {"shuffle": kind == "map", "collate_fn": collate}
        return torchdata.StatefulDataLoader(KINDS[kind](), 4, **options)


def rows_in(batch: Any) -> Any:
    """Of one loader, or of each that has not ended."""
    if "ids" in batch:
        return batch["ids"].tolist()
    return {key: each and rows_in(each) for key, each in batch.items()}


class NotesRows(pl.LightningModule):
    """Notes the rows that it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.read: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read.append(rows_in(batch))


class Reading(NotesRows, Dropping):
    """Has dropout and a schedule."""


class Read(NotesRows, TokenModule):
    """Can be validated; only the loaders count."""

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def asking(self: Any) -> Any:
    """In `configure_optimizers`, for the number of steps."""
    assert self.trainer.estimated_stepping_batches > 0
    return TokenModule.configure_optimizers(self)


def rows_of(
    loaders: Sequence[Any],
    *callbacks: Any,
    kind: type[NotesRows] = Read,
    path: Path | None = None,
    **options: Any,
) -> list[Any]:
    """The rows that a training reads, from the start or from a checkpoint."""
    module = kind()
    each = trainer(callbacks=[*callbacks], enable_checkpointing=True, **options)
    each.fit(module, *loaders, ckpt_path=path, weights_only=True)
    return module.read
