"""The proof at the start of a run calls exact what is, and nothing else."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from tests.helpers import pad, ragged_sequences
from tests.lit.proof.starting import (
    ALARM,
    BATCH_NORM,
    CLASSES,
    IMAGES,
    INSIDE,
    SPLIT,
    fit,
    images,
    packed,
    said,
    stream,
    tokens,
)
from tests.zoo import causes, wrongs
from tests.zoo.causes import Attending, Images, Noisy, Positioned, Tokens, TwoTerms
from tests.zoo.modules import Manual, Stream
from trainkit import (
    AccumulationMixin,
    MicroBatching,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
)

TERMS = {"tokens": PerToken(), "rows": PerSample()}
COLLATED = MicroBatching(size=2, collate=causes.padded)


def images_by_class() -> Any:
    rows = sorted(causes.image_loader().dataset, key=lambda row: int(row[1]))  # type: ignore[call-overload]
    return DataLoader(rows, batch_size=10)  # type: ignore[arg-type]


def padded_to_14(rows: list[Any], *, left: bool = False) -> Any:
    """To one width."""
    ids = torch.ones(14, dtype=torch.long)
    batch = causes.padded([*rows, {"ids": ids, "labels": ids}], left=left)
    return {name: value[:-1] for name, value in batch.items()}


LEFT_TO_14 = functools.partial(padded_to_14, left=True)


def compiled() -> Any:
    """Its function closes over what is of a thread."""
    module = IMAGES()
    module.net.compile(backend="eager", dynamic=True)
    return module


class ByProperty(AccumulationMixin, Tokens):
    """Nobody can assign its strategy."""

    @property
    def accumulation(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return PerToken()


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
    "one width": (Positioned, lambda: tokens(collate=LEFT_TO_14), PerToken()),
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
    "drawn in place": (wrongs.Overwriting, images, PerSample()),
    "a variational encoder": (wrongs.Variational, images, PerSample()),
    "by hand": (wrongs.ByHand, images),
    "said": (wrongs.Saying, tokens),
    "by a property": (ByProperty, tokens),
    "dropout by place": (lambda: causes.dropping(causes.classified), images,
     PerSample()),
    "inner cut, computed anew": (lambda: causes.dropping(causes.nt_xent), images, None,
     INSIDE),
    "inner cut": (lambda: Images(causes.nt_xent), images, None, INSIDE),
    "found inner cut": (lambda: Images(causes.nt_xent), images, None,
     MicroBatching(inside="auto", size=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_said_to_be_and_required(name: str, capsys: Any) -> None:
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
    "a sum": (lambda: Tokens(causes.token_sum), tokens, PerToken(), None,
     "sum over rows"),
    "no classes": (wrongs.ClassWeighted, images, PerSample(), None, "self.rates"),
    "one class": (wrongs.ClassWeighted, images_by_class, PerSample(), None,
     "self.rates"),
    "unlike sizes": (IMAGES, images, Uniform(), None, "PerSample() counts"),
    "BatchNorm": (BATCH_NORM, images, PerSample(), SPLIT, "BatchNorm2d normalises"),
    "Dice": (lambda: Images(causes.dice), images, PerSample(), None, "looks across"),
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
    "one length, another count": (Tokens, lambda: tokens(4, rows=wrongs.all_labels()),
     PerSample(), None, "PerToken() counts"),
    "one length, padding seen": (wrongs.Bidirectional, lambda: tokens(4,
     rows=wrongs.one_length(causes.sequences())), PerToken(), None, "padded to"),
    "one length, left padding": (Positioned, lambda: tokens(4,
     rows=wrongs.one_length(causes.sequences()), collate=causes.padded_left),
     PerToken(), None, "padded to"),
    "a copy": (causes.WithMomentumCopy, tokens, PerToken(mask="attention_mask"), None,
     "(target.weight)"),
    "by hand": (lambda: wrongs.ByHandUniform(causes.sample_weighted), images, None,
     None, "mask=2"),
    "said": (wrongs.SayingRows, tokens, None, None, "what self.weigh gets"),
}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
def test_what_is_not_exact_is_refused_before_anything_moves(name: str) -> None:
    module, data, strategy, cut, cause = OFF[name]
    made = module()
    if isinstance(made, AccumulationMixin):
        made.proof = "require"
    before = [each.detach().clone() for each in made.parameters()]
    with pytest.raises(TrainkitError, match=f'proof="require": .*{ALARM}') as caught:
        fit(made, data(), strategy, cut, proof="require")
    assert cause in str(caught.value)
    assert str(caught.value).count("trainkit.check(") == 1
    pairs = zip(before, made.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_batch_norm_over_four_rows_is_named() -> None:
    """A part of one row would have no statistics, and so no cause."""
    module: Any = IMAGES()
    module.head = nn.Sequential(nn.BatchNorm1d(8), module.head)
    data = DataLoader(Stream(images().dataset), batch_size=4)
    with pytest.warns(UserWarning, match="BatchNorm1d normalises each micro-batch"):
        fit(module, data, PerSample())


def starting_with_one_label() -> list[Any]:
    rows = wrongs.all_labels()
    short = [{name: value[:1] for name, value in row.items()} for row in rows[:4]]
    return short + rows


def masked_by_label(module: Any, logits: Any, batch: dict[str, Any]) -> Any:
    losses = cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
    return losses[batch["label_mask"].bool()].mean()


def with_label_mask(rows: list[Any]) -> Any:
    batch = causes.padded(rows)
    ones = torch.ones_like(batch["ids"])
    return {**batch, "label_mask": ones, "segments": ones - 1}


def with_real_mask(rows: list[Any]) -> Any:
    return {
        k: v.float() if "mask" in k else v for k, v in with_label_mask(rows).items()
    }


DOUBTFUL: dict[str, tuple[Any, ...]] = {
    "a mask of labels": (lambda: Tokens(masked_by_label),
     lambda: tokens(4, rows=packed(), collate=with_label_mask), PerSample(),
     "PerSample and PerToken look the same"),
    "a mask of real numbers": (lambda: Tokens(masked_by_label),
     lambda: tokens(4, rows=packed(), collate=with_real_mask), PerSample(),
     "PerSample and PerToken look the same"),
    "one length in one width": (lambda: Tokens(causes.shifted),
     lambda: tokens(4, rows=packed(), collate=padded_to_14), PerToken(),
     "PerSample and PerToken look the same"),
    "one length, another count": (Tokens, lambda: stream(wrongs.all_labels()),
     PerSample(), "PerSample and PerToken look the same"),
    "one label, another count": (Tokens, lambda: stream(starting_with_one_label()),
     PerSample(), "PerSample and PerToken look the same"),
    "one length, seen padding": (wrongs.Bidirectional, lambda: stream(packed()),
     PerToken(), "count alike, so PerSample and PerToken look the same on them; "
     "with one ending earlier, the gradient is off"),
    # As many numbers as a part may have rows.
    **{f"{n} draws for all": (functools.partial(wrongs.Scaling, n), images, PerSample(),
        "(rand at zoo/wrongs.py:", *how)
        for n, how in ((1, []), (2, [SPLIT]), (3, [SPLIT]))},
    "a gradient through draws": (wrongs.Choosing, images, PerSample(),
     "gumbel_softmax at zoo/wrongs.py:"),
    "indices of rows": (wrongs.Pairing, images, PerSample(),
     "(randint at zoo/wrongs.py:"),
    "a distribution": (wrongs.Mixing, images, PerSample(), "(_sample_dirichlet at "),
    "mixup": (lambda: Images(causes.mixup), images, PerSample(),
     "randperm at zoo/causes"),
    "one row": (Tokens, lambda: stream(causes.sequences(), 1), PerToken(),
     "there is 1 row"),
    "a lock": (lambda: wrongs.Held(threading.Lock()), tokens, PerToken(),
     "Held.head.kept (dict) cannot be copied"),
    "a generator": (lambda: wrongs.Held(n for n in range(3)), tokens, PerToken(),
     "Held.head.kept (dict) cannot be copied"),
}  # fmt: skip


def test_noise_around_other_rows_is_no_noise_of_a_row(capsys: Any) -> None:
    """Replayed, it would hide that rows see each other."""
    fit(wrongs.DrawnAround(), images(), PerSample())
    assert said(capsys).startswith("not measured: it draws numbers")


def test_paths_that_are_dropped_are_dropout(capsys: Any) -> None:
    module = Images(causes.nt_xent, lambda width: causes.DropPath())
    fit(module, images(), None, INSIDE)
    assert said(capsys).endswith("left out: dropout")


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_cannot_be_told_is_not_called_exact(name: str, capsys: Any) -> None:
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


def test_unequal_parts_that_weigh_alike_are_not_called_exact(capsys: Any) -> None:
    """The control: parts of equal sizes."""
    fit(Decays(causes.classified), images(), Uniform())
    assert "may be of unequal sizes, so it is right by chance" in said(capsys)
    fit(Decays(causes.classified), images(15), Uniform(), proof="require")


class Counted(Stream):
    """Its workers share it, so its length does not tell that of batches."""

    def __len__(self) -> int:
        return 16


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_nobody_knows_the_sizes_of_the_batches_of_a_stream(capsys: Any) -> None:
    """Two rows are all that is known of it, and they are two equal parts."""
    rows = list(images(15).dataset)  # type: ignore[arg-type]
    loader: Any = DataLoader(Stream(rows), batch_size=2)
    for each in (loader, DataLoader(Counted(rows), batch_size=2)):
        fit(IMAGES(), each, Uniform())
        assert "may be of unequal sizes, so it is right by chance" in said(capsys)
    fit(IMAGES(), loader, PerSample(), proof="require")
    equal: Any = DataLoader(Stream(rows), batch_size=2, drop_last=True)
    fit(IMAGES(), equal, Uniform(), proof="require")


@pytest.mark.parametrize("window", [1, 2, 5])
def test_windows_by_hand_are_proved_in_any_size(window: int, capsys: Any) -> None:
    """All batches of a rehearsal are one window. The control: a wrong strategy."""
    rows: Any = ragged_sequences(24)
    data = DataLoader(rows, 4, collate_fn=pad)
    fit(Manual(), data, accumulate=window)
    assert said(capsys).startswith("exact on ")
    with pytest.warns(UserWarning, match=r"not by PerSample\(\)"):
        fit(Manual(strategy=PerSample()), data, accumulate=window)


def test_a_mask_in_whose_name_labels_stand_is_a_mask() -> None:
    data = tokens(4, rows=packed(), collate=with_label_mask)
    own = PerToken(mask="label_mask")
    fit(Tokens(masked_by_label), data, own, proof="require")


def test_stream_of_one_length_is_exact_where_padding_is_not_seen(capsys: Any) -> None:
    fit(Tokens(), stream(packed()), PerToken(), proof="require")
    assert said(capsys).endswith("left out: the collate function, later batches")


def test_stream_whose_width_may_be_fixed_is_doubtful_and_warns() -> None:
    """A bidirectional net sees padding, which one width for all makes harmless."""
    text = "not measured: the model sees its padding: if the batches of this stream"
    data, module = stream(causes.sequences(40)), wrongs.Bidirectional
    with pytest.warns(UserWarning, match=text):
        fit(module(), data, PerToken())
    with pytest.raises(TrainkitError, match=text):
        fit(module(), data, PerToken(), proof="require")


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
    cut: MicroBatching | None, capsys: Any
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
