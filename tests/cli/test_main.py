"""What a command loads, says first, and ends with: one message and an exit status."""

from __future__ import annotations

import contextlib
import pickle
import re
import signal
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401
import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from tests.cli.fresh import Answer, fresh
from tests.startup import ended
from trainkit import __version__
from trainkit.cli.console import say_loading
from trainkit.cli.errors import (
    Interrupted,
    TrainingFailed,
    guarded,
    remember_ctrl_c,
)
from trainkit.cli.main import COMMANDS, main
from trainkit.errors import TRACEBACK, TrainkitError

PLAN = ["plan", "--target", "512", "--world-size", "4", "--max-micro-batch", "24"]
RATE = ["--lr", "0.1", "--reference", "256"]
HYDRA = ["hydra", "omegaconf"]
ANSWERS = [
    (["--help"], "usage: trainkit COMMAND", []),
    (["--version"], f"trainkit {__version__}", []),
    (PLAN, "accumulation: 8 micro-batches", []),
    ([*PLAN, *RATE, "--noise-scale", "210"], "lr, gain with Adam: 0.113616", []),
    ([*PLAN, *RATE, "--json"], '"accumulate": 8', []),
    (["plan", "--help"], "--noise-scale", []),
    (["sweep", "--help"], "Run a sweep in W&B's own format", []),
    (["completion", "bash"], "-F _python_argcomplete trainkit", []),
    ("trainkit plan --t", "--target", []),
    ("trainkit train accumulation=per_t", "accumulation=per_token", HYDRA),
    (["train", "--cfg", "job"], "accumulate_grad_batches:", HYDRA),
    (["train", "--help"], "accumulation: ", HYDRA),
]
MISTAKES = [
    (["plna"], "command: must be one of new, train, .* Did you mean plan"),
    ([*PLAN, "--rule", "auto"], "unrecognized arguments: --rule"),
    (["plan", "--target", "0", "--max-micro-batch", "8"], "BatchPlan target: must"),
    (["completion", "tcsh"], "invalid choice: 'tcsh' .*bash"),
    (["train", "accumulation=nothing"], "'accumulation'(?s:.*)per_sample"),
    (["sweep", "none.yaml"], "sweep file: none.yaml cannot be read as YAML"),
]
LINE = "trainkit | {}: loading torch and Lightning ...\n"
LOADING = {
    "train": ["train", "experiment=demo"],
    "fit": ["fit", "--model=mine.Net"],
    "check": ["check", "train", "experiment=demo"],
    "plan": ["plan", "--probe", "--target", "8"],
}
SILENT = [["fit", "--help"], ["check", "--help"], ["check", "--json", "train"]]
SILENT += [["plan", "--probe", "--target", "8", "--json"]]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """Of all commands, where torch cannot be imported."""
    commands = [words for words, *_ in (*ANSWERS, *MISTAKES)]
    commands += [*LOADING.values(), *SILENT]
    where = tmp_path_factory.mktemp("empty")
    found = fresh(commands, where, hidden=["torch"])
    made = {path.name for path in where.iterdir()}
    assert made <= {"outputs"}  # of the trainings that cannot import torch
    return {" ".join(words): each for words, each in zip(commands, found, strict=True)}


@pytest.mark.parametrize(("words", "said", "loaded"), ANSWERS)
def test_what_only_answers_loads_nothing_heavy(
    words: list[str], said: str, loaded: list[str], answers: dict[str, Answer]
) -> None:
    found = answers[" ".join(words)]
    assert (found.status, found.err) == (0, "")
    assert said in found.out
    assert "loading" not in found.out
    assert found.loaded == loaded


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_a_mistake_is_one_message_with_the_choices_and_2(
    words: list[str], message: str, answers: dict[str, Answer]
) -> None:
    found = answers[" ".join(words)]
    assert (found.status, found.out) == (2, "")
    assert re.match(f"trainkit: (?s:.*){message}", found.err)
    assert "Traceback" not in found.err


@pytest.mark.parametrize("command", LOADING)
def test_what_takes_seconds_to_load_says_so_first(
    command: str, answers: dict[str, Answer]
) -> None:
    found = answers[" ".join(LOADING[command])]
    assert found.out == LINE.format(command)
    assert found.status != 0  # there is no torch


@pytest.mark.parametrize("words", SILENT)
def test_what_only_prints_has_no_such_line(
    words: list[str], answers: dict[str, Answer]
) -> None:
    assert "loading" not in answers[" ".join(words)].out


def test_it_is_said_once_and_on_the_first_rank_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say_loading("train")  # this process has loaded Lightning
    assert capsys.readouterr().out == ""
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    for rank, said in (("1", ""), ("0", LINE.format("train"))):
        monkeypatch.setenv("LOCAL_RANK", rank)
        say_loading("train")
        assert capsys.readouterr().out == said


def test_python_m_trainkit_is_the_command(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = ended([sys.executable, "-m", "trainkit", "tran"], tmp_path, env)
    assert (done.returncode, done.stdout) == (2, "")
    assert "received 'tran'. Did you mean train?" in done.stderr


# ---- one message, and an exit status -------------------------------------------------


def raises(error: BaseException) -> int:
    def call() -> int:
        raise error

    return guarded(call)


def failed(cause: Exception) -> TrainingFailed:
    """A failed training, as from a launcher's process."""
    return pickle.loads(pickle.dumps(TrainingFailed.by(cause)))


@pytest.mark.parametrize(
    ("error", "traceback", "status", "said"),
    [
        (TrainkitError("thing: rule."), "", 2, "trainkit: thing: rule.\n"),
        (TrainkitError("thing"), "1", 2, "Traceback "),
        (ZeroDivisionError("oh"), "", 1, "Traceback "),
        (PermissionError(13, "No", "x"), "", 2, "trainkit: [Errno 13] No: 'x'\n"),
        (PermissionError(13, "No"), "", 1, "Traceback "),  # it says no place
        (KeyboardInterrupt(), "", 130, ""),
        (failed(TrainkitError("loss: nan")), "", 1, "trainkit: loss: nan"),
        (failed(ConfigKeyError("no such metric")), "", 1, "trainkit: no such metric"),
        (failed(ValueError("deep")), "", 1, "ValueError: deep"),
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


@pytest.mark.usefixtures("own_ctrl_c")
@pytest.mark.parametrize(("remembers", "status"), [(True, 130), (False, 1)])
def test_an_error_that_a_swallowed_ctrl_c_has_caused_is_no_error(
    remembers: bool, status: int
) -> None:
    """As an import that numpy repeats, until there is a RecursionError."""

    def broken() -> int:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError

    if remembers:
        remember_ctrl_c()
    assert guarded(broken) == status


@pytest.mark.usefixtures("own_ctrl_c")
def test_a_command_that_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    remember_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
