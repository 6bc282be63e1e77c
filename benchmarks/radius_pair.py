"""Dense training and Radius with a model of 10.8 million parameters: the pair of the appendix of Radius in small.

    python benchmarks/radius_pair.py FOLDER          # two hours on two cores; call it again to go on
    python benchmarks/radius_pair.py FOLDER --quick  # a test of the script: a tiny model, some steps

Dense and Radius (density 0.4, a new mask every 200 steps, dense for the first fifth) both train with the same three
learning rates, then with two seeds at the rate that was better for each. All by `aiscale train`, `aiscale compare` and
`aiscale evaluate`. One process stands for all ranks: they share the mask, so n of them update the weights as one with
the whole batch does, up to rounding. Writes FOLDER/radius_pair.json.
"""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import machine_facts
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from aiscale.cost.compression import is_exempt
from aiscale.study.compare import compare

QUICK = "--quick" in sys.argv
TUNED, STEPS, INTERVAL = (20, 40, 4) if QUICK else (1000, 2000, 200)
RATES, SEEDS, DENSITY = (5e-4, 1e-3, 2e-3), (0, 1), 0.4
TASKS = "aiscale_last_word,aiscale_rolling,aiscale_two_choice"
MODEL = ("n_layer=1", "n_head=2", "d_model=32") if QUICK else ()
BASE = [*(f"model.{text}" for text in (*MODEL, "vocab_size=256", "max_seq_len=256"))]
BASE += ["data.corpus=stdlib", "data.tokenizer=byte", "parallel.strategy=ddp", "optimizer.schedule=cosine"]
BASE += ["optimizer.clip_norm=1.0", "optimizer.weight_decay=0.1", "optimizer.beta2=0.99"]
BASE += ["loop.epochs=0", "loop.seq_len=128", "loop.global_batch=8", "loop.precision=bf16", "loop.eval_batches=32"]
BASE += ["loop.device=cpu", f"loop.checkpoint_every={INTERVAL}", f"loop.eval_every={INTERVAL}"]


def aiscale(*words):
    return subprocess.run(["aiscale", *map(str, words)], check=True, stdout=subprocess.PIPE, text=True).stdout


def train(folder, method, steps, lr, seed, *others):
    """The folder of a run, trained unless it has finished."""
    name = f"{method}-{steps}-{lr:g}-{seed}"
    settings = [f"name={name}", *BASE, f"loop.steps={steps}", *others]
    settings += [f"optimizer.{key}={value}" for key, value in (("lr", lr), ("min_lr", lr / 10))]
    settings += [f"optimizer.warmup_steps={steps // 10}", f"loop.seed={seed}", f"data.seed={seed}"]
    if method == "radius":
        chosen = {"method": method, "density": DENSITY, "interval": INTERVAL, "warmup_steps": steps // 5}
        settings += [f"compression.{key}={value}" for key, value in chosen.items()]
    note = folder / name / "run.json"
    if not note.exists() or json.loads(note.read_text())["status"] != "finished":
        options = (f"--set={setting}" for setting in settings)
        aiscale("train", "--recipe=gpt-c", f"--runs-dir={folder}", "--resume-if-any", "--quiet", *options)
    return folder / name


def masks_of(checkpoint):
    """{name: mask (N,)} of a checkpoint, without the tensors that are always sent whole."""
    with TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint, Path(folder) / "all.pt")
        masks = torch.load(Path(folder) / "all.pt", mmap=True)["compression"]["mask"]
        return {name: mask.clone() for name, mask in masks.items() if not is_exempt(name)}


def kept(run):
    """[(step, share of the mask's entries that the next mask, an interval later, has too)]; by chance: the density."""
    folders = sorted((run / "checkpoints").glob("step_*"))
    found = [(int(folder.name.removeprefix("step_")), masks_of(folder)) for folder in folders]
    found = [(step, masks) for step, masks in found if not all(bool(mask.all()) for mask in masks.values())]
    shares = []
    for (step, before), (_, after) in pairwise(found):
        both = sum(int((before[name] & after[name]).sum()) for name in before)
        shares.append((step, both / sum(int(mask.sum()) for mask in before.values())))
    return shares


def evaluated(run):
    results = json.loads(aiscale("evaluate", run, f"--tasks={TASKS}", "--json"))["results"]
    return {task: {k: v for k, v in row.items() if not isinstance(v, str)} for task, row in results.items()}


def main(folder):
    tuned, runs = {}, {}
    for method in ("dense", "radius"):
        for lr in RATES:
            tuned.setdefault(method, {})[lr] = compare([train(folder, method, TUNED, lr, SEEDS[0])])[0]["val_ppl"][0]
    for method, found in tuned.items():
        lr = min(found, key=found.get)
        keep = STEPS // INTERVAL + 1 if method == "radius" else 1
        runs[method] = [train(folder, method, STEPS, lr, seed, f"loop.keep_checkpoints={keep}") for seed in SEEDS]
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
