"""What recipes share: a tokenizer, the memory held, and the studies of their runs."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from recipes.apart import main, weights_at_end, weights_at_start
from recipes.batch_size import Pieces
from recipes.batch_size.study import first_at, fit, read, smoothed
from recipes.held import MB, HeldMemory
from recipes.tokenizer import byte_bpe, encode, user_cache
from tests.cli.training import summary_of
from tests.recipes.small import small
from trainkit import Chunked, TrainkitError

TEXTS = ["def f(x):\n    return x\n", "def g(x):\n    return f(x)\n"] * 20


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_any_text_comes_back_as_it_was(tmp_path: Path) -> None:
    bpe = byte_bpe(TEXTS, vocab_size=280, folder=tmp_path)
    texts = [*TEXTS[:2], "", "naïve 𝛼\t\x00 never seen\r\n"]
    assert [bpe.decode(ids) for ids in encode(bpe, texts)] == texts
    assert len(encode(bpe, TEXTS[:1])[0]) < len(TEXTS[0]) / 2  # it has learned merges


def test_a_second_time_it_is_read(tmp_path: Path) -> None:
    first = byte_bpe(TEXTS, vocab_size=280, folder=tmp_path)
    (name,) = kept(tmp_path)
    (tmp_path / name).write_text(first.to_str().replace("return", "return"))
    before = (tmp_path / name).stat().st_mtime_ns
    assert byte_bpe(TEXTS, vocab_size=280, folder=tmp_path).to_str() == first.to_str()
    assert (tmp_path / name).stat().st_mtime_ns == before


def test_the_file_goes_by_all_that_was_asked(tmp_path: Path) -> None:
    asked = [
        (TEXTS, 280, ()),
        (TEXTS, 281, ()),
        (TEXTS, 280, ("[MASK]",)),
        (TEXTS[1:], 280, ()),
        (["ab", "c"], 280, ()),
        (["a", "bc"], 280, ()),  # the same letters in the same order
    ]
    for texts, size, special in asked:
        byte_bpe(texts, vocab_size=size, special=special, folder=tmp_path)
    assert len(kept(tmp_path)) == len(asked)


def test_special_tokens_have_the_first_ids(tmp_path: Path) -> None:
    bpe = byte_bpe(TEXTS, vocab_size=280, special=["[PAD]", "[MASK]"], folder=tmp_path)
    assert [bpe.token_to_id(name) for name in ("[PAD]", "[MASK]")] == [0, 1]
    assert bpe.get_vocab_size() <= 280
    assert min(encode(bpe, TEXTS[:1])[0]) > 1


def test_several_at_once_get_the_same_and_leave_one_whole_file(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"

    def learned(_: int) -> str:
        return byte_bpe(TEXTS, vocab_size=280, folder=folder).to_str()

    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(learned, range(8)))
    assert len(set(made)) == 1
    (name,) = kept(folder)  # no half-written one beside it
    assert (folder / name).read_text(encoding="utf-8") == made[0]


def test_a_damaged_file_is_written_anew(tmp_path: Path) -> None:
    first = byte_bpe(TEXTS, vocab_size=280, folder=tmp_path).to_str()
    (name,) = kept(tmp_path)
    (tmp_path / name).write_text(first[: len(first) // 2])
    assert byte_bpe(TEXTS, vocab_size=280, folder=tmp_path).to_str() == first
    assert (tmp_path / name).read_text(encoding="utf-8") == first


def test_where_nothing_can_be_written_it_is_learned_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bpe = byte_bpe(TEXTS, vocab_size=280, folder=tmp_path / "file" / "folder")
    assert encode(bpe, TEXTS[:1])


def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*paths: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fails)
    byte_bpe(TEXTS, vocab_size=280, folder=tmp_path)
    assert kept(tmp_path) == []


def test_the_cache_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "trainkit" / "tokenizers"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "trainkit" / "tokenizers"


@pytest.mark.parametrize("size", [0, 257, True])
def test_too_few_tokens_are_refused(size: int) -> None:
    with pytest.raises(TrainkitError, match="byte_bpe vocab_size: must hold 256 bytes"):
        byte_bpe(TEXTS, vocab_size=size, special=["[PAD]", "[MASK]"])


# ---- what the graph of a training step holds -----------------------------------------


class Logged(nn.Module):
    """Two layers, and the number that was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Sigmoid())
        self.logged = 0.0

    def log(self, name: str, value: float) -> None:
        self.logged = value


def held(module: Logged, rows: Tensor, callback: HeldMemory) -> float:
    """In bytes, in the backward pass too."""
    callback.on_train_batch_start(SimpleNamespace(), module, None, 0)
    module.net(rows).sum().backward()
    callback.on_train_batch_end(SimpleNamespace(), module)
    return module.logged * MB


def test_it_counts_what_is_held_at_one_time() -> None:
    """The rows, and the output of the last layer: once, and not for two steps."""
    rows, callback = torch.randn(32, 8), HeldMemory(2)
    module = Logged()
    whole = rows.nbytes + 32 * 64 * 4
    assert held(module, rows, callback) == whole
    assert held(module, rows, callback) == whole
    assert callback._held == 0
    assert held(module, rows.repeat(9, 1), callback) == whole  # measured no more


