"""The command line that repeats a run, or resumes it: `ckpt_path=last` and `auto`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainkit.cli.composition import Composition
from trainkit.cli.runs.folder import RunFolder, wandb_run_of
from trainkit.cli.words import OF_ONES_OWN, SEARCH_PATH, key_of, quoted, unquoted
from trainkit.config.redact import REDACTED
from trainkit.config.run_name import job_name
from trainkit.errors import TrainkitError

KEY = "ckpt_path"
"""The key of the checkpoint from which a run is resumed."""

LAST = "last"
AUTO = "auto"

_OF_A_TRIAL = {"WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"}


def expand(argv: list[str]) -> list[str]:
    """Replace `ckpt_path=...` in a command line with the arguments that resume the run.

    The run's own overrides come first, then the new ones, so that
    `trainkit train ckpt_path=last trainer.max_steps=500` trains for longer. A
    checkpoint outside of any run's folder starts a new run. `auto` is for jobs that are
    restarted with an unchanged command: it resumes the run if there is one, and
    otherwise starts it.
    """
    given = [word for word in argv if key_of(word) == KEY]
    if not given:
        return argv
    rest = [word for word in argv if key_of(word) != KEY]
    wanted = unquoted(given[-1].partition("=")[2])
    if wanted in ("", "null", "None"):
        return rest
    if wanted == AUTO and _OF_A_TRIAL & os.environ.keys():
        return rest  # the newest run may be another trial's; see as_trial
    if "-m" in argv or "--multirun" in argv:
        raise TrainkitError(
            "ckpt_path: resumes one run, so it cannot be used with --multirun. Leave "
            "-m out to resume, or leave ckpt_path out to start new runs."
        )
    if wanted in (LAST, AUTO):
        folder = _run_of(rest, may_begin=wanted == AUTO)
        if folder is None:
            return rest
        checkpoint = folder.newest_checkpoint() if folder.is_of_a_run() else None
        if checkpoint is None and wanted == LAST:
            print(f"trainkit | {folder.path}: no checkpoint yet, so it starts anew")
    else:
        folder, checkpoint = _of_file(wanted)
    words = rest
    if folder is not None:
        words = words_of_run(folder, rest) if folder.is_of_a_run() else rest
        words = [*words, f"hydra.run.dir={quoted(folder.path)}"]
    return words if checkpoint is None else [*words, f"{KEY}={quoted(checkpoint)}"]


def _run_of(given: list[str], *, may_begin: bool) -> RunFolder | None:
    """The run in `paths.run_dir` if that is given, or else the newest one.

    torchrun, SLURM and supervisors of containers restart a program with an unchanged
    command. Where a run may begin, the folder of the job comes before the newest run.
    """
    job = job_name() if may_begin else None
    if any(key_of(word) == "paths.run_dir" for word in given):
        where = Path(_paths(given).run_dir)
        found = RunFolder(where)
    elif job is not None:
        where = Path(_paths(given).output_dir, job)
        found = RunFolder(where)
    else:
        where = _folder_of_runs(given)
        found = _newest_in(where)
    if may_begin or (found is not None and found.is_of_a_run()):
        return found
    raise TrainkitError(
        f"ckpt_path=last: there is no run in {where}. Leave ckpt_path out to start a "
        f"run, or name a checkpoint: ckpt_path=path/to/last.ckpt."
    )


def _newest_in(where: Path) -> RunFolder | None:
    """The newest run below a folder, without those that have failed too early."""
    runs = [RunFolder(path.parent) for path in where.rglob(RunFolder.OVERRIDES)]
    resumable = (
        run
        for run in runs
        if run.read_summary().get("status") != "failed" or run.newest_checkpoint()
    )
    return max(resumable, key=RunFolder.started, default=None)


def as_trial(argv: list[str]) -> list[str]:
    """The arguments of a sweep's trial, with its checkpoint if there is one.

    If W&B gives a trial to an agent again, it has the id of its earlier run.
    """
    run_id = os.environ.get("WANDB_RUN_ID")
    words = [word for word in argv if word != f"{KEY}={AUTO}"]
    given = {KEY, "paths.run_dir", "hydra.run.dir"} & {key_of(word) for word in words}
    if "WANDB_SWEEP_ID" not in os.environ or run_id is None or given:
        return argv
    for path in Path(_paths(argv).output_dir).rglob("wandb"):
        checkpoint = RunFolder(path.parent).newest_checkpoint()
        if checkpoint is not None and wandb_run_of(path.parent) == run_id:
            print(f"trainkit | {run_id}: resuming from {checkpoint}", flush=True)
            return [*argv, f"{KEY}={quoted(checkpoint)}"]
    return argv


def _of_file(wanted: str) -> tuple[RunFolder | None, Path]:
    path = Path(wanted).expanduser().absolute()
    newest = RunFolder(path).newest_checkpoint()
    path = newest or path
    is_folder = path.is_dir() and not (path / "meta.pt").exists()  # of no sharded one
    if is_folder or not path.exists():
        why = "which is of no run" if is_folder else "which does not exist"
        why = "which has no checkpoint" if RunFolder(path).is_of_a_run() else why
        raise TrainkitError(
            f"ckpt_path: must be a checkpoint, the folder of a run, `last` or `auto`, "
            f"received {wanted!r}, {why}. `trainkit train ckpt_path=last` resumes the "
            f"newest run."
        )
    return RunFolder.around(path), path


def _folder_of_runs(argv: list[str]) -> Path:
    """`paths.output_dir`; that of all names, if no word decides the name."""
    where = Path(_paths(argv).output_dir)
    deciding = {"name", "paths.output_dir", *OF_ONES_OWN}
    is_of_all = not deciding & {key_of(word) for word in argv}
    return where.parent if is_of_all and where.name else where


def _paths(argv: list[str]) -> Any:
    # Only overrides that decide the folder: others may need keys that the run added.
    deciding = ("name", "paths", "experiment")
    words = [
        word
        for word in argv
        if word.startswith("-")
        or key_of(word).partition(".")[0] in deciding
        or key_of(word) in OF_ONES_OWN
        or key_of(word) == SEARCH_PATH
    ]
    return Composition(words).config.paths


def words_of_run(folder: RunFolder, given: list[str], *, but: str = "") -> list[str]:
    """The run's own arguments, with those that are given now in place of theirs.

    Args:
        folder: the folder of the run.
        given: the overrides of the command line.
        but: a group of which nothing is taken.
    """
    saved = [w for w in folder.overrides() if key_of(w).partition(".")[0] != but]
    again = {key_of(word) for word in given} | {KEY}
    wanted = [word for word in saved if key_of(word) not in again]
    for word in wanted:
        if REDACTED in word:
            raise TrainkitError(
                f"{key_of(word)}: is a secret, so its value was not saved in the run's "
                f"folder. Give it again on the command line: {key_of(word)}=..."
            )
    # `++` replaces a key that the run has added with `+`.
    added = {key_of(word) for word in saved if word.startswith("+")}
    for word in given:
        is_plain = not word.startswith(("+", "~", "-"))
        wanted.append(f"++{word}" if is_plain and key_of(word) in added else word)
    return wanted
