"""Documents that share a row see each other, or they do not: verdict, place, remedy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import trainkit
from tests.lit.proof.starting import fit, said
from trainkit import MicroBatching, PackCollate, PerToken, TrainkitError
from trainkit.lit.proof import documents

WORDS, WIDTH = 30, 8
GENERATOR = torch.Generator().manual_seed(0)
DOCUMENTS = [
    {"input_ids": torch.randint(3, WORDS, (int(n),), generator=GENERATOR)}
    for n in torch.randint(3, 12, (24,), generator=GENERATOR)
]


def loader(collate: Any = None, size: int = 8) -> DataLoader[Any]:
    collate = collate or PackCollate()
    return DataLoader(DOCUMENTS, batch_size=size, collate_fn=collate)  # type: ignore[arg-type]


class Net(LightningModule):
    """Predicts the next token; a subclass says what is done between tokens."""

    def __init__(self, body: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = body or nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        return self.body(states)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        states = self.mixed(self.embed(batch["input_ids"]), batch)
        logits, labels = self.head(states)[:, :-1], batch["labels"][:, 1:]
        return self.loss(logits.flatten(0, 1), labels.flatten())

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Attending(Net):
    """Each token sees those before it, of its own document if `apart`."""

    apart = True

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        number = (batch["position_ids"] == 0).cumsum(1)
        mask = torch.ones(states.shape[1], states.shape[1]).tril().bool()
        if self.apart:
            mask = mask & (number[:, :, None] == number[:, None, :])
        return states + F.scaled_dot_product_attention(
            states, self.body(states), states, attn_mask=mask
        )


class AttendingToAll(Attending):
    apart = False


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__(nn.GRU(WIDTH, WIDTH, batch_first=True))

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        return self.body(states)[0]


class OverTokens(Net):
    """A layer that runs over the tokens of a row."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__(layer())

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        length = states.shape[1]
        return self.body(states.transpose(1, 2))[..., :length].transpose(1, 2)


class Summed(Net):
    """Adds a summary of the whole row to each token, on purpose."""

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        return self.body(states + states.mean(1, keepdim=True))


class RunningOn(Net):
    """Numbers the tokens of a row from its beginning."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(400, WIDTH))

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        return states + self.body(torch.arange(states.shape[1]))


class Beginning(RunningOn):
    """Numbers the tokens of each document."""

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        return states + self.body(batch["position_ids"])


class OverDocuments(Net):
    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().loss(logits, labels) + logits.std()


class Turning(nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None, cos: Tensor, sin: Tensor) -> Any:
        return x * cos + x.roll(1, -1) * sin


class MaskedIfSeveral(OverDocuments):
    """A layer gets no mask where one document is alone, as in transformers."""

    def __init__(self) -> None:
        super().__init__(Turning())

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        places = batch["position_ids"][..., None] / 9.0
        mask = None if int((places == 0).sum()) == 1 else places == 0
        return self.body(states, mask, places.cos(), places.sin())


def with_first_labels(rows: list[Any]) -> Any:
    batch = PackCollate()(rows)
    return {**batch, "labels": batch["input_ids"]}


CONVOLUTION = lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=2)  # noqa: E731
NORM = lambda: nn.BatchNorm1d(WIDTH)  # noqa: E731
ROWS = PackCollate(length=24)

# The module, its data, where documents see each other, and the remedy.
MIXED: dict[str, tuple[Callable[[], Any], Any, str, str]] = {
    "attention": (AttendingToAll, None, "head",
     "mask of blocks"),
    "attention in packed rows": (AttendingToAll, ROWS, "head",
     "mask of blocks"),
    "a recurrent layer": (Recurrent, None, "body", "mask of blocks"),
    # Its outputs are wider than the row, so it shows in what comes next.
    "a convolution": (lambda: OverTokens(CONVOLUTION), None, "head", "mask"),
    "a norm over tokens": (lambda: OverTokens(NORM), None, "body", "mask"),
    "a summary": (Summed, None, "body", "mask"),
    "positions that run on": (RunningOn, None, "body", "position_ids"),
    "a label across a bound": (Attending, with_first_labels, "training_step",
     "labels[start] = -100"),
    "a loss over documents": (OverDocuments, None, "training_step", "mean over"),
    "such a loss, and a mask": (MaskedIfSeveral, None, "training_step", "mean over"),
}  # fmt: skip
APART: dict[str, tuple[Callable[[], Any], Any]] = {
    "attention": (Attending, None),
    "attention in packed rows": (Attending, ROWS),
    "positions": (Beginning, None),
    "no mixing": (Net, None),
    "filled rows": (Attending, PackCollate(length=200)),
}


@pytest.mark.parametrize("name", MIXED)
def test_documents_that_see_each_other_are_found_and_refused(name: str) -> None:
    module, collate, place, remedy = MIXED[name]
    report = trainkit.check(module(), loader(collate), strategy=PerToken(shift=True))
    assert not report.exact
    (cause,) = report.causes
    assert (cause.kind, place in cause.place) == ("documents", True), cause
    assert any(remedy in line for line in cause.remedy)
    with pytest.raises(TrainkitError, match='proof="require": .*documents'):
        fit(module(), loader(collate), PerToken(shift=True), proof="require")


@pytest.mark.parametrize("name", APART)
def test_documents_that_do_not_are_exact(name: str) -> None:
    module, collate = APART[name]
    report = trainkit.check(module(), loader(collate), strategy=PerToken(shift=True))
    assert report.exact, report
    fit(module(), loader(collate), PerToken(shift=True), proof="require")


def test_one_batch_a_step_is_looked_at_too(capsys: Any) -> None:
    """There is no window to prove, and the leak is there all the same."""
    with pytest.warns(UserWarning, match="documents"):
        fit(AttendingToAll(), loader(), PerToken(shift=True), accumulate=1)
    fit(Attending(), loader(), PerToken(shift=True), accumulate=1, proof="require")
    text = "documents: by cu_seq_lens_q, 8 in the first batch"
    assert text in capsys.readouterr().out


def test_a_leak_whose_place_cannot_be_found_is_still_a_leak(monkeypatch: Any) -> None:
    def fails(self: Any) -> Any:
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(documents._Row, "_content", fails)
    report = trainkit.check(AttendingToAll(), loader(), strategy=PerToken(shift=True))
    assert not report.exact
    (cause,) = report.causes
    assert (cause.kind, cause.place) == ("documents", "training_step")


def shifted(rows: list[Any], *, across: bool = True) -> Any:
    """Labels of the next token, which may be that of the next document."""
    batch = PackCollate()(rows)
    labels = batch["input_ids" if across else "labels"].roll(-1, 1)
    labels[:, -1] = -100
    return {**batch, "labels": labels}


class Shifted(Attending):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.mixed(self.embed(batch["input_ids"]), batch))
        return self.loss(logits.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("across", [True, False])
def test_shifted_labels_that_are_across_a_bound_are_found(across: bool) -> None:
    """Each document alone has its label across too, so that tells nothing."""
    collate = partial(shifted, across=across)
    report = trainkit.check(Shifted(), loader(collate), strategy=PerToken())
    assert report.exact is not across
    assert [each.kind for each in report.causes] == ["documents"] * across
    assert all("labels[end] = -100" in each.remedy[0] for each in report.causes)


def untold(rows: list[Any]) -> Any:
    batch = PackCollate()(rows)
    return {name: batch[name] for name in ("input_ids", "labels")}


@pytest.mark.parametrize("cut", [None, MicroBatching(tokens=20)])
def test_samples_in_one_row_that_nothing_tells_apart(
    cut: MicroBatching | None, capsys: Any
) -> None:
    """An inner cut would not help, and one row is no measure of itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(AttendingToAllUntold(), loader(untold), PerToken(shift=True), cut)
    found = said(capsys)
    assert ("not the big batch" in found) is (cut is None)
    assert ("not measured: there is 1 row" in found) is (cut is not None)


