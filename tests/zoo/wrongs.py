"""Modules whose step depends on more than the rows that it is given, and like ones that
do not."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo import causes
from tests.zoo.causes import Images, Tokens, classified
from trainkit import AccumulationMixin, PerSample, Uniform, Weighed


class OwnDivision(Tokens):
    """As tutorials on accumulation show it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss / self.trainer.accumulate_grad_batches


class OverBatches(Tokens):
    """A penalty that is shared out over the epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        penalty = self.head.weight.square().sum() / self.trainer.num_training_batches
        return super().training_step(batch, batch_idx) + penalty


class ByIndex(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + batch_idx)


class SecondPass(Tokens):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        (0.2 * self.head.weight.square().sum()).backward()


class BackwardInStep(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx).backward()
        return super().training_step(batch, batch_idx)


class ClipsEarly(Tokens):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class DividesInStep(Tokens):
    """Divides gradients in its own `optimizer_step`."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        optimizer, closure = args[2], args[3]

        def divided() -> Any:
            loss = closure()
            for each in self.parameters():
                assert each.grad is not None
                each.grad.div_(self.trainer.accumulate_grad_batches)
            return loss

        optimizer.step(closure=divided)


class Clamps(Tokens):
    """Hooks of parameters that are not linear, and close over the module."""

    def __init__(self) -> None:
        super().__init__()
        self.most = torch.tensor(0.01)
        for each in self.parameters():
            each.register_hook(lambda g: g.clamp(-self.most, self.most))


class Scales(Tokens):
    """The control: linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.tensor(0.5)
        self.head.weight.register_hook(lambda g: g * self.factor)


class SetsBefore(Tokens):
    """A hook sets what the step reads."""

    scale = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 1.0 + float((batch["labels"] != -100).sum()) / 10

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale


class Centring(Images):
    """A transfer hook looks across rows."""

    def __init__(self) -> None:
        super().__init__(classified)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] - batch[0].mean(0), *batch[1:]]


class CentringHook(Tokens):
    """A forward hook does."""

    def __init__(self) -> None:
        super().__init__()
        self.body.register_forward_hook(lambda m, x, out: out - 0.3 * out.mean(0))


class Bidirectional(Tokens):
    """Reads padding from the right."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 8, bidirectional=True, batch_first=True)

    def features(self, batch: Any) -> Tensor:
        return self.lstm(super().features(batch))[0]


class Bootstrap(Images):
    """BYOL, whose target still equals its net, and moves with each micro-batch."""

    def __init__(self) -> None:
        super().__init__(classified)
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one = F.normalize(self.net(batch[0]).mean((2, 3)), dim=1)
        other = F.normalize(self.target(batch[0].flip(3)).mean((2, 3)), dim=1)
        return (one - other).square().sum(1).mean()

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        pairs = zip(self.target.parameters(), self.net.parameters(), strict=True)
        for target, own in pairs:
            target.data.mul_(0.9).add_(own.data, alpha=0.1)


class OverLoaderSize(Images):
    """A sum over the batch size that the loader says."""

    def __init__(self) -> None:
        super().__init__(classified)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.net(batch[0]).mean((2, 3)))
        loader: Any = self.trainer.train_dataloader
        return F.cross_entropy(logits, batch[1], reduction="sum") / loader.batch_size


class ClassWeighted(Images):
    """Class weights that are an attribute."""

    def __init__(self) -> None:
        super().__init__(classified)
        self.rates = torch.arange(1.0, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.net(batch[0]).mean((2, 3)))
        return F.cross_entropy(logits, batch[1], weight=self.rates)


class Scaling(Images):
    """Scales images at random: all by some numbers, or each by one of its own."""

    def __init__(self, numbers: int | None) -> None:
        super().__init__(classified)
        self.numbers = numbers

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, *labels = batch
        shape = (len(images), 1, 1, 1)
        scale = torch.rand(self.numbers).mean() if self.numbers else torch.rand(shape)
        return super().training_step([images * scale, *labels], 0)


class DrawnAround(Images):
    """Draws each image's pixels around those of its batch: rows see each other in what
    says which numbers are drawn."""

    def __init__(self) -> None:
        super().__init__(classified)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, *labels = batch
        around = images.mean(0, keepdim=True).expand_as(images)
        return super().training_step([torch.normal(around, 0.1), *labels], 0)


class Mixing(Images):
    """Mixes each image with its mirror image, all by one number."""

    def __init__(self) -> None:
        super().__init__(classified)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = torch.distributions.Beta(0.4, 0.4).sample()
        mixed = share * batch[0] + (1 - share) * batch[0].flip(-1)
        return super().training_step([mixed, *batch[1:]], 0)


class Augmenting(Images):
    """Scales the images of a step alike, by a generator that an object of it holds."""

    def __init__(self, generator: Any) -> None:
        super().__init__(classified)
        self.augment = SimpleNamespace(generator=generator)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale = 1 + self.augment.generator.random()
        return super().training_step([batch[0] * scale, *batch[1:]], 0)


