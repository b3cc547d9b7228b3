"""How large a batch pays: its data, its debug size, and the curve through its runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from recipes.batch_size import Pieces
from recipes.batch_size.study import first_at, fit, read, smoothed
from tests.cli.training import summary_of
from tests.recipes.debugging import small

WINDOWS = (8, 16, 32, 64, 128)


def test_pieces_are_whole_and_those_of_validation_are_the_same_for_each_seed() -> None:
    one, other = (Pieces(num_train=200, num_val=20, seed=seed) for seed in (1, 2))
    one.setup("fit")
    other.setup("fit")
    row = one.train_rows[0]
    assert row["ids"].shape == row["labels"].shape == (64,)
    assert torch.equal(row["ids"][1:], row["labels"][:-1])
    assert (len(one.train_rows), len(one.val_rows)) == (200, 20)
    for a, b in zip(one.val_rows, other.val_rows, strict=True):
        assert torch.equal(a["ids"], b["ids"])
    first, second = (next(iter(each.train_dataloader())) for each in (one, other))
    assert not torch.equal(first["ids"], second["ids"])  # the control


@pytest.mark.parametrize("critical", [4.0, 35.0, 900.0])
def test_the_fit_finds_the_critical_batch(critical: float) -> None:
    samples = [5_000 * (1 + w / critical) for w in WINDOWS]
    found = fit(WINDOWS, samples)
    assert found.critical == pytest.approx(critical, rel=0.01)
    assert found.fewest_samples == pytest.approx(5_000, rel=0.01)
    assert found.error < 0.01
    steps = [e / w for w, e in zip(WINDOWS, samples, strict=True)]
    for s, e in zip(steps, samples, strict=True):
        fewest_steps = found.fewest_samples / found.critical
        product = (s / fewest_steps - 1) * (e / found.fewest_samples - 1)
        assert product == pytest.approx(1, rel=0.1)


def test_runs_that_are_on_no_such_curve_show_it() -> None:
    """Negative control."""
    found = fit(WINDOWS, [20_000, 5_000, 20_000, 5_000, 20_000])
    assert found.error > 0.3


def test_a_run_that_has_not_come_so_far_is_left_out() -> None:
    samples = [5_000 * (1 + w / 35) for w in WINDOWS]
    assert fit(WINDOWS, [*samples[:4], math.nan]).critical == pytest.approx(
        35, rel=0.01
    )
    assert math.isnan(fit(WINDOWS, [1.0, 2.0, *[math.nan] * 3]).critical)


def test_the_target_is_where_the_smoothed_loss_crosses_it() -> None:
    curve = [(float(x), 3 - x / 100) for x in range(0, 200, 10)]
    assert first_at(smoothed(curve), 2.0) == pytest.approx(100)
    curve[7] = (70.0, 1.9)  # by chance
    assert first_at(curve, 2.0) < 70
    assert first_at(smoothed(curve), 2.0) > 90
    assert math.isnan(first_at(curve, 0.5))


def test_the_debug_size_trains_and_the_study_reads_it(
    run_train: Callable[..., Path], tmp_path: Path
) -> None:
    run = run_train(
        *small("batch_size", epochs=1),
        "trainer.val_check_interval=0.25",
        "callbacks.noise_scale.every_n_steps=1",
        "optimizer.lr=0.004",
        name="seed-1/reference",
    )
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("finished", 20)
    assert summary["noise_scale"]["samples"] > 0
    assert summary["noise_scale"]["window"] == 16
    found = read(tmp_path, "gain", 16, 1, target=5.15)
    assert 0 < found.samples < 320
    assert found.steps == found.samples / 16
    assert found.noise_scale_low < found.noise_scale < found.noise_scale_high
    assert found.rate == pytest.approx(0.004)
    assert math.isnan(read(tmp_path, "gain", 16, 1, target=1.0).noise_scale)
