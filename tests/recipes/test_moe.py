"""A mixture of experts: balanced over a big batch, by a net that sees a part of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes.apart import off_by, weights_at_end, weights_at_start
from recipes.moe import Blocks, MixtureLM
from recipes.moe.moe import Experts, Net, balance_loss, loads
from tests.helpers import NAIVE
from tests.recipes.debugging import metrics_of, small
from tests.recipes.exact import alone, window_is_off_by
from trainkit import PerSample

DEBUG = [
    *small("moe"),
    "trainer.precision=64-true",
    "trainer.max_steps=2",
    "model.balance=1",
]
EXACT = 1e-10
"""Of the distance travelled, in float64."""


def test_the_inner_cut_is_the_big_batch(run_train: Callable[..., Path]) -> None:
    whole = run_train(*DEBUG, "micro_batching.size=16", name="whole")
    inside = run_train(*DEBUG, "trainer.val_check_interval=2", name="inside")
    start, end = weights_at_start(whole), weights_at_end(whole)
    assert not start.equal(end)
    assert off_by(weights_at_end(inside), end, start) < EXACT
    metrics = metrics_of(inside)
    assert metrics["val/least_loaded"] <= 1 <= metrics["val/most_loaded"]
    assert 1 / 4 <= metrics["val/in_a_row"] <= 1


@pytest.mark.parametrize("balance", [0.0, 1.0])
def test_accumulation_is_the_big_batch_without_the_balance_loss_only(
    balance: float,
) -> None:
    """All rows are equally long, so that nothing else stands in the way."""
    data = Blocks(num_train=16, num_val=1)
    data.setup("fit")
    torch.manual_seed(0)
    module = alone(MixtureLM(width=8, num_heads=2, num_experts=4, balance=balance))
    rows = [row[:17] for row in data.train_rows]
    off = window_is_off_by(module, PerSample(), rows, torch.stack, cuts=[5, 4, 4, 3])
    assert off > NAIVE if balance else off < EXACT


def test_the_balance_of_parts_is_not_that_of_the_whole() -> None:
    """Two rows, each with an expert of its own: even together, and not alone."""
    chances = torch.eye(2).view(2, 1, 1, 2)
    assert loads(chances).tolist() == [[1, 1]]
    assert float(balance_loss(chances)) == 1
    assert [float(balance_loss(row[None])) for row in chances] == [2, 2]


def test_each_position_gets_the_output_of_its_expert() -> None:
    torch.manual_seed(0)
    layer = Experts(4, 3)
    hidden = torch.randn(2, 5, 4)
    out, chances = layer(hidden)
    for row in range(2):
        for place in range(5):
            number = int(chances[row, place].argmax())
            expected = layer.experts[number](hidden[row, place])
            torch.testing.assert_close(
                out[row, place], expected * chances[row, place, number]
            )
    assert len(chances.argmax(-1).unique()) > 1


def test_a_byte_is_predicted_from_those_before_it() -> None:
    torch.manual_seed(0)
    sizes = {"width": 8, "num_layers": 2, "num_heads": 2, "num_experts": 2}
    net = Net(length=6, **sizes)
    rows = torch.randint(0, 256, (2, 7))
    later = rows.clone()
    later[:, 4:] = (rows[:, 4:] + 1) % 256
    found, other = net(rows)[0], net(later)[0]
    torch.testing.assert_close(found[:, :3], other[:, :3])
    assert not torch.isclose(found[:, 3:], other[:, 3:]).any()


def test_training_and_validation_share_no_block() -> None:
    data = Blocks(num_train=100, num_val=10)
    data.setup("fit")
    assert (len(data.train_rows), len(data.val_rows)) == (100, 10)
    train, val = (
        {tuple(row) for row in rows.tolist()}
        for rows in (data.train_rows, data.val_rows)
    )
    assert len(train) > 90
    assert not train & val
