"""Replace secrets before anything is written down: keys, tokens, passwords."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trainkit.pages.atomic_file import write_atomically

REDACTED = "<redacted>"

_SECRET = re.compile(
    r"(^|_)(apikeys?|authorization|credentials?|pass(phrase|wd|word)|secrets?"
    r"|(access|api|encryption|private|secret|signing|ssh)_keys?"
    r"|(access|api|app|auth|bearer|bot|gh|git|github|gitlab|hf|hub|id|identity|private"
    r"|pypi|refresh|secret|security|session|user|wandb)_token)(_|$)|^token$"
)
_SECRET_VARIABLE = re.compile(r"_(token|key|pass|pwd|pat)$", re.IGNORECASE)
"""The end of a secret variable's name; the key `pad_token` is not a secret."""

_MIN_LENGTH = 8
"""The least length of a secret in the environment; a shorter value may be a word."""

_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_ENVIRONMENT = re.compile(r"\$\{oc\.env:[^,{}$]+(,\s*null)?\}")
_WORD = re.compile(r"([^\s={]+)=(.*)", re.DOTALL)
_INNER_KEY = re.compile(r"[\w.]+(?=['\"]?\s*:)")


def redact(value: Any, *, environ: Mapping[str, str] | None = None) -> Any:
    """A copy without secrets, for logs and files.

    It replaces the values of keys that sound secret (see `sounds_secret`), also in the
    words of a command line; the values of such environment variables in any text; and
    users and passwords in URLs. The name of an environment variable is not a secret.

    >>> redact({"hub": {"api_key": "sk-1", "key": "v0"}, "lr": 0.1}, environ={})
    {'hub': {'api_key': '<redacted>', 'key': 'v0'}, 'lr': 0.1}
    >>> redact(["seed=1", "+hub.token=abc", "++m={_target_: X, api_key: abc}"])
    ['seed=1', '+hub.token=<redacted>', '++m=<redacted>']
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


def redact_file(path: Path) -> None:
    """Replace secrets in a configuration that Hydra has written."""
    content = yaml.safe_load(path.read_text())
    # This entry repeats all words of the command line in one text.
    content.get("hydra", {}).get("job", {}).pop("override_dirname", None)
    write_atomically(path, yaml.safe_dump(redact(content), sort_keys=False))


def sounds_secret(key: str) -> bool:
    """Whether a key is likely to hold a secret.

    >>> [k for k in ("apiKey", "hf_token", "db.password", "token") if sounds_secret(k)]
    ['apiKey', 'hf_token', 'db.password', 'token']
    >>> [k for k in ("key", "pad_token", "tokens", "tokenizer") if sounds_secret(k)]
    []
    """
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key)
    return bool(_SECRET.search("_".join(re.findall(r"[a-z0-9]+", apart.lower()))))


def _secrets_of(environ: Mapping[str, str]) -> list[str]:
    """The secrets in an environment, longest first: one may contain another."""
    found = {
        value
        for name, value in environ.items()
        if len(value) >= _MIN_LENGTH
        and (sounds_secret(name) or _SECRET_VARIABLE.search(name))
    }
    return sorted(found, key=len, reverse=True)


def _redacted(value: Any, known: list[str], *, in_secret: bool) -> Any:
    if isinstance(value, Mapping):
        return {
            _redacted(key, known, in_secret=False): _redacted(
                each, known, in_secret=in_secret or sounds_secret(str(key))
            )
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_redacted(each, known, in_secret=in_secret) for each in value]
    if in_secret:
        is_named = isinstance(value, str) and _ENVIRONMENT.fullmatch(value)
        is_flag = isinstance(value, bool)  # `use_auth_token: true`
        return value if is_named or is_flag or value in (None, "", "???") else REDACTED
    return _text(value, known) if isinstance(value, str) else value


def _text(text: str, known: list[str]) -> str:
    word = _WORD.fullmatch(text)
    if word is not None:
        key, value = word.groups()
        # A list or a dict goes as a whole, since a part of it could not be read back.
        inner = _INNER_KEY.findall(value) if value[:1] in ("{", "[") else []
        if any(map(sounds_secret, (key, *inner))):
            return f"{key}={_redacted(value, known, in_secret=True)}"
    for secret in known:
        text = text.replace(secret, REDACTED)
    return _USER_IN_URL.sub(REDACTED, text)
