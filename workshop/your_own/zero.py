"""The same training by DeepSpeed: optimizer states and gradients divided among the ranks (ZeRO-2), as its JSON says.

    torchrun --nproc-per-node=4 zero.py --steps 40
    srun bash with_slurm.sh python zero.py --micro-batch 1   # ranks x micro-batch must divide --batch

A run that was cut off goes on from its last checkpoint, on the same number of ranks.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from ddp import connect
from model import LM, TEXT, read_windows
from torch.utils.data import DataLoader, DistributedSampler

if not torch.cuda.is_available():  # else DeepSpeed compiles an all-reduce through shared memory: a minute
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def main(args):
    device = connect()
    deepspeed.init_distributed(dist.get_backend())  # takes the process group that is there
    torch.manual_seed(0)
    model = LM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    config = json.loads(Path(args.config).read_text())
    config |= {"train_batch_size": args.batch, "train_micro_batch_size_per_gpu": args.micro_batch}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    windows = read_windows(args.text)
    steps_per_epoch = len(windows) // args.batch
    sampler = DistributedSampler(windows, drop_last=True)  # deals out one shuffled order among the ranks
    folder, saved = engine.load_checkpoint(args.save)
    first = saved["steps"] if folder else 0

    for step in range(first, args.steps):
        if step % steps_per_epoch == 0 or step == first:  # each epoch has an order of its own
            sampler.set_epoch(step // steps_per_epoch)
            seen = step % steps_per_epoch * engine.gradient_accumulation_steps()
            loader = itertools.islice(DataLoader(windows, args.micro_batch, sampler=sampler), seen, None)
        loss = 0
        for _ in range(engine.gradient_accumulation_steps()):
            part = engine(next(loader).to(device))
            engine.backward(part)  # divides by the number of micro-batches
            engine.step()  # acts after the last of them: clips, steps, clears the gradients
            loss += part.detach() / engine.gradient_accumulation_steps()
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            engine.save_checkpoint(args.save, client_state={"steps": step + 1})  # on all ranks: each has a part
    engine.destroy()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's thread lets go of the last message; if Python ends in that moment, it aborts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=Path(__file__).with_name("ds_config.json"), help="DeepSpeed's settings")
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences that a rank computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="checkpoints", help="a folder; training goes on from the last one in it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    main(parser.parse_args())
