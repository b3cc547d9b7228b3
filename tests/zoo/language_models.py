"""Tiny models of transformers, made from configurations, in float64."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

WORDS, WIDTH = 31, 16
SIZES: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


def made(kind: str, config: str, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    of = getattr(transformers, f"{config}Config")(**options)
    return getattr(transformers, kind)(of, *args).double().train()


def llama(kind: str = "LlamaForCausalLM", **options: Any) -> Any:
    return made(kind, "Llama", **SIZES, num_key_value_heads=1, **options)


def bert(kind: str = "BertModel", *args: Any, dropout: float = 0.0) -> Any:
    drops = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    return made(kind, "Bert", *args, **SIZES, **dict.fromkeys(drops, dropout))


def gpt2(dropout: float = 0.0) -> Any:
    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "vocab_size": WORDS}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return made("GPT2LMHeadModel", "GPT2", n_positions=32, **sizes, **drops)


def t5(dropout: float = 0.0) -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    more = {"vocab_size": WORDS, "dropout_rate": dropout, "decoder_start_token_id": 0}
    return made("T5ForConditionalGeneration", "T5", **sizes, **more)


def mixtral(**options: Any) -> Any:
    experts = {"num_local_experts": 3, "num_experts_per_tok": 2}
    options = {"num_key_value_heads": 1, **experts, **options}
    return made("MixtralForCausalLM", "Mixtral", **SIZES, **options)


class LowRank(nn.Module):
    """A frozen layer and what is added to it, as LoRA does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        how: Any = {"bias": False, "dtype": layer.weight.dtype}
        self.down = nn.Linear(layer.in_features, 2, **how)
        self.up = nn.Linear(2, layer.out_features, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))
