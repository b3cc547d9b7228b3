"""What a resumed run logs of its scaling, and what a module with windows of its own
size is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from tests.core.plan.schedulers import deviation
from tests.lit.rates.scaled import EXACT, Saves, Scheduled, fit, linear, plain, times
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationSchedule,
    PerSample,
    Uniform,
)
from trainkit.errors import TrainkitError

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before:UserWarning",
)


class Logger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[dict[str, Any]] = []
        self.changes: list[tuple[float, float, int | None]] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters.append(params["lr_scaling"])

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if "lr_scaling/k" in metrics:
            size = metrics["lr_scaling/effective_batch"]
            self.changes.append((metrics["lr_scaling/k"], size, step))


def run(scaling: Any, *more: Any, path: Path | None = None) -> Logger:
    logger = Logger()
    how: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
    fit(Scheduled("CosineAnnealingLR"), scaling, *more, ckpt_path=path, **how)
    return logger


@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_resumed_run_with_the_same_k_logs_the_same_hyperparameters(
    tmp_path: Path, warmup_steps: int
) -> None:
    """As every run does that goes on in the logger of the first: no other value."""
    path = tmp_path / "one.ckpt"
    first = run(linear(warmup_steps=warmup_steps), Saves(path, 4))
    second = run(linear(warmup_steps=warmup_steps), path=path)
    (expected,), (found,) = first.parameters, second.parameters
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        is_text = isinstance(value, str)
        assert found[name] == (value if is_text else pytest.approx(value, rel=1e-12))
    assert first.changes == second.changes == []


def test_resumed_run_with_another_k_logs_a_metric_only(tmp_path: Path) -> None:
    """Under Lightning's own step, which it counts after the hook that saved."""
    path = tmp_path / "one.ckpt"
    run(linear(), Saves(path, 4))
    second = run(linear(reference_batch=12), path=path)
    assert second.parameters == []
    assert second.changes == [(0.5, 6.0, 1)]


def test_resumed_run_of_an_unscaled_one_logs_its_hyperparameters(
    tmp_path: Path,
) -> None:
    path = tmp_path / "one.ckpt"
    fit(Scheduled("CosineAnnealingLR"), Saves(path, 4))
    second = run(linear(), path=path)
    assert [each["k"] for each in second.parameters] == [4.0]
    assert second.changes == []


# ---- windows of one's own size -------------------------------------------------------


class OwnSizes(AccumulationMixin, pl.LightningModule):
    """Two optimizers by hand, whose windows have sizes of their own."""

    accumulation = PerSample()

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.sizes = sizes
        self.nets = nn.ModuleList(nn.Linear(1, 1) for _ in sizes)
        self.curve: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        made = zip(self.nets, optimizers, self.sizes, strict=True)
        for net, optimizer, size in made:
            loss = net(batch.float()).square().mean()
            self.accumulate(loss, batch, optimizer=optimizer)
            if self.window_ends(batch_idx, every=size):
                self.curve.append([optimizer.param_groups[0]["lr"]])
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.05) for net in self.nets], []


@pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning")
def test_windows_of_several_sizes_are_refused() -> None:
    """By Lightning's count a step; k would be that of one of them."""
    with pytest.raises(TrainkitError, match=r"windows have \[2, 6\] micro-batches"):
        fit(OwnSizes(2, 6), linear(), window=1)
    module = fit(OwnSizes(2, 6), window=1)
    assert len(module.curve) == 2 * (5 + 2)


@pytest.mark.parametrize("sizes", [(6,), (6, 6)])
def test_table_of_windows_of_their_own_size_is_shown_again_once(
    sizes: tuple[int, ...], capsys: Any
) -> None:
    module = fit(OwnSizes(*sizes), linear(reference_batch=3), window=1)
    first, again = _after(capsys.readouterr().out, "step: ")
    assert first.startswith("per-device batch 3 x accumulation 1 x ranks 1 = 3 ")
    assert again == "per-device batch 3 x accumulation 6 x ranks 1 = 18 samples a step"
    expected = plain(None, 4 * len(sizes), (0.05,))
    expected = [row[:1] for row in times(expected, [6.0] * len(expected))]
    assert deviation(module.curve, expected) <= EXACT


def test_table_of_its_own_size_says_the_new_rates(capsys: Any) -> None:
    fit(OwnSizes(6), linear(reference_batch=3), window=1)
    rates = _after(capsys.readouterr().out, "learning rate: ")
    assert rates[1] == "lr 0.05 -> 0.3 (linear, reference 3)"
    assert len(rates) == 2


def test_table_of_the_trainers_size_is_shown_once(capsys: Any) -> None:
    fit(OwnSizes(2, 2), linear(), window=2)
    assert len(_after(capsys.readouterr().out, "step: ")) == 1


def test_table_of_a_schedule_is_shown_once(capsys: Any) -> None:
    """It says the sizes beforehand."""
    schedule = AccumulationSchedule({0: 1, 1: 5})
    fit(Scheduled(None), AccumulationCallback(Uniform()), schedule, linear(), window=1)
    assert len(_after(capsys.readouterr().out, "learning rate: ")) == 1


def _after(text: str, label: str) -> list[str]:
    lines = text.splitlines()
    return [line.split(label, 1)[1] for line in lines if f"| {label}" in line]
