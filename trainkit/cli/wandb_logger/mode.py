"""Whether a W&B run is online, decided without asking the user or the network."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal, get_args

from trainkit.errors import TrainkitError

Mode = Literal["auto", "online", "offline", "disabled"]

_ALIASES = {"run": "online", "dryrun": "offline"}


def check_mode(mode: str) -> None:
    """Refuse a text that is not one of the modes."""
    if mode not in get_args(Mode):
        raise TrainkitError(
            f"WandbRunLogger mode: must be one of {', '.join(get_args(Mode))}, "
            f"received {mode!r}. auto is offline unless you are logged in."
        )


def resolve_mode(mode: Mode) -> str:
    """The mode for `wandb.init`.

    For `"auto"`, `WANDB_MODE` or `wandb offline` decides. Without them it is online
    under a sweep's agent or with a login for the server, and else offline.

    Raises:
        TrainkitError: online is asked for, and there is no login.
    """
    import wandb

    settings = wandb.setup().settings
    wanted = _wanted(mode, os.environ, saved=settings.mode)
    if wanted == "auto":
        wanted = "online" if _is_logged_in(settings) else "offline"
    elif wanted == "online" and not _is_logged_in(settings):
        raise TrainkitError(
            f"WandbRunLogger mode: online needs a login for {settings.base_url}, and "
            f"there is none. Run `wandb login`, set WANDB_API_KEY, or use mode=offline."
        )
    return wanted


def _wanted(mode: str, environ: Mapping[str, str], *, saved: str) -> str:
    """The mode that the user asks for, by argument, by variable or by command.

    >>> _wanted("auto", {"WANDB_MODE": "dryrun"}, saved="online")
    'offline'
    >>> _wanted("auto", {"WANDB_SWEEP_ID": "abc"}, saved="online")
    'online'
    """
    if mode == "auto":
        under_agent = "online" if "WANDB_SWEEP_ID" in environ else mode
        by_command = None if saved == "online" else saved  # online is W&B's default
        mode = environ.get("WANDB_MODE", by_command) or under_agent
    return _ALIASES.get(mode, mode)


def _is_logged_in(settings: Any) -> bool:
    """Whether there is a key for the server that the settings name."""
    from requests.utils import get_netrc_auth  # wandb uses it too

    if settings.api_key or settings.identity_token_file:
        return True
    _, password = get_netrc_auth(settings.base_url) or (None, None)
    return bool(os.environ.get("WANDB_API_KEY") or password)
