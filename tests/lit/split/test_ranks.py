"""Split windows on several ranks train what one process with the big batch trains."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from tests.helpers import (
    NAIVE,
    deviation,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
)
from tests.lit.split.common import EXACT
from tests.lit.split.rank_cases import SHARES, Case, Result, reference, train, train_all
from tests.lit.split.short_of_memory import Memory, Place
from trainkit import MicroBatching
from trainkit.lit.split.refusals import communicates_in_forward

TOKENS = MicroBatching(tokens=40)
ROWS = MicroBatching(size=1)
POOLS = MicroBatching(tokens=40, pool=2)
SHAPES = MicroBatching(tokens=60, shapes=3)
AUTO = MicroBatching("auto")
SEEKS = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
SHORT: Any = {"branches": True, "ddp": SEEKS, "only_short": (1, 3)}

ALIKE = {
    "tokens": Case(cut=TOKENS, epochs=2),
    "terms, tokens, adamw": Case(loss="terms", cut=TOKENS, optimizer="adamw"),
    "sums, metrics": Case(loss="sums", metrics=True),
    "metrics that synchronise on a step": Case(metrics="sync"),
    "said, streamed": Case(loss="said", cut=None, window=2),
    "said, windows of two": Case(loss="said", window=2, optimizer="adamw"),
    "said, nearly nothing on rank 0": Case(loss="said", silent=0),
    "pools": Case(cut=POOLS, window=2, epochs=2),
    "few shapes": Case(cut=SHAPES, epochs=2),
    "nearly nothing on rank 0": Case(silent=0),
    "nearly nothing on rank 1": Case(silent=1, loss="terms"),
    "windows of two": Case(window=2, epochs=2),
    "bucket views, windows of two": Case(window=2, ddp=VIEWS),
    "branches, windows of two": Case(branches=True, window=2, ddp=SEEKS),
    "branches, some windows without": Case(**SHORT, optimizer="adamw", epochs=2),
}
SEARCHED = {
    "auto, windows of two": Case(cut=AUTO, window=2, epochs=3),
    "auto, terms, bucket views": Case(cut=AUTO, loss="terms", ddp=VIEWS, epochs=2),
    "auto, branches": Case(cut=AUTO, **SHORT, optimizer="adamw", epochs=3),
}
ON_0 = [Memory({0: 60}), Memory()]
ON_1 = [Memory(), Memory({0: 40}, place="backward")]
ON_BOTH = [Memory({0: 90}, place="transfer"), Memory({0: 40}, place="backward")]
LATE = [Memory(), Memory({0: 400, 12: 20}, place="backward")]
PARTS = [Memory(calls=(1, 3, 4), place="transfer"), Memory(calls=(0, 4, 5, 6))]
RAN_OUT = {
    "at once, on rank 0": Case(cut=AUTO, memory=ON_0, epochs=2),
    "at once, said": Case(cut=AUTO, memory=ON_1, loss="said", epochs=2),
    "at once, said, before a weight": Case(cut=AUTO, memory=ON_0, loss="said"),
    "on both": Case(cut=AUTO, memory=ON_BOTH, window=2, epochs=3),
    "at once, but late": Case(cut=AUTO, memory=LATE, epochs=4),
    "of single micro-batches": Case(cut=AUTO, memory=PARTS, epochs=2),
}


def at_random(seed: int) -> Case:
    """Failures anywhere, on any rank."""
    draw = random.Random(seed)
    places: list[Place] = ["forward", "backward", "transfer"]
    memory = []
    for _ in range(2):
        calls = draw.sample(range(60), draw.randint(0, 12))
        fits = {draw.randint(0, 6): draw.randint(20, 200)}
        memory.append(Memory(fits, calls, draw.choice(places)))
    loss, window = draw.choice(["tokens", "samples", "sums"]), draw.choice([1, 2])
    silent = draw.choice([None, 0, 1]) if loss != "samples" else None
    how: Any = {"loss": loss, "window": window, "silent": silent, "memory": memory}
    return Case(cut=AUTO, epochs=2, **how)


RANDOM = {f"random {seed}": at_random(seed) for seed in (2, 4, 6)}
SHARDED = {
    f"sharded, {name}": Case(ddp=None, **how)
    for name, how in {
        "tokens": {"cut": TOKENS},
        "single rows": {"cut": ROWS},
        "terms": {"loss": "terms"},
        "sums, windows of two": {"window": 2, "loss": "sums", "cut": ROWS},
    }.items()
}
FILLED = {"sharded, few shapes": Case(ddp=None, cut=SHAPES)}
EQUAL = {**ALIKE, **SEARCHED, **RAN_OUT, **RANDOM, **SHARDED, **FILLED}

IN_FORWARD = [Memory(fits={0: 60}, place="transfer"), Memory()]
"""It runs out before the first forward pass, in which DDP sends the buffers."""

FLOAT = torch.float32
NARROW = {
    "float32": (Case(dtype=FLOAT, loss="terms"), 2e-5),
    "fp16 hook": (Case(dtype=FLOAT, hook=fp16_compress_hook), 5e-3),
}
SMALL = [Memory(), Memory({1: 5})]
REFUSED = {
    "memory ran out with a single sample of": Case(cut=AUTO, memory=SMALL),
    "static_graph=True: DDP cannot run a window of several": Case(
        ddp={"static_graph": True}
    ),
    "ModelParallelStrategy forward passes communicate": Case(ddp=None, cut=AUTO),
}
OTHERS = {
    "plain": Case(naive=True),
    "norm": Case(cut=AUTO, norm=True, memory=IN_FORWARD, epochs=2),
    "norm, of that size": Case(cut=MicroBatching(tokens=38), norm=True, epochs=2),
    "norm, auto": Case(cut=AUTO, norm=True, epochs=2),
}
CASES = EQUAL | {name: case for name, (case, _) in NARROW.items()} | REFUSED | OTHERS
TwoRanks = list[dict[str, Result]]


@pytest.fixture(scope="module")
def two_ranks() -> TwoRanks:
    """All of them in one pair of processes."""
    return raise_rank_errors(run_ranks(train_all, 2, CASES))


def assert_equal(case: Case, result: Result, world: int, most: float = EXACT) -> None:
    start, end, metric = reference(case, world)
    assert result.error == ""
    assert deviation(result.weights, end, start) <= most
    if metric is not None:
        assert result.logged["metric"] == pytest.approx(metric, rel=1e-6)


@pytest.mark.parametrize("name", [*EQUAL, *NARROW])
def test_two_ranks_equal_one_process(name: str, two_ranks: TwoRanks) -> None:
    for result in (rank[name] for rank in two_ranks):
        assert_equal(CASES[name], result, 2, NARROW.get(name, (0, EXACT))[1])
        if name in ALIKE:  # DDP reduces once a window
            assert result.num_reductions == result.steps > 0
        elif name in RAN_OUT or name in SEARCHED:  # windows that may run again
            assert result.num_reductions == 0 < result.steps
    failures = sum(rank[name].num_failures for rank in two_ranks)
    assert failures >= (2 - ("once" in name) if name in RAN_OUT else 0)


def test_dividing_on_each_rank_does_not_equal_one_process(two_ranks: TwoRanks) -> None:
    """The control: plain Lightning, which leaves the mean of the ranks' means."""
    start, end, _ = reference(CASES["plain"], 2)
    assert deviation(two_ranks[0]["plain"].weights, end, start) > NAIVE


