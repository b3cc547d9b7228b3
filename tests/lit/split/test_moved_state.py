"""State that `training_step` moves once for each micro-batch is announced."""

from __future__ import annotations

import warnings
from itertools import cycle
from typing import Any

import pytest

from tests.helpers import NAIVE, deviation, weights
from tests.lit.split.common import CUTS, SIZES, fit
from tests.lit.windows.moving import NAMES, ONCE, WAYS, Moving
from trainkit import PerToken
from trainkit.core.split.micro_batching import MicroBatching


class Cut(Moving):
    accumulation = PerToken()

    def __init__(self, *args: Any, cut: MicroBatching | None, **how: Any) -> None:
        super().__init__(*args, **how)
        self.micro_batching = cut


def trained(where: str, way: str, cut: str | None, **how: Any) -> tuple[Moving, list]:
    module = Cut(where, way, cut=CUTS[cut] if cut else None, **how)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(module)
    said = [str(each.message) for each in told]
    return module, [each for each in said if "training_step has changed" in each]


@pytest.mark.parametrize(("way", "cut"), [*zip(WAYS, cycle(["size", "auto"]))])
def test_moved_in_training_step_is_said_once_and_is_another_training(
    way: str, cut: str
) -> None:
    ours, said = trained("training_step", way, cut)
    assert len(said) == 1
    assert f"has changed {NAMES.get(way, 'follower.')}" in said[0]
    assert ONCE in said[0]
    whole, said_of_whole = trained("training_step", way, None)
    assert not said_of_whole
    assert deviation(ours.net, whole.net, weights(Cut("", "", cut=None).net)) > NAIVE


@pytest.mark.parametrize(
    ("way", "where"), [*zip(WAYS, cycle([ONCE, "on_train_batch_end"]))]
)
def test_moved_once_a_step_equals_whole_batches_and_nothing_is_said(
    way: str, where: str
) -> None:
    (ours, said), (whole, _) = (trained(where, way, cut) for cut in ("size", None))
    assert not said
    assert deviation(ours, whole, Cut("", "", cut=None)) < 1e-12


def test_what_begins_to_move_later_is_said_too() -> None:
    _, said = trained("training_step", "by data", "size", since=len(SIZES))
    assert len(said) == 1
    assert not trained("training_step", "by data", "size", since=99)[1]


def test_several_loader_batches_that_are_not_cut_are_several_micro_batches() -> None:
    module = Cut("training_step", "buffer", cut=MicroBatching(size=99))
    with pytest.warns(UserWarning, match="has changed center, which"):
        fit(module, window=2)
