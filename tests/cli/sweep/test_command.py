"""A trial's command line is the agent's, and Hydra reads back what was proposed."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.whole_config import hydra_text

pytest.importorskip("optuna")
from trainkit.cli.sweep.offline import command_line

ARGUMENTS = {"lr": 0.1, "flag": True, "off": False}
SHORT = ["".join(w) for n in range(5) for w in itertools.product("\\'a,", repeat=n)]
SCALARS = (
    st.text("\\'\"ab1e ,=:$")
    | st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]))
    .filter(lambda text: "${" not in text)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)  # fmt: skip


def sweep(*command: str, **config: Any) -> SweepFile:
    parameters = {"lr": {"value": 1}}
    common = {"method": "random", "parameters": parameters, "program": "t.py"}
    return SweepFile.model_validate({**common, "command": list(command), **config})


@example(SHORT)
@given(SCALARS | st.lists(SCALARS, max_size=3))
def test_hydra_reads_back_what_was_written(value: Any) -> None:
    override = OverridesParser.create().parse_override(f"key={hydra_text(value)}")

    read = _plain(override.value())
    assert read == value
    assert type(read) is type(value)
    # The control: what an agent writes for None is a text to Hydra.
    assert OverridesParser.create().parse_override("key=None").value() == "None"


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value.text if hasattr(value, "text") else value


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("${args_json_file}", ["{folder}/arguments.json"]),
        ("${env}", ["/usr/bin/env"]),
        ("${interpreter}", [sys.executable]),
        ("${program}", ["t.py"]),
        ("--gpu=${envvar:TRAINKIT_TEST_GPU}", ["--gpu=3"]),
        ("${args_no_hyphens}", ["lr=0.1", "flag=True", "off=False", "more"]),
        ("${args_no_boolean_flags}", ["--lr=0.1", "--flag"]),
    ],
)
def test_command_line_is_the_agents(
    word: str, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRAINKIT_TEST_GPU", "3")
    found = command_line(sweep(word), ARGUMENTS, tmp_path, more=["more"])
    assert found == [each.replace("{folder}", str(tmp_path)) for each in words]
    assert json.loads((tmp_path / "arguments.json").read_text()) == ARGUMENTS


@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        ({"command": ["${env}", "/opt/bin/trainkit", "train"]}, True),
        ({"command": ["${interpreter}", "-m", "trainkit", "train"]}, True),
        ({"program": "trainkit", "command": ["${program}", "train"]}, True),
        ({"command": ["trainkit", "fit"]}, False),
        ({"program": "trainkit.py"}, False),
    ],
)
def test_trainkit_train_is_recognised(config: dict[str, Any], is_one: bool) -> None:
    words = [*config.pop("command", ["${program}"]), "${args_no_hyphens}"]
    assert sweep(*words, **config).runs_trainkit is is_one
