"""A curve with a warm-up, as a scheduler of torch's."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from trainkit import TrainkitError, warmup_cosine
from trainkit.core.curves import WarmupCosine


def rates(steps: int, **options: float) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = warmup_cosine(optimizer, **options)  # type: ignore[arg-type]
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_curve_is_the_formula() -> None:
    seen = rates(12, total_steps=10, warmup=0.4, final=0.25)
    up = [0.5, 1.0, 1.5, 2.0]
    down = [2 * (0.25 + 0.75 * (1 + math.cos(math.pi * k / 6)) / 2) for k in range(7)]
    assert seen == pytest.approx([*up, *down, 0.5], abs=1e-12)


def test_without_a_warm_up_it_is_torchs_cosine() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    theirs = []
    for _ in range(10):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(10, total_steps=10) == pytest.approx(theirs, abs=1e-12)


def test_it_can_be_pickled() -> None:
    curve = WarmupCosine(10, 2, 0.1)
    assert pickle.loads(pickle.dumps(curve)) == curve


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"total_steps": -1}, "total_steps: must be at least 1, received -1"),
        ({"total_steps": 10, "warmup": 20}, "share of the steps"),
        ({"total_steps": 10, "warmup": -1}, "received -1"),
        ({"total_steps": 10, "final": 1.5}, "must lie in 0 to 1, received 1.5"),
    ],
)
def test_what_makes_no_curve_is_refused(options: dict, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        rates(1, **options)
