"""The command line that repeats a run."""

from __future__ import annotations

from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import key_of
from trainkit.config.redact import REDACTED
from trainkit.errors import TrainkitError

CHECKPOINT = "ckpt_path"
"""The key of the checkpoint from which a run is resumed."""


def words_of_run(folder: RunFolder, given: list[str]) -> list[str]:
    """The run's own arguments, with those that are given now in place of theirs."""
    saved = folder.overrides()
    return [*_still_wanted(saved, given), *(_replacing(word, saved) for word in given)]


def _still_wanted(saved: list[str], given: list[str]) -> list[str]:
    again = {key_of(word) for word in given} | {CHECKPOINT}
    wanted = [word for word in saved if key_of(word) not in again]
    for word in wanted:
        if REDACTED in word:
            raise TrainkitError(
                f"{key_of(word)}: is a secret, so its value was not saved in the run's "
                f"folder. Give it again on the command line: {key_of(word)}=..."
            )
    return wanted


def _replacing(word: str, saved: list[str]) -> str:
    """The override with `++` if the run added its key with `+`: it replaces that."""
    is_plain = not word.startswith(("+", "~", "-"))
    was_added = any(w.startswith("+") and key_of(w) == key_of(word) for w in saved)
    return f"++{word}" if is_plain and was_added else word
