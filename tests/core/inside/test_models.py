"""Tiny models of transformers, built from a configuration, in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as typed
from torch import Tensor

from tests.core.inside.common import EXACT, NAIVE, gradient, off_by
from trainkit import Chunked, TrainkitError

pytestmark = pytest.mark.filterwarnings("ignore:.*hooks of")

SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 11,
}
ROWS, LENGTH = 6, 5
transformers: Any = typed


def model_of(kind: str, config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).double().train()


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[2, 3:] = mask[4, 2:] = 0
    return {"input_ids": torch.randint(1, 11, (ROWS, LENGTH)), "attention_mask": mask}


def next_token(logits: Tensor) -> Tensor:
    """The mean over all tokens that are not padding."""
    batch = tokens()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=1)
    return model_of("LlamaForCausalLM", config)


def gpt2() -> Any:
    config = transformers.GPT2Config(
        n_embd=8,
        n_layer=2,
        n_head=2,
        vocab_size=11,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return model_of("GPT2LMHeadModel", config)


def t5() -> Any:
    config = transformers.T5Config(
        d_model=8,
        d_kv=4,
        d_ff=16,
        num_layers=2,
        num_heads=2,
        vocab_size=11,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return model_of("T5ForConditionalGeneration", config)


def bert() -> Any:
    config = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return model_of("BertModel", config)


def vit() -> Any:
    sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    return model_of("ViTModel", config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SIZES,
        num_key_value_heads=1,
        num_local_experts=3,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        experts_implementation="eager",
    )
    return model_of("MixtralForCausalLM", config)


def with_labels(model: Any) -> Tensor:
    batch = tokens()
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return model(**batch, labels=labels).loss


def contrast(model: Any) -> Tensor:
    out = model(**tokens()).pooler_output
    return F.cross_entropy(out @ out.T, torch.arange(ROWS).roll(1))


def of_images(model: Any) -> Tensor:
    torch.manual_seed(1)
    out = model(torch.randn(ROWS, 3, 8, 8, dtype=torch.float64)).last_hidden_state
    out = out.mean(1)
    return F.cross_entropy(out @ out.T, torch.arange(ROWS).roll(1))


STEPS: dict[str, tuple[Callable[[], Any], str, Callable[[Any], Tensor]]] = {
    "Llama": (llama, "model", with_labels),
    "GPT-2 tied": (gpt2, "transformer", with_labels),
    "T5 encoder": (t5, "encoder", with_labels),
    "BERT": (bert, "", contrast),
    "ViT": (vit, "", of_images),
    "Mixtral with its router's loss": (mixtral, "model", with_labels),
}


@pytest.mark.parametrize("name", STEPS)
def test_models_of_transformers_in_chunks(name: str) -> None:
    make, part, step = STEPS[name]
    model = make()
    cut = model.get_submodule(part)
    uses_cache = getattr(cut.config, "use_cache", None)
    wanted_loss, wanted = gradient(model, step)
    rows: list[int] = []
    layer = next(m for n, m in cut.named_modules() if n.endswith(".0"))
    with Chunked(cut, size=2):
        layer.register_forward_hook(
            lambda m, args, out: rows.append(
                len(out[0] if isinstance(out, tuple) else out)
            )
        )
        for _ in range(2):
            loss, found = gradient(model, step)
            assert abs(loss - wanted_loss) <= EXACT
            assert off_by(found, wanted) <= EXACT
            assert getattr(cut.config, "use_cache", None) == uses_cache
    assert set(rows) <= {1, 2, 3, 4}


@pytest.mark.parametrize("name", ["Llama", "Mixtral with its router's loss"])
def test_mean_of_their_micro_batches_is_not_the_whole_batch(name: str) -> None:
    make, _, step = STEPS[name]
    model, every = make(), tokens()
    _, wanted = gradient(model, step)

    def naive(model: Any) -> Tensor:
        parts = [{k: v[i : i + 2] for k, v in every.items()} for i in (0, 2, 4)]
        losses = [
            model(
                **p, labels=p["input_ids"].masked_fill(p["attention_mask"] == 0, -100)
            )
            for p in parts
        ]
        return torch.stack([each.loss for each in losses]).mean()

    assert off_by(gradient(model, naive)[1], wanted) > NAIVE


def test_a_whole_model_without_labels_and_with_a_loss_inside() -> None:
    model = llama()
    outside = lambda model: next_token(model(**tokens()).logits)  # noqa: E731
    _, wanted = gradient(model, outside)
    with Chunked(model, size=2):
        assert off_by(gradient(model, outside)[1], wanted) <= EXACT
        with pytest.raises(TrainkitError, match="'loss'.*depends on them"):
            with_labels(model)
        with pytest.raises(TrainkitError, match="'past_key_values' is a DynamicCache"):
            model(**tokens(), use_cache=True)


@pytest.mark.filterwarnings("ignore:.*checkpointing_enable")
def test_their_checkpoints_and_adapters_inputs() -> None:
    model = llama()
    _, wanted = gradient(model, with_labels)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    with Chunked(model.model, size=2, keep=0):
        for _ in range(3):
            assert off_by(gradient(model, with_labels)[1], wanted) <= EXACT


def test_generating_in_evaluation_has_its_cache() -> None:
    model = llama().eval()
    ids = tokens()["input_ids"][:2]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    with Chunked(model.model, size=1):
        assert torch.equal(model.generate(ids, **options), wanted)
        with torch.no_grad():
            assert model(input_ids=ids).past_key_values is not None
