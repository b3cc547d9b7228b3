"""The proof on patterns of widely used packages."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from tests.lit.measure.starting import ALARM, SPLIT, fit, said
from tests.lit.proof import zoo
from trainkit import PerSample, PerToken


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
