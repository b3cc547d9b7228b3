"""What a command loads, says first, and ends with, in a new interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch  # noqa: F401
import pytest

from tests.cli.fresh import Answer, fresh
from trainkit import __version__
from trainkit.cli.printing import say_loading

PLAN = ["plan", "--target", "512", "--world-size", "4", "--max-micro-batch", "24"]
ANSWERS = [
    (["--help"], "usage: trainkit COMMAND", []),
    (["--version"], f"trainkit {__version__}", []),
    (PLAN, "accumulation: 8 micro-batches", []),
    ([*PLAN, "--json"], '"accumulate": 8', []),
    (["plan", "--help"], "--noise-scale", []),
    (["sweep", "--help"], "Run a sweep in W&B's own format", []),
    (["completion", "bash"], "-F _python_argcomplete trainkit", []),
    (["completion", "--query", "trainkit plan --t"], "--target", []),
    (
        ["completion", "--query", "trainkit train accumulation=per_t"],
        "accumulation=per_token",
        ["hydra"],
    ),
    (["train", "--cfg", "job"], "accumulate_grad_batches:", ["hydra"]),
    (["train", "--help"], "accumulation: ", ["hydra"]),
]
MISTAKES = [
    (["plna"], "command: must be one of new, train, .* Did you mean plan"),
    ([*PLAN, "--rule", "auto"], "invalid choice: 'auto' .*linear"),
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
    done = subprocess.run(
        [sys.executable, "-m", "trainkit", "tran"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "received 'tran'. Did you mean train?" in done.stderr
