"""Windows that are planned over all ranks: the big batch's steps, also resumed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    NAIVE,
    TokenModule,
    deviation,
    pad,
    ragged_sequences,
    raise_rank_errors,
    run_ranks,
    train_on_windows,
    trainer,
    weights,
)
from tests.lit.resume.interrupting import KillAt, Killed
from tests.zoo.callbacks import Saving
from trainkit import (
    AccumulationCallback,
    AccumulationSchedule,
    ExactResume,
    PackCollate,
    PerToken,
    ResumableLoader,
    TrainkitError,
    WindowSampler,
)

DATA = ragged_sequences(44)
for _, labels in DATA:
    labels[0] = -100  # as PackCollate ignores the first label of each document
LENGTHS = [len(ids) for ids, _ in DATA]
WINDOW, EPOCHS = 16, 2
"""Windows of 16, 16 and 12 rows."""
EXACT = 1e-12


class Packed(TokenModule):
    """Reads flattened batches too, and notes the tokens of micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({"ids": batch["input_ids"], **batch}, batch_idx)


def padded(rows: Sequence[Any]) -> dict[str, Tensor]:
    batch = pad(rows)
    return {"input_ids": batch["ids"], **batch}


def flat(rows: Sequence[Any]) -> dict[str, Tensor]:
    return PackCollate()([{"input_ids": x, "labels": y} for x, y in rows])


def loader(num_ranks: int, flattened: bool, **how: Any) -> ResumableLoader:
    options: Any = {"window": WINDOW, "tokens": 40, "num_replicas": num_ranks, **how}
    plan = WindowSampler(LENGTHS, flattened=flattened, **options)
    collate = flat if flattened else padded
    return ResumableLoader(DATA, batch_sampler=plan, collate_fn=collate)


def fit(
    num_ranks: int,
    folder: str,
    *,
    flattened: bool = False,
    after: int = 0,
    resume: bool = False,
    ours: bool = True,
    **how: Any,
) -> Tensor:
    train = loader(num_ranks, flattened, **how)
    plan: Any = train.batch_sampler
    module = Packed(dtype=torch.float64)
    callbacks: list[Any] = []
    if ours:
        callbacks = [AccumulationCallback(PerToken()), ExactResume(dirpath=folder)]
    path = Path(folder, "stop.ckpt")
    if after:  # so many batches of the second epoch
        at = len(train) + after - 1
        callbacks += [Saving(path, at), KillAt("on_train_batch_end", at)]
    ranks: Any = {"devices": num_ranks, "strategy": "ddp" if num_ranks > 1 else "auto"}
    how = {"callbacks": callbacks, "enable_checkpointing": True, **ranks}
    fitting = trainer(plan.micro_batches, **how)
    with pytest.raises(Killed) if after else nullcontext():
        fitting.fit(module, train, ckpt_path=path if resume else None)
    return weights(module)


def big_batches() -> Tensor:
    order = WindowSampler(LENGTHS, window=WINDOW, tokens=40, num_replicas=1, rank=0)
    windows: list[Any] = []
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        rows = [DATA[n] for n in order.permuted(len(DATA))]
        windows += [rows[at : at + WINDOW] for at in range(0, len(rows), WINDOW)]
    module = TokenModule(dtype=torch.float64)
    return weights(train_on_windows(module, windows, epochs=1))


def micro_batches(num_ranks: int, **how: Any) -> int:
    plan: Any = loader(num_ranks, False, **how).batch_sampler
    return plan.micro_batches


def on_two_ranks(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    k = micro_batches(2)
    ends = {
        "padded": fit(2, f"{folder}/a"),
        "flattened": fit(2, f"{folder}/b", flattened=True),
        "plain": fit(2, f"{folder}/plain", ours=False),
        "stopped": fit(2, f"{folder}/inside", after=k + 1),
        "inside": fit(2, f"{folder}/inside", resume=True),
        "between": fit(2, f"{folder}/one", resume=True, micro_batches=k + 1),
    }
    fit(2, f"{folder}/two", after=k)
    fit(2, f"{folder}/two inside", after=k + 1)
    return ends


@pytest.fixture(scope="module")
def ends(tmp_path_factory: Any) -> dict[str, list[Tensor]]:
    """The weights at the ends of trainings, by what was done."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    fit(1, f"{folder}/one", after=micro_batches(1) * 2)
    two = raise_rank_errors(run_ranks(on_two_ranks, 2, folder))
    found = {name: [each[name] for each in two] for name in two[0]}
    found["alone"] = [fit(1, f"{folder}/c")]
    found["alone, flattened"] = [fit(1, f"{folder}/d", flattened=True)]
    found["alone, inside"] = [fit(1, f"{folder}/two inside", resume=True)]
    found["alone, between"] = [fit(1, f"{folder}/two", resume=True)]
    return found


@pytest.mark.filterwarnings("ignore:.*checkpoint")
def test_steps_are_those_of_big_batches_on_one_rank_and_on_two(ends: Any) -> None:
    """Padded and flattened, also resumed within a window and on another number of
    ranks. The control is plain Lightning on the same micro-batches."""
    start, exact = weights(Packed(dtype=torch.float64)), big_batches()
    off = {
        name: max(deviation(each, exact, start) for each in found)
        for name, found in ends.items()
    }
    assert off.pop("plain") > NAIVE
    assert off.pop("stopped") > NAIVE
    assert {name: far for name, far in off.items() if far > EXACT} == {}
    assert len(off) == 8


@pytest.mark.parametrize("is_scheduled", [False, True])
def test_other_windows_are_refused(is_scheduled: bool) -> None:
    """A schedule would cut the planned windows later in training."""
    k, ours = micro_batches(1), AccumulationCallback(PerToken())
    text = f"on each rank, {k}, received {k + 1}.*accumulate_grad_batches={k}"
    fitting = trainer(k + 1, callbacks=[ours])
    if is_scheduled:
        schedule = AccumulationSchedule({0: k, 1: k + 1})
        fitting = trainer(1, callbacks=[ours, schedule])
        text = "a schedule that changes it"
    with pytest.raises(TrainkitError, match=text):
        fitting.fit(Packed(), loader(1, False))
