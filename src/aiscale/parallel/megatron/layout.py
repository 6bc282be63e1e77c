"""Which part of GPT's weights each Megatron-Core rank holds, under which name and in which order.

Megatron-Core's linear layers order rows differently from ours, because each tensor-parallel rank needs whole heads and
its gate next to its values:

    attn.qkv   rows [all queries | all keys | all values]   ->  for each key/value head: [its queries | key | value]
    mlp.up     rows [gate | value] (SwiGLU)                 ->  for each rank: [its gate | its value]
    embedding  V rows                                       ->  V rounded up to a multiple of tp, the rest zeros

Shapes: V vocabulary, D width, H heads, G key/value heads, C width of a head, F width of the MLP's hidden layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aiscale.config import ModelConfig, ParallelConfig

PADDING = -1  #: in an order: a padded row, which GPT does not have


@dataclass(frozen=True)
class Grid:
    """How ranks are arranged: tensor-parallel neighbours first, then data-parallel ones, then pipeline stages."""

    tp: int = 1
    pp: int = 1
    virtual: int = 1  #: pieces of the model on each pipeline rank
    dp: int = 1

    @classmethod
    def of(cls, layout: ParallelConfig, world_size: int) -> Grid:
        dp = world_size // (layout.tp * layout.pp)
        return cls(tp=layout.tp, pp=layout.pp, virtual=layout.virtual_stages, dp=dp)

    @property
    def stages(self) -> int:
        """The number of pieces of the model."""
        return self.pp * self.virtual

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, dp, pp) coordinates."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def stage(self, pp_rank: int, chunk: int) -> int:
        """The stage of a pipeline rank's chunk-th piece: rank 0 holds stages 0, pp, 2 pp, ..."""
        return chunk * self.pp + pp_rank


@dataclass(frozen=True)
class Slot:
    """How one of Megatron-Core's tensors is made from GPT's."""

    source: str  #: GPT's name
    tp: int = 1
    dim: int | None = None  #: the dim that tensor-parallel ranks shard; None: not sharded
    order: Tensor | None = None  #: GPT's indices along dim, those of rank 0 first; None: as they are
    is_copy: bool = False  #: a copy of a tensor that another stage holds

    def indices(self, size: int, tp_rank: int) -> Tensor:
        """GPT's indices along dim that a tensor-parallel rank holds; PADDING where GPT has none."""
        order = torch.arange(size) if self.order is None else self.order
        return order.chunk(self.tp)[tp_rank]

    def shape(self, full: tuple[int, ...]) -> list[int]:
        shape = list(full)
        if self.dim is not None:
            shape[self.dim] = self.indices(full[self.dim], 0).numel()
        return shape

    def cut(self, full: Tensor, tp_rank: int) -> Tensor:
        """A tensor-parallel rank's shard of GPT's tensor."""
        if self.dim is None:
            return full
        rows = self.indices(full.shape[self.dim], tp_rank)
        part = full.index_select(self.dim, rows.clamp(min=0))
        if (rows == PADDING).any():
            part.index_fill_(self.dim, (rows == PADDING).nonzero().flatten(), 0.0)
        return part

    def paste(self, part: Tensor, full: Tensor, tp_rank: int) -> None:
        """Write a tensor-parallel rank's shard into GPT's tensor."""
        if self.dim is None:
            full.copy_(part)
            return
        rows = self.indices(full.shape[self.dim], tp_rank)
        real = (rows != PADDING).nonzero().flatten()
        full.index_copy_(self.dim, rows[real], part.index_select(self.dim, real).to(full.dtype))


def padded_vocab(vocab_size: int, tp: int) -> int:
    """The vocabulary size padded to a multiple of tp, so that all ranks hold equally many rows."""
    return -(-vocab_size // tp) * tp


def slots(model: ModelConfig, grid: Grid, stage: int) -> dict[str, Slot]:
    """Megatron-Core's name -> Slot, for one piece of the model; stages count along the model from 0."""
    found: dict[str, Slot] = {}
    vocabulary = torch.arange(padded_vocab(model.vocab_size, grid.tp))
    vocabulary[model.vocab_size :] = PADDING
    if stage == 0:
        found["embedding.word_embeddings.weight"] = Slot("token_embedding.weight", grid.tp, 0, vocabulary)
        if model.position == "learned":
            found["embedding.position_embeddings.weight"] = Slot("position_embedding.weight")
    layers = model.n_layer // grid.stages
    for layer in range(layers):
        theirs, ours = f"decoder.layers.{layer}", f"blocks.{stage * layers + layer}"
        found.update(_layer(model, grid.tp, theirs, ours))
    if stage == grid.stages - 1:
        found.update(_norm(model, "decoder.final_layernorm", "norm"))
        if not model.tied:
            found["output_layer.weight"] = Slot("head.weight", grid.tp, 0, vocabulary)
        elif grid.stages > 1:  # the tied head is a copy of the first stage's embedding
            found["output_layer.weight"] = Slot("token_embedding.weight", grid.tp, 0, vocabulary, is_copy=True)
    return found


def query_key_value_order(model: ModelConfig) -> Tensor:
    """GPT's rows of attn.qkv in Megatron-Core's order: for each key/value head its queries, key and value."""
    queries, keys, values = torch.arange((model.n_head + 2 * model.kv_heads) * model.d_head).split(
        [model.d_model, model.kv_heads * model.d_head, model.kv_heads * model.d_head]
    )
    by_group = [rows.view(model.kv_heads, -1) for rows in (queries, keys, values)]
    return torch.cat(by_group, dim=1).flatten()


def gate_value_order(ff_width: int, tp: int) -> Tensor:
    """GPT's rows of SwiGLU's mlp.up in Megatron-Core's order: for each rank its gate, then its value."""
    return torch.arange(2 * ff_width).view(2, tp, -1).transpose(0, 1).flatten()


def _layer(model: ModelConfig, tp: int, theirs: str, ours: str) -> dict[str, Slot]:
    up_order = gate_value_order(model.ff_width, tp) if model.gated else None
    linears = {  # ours, the dim that is sharded (0: outputs, with their biases; 1: inputs), the order along it
        "self_attention.linear_qkv": ("attn.qkv", 0, query_key_value_order(model)),
        "self_attention.linear_proj": ("attn.out", 1, None),
        "mlp.linear_fc1": ("mlp.up", 0, up_order),
        "mlp.linear_fc2": ("mlp.down", 1, None),
    }
    slots = _norm(model, f"{theirs}.input_layernorm", f"{ours}.attn_norm")
    slots |= _norm(model, f"{theirs}.pre_mlp_layernorm", f"{ours}.mlp_norm")
    for name, (source, dim, order) in linears.items():
        slots[f"{theirs}.{name}.weight"] = Slot(f"{ours}.{source}.weight", tp, dim, order)
        if model.bias:
            bias = f"{ours}.{source}.bias"
            slots[f"{theirs}.{name}.bias"] = Slot(bias, tp, 0, order) if dim == 0 else Slot(bias)
    return slots


def _norm(model: ModelConfig, theirs: str, ours: str) -> dict[str, Slot]:
    parts = ["weight"] + ["bias"] * (model.norm == "layernorm" and model.bias)
    return {f"{theirs}.{part}": Slot(f"{ours}.{part}") for part in parts}
