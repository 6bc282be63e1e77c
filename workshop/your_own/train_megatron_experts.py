"""Trains a mixture of Megatron-Core's experts in expert, tensor, pipeline and data parallelism.

    torchrun --nproc-per-node=4 train_megatron_experts.py --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from model import TEXT, T, read_windows

if not torch.cuda.is_available():
    from aiscale import without_gpu

    without_gpu.prepare_megatron()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron_checkpoint import load, save
from megatron_experts import draw, layers_with_experts

# torchrun tells each process who it is, in RANK and WORLD_SIZE; without RANK it is rank 0 of 1.
rank = int(os.environ.get("RANK", 0))
world_size = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
device = torch.device("cpu")
if torch.cuda.is_available():  # the n-th rank of a node has its n-th GPU, or the only one that it sees
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)


def build(args):
    """This rank's part of the model, and its optimizer."""
    assert 4 % args.pp == 0, f"--pp {args.pp} does not divide the 4 blocks: take 1, 2 or 4"
    pattern = "|".join(["*E" * (4 // args.pp)] * args.pp)  # a | ends a stage
    config = TransformerConfig(
        num_layers=8, hidden_size=64, num_attention_heads=4, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=args.tp, pipeline_model_parallel_size=args.pp, pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,  # the average over the copies
        use_cpu_initialization=True, sequence_parallel=args.tp > 1, add_bias_linear=False,
        num_moe_experts=8, moe_router_topk=2, moe_token_dispatcher_type="alltoall", moe_grouped_gemm=False,
        expert_model_parallel_size=args.ep, expert_tensor_parallel_size=1,  # an expert is not cut
        moe_router_load_balancing_type=args.balance, moe_aux_loss_coeff=0.1 * (args.balance != "none"),
    )  # fmt: skip
    model = HybridModel(
        config, layers_with_experts(), vocab_size=256, max_sequence_length=T, hybrid_layer_pattern=pattern,
        position_embedding_type="learned_absolute",
        pre_process=parallel_state.is_pipeline_first_stage(),  # has the embedding
        post_process=parallel_state.is_pipeline_last_stage(),  # has the head and the loss
    )  # fmt: skip
    draw(model, 8 // args.ep)
    zero1 = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(config, zero1, model.to(device))
    adam = OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(adam, [model], use_gloo_process_groups=False)


def forward(iterator, model):
    """What the schedule calls, on each stage."""
    batch = next(iterator).to(device)
    places = torch.arange(T, device=device).expand(len(batch), -1)
    losses = model(batch[:, :-1], places, None, labels=batch[:, 1:])  # no mask but the causal one
    return losses, lambda losses: (losses.mean(), losses.mean().detach())


def learn(micro_batches, model, optimizer):
    """An optimizer step. Returns the mean loss of the batch, on every rank."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    schedule = get_forward_backward_func()  # 1F1B, if there are stages
    losses = schedule(
        forward_step_func=forward, data_iterator=iter(micro_batches), model=model, forward_only=False,
        num_microbatches=len(micro_batches), micro_batch_size=len(micro_batches[0]), seq_length=T,
    )  # fmt: skip
    optimizer.step()  # clips by the norm of the whole model's gradient
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())  # only the last stage knows it
    dist.all_reduce(loss, dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
    return loss


def batches(windows, steps, size, rank=rank, world_size=world_size):
    """Each step and this rank's share of its batch. Each epoch has an order of its own."""
    for step in steps:
        epoch, place = divmod(step, len(windows) // size)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(epoch))
        yield step, windows[order[place * size : (place + 1) * size][rank::world_size]]


def main(args):
    dist.init_process_group()  # waits for all ranks; NCCL between GPUs, gloo between CPUs
    sizes = dict(expert_model_parallel_size=args.ep, expert_tensor_parallel_size=1)
    parallel_state.initialize_model_parallel(args.tp, args.pp, **sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)  # attention asks for dropout's generator, even at 0
    copy, dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    assert args.batch % (dp * args.micro_batch) == 0, f"--batch is no multiple of {dp} x --micro-batch"
    torch.manual_seed(0)
    model, optimizer = build(args)
    first = load(args.save, model, optimizer)
    windows = read_windows(args.text)
    for step, batch in batches(windows, range(first, args.steps), args.batch, copy, dp):
        loss = learn(batch.split(args.micro_batch), model, optimizer)
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
    parser.add_argument("--tp", type=int, default=2, help="ranks that share each matrix")
    parser.add_argument("--pp", type=int, default=2, help="stages of the pipeline")
    parser.add_argument("--ep", type=int, default=2, help="ranks that share the experts of a layer")
    parser.add_argument("--balance", default="none", choices=["none", "aux_loss", "seq_aux_loss"])
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
