"""Token shards: a tokenized corpus on disk, memory-mapped, so that it may be larger than memory.

    write_corpus(text, tokenizer, folder)                # streams; can be interrupted and called again
    tokens, manifest, tokenizer = read_corpus(folder)    # maps; reads nothing until a window is needed

A folder holds

    manifest.json      written last: a folder without it is unfinished
    tokenizer.json
    00000.tokens       64 bytes of header, then uint16 or uint32 tokens, little-endian
    00001.tokens ...

The header repeats the number of tokens and the size and hash of the vocabulary, so that a truncated shard, or one
copied from another folder, is refused by name. The shards are one sequence: a training window may begin in one and end
in the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from aiscale.config import ConfigError
from aiscale.data.tokenizers import Tokenizer, regroup

MAGIC, VERSION = b"AISCALET", 1
HEADER = struct.Struct("<8sIIQQ32s")  #: magic, version, bytes a token, tokens, vocabulary, hash of the tokenizer
SHARD_TOKENS = 2**27  #: tokens in a shard, roughly, because a shard ends with a block of text
BLOCK_CHARS = 2**22
MANIFEST, PROGRESS, TOKENIZER = "manifest.json", "progress.json", "tokenizer.json"


@dataclass(frozen=True)
class Text:
    """A text that can be read several times, piece by piece."""

    name: str  #: as the user gave it
    identity: str  #: changes when the text may have changed: a hash of the text, or of file names, sizes and times
    pieces: Callable[[], Iterator[str]]  #: a fresh pass over the text


class ShardError(ConfigError):
    """Tokens on disk that cannot be used; the message names the file."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    name: str  #: of the corpus
    source: str  #: identity of the text it was made from
    sha256: str  #: of the whole text, in UTF-8
    text_bytes: int  #: of the whole text, in UTF-8
    tokens: int
    blocks: int  #: blocks of text read, to continue after an interruption
    vocab_size: int
    tokenizer_sha256: str
    shards: tuple[str, ...]  #: file names, in order
    version: int = VERSION


class Tokens:
    """A read-only sequence of tokens in several memory-mapped files.

    `len(tokens)`, `tokens[i]`, `tokens[i:j]` (a numpy array, copied if it spans files), `tokens.dtype`,
    `np.asarray(tokens)` (reads everything), and `tokens.part(i, j, name)`, a view that reads nothing.
    """

    def __init__(self, files: list[np.ndarray], name: str, start: int = 0, stop: int | None = None) -> None:
        self._files = files
        self._ends = np.cumsum([len(file) for file in files])
        self._start, self._stop = start, int(self._ends[-1]) if stop is None else stop
        self.name = name  #: for messages: "the validation part of corpus toy"
        self.dtype = files[0].dtype

    def part(self, start: int, stop: int, name: str) -> Tokens:
        return Tokens(self._files, name, self._start + start, self._start + stop)

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, key: int | slice) -> np.ndarray:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            return self._read(self._start + start, self._start + max(start, stop))[::step]
        if not -len(self) <= key < len(self):
            raise IndexError(f"token {key} of {len(self)}")
        at = self._start + key % len(self)
        return self._read(at, at + 1)[0]

    def _read(self, start: int, stop: int) -> np.ndarray:
        first = min(int(np.searchsorted(self._ends, start, side="right")), len(self._files) - 1)
        pieces = []
        for number in range(first, len(self._files)):
            begins = int(self._ends[number]) - len(self._files[number])
            if begins >= stop and pieces:
                break
            pieces.append(self._files[number][max(start - begins, 0) : max(stop - begins, 0)])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.array(self[:], dtype=dtype)


def is_corpus(folder: Path) -> bool:
    """Whether the folder holds shards, finished or not."""
    return any((folder / name).is_file() for name in (MANIFEST, PROGRESS))


def read_corpus(folder: Path, tokenizer: Tokenizer | None = None) -> tuple[Tokens, Manifest, Tokenizer]:
    """(tokens, manifest, tokenizer) of a folder; raises ShardError if its tokenizer is not `tokenizer`."""
    manifest = read_manifest(folder)
    if tokenizer is None:
        tokenizer = read_tokenizer(folder)
    files = [_map_shard(folder / name, tokenizer) for name in manifest.shards]
    held = sum(map(len, files))
    if held != manifest.tokens:
        raise ShardError(
            f"the shards of {folder} hold {held} tokens, but {MANIFEST} says {manifest.tokens}: "
            f"delete {folder} and prepare the corpus again"
        )
    return Tokens(files, f"corpus {manifest.name}"), manifest, tokenizer


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder."""
    if not folder.is_dir():
        raise ShardError(f"there is no folder {folder}: name one that `aiscale data prepare` has made")
    if not (folder / MANIFEST).is_file():
        raise ShardError(f"{folder} is an unfinished corpus (no {MANIFEST}): run `aiscale data prepare` again")
    try:
        tree = json.loads(_read_text(folder / MANIFEST))
        if tree["version"] != VERSION:
            raise ShardError(
                f"{folder / MANIFEST} has version {tree['version']}, this aiscale reads {VERSION}: prepare it again"
            )
        return Manifest(**{**tree, "shards": tuple(tree["shards"])})
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ShardError(f"{folder / MANIFEST} is damaged: delete {folder} and prepare the corpus again") from None


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, finished or not."""
    return Tokenizer.from_json(_read_text(folder / TOKENIZER))


