"""A budget of tokens inside a module: the loss over real positions cannot tell, and a
loss or a module that uses what was left out is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.inside.common import EXACT, NAIVE, gradient, off, off_by
from tests.zoo.language_models import bert, llama
from trainkit import Chunked, TrainkitError
from trainkit.core.inside import call
from trainkit.core.inside import tokens as tokens_module

VOCABULARY, ROWS, WIDTH, TOKENS = 29, 14, 24, 40
UNCHECKED = mock.patch.object(call, "refuse_padding")
"""Without the refusal a wrong gradient is seen: the control."""

Step = Callable[[Any], Tensor]


class Reader(nn.Module):
    """Attention over what the mask leaves, and a pooled output; other arguments are
    added to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out, self.side = nn.Linear(8, VOCABULARY), nn.Linear(8, 8)
        self.shapes: list[torch.Size] = []
        self.double()

    def forward(self, ids: Tensor, attention_mask: Tensor, **given: Any) -> Any:
        names = ("scale", "target", "side", "square")
        scale, target, side, square = map(given.get, names)
        self.shapes.append(ids.shape)
        x = self.embed(ids)
        if scale is not None:
            x = x * scale[..., None]
        ignored = torch.zeros_like(attention_mask).double()
        ignored = ignored.masked_fill(attention_mask == 0, -torch.inf)
        if square is not None:
            assert square.shape[-1] == square.shape[-2] == ids.shape[1]
            square = square.flatten(0, 1) if square.ndim > 2 else square
        x = x + self.attend(x, x, x, key_padding_mask=ignored, attn_mask=square)[0]
        weights = attention_mask[..., None].to(x)
        pooled = (x * weights).sum(1) / weights.sum(1)
        if side is not None:
            pooled = pooled + self.side(side)
        if target is not None:  # a decoder that sees the columns before
            x = (self.embed(target).cumsum(1) / 8 + pooled[:, None]).tanh()
        return self.out(x), pooled


