"""What Tab offers, in the shells themselves."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.startup import CHILD_PATH
from trainkit.cli.completion import options as completion_options
from trainkit.cli.completion.main import complete, main
from trainkit.cli.completion.options import cached_options, options_of, output_of
from trainkit.cli.completion.scripts import SCRIPTS
from trainkit.cli.main import COMMANDS
from trainkit.core.scaling import RULES
from trainkit.errors import TrainkitError

STRATEGIES = ["none", "per_sample", "per_token", "uniform"]


@pytest.fixture(autouse=True)
def _private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COMP_LINE", "")  # Hydra's way of being asked; put back after


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("trainkit ", list(COMMANDS)),
        ("trainkit", list(COMMANDS)),
        ("", list(COMMANDS)),
        ("trainkit p", ["predict", "plan"]),
        ("trainkit --", ["--help", "--version"]),
        ("trainkit nothing ", []),
        ("trainkit completion ", ["bash", "zsh", "fish"]),
        ("trainkit completion f", ["fish"]),
        ("trainkit plan --ma", ["--max-micro-batch"]),
        ("trainkit plan --json --dr", ["--drop-last"]),
        ("trainkit plan --rule ", list(RULES)),
        ("trainkit plan --rule=s", ["--rule=sqrt"]),
        ("trainkit plan --json=", []),
        ("trainkit plan --target ", []),
        ("trainkit train --cf", ["--cfg"]),
        ("trainkit train --cfg ", ["job", "hydra", "all"]),
        (
            "trainkit train accumulation=",
            [f"accumulation={name}" for name in STRATEGIES],
        ),
        ("trainkit train accumulation=per_t", ["accumulation=per_token"]),
        (
            "trainkit train -m accumulation=per_token,u",
            ["accumulation=per_token,uniform"],
        ),
        ("trainkit train trainer=debug trainer.devi", ["trainer.devices="]),
        ("trainkit train accumulation=nothing data.batch_s", []),
        ("trainkit train 'unbalanced", []),
        ("trainkit plan --probe accumulation=per_t", ["accumulation=per_token"]),
        ("trainkit plan --probe --ma", ["--max-micro-batch"]),
        ("trainkit plan --probe --rule s", ["sqrt"]),
    ],
)
def test_candidates_of_a_line(line: str, candidates: list[str]) -> None:
    assert complete(line) == candidates


def test_train_offers_every_group_of_the_configuration() -> None:
    offered = complete("trainkit train ")
    for group in ("accumulation", "lr_scaling", "batchnorm", "schedule", "trainer"):
        assert f"{group}=" in offered


def test_values_of_a_path_are_files(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    start = f"ckpt_path={tmp_path}/"
    assert f"{start}last.ckpt" in complete(f"trainkit train {start}")


def test_every_option_of_plan_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    offered = complete("trainkit plan ")
    for option in ("--target", "--world-size", "--lr", "--rule", "--json", "--help"):
        assert option in offered
    assert capsys.readouterr() == ("", "")


def test_options_of_jsonargparse_are_read() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="trainkit fit")
    parser.add_argument("-c", "--config", action="config")
    parser.add_class_arguments(Something, "something")
    parser.add_subclass_arguments(Kind, "kind", required=False)
    options = options_of(parser.format_help())
    assert options["--something.size"].takes_value
    assert options["--something.fast"].choices[:2] == ("true", "false")
    assert not options["--print_config"].takes_value
    assert options["--config"].takes_value
    assert options["--kind"].choices == ("Kind", "Round", "Square")


class Something:
    def __init__(self, size: int = 1, fast: bool = False) -> None:
        pass


class Kind:
    pass


class Round(Kind):
    pass


class Square(Kind):
    pass


def test_a_command_that_fails_offers_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert output_of("plan", "--target", "0") == ""
    assert output_of("nothing") == ""
    assert capsys.readouterr() == ("", "")
    assert "usage: trainkit plan" in output_of("plan", "--help")


def test_a_slow_help_is_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which command is slow is set here: the rule is the same for a quick one."""
    monkeypatch.setattr(completion_options, "SLOW", ("plan",))
    first = cached_options("plan")
    (kept,) = (tmp_path / "cache" / "trainkit").iterdir()
    assert kept.name.startswith("plan-")
    assert options_of(kept.read_text()) == first[0]
    kept.write_text("  --kept  from the file")
    assert list(cached_options("plan")[0]) == ["--kept"]
    monkeypatch.setattr(completion_options, "version", lambda package: "another")
    assert cached_options("plan") == first


def test_a_home_that_cannot_be_written_to_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion_options, "SLOW", ("plan",))
    (tmp_path / "cache").write_text("no folder")
    assert "--target" in cached_options("plan")[0]


