"""A corpus of the kind that the four stages were measured with: small, of few words, and repetitive.

Theirs has 290,599 bytes, 52,600 tokens and 172 different ones. It is not published, so this one has its counts only.
"""

import random

N_TOKENS = 52_600
DETERMINERS = "a the this that one every each no some".split()
ADJECTIVES = """
ancient big bold brave bright calm careful clever cold cool dark deep eager early fair fine
forgotten fresh friendly gentle glad good grand great green happy hard heavy high honest huge hungry
kind large late light little long loud ordinary plain proud quick quiet rich round sharp short
silent slow small soft strong sweet swift tall thirsty warm white wide wild wise young
""".split()
NOUNS = """
baker blacksmith book bridge butterfly captain castle child city cloud dancer doctor dolphin dragon
elephant engine falcon farmer field fire fisher flower forest garden king horse house hunter
island lamp letter lighthouse miller moon mountain painter pilot prince queen rabbit river road
sailor ship singer soldier star stone storm student teacher tower tree village wolf workshop writer
""".split()
VERBS = """
answers builds calls carries catches discovers draws finds follows guards hears helps keeps knows
leads leaves likes loves meets moves opens paints pulls reads remembers surprises takes teaches
tells understands visits watches
""".split()
PLACES = "above behind beside alongside under".split()
LINKS = "and but so while".split()


def sentence(draw):
    def thing():
        return [draw.choice(DETERMINERS), draw.choice(ADJECTIVES), draw.choice(NOUNS)]

    words = [*thing(), draw.choice(VERBS), *thing(), draw.choice(PLACES), *thing()]
    if draw.random() < 0.5:
        words += [",", draw.choice(LINKS), *thing(), draw.choice(VERBS), *thing()]
    return [*words, "."]


def corpus(n_sentences=600, seed=0):
    """The text: sentences drawn again and again from a stock of n_sentences."""
    draw = random.Random(seed)
    stock, words = [sentence(draw) for _ in range(n_sentences)], []
    while len(words) < N_TOKENS:
        words += draw.choice(stock)
    return " ".join(words[:N_TOKENS])
