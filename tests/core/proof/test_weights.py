"""Weights that are found from gradients alone."""

from __future__ import annotations

import itertools

import pytest
import torch

from trainkit.core.proof.candidates import SUM, UNIFORM, candidates, line_of
from trainkit.core.proof.gradients import Coordinates, best_fit, deviation
from trainkit.core.proof.parts import telling_parts
from trainkit.core.proof.weights import Counts, Measured, explain, two_denominators
from trainkit.core.strategies import PerSample, PerToken, Uniform

GENERATOR = torch.Generator().manual_seed(0)
ROWS = torch.randn(12, 30, generator=GENERATOR, dtype=torch.float64)
LENGTHS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
BATCH = {"labels": torch.where(torch.arange(9) < LENGTHS[:, None], 1, -100)}
PARTS = [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9], [10, 11]]


def part(rows: list[int]) -> dict[str, torch.Tensor]:
    return {"labels": BATCH["labels"][rows]}


def measured(by: str) -> Measured:
    """Sums of rows, each divided by what its part counts, or by nothing."""

    def gradient(rows: list[int]) -> torch.Tensor:
        counts = {"tokens": int(LENGTHS[rows].sum()), "rows": len(rows), "sum": 1}
        return ROWS[rows].sum(0) / counts[by]

    whole = list(range(12))
    parts = torch.stack([gradient(rows) for rows in PARTS])
    return Measured(gradient(whole), parts, 1.0, torch.ones(4).double())


@pytest.mark.parametrize(
    ("by", "line"),
    [("tokens", "PerToken()"), ("rows", "PerSample()"), ("sum", "a sum")],
)
def test_the_denominator_is_found(by: str, line: str) -> None:
    known = {
        each: Counts(
            each.weigh(BATCH),
            torch.tensor([each.weigh(part(p)) for p in PARTS]).double(),
        )
        for each in candidates(BATCH, {})
    }
    found = explain(measured(by), known, 1e-10)
    assert found is not None
    assert found.classes[0].line == line
    assert found.deviation < 1e-14
    others = [c for c in (SUM, UNIFORM) if c not in found.classes]
    assert others  # the control: not everything fits


def test_rows_that_see_each_other_fit_no_weights() -> None:
    parts = torch.stack([ROWS[rows].mean(0) ** 2 for rows in PARTS])
    whole = Measured(ROWS.mean(0) ** 2, parts, 1.0, torch.ones(4).double())
    assert explain(whole, {}, 1e-10) is None
    assert best_fit(whole.whole, parts).deviation > 0.1


def test_two_denominators_are_found_among_others() -> None:
    one, two = ROWS, ROWS.flip(1) ** 2
    rows = [sum(len(PARTS[n]) for n in union) for union in _unions()]
    tokens = [sum(int(LENGTHS[PARTS[n]].sum()) for n in union) for union in _unions()]
    gradients = {
        union: one[_rows(union)].sum(0) / tokens[at]
        + two[_rows(union)].sum(0) / rows[at]
        for at, union in enumerate(_unions())
    }
    known = {
        each: [each.weigh(part(p)) for p in PARTS]
        for each in candidates(BATCH, {})
        if each.line in ("PerSample()", "PerToken()", "PerToken(shift=True)")
    }
    pair = two_denominators(gradients, known, 1e-10)
    assert pair is not None
    assert {each.line for each in pair} == {"PerSample()", "PerToken()"}
    bent = {union: value**2 for union, value in gradients.items()}
    assert two_denominators(bent, known, 1e-10) is None


def _unions() -> list[frozenset[int]]:
    return [
        frozenset(union)
        for size in range(1, 5)
        for union in itertools.combinations(range(4), size)
    ]


def _rows(union: frozenset[int]) -> list[int]:
    return [row for n in sorted(union) for row in PARTS[n]]


def test_parts_tell_rows_from_tokens_and_none_is_small() -> None:
    counts = torch.stack([torch.ones(12), LENGTHS.float()], 1)
    parts = telling_parts(counts, 4)
    assert sorted(row for rows in parts for row in rows) == list(range(12))
    assert min(map(len, parts)) >= 2
    shares = torch.stack([counts[rows].sum(0) for rows in parts])
    shares = shares / shares.sum(0)
    assert (shares[:, 0] - shares[:, 1]).norm() > 0.2


def test_a_whole_that_vanishes_is_measured_against_its_parts() -> None:
    parts = torch.tensor([[1.0, 0.0], [-1.0, 1e-9]]).double()
    whole = torch.tensor([0.0, 1e-9]).double()
    assert deviation(whole, parts, torch.ones(2).double()) < 1e-8


def test_what_is_no_number_counts_unless_it_weighs_nothing() -> None:
    parts = torch.tensor([[1.0, 2.0], [float("nan"), 0.0]]).double()
    whole = torch.tensor([1.0, 2.0]).double()
    assert deviation(whole, parts, torch.tensor([1.0, 0.0]).double()) == 0
    assert deviation(whole, parts, torch.tensor([0.9, 0.1]).double()) == float("inf")


def test_some_coordinates_of_a_large_tensor_are_kept_and_its_largest() -> None:
    large = torch.zeros(20_000)
    large[777] = 5.0
    kept = Coordinates([large, None], sizes=[20_000, 3])
    vector = kept.of([large, None])
    assert len(vector) == 4096 + 3
    assert vector.max() == 5.0
    assert [len(each) for each in kept.split(vector)] == [4096, 3]


def test_a_strategy_is_written_without_its_defaults() -> None:
    assert line_of(PerToken(labels="y", mask="m")) == "PerToken(labels='y', mask='m')"
    assert line_of(PerSample()) == "PerSample()"
    assert line_of(Uniform()) == "Uniform()"
