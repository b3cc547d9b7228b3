"""What W&B's own engine refuses with its own errors is refused here, in ours."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.cli.sweep.distributions import DISTRIBUTIONS
from trainkit.cli.sweep.offline.engine import Engine
from trainkit.cli.sweep.sweep_file import check
from trainkit.errors import TrainkitError

GOOD: list[dict[str, Any]] = [
    {"distribution": "constant", "value": 2},
    {"distribution": "categorical", "values": [1, 2]},
    {"distribution": "normal"},
    {"distribution": "q_normal", "mu": 0, "sigma": 1, "q": 0.5},
    {"distribution": "beta", "a": 1, "b": 2},
    {"distribution": "int_uniform", "min": 1, "max": 3},
    {"distribution": "q_log_uniform_values", "min": 0.1, "max": 3.0, "q": 0.1},
    {"distribution": "inv_log_uniform_values", "min": 0.1, "max": 0.9},
    {"values": [1, 2], "probabilities": [0.2, 0.8]},
    {"values": [1, 2, 3], "probabilities": [0.1, 0.2, 0.7]},
    {"min": 1, "max": 3},
    {"min": 1.5, "max": 3},
]
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"distribution": "log_unform_values", "min": 0.1, "max": 1.0},
        r"distribution: must be one of constant, .*log_uniform_values, .* received "
        r"'log_unform_values'. Did you mean log_uniform_values\?",
    ),
    ({"distribution": None, "min": 1, "max": 2}, "must be one of .* received None"),
    ({"distribution": ["normal"]}, r"must be one of .* received \['normal'\]"),
    (
        {"value": 1, "probabilities": [0.2]},
        "distribution constant takes value, received value, probabilities",
    ),
    (
        {"min": 1, "max": 2.5, "q": 0.5},
        "uniform takes min, max, received min, max, q. These keys fit .*q_uniform",
    ),
    ({"distribution": "normal", "min": 0, "max": 1}, "normal takes mu, sigma, "),
    ({"distribution": "log_uniform_values"}, "min, max, received no key"),
    ({"distribution": "int_uniform", "min": 1.5, "max": 2}, "takes whole numbers"),
    ({"values": [1, 2], "min": 1, "max": 2}, "categorical takes values, received"),
]
BAD_PROBABILITIES: list[tuple[dict[str, Any], str]] = [
    (
        {"values": [1], "probabilities": [0.2]},
        r"probabilities: must sum to 1, received \[0.2\], which sum to 0.2",
    ),
    (
        {"values": [1, 2], "probabilities": [0.2]},
        r"list of 2 numbers from 0 to 1, one for each of values, received \[0.2\]",
    ),
    ({"values": [1, 2], "probabilities": [2, -1]}, "2 numbers from 0 to 1"),
    ({"values": [1, 2], "probabilities": 0.5}, "received 0.5"),
]


def with_lr(parameter: dict[str, Any], method: str = "random") -> dict[str, Any]:
    return {"program": "t.py", "method": method, "parameters": {"lr": parameter}}


@pytest.mark.parametrize("parameter", GOOD)
def test_what_the_engine_takes_is_taken(parameter: dict[str, Any]) -> None:
    pytest.importorskip("sweeps")

    check(with_lr(parameter), where="s.yaml")

    assert "lr" in (Engine(with_lr(parameter), seed=1).propose([]) or {})


@pytest.mark.parametrize(("parameter", "text"), BAD + BAD_PROBABILITIES)
def test_what_it_does_not_is_refused(parameter: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=f"s.yaml parameters.lr.*{text}"):
        check(with_lr(parameter), where="s.yaml")


@pytest.mark.parametrize("parameter", [parameter for parameter, _ in BAD])
def test_the_engine_would_not_take_it_either_and_has_no_traceback(
    parameter: dict[str, Any],
) -> None:
    pytest.importorskip("sweeps")

    with pytest.raises(TrainkitError, match="W&B's engine refuses it"):
        Engine(with_lr(parameter), seed=1).propose([])


def test_the_distributions_are_those_of_wandbs_schema() -> None:
    pytest.importorskip("sweeps")
    from sweeps.config import schema

    found: Any = schema.dereferenced_sweep_config_jsonschema
    every = found["definitions"]["parameter"]["anyOf"]
    forms = [form for each in every for form in each.get("anyOf", [each])]
    names = {
        name
        for form in forms
        for name in form["properties"].get("distribution", {}).get("enum", [])
    }
    assert set(DISTRIBUTIONS) == names


@pytest.mark.parametrize(
    ("parameter", "text"),
    [
        ({"values": [1, 2], "probabilities": [0.5, 0.5]}, r"probabilities \[0.5, 0.5"),
        ({"distribution": "normal"}, "received distribution normal"),
    ],
)
def test_a_grid_lists_its_values(parameter: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=f"a grid needs values, .*{text}"):
        check(with_lr(parameter, "grid"), where="s.yaml")
