"""The partition is the one of least cost, and wastes little padding; the search for a
size, on machines whose speed and memory are known; the options."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf

from tests.core.split.common import DISTRIBUTIONS, window
from trainkit import TrainkitError
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import Run, cut_lengths, partition, width
from trainkit.lit.split.auto import SizeSearch

LENGTHS = st.lists(st.integers(1, 30) | st.integers(1, 999), min_size=1, max_size=40)
SIZE = st.none() | st.integers(1, 9)
TOKENS = st.none() | st.integers(1, 120) | st.integers(1, 20_000)
OVERHEAD = st.sampled_from([0.5, 1, 3.5, 50, 1000, 10**7])


def spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, length) for length in lengths]


def cost(ordered: Sequence[int], run: Run, limits: dict[str, Any]) -> float:
    """What a run costs, written as it is stated; infinite where it is not allowed."""
    rows, longest = run[1] - run[0], ordered[run[0]]
    size, tokens = limits["size"] or math.inf, limits["tokens"] or math.inf
    if rows > 1 and (rows > size or rows * longest > tokens):
        return math.inf
    return rows * longest + limits["overhead"]


def least_cost(ordered: Sequence[int], limits: dict[str, Any]) -> float:
    """The least cost of all cuts: every last run is tried for every row."""
    best = [0.0]
    for stop in range(1, len(ordered) + 1):
        tried = [(start, stop) for start in range(stop)]
        best.append(min(best[run[0]] + cost(ordered, run, limits) for run in tried))
    return best[-1]


@given(LENGTHS, SIZE, TOKENS, OVERHEAD)
@settings(max_examples=80)
def test_cost_of_the_cut_equals_the_least_of_all_cuts(
    lengths: list[int], size: Any, tokens: Any, overhead: float
) -> None:
    ordered = sorted(lengths, reverse=True)
    limits = {"size": size, "tokens": tokens, "overhead": overhead}
    runs = cut_lengths(ordered, **limits)
    assert [row for run in runs for row in range(*run)] == list(range(len(lengths)))
    found = sum(cost(ordered, run, limits) for run in runs)
    assert found == pytest.approx(least_cost(ordered, limits), rel=1e-12)


@given(LENGTHS, st.integers(1, 9))
@settings(max_examples=40)
def test_size_alone_gives_the_fewest_micro_batches_then_the_least_padding(
    lengths: list[int], size: int
) -> None:
    parts = partition([spans(lengths)], size=size)
    assert len(parts) == math.ceil(len(lengths) / size)
    assert sorted(row for part in parts for row in part) == list(range(len(lengths)))
    limits = {"size": size, "tokens": None, "overhead": 1e12}
    each = [sorted((lengths[row] for row in part), reverse=True) for part in parts]
    found = sum(cost(part, (0, len(part)), limits) for part in each)
    least = least_cost(sorted(lengths, reverse=True), limits)
    assert found == pytest.approx(least, rel=1e-14)


@pytest.mark.parametrize(
    ("groups", "options", "parts"),
    [
        ([[3, 50, 3]], {"tokens": 10}, [[1], [0, 2]]),  # over the budget: alone
        ([[3, 50, 3]], {}, [[1, 0, 2]]),
        ([[9, 9, 1, 1], [1, 1, 9, 9]], {"tokens": 20}, [[0, 1], [2, 3]]),
    ],
)
def test_rows_of_each_micro_batch(groups: Any, options: Any, parts: Any) -> None:
    assert partition(list(map(spans, groups)), **options) == parts


@pytest.mark.parametrize("limit", [{"tokens": 120}, {"tokens": 120, "size": 3}])
def test_rows_of_two_lengths_stay_within_the_budget(limit: dict[str, int]) -> None:
    draw = random.Random(4)
    groups = [spans([draw.randint(1, 40) for _ in range(60)]) for _ in range(2)]
    parts = partition(groups, **limit)  # type: ignore[arg-type]
    assert sorted(row for part in parts for row in part) == list(range(60))
    padded = [len(part) * width(groups, part) for part in parts]
    for part, wide in zip(parts, padded, strict=True):
        assert len(part) <= limit.get("size", 60)
        assert wide <= 120 or len(part) == 1
    # Negative control: as many in the rows' order pad more.
    size = -(-60 // len(parts))
    in_order = [range(at, min(at + size, 60)) for at in range(0, 60, size)]
    assert sum(len(p) * width(groups, p) for p in in_order) > 1.1 * sum(padded)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_windows_of_64_compute_at_most_1_30_of_their_tokens(name: str) -> None:
    """And none has two micro-batches more than its tokens fill, if a cut has fewer."""
    draw, wasted, in_order, extra = random.Random(0), [], [], []
    for _ in range(30):
        lengths = window(name, draw)

        def padded(parts: Any, lengths: list[int] = lengths) -> int:
            return sum(len(part) * max(lengths[row] for row in part) for part in parts)

        parts = partition([spans(lengths)], tokens=4096)
        wasted.append(padded(parts) / sum(lengths))
        extra.append(len(parts) - math.ceil(padded(parts) / 4096))
        ordered = sorted(lengths, reverse=True)
        fewest = len(cut_lengths(ordered, tokens=4096, overhead=10**9))
        assert extra[-1] <= 1 or len(parts) == fewest
        eights = [range(i, i + 8) for i in range(0, 64, 8)]
        in_order.append(padded(eights) / sum(lengths))
    assert sum(wasted) / 30 <= 1.30
    assert max(wasted) <= 1.5
    assert sum(extra) / 30 <= 1
    # Negative control: micro-batches of 8 in order compute at least 1.4 times more.
    assert sum(in_order) / sum(wasted) >= 1.4


# ---- the search for a size -----------------------------------------------------------

WHOLE = 4096


class Machine:
    """What a token costs, by the size of a micro-batch, and what memory holds."""

    def __init__(self, cost: Callable[[int], float], memory: int = 10**9) -> None:
        self.cost, self.memory = cost, memory
        self.sizes: list[int] = []

    def window(self, found: SizeSearch, whole: int = WHOLE) -> None:
        while (size := min(found.begin(whole), whole)) > self.memory:
            found.failed(size)
        self.sizes.append(size)
        found.passed(whole, self.cost(size))

    def run(self, found: SizeSearch, most: int = 40) -> Any:
        """Let it search; the size that it has found."""
        for _ in range(most):
            self.window(found)
        assert not found.is_searching
        return found.limit


def up_to(size: int, noise: float = 0.0) -> Callable[[int], float]:
    """Windows get faster up to a size."""
    draw = random.Random(0)
    return lambda now: max(1.0, size / now) * (1 + draw.random() * noise)


def settling() -> Callable[[int], float]:
    """At each size two windows are slow: kernels settle, and something disturbs."""
    seen: list[int] = []
    return lambda size: 9.0 if seen.append(size) or seen.count(size) < 3 else 1 / size


@pytest.mark.parametrize(
    ("cost", "size"),
    [
        *((up_to(512, noise), 512) for noise in (0, 0.01)),
        *((up_to(2048, noise), 2048) for noise in (0, 0.01)),
        (up_to(10**9), WHOLE),
        (float, WHOLE // 8),
        (settling(), WHOLE),
    ],
)
def test_it_doubles_while_that_is_faster(cost: Any, size: int) -> None:
    machine = Machine(cost)
    assert machine.run(SizeSearch()) == size
    assert machine.sizes[0] == WHOLE // 8
    assert max(machine.sizes) <= 2 * size


@pytest.mark.parametrize("memory", [3000, 700, 60, 1])
def test_where_memory_ends_the_size_fits_and_is_halved(memory: int) -> None:
    machine, found = Machine(up_to(10**9), memory), SizeSearch()
    assert memory / 4 < machine.run(found) <= memory
    machine.memory = max(memory // 5, 1)  # it may end at any time
    assert machine.run(found) <= machine.memory


def test_a_size_is_kept_once_it_is_found() -> None:
    found, machine = SizeSearch(), Machine(up_to(1024))
    machine.window(found)
    again = SizeSearch(found.state_dict())
    assert again.limit is None  # a search under way begins anew
    machine.run(found)
    again = SizeSearch(found.state_dict())
    assert (again.limit, again.is_searching) == (1024, False)
    found.failed(512)
    again = SizeSearch(found.state_dict())
    machine.window(again)  # where memory has ended, it ends
    assert (again.limit, again.is_searching) == (256, False)


# ---- the options ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"how": "fast"}, r"how: must be 'auto'.*received 'fast'"),
        ({"size": 0}, r"MicroBatching size: must be a whole number from 1"),
        ({"tokens": 2.5}, r"MicroBatching tokens: must be a whole number.*2\.5"),
        ({"trim": 1}, r"trim: must be True or False, received 1"),
        ({"collate": "pad"}, r"collate: must be the function.*'pad'"),
        ({"lengths": ""}, r"lengths: must be dotted paths"),
        ({"lengths": []}, r"lengths: must be dotted paths.*\[\]"),
        ({"lengths": True}, r"lengths: must be dotted paths.*True"),
        ({"shared": [None]}, r"shared: must be dotted paths.*None"),
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
    "shared": ["table"],
}
FEW: dict[str, Any] = {"tokens": 64, "shapes": [32, 8]}


def test_configurations_and_copies_make_the_same_options() -> None:
    options = MicroBatching(**OPTIONS)
    assert options.lengths == options.length_paths == ("mask", "targets.mask")
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
    for made in (
        instantiate(OmegaConf.create({"_target_": target, **FEW})),
        parser.instantiate(parser.parse_object({"cut": FEW})).cut,
    ):
        assert made == MicroBatching(tokens=64, shapes=(32, 8))
        assert type(made.shapes) is tuple
    assert [each.is_auto for each in (options, MicroBatching())] == [False, True]
