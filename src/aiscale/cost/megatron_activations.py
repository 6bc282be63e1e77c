"""What Megatron-Core keeps for the backward pass, under tensor and sequence parallelism and on a pipeline's stages.

    megatron_activation_bytes(run, world_size, rank)          # of one micro-batch, to a per cent
    megatron_activation_bytes_by_part(run, world_size, rank)  # {"norms": ..., "attention": ..., "scores": ..., ...}

In numbers for each of the B T D of a layer, t tensor-parallel ranks (Korthikanti et al. 2022, section 4, count the same
in bytes of 16 bits, and dropout's masks, which training without dropout has not):

    inputs of both norms and of qkv and mlp.up    4, over t with sequence parallelism        their 8 bytes
    q, k, v and attention's output                4 / t                                      their 8 / t
    both sides of GELU                            8 / t                                      their 16 / t
    scores, of H T for each D                     1 / t, in 16 bits also the softmax in fp32  their 5 / t

Megatron-Core's own attention, without Transformer Engine, keeps the scores; flash attention would not (`scores` is then
0), as they recommend by recomputing them. How many micro-batches a stage holds at once says `pipeline.in_flight`.
"""

from __future__ import annotations

from aiscale.config import Run
from aiscale.cost.megatron import Place, padded_vocab
from aiscale.cost.parameters import check_dense

FP32 = 4


def megatron_activation_bytes(run: Run, world_size: int, rank: int = 0) -> int:
    """Bytes that a forward pass of one micro-batch through all of this rank's layers keeps."""
    return sum(megatron_activation_bytes_by_part(run, world_size, rank).values())


def megatron_activation_bytes_by_part(run: Run, world_size: int, rank: int = 0) -> dict[str, int]:
    """The same, by part; scores are apart because other attention kernels do not keep them."""
    place, model, layout = Place(run, world_size, rank), run.model, run.parallel
    check_dense(model)
    _, tokens = place.micro_batch
    each, t = place.weight_bytes, layout.tp
    divided = t if layout.sequence_parallel else 1
    stream = tokens * model.d_model * each // divided
    # Of each token mean and 1/deviation, or (RMS, on a CPU) 1/root, and the normed input.
    norm = tokens * each * (2 if model.norm == "layernorm" else 1 + model.d_model) // divided
    angles = 4 * run.loop.seq_len * model.d_head * max(each, FP32) if model.position == "rotary" else 0  # for q and k
    layers = len(place.stages) * model.n_layer // (place.last_stage + 1)
    first, last = 0 in place.stages, place.last_stage in place.stages
    inner = {
        "norms": 2 * norm + 4 * stream,
        "attention": tokens * _attention_numbers(run) * each // t + angles,
        "scores": tokens * run.loop.seq_len * model.n_head // t * (each + (FP32 if each < FP32 else 0)),
        "mlp": tokens * model.ff_width * (5 if model.activation == "swiglu" else 2) * each // t,
    }
    kept = 1 if model.activation_checkpointing else layers
    parts = {part: kept * nbytes for part, nbytes in inner.items()}
    if model.activation_checkpointing:
        parts["block_inputs"] = (layers - 1) * stream
    positions = 8 * run.loop.seq_len if model.position == "learned" else 0
    parts["embeddings"] = first * (8 * tokens + (tokens if t > 1 else 0) + positions)
    logits = tokens * padded_vocab(model, t) // t * max(each, FP32)
    parts["head"] = last * (2 * stream + norm + logits + 9 * tokens)
    return parts


def _attention_numbers(run: Run) -> int:
    """Numbers a token before they are divided by tp: q, k and v, as views of one tensor where nothing changes them, and
    attention's output. Rotated q and k are kept beside what they came from, for v is part of it; where heads share k
    and v, these are written out for every head."""
    model = run.model
    width = model.d_model
    if model.kv_heads != model.n_head:
        return 4 * width
    return (6 if model.position == "rotary" else 4) * width
