"""The noise scale of simulated windows, whose truth is known."""

from __future__ import annotations

import math
from statistics import fmean
from unittest import mock

import pytest
import torch

from tests.core.noise.simulated import Setting, as_if_equal, estimate_of
from trainkit.core.noise import estimate
from trainkit.core.noise.estimate import (
    COLUMNS,
    NoiseEstimate,
    per_sample,
    per_step,
)
from trainkit.core.plan.scaling import gain

EQUAL = [Setting(2, 4, 0.25, False), Setting(8, 4, 8, False)]
RAGGED = [Setting(2, 1, 1, True), Setting(4, 1, 0.25, True)]
LARGE = [Setting(16, 1, 8, True)]
BIAS, COVERED = 0.03, (0.85, 0.95)


@pytest.mark.parametrize("setting", [*EQUAL, *RAGGED, *LARGE], ids=str)
def test_it_is_unbiased_and_its_interval_covers_the_truth(setting: Setting) -> None:
    found = [estimate_of(setting.windows(60, seed)) for seed in range(400)]
    truth = setting.noise_scale
    known = [each for each in found if each is not None]
    assert len(known) == 400
    assert abs(fmean(truth / each.samples for each in known) - 1) < BIAS
    covered = sum(each.low <= truth <= each.high for each in known) / 400
    assert COVERED[0] <= covered <= COVERED[1]


@pytest.mark.parametrize("setting", RAGGED, ids=str)
def test_the_formula_for_equal_micro_batches_is_far_off_on_ragged_ones(
    setting: Setting,
) -> None:
    of_equal = [
        estimate_of(as_if_equal(setting.windows(60, seed), setting.micro_batches))
        for seed in range(100)
    ]
    known = [setting.noise_scale / e.samples for e in of_equal if e is not None]
    assert abs(fmean(known) - 1) > 0.2


def test_of_windows_too_few_or_of_one_micro_batch_there_is_none() -> None:
    setting = Setting(4, 4, 1, False)
    assert estimate_of(setting.windows(4, 0)) is None
    assert estimate_of(setting.windows(5, 0)) is not None
    assert estimate_of(Setting(1, 4, 1, False).windows(40, 0)) is None


@pytest.mark.parametrize("zeros", [len(COLUMNS), COLUMNS.index("samples")])
def test_a_window_that_was_not_seen_or_weighs_nothing_counts_for_nothing(
    zeros: int,
) -> None:
    windows = Setting(4, 4, 1, False).windows(40, 0)
    some = windows.clone()
    some[::2, :zeros] = 0
    found, of_half = estimate_of(some), estimate_of(windows[1::2])
    assert found is not None
    assert of_half is not None
    assert found.num_windows == 20
    assert found.samples == pytest.approx(of_half.samples)


def test_long_gradients_at_the_beginning_do_not_outweigh_later_ones() -> None:
    """As a training begins: 40 windows whose gradients are 10 times as long, and whose
    noise scale is a 16th of the later one."""
    early, late = Setting(8, 2, 0.125, False), Setting(8, 2, 2, False)
    begin = early.windows(40, 1)
    begin[:, :2] *= 100
    windows = torch.cat([begin, late.windows(120, 2)])
    found, later = estimate_of(windows), estimate_of(windows[40:])
    assert found is not None
    assert later is not None
    assert found.samples == pytest.approx(later.samples, rel=0.5)
    with mock.patch.object(estimate, "_in_units", lambda windows: windows):
        plain = estimate_of(windows)
    assert plain is not None
    assert plain.samples < 0.2 * later.samples  # the control


def test_without_an_upper_end_it_is_at_least_the_lower_one() -> None:
    noisy = [0.0, 100.0, 16.0, 4.0, 4.0, 4.0, 1.0]
    blocks = [[90.0 + 15 * (i % 3), *noisy[1:]] for i in range(12)]
    found = NoiseEstimate.of(blocks)
    assert found is not None
    assert 0 < found.low < found.samples
    assert found.high == math.inf
    assert not found.is_bounded
    assert NoiseEstimate.of_facts(found.facts()) == found


def test_without_any_noise_it_is_zero() -> None:
    exact = [16.0, 4.0, 16.0, 4.0, 4.0, 4.0, 1.0]
    found = NoiseEstimate.of([exact] * 10)
    assert found is not None
    assert (found.low, found.samples, found.high) == (0, 0, 0)
    assert len(COLUMNS) == len(exact)


def test_rescaled_gradients_and_weights_change_nothing() -> None:
    windows = Setting(4, 2, 2, True).windows(50, 3)
    scaled = windows.clone()
    scaled[:, :2] *= 1e-18
    scaled[:, 2:4] *= 100
    scaled[:, 4] *= 10
    one, other = estimate_of(windows), estimate_of(scaled)
    assert one is not None
    assert other is not None
    assert one.samples == pytest.approx(other.samples, rel=1e-9)
    assert one.high == pytest.approx(other.high, rel=1e-9)
    assert other.weight == pytest.approx(10 * one.weight)


def test_what_a_window_gains() -> None:
    assert per_step(210, 512) + per_sample(210, 512) == pytest.approx(1)
    assert per_step(math.inf, 64) == 0
    assert per_sample(0, 64) == 0
    assert gain(1e9, 16, 64) == pytest.approx(4, rel=1e-6)  # far below it: linear
    assert gain(40, 16, 1e9) == pytest.approx(gain(40, 16, 1e12), rel=1e-6)  # level
    assert gain(40, 16, 64) < 4 * 0.6
