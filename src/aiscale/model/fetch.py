"""Fetch a pretrained model where there is a network: `aiscale models fetch NAME`.

aiscale models fetch openai-community/gpt2            # into models/gpt2
aiscale train --set model.folder=models/gpt2          # reads it, also on compute nodes without a network
"""

from __future__ import annotations

import argparse
from pathlib import Path

from aiscale.config import ConfigError, require_writable

_TEXTS = ("*.json", "*.txt", "*.model")  #: configuration and tokenizer
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")  #: the first kind that the model has


def fetch(name: str, out: str | Path | None = None) -> Path:
    """The folder with a model of the Hugging Face hub; a fetch that was cut off goes on. Raises ConfigError."""
    folder = Path(out or Path("models") / name.rpartition("/")[2])
    require_writable(folder, "--out")
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    try:
        files = [file.rfilename for file in HfApi().model_info(name, timeout=30).siblings]
        weights = next((kind for kind in _WEIGHTS if [*filter_repo_objects(files, allow_patterns=[kind])]), None)
        if "config.json" not in files or weights is None:
            raise ConfigError(f"{name} has no config.json or no weights of torch: name another model")
        snapshot_download(name, local_dir=folder, allow_patterns=[*_TEXTS, weights], ignore_patterns=["*/*"])
    except ConfigError:
        raise
    except Exception as error:  # of several libraries: no network, no such model, a licence to accept, no space
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ConfigError(
            f"{name} cannot be fetched ({why}): check its name and the network (a login node has one, compute nodes "
            f"do not), or copy its folder to {folder}"
        ) from None
    return folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    get = actions.add_parser("fetch", help="download a model of the Hugging Face hub into a folder")
    get.add_argument("name", metavar="NAME", help="such as openai-community/gpt2")
    get.add_argument("--out", metavar="DIR", help="the folder (default: models/NAME)")


def run(args: argparse.Namespace) -> int:
    folder = fetch(args.name, args.out)
    print(f"{folder}: train from it with --set model.folder={folder}")
    return 0
