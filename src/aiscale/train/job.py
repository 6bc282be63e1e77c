"""What each trainer needs beside its strategy: which rank it is, when to save, when to stop.

Nothing here waits for a GPU in a step: what a step has found is read in the one after it.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from aiscale.train.data import share_of
from aiscale.train.optimizer import rate
from aiscale.train.presets import shape_of
from aiscale.train.record import Record, check_same_training


def find_rank():
    """(rank, world size, local rank) of torchrun, `aiscale train`, srun, or one process."""
    env = os.environ
    if "RANK" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0))
    if "SLURM_STEP_NUM_TASKS" in env:  # a batch script has SLURM_PROCID too, but starts no ranks
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        rank, world_size, local_rank = (int(env[name]) for name in names)
        return rank, world_size, local_rank
    return 0, 1, 0


rank, world_size, local_rank = find_rank()
device = torch.device("cpu")
if torch.cuda.is_available():  # the n-th rank of a node has its n-th GPU, or the only one it sees
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)

TRAINER = Path(sys.argv[0]).stem
told = []  #: the signals that have come


def note_signal(number, frame):
    told.append(number)


for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note_signal)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # see __init__.py


def start(args):
    """Checks the options, then waits for all ranks; NCCL between GPUs, gloo between CPUs."""
    tp, pp = getattr(args, "tp", 1), getattr(args, "pp", 1)
    if world_size % (tp * pp):
        raise SystemExit(f"{world_size} ranks are no multiple of --tp {tp} x --pp {pp}")
    copies = world_size // (tp * pp)
    if args.batch % (copies * args.micro_batch):
        rule = f"a multiple of {copies} copies of the model x --micro-batch {args.micro_batch}"
        raise SystemExit(f"--batch is {args.batch}: it must be {rule}")
    check_same_training(args, TRAINER)
    if args.fp64:
        torch.set_default_dtype(torch.float64)
    timeout = timedelta(seconds=args.patience)
    if world_size == 1:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    place = {"rank": rank, "world_size": world_size, "timeout": timeout}
    store = os.environ.get("AISCALE_STORE")
    if store:  # a file in a folder of this user alone: all ranks are on this machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        step = os.environ.get("SLURM_STEP_ID", "0")
        dist.init_process_group(init_method=f"file://{store}.{step}", **place)
    else:  # torchrun's store, or MASTER_ADDR and MASTER_PORT of a launcher
        dist.init_process_group(init_method="env://", **place)


class Later:
    """Numbers of a device, on their way to the host."""

    def __init__(self, numbers):
        self.host = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda)
        self.host.copy_(numbers, non_blocking=True)
        self.copied = torch.cuda.Event() if numbers.is_cuda else None
        if self.copied:
            self.copied.record()

    def read(self):
        if self.copied:
            self.copied.synchronize()
        return self.host.tolist()


class Job:
    """Follows a run on all ranks: its record, and the reasons to save and to stop."""

    def __init__(self, args, optimizer, first, text_digest):
        self.args, self.optimizer = args, optimizer
        self.pending = None  #: (step, its numbers, its seconds) of the last step, not yet read
        self.stopping = self.overdue = False
        self.saved_s = self.before_s = time.monotonic()
        self.flops_per_token = shape_of(args.model).flops_per_token(args.length)
        self.record = None
        if rank == 0:
            self.record = Record(args, first, world_size, text_digest, TRAINER)
        if first >= args.steps and rank == 0:
            seen = f"{args.save} has seen {first} of --steps {args.steps}"
            print(f"{seen}: nothing to do", flush=True)

    def follow(self, batches):
        """The batches, until all steps are done or a signal has come."""
        for step, batch in batches:
            for group in self.optimizer.param_groups:
                group["lr"] = rate(step, self.args)
            yield step, batch
            if self.stopping:
                break
        self.read_pending()
        stopped = self.stopping and self.pending_step + 1 < self.args.steps
        if rank == 0:
            self.record.finish("stopped" if stopped else "finished")
            if stopped and "AISCALE_NOTE_SAVED" in os.environ:  # a launcher may requeue the job
                with open(os.environ["AISCALE_NOTE_SAVED"], "a") as file:
                    file.write("stopped\n")

    def log(self, step, loss, norm):
        """Takes note of a step. What it found is printed and recorded one step later."""
        self.read_pending()
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        norm = torch.as_tensor(norm, dtype=torch.float64, device=device)
        # Ranks hear a signal at different steps, and only rank 0's clock counts.
        late = rank == 0 and time.monotonic() - self.saved_s > 60 * self.args.save_minutes
        flags = torch.tensor([float(bool(told)), float(late)], dtype=torch.float64, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        numbers = torch.cat([loss.detach().double().view(1), norm.view(1), flags])
        now_s = time.monotonic()
        self.pending = (step, Later(numbers), now_s - self.before_s)
        self.pending_step, self.before_s = step, now_s

    def read_pending(self):
        if not self.pending:
            return
        (step, later, seconds), self.pending = self.pending, None
        loss, norm, stopping, overdue = later.read()
        self.stopping = self.stopping or bool(stopping)
        self.overdue = self.overdue or bool(overdue)
        if not math.isfinite(loss):
            raise SystemExit(f"the loss is {loss} at step {step}: lower --lr or raise --warm-up")
        if rank != 0:
            return
        print(f"step {step} loss {loss:.6f}", flush=True)
        tokens_per_s = self.args.batch * self.args.length / seconds
        values = {"step": step, "loss": loss, "grad_norm": norm, "lr": rate(step, self.args)}
        values |= {"seconds": seconds, "tokens_per_s": tokens_per_s}
        if self.args.peak_tflops:
            peak = self.args.peak_tflops * 1e12 * world_size
            values["mfu"] = tokens_per_s * self.flops_per_token / peak
        self.record.add("train", **values)

    def must_save(self, step):
        """Whether this is the step to save after, the same on all ranks."""
        due = (step + 1) % self.args.save_every == 0 or step + 1 == self.args.steps
        if not (due or self.stopping or self.overdue):
            return False
        self.read_pending()  # a loss that is no number must not be saved
        self.overdue, self.saved_s = False, time.monotonic()
        return True

    def evaluate(self, step, model, held_out, loss_of):
        """The mean loss of the text held out, where it is due; all ranks share the work."""
        if self.must_evaluate(step):
            loss = evaluate(model, held_out, loss_of, self.args)
            self.note_evaluation(step, loss)

    def must_evaluate(self, step):
        every = self.args.evaluate_every
        return bool(every) and ((step + 1) % every == 0 or step + 1 == self.args.steps)

    def note_evaluation(self, step, loss):
        self.read_pending()  # of the same step
        if rank == 0:
            print(f"step {step} val_loss {loss:.6f}", flush=True)
            self.record.add("eval", step=step, loss=loss, perplexity=math.exp(min(loss, 700.0)))


@torch.no_grad()
def evaluate(model, held_out, loss_of, args):
    """Over the first --evaluate-batches."""
    rows = share_of(held_out, args, rank, world_size)
    total = torch.zeros((), device=device)
    for part in rows.to(device).split(args.micro_batch):
        total += loss_of(model(part[:, :-1]), part[:, 1:]) * len(part)
    mean = total / len(rows)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    return mean.item()
