"""A `NoiseScale` that has measured what it is given."""

from __future__ import annotations

from typing import Any

from trainkit.core.noise.estimate import NoiseEstimate
from trainkit.lit.noise.callback import NoiseScale


class Given(NoiseScale):
    """Logs one noise scale in the rows of every second step.

    Args:
        samples: the noise scale; its interval is 30 % wide on either side.
        why_not: why there is none.
        bounded: whether the interval has an upper end.
    """

    def __init__(
        self,
        samples: float = 0,
        why_not: str | None = None,
        bounded: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.why_not, self._samples, self._bounded = why_not, samples, bounded
        self._seen = 0

    @property
    def estimate(self) -> NoiseEstimate | None:  # type: ignore[override]
        if not self._samples:
            return None
        ends = (self._samples / 1.3, self._samples * 1.3)
        if not self._bounded:
            ends = (ends[0], float("inf"))
        return NoiseEstimate(self._samples, *ends, 8.0, 100.0, 10 * self._seen)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.show_table(trainer, pl_module)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[tuple[str, str]]:
        return super().table_rows(trainer, pl_module) if self.why_not else []

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        self._seen += 1
        if self._seen % 2 == 0 and self._samples:
            found = {"window/noise_scale": self._samples}
            trainer.loggers[0].log_metrics(found, step=trainer.global_step + 1)

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen = state_dict["windows"]
