"""What every micro-batch gets whole, and one of them writes into, is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer
from tests.lit.fronts import Plain, cut, plain_token_loss
from tests.lit.split.common import SEQUENCES, SIZES, START, Split, pad_and_mask
from trainkit import AccumulationCallback, PerToken
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.errors import TrainkitError
from trainkit.lit.split import shared_fields
from trainkit.lit.split.shared_fields import SharedFields

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")

SHARED = MicroBatching(size=4, shared=("prior", "nested", "array"))


def with_shared(samples: Any) -> dict[str, Any]:
    batch = pad_and_mask(samples)
    return {
        **batch,
        "prior": torch.full((13,), 0.5, dtype=torch.float64),
        "nested": {"scales": [torch.ones(13, dtype=torch.float64)], "count": 1},
        "number": torch.tensor(1.0, dtype=torch.float64),
        "array": np.ones(13),
        "name": "rows",
    }


def data() -> DataLoader[Any]:
    return DataLoader(
        SEQUENCES,  # type: ignore[arg-type]
        batch_sampler=cut(SEQUENCES, SIZES),
        collate_fn=with_shared,
    )


class Writing(Split):
    """Scales its loss by what is shared, and may write into that."""

    def __init__(self, where: str, cut: MicroBatching | None = SHARED) -> None:
        super().__init__(cut=cut)
        self.where = where

    def write(self, batch: Any) -> None:
        if self.where == "prior":
            batch["prior"] *= 1.5
        elif self.where == "nested.scales.0":
            batch["nested"]["scales"][0].mul_(1.5)
        elif self.where == "nested.count":
            batch["nested"]["count"] *= 2
        elif self.where == "number":
            batch["number"].mul_(1.5)
        elif self.where == "array":
            batch["array"] *= 1.5
        elif self.where == "rebound":  # in a dict that each micro-batch has for itself
            batch["prior"] = batch["prior"] * 1.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(batch)
        factor: Tensor = batch["prior"].mean() * batch["nested"]["scales"][0].mean()
        factor = factor * batch["number"] * batch["nested"]["count"]
        factor = factor * float(batch["array"].mean())
        return plain_token_loss(self.net, batch) * factor


WHERE = ["prior", "nested.scales.0", "nested.count", "number", "array"]


def text(where: str) -> str:
    copied = "deepcopy" if where in ("nested.count", "array") else "clone"
    return f"writes into the field '{where}', which is not cut.*{copied}"


@pytest.mark.parametrize("where", WHERE)
def test_a_shared_field_that_is_written_into_is_refused(where: str) -> None:
    with pytest.raises(TrainkitError, match=text(where)):
        trainer(1).fit(Writing(where), data())


def test_it_is_refused_for_a_foreign_module() -> None:
    class Foreign(Plain):
        where = "prior"
        write, training_step = Writing.write, Writing.training_step

    callback = AccumulationCallback(PerToken(), micro_batching=SHARED)
    with pytest.raises(TrainkitError, match=text("prior")):
        trainer(1, callbacks=[callback]).fit(Foreign(), data())


def test_without_the_look_the_steps_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedFields, "refuse_changed", lambda self: None)
    module, whole = Writing("prior"), Writing("prior", cut=None)
    for each in (module, whole):
        trainer(1).fit(each, data())
    assert deviation(module, whole, START) > NAIVE


class Copying(Writing):
    """Each micro-batch gets tensors of its own, as on a GPU."""

    def transfer_batch_to_device(
        self, batch: Any, device: Any, dataloader_idx: int
    ) -> Any:
        nested = {"scales": [batch["nested"]["scales"][0].clone()], "count": 1}
        return {**batch, "prior": batch["prior"].clone(), "nested": nested}


@pytest.mark.parametrize(
    ("made", "where", "how"),
    [
        (Writing, "", SHARED),
        (Writing, "rebound", SHARED),
        (Copying, "prior", SHARED),
        (Copying, "nested.scales.0", SHARED),
        (Copying, "nested.count", SHARED),
        (Writing, "prior", MicroBatching("auto", start=60, shared=SHARED.shared)),
        (Writing, "number", MicroBatching("auto", start=60, shared=SHARED.shared)),
        (Writing, "prior", MicroBatching(size=100, shared=SHARED.shared)),
    ],
)
def test_what_each_has_for_itself_may_be_written_into(
    made: Any, where: str, how: MicroBatching
) -> None:
    module, whole = made(where, cut=how), made(where, cut=None)
    for each in (module, whole):
        trainer(1).fit(each, data())
    assert deviation(module, whole, START) <= TOLERANCE[torch.float64]


def test_what_is_made_in_inference_mode_is_let_be() -> None:
    with torch.inference_mode():
        value = torch.ones(2)
    looked = SharedFields([shared_fields.Field("x", value)], with_arrays=True)
    looked.refuse_changed()
