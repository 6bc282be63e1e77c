"""Five deaths, twice: three replicas that go on without the dead one, and three ranks that restart.

    python benchmarks/going_on.py OUT.json     # about four minutes

Both train the lesson's GPT on the same batches; each sequence takes 20 ms more, as if each rank had
a device of its own. After each of the steps KILLED_AFTER one rank gets SIGKILL. `going_on` is
train_elastic.py under keep_going.py; `restarting` is train_ddp.py under torchrun, which saves after
every 10 steps. A row of `steps` is [seconds since the start, step, loss], as it was printed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
from common import machine_facts

from aiscale.lesson.replicas import Replicas

OWN = Path(__file__).parents[1] / "workshop" / "your_own"
RANKS, STEPS, BATCH, SAVE_EVERY, SEQUENCE_S = 3, 260, 12, 10, 0.02
#: step: rank; five steps are done again on average
KILLED_AFTER = {33: 2, 77: 1, 125: 0, 171: 2, 214: 1}


def going_on(folder):
    """Its steps, and for each death when the others went on and when the new one was healed."""
    options = [f"--steps={STEPS}", f"--batch={BATCH}", f"--sequence-s={SEQUENCE_S}"]
    deaths = []
    with Replicas(folder, *options, replicas=RANKS) as job:
        for step, rank in KILLED_AFTER.items():
            death = {}
            for name, line in (
                ("killed_s", f"step {step} loss"),
                ("without_s", f"members {RANKS - 1} "),
                ("healed_s", f"members {RANKS} "),
            ):
                job.until(line, limit_s=600)
                death[name] = job.said[-1][0]
                if name == "killed_s":
                    job.kill(f"r{rank}")
            deaths.append(death)
        job.wait(limit_s=600)
    steps = [row[:3] for row in job.steps()]
    return {"steps": steps, "deaths": deaths, "states": sorted(set(job.states().values()))}


def restarting(folder):
    """Its steps, and for each death when a step was done again."""
    script = folder / "train_ddp.py"
    update = "        optimizer.step()\n"
    slow = f"        __import__('time').sleep({SEQUENCE_S} * len(batch))\n"
    script.write_text((OWN / script.name).read_text().replace(update, slow + update))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", "--max-restarts=20", "--monitor-interval=0.1"]
    command += [script.name, f"--steps={STEPS}", f"--batch={BATCH}", f"--save-every={SAVE_EVERY}"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    kills, steps, deaths, began = dict(KILLED_AFTER), [], [], time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, cwd=folder, env=env, **pipes) as job:
        for line in job.stdout:
            if not (found := re.match(r"step (\d+) loss (\S+)", line)):
                continue
            now, step = round(time.monotonic() - began, 3), int(found[1])
            if steps and step <= steps[-1][1]:
                deaths[-1]["again_s"] = now
            steps.append([now, step, float(found[2])])
            if step in kills:
                children = psutil.Process(job.pid).children()
                ranks = [child for child in children if script.name in child.cmdline()]
                ranks[kills.pop(step)].kill()
                deaths.append({"killed_s": now})
    if job.returncode:
        raise SystemExit(f"torchrun ended with status {job.returncode}")
    return {"steps": steps, "deaths": deaths}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT.json")
    args = parser.parse_args()
    found = {
        "ranks": RANKS,
        "batch": BATCH,
        "save_every": SAVE_EVERY,
        "sequence_s": SEQUENCE_S,
        "killed_after": list(KILLED_AFTER),
    }
    with TemporaryDirectory() as folder:
        folder = Path(folder, "scripts")
        shutil.copytree(OWN, folder)
        for way in (going_on, restarting):
            found[way.__name__] = way(folder)
            seconds, step, loss = found[way.__name__]["steps"][-1]
            print(f"{way.__name__}: {seconds:.1f} s to step {step}, loss {loss}")
    args.out.write_text(json.dumps({"machine": machine_facts(), **found}) + "\n")
