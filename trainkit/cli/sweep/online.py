"""A sweep on a W&B server, whose trials are run by agents of W&B's client."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.cli.sweep.process import KILL_DELAY, environment, noted_signals
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.errors import TrainkitError

_SECONDS = 20
_TICK = 0.1
_FINISH_TIMEOUT = "600"


def run_online(
    sweep: SweepFile, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[int, str]:
    """Create a sweep, or take the one that is resumed, and run agents until they leave.

    Their output goes to our errors. SIGINT and SIGTERM reach each agent as SIGTERM,
    which it passes on to its trial. The trial may save a checkpoint. If it takes too
    long, the agent kills it.

    Returns:
        0, or 130 or 143 if a signal ended it; and the sweep's id.

    Raises:
        TrainkitError: there is no server, or nobody is logged in.
    """
    entity, project, sweep_id = _on_the_server(sweep, options.resume)
    path, folder = f"{entity}/{project}/{sweep_id}", Path(options.dir, sweep_id)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"sweep {path}; its agents write to {folder.absolute()}")
    env = environment() | {
        "WANDB_DIR": str(folder.absolute()),
        "WANDB_ENTITY": entity,
        "WANDB_PROJECT": project,
    }
    # A trial must not wait forever for a server that has died.
    env.setdefault("WANDB_FINISH_TIMEOUT", _FINISH_TIMEOUT)
    agent = [sys.executable, "-m", "wandb", "agent", "--forward-signals"]
    agent += ["--term-timeout", str(round(KILL_DELAY))]
    shares: list[list[str]] = [[]] * options.agents
    if options.count is not None:  # as even as it goes
        numbers = range(options.count)
        sizes = [len(numbers[each :: options.agents]) for each in range(options.agents)]
        shares = [["--count", str(size)] for size in sizes if size]
    with noted_signals() as came:
        running = [
            subprocess.Popen(
                [*agent, *share, path],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                start_new_session=True,  # the terminal's Ctrl-C is for the sweep
            )
            for share in shares
        ]
        passed_on = 0
        while any(each.poll() is None for each in running):
            if len(came) > passed_on:
                passed_on = len(came)
                for each in running:
                    each.terminate()
            time.sleep(_TICK)
    return 128 + came[0] if came else 0, sweep_id


def _on_the_server(sweep: SweepFile, resumed: str | None) -> tuple[str, str, str]:
    """The entity, the project and the id of the sweep."""
    import wandb

    try:
        with contextlib.redirect_stdout(sys.stderr):  # the client prints
            api = wandb.Api(timeout=_SECONDS)
            entity = os.environ.get("WANDB_ENTITY") or sweep.entity
            entity = str(entity or api.default_entity)
            project = os.environ.get("WANDB_PROJECT") or sweep.project
            project = str(project or "trainkit")
            if resumed is None:
                return entity, project, wandb.sweep(sweep.config, entity, project)
            return entity, project, api.sweep(f"{entity}/{project}/{resumed}").id
    except (wandb.Error, ValueError, OSError) as error:
        raise TrainkitError(
            f"trainkit sweep: W&B reports: {error} Check `wandb login` and the "
            f"network. Or run this file without a server: --offline."
        ) from error
