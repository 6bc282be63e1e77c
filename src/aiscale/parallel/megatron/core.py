"""Megatron-Core's process groups, model, data-parallel wrapper and optimizer, set up for a `Run`.

The model is GPTModel from the local layer spec, but with our norms (`Norm`): the local spec's norms always have a bias
and refuse sequence parallelism. Everything must run inside `without_gpu.megatron_on`.

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor, nn

from aiscale.config import ModelConfig, Run
from aiscale.config.choices import ACTIVATIONS as CHOICES
from aiscale.model import ACTIVATIONS
from aiscale.model.gpt import make_norm
from aiscale.optim import FUSED_DEVICES
from aiscale.parallel.megatron.layout import Grid, Slot, padded_vocab
from aiscale.parallel.megatron.shards import Shard
from aiscale.without_gpu import leave_out_triton

leave_out_triton()
with warnings.catch_warnings():  # about missing Apex and Transformer Engine, which need CUDA
    warnings.simplefilter("ignore")
    from megatron.core import optimizer as megatron_optimizer
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: F401  for engine
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}  #: of weights; else fp32


def start_groups(grid: Grid) -> None:
    """Create Megatron-Core's process groups with the world's backend, so that their traffic is counted."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    parallel_state.initialize_model_parallel(
        grid.tp,
        grid.pp,
        virtual_pipeline_model_parallel_size=grid.virtual if grid.virtual > 1 else None,
        create_gloo_process_groups=False,
    )


def end_groups() -> None:
    """Destroy them, so that another engine can be built in this process."""
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in filter(None, groups):
        with suppress(ValueError):  # the world is closed, and so are its groups
            dist.destroy_process_group(group)


class Norm(nn.Module):
    """GPT's norm, with the constructor that the layer spec calls. With sequence parallelism, Megatron-Core sums its
    gradients over the tensor-parallel ranks."""

    def __new__(cls, config: TransformerConfig, model: ModelConfig, **_) -> nn.Module:
        norm = make_norm(model)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def transformer_config(run: Run) -> TransformerConfig:
    """Megatron-Core's configuration of `run`. Its fused kernels, which need CUDA extensions, are off by default."""
    model, layout, precision = run.model, run.parallel, run.loop.precision
    dtype = DTYPES.get(precision, torch.float32)
    activation = CHOICES[model.activation]
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=model.n_layer,
        hidden_size=model.d_model,
        num_attention_heads=model.n_head,
        num_query_groups=model.kv_heads,
        ffn_hidden_size=model.ff_width,
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        layernorm_epsilon=model.norm_eps,
        activation_func=ACTIVATIONS[activation.function],
        gated_linear_unit=activation.gated,
        add_bias_linear=model.bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
        sequence_parallel=layout.sequence_parallel,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        deallocate_pipeline_outputs=True,
        init_method=_leave,
        output_layer_init_method=_leave,
        **(recompute if model.activation_checkpointing else {}),
    )


def build_chunks(run: Run, device: torch.device) -> list[DistributedDataParallel]:
    """This rank's pieces of the model, wrapped for data parallelism, with weights not yet set."""
    tensor_parallel.model_parallel_cuda_manual_seed(run.loop.seed)
    config = transformer_config(run)
    pieces = [_gpt(run.model, config, chunk) for chunk in range(run.parallel.virtual_stages)]
    if run.loop.precision == "fp64" and run.model.position == "rotary":
        channel = torch.arange(0, run.model.d_head, 2, dtype=torch.float64)
        for piece in pieces:  # Megatron-Core computes the frequencies in fp32
            piece.rotary_pos_emb.inv_freq = run.model.rope_theta ** (-channel / run.model.d_head)
    pieces = [piece.to(device, config.params_dtype) for piece in pieces]
    if config.bf16 or config.fp16:
        pieces = [Float16Module(config, piece) for piece in pieces]
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.bf16,
        use_distributed_optimizer=run.parallel.distributed_optimizer,
    )
    wrapped = [DistributedDataParallel(config, ddp, piece) for piece in pieces]
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(run: Run, chunks: list[DistributedDataParallel], device: torch.device):
    """Megatron-Core's optimizer around torch's AdamW, Adam or SGD; the distributed one if the run asks for it."""
    ours, config = run.optimizer, chunks[0].config
    # With Transformer Engine or Apex installed it would use their optimizers, whose states differ.
    megatron_optimizer.USING_PYTORCH_OPTIMIZER, megatron_optimizer.SGD = True, torch.optim.SGD
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="sgd" if ours.name == "sgd" else "adam",
            decoupled_weight_decay=ours.name != "adam",
            lr=ours.lr,
            weight_decay=ours.weight_decay,
            adam_beta1=ours.beta1,
            adam_beta2=ours.beta2,
            adam_eps=ours.eps,
            sgd_momentum=ours.momentum,
            clip_grad=ours.clip_norm,
            bf16=config.bf16,
            fp16=config.fp16,
            initial_loss_scale=2**16,  # as torch; Megatron-Core's 2**32 would skip the first steps
            params_dtype=config.params_dtype,
            use_distributed_optimizer=run.parallel.distributed_optimizer,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss if config.fp16 else None
    for group in optimizer.param_groups:
        # Megatron-LM's own scheduler does this in every step: biases and norms have wd_mult 0.
        group["weight_decay"] = ours.weight_decay * group["wd_mult"]
        if device.type in FUSED_DEVICES and "fused" in group:
            group["fused"], group["foreach"] = True, False
    return optimizer


