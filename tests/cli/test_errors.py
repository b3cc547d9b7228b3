"""How the command ends: one message, and an exit status."""

from __future__ import annotations

import pickle

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from trainkit.cli.errors import Interrupted, TrainingFailed, guarded
from trainkit.cli.main import COMMANDS, main
from trainkit.errors import TRACEBACK, TrainkitError


def raises(error: BaseException) -> int:
    def call() -> int:
        raise error

    return guarded(call)


def test_what_works_passes_its_status_on() -> None:
    assert guarded(lambda: 0) == 0
    assert guarded(lambda: 1) == 1


def test_a_mistake_is_one_message_and_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRACEBACK, raising=False)
    assert raises(TrainkitError("thing: rule.")) == 2
    assert capsys.readouterr().err == "trainkit: thing: rule.\n"


def test_a_traceback_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACEBACK, "1")
    assert raises(TrainkitError("thing")) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_shows_its_traceback_and_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert raises(ZeroDivisionError("oh")) == 1
    assert "Traceback" in capsys.readouterr().err


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


def test_signals() -> None:
    assert raises(KeyboardInterrupt()) == 130
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


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tran"]) == 2
    assert "received 'tran'. Did you mean train?" in capsys.readouterr().err


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("trainkit 0.")
