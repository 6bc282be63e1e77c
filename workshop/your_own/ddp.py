"""The same training on many GPUs, or CPU cores: each rank has the whole model, and a share of each batch.

    torchrun --nproc-per-node=4 ddp.py --steps 40
    srun bash with_slurm.sh python ddp.py --micro-batch 1   # ranks x micro-batch must divide --batch

A run that was cut off goes on from its checkpoint: start it again with the same --save.
"""

import argparse
import contextlib
import gc
import itertools
import os

import torch
import torch.distributed as dist
from model import LM, TEXT, read_windows
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def connect():
    """Joins the other ranks; returns this rank's device. Who is who stands in the environment."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    # The n-th rank of a node has its n-th GPU; where Slurm shows a rank only its own, that is number 0.
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def save(path, model, optimizer, steps):
    if dist.get_rank() == 0:  # all ranks hold the same
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, f"{path}.part")
        os.replace(f"{path}.part", path)  # a job that is killed here leaves the old file or the new one, whole


def main(args):
    device = connect()
    # --batch is that of the whole job. On more ranks it stays as it is, and so do learning rate and steps.
    micro_batches, rest = divmod(args.batch, args.micro_batch * dist.get_world_size())
    assert micro_batches and not rest, f"--batch is no multiple of --micro-batch x {dist.get_world_size()} ranks"
    torch.manual_seed(0)
    model = LM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    windows = read_windows(args.text)
    steps_per_epoch = len(windows) // args.batch
    sampler = DistributedSampler(windows, drop_last=True)  # deals out one shuffled order among the ranks

    first = 0
    if os.path.exists(args.save):
        saved = torch.load(args.save, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["steps"]
    model = DistributedDataParallel(model)

    for step in range(first, args.steps):
        if step % steps_per_epoch == 0 or step == first:  # each epoch has an order of its own
            sampler.set_epoch(step // steps_per_epoch)
            seen = step % steps_per_epoch * micro_batches  # of this epoch, before the run was cut off
            loader = itertools.islice(DataLoader(windows, args.micro_batch, sampler=sampler), seen, None)
        optimizer.zero_grad()
        loss = 0
        for i in range(micro_batches):
            with model.no_sync() if i + 1 < micro_batches else contextlib.nullcontext():  # send gradients once a step
                part = model(next(loader).to(device)) / micro_batches
                part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.save, model.module, optimizer, step + 1)
    del model
    gc.collect()  # DDP ends before the group that it holds: the other way round, gloo may hang at exit
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences that a rank computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="model.pt", help="the checkpoint; if it is there, training goes on from it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    main(parser.parse_args())
