"""Words and numbers: each different word of the corpus, and each punctuation mark, is a token."""

import re


def split(text):
    return re.findall(r"\w+|[^\w\s]", text)


class Tokenizer:
    def __init__(self, words):
        """words: those of a corpus, or a vocabulary; each gets its place in sorted order."""
        self.words = sorted(set(words))
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def encode(self, text):
        """KeyError: a word that the corpus did not have."""
        return [self.numbers[word] for word in split(text)]

    def decode(self, numbers):
        return re.sub(r" ([.,])", r"\1", " ".join(self.words[number] for number in numbers))
