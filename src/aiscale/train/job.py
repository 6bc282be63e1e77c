"""A run, followed step by step: its rate, its record, when to save and when to stop.

Nothing here waits for a GPU in a step: what a step has found is read in the one after it.
"""

from __future__ import annotations

import math
import os
import socket
import time

import torch
import torch.distributed as dist

from aiscale.train.data import share_of
from aiscale.train.optimizer import rate
from aiscale.train.presets import shape_of
from aiscale.train.ranks import agree, device, rank, told, world_size
from aiscale.train.record import Record, other_text
from aiscale.train.refusal import refuse
from aiscale.train.sharded_checkpoint import gather


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
        self.paused_s = None  #: since when an evaluation or a checkpoint holds up the next step
        mlps = args.top_k if getattr(args, "experts", 0) else 1
        self.flops_per_token = shape_of(args.model).flops_per_token(args.length, mlps)
        check_text(args, text_digest)
        processes = gather([socket.gethostname(), os.getpid()])
        self.record = None
        if rank == 0:
            self.record = Record(args, first, world_size, text_digest, processes)
        if first >= args.steps and rank == 0:
            print(f"{args.save} has seen all --steps {args.steps}: nothing to do", flush=True)

    def follow(self, batches):
        """The batches, until all steps are done or a signal has come."""
        for step, batch in batches:
            for group in self.optimizer.param_groups:
                group["lr"] = rate(step, self.args)
            yield step, batch
            if self.paused_s is not None:
                self.before_s += time.monotonic() - self.paused_s
                self.paused_s = None
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
        """Keeps a step's numbers. The next call, a pause or the end prints and records them.

        norm: of the gradient, before clipping; None if the library does not tell it.
        """
        self.read_pending()
        self.knows_norm = norm is not None
        norm = norm if self.knows_norm else 0.0
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
        wrong = "" if math.isfinite(loss) else f"loss is {loss}"
        if not wrong and math.isnan(norm):
            wrong = "gradient's norm is nan"
        if wrong:
            if rank == 0:
                self.record.finish("failed")
            refuse(f"the {wrong} at step {step}: lower --lr or raise --warm-up")
        if rank != 0:
            return
        print(f"step {step} loss {loss:.6f}", flush=True)
        tokens_per_s = self.args.batch * self.args.length / seconds
        known = norm if self.knows_norm else None
        values = {"step": step, "loss": loss, "grad_norm": known, "lr": rate(step, self.args)}
        values |= {"seconds": seconds, "tokens_per_s": tokens_per_s}
        if self.args.peak_tflops:
            peak = self.args.peak_tflops * 1e12 * world_size
            values["mfu"] = tokens_per_s * self.flops_per_token / peak
        self.record.add("train", **values)

    def pause(self):
        """What follows, until the next step, is no part of any step's seconds."""
        self.read_pending()  # so that a GPU has ended its step
        if self.paused_s is None:
            self.paused_s = time.monotonic()

    def must_save(self, step):
        """Whether this is the step to save after, the same on all ranks."""
        every = self.args.save_every
        due = bool(every) and ((step + 1) % every == 0 or step + 1 == self.args.steps)
        if not (due or self.stopping or self.overdue):
            return False
        self.pause()  # which reads the loss: one that is no number must not be saved
        self.overdue, self.saved_s = False, time.monotonic()
        return True

    def evaluate(self, step, model, held_out, loss_of):
        """The mean loss of the text held out, where it is due; all ranks share the work."""
        if self.must_evaluate(step):
            loss = evaluate(model, held_out, loss_of, self.args)
            self.note_evaluation(step, loss)

    def must_evaluate(self, step):
        every = self.args.evaluate_every
        due = bool(every) and ((step + 1) % every == 0 or step + 1 == self.args.steps)
        if due:
            self.pause()
        return due

    def note_evaluation(self, step, loss):
        if rank == 0:
            print(f"step {step} val_loss {loss:.6f}", flush=True)
            self.record.add("eval", step=step, loss=loss, perplexity=math.exp(min(loss, 700.0)))


def check_text(args, text_digest):
    """Ends all ranks unless they have read one text, the same as before where a run goes on."""
    digests = gather(text_digest)
    for other, digest in enumerate(digests):
        if digest != digests[0]:
            where = f"--text {args.text} is not the same on ranks 0 and {other}"
            refuse(f"{where}: give every node the same file")
    agree(other_text(args, text_digest) if rank == 0 else None)


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
