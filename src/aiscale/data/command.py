"""The command `aiscale data`: prints one line, or JSON."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from aiscale.data.corpora import DOWNLOADABLE
from aiscale.data.prepare import prepare_corpus
from aiscale.data.shards import SHARD_TOKENS, Manifest, read_corpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    prepare = actions.add_parser(
        "prepare",
        help="tokenize text once, into memory-mapped shards",
        description="Tokenize text once, into memory-mapped shards. After an interruption, run the same command again.",
        epilog="example:\n  aiscale data prepare my_texts/ --out corpora/mine --tokenizer bpe --vocab-size 8192",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.add_argument(
        "source",
        nargs="+",
        help=f"text, JSON-lines or parquet files, folders of them, or one of {', '.join(DOWNLOADABLE)}",
    )
    prepare.add_argument("--out", metavar="DIR", help="the folder for the shards (default: corpora/NAME)")
    prepare.add_argument(
        "--tokenizer", default="bpe", metavar="KIND", help="byte, char, word, bpe, or a tokenizer.json (default: bpe)"
    )
    prepare.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="vocabulary of a bpe tokenizer (default: 50257 for openwebtext and oscar, else 8192)",
    )
    prepare.add_argument(
        "--field", default="text", help="the key of the text in a JSON or parquet record (default: text)"
    )
    prepare.add_argument("--subset", help="which part of oscar, such as unshuffled_deduplicated_en")
    prepare.add_argument(
        "--shard-tokens", type=int, default=SHARD_TOKENS, metavar="N", help="approximate number of tokens in a shard"
    )
    prepare.add_argument("--quiet", action="store_true", help="show no progress")
    show = actions.add_parser(
        "show",
        help="check the shards of a prepared corpus and print its size",
        description="Check the shards of a prepared corpus and print its size.",
        epilog="example:\n  aiscale data show corpora/mine",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.add_argument("folder")
    for action in (prepare, show):
        action.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(args: argparse.Namespace) -> int:
    if args.action == "show":
        _, manifest, _ = read_corpus(Path(args.folder))
        _print(manifest, args.folder, args.json)
        return 0
    manifest = prepare_corpus(
        args.source,
        args.out,
        tokenizer=args.tokenizer,
        bpe_vocab_size=args.vocab_size or (50257 if args.source[0] in ("openwebtext", "oscar") else 8192),
        field=args.field,
        subset=args.subset,
        shard_tokens=args.shard_tokens,
        progress=not args.quiet,
    )
    _print(manifest, args.out or f"corpora/{manifest.name}", args.json)
    return 0


def _print(manifest: Manifest, folder: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"folder": str(folder), **asdict(manifest)}, indent=2))
    else:
        print(
            f"{folder}: {manifest.tokens:,} tokens of a vocabulary of {manifest.vocab_size:,}, from "
            f"{manifest.text_bytes:,} bytes of text, in {len(manifest.shards)} shards"
        )
