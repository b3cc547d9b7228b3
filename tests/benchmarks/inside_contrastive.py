"""The inner cut beside sentence-transformers' loss that caches gradients.

Two columns of 128 rows go through a tiny BERT, and each row of the first is to find its
row of the second. `CachedMultipleNegativesRankingLoss` cuts both columns itself; the
inner cut is under the plain `MultipleNegativesRankingLoss`, which knows nothing of it:
around the whole model, whose output holds a vector for each token, or around a module
that returns one vector for each row.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.core.inside.forward import Chunked

ROWS, TOKENS, WORDS, WIDTH = 128, 48, 1000, 128

Step = Callable[[], None]


def is_there() -> bool:
    return all(map(importlib.util.find_spec, ("sentence_transformers", "transformers")))


class Vectors(nn.Module):
    """A model that returns its rows' vectors, and nothing else."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self.inner(features)["sentence_embedding"]}


def bert() -> nn.Module:
    """A model of sentence-transformers, with weights of its own."""
    from sentence_transformers import SentenceTransformer  # pyright: ignore[reportMissingImports]
    from sentence_transformers.models import Pooling  # pyright: ignore[reportMissingImports]  # pyright: ignore[reportMissingImports]
    from transformers import BertConfig, BertModel

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(
                vocab_size=WORDS,
                hidden_size=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=4 * WIDTH,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            found = self.bert(features["input_ids"], features["attention_mask"])
            return {**features, "token_embeddings": found.last_hidden_state}

    return SentenceTransformer(modules=[Words(), Pooling(WIDTH)], device="cpu").train()


def columns() -> list[dict[str, Tensor]]:
    ids = torch.randint(0, WORDS, (2, ROWS, TOKENS))
    return [{"input_ids": i, "attention_mask": torch.ones_like(i)} for i in ids]


def kinds(chunk: int) -> dict[str, Callable[[nn.Module, Any], Step]]:
    """Kinds of step, each of which makes a step of a model and its columns."""
    from sentence_transformers import losses  # pyright: ignore

    labels = torch.empty(0)

    def plain(net: Any, given: Any) -> Step:
        loss = losses.MultipleNegativesRankingLoss(net)
        return lambda: loss(map(dict, given), labels).backward()

    def cached(net: Any, given: Any) -> Step:
        loss = losses.CachedMultipleNegativesRankingLoss(net, mini_batch_size=chunk)
        return lambda: loss(list(map(dict, given)), labels).backward()

    def cut(net: Any, given: Any) -> Step:
        Chunked(net, size=chunk)
        return plain(net, given)

    def cut_vectors(net: Any, given: Any) -> Step:
        return cut(Vectors(net), given)

    return {"whole": plain, "cached": cached, "cut": cut, "cut, vectors": cut_vectors}
