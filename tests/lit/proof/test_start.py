"""The proof at the start of a run: right verdicts, no trace, never in the way."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.helpers import pad, ragged_sequences, trainer
from tests.lit.proof.starting import (
    ALARM,
    CLASSES,
    SPLIT,
    fit,
    images,
    images_by_class,
    padded_to_14,
    said,
    tokens,
)
from tests.zoo import causes, wrongs
from tests.zoo.causes import Attending, Images, Noisy, Positioned, Tokens, TwoTerms
from tests.zoo.modules import Manual, Stream, hooked
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    BatchNormGuard,
    MicroBatching,
    PerSample,
    PerToken,
    StepProgress,
    TrainkitError,
    Uniform,
)
from trainkit.lit.callback.base import is_rehearsal
from trainkit.lit.proof import parts as proof_parts
from trainkit.lit.quiet import LIGHTNINGS

IMAGES, BATCH_NORM = (lambda: Images(causes.classified), lambda: Images(
    causes.classified, nn.BatchNorm2d
))  # fmt: skip
INSIDE = MicroBatching(inside="net", size=4)
TERMS = {"tokens": PerToken(), "rows": PerSample()}

COLLATED = MicroBatching(size=2, collate=causes.padded)


def compiled() -> Any:
    """Its function closes over what is of a thread."""
    module = IMAGES()
    module.net.compile(backend="eager", dynamic=True)
    return module


EXACT: dict[str, tuple[Any, ...]] = {
    "tokens": (Tokens, tokens, PerToken()),
    "in few rows": (Tokens, lambda: tokens(2), PerToken()),
    "split": (Tokens, tokens, PerToken(), SPLIT),
    "split by tokens": (Tokens, tokens, PerToken(), MicroBatching(tokens=40)),
    "shifted": (lambda: Tokens(causes.shifted), tokens, PerToken(shift=True)),
    "rows": (lambda: Tokens(causes.row_mean), tokens, PerSample()),
    "a total": (lambda: Tokens(causes.token_sum), tokens,
     PerToken(loss_reduction="total")),
    "a sum": (lambda: Tokens(causes.token_sum), tokens, PerToken(loss_reduction="sum")),
    "classes": (lambda: Tokens(causes.class_weighted), tokens, CLASSES),
    "dropout and noise": (Noisy, tokens, PerToken()),
    "dropout and noise, split": (Noisy, tokens, PerToken(), SPLIT),
    "attention": (lambda: Attending(has_mask=True), tokens, PerToken()),
    "not trimmed": (lambda: Attending(has_mask=False), tokens, PerToken(), SPLIT),
    "positions": (Positioned, tokens, PerToken()),
    "one width": (Positioned, lambda: tokens(collate=padded_to_14), PerToken()),
    "images": (IMAGES, images, PerSample()),
    "alike": (IMAGES, lambda: images(15), Uniform()),
    "compiled": (compiled, images, PerSample()),
    "one class": (IMAGES, images_by_class, PerSample()),
    "one length": (Tokens, lambda: tokens(8, rows=wrongs.all_labels()), PerToken()),
    "one length in all": (wrongs.Bidirectional, lambda: tokens(4,
     rows=wrongs.all_labels()[:6] * 4), PerToken()),
    "one row": (Tokens, lambda: tokens(1), PerToken()),
    "one image": (IMAGES, lambda: images(1), PerSample()),
    "collated parts": (Tokens, lambda: tokens(collate=list), PerToken(), COLLATED),
    "random collate": (Tokens, lambda: tokens(collate=wrongs.masked_at_random),
     PerToken()),
    "terms": (TwoTerms, tokens, TERMS, SPLIT),
    "terms, collated": (TwoTerms, lambda: tokens(collate=list), TERMS, COLLATED),
    "linear hooks": (wrongs.Scales, tokens, PerToken()),
    "the loader's size": (wrongs.OverLoaderSize, lambda: images(15), PerSample()),
    "noise by row": (lambda: wrongs.Scaling(None), images, PerSample()),
    "chosen by row": (lambda: wrongs.Choosing(dim=1), images, PerSample()),
    "by hand": (wrongs.ByHand, images),
    "said": (wrongs.Saying, tokens),
    "inner cut": (lambda: Images(causes.nt_xent), images, None, INSIDE),
    "found inner cut": (lambda: Images(causes.nt_xent), images, None,
     MicroBatching(inside="auto", size=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_said_to_be_and_required(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: the wrong ones below."""
    module, data, *how = EXACT[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MicroBatching: the model sees its padding")
        fit(module(), data(), *how, proof="require")
    found = re.match(r"exact on \d of your rows: off by (\S+) in f", said(capsys))
    assert found is not None
    assert float(found[1]) < 1e-6


OFF: dict[str, tuple[Any, ...]] = {
    "another count": (Tokens, tokens, PerSample(), None, "PerToken() counts"),
    "another count, split": (Tokens, tokens, PerSample(), SPLIT, "PerToken() counts"),
    "another count, collated": (Tokens, lambda: tokens(collate=list), PerSample(),
     COLLATED, "PerToken() counts"),
    "padding, collated": (wrongs.Bidirectional, lambda: tokens(collate=list),
     PerToken(), COLLATED, "(lstm)"),
    "no shift": (lambda: Tokens(causes.shifted), tokens, PerToken(), None,
     "PerToken(shift=True) counts"),
    "no mask": (lambda: Tokens(causes.masked), tokens, PerToken(), None,
     "attention_mask"),
    "a sum": (lambda: Tokens(causes.token_sum), tokens, PerToken(), None,
     "sum over rows"),
    "no classes": (wrongs.ClassWeighted, images, PerSample(), None, "self.rates"),
    "one class": (wrongs.ClassWeighted, images_by_class, PerSample(), None,
     "self.rates"),
    "weights of rows": (lambda: Images(causes.sample_weighted), images, PerSample(),
     None, "mask=2"),
    "unlike sizes": (IMAGES, images, Uniform(), None, "PerSample() counts"),
    "BatchNorm": (BATCH_NORM, images, PerSample(), None, "BatchNorm2d normalises"),
    "BatchNorm, split": (BATCH_NORM, images, PerSample(), SPLIT, "BatchNorm2d"),
    "Dice": (lambda: Images(causes.dice), images, PerSample(), None, "looks across"),
    "NT-Xent": (lambda: Images(causes.nt_xent), images, PerSample(), None, "across"),
    "two terms": (lambda: Tokens(causes.two_means), tokens, PerToken(), None, "across"),
    "a root": (lambda: Tokens(causes.root), tokens, PerToken(), None, "square root"),
    "own division": (wrongs.OwnDivision, tokens, PerToken(), None, "accumulate_grad"),
    "over batches": (wrongs.OverBatches, tokens, PerToken(), None, "num_training"),
    "by index": (wrongs.ByIndex, tokens, PerToken(), None, "batch_idx"),
    "a second pass": (wrongs.SecondPass, tokens, PerToken(), None, "backward of"),
    "backward in step": (wrongs.BackwardInStep, tokens, PerToken(), None,
     ".backward"),
    "early clipping": (wrongs.ClipsEarly, tokens, PerToken(), None, "on_after_back"),
    "hooks": (wrongs.Clamps, tokens, PerToken(), None, "hook of embed.weight"),
    "own step": (wrongs.DividesInStep, tokens, PerToken(), None, "optimizer_step"),
    "set before": (wrongs.SetsBefore, tokens, PerToken(), None, "across"),
    "transfer": (wrongs.Centring, images, PerSample(), None,
     "on_after_batch_transfer"),
    "forward hook": (wrongs.CentringHook, tokens, PerToken(), None, "body"),
    "padding": (wrongs.Bidirectional, tokens, PerToken(), None, "(lstm)"),
    "padding, no mask": (wrongs.Bidirectional, lambda: tokens(collate=lambda rows:
     {name: causes.padded(rows)[name] for name in ("ids", "labels")}), PerToken(),
     None, "padded to"),
    "padding of floats": (wrongs.Speech, lambda: tokens(collate=wrongs.spoken),
     PerSample(), None, "padded to"),
    "left padding": (Positioned, lambda: tokens(collate=causes.padded_left), PerToken(),
     None, "padded to"),
    "one length, another count": (Tokens, lambda: tokens(4, rows=wrongs.all_labels()),
     PerSample(), None, "PerToken() counts"),
    "one length, padding seen": (wrongs.Bidirectional, lambda: tokens(4,
     rows=wrongs.one_length(causes.sequences())), PerToken(), None, "padded to"),
    "one length, left padding": (Positioned, lambda: tokens(4,
     rows=wrongs.one_length(causes.sequences()), collate=causes.padded_left),
     PerToken(), None, "padded to"),
    "a target": (wrongs.Bootstrap, images, PerSample(), None, "on_train_batch_end"),
    "a copy": (causes.WithMomentumCopy, tokens, PerToken(mask="attention_mask"), None,
     "(target.weight)"),
    "a centre": (causes.WithCentre, tokens, PerToken(), None, "(centre)"),
    "by hand": (lambda: wrongs.ByHandUniform(causes.sample_weighted), images, None,
     None, "mask=2"),
    "said": (wrongs.SayingRows, tokens, None, None, "what self.weigh gets"),
}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
def test_what_is_not_exact_is_refused_before_anything_moves(name: str) -> None:
    module, data, strategy, cut, cause = OFF[name]
    made = module()
    if isinstance(made, AccumulationMixin):
        made.accumulation_proof = "require"
    before = [each.detach().clone() for each in made.parameters()]
    with pytest.raises(TrainkitError, match=f'proof="require": .*{ALARM}') as caught:
        fit(made, data(), strategy, cut, proof="require")
    assert cause in str(caught.value)
    assert str(caught.value).count("trainkit.check(") == 1
    pairs = zip(before, made.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_what_is_not_exact_is_said_and_warned_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, data, strategy, cut, cause = OFF["another count"]
    with pytest.warns(UserWarning, match=ALARM) as caught:
        fit(module(), data(), strategy, cut)
    (text,) = (str(w.message) for w in caught if ALARM in str(w.message))
    assert cause in text
    assert f"proof: {said(capsys)}" == text


def test_batch_norm_over_four_rows_is_named() -> None:
    """A part of one row would have no statistics, and so no cause."""
    module: Any = IMAGES()
    module.head = nn.Sequential(nn.BatchNorm1d(8), module.head)
    data = DataLoader(Stream(images().dataset), batch_size=4)
    with pytest.warns(UserWarning, match="BatchNorm1d normalises each micro-batch"):
        fit(module, data, PerSample())


def test_what_a_callback_does_to_gradients_is_measured() -> None:
    with pytest.warns(UserWarning, match="on_after_backward of ClipsInCallback"):
        fit(Tokens(), tokens(), PerToken(), callbacks=(wrongs.ClipsInCallback(),))


class Coin:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.own = torch.Generator().manual_seed(0)

    def __call__(self) -> torch.Tensor:
        return torch.rand(1, generator=self.own) < 0.5


class Drawing:
    """A data set and a collate function that count, and have a transform."""

    def __init__(self) -> None:
        self.rows, self.reads, self.coins = causes.sequences(32), 0, [Coin()]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.rows[index]

    def __call__(self, rows: list[Any]) -> Any:
        self.reads += 1
        batch, is_left = causes.padded(rows), self.coins[0]()
        return {**batch, "labels": torch.where(is_left, batch["ids"], batch["labels"])}


def test_rows_are_read_by_copies_of_the_data_set_and_the_collate_function() -> None:
    trained, reads = [], []
    for proof in ("warn", "off"):
        torch.manual_seed(0)
        data, collate, module = Drawing(), Drawing(), Tokens()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a verdict on such batches is by chance
            loader: Any = DataLoader(data, 8, collate_fn=collate)  # type: ignore[arg-type]
            fit(module, loader, PerToken(), proof=proof)
        trained.append(module.head.weight.detach())
        reads.append((data.reads, collate.reads))
    assert torch.equal(*trained)
    assert reads[0] == reads[1]


def test_rows_are_chosen_by_what_the_cutter_makes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other parts of the same rows may count alike, where these do not."""
    ids, choose, parts = torch.arange(1, 7), proof_parts.chosen_parts, []
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

    monkeypatch.setattr(proof_parts, "chosen_parts", noted)
    fit(Noting(), tokens(8, rows=rows), PerToken(), MicroBatching(size=1))
    assert sorted(map(len, parts)) == [1, 3, 3]
    assert sorted(Noting.seen[-3:]) == sorted(parts)


def test_accumulation_around_an_inner_cut_is_measured_too() -> None:
    how = {"micro_batching": INSIDE, "proof": "require"}
    callback = AccumulationCallback(PerSample(), **how)  # type: ignore[arg-type]
    trainer(2, callbacks=[callback], max_epochs=1).fit(IMAGES(), images())
    callback = AccumulationCallback(PerSample(), **how)  # type: ignore[arg-type]
    with pytest.raises(TrainkitError, match="looks across"):
        trainer(2, callbacks=[callback]).fit(Images(causes.nt_xent), images())


AROUND_SPLIT: dict[str, tuple[Any, ...]] = {
    "own division": (wrongs.OwnDivision, lambda: tokens(8), "accumulate_grad"),
    "by index": (wrongs.ByIndex, lambda: stream(causes.sequences(40), 8), "batch_idx"),
    "padding": (wrongs.Bidirectional, lambda: tokens(8), "padded to"),
    "padding of a stream": (wrongs.Bidirectional,
     lambda: stream(causes.sequences(40), 8), "padded to"),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND_SPLIT)
@pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding")
def test_accumulation_around_split_windows_is_measured_too(name: str) -> None:
    """The control: one loader batch a step, and a module to which both are alike."""
    module, data, cause = AROUND_SPLIT[name]

    def begin(module: Any, accumulate: int) -> None:
        how: Any = {"micro_batching": MicroBatching(size=3), "proof": "require"}
        callback = AccumulationCallback(PerToken(), **how)
        pl = trainer(accumulate, callbacks=[callback], max_epochs=1)
        pl.fit(module, data())

    begin(module(), 1)
    begin(Tokens(), 2)
    with pytest.raises(TrainkitError, match=cause):
        begin(module(), 2)


def test_exact_batch_norm_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    guard = (BatchNormGuard("exact"),)
    fit(BATCH_NORM(), images(), PerSample(), SPLIT, callbacks=guard, proof="require")
    assert said(capsys).startswith("exact on 7 of your rows")


def stream(rows: Iterable[Any], size: int = 4) -> Any:
    data = Stream(rows)
    return DataLoader(data, batch_size=size, collate_fn=causes.padded)


def packed() -> list[Any]:
    """Rows of one length."""
    return wrongs.all_labels()[:6] * 4


def starting_with_one_label() -> list[Any]:
    rows = wrongs.all_labels()
    short = [{name: value[:1] for name, value in row.items()} for row in rows[:4]]
    return short + rows


def in_one_width(rows: list[Any]) -> Any:
    """Padded on the right to 14 columns."""
    ids = torch.ones(14, dtype=torch.long)
    batch = causes.padded([*rows, {"ids": ids, "labels": ids}])
    return {name: value[:-1] for name, value in batch.items()}


def masked_by_label(module: Any, logits: Any, batch: dict[str, Any]) -> Any:
    losses = cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
    return losses[batch["label_mask"].bool()].mean()


def with_label_mask(rows: list[Any]) -> Any:
    batch = causes.padded(rows)
    ones = torch.ones_like(batch["ids"])
    return {**batch, "label_mask": ones, "segments": ones - 1}


DOUBTFUL: dict[str, tuple[Any, ...]] = {
    "a mask of labels": (lambda: Tokens(masked_by_label),
     lambda: tokens(4, rows=packed(), collate=with_label_mask), PerSample(),
     "PerSample and PerToken look the same"),
    "one length in one width": (lambda: Tokens(causes.shifted),
     lambda: tokens(4, rows=packed(), collate=in_one_width), PerToken(),
     "PerSample and PerToken look the same"),
    "one length, another count": (Tokens, lambda: stream(wrongs.all_labels()),
     PerSample(), "PerSample and PerToken look the same"),
    "one label, another count": (Tokens, lambda: stream(starting_with_one_label()),
     PerSample(), "PerSample and PerToken look the same"),
    "one length, seen padding": (wrongs.Bidirectional, lambda: stream(packed()),
     PerToken(), "count alike, so PerSample and PerToken look the same on them; "
     "where one ends earlier, the gradient is off"),
    # As many numbers as a part may have rows.
    **{f"{n} draws for all": (functools.partial(wrongs.Scaling, n), images, PerSample(),
        "(rand at zoo/wrongs.py:", *how)
        for n, how in ((1, []), (2, [SPLIT]), (3, [SPLIT]))},
    "a distribution": (wrongs.Mixing, images, PerSample(), "(_sample_dirichlet at "),
    "mixup": (lambda: Images(causes.mixup), images, PerSample(),
     "randperm at zoo/causes"),
    "one row": (Tokens, lambda: stream(causes.sequences(), 1), PerToken(),
     "there is 1 row"),
    "a lock": (lambda: wrongs.Held(threading.Lock()), tokens, PerToken(),
     "Held.head.kept.held (lock) cannot be copied"),
    "a generator": (lambda: wrongs.Held(n for n in range(3)), tokens, PerToken(),
     "Held.head.kept.held (generator) cannot be copied"),
}  # fmt: skip


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_cannot_be_told_is_not_called_exact(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, data, strategy, why, *cut = DOUBTFUL[name]
    fit(module(), data(), strategy, *cut)
    text = said(capsys)
    assert text.startswith("not measured: ")
    assert why in text
    with pytest.raises(TrainkitError, match='proof="require": not measured: '):
        fit(module(), data(), strategy, *cut, proof="require")


class Decays(Images):
    """Its loss looks at no row, so each way to weigh rows gives the same gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return sum(each.square().sum() for each in self.parameters())


def test_unequal_parts_that_weigh_alike_are_not_called_exact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The control: parts of equal sizes."""
    fit(Decays(causes.classified), images(), Uniform())
    assert "may be of unequal sizes, so it is right by chance" in said(capsys)
    fit(Decays(causes.classified), images(15), Uniform(), proof="require")


class Counted(Stream):
    """Its workers share it, so its length does not tell that of batches."""

    def __len__(self) -> int:
        return 16


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_nobody_knows_the_sizes_of_the_batches_of_a_stream(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two rows are all that is known of it, and they are two equal parts."""
    rows = list(images(15).dataset)  # type: ignore[arg-type]
    loader: Any = DataLoader(Stream(rows), batch_size=2)
    for each in (loader, DataLoader(Counted(rows), batch_size=2)):
        fit(IMAGES(), each, Uniform())
        assert "may be of unequal sizes, so it is right by chance" in said(capsys)
    fit(IMAGES(), loader, PerSample(), proof="require")
    equal: Any = DataLoader(Stream(rows), batch_size=2, drop_last=True)
    fit(IMAGES(), equal, Uniform(), proof="require")


@pytest.mark.parametrize("every", [None, 2, 5])
def test_windows_by_hand_are_proved_whatever_their_size(
    every: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """All batches of a rehearsal are one window. The control: a wrong strategy."""
    rows: Any = ragged_sequences(24)
    data, kind = DataLoader(rows, 4, collate_fn=pad), hooked(Manual, every=every)
    fit(kind(), data)
    assert said(capsys).startswith("exact on ")
    with pytest.warns(UserWarning, match=r"not by PerSample\(\)"):
        fit(kind(strategy=PerSample()), data)


def test_a_mask_in_whose_name_labels_stand_is_a_mask() -> None:
    data = tokens(4, rows=packed(), collate=with_label_mask)
    own = PerToken(mask="label_mask")
    fit(Tokens(masked_by_label), data, own, proof="require")


def test_stream_of_one_length_is_exact_where_padding_is_not_seen(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(Tokens(), stream(packed()), PerToken(), proof="require")
    assert said(capsys).endswith("left out: the collate function, later batches")


def test_stream_whose_width_may_be_fixed_is_doubtful_and_warns() -> None:
    """A bidirectional net sees padding, which one width for all makes harmless."""
    text = "not measured: the model sees its padding: if the batches of this stream"
    with pytest.warns(UserWarning, match=text):
        fit(wrongs.Bidirectional(), stream(causes.sequences(40)), PerToken())
    with pytest.raises(TrainkitError, match=text):
        fit(
            wrongs.Bidirectional(),
            stream(causes.sequences(40)),
            PerToken(),
            proof="require",
        )


def masked_language(*names: str) -> Any:
    """Ready batches of full rows, of whose labels a fifth counts."""
    batches: Any = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(1, 12, (8, 12), generator=generator)
        counts = torch.rand(8, 12, generator=generator) < 0.2
        batch = {"ids": ids, "labels": torch.where(counts, ids, -100)}
        batches.append({**batch, **dict.fromkeys(names, torch.ones_like(ids))})
    return DataLoader(batches, batch_size=None)


@pytest.mark.parametrize("cut", [None, MicroBatching(size=3, pool=2)])
def test_full_rows_that_end_with_labels_that_do_not_count_are_not_called_off(
    cut: MicroBatching | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What stands behind a row's last label may be padding. The control: a mask, which
    says that it is not, and one that says that it is."""
    module, plain = wrongs.Bidirectional, masked_language()
    with pytest.warns(UserWarning, match="what stands behind a row's last label"):
        fit(module(), plain, PerToken(), cut)
    assert said(capsys).startswith("not measured: ")
    told = masked_language("attention_mask")
    fit(module(), told, PerToken(), cut, proof="require")
    rows = causes.sequences()
    padded: Any = [causes.padded(rows[n : n + 8]) for n in range(0, 32, 8)]
    padded = DataLoader(padded, batch_size=None)
    seen = "sees its padding" if cut else "is not the big batch"  # a pool has one width
    with pytest.warns(UserWarning, match=seen):
        fit(module(), padded, PerToken(), cut)


def test_a_step_without_padding_costs_no_rehearsal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether columns may be cut off is open until a row is padded, so each batch is
    looked at; logging, whose levels take long to set, is not touched any more."""
    levels: list[int] = []
    original = logging.Logger.setLevel

    def noted(logger: logging.Logger, level: int) -> None:
        levels.append(level)
        original(logger, level)

    monkeypatch.setattr(logging.Logger, "setLevel", noted)
    data = tokens(4, rows=packed())
    fit(Tokens(), data, PerToken(), MicroBatching(size=2), accumulate=1)
    assert 0 < len(levels) <= 2 * len(LIGHTNINGS)


@pytest.mark.parametrize(("size", "is_said"), [(8, False), (3, True)])
def test_windows_that_are_split_in_name_only_need_no_proof(
    size: int, is_said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The wrong strategy divides nothing wrong where nothing is cut."""
    options = MicroBatching(size=size)
    refused = pytest.raises(TrainkitError, match="not the big batch")
    with refused if is_said else contextlib.nullcontext():
        fit(Tokens(), tokens(8), PerSample(), options, proof="require")
    assert not said(capsys)


def test_what_the_copy_leaves_out_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Noisy(), tokens(), PerToken(), precision="bf16-mixed", gradient_clip_val=1.0)
    left_out = "left out: dropout, precision bf16-mixed, clipping"
    assert said(capsys).endswith(left_out)
    fit(Tokens(), stream(causes.sequences()), PerToken())
    assert said(capsys).endswith("left out: the collate function, later batches")


@pytest.mark.parametrize(
    "bar", [StepProgress, RichProgressBar, TQDMProgressBar, None], ids=str
)
def test_it_is_printed_above_every_bar(
    capsys: pytest.CaptureFixture[str], bar: Any
) -> None:
    bars = () if bar is None else (bar(),)
    shown = bar is not None
    fit(Tokens(), tokens(), PerToken(), callbacks=bars, enable_progress_bar=shown)
    assert re.search(r"trainkit \| proof: exact on 6", capsys.readouterr().out)


def test_a_window_of_one_batch_needs_no_proof(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit(Tokens(), tokens(), PerSample(), accumulate=1, proof="require")
    fit(Tokens(), tokens(), PerSample(), proof="off")
    assert said(capsys) == ""


def test_a_stream_that_is_read_once_keeps_all_its_batches() -> None:

    class Counting(Tokens):
        num_rows = 0

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.num_rows += len(batch["ids"])

    module, rows = Counting(), iter(causes.sequences(32))
    fit(module, stream(rows), PerToken(), limit_train_batches=8, proof="require")
    assert module.num_rows == 32


class Moving(LightningDataModule):
    """Its transfer hook looks across rows."""

    def train_dataloader(self) -> Any:
        return images()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] - batch[0].mean(0), *batch[1:]]


def test_hooks_of_a_data_module_are_rehearsed() -> None:
    with pytest.warns(UserWarning, match="on_after_batch_transfer of Moving"):
        fit(IMAGES(), Moving(), PerSample())


@pytest.mark.parametrize("wrong", ["on", True, None, "REQUIRE"])
def test_other_values_are_refused(wrong: Any) -> None:
    with pytest.raises(TrainkitError, match=r'proof: must be "warn", "require" or'):
        AccumulationCallback(PerToken(), proof=wrong)


def test_a_guard_does_not_count_rehearsed_rows() -> None:
    freeze = (BatchNormGuard("freeze"),)
    fit(BATCH_NORM(), images(), PerSample(), callbacks=freeze, proof="require")
    guard = (BatchNormGuard("error", min_samples=12),)
    with pytest.warns(UserWarning, match=ALARM):
        fit(BATCH_NORM(), images(), PerSample(), callbacks=guard)
