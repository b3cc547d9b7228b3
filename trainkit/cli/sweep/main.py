"""`trainkit sweep FILE`: create a sweep, run it, and show its trials."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli.arguments import Arguments
from trainkit.cli.sweep.trial import Trial
from trainkit.cli.words import to_paste
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    from trainkit.cli.sweep.sweep_file import SweepFile

_ABOUT = """\
Run a sweep in W&B's own format.

Creates it on the server that `wandb login` knows, runs agents of W&B's client, prints
the trials sorted by the metric, and writes a picture of them. With --offline it needs
no server and no account: Optuna proposes the trials, and each trial is an offline run,
which `wandb sync` can upload later.
"""
_EXIT = """\
exit status: 0 if at least one trial finished; 1 if none finished or none logged the
metric; 2 for a mistake in the file; 130 after SIGINT and 143 after SIGTERM, after which
--resume ID continues the sweep.
"""


def main(argv: list[str]) -> int:
    """Run a sweep, and return the exit status."""
    options = _parse(argv)
    from trainkit.cli.sweep.config_keys import check_keys
    from trainkit.cli.sweep.missing_metric import finished_without, message
    from trainkit.cli.sweep.sweep_file import SweepFile

    sweep = SweepFile.read(options.file)
    check_keys(sweep)
    _refuse_endless(sweep, options.count)
    run = _run_offline if options.offline else _run_online
    status, sweep_id, folder, trials = run(sweep, options)
    _report(sweep, trials, options, sweep_id, folder)
    if status:
        again = [] if options.resume else ["--resume", sweep_id]
        _say(f"to resume: {to_paste(['sweep', *argv, *again])}")
        return status
    if (lacks := finished_without(sweep, trials)) is not None:
        _say(message(sweep, lacks))
        return 1
    return 0 if any(trial.state == "finished" for trial in trials) else 1


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Arguments(prog="trainkit sweep", description=_ABOUT, epilog=_EXIT)
    add = parser.add_argument
    add("file", metavar="FILE", help="the sweep, YAML in W&B's format")
    here = "run without a server; needs pip install 'lightning-trainkit[sweeps]'"
    add("--offline", action="store_true", help=here)
    at_once = "trials at once (default: 1)"
    add("--agents", type=int, default=1, metavar="K", help=at_once)
    add("--count", type=int, metavar="N", help="start at most N trials in all")
    add("--resume", metavar="ID", help="continue this sweep instead of a new one")
    add("--dir", default="sweeps", help="where its folder is made (default: sweeps)")
    add("--seed", default=None, help="seed for --offline (default: the sweep's id)")
    add("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args(argv)
    for name in ("agents", "count"):
        if (value := getattr(options, name)) is not None:
            check_whole_number(f"trainkit sweep --{name}", value)
    return options


def _refuse_endless(sweep: SweepFile, count: int | None) -> None:
    has_end = sweep.method == "grid" or sweep.config.get("run_cap") is not None
    if not has_end and count is None:
        raise TrainkitError(
            f"{sweep.path}: method {sweep.method} never ends by itself. Give "
            f"--count N, or write run_cap: N into the file."
        )


def _run_offline(
    sweep: SweepFile, options: argparse.Namespace
) -> tuple[int, str, Path, list[Trial]]:
    try:
        from trainkit.cli.sweep.offline.journal import Journal, check_exists
    except ImportError as error:
        raise TrainkitError(
            f"trainkit sweep --offline: without a server it needs Optuna, from version "
            f"4, which cannot be imported: {error}. Run pip install "
            f"'lightning-trainkit[sweeps]'."
        ) from error
    from trainkit.cli.runs.only_one import only_one
    from trainkit.cli.sweep.offline.search import Search
    from trainkit.cli.sweep.offline.sweep import OfflineSweep

    sweep_id = options.resume or secrets.token_hex(4)
    folder = Path(options.dir).absolute() / sweep_id
    seed = str(options.seed or sweep_id)
    Search(sweep.config, seed=seed)  # what it refuses leaves no folder
    if options.resume:
        check_exists(folder)
    with only_one(folder, what="trainkit sweep"):
        if options.resume:
            journal = Journal.load(folder)
            _refuse_another(sweep, journal.config, sweep_id)
        else:
            journal = Journal.create(folder, sweep.config, seed=seed)
        _say(f"sweep {sweep_id} in {folder}")
        running = OfflineSweep(
            sweep, journal, agents=options.agents, count=options.count, say=_say
        )
        return running.run(), sweep_id, folder, journal.trials


def _refuse_another(sweep: SweepFile, config: dict[str, object], sweep_id: str) -> None:
    if sweep.config != config:
        keys = {*sweep.config, *config}
        changed = sorted(k for k in keys if sweep.config.get(k) != config.get(k))
        raise TrainkitError(
            f"trainkit sweep --resume: {sweep.path} has changed since {sweep_id} was "
            f"started: {', '.join(changed)}. Change it back, or leave --resume out to "
            f"start a new sweep."
        )


def _run_online(
    sweep: SweepFile, options: argparse.Namespace
) -> tuple[int, str, Path, list[Trial]]:
    from trainkit.cli.sweep.online import Server, run_agents

    server = Server(sweep)
    sweep_id = server.find(options.resume) if options.resume else server.create()
    folder = Path(options.dir).absolute() / sweep_id
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"sweep {server.path(sweep_id)}; its agents write to {folder}")
    status = run_agents(
        server, sweep_id, folder, number=options.agents, count=options.count
    )
    return status, sweep_id, folder, server.trials(sweep_id)


def _report(
    sweep: SweepFile,
    trials: list[Trial],
    options: argparse.Namespace,
    sweep_id: str,
    folder: Path,
) -> None:
    from trainkit.cli.sweep import picture, table

    if not options.json:
        table.show(sweep, trials)
    drawn = None
    if any(trial.is_over for trial in trials):
        drawn = str(picture.draw(sweep, trials, folder / "sweep.png"))
    if options.json:
        about = {"id": sweep_id, "folder": str(folder), "picture": drawn}
        print(table.as_json(sweep, trials, **about))
        return
    if drawn:
        print(f"picture: {drawn}")
    if options.offline and trials:
        print(f"upload:  wandb sync {folder}/*/wandb/offline-run-*")


def _say(text: str) -> None:
    """Print news to standard error, since standard output is for the table."""
    print(f"trainkit | {text}", file=sys.stderr, flush=True)
