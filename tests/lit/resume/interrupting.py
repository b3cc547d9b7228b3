"""A small training that can be killed anywhere, and what it leaves behind."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.functional import dropout

from tests.helpers import QUIET, TokenNet, pad, ragged_sequences
from trainkit import AccumulationCallback, AccumulationMixin, PerToken, WindowMonitor
from trainkit.data.resumable import ResumableLoader
from trainkit.lit.front.exact_resume import ExactResume
from trainkit.lit.logs.metrics_csv import MetricsCSVLogger, Row

TRAIN = ragged_sequences(26)
"""Seven batches an epoch: windows of 3, 3 and 1."""
VALIDATION = ragged_sequences(8, seed=1)


class Killed(BaseException):
    """As sudden as SIGKILL for all that is on the disk."""


class Dropping(pl.LightningModule):
    """A model with dropout, a schedule, and logs of every kind."""

    def __init__(self, *, scheduler: str = "step", logs_late: bool = False) -> None:
        super().__init__()
        self.net = TokenNet(dtype=torch.float64)
        self.scheduler = scheduler
        self.logs_late = logs_late

    def _loss(self, batch: Any) -> Tensor:
        hidden = torch.tanh(self.net.embed(batch["ids"]))
        logits = self.net.head(dropout(hidden, 0.3, self.training)).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        size = len(batch["ids"])
        self.log("train/loss", loss, on_step=True, on_epoch=True, batch_size=size)
        self.log("train/mean", loss, on_step=False, on_epoch=True, batch_size=size)
        for how in ("sum", "max", "min"):
            options: Any = {"on_step": False, "on_epoch": True, "reduce_fx": how}
            self.log(f"train/{how}", loss, **options)
        return loss

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.logs_late:  # after all callbacks, and so after a checkpoint
            self.log("train/late", float(self.global_step))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), batch_size=len(batch["ids"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.scheduler.startswith("plateau"):
            options: Any = {"factor": 0.5, "patience": 0, "threshold": 10.0}
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **options)
            how = {"scheduler": plateau, "monitor": "val/loss"}
            if self.scheduler == "plateau by step":
                how = {**how, "monitor": "train/loss", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": how}
        steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        return [optimizer], [{"scheduler": steps, "interval": self.scheduler}]


class Exactly(AccumulationMixin, Dropping):
    """Logs exact means in training; in one of them only the first batches count."""

    accumulation = PerToken()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_exact("train/exact", loss.detach(), batch)
        counts = batch["labels"].ne(-100).sum() * (batch_idx < 2)
        self.log_exact("train/first", loss.detach(), weight=counts)
        return loss


class Counting(Dropping):
    """Asks how many steps there will be, which has the loaders made early."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


Run = tuple[Any, pl.Trainer]
"""A module, and the Trainer that has trained it."""


