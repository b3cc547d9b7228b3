"""Split windows on several ranks train what one process with the big batch trains."""

from __future__ import annotations

import random

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
)

from tests.helpers import NAIVE, deviation, raise_rank_errors, run_ranks
from tests.lit.split.rank_cases import Case, Result, reference, train, train_all
from tests.lit.split.short_of_memory import Memory, Place
from trainkit.core.split.micro_batching import MicroBatching

EXACT = 1e-9
TOKENS = MicroBatching(tokens=40)
AUTO = MicroBatching("auto", start=1000)
SEEKS = {"find_unused_parameters": True}

EQUAL = {
    "tokens": Case(cut=TOKENS, epochs=2),
    "terms, tokens, adamw": Case(loss="terms", cut=TOKENS, optimizer="adamw"),
    "sums, metrics": Case(loss="sums", metrics=True),
    "said, streamed": Case(loss="said", cut=None, window=2),
    "said, windows of two": Case(loss="said", window=2, optimizer="adamw"),
    "said, nearly nothing on rank 0": Case(loss="said", silent=0),
    "auto, said": Case(cut=AUTO, loss="said", epochs=2),
    "nearly nothing on rank 0": Case(silent=0),
    "nearly nothing on rank 1": Case(silent=1, loss="terms"),
    "windows of two": Case(window=2, epochs=2),
    "windows of two, samples": Case(window=2, loss="samples"),
    "bucket views, windows of two": Case(
        window=2, ddp={"gradient_as_bucket_view": True}
    ),
    "branches, windows of two": Case(branches=True, window=2, ddp=SEEKS),
    "branches, some windows without": Case(
        branches=True, ddp=SEEKS, only_short=(1, 3), optimizer="adamw", epochs=2
    ),
    "auto": Case(cut=AUTO, epochs=2),
    "auto, windows of two": Case(cut=AUTO, window=2, epochs=3),
    "auto, terms, bucket views": Case(
        cut=AUTO, loss="terms", ddp={"gradient_as_bucket_view": True}, epochs=2
    ),
    "auto, branches": Case(
        cut=AUTO,
        branches=True,
        ddp=SEEKS,
        only_short=(1, 3),
        optimizer="adamw",
        epochs=3,
    ),
}

ALIKE = {name: case for name, case in EQUAL.items() if case.cut is not AUTO}

MEMORIES = {
    "at once, on rank 0": [Memory(fits={0: 60}), Memory()],
    "at once, on rank 1": [Memory(), Memory(fits={0: 40}, place="backward")],
    "on both": [
        Memory(fits={0: 90}, place="transfer"),
        Memory(fits={0: 40}, place="backward"),
    ],
    "late, at a size that has run": [
        Memory(),
        Memory(fits={0: 400, 12: 20}, place="backward"),
    ],
    "of single micro-batches": [
        Memory(calls=(1, 3, 4), place="transfer"),
        Memory(calls=(0, 4, 5, 6)),
    ],
}
RAN_OUT = {
    f"{name}, windows of {window}": Case(
        cut=AUTO, window=window, memory=MEMORIES[name], epochs=epochs
    )
    for name, window, epochs in (
        ("at once, on rank 0", 1, 2),
        ("at once, on rank 1", 2, 3),
        ("on both", 2, 3),
        ("late, at a size that has run", 1, 4),
        ("of single micro-batches", 1, 2),
    )
}
RAN_OUT["at once, on rank 1, said"] = Case(
    cut=AUTO, loss="said", memory=MEMORIES["at once, on rank 1"], epochs=2
)

IN_FORWARD = [Memory(fits={0: 60}, place="transfer"), Memory()]
"""It runs out before the first forward pass, in which DDP sends the buffers."""

OTHERS = {
    "plain": Case(naive=True),
    "float32": Case(dtype=torch.float32, loss="terms"),
    "fp16 hook": Case(dtype=torch.float32, hook=fp16_compress_hook),
    "norm": Case(cut=AUTO, norm=True, memory=IN_FORWARD, epochs=2),
    "norm, of that size": Case(cut=MicroBatching(tokens=38), norm=True, epochs=2),
    "norm, searching": Case(cut=AUTO, norm=True, epochs=2),
    "a sample too long": Case(cut=AUTO, memory=[Memory(), Memory(fits={1: 5})]),
    "static graph": Case(ddp={"static_graph": True}),
}


def at_random(seed: int) -> Case:
    """Failures anywhere, on any rank, while sizes are still tried."""
    draw = random.Random(seed)
    places: list[Place] = ["forward", "backward", "transfer"]
    memory = [
        Memory(
            calls=draw.sample(range(60), draw.randint(0, 12)),
            fits={draw.randint(0, 6): draw.randint(20, 200)},
            place=draw.choice(places),
        )
        for _ in range(2)
    ]
    loss, window = draw.choice(["tokens", "samples", "sums"]), draw.choice([1, 2])
    silent = draw.choice([None, 0, 1]) if loss != "samples" else None
    return Case(
        cut=AUTO,
        loss=loss,
        window=window,
        silent=silent,
        memory=memory,
        epochs=2,
    )


