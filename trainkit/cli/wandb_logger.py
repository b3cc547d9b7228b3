"""Lightning's W&B logger, for runs that need no account and cannot hang."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from trainkit.cli._compat import is_finished, run_of, without_run
from trainkit.cli.runs.folder import wandb_run_of
from trainkit.cli.sweep.whole_config import as_logged
from trainkit.config.redact import redact
from trainkit.core.plan.options import check_choice, is_positive_number
from trainkit.core.strategies import PerToken
from trainkit.errors import TrainkitError
from trainkit.lit.batch_size import find_effective_batch
from trainkit.lit.callback.base import windows_of

Mode = Literal["auto", "online", "offline", "disabled"]

_ALIASES = {"run": "online", "dryrun": "offline"}
_BY_SIGTERM = 128 + signal.SIGTERM


class WandbRunLogger(WandbLogger):
    """Logs to W&B: offline unless you are logged in, and to one run per folder.

    - **No account is needed.** With `mode="auto"`, `WANDB_MODE` or `wandb offline`
      decides. Without them the run is online under a sweep's agent or with a login, and
      else offline; `wandb sync` uploads it at any time. Nothing is asked.
    - **One run per folder.** A training that resumes in `save_dir` continues the W&B
      run whose files are there, in `wandb/`; `WANDB_RUN_ID` takes precedence. W&B
      cannot delete rows: steps that a killed training had logged after its checkpoint
      are there twice, and the later row belongs to the weights. (`metrics.csv` has
      them once.)
    - **Nothing waits for long.** Without a server at the start, the run is offline. If
      the server dies, what was not uploaded in `finish_timeout` seconds stays on disk,
      and the command that uploads it is printed.
    - **Nothing of the environment is sent**: no command line, variables (W&B itself
      records SLURM's), git remotes, code or console. What looks like a secret in a
      configuration is replaced.
    - **The x-axis** of all metrics is the optimizer step. In a chart's settings W&B
      offers `window/seen` too, the tokens or samples seen.

    The run ends with `fit`; logging after that opens it again.

    Args:
        project: default `WANDB_PROJECT`, or else `"trainkit"`.
        entity: the team or user; default: the login's.
        name: the run's name in W&B's tables.
        group: the name of runs that belong together.
        tags: the run's tags.
        job_type: the run's role in its group.
        notes: a text about the run.
        save_dir: the folder of the run; None writes to `./wandb`, a new run each time.
        id: the run's id; default: the folder's, or a new one.
        mode: `"auto"`, `"online"`, `"offline"` or `"disabled"`.
        log_model: checkpoints as artifacts: False, True (when training ends), or
            `"all"` (as they are written).
        console: whether W&B may keep what is printed.
        init_timeout: how many seconds to wait for the server at the start.
        finish_timeout: how many seconds to wait for the upload at the end.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        job_type: str | None = None,
        notes: str | None = None,
        save_dir: str | Path | None = None,
        id: str | None = None,
        mode: Mode = "auto",
        log_model: Literal["all"] | bool = False,
        console: bool = False,
        init_timeout: float = 30.0,
        finish_timeout: float = 30.0,
    ) -> None:
        check_choice("WandbRunLogger mode", mode, get_args(Mode))
        if not isinstance(log_model, bool):
            name, others = "WandbRunLogger log_model", ", true or false"
            check_choice(name, log_model, ["all"], or_else=others)
        for option, value in (("init", init_timeout), ("finish", finish_timeout)):
            if not is_positive_number(value):
                raise TrainkitError(
                    f"WandbRunLogger {option}_timeout: must be a number of seconds "
                    f"above 0, received {value!r}. 30 is the default."
                )
        super().__init__(
            project=project or os.environ.get("WANDB_PROJECT") or "trainkit",
            name=name,
            save_dir=save_dir,  # type: ignore[arg-type]  # None is allowed
            id=id,
            log_model=log_model,
            entity=entity,
            group=group,
            tags=None if tags is None else list(tags),
            job_type=job_type,
            notes=notes,
            settings={
                "console": "auto" if console else "off",
                "disable_code": True,
                "disable_git": True,
                "x_disable_meta": True,  # the command line, SLURM's variables
                "init_timeout": init_timeout,
                "finish_timeout": finish_timeout,
                "finish_timeout_raises": True,
            },
        )
        self._mode: Mode = mode
        self._has_opened = False
        self._logged: dict[str, Any] = {}

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, opened at its first use, and again if it was finished."""
        run = run_of(self)
        if run is not None and not is_finished(run):
            return run
        import wandb
        from wandb.errors import AuthenticationError, CommError

        self._has_opened = wandb.run is None  # else it is the user's, or a logger's
        options = without_run(self)
        if run is not None:
            options["id"] = run.id
        if self._has_opened:
            self._choose_run(options)
        try:
            return super().experiment
        except CommError as error:
            if options["mode"] != "online" or isinstance(error, AuthenticationError):
                raise
            wandb.teardown()  # frees the id
            options["mode"] = "offline"
            run = super().experiment
            _say(
                f"no W&B server ({_first_line(error)}): the run is offline. To upload "
                f"it: wandb sync {_folder(run)}"
            )
            return run

    def _choose_run(self, options: dict[str, Any]) -> None:
        """Complete the options of `wandb.init`: the mode, and which run it is."""
        options["mode"] = resolve_mode(self._mode)
        if self.save_dir is not None:
            Path(self.save_dir).mkdir(parents=True, exist_ok=True)
        known = options["id"] or os.environ.get("WANDB_RUN_ID")
        options["id"] = known or wandb_run_of(self.save_dir)
        # With resume="allow" for a new run that a dying server has half uploaded,
        # `wandb sync` would append all rows to those on the server.
        options["resume"] = "allow" if options["id"] else None
        if "WANDB_SWEEP_ID" in os.environ:  # the agent has set these
            options.update(project=None, entity=None, id=None)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Add to the run's configuration.

        Secrets are replaced. Mappings that are logged under one name, as `LRScaling`
        adds its factors to `lr_scaling`, are merged.
        """
        entries = redact(vars(params) if isinstance(params, Namespace) else params)
        for key, value in entries.items():
            before = self._logged.get(key)
            if isinstance(before, Mapping) and isinstance(value, Mapping):
                entries[key] = {**before, **value}
        self._logged.update(entries)
        super().log_hyperparams(dict(as_logged(self._logged)))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Log checkpoints if `log_model` says so, and finish the run.

        It waits for `finish_timeout`. A run that this logger has not opened stays open.
        """
        run = run_of(self)
        if run is None or is_finished(run):
            return
        super().finalize(status)
        if not self._has_opened:
            return
        try:
            run.finish(exit_code=_exit_code(status))
        except Exception as error:  # a training must not fail because of W&B
            folder = _folder(run)
            _say(
                f"W&B: not all was uploaded ({_first_line(error)}); it is kept in "
                f"{folder}. To upload it: wandb sync --include-online {folder}"
            )


def resolve_mode(mode: str) -> str:
    """The mode for `wandb.init`.

    For `"auto"`, `WANDB_MODE` or `wandb offline` decides. Without them it is online
    under a sweep's agent or with a login for the server, and else offline.

    Raises:
        TrainkitError: online is asked for, and there is no login.
    """
    import wandb

    settings = wandb.setup().settings
    is_asked = mode != "auto" or {"WANDB_MODE", "WANDB_SWEEP_ID"} & os.environ.keys()
    if mode == "auto":  # the client has online, unless another was saved
        mode = os.environ.get("WANDB_MODE") or settings.mode
    wanted = _ALIASES.get(mode, mode)
    if wanted != "online" or _is_logged_in(settings):
        return wanted
    if not is_asked:
        return "offline"
    raise TrainkitError(
        f"WandbRunLogger mode: online needs a login for {settings.base_url}, and "
        f"there is none. Run `wandb login`, set WANDB_API_KEY, or use mode=offline."
    )


def _is_logged_in(settings: Any) -> bool:
    """Whether there is a key for the server that the settings name."""
    from requests.utils import get_netrc_auth  # wandb uses it too

    if settings.api_key or settings.identity_token_file:
        return True
    _, password = get_netrc_auth(settings.base_url) or (None, None)
    return bool(os.environ.get("WANDB_API_KEY") or password)


def _exit_code(status: str) -> int:
    """The exit code for a status of Lightning's, which calls a stop by SIGTERM failed.

    Such a stop, as a sweep's early stop makes it, is a SystemExit: Lightning's own has
    no status, `ExactResume`'s has one. It marks the run as finished.
    """
    if status != "failed":
        return 0
    error = sys.exc_info()[1]
    is_stop = isinstance(error, SystemExit) and error.code in (None, 0, _BY_SIGTERM)
    return 0 if is_stop else 1


def _folder(run: Any) -> str:
    """The run's folder, quoted for a shell."""
    return shlex.quote(str(Path(run.dir).absolute().parent))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _say(text: str) -> None:
    print(f"trainkit | {text}", file=sys.stderr, flush=True)


