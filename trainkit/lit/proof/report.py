"""The report of a check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainkit.lit.proof.findings import Findings
from trainkit.lit.proof.page import write_page


@dataclass(frozen=True, repr=False)
class Report(Findings):
    """How far the gradient of a window is from that of one batch, and why.

    `str(report)` is a table; the attributes are those of `Findings`.
    """

    def to_html(self, path: str | Path, *, command: str = "") -> None:
        """Write the report as a page that needs no other file and no network.

        Args:
            path: the file; its folder must exist.
            command: what was run, if it was a command.
        """
        write_page(self, path, command=command)
