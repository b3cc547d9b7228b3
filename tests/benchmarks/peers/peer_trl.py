"""TRL: `SFTTrainer` on token ids."""

from __future__ import annotations

import tempfile

from datasets import Dataset  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

from tests.benchmarks.peers.peer_huggingface import (
    NetForCausalLM,
    arguments,
    optimizers,
)
from tests.benchmarks.peers.work import CausalNet, Work

PACKAGES = ("trl", "transformers", "accelerate")


def train(work: Work, net: CausalNet) -> None:
    model = NetForCausalLM(net)
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=model,
            args=SFTConfig(**arguments(work, folder), max_length=None),
            train_dataset=Dataset.from_dict({"input_ids": work.rows}),
            processing_class=tokenizer(work.sizes[0]),
            optimizers=optimizers(work, model),
        ).train()


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """What SFTTrainer asks for to know the id that pads."""
    words = {str(number): number for number in range(vocabulary)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")),
        pad_token="0",
        eos_token="1",
    )


VARIANTS = {"TRL, SFTTrainer": train}
