"""What the tests of the command share."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from tests.cli.sweep.helpers import private_env
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
def for_lightnings_cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules in the folder of the test are found, and its seeds are forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path))
    # Lightning 2.6 calls jsonargparse 4.53 by old names; only a strict suite sees it.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    for variable in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything sets them
        monkeypatch.setenv(variable, "0")


@pytest.fixture
def own_ctrl_c() -> Iterator[None]:
    """SIGINT as Python has it; what a test makes of it is forgotten."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.fixture
def no_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private HOME, nothing of W&B's inherited; returns the folder to work in.

    Trials that a sweep starts from here are forks, and it looks at them often: the
    client writes their rows at once."""
    for name in os.environ.keys() - (env := private_env(tmp_path)).keys():
        monkeypatch.delenv(name)
    soon = {"WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.05"}
    for name, value in {**env, **soon}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("trainkit.cli.sweep.offline._TICK", 0.02)
    monkeypatch.setattr("trainkit.cli.sweep.offline._LOOK_EVERY", 0.1)
    return tmp_path
