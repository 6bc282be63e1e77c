"""What E of a pattern stands for, beside * and -: a layer of experts, of parts without Transformer Engine."""

import re
from zlib import crc32

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_block
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayerSubmodules
from megatron_layers import layers


def norm(config, hidden_size, eps, **_):
    """A norm for sequence parallelism, which experts need under tp: its gradients are summed over tp."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for weight in norm.parameters():
        weight.sequence_parallel = config.sequence_parallel
    return norm


def layers_with_experts():
    stack = layers()
    stack.submodules.attention_layer.submodules.input_layernorm = norm
    experts = get_gpt_layer_local_submodules(num_experts=1).mlp  # of any number
    parts = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=get_bias_dropout_add)
    stack.submodules.moe_layer = ModuleSpec(MoETransformerLayer, submodules=parts)
    hybrid_block.TENorm = norm  # the last norm
    return stack


def draw(model, experts_here):
    """Draws each matrix by its name in the whole model, so that all grids begin with the same numbers."""
    tp, mine = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    first = {"layers": len(model.decoder.layers) * parallel_state.get_pipeline_model_parallel_rank()}
    first["local_experts"] = experts_here * parallel_state.get_expert_model_parallel_rank()
    for name, weight in model.named_parameters():
        name = re.sub(r"(layers|local_experts)\.(\d+)", lambda found: f"{int(found[2]) + first[found[1]]}", name)
        ways = tp if getattr(weight, "tensor_model_parallel", False) and ".experts." not in name else 1
        if weight.dim() == 2:
            shape, dim = list(weight.shape), getattr(weight, "partition_dim", 0)
            shape[dim] *= ways
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) / 50
            weight.data.copy_(whole.chunk(ways, dim)[mine % ways])
