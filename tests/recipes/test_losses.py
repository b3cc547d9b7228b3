"""Recipes of losses that need care: balanced experts, two terms, and a ragged end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.moe import Blocks, MixtureLM
from recipes.moe.moe import Experts, Net, balance_loss, loads
from recipes.multi_term import Names, NameVAE
from recipes.multi_term.multi_term import NAME, collate, read_names
from recipes.ragged_regression import Diabetes, Regression
from recipes.ragged_regression.ragged_regression import read_rows
from tests.helpers import NAIVE
from tests.recipes.small import (
    EXACT,
    alone,
    doubled,
    joined,
    metrics_of,
    off,
    off_the_first,
    parts_of,
    small,
    step_of,
    whole_gradient,
    window_gradient,
    window_is_off_by,
)
from trainkit import PerSample, PerToken, Uniform

# ---- a mixture of experts, balanced over a big batch ---------------------------------


def test_the_inner_cut_of_experts_is_the_big_batch(
    run_train: Callable[..., Path],
) -> None:
    words = [*small("moe"), "trainer.precision=64-true", "trainer.max_steps=2"]
    words.append("model.balance=1")
    whole = run_train(*words, "micro_batching.size=16", name="whole")
    inside = run_train(*words, "trainer.val_check_interval=2", name="inside")
    assert off_the_first(whole, inside)[0] < EXACT
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
    found = window_is_off_by(module, PerSample(), rows, torch.stack, cuts=[5, 4, 4, 3])
    assert found > NAIVE if balance else found < EXACT


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


# ---- a sequence VAE: a mean over characters and one over names -----------------------


LONG = [b"visit_AugAssign", b"_flatten_literal_params", b"format_exception_only"]
SHORT = [b"get", b"_eof", b"run", b"a", b"seek", b"tell", b"Queue"]


@pytest.fixture
def vae() -> Any:
    torch.manual_seed(0)
    return alone(NameVAE(width=8, latent=4, beta=1.0))


def cut(names: list[bytes], *sizes: int) -> tuple[Any, list[Any]]:
    """A batch, and its rows in micro-batches with less padding."""
    rows, data = list(enumerate(names)), Names(latent=4)
    whole, *parts = (
        doubled(data.with_noise(collate(each), epoch=0))
        for each in (rows, *parts_of(rows, sizes))
    )
    return whole, parts


@pytest.mark.parametrize("sizes", [(3, 7), (1, 4, 5), (10,)])
def test_a_window_of_two_terms_equals_the_big_batch(
    sizes: tuple[int, ...], vae: NameVAE
) -> None:
    """Both terms, however the names are cut: the noise is cut with them."""

    def terms_of(module: Any, batch: Any) -> Any:
        return step_of(module, batch)["loss"]

    whole, parts = cut(LONG + SHORT, *sizes)
    found = window_gradient(vae, terms_of, parts, vae.accumulation)
    assert off(found, whole_gradient(vae, terms_of, whole)) <= EXACT


@pytest.mark.parametrize("strategy", [PerToken(), PerSample(), Uniform()], ids=repr)
def test_one_strategy_for_both_terms_differs(vae: NameVAE, strategy: Any) -> None:
    """Negative control."""
    vae.accumulation = strategy
    whole, parts = cut(LONG + SHORT, 3, 7)
    reference = whole_gradient(vae, step_of, whole)
    assert off(window_gradient(vae, step_of, parts, strategy), reference) > NAIVE


def test_padding_changes_nothing(vae: NameVAE) -> None:
    """The encoder reads its state after each name's own last character."""
    (alone, _), (padded, _) = cut(SHORT, 7), cut(SHORT + LONG, 10)
    means = [vae.encode(batch)[0][: len(SHORT)] for batch in (alone, padded)]
    torch.testing.assert_close(*means)


def test_names_are_those_of_functions_and_classes() -> None:
    source = (
        b"class A(B):\n    async def f_1(self):\n        define = 1\n  def g(): ..."
    )
    assert NAME.findall(source) == [b"A", b"f_1", b"g"]
    names = read_names()
    assert len(names) > 3000
    assert names == sorted(set(names))
    assert max(max(name) for name in names) < 128  # what the embedding knows


def test_each_label_is_the_next_character_and_the_end_is_one() -> None:
    batch = collate([(0, b"ab"), (1, b"c")])
    assert batch["ids"].tolist() == [[10, 97, 98], [10, 99, 0]]
    assert batch["labels"].tolist() == [[97, 98, 10], [99, 10, -100]]
    assert batch["row"].tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore:NameVAE. its own strategy")
@pytest.mark.parametrize(
    ("words", "is_own"), [([], True), (["accumulation=per_sample"], False)]
)
def test_the_debug_size_of_two_terms_trains(
    words: list[str], is_own: bool, run_train: Callable[..., Path]
) -> None:
    metrics = metrics_of(run_train(*small("multi_term"), *words))
    length = (metrics["val/bound"] - metrics["val/kl"]) / metrics["val/ce"]
    assert 5 < length < 20  # characters of a name, with its end
    assert ("train/kl" in metrics) is is_own


# ---- a last batch that is smaller: weighed, or left out -----------------------------


@pytest.mark.parametrize(
    ("drop_last", "sizes"), [(False, [8, 8, 8, 2]), (True, [8, 8, 8])]
)
def test_the_gradient_is_that_of_the_rows_it_reads(
    drop_last: bool, sizes: list[int]
) -> None:
    """Of an epoch's last window. The control is a mean of means, where a batch is
    smaller: keras-team/keras#20241."""

    def loss_of(module: Any, batch: Any) -> torch.Tensor:
        return module.loss(batch)

    data = Diabetes(num_train=58, drop_last=drop_last)  # 7 batches of 8 and one of 2
    data.setup("fit")
    window = [doubled(batch) for batch in data.train_dataloader()][4:]
    assert [len(batch["y"]) for batch in window] == sizes
    module = Regression().double()
    whole = whole_gradient(module, loss_of, joined(window))
    found = window_gradient(module, loss_of, window, module.accumulation)
    assert off(found, whole) <= EXACT
    if not drop_last:
        naive = window_gradient(module, loss_of, window, Uniform())
        assert off(naive, whole) > NAIVE


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
