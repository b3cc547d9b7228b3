"""A stream in Lightning, which reads a batch ahead: `ResumableStream` loses none. And
several loaders at once."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from tests.helpers import (
    TOLERANCE,
    TokenModule,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    start_gloo,
    trainer,
    weights,
)
from tests.lit.resume.interrupting import (
    TRAIN,
    Dropping,
    KillAt,
    Killed,
    ask,
    interrupted,
    shuffled,
    train,
    unlike,
)
from tests.lit.resume.resuming import Saving
from tests.lit.resume.streaming import (
    NotesRows,
    Plain,
    Read,
    Reading,
    grain,
    litdata,
    rows_of,
    stateful,
)
from tests.zoo.callbacks import told
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationStrategy,
    BatchNormGuard,
    ExactResume,
    MicroBatching,
    PerToken,
    ResumableLoader,
    ResumableStream,
    TrainkitError,
)

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
    # Killed before its first checkpoint, a run begins anew.
    pytest.mark.filterwarnings("ignore:MetricsCSVLogger. .* of another training"),
    pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning"),
]


def chains() -> list[list[Any]]:
    """Where runs stop one after another, by batches counted over both epochs of seven:
    inside windows, at their ends, beside a validation, as after every fourth batch, in
    an epoch's last batch and its end, and in the next one."""
    begin, end = "on_train_batch_start", "on_train_batch_end"
    return [
        [ask("on_after_backward", 0), KillAt(end, 4), ask(begin, 9)],
        [ask(end, 1), ask("on_validation_start", 3), KillAt(begin, 6)],
        [KillAt(begin, 3), ask(end, 5), KillAt("on_train_epoch_end", 13)],
        [ask(end, 0), ask(end, 2), ask("on_before_optimizer_step", 4)],
        [KillAt(end, 5), KillAt("on_train_epoch_end", 6), ask(begin, 8)],
        [KillAt("on_validation_end", 3), KillAt(begin, 7), KillAt(end, 12)],
    ]


SETUPS = [
    *(("map", 2, 2, 3), ("stream", 2, 1, 4), ("hugging face", 2, 2, 5)),
    *(("stream", 0, 3, which) for which in range(6)),
]


def reading(window: int = 1) -> dict[str, Any]:
    return {"kind": Reading, "accumulate_grad_batches": window}


def wrapped(kind: str, workers: int) -> Any:
    options = {"num_workers": workers, "prefetch_factor": 3} if workers else {}
    return ResumableStream(stateful(kind, **options))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: Any) -> Any:
    """Trains each unbroken run once."""

    @cache
    def trained(kind: str, workers: int, window: int) -> Any:
        folder, loader = tmp_path_factory.mktemp("whole"), wrapped(kind, workers)
        return train(folder, loader=loader, **reading(window))

    return trained


@pytest.mark.parametrize(("kind", "workers", "window", "which"), SETUPS)
def test_run_of_three_stops_equals_an_unbroken_one(
    kind: str, workers: int, window: int, which: int, unbroken: Any, tmp_path: Path
) -> None:
    """To the bit, and in the rows that it reads."""
    whole, make = unbroken(kind, workers, window), partial(wrapped, kind, workers)
    kills = chains()[which]
    found = interrupted(tmp_path / "run", *kills, make=make, **reading(window))
    assert len(found[0].read) < len(whole[0].read)
    assert unlike(whole, found) == []


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.filterwarnings(
    "ignore:ExactResume. .*was logged before the run was resumed"
)
@pytest.mark.parametrize(
    ("kind", "limit"), [("map", 1.0), ("stream", 1.0), ("stream", 9), ("counted", 1.0)]
)
def test_checkpoint_of_an_epochs_last_batch_skips_and_repeats_no_epoch(
    kind: str, limit: float, unbroken: Any, tmp_path: Path
) -> None:
    """`ModelCheckpoint(every_n_train_steps=)` may write one. Where a loader has a
    length, nothing has asked it for a batch after the last one. With a limit above
    that, Lightning resumes in the same epoch, of which nothing is left."""

    def die(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
        raise Killed

    whole, make = unbroken(kind, 0, 1), partial(wrapped, kind, 0)
    kill = KillAt("on_train_batch_end", 6, die)
    how = {"limit_train_batches": limit, **reading(1)}
    found = interrupted(tmp_path / "run", kill, make=make, **how)
    assert found[0].read == whole[0].read[7:]
    if kind != "stream":  # whose iterator draws a seed before draws are put back
        assert unlike(whole, found) == []


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize(
    ("kind", "workers", "which"),
    [(litdata, 0, 0), (litdata, 0, 5), (litdata, 2, 1), (litdata, 2, 4), (grain, 0, 5)],
)
def test_streams_of_other_libraries_do_so_too(
    kind: Any, workers: int, which: int, tmp_path: Path
) -> None:
    def make() -> Any:
        return ResumableStream(kind(tmp_path / "rows", num_workers=workers))

    whole = train(tmp_path / "whole", loader=make(), **reading(2))
    found = interrupted(tmp_path, *chains()[which], make=make, **reading(2))
    assert unlike(whole, found) == []


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("every", [None, 7])
@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_of_an_epoch_is_that_of_the_resumed_one(
    every: int | None, workers: int, tmp_path: Path
) -> None:
    """Lightning reads before it tells the epoch; a checkpoint was written at the end of
    one, or with its last batch, after which the stream has ended."""

    def trained(epochs: int, path: Any = None) -> Read:
        kept = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=every)
        ours = [kept, AccumulationCallback(PerToken())]
        each = trainer(callbacks=ours, max_epochs=epochs, enable_checkpointing=True)
        data, module = wrapped("ordered", workers), Read()
        each.fit(module, data, ckpt_path=path, weights_only=bool(path))
        return module

    trained(1)
    (tmp_path / "last.ckpt").rename(tmp_path / "first.ckpt")
    resumed, whole = trained(3, tmp_path / "first.ckpt"), trained(3)
    assert resumed.read == whole.read[7:] != whole.read[:14]
    assert torch.equal(weights(resumed), weights(whole))


