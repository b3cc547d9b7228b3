"""A curve that torch lacks: its formula, and what makes none."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR

from trainkit import TrainkitError, warmup_cosine
from trainkit.core.plan.rates import WarmupCosine

EXACT = 1e-12


def warmed(steps: int = 10, scheduler: Any = warmup_cosine, **how: Any) -> list[float]:
    """The rate before each of the steps."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    made, found = scheduler(optimizer, **how), []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        made.step()
    return found


def test_the_curve_is_the_formula_and_torchs_without_a_warm_up() -> None:
    up = [0.5, 1.0, 1.5, 2.0]
    down = [2 * (0.25 + 0.75 * (1 + math.cos(math.pi * k / 6)) / 2) for k in range(7)]
    found = warmed(12, total_steps=10, warmup=0.4, final=0.25)
    assert found == pytest.approx([*up, *down, 0.5], abs=EXACT)
    theirs = warmed(scheduler=CosineAnnealingLR, T_max=10)
    assert warmed(total_steps=10) == pytest.approx(theirs, abs=EXACT)
    curve = WarmupCosine(10, 2, 0.1)
    assert pickle.loads(pickle.dumps(curve)) == curve


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("total_steps", -1, "must be a whole number from 1 .* received -1. It is the"),
        ("total_steps", math.inf, "must be a whole number .* received inf. It is the"),
        ("warmup", 20, "must lie in 0 to 1, received 20. It is a share of the steps"),
        ("warmup", -1, "must lie in 0 to 1, received -1"),
        ("final", 1.5, "must lie in 0 to 1, received 1.5. It is .* the largest rate"),
    ],
)
def test_what_makes_no_curve_is_refused(name: str, value: float, text: str) -> None:
    with pytest.raises(TrainkitError, match=f"warmup_cosine {name}: {text}"):
        warmed(**{"total_steps": 10, name: value})
