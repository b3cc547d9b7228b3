"""One YAML for both doors, and what the CLI writes it reads again."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cli.fit.lightning_runs import (
    CONF,
    USER,
    by_hand,
    callbacks_of,
    fit,
    make,
    only,
    quiet,
    strategy_of,
    written,
)
from tests.cli.fit.lightning_user import ByRow, Configured, Data, Net, WithoutOptimizer
from tests.helpers import weights
from tests.startup import forked
from trainkit import (
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.cli.fit.cli import TrainkitCLI
from trainkit.core.noise.estimate import NoiseEstimate


@pytest.mark.parametrize("strategy", [PerToken(), PerSample(), Uniform()])
def test_a_group_file_of_hydras_serves_here_and_names_every_argument(
    strategy: Any,
) -> None:
    names = {PerToken: "per_token", PerSample: "per_sample", Uniform: "uniform"}
    path = CONF / "accumulation" / f"{names[type(strategy)]}.yaml"
    assert strategy_of(make(f"--accumulation={path}")) == strategy
    node = yaml.safe_load(path.read_text())
    assert set(node) - {"_target_"} == {field.name for field in fields(strategy)}


@pytest.mark.parametrize("group", ["lr_scaling", "batchnorm", "schedule"])
def test_every_file_of_a_group_serves_here(group: str) -> None:
    kinds = {
        "lr_scaling": LRScaling,
        "batchnorm": BatchNormGuard,
        "schedule": AccumulationSchedule,
    }
    files = sorted((CONF / group).glob("*.yaml"))
    assert len(files) > 2
    for path in files:
        needed = ["--lr_scaling.reference_batch=8"] * (
            group == "lr_scaling" and path.stem != "none"
        ) + ["--schedule.sizes={0: 2, 5: 4}"] * (path.stem in ("stages", "by_tokens"))
        needed += ["--lr_scaling.noise_scale=40"] * (path.stem == "gain")
        made = only(make(f"--{group}={path}", *needed), kinds[group])
        assert len(made) == (path.stem != "none"), path


def test_an_argument_after_a_file_changes_it() -> None:
    path = CONF / "accumulation" / "per_token.yaml"
    cli = make(f"--accumulation={path}", "--accumulation.ignore_index=-3")
    assert strategy_of(cli) == PerToken(ignore_index=-3)


def test_an_optimizer_group_file_serves_here() -> None:
    path = CONF / "optimizer" / "adamw.yaml"
    cli = make(f"--optimizer={path}", "--optimizer.lr=0.25", model=WithoutOptimizer)
    assert cli.model.configure_optimizers().param_groups[0]["lr"] == 0.25


def test_a_config_file_mixes_both_notations(tmp_path: Path) -> None:
    path = written(
        tmp_path / "mixed.yaml",
        f"""
        model:
          strategy: {{_target_: {USER}.ByRow, factor: 1e-4}}
          lr: ${{oc.env:NOT_SET_ANYWHERE,1e-3}}
        accumulation: {{class_path: PerToken, init_args: {{ignore_index: -7}}}}
        trainer:
          log_every_n_steps: 7
          callbacks:
          - _target_: trainkit.WindowMonitor
            every_n_steps: ${{trainer.log_every_n_steps}}
          - class_path: LearningRateMonitor
        """,
    )
    cli = make(f"--config={path}", model=Configured)
    assert isinstance(cli.model.strategy, ByRow)
    assert cli.model.strategy.factor == 1e-4  # a number, not the string
    assert cli.model.lr == 1e-3
    assert strategy_of(cli) == PerToken(ignore_index=-7)
    found = {type(each).__name__: each for each in callbacks_of(cli)}
    assert found["WindowMonitor"].every_n_steps == 7
    assert "LearningRateMonitor" in found


def test_what_must_be_given_is_asked_for(capsys: Any) -> None:
    path = CONF / "lr_scaling" / "linear.yaml"
    with pytest.raises(SystemExit):
        make(f"--lr_scaling={path}")
    assert "required: reference_batch" in capsys.readouterr().err


def test_a_printed_config_trains_to_the_same_weights(
    tmp_path: Path, capsys: Any
) -> None:
    args = [*quiet(), "--accumulation=PerToken"]
    args += ["--lr_scaling.rule=linear", "--lr_scaling.reference_batch=8"]
    with pytest.raises(SystemExit) as end:
        TrainkitCLI(Net, Data, args=["fit", *args, "--print_config=skip_null"])
    assert end.value.code == 0
    file = written(tmp_path / "printed.yaml", capsys.readouterr().out)
    assert yaml.safe_load(Path(file).read_text())["lr_scaling"]["class_path"]
    first, again = fit(*args), fit(f"--config={file}")
    assert torch.equal(weights(first.model), weights(again.model))
    assert not torch.equal(weights(first.model), by_hand(PerToken()))  # rates scaled


def test_the_saved_config_of_a_run_runs_again_without_the_folder_it_read(
    tmp_path: Path,
) -> None:
    facts = NoiseEstimate(43.25, 33.0, 60.0, 32.0, 1.0, 50).facts()
    (tmp_path / "summary.json").write_text(json.dumps({"noise_scale": facts}))
    args = [*quiet(logger="true"), f"--trainer.default_root_dir={tmp_path}"]
    args += [f"--accumulation={CONF / 'accumulation' / 'per_token.yaml'}"]
    args += ["--lr_scaling.rule=gain", "--lr_scaling.reference_batch=8"]
    args += [f"--lr_scaling.noise_scale={tmp_path}"]
    args += ["--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path}"]
    args += ["--trainer.log_every_n_steps=2"]
    first = fit(*args)
    saved = Path(str(first.trainer.log_dir), "config.yaml")
    scaling = yaml.safe_load(saved.read_text())["lr_scaling"]
    assert scaling["init_args"]["noise_scale"] == 43.25  # the folder may change
    again = TrainkitCLI(Net, Data, args=["fit", f"--config={saved}"])  # saves its own
    assert again.trainer.log_dir != first.trainer.log_dir
    assert strategy_of(again) == PerToken()
    assert torch.equal(weights(first.model), weights(again.model))


def test_a_checkpoint_goes_on_where_it_stopped(tmp_path: Path) -> None:
    args = [*quiet(max_epochs="1"), "--accumulation=PerToken"]
    args += ["--lr_scaling.rule=sqrt", "--lr_scaling.reference_batch=3"]
    first = fit(*args)
    first.trainer.save_checkpoint(tmp_path / "half.ckpt")
    more = [*args, "--trainer.max_epochs=2"]
    resumed = fit(*more, f"--ckpt_path={tmp_path / 'half.ckpt'}")
    assert torch.equal(weights(resumed.model), weights(fit(*more).model))
    assert not torch.equal(weights(resumed.model), weights(first.model))


def test_a_parser_works_in_a_process_that_was_spawned(tmp_path: Path) -> None:
    cli = make("--accumulation=PerToken", "--trainer.callbacks+=LearningRateMonitor")
    (tmp_path / "cli.pickle").write_bytes(pickle.dumps((cli.parser, cli.config)))
    program = (
        "import pickle\n"
        "parser, config = pickle.load(open('cli.pickle', 'rb'))\n"
        "print(parser.dump(config))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, **forked()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "class_path: trainkit.PerToken" in done.stdout, done.stderr