def _on_two_ranks(rank: int, size: int, folder: str) -> list[Any]:
    """Each rank has its own stream, and is stopped inside a window or a pool of two."""
    start_gloo()
    found: list[Any] = []
    for cut in (None, MicroBatching(tokens=12, pool=2)):
        window = 2 if cut is None else 1

        def make() -> Any:
            stream = stateful("stream")
            stream.dataset.first = rank
            return ResumableStream(stream)

        ours = AccumulationCallback(PerToken(), micro_batching=cut)
        how: dict[str, Any] = {"without": ["AccumulationCallback"], "others": [ours]}
        how |= {"strategy": "ddp", "devices": size, **reading(window)}
        path, kill = Path(folder, str(window)), KillAt("on_train_batch_start", 5)
        whole = train(path / "whole", loader=make(), **how)
        again = interrupted(path / "run", kill, make=make, **how)
        away = float((weights(whole[0]) - weights(again[0])).abs().max())
        reads_on = "other rows" not in unlike(whole, again)
        found.append((reads_on, away, whole[0].read))
    return found


def test_each_rank_resumes_its_stream_inside_windows_and_pools(tmp_path: Path) -> None:
    ranks = raise_rank_errors(run_ranks(_on_two_ranks, 2, str(tmp_path)))
    for first, second in zip(*ranks, strict=True):
        assert first[0]
        assert second[0]
        assert first[2] != second[2]  # the control: streams of their own
        assert max(first[1], second[1]) <= TOLERANCE[torch.float64]


# ---- who says which batch was trained on ---------------------------------------------


class Mixed(AccumulationMixin, Read):
    accumulation = PerToken()


FRONTS: dict[str, Any] = {
    "ExactResume": (Read, lambda: [ExactResume()]),
    "AccumulationCallback": (Read, lambda: [AccumulationCallback(PerToken())]),
    "AccumulationMixin": (Mixed, list),
    "none": (Read, list),
}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
def test_one_callback_is_enough_and_none_is_said(
    front: str, hook: str, tmp_path: Path
) -> None:
    kind, ours = FRONTS[front]

    def read(*more: Any, path: Path | None = None) -> list[Any]:
        loaders = ResumableStream(stateful("stream")), shuffled()
        how: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 3}
        how |= {"kind": kind, "path": path, "default_root_dir": tmp_path}
        return rows_of(loaders, *ours(), *more, **how)

    path = tmp_path / "inside.ckpt"
    with told("ResumableStream:") as said:
        whole = read(Saving(path, at=2, hook=hook))
        found = read(path=path)
    is_told = front != "none"
    assert any("Add trainkit.ExactResume()" in text for text in said) != is_told
    assert (found == whole[3:]) == is_told
    if not is_told:  # the control: that batch is lost
        assert found[:3] == whole[4:7]


def test_exact_resume_says_nothing_of_a_wrapped_stream(tmp_path: Path) -> None:
    """The controls: one that is not wrapped, and a loader of litData's module."""
    alike = type("Alike", (ResumableLoader,), {"__module__": "litdata.streaming"})
    repeats = "repeats the rest of this epoch in later ones"
    for loader, text in (
        (ResumableStream(stateful("stream")), None),
        (stateful("stream"), "wrap it: ResumableStream(loader)"),
        (alike(TRAIN, 4, collate_fn=pad), repeats),
    ):
        with told("ExactResume:") as said:
            folder = tmp_path / type(loader).__name__
            train(folder, loader=loader, **reading())
        assert any(str(text) in each for each in said) if text else said == []


def test_loaders_that_are_made_anew_for_each_epoch_are_told(tmp_path: Path) -> None:
    class Data(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return ResumableStream(stateful("stream"))

        def val_dataloader(self) -> Any:
            return shuffled()

    path, ours = tmp_path / "second.ckpt", partial(AccumulationCallback, PerToken())
    how: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1}
    how |= {"default_root_dir": tmp_path}
    with told("ResumableStream:") as said:
        whole = rows_of([Data()], ours(), Saving(path, at=9), **how)
        assert rows_of([Data()], ours(), path=path, **how) == whole[10:]
    assert said == []


