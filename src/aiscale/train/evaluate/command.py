"""The command `aiscale evaluate RUN`: runs tasks of EleutherAI's lm-eval harness on a trained model.

    aiscale evaluate runs/radius-2b --tasks lambada_openai,lambada_standard,wikitext,winogrande --device cuda --json
    aiscale evaluate runs/forge-s --tasks forge
    aiscale evaluate runs/laptop --tasks aiscale_last_word,aiscale_rolling,aiscale_two_choice
    results = evaluate("runs/laptop", ["aiscale_rolling"])      # {"results": {"aiscale_rolling": {...}}, ...}

The first is what Radius's authors measured (published.table("radius_downstream")), the second the ten tasks of FORGE's
(published.table("forge_lm_eval")); their data sets are downloaded from the Hugging Face hub. The third needs no
network: three tasks of the same kinds, from our own files. Needs `pip install 'aiscale[eval]'`.

RUN is a Hugging Face folder, such as `aiscale export` writes, or a run folder of any strategy: its newest checkpoint is
first exported into a temporary folder (TMPDIR). The harness's class for transformers reads it, with our tokenizer.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import fnmatch
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiscale.config import ConfigError
from aiscale.data import Tokenizer
from aiscale.data.formats import first_line
from aiscale.train.export import export

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MMLU = "college_chemistry college_computer_science college_medicine college_physics sociology"
#: Names of several tasks. FORGE's are in at-aaims/forge, train/README.md, where MMLU is called hendrycksTest.
SETS = {
    "radius": ("lambada_openai", "lambada_standard", "wikitext", "winogrande"),
    "forge": ("arc_easy", "arc_challenge", *(f"mmlu_{name}" for name in _MMLU.split()), "openbookqa", "piqa", "sciq"),
}
OURS = Path(__file__).parent / "tasks"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
BOOTSTRAP_DRAWS = 1000  #: for a perplexity's standard error; lm-eval's 100,000 take longer than a small evaluation


def evaluate(
    path: str | Path, tasks: Sequence[str] = ("radius",), *, limit: int = 0, batch_size: int = 8, device: str = "auto"
) -> dict:
    """The result of lm-eval's `evaluate`, with `results` by task; raises ConfigError if it cannot run.

    limit: the number of documents of each task, 0: all. Zero-shot, unless a task says otherwise (Radius's authors also
    evaluated zero-shot).
    """
    for name, value, least in (("limit", limit, 0), ("batch-size", batch_size, 1)):
        if value < least:
            raise ConfigError(f"--{name} is {value}: it must be at least {least}")
    path, tasks = Path(path), [name for task in tasks for name in SETS.get(task, (task,))]
    if not (path / "run.json").is_file() and not (path / "config.json").is_file():  # before seconds of imports
        raise ConfigError(f"{path} is neither a run folder (run.json) nor a Hugging Face folder (config.json)")
    _require_harness()
    import lm_eval

    manager, device = _tasks(tasks), _device(device)
    # The harness would draw in processes forked from this one, whose threads may hold a lock: sometimes they hang. In
    # this process BOOTSTRAP_DRAWS take seconds.
    os.environ["DISABLE_MULTIPROC"] = "1"
    # The harness prints its progress.
    with _exported(path) as folder, contextlib.redirect_stdout(sys.stderr):
        model = _open(folder, batch_size, device)
        loaded = _load(manager, tasks)
        found = lm_eval.evaluate(model, loaded, limit=limit or None, bootstrap_iters=BOOTSTRAP_DRAWS, log_samples=False)
    return {**found, "lm_eval_version": lm_eval.__version__, "limit": limit}


def _load(manager, names: list[str]) -> dict:
    try:
        loaded = manager.load(names)
    except OSError as error:  # from `datasets`: the hub cannot be reached, or a file is missing
        raise ConfigError(
            f"the documents of {', '.join(names)} cannot be read ({first_line(error)}): connect to a network, or name "
            f"tasks whose files are here, such as {', '.join(sorted(path.stem for path in OURS.glob('*.yaml')))}"
        ) from error
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(1234)  # the harness's own default
    return loaded


def rows(results: dict) -> list[dict]:
    """One row per task and metric: task, metric, value, stderr (None if there is none), documents."""
    table = []
    for task, measured in results["results"].items():
        for key, value in measured.items():
            metric, _, _ = key.partition(",")
            if not isinstance(value, int | float) or metric.endswith("_stderr") or "," not in key:
                continue
            stderr = measured.get(key.replace(metric, f"{metric}_stderr"))
            documents = results["n-samples"][task]["effective"] if task in results["n-samples"] else None
            stderr = stderr if isinstance(stderr, float) else None
            table.append({"task": task, "metric": metric, "value": value, "stderr": stderr, "documents": documents})
    return table


def _require_harness() -> None:
    try:
        import accelerate  # noqa: F401  (the harness's class for transformers needs it)
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed, and evaluation is done by the lm-eval harness: `make setup` installs it"
        ) from None


@contextlib.contextmanager
def _exported(path: Path) -> Iterator[Path]:
    """`path` as a Hugging Face folder."""
    if (path / "run.json").is_file():
        with tempfile.TemporaryDirectory(prefix="aiscale-evaluate-") as folder:
            yield export(path, Path(folder) / "model")
    else:
        yield path


def _open(path: Path, batch_size: int, device: str):
    """The model of a Hugging Face folder, as lm-eval's LM."""
    from lm_eval.models.huggingface import HFLM

    ours, options = path / "aiscale_tokenizer.json", {}
    if not any((path / name).is_file() for name in (ours.name, *_TOKENIZERS)):
        raise ConfigError(f"{path} holds no tokenizer ({ours.name}, or {', '.join(_TOKENIZERS)}): copy it there, too")
    if '"model_type": "bert"' in (path / "config.json").read_text():
        raise ConfigError("BERT guesses hidden tokens, and lm-eval scores the next one: evaluate a causal model, or T5")
    try:
        if ours.is_file():
            options["tokenizer"] = hugging_face_tokenizer(Tokenizer.from_json(ours.read_text(encoding="utf-8")))
        # transformers does not look up an absolute path on the hub. With its cache of logits, lm-eval 0.4.13 scores the
        # wrong token if two requests split the same text at different places.
        return HFLM(str(path.resolve()), batch_size=batch_size, device=device, logits_cache=False, **options)
    except ConfigError:
        raise
    except Exception as error:  # transformers passes on the errors of its many readers
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise ConfigError(
            f"{path} cannot be read ({reason}): copy the whole folder again, or export it again"
        ) from error


