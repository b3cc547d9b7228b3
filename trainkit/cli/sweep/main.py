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
    from trainkit.cli.sweep.trial import Trial

_ABOUT = """\
Run a sweep in W&B's own format.

Creates it on the server that `wandb login` knows, runs agents of W&B's client, and
prints the trials sorted by the metric. With --offline it needs no server and no
account: Optuna proposes the trials, and each trial is an offline run, which `wandb
sync` can upload later.
"""
_EXIT = """\
exit status: 0 if at least one trial finished; 1 if none finished or none logged the
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
    run = _run_offline if options.offline else _run_online
    status, folder, trials = run(sweep, options)
    from trainkit.cli.sweep.trial import as_json, lacking, table

    if options.json:
        print(as_json(sweep, trials, id=folder.name, folder=str(folder)))
    else:
        print("\n".join(table(sweep, trials)))
        if options.offline:
            print(f"upload:  wandb sync {folder}/*/wandb/offline-run-*")
    if status:
        again = [] if options.resume else ["--resume", folder.name]
        _say(f"to resume: {to_paste(['sweep', *argv, *again])}")
        return status
    if lacks := lacking(sweep, trials):
        _say(lacks)
    return int(bool(lacks) or all(trial.state != "finished" for trial in trials))


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


def check_keys(sweep: SweepFile) -> None:
    """Refuse parameters that `trainkit train` would refuse in a trial.

    The configuration is composed with each parameter's first value, and with each text,
    since that may be an option of a group. Only other programs know their keys.
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
    values = {name: each.listed for name, each in sweep.leaves.items()}
    first = {name: every[0] for name, every in values.items()}
    texts = [{n: v} for n, every in values.items() for v in every if isinstance(v, str)]
    for changed in [{}, *texts]:
        trial = {**first, **changed}
        words = [f"{name}={hydra_text(value)}" for name, value in trial.items()]
        try:
            _ = Composition([*fixed, *words]).config
        except Exception as error:
            if not is_mistake(error):
                raise
            raise TrainkitError(
                f"{sweep.path} parameters: `trainkit train` would refuse a trial with "
                f"{' '.join(words)}: {readable(error)}"
            ) from error


def _run_offline(
    sweep: SweepFile, options: argparse.Namespace
) -> tuple[int, Path, list[Trial]]:
    try:
        from trainkit.cli.sweep.offline import BEGUN, OfflineSweep
    except ImportError as error:
        raise TrainkitError(
            f"trainkit sweep --offline: without a server it needs Optuna, from version "
            f"4, which cannot be imported: {error}. Run pip install "
            f"'lightning-trainkit[sweeps]'."
        ) from error
    from trainkit.cli.runs.folder import only_one
    from trainkit.cli.sweep.search import refuse_what_optuna_lacks

    sweep_id = options.resume or secrets.token_hex(4)
    folder = Path(options.dir).absolute() / sweep_id
    refuse_what_optuna_lacks(sweep)
    if options.resume and not (folder / BEGUN).is_file():
        raise TrainkitError(
            f"trainkit sweep --resume: there is no sweep {sweep_id!r} in "
            f"{folder.parent}. Leave --resume out to start a new one."
        )
    with only_one(folder, what="trainkit sweep"):
        running = OfflineSweep(sweep, folder, seed=options.seed or sweep_id, say=_say)
        _say(f"sweep {sweep_id} in {folder}")
        status = running.run(agents=options.agents, count=options.count)
    return status, folder, running.trials


def _run_online(
    sweep: SweepFile, options: argparse.Namespace
) -> tuple[int, Path, list[Trial]]:
    from trainkit.cli.sweep.online import OnlineSweep

    running = OnlineSweep(sweep, options.resume)
    folder = Path(options.dir).absolute() / running.id
    folder.mkdir(parents=True, exist_ok=True)
    _say(f"sweep {running.path}; its agents write to {folder}")
    status = running.run(folder, agents=options.agents, count=options.count)
    return status, folder, running.trials()


def _say(text: str) -> None:
    """Print news to standard error, since standard output is for the table."""
    print(f"trainkit | {text}", file=sys.stderr, flush=True)
