"""The same file without a server: every trial runs once, and its rows are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.sweep.helpers import LR, by_lr, offline, toy
from trainkit.cli.sweep.offline import OfflineSweep
from trainkit.cli.sweep.trial import Trial

pytest.importorskip("optuna")


LOGS_NOTHING: dict[str, Any] = {
    "command": ["${interpreter}", "-c", "pass"],
    "metric": None,
}


def trials_of(sweep: Any) -> list[Trial]:
    """As they stand on the disk, not as they are in memory."""
    return OfflineSweep(sweep._sweep, sweep._folder).trials


def loss(lr_exponent: int, rows: int) -> float:
    """What a toy trial ends with."""
    return (lr_exponent + 2) ** 2 + 1 / rows


def test_a_grid_runs_every_trial_once(no_account: Path) -> None:
    path = toy(no_account, {"lr": LR, "rows": 4, "started": "started.txt"})

    sweep = offline(path)

    assert sweep.run(agents=2) == 0
    trials = by_lr(trials_of(sweep))
    assert {lr: trial.number for lr, trial in trials.items()} == {
        0.1: pytest.approx(loss(-1, 4)),
        0.01: pytest.approx(loss(-2, 4)),
        0.001: pytest.approx(loss(-3, 4)),
    }
    assert [trial.num_rows for trial in trials.values()] == [4, 4, 4]
    assert {trial.state for trial in trials.values()} == {"finished"}
    assert len(Path("started.txt").read_text().splitlines()) == 3

    again = offline(path)
    assert again.run() == 0
    assert len(Path("started.txt").read_text().splitlines()) == 3  # nothing to do


def test_count_is_how_many_are_started_now(no_account: Path) -> None:
    path = toy(no_account, {"lr": LR}, **LOGS_NOTHING)

    assert offline(path).run(count=1) == 0
    sweep = offline(path)
    assert sweep.run(count=1) == 0
    assert [trial.state for trial in trials_of(sweep)] == ["finished", "finished"]


@pytest.mark.parametrize(("method", "trial"), [("random", LOGS_NOTHING), ("bayes", {})])
def test_a_search_ends_at_its_cap(
    no_account: Path, method: str, trial: dict[str, Any]
) -> None:
    lr = {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0}
    path = toy(no_account, {"lr": lr, "rows": 1}, method=method, run_cap=3, **trial)

    sweep = offline(path)
    sweep.run(agents=2)

    found = trials_of(sweep)
    assert [trial.state for trial in found] == ["finished"] * 3
    assert len({trial.arguments["lr"] for trial in found}) == 3


def test_a_crashed_trial_is_reported_and_the_sweep_goes_on(no_account: Path) -> None:
    said: list[str] = []
    path = toy(no_account, {"lr": LR, "crash_at": 0.1})

    sweep = offline(path, said.append)
    sweep.run(agents=2)

    trials = by_lr(trials_of(sweep))
    assert trials[0.1].state == "crashed"
    assert trials[0.1].exit_code == 3
    assert trials[0.1].num_rows == 2
    assert trials[0.1].note == "exit 3: toy_trial: the GPU fell off the bus"
    assert trials[0.01].state == trials[0.001].state == "finished"
    assert any("crashed" in line and "fell off the bus" in line for line in said)


def test_a_sweep_whose_first_trials_all_crash_is_given_up(no_account: Path) -> None:
    said: list[str] = []
    command = ["${interpreter}", "-c", "import sys; sys.exit('no such data')"]
    path = toy(no_account, {"n": {"values": [1, 2, 3, 4, 5]}}, command=command)

    sweep = offline(path, said.append)
    sweep.run()

    found = trials_of(sweep)
    assert [trial.state for trial in found] == ["crashed"] * 3
    assert found[0].note == "exit 1: no such data"
    assert any("the first trials crashed" in line for line in said)


def test_a_command_that_is_not_there_is_a_crash(no_account: Path) -> None:
    path = toy(no_account, {"n": {"values": [1, 2]}}, command=["/no/such/program"])

    sweep = offline(path)
    sweep.run()

    assert [trial.note for trial in trials_of(sweep)] == [
        "/no/such/program: No such file or directory"
    ] * 2


def test_hyperband_stops_a_poor_trial_and_counts_it(no_account: Path) -> None:
    rule = {"type": "hyperband", "min_iter": 2, "eta": 3, "strict": True}
    # Each of the others is the best so far: whenever the sweep looks, it stays.
    lr = {"values": [0.1, 1.0, 0.03, 0.01]}
    hold = {"hold": "never", "hold_at": 1.0}
    path = toy(no_account, {"lr": lr, "rows": 4, **hold}, early_terminate=rule)

    sweep = offline(path)
    sweep.run(agents=2)

    trials = by_lr(trials_of(sweep))
    assert trials[1.0].state == "stopped"
    assert trials[1.0].exit_code == 0  # it ended gracefully, and what it logged is read
    assert trials[1.0].metric == [pytest.approx(loss(0, n)) for n in (1, 2)]
    assert trials[1.0].note == "stopped after 2 values"
    assert [trials[lr].state for lr in (0.1, 0.03, 0.01)] == ["finished"] * 3


ENDS_BY_ITSELF = """
import os, pathlib, signal, time
import wandb

stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
run = wandb.init(settings=wandb.Settings(console="off"))
for step in range(3):
    run.log({"val/loss": 9.0 - run.config["lr"]})
while run.config["lr"] < 0.2 and not stopped:
    time.sleep(0.02)
run.finish()
path = pathlib.Path(os.environ["WANDB_DIR"], "summary.json")
status = "interrupted" if run.config["lr"] == 0.05 else "finished"
path.write_text('{"status": "%s"}' % status)
"""


def test_a_trial_that_is_stopped_while_it_ends_has_finished(no_account: Path) -> None:
    """Its own summary knows."""
    program = no_account / "ends.py"
    program.write_text(ENDS_BY_ITSELF)
    rule = {"type": "hyperband", "min_iter": 2, "eta": 3, "strict": True}
    lr = {"values": [0.2, 0.1, 0.05]}
    path = toy(
        no_account, {"lr": lr}, program=str(program), command=None, early_terminate=rule
    )
    sweep = offline(path)
    sweep.run()
    states = {lr: trial.state for lr, trial in by_lr(trials_of(sweep)).items()}
    assert states == {0.2: "finished", 0.1: "finished", 0.05: "stopped"}


def test_a_program_may_read_its_arguments_from_wandb(no_account: Path) -> None:
    program = no_account / "reads.py"
    program.write_text(
        "import wandb\n"
        "run = wandb.init(settings=wandb.Settings(console='off'))\n"
        "run.log({'val/loss': run.config['lr'] * 2})\n"
        "run.finish()\n"
    )
    path = toy(no_account, {"lr": LR}, program=str(program), command=None)

    sweep = offline(path)
    sweep.run(count=1)

    assert trials_of(sweep)[0].number == pytest.approx(0.2)


def test_a_metric_that_the_first_finished_trial_lacks_ends_the_sweep(
    no_account: Path,
) -> None:
    metric = {"name": "val/los", "goal": "minimize"}
    path = toy(no_account, {"lr": LR, "rows": 1}, metric=metric)

    sweep = offline(path)
    sweep.run()

    (trial,) = trials_of(sweep)
    assert trial.state == "finished"
    assert sorted(trial.logged) == ["step", "val/loss"]

    offline(path).run()  # nor does it go on
    assert len(trials_of(sweep)) == 1


def test_a_crash_or_a_stop_before_the_first_value_ends_no_sweep(
    no_account: Path,
) -> None:
    program = "import os, sys; sys.exit('n=1' in sys.argv)"
    command = ["${interpreter}", "-c", program, "${args_no_hyphens}"]
    path = toy(no_account, {"n": {"values": [2, 1, 3]}}, command=command)
    sweep = offline(path)
    stopped = sweep.propose()
    stopped.state = "stopped"
    sweep.save(stopped)

    sweep.run()

    states = [trial.state for trial in trials_of(sweep)]
    assert states == ["stopped", "crashed", "finished"]


def test_trainkit_runs_in_the_trials_own_folder(no_account: Path) -> None:
    path = toy(
        no_account,
        {"optimizer.lr": {"values": [0.1, 0.2]}},
        command=["trainkit", "train", "${args_no_hyphens}"],
    )
    sweep = offline(path)
    folder = no_account / "with space" / "t0"
    trial = Trial(name="t0", arguments={"optimizer.lr": 0.1}, folder=str(folder))

    (_made(folder / "wandb") / "of an attempt that was killed").touch()
    words = sweep._command(trial)
    assert not (folder / "wandb").exists()
    assert words[2:] == ["optimizer.lr=0.1", f"hydra.run.dir='{folder}'"]

    checkpoint = _made(folder / "checkpoints") / "last.ckpt"
    checkpoint.touch()
    assert sweep._command(trial)[-1] == f"ckpt_path='{checkpoint}'"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
