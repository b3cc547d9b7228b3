"""What sounds like a secret is replaced, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainkit.config.redact import REDACTED, redact, redact_file, sounds_secret


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "apiKey",
        "API-KEY",
        "wandb.api_key",
        "WANDB_API_KEY",
        "HF_TOKEN",
        "hub_token",
        "use_auth_token",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN",
        "db_password",
        "client_secret",
        "credentials",
        "private_key",
        "token",
    ],
)
def test_keys_of_secrets(key: str) -> None:
    assert sounds_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        "tokens",
        "tokenizer",
        "ignore_token",
        "pad_token",
        "eos_token_id",
        "max_tokens",
        "token_type",
        "key",
        "sort_key",
        "keys",
        "secretary",
        "access",
        "num_keys",
    ],
)
def test_keys_of_other_things(key: str) -> None:
    assert not sounds_secret(key)


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


def test_the_value_given_is_left_alone() -> None:
    config = {"a": {"token": "x"}, "b": [{"password": "y"}]}
    redact(config, environ={})
    assert config == {"a": {"token": "x"}, "b": [{"password": "y"}]}


def test_secrets_in_a_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "multirun.yaml"
    words = ["seed=1,2", "model.api_key=sk-1", "+m={_target_: X, password: p}"]
    path.write_text(yaml.safe_dump({"overrides": {"task": words}, "lr": 0.1}))
    redact_file(path)
    assert yaml.safe_load(path.read_text()) == {
        "overrides": {
            "task": ["seed=1,2", "model.api_key=<redacted>", "+m=<redacted>"]
        },
        "lr": 0.1,
    }
