"""`aiscale evaluate RUN`: tasks of EleutherAI's lm-eval on a run or a Hugging Face folder.

The data sets of lm-eval's own tasks are downloaded. Those of aiscale_last_word, aiscale_rolling and
aiscale_two_choice are files of ours, in tasks/. aiscale_continuation and aiscale_repeated_word have
up to 400 items, made of the text that the run held out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from aiscale.errors import ConfigError
from aiscale.train.data import read_tokens
from aiscale.train.export import export
from aiscale.train.record import read_note

_MMLU = "college_chemistry college_computer_science college_medicine college_physics sociology"
#: What was published (published.table). FORGE's are in at-aaims/forge, train/README.md;
#: hendrycksTest is MMLU there.
SETS = {
    "radius": ("lambada_openai", "lambada_standard", "wikitext", "winogrande"),
    "forge": (
        "arc_easy",
        "arc_challenge",
        *(f"mmlu_{name}" for name in _MMLU.split()),
        "openbookqa",
        "piqa",
        "sciq",
    ),
}
OURS = Path(__file__).parent / "tasks"
OF_THE_RUN = ("aiscale_continuation", "aiscale_repeated_word")


def evaluate(
    path: str | Path, tasks: Sequence[str], limit: int = 0, batch_size: int = 8, device: str = "cpu"
) -> dict:
    """The result of lm-eval's `simple_evaluate`; limit: each task's first documents, 0: all."""
    path, tasks = Path(path), [name for task in tasks for name in SETS.get(task, (task,))]
    if not any((path / name).is_file() for name in ("run.json", "config.json")):
        raise ConfigError(
            f"{path} is neither a run folder (run.json) nor a Hugging Face folder (config.json)"
        )
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError:
        raise ConfigError("lm-eval is not installed: `make setup` installs it") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # it would fork this process, whose threads may hold a lock
    os.environ["DISABLE_MULTIPROC"] = "1"
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(sys.stderr):
        folder = Path(name)
        metadata = {}
        if set(tasks) & set(OF_THE_RUN):
            text = folder / "held_out.txt"
            text.write_text(held_out_text(path), encoding="utf-8")
            metadata["held_out"] = str(text)
        # else it reads thousands of files of its own
        ours = all((OURS / f"{name}.yaml").is_file() for name in tasks)
        manager = TaskManager(
            include_path=[str(OURS)], include_defaults=not ours, metadata=metadata
        )
        if unknown := [name for name in tasks if name not in manager.all_tasks]:
            raise ConfigError(
                f"no task of lm-eval is called {unknown[0]!r}: `lm-eval ls tasks` lists all"
            )
        model = export(path, folder / "model") if (path / "run.json").is_file() else path
        if json.loads((model / "config.json").read_text()).get("model_type") == "bert":
            raise ConfigError(
                "BERT guesses hidden tokens, and lm-eval scores the next one: "
                "evaluate another model"
            )
        # With its cache, lm-eval 0.4.13 scores the wrong token if two requests split the same text
        # differently. Its 100,000 bootstrap draws, for standard errors, take long.
        options = {"pretrained": str(model.resolve()), "logits_cache": False}
        settings = {
            "limit": limit or None,
            "batch_size": batch_size,
            "device": device,
            "bootstrap_iters": 1000,
        }
        return lm_eval.simple_evaluate(
            "hf", options, tasks, task_manager=manager, log_samples=False, **settings
        )


def held_out_text(path: Path) -> str:
    """The part of its text that a run did not train on."""
    note = read_note(path)
    share = note["options"]["held_out"] if note else 0.0
    if not share:
        remedy = "train with --held-out 0.1, or choose other tasks"
        raise ConfigError(f"{path} has held out no text to make items of: {remedy}")
    tokens, _, digest = read_tokens(note["options"]["text"])
    if digest != note["text_sha256"]:
        where = note["options"]["text"]
        raise ConfigError(f"{where} is no longer the text of {path}: its held-out part is unknown")
    part = tokens[len(tokens) - round(len(tokens) * share) :]
    tokenizer = path / "tokenizer.json"
    if tokenizer.exists():
        return Tokenizer.from_file(str(tokenizer)).decode(part.tolist())
    return bytes(part).decode("utf-8", errors="replace")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN", help="a run folder, such as runs/laptop, or a Hugging Face folder")
    add(
        "--tasks",
        default="radius",
        help="lm-eval's tasks, comma-separated; radius or forge: those of the publication",
    )
    add(
        "--limit",
        type=int,
        default=0,
        metavar="N",
        help="use only the first N documents of each task; 0: all",
    )
    add("--batch-size", type=int, default=8, metavar="N", help="sequences in a batch (default: 8)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> None:
    results = evaluate(args.path, args.tasks.split(","), args.limit, args.batch_size, args.device)
    from lm_eval.utils import make_table

    parts = ("results", "n-samples", "n-shot", "versions", "config")
    print(
        json.dumps({key: results[key] for key in parts}, default=str)
        if args.json
        else make_table(results)
    )
