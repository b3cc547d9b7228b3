"""The bar of `StepProgress`, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from rich import progress
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Column


class StepBar:
    """Steps, numbers and times beside a bar, as wide as the terminal is.

    While it is drawn, what is printed appears above it.

    Args:
        total: how many steps there will be; None if that is not known.
    """

    def __init__(self, total: int | None) -> None:
        whole = Column(no_wrap=True)
        self._progress = progress.Progress(
            progress.TextColumn("[bold]step"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(table_column=whole),
            _NumbersColumn(),
            progress.TimeElapsedColumn(table_column=whole),
            progress.TextColumn("<"),
            progress.TimeRemainingColumn(table_column=whole),
            console=Console(),
        )
        self._task = self._progress.add_task("train", total=total, numbers=[])
        self._progress.start()

    def draw(self, step: int, numbers: list[str]) -> None:
        """Show a step and texts such as `window/loss 0.25`."""
        self._progress.update(self._task, completed=step, numbers=numbers)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._progress.stop()


class _NumbersColumn(progress.ProgressColumn):
    """The numbers, in as many lines as they need; none is cut."""

    def render(self, task: progress.Task) -> Any:
        return _Numbers(task.fields["numbers"])


class _Numbers:
    def __init__(self, texts: list[str]) -> None:
        last = len(texts) - 1
        self._texts = [text + "," * (i < last) for i, text in enumerate(texts)]

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[Segment]:
        line, width = "", max(1, options.max_width)
        for text in self._texts:
            if line and len(line) + 1 + len(text) > width:
                yield Segment(line + "\n")
                line = ""
            text = f"{line} {text}".strip()
            *above, line = wrap(text, width, break_on_hyphens=False)
            yield from (Segment(each + "\n") for each in above)
        yield Segment(line)

    def __rich_measure__(
        self, console: Console, options: ConsoleOptions
    ) -> Measurement:
        longest = max(map(len, self._texts), default=0)
        return Measurement(longest, len(" ".join(self._texts)))
