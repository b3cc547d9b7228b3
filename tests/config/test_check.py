"""Wrong keys and types are refused before anything is built."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Protocol, TypeVar, Union

import pytest
import torch
from lightning.pytorch import Trainer
from omegaconf import DictConfig, OmegaConf
from pydantic import AfterValidator

from tests.config.test_conf import composed
from trainkit import TrainkitError
from trainkit.cli.main import main
from trainkit.config import allow_targets
from trainkit.config.check import _hints, check, check_limits, fits
from trainkit.config.groups import refuse_unread


class Widget:
    made = 0

    def __init__(
        self, size: int, *, name: str = "w", parts: list[float] | None = None
    ) -> None:
        type(self).made += 1


class Anything:
    def __init__(self, **options: Any) -> None:
        pass


class Loose:
    def __init__(
        self,
        size: int = None,  # type: ignore[assignment]  # as many write it
        kind: Literal["a", None] = "a",
        other: int = 1,
    ) -> None:
        pass


allow_targets("tests")
WIDGET = "tests.config.test_check.Widget"
ANYTHING = "tests.config.test_check.Anything"
NOT_A_SIZE = {"_target_": WIDGET, "size": "x"}


def refused(config: Any, **kwargs: Any) -> str:
    with pytest.raises(TrainkitError) as error:
        check(OmegaConf.create(config), key="group", **kwargs)
    assert Widget.made == 0
    return str(error.value)


def test_an_unknown_key_is_named_with_those_that_there_are() -> None:
    text = refused({"_target_": WIDGET, "size": 1, "namee": "x"})
    assert text.startswith("group.namee: Widget has no such argument.")
    assert "Did you mean name?" in text
    assert "size, name, parts" in text


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"size": "many"}, "group.size: must be int, received 'many'"),
        ({"size": 1.5}, "group.size: must be int, received 1.5"),
        ({"size": 1, "name": [1]}, "group.name: must be str"),
        ({"size": 1, "parts": ["a"]}, "group.parts: must be"),
        ({"size": None}, "group.size: must be int, received None"),
        ({"size": "8"}, "group.size: must be int, received '8'. The text is not"),
        ({"size": 1, "parts": [1, "2"]}, "received [1, '2']. The text is not"),
        ({}, "group.size: Widget needs it"),
        ({"size": "???"}, "group.size: must be given"),
    ],
)
def test_a_wrong_type_or_a_missing_argument_is_named(
    values: dict[str, Any], key: str
) -> None:
    assert key in refused({"_target_": WIDGET, **values})


@pytest.mark.parametrize(
    "config",
    [
        {"_target_": WIDGET, "size": 1, "parts": [1, 2.5]},
        {"_target_": WIDGET, "size": 1, "parts": None},
        {"_target_": WIDGET, "_partial_": True},
        {"_target_": WIDGET, "size": 1, "name": {"_target_": ANYTHING}},
        {"_target_": WIDGET, "_args_": [1]},
        {"_target_": ANYTHING, "x": 1},
        {},
        {"lr": 1},
        None,
    ],
)
def test_what_fits_is_left_alone(config: Any) -> None:
    check(OmegaConf.create(config) if config is not None else None, key="group")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"_target_": "trainkit.PerToken", "ignore_index": "abc"}, "ignore_index"),
        ({"_target_": "trainkit.PerToken", "loss_reduction": "median"}, "median"),
        ({"_target_": "trainkit.LRScaling", "rule": "linear"}, "reference_batch"),
        ({"_target_": "trainkit.BatchNormGuard", "policy": "warm"}, "warm"),
        (
            {"_target_": "trainkit.AccumulationSchedule", "sizes": "10:4"},
            "group.sizes: must be",
        ),
        ({"one": {"deep": [1, NOT_A_SIZE]}}, "group.one.deep[1].size"),
        (
            {"_target_": "torch.optim.AdamW", "_partial_": True, "learning_rate": 1},
            "learning_rate",
        ),
    ],
)
def test_real_and_deeper_targets(config: dict[str, Any], text: str) -> None:
    assert text in refused(config)


def test_a_variable_of_the_environment_is_a_text_until_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SIZE", "8")
    assert "${oc.decode:...}" in refused({"_target_": WIDGET, "size": "${oc.env:SIZE}"})
    decoded = {"_target_": WIDGET, "size": "${oc.decode:${oc.env:SIZE}}"}
    check(OmegaConf.create(decoded), key="group")


def test_what_is_written_in_c_refuses_arguments_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINKIT_ALLOW", "torch")
    check(OmegaConf.create({"_target_": "torch.eye", "size": "x"}), key="group")


def test_null_fits_where_it_is_the_default() -> None:
    target = "tests.config.test_check.Loose"
    config = {"_target_": target, "size": None, "kind": None}
    check(OmegaConf.create(config), key="group")
    assert "other: must be int" in refused({"_target_": target, "other": None})


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("optimizer", {"_target_": "torch.optim.AdamW", "lr": 0.1}),
        ("scheduler", {"_target_": "trainkit.warmup_cosine", "total_steps": 3}),
    ],
)
def test_what_waits_for_the_training_is_partial(
    key: str, config: dict[str, Any]
) -> None:
    with pytest.raises(TrainkitError, match=f"{key}: .* Add _partial_: true beside"):
        check(OmegaConf.create(config), key=key)
    check(OmegaConf.create({**config, "_partial_": True}), key=key)


def test_what_must_be_given_is_named_from_the_root() -> None:
    root = OmegaConf.create({"group": {"parts": [{"size": "???"}]}})
    with pytest.raises(TrainkitError, match=r"^group\.parts\[0\]\.size: must be giv"):
        check(root.group, key="group")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("trainer.accumulate_grad_batches", 0, "at least 1"),
        ("trainer.val_check_interval", 0, "above 0"),
        ("trainer.val_check_interval", 0.0, "above 0"),
        ("trainer.val_check_interval", -0.5, "above 0"),
        ("trainer.val_check_interval", math.nan, "above 0"),
        ("trainer.check_val_every_n_epoch", 0, "at least 1"),
        ("trainer.log_every_n_steps", -1, "at least 0"),
        ("trainer.gradient_clip_val", -1, "at least 0"),
        ("trainer.gradient_clip_val", math.nan, "at least 0"),
        ("seed", -1, "from 0 to 4294967295"),
        ("seed", 2**32, "from 0 to 4294967295"),
        ("mode", "foo", "min or max"),
        ("checks", "never", "late or now"),
        # The controls, within the limits.
        ("trainer.accumulate_grad_batches", 1, None),
        ("trainer.val_check_interval", 0.25, None),
        ("trainer.val_check_interval", "00:00:05:00", None),
        ("trainer.val_check_interval", {"minutes": 5}, None),
        ("trainer.val_check_interval", None, None),
        ("trainer.check_val_every_n_epoch", None, None),
        ("trainer.log_every_n_steps", 0, None),
        ("trainer.gradient_clip_val", 0, None),
        ("trainer.gradient_clip_val", None, None),
        ("seed", None, None),
        ("seed", 2**32 - 1, None),
        ("mode", "max", None),
        ("checks", "now", None),
    ],
)
def test_what_is_beyond_a_limit_is_refused(
    key: str, value: Any, rule: str | None
) -> None:
    config = {"trainer": {}, "seed": 0, "mode": "min", "checks": "late"}
    limited = OmegaConf.create(config)
    OmegaConf.update(limited, key, value)
    if rule is None:
        check_limits(limited)
        return
    with pytest.raises(TrainkitError, match=rf"^{key}: must be {rule}, received"):
        check_limits(limited)


@pytest.fixture(scope="module")
def demo() -> DictConfig:
    return composed()


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        ({"max_epochs": 3}, "Did you mean trainer.max_epochs?"),
        ({"lr": 0.3}, "Did you mean optimizer.lr?"),
        ({"seeds": 3}, "Did you mean seed?"),
        ({"size": 3, "resize": "${sizes}", "sizes": 4}, "as ${size}"),
        # The controls: nothing, and keys that another value uses.
        ({}, None),
        ({"size": 3, "trainer.max_steps": "${size}"}, None),
        ({"my": {"size": 3}, "trainer.max_steps": "${my.size}"}, None),
    ],
)
def test_a_key_that_nothing_reads_is_refused(
    values: dict[str, Any], meant: str | None, demo: DictConfig
) -> None:
    config = copy.deepcopy(demo)
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=True)
    if meant is None:
        refuse_unread(config)
        return
    with pytest.raises(TrainkitError, match=r"nothing reads this key") as refused:
        refuse_unread(config)
    assert meant in str(refused.value)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("max_epochs=3", "Did you mean trainer.max_epochs?"),
        ("trainer.max_epoch=3", "Did you mean trainer.max_epochs?"),
        ("trainr.max_steps=3", "Did you mean trainer?"),
    ],
)
def test_no_advice_is_given_that_does_nothing(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hydra's own advice, `+max_epochs=3`, makes a key that nothing reads."""
    assert main(["train", "experiment=demo", word]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "To append to your config" not in shown


class Color(enum.Enum):
    RED = 1


class Word(str, enum.Enum):
    RED = "the red one"


@dataclass
class Sizes:
    width: int = 8


class Sized(Protocol):  # which isinstance refuses
    size: int


Free = TypeVar("Free")
Bound = TypeVar("Bound", bound=int)

TEXTS: list[tuple[Any, Any]] = [
    ("false", bool),
    ("yes", bool),
    ("8", int),
    ("0.1", float),
    ("null", Optional[int]),  # noqa: UP045
    ("1", Literal[1, 2]),
    ([1, "2"], list[int]),
    ("[1, 2]", list[int]),
    ([[1, "2"]], list[list[int]]),
    ([1, "2"], tuple[int, int]),
    ([1, "2"], tuple[int, ...]),
    (["1"], set[int]),
    ({"a": "1"}, dict[str, int]),
    ("RED", Color),
    ("RED", Word),
    ("torch.nn.ReLU", type),
    ("torch.nn.ReLU", torch.nn.Module),
    ("torch.relu", Callable),
    ("torch.float32", torch.dtype),
    ("8", Sizes),
]


FITTING: list[tuple[Any, Any]] = [
    ("8", str),
    ("8", Any),
    ("8", object),
    ("8", int | str),
    ("8", Union[int, str]),  # noqa: UP007
    ("null", str | None),
    ("a", Path),
    ("a", str | Path),
    ("16", Literal[16, "16"]),
    ("16", Literal[16] | Literal["16", "bf16"] | None),
    (["1", 2], list[int | str]),
    (["1"], list[Any]),
    (["1"], list[Literal["1", "2"]]),
    (["1", 2], tuple[str | int, int]),
    ({"1": "2"}, dict[str, int | str]),
    ({"a": ["1"]}, dict[str, Any]),
    (["a"], Sequence[str]),
    (["a", "b"], set[str]),
    ("torch.relu", Callable | str),
    (1, float),
    ([1, 2], tuple[int, int]),
    ([1, 2], tuple[int, ...]),
    ([1, 2, 3], tuple[int, ...]),
    ("x", Free),
    (Color.RED, Color),
    (3, Sized),
    (3, Annotated[int, AfterValidator(len)]),
    (None, None),
    (None, type(None)),
    (None, Any),
    (None, int | None),
    (None, Literal["a", None]),
    (None, Literal["a"] | Literal[None]),
    (None, Free),
]
OF_THE_TRAINER = [
    ("precision", "16", True),
    ("precision", "15", False),
    ("devices", "2", True),
    ("deterministic", "warn", True),
    ("deterministic", "false", False),
    ("val_check_interval", {"minutes": 5}, True),
    ("val_check_interval", {"minutes": "5"}, False),
    ("val_check_interval", "00:00:05:00", True),
    ("max_steps", "5", False),
]


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        *((value, hint, False) for value, hint in TEXTS),
        *((value, hint, True) for value, hint in FITTING),
        *((None, hint, False) for hint in (Bound, int, int | str, Literal["a"])),
        *((value, _hints(Trainer)[name], ok) for name, value, ok in OF_THE_TRAINER),
    ],
)
def test_nothing_is_converted_to_fit(value: Any, hint: Any, expected: bool) -> None:
    kept = str(value)
    assert fits(value, hint) is expected
    assert str(value) == kept
