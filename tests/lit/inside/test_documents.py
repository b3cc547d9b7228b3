"""A fit whose submodule runs in chunks of documents is plain torch's on whole rows."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.core.inside.test_documents import WORDS, Llama, Reader, loss, means
from tests.helpers import NAIVE, deviation
from tests.lit.inside.common import fit
from trainkit import MicroBatching, PackCollate, PerSample, TrainkitError, check

GENERATOR = torch.Generator().manual_seed(3)
DOCUMENTS: Any = [
    {"input_ids": torch.randint(0, WORDS, (int(n),), generator=GENERATOR)}
    for n in torch.randint(2, 12, (48,), generator=GENERATOR)
]


class Contrastive(pl.LightningModule):
    """Each document of a row against all others, and its tokens.

    Args:
        net: what runs in chunks.
        told: the name of the argument that tells documents apart.
    """

    def __init__(self, net: Any = None, told: str = "cu_seqlens") -> None:
        super().__init__()
        self.net, self.told = net or Reader(), told

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, ends = batch["input_ids"], batch["cu_seq_lens_q"]
        if isinstance(self.net, Reader):
            states, pooled = self.net(ids, **{self.told: ends})
        else:
            given = {self.told: batch[self.told]}
            states = self.net.body(input_ids=ids, **given).last_hidden_state
            pooled = means(states, ends.diff().tolist())
        return loss(self.net.head, states, pooled, ids)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


def llama() -> Contrastive:
    net = Llama(use_cache=False, attn_implementation="sdpa")
    return Contrastive(net, "position_ids")


def collated(rows: Any) -> Any:
    batch = PackCollate()(rows)
    return {**batch, "ends": batch["cu_seq_lens_q"]}


def loader() -> DataLoader[Any]:
    return DataLoader(DOCUMENTS, batch_size=12, collate_fn=collated)  # type: ignore[arg-type]


def trained(module: Any, cut: MicroBatching, by: Any = None) -> Any:
    fit(module, cut, by=by, loader=loader())
    return module


def by_hand(module: Any) -> Any:
    optimizer = module.configure_optimizers()
    for batch in [*loader()] * 2:
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return module


@pytest.mark.parametrize(
    ("make", "path"), [(Contrastive, "net"), (llama, "net.body"), (llama, "auto")]
)
@pytest.mark.parametrize("limit", [{"tokens": 20}, {"size": 5}])
def test_a_fit_is_plain_torch_on_whole_rows(
    make: Any, path: str, limit: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    start, cut = make(), MicroBatching(inside=path, **limit)
    whole = by_hand(copy.deepcopy(start))
    found = trained(copy.deepcopy(start), cut)
    assert "proof: exact on 7 of your rows: off by " in capsys.readouterr().out
    assert deviation(found, whole, start) <= 1e-10
    assert check(start, loader(), micro_batches=cut).exact


@pytest.mark.filterwarnings("ignore:proof. .*the loss does")
def test_a_cut_of_the_batch_is_off() -> None:
    start = Contrastive()
    whole = by_hand(copy.deepcopy(start))
    cut = trained(copy.deepcopy(start), MicroBatching(tokens=20), PerSample())
    assert deviation(cut, whole, start) > NAIVE


@pytest.mark.parametrize("of", ["cut", "strategy"])
def test_what_tells_documents_apart_can_be_named(of: str, capsys: Any) -> None:
    how: dict[str, Any] = {"documents": "ends"}
    cut = MicroBatching(size=5, inside="net", **(how if of == "cut" else {}))
    by = PerSample(**how) if of == "strategy" else None
    module = trained(Contrastive(told="ends"), cut, by)
    assert len(module.net.widths) > 2 * 4 * 3
    assert "chunks of at most 5 documents or packed rows," in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:proof. documents that share a row")
@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Contrastive(Reader("mean")), "net: .*chunks of documents: .*on other docu"),
        (Contrastive(told="ends"), "of 12 rows or documents, .*told apart by an arg"),
    ],
)
def test_a_leak_or_what_is_not_told_is_refused(module: Any, words: str) -> None:
    with pytest.raises(TrainkitError, match=words):
        trained(module, MicroBatching(tokens=20, inside="net"))


def test_a_submodule_that_is_not_called_is_not_said_to_lack_documents() -> None:
    class Around(Contrastive):
        """Calls the function of the class, past the module."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            ids, ends = batch["input_ids"], batch["cu_seq_lens_q"]
            states, pooled = Reader.forward(self.net, ids, cu_seqlens=ends)
            return loss(self.net.head, states, pooled, ids)

    with pytest.warns(UserWarning, match="net ran whole. .* calls it with 0. Only"):
        trained(Around(), MicroBatching(tokens=20, inside="net"))
