"""Byte-level BPE: learned once, kept by content, safe with several at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipes.tokenizer import byte_bpe, encode, user_cache
from trainkit import TrainkitError

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
    with ThreadPoolExecutor(4) as pool:
        made = list(
            pool.map(
                lambda _: byte_bpe(TEXTS, vocab_size=280, folder=folder).to_str(),
                range(8),
            )
        )
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
