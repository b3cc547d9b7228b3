"""The noise scale is not measured where an inner cut gives one backward pass."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader, TensorDataset

from tests.core.inside.common import batch
from tests.lit.inside.common import Foreign, fit
from trainkit import AccumulationCallback, MicroBatching, NoiseScale, PerSample
from trainkit.errors import TrainkitError

WORDS = r"MicroBatching\(inside=...\) runs a loader batch in one backward pass"


def trained(noise: NoiseScale, accumulate: int) -> Any:
    cut = MicroBatching(size=4, inside="net")
    own = AccumulationCallback(PerSample(), micro_batching=cut, proof="off")
    loader = DataLoader(TensorDataset(*batch(44)), 11)
    return fit(Foreign(), None, own, noise, loader=loader, accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_inner_cut_is_refused_by_name(accumulate: int) -> None:
    with pytest.raises(TrainkitError, match=f"NoiseScale: {WORDS}"):
        trained(NoiseScale(1, if_impossible="raise"), accumulate)


def test_training_without_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    noise = NoiseScale(1, if_impossible="say")
    run = trained(noise, 1)
    assert noise.estimate is None
    assert "window/noise_scale" not in run.callback_metrics
    assert "MicroBatching(inside=...) runs a loader" in capsys.readouterr().out
