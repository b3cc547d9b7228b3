"""The Lightning CLI's door: the same training as the hand-written one."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser

from tests.cli.fit.lightning_runs import (
    USER,
    by_hand,
    callbacks_of,
    fitted,
    make,
    only,
    quiet,
    strategy_of,
)
from tests.cli.fit.lightning_user import ByRow, Data, MixinNet, Net, WithoutOptimizer
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    PerSample,
    PerToken,
    Uniform,
)
from trainkit.cli.fit.cli import TrainkitCLI, _refusal_in
from trainkit.cli.fit.parser import TrainkitParser

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
    for subcommand, is_said in (("validate", False), ("fit", True)):
        TrainkitCLI(
            Net,
            Data,
            args=[subcommand, *quiet()],
            save_config_kwargs={"overwrite": True},
        )
        assert ("plain Lightning" in capsys.readouterr().out) == is_said


def test_a_schedule_equals_the_written_one() -> None:
    trained = fitted(
        "--trainer.accumulate_grad_batches=1",
        "--accumulation=PerToken",
        "--schedule.sizes={0: 4, 1: 2}",
    )
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

    cli = Mine(
        Net, Data, run=False, args=[*quiet(), "--name=x", "--accumulation=PerToken"]
    )
    assert cli.config.name == "x"
    assert strategy_of(cli) == PerToken()


# ---- older versions of jsonargparse --------------------------------------------------


def test_micro_batching_has_a_base_that_is_no_dataclass() -> None:
    """What jsonargparse from 4.39 on asks of a class that a `class_path` may name; the
    option that names others came later."""
    bases = [base for base in MicroBatching.__mro__ if base is not object]
    assert not all(map(is_dataclass, bases))
    assert is_dataclass(MicroBatching)


@dataclass(frozen=True)
class NoOtherBase:
    size: int = 1


def test_a_dataclass_without_such_a_base_is_refused() -> None:
    """The control."""
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
    error = older_union("Expected a <class 'NoneType'>", REFUSED, kind=OURS)
    assert str(_refusal_in(error)) == REFUSED


def test_an_error_of_somebody_elses_class_stays_what_it_is() -> None:
    error = older_union("Expected a <class 'NoneType'>", "no", kind="theirs.Net")
    assert _refusal_in(error) is None


@pytest.mark.parametrize("first", ["U", "u"])
def test_an_option_that_is_misspelt_finds_the_right_one(first: str) -> None:
    parser = TrainkitParser(exit_on_error=False)
    parser.add_argument("--accumulation")
    with pytest.raises(ArgumentError, match=r"Did you mean --accumulation\?"):
        parser.error(f"{first}nrecognized arguments: --acumulation=PerToken")
