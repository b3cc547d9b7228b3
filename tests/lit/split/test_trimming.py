"""Whether a model sees its padding is measured on the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.core.split.common import mask_of
from tests.helpers import deviation
from tests.lit.split.common import fit as fit_module
from tests.lit.split.short_of_memory import states
from tests.zoo.modules import Rows, hooked
from trainkit import AccumulationMixin, MicroBatching, PerSample, PerToken
from trainkit.lit.callback.base import is_rehearsal

SEES = "the model sees its padding"
LENGTHS = [7, 2, 12, 3, 5, 1, 9, 4]
TWO = MicroBatching(size=2)
CUTS = {"rows": TWO, "tokens": MicroBatching(tokens=30), "auto": MicroBatching("auto")}


def batch_of(lengths: list[int], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = mask_of(lengths, padded_length=14)
    ids = torch.randint(1, 9, mask.shape, generator=generator) * mask
    y = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    return {"ids": ids, "attention_mask": mask, "y": y}


FULL = batch_of([14] * 8, 3)
BATCHES = [batch_of(LENGTHS, 0), FULL, batch_of(LENGTHS[::-1], 1)]
FEW = [batch_of([3, 14, 14, 3], seed) for seed in range(2)]


def apart(batches: Sequence[Any]) -> list[list[Any]]:
    """Lists of samples, which are padded in each micro-batch."""
    return [
        [
            {k: v[i, :length] if v.ndim > 1 else v[i] for k, v in batch.items()}
            for i, length in enumerate(batch["attention_mask"].sum(1).tolist())
        ]
        for batch in batches
    ]


def joined(samples: Sequence[Any]) -> dict[str, Tensor]:
    columns = {k: [s[k] for s in samples] for k in samples[0]}
    return {
        k: pad_sequence(v, batch_first=True) if v[0].ndim else torch.stack(v)
        for k, v in columns.items()
    }


class Pooled(AccumulationMixin, Rows):
    """A number for each row, from its tokens."""

    accumulation = PerSample()
    terms: Any = None
    zero_head = False

    def __init__(self, cut: MicroBatching | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.micro_batching = cut
        if self.terms and cut is not None:
            self.accumulation = self.terms
        self.embed = nn.Embedding(9, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.head = nn.Linear(6, 1)
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=True)
        self.scale = nn.Parameter(torch.zeros(()))
        if self.zero_head:
            nn.init.zeros_(self.head.weight)
        del self.net
        self.double()

    def pooled(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return (hidden * mask).sum(1) / mask.sum(1)

    def hidden(self, batch: Any) -> Tensor:
        return self.embed(batch["ids"]).tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pooled = self.pooled(self.hidden(batch), batch["attention_mask"].unsqueeze(2))
        return F.mse_loss(self.head(pooled).squeeze(1), batch["y"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def convolved(self: Any, batch: Any) -> Tensor:
    return self.conv(self.embed(batch["ids"]).transpose(1, 2)).transpose(1, 2)


def branched(self: Any, batch: Any) -> Tensor:
    """A convolution that begins at 0."""
    hidden = Pooled.hidden(self, batch)
    return hidden + self.scale * self.conv(hidden.transpose(1, 2)).transpose(1, 2)


def mean_in_training(self: Any, hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.mean(1) if self.training else Pooled.pooled(self, hidden, mask)


def recomputed(self: Any, batch: Any) -> Any:
    """The backward pass runs parts of the forward pass again."""
    return checkpoint(partial(Pooled.hidden, self), batch, use_reentrant=False)


def differentiating(self: Any, batch: Any, batch_idx: int) -> Any:
    """Needs gradients in its step."""
    loss = Pooled.training_step(self, batch, batch_idx)
    (slope,) = torch.autograd.grad(loss, self.head.weight, create_graph=True)
    return loss + 0.1 * slope.square().mean().detach()


def by_term(self: Any, batch: Any) -> Any:
    """Every term is compared, also without a batch index."""
    loss, cut = Pooled.training_step(self, batch, 0), self.micro_batching
    return {"loss": {"a": 0 * loss, "b": loss}} if cut else loss


def masked(self: Any, batch: Any) -> Tensor:
    """A Transformer, whose fast path in eval mode is another computation."""
    padding = batch["attention_mask"] == 0
    return self.encoder(Pooled.hidden(self, batch), src_key_padding_mask=padding)


def noisy(self: Any, batch: Any) -> Tensor:
    hidden = Pooled.hidden(self, batch)
    return hidden + torch.randn_like(hidden)


def fit(module: Any, batches: Any = BATCHES, **options: Any) -> Any:
    data = DataLoader(batches, batch_size=None)
    return fit_module(module, data=data, **{"max_epochs": 1, **options})


def off(kind: Any, cut: MicroBatching, batches: Any = BATCHES) -> float:
    """From the weights that whole batches give."""
    fit(module := kind(cut), apart(batches) if cut.collate else batches)
    fit(whole := kind(None), batches)
    return deviation(module, whole, kind())


MeanOfAll = hooked(Pooled, pooled=lambda self, hidden, mask: hidden.mean(1))
BOTH_TERMS = {"training_step": by_term, "terms": {"a": PerSample(), "b": PerSample()}}
SEEING = {
    "convolution": hooked(Pooled, hidden=convolved),
    "mean of all": MeanOfAll,
    "zero head": hooked(MeanOfAll, zero_head=True),  # its first loss hides the rest
    "zero branch": hooked(Pooled, hidden=branched),
    "in training": hooked(Pooled, pooled=mean_in_training),
    "recomputing": hooked(MeanOfAll, hidden=recomputed),
    "differentiating": hooked(MeanOfAll, training_step=differentiating),
    "terms": hooked(MeanOfAll, **BOTH_TERMS),
}
MASKING = {
    "masked mean": Pooled,
    "differentiating": hooked(Pooled, training_step=differentiating),
    "transformer": hooked(Pooled, hidden=masked),
}


@pytest.mark.parametrize(("name", "cut"), [*zip(SEEING, cycle(CUTS))])
def test_model_that_sees_its_padding_is_not_trimmed(name: str, cut: str) -> None:
    """Trimmed without being measured, the control, it ends with other weights."""
    batches = [*BATCHES, *BATCHES]
    text = rf"{SEES}: without it, the gradient of some rows is off by"
    with pytest.warns(UserWarning, match=text):
        assert off(SEEING[name], CUTS[cut], batches) < 1e-12
    collated = MicroBatching(size=2, collate=joined)
    assert off(SEEING[name], collated, batches) > 1e-3


@pytest.mark.parametrize(("name", "cut"), [*zip(MASKING, cycle(CUTS))])
def test_model_that_masks_its_padding_is_trimmed(name: str, cut: str) -> None:
    assert off(MASKING[name], CUTS[cut]) < 1e-12


def test_micro_batches_are_as_wide_as_their_rows() -> None:
    widths: list[int] = []

    def hidden(self: Any, batch: Any) -> Tensor:
        if not is_rehearsal(self.trainer):
            widths.append(batch["ids"].shape[1])
        return Pooled.hidden(self, batch)

    fit(hooked(Pooled, hidden=hidden)(TWO))
    assert sorted(widths[:4]) == [2, 4, 7, 12]
    assert widths[4:8] == [14] * 4  # has no padding
    assert len(widths) == 3 * 4


def of_marks(self: Any, batch: Any, batch_idx: int) -> Any:
    """Two terms; only the second one's mask tells how long rows are."""
    out, marks = self.head(self.embed(batch["ids"]).mean(1)), batch["marks"]
    seen = (out + marks.mean(1, keepdim=True)).square()  # of all columns
    a, b = out.square().mean(), (seen * marks).sum() / marks.sum()
    return {"loss": {"a": a, "b": b}} if self.micro_batching else a + b


