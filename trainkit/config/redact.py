"""Replace secrets before anything is written down: keys, tokens, passwords."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainkit.pages.atomic_file import write_atomically

REDACTED = "<redacted>"

_SECRET_WORDS = frozenset(
    "apikey authorization credential credentials passphrase passwd password secret "
    "secrets".split()
)
_KINDS_OF_KEY = frozenset("access api encryption private secret signing ssh".split())
_KINDS_OF_TOKEN = frozenset(
    "access api app auth bearer bot gh git github gitlab hf hub id identity private "
    "pypi refresh secret security session user wandb".split()
)
_OF_VARIABLES = ("_TOKEN", "_KEY", "_PASS", "_PWD", "_PAT")
"""Endings of secret environment variables; the key `pad_token` is not a secret."""

_MIN_LENGTH = 8
"""The least length of a secret in the environment; a shorter value may be a word."""

_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^,{}$]+(,\s*null)?\}")


def redact(value: Any, *, environ: Mapping[str, str] | None = None) -> Any:
    """A copy without secrets, for logs and files.

    It replaces the values of keys that sound secret (see `sounds_secret`), the values
    of such environment variables in any text, and users and passwords in URLs. The name
    of an environment variable is not a secret.

    >>> redact({"hub": {"api_key": "sk-1", "key": "v0"}, "lr": 0.1}, environ={})
    {'hub': {'api_key': '<redacted>', 'key': 'v0'}, 'lr': 0.1}
    >>> redact("see https://me:pw@host/x", environ={})
    'see https://<redacted>@host/x'
    >>> redact(["--x=12345678"], environ={"MY_API_KEY": "12345678"})
    ['--x=<redacted>']
    >>> redact({"api_key": "${oc.env:MY_API_KEY}"}, environ={})
    {'api_key': '${oc.env:MY_API_KEY}'}

    Args:
        value: nested mappings and lists of plain values.
        environ: the environment; by default, the environment of the process.
    """
    known = _secrets_of(os.environ if environ is None else environ)
    return _redacted(value, known, in_secret=False)


def redact_words(words: Sequence[str]) -> list[str]:
    """Words of a command line, with secret values of `key=value` replaced.

    >>> redact_words(["seed=1", "+hub.token=abc", "++m={_target_: X, api_key: abc}"])
    ['seed=1', '+hub.token=<redacted>', '++m=<redacted>']
    """
    return [_word(word) for word in words]


def _word(word: str) -> str:
    key, equals, value = word.partition("=")
    if value[:1] in ("{", "["):
        # Replaced as a whole, since Hydra could not read back a part of it.
        names = re.findall(r"[\w.]+(?=['\"]?\s*:)", value)
        if any(map(sounds_secret, names)):
            return f"{key}={REDACTED}"
    (shown,) = redact({key: value}).values()
    return f"{key}{equals}{shown}"


def redact_file(path: Path) -> None:
    """Replace secrets in a configuration that Hydra has written."""
    content = yaml.safe_load(path.read_text())
    # This entry repeats all words of the command line in one text.
    content.get("hydra", {}).get("job", {}).pop("override_dirname", None)
    content = redact(_with_words(content))
    write_atomically(path, yaml.safe_dump(content, sort_keys=False))


def _with_words(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_words(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_word(x) if isinstance(x, str) else _with_words(x) for x in value]
    return value


def sounds_secret(key: str) -> bool:
    """Whether a key is likely to hold a secret.

    >>> [k for k in ("apiKey", "hf_token", "db.password", "token") if sounds_secret(k)]
    ['apiKey', 'hf_token', 'db.password', 'token']
    >>> [k for k in ("key", "pad_token", "tokens", "tokenizer") if sounds_secret(k)]
    []
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", key)
    words = re.findall(r"[a-z0-9]+", spaced.lower())
    if _SECRET_WORDS.intersection(words) or words == ["token"]:
        return True
    return any(
        (second in ("key", "keys") and first in _KINDS_OF_KEY)
        or (second == "token" and first in _KINDS_OF_TOKEN)
        for first, second in zip(words, words[1:], strict=False)
    )


def _secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The secrets in an environment, longest first: one may contain another."""
    found = {
        value
        for name, value in environ.items()
        if len(value) >= _MIN_LENGTH
        and (sounds_secret(name) or name.upper().endswith(_OF_VARIABLES))
    }
    return sorted(found, key=len, reverse=True)


def _redacted(value: Any, known: list[str], *, in_secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            _text(key, known) if isinstance(key, str) else key: _redacted(
                each, known, in_secret=in_secret or sounds_secret(str(key))
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(each, known, in_secret=in_secret) for each in value]
    if isinstance(value, str):
        is_named = _ENVIRONMENT.fullmatch(value) or value in ("", "???")
        return REDACTED if in_secret and not is_named else _text(value, known)
    is_flag = value is None or isinstance(value, bool)  # `use_auth_token: true`
    return REDACTED if in_secret and not is_flag else value


def _text(text: str, known: list[str]) -> str:
    for secret in known:
        text = text.replace(secret, REDACTED)
    return _USER_IN_URL.sub(REDACTED, text)
