"""Does a pretrained model know the run's tokens?

    check_pretrained("models/gpt2", corpus, "texts/")    # ConfigError if its tokenizer gives others

A pretrained embedding has a row for each token of the tokenizer that the model was trained with.
Another tokenizer of the same size points at the wrong rows, and nothing but the loss tells.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from aiscale.config import ConfigError
from aiscale.data.corpus import Corpus
from aiscale.data.tokenizers import Tokenizer

#: the file that `aiscale export` writes, and Hugging Face's
FILES = ("aiscale_tokenizer.json", "tokenizer.json")
SAMPLE_TOKENS = 2**14


def check_pretrained(folder: str | Path, corpus: Corpus, name: str) -> None:
    """Raise ConfigError if the tokenizer of a model's folder encodes the corpus `name` otherwise
    than the run's. Say on stderr where the folder's tokenizer is unknown."""
    file = next((Path(folder) / each for each in FILES if (Path(folder) / each).is_file()), None)
    if file is None:
        _say_unknown(folder, f"it has no {FILES[-1]}")
        return
    try:
        theirs = Tokenizer.from_json(file.read_text(encoding="utf-8"))
    except Exception:  # the library `tokenizers` raises this very class
        _say_unknown(folder, f"{file.name} cannot be read")
        return
    ours = corpus.tokenizer
    text = ours.decode(corpus.train[:SAMPLE_TOKENS])
    try:
        pairs = itertools.zip_longest(ours.encode(text), theirs.encode(text))
    except ConfigError as error:  # a character that it does not know
        _refuse(file, theirs, ours, name, str(error).partition(":")[0])
    for number, (own, their) in enumerate(pairs, 1):
        if own != their:
            difference = f"token {number} of the corpus is {own} by the run's, {their} by it"
            _refuse(file, theirs, ours, name, difference)


def _say_unknown(folder: str | Path, why: str) -> None:
    what = "whether its weights belong to the run's tokens is unknown"
    print(f"aiscale: model.folder {folder}: {why}, so {what}", file=sys.stderr)


def _refuse(file: Path, theirs: Tokenizer, ours: Tokenizer, name: str, difference: str) -> None:
    raise ConfigError(
        f"{file} ({theirs.vocab_size} tokens) is not the run's {ours.kind} tokenizer "
        f"({ours.vocab_size} tokens): {difference}; pretrained weights need their own: run "
        f"`aiscale data prepare {name} --tokenizer {file} --out FOLDER`, then set "
        f"data.corpus=FOLDER and data.tokenizer={theirs.kind}"
    )
