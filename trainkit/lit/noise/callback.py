"""The callback that measures the noise scale."""

from __future__ import annotations

from lightning.pytorch import Callback

from trainkit.core.noise.estimate import NoiseEstimate


class NoiseScale(Callback):
    """Measures the noise scale."""

    estimate: NoiseEstimate | None = None
    why_not: str | None = None
