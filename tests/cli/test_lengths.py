"""`trainkit lengths`: the lengths of a data set's rows, in a file for the samplers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainkit.cli.main import main

PARAGRAPHS = ["experiment=masked_lm", "data.num_train=50", "data.num_val=4"]
USER = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.nn.functional import mse_loss
from trainkit import AccumulationMixin, PadCollate, ResumableLoader, WindowSampler

ROWS = [
    {"x": torch.ones(1 + n % 7), "labels": torch.ones(1 + n % 7).long()}
    for n in range(60)
]


class Net(AccumulationMixin, LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        counts = batch["labels"] != -100
        return ((self.weight * batch["x"]).square() * counts).sum() / counts.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    def __init__(self, plan=None):
        super().__init__()
        self.rows, self.plan = ROWS, plan

    def train_dataloader(self):
        pad = PadCollate({"labels": -100})
        return ResumableLoader(self.rows, batch_sampler=self.plan, collate_fn=pad)
"""


def test_file_has_the_length_of_each_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["lengths", "train", *PARAGRAPHS]) == 0
    out = capsys.readouterr().out
    found = np.load(tmp_path / "lengths.npy")
    assert f"50 rows, {found.sum():,} tokens, the longest row has {found.max()}" in out
    words = ["--out=b.npy", "--dataset=train_rows", "--field=input_ids", "--workers=1"]
    assert main(["lengths", *words, "train", *PARAGRAPHS]) == 0
    assert np.load("b.npy").tolist() == found.tolist()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["b.npy", "lengths.npy"]


def test_training_with_the_file_also_where_the_loader_needs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("planned.py").write_text(USER)
    monkeypatch.syspath_prepend(".")
    data = ["model._target_=planned.Net", "data._target_=planned.Data"]
    plan = [
        "+data.plan._target_=trainkit.WindowSampler",
        "+data.plan.lengths=lengths.npy",
        "+data.plan.window=20",
        "+data.plan.tokens=28",
    ]
    assert main(["lengths", "train", *data, *plan]) == 2
    assert "received 'lengths.npy'" in capsys.readouterr().err
    words = ["--dataset=rows", "--field=x"]
    assert main(["lengths", *words, "train", *data]) == 0
    assert np.load("lengths.npy").tolist() == [1 + n % 7 for n in range(60)]
    few = ["trainer.max_epochs=1", "accumulation=per_token", "report=false"]
    assert main(["train", *data, *plan, *few]) == 2
    assert "trainer.accumulate_grad_batches=5" in capsys.readouterr().err
    assert main(["train", *data, *plan, *few, "trainer.accumulate_grad_batches=5"]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "must be followed by train or fit"),
        (["--workers=-1", "train"], "--workers: must be a whole number from 0"),
        (["--out=no/file.npy", "train"], "--out: must be a file in a folder that"),
        (["--dataset=nothing", "train", *PARAGRAPHS], "Paragraphs.nothing is NoneType"),
        (["--field=row", "train", *PARAGRAPHS], "'row' of row 0 has none"),
        (["train", "--field=row", *PARAGRAPHS], "must stand before the word train"),
    ],
)
def test_mistakes_are_said(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lengths", *words]) == 2
    assert text in capsys.readouterr().err
