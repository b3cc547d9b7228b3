"""A last batch that is smaller, weighed, padded or left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.ragged_regression import Diabetes, Regression
from recipes.ragged_regression.ragged_regression import read_rows
from tests.helpers import NAIVE, TOLERANCE
from tests.recipes.debugging import run_debug
from tests.recipes.exact import doubled, off, whole_gradient, window_gradient
from trainkit import Uniform

EXACT = TOLERANCE[torch.float64]


def loss_of(module: Any, batch: Any) -> torch.Tensor:
    return module.loss(batch)


def last_window(last: str) -> tuple[list[Any], Any]:
    """An epoch's last four batches and all rows of them that were read, as one."""
    data = Diabetes(num_train=58, last=last)  # 7 batches of 8 and one of 2
    data.setup("fit")
    batches = [doubled(batch) for batch in data.train_dataloader()][4:]
    together = {
        name: torch.cat([batch[name] for batch in batches]) for name in batches[0]
    }
    return batches, {
        name: rows[together["weight"] > 0] for name, rows in together.items()
    }


@pytest.mark.parametrize(
    ("last", "sizes", "num_rows"),
    [
        ("weight", [8, 8, 8, 2], 26),
        ("pad", [8, 8, 8, 8], 26),
        ("drop", [8, 8, 8], 24),
    ],
)
def test_every_remedy_gives_the_gradient_of_the_rows_it_reads(
    last: str, sizes: list[int], num_rows: int
) -> None:
    module = Regression().double()
    batches, rows = last_window(last)
    assert [len(batch["y"]) for batch in batches] == sizes
    assert len(rows["y"]) == num_rows
    whole = whole_gradient(module, loss_of, rows)
    found = window_gradient(module, loss_of, batches, module.accumulation)
    assert off(found, whole) <= EXACT


@pytest.mark.parametrize("last", ["weight", "pad"])
def test_a_mean_of_means_does_not(last: str) -> None:
    """Negative control, keras-team/keras#20241: also where batches are of one size."""
    module = Regression().double()
    batches, rows = last_window(last)
    whole = whole_gradient(module, loss_of, rows)
    assert off(window_gradient(module, loss_of, batches, Uniform()), whole) > NAIVE


def test_the_data_are_standard_and_shared_out() -> None:
    rows = read_rows(0)
    table = torch.stack([row["x"] for row in rows])
    torch.testing.assert_close(table.std(0, correction=0), torch.ones(10))
    data = Diabetes()
    data.setup("fit")
    assert (len(data.train_rows), len(data.val_rows)) == (346, 96)
    seen = [tuple(row["x"].tolist()) for row in data.train_rows + data.val_rows]
    assert len(set(seen)) == 442
    assert not torch.equal(read_rows(1)[0]["x"], rows[0]["x"])


@pytest.mark.parametrize("last", ["weight", "pad"])
def test_debug_size_trains(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_debug("ragged_regression", tmp_path, f"data.last={last}")["val/loss"] > 0
