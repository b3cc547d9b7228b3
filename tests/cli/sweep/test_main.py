"""`trainkit sweep`: exit status, messages, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.sweep.helpers import LR, private_env, toy
from trainkit.cli.sweep.config_keys import ConfigKeys, check_keys
from trainkit.cli.sweep.main import main
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.config._compat import VERSION_BASE
from trainkit.errors import TrainkitError

CONF = Path(__file__).parents[3] / "conf" / "sweep"


def train(folder: Path, parameters: dict[str, object], *words: str) -> SweepFile:
    command = ["${env}", "trainkit", "train", "logger=csv", *words]
    path = toy(folder, parameters, command=[*command, "${args_no_hyphens}"])
    return SweepFile.read(path)


def test_no_trial_that_finished_is_exit_status_1(no_account: Path) -> None:
    pytest.importorskip("optuna")
    command = ["${interpreter}", "-c", "import sys; sys.exit(1)"]
    path = toy(no_account, {"lr": LR}, command=command)

    assert main([str(path), "--offline"]) == 1


def test_a_metric_that_nobody_logs_is_exit_status_1(
    no_account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    command = ["${interpreter}", "-c", "pass"]
    path = toy(no_account, {"lr": LR}, command=command)

    assert main([str(path), "--offline"]) == 1
    assert "metric.name: " in capsys.readouterr().err


def test_json_is_all_that_standard_output_gets(
    no_account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    path = toy(no_account, {"lr": LR, "rows": 2})

    assert main([str(path), "--offline", "--json", "--count", "1"]) == 0

    output, news = capsys.readouterr()
    assert yaml.safe_load(output)["trials"][0]["rows"] == 2
    assert "finished: lr=0.1 rows=2, val/loss" in news


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--agents", "0"], "--agents: must be a whole number from 1 .* received 0"),
        (["--count", "-1"], "--count: must be a whole number from 1 .* received -1"),
        (["--resume", "nope", "--offline"], "there is no sweep 'nope'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_wrong_options_are_refused(
    no_account: Path, words: list[str], text: str
) -> None:
    path = toy(no_account, {"lr": LR})

    with pytest.raises(TrainkitError, match=text):
        main([str(path), *words])
    assert not (no_account / "sweeps" / "nope").exists()


def test_without_optuna_the_extra_is_named_and_no_folder_is_left(
    no_account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = toy(no_account, {"lr": LR})
    for name in ("journal", "search"):
        monkeypatch.delitem(
            sys.modules, f"trainkit.cli.sweep.offline.{name}", raising=False
        )
    monkeypatch.setitem(sys.modules, "optuna", None)

    with pytest.raises(TrainkitError, match=r"'lightning-trainkit\[sweeps\]'"):
        main([str(path), "--offline"])
    assert not (no_account / "sweeps").exists()


def test_a_search_without_an_end_is_refused(no_account: Path) -> None:
    path = toy(no_account, {"lr": {"min": 0.1, "max": 0.2}}, method="random")

    with pytest.raises(TrainkitError, match="never ends by itself. Give --count N"):
        main([str(path), "--offline"])


def test_help_and_a_wrong_file_load_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from trainkit.cli.main import main\n"
        "for words in (['--help'], ['none.yaml']):\n"
        "    try: main(['sweep', *words])\n"
        "    except SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'hydra', 'wandb', 'matplotlib'}\n"
        "print(heavy & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=private_env(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )

    assert done.stdout.splitlines()[-1] == "set()"
    assert "none.yaml cannot be read" in done.stderr


# ---- keys of `trainkit train` --------------------------------------------------------


def test_a_parameter_that_trainkit_does_not_have_is_refused(tmp_path: Path) -> None:
    sweep = train(tmp_path, {"optim.lr": LR})

    with pytest.raises(TrainkitError, match="no such key. Did you mean optimizer.lr"):
        check_keys(sweep)


def test_an_unknown_option_of_a_group_is_refused(tmp_path: Path) -> None:
    sweep = train(tmp_path, {"lr_scaling": {"values": ["sqrt", "cubic"]}})

    with pytest.raises(TrainkitError, match="must be one of .*linear.*'cubic'"):
        check_keys(sweep)


def test_keys_of_a_chosen_group_are_known(tmp_path: Path) -> None:
    parameters: dict[str, object] = {"lr_scaling.rule": {"values": ["sqrt", "none"]}}
    own = "lr_scaling.reference_batch=32"

    check_keys(train(tmp_path, parameters, "lr_scaling=sqrt", own))
    with pytest.raises(TrainkitError, match="lr_scaling.rule: .* no such key"):
        check_keys(train(tmp_path, parameters))


def test_groups_of_ones_own_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my conf" / "model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("_target_: my.Net\nwidth: 3\n")
    parameters: dict[str, object] = {
        "model": {"values": ["mine", "code_lm"]},
        "model.width": {"values": [3, 4]},
    }
    where = f"--config-dir={tmp_path}/my conf"

    check_keys(train(tmp_path, parameters, where))
    monkeypatch.setenv("MY_CONF", f"{tmp_path}/my conf")
    check_keys(train(tmp_path, parameters, "--config-dir=${envvar:MY_CONF}"))
    with pytest.raises(
        TrainkitError, match="must be one of batch_size, code_lm, .* received 'mine'"
    ):
        check_keys(train(tmp_path, parameters))
    only_width: dict[str, object] = {"model.width": {"values": [3, 4]}}
    check_keys(train(tmp_path, only_width, "model=mine", "-cd", f"{tmp_path}/my conf"))
    with pytest.raises(TrainkitError, match="model.width: .* no such key"):
        check_keys(train(tmp_path, only_width, where))


def test_a_configuration_of_ones_own_has_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [train, override lr_scaling: sqrt, _self_]\n"
    )
    parameters: dict[str, object] = {"lr_scaling.rule": {"values": ["sqrt", "none"]}}

    check_keys(train(tmp_path, parameters, "-cp", str(tmp_path), "-cn", "mine"))
    check_keys(train(tmp_path, parameters, "-cd", str(tmp_path), "-cn", "mine"))
    with pytest.raises(TrainkitError, match="lr_scaling.rule: .* no such key"):
        check_keys(train(tmp_path, parameters))


def test_keys_of_another_program_are_its_own(tmp_path: Path) -> None:
    check_keys(SweepFile.read(toy(tmp_path, {"whatever": LR})))


def test_config_keys_are_those_of_the_composed_configuration() -> None:
    keys = ConfigKeys([])

    assert all(
        map(keys, ("data.batch_size", "trainer.max_steps", "lr_scaling", "seed"))
    )
    assert not any(map(keys, ("data.nope", "effective_batch/samples", "seed.x", "")))


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_shipped_sweeps_compose_in_every_corner(path: Path) -> None:
    from hydra import compose, initialize_config_module
    from omegaconf import OmegaConf

    from trainkit.cli.sweep.command import fixed_words, hydra_text

    sweep = SweepFile.read(path)
    check_keys(sweep)
    for pick in (0, -1):
        swept = {
            name: parameter.get("values", [parameter.get("min")])[pick]
            for name, parameter in sweep.varied.items()
        }
        words = [f"{name}={hydra_text(value)}" for name, value in swept.items()]
        with initialize_config_module("trainkit.conf", **VERSION_BASE):
            config = compose(
                "train", ["experiment=demo", *fixed_words(sweep.config), *words]
            )
        trainer = OmegaConf.to_container(config.trainer, resolve=False)
        assert isinstance(trainer, dict)
        if path.stem == "lr_batch":
            assert config.trainer.accumulate_grad_batches * config.data.batch_size == 32
        for name, value in swept.items():
            assert OmegaConf.select(config, name) == value
