"""The bar of `StepProgress`, on a terminal."""

from __future__ import annotations

from rich import progress
from rich.console import Console
from rich.table import Column


class StepBar:
    """Steps, numbers and times beside a bar, as wide as the terminal is.

    While it is drawn, what is printed appears above it.

    Args:
        total: how many steps there will be; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        whole = Column(no_wrap=True)
        in_lines = Column(overflow="fold")  # as many as the numbers need; none is cut
        self._progress = progress.Progress(
            progress.TextColumn("[bold]step"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(table_column=whole),
            progress.TextColumn("{task.fields[numbers]}", table_column=in_lines),
            progress.TimeElapsedColumn(table_column=whole),
            progress.TextColumn("<"),
            progress.TimeRemainingColumn(table_column=whole),
            console=Console(),
        )
        self._task = self._progress.add_task("train", total=total, numbers="")
        self._progress.start()

    def draw(self, step: int, numbers: list[str]) -> None:
        """Show a step and texts such as `window/loss 0.25`."""
        self._progress.update(self._task, completed=step, numbers=", ".join(numbers))

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()
