"""The trials of a sweep, the best first, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any, TextIO

from trainkit.cli.aligned import aligned
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, best_of, ranked

BEST = "*"


def show(sweep: SweepFile, trials: list[Trial], *, file: TextIO | None = None) -> None:
    """Print the table, without colours if the output is not a terminal."""
    stream = file or sys.stdout
    if stream.isatty():
        _show_rich(sweep, trials, stream)
    else:
        print("\n".join(lines(sweep, trials)), file=stream)


def lines(sweep: SweepFile, trials: list[Trial]) -> list[str]:
    """The lines of the table, with aligned columns."""
    return aligned([_header(sweep), *_rows(sweep, trials)])


def as_json(sweep: SweepFile, trials: list[Trial], **about: Any) -> str:
    """The table as JSON; a metric that is not a finite number is null."""
    best = best_of(trials, maximizes=sweep.maximizes)
    order = ranked(trials, maximizes=sweep.maximizes)
    content = {
        **about,
        "metric": sweep.metric,
        "goal": "maximize" if sweep.maximizes else "minimize",
        "best": best.name if best else None,
        "trials": [_entry(trial) for trial in order],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _entry(trial: Trial) -> dict[str, Any]:
    return {
        "name": trial.name,
        "state": trial.state,
        "value": trial.number,
        "arguments": trial.flat,
        "rows": trial.num_rows,
        "exit_code": trial.exit_code,
        "note": trial.note,
        "folder": trial.folder,
    }


def _header(sweep: SweepFile) -> list[str]:
    return ["", "trial", "state", sweep.metric or "metric", *sweep.varied, "note"]


def _rows(sweep: SweepFile, trials: list[Trial]) -> Iterable[list[str]]:
    best = best_of(trials, maximizes=sweep.maximizes)
    for trial in ranked(trials, maximizes=sweep.maximizes):
        values = trial.flat
        yield [
            BEST if trial is best else "",
            trial.name,
            trial.state,
            "" if trial.value is None else f"{trial.value:.6g}",
            *(brief(values.get(name, "")) for name in sweep.varied),
            trial.note if trial.state != "finished" or not trial.metric else "",
        ]


def brief(value: Any) -> str:
    """The text of a value in a table.

    >>> brief(0.00012345678), brief("sqrt"), brief(8)
    ('0.000123457', 'sqrt', '8')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _show_rich(sweep: SweepFile, trials: list[Trial], file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {"finished": "green", "stopped": "yellow", "crashed": "red"}
    table = Table(box=None, header_style="bold")
    for name in _header(sweep):
        table.add_column(name, overflow="fold")
    for row in _rows(sweep, trials):
        cells = [Text(cell) for cell in row]
        cells[2].stylize(colours.get(row[2], ""))
        table.add_row(*cells, style="bold" if row[0] == BEST else "")
    Console(file=file).print(table)