SEEDS = (2, 4, 6)
RANDOM = {f"random {seed}": at_random(seed) for seed in SEEDS}
CASES = EQUAL | RAN_OUT | RANDOM | OTHERS


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Result]]:
    """All of them in one pair of processes."""
    return raise_rank_errors(run_ranks(train_all, 2, CASES))


TwoRanks = list[dict[str, Result]]


@pytest.mark.parametrize("name", [*EQUAL, *RAN_OUT, *RANDOM])
def test_two_ranks_equal_one_process(name: str, two_ranks: TwoRanks) -> None:
    start, end = reference(CASES[name], 2)
    for result in (rank[name] for rank in two_ranks):
        assert result.error == ""
        assert deviation(result.weights, end, start) <= EXACT


@pytest.mark.parametrize("name", RAN_OUT)
def test_memory_has_run_out_in_them(name: str, two_ranks: TwoRanks) -> None:
    assert sum(rank[name].num_failures for rank in two_ranks) >= 2 - (
        "once" in name or "late" in name
    )


def test_dividing_on_each_rank_does_not_equal_one_process(two_ranks: TwoRanks) -> None:
    """The control: plain Lightning, which leaves the mean of the ranks' means."""
    start, end = reference(CASES["plain"], 2)
    assert deviation(two_ranks[0]["plain"].weights, end, start) > NAIVE


@pytest.mark.parametrize(("name", "most"), [("float32", 2e-5), ("fp16 hook", 5e-3)])
def test_narrow_numbers_equal_one_process_up_to_rounding(
    name: str, most: float, two_ranks: TwoRanks
) -> None:
    start, end = reference(CASES[name], 2)
    for result in (rank[name] for rank in two_ranks):
        assert deviation(result.weights, end, start) <= most


@pytest.mark.parametrize("name", ALIKE)
def test_ddp_reduces_once_a_window(name: str, two_ranks: TwoRanks) -> None:
    for result in (rank[name] for rank in two_ranks):
        assert result.num_reductions == result.steps > 0


@pytest.mark.parametrize("name", ["auto", "auto, windows of two", *RAN_OUT])
def test_windows_that_may_run_again_do_not_reduce_in_backward(
    name: str, two_ranks: TwoRanks
) -> None:
    for result in (rank[name] for rank in two_ranks):
        assert result.num_reductions == 0 < result.steps


def test_memory_that_runs_out_before_buffers_are_sent_is_no_hang(
    two_ranks: TwoRanks,
) -> None:
    """DDP sends buffers in the first forward pass after a synchronised one."""
    mine, other = two_ranks[0]["norm"], two_ranks[1]["norm"]
    expected = two_ranks[0]["norm, of that size"]
    assert mine.num_failures > 0
    assert mine.limit == 38
    assert torch.equal(mine.weights, expected.weights)
    for found, wanted in zip(mine.statistics, expected.statistics, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(mine.weights, other.weights)


def test_validation_sees_the_first_ranks_buffers_after_any_window(
    two_ranks: TwoRanks,
) -> None:
    """As after plain ones; no backward pass of a search's windows communicates."""
    mine, other = two_ranks[0]["norm, searching"], two_ranks[1]["norm, searching"]
    assert mine.num_reductions == 0
    assert len(mine.validated) == len(other.validated) == 2
    for found, wanted in zip(other.validated, mine.validated, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a sample too long", "memory ran out with a single sample of"),
        ("static graph", "static_graph=True: DDP cannot run a window of several"),
    ],
)
def test_what_cannot_be_exact_is_refused_on_all_ranks(
    name: str, text: str, two_ranks: TwoRanks
) -> None:
    for result in (rank[name] for rank in two_ranks):
        assert text in result.error
        assert result.steps == (1 if "sample" in name else 0)


def train_to_the_error(rank: int, world: int, case: Case) -> None:
    result = train(rank, world, case)
    raise RuntimeError(f"after {result.steps} steps: {result.error}")


def test_parameters_that_ddp_does_not_seek_are_refused_before_the_step() -> None:
    """The last micro-batch of a rank does not use what an earlier one has used: DDP
    would leave the ranks apart, and say so when the step has been taken."""
    texts = [str(e) for e in run_ranks(train_to_the_error, 2, Case(branches=True))]
    assert not any("steps: \n" in text for text in texts)
    assert any(
        "after 0 steps: TrainkitError" in text
        and "set find_unused_parameters=True" in text
        for text in texts
    )


def test_three_ranks_equal_one_process() -> None:
    names = ["terms, tokens, adamw", "windows of two", "auto, branches"]
    cases = {name: EQUAL[name] for name in names}
    for results in raise_rank_errors(run_ranks(train_all, 3, cases)):
        for name, result in results.items():
            start, end = reference(cases[name], 3)
            assert result.error == ""
            assert deviation(result.weights, end, start) <= EXACT
