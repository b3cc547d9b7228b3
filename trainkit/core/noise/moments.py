"""The noise scale of a training, measured in its own windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.gradients import gradients_of, parameters_of
from trainkit.core.noise.estimate import COLUMNS, NoiseEstimate
from trainkit.core.noise.norms import PassNorms, refuse_shards
from trainkit.core.plan.options import check_whole_number
from trainkit.core.window import WindowStats
from trainkit.errors import TrainkitError


class NoiseMoments:
    """Sums over measured windows, from which the gradient noise scale is estimated.

        noise = NoiseMoments(accumulator, optimizer)
        for micro_batches in windows:
            noise.watch()
            for batch in micro_batches:
                accumulator.backward(loss_of(batch), batch)
            stats = accumulator.finish(optimizer)
            noise.add(stats, samples=64)
            optimizer.step()
        print(noise.estimate())

    A window that is not watched costs nothing; there is no need to watch all. Norms are
    taken in hooks and stay on the device. On several ranks each measured window needs
    one small sum over ranks.

    Args:
        accumulator: of the windows.
        optimizer_or_parameters: what trains.
        last: the estimate is over at most so many measured windows.

    Attributes:
        why_not: why nothing can be measured, once that is known.
        table: the sums of each window that was added, as `COLUMNS` names them, on its
            device; zeros if some of it was not seen.

    Raises:
        TrainkitError: the loss has several terms, or a rank has parts of parameters.
    """

    def __init__(
        self,
        accumulator: Accumulator,
        optimizer_or_parameters: Any,
        *,
        last: int = 160,
    ) -> None:
        check_whole_number("NoiseMoments last", last, hint="160 is the default.")
        if len(accumulator.strategies) > 1:
            raise TrainkitError(
                f"noise scale: a micro-batch must have one weight, and the terms "
                f"{list(accumulator.strategies)} of the loss have one each. Leave it "
                f"out, or give the loss one strategy."
            )
        self._accumulator = accumulator
        is_optimizer = hasattr(optimizer_or_parameters, "param_groups")
        found = parameters_of(optimizer_or_parameters)
        refuse_shards(found, accumulator.module)
        # Finetuning may add some to an optimizer; a generator is used up now.
        self._source = optimizer_or_parameters if is_optimizer else found
        self._norms, self._last = PassNorms(), last
        self.table: Tensor = torch.zeros(0, len(COLUMNS))

    @property
    def why_not(self) -> str | None:
        return self._norms.why_not

    # ---- a window --------------------------------------------------------------------

    @property
    def is_watching(self) -> bool:
        """Whether the open window is measured."""
        return self._accumulator.gradients.norms is self._norms

    @property
    def is_finished(self) -> bool:
        """Whether a watched window has been finished, and can be added."""
        return self.is_watching and self._norms.parts is not None

    def watch(self) -> None:
        """Measure the window that begins now."""
        parameters = parameters_of(self._source)
        refuse_shards(parameters)
        self._norms = PassNorms(parameters)
        self._accumulator.gradients.norms = self._norms

    def stop(self) -> None:
        """Take all hooks away."""
        self._norms.stop()
        if self.is_watching:
            self._accumulator.gradients.norms = None

    def add(
        self,
        stats: WindowStats,
        *,
        samples: float | None = None,
        scale: Tensor | float = 1.0,
    ) -> None:
        """Add the window that was watched and has been finished.

        Every rank must call it, before its gradients are clipped.

        Args:
            stats: what `finish` returned.
            samples: how many samples it had on all ranks; not needed where they were
                counted in `stats`.
            scale: what a gradient scaler has multiplied the gradients by, if they are
                not unscaled yet.
        """
        if not self.is_finished:
            raise TrainkitError(
                "NoiseMoments.add(): the window must be watched and finished, and "
                f"{'was not finished' if self.is_watching else 'was not watched'}. "
                f"Call watch() before its first backward pass, then finish()."
            )
        gradients = gradients_of(parameters_of(self._source))
        row = self._norms.row(stats, gradients, self._accumulator.ranks, scale)
        if samples is not None:
            row[5] = torch.where(row[6] > 0, samples, 0.0)
        self.stop()
        self.table = torch.cat([self.table.to(row), row[None]])[-self._last :]

    # ---- the estimate ----------------------------------------------------------------

    def estimate(self) -> NoiseEstimate | None:
        """The estimate so far; waits for the device.

        None before five windows were measured, if each was one micro-batch on one
        rank, or if nobody has counted samples.
        """
        return NoiseEstimate.of(self.table.tolist())

    def state_dict(self) -> dict[str, Any]:
        """The sums, for a checkpoint; waits for the device. A window that is open is
        not measured."""
        return {"table": self.table.cpu()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume what `state_dict` has saved."""
        self.table = state["table"].to(self._accumulator.device)