def test_it_is_measured_where_another_term_than_the_first_tells_lengths() -> None:
    """The control is in the test of models that see their padding."""
    terms = {"a": PerSample(), "b": PerToken(mask="marks")}
    kind = hooked(Pooled, training_step=of_marks, terms=terms)
    marks = mask_of(LENGTHS, padded_length=12).double()
    with pytest.warns(UserWarning, match="sees what stands behind a row's last label"):
        assert off(kind, TWO, [{"ids": FULL["ids"], "marks": marks}]) < 1e-12


def after_a_prompt(self: Any, batch: Any, batch_idx: int) -> Any:
    """Each token sees those before it, which may weigh nothing."""
    out, marks = self.head(self.embed(batch["ids"]).cumsum(1)).squeeze(2), batch["w"]
    return (out.square() * marks).sum() / marks.sum()


def test_weights_of_tokens_do_not_cut_off_what_stands_before_them() -> None:
    """Trimming is measured by the first batch, whose rows have no prompt."""
    columns, starts = torch.arange(14), torch.tensor([[0] * 8, [5, 6, 7, 6] * 2])
    batches = [
        {"ids": FULL["ids"], "w": ((columns >= each) & (columns < 11)).double()}
        for each in starts.unsqueeze(2)
    ]
    by = {"training_step": after_a_prompt, "accumulation": PerToken(mask="w")}
    assert off(hooked(Pooled, **by), TWO, batches) < 1e-12


