"""Trains a small language model on one device: the script as it was before it met a cluster.

    python train.py --steps 40

The loss of every step is printed; the weights go to --save.
"""

import argparse

import torch
from model import LM, TEXT, read_windows
from torch.utils.data import DataLoader


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = LM().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    windows = read_windows(args.text)
    steps_per_epoch = len(windows) // args.batch

    for step in range(args.steps):
        if step % steps_per_epoch == 0:  # each epoch has an order of its own
            order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(step // steps_per_epoch))
            loader = iter(DataLoader(windows, args.batch, sampler=order.tolist()))
        loss = model(next(loader).to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}", flush=True)
    torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="model.pt", help="where the weights go")
    main(parser.parse_args())
