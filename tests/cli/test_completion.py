"""What Tab offers for a line."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.fresh import fresh
from tests.startup import forked
from trainkit.cli.completion import main
from trainkit.cli.main import COMMANDS
from trainkit.errors import TrainkitError

STRATEGIES = ["none", "per_class_weight", "per_sample", "per_token", "uniform"]
STRATEGIES.append("weighed")


@pytest.fixture(autouse=True)
def _private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def complete_all(*lines: str) -> dict[str, list[str]]:
    """What the last word of each line may become."""
    first = ["trainkit.cli.composition", "argcomplete"]
    found = [each.out.split() for each in fresh(lines, Path(), first=first)]
    return dict(zip(lines, found, strict=True))


CANDIDATES = {
    "trainkit ": list(COMMANDS),
    "trainkit p": ["predict", "plan"],
    "trainkit nothing ": [],
    "trainkit completion f": ["fish"],
    "trainkit new mine --h": ["--help"],
    "trainkit plan --ma": ["--max-micro-batch"],
    "trainkit plan --json --wo": ["--world-size"],
    "trainkit check --j": ["--json"],
    "trainkit train --cf": ["--cfg"],
    "trainkit train --cfg ": ["job", "hydra", "all"],
    "trainkit train accumulation=": [f"accumulation={name}" for name in STRATEGIES],
    "trainkit train accumulation=per_t": ["accumulation=per_token"],
    "trainkit train -m accumulation=n": ["accumulation=none"],
    "trainkit train ~schedu": ["~schedule", "~scheduler"],
    "trainkit train +sw": [],  # conf/sweep is no group
    "trainkit train trainer=cpu trainer.devi": ["trainer.devices="],
    "trainkit train model.wi": [],  # the demo's has no width; see below
    "trainkit train accumulation=nothing data.batch_s": [],
    "trainkit train 'unbalanced": [],
    "trainkit plan --probe accumulation=per_t": ["accumulation=per_token"],
    "trainkit plan accumulation=per_t": [],
    "trainkit fit --trainer.max_e": [],  # Lightning's
    "trainkit validate ru": [],  # the shell then offers folders
    "trainkit sweep --off": ["--offline"],
    "trainkit report --no": ["--no-pictures"],
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    return complete_all(*CANDIDATES)


@pytest.mark.parametrize("line", CANDIDATES)
def test_candidates_of_a_line(line: str, answers: dict[str, list[str]]) -> None:
    assert answers[line] == CANDIDATES[line]


def test_what_is_on_the_disk_is_offered(tmp_path: Path) -> None:
    """Files, and groups of the user's own."""
    fit, model = tmp_path / "fit", tmp_path / "conf" / "model"
    for folder in (fit, model):
        folder.mkdir(parents=True)
    (model / "mine.yaml").write_text("_target_: mine.Net\n")
    (fit / "last.ckpt").touch()
    start = f"ckpt_path={fit}/"
    expected = {
        f"trainkit train {start}": [f"{start}last.ckpt"],
    }
    for place in ("--config-dir=", "--config-dir ", "-cd "):
        expected[f"trainkit train {place}{tmp_path}/conf model=min"] = ["model=mine"]
    train = "trainkit train "
    found = complete_all(*expected, train)
    assert {"accumulation=", "lr_scaling=", "schedule="} < set(found.pop(train))
    assert found == expected


def test_keys_are_those_of_the_folders_own_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["trainkit train model.wi", "trainkit train model=code_lm model.wi"]
    experiment = tmp_path / "conf" / "experiment" / "default.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\ndefaults: [lines]\n")
    assert complete_all(*lines) == {lines[0]: ["model.width="], lines[1]: []}


def test_an_unknown_shell_is_refused_with_the_choices() -> None:
    with pytest.raises(TrainkitError, match="invalid choice: 'tcsh' .*bash.*zsh.*fish"):
        main(["tcsh"])
    with pytest.raises(TrainkitError, match="arguments are required: shell"):
        main([])


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with a `trainkit` that completes, and writes down what it would run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "trainkit"
    program.write_text(
        f"""#!/bin/sh
if [ "$1" = completion ] || [ -n "$_ARGCOMPLETE" ]; then
    exec "{sys.executable}" -m trainkit "$@"
fi
echo "$*" > "{tmp_path}/ran.new"
mv "{tmp_path}/ran.new" "{tmp_path}/ran"
"""
    )
    program.chmod(0o755)
    return folder


def environment(commands: Path) -> dict[str, str]:
    """What the shells start with: nothing of the user's."""
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "HOME": os.environ["HOME"],
        "XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"],
        **forked(),
        "TERM": "xterm",
        "LANG": "C.UTF-8",
    }


SHELLS = {
    "bash": ("--norc --noprofile -i", 'eval "$(trainkit completion bash)"\n'),
    "zsh": ("-f -i", 'eval "$(trainkit completion zsh)"\n'),
    "fish": ("--no-config -i", "trainkit completion fish | source\n"),
}
"""Their options, and how they load the completion."""


@contextmanager
def terminal(argv: list[str], env: dict[str, str], folder: Path) -> Iterator[int]:
    """A program that believes a person types; its keyboard is yielded."""
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        argv,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=env,
        cwd=folder,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # or fish leaves
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield ours
    finally:
        program.kill()
        program.wait(timeout=240)
        os.close(ours)


def type_and_wait(keyboard: int, keys: str, ran: Path) -> str:
    """What the command was run with, once it was."""
    os.write(keyboard, keys.encode())
    deadline = time.monotonic() + 240
    while not ran.exists():
        assert time.monotonic() < deadline, f"nothing ran after {keys!r}"
        time.sleep(0.02)
        try:
            os.read(keyboard, 65536)  # or the shell would wait for its terminal
        except BlockingIOError:
            continue
    words = ran.read_text().strip()
    ran.unlink()
    return words


@pytest.mark.parametrize("shell", SHELLS)
def test_tab_completes_what_is_then_run(
    shell: str, commands: Path, tmp_path: Path
) -> None:
    program, (options, load) = shutil.which(shell), SHELLS[shell]
    if program is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "sweep_of_rates.yaml").touch()
    typed = {
        "trainkit pla\t --js\t\n": "plan --json",
        "trainkit train accumulation=per_t\t\n": "train accumulation=per_token",
        "trainkit train trainer.max_st\t5\n": "train trainer.max_steps=5",
        "trainkit sweep sweep_o\t--json\n": "sweep sweep_of_rates.yaml --json",
    }
    argv = [program, *options.split()]
    with terminal(argv, environment(commands), tmp_path) as keyboard:
        os.write(keyboard, load.encode())
        for keys, words in typed.items():
            ran = type_and_wait(keyboard, keys, tmp_path / "ran")
            assert " ".join(ran.split()) == words
