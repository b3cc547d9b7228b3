"""Trainings that are killed at random moments, and started again until they end.

    python -m tests.benchmarks.kills [--kills 1000] [--seed 0] [--only KIND ...]

Each training gets one to three signals of SIGKILL, SIGTERM, SIGINT and SIGUSR1, each at
a random moment, and the same program again after each. In the end its weights and its
rows of metrics must be those of a training that nobody killed, to the bit. Windows of
all kinds take turns. Processes are forks of one that has imported all, so that a
kill takes about two seconds. The exit status is 1 if one training ended otherwise.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.benchmarks.measuring import asked
from tests.helpers import TokenNet, pad, quiet_lightning, ragged_sequences, token_loss
from tests.helpers import trainer as make_trainer
from tests.zoo.modules import Plain
from trainkit import (
    AccumulationCallback,
    ExactResume,
    MicroBatching,
    PerToken,
    ResumableLoader,
    ResumableStream,
    WindowMonitor,
    WindowSampler,
)
from trainkit.lit import MetricsCSVLogger

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ROWS = ragged_sequences(64, longest=9)
KINDS = ("streamed", "split", "planned", "stream", "pooled")
PATIENCE = 120.0
"""Seconds after which a training that got a signal has hung."""


class Stream(IterableDataset[Any]):
    """The rows one after another, without a length."""

    row = following = 0

    def __iter__(self) -> Any:
        self.row, self.following = self.following, 0
        while self.row < len(ROWS):
            self.row += 1
            yield ROWS[self.row - 1]

    def state_dict(self) -> dict[str, int]:
        return {"row": self.row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.following = state["row"]


class Net(Plain):
    """Dropout, AdamW, a schedule by steps, logged values and a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(TokenNet(), nn.Dropout(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.004)  # so that signals come within steps, too
        loss = token_loss(self.net, batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", token_loss(self.net, batch))

    def val_dataloader(self) -> Any:
        return DataLoader(ROWS[:8], 4, collate_fn=pad)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        curve = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=40)
        return [optimizer], [{"scheduler": curve, "interval": "step"}]


def loading(kind: str) -> tuple[Any, int, MicroBatching | None]:
    """The loader, how many of its batches make a window, and how they are cut."""
    if kind == "planned":
        plan = WindowSampler([len(x) for x, _ in ROWS], window=20, tokens=30)
        loader = ResumableLoader(ROWS, batch_sampler=plan, collate_fn=pad)
        return loader, plan.micro_batches, None
    if kind == "stream":
        stream = StatefulDataLoader(Stream(), 4, collate_fn=pad)
        return ResumableStream(stream), 3, None
    if kind == "pooled":
        loader = ResumableLoader(ROWS, 4, shuffle=True, collate_fn=pad)
        return loader, 1, MicroBatching(tokens=30, pool=3)
    if kind == "split":
        loader = ResumableLoader(ROWS, 8, shuffle=True, collate_fn=pad)
        return loader, 1, MicroBatching(size=4)
    return ResumableLoader(ROWS, 4, shuffle=True, collate_fn=pad), 3, None


def train(kind: str) -> None:
    """Train in the current folder, or continue what is there, to the end."""
    torch.manual_seed(3)
    loader, accumulate, cut = loading(kind)
    fit = make_trainer(
        accumulate,
        val_check_interval=5,
        enable_checkpointing=True,
        logger=MetricsCSVLogger("runs"),
        callbacks=[
            AccumulationCallback(PerToken(), micro_batching=cut),
            ExactResume(every_n_train_steps=3),
            WindowMonitor(every_n_steps=1),
        ],
    )
    module = Net()
    fit.fit(module, loader, ckpt_path="last")
    torch.save(module.state_dict(), "end.tmp")
    Path("end.tmp").rename("end.pt")


def start(folder: Path, kind: str) -> int:
    """Start a training in a process of its own, and return its number."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.chdir(folder)
        out = os.open("out.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        with quiet_lightning():
            train(kind)
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(process: int, seconds: float) -> int | None:
    """The status of a process that ends within some seconds; else None."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.005)
    return None


def killed(folder: Path, kind: str, seconds: float, draw: random.Random) -> list[Any]:
    """Kill a training up to three times, let it end, and say what was done to it."""
    done: list[Any] = []
    for _ in range(draw.randint(1, 3)):
        moment, sent = draw.uniform(0, seconds), draw.choice(SIGNALS)
        process = start(folder, kind)
        status = wait(process, moment)
        if status is not None:
            break  # it was quicker
        os.kill(process, sent)
        status = wait(process, PATIENCE)
        done.append((round(moment, 2), sent.name, status))
        if status is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    if not (folder / "end.pt").exists():
        done.append(("end", wait(start(folder, kind), PATIENCE)))
    return done


def result(folder: Path) -> tuple[dict[str, Any], str] | None:
    """The weights and the rows of a training that has ended."""
    if not (folder / "end.pt").exists():
        return None
    rows = (folder / "runs" / "metrics.csv").read_text()
    return torch.load(folder / "end.pt"), rows


def is_same(one: Any, other: Any) -> bool:
    """Whether two results are equal to the bit."""
    if one is None or one[1] != other[1]:
        return False
    return all(torch.equal(one[0][name], value) for name, value in other[0].items())


def main() -> int:
    """Kill trainings until there were enough kills."""
    options = asked(__doc__, kills=1000, seed=0, only=KINDS)
    torch.set_num_threads(1)  # sums are split by threads
    warnings.simplefilter("ignore")
    draw, base = random.Random(options.seed), Path(tempfile.mkdtemp())
    whole, seconds = {}, {}
    for kind in options.only:
        folder = base / kind
        folder.mkdir()
        began = time.monotonic()
        wait(start(folder, kind), PATIENCE)
        whole[kind], seconds[kind] = result(folder), time.monotonic() - began
    kills = trainings = others = 0
    while kills < options.kills:
        kind = options.only[trainings % len(options.only)]
        folder = Path(tempfile.mkdtemp(dir=base))
        done = killed(folder, kind, seconds[kind], draw)
        trainings, kills = trainings + 1, kills + sum(len(each) == 3 for each in done)
        hung = any(each[-1] is None for each in done)
        if not hung and is_same(result(folder), whole[kind]):
            shutil.rmtree(folder)
        else:
            others += 1
            print(f"{kind}: another end after {done}, in {folder}", flush=True)
    print(f"{kills} kills of {trainings} trainings: {others} ended otherwise")
    if not others:
        shutil.rmtree(base)
    return int(others > 0)


if __name__ == "__main__":
    sys.exit(main())
