"""Megatron-Core's model for a shape of presets.toml."""

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
from aiscale.train.options import AUX_LOSS
from aiscale.train.presets import shape_of
from aiscale.train.ranks import device


def configure(args):
    shape = shape_of(args.model)
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
    config = TransformerConfig(
        num_layers=2 * shape.layers,  # attention and an MLP are two
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        sequence_parallel=args.sequence_parallel,
        deallocate_pipeline_outputs=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=args.bf16,
        fp16=args.fp16,
        finalize_model_grads_func=finalize_model_grads,  # the average over the copies
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,  # it would draw whole matrices: see megatron_weights
        **grid(args),
        **mixture(args),
    )
    if args.recompute:
        config.recompute_granularity, config.recompute_method = "full", "uniform"
        config.recompute_num_layers = 2  # a block
    return config


def mixture(args):
    """What makes each MLP a layer of experts. Megatron-Core's experts here have no biases."""
    if not args.experts:
        return {}
    return {
        "num_moe_experts": args.experts,
        "moe_router_topk": args.top_k,
        "moe_router_dtype": "fp32",  # in 16 bits experts would tie
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,  # it needs Transformer Engine: here one expert after the other
        # seq_aux_loss counts the load of one sequence: the same for every grid.
        # aux_loss counts the load of one micro-batch, over its tp x cp ranks.
        "moe_router_load_balancing_type": args.balance,
        "moe_aux_loss_coeff": AUX_LOSS[args.balance] if args.aux_loss is None else args.aux_loss,
        "add_bias_linear": False,
    }


def grid(args):
    """How ranks share the model: for parallel_state, and for the model's configuration."""
    return {
        "tensor_model_parallel_size": args.tp,
        "pipeline_model_parallel_size": args.pp,
        "virtual_pipeline_model_parallel_size": virtual(args),
        "expert_model_parallel_size": args.ep,
        "expert_tensor_parallel_size": 1,  # an expert is not cut
    }


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
    # Each block is *-, or *E with experts; a | ends a stage.
    block = "*E" if args.experts else "*-"
    pattern = "|".join([block * (shape.layers // stages)] * stages)
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
