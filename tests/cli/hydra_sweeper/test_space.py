"""What -m sweeps becomes a sweep of W&B's, with nothing lost and nothing added."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from trainkit.cli.composition import Composition
from trainkit.cli.hydra_sweeper.space import Space, as_sweep, read_space
from trainkit.cli.sweep.command import fixed_words
from trainkit.errors import TrainkitError

OPTIONS: dict[str, Any] = {
    "method": "random",
    "n_trials": None,
    "metric": "val/loss",
    "goal": "minimize",
    "project": None,
    "entity": None,
    "name": None,
    "early_terminate": None,
}
NO_LOADER: Any = None


def space(*words: str, **params: Any) -> Space:
    return read_space(words, params, NO_LOADER)


@pytest.mark.parametrize(
    ("word", "parameter"),
    [
        (
            "optimizer.lr=interval(1e-4,1e-2)",
            {"distribution": "uniform", "min": 1e-4, "max": 1e-2},
        ),
        (
            "optimizer.lr=tag(log,interval(1e-4,1e-2))",
            {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-2},
        ),
        (
            "data.batch_size=int(interval(4,32))",
            {"distribution": "int_uniform", "min": 4, "max": 32},
        ),
        (
            "data.batch_size=tag(log,int(interval(4,32)))",
            {"distribution": "q_log_uniform_values", "q": 1, "min": 4, "max": 32},
        ),
        ("data.batch_size=range(4,10,2)", {"values": [4, 6, 8]}),
        ("data.batch_size=choice(4,8)", {"values": [4, 8]}),
        ("accumulation=per_token,'uniform'", {"values": ["per_token", "uniform"]}),
        ("data.max_length=null,128", {"values": [None, 128]}),
    ],
)
def test_what_hydra_sweeps_is_a_parameter_of_wandbs(
    word: str, parameter: dict[str, Any]
) -> None:
    name = word.partition("=")[0]
    assert space(word, "seed=1").parameters == {name: parameter}
    assert space(word, "seed=1").fixed == ["seed=1"]


def test_the_words_of_a_trial_are_what_hydra_reads_as_its_values() -> None:
    found = space(
        "data.batch_size=tag(log,int(interval(4,32)))", "+model.odd='a,b',c", "seed=1"
    )
    words = found.words_of({"data.batch_size": 8.0, "model.odd": "a,b"})
    parsed = OverridesParser.create().parse_overrides(words)
    assert {o.get_key_element(): o.value() for o in parsed} == {
        "seed": 1,
        "data.batch_size": 8,
        "+model.odd": "a,b",
    }


def test_the_command_line_goes_before_params() -> None:
    given: dict[str, Any] = {"seed": "1,2", "optimizer.lr": "0.1,0.2"}
    found = read_space(["seed=7"], given, NO_LOADER)
    assert list(found.parameters) == ["optimizer.lr"]
    assert found.words_of({"optimizer.lr": 0.1}) == ["seed=7", "optimizer.lr=0.1"]


def test_an_agent_elsewhere_can_run_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W&B's names have no `+`, so the command has already added the key."""
    argv = ["trainkit", "-m", "--config-name=train", "experiment=demo"]
    monkeypatch.setattr(sys, "argv", argv)
    found = space("+model.extra=1,2", "experiment=demo", "+hub.token=abcdefgh")
    words = fixed_words(as_sweep(found, OPTIONS).config)
    assert words[0] == "--config-name=train"
    assert "+hub.token=<redacted>" in words
    words.remove("+hub.token=<redacted>")
    assert Composition([*words, "model.extra=2"]).config.model.extra == 2
    rest = [word for word in words if "model.extra" not in word]
    with pytest.raises(Exception, match="model.extra"):
        _ = Composition([*rest, "model.extra=2"]).config  # the control


def test_conf_of_the_current_folder_is_found_by_an_agent_in_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf").mkdir()
    option = f"--config-dir={tmp_path / 'conf'}"
    monkeypatch.setattr(sys, "argv", ["trainkit", "-m", option])
    found = space("seed=1,2", "experiment=demo")
    words = fixed_words(as_sweep(found, OPTIONS).config)
    assert words[0] == option  # the control: another folder is named
    monkeypatch.chdir(tmp_path)
    assert fixed_words(as_sweep(found, OPTIONS).config) == words[1:]


@pytest.mark.parametrize(
    ("options", "cap"),
    [({}, 20), ({"method": "grid"}, None), ({"method": "grid", "n_trials": 3}, 3)],
)
def test_only_a_grid_ends_by_itself(options: dict[str, Any], cap: int | None) -> None:
    found = as_sweep(space("seed=1,2", "experiment=demo"), {**OPTIONS, **options})
    assert found.config.get("run_cap") == cap


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["seed=1"], {}, "nothing is swept"),
        (["a@b=1,2"], {}, "a@b: W&B takes letters"),
        (["hydra/launcher=a,b"], {}, "hydra/launcher: W&B takes letters"),
        (["seed=tag(odd,interval(1,2))"], {}, "the only tag is log"),
        (["seed=tag(log,choice(1,2))"], {}, "the only tag is log"),
        (["seed=1,2"], {"method": "grdi"}, "Did you mean grid"),
        (["seed=interval(1,2)"], {"method": "grid"}, "List them, seed=0.1,0.2"),
        (["seed=interval(2,1)"], {}, "min must be below max"),
        (["seed=1,2"], {"n_trials": 0}, "hydra.sweeper.n_trials"),
        (["sede=1,2", "experiment=demo"], {}, "Did you mean seed"),
        (["logger=csv,nope", "experiment=demo"], {}, "must be one of csv"),
        (["seed=1,2"], {"metric": None, "method": "bayes"}, "method: bayes needs one"),
        (["seed=1,2"], {"early_terminate": {"type": "median"}}, "hyperband"),
    ],
)
def test_a_mistake_is_one_message(
    words: list[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainkitError, match=message):
        as_sweep(space(*words), {**OPTIONS, **options})
