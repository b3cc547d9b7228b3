"""Micro-batches reach the device once each, and are weighed as they arrive; and what
only a GPU shows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import NAIVE, deviation, trainer, weights
from tests.lit.fronts import windows_of
from tests.lit.split.common import (
    CUTS,
    FIXED,
    SIZES,
    START,
    TRANSFER_HOOKS,
    Split,
    assert_as_whole,
    data_module,
    fit,
    loader_batches,
    off,
    on_the_way,
)
from tests.zoo.modules import Plain, Rows, Terms, hooked, on_front
from trainkit import (
    AccumulationMixin,
    AccumulationStrategy,
    MicroBatching,
    PerSample,
    PerToken,
)
from trainkit.core.nested import tensors
from trainkit.core.split.cutting import Cutter
from trainkit.lit.split import arriving
from trainkit.lit.split.arriving import Transfer
from trainkit.lit.split.micro_batches import CutWindow

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")
BEFORE, TO_DEVICE, AFTER = TRANSFER_HOOKS


def other_ids(module: Any, batch: Any) -> Any:
    return {**batch, "ids": (batch["ids"] + 1) % 13}


def masked(module: Any, batch: Any) -> Any:
    """As masked models do it on the device: some labels do not count, but the first."""
    is_masked = batch["ids"] % 3 == 0
    is_masked[:, 0] = False
    return {**batch, "labels": batch["labels"].masked_fill(is_masked, -100)}


def labelling(module: Any, batch: Any) -> Any:
    return {"ids": batch["ids"], "labels": batch["targets"]}


def hiding(module: Any, batch: Any) -> Any:
    return {"ids": batch["ids"], "targets": batch["labels"]}


PACKS = on_the_way(AFTER, lambda module, batch: [batch])
CASES: dict[str, Any] = {
    **{hook: {"hooks": on_the_way(hook, other_ids)} for hook in TRANSFER_HOOKS},
    "of a data module": {"owner": "data", "hooks": on_the_way(AFTER, other_ids)},
    "labels of a data module": {"owner": "data", "hooks": on_the_way(AFTER, masked)},
    "labels before the cut": {"hooks": on_the_way(BEFORE, masked)},
    "labels": {
        "hooks": on_the_way(TO_DEVICE, masked),
        "cut": CUTS["tokens"],
        "naive": NAIVE,
    },
    "labels, auto": {"hooks": on_the_way(AFTER, masked), "cut": CUTS["auto"]},
    "labels, windows of two": {"hooks": on_the_way(AFTER, masked), "window": 2},
    "labels made there": {
        "hooks": {**on_the_way(BEFORE, hiding), **on_the_way(AFTER, labelling)},
        "cut": MicroBatching(size=4, trim=False),
    },
}


@cache
def without_hooks(window: int) -> Tensor:
    fit(module := Split(cut=None), window=window)
    return weights(module)


@pytest.mark.parametrize("name", CASES)
def test_what_hooks_change_equals_whole_batches(name: str) -> None:
    """Also labels that they change, or make: each micro-batch weighs what it weighs as
    `training_step` gets it. Without the hook, a control, it is another training."""
    how = {"owner": "module", "cut": FIXED, **CASES[name]}
    hooks, owner = how.pop("hooks"), how.pop("owner")
    kind: Any = Split if owner == "data" else hooked(Split, **hooks)
    how["data"] = data_module(hooks) if owner == "data" else None
    ours = assert_as_whole(kind, how.pop("cut"), naive=how.pop("naive", 0), **how)
    untouched = without_hooks(how.get("window", 1))
    found = deviation(untouched, ours.lightning_module, START)
    assert found < 1e-10 if "made" in name else found > NAIVE


@pytest.mark.parametrize("front", ["callback", "terms", "another structure"])
def test_what_changes_there_weighs_so_on_any_front(front: str) -> None:
    hooks = on_the_way(AFTER, masked)
    if front == "another structure":
        of_first = {"training_step": lambda module, batch, _: module.loss_of(batch[0])}
        kind, whole = hooked(Split, **PACKS, **of_first), Split(cut=None)
        module, ours = kind(strategy=PerToken("0.labels")), []
    elif front == "callback":
        module, ours = on_front(front, hooked(Plain, **hooks), cut=FIXED)
        whole: Any = hooked(Split, **hooks)(cut=None)
    else:  # each divided by a total of its own
        module, ours = hooked(Terms, **hooks)(cut=FIXED), []
        whole = hooked(Terms, **hooks, is_whole=True)(strategy=PerSample())
    assert off(module, whole, *ours) < 1e-10


@dataclass(frozen=True)
class Counting(AccumulationStrategy):
    """Counts the rows that it is asked for, by their batches."""

    asked: list[int]

    def weight(self, batch: Any) -> Any:
        self.asked.append(len(batch["ids"]))
        return PerToken().weight(batch)


@pytest.mark.parametrize("has_hook", [True, False])
def test_each_micro_batch_travels_and_is_weighed_once(has_hook: bool) -> None:
    """And hooks run for the loader batch before the cut, for micro-batches after it."""
    seen: dict[str, list[int]] = {hook: [] for hook in TRANSFER_HOOKS}
    hooks: dict[str, Any] = {}
    for hook, sizes in seen.items() if has_hook else ():

        def count(module: Any, batch: Any, sizes: list[int] = sizes) -> Any:
            sizes.append(len(batch["ids"]))
            return batch

        hooks |= on_the_way(hook, count)
    strategy, cut = Counting([]), MicroBatching(size=4, trim=False)
    module: Any = hooked(Split, **hooks)(strategy=strategy, cut=cut)
    module.proof = "off"  # its rehearsals are counted too
    fit(module, max_epochs=1)
    assert sum(rows for rows in strategy.asked if rows <= 4) == sum(SIZES)
    assert seen[BEFORE] == list(SIZES) * has_hook
    for hook in (TO_DEVICE, AFTER):
        assert sum(seen[hook]) == sum(SIZES) * has_hook
        assert max(seen[hook], default=0) <= 4


def test_to_a_gpu_they_are_copied_from_pinned_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the host does not wait for the copy."""
    fitted, (batch, *_) = trainer(), [*loader_batches()]
    transfer = Transfer(fitted, Split(), {}, may_repeat=False)
    parts = Cutter(FIXED, PerToken()).cut(batch)
    current = CutWindow([], parts, len(parts), {}, are_said=False)
    pinned = [*map(id, tensors([part.batch for part in parts]))]
    for device, expected in (("cpu", []), ("cuda", pinned)):
        transfer._device, found = torch.device(device), list[int]()

        def pin(tensor: Tensor, found: list[int] = found) -> Tensor:
            found.append(id(tensor))
            return tensor

        monkeypatch.setattr(Tensor, "pin_memory", pin)
        monkeypatch.setattr(arriving, "move_data_to_device", lambda batch, to: batch)
        assert len(list(transfer.bring(current))) == len(parts)
        assert found == expected


