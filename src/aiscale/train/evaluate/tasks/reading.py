"""What the YAML files beside call: their documents, and the two readings of a sentence with a gap.

lm-eval resolves `!function reading.NAME` to this file. The documents are ours (a line of JSON each), so that nothing is
fetched; each task has the kind of documents, the request and the metrics of the published one that it stands for.
"""

from __future__ import annotations

import json
from pathlib import Path


def documents(file: str, **metadata) -> dict:
    """The splits of a task: one, from the file of that name in this folder."""
    from datasets import Dataset

    lines = (Path(__file__).parent / file).read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}


def answer(document: dict) -> int:
    """Which of the two choices is right, from 0."""
    return int(document["answer"]) - 1


def choices(document: dict) -> list[str]:
    """The sentence up to its gap, and the gap filled, each way: what is read before the rest is scored."""
    before, _ = document["sentence"].split("_")
    return [before + document["option1"], before + document["option2"]]


def rest(document: dict) -> str:
    """The sentence after its gap: the better a filling, the likelier this. lm-eval puts the space before it."""
    return document["sentence"].split("_")[1].strip()
