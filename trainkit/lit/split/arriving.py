"""Micro-batches on their way to the device, each while the one before computes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.checks import LateReading
from trainkit.core.nested import tensors, with_tensors
from trainkit.core.strategies import Weight
from trainkit.core.window import vector
from trainkit.errors import TrainkitError
from trainkit.lit._compat import as_hook, transfers_plainly
from trainkit.lit.split.errors import stop_iteration
from trainkit.lit.split.micro_batches import CutBatch

TRANSFER = ("batch_to_device", "transfer_batch_to_device", "on_after_batch_transfer")
"""The hooks on a batch's way to the device, in which Lightning logs nothing."""

ROUNDED = 1e-2
"""The tolerance for a weight that may be cast to a narrow dtype; a count is exact."""


class Transfer:
    """Brings micro-batches to the device, with the user's hooks for it.

    Hooks that nobody has are not called: that would cost as much as a small layer.

    Args:
        trainer: in `fit`.
        pl_module: the module that trains.
        accumulator: has the windows of the micro-batches.
        may_repeat: whether the loader batch may be needed again. Then tensors that are
            on the device already are copied: micro-batches are views of the loader
            batch, and a training step may write into its batch.

    Attributes:
        arrivals: weighs micro-batches on the device, if hooks may change them there.
    """

    def __init__(
        self,
        trainer: Any,
        pl_module: Any,
        accumulator: Accumulator,
        *,
        may_repeat: bool,
    ) -> None:
        self._module, self._may_repeat = pl_module, may_repeat
        self._device = trainer.strategy.root_device
        self._batch_to_device = trainer.strategy.batch_to_device
        self._is_plain = transfers_plainly(trainer, pl_module)
        is_host = self._device.type == "cpu"
        self._is_there = self._is_plain and is_host and not may_repeat
        self.arrivals = None if self._is_plain else Arrivals(accumulator)

    def each(self, current: CutBatch) -> Iterator[Any]:
        """Yield the micro-batches of a loader batch on the device, one after another;
        each is then the one under way."""
        if self._is_there:
            for index, part in enumerate(current.parts):
                current.index, current.on_device[index] = index, part.batch
                yield part.batch
            return
        if self.arrivals is not None:
            self.arrivals.begin()
        coming = iter(range(len(current.parts)))

        def move(batch: Any) -> Any:
            current.index = next(coming)
            return self._moved(batch)

        batches = [part.batch for part in current.parts]
        for index, batch in enumerate(moved(batches, move, self._device)):
            current.index, current.on_device[index] = index, batch
            if self.arrivals is not None and not current.is_filler:
                self.arrivals.check(current, batch)
            yield batch
        if self.arrivals is not None:
            self.arrivals.end()

    def _moved(self, batch: Any) -> Any:
        if self._may_repeat:
            batch = with_tensors(batch, self._copied)
        if not self._is_plain:
            with as_hook(self._module, TRANSFER[0]):  # as around a loader batch
                try:
                    return self._batch_to_device(batch)
                except StopIteration as error:
                    raise stop_iteration("a hook of the transfer") from error
        if self._device.type == "cpu":
            return batch
        return move_data_to_device(batch, self._device)

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.device == self._device else tensor


def moved(
    batches: Sequence[Any], move: Callable[[Any], Any], device: torch.device
) -> Iterator[Any]:
    """Yield each batch on the device while the next one is copied.

    On a GPU the copy runs from pinned memory on a stream of its own. The stream that
    computes waits for it; the host does not.

    Args:
        batches: the batches on the host.
        move: brings one to the device, with the module's hooks for it.
        device: the device.
    """
    if device.type != "cuda":
        for batch in batches:  # in a map(), a hook's StopIteration would be lost
            yield move(batch)
        return
    copies = torch.cuda.Stream(device)
    coming = _begin(batches[0], move, copies)
    for following in [*batches[1:], None]:
        batch, arrived = coming
        computes = torch.cuda.current_stream(device)
        computes.wait_event(arrived)
        for tensor in tensors(batch):
            if tensor.is_cuda:
                tensor.record_stream(computes)  # not to be reused while it is read
        if following is not None:
            coming = _begin(following, move, copies)
        yield batch


