"""Trains the GPT of model.py on replicas that may die: the others go on, and heal those that come back.

    python keep_going.py --replicas 3 train_elastic.py --steps 60

It saves nothing: if all replicas die, it begins anew.
"""

import argparse
import gc
import time

import torch
import torch.distributed as dist
from members import Members
from model import GPT, TEXT, loss_of, read_windows
from whole_state import digest, one_buffer, state_of


def batch_of(windows, step, size):
    """The whole batch of a step. Each epoch has an order of its own."""
    epoch, place = divmod(step, len(windows) // size)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
    return windows[order[place * size : (place + 1) * size]]


def main(args):
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    state, (sums, loss, door) = state_of(model, optimizer), one_buffer(model)
    windows = read_windows(TEXT)
    members, done, joined = Members(args.meet, args.name, args.replicas), -1, False
    while done < args.steps or members.size < args.replicas:  # at the end, wait for who is still starting
        if joined:
            sums.zero_()
            batch = batch_of(windows, done, args.batch)
            share = batch[members.rank :: members.size]
            for micro_batch in share.split(args.micro_batch):
                part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:]) * len(micro_batch) / len(batch)
                part.backward()
                loss += part.detach()
            time.sleep(args.sequence_s * len(batch) / members.size)
            door += members.somebody_waits()
        try:  # only what needs the others: an error of our own ends this replica
            if not joined:
                steps = members.gather(done, everybody=done == args.steps)
                source = steps.index(max(steps))
                done = -1  # half healed, it must not heal others
                for tensor in state:
                    dist.broadcast(tensor, source)
                done = max(0, *steps)
                joined = True
                print(f"round {members.round} members {members.size} step {done}", flush=True)
                continue
            dist.all_reduce(sums)
        except RuntimeError as error:  # gloo's: a member has died; the step is done again, in another round
            print(f"step {done} failed: {error}", flush=True)
            joined = False
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if members.rank == 0:
            print(f"step {done} loss {loss.item():.6f}", flush=True)
        done, joined = done + 1, not door
    print(f"state {digest(state)}", flush=True)
    members.leave()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all members")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences that a member computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--name", required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--meet", required=True, help="a folder of this user alone, in which replicas agree")
    parser.add_argument("--sequence-s", type=float, default=0, help="seconds more that a sequence takes")
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
