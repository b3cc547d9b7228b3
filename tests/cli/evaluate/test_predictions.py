"""`trainkit predict` writes each row once, in the order of the data."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from tests.cli.evaluate.runs import result, trainkit
from tests.cli.ones_own import Net, loader
from trainkit.cli.evaluate.predictions import Predictions, rows_of
from trainkit.errors import TrainkitError


def test_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainkit("predict", run) == 0
    module = Net()
    module.load_state_dict(torch.load(run / "checkpoints" / "best.ckpt")["state_dict"])
    with (run / "predictions.csv").open() as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    inputs, wanted = zip(*loader(3, 10).dataset, strict=True)
    assert [row["wanted"] for row in rows] == torch.stack(wanted).tolist()
    with torch.no_grad():
        found = module(torch.stack(inputs))
    torch.testing.assert_close(torch.tensor([row["found"] for row in rows]), found)
    about = result(run, "predict")
    assert (about["rows"], about["file"]) == (10, "predictions.csv")
    assert about["checkpoint"] == "checkpoints/best.ckpt"
    assert "predictions: 10 rows" in capsys.readouterr().out


class Echo(LightningModule):
    """Predicts what its function makes of the batch's numbers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.function(batch[0])


def numbers(count: int, **options: Any) -> Any:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=4, **options)


def predicted(folder: Path, function: Any, *loaders: Any) -> Predictions:
    writer = Predictions(folder)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[writer],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.predict(Echo(function), [*loaders], return_predictions=False)
    finally:
        writer.close()
    return writer


def test_lists_are_rows_of_json_and_loaders_have_a_column(tmp_path: Path) -> None:
    (tmp_path / "predictions.csv").touch()  # of an earlier prediction
    loaders = numbers(6, num_workers=2), numbers(1)
    writer = predicted(tmp_path, lambda x: {"n": x, "two": x[:, None] * 2}, *loaders)
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    wanted = [{"dataloader": 0, "n": n, "two": [2 * n]} for n in range(6)]
    wanted.append({"dataloader": 1, "n": 0, "two": [0]})
    assert [json.loads(line) for line in lines] == wanted
    assert writer.num_rows == 7
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.jsonl"]


def test_a_batch_is_written_before_the_next_one_is_predicted(tmp_path: Path) -> None:
    sizes = []

    def step(batch: Any) -> Any:
        (file,) = [*tmp_path.glob(".predictions.*")] or [None]
        sizes.append(file.stat().st_size if file else 0)
        return batch[:, None].expand(-1, 5000)  # more than a buffer of a file

    predicted(tmp_path, step, numbers(12))
    assert sizes[0] == 0 < sizes[1] < sizes[2]


def test_a_prediction_that_fails_leaves_the_earlier_one(tmp_path: Path) -> None:
    def other_columns(batch: Any) -> Any:
        return {"n" if 0 in batch else "m": batch}

    predicted(tmp_path, lambda batch: batch, numbers(5))
    before = (tmp_path / "predictions.csv").read_text()
    with pytest.raises(TrainkitError, match="must have the columns of the first"):
        predicted(tmp_path, other_columns, numbers(5))
    assert (tmp_path / "predictions.csv").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.csv"]
    with pytest.warns(UserWarning, match="predict returned None"):
        assert predicted(tmp_path, lambda batch: None, numbers(5)).path is None


def test_complex_numbers_are_texts_in_both_formats(tmp_path: Path) -> None:
    """The control is the CSV, whose values are texts anyway."""

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x.float(), x.float())

    writer = predicted(tmp_path, step, numbers(3))
    assert writer.path is not None
    assert writer.path.read_text().split() == ["prediction", "0j", "(1+1j)", "(2+2j)"]
    writer = predicted(tmp_path, lambda x: step(x)[:, None], numbers(3))
    assert writer.path is not None
    assert writer.path.read_text().splitlines()[1] == '{"prediction": ["(1+1j)"]}'


TWO = torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("prediction", "rows"),
    [
        (TWO, [{"prediction": 1}, {"prediction": 2}]),
        (np.array([1.5, 2.5]), [{"prediction": 1.5}, {"prediction": 2.5}]),
        (["one", "two"], [{"prediction": "one"}, {"prediction": "two"}]),
        ([TWO, TWO[:1]], [{"prediction": [1, 2]}, {"prediction": [1]}]),
        ({"a": TWO, "b": torch.tensor(7)}, [{"a": 1, "b": 7}, {"a": 2, "b": 7}]),
        ({"a": torch.eye(2, dtype=torch.bfloat16)}, [{"a": [1, 0]}, {"a": [0, 1]}]),
    ],
)  # fmt: skip
def test_of_what_predict_step_may_return(prediction: Any, rows: Any) -> None:
    assert rows_of(prediction) == rows
    assert rows_of(prediction, 2) == rows
    with pytest.raises(TrainkitError, match=r"columns of \[2\] rows, for a batch of 3"):
        rows_of(prediction, 3)


@pytest.mark.parametrize(
    ("prediction", "text"),
    [
        ({"a": TWO, "b": [1, 2, 3]}, r"columns of \[2, 3\] rows"),
        (torch.tensor(1.0), r"columns of \[1\] rows, for a batch of 2"),
        ([object()], "an object of object"),
        ({"a": {1, 2}}, "an object of set"),
        ((TWO, TWO), "an object of tuple"),
    ],
)
def test_what_has_no_rows_is_refused(prediction: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        rows_of(prediction, 2)