def _begin(batch: Any, move: Callable[[Any], Any], stream: Any) -> tuple[Any, Any]:
    pinned = with_tensors(batch, _pinned)
    with torch.cuda.stream(stream):
        on_device = move(pinned)
        arrived = torch.cuda.Event()
        arrived.record(stream)
    return on_device, arrived


def _pinned(tensor: Tensor) -> Tensor:
    is_plain = tensor.is_cpu and tensor.layout == torch.strided
    return tensor.pin_memory() if is_plain else tensor


class Arrivals:
    """Weighs micro-batches again after the user's hooks of the transfer.

    Labels that are made or masked on the device are too late for a total that is known
    beforehand. The numbers are read when a later window runs, so that nothing waits;
    but in the first window, and with `checks="now"`, before the step.

    Args:
        accumulator: has the windows of the micro-batches.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._compared: list[tuple[str, Weight, Weight, float]] = []
        self._waiting: deque[tuple[int, list[str], LateReading]] = deque()
        self._is_first = True

    def begin(self) -> None:
        """Begin a loader batch, or repeat it after memory ran out."""
        self._compared = []
        self.read(wait=False)

    def check(self, current: CutBatch, on_device: Any) -> None:
        """Compare the weight of the micro-batch that has arrived, as `training_step`
        will get it."""
        for term, strategy in self._accumulator.strategies.items():
            try:
                arrived = strategy.weight(on_device)
            except (TrainkitError, LookupError, TypeError, AttributeError):
                continue  # changed in structure, but perhaps right
            expected = current.weights[term][current.index]
            tolerance = 1e-9 if _is_count(arrived) else ROUNDED
            self._compared.append((term, expected, arrived, tolerance))

    def end(self) -> None:
        """End a loader batch, of which all micro-batches have run."""
        must_wait = self._is_first or self._accumulator.watch.checks == "now"
        self._is_first = False
        if not self._compared:
            return
        terms, *columns = zip(*self._compared, strict=True)
        found = [w for w in (*columns[1], *columns[0]) if isinstance(w, Tensor)]
        device = found[0].device if found else torch.device("cpu")
        reading = LateReading(torch.stack([vector(c, device) for c in columns]))
        self._waiting.append((self._accumulator.num_windows, list(terms), reading))
        self.read(wait=must_wait)

    def read(self, *, wait: bool) -> None:
        """Compare the weights that have reached the host; `wait` waits for the rest."""
        while self._waiting and (wait or self._waiting[0][2].arrived):
            self._compare(*self._waiting.popleft())

    def _compare(self, step: int, terms: list[str], reading: LateReading) -> None:
        for term, expected, arrived, tolerance in zip(
            terms, *reading.values(), strict=True
        ):
            if math.isclose(expected, arrived, rel_tol=tolerance, abs_tol=1e-9):
                continue
            taken = (
                " The step was taken with it; resume from a checkpoint before, or set "
                "checks='now' to stop before the step."
                if step < self._accumulator.num_windows
                else ""
            )
            raise TrainkitError(
                f"{type(self._accumulator.strategies[term]).__name__}: at optimizer "
                f"step {step} (counted from 0) a micro-batch weighed {expected:g} "
                f"before it went to the device, and weighs {arrived:g} after "
                f"transfer_batch_to_device and on_after_batch_transfer, so the window "
                f"is divided by a wrong total. Make the labels in the dataset, in the "
                f"collate function or in on_before_batch_transfer, which run before "
                f"the cut.{taken}"
            )


def _is_count(weight: Weight) -> bool:
    if isinstance(weight, Tensor):
        return not weight.is_floating_point()
    return isinstance(weight, int)
