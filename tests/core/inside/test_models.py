"""Tiny models of transformers, built from a configuration, in chunks; what torch does
around them: autocast, half precision, checkpoints, offloading and compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.inside.common import (
    EXACT,
    LABELS,
    NAIVE,
    Net,
    X,
    batch,
    gradient,
    in_parts,
    nt_xent,
    off,
    off_by,
    step,
    twin,
)
from tests.zoo.language_models import SIZES, WORDS, bert, gpt2, llama, made, mixtral, t5
from trainkit import Chunked, TrainkitError

ROWS, LENGTH = 6, 5


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[2, 3:] = mask[4, 2:] = 0
    ids = torch.randint(1, WORDS, (ROWS, LENGTH))
    return {"input_ids": ids, "attention_mask": mask}


def labels_of(batch: dict[str, Tensor]) -> Tensor:
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


def vit() -> Any:
    sizes = {k: v for k, v in SIZES.items() if k != "vocab_size"}
    return made("ViTModel", "ViT", **sizes, image_size=8, patch_size=4)


ROUTED: dict[str, Any] = {
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "experts_implementation": "eager",
}


def with_labels(model: Any) -> Tensor:
    batch = tokens()
    return model(**batch, labels=labels_of(batch)).loss


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
    "Mixtral with its router's loss": (lambda: mixtral(**ROUTED), "model", with_labels),
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
        layer.register_forward_hook(lambda m, args, out: rows.append(num_rows(out)))
        for _ in range(2):
            loss, found = gradient(model, step)
            assert abs(loss - wanted_loss) <= EXACT
            assert off_by(found, wanted) <= EXACT
            assert getattr(cut.config, "use_cache", None) == uses_cache
    assert set(rows) <= {1, 2, 3, 4}
    if step is with_labels and part == "model":  # the control: means of micro-batches
        _, naive = gradient(model, of_micro_batches)
        assert off_by(naive, wanted) > NAIVE


def num_rows(out: Any) -> int:
    return len(out[0] if isinstance(out, tuple) else out)


def of_micro_batches(model: Any) -> Tensor:
    every = tokens()
    parts = [{k: v[i : i + 2] for k, v in every.items()} for i in (0, 2, 4)]
    return torch.stack([model(**p, labels=labels_of(p)).loss for p in parts]).mean()


def test_a_whole_model_without_labels_and_with_a_loss_inside() -> None:
    model, batch = llama(), tokens()

    def outside(model: Any) -> Tensor:
        logits, labels = model(**batch).logits, labels_of(batch)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    assert off(model, outside, size=2) <= EXACT
    with Chunked(model, size=2):
        with pytest.raises(TrainkitError, match="'loss'.*depends on them"):
            with_labels(model)
        with pytest.raises(TrainkitError, match="'past_key_values' is a DynamicCache"):
            model(**batch, use_cache=True)


@pytest.mark.filterwarnings("ignore:.*checkpointing_enable")
def test_their_checkpoints_and_adapters_inputs() -> None:
    model = llama()
    _, wanted = gradient(model, with_labels)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    assert off(model, with_labels, of=model.model, wanted=wanted, size=2) <= EXACT


def test_generating_in_evaluation_has_its_cache() -> None:
    model = llama().eval()
    ids = tokens()["input_ids"][:2]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    with Chunked(model.model, size=1):
        assert torch.equal(model.generate(ids, **options), wanted)
        with torch.no_grad():
            assert model(input_ids=ids).past_key_values is not None


Make = Callable[[Any], Tensor]

# ---- autocast ------------------------------------------------------------------------


def cast(make: Make, cached: bool = True) -> Make:
    def within(net: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            return make(net)

    return within


@pytest.mark.parametrize("cached", [False, True])
def test_autocast_holds_in_the_second_pass(cached: bool) -> None:
    """The gradient is that of the same chunks in one graph, to the rounding of their
    sums; without autocast in the second pass it would be the float32 one."""
    net = Net()
    _, wanted = gradient(net, cast(in_parts, cached))
    rounding = off_by(wanted, gradient(net, step)[1])
    assert rounding > NAIVE
    assert off(net, cast(step, cached), wanted=wanted, size=4) <= rounding / 2


def test_weights_cast_without_a_graph_do_not_serve_the_loss() -> None:
    """A weight used inside and in the loss: autocast keeps its cast, made inside."""

    @cast
    def tied(net: Any) -> Tensor:
        return nt_xent(F.linear(net(X.float()), net.head.weight.T), LABELS)

    net = Net()
    _, wanted = gradient(net, tied)
    net.head.weight.requires_grad_(False)
    _, without = gradient(net, tied)
    net.head.weight.requires_grad_(True)
    assert off(net, tied, wanted=wanted, size=4) <= 0.05
    assert off_by(without, wanted) > 0.2


# ---- half precision ------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 8, 64])
def test_gradients_of_half_precision_are_added_up_in_float32(size: int) -> None:
    x, labels = batch(256)
    exact = twin(Net().bfloat16())
    _, wanted = gradient(exact, lambda net: F.cross_entropy(net(x), labels))
    net = Net().bfloat16()

    def half(net: Any) -> Tensor:
        return F.cross_entropy(net(x.bfloat16()).float(), labels)

    def naive(net: Any) -> Tensor:
        net.zero_grad()
        out = net(x.bfloat16()).detach().requires_grad_()
        F.cross_entropy(out.float(), labels).backward()
        for part, g in zip(x.bfloat16().split(1), out.grad.split(1), strict=True):
            net(part).backward(g)  # adds up in bfloat16
        return torch.cat([p.grad.flatten() for p in net.parameters()]).double()

    whole = off_by(gradient(net, half)[1].double(), wanted)
    with Chunked(net, size=size):
        found = gradient(net, half)[1]
    assert found.dtype == torch.bfloat16
    assert off_by(found.double(), wanted) <= 1.3 * whole
    assert off_by(naive(net), wanted) > 1.3 * whole


# ---- checkpoints and offloading ------------------------------------------------------


def checkpointed(net: Any, x: Tensor) -> Tensor:
    return net.head(checkpoint(net.body, x, use_reentrant=net.reentrant))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_inside(reentrant: bool, dropout: float) -> None:
    net = twin(Net(checkpointed, dropout=dropout, reentrant=reentrant))
    x = X.clone().requires_grad_()  # or a reentrant one gives no gradient at all

    def made(net: Any) -> Tensor:
        return nt_xent(net(x), LABELS)

    def parts(net: Any) -> Tensor:
        return nt_xent(torch.cat([net(part) for part in x.tensor_split(6)]), LABELS)

    _, wanted = gradient(net, parts)
    assert off(net, made, wanted=wanted) <= EXACT


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_inside_autocast(reentrant: bool) -> None:
    """What they save is not seen, and has the rounding of half precision."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, dropout=0.0, batch_first=True)
    net: Any = nn.TransformerEncoder(layer, 4)

    def through(x: Tensor) -> Tensor:
        for each in net.layers:
            x = checkpoint(each, x, use_reentrant=reentrant)  # type: ignore[assignment]
        return F.layer_norm(x.float(), (64,))

    net.forward = through
    x = torch.randn(16, 12, 64).requires_grad_()
    with Chunked(net, size=4), torch.autocast("cpu", torch.bfloat16):
        net(x).std().backward()
    assert all(each.grad is not None for each in net.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around(reentrant: bool) -> None:
    net, x = twin(Net(dropout=0.5)), X.clone().requires_grad_()
    _, wanted = gradient(net, in_parts)

    def around(net: Any) -> Tensor:
        return nt_xent(checkpoint(net, x, use_reentrant=reentrant), LABELS)  # type: ignore[arg-type]

    assert off(net, around, wanted=wanted) <= EXACT


def test_offloading_around() -> None:
    with torch.autograd.graph.save_on_cpu():
        assert off(twin(Net())) <= EXACT


# ---- compiling -----------------------------------------------------------------------


@pytest.fixture
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting(Net):
    """Notes how many rows it sees."""

    rows: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.rows = (*self.rows, len(x))
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.usefixtures("clean")
def test_compiled_around_it_runs_uncompiled() -> None:
    """The module, a step, or the module itself by `compile()`."""
    net, in_place = twin(Counting()), twin(Counting())
    _, wanted = gradient(net, step)
    in_place.compile(backend="eager")
    around: Any = torch.compile(net, backend="eager")
    compiled: Any = torch.compile(step, backend="eager")
    for cut, run in ((around, step), (net, compiled), (in_place, step)):
        net.rows = in_place.rows = ()
        assert off(cut, run, wanted=wanted, size=8) <= EXACT
        assert max(net.rows or in_place.rows) <= 16  # two chunks are compared at first


def test_what_was_scripted_is_refused() -> None:
    with pytest.warns(DeprecationWarning, match="jit"):
        scripted = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(TrainkitError, match="scripted"):
        Chunked(scripted, size=2)
