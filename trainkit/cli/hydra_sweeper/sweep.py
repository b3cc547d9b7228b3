"""A multirun whose runs are the trials of a W&B sweep."""

from __future__ import annotations

import contextlib
import io
import math
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from trainkit.cli.errors import Interrupted, MissingMetric, is_mistake, readable
from trainkit.cli.hydra_sweeper.logger import logging_to_wandb, mode_of
from trainkit.cli.hydra_sweeper.offline import OfflineSource
from trainkit.cli.hydra_sweeper.online import OnlineSource
from trainkit.cli.hydra_sweeper.space import WHERE, Space, as_sweep, read_space
from trainkit.cli.runs.folder import RunFolder
from trainkit.cli.sweep import environment, missing_metric
from trainkit.cli.sweep.command import hydra_text
from trainkit.cli.sweep.online.server import Server, answers
from trainkit.cli.sweep.picture import draw
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, best_of, describe, news_of
from trainkit.config.redact import REDACTED
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

_IN_THIS_PROCESS = "BasicLauncher"


class Source(Protocol):
    """Where trials come from."""

    was_asked_to_stop: bool

    def next_trials(self, trials: list[Trial]) -> list[Trial]: ...

    def environment(self, trial: Trial) -> dict[str, str]: ...

    def end(self, trial: Trial) -> None: ...

    def close(self) -> None: ...


class NewClient:
    """A job in whose process W&B's client starts anew, with the job's variables.

    The client keeps those with which it was first started, and a process may run
    several jobs, one after the other.
    """

    def __init__(self, task: TaskFunction) -> None:
        self._task = task

    def __call__(self, config: DictConfig) -> Any:
        if "wandb" in sys.modules:
            _end_client()
        return self._task(config)


