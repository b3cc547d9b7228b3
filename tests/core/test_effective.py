"""The arithmetic of the effective batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import EffectiveBatch
from trainkit.core.effective import brief
from trainkit.errors import TrainkitError


@given(
    micro=st.integers(1, 512),
    accumulate=st.integers(1, 64),
    replicas=st.integers(1, 64),
    reference=st.integers(1, 4096),
)
def test_size_equals_the_product(
    micro: int, accumulate: int, replicas: int, reference: int
) -> None:
    batch = EffectiveBatch(micro_batch=micro, accumulate=accumulate, replicas=replicas)
    product = micro * accumulate * replicas
    assert batch.size == product
    assert isinstance(batch.size, int)
    assert batch.over(reference) == product / reference
    assert batch.is_exact


def test_a_measured_one_says_so() -> None:
    options: dict[str, Any] = {"micro_batch": 7.6, "accumulate": 2, "unit": "tokens"}
    one = EffectiveBatch(**options, windows_measured=1)
    assert str(one) == (
        "per-device batch 7.6 x accumulation 2 x ranks 1 = 15.2 tokens a step "
        "(measured over 1 window)"
    )
    several = EffectiveBatch(**options, windows_measured=8)
    assert "(measured over 8 windows)" in str(several)
    assert not several.is_exact


def test_text_equals_the_issues() -> None:
    batch = EffectiveBatch(micro_batch=8, accumulate=4, replicas=2)
    assert str(batch) == (
        "per-device batch 8 x accumulation 4 x ranks 2 = 64 samples a step"
    )


@pytest.mark.parametrize("size", [0, -1, 0.0, math.nan, math.inf, None, "8", True, [8]])
def test_a_micro_batch_that_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(TrainkitError, match="micro_batch: must be a positive number"):
        EffectiveBatch(micro_batch=size)


@pytest.mark.parametrize("name", ["accumulate", "replicas"])
@pytest.mark.parametrize("value", [0, -1, 1.0, None, "2", True])
def test_a_factor_that_is_not_whole_is_refused(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(TrainkitError, match=f"EffectiveBatch {name}: must be a whole"):
        EffectiveBatch(micro_batch=8, **options)


def test_an_unknown_unit_is_refused() -> None:
    unit: Any = "pixels"
    with pytest.raises(TrainkitError, match="EffectiveBatch unit: must be one of"):
        EffectiveBatch(micro_batch=8, unit=unit)


@pytest.mark.parametrize("reference", [0, -3, math.nan, math.inf, None, True])
def test_a_reference_that_is_no_size_is_refused(reference: Any) -> None:
    with pytest.raises(TrainkitError, match="reference_batch: must be a positive"):
        EffectiveBatch(micro_batch=8).over(reference)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1e-8, "1e-08"),
        (0.2, "0.2"),
        (9999.4, "9999"),
        (9999.6, "10,000"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (10_000.4, "10,000"),
        (2**20, "1,048,576"),
        (-3.0, "-3"),
        (1e20, "100,000,000,000,000,000,000"),
    ],
)
def test_brief_writes_as_a_person_would(number: float, text: str) -> None:
    assert brief(number) == text
