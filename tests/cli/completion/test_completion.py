"""What Tab offers for a line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.completion.conftest import STRATEGIES
from tests.cli.fresh import fresh
from trainkit.cli.completion.main import main
from trainkit.cli.main import COMMANDS
from trainkit.core.plan.scaling import RULES
from trainkit.errors import TrainkitError


def complete_all(*lines: str) -> dict[str, list[str]]:
    """What the last word of each line may become."""
    asked = [["completion", "--query", line] for line in lines]
    first = ["trainkit.cli.composition", "argcomplete"]
    found = [each.out.split() for each in fresh(asked, Path(), first=first)]
    return dict(zip(lines, found, strict=True))


CANDIDATES = {
    "trainkit ": list(COMMANDS),
    "trainkit p": ["predict", "plan"],
    "trainkit --": ["--help", "--version"],
    "trainkit nothing ": [],
    "trainkit completion ": ["bash", "zsh", "fish"],
    "trainkit completion f": ["fish"],
    "trainkit new mine --h": ["--help"],
    "trainkit plan --ma": ["--max-micro-batch"],
    "trainkit plan --json --dr": ["--drop-last"],
    "trainkit plan --rule ": [*RULES, "gain"],
    "trainkit plan --rule=s": ["--rule=sqrt"],
    "trainkit plan --json=": [],
    "trainkit plan --lr 0.1 --tar": ["--target"],
    "trainkit check ": ["--help", "--json", "--html", "--rows", "train", "fit"],
    "trainkit check t": ["train"],
    "trainkit check --j": ["--json"],
    "trainkit check --html t": ["train"],
    "trainkit check --html=no_such": [],
    "trainkit check --html=a.html --r": ["--rows"],
    "trainkit check train accumulation=per_t": ["accumulation=per_token"],
    "trainkit check --json train --cf": ["--cfg"],
    "trainkit train --cf": ["--cfg"],
    "trainkit train --cfg ": ["job", "hydra", "all"],
    "trainkit train seed=1 --cfg ": ["job", "hydra", "all"],
    "trainkit train accumulation=": [f"accumulation={name}" for name in STRATEGIES],
    "trainkit train accumulation=per_t": ["accumulation=per_token"],
    "trainkit train -m accumulation=per_token,u": ["accumulation=per_token,uniform"],
    "trainkit train seed=1 -m accumulation=n": ["accumulation=none"],
    "trainkit train ~schedu": ["~schedule", "~scheduler"],
    "trainkit train +sw": [],  # conf/sweep is no group
    "trainkit train trainer=cpu trainer.devi": ["trainer.devices="],
    "trainkit train accumulation=nothing data.batch_s": [],
    "trainkit train 'unbalanced": [],
    "trainkit plan --probe accumulation=per_t": ["accumulation=per_token"],
    "trainkit plan --probe --ma": ["--max-micro-batch"],
    "trainkit plan --probe --rule s": ["sqrt"],
    "trainkit plan --probe seed=1 --rule s": ["sqrt"],
    "trainkit plan --probe seed=1 --lr 1 accumulation=n": ["accumulation=none"],
    "trainkit plan accumulation=per_t": [],
    "trainkit fit --trainer.max_e": [],  # Lightning's
    "trainkit train scheduling": ["scheduling.interval=", "scheduling.monitor="],
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
    """Files, runs, and groups of the user's own."""
    run, fit, model = tmp_path / "run", tmp_path / "fit", tmp_path / "conf" / "model"
    for folder in (run, fit, model):
        folder.mkdir(parents=True)
    (model / "mine.yaml").write_text("_target_: mine.Net\n")
    (fit / "last.ckpt").touch()
    start = f"ckpt_path={fit}/"
    expected = {
        f"trainkit train {start}": [f"{start}last.ckpt"],
        f"trainkit validate {tmp_path}/r": [f"{run}/"],
        f"trainkit test {run} trainer.devi": [],
    }
    for place in ("--config-dir=", "--config-dir ", "-cd "):
        line = f"trainkit train {place}{tmp_path}/conf model=min"
        expected[line] = ["model=mine"]
    assert complete_all(*expected) == expected
    groups = complete_all(*(lines := ["trainkit train ", "trainkit plan "]))
    assert {"accumulation=", "lr_scaling=", "schedule="} < set(groups[lines[0]])
    assert {"--target", "--lr", "--rule", "--json", "--help"} < set(groups[lines[1]])


def test_keys_are_those_of_the_folders_own_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["trainkit train model.wi", "trainkit train model=code_lm model.wi"]
    assert complete_all(*lines) == dict.fromkeys(lines, [])  # the control: the demo
    experiment = tmp_path / "conf" / "experiment" / "default.yaml"
    experiment.parent.mkdir(parents=True)
    experiment.write_text("# @package _global_\ndefaults: [lines]\n")
    assert complete_all(*lines) == {lines[0]: ["model.width="], lines[1]: []}


def test_an_unknown_shell_is_refused_with_the_choices() -> None:
    with pytest.raises(TrainkitError, match="invalid choice: 'tcsh' .*bash.*zsh.*fish"):
        main(["tcsh"])
    with pytest.raises(TrainkitError, match="one of the arguments .* is required"):
        main([])
