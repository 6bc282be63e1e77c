"""`python -m kept_by_megatron CASES`, a rank: what autograd keeps of a forward pass of megatron.

CASES: [[options, layers], ...], as JSON. Rank 0 prints {"kept": bytes of each rank, "planned": ...}
for each case.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist

from aiscale.plan import cost
from aiscale.plan import presets as plans
from aiscale.plan.options import run_of
from aiscale.train import megatron, presets
from aiscale.train.megatron_model import grid
from aiscale.train.options import options
from aiscale.train.ranks import start
from aiscale.train.sharded_checkpoint import gather

COMMON = "--model measured --length 64 --batch 4 --micro-batch 2 --pp 1"


def kept_bytes(args) -> int:
    """Of one micro-batch, without weights and gradients."""
    model, _ = megatron.build(args)
    held = set()
    for weight in model[0].parameters():
        held |= {part.untyped_storage().data_ptr() for part in (weight, weight.main_grad)}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            # alive, so that no other tensor gets the same address
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(0, 67, (2, 65))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        megatron.compute([tokens], model)
    return sum(storage.nbytes() for storage in kept.values())


def measure(words: str, layers: int) -> dict:
    shape = {"layers": layers, "heads": 4, "width": 128, "vocabulary": 67, "context": 64}
    for table in (plans, presets):
        table.presets()["measured"] = {**shape, "tied": True}
    args = options("megatron").parse_args(f"{COMMON} {words}".split())
    megatron.parallel_state.initialize_model_parallel(
        **grid(args), create_gloo_process_groups=False
    )
    megatron.tensor_parallel.model_parallel_cuda_manual_seed(0)
    kept, run = kept_bytes(args), run_of("megatron", args)
    megatron.parallel_state.destroy_model_parallel()
    parts = cost.megatron_activation_bytes_by_part(run, dist.get_world_size(), dist.get_rank())
    theirs = cost.korthikanti_activation_bytes(
        run.model, 2, 64, tp=args.tp, sequence_parallel=args.sequence_parallel
    )
    return {"kept": gather(kept), "planned": gather(sum(parts.values())), "korthikanti": theirs}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        start(options("megatron").parse_args(["--pp", "1", "--save", os.path.join(folder, "run")]))
        found = [measure(*case) for case in json.loads(sys.argv[1])]
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.destroy_process_group()
