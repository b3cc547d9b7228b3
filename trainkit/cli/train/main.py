"""`trainkit train`: a Hydra application."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainkit.cli.comparison import compared_even_if_some_fail
from trainkit.cli.composition import LOOP
from trainkit.cli.console import is_first_rank, say_loading
from trainkit.cli.door import spoken
from trainkit.cli.errors import TrainingFailed, is_mistake, shown
from trainkit.cli.runs import resume
from trainkit.cli.runs.folder import RunFolder, only_one
from trainkit.cli.runs.screen_log import screen_log
from trainkit.cli.sweep.whole_config import for_train
from trainkit.cli.words import (
    CONFIG_DIR,
    completed,
    find_modules_here,
    key_of,
    option,
    options_first,
    refuse_another_app,
)
from trainkit.config._compat import VERSION_BASE, without_group
from trainkit.config.conf import PACKAGE, found_first, register
from trainkit.errors import TrainkitError

_ONLY_SHOWS = {"--help", "--hydra-help", "--cfg", "--info"}
_ONLY_SHOWS |= {"--shell-completion", "--version"}


class _JobEnded(BaseException):
    """Carries a job's error through Hydra, which would otherwise print about it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


def main(argv: list[str]) -> int:
    """Compose the configuration and train; with `-m`, train once for each choice."""
    register()
    find_modules_here()
    argv = options_first(argv)
    if not any(word.partition("=")[0] in _ONLY_SHOWS for word in argv):
        argv = resume.expand(resume.as_trial(for_train(argv)))
        argv = options_first(_in_one_folder(argv))
        refuse_another_app(argv)
    argv = completed(argv)
    no_sweep = without_group("trainkit.conf", "sweep")  # files of `trainkit sweep`
    own = found_first(option(argv, CONFIG_DIR))
    app = hydra.main(config_path=PACKAGE, config_name="train", **VERSION_BASE)
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with own, no_sweep, compared_even_if_some_fail() as compared:
        try:
            sys.argv = [*(before[:1] or ["trainkit"]), *argv]
            os.environ["HYDRA_FULL_ERROR"] = "1"  # else it prints errors and exits
            app(run_job)()
        except _JobEnded as ended:
            raise ended.error from ended.error.__cause__  # not from _JobEnded
        except (OSError, RecursionError, ValueError) as error:
            of_hydra = isinstance(error, PermissionError)  # it makes the run's folder
            if is_mistake(error) and not of_hydra or _is_of_a_job(error):
                raise
            if "No trials are completed" in str(error):  # Optuna's words
                raise TrainingFailed(
                    "trainkit: metric: no trial has ended with a number, so there is "
                    "no best one."
                ) from error
            raise TrainkitError(_of_hydra_itself(error)) from error
        finally:
            sys.argv = before
            del os.environ["HYDRA_FULL_ERROR"]
            if full is not None:
                os.environ["HYDRA_FULL_ERROR"] = full
    if compared.is_empty:
        raise TrainkitError(
            "--multirun: the overrides must give at least one run, and one of them has "
            "no values, maybe a range(...) or a glob(...). trainkit train --help lists "
            "the options of each group."
        )
    return 1 if compared.num_unfinished else 0


def _in_one_folder(argv: list[str]) -> list[str]:
    """Make Hydra write its files to `paths.run_dir` too, if that is given."""
    words = {key_of(word): word.partition("=")[2] for word in argv}
    if "paths.run_dir" not in words or "hydra.run.dir" in words:
        return argv
    return [*argv, f"hydra.run.dir={words['paths.run_dir']}"]


def run_job(config: DictConfig) -> float | None:
    """Train once, and return the metric that a sweeper optimises."""
    folder = RunFolder(HydraConfig.get().runtime.output_dir)
    is_new = folder.path != Path.cwd() and not any(folder.path.iterdir())
    with screen_log() as log:
        say_loading("train")
        try:
            from trainkit.cli.train.job import run
            from trainkit.lit.aside import ADVICE, without_advice

            with spoken("train"), without_advice(ADVICE):
                return run(config, log)
        except Exception as error:
            log.write(f"{shown(error)}\n")  # it is printed when Hydra has ended
            came_to_nothing = is_mistake(error) or not folder.is_of_a_run()
            if came_to_nothing and is_first_rank():
                root = OmegaConf.select(config, "paths.root_dir", default=".")
                _remove(folder, Path(os.path.abspath(root)), is_new=is_new)
            if HydraConfig.get().mode is RunMode.RUN:
                raise _JobEnded(error) from error
            raise  # Hydra counts the failures of a multirun


def _remove(folder: RunFolder, root: Path, *, is_new: bool) -> None:
    """Remove the folder of a run without a step, and the empty ones above it.

    In a folder that had files only the lock goes.
    """
    with suppress(TrainkitError), only_one(folder.path, what="paths.run_dir"):
        if folder.newest_checkpoint() or folder.read_summary().get("steps"):
            return
        if is_new:
            shutil.rmtree(folder.path, ignore_errors=True)
        elif not folder.is_of_a_run():
            (folder.path / RunFolder.LOCK).unlink()
    with suppress(OSError):  # it is not empty
        for each in folder.path.parents:
            if root in each.parents:
                each.rmdir()


def _is_of_a_job(error: Exception) -> bool:
    """Whether a job of a multirun has raised the error, here or in another process."""
    frames = traceback.walk_tb(error.__traceback__)
    codes = {frame.f_code for frame, _ in frames}
    return error.__cause__ is not None or run_job.__code__ in codes


def _of_hydra_itself(error: Exception) -> str:
    """The message for an error that Hydra itself has raised."""
    if isinstance(error, RecursionError):
        return LOOP
    if isinstance(error, OSError):
        if str(error.filename).endswith(".yaml"):
            return f"configuration: {error}"
        return (
            f"paths.root_dir: the folder of the run cannot be created: {error}. Choose "
            f"a writable folder: paths.root_dir=/some/where."
        )
    return (
        f"overrides: {error}. A group takes the name of one of its options, such as "
        f"accumulation=per_token; trainkit train --help lists them all."
    )
