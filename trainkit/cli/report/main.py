"""`trainkit report`: draws the report of a run again."""

from __future__ import annotations

from pathlib import Path

from trainkit.cli.arguments import Arguments
from trainkit.cli.report.write import write_report
from trainkit.cli.runs.folder import RunFolder
from trainkit.errors import TrainkitError

EPILOG = """\
report.html needs no other file and no network. It is drawn from metrics.csv, and from
summary.json and learning_rate_plan.json if they exist. The run may be under way, or may
have been killed.
"""


def main(argv: list[str]) -> int:
    """Write the report of one or several runs.

    Args:
        argv: the arguments after `report`.

    Returns:
        The exit status, 0.

    Raises:
        TrainkitError: a folder has no rows to draw, or is not writable.
    """
    parser = Arguments(
        prog="trainkit report",
        description="Write report.html and pictures/ into the folder of a run.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "run_dir", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run"
    )
    parser.add_argument("--no-pictures", action="store_true", help="leave the PNGs out")
    args = parser.parse_args(argv)
    for path in args.run_dir:
        folder = RunFolder(path)
        _refuse_empty(folder)
        try:
            missing = write_report(folder, pictures=not args.no_pictures)
        except OSError as error:
            raise TrainkitError(
                f"RUN_DIR: its report cannot be written: {error}. Make the folder "
                f"writable, or copy {folder.METRICS} to another one."
            ) from error
        if missing is None:
            raise TrainkitError(
                f"RUN_DIR: must have rows of numbers in {folder.METRICS}, and "
                f"{folder.path} has none yet. Wait until the run logs its first one."
            )
        if missing:
            print(f"trainkit | report: {missing}")
        print(f"trainkit | report: {folder.path / folder.REPORT}")
    return 0


def _refuse_empty(folder: RunFolder) -> None:
    if not (folder.path / folder.METRICS).is_file():
        raise TrainkitError(
            f"RUN_DIR: must be the folder of a run, with {folder.METRICS} in it, "
            f"received {folder.path}. `trainkit train` ends with the name of its "
            f"folder; with logger=none it writes no rows."
        )
