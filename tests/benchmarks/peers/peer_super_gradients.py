"""Super-Gradients: `batch_accumulate`, as it is and with the rate divided by hand."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.benchmarks.peers.stand_in import stand_in
from tests.benchmarks.peers.work import CausalNet, Work, loss_of, pad_as_pair

os.environ["CRASH_HANDLER"] = "FALSE"  # it keeps the console in files of its own
stand_in(
    "torchvision",
    "onnx",
    "onnxruntime",
    "onnxsim",
    "albumentations",
    "data_gradients",
    "pycocotools",
    "imagesize",
)

from super_gradients.training import Trainer  # noqa: E402  # pyright: ignore

PACKAGES = ("super-gradients",)


class Loss(nn.Module):
    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return loss_of(logits, labels)


def train(work: Work, net: CausalNet, *, divides: bool = False) -> None:
    """It sums gradients and divides nothing: then the rate must be divided."""
    optimizer = work.make_optimizer(net.parameters())
    for group in optimizer.param_groups:
        group["lr"] /= work.accumulate if divides else 1
    rows: Any = work.rows
    loader = DataLoader(rows, work.micro_batch, collate_fn=pad_as_pair)
    with tempfile.TemporaryDirectory() as folder:
        Trainer("peers", ckpt_root_dir=folder).train(
            model=net,
            training_params={
                "max_epochs": 1,
                "batch_accumulate": work.accumulate,
                "optimizer": optimizer,
                "lr_mode": None,
                "loss": Loss(),
                "metric_to_watch": "Loss",
                "greater_metric_to_watch_is_better": False,
                "average_best_models": False,
                "save_model": False,
                "silent_mode": True,
            },
            train_loader=loader,
            valid_loader=loader,
        )


VARIANTS = {
    "Super-Gradients": train,
    "Super-Gradients, rate / N by hand": partial(train, divides=True),
}
