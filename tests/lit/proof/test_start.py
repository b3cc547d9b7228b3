"""The proof at the start of a run: no trace, not in the way, one verdict of ranks."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

import trainkit
from tests.helpers import raise_rank_errors, run_ranks, trainer
from tests.lit.proof.starting import (
    ALARM,
    BATCH_NORM,
    IMAGES,
    INSIDE,
    SPLIT,
    fit,
    images,
    said,
    stream,
    tokens,
)
from tests.zoo import causes, wrongs
from tests.zoo.causes import Images, Noisy, NormalisedTokens, Tokens
from tests.zoo.wrongs import ClipsEarly
from trainkit import (
    AccumulationCallback,
    BatchNormGuard,
    MicroBatching,
    PerSample,
    PerToken,
    Report,
    StepProgress,
    TrainkitError,
)
from trainkit.lit.proof.measure import of_all_ranks

THREES = PerToken(), MicroBatching(size=3)
# The module, one to which both are alike, the data, how they are cut, and the cause.
AROUND: dict[str, tuple[Any, ...]] = {
    "an inner cut": (lambda: Images(causes.nt_xent), IMAGES, images,
     (PerSample(), INSIDE), "looks across"),
    "own division": (wrongs.OwnDivision, Tokens, lambda: tokens(8), THREES,
     "accumulate_grad"),
    "by index": (wrongs.ByIndex, Tokens, lambda: stream(causes.sequences(40), 8),
     THREES, "batch_idx"),
    "padding": (wrongs.Bidirectional, Tokens, lambda: tokens(8), THREES, "padded to"),
    "padding of a stream": (wrongs.Bidirectional, Tokens,
     lambda: stream(causes.sequences(40), 8), THREES, "padded to"),
}  # fmt: skip


@pytest.mark.parametrize("name", AROUND)
@pytest.mark.filterwarnings("ignore:MicroBatching. the model sees its padding")
def test_accumulation_around_what_is_cut_is_measured_too(name: str) -> None:
    """The controls: one loader batch a step, and a module to which both are alike."""
    module, alike, data, (strategy, cut), cause = AROUND[name]

    def begin(module: Any, accumulate: int) -> None:
        own = AccumulationCallback(strategy, micro_batching=cut, proof="require")
        trainer(accumulate, callbacks=[own], max_epochs=1).fit(module, data())

    begin(module(), 1)
    begin(alike(), 2)
    with pytest.raises(TrainkitError, match=cause):
        begin(module(), 2)


def test_exact_batch_norm_is_measured(capsys: Any) -> None:
    guard = (BatchNormGuard("exact"),)
    fit(BATCH_NORM(), images(), PerSample(), SPLIT, callbacks=guard, proof="require")
    assert said(capsys).startswith("exact on 7 of your rows")


def test_what_is_not_exact_is_said_and_warned_of_once(capsys: Any) -> None:
    with pytest.warns(UserWarning, match=ALARM) as caught:
        fit(Tokens(), tokens(), PerSample())
    (text,) = (str(w.message) for w in caught if ALARM in str(w.message))
    assert "PerToken() counts" in text
    assert f"proof: {said(capsys)}" == text


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


@pytest.mark.parametrize(
    ("limit", "refused"),
    [
        ({"size": 8}, None),
        ({"size": 3}, 'require": a window of this training is not the big batch'),
        ({"size": 8, "tokens": 20}, 'require": a window of this training is not the'),
        (
            {"tokens": 10_000},
            'require": not measured: the first batch is one micro-batch; where one is '
            "cut, a window of this training is not the big batch: on 7 of your rows",
        ),
    ],
)
def test_windows_that_are_split_in_name_only_need_no_proof(
    limit: Any, refused: str | None, capsys: Any
) -> None:
    """The wrong strategy divides nothing wrong where nothing is cut; a budget of tokens
    may cut a later batch."""
    expected = contextlib.nullcontext()
    if refused is not None:
        expected = pytest.raises(TrainkitError, match=refused)
    with expected:
        fit(Tokens(), tokens(8), PerSample(), MicroBatching(**limit), proof="require")
    assert not said(capsys)


def test_what_the_copy_leaves_out_is_named(capsys: Any) -> None:
    fit(Noisy(), tokens(), PerToken(), precision="bf16-mixed", gradient_clip_val=1.0)
    left_out = "left out: dropout, precision bf16-mixed, clipping"
    assert said(capsys).endswith(left_out)
    fit(Tokens(), stream(causes.sequences()), PerToken())
    assert said(capsys).endswith("left out: the collate function, later batches")


@pytest.mark.parametrize(
    "bar", [StepProgress, RichProgressBar, TQDMProgressBar, None], ids=str
)
def test_it_is_printed_above_every_bar(capsys: Any, bar: Any) -> None:
    bars = () if bar is None else (bar(),)
    shown = bar is not None
    fit(Tokens(), tokens(), PerToken(), callbacks=bars, enable_progress_bar=shown)
    assert re.search(r"trainkit \| proof: exact on 6", capsys.readouterr().out)


def test_a_window_of_one_batch_needs_no_proof(capsys: Any) -> None:
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


# ---- two ranks rehearse alone, and say one verdict by both doors ---------------------


class FussyOnOne(Tokens):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if self.global_rank == 1 and len(batch["ids"]) < 8:
            raise ValueError("only here")
        return super().training_step(batch, batch_idx)


class UnlikeOnOne(Tokens):
    """One rank trains another loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.loss = causes.row_mean if self.global_rank == 1 else causes.token_mean
        return super().training_step(batch, batch_idx)


