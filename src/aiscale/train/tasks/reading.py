"""Functions that the YAML files in this folder call (lm-eval's `!function reading.NAME`).

They load our documents, so that nothing is downloaded, and fill a sentence's gap both ways.
"""

from __future__ import annotations

import json
from pathlib import Path


def documents(file: str, **metadata) -> dict:
    """The splits of a task: only `test`, from this folder's `file`."""
    from datasets import Dataset

    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def answer(document: dict) -> int:
    """The index of the right choice, from 0."""
    return int(document["answer"]) - 1


def choices(document: dict) -> list[str]:
    """The sentence up to its gap, with the gap filled each way: the context for the rest."""
    before, _ = document["sentence"].split("_")
    return [before + document["option1"], before + document["option2"]]


def rest(document: dict) -> str:
    """The sentence after its gap: the better the filling, the likelier this.

    lm-eval adds the space before it.
    """
    return document["sentence"].split("_")[1].strip()