def _tasks(names: list[str]):
    """An index that knows all of `names`; without lm-eval's own thousands of files, unless they are needed."""
    from lm_eval.tasks import TaskManager

    if not names:
        raise ConfigError("--tasks is empty: name at least one task, such as lambada_openai")
    for defaults in (False, True):
        manager = TaskManager(include_path=[str(OURS)], include_defaults=defaults)
        unknown = [name for name in names if not fnmatch.filter(manager.all_tasks, name)]
        if not unknown:
            return manager
    near = ", ".join(difflib.get_close_matches(unknown[0], manager.all_tasks, n=3, cutoff=0))
    raise ConfigError(
        f"no task of lm-eval is called {unknown[0]!r}: the nearest are {near}; `lm-eval ls tasks` lists all"
    )


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {name!r}: it must be auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"--device {name}, but torch sees no GPU here: use --device cpu")
    return name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="RUN", help="a run folder, such as runs/laptop, or a Hugging Face folder")
    which = "comma-separated names of lm-eval's tasks; radius or forge: those of the publication (default: radius)"
    add("--tasks", default="radius", help=which)
    how_many = "use only the first N documents of each task; 0: all (default: 0)"
    add("--limit", type=int, default=0, metavar="N", help=how_many)
    add("--batch-size", type=int, default=8, metavar="N", help="sequences in a batch (default: 8)")
    add("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    add("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    results = evaluate(args.path, names, limit=args.limit, batch_size=args.batch_size, device=args.device)
    if args.json:
        kept = ("results", "n-samples", "n-shot", "versions", "limit", "lm_eval_version")
        print(json.dumps({key: results[key] for key in kept if key in results}, indent=2, default=str))
        return 0
    for row in rows(results):
        error = "" if row["stderr"] is None else f" ± {row['stderr']:.3g}"
        print(f"{row['task']:24} {row['metric']:16} {row['value']:.4g}{error}  ({row['documents']} documents)")
    if args.limit:
        print(f"aiscale: the first {args.limit} documents of each task only: not a result to publish", file=sys.stderr)
    return 0


# The tokenizer, as transformers reads it ------------------------------------------------------------------------------


def end_of_text(tokenizer: Tokenizer) -> int:
    """The last token of the separator between documents: <|endoftext|>, or a line end if there is no such token."""
    return tokenizer.encode(tokenizer.separator)[-1]


def hugging_face_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A transformers tokenizer that gives the same ids; end_of_text is its bos, eos and pad token. Raises ConfigError
    for a tokenizer that cannot encode every text."""
    from tokenizers import Tokenizer as Library
    from transformers import PreTrainedTokenizerFast

    if tokenizer.kind == "bpe":
        library = Library.from_str(json.dumps(json.loads(tokenizer.to_json())["tokenizer"]))
    elif tokenizer.kind == "byte":
        library = _bytes()
    else:
        raise ConfigError(
            f"the model's {tokenizer.kind} tokenizer knows its own corpus alone, no task's text: evaluate a model that "
            "was trained with data.tokenizer byte or bpe"
        )
    end = library.id_to_token(end_of_text(tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=library, bos_token=end, eos_token=end, pad_token=end)


def _bytes():
    """BPE without merges: every byte is a token with its own value as id."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # `tokenizers` writes a byte as such a character

    library = Library(models.BPE({character: byte for byte, character in bytes_to_unicode().items()}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return library
