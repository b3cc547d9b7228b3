"""Refuses to run among the files of another distribution."""

from __future__ import annotations

from pathlib import Path

from trainkit.errors import TrainkitError

SITE = Path(__file__).parents[2]
"""The folder that holds the package: `site-packages`, or a clone."""


def refuse_a_mixture(site: Path = SITE) -> None:
    """Check that one distribution alone has put files into the package `trainkit`.

    It reads the folder instead of `importlib.metadata`, whose import takes longer than
    the rest of the command's start.

    Raises:
        TrainkitError: another one, which is named `trainkit` too, has put files there.
    """
    others = [
        record.parent.name.removesuffix(".dist-info")
        for record in site.glob("trainkit-*.dist-info/RECORD")
        if "\ntrainkit/" in "\n" + record.read_text(encoding="utf-8")
    ]
    if others and any(site.glob("lightning_trainkit-*.dist-info")):
        raise TrainkitError(
            f"package trainkit: must come from one distribution, received the files of "
            f"lightning-trainkit and of {others[0]} in {site}. Run pip uninstall "
            f"trainkit lightning-trainkit, then install the one that you want again."
        )