class HydraSweep:
    """Runs trials through Hydra's launcher, and reports the best.

    Args:
        options: the sweeper's, from `hydra.sweeper`.
        context: Hydra's.
        task: the job of a trial.
        config: the configuration that trials share.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        context: HydraContext,
        task: TaskFunction,
        config: DictConfig,
    ) -> None:
        self._options: dict[str, Any] = {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in options.items()
        }
        self._loader = context.config_loader
        self._config = config
        self._folder = Path(config.hydra.sweep.dir)
        self._launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=context, task_function=NewClient(task)
        )
        self._trials: list[Trial] = []
        self._first_error: Exception | None = None

    def run(self, arguments: Sequence[str]) -> None:
        """Run the sweep.

        Raises:
            TrainkitError: it cannot run, or no trial has logged the metric.
        """
        check_whole_number("hydra.sweeper.n_jobs", self._options["n_jobs"])
        space = read_space(arguments, self._options["params"], self._loader)
        why_offline = self._why_offline()
        if why_offline is None:
            space.fixed[:] = logging_to_wandb(self._config, space.fixed, say=_say)
        sweep = as_sweep(space, self._options)
        source: Source
        if why_offline is None:
            source = self._online(sweep)
        else:
            source = self._offline(sweep, why_offline)
        _end_client()  # or jobs in other processes would use its service
        try:
            with _sigterm_ends(source):
                self._folder.mkdir(parents=True, exist_ok=True)
                OmegaConf.save(self._config, self._folder / "multirun.yaml")
                while batch := source.next_trials(self._trials):
                    self._launch(batch, space, sweep, source)
                    if self._gives_up(sweep):
                        break
        finally:
            source.close()
        if not self._trials and isinstance(source, OnlineSource):
            raise TrainkitError(
                f"{WHERE}: W&B's agent has started no trial. Its last line in "
                f"{self._folder}/agents: {source.last_words()}"
            )
        self._report(sweep)

    # ---- where trials come from ------------------------------------------------------

    def _why_offline(self) -> str | None:
        """Why there is no server; None if there is one."""
        import wandb

        if mode_of(self._config) != "online":
            return "you are not logged in to W&B, or have chosen to be offline"
        url = wandb.setup().settings.base_url
        return None if answers(url) else f"{url} does not answer"

    def _online(self, sweep: SweepFile) -> OnlineSource:
        launcher = type(self._launcher).__name__
        n_jobs = self._options["n_jobs"]
        can_stop = launcher == _IN_THIS_PROCESS and n_jobs == 1
        if not can_stop and sweep.config.get("early_terminate") is not None:
            raise TrainkitError(
                f"hydra.sweeper.early_terminate: only a single trial in this process "
                f"can be stopped, received {launcher} and n_jobs={n_jobs}. Leave it "
                f"out, or write hydra/launcher=basic hydra.sweeper.n_jobs=1, or use "
                f"`trainkit sweep FILE --agents K`."
            )
        server = Server(sweep, who=WHERE, instead="set WANDB_MODE=offline")
        source = OnlineSource(
            sweep,
            server,
            n_jobs=n_jobs,
            folder=(self._folder / "agents").absolute(),
            can_stop=can_stop,
            say=_say,
        )
        _say(f"sweep {source.path}: {_about(sweep)}")
        if not any(REDACTED in word for word in sweep.config["command"]):
            _say(f"other machines may run trials of it: wandb agent {source.path}")
        return source

    def _offline(self, sweep: SweepFile, why: str) -> OfflineSource:
        name, options = secrets.token_hex(4), self._options
        source = OfflineSource(
            sweep, name=name, n_jobs=options["n_jobs"], seed=options["seed"]
        )
        _say(f"{why}: W&B's engine proposes the trials here, without a server")
        _say(f"sweep {name}: {_about(sweep)}")
        return source

    # ---- trials ----------------------------------------------------------------------

    def _launch(
        self, batch: list[Trial], space: Space, sweep: SweepFile, source: Source
    ) -> None:
        words = [self._words(trial, space, source) for trial in batch]
        first = len(self._trials)
        jobs: Sequence[JobReturn | None] = [None] * len(batch)
        try:
            jobs = self._launcher.launch(words, initial_job_idx=first)
        except SystemExit as end:
            if not source.was_asked_to_stop:
                # A trial of a W&B sweep ends with 0 after SIGTERM.
                raise (end if end.code else Interrupted(signal.SIGTERM)) from None
        for number, (trial, job) in enumerate(zip(batch, jobs, strict=True), first):
            self._take(trial, job, number)
            source.end(trial)
            _say(f"run {number}, {news_of(trial, sweep.metric)}")
        self._trials += batch

    def _words(self, trial: Trial, space: Space, source: Source) -> list[str]:
        variables = hydra_text(source.environment(trial))
        return [
            *space.words_of(trial.arguments),
            f"++hydra.job.env_set={variables}",  # in whatever process the job is
        ]

    def _take(self, trial: Trial, job: JobReturn | None, number: int) -> None:
        folder = self._folder / str(number)  # where SIGTERM has stopped it
        if job is not None and job.hydra_cfg is not None:
            folder = Path(job.hydra_cfg.hydra.runtime.output_dir)
        trial.folder = str(folder)
        summary = RunFolder(folder).read_summary() or {}
        value: Any = (summary.get("metrics") or {}).get(summary.get("metric"), _NONE)
        if job is not None and job.status is JobStatus.FAILED:
            error = _error_of(job)
            self._first_error = self._first_error or error
            text = readable(error) if is_mistake(error) else str(error)
            trial.state, trial.note = "crashed", text.strip().splitlines()[-1]
            return
        is_over = job is not None or summary.get("status") == "finished"
        trial.state = "finished" if is_over else "stopped"
        if value is not _NONE:
            trial.metric = [math.nan if value is None else float(value)]

    def _gives_up(self, sweep: SweepFile) -> bool:
        crashed = sum(trial.state == "crashed" for trial in self._trials)
        if crashed == len(self._trials) >= environment.max_initial_failures():
            _say(f"the first {crashed} trials crashed, so no more are started")
            return True
        if isinstance(self._first_error, MissingMetric):
            return True  # no other trial would log it
        return missing_metric.finished_without(sweep, self._trials) is not None

    # ---- the end ---------------------------------------------------------------------

    def _report(self, sweep: SweepFile) -> None:
        picture = draw(sweep, self._trials, self._folder / "sweep.png")
        _say(f"picture: {picture}")
        best = best_of(self._trials, maximizes=sweep.maximizes)
        if best is not None:
            results = {
                "name": "wandb",
                "best_params": best.flat,
                "best_value": best.number,
            }
            path = self._folder / "optimization_results.yaml"
            OmegaConf.save(OmegaConf.create(results), path)
            number = self._trials.index(best)
            value = f"{sweep.metric} {best.number:.6g}"
            _say(f"best: run {number}, {value}, {describe(best)}")
        without = missing_metric.finished_without(sweep, self._trials)
        if without is not None:
            summary = RunFolder(without.folder).read_summary() or {}
            logged = ", ".join(summary.get("metrics") or {}) or "nothing"
            raise TrainkitError(
                f"metric: no trial has logged {sweep.metric}, so no more are started. "
                f"They logged {logged}. Name one of these: metric=..."
            )
        if self._first_error is None:
            return
        if all(trial.state == "crashed" for trial in self._trials):
            raise self._first_error
        print(str(self._first_error).rstrip(), file=sys.stderr)


_NONE = object()


def _end_client() -> None:
    import wandb

    wandb.teardown()


def _about(sweep: SweepFile) -> str:
    cap = sweep.config.get("run_cap")
    goal = f", {sweep.config['metric']['goal']} {sweep.metric}" if sweep.metric else ""
    trials = "all trials" if cap is None else f"{cap} trials"
    return f"method {sweep.method}, {trials}{goal}"


def _error_of(job: JobReturn) -> Exception:
    with contextlib.redirect_stderr(io.StringIO()):  # Hydra prints the overrides
        try:
            _ = job.return_value
        except Exception as error:
            return error
    raise AssertionError


@contextlib.contextmanager
def _sigterm_ends(source: Source) -> Iterator[None]:
    """Let SIGTERM end the sweep with its agents, unless it is for a trial alone."""

    def end(signum: int, frame: Any) -> None:
        if not source.was_asked_to_stop:
            raise Interrupted(signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(text: str) -> None:
    print(f"trainkit | {text}", flush=True)
