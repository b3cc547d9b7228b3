"""`trainkit report`: draws the report of a run, or several runs in one page."""

from __future__ import annotations

from pathlib import Path

from trainkit.cli.console import Arguments
from trainkit.cli.report.page import comparison, read_run, write_report
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError
from trainkit.pages.atomic_file import write_atomically

EPILOG = """\
One run: report.html and pictures/ in its folder. Several runs, or the folder of a
multirun: one page with a line for each run and a table of what differs in their
configurations.

A page needs no other file and no network. It is drawn from metrics.csv, and from
summary.json and config.yaml if they exist. A run may be under way, or may have been
killed.
"""
_PAGE = "runs.html"


def main(argv: list[str]) -> int:
    """Run `trainkit report`, and return the exit status."""
    about = "Draw the report of a run, or several runs in one page."
    parser = Arguments(prog="trainkit report", description=about, epilog=EPILOG)
    add = parser.add_argument
    where = "the folder of a run"
    add("run_dir", nargs="+", type=Path, metavar="RUN_DIR", help=where)
    add("--no-pictures", action="store_true", help="leave the PNGs out")
    several = f"several runs: default {_PAGE}"
    add("--to", type=Path, metavar="PAGE.html", help=several)
    args = parser.parse_args(argv)
    runs, left_out = [], []
    for path in dict.fromkeys(run for each in args.run_dir for run in _runs_in(each)):
        if not (path / RunFolder.METRICS).is_file():
            left_out.append(f"{path} (no {RunFolder.METRICS})")
            continue
        runs.append(read_run(RunFolder(path)))
        if not runs[-1].charts:
            raise TrainkitError(
                f"RUN_DIR: must have rows of numbers in {RunFolder.METRICS}, and "
                f"{path} has none yet. Wait until the run logs its first one, or leave "
                f"it out."
            )
    if len(runs) == 1 and args.to is not None:
        raise TrainkitError(
            f"--to: is for the page of several runs, and there is one run, "
            f"{runs[0].folder.path}. Its report goes into its folder: leave --to out, "
            f"or name more runs."
        )
    try:
        if len(runs) == 1:
            write_report(runs[0], pictures=not args.no_pictures)
            said = str(runs[0].folder.path / RunFolder.REPORT)
        else:
            to = (args.to or Path(_PAGE)).absolute()
            write_atomically(to, comparison(runs, left_out=left_out))
            said = f"{len(runs)} runs in {to}"
    except OSError as error:
        raise TrainkitError(
            f"trainkit report: the page cannot be written: {error}. Name a writable "
            f"folder; of several runs, --to PAGE.html names it."
        ) from error
    for line in (*(f"left out: {each}" for each in left_out), said):
        print(f"trainkit | report: {line}")
    return 0


def _runs_in(path: Path) -> list[Path]:
    """The folder of a run, or the runs in the folder of a multirun, in their order.

    A run of a multirun may have crashed before its first row.
    """
    for deep in ("", "*/", "*/*/"):
        rows = [each.parent for each in path.resolve().glob(deep + RunFolder.METRICS)]
        begun = path.resolve().glob(deep + RunFolder.OVERRIDES)
        if rows:
            return sorted({*rows, *(each.parent for each in begun)}, key=_by_number)
    raise TrainkitError(
        f"RUN_DIR: must be the folder of a run, with {RunFolder.METRICS} in it, or "
        f"the folder of several, received {path.absolute()}. `trainkit train` ends "
        f"with the name of its folder."
    )


def _by_number(path: Path) -> tuple[Path, int, str]:
    number = int(path.name) if path.name.isdecimal() else -1
    return path.parent, number, path.name
