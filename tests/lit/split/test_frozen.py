"""A parameter that `training_step` itself moves is noticed, and nothing else is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.lit.split.common import CUTS, Split, fit
from trainkit.core._compat import version_of

ONCE = "on_train_batch_end"


class Momentum(Split):
    """Has an encoder that follows the one that is trained."""

    def __init__(self, where: str, **how: Any) -> None:
        super().__init__(**how)
        self.where = where
        self.follower = copy.deepcopy(self.net).requires_grad_(False)

    def follow(self) -> None:
        with torch.no_grad():
            for own, other in zip(
                self.follower.parameters(), self.net.parameters(), strict=True
            ):
                own.mul_(0.9).add_(other, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.where == "training_step":
            self.follow()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == ONCE:
            self.follow()


@pytest.mark.parametrize("cut", ["size", "auto"])
def test_moved_in_training_step_is_said_once(cut: str) -> None:
    with pytest.warns(UserWarning, match=f"has changed follower.*{ONCE}") as told:
        fit(Momentum("training_step", cut=CUTS[cut]))
    said = [str(each.message) for each in told]
    assert sum("training_step has changed" in each for each in said) == 1


def test_moved_once_a_step_equals_whole_batches_and_nothing_is_said() -> None:
    ours, whole = Momentum(ONCE), Momentum(ONCE, cut=None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(ours)
        fit(whole)
    assert not [each for each in told if "has changed" in str(each.message)]
    for own, other in zip(
        ours.follower.parameters(), whole.follower.parameters(), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)


def test_version_counts_what_is_written_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    before = version_of(parameter)
    parameter.sum().backward()
    assert version_of(parameter) == before
    with torch.no_grad():
        parameter.add_(1)
    assert version_of(parameter) > before
