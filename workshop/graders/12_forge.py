"""Graders of the exercises on FORGE: texts kept apart, answers by likelihood, a gain, and three controls."""

import random

import numpy as np
import torch
from scipy.stats import sem
from sklearn.feature_extraction.text import CountVectorizer
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
)  # here: imports take longer than an answer may

from aiscale.lesson.grading import exercise, require, same

WORDS = "iron platinum energy shell pair phase alloy field token model bcc fcc".split()


def _text(n: int) -> list[str]:
    return [random.choice(WORDS) for _ in range(n)]


# 12.1 ---------------------------------------------------------------------------------------------------------------


def _counts(one: str, other: str, n: int):
    """Both texts' runs, counted by scikit-learn: (2, runs)."""
    split = CountVectorizer(analyzer="word", tokenizer=str.split, token_pattern=None, ngram_range=(n, n))
    return split.fit_transform([one, other]).toarray()


@exercise(
    "12.1",
    "How alike are two texts?",
    "similarity",
    minutes=8,
    hints=[
        "A set of tuples: it forgets how often a run stands in a text, and can be compared.",
        "A text of w words has w - n + 1 runs: mind the last one.",
    ],
)
def how_alike(similarity):
    same(similarity("iron", "iron ore", 3), 0.0, "texts shorter than n")
    graded = 0
    while graded < 5:
        n, shared = random.randint(2, 4), _text(random.randint(8, 14))
        one, other = [*shared, *_text(4), *shared], [*_text(9), *shared]
        one[0] = one[0].upper()
        a, b = _counts(" ".join(one), " ".join(other), n)
        both, either = ((a > 0) & (b > 0)).sum(), ((a > 0) | (b > 0)).sum()
        words = len({*(w.lower() for w in one)} & {*other}) / len({*(w.lower() for w in one), *other})
        causes = {
            "a run counts once, however often it stands in a text": (a.clip(max=b)).sum()
            / (a + b - a.clip(max=b)).sum(),
            "divide by the runs of both texts together": both / (a > 0).sum(),
            "divide by the runs of both texts together, not of the longer": both / max((a > 0).sum(), (b > 0).sum()),
            "these are shared words: compare runs of n words": words,
            "that is Dice's measure: a shared run counts once below the line": 2
            * both
            / ((a > 0).sum() + (b > 0).sum()),
        }
        if len({both / either, *causes.values()}) <= len(causes):
            continue  # two mistakes give the same number
        graded += 1
        found = similarity(" ".join(one), " ".join(other), n)
        same(found, both / either, f"two texts, n = {n}", causes=causes, rtol=1e-9)


_RUNS = """
def runs(text):
    words = text.lower().split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
a, b = set(runs(one)), set(runs(other))
"""
how_alike.refuses("over the first text", "of both texts together", _RUNS + "return len(a & b) / len(a) if a else 0.0")
how_alike.refuses(
    "Dice's measure", "Dice's measure", _RUNS + "return 2 * len(a & b) / (len(a) + len(b)) if a and b else 0.0"
)
how_alike.refuses(
    "shared words",
    "these are shared words",
    """
    a, b = set(one.lower().split()), set(other.lower().split())
    return len(a & b) / len(a | b) if min(len(a), len(b)) >= n else 0.0
    """,
)
how_alike.refuses(
    "case matters", "two texts", _RUNS.replace(".lower()", "") + "return len(a & b) / len(a | b) if a | b else 0.0"
)
how_alike.refuses("fails on short texts", "ZeroDivisionError", _RUNS + "return len(a & b) / len(a | b)")
how_alike.refuses("hard-coded for the shown texts", "texts", "return 1 / 3")


