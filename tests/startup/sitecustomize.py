"""Quicker processes: each that a test starts runs this first.

- It becomes a fork of a server, where its environment names one: see `forked`.
- transformers and scipy seem not to be installed, as with many users. torchmetrics
  imports them wherever they are, for two seconds of each start. Who asks for them by
  name is given them.
- `wandb agent` asks its server fifty times a second, not each five seconds. So do, in
  forks, `trainkit sweep` its trials and nodes of torchrun each other, not each second.
"""

import os
import sys

if server := os.environ.get("TESTS_FORK_SERVER"):  # before anything else is imported
    from fork_client import become_fork, words

    if asked := words():
        become_fork(server, asked)

import importlib.metadata
import importlib.util
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, PackageNotFoundError

HIDDEN = ("transformers", "scipy")

_distribution = importlib.metadata.distribution
_find_spec = importlib.util.find_spec


def _without_hidden(distribution_name: str) -> Distribution:
    if distribution_name in HIDDEN:
        raise PackageNotFoundError(distribution_name)
    return _distribution(distribution_name)


def _no_spec_of_hidden(name: str, package: "str | None" = None) -> "ModuleSpec | None":
    return None if name in HIDDEN else _find_spec(name, package)


importlib.metadata.distribution = _without_hidden
importlib.util.find_spec = _no_spec_of_hidden


def show_hidden() -> None:
    """For tests themselves: what is installed is seen."""
    importlib.metadata.distribution = _distribution
    importlib.util.find_spec = _find_spec


def ask_often() -> None:
    runs = sys.orig_argv[1:4]
    if runs == ["-m", "wandb", "agent"]:
        from wandb.wandb_agent import Agent

        Agent.POLL_INTERVAL = 0.02  # type: ignore[assignment]
    if runs == ["-m", "trainkit", "sweep"]:
        for name in ("online", "offline"):
            if found := sys.modules.get(f"trainkit.cli.sweep.{name}"):
                vars(found)["_TICK"] = 0.02
    if runs[:2] == ["-m", "torch.distributed.run"]:
        name = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
        if found := sys.modules.get(name):
            wait = found._delay
            found._BackendRendezvousStateHolder.__init__.__defaults__ = (0,)  # seconds
            # Its events' names, which nobody reads, are made of the whole stack: with
            # all that a fork has imported, that takes seconds.
            vars(found).update(
                _delay=lambda seconds: wait(0.02 if seconds == 1 else 0),
                get_method_name=lambda: "",
            )


ask_often()
