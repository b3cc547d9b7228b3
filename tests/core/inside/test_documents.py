"""Documents of one row in chunks: the loss sees all of them at once, and a module in
which they see each other is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.inside.common import EXACT, NAIVE, gradient, off_by
from tests.zoo.language_models import WORDS, llama
from trainkit import Chunked, TrainkitError

WIDTH, LENGTHS = 8, [5, 3, 7, 2, 6, 4, 4, 9]
ENDS = F.pad(torch.tensor(LENGTHS).cumsum(0), (1, 0))
NUMBERS = torch.arange(8).repeat_interleave(torch.tensor(LENGTHS))[None]
IDS = torch.randint(0, WORDS, NUMBERS.shape, generator=torch.Generator().manual_seed(1))
PLACES = torch.cat([torch.arange(n) for n in LENGTHS])[None]
TOLD: dict[str, tuple[str, Tensor]] = {
    "offsets": ("cu_seqlens", ENDS),
    "offsets in a row": ("cu_seqlens", ENDS[None].int()),
    "numbers": ("seq_idx", NUMBERS),
    "positions": ("position_ids", PLACES),
    "a mask": ("attention_mask", NUMBERS + 1),
    "a mask, padding last": ("attention_mask", (NUMBERS + 1) % 8),
    "blocks": ("attention_mask", (NUMBERS.mT == NUMBERS).tril()[None, None]),
}
HOWS: list[dict[str, Any]] = [
    {"tokens": 12}, {"tokens": 9}, {"tokens": 14, "size": 2}, {"tokens": 99},
    {"size": 1}, {"size": 3}, {},
]  # fmt: skip
RUNS = [(0, 3), (3, 6), (6, 8)]


def means(states: Tensor, lengths: Sequence[int]) -> Tensor:
    parts = states.reshape(-1, states.shape[-1]).split(lengths)
    return torch.stack([each.mean(0) for each in parts])


def loss(head: nn.Module, states: Tensor, pooled: Tensor, ids: Tensor = IDS) -> Tensor:
    """Each document against all others, and cross entropy over their tokens."""
    z = F.normalize(pooled, dim=-1)
    across = F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))
    return across + F.cross_entropy(head(states.flatten(0, -2)), ids.flatten())


class Reader(nn.Module):
    """Runs over each document by itself; returns what their tokens have, and means.

    Args:
        leak: how documents see each other all the same.
        dropout: the share of values that it leaves out.
    """

    def __init__(self, leak: str = "", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leak, self.drop, self.widths = leak, nn.Dropout(dropout), list[int]()
        self.longest: list[Any] = []
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.double()

    def forward(
        self,
        ids: Tensor,
        *,
        side: Any = 0,
        table: Any = None,
        max_seqlen: int | None = None,
        **told: Any,
    ) -> Any:
        x = ids if ids.is_floating_point() else self.embed(ids)
        self.widths.append(x.numel() // WIDTH)
        ((name, value),) = told.items()
        numbers = value[0, 0].long().argmax(-1) if value.ndim > 2 else value.flatten()
        numbers = (numbers == 0).cumsum(0) if name == "position_ids" else numbers
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        lengths = numbers.diff().tolist() if name in ("cu_seqlens", "ends") else lengths
        self.longest.append((max_seqlen, max(lengths)))
        bounds = [sum(lengths)] if self.leak == "all" else lengths
        parts = [each[None] for each in x.view(-1, WIDTH).split(bounds)]
        parts = [self.gru(each)[0] + self.conv(each.mT).mT.tanh() for each in parts]
        states = self.drop(torch.cat(parts, 1))[0]
        if table is not None:
            states = states * table.mean(0)
        if self.leak == "mean":
            states = states - states.mean(0)
        if self.leak == "place":
            states = states + torch.arange(len(states))[:, None] / 100
        if self.leak == "noise":
            states = states + torch.rand_like(states)
        return states.view(x.shape), means(states, lengths) + side


def step(net: Any, ids: Tensor = IDS, **told: Any) -> Tensor:
    return loss(net.head, *net(ids, **(told or {"cu_seqlens": ENDS})))


def runs_of(net: Any) -> list[Any]:
    """What a net returns for some documents after others."""
    starts = [(ENDS[a], ENDS[b], ENDS[a : b + 1] - ENDS[a]) for a, b in RUNS]
    return [net(IDS[:, a:b], cu_seqlens=ends) for a, b, ends in starts]


def in_one_graph(net: Any) -> Tensor:
    states, pooled = zip(*runs_of(net), strict=True)
    return loss(net.head, torch.cat(states, 1), torch.cat(pooled))


def naive(net: Any) -> Any:
    """The mean of the losses of runs."""
    ids = [IDS[:, ENDS[a] : ENDS[b]] for a, b in RUNS]
    pairs = zip(runs_of(net), ids, strict=True)
    return sum(loss(net.head, *out, ids=own) for out, own in pairs) / len(RUNS)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("ids", [IDS, IDS[0]], ids=["row", "tokens"])
def test_the_loss_sees_all_documents_at_once(ids: Tensor, how: dict[str, Any]) -> None:
    """What has an entry for each document is joined too."""
    net = Reader()
    wanted = gradient(net, lambda net: step(net, ids))
    assert off_by(gradient(net, naive)[1], wanted[1]) > NAIVE
    with Chunked(net, **how):
        for _ in range(3):
            net.widths.clear()
            found = gradient(net, lambda net: step(net, ids))
            assert max(map(off_by, found, wanted)) <= EXACT
        assert max(net.widths) <= max(how.get("tokens", 40), 9)


@pytest.mark.parametrize("name", TOLD)
def test_what_tells_documents_apart_is_made_anew(name: str) -> None:
    net, told = Reader(), dict([TOLD[name]])
    wanted = gradient(net, lambda net: step(net, **told))[1]
    with Chunked(net, tokens=12):
        assert off_by(gradient(net, lambda net: step(net, **told))[1], wanted) <= EXACT
        assert len(net.widths) > 6


def test_dropout_is_that_of_chunks_in_one_graph() -> None:
    net = Reader(dropout=0.4)
    wanted = gradient(net, in_one_graph)[1]
    with Chunked(net, size=3):
        assert off_by(gradient(net, step)[1], wanted) <= EXACT


@pytest.mark.parametrize("number", [1, len(LENGTHS)])
@pytest.mark.parametrize("shape", [NUMBERS.shape, NUMBERS.shape[1:]])
def test_arguments_that_train_get_their_gradient(shape: Any, number: int) -> None:
    """By tokens, by documents, or one for all."""
    net, x = Reader(), torch.randn(*shape, WIDTH).double().requires_grad_()
    side = torch.randn(number, WIDTH).double().requires_grad_()
    told = {"cu_seqlens": ENDS, "side": side}
    wanted = torch.autograd.grad(step(net, x, **told), (x, side))
    with Chunked(net, size=3):
        found = torch.autograd.grad(step(net, x, **told), (x, side))
    assert max(map(off_by, found, wanted)) <= EXACT


@pytest.mark.parametrize("shared", [(), "max_seqlen"])
@pytest.mark.parametrize("entries", [3, 17])
def test_a_table_of_all_documents_stays_whole(entries: int, shared: Any) -> None:
    """Also where it has as many entries as the documents of a chunk, or their tokens.

    The groups that are compared have as many tokens, by chance, and the first document
    is the longest.
    """
    ends = F.pad(torch.tensor([9, 6, 2, 4, 2, 6, 4, 7]).cumsum(0), (1, 0))
    table = torch.randn(entries, WIDTH).double()
    net, given = Reader(), {"cu_seqlens": ends, "table": table, "max_seqlen": 9}
    wanted = gradient(net, lambda net: step(net, **given))[1]
    with Chunked(net, size=3, shared=shared):
        assert off_by(gradient(net, lambda net: step(net, **given))[1], wanted) <= EXACT
    assert all(told == (9 if shared else own) for told, own in net.longest)


@pytest.mark.parametrize("how", [HOWS[0], *HOWS[-4:]])
@pytest.mark.parametrize("leak", ["all", "mean", "place", "noise"])
def test_documents_that_see_each_other_are_refused(leak: str, how: Any) -> None:
    with Chunked(Reader(leak), **how) as net:
        with pytest.raises(TrainkitError, match="chunks of documents: .*a document de"):
            step(net)


@pytest.mark.parametrize("ends", [ENDS[:-1], torch.cat([ENDS[:2], ENDS[1:]])])
def test_offsets_must_be_those_of_all_documents(ends: Tensor) -> None:
    with Chunked(Reader(), size=2) as net:
        with pytest.raises(TrainkitError, match="offsets cu_seqlens must begin at 0"):
            net(IDS, cu_seqlens=ends)


@pytest.mark.parametrize(
    ("how", "name", "is_cut"),
    [("batch.ends", "ends", True), ("auto", "ends", False), ("off", "seq_idx", False)],
)
def test_it_is_named_found_or_not_looked_for(how: str, name: str, is_cut: bool) -> None:
    net = Reader()
    with Chunked(net, size=2, documents=how):
        net(IDS, **{name: ENDS if name == "ends" else NUMBERS})
    assert (len(net.widths) > 1) is is_cut
    with Chunked(net, tokens=9), pytest.raises(TrainkitError, match="cu_seq_lens_q, "):
        net(IDS[0], ends=ENDS)


class Rows(nn.Module):
    """Notes how many rows it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.got = nn.Embedding(WORDS, WIDTH), list[int]()

    def forward(self, ids: Tensor, **told: Tensor) -> Tensor:
        self.got.append(len(ids))
        return self.embed(ids)


