"""workshop/from_scratch beside PyTorch, and the 50 epochs of its authors.

    # seconds of a step at the full recipe: minutes, on a quiet machine
    OMP_NUM_THREADS=1 python benchmarks/from_scratch.py
    # 50 epochs by one process, by two ranks and by our package
    python benchmarks/from_scratch.py FOLDER
    # seconds to write one text and two, with a model of that size: minutes
    python benchmarks/from_scratch.py --inference FILE.json

The first prints medians of rounds in which all take turns, and their ratios, one thread each. The
second takes hours on two cores, goes on if it was cut off, and writes FOLDER/from_scratch.json.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from common import machine_facts
from torch import nn

from aiscale.train.record import read_metrics
from aiscale.train.trained import open_folder

WORKSHOP = Path(__file__).parents[1] / "workshop"
sys.path.insert(0, str(WORKSHOP))  # before this script, which has the name of its package
from from_scratch.corpus import corpus  # noqa: E402
from from_scratch.tokenizer import Tokenizer, split  # noqa: E402

ROUNDS, STEPS = 3, 3
WORDS = 128  #: of a text whose seconds are measured
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def torch_step_s():
    """Seconds of a training step of the same shape in eager PyTorch, after one to warm up."""
    torch.set_num_threads(1)
    T, width = 256, 384
    block = dict(dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
    words, places, head = nn.Embedding(172, width), nn.Embedding(T, width), nn.Linear(width, 172)
    blocks = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(width, 6, 4 * width, **block), 6, nn.LayerNorm(width), False
    )
    model = nn.ModuleList([words, places, blocks, head])
    adam = torch.optim.Adam(model.parameters(), 3e-4)
    text, mask = torch.randint(172, (16, T + 1)), nn.Transformer.generate_square_subsequent_mask(T)
    for step in range(STEPS + 1):
        if step == 1:
            began = time.perf_counter()
        x = words(text[:, :-1]) + places.weight
        logits = head(blocks(x, mask=mask, is_causal=True))
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        adam.step()
        adam.zero_grad()
    return (time.perf_counter() - began) / STEPS


def step_s(*start):
    """Seconds of a step of `from_scratch.train`, the first one left out."""
    command = [*start, sys.executable, "-m", "from_scratch.train", "--steps", str(STEPS + 1)]
    output = subprocess.run(
        command, cwd=WORKSHOP, env=ONE_THREAD, capture_output=True, text=True, check=True
    ).stdout
    return median([float(s) for s in re.findall(r"  ([\d.]+) s$", output, re.M)][1:])


def speed():
    """Rounds of (PyTorch, one process, two ranks): seconds of a step, one thread each."""
    rounds = []
    for _ in range(ROUNDS):
        rounds.append((torch_step_s(), step_s(), step_s("mpiexec", "-n", "2")))
        print("PyTorch {:.2f} s, one process {:.2f} s, two ranks {:.2f} s".format(*rounds[-1]))
    longer = median(one / torch for torch, one, _ in rounds)
    print(f"one process takes {longer:.2f} times PyTorch's seconds")
    faster = median(one / two for _, one, two in rounds)
    print(f"two ranks are {faster:.2f} times as fast as one process")
    return rounds


def experiment(folder):
    """Losses of every step, the sum of all steps' seconds, and texts of 40 words.
    Then the speed of a few steps."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = {
        "one process": trained(folder / "one_process"),
        "two ranks": trained(folder / "two_ranks", "mpiexec -n 2"),
    }
    runs["our package"] = trained_by_package(folder)
    step_s = dict(zip(("PyTorch", *runs), zip(*speed(), strict=True), strict=False))
    results = {"machine": machine_facts(), "runs": runs, "step_s": step_s}
    (folder / "from_scratch.json").write_text(json.dumps(results) + "\n")


def trained(path, start=""):
    """The authors' recipe, from its checkpoint if there is one."""
    log, file = path.with_suffix(".log"), path.with_suffix(".npz")
    command = [sys.executable, "-m", "from_scratch.train", "--checkpoint", file]
    with open(log, "a") as output:
        subprocess.run(
            [*start.split(), *command], cwd=WORKSHOP, env=ONE_THREAD, stdout=output, check=True
        )
    lines = re.findall(r"^step +(\d+)  loss (\S+)  (\S+) s$", log.read_text(), re.M)
    # the last, if one ran twice
    steps = {int(step): (float(loss), float(seconds)) for step, loss, seconds in lines}
    losses, seconds = zip(*(steps[step] for step in sorted(steps)), strict=True)
    text = output_of("from_scratch.inference", file, cwd=WORKSHOP)
    return {"losses": losses, "train_s": round(sum(seconds)), "texts": text.splitlines()[:-1]}


def trained_by_package(folder):
    """The same job by the trainer serial, its model gpt-c, on all cores; a word is one byte."""
    words = Tokenizer(split(corpus()))
    (folder / "corpus.bytes").write_bytes(bytes(words.encode(corpus())))
    shape = (
        "--model=gpt-c --length=256 --batch=16 --micro-batch=16 --lr=3e-4 --steps=640 "
        "--save-every=100"
    )
    output_of(
        "aiscale",
        "train",
        "serial",
        "--text=corpus.bytes",
        "--save=gpt-c",
        *shape.split(),
        cwd=folder,
    )
    steps = read_metrics(folder / "gpt-c")
    model, _ = open_folder(folder / "gpt-c")
    prompt = torch.tensor([words.encode("the")[:1]])
    torch.manual_seed(0)
    how = {"do_sample": True, "top_k": 40, "pad_token_id": 0}
    every = torch.ones_like(prompt)
    (text,) = model.generate(prompt, attention_mask=every, max_new_tokens=40, **how)
    # the words; the model has 256 rows
    known = [number for number in text.tolist() if number < 172]
    losses = [round(step["loss"], 6) for step in steps]
    seconds = round(sum(step["seconds"] for step in steps))
    return {"losses": losses, "train_s": seconds, "texts": [words.decode(known)]}


def inference(file):
    """Seconds to write one text and two, by one process and by two ranks, which take turns.
    The weights are those of a first step: a word takes as long whatever they are."""
    starts = {"one process": "", "two ranks": "mpiexec -n 2"}
    seconds = {name: {"1": [], "2": []} for name in starts}
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "full.npz")
        output_of("from_scratch.train", "--steps=1", f"--checkpoint={kept}", cwd=WORKSHOP)
        for _ in range(ROUNDS):
            for name, start in starts.items():
                for n_texts in ("1", "2"):
                    seconds[name][n_texts].append(inference_s(kept, n_texts, start))
            print({name: {n: each[-1] for n, each in by.items()} for name, by in seconds.items()})
    facts = {"recipe": "full", "words": WORDS, "seconds_by_texts": seconds}
    file.write_text(json.dumps({"machine": machine_facts(), **facts}, indent=1) + "\n")


def inference_s(kept, n_texts, start):
    """The seconds that `from_scratch.inference` prints."""
    words = [kept, "--samples", n_texts, "--words", str(WORDS)]
    command = [*start.split(), sys.executable, "-m", "from_scratch.inference", *words]
    output = subprocess.run(
        command, cwd=WORKSHOP, env=ONE_THREAD, capture_output=True, text=True, check=True
    ).stdout
    return float(re.search(r"([\d.]+) s$", output.strip())[1])


def output_of(module, *words, cwd):
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True).stdout


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inference"]:
        inference(Path(sys.argv[2]))
    elif sys.argv[1:]:
        experiment(Path(sys.argv[1]).absolute())
    else:
        speed()
