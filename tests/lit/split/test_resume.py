"""The size that was found is kept in the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import deviation, trainer
from tests.lit.fronts import windows_of
from tests.lit.split.common import START, fit, loader_batches
from tests.lit.split.short_of_memory import Memory, Short
from tests.lit.split.test_auto import Cuts, Sized
from trainkit.core.split import search
from trainkit.core.split.micro_batching import MicroBatching

AUTO = MicroBatching("auto")
EXACT = 1e-9


def sizes_of(fitted: Any) -> Any:
    return windows_of(fitted).split.sizes  # type: ignore[attr-defined]


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SHARE", 1)
    monkeypatch.setattr(search, "FASTER", 1e9)


@pytest.mark.usefixtures("short_search")
def test_a_resumed_run_goes_on_with_the_size_and_equals_one_that_was_not_stopped(
    tmp_path: Path,
) -> None:
    path = tmp_path / "found.ckpt"
    first = fit(Short(Memory(fits={0: 70}), cut=AUTO), max_epochs=3)
    found = sizes_of(first).search.limit
    first.save_checkpoint(path)
    cuts, module = Cuts(), Sized(Memory(fits={0: 70}), cut=AUTO)
    resumed = fit_on(module, path, cuts, max_epochs=5)
    assert module.memory.num_failures == 0
    assert found <= 70
    assert max(map(max, cuts.sizes)) <= found
    assert sizes_of(resumed).search.limit == found
    whole = Short(cut=None)
    fit(whole, max_epochs=5)
    assert deviation(module, whole, START) <= EXACT


def fit_on(module: Short, path: Path, *callbacks: Any, **options: Any) -> Any:
    fitted = trainer(callbacks=list(callbacks), **options)
    fitted.fit(module, loader_batches(), ckpt_path=str(path))
    return fitted


@pytest.mark.parametrize("start", [None, 1000])
def test_a_run_that_was_still_searching_begins_below_what_has_failed(
    start: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "WARM", 10**6)  # however fast this machine is
    path, cut = tmp_path / "searching.ckpt", MicroBatching("auto", start=start)
    first = fit(Short(Memory(fits={0: 150}), cut=cut), max_epochs=2)
    assert sizes_of(first).search.is_searching is (start is None)
    first.save_checkpoint(path)
    module = Sized(Memory(fits={0: 150}), cut=cut)
    resumed = fit_on(module, path, max_epochs=3)
    assert module.memory.num_failures == 0  # what ran out is known
    assert sizes_of(resumed).search.is_searching is (start is None)
    assert torch.load(path, weights_only=True)["trainkit_micro_batching"]


@pytest.mark.usefixtures("short_search")
def test_another_fit_knows_nothing_of_the_last() -> None:
    module = Short(Memory(fits={0: 70}), cut=AUTO)
    fit(module)
    before = module.memory.num_failures
    module.memory = Memory(fits={0: 70})
    fit(module)
    assert before == module.memory.num_failures > 0
