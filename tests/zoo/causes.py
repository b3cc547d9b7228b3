"""Modules with a known cause each, on ragged token rows or on small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

VOCABULARY, WIDTH = 13, 8


def sequences(number: int = 80) -> list[dict[str, Tensor]]:
    """Rows of 3 to 11 tokens; a fifth of their labels do not count."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(number):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[torch.rand(length, generator=generator) < 0.2] = -100
        labels[1] = ids[1]
        rows.append({"ids": ids, "labels": labels})
    return rows


def padded(rows: list[dict[str, Tensor]], *, left: bool = False) -> dict[str, Tensor]:
    longest = max(len(row["ids"]) for row in rows)

    def pad(values: Tensor, filler: int) -> Tensor:
        missing = longest - len(values)
        return F.pad(values, (missing, 0) if left else (0, missing), value=filler)

    ids = torch.stack([pad(row["ids"], 0) for row in rows])
    labels = torch.stack([pad(row["labels"], -100) for row in rows])
    return {"ids": ids, "labels": labels, "attention_mask": (ids != 0).long()}


def padded_left(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return padded(rows, left=True)


def counted(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
    batch: dict[str, Any] = padded(rows)
    batch["num_targets"] = int((batch["labels"] != -100).sum())
    return batch


def token_loader(collate: Callable[[Any], Any] = padded) -> DataLoader[Any]:
    return DataLoader(sequences(), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]


def image_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(60, 3, 6, 6, generator=generator)
    labels = torch.randint(0, 5, (60,), generator=generator)
    weights = torch.rand(60, generator=generator) + 0.1
    masks = (torch.rand(60, 6, 6, generator=generator) < 0.3).float()
    rows = list(zip(images, labels, weights, masks, strict=True))
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


class Base(LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tokens(Base):
    """A model of tokens whose loss is a function of logits and batch."""

    def __init__(
        self, loss: Callable[[Any, Tensor, dict[str, Any]], Any] | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU())
        self.head = nn.Linear(16, VOCABULARY)
        self.register_buffer("class_weights", torch.arange(1.0, VOCABULARY + 1))
        self.loss = loss or token_mean

    def features(self, batch: dict[str, Any]) -> Tensor:
        return self.body(self.embed(batch["ids"]))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        return self.loss(self, self.head(self.features(batch)), batch)


def token_mean(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"])


def token_sum(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="sum")


def shifted(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return token_mean(module, logits[:, :-1], {"labels": batch["labels"][:, 1:]})


def masked(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    mask = batch["attention_mask"]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["ids"], reduction="none")
    return (losses * mask).sum() / mask.sum()


def class_weighted(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(
        logits.transpose(1, 2), batch["labels"], weight=module.class_weights
    )


def row_mean(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    counts = (batch["labels"] != -100).sum(1)
    return (losses.sum(1) / counts).mean()


def root(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return token_mean(module, logits, batch).sqrt()


def by_host_count(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return token_sum(module, logits, batch) / batch["num_targets"]


def balanced(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    """The mean and the product of two means, as an expert's balance is."""
    mask = batch["attention_mask"][..., None]
    share = (logits.softmax(-1) * mask).sum((0, 1)) / mask.sum()
    chosen = (F.one_hot(logits.argmax(-1), VOCABULARY) * mask).sum((0, 1)) / mask.sum()
    return token_mean(module, logits, batch) + (share * chosen).sum()


def two_means(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    pooled = (logits * batch["attention_mask"][..., None]).sum(1)
    return token_mean(module, logits, batch) + 0.01 * pooled.square().mean()


def focal_over_batch(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    weights = (1 - (-losses).exp()) ** 2
    return (weights * losses).sum() / weights.sum()


class Noisy(Tokens):
    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        return F.dropout(hidden, 0.3, self.training) + 0.1 * torch.randn_like(hidden)


class NormalisedTokens(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def features(self, batch: dict[str, Any]) -> Tensor:
        return self.norm(super().features(batch).transpose(1, 2)).transpose(1, 2)


class Attending(Tokens):
    """A transformer's layer, with a mask of the padding or without."""

    def __init__(self, *, has_mask: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 16, dropout=0.1, batch_first=True
        )
        self.has_mask = has_mask

    def features(self, batch: dict[str, Any]) -> Tensor:
        mask = batch["attention_mask"] == 0 if self.has_mask else None
        return self.layer(super().features(batch), src_key_padding_mask=mask)


class Positioned(Tokens):
    """Positions are counted from the first column."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(32, WIDTH)

    def features(self, batch: dict[str, Any]) -> Tensor:
        ids = batch["ids"]
        numbers = self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.body(self.embed(ids) + numbers)


class Pooling(Tokens):
    """Classifies rows by the mean over all columns, padding too."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        logits = self.head(self.features(batch).mean(1))
        return F.cross_entropy(logits, batch["ids"][:, 0])


class WithMomentumCopy(Tokens):
    """A frozen copy of the embedding follows it in each training step."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)

    def features(self, batch: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            self.target.weight.mul_(0.9).add_(self.embed.weight, alpha=0.1)
        return super().features(batch)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.features(batch)
        far = (self.embed(batch["ids"]) - self.target(batch["ids"])).square().mean(-1)
        far = (far * batch["attention_mask"]).sum() / batch["attention_mask"].sum()
        return far


class WithCentre(Tokens):
    """A buffer is moved towards the mean of each batch, and subtracted."""

    def __init__(self) -> None:
        super().__init__()
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(16))

    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        out = hidden - self.centre
        with torch.no_grad():
            self.centre.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        return out


class Images(Base):
    """A small convolutional net; `loss` is a function of its features and the batch."""

    def __init__(
        self,
        loss: Callable[[Any, Tensor, Any], Any],
        norm: Callable[[int], nn.Module] = lambda width: nn.GroupNorm(2, width),
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.head = nn.Linear(8, 5)
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self, self.net(batch[0]), batch)


class Dropping(nn.Module):
    """Attends with dropout, whose place in the call names it, and computes anew in the
    backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def attend(self, x: Any) -> Any:
        maps = self.conv(x)
        rows = F.dropout(maps.flatten(2), 0.2, self.training)
        found = F.scaled_dot_product_attention(rows, rows, rows, None, 0.3)
        return found.view_as(maps)

    def forward(self, x: Any) -> Any:
        return checkpoint(self.attend, x, use_reentrant=False)


class DropPath(nn.Module):
    """Leaves rows out, as branches of vision transformers do (stochastic depth)."""

    drop_prob: float

    def __init__(self, drop_prob: float = 0.5) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, maps: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return maps
        kept = torch.empty(len(maps), 1, 1, 1, dtype=maps.dtype)
        return maps * kept.bernoulli_(1 - self.drop_prob) / (1 - self.drop_prob)


def dropping(loss: Any) -> Any:
    module = Images(loss)
    module.net = nn.Sequential(Dropping())
    return module


def classified(module: Any, maps: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(module.head(maps.mean((2, 3))), batch[1])


def sample_weighted(module: Any, maps: Tensor, batch: Any) -> Tensor:
    logits = module.head(maps.mean((2, 3)))
    losses = F.cross_entropy(logits, batch[1], reduction="none")
    return (losses * batch[2]).sum() / batch[2].sum()


def dice(module: Any, maps: Tensor, batch: Any) -> Tensor:
    chance, mask = maps.mean(1).sigmoid(), batch[3][:, 1:-1, 1:-1]
    both = (chance * mask).sum()
    return 1 - (2 * both + 1) / (chance.sum() + mask.sum() + 1)


def nt_xent(module: Any, maps: Tensor, batch: Any) -> Tensor:
    one = F.normalize(maps.mean((2, 3)), dim=1)
    other = F.normalize(module.net(batch[0].flip(3)).mean((2, 3)), dim=1)
    return F.cross_entropy(one @ other.T / 0.5, torch.arange(len(one)))


def vicreg(module: Any, maps: Tensor, batch: Any) -> Tensor:
    pooled = maps.mean((2, 3))
    spread = (pooled.var(0) + 1e-4).sqrt()
    return F.relu(1 - spread).mean() + classified(module, maps, batch)


def mixup(module: Any, maps: Tensor, batch: Any) -> Tensor:
    order = torch.randperm(len(maps))
    mixed = 0.7 * maps + 0.3 * maps[order]
    logits = module.head(mixed.mean((2, 3)))
    return 0.7 * F.cross_entropy(logits, batch[1]) + 0.3 * F.cross_entropy(
        logits, batch[1][order]
    )


class ByHand(Images):
    """Two optimizers, stepped in `training_step`."""

    def __init__(self) -> None:
        super().__init__(classified)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net.parameters(), lr=0.1),
            torch.optim.SGD(self.head.parameters(), lr=0.1),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(classified(self, self.net(batch[0]), batch))
            optimizer.step()


class TwoTerms(Tokens):
    """Terms by name, each with a denominator of its own."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        logits = self.head(self.features(batch))
        return {
            "loss": {
                "tokens": token_mean(self, logits, batch),
                "rows": row_mean(self, logits, batch),
            }
        }
