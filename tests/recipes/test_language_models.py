"""Recipes of language models: on functions, completions, documents and masked text."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trainkit
from recipes.code_lm import CodeLM, Functions
from recipes.code_lm.code_lm import FUNCTION, collate, read_functions
from recipes.completions import CompletionLM, Completions
from recipes.completions.completions import DOCUMENTED, END, IGNORED, as_row
from recipes.masked_lm import MaskedLM, Paragraphs
from recipes.masked_lm.masked_lm import MASK, mask, read_paragraphs
from recipes.packed_lm import PackedLM, Texts
from recipes.packed_lm.packed_lm import Padded
from tests.cli.training import same_weights, summary_of, weights_of
from tests.helpers import NAIVE, TOLERANCE
from tests.recipes.small import EXACT, off, small, whole_gradient, window_is_off_by
from trainkit import PackCollate, PerSample, PerToken, TrainkitError, Uniform

# A Llama takes its norms and its loss in float32, whatever its parameters are.
EXACT_OF_LLAMA = TOLERANCE[torch.float32]
LLAMA: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16}
LLAMA |= {"num_layers": 1, "num_heads": 2}

# ---- functions of the standard library, by bytes and by tokens -----------------------


def outermost(node: ast.AST, lines: list[bytes]) -> Iterator[bytes]:
    """What the parser takes for functions, but for those inside of others."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield b"".join(lines[child.lineno - 1 : child.end_lineno])
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from outermost(child, lines)


def test_nearly_all_functions_are_those_of_the_parser() -> None:
    parsed: set[bytes] = set()
    for path in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        source = path.read_bytes()
        functions = outermost(ast.parse(source), source.splitlines(keepends=True))
        parsed |= {each.rstrip() + b"\n" for each in functions}
    found = set(read_functions())
    assert len(found & parsed) > 0.97 * max(len(found), len(parsed))


@pytest.mark.parametrize(
    ("source", "functions"),
    [
        (b"def f():\n    pass\nx = 1\n", [b"def f():\n    pass\n"]),
        (b"def f(): pass\ndef g(): pass\n", [b"def f(): pass\n", b"def g(): pass\n"]),
        (b"async def f():\n\n    pass\n\n\n", [b"async def f():\n\n    pass\n\n\n"]),
        (b"def f(\n    a,\n):\n    pass\n)\n", [b"def f(\n    a,\n):\n    pass\n)\n"]),
        (
            b"class A:\n    def f(self):\n        def g(): pass\n    x = 1\n",
            [b"    def f(self):\n        def g(): pass\n"],
        ),
        (b"x = 'def f():'\ndefault = 1\n", []),
    ],
)
def test_a_function_ends_where_its_indentation_does(
    source: bytes, functions: list[bytes]
) -> None:
    assert [found.group() for found in FUNCTION.finditer(source)] == functions


