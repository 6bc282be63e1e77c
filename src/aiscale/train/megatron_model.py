"""Megatron-Core's model for a shape of presets.toml, and what it cannot do, said in one line."""

from __future__ import annotations

from math import lcm

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from aiscale.train.megatron_layers import layers
from aiscale.train.megatron_weights import draw
from aiscale.train.presets import presets, shape_of
from aiscale.train.ranks import device, world_size
from aiscale.train.refusal import refuse


def configure(args):
    shape = shape_of(args.model)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    config = TransformerConfig(
        num_layers=2 * shape.layers,  # attention and an MLP are two
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tp,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=virtual(args),
        deallocate_pipeline_outputs=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.bf16,
        fp16=args.fp16,
        finalize_model_grads_func=finalize_model_grads,  # the average over the copies
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # it would draw whole matrices: see megatron_weights
    )
    if args.recompute:
        config.recompute_granularity, config.recompute_method = "full", "uniform"
        config.recompute_num_layers = 2  # a block
    return config


def grid(args):
    return args.tp, args.pp, virtual(args)


def virtual(args):
    """Pieces of the model on a rank, as Megatron-Core wants it: none if there is one."""
    return args.virtual_stages if args.virtual_stages > 1 else None


def pieces(config, args):
    """This rank's pieces of the model, with their first weights."""
    models = [piece(config, args, number) for number in range(args.virtual_stages)]
    if args.bf16 or args.fp16:
        return [Float16Module(config, model) for model in models]
    return models


def piece(config, args, number):
    shape = shape_of(args.model)
    place = {"vp_stage": number if virtual(args) else None}
    ends = {"ignore_virtual": not virtual(args), **place}
    stages = args.pp * args.virtual_stages
    # Each block is *-, a | ends a stage.
    pattern = "|".join(["*-" * (shape.layers // stages)] * stages)
    with device:
        model = HybridModel(
            config,
            layers(),
            vocab_size=padded(shape.vocabulary, args.tp),
            max_sequence_length=shape.context,
            hybrid_layer_pattern=pattern,
            pre_process=parallel_state.is_pipeline_first_stage(**ends),  # has the embedding
            post_process=parallel_state.is_pipeline_last_stage(**ends),  # has head and loss
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="rope" if shape.rotary else "learned_absolute",
            **place,
        )
    leave_out_padding(model, shape.vocabulary)
    return draw(model.to(config.params_dtype), args)


def padded(vocabulary, tp):
    """As Megatron-LM pads it: the same for most tp, so that they can read each other's weights."""
    multiple = lcm(128, tp)
    return -(-vocabulary // multiple) * multiple


def leave_out_padding(model, vocabulary):
    """Tokens that only pad the vocabulary get no probability: the loss is the same as without."""
    size = model.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    real = max(0, vocabulary - size * parallel_state.get_tensor_model_parallel_rank())

    def hook(module, inputs, outputs):
        logits, bias = outputs
        logits[..., real:] = float("-inf")
        return logits, bias

    if model.post_process and real < size:
        model.output_layer.register_forward_hook(hook)


def check(args):
    """Stops with one line if Megatron-Core cannot do what the options ask for."""
    if args.model not in presets() or "transformers" in presets()[args.model]:
        stop(f"--model {args.model}", "Megatron-Core has a GPT of its own: take fsdp or zero")
    if args.fp64:
        stop("--fp64", "Megatron-Core computes the loss in fp32: leave it out, or take tp_pp")
    if args.optimizer == "lamb":
        stop("--optimizer lamb", "Megatron-Core has Adam: take adamw, or train by fsdp or zero")
    if args.compile:
        stop("--compile", "Megatron-Core's blocks are not compiled here: leave it out")
    if args.bf16 and args.fp16:
        stop("--bf16 --fp16", "a run has one precision: leave one out")
    shape, tp, pp = shape_of(args.model), args.tp, args.pp
    if shape.layers % (pp * args.virtual_stages):
        stages = f"--pp {pp} x --virtual-stages {args.virtual_stages}"
        stop(stages, f"must divide the {shape.layers} layers of {args.model}: lower one of them")
    if shape.heads % tp:
        stop(f"--tp {tp}", f"must divide the {shape.heads} heads of {args.model}: lower it")
    if args.sequence_parallel and (tp == 1 or args.length % tp):
        rule = f"--tp {tp} must be more than 1 and divide --length {args.length}: change one"
        stop("--sequence-parallel", rule)
    if virtual(args):
        check_interleaved(args)


def check_interleaved(args):
    if args.pp < 3:
        rule = f"with --pp {args.pp} both neighbours are one rank and messages cross: take 3"
        stop(f"--virtual-stages {args.virtual_stages}", rule)
    copies = world_size // (args.tp * args.pp)
    micro_batches = args.batch // (copies * args.micro_batch)
    if micro_batches % args.pp:
        rule = f"--pp {args.pp} must divide a copy's {micro_batches} micro-batches: change --batch"
        stop(f"--virtual-stages {args.virtual_stages}", rule)


def stop(option, rule):
    refuse(f"{option}: {rule}")
