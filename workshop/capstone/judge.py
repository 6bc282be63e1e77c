"""Judges a capstone: a training script for four ranks, with little memory and a slow link. README.md is the task.

    python workshop/capstone/judge.py my/capstone/train.py
    python workshop/capstone/judge.py my/capstone/train.py --micro-batch 4      # further words are for the script

Four verdicts, one line each: it trains as one process does; what a rank holds; what a step sends; what Frontier's rules
say of its job. The exit status is 0 if all four hold.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from aiscale.lesson.scripts import changed
from aiscale.measure.referee.judge import Question, judge, say_progress

HERE = Path(__file__).resolve().parent
OWN = HERE.parent / "your_own"
RANKS, STEPS = 4, 3
MEMORY_MIB = 96  #: that a rank may hold at once, of tensors and what torch needs beside
LINK_MBIT = 100  #: a second, of each rank's link
MESSAGES_S = 6  #: that the messages of a step may take on this link
#: The model of the task, in the script that is right: train.py with this change.
CHANGE = """\
-    model = (Llama() if args.llama else GPT()).to(device)
+    model = Llama(width=320, layers=4).to(device)
"""
#: Of a buffer, what passes each rank's link, for n ranks in a ring. (A broadcast or scatter is no part of a step.)
SHARE = {
    "all_reduce": 2 * (RANKS - 1) / RANKS,
    "all_gather": (RANKS - 1) / RANKS,
    "reduce_scatter": (RANKS - 1) / RANKS,
}
#: What only the site's own machines can tell.
ON_SITE = ("environment", "modules", "Slurm")


@dataclass(frozen=True)
class Line:
    what: str
    holds: bool
    text: str

    def __str__(self):
        return f"{'✓' if self.holds else '✗'} {self.what:10} {self.text}"


def equality(script, arguments):
    """The referee's verdict: four ranks against one process of train.py with the task's model."""
    with tempfile.TemporaryDirectory() as folder:
        serial = Path(folder, "train.py")
        serial.write_text(changed((OWN / "train.py").read_text(), CHANGE))
        for helper in ("llama.py", "model.py", "checkpoint.py", "shared_folder.py"):
            Path(folder, helper).write_bytes((OWN / helper).read_bytes())
        save = ("--save", "{TMP}/checkpoint")
        question = Question(script, (*save, *arguments), RANKS, STEPS, limit_s=300, against=(serial, save))
        verdict = judge(question, say_progress)
    return Line("equal", verdict.status == 0, str(verdict).replace("\n", "\n  "))


def measured(script, arguments):
    """For each rank: {"peak_bytes", "sent": {operation: bytes in a step}}; a text if the script failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["torchrun", f"--nproc-per-node={RANKS}", HERE / "measured_rank.py", folder, script]
        command += ["--steps", STEPS, "--save", f"{folder}/checkpoint", *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True)
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank*.json"))]
    return found if len(found) == RANKS else done.stderr[-2000:]


def memory(ranks):
    peak = max(rank["peak_bytes"] for rank in ranks) / 2**20
    return Line("memory", peak <= MEMORY_MIB, f"{peak:.0f} MiB on the rank that holds most, of {MEMORY_MIB}")


def messages(ranks):
    totals = [sum(rank["sent"].values()) for rank in ranks]
    sent = ranks[totals.index(max(totals))]["sent"]
    wire = sum(nbytes * SHARE.get(operation, 0) for operation, nbytes in sent.items()) / STEPS
    seconds = 8 * wire / (LINK_MBIT * 1e6)
    parts = ", ".join(f"{operation} {nbytes / STEPS / 1e6:.0f} MB" for operation, nbytes in sent.items())
    text = f"{seconds:.1f} s of messages in a step, of {MESSAGES_S} at {LINK_MBIT} Mbit/s (buffers: {parts})"
    return Line("messages", seconds <= MESSAGES_S, text)


def job(script, arguments):
    launcher = HERE.parents[1] / "launchers" / "frontier" / "your_own.sbatch"
    command = [
        sys.executable,
        "-m",
        "aiscale",
        "submit",
        "--dry-run",
        "--site",
        "frontier",
        launcher,
        script,
        *arguments,
    ]
    said = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    wrong = [line for line in said.splitlines() if line.startswith("✗") and line.split()[1] not in ON_SITE]
    price = [line.removeprefix("✓ price").strip() for line in said.splitlines() if line.startswith("✓ price")]
    if wrong or not price:
        return Line("job", False, "; ".join(wrong) or said.strip())
    return Line("job", True, f"{price[0]}; {', '.join(ON_SITE)} are the site's to check")


def main(words):
    if not words or not Path(words[0]).is_file():
        sys.exit("judge.py SCRIPT.py [its own arguments]: the first word is no file")
    script, arguments = Path(words[0]).resolve(), words[1:]
    lines = [equality(script, arguments)]
    print(lines[0], flush=True)
    ranks = measured(script, arguments)
    if isinstance(ranks, str):
        lines.append(Line("memory", False, f"the script stopped under torchrun: {ranks}"))
    else:
        lines += [memory(ranks), messages(ranks)]
    lines.append(job(script, arguments))
    print(*lines[1:], sep="\n")
    return 0 if all(line.holds for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
