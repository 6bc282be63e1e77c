"""Trains the GPT of model.py in tensor, pipeline and data parallelism, with torch's own tools.

    torchrun --nproc-per-node=4 train_tp_pp.py --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from llama_heads import Llama
from model import GPT, TEXT, loss_of, read_windows
from sharded_checkpoint import load, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

#: Into a block by columns, out of it by rows. (torch's backward sums q, k and v one by one.)
PLAN = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
PLAN |= {name: RowwiseParallel() for name in ("out", "down")}
LLAMA_PLAN = PLAN | {"gate": ColwiseParallel()}

# torchrun tells each process who it is, in RANK and WORLD_SIZE; without RANK it is rank 0 of 1.
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
device = torch.device("cpu")
if torch.cuda.is_available():  # the n-th rank of a node has its n-th GPU, or the only one that it sees
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)


def cut(model, stage, stages):
    """Leaves in the model what one pipeline stage computes."""
    if stage > 0:
        model.embed = nn.Identity()
    if stage < stages - 1:
        model.head = nn.Identity()
    for i in range(len(model.blocks)):
        if i * stages // len(model.blocks) != stage:
            model.blocks[i] = nn.Identity()


def clip(model, most, pipeline):
    """Clips by the norm of the whole model's gradient, of which each rank has a part."""
    # Gathering is simplest; Megatron-Core sums the squares of the parts
    gradients = [weight.grad for weight in model.parameters()]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients]
    squares = sum(gradient.square().sum() for gradient in whole)
    dist.all_reduce(squares, group=pipeline)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), most, squares.sqrt(), foreach=False)


def batches(windows, steps, size, rank=rank, world_size=world_size):
    """Each step and this rank's share of its batch. Each epoch has an order of its own."""
    for step in steps:
        epoch, place = divmod(step, len(windows) // size)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
        yield step, windows[order[place * size : (place + 1) * size][rank::world_size]]


def main(args):
    dist.init_process_group()  # waits for all ranks; NCCL between GPUs, gloo between CPUs
    dp = world_size // (args.pp * args.tp)
    assert args.pp == 1 or not args.llama, "--llama with stages: the first and the last would each have the tied matrix"
    assert args.batch % (dp * args.micro_batch) == 0, f"--batch is no multiple of {dp} x --micro-batch"
    torch.manual_seed(0)
    model = (Llama() if args.llama else GPT()).to(device)
    plan = LLAMA_PLAN if args.llama else PLAN
    mesh = init_device_mesh(device.type, (dp, args.pp, args.tp), mesh_dim_names=("dp", "pp", "tp"))
    data, pipeline, my_stage = mesh.get_group("dp"), mesh.get_group("pp"), mesh.get_local_rank("pp")
    cut(model, my_stage, args.pp)
    for block in model.blocks:
        if not isinstance(block, nn.Identity):
            parallelize_module(block, mesh["tp"], plan)
    stage = PipelineStage(model, my_stage, args.pp, device, group=pipeline)
    schedule = Schedule1F1B(stage, args.batch // dp // args.micro_batch, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)  # with DTensors
    first = load(args.save, model, optimizer)
    windows = read_windows(args.text)
    for step, batch in batches(windows, range(first, args.steps), args.batch, mesh.get_local_rank("dp"), dp):
        batch, losses = batch.to(device), []
        inputs = [batch[:, :-1]] if stage.is_first else []
        given = {"target": batch[:, 1:], "losses": losses} if stage.is_last else {}
        schedule.step(*inputs, **given)
        loss = torch.stack(losses).mean() if stage.is_last else torch.zeros((), device=device)
        dist.all_reduce(loss, group=pipeline)  # only the last stage knows it
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=data)
        for weight in model.parameters():
            mine = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            dist.all_reduce(mine, dist.ReduceOp.AVG, group=data)
        clip(model, 1.0, pipeline)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(args.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--text", default=TEXT, help="a file to learn from")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one step, over all ranks")
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences that a rank computes at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", default="checkpoint", help="training goes on from it")
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--llama", action="store_true", help="train the model of llama.py")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each matrix")
    parser.add_argument("--pp", type=int, default=2, help="stages of the pipeline")
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
