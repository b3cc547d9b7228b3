"""What the tests of the command share."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wandb_server import WandbServer


@pytest.fixture
def wandb_server() -> Iterator[WandbServer]:
    """A W&B server on the loopback, for the real client; see tests/wandb_server.py."""
    with WandbServer() as server:
        yield server


@pytest.fixture
def private_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The client in this process, as a new user in an empty folder has it: logged in
    nowhere. For a server, set what `WandbServer.env` says."""
    import wandb

    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "exit", sys.exit)  # the client wraps them, again
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # after each teardown
    wandb.teardown()
    with tempfile.TemporaryDirectory() as home:
        monkeypatch.setenv("HOME", home)
        monkeypatch.chdir(tmp_path)
        yield tmp_path
        wandb.teardown()
