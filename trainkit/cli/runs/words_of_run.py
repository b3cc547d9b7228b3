"""The command line that repeats a run."""

from __future__ import annotations

from trainkit.cli.loading import is_first_rank
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.words import key_of
from trainkit.config.redact import REDACTED
from trainkit.errors import TrainkitError

CHECKPOINT = "ckpt_path"
"""The key of the checkpoint from which a run is resumed."""

NOISE_SCALE = "lr_scaling.noise_scale"
"""The key of a number that may be given as the folder of another run."""


def words_of_run(folder: RunFolder, given: list[str], *, but: str = "") -> list[str]:
    """The run's own arguments, with those that are given now in place of theirs.

    Args:
        folder: the folder of the run.
        given: the overrides of the command line.
        but: a group of which nothing is taken.
    """
    saved = [w for w in folder.overrides() if key_of(w).partition(".")[0] != but]
    return [*_still_wanted(saved, given), *(_replacing(word, saved) for word in given)]


def unchanged(folder: RunFolder, given: list[str]) -> list[str]:
    """The words of an unchanged command that begins a run or resumes it.

    The run keeps the noise scale that it has read from another run's folder when it
    began, since that folder may have changed or be gone.
    """
    kept = [word for word in folder.overrides() if word.startswith(f"++{NOISE_SCALE}=")]
    again = [word for word in given if key_of(word) == NOISE_SCALE]
    if not kept or not again or not _is_folder(again[-1].partition("=")[2]):
        return given
    if is_first_rank():
        number = kept[-1].partition("=")[2]
        print(f"trainkit | noise scale: {number}, as read when this run began")
    return [word for word in given if word not in again]


def _is_folder(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text != "null"
    return False


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