class KillAt(pl.Callback):
    """Dies in a hook of a certain batch, counted over all epochs from 0."""

    def __init__(self, hook: str, batch: int, die: Any = None) -> None:
        self.hook, self.batch = hook, batch
        self.die = die
        self.has_died = False
        setattr(self, hook, self._look)

    def _look(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        is_rehearsal = getattr(trainer, "is_rehearsal", False)
        if trainer.sanity_checking or is_rehearsal or self.has_died:
            return
        if trainer.fit_loop.total_batch_idx >= self.batch:
            self.has_died = True
            if self.die is None:
                raise Killed
            self.die(trainer)


def train(
    folder: Path,
    *,
    resume: bool = False,
    kill: pl.Callback | None = None,
    last: bool = False,
    without: Sequence[str] = (),
    loader: Any = None,
    logger: Any = None,
    every: int | None = 1,
    scheduler: str = "step",
    num_workers: int = 0,
    logs_late: bool = False,
    others: Sequence[pl.Callback] = (),
    seed: int = 7,
    kind: type[Dropping] = Dropping,
    proof: Any = None,
    **options: Any,
) -> Run:
    """Train from the start, or from `last.ckpt` where there is one.

    `kill` ends it early, `last` of all callbacks or first; `without` names those of
    ours that are left out, and `others` are more; `scheduler` is the interval of a
    schedule, "plateau" or "plateau by step"; a `kind` with a mixin brings its callback
    itself. Without a `proof` only the run that nobody interrupts begins with one, from
    which the others must not differ.
    """
    torch.manual_seed(seed)
    path = folder / "checkpoints" / "last.ckpt"
    start = path if resume and path.exists() else None
    proof = proof or ("warn" if kill is None and start is None else "off")
    if issubclass(kind, AccumulationMixin):
        without = [*without, "AccumulationCallback"]
    # All that a run needs to go on exactly.
    ours: list[pl.Callback] = [
        AccumulationCallback(PerToken(), proof=proof),
        WindowMonitor(every_n_steps=1),
        ExactResume(every_n_train_steps=every),
    ]
    used = [*others, *(each for each in ours if type(each).__name__ not in without)]
    if kill is not None:
        if last:
            kill.late_place = 9  # type: ignore[attr-defined]
        used = [kill, *used]
    how: dict[str, Any] = {
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": folder},
        **{"accumulate_grad_batches": 3, "val_check_interval": 4},
        **{"log_every_n_steps": 1, "logger": logger or MetricsCSVLogger(folder)},
    }
    trainer = pl.Trainer(callbacks=used, **{**how, **options})
    module: Any = kind(scheduler=scheduler, logs_late=logs_late)
    module.proof = proof
    rows = shuffled(num_workers=num_workers) if loader is None else loader
    validation = ResumableLoader(VALIDATION, 4, collate_fn=pad)
    trainer.fit(module, rows, validation, ckpt_path=start, weights_only=True)
    return module, trainer


def shuffled(**options: Any) -> ResumableLoader:
    return ResumableLoader(TRAIN, 4, shuffle=True, seed=5, collate_fn=pad, **options)


def interrupted(
    folder: Path,
    *kills: KillAt,
    make: Callable[[], Any] | None = None,
    last: bool = False,
    **options: Any,
) -> Run:
    """Train until each of these has ended it, every time in what could be another
    process; then go on to the end. `make` makes a loader for each."""

    def go_on(**more: Any) -> Run:
        loader = {"loader": make()} if make else {}
        return train(folder, resume=True, **loader, **options, **more)

    for kill in kills:
        with contextlib.suppress(Killed, SystemExit):
            go_on(kill=kill, last=last)
        assert kill.has_died
    return go_on()


def unlike(whole: Run, found: Run) -> list[str]:
    """Where the ends of two runs differ, to the last bit, or the rows that the second
    one has read are not those that were left, where they are noted."""
    read, rest = (getattr(module, "read", []) for module, _ in (whole, found))
    others = [] if rest == read[len(read) - len(rest) :] else ["other rows"]
    return others + differing(state_of(*whole), state_of(*found))


def ask(hook: str, batch: int, *numbers: int) -> KillAt:
    """Sends signals, or SIGTERM, in a hook of a certain batch."""

    def send(_: Any) -> None:
        for number in numbers or (signal.SIGTERM,):
            signal.raise_signal(number)

    return KillAt(hook, batch, send)


def rows(folder: Path) -> list[Row]:
    return MetricsCSVLogger(folder).rows()


def state_of(module: Dropping, trainer: pl.Trainer) -> dict[str, Any]:
    """All that must be the same, for `same`."""
    optimizer = trainer.optimizers[0]
    return {
        "weights": {n: value.clone() for n, value in module.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "lr": [group["lr"] for group in optimizer.param_groups],
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


def differing(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two states differ, to the last bit."""
    if isinstance(one, Tensor):
        return [] if torch.equal(one, other) else [at]
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{at}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [x for k in one for x in differing(one[k], other[k], f"{at}.{k}")]
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{at}: {len(one)} and {len(other)}"]
        pairs = enumerate(zip(one, other, strict=True))
        return [x for i, (a, b) in pairs for x in differing(a, b, f"{at}.{i}")]
    return [] if one == other else [f"{at}: {one!r} and {other!r}"]


def close(one: list[Row], other: list[Row]) -> list[str]:
    """Where rows differ by more than rounding: sums over a window that a checkpoint has
    cut in two are added up in another order."""
    if len(one) != len(other):
        return [f"{len(one)} and {len(other)} rows"]
    return [
        f"row {number}, {name}: {a.get(name)} and {b.get(name)}"
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        for name in a.keys() | b.keys()
        if name not in a or name not in b or not _is_close(a[name], b[name])
    ]


def _is_close(one: str, other: str) -> bool:
    return one == other or abs(float(one) - float(other)) <= 1e-12 * abs(float(one))
