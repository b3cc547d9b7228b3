"""What the tests of the command share."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from tests.cli.wandb_runs import connect
from tests.wandb_server import WandbServer
from trainkit.config import allow_targets

allow_targets("tests")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is alone in a folder of its own, as a command that just begins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    GlobalHydra.instance().clear()


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
        yield tmp_path
        wandb.teardown()


@pytest.fixture
def online(
    wandb_server: WandbServer, private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> WandbServer:
    connect(wandb_server, monkeypatch, private_wandb)
    return wandb_server
