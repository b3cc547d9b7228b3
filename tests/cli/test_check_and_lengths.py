"""`trainkit check` and `trainkit lengths`, which look at a training that is not run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cli.training import SMALL
from trainkit import TrainkitError
from trainkit.cli.lengths import length_of
from trainkit.cli.main import main

TINY = [*SMALL, "data.num_train=32"]


def test_a_training_that_is_exact_ends_with_0_and_leaves_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["check", "train", *TINY]) == 0
    out = capsys.readouterr().out
    assert "verdict: exact on 24 of your rows" in out
    assert "plain accumulation: off by" in out
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_is_not_ends_with_1_and_says_why_also_in_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["train", *TINY, "accumulation=uniform"]
    (tmp_path / "proof").mkdir()
    assert main(["check", "--rows=12", "--json", "--html=proof/a.html", *words]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["exact"] is False
    assert report["num_rows"] == 12
    assert report["causes"][0]["remedy"] == ["accumulation=per_token"]
    assert f"trainkit | page: {tmp_path / 'proof' / 'a.html'}" in err
    assert [each.name for each in tmp_path.iterdir()] == ["proof"]
    page = (tmp_path / "proof" / "a.html").read_text(encoding="utf-8")
    assert "trainkit check --rows=12 --json --html=proof/a.html train" in page
    assert "<td>accumulation=per_token</td>" in page
    offs = [off for _, off in report["parameters"]]
    assert offs == sorted(offs, reverse=True)
    assert math.hypot(*offs) == pytest.approx(report["deviation"])


@pytest.mark.usefixtures("for_lightnings_cli")
def test_a_module_of_the_lightning_cli(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    own = "tests.cli.ones_own"
    words = ["check", "fit", f"--model={own}.Bare", f"--data={own}.OnlyTrain"]
    words += ["--trainer.accelerator=cpu", "--seed_everything=0"]
    assert main([*words, "--accumulation=PerSample"]) == 0
    assert "verdict: exact" in capsys.readouterr().out
    assert main(words) == 1
    assert "--accumulation=PerSample" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("*.ckpt")] == []
    assert main([*words, "--accumulation=Nope"]) == 2


def test_a_page_that_cannot_be_written_is_a_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The control has the name of every page that is given none."""
    assert main(["check", "--rows=4", "--html=no/a.html", "train", *TINY]) == 2
    out, err = capsys.readouterr()
    assert "verdict:" in out  # the measurement is not lost
    assert re.search(r"check --html: .*no/a.html cannot be written: .*--html=FILE", err)
    assert main(["check", "--rows=4", "--html", "train", *TINY]) == 0
    assert f"trainkit | page: {tmp_path / 'check.html'}" in capsys.readouterr().out
    assert [each.name for each in tmp_path.iterdir()] == ["check.html"]


# ---- `trainkit lengths`: the lengths of rows, in a file for the samplers -------------


PARAGRAPHS = "experiment=masked_lm data.num_train=50 data.num_val=4"
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
    assert main(["lengths", "train", *PARAGRAPHS.split()]) == 0
    out = capsys.readouterr().out
    found = np.load(tmp_path / "lengths.npy")
    assert f"50 rows, {found.sum():,} tokens, the longest row has {found.max()}" in out
    words = ["--out=b.npy", "--dataset=train_rows", "--field=input_ids"]
    assert main(["lengths", *words, "train", *PARAGRAPHS.split()]) == 0
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
    "row",
    [
        (torch.arange(5), 1),
        [torch.arange(5), torch.ones(())],
        {"input_ids": torch.arange(5)[None]},
    ],
)
def test_fields_of_a_row_are_not_its_tokens(row: Any) -> None:
    for tokens in ({"input_ids": torch.arange(5)}, torch.ones(5, 80), [1, 2, 3, 4, 5]):
        assert length_of(tokens, None) == 5
    assert length_of({"frames": torch.ones(5, 80)}, "frames") == 5
    with pytest.raises(TrainkitError, match="'input_ids' of a row has none"):
        length_of(row, None)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("check", "must be followed by train or fit, .* received nothing"),
        ("check experiment=digits_bn", "received 'experiment=digits_bn'"),
        ("check --rows train", "argument --rows: expected one argument"),
        ("check --rows=1 train", "--rows: must be a whole number from 2 to .* 1"),
        ("check --deep train", "unrecognized arguments: --deep. .* --help"),
        ("check train --rows 3", "check --rows: must stand before the word train"),
        ("check train model.nope=1", "nope"),
        ("lengths", "must be followed by train or fit"),
        ("lengths --out=no/file.npy train", "--out: must be a file in a folder that"),
        (
            f"lengths --dataset=nothing train {PARAGRAPHS}",
            "Paragraphs.nothing is NoneType",
        ),
        (f"lengths --field=row train {PARAGRAPHS}", "'row' of a row has none"),
        (f"lengths train --field=row {PARAGRAPHS}", "must stand before the word train"),
    ],
)
def test_a_mistake_is_one_message_and_2(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert re.search(text, capsys.readouterr().err)
