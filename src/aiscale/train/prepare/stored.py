"""A tokenized corpus on disk, written as a stream, so that it may be larger than memory.

    write_corpus("mine", pieces, tokenizer, folder)
    tokens, vocabulary, sha256 = read_tokens(folder)    # aiscale.train.data, whatever trains

A folder holds tokens.bin (uint16 or uint32, little-endian), tokenizer.json and, written last,
manifest.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from aiscale.errors import ConfigError, write_whole
from aiscale.train.prepare.tokenizers import Tokenizer, regroup

BLOCK_CHARS = 2**22
MANIFEST, TOKENIZER, TOKENS = "manifest.json", "tokenizer.json", "tokens.bin"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    name: str  #: of the corpus
    sha256: str  #: of the whole text, in UTF-8
    text_bytes: int  #: of the whole text, in UTF-8
    tokens: int
    vocab_size: int


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder."""
    return Tokenizer.from_json((folder / TOKENIZER).read_text(encoding="utf-8"))


def write_corpus(
    name: str,
    pieces: Iterable[str],
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
        for block in regroup(pieces, BLOCK_CHARS):
            raw, ids = block.encode(), tokenizer.encode_array(block)
            stream.write(ids.astype(ids.dtype.newbyteorder("<"), copy=False).tobytes())
            digest.update(raw)
            text_bytes, tokens = text_bytes + len(raw), tokens + len(ids)
            report(text_bytes)
        if not tokens:
            raise ConfigError(f"corpus {name} is empty: put text into it")
    manifest = Manifest(
        name=name,
        sha256=digest.hexdigest(),
        text_bytes=text_bytes,
        tokens=tokens,
        vocab_size=tokenizer.vocab_size,
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