# ---- what reads the same one ---------------------------------------------------------


def test_validation_on_the_same_stream_is_refused() -> None:
    stream = ResumableStream(Plain("stream"))
    each = trainer(limit_val_batches=1, val_check_interval=2)
    with pytest.raises(TrainkitError, match="ResumableStream iter: .* one pass at a"):
        each.fit(Read(), stream, stream)


def test_batch_norm_guard_does_not_read_it_beside_training() -> None:
    module, each = TokenModule(), trainer(callbacks=[BatchNormGuard("recalibrate")])
    module.norm = torch.nn.BatchNorm1d(3)
    words = "a ResumableStream, which can be read only"
    with pytest.raises(TrainkitError, match=words):
        each.fit(module, ResumableStream(Plain("stream")))


# ---- several loaders at once: each goes on where it was, or stays ended --------------

LONG, SHORT = ragged_sequences(18), ragged_sequences(8, seed=3)
"""Five batches of one and two of the other."""


def loaders(mode: Any, workers: dict[str, Any] | None = None) -> CombinedLoader:
    how: dict[str, Any] = {"shuffle": True, "collate_fn": pad, **(workers or {})}
    pair = {
        "short": ResumableLoader(SHORT, 4, seed=3, **how),
        "long": ResumableLoader(LONG, 4, seed=5, **how),
    }
    return CombinedLoader(pair, mode)


def streams(mode: Any) -> CombinedLoader:
    """Three batches of one and seven of the other."""
    pair = {"short": stateful("stream"), "long": stateful("hugging face")}
    pair["short"].dataset.rows = 10
    wrapped = {key: ResumableStream(each) for key, each in pair.items()}
    return CombinedLoader(wrapped, mode)


def labels(batch: Any) -> Any:
    return sum((each["labels"] != -100).sum() for each in batch.values() if each)


class TokensOfAll(AccumulationStrategy):
    """Those of the loaders that have not ended."""

    def weight(self, batch: Any) -> Tensor:
        return labels(batch)


class Several(NotesRows, Dropping):
    """Trains on the batches of all loaders that have not ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [b for b in batch.values() if b]
        total = sum(self._loss(b) * (b["labels"] != -100).sum() for b in parts)
        return total / labels(batch)  # type: ignore[return-value]


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
PLACES: list[tuple[str, int, list[Any], int, Any]] = [
    # Where a run ends early, counted over both epochs; and of what length they are.
    ("max_size", 1, [KillAt("on_train_batch_end", at) for at in (0, 3, 6)], 5, {}),
    ("max_size", 3, [ask("on_after_backward", at) for at in (1, 4)], 5, {}),
    ("max_size_cycle", 3, [ask("on_after_backward", at) for at in (3, 9)], 5, {}),
    ("min_size", 1, [KillAt("on_train_batch_end", at) for at in (0, 3)], 2, {}),
    ("min_size", 3, [ask("on_after_backward", 1)], 2, {}),
    ("max_size", 1, [KillAt("on_train_batch_end", 3)], 5, PERSISTENT),
    ("max_size_cycle", 1, [KillAt("on_train_batch_end", 5)], 5, PERSISTENT),
    # Streams. Of the longest, a shorter one that has ended would begin anew.
    ("max_size", 1, [ask("on_train_batch_end", at) for at in (0, 1)], 7, None),
    ("max_size_cycle", 1, [ask("on_train_batch_end", at) for at in (1, 4)], 7, None),
    ("min_size", 1, [ask("on_train_batch_end", at) for at in (0, 4)], 3, None),
]


@pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only")
@pytest.mark.parametrize(("mode", "window", "kills", "length", "workers"), PLACES)
def test_several_loaders_go_on_together(
    mode: str, window: int, kills: list[Any], length: int, workers: Any, tmp_path: Path
) -> None:
    """To the bit, and in its rows, since losses may be alike by chance; where it is
    stopped, in mid-window. With workers as without any."""
    # Rows of several loaders at once are more than the proof can cut.
    ours = AccumulationCallback(TokensOfAll(), proof="off")
    how: dict[str, Any] = {"without": ["AccumulationCallback"], "others": [ours]}
    how |= {"accumulate_grad_batches": window, "val_check_interval": 1.0}
    how |= {"kind": Several}
    make = partial(streams if workers is None else loaders, mode)
    whole = train(tmp_path / "whole", loader=make(), **how)
    assert len(whole[0].read) == 2 * length
    make = make if workers is None else partial(loaders, mode, workers)
    for number, kill in enumerate(kills):
        found = interrupted(tmp_path / str(number), kill, make=make, **how)
        assert unlike(whole, found) == []
    if mode == "max_size" and workers is not None:
        # The control: the shorter loader has ended in mid-epoch.
        ended = [each["short"] is None for each in whole[0].read]
        assert ended == ([False] * 2 + [True] * 3) * 2
