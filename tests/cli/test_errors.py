"""How the command ends: one message, and an exit status."""

from __future__ import annotations

import contextlib
import pickle
import signal

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from trainkit.cli.errors import (
    Interrupted,
    TrainingFailed,
    guarded,
    readable,
    remember_ctrl_c,
)
from trainkit.cli.main import COMMANDS, main
from trainkit.errors import TRACEBACK, TrainkitError


def raises(error: BaseException) -> int:
    def call() -> int:
        raise error

    return guarded(call)


@pytest.mark.parametrize(
    ("error", "traceback", "status", "said"),
    [
        (TrainkitError("thing: rule."), "", 2, "trainkit: thing: rule.\n"),
        (TrainkitError("thing"), "1", 2, "Traceback "),
        (ZeroDivisionError("oh"), "", 1, "Traceback "),
        (PermissionError(13, "No", "x"), "", 2, "trainkit: [Errno 13] No: 'x'\n"),
        (PermissionError(13, "No"), "", 1, "Traceback "),  # it says no place
        (KeyboardInterrupt(), "", 130, ""),
    ],
)
def test_an_error_is_one_message_and_a_status(
    error: BaseException,
    traceback: str,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(TRACEBACK, traceback)
    assert raises(error) == status
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert ("Traceback" in shown) == ("Traceback" in said)
    assert guarded(lambda: status) == status  # what works passes its status on


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (TrainkitError("loss: nan"), "trainkit: loss: nan"),
        (ConfigKeyError("no such metric"), "trainkit: no such metric"),
        (ValueError("deep"), "ValueError: deep"),
    ],
)
def test_a_failed_training_is_1(
    cause: Exception,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TRACEBACK, raising=False)
    failed = TrainingFailed.by(cause)
    failed = pickle.loads(pickle.dumps(failed))  # as from a launcher's process
    assert raises(failed) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(text)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("hydra/launcher/ray_aws", "[ray]"),
        ("hydra/sweeper/optuna", "[optuna]"),
        ("hydra/launcher/rai", ""),
        ("model/ray", ""),
    ],
)
def test_a_plugin_of_hydras_comes_with_an_extra(name: str, extra: str) -> None:
    error = HydraException(f"In 'hydra/config': Could not find '{name}'\n\nAvailable")
    assert readable(error).endswith(f"lightning-trainkit{extra}" if extra else "able")


def test_a_signal_ends_the_process() -> None:
    with pytest.raises(SystemExit) as left:
        raises(Interrupted(15))
    assert left.value.code == 143


def test_a_wrong_key_shows_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = OmegaConf.create({"rate": 1, "steps": 2, "_target_": "x"})
    OmegaConf.set_struct(config, True)

    def call() -> int:
        return config.raet

    assert guarded(call) == 2
    text = capsys.readouterr().err
    assert "Did you mean rate?" in text
    assert "There are: rate, steps\n" in text
    assert "full_key" not in text


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"  {name} " in text
    assert main([]) == 2


@pytest.mark.parametrize(("remembers", "status"), [(True, 130), (False, 1)])
def test_an_error_that_a_swallowed_ctrl_c_has_caused_is_no_error(
    remembers: bool, status: int
) -> None:
    """As an import that numpy repeats, until there is a RecursionError."""

    def broken() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if remembers:
            remember_ctrl_c()
        assert guarded(broken) == status
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        remember_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
