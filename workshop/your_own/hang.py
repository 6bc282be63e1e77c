"""Two ranks that do not agree, to practise on. Each mistake is one that training scripts make.

torchrun --nproc-per-node=2 hang.py --mistake uneven            # one rank has a batch more: both wait, for 5 minutes
kill -USR1 PID                                                  # then each prints where it stands
py-spy dump --pid PID                                           # the same, without a line in the script
TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun --nproc-per-node=2 hang.py --mistake shape
"""

import argparse
import faulthandler
import json
import os
import signal
from datetime import timedelta

os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the flight recorder keeps the last 2000 collectives

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

faulthandler.register(signal.SIGUSR1)  # a line for every training script


def train(batches, size, group):
    for _ in range(batches):
        dist.all_reduce(torch.ones(size), group=group)  # as DDP does with gradients


def say_what_was_recorded():
    """The last collectives that this rank began. With NCCL torch writes them to a file when a time-out has passed."""
    for entry in json.loads(_distributed_c10d._dump_fr_trace_json())["entries"][-2:]:
        number, name, sizes = entry["collective_seq_id"], entry["profiling_name"], entry["input_sizes"]
        print(f"rank {dist.get_rank()} recorded number {number}: {name} {sizes}", flush=True)


def main(args):
    dist.init_process_group("gloo")
    dist.barrier()  # ranks may start minutes apart
    rank, patience = dist.get_rank(), timedelta(seconds=args.patience)
    group = dist.new_group(timeout=patience)
    print(f"rank {rank} has started", flush=True)
    try:
        train(3, 1000, group)
        if args.mistake == "uneven":
            train(rank, 1000, group)  # rank 1 has one batch more: its sampler did not drop the last
        if args.mistake == "shape":
            train(1, 1000 + rank, group)  # rank 1 has a parameter more
        dist.monitored_barrier(group, timeout=patience)  # rank 0 names who does not come
    finally:
        say_what_was_recorded()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mistake", choices=["uneven", "shape"], default="uneven")
    parser.add_argument("--patience", type=float, default=300, metavar="S", help="how long ranks wait for each other")
    main(parser.parse_args())
