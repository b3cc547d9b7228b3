"""A budget of tokens inside a module: the loss over real positions cannot tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.inside.common import gradient, off_by
from trainkit import Chunked, TrainkitError
from trainkit.core.inside import tokens as tokens_module
from trainkit.core.inside.tokens import ByTokens

EXACT = 1e-12
NAIVE = 1e-3
VOCABULARY, ROWS, WIDTH, TOKENS = 29, 14, 24, 40


class Reader(nn.Module):
    """Attention over what the mask leaves, and a pooled output."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop = nn.Embedding(VOCABULARY, 8), nn.Dropout(dropout)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, VOCABULARY)

    def forward(
        self, ids: Tensor, attention_mask: Tensor, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = self.drop(self.embed(ids))
        if scale is not None:
            x = x * scale[..., None]
        x = x + self.attend(x, x, x, key_padding_mask=attention_mask == 0)[0]
        weights = attention_mask[..., None].to(x)
        return self.out(x), (x * weights).sum(1) / weights.sum(1)


def batch(*, is_left: bool = False, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH // 2, (ROWS,), generator=generator)
    lengths[5] = WIDTH
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    ids = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    mask = mask.flip(1) if is_left else mask
    return {"ids": ids, "mask": mask, "lengths": lengths}


def token_loss(logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Over real positions, divided by a number that depends on the whole batch."""
    labels = data["ids"].masked_fill(data["mask"] == 0, -100)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum() / data["mask"].sum() + losses.sum().square() / 1e4


def contrast(pooled: Tensor) -> Tensor:
    z = F.normalize(pooled, dim=-1)
    return F.cross_entropy(z @ z.T * 4, torch.arange(len(z)).roll(1))


def both(
    net: nn.Module, step: Callable[[nn.Module], Tensor], cut: nn.Module, **options: Any
) -> tuple[float, float]:
    """How far the loss and the gradient are off."""
    wanted = found = gradient(net, step)
    with Chunked(cut, **options):
        for _ in range(4):
            found = gradient(net, step)
    return float((found[0] - wanted[0]).abs()), off_by(found[1], wanted[1])


@pytest.mark.parametrize("size", [None, 3])
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_loss_over_real_positions_cannot_tell(keep: Any, size: int | None) -> None:
    net, data = Reader().double(), batch()

    def step(net: Any) -> Tensor:
        logits, pooled = net(data["ids"], attention_mask=data["mask"])
        return token_loss(logits, data) + contrast(pooled)

    options = {"tokens": TOKENS, "size": size, "keep": keep}
    assert max(both(net, step, net, **options)) <= EXACT


def test_outputs_are_in_the_order_of_the_rows_and_0_at_padding() -> None:
    net, data = Reader().double(), batch()
    wanted, pooled = net(data["ids"], data["mask"])
    with Chunked(net, tokens=TOKENS):
        found, also = net(data["ids"], data["mask"])
    real = data["mask"] == 1
    torch.testing.assert_close(found[real], wanted[real], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(also, pooled, rtol=EXACT, atol=EXACT)
    assert found.shape == wanted.shape
    assert not found[0, WIDTH // 2 :].any()
    assert wanted[0, WIDTH // 2 :].any()


def test_chunks_keep_the_budget_and_compute_less() -> None:
    shapes: list[torch.Size] = []

    class Noting(Reader):
        def forward(self, ids: Tensor, attention_mask: Tensor, scale: Any = None):
            shapes.append(ids.shape)
            return super().forward(ids, attention_mask)

    net, data = Noting().double(), batch()
    with Chunked(net, tokens=TOKENS):
        for _ in range(3):
            shapes.clear()
            net(data["ids"], data["mask"])
    assert sum(shape[0] for shape in shapes) == ROWS
    assert all(shape.numel() <= TOKENS for shape in shapes)
    assert sum(shape.numel() for shape in shapes) < ROWS * WIDTH / 2


def test_inputs_with_a_gradient_get_it_in_their_place() -> None:
    net, data = Reader().double(), batch()
    grads = []
    for cut in (False, True):
        chunks = Chunked(net, tokens=TOKENS)
        if not cut:
            chunks.remove()
        for shape in ((ROWS, WIDTH), (1, WIDTH)):
            scale = torch.linspace(1, 2, shape[0] * WIDTH).double().view(shape)
            scale.requires_grad_()
            logits, pooled = net(data["ids"], data["mask"], scale=scale)
            (token_loss(logits, data) + contrast(pooled)).backward()
            grads.append(scale.grad)
    for wanted, found in zip(grads[:2], grads[2:], strict=True):
        assert off_by(found, wanted) <= EXACT


def test_dropout_is_that_of_the_second_pass_too() -> None:
    """A finite difference sees the draws of the forward pass alone."""
    net, data = Reader(dropout=0.5).double(), batch()

    def step(net: Any) -> Tensor:
        logits, pooled = net(data["ids"], data["mask"])
        return token_loss(logits, data) + contrast(pooled)

    with Chunked(net, tokens=TOKENS):
        _, found = gradient(net, step)
        direction = [p.grad.clone() for p in net.parameters()]  # type: ignore[union-attr]
        losses = []
        for sign in (1, -2):
            with torch.no_grad():
                for p, d in zip(net.parameters(), direction, strict=True):
                    p.add_(d, alpha=sign * 1e-6)
            losses.append(gradient(net, step)[0])
    slope = (losses[0] - losses[1]) / 2e-6
    assert float((slope / found.norm() ** 2 - 1).abs()) < 1e-6


# ---- what is refused -----------------------------------------------------------------


def test_unmasked_mean_is_refused_by_name() -> None:
    net, data = Reader().double(), batch()
    step = lambda net: net(data["ids"], data["mask"])[0].mean(1).square().sum()  # noqa: E731
    _, wanted = gradient(net, step)
    with Chunked(net, tokens=TOKENS):
        with pytest.raises(TrainkitError, match="at padding is used by the loss"):
            gradient(net, step)
    with mock.patch.object(ByTokens, "refuse_padding"), Chunked(net, tokens=TOKENS):
        assert off_by(gradient(net, step)[1], wanted) > NAIVE  # the control


def test_padding_that_rows_look_at_is_refused() -> None:
    class Unmasked(Reader):
        def forward(self, ids: Tensor, attention_mask: Tensor, scale: Any = None):
            return super().forward(ids, torch.ones_like(attention_mask))

    net, data = Unmasked().double(), batch()
    with Chunked(net, tokens=TOKENS):
        with pytest.raises(TrainkitError, match="columns that are padding"):
            net(data["ids"], data["mask"])


def test_padding_on_the_left_needs_positions() -> None:
    net, data = Reader().double(), batch(is_left=True)
    with Chunked(net, tokens=TOKENS):
        with pytest.raises(TrainkitError, match="padded on the left"):
            net(data["ids"], data["mask"])


def test_a_mask_is_needed() -> None:
    net, data = Reader().double(), batch()
    with Chunked(net, tokens=TOKENS, lengths="mask"):
        with pytest.raises(TrainkitError, match="Pass 'mask' by name"):
            net(data["ids"], data["mask"])
    with Chunked(net, tokens=TOKENS):
        for given in (data["lengths"], data["mask"][:3]):
            with pytest.raises(TrainkitError, match="a mask of 14 rows and their col"):
                net(data["ids"], given)


def test_lengths_without_a_budget_are_refused() -> None:
    with pytest.raises(TrainkitError, match="Add tokens="):
        Chunked(Reader(), size=3, lengths="lengths")


def test_lengths_are_read_once_in_a_call() -> None:
    net, data = Reader().double(), batch()
    reads = []
    spans = tokens_module.spans_of
    with mock.patch.object(
        tokens_module, "spans_of", side_effect=lambda m: reads.append(1) or spans(m)
    ):
        with Chunked(net, tokens=TOKENS):
            net(data["ids"], data["mask"])[1].sum().backward()
    assert len(reads) == 1


# ---- models of transformers ----------------------------------------------------------


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        use_cache=False,
    )
    torch.manual_seed(0)
    return transformers.LlamaModel(config).double()


def bert(*, pools: bool = True) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    return transformers.BertModel(config, add_pooling_layer=pools).double()


def bert_without_pooler() -> Any:
    """Its pooler reads column 0, which on the left is padding."""
    return bert(pools=False)


class WithHead(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(16, VOCABULARY).double()

    def forward(self, data: dict[str, Tensor], *, positions: bool) -> tuple[Any, Any]:
        places = (data["mask"].cumsum(1) - 1).clamp(min=0)
        given = {"position_ids": places} if positions else {}
        out = self.body(input_ids=data["ids"], attention_mask=data["mask"], **given)
        hidden, mask = out.last_hidden_state, data["mask"][..., None]
        pooled = out.get("pooler_output")
        if pooled is None:
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        return self.head(hidden), pooled


@pytest.mark.parametrize(
    ("make", "is_left", "positions"),
    [
        (llama, False, False),
        (llama, False, True),
        (llama, True, True),
        (bert, False, False),
        (bert, False, True),
        (bert_without_pooler, True, True),
    ],
)
def test_models_of_transformers_cannot_tell(
    make: Any, is_left: bool, positions: bool
) -> None:
    net, data = WithHead(make()), batch(is_left=is_left)

    def step(net: Any) -> Tensor:
        logits, pooled = net(data, positions=positions)
        return token_loss(logits, data) + contrast(pooled)

    assert max(both(net, step, net.body, tokens=TOKENS)) <= EXACT
