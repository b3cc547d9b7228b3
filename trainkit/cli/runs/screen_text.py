"""What stands on a terminal after some text was written to it."""

from __future__ import annotations

import re

_PARTS = re.compile(
    r"\x1b\[(?P<numbers>[0-9;?]*)(?P<code>[@-~])"  # such as: go up, erase the line
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # a title or a link
    r"|\x1b[^\[\]]"
    r"|(?P<control>[\r\n\b])"
    r"|(?P<text>[^\x1b\r\n\b]+)"
)


class ScreenText:
    """The lines on a terminal, after progress bars have drawn over themselves.

    Attributes:
        lines: those that may still change, from the top.
    """

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self._row = self._column = 0
        self._rest = ""

    def write(self, text: str) -> None:
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            part = _PARTS.match(text, place)
            if part is None:  # the beginning of a code, whose end comes later
                self._rest = text[place:]
                return
            place = part.end()
            if part["text"]:
                self._put(part["text"])
            elif part["control"]:
                self._go(part["control"])
            elif part["code"]:
                self._obey(part["code"], part["numbers"])

    def take(self, keep: int) -> list[str]:
        """The lines above the last ones, which will not change; they are forgotten."""
        number = max(0, min(len(self.lines) - keep, self._row))
        taken, self.lines = self.lines[:number], self.lines[number:]
        self._row -= number
        return taken

    def _put(self, text: str) -> None:
        line = self.lines[self._row].ljust(self._column)
        end = self._column + len(text)
        self.lines[self._row] = line[: self._column] + text + line[end:]
        self._column = end

    def _go(self, control: str) -> None:
        if control == "\b":
            self._column = max(0, self._column - 1)
            return
        self._column = 0
        if control == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")

    def _obey(self, code: str, numbers: str) -> None:
        number = int(numbers) if numbers.isdigit() else 0
        if code == "A":
            self._row = max(0, self._row - (number or 1))
        elif code == "B":
            self._row = min(len(self.lines) - 1, self._row + (number or 1))
        elif code == "G":
            self._column = max(0, number - 1)
        elif code == "K":
            line = self.lines[self._row]
            kept = {0: line[: self._column], 1: line[self._column :]}.get(number, "")
            self.lines[self._row] = kept.rjust(len(line)) if number == 1 else kept
        elif code == "J" and number == 0:
            del self.lines[self._row + 1 :]
