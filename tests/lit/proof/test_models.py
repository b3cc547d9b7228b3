"""`check` on models of many kinds: of widely used packages, and drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import quiet_lightning, trainer
from tests.lit.fronts import EQUAL, micro_batches
from tests.lit.proof.starting import fit, said
from tests.lit.proof.test_check import check, check_quickly
from tests.lit.split.common import SEQUENCES
from tests.lit.windows.moving import NAMES, ONCE, WAYS, Moving
from tests.zoo import causes
from tests.zoo.causes import WIDTH, Base, Tokens, token_loader
from tests.zoo.language_models import WORDS, LowRank, bert, gpt2, llama, mixtral, t5
from trainkit import MicroBatching, PerSample, PerToken, TrainkitError

# ---- patterns of widely used packages ------------------------------------------------


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


class Decaying(MadeInFirstPass):
    """Every pass moves what trains."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.gain.data.mul_(0.9)
        return super().training_step(batch, batch_idx)


def test_a_parameter_that_is_made_in_the_first_pass_is_no_state() -> None:
    """The control: one that every pass moves."""
    report = check(MadeInFirstPass(), token_loader(), strategy=PerToken())
    assert report.exact, report
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


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_batch_norm_on_the_nodes_of_graphs_is_named(norm: Any) -> None:
    loader = DataLoader(causes.sequences(), batch_size=4, collate_fn=graphs)  # type: ignore[arg-type]
    report = check(Graphs(norm(8)), loader, strategy=PerSample(size="y"))
    assert report.exact == (norm is nn.LayerNorm)
    assert [cause.place for cause in report.causes] == ["norm"] * (not report.exact)
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


# ---- models of transformers, made from configurations --------------------------------


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def texts() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 12, (40,), generator=generator).tolist()
    rows = [torch.randint(3, WORDS, (n,), generator=generator) for n in lengths]
    return DataLoader(rows, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


class Model(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(p for p in self.parameters() if p.requires_grad)


class Contrastive(Model):
    """The other rows of a batch are the negatives."""

    def embedded(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return F.normalize(hidden[:, 0], dim=-1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        one = self.embedded(ids, mask)
        other = self.embedded(ids * mask % 7 + mask, mask)
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


def llama_with_lora() -> Any:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = added = LowRank(layer.self_attn.q_proj)
        nn.init.zeros_(added.up.weight)
    return model


def words_left_out() -> Any:
    return bert("BertForMaskedLM", dropout=0.1)


SHIFTED = PerToken(shift=True)
LANGUAGE_MODELS: dict[str, Any] = {
    "BERT": (words_left_out, PerToken(), None),
    "BERT, by rows": (words_left_out, PerSample(), "denominator"),
    "Llama": (llama, SHIFTED, None),
    "Llama, no shift": (llama, PerToken(), "denominator"),
    "Llama with LoRA": (llama_with_lora, SHIFTED, None),
    "T5": (lambda: t5(dropout=0.1), PerToken(), None),
    "GPT-2": (lambda: gpt2(dropout=0.1), SHIFTED, None),
    "Mixtral": (mixtral, SHIFTED, None),
    "Mixtral, balanced": (lambda: mixtral(output_router_logits=True), SHIFTED, "loss"),
}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models(name: str, capsys: Any) -> None:
    make, strategy, kind = LANGUAGE_MODELS[name]
    report = check(Model(make()), texts(), strategy=strategy, rows=8)
    assert report.precision == "float64"
    assert [cause.kind for cause in report.causes] == ([kind] if kind else [])
    assert report.exact == (kind is None)
    if kind is None:
        with quiet_lightning():
            fit(Model(make()), texts(), strategy, proof="require")
        assert said(capsys).startswith("exact on 6 of your rows")


def test_negatives_within_the_batch_are_found() -> None:
    with pytest.warns(UserWarning, match="The loss after model.* looks across|across"):
        fit(Contrastive(bert(dropout=0.1)), texts(), PerSample())


# ---- modules made at random: no false alarm, and no wrong strategy called exact ------


LOSSES: list[tuple[Any, Any]] = [
    (causes.token_mean, PerToken()),
    (causes.shifted, PerToken(shift=True)),
    (causes.row_mean, PerSample()),
    (causes.token_sum, PerToken(loss_reduction="total")),
    (causes.masked, PerToken(mask="attention_mask")),
]


class Drawn(Tokens):
    """An architecture that treats rows and padding apart."""

    def __init__(self, draw: random.Random, loss: Any) -> None:
        super().__init__(loss)
        activation = draw.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), activation())
        self.kind = draw.choice(["gru", "lstm", "attention", "convolution", "gate"])
        dropout = draw.choice([0.0, 0.2])
        self.gate = nn.Parameter(torch.zeros(1))
        self.middle: Any = {
            "gru": lambda: nn.GRU(16, 16, batch_first=True),
            "lstm": lambda: nn.LSTM(16, 16, 2, batch_first=True, dropout=dropout),
            "attention": lambda: nn.TransformerEncoderLayer(
                16, 4, 16, dropout=dropout, batch_first=True
            ),
            "convolution": lambda: nn.Conv1d(16, 16, 1),
            "gate": lambda: nn.Sequential(nn.LayerNorm(16), nn.Dropout(dropout)),
        }[self.kind]()

    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        if self.kind in ("gru", "lstm"):
            return self.middle(hidden)[0]
        if self.kind == "attention":
            padding = batch["attention_mask"] == 0
            return self.middle(hidden, src_key_padding_mask=padding)
        if self.kind == "convolution":
            return self.middle(hidden.transpose(1, 2)).transpose(1, 2)
        return hidden + self.gate * self.middle(hidden)


@pytest.mark.parametrize("seed", range(4, 10))
def test_verdicts_are_right(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    loss, right = LOSSES[seed % len(LOSSES)]
    wrong = draw.choice([s for s in (PerToken(), PerSample()) if s != right])
    module = Drawn(draw, loss)
    cut = (None, MicroBatching(size=3), MicroBatching(tokens=30))[seed % 3]
    found = [
        check_quickly(module, token_loader(), strategy=each, micro_batches=cut)
        for each in (right, wrong)
    ]
    assert [report.exact for report in found] == [True, False], module.kind
    assert found[0].deviation < 1e-12
    assert found[1].deviation > 1e-4
    assert [cause.kind for cause in found[1].causes] == ["denominator"]