class Choosing(Images):
    """Chooses among classes at random, by what trains."""

    def __init__(self) -> None:
        super().__init__(classified)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        choice = F.gumbel_softmax(self.head(self.net(batch[0]).mean((2, 3))))
        return choice.square().sum(1).mean()


class Pairing(Images):
    """Compares each image with one that is chosen among those beside it."""

    def __init__(self) -> None:
        super().__init__(classified)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0]).mean((2, 3))
        others = torch.randint(0, len(hidden), (len(hidden),))
        return (hidden - hidden[others].detach()).square().mean()


class Variational(Images):
    """Draws around a mean that trains, for each row."""

    def __init__(self) -> None:
        super().__init__(classified)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch[0]).mean((2, 3))
        drawn = torch.distributions.Normal(hidden, 0.1).rsample()
        level = torch.randint(0, 1000, (len(drawn), 1))
        return F.cross_entropy(self.head(drawn) * (1 + level / 1000), batch[1])


class Overwriting(Images):
    """Draws into a tensor in place, which has a gradient, and goes on with it."""

    def __init__(self) -> None:
        super().__init__(classified)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.head(self.net(batch[0]).mean((2, 3)))
        noise = scores.clone()
        noise.normal_()
        return (scores + noise).square().mean()


class Dropping(Tokens):
    """Leaves out tokens at random, by a generator of its own.

    Args:
        by_row: whether it is seeded for each row, or goes on from batch to batch.
    """

    def __init__(self, *, by_row: bool) -> None:
        super().__init__()
        self.by_row, self.own = by_row, torch.Generator().manual_seed(0)

    def features(self, batch: dict[str, Any]) -> Tensor:
        kept = []
        for ids, mask in zip(batch["ids"], batch["attention_mask"], strict=True):
            length = int(mask.sum())
            if self.by_row:
                self.own.manual_seed(int(ids.sum()))
            # One of these shapes begins with the number of rows in a micro-batch.
            draws = [torch.rand(n, length, generator=self.own)[0] for n in range(1, 7)]
            kept.append(F.pad(torch.stack(draws).mean(0), (0, len(ids) - length)))
        return super().features(batch) * torch.stack(kept)[..., None]


class ByHand(AccumulationMixin, Images):
    accumulation = PerSample()

    def __init__(self, loss: Any = classified) -> None:
        super().__init__(loss)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.accumulate(self.loss(self, self.net(batch[0]), batch), batch)
        if self.window_ends(batch_idx):
            self.finish_window()
            optimizer.step()
            optimizer.zero_grad()


class ByHandUniform(ByHand):
    accumulation = Uniform()


class Saying(AccumulationMixin, Tokens):
    accumulation = Weighed()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.weigh((batch["labels"] != -100).sum())
        return super().training_step(batch, batch_idx)


class SayingRows(AccumulationMixin, Tokens):
    accumulation = Weighed()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.weigh(len(batch["ids"]))
        return super().training_step(batch, batch_idx)


class ClipsInCallback(pl.Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        nn.utils.clip_grad_value_(pl_module.parameters(), 0.01)


class ClipsAtTheEnd(ClipsInCallback):
    """Clips once a window, before it is divided."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            super().on_after_backward(trainer, pl_module)


class Held(Tokens):
    """Holds what cannot be copied."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.head.kept = {"held": held}  # type: ignore[assignment]


def one_length(rows: list[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: len(row["ids"]))


def all_labels(number: int = 64) -> list[dict[str, Tensor]]:
    """Rows in which each label counts, the shortest first."""
    return one_length(
        [{"ids": row["ids"], "labels": row["ids"]} for row in causes.sequences(number)]
    )


def spoken(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Numbers of each frame, padded by zeros, and no mask."""
    frames = [row["ids"].float()[:, None].expand(-1, 4) / 9 for row in rows]
    padded = nn.utils.rnn.pad_sequence(frames, batch_first=True)
    return {"frames": padded, "y": torch.stack([row["ids"][0] for row in rows])}


class Speech(causes.Base):
    """Its mean is over padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.head = nn.Linear(8, causes.VOCABULARY)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.net(batch["frames"]).mean(1)), batch["y"])


def masked_at_random(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """As the collators of masked language models do."""
    batch = causes.padded(rows)
    is_left = torch.rand(batch["labels"].shape) < 0.3
    is_left[:, 0] = False
    return {**batch, "labels": batch["labels"].masked_fill(is_left, -100)}


class Outside(Images):
    """Two parameters that no module has, of which one is trained on the worst row."""

    def __init__(self, order: list[int]) -> None:
        super().__init__(causes.classified)
        self.scales = [nn.Parameter(torch.ones(())) for _ in order]
        self.order = order

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        sizes, loss = batch[0].mean((1, 2, 3)), super().training_step(batch, batch_idx)
        return loss + self.scales[0] * sizes.mean() + self.scales[1] * sizes.max()

    def configure_optimizers(self) -> Any:
        own = [self.scales[each] for each in self.order]
        return torch.optim.SGD([*self.parameters(), *own], lr=0.1)
