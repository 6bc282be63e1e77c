"""Dense training and Radius with 10.8 million parameters: the pair of Radius's appendix in small.

    python benchmarks/radius_pair.py FOLDER          # two hours on two cores; again, to go on
    python benchmarks/radius_pair.py FOLDER --quick  # a test of the script: a tiny model, few steps

Dense and Radius (density 0.4, a new mask every 200 steps, dense for the first fifth) both train
with the same three learning rates, then with two seeds of the first weights at the rate that was
better for each. All by `aiscale train ddp` and `radius`, `aiscale compare` and `aiscale evaluate`.
One process stands for all ranks: they share the mask, so n of them update the weights as one with
the whole batch does, up to rounding. Writes FOLDER/radius_pair.json.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import machine_facts, text_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from aiscale.measure.compare import compare

QUICK = "--quick" in sys.argv
TUNED, STEPS, INTERVAL = (20, 40, 10) if QUICK else (1000, 2000, 200)
RATES, SEEDS, DENSITY = (5e-4, 1e-3, 2e-3), (0, 1), 0.4
TASKS = "aiscale_last_word,aiscale_rolling,aiscale_two_choice"
BASE = ["--model=1x32" if QUICK else "--model=gpt-c", "--length=128", "--held-out=0.1", "--bf16"]
BASE += ["--batch=8", "--micro-batch=8", "--weight-decay=0.1", "--beta2=0.99", "--clip=1"]
BASE += [f"--save-every={INTERVAL}", f"--evaluate-every={INTERVAL}", "--evaluate-batches=32"]


def aiscale(*words):
    command = [sys.executable, "-m", "aiscale", *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def train(folder, method, steps, lr, seed, keep_masks=False):
    """The folder of a run, trained unless it has finished; with all its masks, if they are kept.

    A trainer keeps its newest checkpoints only. So for masks it stops at each of them, and goes on.
    """
    run = folder / f"{method}-{steps}-{lr:g}-{seed}"
    words = [*BASE, f"--text={text_of(folder)}", f"--save={run}", f"--seed={seed}"]
    words += [f"--lr={lr}", f"--min-lr={lr / 10}"]
    words += [f"--warm-up={steps // 10}", f"--decay-steps={steps}"]
    if method == "radius":
        words += [f"--density={DENSITY}", f"--interval={INTERVAL}", f"--dense-until={steps // 5}"]
    for until in range(INTERVAL, steps + 1, INTERVAL) if keep_masks else [steps]:
        masks = folder / f"masks-{run.name}" / f"{until:08}.pt"
        if masks.exists() if keep_masks else has_finished(run):
            continue
        aiscale("train", "radius" if method == "radius" else "ddp", *words, f"--steps={until}")
        if keep_masks:
            masks.parent.mkdir(exist_ok=True)
            torch.save(masks_of(run / f"{until:08}"), masks)
    return run


def has_finished(run):
    note = run / "run.json"
    return note.exists() and json.loads(note.read_text())["status"] == "finished"


def masks_of(checkpoint):
    """{name: mask (N,)} of a checkpoint, without the tensors that are always sent whole."""
    with TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder) / "all.pt")
        masks = torch.load(Path(folder) / "all.pt", mmap=True)["mask"]
        return {name: mask.clone() for name, mask in masks.items() if not mask.all()}


def kept(run):
    """[(step, share of the mask's entries that the next one has, too)]; by chance: the density."""
    files = sorted((run.parent / f"masks-{run.name}").glob("*.pt"))
    found = [(int(file.stem), torch.load(file)) for file in files]
    found = [(step, masks) for step, masks in found if masks]  # at first all is sent
    shares = []
    for (step, before), (_, after) in pairwise(found):
        both = sum(int((before[name] & after[name]).sum()) for name in before)
        shares.append((step, both / sum(int(mask.sum()) for mask in before.values())))
    return shares


def evaluated(run):
    results = json.loads(aiscale("evaluate", run, f"--tasks={TASKS}", "--json"))["results"]
    return {
        task: {k: v for k, v in row.items() if not isinstance(v, str)}
        for task, row in results.items()
    }


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    tuned, runs = {}, {}
    for method in ("dense", "radius"):
        for lr in RATES:
            (row,) = compare([train(folder, method, TUNED, lr, SEEDS[0])])
            tuned.setdefault(method, {})[lr] = row["val_ppl"][0]
    for method, found in tuned.items():
        lr = min(found, key=found.get)
        runs[method] = []
        for seed in SEEDS:
            keep_masks = method == "radius" and seed == SEEDS[0]
            runs[method].append(train(folder, method, STEPS, lr, seed, keep_masks))
    print(aiscale("compare", *runs["dense"], *runs["radius"], f"--out={folder / 'compare'}"))
    result = {
        "machine": machine_facts(),
        "settings": BASE,
        "val_ppl_by_rate": tuned,
        "compare": json.loads((folder / "compare/compare.json").read_text()),
        "mask_kept": kept(runs["radius"][0]),
        "mask_kept_by_chance": DENSITY,
        "tasks": {run.name: evaluated(run) for group in runs.values() for run in group},
    }
    text = json.dumps(result, indent=1).replace(str(folder), "runs")
    (folder / "radius_pair.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