class WandbFacts(Callback):
    """Adds the effective batch and the learning rates to every W&B run's configuration.

    So runs can be compared and grouped by them:

    - `effective_batch`: samples and their factors, if the loader has a batch size. With
      `PerToken` the mean number of tokens is added when training ends.
    - `learning_rate`: of each optimizer and parameter group when training starts.
      `LRScaling` adds the rates before and after scaling as `lr_scaling`.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        rates = {
            f"optimizer_{index}": [float(group["lr"]) for group in each.param_groups]
            for index, each in enumerate(trainer.optimizers)
        }
        _log(trainer, {"learning_rate": rates, **_batch(trainer)})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        _log(trainer, _batch(trainer))


def _batch(trainer: Any) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    batch, windows = find_effective_batch(trainer), windows_of(trainer)
    if batch is not None:
        entries = {"samples": batch.size, "micro_batch_samples": batch.micro_batch}
        entries |= {"accumulate": batch.accumulate, "replicas": batch.replicas}
    if windows is not None and isinstance(windows.strategy, PerToken):
        account = windows.ledger.of()
        if account is not None:
            entries["tokens"] = float(account.weight) / account.num_windows
    return {"effective_batch": entries} if entries else {}


def _log(trainer: Any, facts: dict[str, Any]) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_hyperparams(facts)
