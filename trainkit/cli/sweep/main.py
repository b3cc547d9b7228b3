"""`trainkit sweep FILE`: create a sweep, run it, and show its trials."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cli.console import Arguments
from trainkit.cli.words import options_first, refuse_another_app, to_paste
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError

if TYPE_CHECKING:
    from trainkit.cli.sweep.sweep_file import SweepFile

_ABOUT = """\
Run a sweep in W&B's own format.

Creates it on the server that `wandb login` knows, and runs agents of W&B's client. With
--offline it needs no server and no account: Optuna proposes the trials, and each trial
is an offline run, which `wandb sync` can upload later. It then prints the trials sorted
by the metric.
"""
_EXIT = """\
exit status: 0 once the sweep is over; 1 if offline no trial finished or none logged the
metric; 2 for a mistake in the file; 130 after SIGINT and 143 after SIGTERM, after which
--resume ID continues the sweep.
"""


def main(argv: list[str]) -> int:
    """Run a sweep, and return the exit status."""
    options = _parse(argv)
    from trainkit.cli.sweep.sweep_file import SweepFile

    sweep = SweepFile.read(options.file)
    if sweep.method != "grid" and sweep.run_cap is None and options.count is None:
        raise TrainkitError(
            f"{sweep.path}: method {sweep.method} never ends by itself. Give "
            f"--count N, or write run_cap: N into the file."
        )
    check_keys(sweep)
    if options.offline:
        status, sweep_id = _run_offline(sweep, options)
    else:
        from trainkit.cli.sweep.online import run_online

        status, sweep_id = run_online(sweep, options, _say)
    if status > 1:
        again = [] if options.resume else ["--resume", sweep_id]
        _say(f"to resume: {to_paste(['sweep', *argv, *again])}")
    return status


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
    add("--seed", help="seed for --offline (default: the sweep's id)")
    add("--json", action="store_true", help="print the table of --offline as JSON")
    options = parser.parse_args(argv)
    for name in ("seed", "json"):
        if getattr(options, name) and not options.offline:
            raise TrainkitError(
                f"trainkit sweep --{name}: is for --offline; on a server W&B proposes "
                f"the trials and shows them. Add --offline, or leave it out."
            )
    for name in ("agents", "count"):
        if (value := getattr(options, name)) is not None:
            check_whole_number(f"trainkit sweep --{name}", value)
    return options


def check_keys(sweep: SweepFile) -> None:
    """Refuse parameters that `trainkit train` would refuse in a trial.

    The configuration is composed with each parameter's first value, and with each text
    or null, since that may be an option of a group. Other programs know their own keys.
    """
    if not sweep.runs_trainkit:
        return
    from wandb.sdk.launch.sweeps.utils import create_sweep_command

    from trainkit.cli.composition import Composition
    from trainkit.cli.errors import is_mistake, readable
    from trainkit.cli.sweep.whole_config import hydra_text

    words = create_sweep_command(sweep.words[sweep.words.index("train") + 1 :])
    fixed = options_first([word for word in words if not word.startswith("${")])
    refuse_another_app(fixed)
    values = {name: each.listed for name, each in sweep.parameters.items()}
    first = {name: every[0] for name, every in values.items()}
    pairs = [(name, value) for name, every in values.items() for value in every]
    chosen = [{n: v} for n, v in pairs if isinstance(v, str) or v is None]
    for changed in [{}, *chosen]:
        trial = {**first, **changed}
        words = [f"{name}={hydra_text(value)}" for name, value in trial.items()]
        try:
            Composition([*fixed, *words])
        except Exception as error:
            if not is_mistake(error) and not isinstance(error, ValueError):
                raise
            raise TrainkitError(
                f"{sweep.path} parameters: `trainkit train` would refuse a trial with "
                f"{' '.join(words)}: {readable(error)}"
            ) from error


def _run_offline(sweep: SweepFile, options: argparse.Namespace) -> tuple[int, str]:
    """Run a sweep and print its table; the status and the sweep's id."""
    try:
        from trainkit.cli.sweep.offline import BEGUN, OfflineSweep
        from trainkit.cli.sweep.search import spaces_of
    except ImportError as error:
        raise TrainkitError(
            f"trainkit sweep --offline: without a server it needs Optuna, from version "
            f"4, which cannot be imported: {error}. Run pip install "
            f"'lightning-trainkit[sweeps]'."
        ) from error
    from trainkit.cli.runs.folder import only_one
    from trainkit.cli.sweep.trial import as_json, lacking, table

    sweep_id = options.resume or secrets.token_hex(4)
    folder = Path(options.dir).absolute() / sweep_id
    spaces_of(sweep)  # it refuses what Optuna does not draw
    if options.resume and not (folder / BEGUN).is_file():
        raise TrainkitError(
            f"trainkit sweep --resume: there is no sweep {sweep_id!r} in "
            f"{folder.parent}. Leave --resume out to start a new one."
        )
    with only_one(folder, what="trainkit sweep"):
        running = OfflineSweep(sweep, folder, seed=options.seed or sweep_id, say=_say)
        _say(f"sweep {sweep_id} in {folder}")
        status = running.run(agents=options.agents, count=options.count)
    trials = running.trials
    if options.json:
        print(as_json(sweep, trials, id=sweep_id, folder=str(folder)))
    else:
        print(table(sweep, trials))
        print(f"upload:  wandb sync {folder}/*/wandb/offline-run-*")
    if status:
        return status, sweep_id
    if lacks := lacking(sweep, trials):
        _say(lacks)
    has_failed = lacks or all(trial.state != "finished" for trial in trials)
    return int(bool(has_failed)), sweep_id


def _say(text: str) -> None:
    """Print news to standard error, since standard output is for the table."""
    print(f"trainkit | {text}", file=sys.stderr, flush=True)
