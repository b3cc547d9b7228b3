"""State that a module moves once a step is the big batch's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import NAIVE, deviation, trainer, weights
from tests.lit.fronts import EQUAL, RAGGED, WINDOW, merged, micro_batches
from tests.lit.split.common import SEQUENCES
from tests.lit.windows.moving import ONCE, WAYS, Moving

LATER = ("training_step", "on_train_batch_end")


def trained(where: str, way: str, sizes: Any = RAGGED, window: int = WINDOW) -> Moving:
    module = Moving(where, way)
    trainer(window).fit(module, micro_batches(SEQUENCES, sizes))
    return module


@pytest.mark.parametrize(
    ("way", "sizes", "wrong"),
    [(way, (RAGGED, EQUAL)[i % 2], LATER[i % 3 > 0]) for i, way in enumerate(WAYS)],
)
def test_moved_before_the_step_equals_the_big_batch_in_streamed_windows(
    way: str, sizes: Any, wrong: str
) -> None:
    """The control: in each batch, and at its end, they move too often."""
    whole, start = trained(ONCE, way, merged(sizes), 1), weights(Moving(ONCE, way))
    assert deviation(trained(ONCE, way, sizes), whole, start) < 1e-7
    assert deviation(trained(wrong, way, sizes), whole, start) > NAIVE
