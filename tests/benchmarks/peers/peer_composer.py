"""Composer: `device_train_microbatch_size`, counting samples or tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.benchmarks.peers.stand_in import stand_in
from tests.benchmarks.peers.work import IGNORED, CausalNet, Work, loss_of, pad

stand_in("torchvision", "mcli")

from composer import DataSpec, Trainer  # noqa: E402  # pyright: ignore
from composer.models import ComposerModel  # noqa: E402  # pyright: ignore
from composer.utils import dist  # noqa: E402  # pyright: ignore

PACKAGES = ("mosaicml",)


class Model(ComposerModel):
    def __init__(self, net: CausalNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["input_ids"])

    def loss(self, outputs: Any, batch: dict[str, Tensor], *args: Any) -> Tensor:
        return loss_of(outputs, batch["labels"])


def train(work: Work, net: CausalNet, *, on_tokens: bool = False) -> None:
    rows: Any = work.rows
    if work.world_size > 1 and not dist.is_initialized():
        dist.initialize_dist("cpu")
    loader = DataLoader(
        rows,
        work.window // work.world_size,
        sampler=dist.get_sampler(rows, shuffle=False),
        collate_fn=pad,
    )
    Trainer(
        model=Model(net),
        train_dataloader=DataSpec(loader, get_num_tokens_in_batch=count),
        optimizers=work.make_optimizer(net.parameters()),
        schedulers=[],
        max_duration="1ep",
        device="cpu",
        precision="fp32",
        device_train_microbatch_size=work.micro_batch,
        accumulate_train_batch_on_tokens=on_tokens,
        progress_bar=False,
    ).fit()


def count(batch: dict[str, Tensor]) -> dict[str, int]:
    predicted = int((batch["labels"][:, 1:] != IGNORED).sum())
    total = int(torch.numel(batch["labels"]))
    return {"total": total, "loss_generating": predicted}


VARIANTS = {"Composer": train, "Composer, on tokens": partial(train, on_tokens=True)}
