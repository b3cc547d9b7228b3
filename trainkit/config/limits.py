"""Settings at which Lightning or NumPy would break down later."""

from __future__ import annotations

import math
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from trainkit.config.targets import TARGET, locate
from trainkit.errors import TrainkitError
from trainkit.lit.logs.monitor import WindowMonitor


@dataclass(frozen=True)
class Limit:
    """From where to where a number may go, and what to do about another one."""

    key: str
    remedy: str
    least: float = 0
    most: float = math.inf
    excludes_least: bool = False

    @property
    def rule(self) -> str:
        if self.excludes_least:
            return f"above {self.least}"
        if self.most < math.inf:
            return f"from {self.least} to {self.most}"
        return f"at least {self.least}"

    def allows(self, number: float) -> bool:
        if self.excludes_least and number == self.least:
            return False
        return self.least <= number <= self.most


_LIMITS = (
    Limit(
        "trainer.accumulate_grad_batches",
        "1 takes an optimizer step after each micro-batch.",
        least=1,
    ),
    Limit(
        "trainer.val_check_interval",
        "trainer.limit_val_batches=0 leaves validation out.",
        excludes_least=True,
    ),
    Limit(
        "trainer.check_val_every_n_epoch",
        "trainer.limit_val_batches=0 leaves validation out; null counts "
        "trainer.val_check_interval across epochs.",
        least=1,
    ),
    Limit("trainer.log_every_n_steps", "0 logs nothing of what each step was."),
    Limit("seed", "null leaves the random generators alone.", most=2**32 - 1),
)


def check_limits(config: DictConfig) -> None:
    """Refuse numbers that are out of range, and a mode that there is not."""
    for limit in _LIMITS:
        value = OmegaConf.select(config, limit.key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and not limit.allows(value):
            raise TrainkitError(
                f"{limit.key}: must be {limit.rule}, received {value}. {limit.remedy}"
            )
    if config.mode not in ("min", "max"):
        raise TrainkitError(
            f"mode: must be min or max, received {config.mode!r}. max is for a metric "
            f"that should grow, such as an accuracy."
        )
    for name, node in (config.callbacks or {}).items():
        if node and locate(node[TARGET]) is WindowMonitor:
            _refuse_no_steps(f"callbacks.{name}", node.get("every_n_steps"))


def _refuse_no_steps(key: str, every_n_steps: int | None) -> None:
    """To Lightning, 0 means no logging; the monitor it leaves without a use."""
    if every_n_steps is not None and every_n_steps < 1:
        raise TrainkitError(
            f"{key}.every_n_steps: must be at least 1, received {every_n_steps}; in "
            f"the group `default` it is trainer.log_every_n_steps. {key}=null leaves "
            f"the monitor out, {key}.every_n_steps=50 keeps it."
        )
