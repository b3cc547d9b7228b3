"""Several loaders at once, interrupted: each goes on where it was, or stays ended."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.helpers import pad, quiet_lightning, ragged_sequences
from tests.lit.resume.interrupting import (
    Dropping,
    KillAt,
    Killed,
    ask,
    differing,
    state_of,
    train,
)
from trainkit import AccumulationCallback, AccumulationStrategy, ResumableLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
    pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only"),
    # Killed before its first checkpoint, a run begins anew.
    pytest.mark.filterwarnings("ignore:MetricsCSVLogger. .* of another training"),
]

LONG, SHORT = ragged_sequences(18), ragged_sequences(8, seed=3)
"""Five batches of one and two of the other."""


def labels(batch: Any) -> Any:
    return sum((each["labels"] != -100).sum() for each in batch.values() if each)


class TokensOfAll(AccumulationStrategy):
    """Those of the loaders that have not ended."""

    def weight(self, batch: Any) -> Tensor:
        return labels(batch)


class Several(Dropping):
    """Trains on the batches of all loaders that have not ended, and notes the rows."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append({k: b and b["ids"].tolist() for k, b in batch.items()})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [b for b in batch.values() if b]
        total = sum(self._loss(b) * (b["labels"] != -100).sum() for b in parts)
        return total / labels(batch)  # type: ignore[return-value]


def run(
    folder: Path, mode: Any, *, kill: Any = None, workers: Any = None, window: int = 1
) -> tuple[Any, Any]:
    how: dict[str, Any] = {"shuffle": True, "collate_fn": pad, **(workers or {})}
    pair = {
        "short": ResumableLoader(SHORT, 4, seed=3, **how),
        "long": ResumableLoader(LONG, 4, seed=5, **how),
    }
    return train(
        folder,
        kind=Several,
        kill=kill,
        resume=kill is None,
        loader=CombinedLoader(pair, mode),
        without=["AccumulationCallback"],
        # Rows of several loaders at once are more than the proof can cut.
        others=[AccumulationCallback(TokensOfAll(), proof="off")],
        val_check_interval=1.0,
        accumulate_grad_batches=window,
    )


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
PLACES: list[tuple[str, int, list[Any], int, Any]] = [
    # Where a run ends early, counted over both epochs; and of what length they are.
    ("max_size", 1, [KillAt("on_train_batch_end", at) for at in (0, 3, 6)], 5, None),
    ("max_size", 3, [ask("on_after_backward", at) for at in (1, 4)], 5, None),
    ("max_size_cycle", 1, [KillAt("on_train_batch_end", 4)], 5, None),
    ("max_size_cycle", 3, [ask("on_after_backward", at) for at in (3, 9)], 5, None),
    ("min_size", 1, [KillAt("on_train_batch_end", at) for at in (0, 3)], 2, None),
    ("min_size", 3, [ask("on_after_backward", 1)], 2, None),
    ("max_size", 1, [KillAt("on_train_batch_end", 3)], 5, {"num_workers": 1}),
    ("max_size", 1, [KillAt("on_train_batch_end", 3)], 5, PERSISTENT),
    ("max_size_cycle", 1, [KillAt("on_train_batch_end", 5)], 5, PERSISTENT),
]


@pytest.mark.parametrize(("mode", "window", "kills", "length", "workers"), PLACES)
def test_resumed_run_equals_an_unbroken_one(
    mode: str, window: int, kills: list[Any], length: int, workers: Any, tmp_path: Path
) -> None:
    """To the bit; where it is stopped, in mid-window. With workers as without any."""
    with quiet_lightning():
        whole = run(tmp_path / "whole", mode, window=window)
        seen = whole[0].seen
        assert len(seen) == 2 * length
        for number, kill in enumerate(kills):
            how = {"window": window, "workers": workers}
            folder = tmp_path / str(number)
            with contextlib.suppress(Killed, SystemExit):
                run(folder, mode, kill=kill, **how)
            module, fitted = run(folder, mode, **how)
            assert differing(state_of(*whole), state_of(module, fitted)) == []
            # The rows as well: their losses may be alike by chance.
            assert module.seen == seen[len(seen) - len(module.seen) :]
    if mode == "max_size":  # the control: the shorter loader has ended in mid-epoch
        ended = [each["short"] is None for each in seen]
        assert ended == ([False] * 2 + [True] * 3) * 2
