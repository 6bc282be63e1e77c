"""The same training for a model that does not fit on one GPU: each rank has a slice of every tensor.

    torchrun --nproc-per-node=4 fsdp.py --steps 40
    srun bash with_slurm.sh python fsdp.py --micro-batch 1   # ranks x micro-batch must divide --batch

A run that was cut off goes on from its last checkpoint, also on another number of ranks.
"""

import argparse
import itertools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp import connect
from model import LM, TEXT, read_windows
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


def build(device):
    """The model, of which this rank holds a slice of every tensor."""
    with torch.device("meta"):  # shapes without memory: the whole model need not fit anywhere
        model = LM()
    for block in model.blocks:
        fully_shard(block)  # gathered, used and freed one at a time
    fully_shard(model)  # what is left: embeddings and head
    model.to_empty(device=device)
    torch.manual_seed(0)
    # Rank 0 makes the weights of train.py and deals them out, as it would weights from a file.
    whole = LM() if dist.get_rank() == 0 else None
    deal = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(model, whole.state_dict() if whole else {}, options=deal)
    for name, buffer in model.named_buffers():  # to_empty left garbage, and a state dict lacks the non-persistent ones
        if whole:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)
    return model


def save(path, model, optimizer, steps):
    weights, moments = states.get_state_dict(model, optimizer)  # this rank's slices, under the names of whole tensors
    saved = {"model": weights, "optimizer": moments, "steps": steps}
    dcp.save(saved, checkpoint_id=Path(path) / f"{steps:06}")  # each rank writes its own


def load(path, model, optimizer):
    """Loads the newest whole checkpoint; returns its number of steps."""
    whole = sorted(Path(path).glob("*/.metadata"))  # written last
    if not whole:
        return 0
    weights, moments = states.get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "steps": 0}
    dcp.load(saved, checkpoint_id=whole[-1].parent)  # reads what this rank needs, whoever wrote it
    states.set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return saved["steps"]


def main(args):
    device = connect()
    # --batch is that of the whole job. On more ranks it stays as it is, and so do learning rate and steps.
    micro_batches, rest = divmod(args.batch, args.micro_batch * dist.get_world_size())
    assert micro_batches and not rest, f"--batch is no multiple of --micro-batch x {dist.get_world_size()} ranks"
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    windows = read_windows(args.text)
    steps_per_epoch = len(windows) // args.batch
    sampler = DistributedSampler(windows, drop_last=True)  # deals out one shuffled order among the ranks
    first = load(args.save, model, optimizer)

    for step in range(first, args.steps):
        if step % steps_per_epoch == 0 or step == first:  # each epoch has an order of its own
            sampler.set_epoch(step // steps_per_epoch)
            seen = step % steps_per_epoch * micro_batches  # of this epoch, before the run was cut off
            loader = itertools.islice(DataLoader(windows, args.micro_batch, sampler=sampler), seen, None)
        optimizer.zero_grad()
        loss = 0
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i + 1 == micro_batches)  # send gradients once a step
            part = model(next(loader).to(device)) / micro_batches
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all slices, not of this rank's
        optimizer.step()
        dist.all_reduce(loss, dist.ReduceOp.AVG)  # each rank knows the loss of its own share
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences that a rank computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="checkpoints", help="a folder; training goes on from the last one in it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    main(parser.parse_args())