@pytest.mark.parametrize(
    ("told", "how"),
    [
        ({"seq_idx": NUMBERS.repeat(4, 1)}, "seq_idx"),  # packed
        ({"attention_mask": torch.tensor([1, 1, 2, 2])}, "auto"),  # such as lengths
    ],
)
def test_several_rows_are_cut_by_rows(told: dict[str, Tensor], how: str) -> None:
    net, ids = Rows(), IDS.repeat(4, 1)
    with Chunked(net, size=1, documents=how):
        for _ in range(2):  # which are checked
            net(ids, **told)
        net.got.clear()
        assert torch.equal(net(ids, **told), net.embed(ids))
    assert net.got == [1] * 4


# ---- models of transformers ----------------------------------------------------------


class Llama(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = llama("LlamaModel", **options)
        self.head = nn.Linear(16, WORDS).double()

    def run(self, **told: Any) -> Tensor:
        told = told or {"position_ids": PLACES}
        states = self.body(input_ids=IDS, **told).last_hidden_state
        return loss(self.head, states, means(states, LENGTHS))


@pytest.mark.parametrize(
    ("attention", "most", "how"),
    [*(("sdpa", 1e-10, how) for how in HOWS), ("eager", 1e-6, HOWS[0])],
)
def test_llama_flattened(attention: str, most: float, how: Any) -> None:
    """Its eager attention rounds to float32, by how many tokens there are."""
    net = Llama(use_cache=False, attn_implementation=attention)
    wanted = gradient(net, Llama.run)
    with Chunked(net.body, **how):
        for _ in range(2):
            assert max(map(off_by, gradient(net, Llama.run), wanted)) <= most


@pytest.mark.parametrize(
    ("cache", "told"), [(True, {}), (False, {"cu_seq_lens_q": ENDS.int()})]
)
def test_llama_that_does_not_heed_documents_is_refused(cache: bool, told: Any) -> None:
    """Its cache, or offsets at which only kernels of variable length look."""
    net = Llama(use_cache=cache, attn_implementation="sdpa")
    with Chunked(net.body, size=2):
        with pytest.raises(TrainkitError, match="documents.*use_cache ?= ?False"):
            net.run(**told)
