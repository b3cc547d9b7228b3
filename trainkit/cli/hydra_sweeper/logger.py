"""The logger of a sweep's trials, from which a W&B server learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig

from trainkit.cli.hydra_sweeper.space import WHERE
from trainkit.cli.wandb_logger.mode import check_mode, resolve_mode
from trainkit.cli.words import key_of
from trainkit.config.targets import TARGET
from trainkit.errors import TrainkitError

_DEFAULT = "csv"
_WITH_WANDB = "logger=several"


def mode_of(config: DictConfig) -> str:
    """The mode in which trials log to W&B: `"online"` or another."""
    modes = [logger.get("mode") for logger in _wandb_loggers(config)]
    mode: Any = next(filter(None, modes), "auto")
    check_mode(mode)
    return resolve_mode(mode)


def logging_to_wandb(
    config: DictConfig, fixed: list[str], *, say: Callable[[str], None]
) -> list[str]:
    """The overrides of trials, with W&B's logger if the default one is chosen.

    Raises:
        TrainkitError: another logger is chosen, and none is W&B's.
    """
    if any(True for _ in _wandb_loggers(config)):
        return fixed
    chosen = config.hydra.runtime.choices.get("logger")
    if chosen != _DEFAULT or "logger" in map(key_of, fixed):
        raise TrainkitError(
            f"{WHERE}: the server learns from what trials log to W&B, and "
            f"logger={chosen} logs nothing there. Write logger=wandb or {_WITH_WANDB}."
        )
    say(f"{_WITH_WANDB} is added, since the server learns from what trials log to W&B")
    return [*fixed, _WITH_WANDB]


def _wandb_loggers(config: DictConfig) -> Iterator[Any]:
    found: Any = config.get("logger") or {}
    entries = found.values() if hasattr(found, "values") else found
    for logger in [found, *entries]:
        target = str(logger.get(TARGET, "")) if hasattr(logger, "get") else ""
        if target.rpartition(".")[2] in ("WandbRunLogger", "WandbLogger"):
            yield logger
