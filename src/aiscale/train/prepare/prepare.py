"""Tokenize a large corpus once, before training: `aiscale data prepare`.

    aiscale data prepare my_texts/ --out corpora/mine --tokenizer bpe --vocab-size 8192
    aiscale train ddp --nproc 2 --text corpora/mine --model gpt2 --length 1024

The text is streamed (`formats.py`). Documents are joined by the tokenizer's separator:
`<|endoftext|>` for bpe, an empty line for the others. The well-known corpora need a network and the
library `datasets`; their addresses come from their publishers and are not tested.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm import tqdm

from aiscale.errors import ConfigError, require_writable
from aiscale.train.prepare.clean import clean_corpus, describe
from aiscale.train.prepare.corpus import BUILT_IN, find_files, find_text
from aiscale.train.prepare.filters import texts_in
from aiscale.train.prepare.formats import (
    Document,
    LeftOut,
    documents_of,
    good_records,
    load_rows,
    numbered,
)
from aiscale.train.prepare.stored import MANIFEST, Manifest, read_tokenizer, write_corpus
from aiscale.train.prepare.tokenizers import END_OF_TEXT, Tokenizer, learn

#: Arguments of datasets.load_dataset for the well-known corpora.
HUB = {
    # Radius, artifact appendix A.3.4; 8 million documents, 38 GB of text
    "openwebtext": {"path": "Skylion007/openwebtext"},
    # OLCF's download script: the Afrikaans part, deduplicated; as parquet on a branch of the hub.
    "oscar": {
        "path": "oscar-corpus/oscar",
        "revision": "refs/convert/parquet",
        "data_dir": "unshuffled_deduplicated_af",
    },
    # Turing report, section 7.1; without the parts that were withdrawn for their copyright.
    "pile": {"path": "monology/pile-uncopyrighted"},
}
LEARN_CHARS = 2**28  #: a bpe tokenizer is learnt from this many characters at the beginning


def prepare_corpus(
    sources: str | Path | list[str | Path],
    out: str | Path | None = None,
    *,
    tokenizer: str = "bpe",
    bpe_vocab_size: int = 8192,
    field: str = "text",
    left_out: LeftOut | None = None,
    progress: bool = True,
) -> Manifest:
    """Tokenize `sources`, a name of HUB or paths, into the folder `out`, for --text.

    tokenizer: byte, char, bpe, or the path of a tokenizer.json. field: the text's key in JSON or
    parquet records.
    left_out: a dict for the records without a readable text; without it the first is an error.
    Raises ConfigError with one line.
    """
    sources = [sources] if isinstance(sources, str | Path) else list(sources)
    name, documents = _open_sources([str(s) for s in sources], field, left_out)
    folder = Path(out) if out else Path("corpora") / name
    if (folder / MANIFEST).exists():
        raise ConfigError(f"{folder} already holds a corpus: choose another --out, or delete it")
    require_writable(folder, "--out")
    pieces = _joined(documents(), END_OF_TEXT if tokenizer == "bpe" else Tokenizer.separator)
    if tokenizer == "bpe":
        pieces = _beginning(pieces, LEARN_CHARS)
    new_tokenizer = learn(tokenizer, pieces, bpe_vocab_size=bpe_vocab_size)
    pieces = _joined(documents(), new_tokenizer.separator)
    with tqdm(
        desc=f"prepare {name}", unit="B", unit_scale=True, disable=not progress, file=sys.stderr
    ) as bar:
        return write_corpus(
            name,
            pieces,
            new_tokenizer,
            folder,
            report=lambda text_bytes: bar.update(text_bytes - bar.n),
        )


def _beginning(pieces: Iterator[str], n_chars: int) -> Iterator[str]:
    for piece in pieces:
        yield piece
        n_chars -= len(piece)
        if n_chars <= 0:
            return


def _joined(documents: Iterator[Document], separator: str) -> Iterator[str]:
    for number, document in enumerate(documents):
        if number:
            yield separator
        yield from document


def _open_sources(
    sources: list[str],
    field: str,
    left_out: LeftOut | None,
) -> tuple[str, Callable]:
    """(name, a function that starts a pass over the documents)."""
    if len(sources) == 1 and sources[0] in HUB and not Path(sources[0]).exists():
        rows = load_rows(sources[0], **HUB[sources[0]])

        def downloaded() -> Iterator[Document]:
            for record in good_records(numbered(rows, sources[0]), field, left_out):
                yield [record[field]]

        return sources[0], downloaded
    if len(sources) == 1 and sources[0] in BUILT_IN:
        return sources[0], lambda: iter([find_text(sources[0])])
    files = [file for source in sources for file in find_files(source)]
    name = Path(sources[0]).name.split(".")[0] or "corpus"

    def in_files() -> Iterator[Document]:
        for file in files:
            yield from documents_of(file, field, left_out)

    return name, in_files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    example = (
        "example:\n"
        "  aiscale data prepare my_texts/ --out corpora/mine --tokenizer bpe --vocab-size 8192"
    )
    raw, about = argparse.RawDescriptionHelpFormatter, "tokenize text once, to be memory-mapped"
    prepare = actions.add_parser(
        "prepare", help=about, description=about, epilog=example, formatter_class=raw
    )
    add = prepare.add_argument
    sources = (
        f"text, JSON-lines or parquet files, folders of them; {', '.join(BUILT_IN)}: Python's own "
        f"documentation, its modules; {', '.join(HUB)}: downloaded; "
        "science: the documentation of the scientific packages that are installed"
    )
    add("source", nargs="+", help=sources)
    add("--out", metavar="DIR", help="the folder for the tokens (default: corpora/NAME)")
    add(
        "--tokenizer",
        default="bpe",
        metavar="KIND",
        help="byte, char, bpe, or a tokenizer.json (default: bpe)",
    )
    size = "vocabulary of a bpe tokenizer (default: 50257 for openwebtext and oscar, else 8192)"
    add("--vocab-size", type=int, metavar="N", help=size)
    add(
        "--field",
        default="text",
        help="the key of the text in a JSON or parquet record (default: text)",
    )
    skip = "leave out and count records without a readable text (default: the first is an error)"
    add("--skip-bad-records", action="store_true", help=skip)
    add("--clean", action="store_true", help="filter the documents and drop near duplicates first")
    add(
        "--against",
        nargs="+",
        default=[],
        metavar="FILE",
        help="with --clean: drop what shares 13 words with them",
    )
    add(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="with --clean: filter with so many processes",
    )


def run(args: argparse.Namespace) -> int:
    left_out = {} if args.skip_bad_records else None
    try:
        folder = _prepare(args, left_out)
    finally:
        if left_out:
            place, why = next(iter(left_out.items()))
            first = f"the first: {place} {why}"
            print(f"{len(left_out):,} records are left out; {first}", file=sys.stderr)
    model = "laptop" if read_tokenizer(folder).vocab_size <= 256 else "gpt2"
    print(shlex.join(["aiscale", "train", "ddp", "--text", str(folder), "--model", model]))
    return 0


def _prepare(args: argparse.Namespace, left_out: LeftOut | None) -> Path:
    """Do what the command says; returns the folder of the tokens."""
    size = args.vocab_size or (50257 if args.source[0] in ("openwebtext", "oscar") else 8192)
    options = {"bpe_vocab_size": size, "field": args.field, "left_out": left_out}
    if args.clean or args.source == ["science"]:
        folder = Path(args.out or f"corpora/{Path(args.source[0]).stem}")
        against = [text for file in args.against for text in texts_in(Path(file), left_out)]
        report = clean_corpus(
            args.source, folder, against=against, processes=args.processes, **options
        )
        print(describe(report))
        return folder / "all"
    manifest = prepare_corpus(args.source, args.out, tokenizer=args.tokenizer, **options)
    folder = Path(args.out or f"corpora/{manifest.name}")
    print(
        f"{folder}: {manifest.tokens:,} tokens of a vocabulary of {manifest.vocab_size:,}, from "
        f"{manifest.text_bytes:,} bytes of text"
    )
    return folder
