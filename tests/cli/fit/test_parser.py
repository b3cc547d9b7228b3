"""What files may hold, and what the CLI writes it reads again."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.cli.fit.lightning_runs import (
    USER,
    by_hand,
    fit,
    make,
    only,
    quiet,
    strategy_of,
    written,
)
from tests.cli.fit.lightning_user import ByRow, Configured, Data, Net
from tests.helpers import weights
from tests.startup import forked
from trainkit import PerToken, WindowMonitor
from trainkit.cli.fit.cli import TrainkitCLI
from trainkit.core.noise.estimate import NoiseEstimate

FILE = "{class_path: PerToken, init_args: {ignore_index: -7}}"


def test_an_argument_after_a_file_changes_it(tmp_path: Path) -> None:
    path = written(tmp_path / "mine.yaml", FILE)
    cli = make(f"--accumulation={path}", "--accumulation.ignore_index=-3")
    assert strategy_of(cli) == PerToken(ignore_index=-3)


def test_a_config_file_may_refer_to_its_entries_and_the_environment(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path / "mine.yaml",
        f"""
        model:
          strategy: {{class_path: {USER}.ByRow, init_args: {{factor: 1e-4}}}}
          lr: ${{oc.env:NOT_SET_ANYWHERE,1e-3}}
        trainer:
          log_every_n_steps: 7
          callbacks:
          - class_path: trainkit.WindowMonitor
            init_args: {{every_n_steps: "${{trainer.log_every_n_steps}}"}}
        """,
    )
    cli = make(f"--config={path}", model=Configured)
    assert isinstance(cli.model.strategy, ByRow)
    assert cli.model.strategy.factor == 1e-4  # a number, not the string
    assert cli.model.lr == 1e-3
    (monitor,) = only(cli, WindowMonitor)
    assert monitor.every_n_steps == 7


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
    args += [f"--accumulation={written(tmp_path / 'mine.yaml', FILE)}"]
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
    assert strategy_of(again) == PerToken(ignore_index=-7)
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
