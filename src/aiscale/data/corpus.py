"""A corpus ready for training: tokenized once, cached, memory-mapped and split.

    tokenizer = train_tokenizer(run.data)                     # on rank 0, which sends its JSON to the others
    corpus = open_corpus(run.data, tokenizer=tokenizer)       # every rank
    corpus.train, corpus.val                                  # sequences of tokens; slices are numpy arrays

Tokens are cached in $AISCALE_CACHE, else $XDG_CACHE_HOME/aiscale, else ~/.cache/aiscale, else (with a note on stderr)
in a temporary folder that is deleted at exit. Several processes may open the same corpus at once: if the file system
has locks, one of them tokenizes; otherwise each does, and the first to finish puts it in place.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aiscale.config import ConfigError, DataConfig
from aiscale.data.corpora import Text, find_text
from aiscale.data.shards import VERSION, Tokens, is_corpus, read_corpus, write_atomically, write_corpus
from aiscale.data.tokenizers import Tokenizer, learn


@dataclass(frozen=True)
class Corpus:
    """Training tokens, validation tokens, and the text they come from."""

    name: str  #: DataConfig.corpus, or the name in a prepared folder
    train: Tokens
    val: Tokens  #: the end of the text
    tokenizer: Tokenizer
    sha256: str  #: of the text in UTF-8
    text_bytes: int  #: of the text in UTF-8


def open_corpus(
    data: DataConfig, *, tokenizer: Tokenizer | None = None, cache_dir: str | os.PathLike | None = None
) -> Corpus:
    """The corpus of `data`, tokenized if it is not in the cache; raises ConfigError with one line.

    A folder made by `aiscale data prepare` is mapped with its own tokenizer, and refused if that is not `tokenizer` or
    not of the kind `data.tokenizer`.
    """
    folder = Path(data.corpus).expanduser()
    if is_corpus(folder):
        tokens, manifest, tokenizer = read_corpus(folder, tokenizer)
        _check_kind(folder, tokenizer, data)
    else:
        text = find_text(data.corpus)
        tokenizer = tokenizer or train_tokenizer(data, cache_dir=cache_dir)
        tokens, manifest, _ = read_corpus(_tokenized(text, tokenizer, cache_dir), tokenizer)
    split = len(tokens) - int(len(tokens) * data.val_fraction)
    name = manifest.name
    return Corpus(
        name=name,
        train=tokens.part(0, split, f"the training part of corpus {name}"),
        val=tokens.part(split, len(tokens), f"the validation part of corpus {name}"),
        tokenizer=tokenizer,
        sha256=manifest.sha256,
        text_bytes=manifest.text_bytes,
    )


def train_tokenizer(data: DataConfig, *, cache_dir: str | os.PathLike | None = None) -> Tokenizer:
    """The tokenizer for `data`, learnt from the whole corpus; a prepared folder has its own."""
    folder = Path(data.corpus).expanduser()
    if is_corpus(folder):
        _, _, tokenizer = read_corpus(folder)
        _check_kind(folder, tokenizer, data)
        return tokenizer
    text = find_text(data.corpus)
    if data.tokenizer == "byte":
        return learn("byte", ())
    size = data.bpe_vocab_size if data.tokenizer == "bpe" else ""
    file = cache_root(cache_dir) / "tokenizers" / f"{data.tokenizer}{size}-{_key(text.identity)}.json"
    with suppress(OSError, ConfigError):
        return Tokenizer.from_json(file.read_text(encoding="utf-8"))
    tokenizer = learn(data.tokenizer, text.pieces(), bpe_vocab_size=data.bpe_vocab_size)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, tokenizer.to_json().encode())
    return tokenizer


def _check_kind(folder: Path, tokenizer: Tokenizer, data: DataConfig) -> None:
    if tokenizer.kind != data.tokenizer:
        raise ConfigError(
            f"corpus {folder} was prepared with a {tokenizer.kind} tokenizer of {tokenizer.vocab_size} tokens, but "
            f"data.tokenizer is {data.tokenizer}: set data.tokenizer={tokenizer.kind}, or prepare the corpus again"
        )


def _tokenized(text: Text, tokenizer: Tokenizer, cache_dir: str | os.PathLike | None) -> Path:
    """The cache folder of this text with this tokenizer, written if it does not exist."""
    name = f"{Path(text.name).stem}-{tokenizer.kind}-{_key(text.identity, tokenizer.sha256)}"
    folder = cache_root(cache_dir) / "tokens" / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f".{name}.lock")):
        if folder.is_dir():
            return folder
        unfinished = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder.parent))
        try:
            write_corpus(text, tokenizer, unfinished)
            unfinished.chmod(0o755)  # mkdtemp gives access only to the owner
            try:
                unfinished.rename(folder)
            except OSError:  # another process was first, with the same tokens
                if not folder.is_dir():
                    raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join([str(VERSION), *parts]).encode()).hexdigest()[:16]


# The cache -----------------------------------------------------------------------------------------------------------


def cache_root(folder: str | os.PathLike | None = None) -> Path:
    """The cache folder: `folder`, or as the module docstring says."""
    if folder is not None:
        return Path(folder)
    own, xdg = os.environ.get("AISCALE_CACHE"), os.environ.get("XDG_CACHE_HOME")
    return _writable(Path(own or os.path.join(xdg or os.path.expanduser("~/.cache"), "aiscale")))


@cache
def _writable(root: Path) -> Path:
    """`root` if it is writable, else a temporary folder, one for each process."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return root
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="aiscale-cache-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        print(
            f"aiscale: {root} cannot be written ({error.strerror}), so tokens go to {temporary} until this process "
            "ends: set AISCALE_CACHE to keep them",
            file=sys.stderr,
        )
        return temporary


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """A lock between processes, if the file system supports locks (some on clusters do not)."""
    with open(file, "w") as stream:
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