def _map_shard(file: Path, tokenizer: Tokenizer) -> np.ndarray:
    remedy = "delete its folder and prepare the corpus again"
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            head = stream.read(HEADER.size)
    except OSError as error:
        raise ShardError(f"shard {file} cannot be read ({error.strerror}): {remedy}") from None
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ShardError(f"{file} is not a token shard ({size} bytes, without the header of a shard): {remedy}")
    _, version, width, count, vocab_size, vocabulary = HEADER.unpack(head)
    if version != VERSION:
        raise ShardError(f"shard {file} has version {version}, this aiscale reads {VERSION}: prepare the corpus again")
    if vocabulary.hex() != tokenizer.sha256:
        raise ShardError(
            f"shard {file} has another vocabulary ({vocab_size} tokens, {vocabulary.hex()[:8]}) than the "
            f"{tokenizer.kind} tokenizer in use ({tokenizer.vocab_size} tokens, {tokenizer.sha256[:8]}): "
            "use the tokenizer it was made with, or prepare the corpus again"
        )
    if size != HEADER.size + count * width:
        raise ShardError(
            f"shard {file} is truncated: {count} tokens of {width} bytes and the header make "
            f"{HEADER.size + count * width} bytes, the file has {size}: {remedy}"
        )
    return np.memmap(file, dtype=f"<u{width}", mode="r", offset=HEADER.size, shape=(count,))


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError(f"{file} cannot be read: {error}") from None


def write_corpus(
    text: Text,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[int], None] = lambda text_bytes: None,
) -> Manifest:
    """Tokenize a text into `folder`, one block at a time; calls report(text bytes done) after each block.

    Called again after an interruption, it reads the finished part of the text without tokenizing it, checks its hash,
    and continues after the last finished shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    done = _read_progress(folder, tokenizer)
    write_atomically(folder / TOKENIZER, tokenizer.to_json().encode())
    source, tokens, shards = _Source(text), 0, []
    if done:
        source.skip(done, folder)
        tokens, shards = done.tokens, list(done.shards)
    while True:
        name = f"{len(shards):05d}.tokens"
        count = _write_shard(folder / name, source, tokenizer, shard_tokens, report)
        if not count:
            (folder / name).unlink(missing_ok=True)
            break
        tokens += count
        shards.append(name)
        facts = source.facts(tokenizer, tokens, shards)
        write_atomically(folder / PROGRESS, json.dumps(asdict(facts)).encode())
    if not tokens:
        raise ConfigError(f"corpus {text.name} is empty: put text into it")
    manifest = source.facts(tokenizer, tokens, shards)
    write_atomically(folder / MANIFEST, json.dumps(asdict(manifest), indent=2).encode())
    (folder / PROGRESS).unlink(missing_ok=True)
    return manifest


class _Source:
    """The blocks of a text, with the hash and the number of those read so far."""

    def __init__(self, text: Text) -> None:
        self.text, self.digest, self.text_bytes, self.blocks = text, hashlib.sha256(), 0, 0
        self._iterator = regroup(text.pieces(), BLOCK_CHARS)

    def __next__(self) -> str:
        block = next(self._iterator)
        raw = block.encode()
        self.digest.update(raw)
        self.text_bytes += len(raw)
        self.blocks += 1
        return block

    def skip(self, done: Manifest, folder: Path) -> None:
        """Read the part that is tokenized already."""
        while self.blocks < done.blocks and next(self, None) is not None:
            pass
        if self.digest.hexdigest() != done.sha256:
            raise ShardError(f"the text of {self.text.name} has changed since {folder} was begun: delete {folder}")

    def facts(self, tokenizer: Tokenizer, tokens: int, shards: list[str]) -> Manifest:
        return Manifest(
            name=self.text.name,
            source=self.text.identity,
            sha256=self.digest.hexdigest(),
            text_bytes=self.text_bytes,
            tokens=tokens,
            blocks=self.blocks,
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=tokenizer.sha256,
            shards=tuple(shards),
        )


def _read_progress(folder: Path, tokenizer: Tokenizer) -> Manifest | None:
    try:
        tree = json.loads((folder / PROGRESS).read_text())
        done = Manifest(**{**tree, "shards": tuple(tree["shards"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if done.tokenizer_sha256 != tokenizer.sha256:
        raise ShardError(f"{folder} was begun with another tokenizer: delete it, or choose another folder")
    return done


def _write_shard(file: Path, source: _Source, tokenizer: Tokenizer, shard_tokens: int, report) -> int:
    """Write blocks until the shard is full or the text ends; returns the tokens written: 0 if the rest had none."""
    width, count, block = np.dtype(tokenizer.dtype).itemsize, 0, next(source, None)
    if block is None:
        return 0
    with replacing(file) as stream:
        stream.write(bytes(HEADER.size))
        while block is not None:
            ids = tokenizer.encode_array(block)
            stream.write(ids.astype(f"<u{width}", copy=False).tobytes())
            count += len(ids)
            report(source.text_bytes)
            block = next(source, None) if count < shard_tokens else None
        stream.seek(0)
        vocabulary = bytes.fromhex(tokenizer.sha256)
        stream.write(HEADER.pack(MAGIC, VERSION, width, count, tokenizer.vocab_size, vocabulary))
    return count


def write_atomically(file: Path, content: bytes) -> None:
    """Write all of the content or leave the file unchanged, whatever happens in between."""
    with replacing(file) as stream:
        stream.write(content)


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A stream to a temporary file beside `file`, which it replaces at the end, unless there is an error."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError as error:
        raise ShardError(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
