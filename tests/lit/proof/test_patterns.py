"""`check` on patterns of widely used packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import trainer
from tests.lit.fronts import EQUAL, micro_batches
from tests.lit.proof.test_check import check
from tests.lit.split.common import SEQUENCES
from tests.lit.windows.moving import NAMES, ONCE, WAYS, Moving
from tests.zoo import causes
from tests.zoo.causes import Base, Tokens, token_loader
from trainkit import PerSample, PerToken, TrainkitError


class MadeInFirstPass(Tokens):
    """Gives a parameter its first value in the first pass, as Gaussian processes do."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(1))
        self.is_made = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if not self.is_made:
            self.gain.data.fill_(2.0)
            self.is_made = True
        logits = self.head(self.gain * self.features(batch))
        return causes.token_mean(self, logits, batch)


def test_a_parameter_that_is_made_in_the_first_pass_is_no_state() -> None:
    report = check(MadeInFirstPass(), token_loader(), strategy=PerToken())
    assert report.exact, report


class Decaying(MadeInFirstPass):
    """The control: every pass moves what trains."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.gain.data.mul_(0.9)
        return super().training_step(batch, batch_idx)


def test_a_parameter_that_every_pass_moves_is_state() -> None:
    module = Decaying()
    module.gain.data.fill_(1.0)
    module.is_made = True
    (cause,) = check(module, token_loader(), strategy=PerToken()).causes
    assert (cause.kind, cause.place) == ("state", "gain")


class Strict(Tokens):
    """Refuses rows that are padded more than the longest of them, as packing does."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        if int(batch["attention_mask"].sum(1).max()) != batch["ids"].shape[1]:
            raise RuntimeError("the longest row is shorter")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(causes.token_mean, ""), (causes.root, "loss"), (causes.masked, "")],
)
def test_rows_that_only_run_when_batched_anew_are_measured(
    loss: Callable[..., Tensor], kind: str
) -> None:
    strategy = PerToken(mask="attention_mask") if loss is causes.masked else PerToken()
    report = check(Strict(loss), token_loader(), strategy=strategy)
    assert [cause.kind for cause in report.causes] == ([kind] if kind else [])
    assert report.exact == (not kind)


def graphs(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The nodes of all rows in one tensor, as batches of graphs have them."""
    owners = [torch.full((len(row["ids"]),), n) for n, row in enumerate(rows)]
    return {
        "nodes": torch.cat([row["ids"] for row in rows]),
        "owner": torch.cat(owners),
        "y": torch.stack([row["ids"][0] for row in rows]),
    }


class Graphs(Base):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(causes.VOCABULARY, 8), norm
        self.head = nn.Linear(8, causes.VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        nodes = self.norm(self.embed(batch["nodes"])).relu()
        sums = nodes.new_zeros(len(batch["y"]), 8).index_add(0, batch["owner"], nodes)
        return F.cross_entropy(self.head(sums), batch["y"])


@pytest.mark.parametrize(
    ("norm", "place"), [(nn.LayerNorm, None), (nn.BatchNorm1d, "norm")]
)
def test_batch_norm_on_the_nodes_of_graphs_is_named(norm: Any, place: Any) -> None:
    loader = DataLoader(causes.sequences(), batch_size=4, collate_fn=graphs)  # type: ignore[arg-type]
    report = check(Graphs(norm(8)), loader, strategy=PerSample(size="y"))
    assert report.exact == (place is None)
    assert [cause.place for cause in report.causes] == ([place] if place else [])
    assert all("BatchNorm1d normalises" in cause.text for cause in report.causes)


class GraphBatch:
    """Tensors by key or attribute, and no mapping, as a batch of torch_geometric."""

    def __init__(self, **tensors: Tensor) -> None:
        vars(self).update(tensors)

    def keys(self) -> list[str]:
        return list(vars(self))

    def __getitem__(self, key: str) -> Tensor:
        return vars(self)[key]

    def apply(self, convert: Callable[[Tensor], Tensor]) -> GraphBatch:
        vars(self).update({key: convert(self[key]) for key in self.keys()})
        return self

    def to(self, *args: Any, **options: Any) -> GraphBatch:
        return self


def graph_batch(rows: list[dict[str, Tensor]]) -> GraphBatch:
    batch = graphs(rows)
    shapes = [torch.linspace(-1, 1, 8).expand(len(row["ids"]), 8) for row in rows]
    x = torch.cat(shapes) * batch["nodes"][:, None]
    edges = torch.stack([batch["nodes"], batch["nodes"]])
    return GraphBatch(edge_index=edges[:, ::2], x=x, ny=batch["nodes"])


class Nodes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, causes.VOCABULARY)

    def training_step(self, batch: GraphBatch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["ny"])


def test_an_object_of_tensors_is_measured_in_float64_and_its_fields_counted() -> None:
    loader = DataLoader(causes.sequences(), batch_size=4, collate_fn=graph_batch)  # type: ignore[arg-type]
    (cause,) = check(Nodes(), loader).causes
    assert cause.remedy[0] == "accumulation = PerToken(labels='ny')"
    report = check(Nodes(), loader, strategy=PerToken(labels="ny"))
    assert report.exact
    assert report.precision == "float64"


def scaled_in_collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = causes.padded(rows)
    batch["scale"] = 0.1 + torch.arange(1, batch["ids"].shape[1] + 1) / 7
    batch["scale"] = batch["scale"].expand(len(rows), -1).clone()
    return batch


class Scaled(Tokens):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        logits = self.head(self.features(batch)) * batch["scale"][..., None]
        return causes.token_mean(self, logits, batch)


def test_floats_that_collate_makes_are_as_wide_in_every_batch() -> None:
    loader = token_loader(scaled_in_collate)
    report = check(Scaled(), loader, strategy=PerToken())
    assert report.exact
    assert report.deviation < 1e-12
    assert not any("collated" in note for note in report.notes)


@pytest.mark.parametrize("way", WAYS)
def test_the_proof_names_what_each_micro_batch_moves(way: str) -> None:
    """The control: moved once a step, the same module trains."""
    module = Moving("training_step", way)
    module.proof = "require"
    name = NAMES.get(way, "follower.")
    with pytest.raises(TrainkitError, match=f"Each micro-batch moves it.*{name}"):
        trainer(2).fit(module, micro_batches(SEQUENCES, EQUAL))
    module = Moving(ONCE, way)
    module.proof = "require"
    trainer(2).fit(module, micro_batches(SEQUENCES, EQUAL))
