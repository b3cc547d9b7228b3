"""Byte-level BPE, trained on the spot and cached.

Merges are learned in a second or two, so nothing is downloaded. The tokenizer is kept
under `~/.cache/trainkit/tokenizers` (or `$XDG_CACHE_HOME`). The file's name is a hash
of the texts and the options, so that other data never get an old vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainkit import TrainkitError

try:
    import tokenizers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError as error:
    raise TrainkitError(
        "byte-level BPE: needs the package tokenizers, which is not installed. "
        "pip install 'lightning-trainkit[recipes]'"
    ) from error

NUM_BYTES = 256


def byte_bpe(
    texts: Sequence[str],
    *,
    vocab_size: int,
    special: Sequence[str] = (),
    folder: Path | None = None,
) -> Tokenizer:
    """A tokenizer for these texts, from the cache or trained on them.

    Several processes may call it at once: each writes the file whole or not at all. If
    the cache is not writable, the tokenizer is trained each time.

    Args:
        texts: to learn from; any other text can be encoded as well, byte by byte.
        vocab_size: how many tokens there are, at most.
        special: tokens that are not text, such as `"[MASK]"`; they have the first ids.
        folder: the cache; default: `user_cache()`.
    """
    least = NUM_BYTES + len(special)
    if isinstance(vocab_size, bool) or vocab_size < least:
        raise TrainkitError(
            f"byte_bpe vocab_size: must hold {NUM_BYTES} bytes and {len(special)} "
            f"special tokens, received {vocab_size!r}. Use {least} or more."
        )
    name = _key(texts, vocab_size, special)
    path = (folder or user_cache()) / f"{name}.json"
    # For a damaged file the library raises a plain Exception. It is trained anew.
    with contextlib.suppress(Exception):
        return Tokenizer.from_file(str(path))
    tokenizer = _train(texts, vocab_size, special)
    with contextlib.suppress(OSError):
        _write(path, tokenizer.to_str())
    return tokenizer


def user_cache() -> Path:
    """Where trained tokenizers are kept."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root, "trainkit", "tokenizers")


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of all texts: ten times as fast as one text at a time."""
    return [each.ids for each in tokenizer.encode_batch(list(texts))]


def _train(texts: Sequence[str], vocab_size: int, special: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _key(texts: Sequence[str], vocab_size: int, special: Sequence[str]) -> str:
    """A hash of all that the merges depend on, the library's version included."""
    digest = hashlib.sha256()
    for part in (tokenizers.__version__, str(vocab_size), *special, "", *texts):
        data = part.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(data))  # so that no two lists of parts run together
        digest.update(data)
    return digest.hexdigest()[:32]


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside its place, and then moved there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
