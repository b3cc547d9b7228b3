"""A fit with an inner cut equals a fit of the whole batches."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.core.inside.common import Loss, Net, batch, dice, nt_xent
from tests.helpers import (
    NAIVE,
    deviation,
    raise_rank_errors,
    run_cases,
    weights,
)
from tests.lit.inside.common import Foreign, Own, data, fit
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    PerSample,
    TrainkitError,
    check,
)

EXACT = 1e-12
NET_BY_4 = MicroBatching(size=4, inside="net")


@pytest.mark.parametrize(
    ("kind", "optimizer", "clip"), [(Foreign, "adamw", None), (Own, "sgd", 0.05)]
)
def test_fit_equals_that_of_the_whole_batch(
    kind: Any, optimizer: str, clip: float | None
) -> None:
    start = kind(calls=2, optimizer=optimizer)
    plain = Foreign(calls=2, optimizer=optimizer)
    plain.load_state_dict(start.state_dict())
    module = copy.deepcopy(start)
    fit(plain, gradient_clip_val=clip)
    run = fit(module, NET_BY_4, gradient_clip_val=clip)
    assert deviation(module, plain, start) <= EXACT
    assert module.logged == pytest.approx(plain.logged, rel=EXACT)
    assert set(run.callback_metrics) >= {"loss"}
    assert "forward" not in vars(module.net)


@pytest.mark.parametrize("loss", [nt_xent, dice])
def test_any_loss_is_that_of_the_whole_batch(loss: Loss) -> None:
    """Accumulation is the control."""
    start = Foreign(loss)
    plain, module, naive = (copy.deepcopy(start) for _ in range(3))
    fit(plain)
    fit(module, MicroBatching(size=5, inside="net"))
    assert deviation(module, plain, start) <= EXACT
    how: dict[str, Any] = {"by": PerSample(), "proof": "off", "accumulate": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(naive, loader=data(size=4), **how)
    assert deviation(naive, plain, start) > NAIVE


@pytest.mark.parametrize(
    ("inside", "size"),  # None begins with all rows
    [("auto", 3), ("auto", None), ("self", 3), (("net.body", "net.head"), None)],
)
def test_which_modules_are_cut_does_not_matter(inside: Any, size: Any) -> None:
    start = Foreign(calls=2)
    plain, module = copy.deepcopy(start), copy.deepcopy(start)
    fit(plain)
    fit(module, MicroBatching(size=size, inside=inside))
    assert deviation(module, plain, start) <= EXACT


def test_a_strategy_weighs_windows_of_several_batches() -> None:
    """Means over rows: the inner cut, and accumulation on top of it."""
    start = Foreign(cross_entropy)
    plain, module = copy.deepcopy(start), copy.deepcopy(start)
    fit(plain, loader=data(size=33))
    how: dict[str, Any] = {"by": PerSample(), "accumulate": 3}
    fit(module, NET_BY_4, loader=data(size=11), **how)
    assert deviation(module, plain, start) <= EXACT


def test_the_forward_is_given_back_after_an_error() -> None:
    class Fails(Foreign):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert "forward" in vars(self.net)
            raise RuntimeError("as asked")

    module = Fails()
    with pytest.raises(RuntimeError, match="as asked"):
        fit(module, NET_BY_4)
    assert "forward" not in vars(module.net)


def with_memory_for_6(net: Any, x: Any) -> Any:
    """So many rows with a graph."""
    if torch.is_grad_enabled() and len(x) > 6:
        raise torch.OutOfMemoryError("as asked")
    return net.plain(x)


def test_memory_that_runs_out_makes_chunks_finer_and_is_remembered(
    tmp_path: Any,
) -> None:
    plain, start = Foreign(calls=2), Foreign(calls=2)
    small = Foreign(calls=2, net=Net(with_memory_for_6))
    fit(plain)
    callback = AccumulationCallback(micro_batching=MicroBatching(inside="net"))
    run = fit(small, None, callback)
    assert deviation(small, plain, start) <= EXACT
    assert callback.micro_batch_size == 5  # halves of 22, 11
    run.save_checkpoint(tmp_path / "small.ckpt", weights_only=False)
    held = torch.load(tmp_path / "small.ckpt", weights_only=False)
    assert held["trainkit_micro_batching"] == {"limit": 5}


# ---- a budget of tokens --------------------------------------------------------------

WIDTH, LENGTH = 6, 9


class Encoder(nn.Module):
    """A transformer whose rows see their own columns that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=attention_mask == 0)