def test_each_label_is_the_next_byte_and_padding_is_none() -> None:
    batch = collate([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
    assert batch["ids"].tolist() == [[1, 2], [4, 0]]
    assert batch["labels"].tolist() == [[2, 3], [5, -100]]


FEW: dict[str, Any] = {"num_train": 60, "num_val": 8}


@pytest.fixture(scope="module")
def tokens(set_up: Callable[..., Any]) -> Functions:
    """Byte-level BPE, in split windows."""
    return set_up(Functions(vocab_size=300, max_length=40, **FEW))


def test_tokens_are_those_of_the_functions_to_train_on(
    tokens: Functions, set_up: Callable[..., Any]
) -> None:
    bytes_ = set_up(Functions(max_length=40, **FEW))
    rows = [*tokens.val_rows, *tokens.train_rows]
    assert len(rows) == len(bytes_.val_rows) + len(bytes_.train_rows) == 68
    assert max(len(row) for row in rows) == 40
    longest = max(int(row.max()) for row in rows)
    assert 256 <= longest < 300  # merges are in use, and the model has room for all
    again = set_up(Functions(vocab_size=300, max_length=40, **FEW))
    assert len(tokens.train_rows) == len(again.train_rows)
    assert all(map(torch.equal, tokens.train_rows, again.train_rows))


def test_accumulated_functions_equal_the_big_batch(tokens: Functions) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 300, "d_model": 8, "max_length": 40}
    module = CodeLM(num_layers=1, num_heads=1, **sizes).double()
    rows, cuts = tokens.train_rows[:12], [5, 4, 3]
    assert window_is_off_by(module, PerToken(), rows, collate, cuts=cuts) < EXACT
    assert window_is_off_by(module, Uniform(), rows, collate, cuts=cuts) > NAIVE


# ---- completions: what counts, and that the cut of a window does not -----------------


@pytest.fixture(scope="module")
def completions(set_up: Callable[..., Any]) -> Completions:
    return set_up(Completions(vocab_size=300, max_length=120, **FEW))


@pytest.fixture(scope="module")
def llama() -> CompletionLM:
    torch.manual_seed(0)
    return CompletionLM(max_length=120, **LLAMA).double()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulated_completions_equal_the_big_batch(
    size: int, completions: Completions, llama: CompletionLM
) -> None:
    strategy = PerToken(shift=True)
    assert llama.accumulation == strategy
    rows: Any = (completions.train_rows[:6], completions.collate)
    cuts = [size] * (6 // size)
    assert window_is_off_by(llama, strategy, *rows, cuts=cuts) < EXACT_OF_LLAMA
    assert window_is_off_by(llama, Uniform(), *rows, cuts=cuts) > NAIVE


def test_without_the_shift_rows_that_begin_with_a_completion_count_too_much(
    llama: CompletionLM,
) -> None:
    """A prompt's first label is ignored anyway; without a prompt it is no target."""
    rows = [as_row([], list(range(9, 9 + n)), max_length=99) for n in (2, 30)]
    collate = Completions().collate
    for strategy, is_exact in ((PerToken(shift=True), True), (PerToken(), False)):
        found = window_is_off_by(llama, strategy, rows, collate, cuts=[1, 1])
        assert (found < EXACT_OF_LLAMA) is is_exact


def test_only_completions_count(completions: Completions) -> None:
    for row in completions.train_rows:
        num_prompt = row["labels"].count(IGNORED)
        assert row["labels"][:num_prompt] == [IGNORED] * num_prompt
        assert row["labels"][num_prompt:] == row["input_ids"][num_prompt:] != []
        assert len(row["input_ids"]) <= 120


def test_a_completion_that_is_not_cut_has_an_end(completions: Completions) -> None:
    whole = [row for row in completions.train_rows if len(row["input_ids"]) < 120]
    assert whole
    assert all(row["input_ids"].index(0) == len(row["labels"]) - 1 for row in whole)
    assert END == "<|end|>"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ('def f(x):\n    """Double."""\n    return 2 * x\n', True),
        ('def f(x):\n    r"""Two\n\n    lines.\n    """\n    return 2 * x\n', True),
        ("def f(x):\n    return 2 * x\n", False),
        ('def f(x):\n    """Nothing follows."""\n', False),
    ],
)
def test_a_prompt_is_a_signature_and_a_docstring(source: str, prompt: bool) -> None:
    found = DOCUMENTED.fullmatch(source)
    assert (found is not None) is prompt
    if found:
        assert found["prompt"].rstrip().endswith('"""')
        assert found["completion"] == "    return 2 * x\n"


def test_completions_are_the_same_rows_each_time(
    completions: Completions, set_up: Callable[..., Any]
) -> None:
    again = set_up(Completions(vocab_size=300, max_length=120, **FEW))
    assert again.train_rows == completions.train_rows
    assert again.val_rows == completions.val_rows


# ---- documents in one row: the padded batch's gradient, but for a cache --------------


@pytest.fixture(scope="module")
def documents(set_up: Callable[..., Any]) -> list[list[int]]:
    made = set_up(Texts(vocab_size=300, max_length=60, **FEW))
    return sorted(made.train_rows, key=len)[::5]  # of unlike lengths


class Packed(PackedLM):
    def configure_optimizers(self) -> Any:  # the configuration has one
        return torch.optim.SGD(self.parameters(), lr=0.1)


def packed(**options: Any) -> PackedLM:
    torch.manual_seed(0)
    return Packed(**LLAMA, **options).double()


def gradient(module: PackedLM, collate: Any, rows: list[Any]) -> torch.Tensor:
    return whole_gradient(module, PackedLM.loss_of, collate(rows))


def test_documents_in_one_row_have_the_padded_batch_s_gradient(
    documents: list[Any],
) -> None:
    """The control: the same model with a cache, which is its default."""
    padded = gradient(packed(), Padded(), documents[:6])
    for pack in (PackCollate(), PackCollate(length=60)):
        found = gradient(packed(), pack, documents[:6])
        assert off(found, padded) < EXACT_OF_LLAMA
    leaks = gradient(packed(use_cache=True), PackCollate(), documents[:6])
    assert off(leaks, padded) > NAIVE


def test_windows_of_rows_equal_one_row(documents: list[Any]) -> None:
    of: Any = (documents[:6], PackCollate())
    ours = window_is_off_by(packed(), PerToken(shift=True), *of, cuts=(2, 1, 3))
    assert ours < EXACT_OF_LLAMA
    assert window_is_off_by(packed(), PerSample(), *of, cuts=(2, 1, 3)) > NAIVE


@pytest.mark.parametrize("has_cache", [False, True])
def test_the_proof_finds_the_cache(has_cache: bool, documents: list[Any]) -> None:
    batch = PackCollate()(documents[:8])
    report = trainkit.check(packed(use_cache=has_cache), batch)
    assert report.exact is not has_cache
    if has_cache:
        (cause,) = report.causes
        assert cause.kind == "documents"
        assert cause.place == "model.model.layers.0.self_attn.o_proj"
        assert cause.remedy[0] == "model.config.use_cache = False"


