"""Items by the hundred from the text that a run held out (lm-eval's `!function held_out.NAME`).

Published test sets are too hard for models that trained for minutes: they guess. These items are of
the kind of text that a model has read, from a part that it has not: `held_out` is a file with that.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

ITEMS = 400  #: at most
CONTEXT = 160  #: characters before what is asked
END = 24  #: characters of an answer of `continuations`
SHORTEST = 4  #: letters of a word that is asked for


def continuations(held_out: str, **_) -> dict:
    """{context, choices, answer}: which of two ends goes on here? The other is from elsewhere."""
    text = Path(held_out).read_text(encoding="utf-8")
    draw = random.Random(0)
    items = []
    for _ in range(ITEMS):
        start, other = draw.sample(range(len(text) - CONTEXT - END), 2)
        end = start + CONTEXT
        choices = [text[end : end + END], text[other : other + END]]
        answer = draw.randrange(2)
        if answer == 1:
            choices.reverse()
        items.append({"context": text[start:end], "choices": choices, "answer": answer})
    return as_split(items)


def repeated_words(held_out: str, **_) -> dict:
    """{context, word}: the next word, which stands in the context already, once or more."""
    text = Path(held_out).read_text(encoding="utf-8")
    words = list(re.finditer(rf"(?<=\s)[A-Za-z_]{{{SHORTEST},}}(?=\W)", text))
    random.Random(0).shuffle(words)
    items = []
    for word in words:
        context = text[max(0, word.start() - CONTEXT) : word.start()]
        if re.search(rf"\b{word.group()}\b", context):
            items.append({"context": context, "word": word.group()})
        if len(items) == ITEMS:
            break
    return as_split(items)


def as_split(items: list[dict]) -> dict:
    from datasets import Dataset

    return {"test": Dataset.from_list(items)}
