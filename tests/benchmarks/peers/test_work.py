"""The work that all frameworks share tells exact accumulation from other."""

from __future__ import annotations

import pytest

from tests.benchmarks.peers import run as table
from tests.benchmarks.peers.work import IGNORED, CausalNet, Work, loss_of, pad
from tests.helpers import NAIVE


def accumulated(work: Work, *, by_tokens: bool) -> CausalNet:
    """A bare loop: sums over the window's total, or the mean of means."""
    net = work.net()
    optimizer = work.make_optimizer(net.parameters())
    for begin in range(0, len(work.rows), work.window):
        window = work.rows[begin : begin + work.window]
        parts = range(0, len(window), work.micro_batch)
        batches = [pad(window[i : i + work.micro_batch]) for i in parts]
        total = sum(int((b["labels"][:, 1:] != IGNORED).sum()) for b in batches)
        for batch in batches:
            reduction = "sum" if by_tokens else "mean"
            loss = loss_of(net(batch["input_ids"]), batch["labels"], reduction)
            (loss / (total if by_tokens else len(batches))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_tokens_counted_first_equal_the_big_batch_and_means_do_not(name: str) -> None:
    work = Work.of(name, dtype="float64")
    assert work.deviation(accumulated(work, by_tokens=True)) < 1e-12
    assert work.deviation(accumulated(work, by_tokens=False)) > NAIVE


def test_an_epoch_ends_with_a_short_window_and_a_batch_of_one_row() -> None:
    work = Work.of("epoch")
    left = len(work.rows) % work.window
    assert 0 < left < work.window
    assert left % work.micro_batch == 1
    assert len(set(map(len, work.rows))) > 10


def test_tokens_per_second_leaves_out_the_first_and_the_last_window() -> None:
    work, seconds = Work.of("epoch"), 0.0
    net = work.net()
    for begin in range(0, len(work.rows), work.micro_batch):
        rows = len(work.rows[begin : begin + work.micro_batch])
        net.seen.append((seconds, rows))
        seconds += 100.0 if begin < work.window else 0.5
    tokens = sum(map(len, work.rows[16:32]))
    assert work.tokens_per_second(net) == pytest.approx(tokens / 2.0)


def test_the_table_shows_deviations_speeds_and_errors() -> None:
    keys = {key: 0.25 for *_, key in table.COLUMNS}
    found = {
        "lightning": {
            "ranks": {"1": {"versions": {}, "results": {"Lightning": keys}}},
            "rounds": [{"results": {"Lightning": 100.0}}],
        },
        "other": {
            "ranks": {"1": {"results": {"Other": {**keys, table.COLUMNS[0][2]: "X"}}}},
            "rounds": [{"results": {"Other": 250.0}}],
        },
        "broken": {"ranks": {"1": {"failed": "a.log"}}, "rounds": []},
    }
    rows = table.markdown(found, {"other": "none"}).splitlines()
    assert "| Lightning | 25% | 25% | – | – | 25% | 25% | 100 | 1.00 |" in rows
    assert "| Other | error | 25% | – | – | 25% | 25% | 250 | 2.50 |" in rows
    assert "| broken | failed: see a.log |" in rows
    assert table.written(3.1151) == "312%"
    assert table.written(2e-6) == "2e-06"
