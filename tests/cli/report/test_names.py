"""What a run writes down so that its charts name units and optimizers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import nn

from trainkit import PerSample, PerToken, Uniform, Weighed
from trainkit.cli.report import rate_plan
from trainkit.cli.report.charts import choose
from trainkit.cli.report.line import Line
from trainkit.cli.report.rate_plan import _optimizers, unit_of_weights


@pytest.mark.parametrize(
    ("strategy", "unit"),
    [
        (PerToken(), "tokens"),
        (PerSample(), "samples"),
        (Uniform(), "micro-batches"),
        (Weighed(), ""),  # the module may weigh anything
        (None, ""),
    ],
)
def test_weights_have_a_unit(
    strategy: Any, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = strategy and SimpleNamespace(strategy=strategy)
    monkeypatch.setattr(rate_plan, "windows_of", lambda trainer: windows)
    assert unit_of_weights(None) == unit


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = nn.Linear(2, 2), nn.Linear(2, 1)


def names(
    *trained: Any, rates: tuple[str, ...] = (), scheduled: tuple[int, ...] = ()
) -> dict[str, str]:
    module = Pair()
    parts = [[p for name in each for p in getattr(module, name).parameters()]
             for each in trained]  # fmt: skip
    optimizers = [torch.optim.SGD(part, 0.1) for part in parts]
    monitor = LearningRateMonitor()
    monitor.lrs = {name: [] for name in rates}
    configs = [
        SimpleNamespace(scheduler=SimpleNamespace(optimizer=optimizers[place]))
        for place in scheduled
    ]
    trainer = SimpleNamespace(
        optimizers=optimizers, callbacks=[monitor], lr_scheduler_configs=configs
    )
    return _optimizers(trainer, module)


def test_an_optimizer_is_named_by_what_it_trains() -> None:
    assert names(["generator"], ["critic"]) == {
        "window/0/": "generator",
        "window/1/": "critic",
    }
    assert names(["generator", "critic"]) == {}  # a single one needs no name
    assert names(["generator"], ["generator"]) == {
        "window/0/": "SGD 1",
        "window/1/": "SGD 2",
    }


def test_a_rate_belongs_to_an_optimizer() -> None:
    """Lightning logs the rates of optimizers with a scheduler first."""
    rates = ("lr-SGD", "lr-SGD-1")
    found = names(["generator"], ["critic"], rates=rates)
    assert [found[name] for name in rates] == ["generator", "critic"]
    found = names(["generator"], ["critic"], rates=rates, scheduled=(1,))
    assert [found[name] for name in rates] == ["critic", "generator"]
    groups = ("lr-SGD/pg1", "lr-SGD/pg2", "lr-SGD-1")
    assert len(names(["generator"], ["critic"], rates=groups)) == 2


def test_legends_have_the_names() -> None:
    columns = {
        name: Line(name, (0.0, 1.0), (1.0, 2.0))
        for name in ("window/0/loss", "window/1/loss", "lr-Adam", "lr-Adam-1")
    }
    known = {"window/0/": "generator", "lr-Adam": "generator", "lr-Adam-1": "critic"}
    found = choose(columns, {}, optimizers=known, unit="tokens")
    assert [[line.name for line in chart.lines] for chart in found.shown] == [
        ["window/0/loss, of generator", "window/1/loss"],  # the control: no name
        ["lr-Adam, of generator", "lr-Adam-1, of critic"],
    ]
