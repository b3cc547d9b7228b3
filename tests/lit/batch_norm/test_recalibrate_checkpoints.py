"""Checkpoints hold the statistics of their own weights, whenever they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.core.batch_norm.nets import furthest, statistics
from tests.lit.batch_norm.fits import (
    At,
    ConvModule,
    Validated,
    batches,
    count_passes,
    fit,
    reference,
    running,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
]

EXACT = 1e-10
CHECKPOINTS: dict[str, Any] = {
    "every epoch": {"every_n_epochs": 1, "save_top_k": -1},
    "every second step": {"every_n_train_steps": 2, "save_top_k": -1},
    "last": {"save_last": True},
    "end of the epoch": {"save_on_train_epoch_end": True, "save_top_k": -1},
    "monitored": {"monitor": "val"},
}


@pytest.mark.parametrize(
    ("how", "validates", "only"),
    [
        ("every epoch", True, False),
        ("every epoch", False, True),
        ("every second step", True, True),
        ("every second step", False, False),
        ("last", True, False),
        ("end of the epoch", True, True),
        ("end of the epoch", False, False),
        ("monitored", True, False),
    ],
)
def test_statistics_in_a_checkpoint_equal_all_rows_under_its_weights(
    tmp_path: Path, how: str, validates: bool, only: bool
) -> None:
    options = CHECKPOINTS[how]
    saving = ModelCheckpoint(tmp_path, save_weights_only=only, **options)
    module = Validated() if validates else ConvModule()
    val = batches(batch_size=27) if validates else None
    fit("recalibrate", saving, module=module, val=val, enable_checkpointing=True)
    paths = list(tmp_path.glob("*.ckpt"))
    assert paths
    for path in paths:
        state = torch.load(path, weights_only=True)["state_dict"]
        twin = ConvModule()
        twin.load_state_dict(state)
        assert furthest(running(state), reference(twin)) <= EXACT


def test_plain_checkpoint_does_not_hold_them(tmp_path: Path) -> None:
    """The negative control."""
    saving = ModelCheckpoint(tmp_path)
    fit(None, saving, enable_checkpointing=True)
    (path,) = tmp_path.glob("*.ckpt")
    twin = ConvModule()
    twin.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert furthest(statistics(twin.net), reference(twin)) > 1e-2


def fail_in(step: int) -> At:
    def fail(trainer: Any, module: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == step:
            raise KeyError("a user's mistake")

    return At("on_train_batch_end", fail)


def test_checkpoint_on_an_exception_is_written_as_it_is(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Who knows what still works then: nothing more is computed."""
    passes = count_passes(monkeypatch)
    saving = ModelCheckpoint(tmp_path, save_on_exception=True)
    with pytest.raises(KeyError, match="a user's mistake"):
        fit("recalibrate", fail_in(4), saving, enable_checkpointing=True)
    assert len(list(tmp_path.glob("*.ckpt"))) == 1
    assert passes == []
