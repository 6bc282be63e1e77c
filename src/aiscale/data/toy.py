"""The toy corpus: small, repetitive, English-like, with the published statistics of the GPT-in-C project's corpus.

    text = toy_text()        # 290,599 bytes, 52,600 word-level tokens, 172 different ones

Sahdev, Mathews and Guerrero ("Distributed GPT2 Model Project", slide "Toy dataset stats") give these three numbers and
say that the text "is small and highly repetitive"; they do not publish it. Ours has stories of four lines from one
grammar; later lines repeat names and things of earlier ones, so that a model gains from a longer context.

A word-level token is a word or a punctuation mark, each with the space before it, or a line end, as in tokenizer
`word`. (With separate spaces, 5.5 bytes a token would need words of ten letters.)
"""

from __future__ import annotations

import random
from functools import cache

from aiscale.data.tokenizers import WORD

N_BYTES, N_TOKENS = 290_599, 52_600

WORDS = {
    "name": "Alexandra Benedict Charlotte Dominic Elisabeth Frederick Gabriella Leonardo Margaret Nathaniel",
    "animal": "antelope badger beaver buffalo donkey falcon hedgehog kingfisher leopard nightingale octopus parrot "
    "porcupine squirrel tortoise weasel",
    "time": "morning evening winter summer afternoon midnight",
    "color": "emerald yellow purple silver golden scarlet turquoise crimson violet",
    "thing": "accordion basket blanket bottle calendar compass feather hammer ladder lantern mirror necklace needle "
    "notebook pocket ribbon saddle teapot telescope umbrella wagon whistle",
    "place": "bakery bridge castle cottage forest garden harbour island kitchen library lighthouse meadow mountain "
    "observatory orchard station temple tunnel valley village windmill",
    "verb": "borrow bring decorate deliver examine paint photograph polish remember repair",
    "mood": "abandoned crowded dark empty foggy mysterious narrow quiet silent steep windy",
    "event": "banquet celebration dinner journey market meeting sunset thunderstorm wedding",
    "manner": "carefully cheerfully gently happily immediately quickly silently slowly together",
    "finish": "celebrated danced laughed rested sang slept smiled waited whispered",
}
STORY = (
    "One {time} {name} the {animal} discovered {adverb}a {color} {thing} near the {mood} {place}.\n"
    "{name} wanted to {verb} the {color} {thing} {where}before the {event}.\n"
    "Because the {place} was {mood}{very}, {friend} the {other} arrived {manner} and offered help.\n"
    "Together they carried the {thing} {way}to the {goal} and {finish}{end} until the next {time}.\n"
)
OPTIONAL = {
    "adverb": ("", "by accident "),
    "where": ("", "at home "),
    "very": ("", " and strange"),
    "way": ("", "all the way "),
    "end": ("", " there"),
}


@cache
def toy_text(seed: int = 4) -> str:
    """The corpus of one seed; the same on every machine and Python version."""
    rng = random.Random(seed)
    stories: list[str] = []
    tokens_left, bytes_left = N_TOKENS, N_BYTES
    while tokens_left > 800:
        # Of six drafts, take the one after which the missing bytes per token are nearest to the target.
        drafts = [_story(rng) for _ in range(6)]
        best = min(drafts, key=lambda s: abs((bytes_left - len(s)) / (tokens_left - _count(s)) - N_BYTES / N_TOKENS))
        stories.append(best)
        tokens_left -= _count(best)
        bytes_left -= len(best)
    return "".join(stories + _fill(rng, tokens_left, bytes_left))


def _fill(rng: random.Random, n_tokens: int, n_bytes: int) -> list[str]:
    """A dozen stories of exactly n_tokens and n_bytes: each near the average of the rest, the last one exact."""
    by_size = {}
    for _ in range(4000):
        story = _story(rng)
        by_size[_count(story), len(story)] = story
    sizes = list(by_size)
    while True:
        stories, remainder = [], (n_tokens, n_bytes)
        for stories_left in range(12, 1, -1):
            share = remainder[0] / stories_left, remainder[1] / stories_left
            drafts = [_pick(rng, sizes) for _ in range(20)]
            size = min(drafts, key=lambda d: 5 * abs(d[0] - share[0]) + abs(d[1] - share[1]))
            stories.append(by_size[size])
            remainder = remainder[0] - size[0], remainder[1] - size[1]
        if remainder in by_size:
            return [*stories, by_size[remainder]]


def _story(rng: random.Random) -> str:
    parts = {kind: _pick(rng, words.split()) for kind, words in WORDS.items()}
    parts |= {kind: _pick(rng, choices) for kind, choices in OPTIONAL.items()}
    parts["friend"] = _other(rng, "name", parts["name"])
    parts["other"] = _other(rng, "animal", parts["animal"])
    parts["goal"] = _other(rng, "place", parts["place"])
    return STORY.format(**parts)


def _other(rng: random.Random, kind: str, taken: str) -> str:
    return _pick(rng, [word for word in WORDS[kind].split() if word != taken])


def _pick(rng: random.Random, choices):
    # Random.choice may change between Python versions; random() is guaranteed not to.
    return choices[int(rng.random() * len(choices))]


def _count(text: str) -> int:
    return len(WORD.findall(text))
