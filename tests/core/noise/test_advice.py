"""Two lines of advice, and other windows where those of a run were far off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.core.noise.advice import FAR, GROWTH, Point, Suggestion, advice, suggest
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.core.plan.stages import Stages

ONE = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)


def of(samples: float, window: float, **changed: float) -> NoiseEstimate:
    numbers = {
        "low": samples / 1.3,
        "high": samples * 1.3,
        "num_windows": 90,
        **changed,
    }
    return NoiseEstimate(
        samples,
        numbers["low"],
        numbers["high"],
        window,
        1.0,
        int(numbers["num_windows"]),
    )


def said(estimate: NoiseEstimate, unit: str = "samples") -> list[str]:
    return [f"{label}: {text}" for label, text in advice(estimate, unit)]


def level(samples: float, window: float, steps: int = 900) -> list[Point]:
    return [Point(n, samples, window) for n in range(10, steps + 1, 10)]


def test_the_lines_are_the_prescribed_ones() -> None:
    assert said(ONE) == [
        "noise scale: 210 samples (160 to 280, 90 %), over the last 120 measured "
        "windows",
        "window of 512: above the noise scale, so a larger one hardly helps: twice as "
        "large takes 15 % fewer steps and 71 % more samples to the same loss, by the "
        "estimate of a simple model",
    ]


@pytest.mark.parametrize(
    ("window", "what"),
    [
        (40.0, "below the noise scale, so a larger one on more devices saves time"),
        (159.0, "below the noise scale"),
        (160.0, "near the noise scale, so keep it"),
        (280.0, "near the noise scale, so keep it"),
        (281.0, "above the noise scale, so a larger one hardly helps"),
    ],
)
def test_the_window_is_judged_by_the_interval(window: float, what: str) -> None:
    estimate = replace(ONE, window=window)
    line = said(estimate)[1]
    assert what in line
    # https://arxiv.org/abs/1812.06162: steps go as 1 + B / W, samples as W + B
    fewer = 1 - (1 + 210 / (2 * window)) / (1 + 210 / window)
    more = (2 * window + 210) / (window + 210) - 1
    assert f"takes {fewer:.0%}".replace("%", " %") in line
    assert f"and {more:.0%}".replace("%", " %") in line


def test_tokens_stand_beside_samples_only_where_weights_are_tokens() -> None:
    heavy = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 100.0, 120)
    first = said(heavy, "tokens")[0]
    assert "210 samples (160 to 280, 90 %), 21,000 tokens (16,000 to 28,000," in first
    assert said(heavy) == said(ONE) == said(ONE, "tokens")  # the controls


def test_without_an_upper_end_it_is_at_least() -> None:
    for samples in (900.0, math.inf):
        lines = said(
            NoiseEstimate(samples, 160.0, math.inf, 512.0, 100.0, 20), "tokens"
        )
        assert lines[0].startswith(
            "noise scale: at least 160 samples, at least 16,000 tokens, over"
        )
        assert "near the noise scale, so keep it" in lines[1]  # it may be far above
        assert "takes at least 12 % fewer steps and at most 76 % more" in lines[1]
        assert "inf" not in " ".join(lines)
        assert "900" not in " ".join(lines)


@given(
    st.floats(0, 1e9),
    st.floats(1, 10),
    st.floats(1, 1e9),
    st.sampled_from(["tokens", ""]),
)
def test_nothing_is_called_optimal(
    samples: float, wide: float, window: float, unit: str
) -> None:
    estimate = NoiseEstimate(samples, samples / wide, samples * wide, window, 7.0, 9)
    text = " ".join(said(estimate, unit)).lower()
    assert "optim" not in text
    assert "best" not in text
    assert "nan" not in text


def test_windows_far_below_are_larger_later() -> None:
    found = suggest(of(210, 32), level(210, 32), accumulate=2, steps=900)
    assert found is not None
    assert found.sizes == {0: 2, 300: 8}  # 128 samples, and 256 would be above
    assert found.steps == 300 + 600 // 4
    assert "100 % of the measured windows were less than 1/4" in found.why
    assert "450 steps instead of 900" in found.why
    assert "but no samples" in found.why
    assert "optim" not in found.why
    assert found.words == [
        "trainer.accumulate_grad_batches=1",
        "schedule=stages",
        "schedule.sizes={0: 2, 300: 8}",
        "schedule.unit=step",
    ]


def test_they_grow_where_all_later_ones_are_far_below() -> None:
    rising = [Point(n, 100.0 if n < 600 else 400.0, 32) for n in range(10, 1000, 10)]
    found = suggest(of(250, 32), rising, accumulate=1, steps=1000)
    assert found is None  # 40 % of them
    rising = [Point(n, 100.0 if n < 450 else 400.0, 32) for n in range(10, 1000, 10)]
    found = suggest(of(250, 32), rising, accumulate=1, steps=1000)
    assert found is not None
    assert found.sizes == {0: 1, 440: 4}
    last = [*rising, Point(1000, 100.0, 32)]
    assert suggest(of(250, 32), last, accumulate=1, steps=1000) is None


def test_growth_has_an_end() -> None:
    far = suggest(of(9e5, 32), level(9e5, 32), accumulate=3, steps=900)
    assert far is not None
    assert max(far.sizes.values()) == 3 * GROWTH
    short = suggest(of(9e5, 32), level(9e5, 32), accumulate=3, steps=900, most=13)
    assert short is not None
    assert max(short.sizes.values()) == 12
    assert suggest(of(9e5, 32), level(9e5, 32), accumulate=3, steps=9, most=5) is None


def test_windows_far_above_are_smaller() -> None:
    found = suggest(of(30, 256), level(30, 256), accumulate=8, steps=900)
    assert found is not None
    assert found.sizes == {0: 1}  # 32 samples
    assert found.words == ["trainer.accumulate_grad_batches=1"]
    # (30 + 32) / (30 + 256) of the samples
    assert "one of 1 micro-batch in place of 8 about 78 % fewer" in found.why
    assert "7,200 steps instead of 900" in found.why


def test_they_are_smaller_only_up_to_where_they_are_near() -> None:
    rising = [Point(n, 30.0 if n < 600 else 90.0, 256) for n in range(10, 1000, 10)]
    found = suggest(of(60, 256), rising, accumulate=8, steps=1000)
    assert found is not None
    assert found.sizes == {0: 2, 590 * 4: 8}
    assert found.steps == 590 * 4 + 410  # as many samples: 590 * 8 = 590 * 4 * 2
    late = [Point(n, 30.0 if n < 900 else 90.0, 256) for n in range(10, 1000, 10)]
    found = suggest(of(60, 256), late, accumulate=8, steps=1000)
    assert found is not None
    assert found.sizes == {0: 2}


def test_one_micro_batch_cannot_be_fewer() -> None:
    found = suggest(of(30, 256), level(30, 256), accumulate=1, steps=900)
    assert found is not None
    assert not found.words
    assert found.why.endswith("fewer samples: make micro-batches smaller")


@pytest.mark.parametrize(
    "estimate",
    [
        of(210, 32, num_windows=19),
        of(210, 32, low=50, high=201),
        of(210, 32, high=math.inf),
        of(math.inf, 32, low=200, high=math.inf),
        of(0, 32, low=0, high=1),
    ],
)
def test_what_is_not_sure_suggests_nothing(estimate: NoiseEstimate) -> None:
    for samples in (210.0, 0.0):
        assert suggest(estimate, level(samples, 32), accumulate=2, steps=900) is None
    assert suggest(of(210, 32), level(210, 32), accumulate=2, steps=900)  # the control
    assert suggest(of(210, 32), [], accumulate=2, steps=900) is None


def micro_batches(sizes: list[int], of_epoch: int) -> int:
    """How many are taken by windows of these sizes, if an epoch's end closes one."""
    taken = 0
    for size in sizes:
        taken += min(size, of_epoch - taken % of_epoch)
    return taken


