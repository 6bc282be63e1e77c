"""A job of torchrun that loses a rank and starts all of them again: what lesson 16 measures."""

import os
import subprocess
import time

import psutil


def lose_a_rank(folder, script, *options, ranks, kill_after):
    """[(seconds, step)] as printed, and the seconds at which the last rank was killed, after a step of that number."""
    command = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1", "--monitor-interval=0.1"]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else the new ranks may look for the old ones
    printed, killed_s, began = [], None, time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([*command, script, *options], cwd=folder, env=env, **pipes) as job:
        for line in job.stdout:
            if not line.startswith("step "):
                continue
            step = int(line.split()[1])
            printed.append((time.monotonic() - began, step))
            if step == kill_after and killed_s is None:
                running = [child for child in psutil.Process(job.pid).children() if script in child.cmdline()]
                running[-1].kill()
                killed_s = time.monotonic() - began
    if job.returncode:
        raise RuntimeError(f"torchrun ended with status {job.returncode}")
    return printed, killed_s
