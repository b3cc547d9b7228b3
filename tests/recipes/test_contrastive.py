"""NT-Xent: the negatives of a big batch, for a net that sees a part of it at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from recipes.apart import off_by, weights_at_end, weights_at_start
from recipes.contrastive import Contrastive, Digits
from recipes.contrastive.contrastive import nt_xent
from tests.helpers import NAIVE
from tests.recipes.debugging import metrics_of, small
from tests.recipes.exact import alone, doubled, off, whole_gradient, window_gradient
from trainkit import PerSample

DEBUG = [*small("contrastive"), "trainer.precision=64-true", "trainer.max_steps=2"]
EXACT = 1e-10
"""Of the distance travelled, in float64."""


def test_the_inner_cut_is_the_big_batch(run_train: Callable[..., Path]) -> None:
    whole = run_train(*DEBUG, "micro_batching.size=32", name="whole")
    inside = run_train(*DEBUG, "trainer.val_check_interval=2", name="inside")
    start, end = weights_at_start(whole), weights_at_end(whole)
    assert not start.equal(end)
    assert off_by(weights_at_end(inside), end, start) < EXACT
    metrics = metrics_of(inside)
    assert 0 <= metrics["val/probe"] <= 1
    assert 0 < metrics["held_mb"] < 1


def rows_of(data: Digits, number: int) -> Any:
    return default_collate(data.train_rows[:number])


@pytest.fixture(scope="module")
def digits() -> Digits:
    data = Digits()
    data.setup("fit")
    return data


def test_accumulation_is_not_the_big_batch(digits: Digits) -> None:
    """Negative control."""
    module = alone(Contrastive(width=4))
    whole = doubled(digits.with_views(rows_of(digits, 32), epoch=0))
    parts = zip(*(value.split(8) for value in whole.values()), strict=True)
    batches = [dict(zip(whole, part, strict=True)) for part in parts]

    def loss_of(each: Any, batch: Any) -> Any:
        return each.loss(batch)

    reference = whole_gradient(module, loss_of, whole)
    assert (
        off(window_gradient(module, loss_of, batches, PerSample()), reference) > NAIVE
    )


def test_views_are_those_of_the_row_wherever_it_is_read(digits: Digits) -> None:
    """With views of the batch, the three trainings would see different images."""
    whole = digits.with_views(rows_of(digits, 6), epoch=1)
    part = digits.with_views(rows_of(digits, 3), epoch=1)
    for name in ("one", "other"):
        torch.testing.assert_close(whole[name][:3], part[name])
    later = digits.with_views(rows_of(digits, 3), epoch=2)
    assert not torch.equal(part["one"], later["one"])
    assert not torch.equal(part["one"], part["other"])


def test_training_and_validation_share_no_image(digits: Digits) -> None:
    train, val = (
        {tuple(row["image"].flatten().tolist()) for row in rows}
        for rows in (digits.train_rows, digits.val_rows)
    )
    assert len(digits.val_rows) == 512
    assert not train & val


def test_nt_xent_by_hand() -> None:
    """Of four views, each has one partner and two negatives."""
    one, other = torch.randn(2, 2, 3, dtype=torch.float64)
    views = torch.nn.functional.normalize(torch.cat([one, other]), dim=1)
    total = 0.0
    for i in range(4):
        near = [float(views[i] @ views[j]) / 0.5 for j in range(4)]
        partner = (i + 2) % 4
        others = torch.tensor([near[j] for j in range(4) if j != i])
        total += float(torch.logsumexp(others, 0)) - near[partner]
    assert float(nt_xent(one, other, 0.5)) == pytest.approx(total / 4)


def test_the_probe_reads_the_features(digits: Digits) -> None:
    """And finds no labels where there are none."""
    torch.manual_seed(0)
    module = Contrastive(width=4)
    known, asked = digits.train_rows, digits.val_rows
    assert module.probe(known, asked) > 0.6  # random features of so easy images
    torch.nn.init.zeros_(next(module.parameters()))
    assert module.probe(known, asked) < 0.2