# 12.2 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "12.2",
    "Keep the test out",
    "contaminated",
    minutes=12,
    hints=[
        "Write a helper that gives the set of runs of m words of a text; a document shares one if two sets meet.",
        "For a test text of k < n words, compare runs of k words.",
    ],
)
def keep_the_test_out(contaminated):
    for _ in range(4):
        n, fresh = random.randint(4, 7), iter(f"w{i}" for i in random.sample(range(10**6), 400))
        tests = [[next(fresh) for _ in range(n + 5)] for _ in range(3)] + [[next(fresh) for _ in range(n - 2)]]
        documents, truth = [], []
        at = random.randint(1, 4)  # 5 would be the last run
        for piece, bad, _ in (
            (tests[0][at : at + n], True, "a run from the middle of a test"),
            (tests[1][: n - 1], False, "one word too few"),
            ([word.upper() for word in tests[2]], True, "in capitals"),
            (tests[3], True, "a short test, whole"),
            (tests[3][:-1], False, "a part of a short test"),
            (tests[0][::-1], False, "the words of a test in another order"),
            ([], False, "nothing of a test"),
            (tests[1][-n:], True, "the last run of a test"),
        ):
            documents.append([next(fresh), *piece, next(fresh)])
            truth.append(bad)
        order = random.sample(range(len(documents)), len(documents))
        expected = [place for place, i in enumerate(order) if truth[i]]
        found = contaminated([" ".join(documents[i]) for i in order], [" ".join(test) for test in tests], n)
        require(isinstance(found, list), f"return a list of numbers, not {str(found)[:60]}")
        what = {i: place for place, i in enumerate(order)}
        for i, said in (
            (0, "shares n words in a row with the middle of a test, and stays"),
            (7, "shares the last n words of a test, and stays: does your loop reach the last run?"),
            (2, "holds a test in capitals, and stays: case does not count"),
            (3, "holds a whole test of fewer than n words, and stays"),
        ):
            require(what[i] in found, f"document {what[i]} {said}")
        for i, said in (
            (1, "shares n - 1 words in a row only"),
            (4, "holds a part of a short test only"),
            (5, "holds a test's words in another order"),
            (6, "shares nothing with any test"),
        ):
            require(what[i] not in found, f"document {what[i]} {said}, and is thrown out")
        same([float(i) for i in found], [float(i) for i in expected], "the numbers, sorted")


_SHARED = """
def runs(text, m):
    words = text.lower().split()
    return {tuple(words[i : i + m]) for i in range(len(words) - m + 1)}
"""
keep_the_test_out.refuses(
    "short tests forgotten",
    "a whole test of fewer than n words",
    _SHARED
    + """
return [i for i, d in enumerate(documents) if any(runs(d, n) & runs(t, n) for t in tests)]
""",
)
keep_the_test_out.refuses(
    "whole test texts only",
    "with the middle of a test",
    "return [i for i, d in enumerate(documents) if any(t.lower() in d.lower() for t in tests)]",
)
keep_the_test_out.refuses(
    "case matters",
    "in capitals",
    _SHARED.replace(".lower()", "")
    + """
return [i for i, d in enumerate(documents)
        if any(runs(d, min(n, len(t.split()))) & runs(t, min(n, len(t.split()))) for t in tests)]
""",
)
keep_the_test_out.refuses("hard-coded for the shown documents", "document", "return [0, 2]")


# 12.3 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "12.3",
    "What does the model answer?",
    "scores",
    minutes=12,
    core=False,
    hints=[
        "`log_softmax(-1)` of the logits, then `gather` picks the token that really came.",
        "The logits at position i are about token i + 1: the first token of the choice is told by the context's last.",
    ],
)
def what_it_answers(scores):
    network = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    ).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(8)  # random weights as they are drawn hardly tell one token from another

        def model(tokens):
            return network(tokens).logits

        for _ in range(3):
            context = random.choices(range(50), k=random.randint(3, 8))
            choices = [random.choices(range(50), k=k) for k in random.sample(range(2, 8), 3)]
            right, causes = [], {}
            sums = {"mean": [], "all": [], "late": []}
            for choice in choices:
                tokens = torch.tensor([context + choice])
                labels = torch.tensor([[-100] * len(context) + choice])  # transformers leaves -100 out of its mean loss
                right.append(-network(tokens, labels=labels).loss.item() * len(choice))
                sums["mean"].append(right[-1] / len(choice))
                sums["all"].append(-network(tokens, labels=tokens).loss.item() * (len(context) + len(choice) - 1))
                labels[0, len(context)] = -100
                sums["late"].append(-network(tokens, labels=labels).loss.item() * (len(choice) - 1))
            causes = {
                "this is the mean over a choice's tokens: the score is their sum": torch.tensor(sums["mean"]),
                "the context's tokens count here, too": torch.tensor(sums["all"]),
                "the first token of the choice is missing: the context's last position tells it": torch.tensor(
                    sums["late"]
                ),
                "the sign: a logarithm of a probability is negative": -torch.tensor(right),
            }
            found = scores(model, context, choices)
            require(len(found) == 3, f"return a score for each of the 3 choices, not {str(found)[:60]}")
            same(torch.tensor(found), torch.tensor(right), "the scores", causes=causes, rtol=1e-4)


