"""Lightning's W&B logger, for runs that need no account and cannot hang."""

from typing import TYPE_CHECKING

from trainkit._lazy import lazy_exports

if TYPE_CHECKING:
    from trainkit.cli.wandb_logger.logger import WandbRunLogger

__all__ = ["WandbRunLogger"]

__getattr__, __dir__ = lazy_exports(__name__, {"WandbRunLogger": ".logger"})
