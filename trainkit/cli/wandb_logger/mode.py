"""Whether a W&B run goes to a server: decided without asking anybody."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from trainkit.errors import TrainkitError

Mode = Literal["auto", "online", "offline", "disabled"]

_ALIASES = {"run": "online", "dryrun": "offline"}


def check_mode(mode: str) -> None:
    """Refuse what is no mode."""
    if mode not in get_args(Mode):
        raise TrainkitError(
            f"WandbRunLogger mode: must be one of {', '.join(get_args(Mode))}, "
            f"received {mode!r}. auto is offline unless you are logged in."
        )


def resolve_mode(mode: Mode, *, environ: Mapping[str, str] = os.environ) -> str:
    """What `wandb.init` gets as its mode.

    `"auto"` is what `WANDB_MODE` says, or `wandb offline`; else online under a sweep's
    agent or where there is a login for the server; else offline. Nothing is asked, of
    the user or the network.

    Raises:
        TrainkitError: online is asked for, and there is no login.
    """
    import wandb

    settings = wandb.setup().settings
    wanted = _wanted(mode, environ, saved=settings.mode)
    if wanted == "auto":
        wanted = "online" if is_logged_in(settings, environ=environ) else "offline"
    elif wanted == "online" and not is_logged_in(settings, environ=environ):
        raise TrainkitError(
            f"WandbRunLogger mode: online needs a login for {settings.base_url}, and "
            f"there is none. Run `wandb login`, set WANDB_API_KEY, or use mode=offline."
        )
    return wanted


def _wanted(mode: str, environ: Mapping[str, str], *, saved: str) -> str:
    """
    >>> _wanted("auto", {"WANDB_MODE": "dryrun"}, saved="online")
    'offline'
    >>> _wanted("auto", {"WANDB_SWEEP_ID": "abc"}, saved="online")
    'online'
    """
    if mode == "auto":
        said = environ.get("WANDB_MODE")
        if said is None and saved != "online":
            said = saved  # by `wandb offline`: online is the default
        if said is None and "WANDB_SWEEP_ID" in environ:
            said = "online"
        mode = said or mode
    return _ALIASES.get(mode, mode)


def is_logged_in(settings: Any, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether there is a key for the server that the settings name."""
    if settings.api_key or settings.identity_token_file or environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(settings.base_url).netloc
    for path in _netrc_files(environ):
        try:
            found = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue  # wandb says it where it is needed
        if found and found[2]:
            return True
    return False


def _netrc_files(environ: Mapping[str, str]) -> list[Path]:
    if "NETRC" in environ:
        return [Path(environ["NETRC"]).expanduser()]
    return [Path.home() / ".netrc", Path.home() / "_netrc"]
