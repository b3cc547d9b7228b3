"""`trainkit sweep`: what it refuses, and what an agent hands over to a trial."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.cli.sweep.helpers import LR, toy
from trainkit.cli.composition import Composition
from trainkit.cli.sweep.main import check_keys, main
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.whole_config import as_logged, for_train, hydra_text
from trainkit.errors import TrainkitError

RULE = {"values": ["sqrt", "none"]}
REFERENCE = "lr_scaling.reference_batch=32"
MINE = {"values": ["mine"]}
WIDTH = {"values": [3, 4]}
CONF = Path(__file__).parents[3] / "conf" / "sweep"


def train(folder: Path, parameters: dict[str, object], *words: str) -> SweepFile:
    command = ["${env}", "trainkit", "train", "logger=csv", *words]
    path = toy(folder, parameters, command=[*command, "${args_no_hyphens}"])
    return SweepFile.read(path)


@pytest.mark.parametrize(
    ("program", "status", "says"),
    [
        ("import sys; sys.exit(1)", 1, "no more start"),
        ("pass", 1, "metric.name: "),
        (None, 0, "finished: lr=0.1 rows=2, val/loss"),
    ],
)
def test_exit_status_1_needs_a_metric_and_json_is_all_that_standard_output_gets(
    no_account: Path,
    capsys: pytest.CaptureFixture[str],
    program: str | None,
    status: int,
    says: str,
) -> None:
    pytest.importorskip("optuna")
    own = {"command": ["${interpreter}", "-c", program]} if program else {}
    path = toy(no_account, {"lr": LR, "rows": 2}, **own)
    count = [] if program else ["--count", "1"]
    assert main([str(path), "--offline", "--json", *count]) == status
    output, news = capsys.readouterr()
    assert says in news
    value = yaml.safe_load(output)["trials"][0]["value"]
    assert (value is None) == bool(program)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--agents", "0"], "--agents: must be a whole number from 1 .* received 0"),
        (["--count", "-1"], "--count: must be a whole number from 1 .* received -1"),
        (["--resume", "nope", "--offline"], "there is no sweep 'nope'"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--offline"], "method random never ends by itself. Give --count N"),
        (["--offline", "--count", "1"], "lr: distribution q_beta is drawn by W&B's"),
        (["--json"], "--json: is for --offline"),
        (["--seed", "1"], "--seed: is for --offline"),
    ],
)
def test_wrong_options_are_refused(
    no_account: Path, words: list[str], text: str
) -> None:
    is_random = words[:1] == ["--offline"]
    lr = {"distribution": "q_beta"} if is_random else LR
    path = toy(no_account, {"lr": lr}, method="random" if is_random else "grid")
    with pytest.raises(TrainkitError, match=text):
        main([str(path), *words])
    assert not (no_account / "sweeps").exists()


def test_without_optuna_the_extra_is_named_and_no_folder_is_left(
    no_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toy(no_account, {"lr": LR})
    for name in ("offline", "search"):
        monkeypatch.delitem(sys.modules, f"trainkit.cli.sweep.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(TrainkitError, match=r"'lightning-trainkit\[sweeps\]'"):
        main([str(path), "--offline"])
    assert not (no_account / "sweeps").exists()


# ---- keys of `trainkit train` --------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "words", "text"),
    [
        ({"optim.lr": LR}, [], "optim.lr=0.1: .* override.*Did you mean optimizer"),
        ({"lr": LR}, [], "lr=0.1: .* override .*Did you mean optimizer.lr"),
        ({"seed.x": LR}, [], "seed.x=0.1: "),
        ({"seed": {"values": [1, None]}}, [], None),
        ({"schedule": {"values": ["none", None]}}, [], "schedule=null: .*Got NoneType"),
        ({"lr_scaling": {"values": ["sqrt", "cubic"]}}, [], "Available options.*lin"),
        ({"lr_scaling.rule": RULE}, ["lr_scaling=sqrt", REFERENCE], None),
        ({"lr_scaling.rule": RULE}, [], "lr_scaling.rule='sqrt': Could not override"),
        ({"model": MINE, "model.width": WIDTH}, ["--config-dir={own}"], None),
        ({"model": MINE}, ["--config-dir=${envvar:MY_CONF}"], None),
        ({"model": MINE}, [], "Could not find 'model/mine'.*code_lm"),
        ({"model.width": WIDTH}, ["model=mine", "-cd", "{own}"], None),
        ({"model.width": WIDTH}, ["--config-dir={own}"], "model.width=3: Could not"),
        ({"lr_scaling.rule": RULE}, ["-cp", "{own}", "-cn", "mine"], None),
        ({"lr_scaling.rule": RULE}, ["-cd", "{own}", "-cn", "mine"], None),
    ],
)
def test_a_parameter_is_one_that_trainkit_train_would_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: dict[str, object],
    words: list[str],
    text: str | None,
) -> None:
    own = tmp_path / "my conf"
    (own / "model").mkdir(parents=True)
    (own / "model" / "mine.yaml").write_text("_target_: my.Net\nwidth: 3\n")
    (own / "mine.yaml").write_text(
        "defaults: [train, override lr_scaling: sqrt, _self_]\n"
    )
    monkeypatch.setenv("MY_CONF", str(own))
    sweep = train(
        tmp_path, parameters, *(word.replace("{own}", str(own)) for word in words)
    )
    if text is None:
        check_keys(sweep)
        return
    with pytest.raises(TrainkitError, match=f"(?s)toy.yaml parameters: .*{text}"):
        check_keys(sweep)


def test_keys_of_another_program_are_its_own_and_its_folder_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_keys(SweepFile.read(toy(tmp_path, {"whatever": LR})))
    sweep = train(tmp_path, {"optimizer.lr": LR})
    check_keys(sweep)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "train.yaml").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainkitError, match="belongs to another program"):
        check_keys(sweep)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_sweeps_compose_in_every_corner(path: Path) -> None:
    sweep = SweepFile.read(path)
    check_keys(sweep)
    for pick in (0, -1):
        swept = {n: sweep.parameters[n].listed[pick] for n in sweep.varied}
        words = [f"{name}={hydra_text(value)}" for name, value in swept.items()]
        config = Composition(["experiment=demo", *sweep.words[3:-1], *words]).config
        if path.stem == "lr_batch":
            assert config.trainer.accumulate_grad_batches * config.data.batch_size == 32
        for name, value in swept.items():
            assert OmegaConf.select(config, name) == value


# ---- what an agent hands over becomes what the trial was started with ----------------


SWEPT: dict[str, Any] = {
    "optimizer.lr": 1e-05,
    "lr_scaling": "sqrt",
    "lr_scaling.rule": "none",
    "seed": None,
    "name": "a,b",
    "model.more": {"b": 1, "a": [None]},
}
LOGGED: dict[str, Any] = {
    "trainkit": {"optimizer": {"_target_": "torch.optim.AdamW"}, "seed": 0},
    "_wandb": {"t": {"1": [1, 5]}},
}
TEXTS = """
optimizer.lr=1e-05 lr_scaling='sqrt' lr_scaling.rule='none' seed=null name='a,b'
model.more={a:[null],b:1}
""".split()
OWN = ["hydra.run.dir=x", "optimizer.lr=9", "--cfg", "lr_scaling.reference_batch=32"]


@pytest.fixture
def as_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, Any]], list[str]]:
    """Gives the words that `wandb agent` makes of arguments, in its environment."""
    path = tmp_path / "config.yaml"
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", str(path))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s")

    def words(arguments: dict[str, Any]) -> list[str]:
        entries = {name: {"desc": None, "value": v} for name, v in arguments.items()}
        path.write_text(yaml.safe_dump({"wandb_version": 1, **entries}))
        return [f"{name}={value}" for name, value in arguments.items()]

    return words


@pytest.mark.parametrize("prefix", ["", "++"])
@pytest.mark.parametrize("is_resumed", [True, False])
def test_trainkit_train_gets_what_the_sweep_has_set(
    as_agent: Callable[[dict[str, Any]], list[str]], is_resumed: bool, prefix: str
) -> None:
    # https://github.com/wandb/wandb/issues/9143: a resumed trial has the arguments
    # with which it was started, and the command's own words stay.
    given = as_agent({**SWEPT, **(LOGGED if is_resumed else {})})
    found = for_train([*OWN, *(f"{prefix}{word}" for word in given)])
    assert found == [*OWN, *(f"{prefix}{word}" for word in TEXTS)]
    for word in TEXTS:  # the control: what an agent has made of these
        OverridesParser.create().parse_override(word)
    with pytest.raises(HydraException):
        OverridesParser.create().parse_override(given[-1])


def test_without_a_sweep_every_word_stays() -> None:
    words = ["lr/0=1", "optimizer={'lr': 1}", "a=None"]
    assert for_train(words) == words


def test_a_run_of_a_sweep_logs_in_one_entry(
    as_agent: Callable[[dict[str, Any]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_agent({"optimizer.lr": 0.1})
    assert as_logged({"seed": 0}) == {"trainkit": {"seed": 0}}
    monkeypatch.delenv("WANDB_SWEEP_PARAM_PATH")
    assert as_logged({"seed": 0}) == {"seed": 0}
