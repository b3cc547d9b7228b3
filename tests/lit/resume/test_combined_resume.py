"""Several loaders at once, interrupted: each goes on where it was, or stays ended."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.helpers import pad, ragged_sequences
from tests.lit.resume.interrupting import (
    Dropping,
    KillAt,
    ask,
    interrupted,
    train,
    unlike,
)
from tests.lit.resume.streaming import NotesRows, stateful
from trainkit import (
    AccumulationCallback,
    AccumulationStrategy,
    ResumableLoader,
    ResumableStream,
)

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only"),
    # Killed before its first checkpoint, a run begins anew.
    pytest.mark.filterwarnings("ignore:MetricsCSVLogger. .* of another training"),
]

LONG, SHORT = ragged_sequences(18), ragged_sequences(8, seed=3)
"""Five batches of one and two of the other."""


def loaders(mode: Any, workers: dict[str, Any] | None = None) -> CombinedLoader:
    how: dict[str, Any] = {"shuffle": True, "collate_fn": pad, **(workers or {})}
    pair = {
        "short": ResumableLoader(SHORT, 4, seed=3, **how),
        "long": ResumableLoader(LONG, 4, seed=5, **how),
    }
    return CombinedLoader(pair, mode)


def streams(mode: Any) -> CombinedLoader:
    """Three batches of one and seven of the other."""
    pair = {"short": stateful("stream"), "long": stateful("hugging face")}
    pair["short"].dataset.rows = 10
    wrapped = {key: ResumableStream(each) for key, each in pair.items()}
    return CombinedLoader(wrapped, mode)


def labels(batch: Any) -> Any:
    return sum((each["labels"] != -100).sum() for each in batch.values() if each)


class TokensOfAll(AccumulationStrategy):
    """Those of the loaders that have not ended."""

    def weight(self, batch: Any) -> Tensor:
        return labels(batch)


class Several(NotesRows, Dropping):
    """Trains on the batches of all loaders that have not ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [b for b in batch.values() if b]
        total = sum(self._loss(b) * (b["labels"] != -100).sum() for b in parts)
        return total / labels(batch)  # type: ignore[return-value]


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
PLACES: list[tuple[str, int, list[Any], int, Any]] = [
    # Where a run ends early, counted over both epochs; and of what length they are.
    ("max_size", 1, [KillAt("on_train_batch_end", at) for at in (0, 3, 6)], 5, {}),
    ("max_size", 3, [ask("on_after_backward", at) for at in (1, 4)], 5, {}),
    ("max_size_cycle", 1, [KillAt("on_train_batch_end", 4)], 5, {}),
    ("max_size_cycle", 3, [ask("on_after_backward", at) for at in (3, 9)], 5, {}),
    ("min_size", 1, [KillAt("on_train_batch_end", at) for at in (0, 3)], 2, {}),
    ("min_size", 3, [ask("on_after_backward", 1)], 2, {}),
    ("max_size", 1, [KillAt("on_train_batch_end", 3)], 5, {"num_workers": 1}),
    ("max_size", 1, [KillAt("on_train_batch_end", 3)], 5, PERSISTENT),
    ("max_size_cycle", 1, [KillAt("on_train_batch_end", 5)], 5, PERSISTENT),
    # Streams. Of the longest, a shorter one that has ended would begin anew.
    ("max_size", 1, [ask("on_train_batch_end", at) for at in (0, 1)], 7, None),
    ("max_size_cycle", 1, [ask("on_train_batch_end", at) for at in (0, 1, 4)], 7, None),
    ("min_size", 1, [ask("on_train_batch_end", at) for at in (0, 1, 4)], 3, None),
]


@pytest.mark.parametrize(("mode", "window", "kills", "length", "workers"), PLACES)
def test_resumed_run_equals_an_unbroken_one(
    mode: str, window: int, kills: list[Any], length: int, workers: Any, tmp_path: Path
) -> None:
    """To the bit, and in its rows, since losses may be alike by chance; where it is
    stopped, in mid-window. With workers as without any."""
    how: dict[str, Any] = {
        "kind": Several,
        "without": ["AccumulationCallback"],
        # Rows of several loaders at once are more than the proof can cut.
        "others": [AccumulationCallback(TokensOfAll(), proof="off")],
        "val_check_interval": 1.0,
        "accumulate_grad_batches": window,
    }
    make = partial(streams if workers is None else loaders, mode)
    whole = train(tmp_path / "whole", loader=make(), **how)
    assert len(whole[0].read) == 2 * length
    make = make if workers is None else partial(loaders, mode, workers)
    for number, kill in enumerate(kills):
        found = interrupted(tmp_path / str(number), kill, make=make, **how)
        assert unlike(whole, found) == []
    if mode == "max_size" and workers is not None:
        # The control: the shorter loader has ended in mid-epoch.
        ended = [each["short"] is None for each in whole[0].read]
        assert ended == ([False] * 2 + [True] * 3) * 2
