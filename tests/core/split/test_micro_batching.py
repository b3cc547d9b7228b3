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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"how": "fast"}, r"how: must be 'auto'.*received 'fast'"),
        ({"size": 0}, r"MicroBatching size: must be a whole number from 1"),
        ({"tokens": 2.5}, r"MicroBatching tokens: must be a whole number.*2\.5"),
        ({"start": True}, r"MicroBatching start: must be a whole number"),
        ({"size": 1, "start": 8}, r"start: is for 'auto'.*start=8, size=1"),
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
        ({"ragged": ["mask"]}, r"ragged: must be a mapping.*\['mask'\]"),
        ({"ragged": {"mask": "2"}}, r"ragged: must be a mapping.*'2'"),
        ({"ragged": {"mask": (0, 1)}}, r"ragged: must be.*none of them 0.*\(0, 1\)"),
        ({"ragged": {"": 2}}, r"ragged: must be a mapping"),
        (
            {"collate": list, "shared": "x"},
            r"collate: samples are cut.*shared=\('x',\)",
        ),
        ({"collate": list, "trim": False}, r"collate: samples are cut.*trim=False"),
        ({"shapes": 3}, r"shapes: must be a number of shapes.*tokens=None"),
        ({"tokens": 9, "shapes": 0}, r"MicroBatching shapes: must be a whole number"),
        ({"tokens": 9, "shapes": "3"}, r"shapes: must be a number of shapes.*'3'"),
        ({"tokens": 9, "shapes": ()}, r"shapes: must be a number of shapes.*\(\)"),
        ({"tokens": 9, "shapes": (12, 4)}, r"none above the budget.*shapes=\(12, 4\)"),
        (
            {"tokens": 9, "shapes": 2, "trim": False},
            r"shapes: .*few widths.*trim=False",
        ),
        ({"tokens": 9, "shapes": 2, "attention": 0.5}, r"shapes: .*attention=0\.5"),
        ({"tokens": 9, "shapes": 2, "inside": "net"}, r"inside: the loader batch"),
        ({"pool": 0}, r"MicroBatching pool: must be a whole number from 1"),
        ({"pool": 2, "inside": "net"}, r"inside: the loader batch.*pool=2"),
        ({"inside": []}, r"inside: must be the path of a submodule or several"),
        ({"inside": 3}, r"inside: must be the path of a submodule.*received 3"),
        ({"inside": "net", "collate": list}, r"inside: the loader batch is not cut"),
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
    "ragged": {"mask4d": [2, 3], "flat": [], "one": 2},
    "shared": ["table"],
    "attention": 0.5,
}
FEW: dict[str, Any] = {"tokens": 64, "shapes": [32, 8]}


def test_configurations_and_copies_make_the_same_options() -> None:
    options = MicroBatching(**OPTIONS)
    assert options.lengths == options.length_paths == ("mask", "targets.mask")
    assert options.ragged == {"mask4d": (2, 3), "flat": (), "one": (2,)}
    assert options.shared == MicroBatching(shared="table").shared == ("table",)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(MicroBatching, "cut")
    parsed = parser.parse_object({"cut": OPTIONS})
    target = "trainkit.core.split.micro_batching.MicroBatching"
    for made in (
        pickle.loads(pickle.dumps(options)),
        copy.deepcopy(options),
        instantiate(OmegaConf.create({"_target_": target, **OPTIONS})),
        parser.instantiate(parsed).cut,
    ):
        assert made == options
        assert type(made.lengths) is tuple
        assert type(made.ragged) is dict
    for made in (
        instantiate(OmegaConf.create({"_target_": target, **FEW})),
        parser.instantiate(parser.parse_object({"cut": FEW})).cut,
    ):
        assert made == MicroBatching(tokens=64, shapes=(32, 8))
        assert type(made.shapes) is tuple
    assert [each.is_auto for each in (options, MicroBatching())] == [False, True]
