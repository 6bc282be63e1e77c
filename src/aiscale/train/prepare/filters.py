"""What decides if a document stays: quality rules, a test set's words, MinHash of duplicates."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from aiscale.train.prepare.corpus import read_files
from aiscale.train.prepare.formats import LeftOut, good_records, json_lines

NGRAM, SHINGLE, BANDS, ROWS = 13, 5, 14, 8
#: Gopher's: an English text has two of them
STOP_WORDS = frozenset("the be to of and that have with".split())
WORD = re.compile(r"\w+")


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer (Steele et al. 2014): each input bit flips half of the output bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_ODD = mix(np.arange(2 * BANDS * ROWS, dtype=np.uint64)) | np.uint64(1)
_FACTORS, _TERMS = _ODD.reshape(2, -1, 1)  #: of hashes


# What a document must keep to; the values are Gopher's.
MIN_WORDS, MAX_WORDS = 50, 100_000
MIN_WORD_CHARS, MAX_WORD_CHARS = 3.0, 10.0  #: mean length of a word
MAX_SYMBOLS = 0.1  #: "#" and "..." for each word
MIN_ALPHABETIC = 0.8  #: share of words with a letter
MAX_BULLETS = 0.9  #: share of lines that begin with a bullet
MAX_ELLIPSES = 0.3  #: share of lines that end in an ellipsis
MAX_REPEATED = 0.3  #: share of lines that have been there before


def why_dropped(text: str) -> str:
    """The first rule that a text breaks, in words; empty if it keeps to all."""
    words, lines = text.split(), [line.strip() for line in text.splitlines() if line.strip()]
    n = len(words)
    if not MIN_WORDS <= n <= MAX_WORDS:
        return "too short" if n < MIN_WORDS else "too long"
    if len(STOP_WORDS & {word.lower() for word in words}) < 2:
        return "not English"
    if not MIN_WORD_CHARS <= sum(map(len, words)) / n <= MAX_WORD_CHARS:
        return "words too short or long"
    if sum(word.isalpha() or any(map(str.isalpha, word)) for word in words) < MIN_ALPHABETIC * n:
        return "too few letters"
    if text.count("#") + text.count("...") + text.count("…") > MAX_SYMBOLS * n:
        return "too many symbols"
    bullets = (line[0] in "*-•" for line in lines)
    ellipses = (line.endswith(("...", "…")) for line in lines)
    if sum(bullets) > MAX_BULLETS * len(lines) or sum(ellipses) > MAX_ELLIPSES * len(lines):
        return "a list, or cut off"
    return "repeats its lines" if len(lines) - len(set(lines)) > MAX_REPEATED * len(lines) else ""


def ngrams(text: str, n: int) -> np.ndarray:
    """The hashes of every n words in a row, uint64; case, marks and white space do not count."""
    words = _words(text)
    if len(words) < n:
        return words[:0]
    return mix(np.correlate(words, _FACTORS[:n, 0], "valid"))


@lru_cache(maxsize=2)  # a text is asked for several n
def _words(text: str) -> np.ndarray:
    return np.array(list(map(_hash, WORD.findall(text.lower()))), dtype=np.uint64)


_hash = lru_cache(maxsize=2**16)(lambda word: zlib.crc32(word.encode()))


def band_keys(text: str) -> np.ndarray:
    """The band keys of MinHash (Broder 1997), (BANDS,).

    Texts of similarity s have an equal key in one band with probability s^ROWS.
    """
    least, shingles = np.full(BANDS * ROWS, 2**64 - 1, dtype=np.uint64), ngrams(text, SHINGLE)
    for start in range(0, len(shingles), 512):  # so many stay in a core's cache
        least = np.minimum(least, (_FACTORS * shingles[start : start + 512] + _TERMS).min(axis=1))
    return mix((least >> np.uint64(20)).reshape(BANDS, ROWS) @ _FACTORS[:ROWS, 0])


def similarity(one: str, other: str) -> float:
    """Jaccard: shared shingles over all shingles of both; what MinHash estimates."""
    a, b = np.unique(ngrams(one, SHINGLE)), np.unique(ngrams(other, SHINGLE))
    shared = len(np.intersect1d(a, b, assume_unique=True))
    return shared / max(len(a) + len(b) - shared, 1)


def found_share(s: float | np.ndarray) -> float | np.ndarray:
    """The share of pairs of similarity s that fall into one band at least."""
    return 1 - (1 - s**ROWS) ** BANDS


def texts_in(file: Path, left_out: LeftOut | None = None) -> Iterator[str]:
    """The texts of a test set: every string of JSON lines, or a text file as a whole."""
    if file.suffix != ".jsonl":
        yield "".join(read_files([file]))
        return
    for record in good_records(json_lines(file), None, left_out):
        yield from (value for value in record.values() if isinstance(value, str))
