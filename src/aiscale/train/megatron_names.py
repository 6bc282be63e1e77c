"""Megatron-Core's weights under other names: ours, and those of transformers' GPT-NeoX.

It needs no Megatron-Core. In a checkpoint tensors are whole, and layers are numbered from the
model's first one, whatever grid trained it.
"""

from __future__ import annotations

#: Megatron-Core's names and ours, outside of the blocks ...
NAMES = {
    "embedding.word_embeddings.weight": "embed.token.weight",
    "embedding.position_embeddings.weight": "embed.place.weight",
    "decoder.final_norm.weight": "head.0.weight",
    "decoder.final_norm.bias": "head.0.bias",
    "output_layer.weight": "head.1.weight",
}
#: ... and in them. Two of its layers, attention and an MLP, are one of our blocks.
PARTS = {
    "input_layernorm": "norm1",
    "self_attention.linear_proj": "out",
    "pre_mlp_layernorm": "norm2",
    "mlp.linear_fc1": "up",
    "mlp.linear_fc2": "down",
    "mlp.router": "router",
}
#: These have rows that only pad the vocabulary.
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
#: GPT-NeoX' names outside of the blocks ...
NEOX = {
    "embedding.word_embeddings.weight": "gpt_neox.embed_in.weight",
    "decoder.final_norm.weight": "gpt_neox.final_layer_norm.weight",
    "decoder.final_norm.bias": "gpt_neox.final_layer_norm.bias",
    "output_layer.weight": "lm_head.weight",
}
#: ... and in them. It keeps a head's query, key and value together, as Megatron-Core does.
NEOX_PARTS = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}


def as_ours(theirs, shape):
    """{our name: tensor} of {Megatron-Core's name: whole tensor}."""
    ours = {}
    for name, tensor in theirs.items():
        if name in NAMES:
            ours[NAMES[name]] = unpadded(name, tensor, shape)
            continue
        block, part, kind = parted(name)
        if part == "self_attention.linear_qkv":
            heads = tensor.unflatten(0, (shape.heads, 3, shape.width // shape.heads))
            for number, its in enumerate(("query", "key", "value")):
                ours[f"blocks.{block}.{its}.{kind}"] = heads[:, number].flatten(0, 1)
        else:
            ours[f"blocks.{block}.{PARTS[part]}.{kind}"] = tensor
    return ours


def as_neox(theirs, shape):
    """{GPT-NeoX' name: tensor} of {Megatron-Core's name: whole tensor}."""
    found = {}
    for name, tensor in theirs.items():
        if name in NEOX:
            found[NEOX[name]] = unpadded(name, tensor, shape)
        else:
            block, part, kind = parted(name)
            found[f"gpt_neox.layers.{block}.{NEOX_PARTS[part]}.{kind}"] = tensor
    if shape.tied:
        found["lm_head.weight"] = found["gpt_neox.embed_in.weight"]
    return found


def unpadded(name, tensor, shape):
    return tensor[: shape.vocabulary] if name in PADDED else tensor


def parted(name):
    """(our block, its part, weight or bias): decoder.layers.5.mlp.linear_fc1.bias is of block 2."""
    layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
    part, kind = rest.rsplit(".", 1)
    return int(layer) // 2, part, kind
