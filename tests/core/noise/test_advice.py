"""Two lines of advice."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit.core.noise.advice import advice
from trainkit.core.noise.estimate import NoiseEstimate

ONE = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)


def said(estimate: NoiseEstimate, unit: str = "samples") -> list[str]:
    return [f"{label}: {text}" for label, text in advice(estimate, unit)]


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
