"""A Lightning training on the workers of Ray Train: the windows of all of them are one.

    python recipes/launch/ray_train.py --workers 2 --accelerator cpu

Needs `pip install 'lightning-trainkit[ray]'`. A worker is a rank of DDP with rows of
its own. Ray prepares the Trainer; the callback reads from it what DDP does to
gradients, and divides by the weights of all workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from ray.train import RunConfig, ScalingConfig
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from trainkit import AccumulationCallback, PerToken

Batch = dict[str, Tensor]


def read_rows(number: int = 48) -> list[Batch]:
    """Rows of eight positions, of which one to eight have a label."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(number):
        labels = torch.randint(0, 5, (8,), generator=draw)
        labels[int(torch.randint(1, 9, (), generator=draw)) :] = -100
        inputs = torch.randn(8, 4, generator=draw, dtype=torch.float64)
        rows.append({"inputs": inputs, "labels": labels})
    return rows


class Tagger(LightningModule):
    """A linear layer at each position; nothing of it knows of trainkit or Ray."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 5).double()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.net(batch["inputs"])
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(batch_size: int, accumulate: int, workers: int = 1, **options: Any) -> Tagger:
    """Train, on one of several workers or in one process, and return the module.

    Args:
        batch_size: rows of a micro-batch.
        accumulate: micro-batches of a worker in a step.
        workers: how many share the rows.
        options: of the Trainer.
    """
    rows: Any = read_rows()
    module, sampler = Tagger(), None
    if workers > 1:
        sampler = DistributedSampler(rows, shuffle=False)
    trainer = Trainer(
        max_epochs=3,
        accumulate_grad_batches=accumulate,
        callbacks=[AccumulationCallback(PerToken())],
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
        **options,
    )
    if workers > 1:
        trainer = prepare_trainer(trainer)
    trainer.fit(module, DataLoader(rows, batch_size, sampler=sampler))
    return module


def work(config: dict[str, Any]) -> None:
    """Train on one worker; the first saves the weights."""
    options = {"strategy": RayDDPStrategy(), "plugins": [RayLightningEnvironment()]}
    options |= {"accelerator": config["accelerator"], "devices": "auto"}
    module = fit(2, 4, config["workers"], **options)
    if module.global_rank == 0:
        torch.save(module.state_dict(), config["to"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="gpu")
    parser.add_argument("--to", type=Path, default=Path("weights.pt"))
    given = parser.parse_args()
    place = given.to.absolute()
    config = {**vars(given), "to": str(place)}
    scaling = ScalingConfig(
        num_workers=given.workers, use_gpu=given.accelerator == "gpu"
    )
    storage = RunConfig(storage_path=str(place.parent))
    TorchTrainer(
        work, train_loop_config=config, scaling_config=scaling, run_config=storage
    ).fit()
    big = fit(2 * 4 * given.workers, 1, accelerator="cpu", devices=1)
    found = torch.load(place, weights_only=True)
    off = max((found[k] - each).abs().max() for k, each in big.state_dict().items())
    print(f"{given.workers} workers: {off:.0e} from the big batch in one process")


if __name__ == "__main__":
    main()