def test_another_layout_is_refused() -> None:
    with pytest.raises(TrainkitError, match="must be one of flattened, packed, padded"):
        Texts(layout="flat")  # type: ignore[arg-type]


# ---- masked text: the law of masking, and what has to be counted ---------------------


@pytest.fixture(scope="module")
def paragraphs(set_up: Callable[..., Any]) -> Paragraphs:
    return set_up(Paragraphs(tokens=120, vocab_size=300, max_length=60, **FEW))


def test_only_the_masked_tokens_make_the_big_batch(paragraphs: Paragraphs) -> None:
    """Counting all tokens is not enough, and rows of one length each not either."""
    torch.manual_seed(0)
    module = MaskedLM(max_length=60, **LLAMA).double()
    rows = [paragraphs.mask_row(row, epoch=0) for row in paragraphs.train_rows[:12]]
    masked, all_tokens, uniform = (
        window_is_off_by(module, strategy, rows, paragraphs.collate, cuts=[5, 4, 3])
        for strategy in (PerToken(), PerToken(mask="attention_mask"), Uniform())
    )
    assert masked < EXACT
    assert all_tokens > NAIVE
    assert uniform > NAIVE


def test_a_share_of_the_tokens_is_masked_as_in_bert() -> None:
    ids = torch.full((40_000,), 7)
    generator = torch.Generator().manual_seed(0)
    seen, labels = mask(ids, share=0.15, vocab_size=1024, generator=generator)
    chosen = labels != IGNORED
    assert (labels[chosen] == 7).all()
    assert (seen[~chosen] == 7).all()
    # Four standard deviations of what is drawn.
    assert abs(chosen.double().mean() - 0.15) < 0.007
    shares = {"mask": seen == MASK, "same": seen == 7}
    found = {
        name: float(is_so[chosen].double().mean()) for name, is_so in shares.items()
    }
    assert found == pytest.approx({"mask": 0.8, "same": 0.1}, abs=0.021)
    assert (seen[chosen & (seen != MASK)] >= 2).all()  # no padding, no other [MASK]


def test_row_and_epoch_alone_decide_what_is_masked(paragraphs: Paragraphs) -> None:
    row = max(paragraphs.train_rows, key=lambda each: len(each["input_ids"]))
    first = paragraphs.mask_row(row, epoch=3)
    torch.manual_seed(1)
    again = paragraphs.mask_row(row, epoch=3)
    for name in ("labels", "input_ids"):
        assert torch.equal(first[name], again[name])
    for other in ({"row": row, "epoch": 4}, {"row": {**row, "row": 0}, "epoch": 3}):
        assert not torch.equal(first["labels"], paragraphs.mask_row(**other)["labels"])


def test_a_batch_is_masked_as_its_rows_are(
    paragraphs: Paragraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paragraphs, "trainer", SimpleNamespace(current_epoch=2))
    num_rows = 0
    for batch in paragraphs.train_dataloader():
        masked = paragraphs.on_before_batch_transfer(batch, 0)
        assert masked["input_ids"].numel() <= 120
        for place, number in enumerate(batch["row"].tolist()):
            row = paragraphs.train_rows[number - paragraphs.num_val]
            expected = paragraphs.mask_row(row, epoch=2)["labels"]
            assert torch.equal(masked["labels"][place, : len(expected)], expected)
            assert (masked["labels"][place, len(expected) :] == IGNORED).all()
            num_rows += 1
    assert num_rows == len(paragraphs.train_rows)


def test_validation_is_masked_once(paragraphs: Paragraphs) -> None:
    (batch,) = paragraphs.val_dataloader()
    assert paragraphs.on_before_batch_transfer(batch, 0) is batch
    assert (batch["labels"] != IGNORED).any()


def test_there_is_enough_to_read() -> None:
    found = read_paragraphs()
    assert len(found) == len(set(found)) > 1000


def test_a_masked_training_goes_on_exactly(run_train: Callable[..., Path]) -> None:
    """From the middle of an epoch on: masks are those that would have been drawn."""
    words = [*small("masked_lm"), "trainer.accumulate_grad_batches=3"]
    words += ["trainer.val_check_interval=6"]
    words += ["scheduler=none"]  # its curve would go by the number of steps
    whole = run_train(*words, "trainer.max_steps=4", name="whole")
    assert summary_of(whole)["status"] == "finished"
    assert summary_of(whole)["plain_accumulation"]["mean"] > NAIVE
    first = run_train(*words, "trainer.max_steps=2", name="first")
    half_way = weights_of(first)
    last = first / "checkpoints" / "last.ckpt"
    run_train(*words, "trainer.max_steps=4", f"ckpt_path={last}", name="first")
    assert same_weights(weights_of(first), weights_of(whole))
    assert not same_weights(weights_of(whole), half_way)
