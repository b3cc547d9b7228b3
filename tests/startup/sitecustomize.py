"""Quicker processes: each that a test starts runs this first.

- transformers seems not to be installed, as with most users. torchmetrics imports it
  wherever it is, for a second of each start.
- `wandb agent` asks its server twice a second, not each five seconds.
"""

import importlib.metadata
import sys
from importlib.metadata import Distribution, PackageNotFoundError

_distribution = importlib.metadata.distribution


def _without_transformers(distribution_name: str) -> Distribution:
    if distribution_name == "transformers":
        raise PackageNotFoundError(distribution_name)
    return _distribution(distribution_name)


importlib.metadata.distribution = _without_transformers

if sys.orig_argv[1:4] == ["-m", "wandb", "agent"]:
    from wandb.wandb_agent import Agent

    Agent.POLL_INTERVAL = 0.5  # type: ignore[assignment]
