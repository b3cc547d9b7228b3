"""What Lightning leaves out where a run goes on within an epoch."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)

from tests.helpers import (
    NAIVE,
    TokenModule,
    deviation,
    loader,
    pad,
    ragged_sequences,
    trainer,
)
from tests.lit.resume.interrupting import (
    TRAIN,
    Dropping,
    KillAt,
    Killed,
    ask,
    close,
    interrupted,
    rows,
    shuffled,
    train,
    unlike,
)
from tests.lit.resume.resuming import Saving
from tests.lit.resume.streaming import Plain, Read, asking, rows_of, stateful
from tests.zoo.callbacks import Ending, Table, told
from tests.zoo.modules import hooked
from trainkit import (
    AccumulationCallback,
    ExactResume,
    PerToken,
    ResumableLoader,
    ResumableStream,
)

pytestmark = [
    pytest.mark.usefixtures("quiet"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]


# ---- schedulers, windows, hooks ------------------------------------------------------


@pytest.mark.parametrize(("how", "batch"), [("stopped", 5), ("killed", 12)])
def test_scheduler_by_metric_moves_beside_lightnings_own_checkpoints(
    how: str, batch: int, tmp_path: Path
) -> None:
    """A run that is stopped saves where Lightning's own checkpoints are; one that is
    killed has these alone. Lightning leaves the scheduler out of a resumed epoch."""
    is_killed = how == "killed"
    options: dict[str, Any] = {"scheduler": "plateau", "val_check_interval": 1.0}
    options |= {"every": None}

    def keeps(folder: Path) -> ModelCheckpoint:
        every = {"every_n_train_steps": 1, "save_last": True} if is_killed else {}
        return ModelCheckpoint(folder / "checkpoints", save_top_k=0, **every)

    whole = train(tmp_path, others=[keeps(tmp_path)], **options)
    kill = ask("on_train_batch_end", batch)
    if is_killed:
        kill = KillAt("on_train_batch_start", batch + 1)
    folder = tmp_path / "run"
    found = interrupted(folder, kill, others=[keeps(folder)], **options)
    assert unlike(whole, found) == []


class Ends(Dropping):
    def on_train_epoch_end(self) -> None:
        self.log("ended", float(self.current_epoch))


def test_an_epoch_of_one_batch_ends_whole_before_a_run_is_saved(tmp_path: Path) -> None:
    """`EarlyStopping` counts it, and the module's hook and row are there."""
    how: dict[str, Any] = {"kind": Ends, "limit_train_batches": 1, "max_epochs": 6}
    how |= {"val_check_interval": 1.0, "accumulate_grad_batches": 1}
    runs = []
    for name, kills in (("whole", []), ("run", [ask("on_train_batch_start", 1)])):
        kept = ModelCheckpoint(tmp_path / name / "kept", save_top_k=-1)
        others = [EarlyStopping("ended", patience=3), kept]
        runs.append(interrupted(tmp_path / name, *kills, others=others, **how))
        assert others[0].stopped_epoch == 3
    assert unlike(*runs) == []
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    files = [
        sorted(each.name for each in tmp_path.glob(f"{n}/kept/*"))
        for n in ("run", "whole")
    ]
    assert files[0] == files[1]


def test_windows_of_lightnings_scheduler_keep_their_size(tmp_path: Path) -> None:
    """It sets the size in `on_train_epoch_start` alone."""

    for kills in ([], [ask("on_train_batch_end", 5)]):
        folder = tmp_path / str(len(kills))
        scheduler = GradientAccumulationScheduler({0: 4, 2: 2})
        interrupted(folder, *kills, others=[scheduler], accumulate_grad_batches=1)
        sizes = [row.get("window/micro_batches") for row in rows(folder)]
        assert [size for size in sizes if size] == ["4.0", "3.0"] * 2


@pytest.mark.filterwarnings("ignore:.*SWA|.*Swapping scheduler")
@pytest.mark.parametrize("name", ["Annealing", "StochasticWeightAveraging", "Sets"])
def test_what_an_epochs_beginning_had_set_is_said(name: str, tmp_path: Path) -> None:
    annealing = type(name, (Dropping,), {"on_train_epoch_start": lambda self: None})
    how: dict[str, Any] = {"kind": annealing}
    if name == "Sets":  # a callback
        sets = type(name, (Callback,), {"on_train_epoch_start": lambda *_: None})
        how = {"others": [sets()]}
    elif name != "Annealing":
        averages = StochasticWeightAveraging(0.01, swa_epoch_start=1)
        how = {"others": [averages], "max_epochs": 3}
    with pytest.warns(UserWarning, match=rf"within epoch 0, .* what {name} sets there"):
        interrupted(tmp_path, ask("on_train_batch_end", 5), **how)


