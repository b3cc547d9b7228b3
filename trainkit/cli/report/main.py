"""`trainkit report`: draws the report of a run, or several runs in one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainkit.cli.arguments import Arguments
from trainkit.cli.report.compare import comparison, runs_in
from trainkit.cli.report.write import Run, read_run, write_report
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError
from trainkit.pages.atomic_file import write_atomically

EPILOG = """\
One run: report.html and pictures/ in its folder. Several runs, or the folder of a
multirun: one page with a line for each run and a table of what differs in their
configurations.

A page needs no other file and no network. It is drawn from metrics.csv, and from
summary.json, config.yaml, learning_rate_plan.json and step_times.csv if they exist. A
run may be under way, or may have been killed.
"""
_PAGE = "runs.html"


def main(argv: list[str]) -> int:
    """Write the report of a run, or the page of several runs.

    Args:
        argv: the arguments after `report`.

    Returns:
        The exit status, 0.

    Raises:
        TrainkitError: a folder has no rows to draw, or is not writable.
    """
    parser = Arguments(
        prog="trainkit report",
        description="Draw the report of a run, or several runs in one page.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run"
    )
    parser.add_argument("--no-pictures", action="store_true", help="leave the PNGs out")
    parser.add_argument(
        "--to", type=Path, metavar="PAGE.html", help=f"several runs: default {_PAGE}"
    )
    args = parser.parse_args(argv)
    folders, empty = _folders(args.run_dir)
    if len(folders) > 1:
        _several(folders, empty, _target(args.to))
    elif args.to is not None:
        raise TrainkitError(
            f"--to: is for the page of several runs, and there is one run, "
            f"{folders[0].path}. Its report goes into its folder: leave --to out, or "
            f"name more runs."
        )
    else:
        _one(folders[0], pictures=not args.no_pictures)
    return 0


def _folders(paths: Sequence[Path]) -> tuple[list[RunFolder], list[Path]]:
    """The runs, and those of a multirun that have no rows."""
    found: list[RunFolder] = []
    empty: list[Path] = []
    for path in paths:
        folder = RunFolder(path)
        if (folder.path / folder.METRICS).is_file():
            found.append(folder)
            continue
        runs, without = runs_in(folder.path)
        if len(runs) < 2:
            _refuse(folder, runs)
        found += runs
        empty += without
    places = [folder.path.resolve() for folder in found]
    twice = [place for n, place in enumerate(places) if place in places[:n]]
    if twice:
        raise TrainkitError(
            f"RUN_DIR: each run once, and {twice[0]} was given twice. Leave one out."
        )
    return found, empty


def _refuse(folder: RunFolder, runs: Sequence[RunFolder]) -> None:
    if runs:
        raise TrainkitError(
            f"RUN_DIR: must be a run, or the folder of several with {folder.METRICS}, "
            f"and in {folder.path} there is one, {runs[0].path.name}. Name it: "
            f"trainkit report {runs[0].path}"
        )
    raise TrainkitError(
        f"RUN_DIR: must be the folder of a run, with {folder.METRICS} in it, "
        f"received {folder.path}. `trainkit train` ends with the name of its folder."
    )


def _read(folder: RunFolder) -> Run:
    run = read_run(folder)
    if not run.charts.shown:
        raise TrainkitError(
            f"RUN_DIR: must have rows of numbers in {folder.METRICS}, and "
            f"{folder.path} has none yet. Wait until the run logs its first one, or "
            f"leave it out."
        )
    return run


def _one(folder: RunFolder, *, pictures: bool) -> None:
    run = _read(folder)
    try:
        write_report(run, pictures=pictures)
    except OSError as error:
        raise TrainkitError(
            f"RUN_DIR: its report cannot be written: {error}. Make the folder "
            f"writable, or copy {folder.METRICS} to another one."
        ) from error
    print(f"trainkit | report: {folder.path / folder.REPORT}")


def _target(to: Path | None) -> Path:
    path = (to or Path(_PAGE)).absolute()
    if path.suffix not in (".html", ".htm") or path.is_dir():
        raise TrainkitError(
            f"--to: must be a file that ends in .html, received {to}. For example "
            f"--to {_PAGE}."
        )
    if not path.parent.is_dir():
        raise TrainkitError(
            f"--to: must lie in a folder that exists, and {path.parent} does not. "
            f"Make it, or name another one."
        )
    return path


def _several(folders: Sequence[RunFolder], empty: Sequence[Path], to: Path) -> None:
    left_out = [f"{path} (no {RunFolder.METRICS})" for path in empty]
    text = comparison([_read(folder) for folder in folders], left_out=left_out)
    try:
        write_atomically(to, text)
    except OSError as error:
        raise TrainkitError(
            f"--to: the page cannot be written: {error}. Name a writable folder."
        ) from error
    for text in left_out:
        print(f"trainkit | report: left out: {text}")
    print(f"trainkit | report: {len(folders)} runs in {to}")
