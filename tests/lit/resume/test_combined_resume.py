"""Several loaders at once, interrupted: each goes on where it was, or stays ended."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.helpers import pad, quiet_lightning, ragged_sequences
from tests.lit.resume.interrupting import (
    Dropping,
    KillAt,
    Killed,
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

NUM_BATCHES = {"max_size": 5, "max_size_cycle": 5, "min_size": 2}
PLACES = {
    ("max_size", "killed"): [0, 3, 6],
    ("max_size", "stopped"): [1, 4, 7],
    ("max_size_cycle", "killed"): [2, 4, 8],
    ("max_size_cycle", "stopped"): [3, 6, 9],
    ("min_size", "killed"): [0, 3],
    ("min_size", "stopped"): [1],
}
"""Where a run ends early, counted over both epochs."""


@pytest.fixture(autouse=True)
def quiet(capsys: pytest.CaptureFixture[str]) -> Any:
    with quiet_lightning():
        yield


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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append({k: b and b["ids"].tolist() for k, b in batch.items()})
        parts = [b for b in batch.values() if b]
        total = sum(self._loss(b) * (b["labels"] != -100).sum() for b in parts)
        return total / labels(batch)  # type: ignore[return-value]


def loaders(mode: Any, **options: Any) -> CombinedLoader:
    how: dict[str, Any] = {"shuffle": True, "collate_fn": pad, **options}
    pair = {
        "short": ResumableLoader(SHORT, 4, seed=3, **how),
        "long": ResumableLoader(LONG, 4, seed=5, **how),
    }
    return CombinedLoader(pair, mode)


def run(folder: Path, mode: Any, *, kill: Any = None, **how: Any) -> tuple[Any, Any]:
    options = {k: how.pop(k) for k in ("num_workers", "persistent_workers") if k in how}
    return train(
        folder,
        kind=Several,
        kill=kill,
        resume=kill is None,
        loader=loaders(mode, **options),
        without=["AccumulationCallback"],
        others=[AccumulationCallback(TokensOfAll())],
        val_check_interval=1.0,
        **how,
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains once in each way, without workers."""

    @functools.cache
    def trained(mode: str, window: int) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("whole")
        return run(folder, mode, accumulate_grad_batches=window)

    return trained


def stop(trainer: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


def assert_same_as_whole(
    tmp_path: Path, mode: str, kill: KillAt, whole: Any, **how: Any
) -> None:
    try:
        run(tmp_path, mode, kill=kill, **how)
    except (Killed, SystemExit):
        pass
    module, fitted = run(tmp_path, mode, **how)
    assert differing(state_of(*whole), state_of(module, fitted)) == [], kill.batch
    # The rows as well: their losses may be alike by chance.
    seen = whole[0].seen
    assert module.seen == seen[len(seen) - len(module.seen) :], kill.batch


@pytest.mark.parametrize(("mode", "dies"), PLACES)
def test_resumed_run_equals_an_unbroken_one(
    unbroken: Any, tmp_path: Path, mode: str, dies: str
) -> None:
    """To the bit, from every place of an epoch; in mid-window where it is stopped."""
    how = {"accumulate_grad_batches": {"killed": 1, "stopped": 3}[dies]}
    whole = unbroken(mode, how["accumulate_grad_batches"])
    assert len(whole[0].seen) == 2 * NUM_BATCHES[mode]
    for batch in PLACES[mode, dies]:
        kill = KillAt("on_train_batch_end", batch)
        if dies == "stopped":
            kill = KillAt("on_after_backward", batch, stop)
        assert_same_as_whole(tmp_path / str(batch), mode, kill, whole, **how)


@pytest.mark.parametrize(
    ("mode", "persistent", "batch"),
    [
        ("max_size", False, 3),
        ("max_size", True, 3),
        ("max_size_cycle", True, 5),
        ("min_size", True, 1),
    ],
)
def test_resumed_run_with_workers_equals_one_without(
    unbroken: Any, tmp_path: Path, mode: str, persistent: bool, batch: int
) -> None:
    whole = unbroken(mode, 1)
    how = {
        "accumulate_grad_batches": 1,
        "num_workers": 1,
        "persistent_workers": persistent,
    }
    kill = KillAt("on_train_batch_end", batch)
    assert_same_as_whole(tmp_path, mode, kill, whole, **how)


def test_shorter_loader_has_ended_in_mid_epoch(unbroken: Any) -> None:
    """The control: what the tests above are about does happen."""
    module, _ = unbroken("max_size", 1)
    ended = [each["short"] is None for each in module.seen]
    assert ended == ([False] * 2 + [True] * 3) * 2
    assert all(each["long"] is not None for each in module.seen)
    assert torch.tensor(module.seen[0]["long"]).shape[0] == 4
