"""Streamed windows announce state that `training_step` moves once a micro-batch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tests.helpers import trainer
from tests.lit.fronts import RAGGED, WINDOW, micro_batches
from tests.lit.split.common import SEQUENCES
from tests.lit.windows.moving import NAMES, ONCE, WAYS, Moving


def said_in(where: str, way: str, window: int = WINDOW, **how: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = Moving(where, way, **how)
        trainer(window).fit(module, micro_batches(SEQUENCES, RAGGED))
    said = [str(each.message) for each in told]
    return [each for each in said if "training_step has changed" in each]


@pytest.mark.parametrize("way", WAYS)
def test_moved_in_training_step_is_said_once(way: str) -> None:
    (said,) = said_in("training_step", way)
    assert f"has changed {NAMES.get(way, 'follower.')}" in said
    assert ONCE in said


@pytest.mark.parametrize("way", WAYS)
def test_moved_once_a_step_is_not_spoken_of(way: str) -> None:
    assert not said_in(ONCE, way)


def test_windows_of_one_micro_batch_are_not_spoken_of() -> None:
    assert not said_in("training_step", "buffer", window=1)


def test_what_begins_to_move_later_is_said_too() -> None:
    assert len(said_in("training_step", "by data", since=3)) == 1