def test_an_unknown_shell_is_refused_with_the_choices() -> None:
    with pytest.raises(TrainkitError, match="invalid choice: 'tcsh' .*bash.*zsh.*fish"):
        main(["tcsh"])
    with pytest.raises(TrainkitError, match="one of the arguments .* is required"):
        main([])


@pytest.mark.parametrize("shell", SCRIPTS)
def test_its_script_is_printed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([shell]) == 0
    assert capsys.readouterr().out == SCRIPTS[shell]


def test_tab_in_plan_loads_nothing_heavy() -> None:
    program = """
import sys
from trainkit.cli.completion.main import main
assert main(["--query", "trainkit plan --"]) == 0
print(sorted({"torch", "lightning", "hydra", "wandb", "rich"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--target" in done.stdout


@pytest.mark.slow
def test_options_of_fit_are_kept_for_the_next_tab(tmp_path: Path) -> None:
    program = """
import sys
from trainkit.cli.completion.main import main
assert main(["--query", "trainkit fit --trainer.max_e"]) == 0
assert main(["--query", "trainkit fit --accumulation=PerT"]) == 0
print("torch" in sys.modules)
"""
    for loads_torch in (True, False):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
            timeout=240,
        )
        assert done.stdout.splitlines() == [
            "--trainer.max_epochs",
            "--accumulation=PerToken",
            str(loads_torch),
        ]


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with a `trainkit` that completes, and writes down what it would run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "trainkit"
    program.write_text(
        f"""#!/bin/sh
if [ "$1" = completion ]; then
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
        "PYTHONPATH": CHILD_PATH,
        "TERM": "xterm",
        "LANG": "C.UTF-8",
    }


# How bash breaks the line into words, by default.
BASH_WORDS = {
    "trainkit ": ["trainkit", ""],
    "trainkit plan --ma": ["trainkit", "plan", "--ma"],
    "trainkit plan --rule=s": ["trainkit", "plan", "--rule", "=", "s"],
    "trainkit train accumulation=": ["trainkit", "train", "accumulation", "="],
    "trainkit train -m accumulation=uniform,per_": [
        *["trainkit", "train", "-m", "accumulation", "=", "uniform,per_"],
    ],
    "trainkit train trainer.max_st": ["trainkit", "train", "trainer.max_st"],
    "trainkit sweep sw": ["trainkit", "sweep", "sw"],
}


@pytest.mark.parametrize(
    ("line", "reply"),
    [
        ("trainkit ", list(COMMANDS)),
        ("trainkit plan --ma", ["--max-micro-batch"]),
        ("trainkit plan --rule=s", ["sqrt"]),
        ("trainkit train accumulation=", STRATEGIES),
        (
            "trainkit train -m accumulation=uniform,per_",
            ["uniform,per_sample", "uniform,per_token"],
        ),
        ("trainkit train trainer.max_st", ["trainer.max_steps="]),
        ("trainkit sweep sw", []),  # files, which bash then lists itself
    ],
)
def test_bash_is_told_what_replaces_its_last_word(
    line: str, reply: list[str], commands: Path
) -> None:
    words = " ".join(f"'{word}'" for word in BASH_WORDS[line])
    program = f"""
eval "$(trainkit completion bash)"
COMP_LINE='{line} unread' COMP_POINT={len(line)}
COMP_WORDS=({words}) COMP_CWORD={len(BASH_WORDS[line]) - 1}
_trainkit_complete trainkit
printf '%s\\n' "${{COMPREPLY[@]}}"
complete -p trainkit
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", program],
        env=environment(commands),
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    *replied, registered = done.stdout.splitlines()
    assert [each for each in replied if each] == reply
    assert registered == "complete -o default -F _trainkit_complete trainkit"
    assert done.stderr == ""


SHELLS = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": 'eval "$(trainkit completion bash)"\n',
    "zsh": 'eval "$(trainkit completion zsh)"\n',
    "fish": "trainkit completion fish | source\n",
}


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
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "sweep_of_rates.yaml").touch()
    typed = {
        "trainkit pla\t --rule sq\t\n": "plan --rule sqrt",
        "trainkit plan --rule=sq\t\n": "plan --rule=sqrt",
        "trainkit train accumulation=per_t\t\n": "train accumulation=per_token",
        "trainkit train trainer.max_st\t5\n": "train trainer.max_steps=5",
        "trainkit sweep sweep_o\t--json\n": "sweep sweep_of_rates.yaml --json",
    }
    argv = [shutil.which(shell) or shell, *SHELLS[shell][1:]]
    with terminal(argv, environment(commands), tmp_path) as keyboard:
        os.write(keyboard, LOAD[shell].encode())
        for keys, words in typed.items():
            ran = type_and_wait(keyboard, keys, tmp_path / "ran")
            assert " ".join(ran.split()) == words
