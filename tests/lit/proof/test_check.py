"""`check` on modules with a known answer: verdict, place, cause and line."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainkit
from tests.helpers import quiet_lightning
from tests.lit.fronts import ragged
from tests.lit.proof.starting import plain_trainer
from tests.zoo import causes, wrongs
from tests.zoo.causes import (
    Attending,
    ByHand,
    Images,
    Noisy,
    NormalisedTokens,
    Pooling,
    Positioned,
    Tokens,
    TwoTerms,
    WithCentre,
    WithMomentumCopy,
    image_loader,
    token_loader,
)
from tests.zoo.modules import OldPlain
from trainkit import MicroBatching, PerSample, PerToken, Report, TrainkitError, Uniform

ROUNDING = 1e-12
TERMS = {"tokens": PerToken(), "rows": PerSample()}
SPLIT = MicroBatching(size=2)
MASKED = PerToken(mask="attention_mask")
COLLATED = MicroBatching(size=3, collate=causes.padded)


def check(module: Any, data: Any, *args: Any, **options: Any) -> Report:
    with quiet_lightning():
        return trainkit.check(module, data, *args, **options)


def check_quickly(module: Any, data: Any, *args: Any, **options: Any) -> Report:
    """With fewer rows, which tell fewer denominators apart."""
    return check(module, data, *args, **{"rows": 10, **options})


class Recurrent(Tokens):
    """Its dropout is within a call that no mode sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(16, 16, 2, dropout=0.5, batch_first=True)

    def features(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.layers(super().features(batch))[0]


# Those that a fit shows too are in `test_verdicts`; here the ways to ask are tied.
EXACT: list[tuple[Any, Any, Any, Any]] = [
    (Tokens, token_loader, PerToken(), None),
    (Tokens, token_loader, PerToken(), SPLIT),
    (Tokens, lambda: token_loader(list), PerToken(), COLLATED),
    (lambda: Tokens(causes.masked), token_loader, MASKED, None),
    (lambda: Tokens(causes.row_mean), token_loader, PerSample(), None),
    (Noisy, token_loader, PerToken(), None),
    (lambda: wrongs.Dropping(by_row=True), token_loader, PerToken(), None),
    (lambda: wrongs.Dropping(by_row=True), token_loader, PerToken(), SPLIT),
    (lambda: Images(causes.sample_weighted), image_loader, PerSample(mask=2), None),
    (wrongs.Overwriting, image_loader, PerSample(), None),
    (ByHand, image_loader, PerSample(), None),
    (TwoTerms, token_loader, TERMS, SPLIT),
    (Recurrent, token_loader, PerToken(), None),
]


@pytest.mark.parametrize(("module", "data", "strategy", "micro_batches"), EXACT)
def test_what_is_exact_is_called_exact(
    module: Any, data: Any, strategy: Any, micro_batches: Any
) -> None:
    """The control: plain accumulation of the same parts, or its own line below."""
    how = {"strategy": strategy, "micro_batches": micro_batches}
    report = check_quickly(module(), data(), **how)
    report.assert_exact()
    assert report.deviation < ROUNDING
    assert report.causes == ()
    assert report.precision == "float64"


def labelled_here_and_there(full: int) -> DataLoader[Any]:
    """Rows of one width, with some columns behind the last label but in the first."""
    ids = torch.arange(22 * 7).reshape(22, 7) % (causes.VOCABULARY - 1) + 1

    def ends(row: int) -> int:
        return 7 if row < full else 3 + row % 4

    rows: Any = [
        {"ids": each, "labels": each.where(torch.arange(7) < ends(n), -100)}
        for n, each in enumerate(ids)
    ]
    return DataLoader(rows, batch_size=8)


class SeesAllColumns(Tokens):
    def features(self, batch: dict[str, Any]) -> torch.Tensor:
        found = super().features(batch)
        return found + found.mean(1, keepdim=True)


@pytest.mark.parametrize("full", [0, 8])
def test_a_run_that_keeps_its_width_is_checked_as_it_runs(full: int) -> None:
    """Where labels alone tell lengths, and the model sees what stands behind them, also
    if no row of the first batch shows it."""
    how = {"strategy": PerToken(), "micro_batches": MicroBatching(size=1)}
    report = check_quickly(SeesAllColumns(), labelled_here_and_there(full), **how)
    report.assert_exact()


@pytest.mark.parametrize("rows", [4, 8, 12])
def test_plain_accumulation_of_few_rows_is_not_called_exact(rows: int) -> None:
    """Parts of one size would hide that it weighs them alike."""
    report = check(Images(causes.classified), image_loader(), rows=rows)
    assert not report.exact
    assert report.deviation > 1e-3


NORMALISED = lambda: Images(causes.classified, nn.BatchNorm2d)  # noqa: E731
INSIDE, STEP, MOVE = 'inside="auto"', "training_step", "on_before_optimizer_step"
TWO_TERMS = '"one": PerSample(), "other": PerTok'
CLASSES_OF = "= PerClassWeight(weight=self.class_weights, labels='labels')"

DENOMINATORS: list[tuple[Any, Any, str]] = [
    (Tokens, None, "= PerToken()"),
    (Tokens, PerSample(), "= PerToken()"),
    (Tokens, Uniform(), "= PerToken()"),
    (lambda: Tokens(causes.shifted), PerToken(), "= PerToken(shift=True)"),
    (lambda: Tokens(causes.masked), PerToken(), "= PerToken(mask='attention_mask')"),
    (lambda: Tokens(causes.row_mean), PerToken(), "= PerSample()"),
    (lambda: Images(causes.sample_weighted), PerSample(), "= PerSample(mask=2)"),
    (lambda: Tokens(causes.class_weighted), PerToken(), CLASSES_OF),
    (lambda: Tokens(causes.token_sum), PerToken(), 'loss_reduction="total"'),
    (lambda: Tokens(causes.two_means), PerToken(), TWO_TERMS),
]
OTHERS: list[tuple[Any, Any, str, str, str]] = [
    (lambda: Tokens(causes.root), PerToken(), "loss", STEP, "return the mean itself"),
    (NormalisedTokens, PerToken(), "rows", "norm", "BatchNormGuard"),
    (NORMALISED, PerSample(), "rows", "net.1", "BatchNormGuard"),
    (lambda: Images(causes.dice), PerSample(), "loss", STEP, INSIDE),
    (lambda: Images(causes.nt_xent), PerSample(), "loss", STEP, INSIDE),
    (lambda: Images(causes.vicreg), PerSample(), "loss", STEP, INSIDE),
    (lambda: Tokens(causes.balanced), PerToken(), "loss", STEP, INSIDE),
    (lambda: Tokens(causes.focal_over_batch), PerToken(), "loss", STEP, INSIDE),
    (lambda: Images(causes.mixup), PerSample(), "randomness",
     "randperm at zoo/causes.py", "draw in the data set"),
    (lambda: wrongs.Dropping(by_row=False), PerToken(), "randomness",
     "rand at zoo/wrongs.py", "draw in the data set"),
    (lambda: wrongs.Augmenting(random.Random(0)), PerSample(), "randomness", STEP,
     "draw with torch"),
    (lambda: wrongs.Augmenting(np.random.default_rng(0)), PerSample(), "randomness",
     STEP, "draw with torch"),
    (lambda: Attending(has_mask=False), PerToken(), "padding", "layer.self_attn",
     "mask padding"),
    (Positioned, PerToken(), "padding", "body", "mask padding"),
    (Pooling, PerSample(), "padding", "head", "mask padding"),
    (WithMomentumCopy, MASKED, "state", "target.weight", MOVE),
    (WithCentre, PerToken(), "state", "centre", MOVE),
    (wrongs.Bootstrap, PerSample(), "state", "on_train_batch_end of", MOVE),
]  # fmt: skip
WRONG = [(m, s, "denominator", "", line) for m, s, line in DENOMINATORS] + OTHERS


@pytest.mark.parametrize(("module", "strategy", "kind", "place", "line"), WRONG)
def test_what_is_not_exact_is_explained(
    module: Any, strategy: Any, kind: str, place: str, line: str
) -> None:
    made = module()
    data = image_loader() if isinstance(made, Images) else token_loader()
    if (kind, place) == ("padding", "body"):
        data = token_loader(causes.padded_left)
    report = check_quickly(made, data, strategy=strategy)
    assert not report.exact
    (cause,) = report.causes
    assert cause.kind == kind
    assert cause.place.startswith(place)
    assert line in "\n".join(cause.remedy)
    if kind != "state":
        assert report.deviation > 1e-3
        assert report.parameters[0][1] > 1e-3
    verdict = "not measured" if kind == "randomness" else "not the big batch"
    with pytest.raises(AssertionError, match=verdict):
        report.assert_exact()


def test_a_count_of_the_whole_batch_is_named() -> None:
    """Each part gets the number of the whole, so its loss is a share, as of a sum."""
    data = token_loader(causes.counted)
    assert check(Tokens(causes.by_host_count), data, strategy=PerToken()).exact
    how: Any = {"strategy": PerToken(), "micro_batches": SPLIT}
    (cause,) = check(Tokens(causes.by_host_count), data, **how).causes
    assert (cause.kind, cause.place) == ("host", "num_targets")


def with_table(rows: list[Any]) -> dict[str, Any]:
    return causes.padded(rows) | {"table": torch.arange(8.0) / 28}


def by_table(module: Any, logits: torch.Tensor, batch: Any) -> torch.Tensor:
    return causes.token_mean(module, logits, batch) * batch["table"].sum()


@pytest.mark.parametrize("is_loader", [True, False])
def test_a_field_as_long_as_the_batch_by_chance_is_named(is_loader: bool) -> None:
    """The loader's rows are collated anew, in other numbers than the table's."""
    rows: Any = causes.sequences()
    data: Any = DataLoader(rows, batch_size=8, collate_fn=with_table)
    data = data if is_loader else next(iter(data))
    how: dict[str, Any] = {"strategy": PerToken(), "micro_batches": SPLIT}
    (cause,) = check(Tokens(by_table), data, **how).causes
    assert (cause.kind, cause.place) == ("rows", "table")
    (remedy,) = cause.remedy
    how["micro_batches"] = eval(remedy.removeprefix("micro_batching = "))
    assert check(Tokens(by_table), data, **how).exact


def test_batches_of_one_row_are_not_cut_nor_is_a_field_of_one_entry() -> None:
    def collate(rows: list[Any]) -> Any:
        return causes.padded(rows) | {"scale": torch.ones(1)}

    data: Any = DataLoader(causes.sequences(), batch_size=1, collate_fn=collate)  # type: ignore[arg-type]
    assert check(Tokens(), data, strategy=PerToken(), micro_batches=SPLIT).exact


def test_padding_that_is_seen_is_not_trimmed_in_split_windows() -> None:
    """The control: loader batches of their own widths, above."""
    how: dict[str, Any] = {"strategy": PerToken(), "micro_batches": SPLIT}
    report = check(Attending(has_mask=False), token_loader(), **how)
    assert report.exact
    assert "micro-batches keep the loader batch's width" in report.notes[0]
    how["strategy"] = PerSample()
    report = check(Attending(has_mask=False), token_loader(), **how)
    assert [cause.kind for cause in report.causes] == ["denominator"]


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (wrongs.OwnDivision, "denominator"),
        (lambda: Attending(has_mask=False), "padding"),
    ],
)
def test_a_trainer_around_split_windows_is_followed(module: Any, kind: str) -> None:
    """The controls: steps of one loader batch, and a module to which both are alike."""
    how: dict[str, Any] = {"strategy": PerToken(), "micro_batches": SPLIT}
    two = {"trainer": plain_trainer(accumulate_grad_batches=2)}
    assert check(module(), token_loader(), **how).exact
    assert check(Tokens(), token_loader(), **how, **two).exact
    report = check(module(), token_loader(), **how, **two)
    assert not report.exact
    assert [cause.kind for cause in report.causes] == [kind]