# ---- memory that really runs out, and how much of it is used -------------------------

NUM_ROWS, MIB = 2**15, 2**20
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Deep(AccumulationMixin, Rows):
    """Its activations take far more memory than all else: 1 GiB for 2^15 rows."""

    accumulation = PerSample()

    def __init__(self, cut: MicroBatching | None, width: int = 1024) -> None:
        super().__init__(dtype=torch.float32)
        torch.manual_seed(0)
        self.micro_batching = cut
        layers: list[nn.Module] = [nn.Linear(16, width)]
        for _ in range(7):
            layers += [nn.Tanh(), nn.Linear(width, width)]
        self.net = nn.Sequential(*layers, nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return (self.net(x).squeeze(1) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit_deep(
    module: Deep, accelerator: str = "gpu", num_rows: int = NUM_ROWS, steps: int = 3
) -> Any:
    """Train; the module is on the CPU then."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(steps * num_rows, 16, generator=draw)
    fitted = trainer(accelerator=accelerator, max_epochs=1)
    fitted.fit(module, DataLoader(TensorDataset(x, x.sum(1)), num_rows))
    module.cpu()
    return fitted


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Only so much memory, beyond what is in use."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    most = torch.cuda.memory_reserved() + num_bytes
    torch.cuda.set_per_process_memory_fraction(most / whole)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.filterwarnings("ignore:GPU available but not used")
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=ON_GPU)])
def test_sizes_that_are_searched_on_a_device_equal_the_whole_batch(
    accelerator: str,
) -> None:
    module, whole = Deep(MicroBatching("auto"), width=32), Deep(None, width=32)
    start = weights(whole)
    for each in (module, whole):
        fit_deep(each, accelerator, num_rows=64, steps=50)
    assert deviation(module, whole, start) <= 2e-5


@pytest.mark.gpu
@ON_GPU[1]
def test_memory_that_runs_out_for_real_equals_the_whole_batch() -> None:
    module, whole = Deep(MicroBatching("auto")), Deep(None)
    start = weights(whole)
    fit_deep(whole)
    with room_for(600 * MIB):
        with pytest.raises(torch.OutOfMemoryError):  # the control
            fit_deep(Deep(None))
        gc.collect()  # the frames of the error hold its activations
        torch.cuda.empty_cache()
        found = windows_of(fit_deep(module)).micro_batch_size
    assert found is not None
    assert found < NUM_ROWS
    assert deviation(module, whole, start) <= 2e-5


@pytest.mark.gpu
@ON_GPU[1]
def test_peak_memory_is_that_of_a_micro_batch_whatever_the_loader_batch() -> None:
    peaks = {}
    for cut in (MicroBatching(size=2048), None):
        for num_rows in (2048, NUM_ROWS):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            fit_deep(Deep(cut), num_rows=num_rows)
            peaks[cut is None, num_rows] = torch.cuda.max_memory_allocated() - before
    assert peaks[False, NUM_ROWS] <= 1.1 * peaks[False, 2048]
    assert peaks[True, NUM_ROWS] > 4 * peaks[True, 2048]  # the control
