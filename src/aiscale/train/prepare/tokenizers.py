"""Three tokenizers with one interface.

    tokenizer = learn("bpe", pieces, bpe_vocab_size=1024)
    ids = tokenizer.encode("some text")    # list[int]; encode_array: numpy's, fast for megabytes

    byte   256 tokens, the bytes of UTF-8; nothing to learn
    char   the characters of the corpus
    bpe    pairs of bytes merged by frequency (Sennrich et al. 2016; byte-level as GPT-2's), by the
           library `tokenizers`

decode(encode(text)) == text for all of them, so an unknown character is an error, not <unk>. Ids
without a token and invalid UTF-8 are decoded as U+FFFD.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from aiscale.errors import ConfigError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
#: GPT-2's document separator, a token of every bpe tokenizer learnt here
END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """The base class; a subclass has a kind, a vocab_size, _encode, decode and _state."""

    kind: str
    vocab_size: int
    separator = "\n\n"  #: between two documents

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text: str) -> np.ndarray:
        """The ids as uint16 (large vocabularies: uint32); raises ConfigError for unknown text."""
        return self._encode(text).astype(self.dtype, copy=False)

    @property
    def dtype(self) -> type:
        """The numpy type in which tokens are stored."""
        return np.uint16 if self.vocab_size <= 2**16 else np.uint32

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, **self._state()}, ensure_ascii=False)

    @staticmethod
    def from_json(text: str) -> Tokenizer:
        """The inverse of to_json; also reads Hugging Face's tokenizer.json, as kind bpe."""
        try:
            state = json.loads(text)
            kind = state.pop("kind", "bpe" if "model" in state else None)
            if kind == "bpe" and "tokenizer" not in state:
                state = {"tokenizer": state}
            return TOKENIZERS[kind](**state)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ConfigError(
                f"this is not a tokenizer: {str(text)[:60]!r}; give the JSON that to_json wrote"
            ) from None


class ByteTokenizer(Tokenizer):
    kind, vocab_size = "byte", 256

    def _state(self) -> dict:
        return {}

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        # 0xff is never valid in UTF-8, so it becomes U+FFFD.
        return bytes(i if i < 256 else 0xFF for i in map(int, ids)).decode(errors="replace")


class CharTokenizer(Tokenizer):
    """The characters of a corpus, sorted by code point."""

    kind = "char"

    def __init__(self, characters: list[str]) -> None:
        self.characters = characters
        self.vocab_size = len(characters)
        self._ids = {character: i for i, character in enumerate(characters)}

    def _state(self) -> dict:
        return {"characters": self.characters}

    def _encode(self, text: str) -> np.ndarray:
        try:
            return np.fromiter(map(self._ids.__getitem__, text), dtype=np.int64)
        except KeyError as error:
            raise ConfigError(
                f"char {error.args[0]!r} is not among the {self.vocab_size} that this tokenizer "
                "knows: change the text, or use tokenizer byte or bpe, which encode every text"
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(
            self.characters[i] if i < self.vocab_size else UNKNOWN for i in map(int, ids)
        )


class BPETokenizer(Tokenizer):
    """Byte pairs merged by frequency; `<|endoftext|>` is one token, the end of a document."""

    kind = "bpe"
    PIECE_CHARS = 2**16  #: texts longer than this are encoded in pieces, by several threads

    def __init__(self, tokenizer: dict) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        self._tokenizer = HuggingFaceTokenizer.from_str(json.dumps(tokenizer))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = self._tokenizer.get_vocab_size()
        if self._tokenizer.token_to_id(END_OF_TEXT) is not None:
            self.separator = END_OF_TEXT

    def _state(self) -> dict:
        return {"tokenizer": json.loads(self._tokenizer.to_str())}

    def _encode(self, text: str) -> np.ndarray:
        pieces = list(regroup([text], self.PIECE_CHARS))
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        if not encoded:
            return np.empty(0, np.int64)
        return np.concatenate([np.array(e.ids, dtype=np.int64) for e in encoded])

    def decode(self, ids: Iterable[int]) -> str:
        parts: list[str] = []
        run: list[int] = []
        for i in map(int, ids):
            if i < self.vocab_size:
                run.append(i)
            else:
                parts += [self._tokenizer.decode(run, skip_special_tokens=False), UNKNOWN]
                run = []
        return "".join(parts) + self._tokenizer.decode(run, skip_special_tokens=False)


TOKENIZERS = {cls.kind: cls for cls in (ByteTokenizer, CharTokenizer, BPETokenizer)}


def learn(kind: str, pieces: Iterable[str], *, bpe_vocab_size: int = 1024) -> Tokenizer:
    """Learn a tokenizer of `kind` from text; a bpe may have fewer tokens than bpe_vocab_size."""
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        characters: set[str] = set()
        for piece in pieces:
            characters.update(piece)
        return CharTokenizer(sorted(characters))
    if kind == "bpe":
        return _learn_bpe(pieces, bpe_vocab_size)
    path = Path(kind)
    if path.is_file():
        return Tokenizer.from_json(path.read_text(encoding="utf-8"))
    raise ConfigError(
        f"tokenizer is {kind!r}: it must be one of {', '.join(TOKENIZERS)}, or a tokenizer.json"
    )


def _learn_bpe(pieces: Iterable[str], vocab_size: int) -> BPETokenizer:
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise ConfigError(
            f"a bpe tokenizer of {vocab_size} tokens: "
            f"it needs at least 257, all bytes and {END_OF_TEXT}: raise --vocab-size"
        )
    tokenizer = HuggingFaceTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(regroup(pieces, 2**16), trainer)
    return BPETokenizer(json.loads(tokenizer.to_str()))


def regroup(pieces: Iterable[str], size: int) -> Iterator[str]:
    """The same text in blocks of about `size` characters.

    A block ends before the last white space that text follows: no tokenizer here has a token
    across that position.
    """
    buffer: list[str] = []
    length = 0
    for piece in pieces:
        for start in range(0, len(piece), size):
            buffer.append(piece[start : start + size])
            length += len(buffer[-1])
            if length >= size:
                block = "".join(buffer)
                cut = _last_word_start(block)
                yield block[:cut]
                buffer, length = [block[cut:]], len(block) - cut
    if length:
        yield "".join(buffer)


def _last_word_start(block: str) -> int:
    at = len(block)
    while at > 0:
        at = max(block.rfind(" ", 0, at), block.rfind("\n", 0, at))
        if at > 0 and at + 1 < len(block) and not block[at + 1].isspace():
            return at
    return len(block)
