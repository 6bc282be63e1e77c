"""`aiscale train NAME [--nproc N] OPTIONS`: a trainer on the ranks of this machine."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from aiscale.launch import launch
from aiscale.processes import GPU_DEVICES, usable_cores
from aiscale.train.options import TRAINERS
from aiscale.train.refusal import refuse

#: With these empty, torch sees no GPU.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def main(argv: list[str]) -> int:
    """Run the trainer that argv names; what is left of argv is its own."""
    name, *rest = argv
    if name.startswith("-"):
        refuse(
            f"{name}: first the trainer, then its options: aiscale train ddp --nproc 4 --lr 1e-3"
        )
    if name not in TRAINERS:
        refuse(f"{name} is no trainer: choose one of {', '.join(TRAINERS)}")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    args, options = parser.parse_known_args(rest)
    module = f"aiscale.train.{name}"
    if args.nproc is None or {"-h", "--help"} & set(options):
        sys.argv = [name, *options]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    if args.nproc < 1:
        refuse(f"--nproc is {args.nproc}: it must be at least 1")
    if "RANK" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ:
        refuse("--nproc starts ranks, but this process is one already: leave --nproc out")
    threads = max(1, len(usable_cores()) // args.nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if share_a_gpu(args.nproc):
        os.environ.update(dict.fromkeys(VISIBLE, ""))
    preload = ["torch._dynamo", "torch.distributed.checkpoint", "aiscale.train.data"]
    return launch(args.nproc, ["-m", module, *options], preload=preload)


def share_a_gpu(nproc: int) -> bool:
    """Whether GPUs are too few for these ranks; NCCL refuses two on one. Says so."""
    if not any(map(os.path.exists, GPU_DEVICES)):
        return False
    import torch  # takes seconds

    gpus = torch.cuda.device_count()
    if not 0 < gpus < nproc:
        return False
    said = f"{nproc} ranks, and GPUs here: {gpus}; no two ranks can share one: all compute on CPUs"
    print(f"aiscale: {said}", file=sys.stderr, flush=True)
    return True