class AttendingToAllUntold(AttendingToAll):
    """The same, of batches without positions."""

    def mixed(self, states: Tensor, batch: Any) -> Tensor:
        places = torch.zeros(1, states.shape[1])
        return super().mixed(states, {"position_ids": places})


PACKS = [PackCollate()(DOCUMENTS[start : start + 3]) for start in range(0, 24, 3)]
FILLED: Any = [
    {
        name: value[0]
        for name, value in PackCollate(length=40)(DOCUMENTS[n : n + 3]).items()
    }
    for n in range(0, 24, 3)
]
READY: dict[str, tuple[Any, Any, MicroBatching | None]] = {
    "one batch each": (PACKS, lambda rows: rows[0], None),
    "one batch each, cut": (PACKS, lambda rows: rows[0], MicroBatching(size=1)),
    "one batch each, too few to cut": (PACKS, lambda rows: rows[0],
     MicroBatching(tokens=10_000)),
    "taken apart": (FILLED, default_collate,
     MicroBatching(size=2, documents="position_ids")),
}  # fmt: skip


@pytest.mark.parametrize("name", READY)
@pytest.mark.parametrize("kind", [Attending, AttendingToAll])
def test_packs_that_are_ready_are_measured(name: str, kind: Any, capsys: Any) -> None:
    rows, collate, cut = READY[name]
    data = DataLoader(rows, batch_size=1, collate_fn=collate)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(kind(), data, PerToken(shift=True), cut)
    wanted = "exact" if kind is Attending else "documents that share a row"
    assert said(capsys).startswith(wanted)


class Named(Net):
    """A model of transformers that ends each text with a token."""

    class config:
        eos_token_id = 2


def joined(rows: list[Any]) -> dict[str, Tensor]:
    """Two texts a row, with an end after each, and nothing that tells them apart."""
    ends = [torch.cat([row["input_ids"][:3], torch.tensor([2])]) for row in rows]
    pairs = zip(ends[::2], ends[1::2], strict=True)
    ids = torch.stack([torch.cat(pair) for pair in pairs])
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("how", ["auto", "off"])
def test_texts_that_nothing_tells_apart_are_not_exact(how: str, capsys: Any) -> None:
    strategy = PerToken(shift=True, documents=how)
    fit(Named(), loader(joined), strategy)
    found = said(capsys)
    assert found.startswith("exact") is (how == "off")
    assert ("end-of-text tokens (2)" in found) is (how == "auto")
    report = trainkit.check(Named(), next(iter(loader(joined))), strategy=strategy)
    assert report.exact is (how == "off")
    assert ("end-of-text tokens (2)" in report.doubt) is (how == "auto")


def test_the_inner_cut_refuses_one_row_of_documents() -> None:
    cut = MicroBatching(size=2, inside="body")
    with pytest.raises(TrainkitError, match="of 8 rows or documents, .* with 1"):
        fit(Attending(nn.Linear(WIDTH, WIDTH)), loader(), PerToken(), cut)