# ---- loaders -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "make", "is_exact"),
    [
        ("stream", Plain, False),
        ("stream", stateful, False),
        ("counted", stateful, True),
        ("stream", lambda kind: ResumableStream(stateful(kind)), True),
        ("stream", lambda kind: ResumableStream(Plain(kind)), True),
    ],
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.filterwarnings("ignore:ExactResume. the train_dataloader leaves a batch")
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_a_loader_without_a_length_is_said_to_leave_a_batch_out(
    kind: str, make: Any, is_exact: bool, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"val_check_interval": 1.0}
    whole = train(tmp_path / "whole", loader=make(kind), **how)
    with told("checkpoint: ") as said:
        kill = ask("on_train_batch_end", 5)
        found = interrupted(tmp_path, kill, make=lambda: make(kind), **how)
    assert any("leaves a batch out" in text for text in said) == (not is_exact)
    assert (unlike(whole, found) == []) == is_exact


@pytest.mark.parametrize(
    ("asks", "ours", "goes_on"),
    [
        (False, None, True),
        (True, None, False),  # lightning#20550: it drops the loader's state
        (True, lambda: AccumulationCallback(PerToken()), True),
        (True, ExactResume, True),
    ],
)
@pytest.mark.filterwarnings("ignore:checkpoint. taken inside:UserWarning")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_rows_go_on_though_the_number_of_steps_was_asked_for(
    asks: bool, ours: Any, goes_on: bool, tmp_path: Path
) -> None:
    """Lightning alone does so only where nobody asks."""

    kind = hooked(Read, configure_optimizers=asking) if asks else Read
    how: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 6, "kind": kind}
    how |= {"default_root_dir": tmp_path}
    path, made = tmp_path / "inside.ckpt", lambda: [ours()] if ours else []
    whole = rows_of([shuffled()], *made(), Saving(path, at=2), **how)
    found = rows_of([shuffled()], *made(), path=path, **how)
    assert found == (whole[3:] if goes_on else whole[:3])
    assert whole[3:] != whole[:3]


