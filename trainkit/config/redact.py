"""What may be written down and shown: secrets and the environment's values replaced."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf, resolvers
from omegaconf.errors import OmegaConfBaseException

from trainkit.config._compat import register_resolver
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
_VARIABLE = re.compile(r"\$\{oc\.env:[^,{}$]+(,\s*null)?\}")
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
        is_named = isinstance(value, str) and _VARIABLE.fullmatch(value)
        is_flag = isinstance(value, bool)  # `use_auth_token: true`
        return value if is_named or is_flag or value in (None, "", "???") else REDACTED
    if isinstance(value, PurePath):
        value = str(value)
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


def public_config(config: DictConfig | Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with interpolations resolved, without the environment's values.

    An interpolation of an environment variable stays a text, also where another entry
    leads to it: what computes with it gets this text. The file then names the source of
    the value, and a copy of it works elsewhere. A root entry that cannot be resolved
    stays as it was written. Secrets are replaced, see `redact`.

    >>> public_config({"a": "${oc.env:HOME}", "b": "${a}/x", "n": "${m}", "m": 2})
    {'a': '${oc.env:HOME}', 'b': '${oc.env:HOME}/x', 'n': 2, 'm': 2}

    Args:
        config: the whole configuration, since interpolations may lead anywhere in it.
    """
    whole: Any = OmegaConf.create(config)  # type: ignore[arg-type]
    raw: Any = OmegaConf.to_container(whole, resolve=False, enum_to_str=True)
    register_resolver("oc.env", _as_written)
    try:
        return redact({key: _resolved(whole, key, raw[key]) for key in raw})
    finally:
        register_resolver("oc.env", resolvers.oc.env)


def _as_written(*words: str | None) -> str:
    """The interpolation of an environment variable, as a text."""
    said = ("null" if word is None else str(word) for word in words)
    return f"${{oc.env:{','.join(said)}}}"


def _resolved(config: Any, key: Any, raw: Any) -> Any:
    """The value of a root entry, or what was written, if it cannot be resolved."""
    try:
        value = config[key]
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    except (OmegaConfBaseException, ValueError, TypeError):
        return raw
    return value
