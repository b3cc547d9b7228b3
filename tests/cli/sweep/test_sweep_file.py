"""A sweep file that would not do what it seems to do is refused, with the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.cli.sweep.sweep_file import Hyperband, SweepFile
from trainkit.errors import TrainkitError

GOOD: dict[str, Any] = {
    "program": "train.py",
    "method": "random",
    "metric": {"name": "val/loss", "goal": "minimize"},
    "parameters": {"lr": {"min": 0.001, "max": 0.1}, "seed": {"value": 0}},
}


def read(content: str, folder: Path) -> SweepFile:
    path = folder / "s.yaml"
    path.write_text(content)
    return SweepFile.read(path)


def test_a_good_file_is_taken_as_it_is(tmp_path: Path) -> None:
    drawn = {"values": [1, 2], "probabilities": [0.25, 0.75]}
    bands = {"type": "hyperband", "min_iter": 3}
    own = {"optimizer.lr": drawn, "optimizer.eps": {"value": 1e-8}}
    good = {**GOOD, "parameters": {**GOOD["parameters"], **own}}
    good["early_terminate"] = bands
    sweep = read(yaml.safe_dump(good), tmp_path)
    assert sweep.config == good
    assert sweep.early_terminate == Hyperband.model_validate({**bands, "eta": 3})
    assert sweep.metric_name == "val/loss"
    assert sweep.varied == ["lr", "optimizer.lr"]
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
    assert yaml.safe_load(text) == text
    values = (
        f"program: t.py\nmethod: random\nparameters: {{lr: {{values: [{text}, 1]}}}}"
    )
    with pytest.raises(
        TrainkitError, match=f"must be written {re.escape(fixed)}, .*{text}"
    ):
        read(values, tmp_path)
    assert yaml.safe_load(fixed) == float(text)


OF_A_PARAMETER = [
    ("{values: [{0: 2}]}", "lr.values: must be a valid string, received 0"),
    ("0.1", "lr: must be a valid dictionary, received 0.1."),
    (
        "{vals: [1]}",
        r"lr.vals: trainkit takes no such key, received \[1\]. Did you mean va",
    ),
    ("{}", "lr: distribution int_uniform takes .*received {}"),
    ("{values: []}", r"lr.values: .*at least 1 item .*received \[\]"),
    ("{values: 3}", "lr.values: must be a valid list, received 3"),
    ("{min: 0.1}", "uniform takes max and min, received {'min': 0.1}"),
    ("{min: 0.1, max: 0.1}", "min must be below max"),
    ("{min: null, max: 1}", "lr.min: must be a number, received None"),
    ("{min: 1e-4, max: 0.1}", "lr.min: must be written 0.0001, .* received '1e-4'"),
    ('{value: "64"}', "lr.value: must be written 64, "),
    (
        "{distribution: log_uniform, min: 0.0001, max: 0.1}",
        "exponents of e, and log_uniform_values bounds of the value, received",
    ),
    ("{distribution: log_uniform_values, min: 0, max: 0.1}", "needs min above 0"),
    (
        "{distribution: log_unform_values, min: 0.1, max: 1.0}",
        "must be one of constant, .* Did you mean log_uniform_values",
    ),
    ("{distribution: null, min: 1, max: 2}", "must be one of .*received .*None"),
    ("{distribution: [normal]}", r"must be one of .* received .*\['normal'\]"),
    ("{value: 1, probabilities: [0.2]}", "constant takes value, received {"),
    ("{min: 1, max: 2.5, q: 0.5}", "uniform takes max and min, received {.*'q': 0.5"),
    ("{distribution: normal, min: 0, max: 1}", "normal takes mu and sigma, received"),
    ("{distribution: int_uniform, min: 1.5, max: 2}", "int_uniform takes whole number"),
    ("{values: [1, 2], min: 1, max: 2}", "categorical takes values, received"),
    ("{values: [1, 2], probabilities: [1.0]}", "probabilities must be one from 0 to"),
    ("{values: [1, 2], probabilities: [2, -1]}", "probabilities must be one from 0"),
    ("{parameters: {b: {value: 1}}}", "lr.parameters: .* dotted name: optimizer.lr"),
]
OF_A_FILE = [
    ("name: 2024-11-21", r"name: .*JSON value, received datetime"),
    ("method: anneal", "method: must be 'grid', 'random' or 'bayes', received 'annea"),
    (
        "parameterz: {}",
        "parameterz: trainkit takes no such key.*Did you mean parameters",
    ),
    ("parameters: {}", "parameters: .* at least 1 item .*received {}"),
    ("parameters: {+lr: {value: 1}}", r"\+lr: .*match pattern .*received '\+lr'"),
    (
        "method: grid",
        r"parameters.lr: a grid needs values: \[...\], and this is uniform",
    ),
    ("{method: bayes, metric: null}", "metric: .* need one, and it is missing"),
    ("metric: {goal: minimize}", "metric.name: Field required, received {'goal'"),
    ("metric: {name: x, goal: min}", "'minimize' or 'maximize', received 'min'"),
    ("run_cap: 0", "run_cap: must be greater than or equal to 1, received 0"),
    ("early_terminate: {type: median}", "type: must be 'hyperband', received 'median'"),
    ("early_terminate: {type: hyperband}", "needs min_iter, or max_iter and s, rece"),
    (
        "early_terminate: {type: hyperband, min_iter: 3, strct: true}",
        r"early_terminate.strct: trainkit takes no such key, .*mean strict\?",
    ),
    (
        "early_terminate: {type: hyperband, min_iter: 0}",
        "min_iter: must be greater than or equal to 1, received 0",
    ),
    (
        "early_terminate: {type: hyperband, min_iter: 3, eta: 1}",
        "eta must be a number above 1, received .*'eta': 1",
    ),
    (
        "early_terminate: {type: hyperband, min_iter: 3, strict: 'no'}",
        "strict: must be a valid boolean, received 'no'",
    ),
    (
        "{metric: null, early_terminate: {type: hyperband, min_iter: 1}}",
        "early_terminate need one, and it is missing: write metric: {name",
    ),
    ("program: null", "program: must name the program of a trial, and is missing"),
    ("command: python train.py", "command: must be a valid list, received 'python tra"),
    ("program: trainkit", r"needs \$\{args_no_hyphens\}"),
    ("command: [trainkit, train, '${args}']", r"needs \$\{args_no_hyphens\}"),
]


@pytest.mark.parametrize(
    ("change", "text"),
    [*((f"parameters: {{lr: {p}}}", text) for p, text in OF_A_PARAMETER), *OF_A_FILE],
)
def test_what_cannot_run_is_refused(change: str, text: str, tmp_path: Path) -> None:
    file = yaml.safe_dump({**GOOD, **yaml.safe_load(change)})
    with pytest.raises(TrainkitError, match=rf"^{tmp_path}/s.yaml .*{text}"):
        read(file, tmp_path)
    read(yaml.safe_dump(GOOD), tmp_path)  # the control


@pytest.mark.parametrize(
    "parameter",
    [
        {"distribution": "log_uniform", "min": -9.2, "max": -2.3},
        {"distribution": "q_uniform", "min": 0.0, "max": 1.0, "q": 0.25},
        {"values": ["adamw", "sgd", True, None, [1, 2], "nan"]},
    ],
)
def test_what_wandb_knows_is_taken(parameter: dict[str, Any]) -> None:
    command = ["python", "t.py", "--model", None]  # which needs no program
    config = {**GOOD, "command": command, "parameters": {"lr": parameter}}
    del config["program"]
    SweepFile.model_validate(config)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"a: [", "cannot be read as YAML"),
        (b"", "must be a valid dictionary, received None"),
        (b"- 1", r"must be a valid dictionary, received \[1\]"),
        (b"\xff\xfe\x00a", "cannot be read as YAML"),
        (None, "cannot be read as YAML: .*No such file"),
    ],
)
def test_an_unreadable_file_is_refused(
    tmp_path: Path, content: bytes | None, text: str
) -> None:
    path = tmp_path / "s.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TrainkitError, match=rf"{re.escape(str(path))}.* {text}"):
        SweepFile.read(path)
