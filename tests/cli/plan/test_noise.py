"""`trainkit plan --noise-scale`: the table of windows, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.plan.test_main import PLAN, RATE, report
from trainkit.cli.plan.main import main
from trainkit.cli.plan.report import Reference, windows
from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.errors import TrainkitError

SCALE = ["--noise-scale", "210"]
ONE = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)


def run(path: Path, **summary: Any) -> str:
    (path / "summary.json").write_text(json.dumps(summary))
    return str(path)


def test_the_lines_are_those_of_the_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, *RATE, *SCALE, "--rule", "gain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:6] == [
        "trainkit | noise scale: 210 samples; a model's estimate, good to about a "
        "factor of 2",
        "trainkit | lr, gain: 0.129086 for SGD, 0.113616 for Adam (gain = 1.291)",
    ]
    table = [line.split() for line in lines[9:17]]
    assert [row[0] for row in table[1:]] == "64 128 256 512 1,024 2,048 4,096".split()
    assert [row for row in table if "(this" in row] == [
        "512 (this plan) 70.9 % 29.1 % x 3.44 x 1.16 x 1.29 0.129 0.114".split()
    ]


def test_without_a_rate_or_devices_their_columns_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["--target", "100", "--max-micro-batch", "25", *SCALE])
    out = capsys.readouterr().out
    assert "speed" not in out
    assert "gain" not in out
    assert out.count("(this plan)") == 1  # between 64 and 128
    main([*PLAN])
    assert "noise" not in capsys.readouterr().out  # the control


@given(
    st.floats(1e-6, 1e9),
    st.integers(1, 10**6),
    st.integers(1, 512),
    st.integers(1, 10**6),
)
def test_each_window_is_what_its_definition_says(
    scale: float, effective: int, devices: int, reference: int
) -> None:
    rate = Reference(batch=reference, lr=0.1, betas=(0.9, 0.999), eps=1e-8)
    found = windows(scale, effective, devices, rate)
    assert [each["window"] for each in found if each["plan"]] == [effective]
    sizes = [each["window"] for each in found]
    assert sizes == sorted(set(sizes))
    for each in found:
        size = each["window"]
        assert size == effective or math.log2(size).is_integer()
        assert each["per_step"] == pytest.approx(size / (size + scale))
        assert each["per_step"] + each["per_sample"] == pytest.approx(1)
        # One device takes `size` long for a step of progress size / (size + scale).
        assert each["time"] == pytest.approx(size / each["per_step"] / scale)
        assert each["speed"] * each["time"] == pytest.approx(min(devices, size))
        ratio = each["per_step"] / (reference / (reference + scale))
        assert each["gain"] == pytest.approx(ratio)
        assert each["lr_sgd"] == pytest.approx(0.1 * ratio)
        assert each["lr_adam"] == pytest.approx(0.1 * math.sqrt(ratio))


def test_a_run_says_its_own_with_the_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path, noise_scale=ONE.facts())
    found = report(capsys, *PLAN, "--noise-scale", folder)
    assert found["noise_scale"] == {"samples": 210.0, "low": 160.0, "high": 280.0}
    number = report(capsys, *PLAN, *SCALE)
    assert number["noise_scale"] == {"samples": 210.0, "low": None, "high": None}
    assert number["windows"] == found["windows"]
    main([*PLAN, "--noise-scale", folder])
    assert "noise scale: 210 samples (160 to 280, 90 %); a" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule", "rules"),
    [
        (SCALE, "gain", {"linear", "sqrt", "none", "half-life", "adam-sde"}),
        ([*SCALE, "--rule", "gain"], "gain", set()),  # it is in the table of windows
        ([*SCALE, "--rule", "sqrt"], "sqrt", {"sqrt"}),
        (["--rule", "none"], "none", {"none"}),
        ([], "auto", {"linear", "sqrt", "none", "half-life", "adam-sde"}),
    ],
)
def test_the_rule_to_paste_is_gain_unless_another_is_named(
    words: list[str], rule: str, rules: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(capsys, *PLAN, *RATE, *words)
    train, fit = found["overrides"].values()
    assert {each["rule"] for each in found["scaling"]} == rules
    assert f"lr_scaling={rule}" in train
    assert (f"--lr_scaling.rule={rule}" in fit) == (rule != "none")
    for word, is_there in (
        ("lr_scaling.noise_scale=210", rule == "gain"),
        ("lr_scaling.reference_batch=256", rule != "none"),
    ):
        assert (word in train) == (f"--{word}" in fit) == is_there


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "-inf", "1e999", "21O"])
def test_a_number_that_is_no_size_is_refused(wrong: str) -> None:
    said = rf"--noise-scale: must be a positive number or the .* received '{wrong}'"
    with pytest.raises(TrainkitError, match=said):
        main([*PLAN, f"--noise-scale={wrong}"])


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (None, "has no summary.json"),
        ({}, r"has measured none. Train with callbacks=\[NoiseScale\(\)\]"),
        ({"noise_scale": None}, "has measured none"),
        ({"noise_scale": {**ONE.facts(), "high": None}}, "at least 160 samples"),
    ],
)
def test_a_run_that_does_not_know_it_is_refused(
    summary: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    folder = str(tmp_path) if summary is None else run(tmp_path, **summary)
    with pytest.raises(TrainkitError, match=f"argument --noise-scale: .*{said}"):
        main([*PLAN, "--noise-scale", folder])
