"""The few rows of a proof: how they are chosen, and what they would not show."""

from __future__ import annotations

import contextlib
import random
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from tests.lit.proof.starting import fit, images, said, tokens
from tests.zoo import causes, wrongs
from tests.zoo.causes import Images, Tokens
from tests.zoo.modules import Stream
from trainkit import MicroBatching, PerSample, PerToken, TrainkitError
from trainkit.lit.callback.base import is_rehearsal
from trainkit.lit.proof import subject as proof_subject
from trainkit.lit.proof.draws import INDEXING, refuse_ignored
from trainkit.lit.proof.rows import FewRows, chosen_parts, few_rows


def unlabelled() -> Any:
    """A third of the images have no label."""
    loader = images(4)
    for row in range(0, len(loader.dataset), 3):
        loader.dataset[row][1].fill_(-100)
    return loader


def losses(module: Any, maps: Tensor, batch: Any) -> Tensor:
    logits = module.head(maps.mean((2, 3)))
    return F.cross_entropy(logits, batch[1], reduction="none")


def over_labels(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return losses(module, maps, batch).sum() / (batch[1] != -100).sum().clamp(min=1)


def over_rows(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return losses(module, maps, batch).mean()


@pytest.mark.parametrize("cut", [None, MicroBatching(size=2)])
def test_a_loss_may_count_rows_that_weigh_nothing(cut: MicroBatching | None) -> None:
    """Of rows that all weigh something, both losses divide by the same number."""
    fit(Images(over_labels), unlabelled(), PerToken(1), cut, proof="require")
    with pytest.raises(TrainkitError, match=r"by what PerSample\(\) counts"):
        fit(Images(over_rows), unlabelled(), PerToken(1), cut, proof="require")


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_parameters_of_no_module_are_all_compared(order: list[int]) -> None:
    with pytest.raises(TrainkitError, match="not the big batch"):
        fit(wrongs.Outside(order), images(4), PerSample(), proof="require")


class Sampling(Images):
    """Draws several times for each row, and the draws come first."""

    def __init__(self, number: int) -> None:
        super().__init__(self.of_draws)
        self.number = number

    def of_draws(self, module: Any, maps: Tensor, batch: Any) -> Tensor:
        means = maps.mean((2, 3))
        noise = torch.randn(self.number, *means.shape)
        return (means + noise).square().mean()


@pytest.mark.parametrize("number", [5, 6])
def test_as_many_draws_as_rows_are_not_those_of_rows(number: int, capsys: Any) -> None:
    """Six rows are rehearsed."""
    fit(Sampling(number), images(5), PerSample())
    assert said(capsys).startswith(
        "not measured: it draws numbers that are not laid out by row"
    )


def over_groups(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return losses(module, maps, batch).sum() / len(batch[2].unique())


@pytest.mark.parametrize("size", [1, 3])
def test_rows_beside_each_other_may_belong_together(size: int) -> None:
    """The control: groups of one row."""
    rows: Any = [
        (image, label, torch.tensor(row // size))
        for row, (image, label, *_) in enumerate(images().dataset)
    ]
    refused = pytest.raises(TrainkitError, match="not the big batch")
    with refused if size > 1 else contextlib.nullcontext():
        loader = DataLoader(rows, batch_size=5)
        fit(Images(over_groups), loader, PerSample(), proof="require")


# ---- which parts are made of them ----------------------------------------------------


def over_classes(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return losses(module, maps, batch).sum() / len(batch[1].unique())


def test_a_loss_may_count_the_classes_of_its_rows() -> None:
    """Of rows of one class each, or of two each, they count as rows do."""
    with pytest.raises(TrainkitError, match="not the big batch"):
        fit(Images(over_classes), images(), PerSample(), proof="require")


@pytest.mark.parametrize("has_text", [False, True])
def test_parts_have_widths_of_their_own_where_rows_allow_it(has_text: bool) -> None:
    """Padding that is seen shows where widths differ. A text beside the tokens has a
    length of its own, and only what is collated makes a row wide."""
    lengths = [3] * 10 + [5, 7]
    ids = [torch.arange(1, 1 + length) for length in lengths]
    samples: Any = [
        {"ids": each, "labels": each, "text": " " * (50 + 7 * row % 12)}
        for row, each in enumerate(ids)
    ]
    loader = tokens(12, rows=samples)
    if has_text:
        rows = few_rows(loader, next(iter(loader)), None, PerSample(), 12)
    else:
        rows = FewRows.cut_from(next(iter(loader)), None, PerSample())
    parts = chosen_parts(rows, (1, 2, 3), PerSample())
    assert {max(lengths[row] for row in part) for part in parts} == {3, 5, 7}


@pytest.mark.parametrize("is_split", [False, True])
def test_parts_tell_labels_from_a_mask_if_two_rows_ignore_one(is_split: bool) -> None:
    """The control: where each label counts, no parts do."""
    mask, most = PerToken(mask="attention_mask"), dict[bool, float]()
    options = MicroBatching(size=3) if is_split else None
    for ignores in (True, False):
        apart = []
        for seed in range(24):
            draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
            rows: list[Any] = []
            for _ in range(13):
                size = (draw.randint(3, 9),)
                ids = torch.randint(1, 12, size, generator=generator)
                rows.append({"ids": ids, "labels": ids.clone()})
            for row in draw.sample(rows, 2 * ignores):
                row["labels"][0] = -100
            loader = tokens(13, rows=rows)
            few = few_rows(loader, causes.padded(rows), options, mask, 13)
            parts = chosen_parts(few, (3, 2, 2), mask)
            batches = [few.make(part) for part in parts]
            weights = torch.tensor(
                [[float(by.weight(each)) for by in (mask, PerToken())]
                 for each in batches]
            )  # fmt: skip
            shares = weights / weights.sum(0)
            apart.append(float((shares[:, 0] - shares[:, 1]).abs().max()))
        most[ignores] = min(apart)
    assert most[True] > 1e-3 > most[False]


def test_rows_are_chosen_by_what_the_cutter_makes_of_them(monkeypatch: Any) -> None:
    """Other parts of the same rows may count alike, where these do not."""
    ids, choose, parts = torch.arange(1, 7), proof_subject.chosen_parts, []
    counts = [(3, 3), (4, 2), (4, 3), (4, 3), (5, 4), (5, 4), (5, 4), (6, 6)]
    rows = [
        {"ids": ids[:n], "labels": torch.where(ids <= count, ids, -100)[:n]}
        for n, count in counts
    ]

    def noted(rows: Any, *how: Any, **options: Any) -> Any:
        found = choose(rows, *how, **options)
        parts.extend(sorted(counts[row][1] for row in part) for part in found)
        return found

    class Noting(Tokens):
        seen: ClassVar[list[list[int]]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if is_rehearsal(self.trainer):
                self.seen.append(sorted((batch["labels"] != -100).sum(1).tolist()))
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(proof_subject, "chosen_parts", noted)
    fit(Noting(), tokens(8, rows=rows), PerToken(), MicroBatching(size=1))
    assert sorted(map(len, parts)) == [1, 3, 3]
    assert sorted(Noting.seen[-3:]) == sorted(parts)


# ---- what they do not show -----------------------------------------------------------


class Probed(Images):
    """A probe with BatchNorm, whose gradient is a millionth of all."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__(causes.classified)
        self.probe = nn.Sequential(norm(8), nn.Linear(8, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pooled = self.net(batch[0]).detach().mean((2, 3))
        probe = F.cross_entropy(self.probe(pooled), batch[1])
        return 1e6 * super().training_step(batch, batch_idx) + probe


def test_a_small_share_of_the_gradient_may_be_wrong() -> None:
    """Adam moves it as far as any other."""
    fit(Probed(nn.LayerNorm), images(4), PerSample(), proof="require")
    with pytest.raises(TrainkitError, match="BatchNorm"):
        fit(Probed(), images(4), PerSample(), proof="require")


def test_functions_of_a_lambda_callback_are_rehearsed() -> None:
    def clip(trainer: Any, module: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 1e-3)

    clips = LambdaCallback(on_after_backward=clip)
    how: Any = {"callbacks": (clips,), "proof": "require"}
    with pytest.raises(TrainkitError, match="on_after_backward of LambdaCallback"):
        fit(Images(causes.classified), images(4), PerSample(), **how)


def test_draws_that_make_no_difference_here_are_named(capsys: Any) -> None:
    class Seldom(Images):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if float(torch.rand(())) < 1e-6:
                batch = [batch[0].roll(1, 0), *batch[1:]]
            return super().training_step(batch, batch_idx)

    fit(Seldom(causes.classified), images(4), PerSample())
    assert said(capsys).endswith("in float32; left out: random draws")


class Clipping(Precision):
    """A plugin of the user's, which a copy runs without."""


def test_later_batches_and_plugins_are_named(capsys: Any) -> None:
    rows: Any = DataLoader(Stream(list(images().dataset)), 4)
    fit(Images(causes.classified), rows, PerSample(), plugins=[Clipping()])
    assert said(capsys).endswith("left out: later batches, Clipping")


# ---- a label that is ignored by a number below zero is no index of a kernel ----------


TABLE, ROWS = torch.ones(3, 4), torch.ones(2, 3)
REFUSED: dict[str, Any] = {
    "embedding": lambda i: F.embedding(i, TABLE),
    "by name": lambda i: F.embedding(weight=TABLE, input=i),
    "a layer": lambda i: nn.Embedding.from_pretrained(TABLE)(i),
    "one hot": lambda i: F.one_hot(i, 3),
    "nanoGPT": lambda i: F.cross_entropy(ROWS, i, ignore_index=-1),
    "nll": lambda i: F.nll_loss(ROWS, i, ignore_index=-1),
    "margin": lambda i: F.multi_margin_loss(ROWS, i),
    "gather": lambda i: ROWS.gather(1, i[:, None]),
    "select": lambda i: torch.index_select(TABLE, 0, i - 1),
    "scatter": lambda i: torch.zeros(2, 3).scatter_(1, i[:, None], 1),
    "a column": lambda i: ROWS[torch.arange(2), i],
}
ALLOWED: dict[str, Any] = {
    "ignored": lambda i: F.cross_entropy(ROWS, i),
    "by place": lambda i: F.cross_entropy(ROWS, i.clamp(-1), None, None, -1),
    "chances": lambda i: F.cross_entropy(ROWS, ROWS.softmax(1) - 2),
    "a mask": lambda i: i[i != -100][:1],
    "from labels": lambda i: i.gather(0, torch.tensor([1])),
    "from the end": lambda i: TABLE[torch.tensor([0, -3])],
    "mapped": lambda i: torch.func.vmap(lambda n: TABLE[n])(torch.tensor([0, 2])),
}


class Refusing(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in INDEXING:
            refuse_ignored(func, args, kwargs or {}, -100)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", {**REFUSED, **ALLOWED})
def test_it_is_refused_before_the_kernel_gets_it(name: str) -> None:
    refused = pytest.raises(IndexError, match="got a label that does not count")
    with Refusing(), refused if name in REFUSED else contextlib.nullcontext():
        {**REFUSED, **ALLOWED}[name](torch.tensor([1, -100]))


class Speech(LightningModule):
    """A net with a CTC loss, which writes anywhere for a label below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self.head(batch["x"]).log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(batch["y"]),), 8)
        return F.ctc_loss(scores, batch["y"], frames, batch["lengths"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_labels_of_a_ctc_loss_are_never_below_zero(capsys: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    data: Any = [
        {
            "x": torch.randn(8, 3, generator=draw),
            "y": torch.randint(1, 5, (3,), generator=draw),
            "lengths": torch.tensor(1 + row % 3),
        }
        for row in range(24)
    ]
    fit(Speech(), DataLoader(data, batch_size=4), PerSample())
    text = said(capsys)
    assert text.startswith("not measured: these rows all count alike")
