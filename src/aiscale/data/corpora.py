"""Sources of text, read in pieces so that a corpus may be larger than memory.

    text = find_text("embedded")             # or "toy", "stdlib", or the path of a text file or of a folder of them
    for piece in text.pieces():
        ...
    bigram_entropy(embedded_text())          # nats a character: a model below it has learnt more than bigrams

The embedded corpus is the English documentation in CPython (`pydoc_data.topics`), so that everything runs offline. The
corpus stdlib is the source code of CPython's modules, for runs that need more text. Both differ between Python
versions: their hash goes into run.json, and no test may assert a loss that depends on them.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from aiscale.config import ConfigError
from aiscale.data.toy import toy_text

BUILT_IN = ("embedded", "toy", "stdlib")
DOWNLOADABLE = ("shakespeare", "openwebtext", "oscar", "pile")  #: names for `aiscale data prepare NAME`
READ_CHARS = 2**20
UNDERLINE = re.compile(r"\s*([*=\-~^\"#])\1{2,}")


@dataclass(frozen=True)
class Text:
    """A text that can be read several times, piece by piece."""

    name: str  #: as the user gave it
    identity: str  #: changes when the text may have changed: a hash of the text, or of file names, sizes and times
    pieces: Callable[[], Iterator[str]]  #: a fresh pass over the text


def find_text(corpus: str) -> Text:
    """The text of DataConfig.corpus; raises ConfigError if there is none."""
    if corpus in ("embedded", "toy"):
        text = embedded_text() if corpus == "embedded" else toy_text()
        return Text(corpus, hashlib.sha256(text.encode()).hexdigest(), lambda: iter([text]))
    files = stdlib_files() if corpus == "stdlib" else find_files(corpus)
    return Text(corpus, identity(files), lambda: read_files(files))


def _remedy(corpus: str) -> str:
    if Path(corpus).name in DOWNLOADABLE:
        return f"make it with `aiscale data prepare {Path(corpus).name} --out {corpus}`, or use data.corpus=embedded"
    near = difflib.get_close_matches(corpus, BUILT_IN, n=1)
    guess = f"did you mean {near[0]}? Else " if near else ""
    return f"{guess}name a text file, a folder of text files, or one of {', '.join(BUILT_IN)}"


# Files ---------------------------------------------------------------------------------------------------------------


def find_files(corpus: str) -> list[Path]:
    """That file, or every file below that folder, sorted by name, without hidden ones."""
    path = Path(corpus).expanduser()
    if not path.exists():
        raise ConfigError(f"corpus {corpus!r} does not exist: {_remedy(corpus)}")
    files = [path]
    if path.is_dir():
        inside = (p for p in path.rglob("*") if p.is_file())
        files = sorted(p for p in inside if not any(part.startswith(".") for part in p.relative_to(path).parts))
        if not files:
            raise ConfigError(f"corpus folder {path} holds no files: put UTF-8 text files into it")
    if not any(file.stat().st_size for file in files):
        raise ConfigError(f"corpus {path} is empty: put UTF-8 text into it")
    return files


def identity(files: list[Path]) -> str:
    """A hash of names, sizes and modification times: hashing the content of 100 GB would take minutes."""
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def read_files(files: list[Path], separator: str = "\n") -> Iterator[str]:
    """The text of all files, joined by `separator`."""
    for number, file in enumerate(files):
        if number:
            yield separator
        yield from _read_file(file)


def _read_file(file: Path) -> Iterator[str]:
    """UTF-8 text without a byte-order mark, with Unix line ends."""
    try:
        with open(file, encoding="utf-8-sig") as stream:
            try:
                while piece := stream.read(READ_CHARS):
                    yield piece
            except UnicodeDecodeError as error:
                offset = stream.buffer.tell() - len(error.object) + error.start
                raise ConfigError(
                    f"{file} is not UTF-8 text (byte {error.object[error.start]:#04x} at offset {offset}): convert it, "
                    "such as with `iconv -f latin1 -t utf-8`, or take it out of the corpus"
                ) from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None


# The embedded corpus -------------------------------------------------------------------------------------------------

# Typographic characters of the documentation -> ASCII, so that one character is one byte.
_ASCII = {"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "…": "...", "°": " degrees", "ß": "ss"}


@cache
def embedded_text() -> str:
    """CPython's documentation topics, sorted by name, as ASCII prose, about 350 kB; depends only on Python's version.

    Removed: the underlining of headings, grammar productions, and repeated paragraphs (many topics include others, and
    repetitions at the end would leak into validation).
    """
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise ConfigError(
            "this Python has no pydoc_data.topics, the text of corpus embedded: use data.corpus=toy, or a text file"
        ) from None
    seen: set[str] = set()
    kept = []
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name].strip("\n")):
            lines = [line.rstrip() for line in paragraph.splitlines() if not UNDERLINE.fullmatch(line)]
            key = " ".join(" ".join(lines).split())
            if key and key not in seen and "::=" not in key:
                seen.add(key)
                kept.append("\n".join(lines))
    text = "\n\n".join(kept) + "\n"
    for sign, plain in _ASCII.items():
        text = text.replace(sign, plain)
    return text.encode("ascii", errors="ignore").decode()


def stdlib_files() -> list[Path]:
    """The modules of CPython's standard library, about 11 MB, in an order that mixes its packages. Without tests,
    tables (encodings, and the documentation that is corpus embedded) and files that are not UTF-8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
    files = [path for path in root.rglob("*.py") if out.isdisjoint(path.relative_to(root).parts) and _is_utf8(path)]
    return sorted(files, key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode()).digest())


def _is_utf8(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return False
    return True


# A baseline ----------------------------------------------------------------------------------------------------------


def bigram_entropy(text: str) -> float:
    """H(c_t | c_t-1) in nats a character: Shannon 1951, "Prediction and Entropy of Printed English", F_2.

    It is the lowest loss that a bigram table can have on this text; recipe `laptop` promises to beat it on its
    validation part.
    """
    if len(text) < 2:
        raise ConfigError(f"a text of {len(text)} characters has no pairs: give 2")
    symbols, ids = np.unique(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32), return_inverse=True)
    V = len(symbols)
    counts = np.bincount(ids[:-1] * V + ids[1:], minlength=V * V).reshape(V, V)  # the second follows the first
    some = counts > 0
    log_p = np.log((counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))[some])
    return float(-(counts[some] * log_p).sum() / counts.sum())
