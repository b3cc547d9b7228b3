"""The Lightning CLI's door: the hand-written training; and what files may hold."""

from __future__ import annotations

import json
import os
import pickle
import sys
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser

from tests.cli.fit.lightning_user import (
    USER,
    ByRow,
    Configured,
    Data,
    MixinNet,
    Net,
    WithoutOptimizer,
    by_hand,
    callbacks_of,
    fit,
    fitted,
    make,
    only,
    quiet,
    strategy_of,
    written,
)
from tests.helpers import weights
from tests.startup import ended, forked
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    PerSample,
    PerToken,
    Uniform,
    WindowMonitor,
)
from trainkit.cli.fit.cli import TrainkitCLI, TrainkitParser, _refusal_in
from trainkit.core.noise.estimate import NoiseEstimate

pytestmark = pytest.mark.usefixtures("for_lightnings_cli")

COUNTS = f"--accumulation.by={USER}.count_tokens"
BY_TOKENS = "--trainer.callbacks.strategy=PerToken"


# ---- the same training ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "model", "strategy", "other"),
    [
        (["--accumulation=PerToken"], Net, PerToken(), Uniform()),
        (["--accumulation=PerToken"], MixinNet, PerToken(), Uniform()),
        ([], Net, None, PerToken()),  # off by default it is plain Lightning
        ([f"--accumulation={USER}.ByRow"], Net, ByRow(), PerToken()),
        (["--accumulation=Weighed", COUNTS], Net, PerToken(), Uniform()),
    ],
)
def test_the_cli_equals_the_written_python_to_the_bit(
    words: list[str], model: Any, strategy: Any, other: Any
) -> None:
    trained = fitted(*words, model=model)
    assert torch.equal(trained, by_hand(strategy))
    assert not torch.equal(trained, by_hand(other))  # the control


@pytest.mark.parametrize(
    ("words", "model", "is_plain"),
    [
        ([], Net, True),
        (["--trainer.accumulate_grad_batches=1"], Net, False),
        (["--accumulation=Uniform"], Net, False),
        (["--trainer.callbacks=AccumulationCallback", BY_TOKENS], Net, False),
        ([], MixinNet, False),
    ],
)
def test_plain_lightnings_division_is_not_silent(
    words: list[str], model: Any, is_plain: bool, capsys: Any
) -> None:
    make(*words, model=model)
    out = capsys.readouterr().out
    said = "trainkit | accumulation: plain Lightning: each micro-batch's loss is divi"
    assert (said in out) == is_plain
    assert ("--accumulation=PerSample or PerToken" in out) == is_plain


@pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`")
def test_what_does_not_train_divides_nothing(capsys: Any) -> None:
    overwrite = {"save_config_kwargs": {"overwrite": True}}
    for subcommand, is_said in (("validate", False), ("fit", True)):
        TrainkitCLI(Net, Data, args=[subcommand, *quiet()], **overwrite)
        assert ("plain Lightning" in capsys.readouterr().out) == is_said


def test_a_schedule_equals_the_written_one() -> None:
    words = ["--trainer.accumulate_grad_batches=1", "--accumulation=PerToken"]
    trained = fitted(*words, "--schedule.sizes={0: 4, 1: 2}")
    schedule = AccumulationSchedule({0: 4, 1: 2})
    assert torch.equal(trained, by_hand(PerToken(), schedule))


# ---- the four arguments --------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], None),
        (["PerToken", "ignore_index=-1"], PerToken(ignore_index=-1)),
        (["PerToken", "labels=1", "shift=true"], PerToken(labels="1", shift=True)),
        (["PerSample", "size=ids"], PerSample(size="ids")),
        (["trainkit.Uniform"], Uniform()),
    ],
)
def test_a_strategy_by_name(args: list[str], expected: Any) -> None:
    words = [f"--accumulation={args[0]}"] if args else []
    words += [f"--accumulation.{option}" for option in args[1:]]
    assert strategy_of(make(*words)) == expected


@pytest.mark.parametrize("name", ["ByRow", f"{USER}.ByRow"])
def test_a_users_strategy_by_name(name: str) -> None:
    cli = make(f"--accumulation={name}", "--accumulation.factor=1e-4")
    strategy = strategy_of(cli)
    assert isinstance(strategy, ByRow)
    assert strategy.factor == 1e-4


def test_a_mixin_module_gets_the_strategy_and_no_callback() -> None:
    cli = make("--accumulation=PerToken", model=MixinNet)
    assert cli.model.accumulation == PerToken()
    assert strategy_of(cli) is None
    assert make(model=MixinNet).model.accumulation == Uniform()


def test_the_callbacks_are_made_from_their_arguments() -> None:
    cli = make(
        "--lr_scaling.rule=linear",
        "--lr_scaling.reference_batch=256",
        "--batchnorm.policy=momentum",
        "--schedule.sizes={0: 8, 10: 4}",
        "--schedule.unit=step",
    )
    (scaling,) = only(cli, LRScaling)
    assert (scaling.rule, scaling.reference_batch) == ("linear", 256.0)
    assert len(only(cli, BatchNormGuard)) == 1
    (schedule,) = only(cli, AccumulationSchedule)
    assert schedule.stages.unit == "step"
    assert (schedule.stages.starts, schedule.stages.sizes) == ((0, 10), (8, 4))


def test_the_users_own_callbacks_stay() -> None:
    cli = make(
        "--trainer.callbacks+=LearningRateMonitor",
        "--trainer.callbacks.logging_interval=step",
        "--trainer.callbacks+=trainkit.WindowMonitor",
        "--trainer.callbacks.every_n_steps=3",
        "--accumulation=PerToken",
        "--batchnorm=BatchNormGuard",
        trainer_defaults={"callbacks": [AlsoHere()]},
    )
    names = [type(each).__name__ for each in callbacks_of(cli)]
    for name in ("LearningRateMonitor", "WindowMonitor", "AlsoHere"):
        assert name in names
    assert len(only(cli, AccumulationCallback)) == 1


class AlsoHere(BatchNormGuard):
    """A callback that a program adds."""


def test_lightnings_own_optimizer_arguments_work() -> None:
    cli = make(
        "--optimizer=AdamW",
        "--optimizer.lr=1e-4",
        "--lr_scheduler=StepLR",
        "--lr_scheduler.step_size=3",
        model=WithoutOptimizer,
    )
    (optimizer,), (scheduler,) = cli.model.configure_optimizers()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.param_groups[0]["lr"] == 1e-4
    assert scheduler.step_size == 3


def test_a_subclass_may_add_arguments_without_knowing_ours() -> None:
    class Mine(TrainkitCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--name", type=str, default="run")

    args = [*quiet(), "--name=x", "--accumulation=PerToken"]
    cli = Mine(Net, Data, run=False, args=args)
    assert cli.config.name == "x"
    assert strategy_of(cli) == PerToken()


# ---- older versions of jsonargparse --------------------------------------------------


@dataclass(frozen=True)
class NoOtherBase:
    size: int = 1


def test_micro_batching_has_a_base_that_is_no_dataclass() -> None:
    """What jsonargparse from 4.39 on asks of a class that a `class_path` may name; the
    option that names others came later. The control is a class without one."""
    bases = [base for base in MicroBatching.__mro__ if base is not object]
    assert not all(map(is_dataclass, bases))
    assert is_dataclass(MicroBatching)
    with pytest.raises(ValueError, match="Not allowed for|to be a subclass type"):
        ArgumentParser().add_subclass_arguments(NoOtherBase, "of")


def older_union(*tried: str, kind: str) -> ValueError:
    """As versions before 4.53 raise it: the first that failed is the cause."""
    errors = "\n".join(f"  - {each}" for each in tried)
    error = ValueError(
        f"Does not validate against any of the Union subtypes\n"
        f"Subtypes: [<class 'NoneType'>, <class '{kind}'>]\nErrors:\n{errors}\n"
        f"Given value type: <class 'jsonargparse._namespace.Namespace'>\n"
        f"Given value: Namespace(class_path='{kind}')"
    )
    error.__cause__ = ValueError(tried[0])
    return error


OURS = "trainkit.lit.rates.lr_scaling.LRScaling"
REFUSED = "LRScaling reference_batch: must be a positive number, received -1.0."


def test_what_a_constructor_refuses_is_read_from_an_older_text() -> None:
    """An error of somebody else's class stays what it is."""
    error = older_union("Expected a <class 'NoneType'>", REFUSED, kind=OURS)
    assert str(_refusal_in(error)) == REFUSED
    error = older_union("Expected a <class 'NoneType'>", "no", kind="theirs.Net")
    assert _refusal_in(error) is None


@pytest.mark.parametrize("first", ["U", "u"])
def test_an_option_that_is_misspelt_finds_the_right_one(first: str) -> None:
    parser = TrainkitParser(exit_on_error=False)
    parser.add_argument("--accumulation")
    with pytest.raises(ArgumentError, match=r"Did you mean --accumulation\?"):
        parser.error(f"{first}nrecognized arguments: --acumulation=PerToken")


# ---- what the CLI writes it reads again ----------------------------------------------


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
    program = "import pickle\nparser, config = pickle.load(open('cli.pickle', 'rb'))\n"
    program += "print(parser.dump(config))"
    (tmp_path / "shown.py").write_text(program)
    env = {**os.environ, **forked()}
    done = ended([sys.executable, "shown.py"], tmp_path, env)
    assert "class_path: trainkit.PerToken" in done.stdout, done.stderr
