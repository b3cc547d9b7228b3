"""A sweep file that would not do what it seems to do is refused, with the fix."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.cli.sweep.parameters import flatten, leaves
from trainkit.cli.sweep.sweep_file import SweepFile, check
from trainkit.errors import TrainkitError

GOOD: dict[str, Any] = {
    "program": "train.py",
    "method": "random",
    "metric": {"name": "val/loss", "goal": "minimize"},
    "parameters": {"lr": {"min": 0.001, "max": 0.1}, "seed": {"value": 0}},
}


def with_lr(parameter: Any, method: str = "random") -> dict[str, Any]:
    return {**GOOD, "method": method, "parameters": {"lr": parameter}}


def early(**keys: Any) -> dict[str, Any]:
    return {**GOOD, "early_terminate": {"type": "hyperband", **keys}}


def test_a_good_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump(GOOD))

    sweep = SweepFile.read(path)

    assert sweep.config == GOOD
    assert sweep.metric == "val/loss"
    assert list(sweep.varied) == ["lr"]
    assert not sweep.maximizes
    assert not sweep.runs_trainkit


@pytest.mark.parametrize(
    ("text", "fixed"),
    [("1e-4", "0.0001"), ("1e3", "1000"), ("1e-20", "1.0e-20"), ("3e25", "3.0e+25")],
)
def test_a_number_that_yaml_reads_as_a_string_is_refused_with_one_it_reads(
    tmp_path: Path, text: str, fixed: str
) -> None:
    # https://github.com/yaml/pyyaml/issues/173
    path = tmp_path / "s.yaml"
    path.write_text(
        f"program: t.py\nmethod: random\nparameters: {{lr: {{values: [{text}, 1]}}}}"
    )
    assert yaml.safe_load(text) == text

    with pytest.raises(
        TrainkitError,
        match=f"parameters.lr.values: {text} looks .* Write {re.escape(fixed)}",
    ):
        SweepFile.read(path)

    assert yaml.safe_load(fixed) == float(text)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            {**GOOD, "name": date(2024, 11, 21)},
            r"name: must be text.*in quotes, received datetime",
        ),
        (
            with_lr({"values": [{0: 2}]}),
            r"lr.values: must be text; put it in quotes, received 0",
        ),
        (
            {**GOOD, "method": "anneal"},
            "method: must be 'grid', 'random' or 'bayes', received 'anneal'",
        ),
        ({**GOOD, "parameterz": {}}, "'parameterz'.*Did you mean parameters"),
        (
            {**GOOD, "parameters": {}},
            "parameters: must not be empty, received {}. Write, for",
        ),
        ({**GOOD, "parameters": {"+lr": {"value": 1}}}, r"\+lr: W&B takes letters"),
        (
            with_lr(0.1),
            r"lr: must be a mapping, received 0.1. Write, for example, .*lr: {values",
        ),
        (
            with_lr({"vals": [1]}),
            "must be one of the keys value, .*received 'vals'. Did you mean values",
        ),
        (with_lr({}), "must have values"),
        (with_lr({"values": []}), "lr.values: must not be empty"),
        (with_lr({"values": 3}), "lr.values: must be a list, received 3"),
        (with_lr({"min": 0.1}), "uniform takes min, max, received {'min': 0.1}"),
        (with_lr({"min": 0.1, "max": 0.1}), "min must be below max"),
        (with_lr({"min": None, "max": 1}), "min: must be a number, received None"),
        (with_lr({"min": "1e-4", "max": 0.1}), "lr.min: 1e-4 .* Write 0.0001"),
        (with_lr({"value": "64"}), "lr.value: 64 looks like a number"),
        (
            with_lr({"distribution": "log_uniform", "min": 0.0001, "max": 0.1}),
            "exponents of e, so these mean 1 to 1.105, received .*_values for",
        ),
        (
            with_lr({"distribution": "log_uniform_values", "min": 0, "max": 0.1}),
            "needs min above 0",
        ),
        (with_lr({"min": 0.1, "max": 0.2}, "grid"), "a grid needs values"),
        ({**GOOD, "metric": None, "method": "bayes"}, "method: bayes needs one"),
        (
            {**GOOD, "metric": {"goal": "minimize"}},
            "metric.name: must be given, received {'goal'",
        ),
        (
            {**GOOD, "metric": {"name": "x", "goal": "min"}},
            "'minimize' or 'maximize', received 'min'. Write",
        ),
        ({**GOOD, "run_cap": 0}, "run_cap: must be a whole number from 1"),
        (
            {**GOOD, "early_terminate": {"type": "median"}},
            "early_terminate.type: must be 'hyperband', received 'median'",
        ),
        (early(), "needs min_iter, or max_iter and s, received {'type'"),
        (early(max_iter=9), "needs min_iter, or max_iter and s"),
        (
            early(min_iter=3, strct=True),
            r"early_terminate.strct: must be one of the keys type, min_iter, .*strict, "
            r"received 'strct'. Did you mean strict\?",
        ),
        (early(min_iter=0), "min_iter: must be a whole number from 1, received 0"),
        (early(min_iter=3, eta=1), "eta must be a number above 1, received .*'eta': 1"),
        (early(min_iter=3, strict="no"), "strict: must be true or false, .*'no'"),
        (
            {**GOOD, "metric": {"name": "x", "gaol": "maximize"}},
            "metric.gaol: must be one of the keys name, .*'gaol'. Did you mean goal",
        ),
        (
            {
                **GOOD,
                "metric": None,
                "early_terminate": {"type": "hyperband", "min_iter": 1},
            },
            "early_terminate needs one, and it is missing",
        ),
        ({**GOOD, "program": None}, "program: must name the program of a trial"),
        (
            {**GOOD, "command": "python train.py"},
            "command: must be a list, received 'python train.py'. Write",
        ),
        ({**GOOD, "program": "trainkit"}, r"needs \$\{args_no_hyphens\}"),
        (
            {**GOOD, "command": ["trainkit", "train", "${args}"]},
            r"needs \$\{args_no_hyphens\}",
        ),
    ],
)
def test_what_cannot_run_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        check(config, where="s.yaml")


@pytest.mark.parametrize(
    "parameter",
    [
        {"distribution": "log_uniform", "min": -9.2, "max": -2.3},
        {"distribution": "log_uniform_values", "min": 0.0001, "max": 0.1},
        {"distribution": "normal", "mu": 0, "sigma": 1},
        {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.25},
        {"values": ["adamw", "sgd", True, None, [1, 2]]},
    ],
)
def test_what_wandb_knows_is_taken(parameter: dict[str, Any]) -> None:
    check(with_lr(parameter), where="s.yaml")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a: [", "is not YAML"),
        (b"", "must be a mapping with method"),
        (b"- 1", "must be a mapping with method"),
        (b"\xff\xfe\x00a", "is not YAML"),
    ],
)
def test_an_unreadable_file_is_refused(
    tmp_path: Path, content: bytes, text: str
) -> None:
    path = tmp_path / "s.yaml"
    path.write_bytes(content)

    with pytest.raises(TrainkitError, match=text):
        SweepFile.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainkitError, match="cannot be read: No such file"):
        SweepFile.read(tmp_path / "none.yaml")


def test_nested_parameters_have_dotted_names() -> None:
    nested = {"optimizer": {"parameters": {"lr": {"values": [1, 2]}}}}

    assert dict(leaves(nested)) == {"optimizer.lr": {"values": [1, 2]}}
    assert flatten({"optimizer": {"lr": 1}}) == {"optimizer.lr": 1}
    with pytest.raises(TrainkitError, match=r"parameters.optimizer.parameters.lr"):
        check(
            {**GOOD, "parameters": {"optimizer": {"parameters": {"lr": 1}}}},
            where="s.yaml",
        )


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
        "distribution constant takes value, received {'value'",
    ),
    (
        {"min": 1, "max": 2.5, "q": 0.5},
        "uniform takes min, max, received {'min': 1, .*'q': 0.5}",
    ),
    ({"distribution": "normal", "min": 0, "max": 1}, "normal takes mu, sigma, "),
    ({"distribution": "log_uniform_values"}, "min, max, received {'dist"),
    ({"distribution": "int_uniform", "min": 1.5, "max": 2}, "takes whole numbers"),
    ({"values": [1, 2], "min": 1, "max": 2}, "categorical takes values, received"),
]
BAD_PROBABILITIES: list[tuple[dict[str, Any], str]] = [
    (
        {"values": [1], "probabilities": [0.2]},
        "probabilities must sum to 1, and sum to 0.2, received",
    ),
    (
        {"values": [1, 2], "probabilities": [0.2]},
        "be 2 numbers from 0 to 1, one for each of values, received",
    ),
    ({"values": [1, 2], "probabilities": [2, -1]}, "2 numbers from 0 to 1"),
    (
        {"values": [1, 2], "probabilities": 0.5},
        "must be a list, received 0.5",
    ),
]


@pytest.mark.parametrize(("parameter", "text"), BAD + BAD_PROBABILITIES)
def test_a_parameter_that_the_server_would_not_take_is_refused(
    parameter: dict[str, Any], text: str
) -> None:
    with pytest.raises(TrainkitError, match=f"s.yaml parameters.lr.*{text}"):
        check(with_lr(parameter), where="s.yaml")
