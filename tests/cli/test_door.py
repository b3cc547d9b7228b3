"""Advice at a shell is in the shell's words, and each word is one that works."""

import re
import warnings

import pytest

from tests.cli.training import SMALL
from trainkit import BatchNormGuard, MicroBatching, PerSample, PerToken, TrainkitError
from trainkit.cli.composition import Composition
from trainkit.cli.door import in_words, spoken
from trainkit.cli.main import main
from trainkit.config.targets import instantiate
from trainkit.lit.callback.table import say, show

TEXTS = [
    (
        'micro_batching = MicroBatching(size=8, inside="auto")',
        "micro_batching=inside micro_batching.size=8 micro_batching.inside=auto",
        "--micro_batching.size=8 --micro_batching.inside=auto",
    ),
    (
        'Write MicroBatching(tokens=4096) or MicroBatching("auto").',
        "Write micro_batching=tokens micro_batching.tokens=4096 or "
        "micro_batching=auto.",
        "Write --micro_batching.tokens=4096 or --micro_batching.how=auto.",
    ),
    (
        "BatchNormGuard('exact'): cut it",
        "batchnorm=exact: cut it",
        "--batchnorm.policy=exact: cut it",
    ),
    (
        'accumulation = PerSample(loss_reduction="total")',
        "accumulation=per_sample accumulation.loss_reduction=total",
        "--accumulation=PerSample --accumulation.loss_reduction=total",
    ),
    (
        "PerClassWeight(weight=[1.0, 2.5], ignore_index=0)",
        "accumulation=per_class_weight accumulation.weight=[1.0,2.5] "
        "accumulation.ignore_index=0",
        "--accumulation=PerClassWeight --accumulation.weight=[1.0,2.5] "
        "--accumulation.ignore_index=0",
    ),
    ("PerToken(shift=True, mask=None)",)
    + (
        "accumulation=per_token accumulation.shift=true accumulation.mask=null",
        "--accumulation=PerToken --accumulation.shift=true --accumulation.mask=null",
    ),
    ("set checks='now' here", "set checks=now here", "set --checks=now here"),
    (
        "set accumulate_grad_batches=1; trainkit.check(module, data) says more",
        "set trainer.accumulate_grad_batches=1; `trainkit check train ...` with the "
        "same words says more",
        "set --trainer.accumulate_grad_batches=1; `trainkit check fit ...` with the "
        "same words says more",
    ),
]

IN_PYTHON_ONLY = [
    "trainer.accumulate_grad_batches=1 is there",
    'accumulation = {"one": PerToken(), "other": PerSample()}',
    "BatchNormGuard('recalibrate', forward=lambda module, batch: module(batch))",
    "PerSample(",
    "self.accumulation = PerClassWeight(weight=self.loss.weight())",
]


@pytest.mark.parametrize(("text", "train", "fit"), TEXTS)
def test_a_call_is_said_in_the_words_of_the_command(
    text: str, train: str, fit: str
) -> None:
    assert in_words("train", text) == train
    assert in_words("fit", text) == fit


@pytest.mark.parametrize("text", IN_PYTHON_ONLY)
def test_what_has_no_words_stays_as_it_is(text: str) -> None:
    assert in_words("train", text) == text


@pytest.mark.parametrize(
    ("text", "key", "same"),
    [
        ('MicroBatching(size=8, inside="net")', "micro_batching", MicroBatching),
        ("MicroBatching(tokens=64)", "micro_batching", MicroBatching),
        ('MicroBatching("auto")', "micro_batching", MicroBatching),
        ('BatchNormGuard("group_norm", groups=4)', "batchnorm", BatchNormGuard),
        ("PerToken('targets', ignore_index=0)", "accumulation", PerToken),
        ("PerSample(loss_reduction='total')", "accumulation", PerSample),
    ],
)
def test_the_words_build_the_object_that_the_call_makes(
    text: str, key: str, same: type
) -> None:
    words = in_words("train", text).split()
    alone = ["experiment=ragged_regression", "~model", "~data"]
    built = instantiate(Composition([*alone, *words]).config[key])
    meant = eval(text, {each.__name__: each for each in (same,)})
    assert type(built) is same
    if same is not BatchNormGuard:
        assert built == meant


def test_errors_warnings_and_rows_are_said_in_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "write PerSample()"
    with pytest.raises(TrainkitError, match="write accumulation=per_sample"):
        with spoken("train"):
            raise TrainkitError(text)
    with warnings.catch_warnings(record=True) as caught, spoken("fit"):
        warnings.simplefilter("always")
        warnings.warn(text, stacklevel=1)
        show([("one", text)])
        say(None, ("two", text))
    assert capsys.readouterr().out.count("write --accumulation=PerSample") == 2
    assert [str(each.message) for each in caught] == ["write --accumulation=PerSample"]
    show([("three", text)])  # afterwards as before
    assert "three: write PerSample()" in capsys.readouterr().out


def test_a_refused_training_advises_what_can_be_pasted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, "micro_batching=auto", "accumulation=uniform"]
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert main(["plan", "--probe", "--target=8", *words]) == 2
    assert "MicroBatching(" not in capsys.readouterr().err
    assert not re.search(r"\b(MicroBatching|PerSample|PerToken)\(", said)
    assert "accumulation=per_sample or accumulation=per_token" in said
