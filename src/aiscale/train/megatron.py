"""Trains Megatron-Core's GPT in tensor, pipeline and data parallelism.

    torchrun --nproc-per-node=8 -m aiscale.train.megatron --steps 20

Start it again with more steps: it goes on from its checkpoint.
"""

import gc

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from aiscale import without_gpu

    without_gpu.prepare_megatron()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from aiscale.train.data import batches, read_windows, share_of
from aiscale.train.job import Job
from aiscale.train.megatron_checkpoint import load, save
from aiscale.train.megatron_model import configure, grid, pieces
from aiscale.train.options import options
from aiscale.train.ranks import device, start


def build(args):
    """This rank's part of the model, and its optimizer."""
    config = configure(args)
    zero1 = {"use_distributed_optimizer": not args.no_zero1}
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=args.bf16, **zero1)
    model = [DistributedDataParallel(config, ddp, piece) for piece in pieces(config, args)]
    adam = OptimizerConfig(
        optimizer="adam", lr=args.lr, weight_decay=args.weight_decay, adam_beta2=args.beta2,
        clip_grad=args.clip, bf16=args.bf16, fp16=args.fp16, params_dtype=config.params_dtype,
        initial_loss_scale=2**16, **zero1,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(adam, model, use_gloo_process_groups=False)
    config.grad_scale_func = optimizer.scale_loss if args.fp16 else None
    for group in optimizer.param_groups:
        group["weight_decay"] = args.weight_decay * group["wd_mult"]  # 0 for biases and norms
    return model, optimizer


def forward(iterator, model):
    """What the schedule calls, on each stage."""
    batch = next(iterator).to(device)
    T = batch.shape[1] - 1
    places = torch.arange(T, device=device).expand(len(batch), -1)
    losses = model(batch[:, :-1], places, None, labels=batch[:, 1:])  # no mask but the causal one
    return losses, lambda losses: (losses.mean(), losses.mean().detach())


def compute(micro_batches, model, forward_only=False):
    """The mean loss over all copies, on all ranks. Also the gradients, unless forward_only."""
    T, iterators = micro_batches[0].shape[1] - 1, [iter(micro_batches) for _ in model]
    schedule = get_forward_backward_func()  # 1F1B, if there are stages
    losses = schedule(
        forward_step_func=forward, data_iterator=iterators, model=model, forward_only=forward_only,
        num_microbatches=len(micro_batches), micro_batch_size=len(micro_batches[0]), seq_length=T,
    )  # fmt: skip
    loss = torch.stack(losses).mean() if losses else torch.zeros((), device=device)
    # Only the last stage knows it.
    dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
    dist.all_reduce(loss, dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
    return loss


def learn(micro_batches, model, optimizer):
    """An optimizer step. The loss comes back, and the norm of the whole model's gradient."""
    for piece in model:
        piece.zero_grad_buffer()
    optimizer.zero_grad()
    loss = compute(micro_batches, model)
    _, norm, _ = optimizer.step()  # clips by the norm of the whole model's gradient
    return loss, torch.inf if norm is None else norm  # None: too large for fp16, no step


def main(args):
    start(args)
    parallel_state.initialize_model_parallel(**grid(args), create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)  # attention wants it, even at 0
    copy = parallel_state.get_data_parallel_rank()
    dp = parallel_state.get_data_parallel_world_size()
    model, optimizer = build(args)
    first = load(args.save, model, optimizer)
    windows, held_out, text = read_windows(args)
    job = Job(args, optimizer, first, text)
    for step, batch in job.follow(batches(windows, first, args, copy, dp)):
        loss, norm = learn(batch.split(args.micro_batch), model, optimizer)
        job.log(step, loss, norm)
        if job.must_evaluate(step):
            rows = share_of(held_out, args, copy, dp, args.micro_batch * args.pp)
            with torch.no_grad():
                loss = compute(rows.split(args.micro_batch), model, forward_only=True)
            job.note_evaluation(step, loss.item())
        if job.must_save(step):
            save(args.save, model, optimizer, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = options("megatron", __doc__)
    main(parser.parse_args())
    gc.freeze()  # or Python, when it ends, searches all objects of torch: a second a rank
