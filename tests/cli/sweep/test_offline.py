"""A sweep without a server: what is run, and trials of `trainkit train`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.sweep.helpers import (
    LR,
    REPOSITORY,
    by_lr,
    command,
    offline,
    private_env,
    read_trials,
    run,
    toy,
)
from tests.startup import forked
from tests.wandb_server import WandbServer
from trainkit.cli.main import main
from trainkit.cli.sweep.offline import OfflineSweep
from trainkit.cli.sweep.trial import Trial

HYPERBAND = {"type": "hyperband", "min_iter": 2, "eta": 3, "strict": True}
CRASHES = ["${interpreter}", "-c", "import sys; sys.exit('no such data')"]
N_IS_1_CRASHES = [
    *("${interpreter}", "-c", "import sys; sys.exit('n=1' in sys.argv)"),
    "${args_no_hyphens}",
]


def trials_of(sweep: Any) -> list[Trial]:
    """As they stand on the disk, not as they are in memory."""
    return OfflineSweep(sweep._sweep, sweep._folder).trials


def loss(lr_exponent: int, rows: int) -> Any:
    """What a toy trial ends with."""
    return pytest.approx((lr_exponent + 2) ** 2 + 1 / rows)


def test_a_grid_runs_every_trial_once(no_account: Path) -> None:
    path = toy(no_account, {"lr": LR, "rows": 4, "started": "started.txt"})
    sweep = offline(path)
    assert sweep.run(count=1) == 0  # as many are started now
    assert [trial.state for trial in trials_of(sweep)] == ["finished"]
    sweep = offline(path)
    assert sweep.run(agents=2) == 0
    trials = by_lr(trials_of(sweep))
    losses = {lr: trial.number for lr, trial in trials.items()}
    assert losses == {0.1: loss(-1, 4), 0.01: loss(-2, 4), 0.001: loss(-3, 4)}
    assert {trial.state for trial in trials.values()} == {"finished"}
    assert offline(path).run() == 0
    assert len(Path("started.txt").read_text().splitlines()) == 3  # nothing twice


def test_a_search_ends_at_its_cap(no_account: Path) -> None:
    lr = {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0}
    path = toy(no_account, {"lr": lr, "rows": 1}, method="bayes", run_cap=3)
    sweep = offline(path)
    sweep.run(agents=2)
    found = trials_of(sweep)
    assert [trial.state for trial in found] == ["finished"] * 3
    assert len({trial.arguments["lr"] for trial in found}) == 3


GOOD = ("finished", "")


@pytest.mark.parametrize(
    ("parameters", "config", "ended", "said"),
    [
        (
            {"lr": LR, "crash_at": 0.1},
            {},
            [("crashed", "exit 3: toy_trial: the GPU fell off the bus"), GOOD, GOOD],
            "s1-000 crashed: .*fell off the bus",
        ),
        (  # the first trials all crash: it is given up
            {"n": {"values": [1, 2, 3, 4, 5]}},
            {"command": CRASHES},
            [("crashed", "exit 1: no such data")] * 3,
            "the first trials crashed, so no more start",
        ),
        (
            {"n": {"values": [1, 2]}},
            {"command": ["/no/such/program"]},
            [("crashed", "/no/such/program: No such file or directory")] * 2,
            "s1-000 crashed",
        ),
        (  # the first finished trial lacks the metric: the next would lack it too
            {"lr": LR, "rows": 1},
            {"metric": {"name": "val/los"}},
            [GOOD],
            "s1-000 finished",
        ),
        (  # a crash before the first value says nothing about the metric
            {"n": {"values": [1, 2, 3]}},
            {"command": N_IS_1_CRASHES},
            [("crashed", "exit 1: "), GOOD],
            "s1-001 finished",
        ),
    ],
)
def test_trials_that_crash_or_lack_the_metric(
    no_account: Path,
    parameters: dict[str, Any],
    config: dict[str, Any],
    ended: list[tuple[str, str]],
    said: str,
) -> None:
    news: list[str] = []
    path = toy(no_account, parameters, **config)
    offline(path, news.append).run()
    found = trials_of(offline(path))
    assert [(trial.state, trial.note) for trial in found] == ended
    assert re.search(said, "\n".join(news))
    if found[-1].state == "finished" and not found[-1].metric:
        offline(path).run()  # nor does it continue
        assert len(trials_of(offline(path))) == len(ended)
    if "rows" in parameters:
        assert sorted(found[0].logged) == ["step", "val/loss"]


def test_hyperband_stops_a_poor_trial_and_counts_it(no_account: Path) -> None:
    # Each of the others is the best so far: whenever the sweep looks, it stays.
    lr = {"values": [0.1, 1.0, 0.03, 0.01]}
    hold = {"hold": "never", "hold_at": 1.0}
    path = toy(no_account, {"lr": lr, "rows": 4, **hold}, early_terminate=HYPERBAND)
    sweep = offline(path)
    sweep.run(agents=2)
    trials = by_lr(trials_of(sweep))
    assert trials[1.0].state == "stopped"
    assert trials[1.0].metric == [loss(0, 1), loss(0, 2)]
    assert trials[1.0].note == "stopped after 2 values"
    assert [trials[lr].state for lr in (0.1, 0.03, 0.01)] == ["finished"] * 3


def test_trainkit_runs_in_the_trials_own_folder(no_account: Path) -> None:
    path = toy(
        no_account,
        {"optimizer.lr": {"values": [0.1, 0.2]}},
        command=["trainkit", "train", "${args_no_hyphens}"],
    )
    sweep = offline(path)
    folder = no_account / "with space" / "t0"
    trial = Trial(name="t0", arguments={"optimizer.lr": 0.1}, folder=str(folder))
    (folder / "wandb").mkdir(parents=True)  # of an attempt that was killed
    words = sweep._command(trial)
    assert not (folder / "wandb").exists()
    assert words[2:] == ["optimizer.lr=0.1", f"hydra.run.dir='{folder}'"]
    checkpoint = folder / "checkpoints" / "last.ckpt"
    checkpoint.parent.mkdir()
    checkpoint.touch()
    assert sweep._command(trial)[-1] == f"ckpt_path='{checkpoint}'"


SHORT = """
trainer.max_steps=3 data.max_length=64 data.num_train=120 data.num_val=16
model.d_model=8 model.num_heads=1
trainer.val_check_interval=${trainer.accumulate_grad_batches} callbacks=none
""".split()


def shortened(name: str, folder: Path, **parameters: list[Any]) -> Path:
    """A shipped sweep, the training cut to three steps, and fewer values."""
    config = yaml.safe_load((REPOSITORY / "conf" / "sweep" / name).read_text())
    for key, values in parameters.items():
        config["parameters"][key.replace("__", ".")] = {"values": values}
    config["command"][-1:] = [*SHORT, "${args_no_hyphens}"]
    path = folder / name
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.slow
def test_the_law_makes_micro_batches_of_one_rate_train_alike_with_and_without_a_server(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    name = "lr_batch.yaml"
    shortened(name, tmp_path, optimizer__lr=[0.003, 0.01], data__batch_size=[8])
    words = command(name, "--offline", "--agents", "2", "--json")
    done = run(words, private_env(tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    losses = {t["arguments"]["optimizer.lr"]: t["value"] for t in trials}
    for trial in read_trials(tmp_path / "sweeps"):
        summary = json.loads((Path(trial["folder"]) / "summary.json").read_text())
        assert summary["status"] == "finished"
    (folder,) = (tmp_path / "sweeps").iterdir()
    page = tmp_path / "page.html"
    assert main(["report", str(folder), "--to", str(page)]) == 0
    assert all(f"{folder.name}-00{n}: lr=" in page.read_text() for n in range(2))
    # W&B's own commands run the same file.
    shortened(name, tmp_path, optimizer__lr=[0.003], data__batch_size=[32])
    env = wandb_server.env(tmp_path, **forked())
    wandb = [sys.executable, "-m", "wandb"]
    assert run([*wandb, "sweep", name], env, tmp_path).returncode == 0
    run([*wandb, "agent", "local/p/sw0"], env, tmp_path)
    (received,) = wandb_server.runs.values()
    assert received.state == "finished"
    assert received.summary["val/loss"] == pytest.approx(losses[0.003], rel=1e-5)
    assert abs(losses[0.01] - losses[0.003]) > 1e-3  # the control
