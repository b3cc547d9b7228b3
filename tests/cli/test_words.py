"""The words of a command line, and that advice at a shell is in words that work."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.cli.training import SMALL
from trainkit import BatchNormGuard, MicroBatching, PerSample, PerToken
from trainkit.cli.composition import Composition
from trainkit.cli.door import in_words, spoken
from trainkit.cli.main import main
from trainkit.cli.words import (
    find_modules_here,
    key_of,
    option,
    options_first,
    quoted,
    unquoted,
)
from trainkit.config.targets import instantiate
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import say, show
from trainkit.lit.proof.report import MORE


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        ([], []),
        (["a=1", "-m", "b=2"], ["--multirun", "a=1", "b=2"]),
        (["a=1", "-cd", "c=d e", "b=2"], ["--config-dir=c=d e", "a=1", "b=2"]),
        (["--config-name", "mine", "a=1"], ["--config-name=mine", "a=1"]),
        (["a=1", "-c", "job", "~b"], ["--cfg=job", "a=1", "~b"]),
        (["--info", "-m", "a=1"], ["--multirun", "--info=all", "a=1"]),
        (["--info", "searchpath"], ["--info=searchpath"]),
        (["a='-m'", "+b=-1"], ["a='-m'", "+b=-1"]),
    ],
)
def test_options_come_first_with_their_values(
    given: list[str], ordered: list[str]
) -> None:
    assert options_first(given) == ordered
    assert options_first(ordered) == ordered  # again is nothing


@pytest.mark.parametrize("words", [["-cn"], ["-cn", "-m"], ["--seed=1"], ["-c", "x"]])
def test_what_is_no_option_is_refused(words: list[str]) -> None:
    with pytest.raises(TrainkitError, match=r"trainkit train: .*have no dashes, as in"):
        options_first(words)


def test_the_last_of_an_option_counts() -> None:
    words = ["--config-dir=a", "--config-dir=b=c", "a=1"]
    assert option(words, "--config-dir") == "b=c"
    assert option(words, "--config-name") is None


def test_keys_and_quotes() -> None:
    assert key_of("++a.b@c=1") == "a.b"
    assert quoted("it's here") == r"'it\'s here'"


@pytest.mark.parametrize(
    "text", ["it's", r"a\b", "end\\", r"\'", "'", "''", "\\\\", "ü (x), [y] {z} = #"]
)
def test_what_is_quoted_is_the_text_to_hydra_and_to_us(text: str) -> None:
    word = f"key={quoted(text)}"
    assert OverridesParser.create().parse_override(word).value() == text
    assert unquoted(quoted(text)) == text


def test_modules_of_the_current_folder_are_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/somewhere"])
    find_modules_here()
    find_modules_here()
    assert sys.path == [str(tmp_path), "/somewhere"]


REHEARSED = "`trainkit check {} ...` with the same words"
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
    (
        "PerToken(shift=True, mask=None)",
        "accumulation=per_token accumulation.shift=true accumulation.mask=null",
        "--accumulation=PerToken --accumulation.shift=true --accumulation.mask=null",
    ),
    ("set checks='now' here", "set checks=now here", "set --checks=now here"),
    (
        "set accumulate_grad_batches=1; trainkit.check(module, data) says more",
        f"set trainer.accumulate_grad_batches=1; {REHEARSED.format('train')} says more",
        f"set --trainer.accumulate_grad_batches=1; {REHEARSED.format('fit')} says more",
    ),
    (
        f"off by 0.2. {MORE}",
        f"off by 0.2. {REHEARSED.format('train')} names the remedy.",
        f"off by 0.2. {REHEARSED.format('fit')} names the remedy.",
    ),
]

IN_PYTHON_ONLY = [
    "trainer.accumulate_grad_batches=1 is there",
    'accumulation = {"one": PerToken(), "other": PerSample()}',
    "PerSample(",
    "self.accumulation = PerClassWeight(weight=self.loss.weight())",
]


@pytest.mark.parametrize(
    ("text", "train", "fit"), [*TEXTS, *((text, text, text) for text in IN_PYTHON_ONLY)]
)
def test_a_call_is_said_in_the_words_of_the_command(
    text: str, train: str, fit: str
) -> None:
    """What has no words stays as it is."""
    assert in_words("train", text) == train
    assert in_words("fit", text) == fit


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
    assert type(built) is same
    if same is not BatchNormGuard:
        assert built == eval(text, {same.__name__: same})


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
        say(SimpleNamespace(is_global_zero=True), ("two", text))
        say(SimpleNamespace(is_global_zero=False), ("two", text))
    assert capsys.readouterr().out.count("write --accumulation=PerSample") == 2
    assert [str(each.message) for each in caught] == ["write --accumulation=PerSample"]
    show([("three", text)])  # afterwards as before
    assert "three: write PerSample()" in capsys.readouterr().out


def test_a_refused_training_advises_what_can_be_pasted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*SMALL, "accumulation=none", "trainer.accumulate_grad_batches=2"]
    words += ["micro_batching=inside", "micro_batching.inside=layers"]
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert main(["plan", "--probe", "--target=8", *words]) == 2
    assert "MicroBatching(" not in capsys.readouterr().err
    assert not re.search(r"\b(MicroBatching|PerSample|PerToken)\(", said)
    assert "such as accumulation=per_sample" in said
