"""The proof on patterns of widely used packages."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.lit.measure.starting import ALARM, SPLIT, fit, images, said
from tests.lit.proof import zoo
from tests.lit.proof.test_no_share import by_root_of_rows
from trainkit import PerSample, PerToken

SHARE = 2e-3
"""Of a term that looks across rows, in a loss that does not."""


def counted() -> DataLoader:
    return DataLoader(zoo.sequences(), batch_size=16, collate_fn=zoo.counted)  # type: ignore[arg-type]


def test_a_count_that_the_collate_function_makes_is_no_alarm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(zoo.Tokens(zoo.by_host_count), counted(), PerToken())
    assert "not measured: field 'num_targets' is " in said(capsys)


def test_a_count_of_something_else_is_an_alarm() -> None:
    with pytest.warns(UserWarning, match=ALARM):
        fit(zoo.Tokens(zoo.by_host_count), counted(), PerSample())


def test_a_count_that_the_run_itself_keeps_is_an_alarm() -> None:
    with (
        pytest.warns(UserWarning, match=ALARM),
        pytest.warns(UserWarning, match="num_targets"),
    ):
        fit(zoo.Tokens(zoo.by_host_count), counted(), PerToken(), SPLIT)


def test_a_little_more_than_rounding_is_not_called_exact() -> None:
    def loss(module: Any, maps: Tensor, batch: Any) -> Tensor:
        return zoo.classified(module, maps, batch) + SHARE * maps.mean().square()

    with pytest.warns(UserWarning, match=ALARM):
        fit(zoo.Images(loss), images(), PerSample())


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (zoo.sample_weighted, "does not divide by what"),
        (by_root_of_rows, "looks across the rows"),
    ],
)
def test_a_divisor_that_does_not_add_up_is_no_wrong_strategy(
    loss: Any, text: str
) -> None:
    with pytest.warns(UserWarning, match=text):
        fit(zoo.Images(loss), images(), PerSample())
