"""The command `aiscale export RUN FOLDER`: a trained model as a Hugging Face folder, whichever strategy trained it.

    export("runs/laptop", "mine/")
    transformers.AutoModelForCausalLM.from_pretrained("mine/").generate(...)

This process alone reads the newest checkpoint. The folder also gets our tokenizer, as aiscale_tokenizer.json
(`Tokenizer.from_json` reads it).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from aiscale.config import ConfigError, remedy, require_writable


def export(run: str | Path, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the model of a run folder's newest checkpoint to `folder`; raises ConfigError if it cannot."""
    from aiscale.train.records import open_trained

    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise ConfigError(f"{folder} is not empty: name another folder, or add --overwrite")
    require_writable(folder, "")
    model, tokenizer = open_trained(run)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial)
        (partial / "aiscale_tokenizer.json").write_text(tokenizer.to_json())
        if folder.is_dir():
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror or error}): {remedy(error, '')}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="RUN", help="a run folder, such as runs/laptop")
    parser.add_argument("folder", metavar="FOLDER", help="the Hugging Face folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace what FOLDER holds")


def run(args: argparse.Namespace) -> int:
    print(export(args.path, args.folder, overwrite=args.overwrite))
    return 0
