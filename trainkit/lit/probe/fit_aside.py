"""A `fit` that nobody sees: a copy of a Trainer, on copies of what it would train."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch.utils._pytree import tree_map

from trainkit.core.generators import random_kept
from trainkit.errors import TrainkitError
from trainkit.lit._compat import copied_trainer
from trainkit.lit.callback.base import no_callbacks
from trainkit.lit.proof.copying import Copies, read_apart, refuse_gradients


def refuse_other_kinds(door: str, trainer: Any, module: Any) -> None:
    """Refuse what is no Trainer or no LightningModule, of either package."""
    for name, value, kind, part in (
        ("trainer", trainer, "Trainer", "fit_loop"),
        ("module", module, "LightningModule", "configure_optimizers"),
    ):
        if isinstance(value, type) or not hasattr(value, part):
            found = f"the class {value.__name__}" if isinstance(value, type) else ""
            raise TrainkitError(
                f"{door} {name}: must be a {kind} of Lightning, received "
                f"{found or type(value).__name__}. Pass an object; a net by itself "
                f"goes into a LightningModule."
            )


class Aside:
    """Copies of a Trainer, of a module and of its data, which can be fitted once.

    The Trainer, its callbacks and loggers, the module, the data module, loaders, their
    samplers and random states are as before afterwards, also after an error. Rows and
    large tensors of the data are shared.

    Args:
        trainer: as it will train.
        module: the module that it will train.
        data: a LightningDataModule, the training loader, several of them, or None.

    Raises:
        NotMeasured: the module cannot be copied.
    """

    def __init__(self, trainer: Any, module: Any, data: Any) -> None:
        self._live, self._device = module, trainer.strategy.root_device
        self.module = Copies(trainer, module, shares=False).module
        vars(self.module)["configure_callbacks"] = no_callbacks
        is_module = hasattr(data, "train_dataloader")
        self._takes = "datamodule" if is_module else "train_dataloaders"
        seen: dict[int, Any] = {id(getattr(data, "trainer", None)): None}
        self.data = tree_map(lambda each: read_apart(each, seen=seen), data)
        self.trainer = copied_trainer(trainer)
        self.trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        self.trainer.profiler = PassThroughProfiler()
        self.trainer.limit_val_batches = self.trainer.num_sanity_val_steps = 0
        # Lightning refuses more with a module that optimizes by itself.
        self.trainer.accumulate_grad_batches = 1

    def fit(self, callback: Callback) -> None:
        """Train with one callback, which ends it with `leaves_fit`."""
        self.trainer.callbacks = [callback]
        with random_kept(self._device), refuse_gradients(self._live):
            self.trainer.fit(self.module, **{self._takes: self.data})