def test_padding_in_front_is_measured_beside_shorter_rows_without_any() -> None:
    mask = torch.tensor([[1] * 3 + [0] * 11] * 4 + [[0] * 6 + [1] * 8] * 4)
    kind = hooked(Pooled, hidden=lambda self, batch: self.embed(batch["ids"]).cumsum(1))
    with pytest.warns(UserWarning, match=SEES):
        assert off(kind, TWO, [FULL | {"attention_mask": mask}]) < 1e-12


class Tagged(AccumulationMixin, Rows):
    """A label for some tokens, which see the mean of all that the mask shows."""

    def __init__(self, cut: MicroBatching | None = None, strategy: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.micro_batching, self.accumulation = cut, strategy or PerToken()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 5)
        del self.net
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, seen = self.embed(batch["ids"]).tanh(), batch["seen"].unsqueeze(2)
        mean = (hidden * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        logits = self.head((hidden + mean).tanh()).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten())

    configure_optimizers = Pooled.configure_optimizers


def tagged(lengths: list[int], num_labels: int) -> dict[str, Tensor]:
    """Rows whose labels end with the mask, or before it."""
    batch = batch_of(lengths, 0)
    mask = batch["attention_mask"]
    labels = (batch["ids"] % 5).where(mask > 0, -100)
    labels[:, num_labels:] = -100
    return {"ids": batch["ids"], "seen": mask, "labels": labels}


TO_THE_END, BEFORE = tagged([9, 4, 14, 2], 14), tagged([14] * 4, 8)
ALIKE = tagged([9] * 4, 14)


@pytest.mark.parametrize(
    "batches", [[TO_THE_END, BEFORE], [BEFORE, TO_THE_END], [BEFORE], [ALIKE, BEFORE]]
)
def test_labels_that_end_before_their_row_do_not_tell_its_length(batches: Any) -> None:
    """Whichever batch comes first: it is measured with labels that end halfway."""
    with pytest.warns(UserWarning, match="sees what stands behind a row's last label"):
        assert off(Tagged, TWO, batches) < 1e-12
    assert off(Tagged, MicroBatching(size=2, lengths="seen"), batches) < 1e-12
    if batches[0] is not BEFORE:  # the control: labels that are named are believed
        assert off(Tagged, MicroBatching(size=2, lengths="labels"), batches) > 1e-3


