"""How large should a batch be, and how does the rate follow?

    trainkit train experiment=batch_size
    trainkit train experiment=batch_size data.batch_size=64 micro_batching.size=8
    python -m recipes.batch_size.study runs/study    # all windows, rules and seeds

The decoder of the recipe code_lm, small, on pieces of the standard library's functions.
One pass over the data and a level rate, so that only the window makes a difference.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from trainkit.recipes import code_lm  # type: ignore[import-not-found]

from trainkit import ResumableLoader


def read_pieces(length: int) -> Tensor:
    """All functions, one after the other, cut into pieces of so many bytes."""
    text = b"".join(code_lm.read_functions())
    whole = len(text) // length * length
    return torch.tensor(list(text[:whole])).view(-1, length)


class Pieces(LightningDataModule):
    """Pieces of equal length, each with the next byte as the label of every byte.

    All pieces weigh the same, so a window of 64 has twice the tokens of one of 32.

    Args:
        batch_size: pieces in a batch of the loader, which is a window.
        max_length: labels of a piece.
        num_train: pieces to train on, at most.
        num_val: pieces to validate on, the same for every seed.
        seed: of the order in which they are trained on.
        num_workers: processes that load.
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        max_length: int = 64,
        num_train: int = 40_960,
        num_val: int = 512,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size, self.max_length = batch_size, max_length
        self.num_train, self.num_val = num_train, num_val
        self.seed, self.num_workers = seed, num_workers

    def setup(self, stage: str) -> None:
        pieces = read_pieces(self.max_length + 1)
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
        rows = [{"ids": each[:-1], "labels": each[1:]} for each in pieces[order]]
        self.val_rows = rows[: self.num_val]
        self.train_rows = rows[self.num_val :][: self.num_train]

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(
            self.train_rows,
            batch_size=self.batch_size,
            shuffle=True,
            seed=self.seed,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.val_rows, batch_size=64)


class SmallLM(code_lm.CodeLM):
    """The decoder of code_lm over bytes, with 44,160 parameters.

    Args:
        d_model: width.
        num_layers: depth.
        num_heads: of attention.
        max_length: the longest sequence it can read.
    """

    def __init__(
        self,
        *,
        d_model: int = 32,
        num_layers: int = 2,
        num_heads: int = 2,
        max_length: int = 64,
    ) -> None:
        super().__init__(
            d_model=d_model,
            num_layers=num_layers,
            num_heads=num_heads,
            max_length=max_length,
        )


if __name__ == "__main__":
    from trainkit.cli.script import train_file

    train_file(__file__, "experiment=batch_size", model="SmallLM", data="Pieces")