class Whole(Images):
    """All of its submodules see rows beside each other."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.net = nn.Sequential(nn.BatchNorm2d(3))
        self.head = nn.BatchNorm1d(3)  # type: ignore[assignment]


def test_what_runs_in_chunks_is_found_as_in_a_run() -> None:
    cut = MicroBatching(size=4, inside="auto")
    report = check(Images(causes.nt_xent), image_loader(), micro_batches=cut)
    assert report.exact
    assert report.notes[0] == 'found by inside="auto": net'
    with pytest.raises(TrainkitError, match='inside="auto": no submodule of Whole'):
        check(Whole(causes.nt_xent), image_loader(), micro_batches=cut)


def test_several_causes_are_all_found() -> None:
    """But for those behind draws, which hide them."""
    module = Images(causes.mixup, nn.BatchNorm2d)
    report = check(module, image_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == ["randomness"]
    assert "more may be behind it" in report.verdict
    report = check(NormalisedTokens(), token_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == ["rows", "denominator"]


@pytest.mark.parametrize("hooks", [[wrongs.ClipsAtTheEnd()], []])
def test_a_hook_is_seen_that_looks_before_the_window_is_divided(hooks: Any) -> None:
    """Windows of eight rows need no division in their first step, and hide it."""
    data = DataLoader([*image_loader().dataset][:8], batch_size=4)  # type: ignore[misc]
    trainer = plain_trainer(hooks, accumulate_grad_batches=2)
    module, by = Images(causes.classified), PerSample()
    report = check(module, data, strategy=by, rows=8, trainer=trainer)
    assert report.exact == (not hooks)


def test_dropout_and_noise_are_told_apart_from_causes() -> None:
    report = check(Noisy(), token_loader(), strategy=PerSample())
    (cause,) = report.causes
    assert cause.remedy == ("accumulation = PerToken()",)
    assert "left out: dropout" in str(report)


def test_module_of_the_older_package_is_checked() -> None:
    """Its Trainer is that package's, which takes no module of another."""
    module, data = OldPlain(), ragged([4, 4, 4])
    assert check_quickly(module, data, strategy=PerToken()).exact
    assert check_quickly(module, data, strategy=PerSample()).is_off


class Lazy(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(2)


REFUSED: dict[str, Any] = {
    "check module: must be a Lightning": lambda: check(3, token_loader()),
    "received Linear": lambda: check(nn.Linear(2, 2), token_loader()),
    "received the class Tokens": lambda: check(Tokens, token_loader()),
    "check trainer: must be a Train": lambda: check(Tokens(), None, trainer=3),
    "micro_batches: must be a MicroBatching, received 2.": (
        lambda: check(Tokens(), token_loader(), micro_batches=2)
    ),
    "check: not measured: there is 1 row, which cannot be cut": (
        lambda: check(Tokens(), token_loader(), rows=1)
    ),
    "check: not measured: lazy.weight gets its shape in the first pass": (
        lambda: check(Lazy(), token_loader())
    ),
    "find_micro_batch trainer: mus": lambda: trainkit.find_micro_batch(3, Tokens()),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_take_is_refused_by_name(words: str) -> None:
    with pytest.raises(TrainkitError, match=words):
        REFUSED[words]()