_SCORE = """
found = []
for choice in choices:
    tokens = torch.tensor([context + choice])
    log_p = model(tokens[:, :-1]).log_softmax(-1)[0]
    said = log_p.gather(-1, tokens[0, 1:, None])[:, 0]
    found.append({})
return found
"""
what_it_answers.refuses("mean of the tokens", "the mean over", _SCORE.format("said[len(context) - 1 :].mean().item()"))
what_it_answers.refuses("the context too", "context's tokens count", _SCORE.format("said.sum().item()"))
what_it_answers.refuses(
    "the first token missed", "first token of the choice", _SCORE.format("said[len(context) :].sum().item()")
)
what_it_answers.refuses("the sign", "the sign", _SCORE.format("-said[len(context) - 1 :].sum().item()"))
what_it_answers.refuses(
    "not shifted",
    "the scores",
    """
    found = []
    for choice in choices:
        tokens = torch.tensor([context + choice])
        log_p = model(tokens).log_softmax(-1)[0]
        found.append(log_p.gather(-1, tokens[0, :, None])[len(context) :].sum().item())
    return found
    """,
)
what_it_answers.refuses("hard-coded for the shown model", "the scores", "return [-6.908, -6.908, -6.908]")


# 12.4 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "12.4",
    "Did it help?",
    "gain",
    minutes=8,
    hints=[
        "Subtract first, draw by draw. What varies between draws for both alike then cancels.",
        "The standard deviation with `ddof=1`, over the root of the number of draws.",
    ],
)
def did_it_help(gain):
    for true in (0.04, -0.01, 0.0):
        n = random.randint(4, 9)
        hard = np.random.normal(0.7, 0.1, n)  # a draw is hard or easy for both
        model, control = (hard + shift + np.random.normal(0, 0.01, n) for shift in (true, 0))
        found = gain(model.tolist(), control.tolist())
        require(isinstance(found, tuple) and len(found) == 2, f"return mean and standard error, not {str(found)[:60]}")
        difference = model - control
        same(found[0], difference.mean(), "the mean difference", scale={-1: "that is control minus model"}, rtol=1e-6)
        causes = {
            "this is the spread of one draw: the mean of n draws varies less": difference.std(ddof=1),
            "divide the squares by n - 1": difference.std() / n**0.5,
            "subtract first: these errors belong to two models on unlike draws": (
                (model.var(ddof=1) + control.var(ddof=1)) / n
            )
            ** 0.5,
        }
        same(found[1], sem(difference), "its standard error", causes=causes, rtol=1e-6)


_DIFFERENCES = "import numpy as np\nd = np.array(model) - np.array(control)\nn = len(d)\n"
did_it_help.refuses("the spread of a draw", "varies less", _DIFFERENCES + "return d.mean(), d.std(ddof=1)")
did_it_help.refuses("n below the line", "n - 1", _DIFFERENCES + "return d.mean(), d.std() / n**0.5")
did_it_help.refuses(
    "the draws not paired",
    "subtract first",
    _DIFFERENCES + "return d.mean(), ((np.var(model, ddof=1) + np.var(control, ddof=1)) / n) ** 0.5",
)
did_it_help.refuses(
    "control minus model", "control minus model", _DIFFERENCES + "return -d.mean(), d.std(ddof=1) / n**0.5"
)
did_it_help.refuses("the mean alone", "return mean and standard error", _DIFFERENCES + "return d.mean()")
did_it_help.refuses("hard-coded for the shown lists", "the mean difference", "return 0.1333, 0.0333")