def test_short_last_windows_are_counted() -> None:
    found = suggest(
        of(150, 750), level(150, 750, 400), accumulate=32, steps=400, most=47
    )
    assert found is not None
    assert found.sizes == {0: 8}
    assert found.steps == 200 * 6  # not 400 * 4: an epoch of 47 ends short windows
    assert micro_batches([8] * found.steps, 47) == micro_batches([32] * 400, 47)
    endless = suggest(
        of(150, 750), level(150, 750, 400), accumulate=32, steps=400
    )  # the control
    assert endless is not None
    assert endless.steps == 1600


@given(
    st.floats(1e-3, 1e7),
    st.floats(1, 1e5),
    st.integers(1, 64),
    st.integers(20, 10_000),
    st.integers(1, 1000),
)
def test_a_suggestion_is_a_schedule_of_as_many_samples(
    samples: float, window: float, accumulate: int, steps: int, most: int
) -> None:
    curve = level(samples, window, steps)
    accumulate = min(accumulate, most)
    found = suggest(
        of(samples, window), curve, accumulate=accumulate, steps=steps, most=most
    )
    if 1 / FAR <= samples / window <= FAR:
        assert found is None
    if found is None or not found.sizes:
        return
    stages = Stages.make(found.sizes, "step")
    assert max(stages.sizes) <= most
    unit = window / accumulate
    taken = micro_batches([stages.at(step) for step in range(found.steps)], most)
    before = micro_batches([accumulate] * steps, most)
    assert abs(taken - before) < max(max(stages.sizes), accumulate) * 3
    new = found.sizes[max(found.sizes)] * unit
    if samples > window:
        assert window < new <= samples * (1 + 1e-9)
    else:
        assert new < window
        assert new >= samples / 2 or found.sizes == {0: 1}


def test_words_are_none_without_sizes() -> None:
    assert Suggestion({}, 9, "").words == []