class Tagger(Reader):
    """It does not look at the mask."""

    def forward(self, ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        x = self.embed(ids).tanh()
        return self.out(x), x[:, 0] * 0


def batch(*, is_left: bool = False, width: int = WIDTH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, width // 2, (ROWS,), generator=generator)
    lengths[5] = width
    mask = (torch.arange(width) < lengths[:, None]).long()
    ids = torch.randint(0, VOCABULARY, (ROWS, width), generator=generator)
    mask = mask.flip(1) if is_left else mask
    return {"ids": ids, "mask": mask, "lengths": lengths}


DATA = batch()


def token_loss(logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    """Over real positions, divided by a number that depends on the whole batch."""
    labels = data["ids"].masked_fill(data["mask"] == 0, -100)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum() / data["mask"].sum() + losses.sum().square() / 1e4


def contrast(pooled: Tensor) -> Tensor:
    z = F.normalize(pooled, dim=-1)
    return F.cross_entropy(z @ z.T * 4, torch.arange(len(z)).roll(1))


def made(data: dict[str, Tensor] = DATA, **given: Any) -> Step:
    """A step that uses both outputs."""

    def step(net: Any) -> Tensor:
        logits, pooled = net(data["ids"], attention_mask=data["mask"], **given)
        return token_loss(logits, data) + contrast(pooled)

    return step


def off_over(net: nn.Module, steps: Sequence[Step]) -> float:
    """How far the gradients of steps are from the whole batch's, at most."""
    whole = copy.deepcopy(net)
    with Chunked(net, tokens=TOKENS):
        return max(off_by(gradient(net, s)[1], gradient(whole, s)[1]) for s in steps)


@pytest.mark.parametrize(("is_left", "size"), [(False, None), (True, None), (True, 3)])
def test_loss_over_real_positions_cannot_tell(is_left: bool, size: int | None) -> None:
    step = made(batch(is_left=is_left))
    assert off(Reader(), step, times=4, tokens=TOKENS, size=size) <= EXACT


def test_a_batch_without_padding_before_one_with_it() -> None:
    full = {**DATA, "mask": torch.ones_like(DATA["mask"])}
    assert off_over(Reader(), [made(full), made(full), made()]) <= EXACT


def test_outputs_are_in_the_order_of_the_rows_and_0_at_padding() -> None:
    net, real = Reader(), DATA["mask"] == 1
    wanted, pooled = net(DATA["ids"], DATA["mask"])
    spans = tokens_module.spans_of
    reading = mock.patch.object(tokens_module, "spans_of", side_effect=spans)
    with Chunked(net, tokens=TOKENS), reading as reads:
        for _ in range(2):
            net(DATA["ids"], DATA["mask"])
        compared, net.shapes = net.shapes[1:], []
        found, also = net(DATA["ids"], DATA["mask"])
    torch.testing.assert_close(found[real], wanted[real], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(also, pooled, rtol=EXACT, atol=EXACT)
    assert found.shape == wanted.shape
    assert not found[0, WIDTH // 2 :].any()
    assert wanted[0, WIDTH // 2 :].any()
    assert reads.call_count == 3  # once in a call
    # Chunks keep the budget, and compute less; what is compared keeps twice of it.
    assert max(shape.numel() for shape in compared) <= 2 * TOKENS
    assert sum(shape[0] for shape in net.shapes) == ROWS
    assert all(shape.numel() <= TOKENS for shape in net.shapes)
    assert sum(shape.numel() for shape in net.shapes) < ROWS * WIDTH / 2


@pytest.mark.parametrize("rows", [ROWS, 1])
def test_inputs_with_a_gradient_get_it_in_their_place(rows: int) -> None:
    net, scale = Reader(), torch.linspace(1, 2, rows * WIDTH).double().view(rows, WIDTH)
    scale.requires_grad_()
    made(scale=scale)(net).backward()
    wanted: Any = scale.grad
    scale.grad = None
    with Chunked(net, tokens=TOKENS):
        made(scale=scale)(net).backward()
    assert off_by(scale.grad, wanted) <= EXACT  # type: ignore[arg-type]


@pytest.mark.parametrize("ndim", [2, 4])
def test_a_mask_of_columns_by_columns_is_cut_on_both_sides(ndim: int) -> None:
    square = torch.full((WIDTH, WIDTH), -torch.inf).double().triu(1)
    given = square if ndim == 2 else square.expand(ROWS, 2, -1, -1)
    assert off(Reader(), made(square=given), tokens=TOKENS) <= EXACT


# ---- a width that is the mask's by chance --------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_target_as_wide_as_the_mask_is_right_or_refused(at: int) -> None:
    """It keeps its columns once it had another width than the mask."""

    def decoding(width: int) -> Step:
        """Its rows are long where those of the encoder are short."""
        mask = (torch.arange(width) < (WIDTH - DATA["lengths"])[:, None]).double()
        mask[5, 0] = 1

        def step(net: Any) -> Tensor:
            target = DATA["ids"].flip(1)[:, :width]
            out, _ = net(DATA["ids"], attention_mask=DATA["mask"], target=target)
            return contrast((out * mask[..., None]).sum(1) / mask.sum(1)[:, None])

        return step

    steps = [decoding(WIDTH if n == at else WIDTH - 2) for n in range(5)]
    if at:
        assert off_over(Reader(), steps) <= EXACT
    else:
        with pytest.raises(TrainkitError, match="at padding is used|columns that are"):
            off_over(Reader(), steps)
        with UNCHECKED:
            assert off_over(Reader(), steps[:1]) > NAIVE  # the control


@pytest.mark.parametrize("widths", [(12, 8), (8, 12)])
def test_features_as_many_as_columns_are_not_cut_or_refused(widths: Any) -> None:
    side = torch.linspace(-1, 1, ROWS * 8).double().view(ROWS, 8)
    steps = [made(batch(width=width), side=side) for width in widths]
    if widths[0] != 8:
        assert off_over(Reader(), steps) <= EXACT
    else:
        with pytest.raises(TrainkitError, match="does not run on fewer rows"):
            off_over(Reader(), steps)


# ---- refused -------------------------------------------------------------------------


def inverse(net: Any) -> Tensor:
    """The mask marks padding."""
    return token_loss(net(DATA["ids"], attention_mask=DATA["mask"] == 0)[0], DATA)


def unmasked(net: Any) -> Tensor:
    return net(DATA["ids"], attention_mask=DATA["mask"])[0].mean(1).square().sum()


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize(("kind", "wrong"), [(Tagger, inverse), (Reader, unmasked)])
def test_a_loss_that_uses_padding_is_refused(kind: Any, wrong: Step, at: int) -> None:
    steps = [wrong if n == at else made() for n in range(4)]
    if kind is Tagger:
        steps = steps[at : at + 1]
    with pytest.raises(TrainkitError, match="at padding is used by the loss"):
        off_over(kind(), steps)
    with UNCHECKED:
        assert off_over(kind(), steps) > NAIVE
    assert off_over(kind(), [made()] * 4) <= EXACT


class Unmasked(Reader):
    def forward(self, ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        return super().forward(ids, torch.ones_like(attention_mask))


class Noisy(Reader):
    def forward(self, ids: Tensor, attention_mask: Tensor, **_: Any) -> Any:
        logits, pooled = super().forward(ids, attention_mask)
        return logits + torch.randn_like(logits), pooled


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Unmasked, "columns that are padding"),
        (Noisy, "draws random numbers in evaluation mode"),
    ],
)
def test_rows_that_look_at_padding_are_refused(kind: Any, words: str) -> None:
    with pytest.raises(TrainkitError, match=words):
        off_over(kind(), [made()])


def test_a_mask_is_needed() -> None:
    net = Reader()
    with Chunked(net, tokens=TOKENS, lengths="mask"):
        with pytest.raises(TrainkitError, match="Pass 'mask' by name"):
            net(DATA["ids"], DATA["mask"])
    with Chunked(net, tokens=TOKENS):
        for given in (DATA["lengths"], DATA["mask"][:3]):
            with pytest.raises(TrainkitError, match="a mask of 14 rows and their col"):
                net(DATA["ids"], given)
    with pytest.raises(TrainkitError, match="Add tokens="):
        Chunked(Reader(), size=3, lengths="lengths")


# ---- models of transformers ----------------------------------------------------------


def causal() -> Any:
    return llama("LlamaModel", use_cache=False)


def both_ways() -> Any:
    """Without its pooler, which reads column 0: on the left that is padding."""
    return bert("BertModel", False)


class WithHead(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(16, VOCABULARY).double()

    def forward(self, data: dict[str, Tensor], *, positions: bool) -> tuple[Any, Any]:
        places = (data["mask"].cumsum(1) - 1).clamp(min=0)
        given = {"position_ids": places} if positions else {}
        out = self.body(input_ids=data["ids"], attention_mask=data["mask"], **given)
        hidden, mask = out.last_hidden_state, data["mask"][..., None]
        return self.head(hidden), (hidden * mask).sum(1) / mask.sum(1)


READERS = [(causal, True, False), (causal, False, True)]
READERS += [(both_ways, True, False), (both_ways, True, True)]


@pytest.mark.parametrize(("make", "is_left", "positions"), READERS)
def test_models_of_transformers_cannot_tell_or_are_refused(
    make: Any, is_left: bool, positions: bool
) -> None:
    """Rows that are padded on the left have other places, if nobody says which."""
    net, data = WithHead(make()), batch(is_left=is_left)

    def step(net: Any) -> Tensor:
        logits, pooled = net(data, positions=positions)
        return token_loss(logits, data) + contrast(pooled)

    if make is both_ways and is_left and not positions:
        with pytest.raises(TrainkitError, match="columns that are padding.*position_i"):
            off(net, step, of=net.body, tokens=TOKENS)
    else:
        # Llama computes places in float32, and only what is between them matters.
        most = 1e-7 if is_left and not positions else EXACT
        assert off(net, step, of=net.body, tokens=TOKENS) <= most