class Sentences(pl.LightningModule):
    """A contrastive loss over rows of unlike length."""

    def __init__(self, *, masks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder().double()
        self.masks = masks

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch["mask"]
        out = self.encoder(batch["x"], attention_mask=mask)
        weights = mask[..., None].to(out) if self.masks else torch.ones_like(out)
        mean = (out * weights).sum(1) / weights.sum(1)
        z = nn.functional.normalize(mean, dim=-1)
        return cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def sentences() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    lengths = torch.randint(2, LENGTH + 1, (32,), generator=generator)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    rows = [{"x": a, "mask": b} for a, b in zip(x, mask, strict=True)]
    return DataLoader(rows, batch_size=16)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [None, 3])
def test_fit_by_tokens_equals_the_whole_batch(size: Any, capsys: Any) -> None:
    start = Sentences()
    whole, module = copy.deepcopy(start), copy.deepcopy(start)
    fit(whole, loader=sentences())
    options = MicroBatching(tokens=2 * LENGTH, size=size, inside="encoder")
    fit(module, options, loader=sentences())
    said = capsys.readouterr().out
    assert "in chunks of at most " in said
    assert "18 tokens" in said
    assert "proof: exact on" in said
    assert deviation(module, whole, start) <= EXACT
    assert check(start, sentences(), micro_batches=options).exact


@pytest.mark.filterwarnings("ignore:.*an open window of 1 micro-batch was dropped")
def test_a_loss_that_uses_padding_is_refused() -> None:
    """The control: without the refusal the step would be another one."""
    whole, start, other = Sentences(masks=False), Sentences(), Sentences()
    fit(whole, loader=sentences())
    fit(other, loader=sentences())
    assert deviation(other, whole, start) > NAIVE
    tokens = MicroBatching(tokens=18, inside="encoder")
    with pytest.raises(TrainkitError, match="at padding is used by the loss"):
        fit(Sentences(masks=False), tokens, loader=sentences())


# ---- several ranks -------------------------------------------------------------------


class Gathering(Foreign):
    """Compares with the rows of other ranks; its cut is looked for on each alone."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Any = self.all_gather(self(batch[0]), sync_grads=True)
        return nt_xent(out.flatten(0, 1), batch[1])


def train(
    rank: int, world: int, kind: Any, cut: Any, loss: Any, by: Any, strategy: str
) -> Any:
    """The weights before and after two epochs on this rank's share."""
    module = kind(loss, calls=2)
    start = weights(module)
    x, labels = batch(44)
    share = DataLoader(TensorDataset(x[rank::world], labels[rank::world]), 11)
    how = {"devices": world, "use_distributed_sampler": False}
    fit(module, cut, by=by, loader=share, strategy=strategy, **how)
    return start, weights(module)


@cache
def ranks() -> dict[str, list[Any]]:
    """What two ranks give in each case."""
    by_3, auto = (MicroBatching(size=n, inside=i) for n, i in ((3, "net"), (4, "auto")))
    unused = "ddp_find_unused_parameters_true"
    cases = {
        "plain": (Foreign, None, nt_xent, None, "ddp"),
        "callback": (Foreign, by_3, nt_xent, None, "ddp"),
        "mixin": (Own, by_3, nt_xent, None, "ddp"),
        unused: (Foreign, by_3, nt_xent, None, unused),
        "gathers": (Gathering, auto, nt_xent, None, "ddp"),
        "mean": (Foreign, by_3, cross_entropy, PerSample(), "ddp"),
    }
    found = run_cases(2, {name: (train, *case) for name, case in cases.items()})
    return {name: raise_rank_errors(each) for name, each in found.items()}


@pytest.mark.parametrize(
    "kind", ["callback", "mixin", "ddp_find_unused_parameters_true"]
)
def test_ranks_with_an_inner_cut_equal_ranks_without(kind: str) -> None:
    (start, first), (_, second) = ranks()[kind]
    assert torch.equal(first, second)
    assert deviation(first, ranks()["plain"][0][1], start) <= EXACT


def test_a_step_that_gathers_is_looked_at_on_each_rank_alone() -> None:
    for start, trained in ranks()["gathers"]:
        assert not torch.equal(start, trained)


def test_a_mean_over_rows_equals_one_process_with_the_big_batch() -> None:
    module, naive = (Foreign(cross_entropy, calls=2) for _ in range(2))
    x, labels = batch(44)
    order = [n for half in (range(22), range(22, 44)) for n in half]
    fit(module, loader=DataLoader(TensorDataset(x[order], labels[order]), 22))
    fit(naive, loader=DataLoader(TensorDataset(x, labels), 11))
    start, trained = ranks()["mean"][0]
    assert deviation(trained, module, start) <= EXACT
    assert deviation(naive, module, start) > NAIVE
