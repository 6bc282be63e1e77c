"""What a pattern's *, - and E stand for: attention, an MLP, experts; no Transformer Engine."""

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid import hybrid_block
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, attention, enums, mlp
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import nn


class Norm(nn.LayerNorm):
    """torch's. Megatron-Core sums its gradients over ranks that share the sequence."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for weight in self.parameters():
            weight.sequence_parallel = config.sequence_parallel


def layers():
    columns, rows, add = ColumnParallelLinear, RowParallelLinear, get_bias_dropout_add
    parts = attention.SelfAttentionSubmodules(columns, DotProductAttention, rows)
    body = ModuleSpec(attention.SelfAttention, {"attn_mask_type": enums.AttnMaskType.causal}, parts)
    star = TransformerLayerSubmodules(input_layernorm=Norm, self_attention=body, self_attn_bda=add)
    body = partial(mlp.MLP.as_mlp_submodule, submodules=mlp.MLPSubmodules(columns, rows))
    dash = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=body, mlp_bda=add)
    star, dash = (ModuleSpec(TransformerLayer, submodules=parts) for parts in (star, dash))
    experts = get_gpt_layer_local_submodules(num_experts=1).mlp  # for any number of experts
    mixture = TransformerLayerSubmodules(pre_mlp_layernorm=Norm, mlp=experts, mlp_bda=add)
    mixture = ModuleSpec(MoETransformerLayer, submodules=mixture)
    hybrid_block.TENorm = Norm  # the last norm: else it is Transformer Engine's
    stack = hybrid_block.HybridStackSubmodules(
        attention_layer=star, mlp_layer=dash, moe_layer=mixture
    )
    return ModuleSpec(hybrid_block.HybridStack, submodules=stack)
