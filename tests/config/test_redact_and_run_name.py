"""What is written down: no secrets, no values of the environment; a name for a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from tests.startup import ended
from trainkit.config.redact import (
    REDACTED,
    public_config,
    redact,
    redact_file,
    sounds_secret,
)
from trainkit.config.run_name import job_name, run_name

SECRET = """
api_key apiKey API-KEY wandb.api_key WANDB_API_KEY HF_TOKEN hub_token use_auth_token
AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN db_password client_secret
credentials private_key token
"""
OTHER = """
tokens tokenizer ignore_token pad_token eos_token_id max_tokens token_type key sort_key
keys secretary access num_keys
"""


@pytest.mark.parametrize("key", [*SECRET.split(), *OTHER.split()])
def test_keys_of_secrets_are_told_from_those_of_other_things(key: str) -> None:
    assert sounds_secret(key) == (key in SECRET.split())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"password": 1234}, {"password": REDACTED}),
        ({"use_auth_token": True}, {"use_auth_token": True}),
        ({"token": None}, {"token": None}),
        ({"token": "???"}, {"token": "???"}),
        (
            {"credentials": {"user": "u", "n": [1]}},
            {"credentials": {"user": REDACTED, "n": [REDACTED]}},
        ),
        ({"api_key": "${oc.env:K,sk-1}"}, {"api_key": REDACTED}),
        ({"api_key": "${oc.env:K,null}"}, {"api_key": "${oc.env:K,null}"}),
        (("a", {1: 2}), ["a", {1: 2}]),
        ("https://tok@github.com/a", "https://<redacted>@github.com/a"),
        ("mail me@host.org, a//b@c", "mail me@host.org, a//b@c"),
    ],
)
def test_values(value: Any, expected: Any) -> None:
    assert redact(value, environ={}) == expected


def test_secret_variables_are_found_wherever_they_stand() -> None:
    environ = {"A_TOKEN": "12345678", "B_API_KEY": "12345678-and-more", "C_KEY": "open"}
    environ |= {"HF_TOKEN": "short", "HOME": "/home/somebody"}
    text = "12345678 x12345678-and-more open short /home/somebody"
    assert redact({text: [text]}, environ=environ | {"HUB_TOKEN": ""}) == {
        "<redacted> x<redacted> open short /home/somebody": [
            "<redacted> x<redacted> open short /home/somebody"
        ]
    }


def test_secrets_in_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "multirun.yaml"
    words = ["seed=1,2", "model.api_key=sk-1", "+m={_target_: X, password: p}"]
    path.write_text(yaml.safe_dump({"overrides": {"task": words}, "lr": 0.1}))
    redact_file(path)
    kept = ["seed=1,2", "model.api_key=<redacted>", "+m=<redacted>"]
    assert yaml.safe_load(path.read_text()) == {"overrides": {"task": kept}, "lr": 0.1}


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
    ("text", "written"),
    [
        ("${oc.env:MY_VARIABLE}", "${oc.env:MY_VARIABLE}"),
        ("${ oc.env:MY_VARIABLE}", "${oc.env:MY_VARIABLE}"),
        ("${oc.env :MY_VARIABLE}", "${oc.env:MY_VARIABLE}"),
        ("${oc.${reader}:MY_VARIABLE}", "${oc.env:MY_VARIABLE}"),
        (r"\\${oc.env:MY_VARIABLE}", r"\${oc.env:MY_VARIABLE}"),
        ("a/${oc.env:MY_VARIABLE}/b", "a/${oc.env:MY_VARIABLE}/b"),
        ("${oc.decode:${oc.env:MY_VARIABLE}}", "${oc.env:MY_VARIABLE}"),
        ("${oc.env:MY_VARIABLE,${other}}", "${oc.env:MY_VARIABLE,1}"),
        ("${oc.env:NO_VARIABLE,null}", "${oc.env:NO_VARIABLE,null}"),
        ("${oc.select:direct}", "${oc.env:MY_VARIABLE}"),
    ],
)
def test_what_reads_the_environment_stays_a_text(text: str, written: str) -> None:
    entries = {"direct": "${oc.env:MY_VARIABLE}", "other": 1, "reader": "env"}
    config = OmegaConf.create({**entries, "x": text, "list": [text]})
    public = public_config(config)
    assert (public["x"], public["list"]) == (written, [written])
    assert "2468" not in str(public)
    is_escaped = text.startswith("\\")
    assert is_escaped or str(OmegaConf.create(public).x) == str(config.x)  # read again
    assert "2468" in str(OmegaConf.to_container(config, resolve=True))


def test_schemas_become_plain_yaml() -> None:
    public = public_config(OmegaConf.create({"typed": Typed, "n": "${typed.n}"}))
    typed = {"n": 3, "lr": "${oc.env:MY_VARIABLE}", "color": "RED", "path": "a/b"}
    typed["missing"] = "???"
    assert yaml.safe_load(yaml.safe_dump(public)) == {"typed": typed, "n": 3}


@pytest.mark.parametrize(
    ("config", "public"),
    [
        *(
            ({"a": {"missing": "???"}, "x": text}, {"a": {"missing": "???"}, "x": text})
            for text in ("${nowhere}", "${no.such:1}", "${a.missing}")  # as written
        ),
        (
            {"root": "${oc.env:MY_VARIABLE}", "deep": {"path": "${root}/data"}},
            {
                "root": "${oc.env:MY_VARIABLE}",
                "deep": {"path": "${oc.env:MY_VARIABLE}/data"},
            },
        ),
        (
            {"hub": {"token": "t"}, "note": "is ${x}", "x": "s3cretvalue"},
            {"hub": {"token": REDACTED}, "note": f"is {REDACTED}", "x": REDACTED},
        ),
    ],
)
def test_what_is_written_of_a_configuration_which_is_left_alone(
    config: dict[str, Any], public: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cretvalue")
    given = OmegaConf.create(config)
    OmegaConf.set_readonly(given, True)
    assert public_config(given) == public
    redact(config)
    assert OmegaConf.to_container(given) == config


# ---- all ranks of a run find the same folder; another run finds another --------------


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}


@pytest.mark.parametrize(
    ("environ", "name", "job"),
    [
        (SLURM, "slurm-7-1", "slurm-7-1"),
        ({**SLURM, "SLURM_PROCID": "3"}, "slurm-7-1", "slurm-7-1"),
        ({**SLURM, "SLURM_RESTART_COUNT": "0"}, "slurm-7-1", "slurm-7-1"),
        ({**SLURM, "SLURM_RESTART_COUNT": "2"}, "slurm-7-1-again2", "slurm-7-1"),
        ({**SLURM, "SLURM_STEP_ID": "2"}, "slurm-7-2", "slurm-7-2"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "j"}, "torchrun-j", "torchrun-j"),
        (
            {"TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_RESTART_COUNT": "1"},
            "torchrun-j-again1",
            "torchrun-j",
        ),
    ],
)
def test_all_tasks_and_attempts_of_a_job_have_its_name(
    environ: dict[str, str], name: str, job: str
) -> None:
    assert run_name(environ) == name
    assert job_name(environ) == job


@pytest.mark.parametrize("leave", ["SLURM_STEP_ID", "SLURM_NTASKS", None])
def test_one_process_of_a_job_or_of_none_is_a_run_of_its_own(leave: str | None) -> None:
    environ = {key: value for key, value in SLURM.items() if leave and key != leave}
    assert run_name(environ) != run_name(environ)
    assert job_name(environ) is None


def test_a_job_without_a_name_is_known_by_its_parent() -> None:
    program = "from trainkit.config.run_name import run_name\n"
    program += f"print(run_name({TORCHRUN}))"
    words = [sys.executable, "-c", program]
    name, again = (ended(words, Path(), os.environ).stdout.strip() for _ in range(2))
    assert name == again
    assert name.startswith(f"torchrun-{os.getpid()}")
    assert run_name(TORCHRUN) != name  # of another parent
    assert run_name({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).endswith("-again1")


def test_without_the_facts_of_a_process_its_number_is_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 2**40)  # of none that runs
    assert job_name(TORCHRUN) == f"torchrun-{2**40}"
