"""Models of transformers, made from configurations, are measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainkit
from tests.helpers import quiet_lightning
from tests.lit.proof.starting import fit, said
from trainkit import PerSample, PerToken

transformers = pytest.importorskip("transformers")

WORDS = 60
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "vocab_size": WORDS,
}  # fmt: skip


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 12, (40,), generator=generator).tolist()
    rows = [torch.randint(3, WORDS, (n,), generator=generator) for n in lengths]
    return DataLoader(rows, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]


class Model(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

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
        one, other = (
            self.embedded(ids, mask),
            self.embedded(ids * mask % 7 + mask, mask),
        )
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


class LowRank(nn.Module):
    """A frozen layer and what is added to it, as LoRA does; it begins at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def llama() -> Any:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def llama_with_lora() -> Any:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
    return model


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def t5() -> Any:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=WORDS,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=WORDS, n_positions=32
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral(**options: Any) -> Any:
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        **options,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


SHIFTED = PerToken(shift=True)
CASES: dict[str, Any] = {
    "BERT": (bert, PerToken(), None),
    "BERT, by rows": (bert, PerSample(), "denominator"),
    "Llama": (llama, SHIFTED, None),
    "Llama, no shift": (llama, PerToken(), "denominator"),
    "Llama with LoRA": (llama_with_lora, SHIFTED, None),
    "T5": (t5, PerToken(), None),
    "GPT-2": (gpt2, SHIFTED, None),
    "Mixtral": (mixtral, SHIFTED, None),
    "Mixtral, balanced": (
        lambda: mixtral(output_router_logits=True),
        SHIFTED,
        "loss",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_language_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, strategy, kind = CASES[name]
    with quiet_lightning():
        report = trainkit.check(Model(make()), loader(), strategy=strategy, rows=8)
        assert report.precision == "float64"
        assert [cause.kind for cause in report.causes] == ([kind] if kind else [])
        assert report.exact == (kind is None)
        if kind is None:
            fit(Model(make()), loader(), strategy, proof="require")
            assert said(capsys).startswith("exact on 6 of your rows")


def test_negatives_within_the_batch_are_found() -> None:
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    with pytest.warns(UserWarning, match="The loss after model.* looks across|across"):
        fit(Contrastive(model), loader(), PerSample())
