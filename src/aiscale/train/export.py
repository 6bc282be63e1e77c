"""`aiscale export RUN FOLDER`: a trained model, of any strategy, as a Hugging Face folder.

The folder also gets the tokenizer: aiscale_tokenizer.json, which `Tokenizer.from_json` reads, and
for byte and bpe, which can encode any text, the files that AutoTokenizer reads.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.errors import ConfigError, require_writable
from aiscale.train.prepare import Tokenizer, learn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def export(run: str | Path, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the model of a run's newest checkpoint to `folder`; raises ConfigError if it cannot."""
    from aiscale.train.trained import open_folder

    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ConfigError(f"{folder} is not empty: name another folder, or add --overwrite")
    require_writable(folder, "")
    model, text = open_folder(run)
    tokenizer = Tokenizer.from_json(text) if text else learn("byte", ())
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        (partial / "aiscale_tokenizer.json").write_text(tokenizer.to_json())
        if tokenizer.kind in ("byte", "bpe"):
            hugging_face_tokenizer(tokenizer).save_pretrained(partial)
        if folder.is_dir():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def hugging_face_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A transformers tokenizer that gives the same ids.

    What separates documents begins and ends a text and pads it: <|endoftext|> or, of bytes, a line
    end.
    """
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    if tokenizer.kind == "bpe":
        library = Library.from_str(json.dumps(json.loads(tokenizer.to_json())["tokenizer"]))
    else:
        library = _bytes()
    end = library.id_to_token(tokenizer.encode(tokenizer.separator)[-1])
    return PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token=end, eos_token=end, pad_token=end
    )


def _bytes():
    """BPE without merges: every byte is a token with its own value as id."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    # `tokenizers` writes a byte as such a character.
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    library = Library(
        models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, [])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="a run folder, such as runs/laptop")
    parser.add_argument("folder", metavar="FOLDER", help="the Hugging Face folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what FOLDER holds")


def run(args: argparse.Namespace) -> int:
    print(export(args.path, args.folder, overwrite=args.overwrite))
    return 0