# 12.5 ---------------------------------------------------------------------------------------------------------------


def _trained():
    """A small network of BERT's architecture whose weights are not those of its first moment."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    network = BertModel(BertConfig(vocab_size=60, max_position_embeddings=24, **sizes))
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight))
    return network.eval()


def _in_order(weight):
    return weight.flatten().sort().values


@exercise(
    "12.5",
    "The same network, untrained",
    "untrained",
    minutes=4,
    hints=[
        "A model of transformers keeps what it was built from: `model.config`.",
        "`type(model)` is its class. A class called with a config builds a network that nobody has trained.",
    ],
)
def the_same_network(untrained):
    for _ in range(2):
        model = _trained()
        found = untrained(model)
        require(type(found) is type(model), f"return a {type(model).__name__}, not {type(found).__name__}")
        mine, theirs = dict(found.named_parameters()), dict(model.named_parameters())
        shapes = {name: tuple(weight.shape) for name, weight in theirs.items()}
        require(
            {name: tuple(weight.shape) for name, weight in mine.items()} == shapes,
            "its parameters must have the names and shapes of the model's: is it the same architecture?",
        )
        name = "embeddings.word_embeddings.weight"
        require(not torch.equal(mine[name], theirs[name]), "its weights are the trained ones: nothing was drawn anew")
        require(mine[name].std() > 0, "all its weights are equal: a network starts from random numbers")
        require(
            not torch.equal(_in_order(mine[name]), _in_order(theirs[name])),
            "these are the trained numbers in another order: they still have the sizes that training gave them",
        )
        same(mine[name].std().item(), model.config.initializer_range, "the spread of its table of tokens", rtol=0.2)


the_same_network.refuses("a copy", "the trained ones", "import copy\nreturn copy.deepcopy(model)")
the_same_network.refuses(
    "zeros",
    "all its weights are equal",
    "for weight in model.parameters():\n    weight.data.zero_()\nreturn model",
)
the_same_network.refuses(
    "shuffled weights",
    "in another order",
    """
    import torch
    for weight in model.parameters():
        weight.data = weight.data.flatten()[torch.randperm(weight.numel())].view(weight.shape)
    return model
    """,
)
the_same_network.refuses(
    "hard-coded: BERT's usual sizes",
    "names and shapes",
    "from transformers import BertConfig, BertModel\nreturn BertModel(BertConfig(num_hidden_layers=1))",
)
the_same_network.refuses("the config", "return a BertModel", "return model.config")


# 12.6 ---------------------------------------------------------------------------------------------------------------

SYMBOLS = {1: "B C N V W Y".split(), 2: "Al Co Cr Cu Fe Mg Mn Mo Nb Ni Ta Ti Zn Zr".split()}


def _formula(lengths, amounts) -> str:
    """A formula whose symbols have these lengths; an amount is a text, and may be empty."""
    symbols = [random.choice(SYMBOLS[length]) for length in lengths]
    return "".join(symbol + amount for symbol, amount in zip(symbols, amounts, strict=True))


@exercise(
    "12.6",
    "Notation alone",
    "notation",
    minutes=5,
    hints=[
        "What does one see who cannot read, and only counts? Digits, points, capitals, characters.",
        "`sum(map(str.isdigit, formula))` counts digits. Return a list of such counts.",
    ],
)
def notation_alone(notation):
    plain, counted = notation("NbTiV"), notation("Al2Ni")
    require(hasattr(plain, "__len__"), f"return a list of numbers, not {str(plain)[:60]}")
    for _ in range(6):
        lengths = random.choices((1, 2), k=random.randint(2, 5))
        amounts = [random.choice(("", "1", "0.5", "0.25", "2")) for _ in lengths]
        first = notation(_formula(lengths, amounts))
        other = notation(_formula(lengths, amounts))
        require(len(first) == len(plain), "every formula must have equally many numbers")
        same(other, first, "the same spelling with other elements", causes=None, rtol=1e-9)
        turned = [amount.replace("5", "8").replace("2", "6").replace("1", "7") for amount in amounts]
        third = notation(_formula(lengths, turned))
        same(third, first, "the same spelling with other amounts", rtol=1e-9)
    require(
        list(plain) != list(counted),
        "NbTiV and Al2Ni look alike to it, but one has a digit: whoever typed the table may tell them apart",
    )
    require(list(notation("AgPb")) != list(notation("Ag0.5Pb0.5")), "AgPb and Ag0.5Pb0.5 look alike to it")


notation_alone.refuses(
    "it knows iron", "other elements", 'return [formula.count("Al"), formula.count("Fe"), len(formula)]'
)
notation_alone.refuses(
    "it adds up the amounts",
    "other amounts",
    'import re\nreturn [sum(map(float, re.findall(r"[0-9.]+", formula))), len(formula)]',
)
notation_alone.refuses("length alone", "look alike", "return [len(formula)]")
notation_alone.refuses("the text itself", "must be numbers", "return list(formula)[:4]")
notation_alone.refuses("hard-coded", "look alike", "return [0, 0]")


# 12.7 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "12.7",
    "Random numbers in its place",
    "in_its_place",
    minutes=5,
    hints=[
        "An embedding gives equal texts equal numbers. So must its control.",
        "`names, which = np.unique(formulas, return_inverse=True)`: draw for `names`, then take the rows `which`.",
    ],
)
def random_numbers(in_its_place):
    for _ in range(3):
        names = [f"Fe{i}Pt{random.randint(1, 9)}" for i in range(1, 301)]
        formulas = random.sample(names * 2, 600)
        columns, seed = random.randint(2, 4), random.randint(0, 999)
        found = np.asarray(in_its_place(list(formulas), columns, seed), float)
        require(found.shape == (600, columns), f"{len(formulas)} formulas, {columns} columns: {found.shape}")
        rows = {name: found[[i for i, other in enumerate(formulas) if other == name]] for name in names}
        require(
            all(np.allclose(two[0], two[1]) for two in rows.values()),
            "two rows of one formula have other numbers: no fit can use these, so the control would be too weak",
        )
        drawn = np.array([two[0] for two in rows.values()])
        require(len(np.unique(drawn.round(9), axis=0)) == len(names), "two formulas have the same numbers")
        again = np.asarray(in_its_place(list(formulas), columns, seed + 1), float)
        require(not np.allclose(again, found), "another seed gives the same numbers: one draw may be lucky")
        same(np.asarray(in_its_place(list(formulas), columns, seed), float), found, "the same seed again")
        same(drawn.mean() + 1, 1, "one more than the mean of all numbers", rtol=0.2)
        same(drawn.std(), 1, "the standard deviation of all numbers", rtol=0.2)


random_numbers.refuses(
    "drawn for each row",
    "no fit can use these",
    "import numpy as np\nreturn np.random.default_rng(seed).normal(size=(len(formulas), columns))",
)
random_numbers.refuses(
    "the seed left out",
    "another seed",
    """
    import numpy as np
    names, which = np.unique(formulas, return_inverse=True)
    return np.random.default_rng(0).normal(size=(len(names), columns))[which]
    """,
)
random_numbers.refuses(
    "a number for each name",
    "another seed",
    """
    import numpy as np
    names, which = np.unique(formulas, return_inverse=True)
    return np.repeat(which[:, None] / len(names), columns, axis=1)
    """,
)
random_numbers.refuses(
    "hard-coded: zeros", "the same numbers", "import numpy as np\nreturn np.zeros((len(formulas), columns))"
)
