"""The public configuration is the resolved one, without the environment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from trainkit.config.public_config import public_config


class Color(Enum):
    RED = 1


@dataclass
class Typed:
    n: int = 3
    lr: Any = "${oc.env:MY_VARIABLE}"
    color: Color = Color.RED
    path: Path = Path("a/b")
    missing: str = "???"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MY_VARIABLE", "2468")
    OmegaConf.register_new_resolver("test.twice", lambda x: x * 2, replace=True)
    yield
    OmegaConf.clear_resolver("test.twice")


def test_without_the_environment_it_equals_the_resolved_configuration() -> None:
    config = OmegaConf.create(
        {
            "a": {"b": [1, "${..c}", {"d": "${a.c}"}], "c": 0.5},
            "text": "run-${a.c}",
            "whole": "${a}",
            "twice": "${test.twice:${a.c}}",
            "none": None,
            "escaped": r"\${x}",
            7: "${a.b[0]}",
        }
    )
    assert public_config(config) == OmegaConf.to_container(config, resolve=True)


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:MY_VARIABLE}",
        "${ oc.env:MY_VARIABLE}",
        "${oc.env :MY_VARIABLE}",
        "${oc.${reader}:MY_VARIABLE}",
        r"\${oc.env:MY_VARIABLE}",
        r"\\${oc.env:MY_VARIABLE}",
        "a/${oc.env:MY_VARIABLE}/b",
        "${oc.decode:${oc.env:MY_VARIABLE}}",
        "${oc.env:MY_VARIABLE,${other}}",
        "${test.twice:${oc.env:MY_VARIABLE}}",
        "${test.twice:${direct}}",
        "${oc.select:direct}",
    ],
)
def test_what_reads_the_environment_stays_as_it_was_written(text: str) -> None:
    config = OmegaConf.create(
        {
            "direct": "${oc.env:MY_VARIABLE}",
            "other": 1,
            "reader": "env",
            "x": text,
            "list": [text],
        }
    )
    public = public_config(config)
    assert public["x"] == text
    assert public["list"] == [text]
    assert "2468" in str(OmegaConf.to_container(config, resolve=True))


def test_an_entry_that_leads_there_says_so() -> None:
    config = {"root": "${oc.env:MY_VARIABLE}", "deep": {"path": "${root}/data"}}
    public = public_config(config)
    assert public["deep"]["path"] == "${oc.env:MY_VARIABLE}/data"
    reread = OmegaConf.create(public)
    assert reread.deep.path == "2468/data"


def test_schemas_become_plain_yaml() -> None:
    public = public_config(OmegaConf.create({"typed": Typed, "n": "${typed.n}"}))
    assert yaml.safe_load(yaml.safe_dump(public)) == {
        "typed": {
            "n": 3,
            "lr": "${oc.env:MY_VARIABLE}",
            "color": "RED",
            "path": "a/b",
            "missing": "???",
        },
        "n": 3,
    }


@pytest.mark.parametrize("text", ["${nowhere}", "${no.such:1}", "${a.missing}"])
def test_what_cannot_be_resolved_stays_as_it_was_written(text: str) -> None:
    assert public_config({"a": {"missing": "???"}, "x": text})["x"] == text


def test_secrets_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cretvalue")
    public = public_config(
        {"hub": {"token": "t"}, "note": "is ${x}", "x": "s3cretvalue"}
    )
    assert public == {
        "hub": {"token": "<redacted>"},
        "note": "is <redacted>",
        "x": "<redacted>",
    }


def test_the_configuration_given_is_left_alone() -> None:
    config = OmegaConf.create({"a": "${oc.env:MY_VARIABLE}", "b": "${a}"})
    OmegaConf.set_readonly(config, True)
    public_config(config)
    assert OmegaConf.to_container(config) == {"a": "${oc.env:MY_VARIABLE}", "b": "${a}"}
