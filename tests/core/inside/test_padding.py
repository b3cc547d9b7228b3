"""Which columns are padding: a length that is the padded one by chance, masks of every
kind, and a loss that uses what was left out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.inside.common import EXACT, NAIVE, gradient, off_by
from trainkit import Chunked, TrainkitError
from trainkit.core.inside import tokens
from trainkit.core.inside.tokens import ByTokens

ROWS, WIDTH, SIZE, WORDS, TOKENS = 16, 8, 6, 20, 24
LENGTHS = torch.tensor([3, 8, 2, 5, 8, 3, 4, 2, 6, 3, 2, 8, 1, 2, 3, 4])

Step = Callable[[Any], Tensor]


class Reader(nn.Module):
    """A mean over what the mask leaves; what else it is given is added to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, SIZE)
        self.body, self.side = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.double()

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        decoder_ids: Tensor | None = None,
        side: Tensor | None = None,
    ) -> Tensor:
        mask = attention_mask[..., None].double()
        pooled = (self.body(self.embed(ids)).tanh() * mask).sum(1) / mask.sum(1)
        if side is not None:
            pooled = pooled + self.side(side)
        if decoder_ids is None:
            return pooled
        seen = self.embed(decoder_ids).cumsum(1) / SIZE  # of the columns before
        return (self.side(seen) + pooled[:, None]).tanh()


class Causal(Reader):
    """Attention under a mask of columns by columns, which all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(SIZE, 2, batch_first=True).double()

    def forward(self, ids: Tensor, attention_mask: Tensor, square: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids)
        masks = square if square.ndim == 2 else square.flatten(0, 1)
        x = x + self.attend(x, x, x, attn_mask=masks, need_weights=False)[0]
        return x if square.ndim == 2 else x * attention_mask[..., None]


def words(seed: int, rows: int = ROWS, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, WORDS, (rows, width), generator=generator)


def marks(width: int = WIDTH) -> Tensor:
    return (torch.arange(width) < LENGTHS[:, None]).long()


def contrast(pooled: Tensor) -> Tensor:
    z = F.normalize(pooled, dim=-1)
    return F.cross_entropy(z @ z.T * 4, torch.arange(len(z)).roll(1))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    weights = mask[..., None].to(x)
    return (x * weights).sum(1) / weights.sum(1)


def off(net: nn.Module, steps: Sequence[Step], **options: Any) -> float:
    """How far losses and gradients of steps are from the whole batch's, at most."""
    whole, worst = copy.deepcopy(net), 0.0
    with Chunked(net, tokens=TOKENS, **options):
        for step in steps:
            wanted, found = gradient(whole, step), gradient(net, step)
            off_loss = float((found[0] - wanted[0]).abs())
            worst = max(worst, off_loss, off_by(found[1], wanted[1]))
    return worst


UNCHECKED = mock.patch.object(ByTokens, "refuse_padding")


# ---- a width that is the mask's by chance --------------------------------------------


def decoding(width: int) -> Step:
    """A decoder's rows are long where the encoder's are short."""
    mask = (torch.arange(width) < (9 - LENGTHS)[:, None]).long()

    def step(net: Any) -> Tensor:
        out = net(words(1), attention_mask=marks(), decoder_ids=words(2, width=width))
        return contrast(masked_mean(out, mask))

    return step


@pytest.mark.parametrize("at", range(6))
def test_a_decoder_as_wide_as_the_mask_is_right_or_refused(at: int) -> None:
    """It keeps its columns once it had another width than the mask."""
    steps = [decoding(WIDTH if n == at else SIZE) for n in range(6)]
    if at:
        assert off(Reader(), steps) <= EXACT
    else:
        with pytest.raises(TrainkitError, match="at padding is used|columns that are"):
            off(Reader(), steps)
        with UNCHECKED:
            assert off(Reader(), steps[:1]) > NAIVE  # the control


@pytest.mark.parametrize("widths", [(SIZE,), (WIDTH, WIDTH, SIZE), (SIZE, WIDTH)])
def test_features_as_many_as_columns_are_not_cut_or_refused(
    widths: Sequence[int],
) -> None:
    def steps(width: int) -> Step:
        lengths = LENGTHS.clamp(max=width)
        mask = (torch.arange(width) < lengths[:, None]).long()
        side = torch.linspace(-1, 1, ROWS * SIZE).double().view(ROWS, SIZE)
        return lambda net: contrast(
            net(words(1, width=width), attention_mask=mask, side=side)
        )

    if widths[0] == WIDTH:
        assert off(Reader(), [steps(width) for width in widths]) <= EXACT
    else:
        with pytest.raises(TrainkitError, match="does not run on fewer rows"):
            off(Reader(), [steps(width) for width in widths])


# ---- masks ---------------------------------------------------------------------------