class Exchanges(UnlikeOnOne):
    """It sums over ranks by itself, and one of them rehearses more often."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ranks = torch.ones(())
        torch.distributed.all_reduce(ranks)
        return super().training_step(batch, batch_idx) * ranks


class Gathers(Tokens):
    def features(self, batch: Any) -> Any:
        everywhere: Any = self.all_gather(super().features(batch))
        return everywhere


class Coupled(Tokens):
    """So little that float32 cannot tell it from rounding."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        across = self.features(batch)[:, 0].mean(0).square().sum()
        return super().training_step(batch, batch_idx) + 3e-5 * across


# The module, its strategy and cut; the kind of the cause, if it is not exact.
CASES: dict[str, tuple[Any, ...]] = {
    "exact": (Tokens, PerToken(), None, None),
    "exact, split": (Tokens, PerToken(), SPLIT, None),
    "inner cut": (IMAGES, None, INSIDE, None),
    "BatchNorm, split": (NormalisedTokens, PerToken(), SPLIT, "rows"),
    "a hook": (ClipsEarly, PerToken(), None, "order"),
    "coupled a little": (Coupled, PerToken(), None, "loss"),
    "unlike on one rank": (UnlikeOnOne, PerToken(), None, "denominator"),
    "exchanges": (Exchanges, PerToken(), None, "denominator"),
}
RANKS: dict[str, Any] = {"strategy": "ddp", "devices": 2}


def checked(make: Any, strategy: Any, cut: Any) -> Any:
    data, ddp = images(15) if cut is INSIDE else tokens(), trainer(**RANKS)
    how = {"strategy": strategy, "micro_batches": cut}
    report = trainkit.check(make(), data, trainer=ddp, **how)
    return report.exact, [c.kind for c in report.causes], str(report)


def started(make: Any, strategy: Any, cut: Any, **how: Any) -> tuple[str, list[str]]:
    """What is printed, and what is warned of."""
    data, out = images(15) if cut is INSIDE else tokens(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        how = {**RANKS, "limit_train_batches": 2, "accumulate": 1, **how}
        fit(make(), data, strategy, cut, **how)
    alarms = [str(w.message) for w in caught if ALARM in str(w.message)]
    lines = [line for line in out.getvalue().split("\n") if "proof:" in line]
    return "; ".join(lines), alarms


def refused(door: Any, *args: Any, **how: Any) -> str:
    try:
        return str(door(*args, **how))
    except (TrainkitError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def on_a_rank(rank: int, world_size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for name, (make, strategy, cut, _) in CASES.items():
        how = make, strategy, cut
        found[name] = checked(*how), started(*how)
    fussy, unlike = (FussyOnOne, PerToken(), None), (UnlikeOnOne, PerToken(), None)
    guards = (BatchNormGuard("exact"),)
    found["an error on one rank"] = refused(checked, *fussy), refused(started, *fussy)
    found["required"] = refused(started, *unlike, proof="require")
    found["gathers"] = checked(Gathers, PerToken(), None)
    how = BATCH_NORM, PerSample(), INSIDE
    found["exact BatchNorm"] = started(*how, callbacks=guards)[0]
    return found


def test_both_ranks_say_what_one_has_found() -> None:
    """With windows of one loader batch, each rank's share is a micro-batch."""
    one, other = raise_rank_errors(run_ranks(on_a_rank, 2))
    for name, (*_, kind) in CASES.items():
        report, (line, alarms) = one[name]
        assert report[:2] == (kind is None, [kind] * (kind is not None)), name
        assert other[name] == (report, ("", [])), name
        assert ("exact on " in line, len(alarms)) == (kind is None, int(bool(kind)))
    (report, (_, alarms)) = one["unlike on one rank"]
    assert "these are rank 1's" in report[2]
    assert "proof: on rank 1, a window of this training is not the" in alarms[0]
    ours, theirs = one["an error on one rank"], other["an error on one rank"]
    assert theirs[0].startswith("ValueError: only here")
    assert ours[0].startswith("TrainkitError: check: rank 1 failed: ")
    assert "only here" in ours[0]
    assert "on rank 1, not measured: ValueError: only here" in ours[1]
    # Each rank rehearses alone, so nothing waits.
    assert one["gathers"][:2] == other["gathers"][:2] == (True, [])
    assert "BatchNorm sees all ranks" in one["exact BatchNorm"]
    assert other["exact BatchNorm"] == ""
    assert ALARM in one["required"]
    assert ALARM in other["required"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_off_is_shown_before_one_that_cannot_tell(
    rank: int, monkeypatch: Any
) -> None:
    off = Report(False, 0.1, 0.0, 8, "float32", ())
    both = [replace(off, deviation=0.9, doubt="nothing says where rows end")]
    both.insert(rank, off)

    def gather(each: list[Any], own: Any) -> None:
        each[:] = both

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert of_all_ranks(SimpleNamespace(world_size=2), lambda: both[0]) == (off, rank)