@pytest.mark.parametrize("name", SHARDED)
def test_what_only_fills_up_counts_nowhere(name: str, two_ranks: TwoRanks) -> None:
    """Their ranks run as many forward passes: 3 against 1, and where a rank has not so
    many rows, some that count nothing."""
    shares, epochs = SHARES[2], CASES[name].epochs
    everything = sum(map(sum, shares))
    drawn = ragged_sequences(100)[:everything]
    mean = sum(int(labels.ne(-100).sum()) for _, labels in drawn) / everything
    for rank, result in enumerate(each[name] for each in two_ranks):
        assert result.forwards[0] == result.forwards[1]
        assert sum(result.samples) == epochs * everything
        assert result.logged["counted"] == everything
        assert result.logged["rows"] == sum(shares[rank])
        assert result.logged["tokens in a row"] == pytest.approx(mean, rel=1e-6)
    if name == "sharded, single rows":
        counted = [rank[name].forwards[0] for rank in two_ranks]
        assert counted == [sum(share) for share in shares]


def test_memory_that_runs_out_before_buffers_are_sent_is_no_hang(
    two_ranks: TwoRanks,
) -> None:
    """DDP sends buffers in the first forward pass after a synchronised one."""
    mine, other = two_ranks[0]["norm"], two_ranks[1]["norm"]
    expected = two_ranks[0]["norm, of that size"]
    assert mine.num_failures > 0
    assert mine.limit == 38
    assert torch.equal(mine.weights, expected.weights)
    assert torch.equal(mine.weights, other.weights)
    for found, wanted in zip(mine.statistics, expected.statistics, strict=True):
        assert torch.equal(found, wanted)


def test_validation_sees_the_first_ranks_buffers_after_any_window(
    two_ranks: TwoRanks,
) -> None:
    """As after plain ones, though no backward pass of these windows communicates."""
    mine, other = (rank["norm, auto"] for rank in two_ranks)
    assert mine.num_reductions == 0
    assert len(mine.validated) == len(other.validated) == 2
    for found, wanted in zip(other.validated, mine.validated, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_exact_is_refused_on_all_ranks(
    text: str, two_ranks: TwoRanks
) -> None:
    for result in (rank[text] for rank in two_ranks):
        assert text in result.error
        assert result.steps == (1 if "sample" in text else 0)


@pytest.mark.parametrize("is_synced", [True, False])
@pytest.mark.parametrize("size", [1, 2])
def test_layers_that_speak_to_other_ranks_are_seen(is_synced: bool, size: int) -> None:
    """torch runs SyncBatchNorm on GPUs alone."""
    net: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if is_synced else net
    ranks: Any = SimpleNamespace(size=size)
    assert communicates_in_forward(net, ranks) == (is_synced and size > 1)


def train_to_the_error(rank: int, world: int, case: Case) -> None:
    result = train(rank, world, case)
    raise RuntimeError(f"after {result.steps} steps: {result.error}")


def test_parameters_that_ddp_does_not_seek_are_refused_before_the_step() -> None:
    """The last micro-batch of a rank does not use what an earlier one has used: DDP
    would leave the ranks apart, and say so when the step has been taken."""
    texts = [str(e) for e in run_ranks(train_to_the_error, 2, Case(branches=True))]
    assert not any("steps: \n" in text for text in texts)
    refused = "after 0 steps: TrainkitError", "set find_unused_parameters=True"
    assert any(all(part in text for part in refused) for text in texts)


def test_three_ranks_equal_one_process() -> None:
    names = ["terms, tokens, adamw", "windows of two", "auto, branches"]
    cases = {name: EQUAL[name] for name in names}
    for results in raise_rank_errors(run_ranks(train_all, 3, cases)):
        for name, result in results.items():
            assert_equal(cases[name], result, 3)
