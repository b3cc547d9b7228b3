"""What only a GPU shows: memory that really runs out, and how much of it is used."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import deviation, trainer, weights
from tests.lit.fronts import windows_of
from tests.zoo.modules import Rows
from trainkit import AccumulationMixin, MicroBatching, PerSample

NUM_ROWS, MIB = 2**15, 2**20
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
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


def fit(
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


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=ON_GPU)])
def test_sizes_that_are_searched_on_a_device_equal_the_whole_batch(
    accelerator: str,
) -> None:
    module, whole = Deep(MicroBatching("auto"), width=32), Deep(None, width=32)
    start = weights(whole)
    for each in (module, whole):
        fit(each, accelerator, num_rows=64, steps=50)
    assert deviation(module, whole, start) <= 2e-5


@pytest.mark.gpu
@ON_GPU[1]
def test_memory_that_runs_out_for_real_equals_the_whole_batch() -> None:
    module, whole = Deep(MicroBatching("auto")), Deep(None)
    start = weights(whole)
    fit(whole)
    with room_for(600 * MIB):
        with pytest.raises(torch.OutOfMemoryError):  # the control
            fit(Deep(None))
        gc.collect()  # the frames of the error hold its activations
        torch.cuda.empty_cache()
        found = windows_of(fit(module)).micro_batch_size
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
            fit(Deep(cut), num_rows=num_rows)
            peaks[cut is None, num_rows] = torch.cuda.max_memory_allocated() - before
    assert peaks[False, NUM_ROWS] <= 1.1 * peaks[False, 2048]
    assert peaks[True, NUM_ROWS] > 4 * peaks[True, 2048]  # the control
