"""Numbers in words, and the colours of both themes."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainkit.pages import frame
from trainkit.pages.look import LIGHT, number


@given(st.floats(-1e6, 1e6))
def test_a_number_is_the_value_to_six_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == float(f"{value:.6g}")


def test_both_themes_have_every_colour() -> None:
    """In the dark one no colour is that of the light one."""
    style = Path(frame.__file__).with_name("page.css").read_text()
    dark = dict(re.findall(r"--(\w+):(#\w{6})", style))
    assert dark.keys() == LIGHT.keys()
    assert not set(dark.items()) & set(LIGHT.items())