@pytest.mark.parametrize(("kind", "epoch"), [("counted", 1), ("stream", 2)])
@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`")
def test_loggers_count_on_after_the_last_batch_of_an_epoch(
    kind: str, epoch: int, tmp_path: Path
) -> None:
    """`ModelCheckpoint(every_n_train_steps=...)` may save there. No row is left then,
    and so nothing is said of the data."""

    def logged(*more: Any, **resume: Any) -> list[float]:
        ours = [AccumulationCallback(PerToken()), LearningRateMonitor("step"), *more]
        options = {"logger": (table := Table()), "log_every_n_steps": 1}
        each = trainer(max_epochs=3, callbacks=ours, **options)
        each.fit(TokenModule(), Plain(kind), weights_only=True, **resume)
        return table.column("step")

    length = -(-len(TRAIN) // 4)
    path, at = tmp_path / "last.ckpt", epoch * length
    whole = logged(Saving(path, at=at - 1))
    assert whole == [*range(3 * length)]
    assert logged(ckpt_path=path) == whole[at:]


# ---- runs that end by themselves -----------------------------------------------------


BY_STEPS = {"max_steps": 8, "max_epochs": -1}


@pytest.mark.parametrize(
    ("hook", "how"),
    [
        ("on_train_epoch_start", {}),
        ("on_train_epoch_start", BY_STEPS),
        ("on_train_epoch_end", BY_STEPS),
    ],
    ids=["before-the-next", "before-the-next-by-steps", "at-its-end-by-steps"],
)
@pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning")
def test_an_epoch_is_not_lost_or_counted_twice_between_two(
    hook: str, how: dict[str, Any], tmp_path: Path
) -> None:
    """Lightning alone ends the next one at once, or the last one again."""
    own: dict[str, Any] = {"every": None, **how}
    whole = train(tmp_path / "whole", **own)
    saving = Saving(tmp_path / "checkpoints" / "last.ckpt", 6, hook)
    with suppress(Killed):
        train(tmp_path, others=[saving], kill=KillAt("on_after_backward", 9), **own)
    found = train(tmp_path, resume=True, **own)
    assert unlike(whole, found) == []
    assert close(rows(tmp_path / "whole"), rows(tmp_path)) == []


class Narrow(Dropping):
    """Made in float32, as by most users of `precision="64-true"`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.float()


@pytest.mark.parametrize(
    ("batch", "how"),
    [
        *((batch, {"every": 50}) for batch in (4, 5)),
        # Lightning loads weights into the module as it was made: it would round these.
        (4, {"kind": Narrow, "precision": "64-true"}),
    ],
)
@pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning")
def test_what_ends_in_mid_epoch_goes_on_there_with_the_same_weights(
    batch: int, how: dict[str, Any], tmp_path: Path
) -> None:
    """From its end the rest of the epoch would be left out."""
    whole, folder = train(tmp_path / "whole", **how), tmp_path / "run"
    train(folder, others=[Ending(batch)], **how)
    assert unlike(whole, train(folder, resume=True, **how)) == []


@pytest.mark.parametrize(
    ("max_steps", "text"),
    [(2, "inside an epoch.*what the loader had left is not read"), (4, None)],
)
def test_a_checkpoint_of_an_end_in_mid_epoch_is_said_to_leave_rows_out(
    max_steps: int, text: str | None, tmp_path: Path
) -> None:
    """`trainer.save_checkpoint` after `fit`: with plain Lightning too."""

    def fitted(max_steps: int, **resume: Any) -> tuple[pl.Trainer, TokenModule]:
        module = TokenModule(dtype=torch.float64)
        ours = [AccumulationCallback(PerToken())]
        each = trainer(3, max_steps=max_steps, max_epochs=-1, callbacks=ours)
        rows = ResumableLoader(ragged_sequences(38), batch_size=4, collate_fn=pad)
        each.fit(module, rows, weights_only=False, **resume)
        return each, module

    path = tmp_path / "end.ckpt"
    fitted(max_steps)[0].save_checkpoint(path)
    with told("checkpoint:") as said:
        _, resumed = fitted(8, ckpt_path=path)
    off = deviation(resumed, fitted(8)[1], TokenModule(dtype=torch.float64))
    if text is None:  # four windows are an epoch
        assert said == []
        assert off < 1e-12
    else:
        assert re.search(text, said[0])
        assert off > NAIVE


@pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning")
def test_a_run_that_ends_by_itself_is_not_stopped(tmp_path: Path) -> None:
    """A signal in the batch before the validation in which `EarlyStopping` decides. But
    `should_stop` ends nothing before `min_epochs`."""

    def stops() -> EarlyStopping:
        return EarlyStopping("val/loss", patience=1, min_delta=10.0)

    _, whole = train(tmp_path / "whole", others=[stops()], max_epochs=4)
    kill = ask("on_validation_start", 10)
    _, found = train(tmp_path / "run", kill=kill, others=[stops()], max_epochs=4)
    assert found.global_step == whole.global_step < 12
    assert kill.has_died
    kill = ask("on_train_batch_end", 5)
    with pytest.raises(SystemExit):
        train(tmp_path / "wait", kill=kill, others=[Ending(3)], min_epochs=2)


def test_a_module_that_was_stopped_in_a_validation_can_train_on(tmp_path: Path) -> None:
    kept: list[Any] = []

    def die(trainer: Any) -> None:
        kept.extend(trainer.lightning_module.modules())
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit):
        train(tmp_path, kill=KillAt("on_validation_start", 3, die))
    assert kept
    assert all(part.training for part in kept)


def test_a_resumed_run_stopped_at_once_names_its_checkpoint(tmp_path: Path) -> None:
    path, data = tmp_path / "earlier.ckpt", loader(ragged_sequences(24), 4)
    trainer(callbacks=[Saving(path, 2)]).fit(TokenModule(), data)
    stop = ExactResume(dirpath=tmp_path / "other", warns=False)
    dies = LambdaCallback(on_train_start=lambda *of: signal.raise_signal(15))
    resumed = trainer(callbacks=[dies, stop], enable_checkpointing=True)
    with pytest.raises(SystemExit):
        resumed.fit(TokenModule(), data, ckpt_path=path)
    assert stop.checkpoint_path == str(path)