def test_rows_of_which_nothing_counts_show_nothing(capsys: Any) -> None:
    """The shortest four have no label, and so no loss; others see their padding."""

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        hidden = self.embed(batch["ids"]).tanh()
        logits = self.head(hidden + hidden.mean(1, keepdim=True)).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten())

    batch = tagged([3, 3, 3, 3, 5, 5, 14, 14], 14)
    batch["labels"][:4] = -100
    cut = MicroBatching(size=2, lengths="seen")
    assert off(hooked(Tagged, training_step=step), cut, [batch]) < 1e-12
    assert "shortest rows is zero or not finite" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batches", "sees"),
    [
        (FEW, True),  # the shortest four of four rows have all columns of the batch
        ([FULL, FULL, BATCHES[0]], False),
        ([batch_of([9] * 8, 0)], True),  # all rows have one length
    ],
)
def test_it_is_measured_on_the_first_batch(
    batches: Any, sees: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no row of it pads, some are made to end earlier."""
    with pytest.warns(UserWarning, match=SEES) if sees else nullcontext():
        assert off(MeanOfAll, TWO, batches) < 1e-12
    text = "made to end earlier, what stands behind its end is seen"
    assert (text in capsys.readouterr().out) != sees
    assert off(Pooled, TWO, batches) < 1e-12
    assert text not in capsys.readouterr().out


def test_windows_of_several_loader_batches() -> None:
    with pytest.warns(UserWarning, match=SEES):
        fit(cut := MeanOfAll(TWO), window=3)
    fit(whole := MeanOfAll(), [{k: torch.cat([b[k] for b in BATCHES]) for k in FULL}])
    assert deviation(cut, whole, MeanOfAll()) < 1e-12


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_rounding_and_noise_are_no_difference(precision: Any) -> None:
    batches = [{k: v.float() if k == "y" else v for k, v in b.items()} for b in BATCHES]
    for kind in (Pooled, hooked(Pooled, hidden=noisy)):
        fit(kind(TWO).float(), batches, precision=precision)
    with pytest.warns(UserWarning, match=SEES):
        fit(MeanOfAll(TWO).float(), batches, precision=precision)


@pytest.mark.filterwarnings("ignore:training_step has changed")
@pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding")
def test_nothing_that_a_step_changes_shows_that_it_was_measured() -> None:
    """As where it was said: weights, buffers, metrics, logs, counters and random
    numbers, bit by bit."""
    found, said = (states(MicroBatching(size=4, trim=trim)) for trim in (True, False))
    assert found == said


@pytest.mark.parametrize("most", [13, 0])
def test_error_in_the_untrimmed_run_leaves_padding_in(most: int, capsys: Any) -> None:
    """And is raised as it is, as any mistake in the step."""

    def hidden(self: Any, batch: Any) -> Tensor:
        if batch["ids"].shape[1] > most:
            raise IndexError("no such position")
        return Pooled.hidden(self, batch)

    with pytest.raises(IndexError, match="^no such position"):
        fit(hooked(Pooled, hidden=hidden)(TWO), BATCHES[:1])
    said = capsys.readouterr().out
    assert "trainkit | trimming: micro-batches keep the loader batch's width" in said
    assert "measured whether the model sees its padding: IndexError: no such" in said


@pytest.mark.parametrize("failures", [0, 1])
@pytest.mark.parametrize("how", [{"how": "auto"}, {"size": 2}], ids=str)
def test_memory_that_runs_out_while_it_is_rehearsed_costs_no_exactness(
    how: dict[str, Any], failures: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows are not trimmed then."""
    left = [None] * failures

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if is_rehearsal(self.trainer) and left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return Pooled.training_step(self, batch, batch_idx)

    kind, fails = hooked(MeanOfAll, training_step=training_step), failures == 1
    with nullcontext() if fails else pytest.warns(UserWarning, match=SEES):
        fit(seeing := kind(MicroBatching(**how)), [BATCHES[0], *BATCHES])
    assert ("OutOfMemoryError" in capsys.readouterr().out) == fails
    fit(whole := MeanOfAll(), [BATCHES[0], *BATCHES])
    assert deviation(seeing, whole, Pooled()) < 1e-12
