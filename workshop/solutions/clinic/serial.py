"""The same training in one process, written without a line of the cases: what their programs are held to."""

import torch
from jobs import Unmended
from model import LM, PAD, padded

TOLERANCE = 5e-4  # fp32 sums in another order, a dozen steps; the faults are worth 5e-3 and more


def train(seed, batches, optimizer, make=LM, loss_of=None, max_norm=None, change=None):
    """[(loss, gradient norm), ...]; a batch is a list of documents, and each byte of it counts alike.

    `change(model, batch)` may spoil the gradients, to see whether a program made that mistake."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = make()
    optimizer = optimizer(model.parameters())
    found = []
    for batch in batches:
        optimizer.zero_grad()
        if loss_of:
            loss = loss_of(model, batch)
        else:
            windows = padded([torch.as_tensor(document) for document in batch])
            loss = model(windows).sum() / (windows[:, 1:] != PAD).sum()
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        if change:
            change(model, batch)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2)


def ran(job):
    """Raise if a job did not run to its end."""
    if job.trouble():
        raise Unmended(job.trouble())
    return job


def all_steps(job, steps, rank=0):
    """The losses that a rank printed; raises if there is not one of each step."""
    printed = job.logged("loss", rank)
    if [step for step, _ in printed] != list(range(steps)):
        said = f"steps {printed[0][0]} to {printed[-1][0]}" if printed else "none"
        raise Unmended(
            f"there should be a line of each step, 0 to {steps - 1}, with its loss; rank {rank} printed {said}"
        )
    return [loss for _, loss in printed]


def agree(found, serial):
    pairs = zip(found, serial, strict=True)
    return all(abs(mine - right) <= TOLERANCE * max(1, abs(right)) for mine, right in pairs)


def equal(found, serial, what="loss", why=""):
    """Raise unless two curves agree, naming the first step at which they part."""
    for step, (mine, right) in enumerate(zip(found, serial, strict=True)):
        if not abs(mine - right) <= TOLERANCE * max(1, abs(right)):
            raise Unmended(f"{what} {mine:.4f} at step {step}, and {right:.4f} in one process on the same data. {why}")
