"""A sweep's requests to a W&B server, through the client's public API."""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from trainkit.cli.sweep.parameters import flatten
from trainkit.cli.sweep.rows import number
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, state_from_wandb
from trainkit.errors import TrainkitError

_SECONDS = 20
_PROJECT = "trainkit"


class Server:
    """The server that the client is logged in to, for one sweep file.

    Args:
        sweep: the file.
        who: the command, for messages.
        instead: what to do without a server, for messages.

    Raises:
        TrainkitError: there is no server, or nobody is logged in.
    """

    def __init__(
        self,
        sweep: SweepFile,
        *,
        who: str = "trainkit sweep",
        instead: str = "run this file without a server: --offline",
    ) -> None:
        import wandb

        self._sweep = sweep
        self._who, self._instead = who, instead
        with self._as_our_error():
            self._api = wandb.Api(timeout=_SECONDS)
            entity = os.environ.get("WANDB_ENTITY") or sweep.config.get("entity")
            self.entity = str(entity or self._api.default_entity)
        project = os.environ.get("WANDB_PROJECT") or sweep.config.get("project")
        self.project = str(project or _PROJECT)

    def create(self) -> str:
        """Create the sweep, and return its id."""
        import wandb

        # The client prints; standard output is for the table.
        with self._as_our_error(), contextlib.redirect_stdout(sys.stderr):
            return wandb.sweep(
                dict(self._sweep.config), entity=self.entity, project=self.project
            )

    def find(self, sweep_id: str) -> str:
        """The id of a sweep that exists on the server.

        Raises:
            TrainkitError: the server has no such sweep.
        """
        with self._as_our_error():
            return self._api.sweep(self.path(sweep_id)).id

    def path(self, name: str) -> str:
        """The path of a sweep or run of the project."""
        return f"{self.entity}/{self.project}/{name}"

    def is_alive(self) -> bool:
        """Whether anything answers at its address, through the user's proxies."""
        return answers(self._api.settings["base_url"])

    def trials(self, sweep_id: str) -> list[Trial]:
        """The sweep's runs, in the state that the server knows now."""
        with self._as_our_error():
            filters = {"$and": [{"sweep": sweep_id}]}  # as in the client's own Sweep
            project = f"{self.entity}/{self.project}"
            self._api.flush()
            runs = list(self._api.runs(project, filters=filters, order="+created_at"))
            return [self._trial(run) for run in runs]

    def logged(self, name: str) -> list[str]:
        """The names that a run has logged with numbers, from its summary."""
        with self._as_our_error():
            run = self._api.run(self.path(name))
            summary = dict(run.summary)
        named = (name for name in summary if not name.startswith("_"))
        return [name for name in named if _number(summary[name]) is not None]

    @contextlib.contextmanager
    def _as_our_error(self) -> Iterator[None]:
        import wandb

        try:
            yield
        except (wandb.Error, ValueError, OSError) as error:
            raise TrainkitError(
                f"{self._who}: W&B reports: {error} Check `wandb login` and the "
                f"network, or {self._instead}."
            ) from error

    def _trial(self, run: Any) -> Trial:
        summary = dict(run.summary)
        config = {**flatten(run.config), **run.config}  # nested or not, by dotted name
        value = _number(summary.get(self._sweep.metric or ""))
        return Trial(
            name=run.id,
            arguments={k: config[k] for k in self._sweep.varied if k in config},
            state=state_from_wandb(run.state),
            metric=[] if value is None else [value],
            num_rows=int(summary.get("_step", -1)) + 1,
        )


def answers(url: str) -> bool:
    """Whether anything answers at an address, through the user's proxies."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True  # an error is an answer
    except OSError:
        return False


def _number(value: Any) -> float | None:
    """The number in a summary's entry, which `define_metric(summary=...)` nests."""
    if hasattr(value, "items"):
        value = next((each for _, each in value.items()), None)
    return number(value)
