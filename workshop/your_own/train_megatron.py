"""Trains Megatron-Core's GPT in tensor, pipeline and data parallelism, with its schedule and distributed optimizer.

    torchrun --nproc-per-node=8 train_megatron.py --tp 2 --pp 2 --steps 20

Start it again with more steps, also on another grid: it goes on from its checkpoint.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    from aiscale import without_gpu

    without_gpu.prepare_megatron()
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from model import TEXT, T, read_windows
from train import batches, device, rank


def build(args):
    """This rank's part of the model, and its optimizer."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        finalize_model_grads_func=finalize_model_grads,  # after the schedule: reduces over data-parallel ranks
        use_cpu_initialization=True,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=T,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    ).to(device)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), gpt)
    settings = OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0, use_distributed_optimizer=True)
    return model, get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)


def forward(iterator, model):
    """What the schedule calls for each micro-batch, on each stage."""
    batch = next(iterator).to(device)
    places = torch.arange(T, device=device).expand(len(batch), -1)
    hidden = torch.ones(1, 1, T, T, dtype=torch.bool, device=device).triu(1)
    losses = model(batch[:, :-1], places, hidden, labels=batch[:, 1:])

    def mean(losses):
        loss = losses.mean()
        return loss, loss.detach().clone()

    return losses, mean


#: Of the optimizer's slices in a checkpoint: one that any grid can read.
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}


def states(model, optimizer, loading):
    """Slices that know their place in the whole, so that another grid can read them."""
    weights = model.module.sharded_state_dict()
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=FORMAT)}


def save(path, model, optimizer, steps):
    folder = Path(path) / f"{steps:06}"
    folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({**states(model, optimizer, False), "steps": steps}, str(folder))


def load(path, model, optimizer):
    """The number of steps that the newest whole checkpoint has seen, 0 without one."""
    whole = sorted(Path(path).glob("*/metadata.json"))
    if not whole:
        return 0
    optimizer.step()  # makes its states: the gradients are zero, and all that it changes is read anew
    saved = dist_checkpointing.load({**states(model, optimizer, True), "steps": 0}, str(whole[-1].parent))
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["steps"]


def main(args):
    dist.init_process_group()
    parallel_state.initialize_model_parallel(args.tp, args.pp, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    model, optimizer = build(args)
    first = load(args.save, model, optimizer)
    run_schedule = get_forward_backward_func()  # 1F1B; without a pipeline one micro-batch after the other
    data_rank, dp = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    assert args.batch % (dp * args.micro_batch) == 0, f"--batch is no multiple of {dp} x --micro-batch"
    windows = read_windows(args.text)
    for step, batch in batches(windows, range(first, args.steps), args.batch, data_rank, dp):
        micro_batches = batch.split(args.micro_batch)
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run_schedule(
            forward_step_func=forward,
            data_iterator=iter(micro_batches),
            model=model,
            num_microbatches=len(micro_batches),
            seq_length=T,
            micro_batch_size=args.micro_batch,
            forward_only=False,
        )
        optimizer.step()  # clips by the norm of the whole gradient
        loss = sum(losses) / len(losses) if losses else torch.zeros((), device=device)  # the last stage knows it
        dist.all_reduce(loss, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=parallel_state.get_data_parallel_group())
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
    main(parser.parse_args())
