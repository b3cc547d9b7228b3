"""`trainkit sweep`: what it refuses, and what an agent hands over to a trial."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf

from tests.cli.sweep.helpers import LR, toy
from trainkit.cli.composition import Composition
from trainkit.cli.sweep.main import check_keys, main
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.whole_config import for_train, hydra_text, without_swept
from trainkit.cli.words import completed
from trainkit.config._compat import VERSION_BASE
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
    assert yaml.safe_load(output)["trials"][0]["rows"] == (0 if program else 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--agents", "0"], "--agents: must be a whole number from 1 .* received 0"),
        (["--count", "-1"], "--count: must be a whole number from 1 .* received -1"),
        (["--resume", "nope", "--offline"], "there is no sweep 'nope'"),
        (["--fast"], "unrecognized arguments: --fast"),
        (["--offline"], "method random never ends by itself. Give --count N"),
        (["--offline", "--count", "1"], "lr: distribution beta is drawn by W&B's"),
    ],
)
def test_wrong_options_are_refused(
    no_account: Path, words: list[str], text: str
) -> None:
    is_random = words[:1] == ["--offline"]
    lr = {"distribution": "beta"} if is_random else LR
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
        swept = {n: (p.values or [p.min])[pick] for n, p in sweep.varied.items()}
        words = [f"{name}={hydra_text(value)}" for name, value in swept.items()]
        config = Composition(["experiment=demo", *sweep.words[3:-1], *words]).config
        if path.stem == "lr_batch":
            assert config.trainer.accumulate_grad_batches * config.data.batch_size == 32
        for name, value in swept.items():
            assert OmegaConf.select(config, name) == value


# ---- what an agent hands over becomes what the trial was started with ----------------


LOGGED: dict[str, Any] = {
    "optimizer.lr": 1e-05,
    "lr_scaling": "sqrt",
    "lr_scaling.rule": "none",
    "seed": 0,
    "experiment": None,
    "schedule": "none",
    "name": "a,b",
    "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-05, "eps": 1e-08},
    "callbacks": {"monitor": {"_target_": "trainkit.WindowMonitor"}},
    "effective_batch/samples": 64,
    "lr/0": 0.1,
    "paths": {"run_dir": "/old"},
    "ckpt_path": None,
    "_wandb": {"t": {"1": [1, 5]}},
}
SWEPT = """
optimizer.lr=1e-05 lr_scaling='sqrt' lr_scaling.rule='none' seed=0 schedule='none'
name='a,b'
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


@pytest.mark.parametrize(
    ("own", "arguments", "prefix", "kept"),
    [
        # https://github.com/wandb/wandb/issues/9143: a resumed trial has the arguments
        # with which it was started, and the command's own words stay.
        (OWN, LOGGED, "", [*OWN, *SWEPT]),
        # https://github.com/wandb/wandb/issues/1427
        (
            [],
            {"optimizer": {"lr": 0.1, "eps": 1e-08}},
            "",
            ["optimizer.lr=0.1", "optimizer.eps=1e-08"],
        ),
        ([], {"optimizer.lr": 0.1, "lr/0": 1}, "++", ["++optimizer.lr=0.1"]),
        ([], {"ckpt_path": None, "metric": None}, "", ["metric=null"]),
    ],
)
def test_trainkit_train_gets_what_the_sweep_has_set(
    as_agent: Callable[[dict[str, Any]], list[str]],
    own: list[str],
    arguments: dict[str, Any],
    prefix: str,
    kept: list[str],
) -> None:
    words = [prefix + word for word in as_agent(arguments)]
    found = for_train([*own, *words])
    assert found[: len(own)] == own
    assert sorted(found) == sorted(kept)
    with initialize_config_module("trainkit.conf", **VERSION_BASE):
        compose("train", completed([w for w in found if w != "--cfg"]))
        if arguments is LOGGED:  # the control
            with pytest.raises(HydraException):
                compose("train", completed(words))


def test_without_a_server_every_argument_is_the_sweeps(
    as_agent: Callable[[dict[str, Any]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_SWEEP_ID")
    words = as_agent({"optimizer": {"lr": 0.1}, "nope": None})
    assert for_train(words) == ["optimizer.lr=0.1", "nope=null"]  # which Hydra refuses


def test_without_a_sweep_every_word_stays() -> None:
    words = ["lr/0=1", "optimizer={'lr': 1}", "a=None"]
    assert for_train(words) == words


def test_what_the_sweep_owns_is_not_logged_again(
    as_agent: Callable[[dict[str, Any]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_agent({"lr_scaling": "sqrt", "optimizer.lr": 0.1})
    config = {"lr_scaling": {"rule": "sqrt"}, "optimizer": {"lr": 0.1}, "seed": 0}
    assert without_swept(config) == {"optimizer": {"lr": 0.1}, "seed": 0}
    monkeypatch.delenv("WANDB_SWEEP_PARAM_PATH")
    assert without_swept(config) == config
