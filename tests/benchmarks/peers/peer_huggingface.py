"""Hugging Face's Trainer: `gradient_accumulation_steps`; TRL trains the same model."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from tests.benchmarks.peers.work import CausalNet, Work, loss_of, pad

PACKAGES = ("transformers", "accelerate")


class Backbone(nn.Module):
    def __init__(self, net: CausalNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, **options: Any) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=self.net.hidden(input_ids))  # type: ignore[arg-type]


class NetForCausalLM(PreTrainedModel):
    """As those of the library: the loss takes `num_items_in_batch`.

    The loss is chosen by the last words of the class's name, and by it whether the
    Trainer counts the first label of a row, which no token predicts.
    """

    config_class = PreTrainedConfig
    base_model_prefix = "model"

    def __init__(self, net: CausalNet) -> None:
        config: Any = PreTrainedConfig()
        config.vocab_size = net.head.out_features
        super().__init__(config)
        self.model = Backbone(net)
        self.lm_head = net.head
        self.generation_config = GenerationConfig()  # TRL writes its tokens there

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **options: Any
    ) -> CausalLMOutput:
        options.pop("attention_mask", None)
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        loss = None
        if labels is not None:
            vocabulary = logits.shape[-1]
            loss = self.loss_function(logits, labels, vocab_size=vocabulary, **options)
        return CausalLMOutput(loss=loss, logits=logits)


def arguments(work: Work, folder: str) -> dict[str, Any]:
    """Of a Trainer that only trains, in order."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": work.accumulate,
        "num_train_epochs": 1,
        "max_grad_norm": 0,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def optimizers(work: Work, model: nn.Module) -> tuple[Any, Any]:
    """The work's optimizer, and a learning rate that stays."""
    optimizer = work.make_optimizer(model.parameters())
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class OwnLoss(nn.Module):
    """A module that returns its mean loss and knows of no `num_items_in_batch`."""

    def __init__(self, net: CausalNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.net(input_ids), labels)}


def fit(work: Work, model: Any) -> None:
    rows: Any = [{"input_ids": row} for row in work.rows]
    with tempfile.TemporaryDirectory() as folder:
        how = arguments(work, folder)
        Trainer(
            model=model,
            args=TrainingArguments(**how, remove_unused_columns=False),
            data_collator=lambda rows: pad([row["input_ids"] for row in rows]),
            train_dataset=rows,
            optimizers=optimizers(work, model),
        ).train()


VARIANTS = {
    "Hugging Face Trainer": lambda work, net: fit(work, NetForCausalLM(net)),
    "Hugging Face Trainer, own mean loss": lambda work, net: fit(work, OwnLoss(net)),
}