def gpt_model(chunk: DistributedDataParallel) -> GPTModel:
    """The GPTModel inside its wrappers."""
    inner = chunk.module
    return inner.module if isinstance(inner, Float16Module) else inner


def _leave(weight: Tensor) -> Tensor:
    """An init_method that does nothing: the weights come from our GPT."""
    return weight


def _gpt(model: ModelConfig, config: TransformerConfig, chunk: int) -> GPTModel:
    has_chunks = config.virtual_pipeline_model_parallel_size is not None
    place = {"vp_stage": chunk} if has_chunks else {}
    ends = {"ignore_virtual": not has_chunks, **place}
    norm = ModuleSpec(module=Norm, params={"model": model})
    layer = get_gpt_layer_local_spec(normalization=config.normalization)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    pieces = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    gpt = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * (config.num_layers // pieces), layer_norm=norm),
        vocab_size=padded_vocab(model.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=model.max_seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope" if model.position == "rotary" else "learned_absolute",
        rotary_base=model.rope_theta,
        **place,
    )
    if gpt.post_process and gpt.vocab_size != model.vocab_size:
        _mask_padding(gpt, model.vocab_size)
    return gpt


def _mask_padding(gpt: GPTModel, vocab_size: int) -> None:
    """Give the padded entries of the vocabulary zero probability, so that they do not change the loss."""
    width = gpt.vocab_size // parallel_state.get_tensor_model_parallel_world_size()
    real = max(0, vocab_size - width * parallel_state.get_tensor_model_parallel_rank())
    if real >= width:
        return

    def mask(_module: nn.Module, _inputs: tuple, outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        logits, bias = outputs
        logits[..., real:] = float("-inf")
        return logits, bias

    gpt.output_layer.register_forward_hook(mask)


def owned(optimizer, chunks: list[DistributedDataParallel], stages: list[int], tables: list[dict[str, Slot]]):
    """A Shard for every parameter of this rank: the range that this rank's optimizer updates, and its state."""
    inner = optimizer.chained_optimizers[0]
    states = inner.optimizer.state
    ranges = getattr(inner, "model_param_gbuf_map", None)  # only the distributed optimizer has one
    for chunk, stage, slots in zip(chunks, stages, tables, strict=True):
        parameters = dict(gpt_model(chunk).named_parameters())
        if parameters.keys() != slots.keys():
            raise RuntimeError(f"Megatron-Core's stage {stage} has other tensors: {parameters.keys() ^ slots.keys()}")
        for name, parameter in parameters.items():
            main, start, end = getattr(parameter, "main_param", parameter), 0, parameter.numel()
            if ranges is not None:
                main = None
                if parameter in ranges:
                    group, place = inner.model_param_group_index_map[parameter]
                    main = inner.optimizer.param_groups[group]["params"][place]
                    buffer, dtype, bucket = ranges[parameter]
                    span = inner.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
                    start, end = span.start, span.end
            state = {} if main is None else states.get(main, {})
            yield Shard(stage, name, slots[name], parameter.detach(), main, start, end, state)


def workspace(chunks: list[DistributedDataParallel]) -> list[Tensor]:
    """Megatron-Core's buffers: neither weights nor gradients nor optimizer states."""
    angles = [getattr(gpt_model(chunk), "rotary_pos_emb", None) for chunk in chunks]
    buffers = list(parallel_state.get_global_memory_buffer().buffer.values())
    return buffers + [rotary.inv_freq for rotary in angles if rotary is not None]
