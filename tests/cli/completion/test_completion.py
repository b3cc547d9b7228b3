"""What Tab offers for a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.completion.conftest import STRATEGIES
from tests.startup import forked
from trainkit.cli.completion import lightning_options
from trainkit.cli.completion.main import main
from trainkit.cli.main import COMMANDS
from trainkit.core.plan.scaling import RULES
from trainkit.errors import TrainkitError


def complete_all(*lines: str) -> dict[str, list[str]]:
    """What the last word of each line may become."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("answers.py")), *lines],
        env={**os.environ, **forked()},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    return json.loads(done.stdout)


def complete(line: str) -> list[str]:
    return complete_all(line)[line]


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
    "trainkit sweep --off": ["--offline"],
    "trainkit report --no": ["--no-pictures"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        return complete_all(*CANDIDATES)


@pytest.mark.parametrize("line", CANDIDATES)
def test_candidates_of_a_line(line: str, answers: dict[str, list[str]]) -> None:
    assert answers[line] == CANDIDATES[line]


def test_train_offers_every_group_of_the_configuration() -> None:
    offered = complete("trainkit train ")
    for group in ("accumulation", "lr_scaling", "batchnorm", "schedule", "trainer"):
        assert f"{group}=" in offered


def test_values_of_a_path_are_files(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    start = f"ckpt_path={tmp_path}/"
    assert f"{start}last.ckpt" in complete(f"trainkit train {start}")


def test_an_evaluation_completes_a_run_and_then_its_overrides(tmp_path: Path) -> None:
    run, fit = tmp_path / "run", tmp_path / "fit"
    for folder in (run, fit):
        folder.mkdir()
    (run / "overrides.yaml").write_text("[experiment=demo, trainer=cpu]\n")
    of_run = f"trainkit test {run} trainer.devi"
    of_fit = f"trainkit predict {fit} --trainer.devi"
    found = complete_all(f"trainkit validate {tmp_path}/", of_run, of_fit)
    assert found == {
        f"trainkit validate {tmp_path}/": [f"{tmp_path}/fit/", f"{tmp_path}/run/"],
        of_run: ["trainer.devices="],
        of_fit: ["--trainer.devices", "--trainer.devices+"],
    }


def test_groups_and_options_of_the_users_own_folder(tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: mine.Net\n")
    places = ("--config-dir=", "--config-dir ", "-cd ")
    lines = [f"trainkit train {place}{tmp_path}/conf model=min" for place in places]
    assert complete_all(*lines) == dict.fromkeys(lines, ["model=mine"])


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


def test_a_section_offers_what_is_in_it() -> None:
    """Not itself, after which a shell would add a space."""
    assert complete("trainkit train scheduling") == [
        "scheduling.interval=",
        "scheduling.monitor=",
    ]


def test_every_option_of_plan_is_offered() -> None:
    offered = complete("trainkit plan ")
    for option in ("--target", "--world-size", "--lr", "--rule", "--json", "--help"):
        assert option in offered


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often the options of fit are read from what is slow."""
    found: list[str] = []

    def options() -> Any:
        found.append("again")
        return {"fit": [["--slow"]]}

    monkeypatch.setattr(lightning_options, "_made", options)
    return found


def offered_by_fit() -> set[str]:
    parser = lightning_options.parser_of("fit")
    return {name for action in parser._actions for name in action.option_strings}


def test_slow_options_are_asked_for_once(
    tmp_path: Path, made: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert offered_by_fit() == {"-h", "--help", "--slow"}
    (kept,) = (tmp_path / "cache" / "trainkit").iterdir()
    kept.write_text(json.dumps({"fit": [["--kept"]]}))
    assert "--kept" in offered_by_fit()
    monkeypatch.setattr(lightning_options, "version", lambda package: "another")
    assert "--slow" in offered_by_fit()
    assert len(made) == 2


@pytest.mark.parametrize("damage", ["", "no JSON"])
def test_a_damaged_file_is_written_again(
    tmp_path: Path, made: list[str], damage: str
) -> None:
    offered_by_fit()
    (kept,) = (tmp_path / "cache" / "trainkit").iterdir()
    kept.write_text(damage)
    assert "--slow" in offered_by_fit()
    assert "--slow" in kept.read_text()


def test_a_home_that_cannot_be_written_to_only_costs_time(
    tmp_path: Path, made: list[str]
) -> None:
    (tmp_path / "cache").write_text("no folder")
    assert "--slow" in offered_by_fit()
    assert "--slow" in offered_by_fit()
    assert len(made) == 2


def test_an_unknown_shell_is_refused_with_the_choices() -> None:
    with pytest.raises(TrainkitError, match="invalid choice: 'tcsh' .*bash.*zsh.*fish"):
        main(["tcsh"])
    with pytest.raises(TrainkitError, match="one of the arguments .* is required"):
        main([])


FRESH = """
import sys
from trainkit.cli.main import main
try:
    main(["completion", "--query", sys.argv[1]])
finally:
    print(sorted({"torch", "lightning", "hydra", "wandb", "rich"} & set(sys.modules)))
"""


def fresh(line: str) -> list[str]:
    """What is offered by a new interpreter, and what that has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", FRESH, line],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    return done.stdout.splitlines()


def test_tab_in_plan_loads_nothing_heavy() -> None:
    *offered, loaded = fresh("trainkit plan --")
    assert "--target" in " ".join([*offered, loaded])
    assert loaded.endswith("[]")


def test_tab_in_train_loads_no_torch() -> None:
    *offered, loaded = fresh("trainkit train accumulation=per_t")
    assert "accumulation=per_token" in " ".join([*offered, loaded])
    assert loaded.endswith("['hydra']")


@pytest.mark.slow
def test_options_of_fit_are_kept_for_the_next_tab(tmp_path: Path) -> None:
    assert not list(tmp_path.rglob("options-*.json"))
    assert "--trainer.max_epochs" in complete("trainkit fit --trainer.max_e")
    assert len(list(tmp_path.rglob("options-*.json"))) == 1
    *_, loaded = fresh("trainkit fit --accumulation=PerToken --wide_g")
    assert loaded == "--wide_gradients[]"
    assert complete("trainkit test --trainer.acceleratorr") == []