@pytest.mark.parametrize("ndim", [2, 4])
@pytest.mark.parametrize("width", [WIDTH, WIDTH + 4])
def test_a_mask_of_columns_by_columns_is_cut_on_both_sides(
    width: int, ndim: int
) -> None:
    square = torch.full((width, width), -torch.inf).double().triu(1)
    given = square if ndim == 2 else square.expand(ROWS, 2, -1, -1)
    shapes: list[torch.Size] = []

    class Noting(Causal):
        def forward(
            self, ids: Tensor, attention_mask: Tensor, square: Tensor
        ) -> Tensor:
            shapes.append(square.shape[-2:])
            return super().forward(ids, attention_mask, square)

    mask = marks(width)
    step: Step = lambda net: contrast(  # noqa: E731
        masked_mean(net(words(1, width=width), mask, given), mask)
    )
    assert off(Noting(), [step] * 3) <= EXACT
    assert {each[0] for each in shapes} == {each[1] for each in shapes}
    assert min(shapes)[0] < width / 2


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("width", [WIDTH, WIDTH + 1])
def test_a_mask_that_marks_padding_is_refused(width: int, additive: bool) -> None:
    """Whether or not there is a row without padding."""
    mask = marks(width) == 0
    given = mask * -1e9 if additive else mask
    with Chunked(Reader(), tokens=TOKENS) as net:
        with pytest.raises(TrainkitError, match="If it marks padding, pass ~mask"):
            net(words(1, width=width), given)


@pytest.mark.parametrize("is_left", [False, True])
def test_a_mask_that_cannot_be_told_to_mark_padding_is_refused_by_the_loss(
    is_left: bool,
) -> None:
    """It looks like that of rows which are padded on the other side."""

    class Tagger(Reader):
        def forward(self, ids: Tensor, attention_mask: Tensor, **given: Any) -> Tensor:  # type: ignore[override]
            return self.body(self.embed(ids))

    mask = marks().flip(1) if is_left else marks()
    places = {} if is_left else {"position_ids": torch.arange(WIDTH).expand(ROWS, -1)}

    def step(net: Any, given: Tensor = mask == 0) -> Tensor:
        return contrast(masked_mean(net(words(1), given, **places), mask))

    with pytest.raises(TrainkitError, match="a mask marks tokens by 1 or True"):
        off(Tagger(), [step])
    with UNCHECKED:
        assert off(Tagger(), [step]) > NAIVE  # the control
    if not is_left:
        assert off(Tagger(), [lambda net: step(net, mask)]) <= EXACT


# ---- a loss that uses padding --------------------------------------------------------


def tagging(*, masks: bool) -> Step:
    mask = marks() if masks else torch.ones(ROWS, WIDTH)

    def step(net: Any) -> Tensor:
        return contrast(masked_mean(net(words(1), marks(), words(2)), mask))

    return step


class Tied(Reader):
    """All arguments are of one width."""

    def forward(self, ids: Tensor, attention_mask: Tensor, tags: Tensor) -> Tensor:  # type: ignore[override]
        x = self.body(self.embed(ids) + self.embed(tags))
        return x * attention_mask.clamp(min=2)[..., None]


@pytest.mark.parametrize("at", range(6))
def test_padding_is_looked_at_in_each_pass(at: int) -> None:
    steps = [tagging(masks=n != at) for n in range(6)]
    with pytest.raises(TrainkitError, match="at padding is used by the loss"):
        off(Tied(), steps)
    with UNCHECKED:
        assert off(Tied(), steps) > NAIVE
    assert off(Tied(), [tagging(masks=True)] * 6) <= EXACT


def failing(net: nn.Module, steps: Sequence[Step]) -> None:
    with Chunked(net, tokens=TOKENS):
        for step in steps:
            gradient(net, step)
        raise KeyError


def test_a_device_is_not_waited_for_but_at_the_next_call_or_the_end() -> None:
    net = Tied()
    steps = [tagging(masks=n != 2) for n in range(3)]
    with mock.patch.object(tokens, "runs_later", return_value=True):
        cut = Chunked(net, tokens=TOKENS)
        for step in steps:
            gradient(net, step)
        check: Any = cut._cut.by_tokens  # type: ignore[union-attr]
        assert len(check._unread) == 1
        with pytest.raises(TrainkitError, match="at padding is used by the loss"):
            net(words(1), marks(), words(2))
        gradient(net, tagging(masks=True))  # pass 4 is waited for
        gradient(net, tagging(masks=False))
        assert check._unread
        assert not copy.deepcopy(check)._unread
        with pytest.raises(TrainkitError, match="at padding is used by the loss"):
            cut.remove()
        assert "forward" not in vars(net)
        with pytest.raises(KeyError):  # another error goes first
            failing(net, steps)
