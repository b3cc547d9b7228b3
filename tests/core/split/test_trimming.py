"""No column is trimmed that holds information."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.core.split.common import Side, mask_of, ragged
from trainkit import PerToken, TrainkitError, Uniform
from trainkit.core.split.cutting import Cutter
from trainkit.core.split.micro_batching import MicroBatching

LENGTHS = [5, 2, 7, 1]


def cut(batch: Any, cutter: Cutter | None = None, **options: Any) -> list[Any]:
    """The batches of one row each, in the order of the rows."""
    cutter = cutter or Cutter(MicroBatching(**{"size": 1, **options}), PerToken())
    return [m.batch for m in sorted(cutter.cut(batch), key=lambda micro: micro.rows)]


def cut_whole(
    batch: Any, text: str, cutter: Cutter | None = None, **options: Any
) -> None:
    """Nothing is trimmed, and this is said."""
    with pytest.warns(UserWarning, match=text):
        parts = cut(batch, cutter, **options)
    for row, part in enumerate(parts):
        for name, value in batch.items():
            assert torch.equal(torch.as_tensor(part[name]), value[row : row + 1])


def columns(batches: list[Any], field: str) -> list[int]:
    return [batch[field].shape[1] for batch in batches]


def test_constant_padding_and_equal_rows_are_trimmed() -> None:
    batch = ragged(LENGTHS)
    batch["positions"] = torch.arange(7).expand(4, 7)
    batch["clipped"] = (batch["attention_mask"].cumsum(1) - 1).clone()
    batch["nan"] = torch.randn(4, 7).masked_fill(batch["ids"] == 0, float("nan"))
    batch["deep"] = torch.randn(4, 7, 3) * batch["attention_mask"].unsqueeze(2)
    batch["array"] = batch["ids"].numpy()
    trimmed = cut(batch)
    for field in batch:
        assert columns(trimmed, field) == LENGTHS
    assert isinstance(trimmed[0]["array"], np.ndarray)
    assert trimmed[1]["positions"].tolist() == [[0, 1]]
    for row, length in enumerate(LENGTHS):
        assert torch.equal(trimmed[row]["deep"], batch["deep"][row : row + 1, :length])


def test_tensors_of_other_widths_and_of_no_width_are_not_trimmed() -> None:
    batch = ragged(LENGTHS)
    batch["features"] = torch.randn(4, 6)
    batch["weight"] = torch.randn(4)
    trimmed = cut(batch)
    assert columns(trimmed, "features") == [6] * 4
    assert all(each["weight"].shape == (1,) for each in trimmed)


def test_batch_with_values_in_the_padding_is_not_trimmed() -> None:
    batch = {**ragged(LENGTHS), "features": torch.randn(4, 7)}
    cut_whole(
        batch,
        r"field 'features' holds values where.*features: float32\[4, 7\].*ragged=\{"
        r"'features': 1\}\), \{'features': \(\)\} if.*lengths=.*trim=False",
    )
    trimmed = cut(batch, ragged={"features": ()})
    assert columns(trimmed, "features") == [7] * 4
    assert columns(trimmed, "ids") == LENGTHS
    assert columns(cut(batch, ragged={"features": 1}), "features") == LENGTHS
    assert columns(cut(batch, trim=False), "ids") == [7] * 4


def test_each_batch_is_looked_at_anew_and_named_once() -> None:
    cutter = Cutter(MicroBatching(size=1), PerToken())
    tail = {**ragged(LENGTHS), "decoder": ragged(LENGTHS, seed=1)["ids"]}
    assert columns(cut(tail, cutter), "decoder") == LENGTHS
    full = {**ragged(LENGTHS), "decoder": torch.randint(1, 9, (4, 7))}
    cut_whole(full, "field 'decoder' holds values", cutter)
    assert columns(cut(full, cutter), "ids") == [7] * 4  # said once
    assert columns(cut(tail, cutter), "ids") == LENGTHS


def test_budget_counts_a_batch_that_is_not_trimmed_as_full() -> None:
    batch = {**ragged(LENGTHS), "features": torch.randn(4, 7)}
    cutter = Cutter(MicroBatching(tokens=14), PerToken())
    with pytest.warns(UserWarning, match="field 'features' holds values"):
        micros = cutter.cut(batch)
    assert [(m.padded, m.real, m.trimmed) for m in micros] == [(14, 7, 0), (14, 8, 0)]
    # Negative control: without the features more rows fit.
    assert [m.padded for m in cutter.cut(ragged(LENGTHS))] == [14, 4]


def test_field_that_was_never_ragged_is_not_so_by_chance() -> None:
    cutter = Cutter(MicroBatching(size=1), PerToken())
    cut({**ragged(LENGTHS), "features": torch.zeros(4, 6)}, cutter)
    chance = {**ragged([6, 2, 3, 1]), "features": torch.zeros(4, 6)}
    assert columns(cut(chance, cutter), "features") == [6] * 4
    # Negative control: seen first in that batch, it looks ragged.
    assert columns(cut(chance), "features") == [6, 2, 3, 1]


def test_field_that_was_ragged_by_chance_is_not_so_later() -> None:
    cutter = Cutter(MicroBatching(size=1), PerToken())
    cut({**ragged(LENGTHS), "features": torch.zeros(4, 7)}, cutter)
    later = {**ragged([9, 2, 3, 1]), "features": torch.zeros(4, 7)}
    trimmed = cut(later, cutter)
    assert columns(trimmed, "features") == [7] * 4
    assert columns(trimmed, "ids") == [9, 2, 3, 1]


def test_mask_that_counts_what_the_lengths_leave_out_is_no_padding() -> None:
    batch = {**ragged(LENGTHS), "y": torch.zeros(4, 7), "y_mask": torch.ones(4, 7)}
    cut_whole(batch, "field 'y_mask' holds values")
    batch["y_mask"][1, 3:] = 0  # columns of another row still count
    cut_whole(batch, "field 'y_mask' holds values")
    # Negative control: a mask that is true where rows are padding.
    batch["y_mask"] = 1.0 - batch["attention_mask"]
    assert columns(cut(batch), "y_mask") == LENGTHS


def test_rows_that_are_alike_and_as_long_are_no_positions() -> None:
    batch = ragged([3, 3])
    batch = {k: torch.nn.functional.pad(v, (0, 2)) for k, v in batch.items()}
    batch["labels"][:, 3:] = -100
    batch["positions"] = torch.arange(5).expand(2, 5)
    assert columns(cut(batch), "ids") == [3, 3]
    batch["decoder"] = torch.tensor([4, 2, 7, 1, 3]).expand(2, 5)
    cut_whole(batch, "field 'decoder' holds values")


def test_batch_without_padding_decides_nothing() -> None:
    cutter = Cutter(MicroBatching(size=1), PerToken())
    cut({**ragged([7] * 4), "features": torch.randn(4, 7)}, cutter)
    trimmed = cut({**ragged([9, 2, 3, 1]), "features": torch.randn(4, 7)}, cutter)
    assert columns(trimmed, "features") == [7] * 4


def test_one_row_is_not_taken_for_rows_that_are_all_alike() -> None:
    mask = mask_of([3], padded_length=7)
    batch = {"attention_mask": mask, "features": torch.arange(7.0).unsqueeze(0)}
    cut_whole(batch, "field 'features' holds values")


def test_further_dimensions_are_trimmed_where_named() -> None:
    batch = ragged(LENGTHS)
    mask = batch["attention_mask"].bool()
    batch["mask4d"] = (mask[:, None, :] & mask[:, :, None]).unsqueeze(1)
    batch["pairs"] = torch.randn(4, 7, 7)
    cut_whole(
        batch,
        r"field 'mask4d' has a further dimension.*\[4, 1, 7, 7\], dimension 2 and 3.*"
        r"ragged=\{'mask4d': \(2, 3\)\}\)",  # what it proposes is what is meant
    )
    cut_whole(
        batch,
        r"field 'pairs' has.*\{'pairs': \(1, 2\)\}.*\{'pairs': 1\} if only",
        ragged={"mask4d": (2, 3)},
    )
    trimmed = cut(batch, ragged={"mask4d": (2, 3), "pairs": -1})
    for row, length in enumerate(LENGTHS):
        assert trimmed[row]["mask4d"].shape == (1, 1, length, length)
        assert trimmed[row]["pairs"].shape == (1, length, length)
        assert trimmed[row]["mask4d"].is_contiguous()
    only_first = cut(batch, ragged={"mask4d": (2, 3), "pairs": 1})
    assert only_first[0]["pairs"].shape == (1, 5, 7)


def test_named_dimension_of_another_length_is_refused() -> None:
    batch = {**ragged(LENGTHS), "mask4d": torch.zeros(4, 1, 1, 7)}
    with pytest.raises(TrainkitError, match=r"dimension 2 of field 'mask4d'.*is 1"):
        cut(batch, ragged={"mask4d": (2, 3)})
    with pytest.raises(TrainkitError, match=r"path 'nothing': the batch has nothing"):
        cut(batch, ragged={"nothing": 2})


def test_shared_field_of_as_many_rows_is_not_trimmed() -> None:
    batch = {**ragged(LENGTHS), "table": torch.randn(4, 7)}
    for each in cut(batch, shared=["table"]):
        assert each["table"] is batch["table"]


def test_batch_whose_targets_count_in_the_padding_is_not_trimmed() -> None:
    batch = ragged(LENGTHS)
    batch["labels"] = batch["ids"].clone()  # 0 in the padding, where -100 was meant
    cut_whole(batch, r"field 'labels' holds targets that count where.*-100")
    # Negative control: for a strategy that does not count them they are padding.
    cutter = Cutter(MicroBatching(size=1), PerToken(ignore_index=0))
    assert columns(cut(batch, cutter), "labels") == LENGTHS
    cutter = Cutter(MicroBatching(size=1), Uniform())
    assert columns(cut(batch, cutter), "labels") == LENGTHS


def test_batch_whose_first_target_is_predicted_from_padding_is_not_trimmed() -> None:
    cutter = Cutter(MicroBatching(size=1), PerToken(shift=True))
    batch = ragged(LENGTHS, side="left")
    cut_whole(
        batch, "field 'labels' is padded on the left, and with shift=True", cutter
    )
    firsts = batch["attention_mask"].argmax(1)
    batch["labels"][torch.arange(4), firsts] = -100
    assert columns(cut(batch, cutter), "labels") == LENGTHS
    right = Cutter(MicroBatching(size=1), PerToken(shift=True))
    assert columns(cut(ragged(LENGTHS), right), "labels") == LENGTHS


def test_left_padding_goes_from_the_left() -> None:
    batch = ragged([4, 1, 2], side="left")
    micros = Cutter(MicroBatching(size=2), PerToken()).cut(batch)
    assert [micro.rows for micro in micros] == [[0], [1, 2]]
    assert torch.equal(micros[1].batch["ids"], batch["ids"][1:, 2:])


def test_untrimmed_rows_count_as_full_in_the_budget() -> None:
    batch = ragged(LENGTHS)
    micros = Cutter(MicroBatching(tokens=14, trim=False), PerToken()).cut(batch)
    assert [(micro.padded, micro.real) for micro in micros] == [(14, 7), (14, 8)]
    assert all(micro.batch["ids"].shape == (2, 7) for micro in micros)


@pytest.mark.parametrize("rows", [[0, 1], [1, 3], [2], [0, 1, 2, 3]], ids=str)
def test_pair_is_the_same_rows_trimmed_and_untrimmed(rows: list[int]) -> None:
    batch = {**ragged(LENGTHS), "weight": torch.arange(4.0)}
    trimmed, whole = Cutter(MicroBatching(size=1), PerToken()).pair(batch, rows)
    longest = max(LENGTHS[row] for row in rows)
    for name, value in batch.items():
        assert torch.equal(whole[name], value[rows])
        assert torch.equal(trimmed[name], value[rows][..., :longest])


def padded(side: Side, pad: float, rows: int) -> dict[str, Any]:
    mask = mask_of([7] + [6] * rows, side=side)
    values = torch.arange(7.0 * len(mask)).view(len(mask), 7) + 3
    return {"attention_mask": mask, "field": torch.where(mask == 1, values, pad)}


@pytest.mark.parametrize("side", ["left", "right"])
def test_few_entries_are_padding_only_if_they_stand_for_nothing(side: Side) -> None:
    """One column of one row always holds one value."""
    for pad in (0.0, -100.0, float("nan"), float("-inf")):
        assert columns(cut(padded(side, pad, 1)), "field") == [7, 6]
    assert columns(cut(padded(side, 50256.0, 1)), "field") == [7, 7]  # no word of it
    assert columns(cut(padded(side, 50256.0, 8)), "field") == [7] + [6] * 8


def test_rows_padded_with_values_of_their_own_are_not_trimmed() -> None:
    batch = ragged(LENGTHS)
    own = torch.arange(4).unsqueeze(1) + 1
    batch["decoder"] = torch.where(batch["ids"] == 0, own, batch["ids"])
    cut_whole(batch, "field 'decoder' holds values")
    batch["decoder"] = own.expand(
        4, 7
    )  # the same in all columns, as a speaker's number
    assert columns(cut(batch), "decoder") == LENGTHS


def test_weights_that_are_all_alike_count_everywhere() -> None:
    cut_whole({**ragged(LENGTHS), "w": torch.full((4, 7), 0.5)}, "field 'w' holds")
