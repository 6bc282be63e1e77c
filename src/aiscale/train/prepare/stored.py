"""A tokenized corpus on disk, memory-mapped, so that it may be larger than memory.

    write_corpus(text, tokenizer, folder)                # streams
    tokens, manifest, tokenizer = read_corpus(folder)    # maps; reads when a window is needed

A folder holds tokens.bin (uint16 or uint32, little-endian), tokenizer.json and, written last,
manifest.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from aiscale.errors import ConfigError, write_whole
from aiscale.train.prepare.tokenizers import Tokenizer, regroup

VERSION = 3
BLOCK_CHARS = 2**22
MANIFEST, TOKENIZER, TOKENS = "manifest.json", "tokenizer.json", "tokens.bin"


@dataclass(frozen=True)
class Text:
    """A text that can be read several times, piece by piece."""

    name: str  #: as the user gave it
    #: changes when the text may have changed: a hash of the text, or of file names, sizes and times
    identity: str
    pieces: Callable[[], Iterator[str]]  #: a fresh pass over the text


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    name: str  #: of the corpus
    source: str  #: identity of the text it was made from
    sha256: str  #: of the whole text, in UTF-8
    text_bytes: int  #: of the whole text, in UTF-8
    tokens: int
    vocab_size: int
    tokenizer_sha256: str
    version: int = VERSION


def is_corpus(folder: Path) -> bool:
    """Whether the folder holds tokens, finished or not."""
    return any((folder / name).is_file() for name in (MANIFEST, TOKENS))


def read_corpus(
    folder: Path, tokenizer: Tokenizer | None = None
) -> tuple[np.memmap, Manifest, Tokenizer]:
    """(tokens, manifest, tokenizer) of a folder; raises ConfigError if `tokenizer` is another."""
    manifest, tokenizer = read_manifest(folder), tokenizer or read_tokenizer(folder)
    if manifest.tokenizer_sha256 != tokenizer.sha256:
        raise ConfigError(
            f"{folder} has another vocabulary ({manifest.vocab_size} tokens, "
            f"{manifest.tokenizer_sha256[:8]}) than the {tokenizer.kind} tokenizer in use "
            f"({tokenizer.vocab_size} tokens, {tokenizer.sha256[:8]}): "
            "use the tokenizer it was made with, or prepare the corpus again"
        )
    file, width = folder / TOKENS, np.dtype(tokenizer.dtype).itemsize
    size = file.stat().st_size if file.is_file() else 0
    if size != width * manifest.tokens:
        raise ConfigError(
            f"{file} is not whole: {manifest.tokens} tokens of {width} bytes, and it has {size} "
            "bytes: delete its folder and prepare it again"
        )
    return np.memmap(file, dtype=f"<u{width}", mode="r"), manifest, tokenizer


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder."""
    if not (folder / MANIFEST).is_file():
        raise ConfigError(
            f"{folder} is an unfinished corpus (no {MANIFEST}): run `aiscale data prepare` again"
        )
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["version"] != VERSION:
        raise ConfigError(
            f"{folder} is of another version than this aiscale's {VERSION}: "
            "delete and prepare it again"
        )
    return Manifest(**manifest)


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, finished or not."""
    return Tokenizer.from_json((folder / TOKENIZER).read_text(encoding="utf-8"))


def write_corpus(
    text: Text,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    report: Callable[[int], None] = lambda text_bytes: None,
) -> Manifest:
    """Tokenize a text into `folder`, block by block; calls report(text bytes done) after each."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / TOKENIZER, tokenizer.to_json())
    digest, text_bytes, tokens = hashlib.sha256(), 0, 0
    with replacing(folder / TOKENS) as stream:
        for block in regroup(text.pieces(), BLOCK_CHARS):
            raw, ids = block.encode(), tokenizer.encode_array(block)
            stream.write(ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes())
            digest.update(raw)
            text_bytes, tokens = text_bytes + len(raw), tokens + len(ids)
            report(text_bytes)
        if not tokens:
            raise ConfigError(f"corpus {text.name} is empty: put text into it")
    manifest = Manifest(
        name=text.name,
        source=text.identity,
        sha256=digest.hexdigest(),
        text_bytes=text_bytes,
        tokens=tokens,
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
    )
    write_whole(folder / MANIFEST, json.dumps(asdict(manifest), indent=2))
    return manifest


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream to a file beside `file`, which it replaces at the end, unless there is an error."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
