"""On PYTHONPATH, it lets `wandb agent` ask its server twice a second, not each five
seconds. Nothing else of the client is touched, and no other process loads it."""

import sys

if sys.orig_argv[1:4] == ["-m", "wandb", "agent"]:
    from wandb.wandb_agent import Agent

    Agent.POLL_INTERVAL = 0.5  # type: ignore[assignment]
