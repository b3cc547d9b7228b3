"""The options: checked where they are made, usable from configurations."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf

from trainkit import TrainkitError
from trainkit.core.split.micro_batching import MicroBatching


def test_auto_means_neither_size_nor_tokens() -> None:
    assert MicroBatching().is_auto
    assert MicroBatching("auto", start=4096).is_auto
    assert not MicroBatching(size=4).is_auto
    assert not MicroBatching(tokens=4096).is_auto


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"how": "fast"}, r"how: must be 'auto', received 'fast'"),
        ({"size": 0}, r"MicroBatching size: must be a whole number from 1"),
        ({"tokens": 2.5}, r"MicroBatching tokens: must be a whole number.*2\.5"),
        ({"start": True}, r"MicroBatching start: must be a whole number"),
        ({"size": 4, "start": 8}, r"start: is for 'auto'.*size=4"),
        ({"size": 4, "overhead": 8}, r"overhead: weighs padding.*overhead=8"),
        ({"tokens": 4, "overhead": 0}, r"overhead: must be a finite number above 0"),
        ({"tokens": 4, "overhead": float("inf")}, r"overhead: must be a finite"),
        ({"attention": -1}, r"attention: must be a finite number of at least 0.*-1"),
        ({"attention": "0"}, r"attention: must be a finite number of at least 0.*'0'"),
        ({"trim": 1}, r"trim: must be True or False, received 1"),
        ({"collate": "pad"}, r"collate: must be the function.*'pad'"),
        ({"lengths": ""}, r"lengths: must be dotted paths"),
        ({"lengths": []}, r"lengths: must be dotted paths.*\[\]"),
        ({"lengths": True}, r"lengths: must be dotted paths.*True"),
        ({"shared": [None]}, r"shared: must be dotted paths.*None"),
        ({"ragged": ["mask"]}, r"ragged: must map a path.*\['mask'\]"),
        ({"ragged": {"mask": "2"}}, r"ragged 'mask': must be a dimension.*'2'"),
        ({"ragged": {"mask": (0, 1)}}, r"ragged 'mask': must be a dimension.*\(0, 1\)"),
        ({"ragged": {"": 2}}, r"ragged: must be dotted paths"),
        ({"collate": list, "shared": "x"}, r"collate: samples are cut before"),
    ],
)
def test_option_that_means_nothing_is_refused(options: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        MicroBatching(**options)


def test_options_other_than_how_are_keywords() -> None:
    with pytest.raises(TypeError):
        MicroBatching("auto", 4)  # type: ignore[misc]


OPTIONS: dict[str, Any] = {
    "tokens": 64,
    "lengths": ["mask", "targets.mask"],
    "ragged": {"mask4d": [2, 3], "flat": []},
    "shared": ["table"],
    "attention": 0.5,
}


def test_copies_equal_what_was_copied() -> None:
    options = MicroBatching(**OPTIONS)
    assert options.length_paths == ("mask", "targets.mask")
    assert options.ragged == {"mask4d": (2, 3), "flat": ()}
    assert pickle.loads(pickle.dumps(options)) == options
    assert copy.deepcopy(options) == options


def test_hydra_makes_the_same_options() -> None:
    target = "trainkit.core.split.micro_batching.MicroBatching"
    made = instantiate(OmegaConf.create({"_target_": target, **OPTIONS}))
    assert made == MicroBatching(**OPTIONS)
    assert type(made.lengths) is tuple
    assert type(made.ragged) is dict


def test_jsonargparse_makes_the_same_options() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MicroBatching, "micro_batching")
    parsed = parser.parse_object({"micro_batching": OPTIONS})
    made = parser.instantiate(parsed)
    assert made.micro_batching == MicroBatching(**OPTIONS)
