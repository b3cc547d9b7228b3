"""A sweep's requests to a W&B server, through the client's public API."""

from __future__ import annotations

import contextlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from trainkit.cli.sweep.rows import number
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial, state_from_wandb
from trainkit.errors import TrainkitError

_SECONDS = 20
_PROJECT = "trainkit"
UNKNOWN = object()
"""The value of an argument that is missing; None may be a value."""


class Server:
    """A sweep's side of the server that the client is logged in to.

    Args:
        sweep: the file.

    Raises:
        TrainkitError: there is no server, or nobody is logged in.
    """

    def __init__(self, sweep: SweepFile) -> None:
        import wandb

        self._sweep = sweep
        with _as_our_error():
            self._api = wandb.Api(timeout=_SECONDS)
            entity = os.environ.get("WANDB_ENTITY") or sweep.config.get("entity")
            self.entity = str(entity or self._api.default_entity)
        project = os.environ.get("WANDB_PROJECT") or sweep.config.get("project")
        self.project = str(project or _PROJECT)

    def create(self) -> str:
        """Create the sweep.

        Returns:
            its id.
        """
        import wandb

        # The client prints; standard output is for the table.
        with _as_our_error(), contextlib.redirect_stdout(sys.stderr):
            return wandb.sweep(
                dict(self._sweep.config), entity=self.entity, project=self.project
            )

    def find(self, sweep_id: str) -> str:
        """The id of a sweep that is there already.

        Raises:
            TrainkitError: the server has no such sweep.
        """
        with _as_our_error():
            return self._api.sweep(self.path(sweep_id)).id

    def path(self, sweep_id: str) -> str:
        return f"{self.entity}/{self.project}/{sweep_id}"

    def is_alive(self) -> bool:
        """Whether anything answers at its address, through the proxies in force."""
        try:
            with urllib.request.urlopen(self._api.settings["base_url"], timeout=5):
                return True
        except urllib.error.HTTPError:
            return True  # an answer, whatever it says
        except OSError:
            return False

    def trials(self, sweep_id: str) -> list[Trial]:
        """The sweep's runs, as the server knows them now."""
        with _as_our_error():
            filters = {"$and": [{"sweep": sweep_id}]}  # as the client's own Sweep asks
            project = f"{self.entity}/{self.project}"
            self._api.flush()
            runs = list(self._api.runs(project, filters=filters, order="+created_at"))
            return [self._trial(run) for run in runs]

    def logged(self, name: str) -> list[str]:
        """The names that a run has logged with numbers, from its summary."""
        with _as_our_error():
            run = self._api.run(f"{self.entity}/{self.project}/{name}")
            summary = dict(run.summary)
        named = (name for name in summary if not name.startswith("_"))
        return [name for name in named if _number(summary[name]) is not None]

    def _trial(self, run: Any) -> Trial:
        config, summary = dict(run.config), dict(run.summary)
        values = {name: value_of(config, name) for name in self._sweep.varied}
        value = _number(summary.get(self._sweep.metric or ""))
        return Trial(
            name=run.id,
            arguments={k: v for k, v in values.items() if v is not UNKNOWN},
            state=state_from_wandb(run.state),
            metric=[] if value is None else [value],
            num_rows=int(summary.get("_step", -1)) + 1,
        )


def value_of(config: Mapping[str, Any], name: str) -> Any:
    """A swept value in a run's configuration, whether it stands flat or nested.

    >>> value_of({"a.b": 1, "a": {"b": 2}}, "a.b"), value_of({"a": {"b": 2}}, "a.b")
    (1, 2)
    >>> value_of({"a": 1}, "b") is UNKNOWN
    True
    """
    if name in config:
        return config[name]
    node: Any = config
    for part in name.split("."):
        node = node.get(part, UNKNOWN) if isinstance(node, Mapping) else UNKNOWN
    return node


def _number(value: Any) -> float | None:
    """A summary's entry: a number, or what `define_metric(summary=...)` makes of it."""
    if hasattr(value, "items"):
        value = next((each for _, each in value.items()), None)
    return number(value)


@contextlib.contextmanager
def _as_our_error() -> Iterator[None]:
    import wandb

    try:
        yield
    except (wandb.Error, ValueError, OSError) as error:
        raise TrainkitError(
            f"trainkit sweep: W&B reports: {error} Check `wandb login` and the "
            f"network, or run the same file without a server: --offline."
        ) from error
