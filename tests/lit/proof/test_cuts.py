"""The cuts of a verdict: the run's own, the one that tells most, and the finest."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import DataLoader

from tests.lit.measure.test_no_trace import Log
from tests.lit.proof import zoo
from tests.lit.proof.test_check import check
from tests.lit.proof.zoo import Tokens, token_loader
from trainkit import MicroBatching, PerToken


@pytest.mark.parametrize(
    ("micro_batches", "sizes"),
    [
        (None, (4,) * 6),  # loader batches
        (MicroBatching(size=5), (5, 5, 5, 5, 4)),
        (MicroBatching(size=64), None),
        (MicroBatching(), None),
    ],
)
def test_the_cut_of_the_run_is_measured_first(micro_batches: Any, sizes: Any) -> None:
    report = check(
        Tokens(), token_loader(), strategy=PerToken(), micro_batches=micro_batches
    )
    assert report.exact
    names = [cut.name for cut in report.cuts]
    assert names[-3:] == ["parts", "single rows", "plain accumulation"]
    assert ("the run's cut" in names) == (sizes is not None)
    if sizes is not None:
        assert sorted(report.cuts[0].sizes) == sorted(sizes)


def test_a_budget_of_tokens_cuts_as_in_the_run() -> None:
    cut = MicroBatching(tokens=40)
    report = check(Tokens(), token_loader(), strategy=PerToken(), micro_batches=cut)
    first = report.cuts[0]
    assert first.name == "the run's cut"
    assert sum(first.sizes) == 24
    assert len(set(first.sizes)) > 1
    assert max(first.sizes) * 3 <= 40


@pytest.mark.parametrize("collates", [True, False])
def test_rows_of_unlike_lengths_are_taken(collates: bool) -> None:
    """The short ones come first in the data, and the first 8 are all short."""
    rows = sorted(zoo.sequences(60), key=lambda row: len(row["ids"]))
    data = DataLoader(rows, batch_size=4, collate_fn=zoo.padded)  # type: ignore[arg-type]
    widths = Log()

    class Looks(Tokens):
        def features(self, batch: dict[str, Any]) -> Any:
            widths.append(batch["ids"].shape[1])
            return super().features(batch)

    report = check(
        Looks(), data if collates else zoo.padded(rows), strategy=PerToken(), rows=8
    )
    assert report.exact
    assert report.num_rows == 8
    assert max(widths.entries) == 11
    assert min(widths.entries) == 3
