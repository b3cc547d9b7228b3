"""Errors and a Ctrl+C that end the command, as a message and an exit status."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any

from trainkit.errors import TRACEBACK, TrainkitError

# Names, so that these packages need not be imported.
_MISTAKES = {
    "hydra.errors.HydraException",
    "omegaconf.errors.OmegaConfBaseException",
    "yaml.error.YAMLError",
    "lightning.fabric.utilities.exceptions.MisconfigurationException",
}


class TrainingFailed(Exception):
    """An error that ended a training after it had begun.

    Its text is complete, since an exception loses its causes on the way from a
    launcher's process to the one that prints it.
    """

    @classmethod
    def by(cls, error: Exception) -> TrainingFailed:
        """The failure with its traceback; a user's mistake with its message alone."""
        return cls(shown(error))


class Interrupted(SystemExit):
    """The end of a training that a signal stopped; exit status 128 + its number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class RememberedCtrlC:
    """Raises KeyboardInterrupt, and keeps the signal as `heard`.

    Python drops what is raised while it collects garbage, and a library that is being
    imported may catch it and then fail in another way. The callback that stops runs
    takes over what was heard.
    """

    heard = 0

    def __call__(self, number: int, frame: Any) -> None:
        self.heard = number
        raise KeyboardInterrupt


def remember_ctrl_c() -> None:
    """Handle SIGINT from now on, unless it is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, RememberedCtrlC())


def guarded(call: Callable[[], int]) -> int:
    """Run a command, and print one message if it fails.

    A user's mistake shows no traceback, unless the environment has
    `TRAINKIT_TRACEBACK=1`.
    """
    try:
        return call()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has ended, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if getattr(signal.getsignal(signal.SIGINT), "heard", 0):
            return 130  # what the Ctrl+C has interrupted is broken
        print(shown(error), file=sys.stderr)
        return 2 if is_mistake(error) else 1


def shown(error: Exception) -> str:
    """What is printed of an error that ends the command."""
    if isinstance(error, TrainingFailed):
        return str(error).rstrip()
    lines = "".join(traceback.format_exception(error))
    if not is_mistake(error):
        return lines.rstrip()
    said = f"trainkit: {readable(error)}"
    return lines + said if os.environ.get(TRACEBACK) == "1" else said


def is_mistake(error: BaseException) -> bool:
    """Whether an error is a user's mistake, and not a fault of a program."""
    if isinstance(error, PermissionError):
        return error.filename is not None  # its text says what may not be written
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    return isinstance(error, TrainkitError) or bool(names & _MISTAKES)


def readable(error: BaseException) -> str:
    """An error's text and its causes'; if a key is missing, also the keys there are."""
    if isinstance(error, TrainkitError):
        return str(error)  # complete as it is
    lines = _lines(error)
    key, node = getattr(error, "key", None), getattr(error, "parent_node", None)
    path = getattr(error, "full_key", None)
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, TrainkitError):
            return str(cause)
        if is_mistake(cause):
            more = _lines(cause)
            # Hydra quotes the cause in its own message.
            lines = [line for line in lines if not more or more[0] not in line]
            lines += [line for line in more if line not in lines]
            key = getattr(cause, "key", None) or key
            node = getattr(cause, "parent_node", None) or node
            path = getattr(cause, "full_key", None) or path
        cause = cause.__cause__
    if "Missing mandatory value" in lines[0]:
        lines.append(f"Say which: {key}=...; trainkit train --help lists the options.")
    elif isinstance(node, MutableMapping) and key not in node:
        names = [name for name in map(str, node) if not name.startswith("_")]
        from trainkit.config.groups import meant_by  # OmegaConf is loaded by now

        group = str(path or "").rpartition(".")[0]
        meant = meant_by(str(key), node, group=group).strip()
        if meant or "trainer" in names:  # nothing would read such a key
            lines = [line for line in lines if not line.startswith("To append")]
        lines += [meant] if meant else []
        lines.append(f"There are: {', '.join(names) or 'none'}")
    return "\n".join(lines)


def _lines(error: BaseException) -> list[str]:
    inner = ("full_key:", "reference_type=", "object_type=")  # OmegaConf's details
    text, _, _ = str(error).strip().partition("\nConfig search path:")
    return [
        line for line in text.splitlines() if not line.strip().startswith(inner)
    ] or [""]