def test_chunks_hold_less() -> None:
    rows, module = torch.randn(32, 8), Logged()
    with Chunked(module.net, size=4):
        found = held(module, rows, HeldMemory())
    # The sum holds nothing, and a chunk's rows are a view of all rows.
    assert found == rows.nbytes + 4 * 64 * 4


# ---- how far apart runs ended, read from the folders that they leave -----------------


SMALL = [*small("completions"), "trainer.max_steps=2", "callbacks.plain=null"]
SMALL += ["trainer.accumulate_grad_batches=4"]


@pytest.mark.filterwarnings("ignore:CompletionLM. its own strategy PerToken")
@pytest.mark.filterwarnings("ignore:proof. a window:UserWarning")  # of the control
def test_a_run_is_compared_with_the_first(
    run_train: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = ["data.batch_size=16", "trainer.accumulate_grad_batches=1"]
    big = run_train(*SMALL, *one, "trainer.val_check_interval=2", name="big")
    ours = [*SMALL, "data.batch_size=4"]
    cut = run_train(*ours, name="cut")
    uniform = run_train(*ours, "accumulation=uniform", name="uniform")
    assert not weights_at_start(big).equal(weights_at_end(big))
    assert weights_at_start(big).equal(weights_at_start(cut))
    monkeypatch.setattr(sys, "argv", ["apart.py", *map(str, (big, cut, uniform))])
    capsys.readouterr()
    main()
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1].strip() for row in rows] == ["big", "cut", "uniform"]
    assert rows[0][4].strip() == ""
    assert float(rows[1][4]) < 1e-2  # AdamW divides by the gradient's own size
    assert rows[2][4].strip().endswith("%")


# ---- how large a batch pays: its data, its debug size, the curve through its runs ----


WINDOWS = (8, 16, 32, 64, 128)


def test_pieces_are_whole_and_those_of_validation_are_the_same_for_each_seed() -> None:
    one, other = (Pieces(num_train=200, num_val=20, seed=seed) for seed in (1, 2))
    one.setup("fit")
    other.setup("fit")
    row = one.train_rows[0]
    assert row["ids"].shape == row["labels"].shape == (64,)
    assert torch.equal(row["ids"][1:], row["labels"][:-1])
    assert (len(one.train_rows), len(one.val_rows)) == (200, 20)
    for a, b in zip(one.val_rows, other.val_rows, strict=True):
        assert torch.equal(a["ids"], b["ids"])
    first, second = (next(iter(each.train_dataloader())) for each in (one, other))
    assert not torch.equal(first["ids"], second["ids"])  # the control


@pytest.mark.parametrize("critical", [4.0, 35.0, 900.0])
def test_the_fit_finds_the_critical_batch(critical: float) -> None:
    samples = [5_000 * (1 + w / critical) for w in WINDOWS]
    found = fit(WINDOWS, samples)
    assert found.critical == pytest.approx(critical, rel=0.01)
    assert found.fewest_samples == pytest.approx(5_000, rel=0.01)
    assert found.error < 0.01
    steps = [e / w for w, e in zip(WINDOWS, samples, strict=True)]
    for s, e in zip(steps, samples, strict=True):
        fewest_steps = found.fewest_samples / found.critical
        product = (s / fewest_steps - 1) * (e / found.fewest_samples - 1)
        assert product == pytest.approx(1, rel=0.1)


def test_runs_that_are_on_no_such_curve_show_it() -> None:
    """Negative control."""
    found = fit(WINDOWS, [20_000, 5_000, 20_000, 5_000, 20_000])
    assert found.error > 0.3


def test_a_run_that_has_not_come_so_far_is_left_out() -> None:
    samples = [5_000 * (1 + w / 35) for w in WINDOWS]
    assert fit(WINDOWS, [*samples[:4], math.nan]).critical == pytest.approx(
        35, rel=0.01
    )
    assert math.isnan(fit(WINDOWS, [1.0, 2.0, *[math.nan] * 3]).critical)


def test_the_target_is_where_the_smoothed_loss_crosses_it() -> None:
    curve = [(float(x), 3 - x / 100) for x in range(0, 200, 10)]
    assert first_at(smoothed(curve), 2.0) == pytest.approx(100)
    curve[7] = (70.0, 1.9)  # by chance
    assert first_at(curve, 2.0) < 70
    assert first_at(smoothed(curve), 2.0) > 90
    assert math.isnan(first_at(curve, 0.5))


def test_the_debug_size_trains_and_the_study_reads_it(
    run_train: Callable[..., Path], tmp_path: Path
) -> None:
    run = run_train(
        *small("batch_size", epochs=1),
        "trainer.val_check_interval=0.25",
        "callbacks.noise_scale.every_n_steps=1",
        "optimizer.lr=0.004",
        name="seed-1/reference",
    )
    summary = summary_of(run)
    assert (summary["status"], summary["steps"]) == ("finished", 20)
    assert summary["noise_scale"]["samples"] > 0
    assert summary["noise_scale"]["window"] == 16
    found = read(tmp_path, "gain", 16, 1, target=5.15)
    assert 0 < found.samples < 320
    assert found.steps == found.samples / 16
    assert found.noise_scale_low < found.noise_scale < found.noise_scale_high
    assert found.rate == pytest.approx(0.004)
    assert math.isnan(read(tmp_path, "gain", 16, 1, target=1.0).noise_scale)
