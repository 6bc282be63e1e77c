"""Megatron-Core: bytes that a step sends, in each kind of parallelism, and that a rank holds.

A is the residual stream of one micro-batch (B T D numbers). Per micro-batch, on the tp ranks that
share a layer:

    tensor parallel     all_reduce A twice a layer forward and twice backward, once for the
                        embedding, once for the gradient of the head's input; three times one number
                        a token for the loss (Narayanan et al. 2021; Shoeybi et al. 2019, figure 4)
    sequence parallel   an all_gather and a reduce_scatter of A in place of each all_reduce, and one
                        more all_gather a layer half: the backward pass gathers the input again
                        (Korthikanti et al. 2022, section 4.2.2)
    pipeline            send A to the next stage, its gradient to the previous one; A / tp with
                        sequence parallelism

Per step: gradients over dp (all_reduce, or with the distributed optimizer a reduce_scatter of the
gradients and an all_gather of the new weights, both padded), gradients of a tied embedding between
the first and the last stage, those of norms and biases over tp with sequence parallelism, and one
number, the gradient norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, lcm, prod

from aiscale.plan.config import ModelConfig, Run
from aiscale.plan.config.choices import ACTIVATIONS
from aiscale.plan.cost.memory import MOMENTS, NARROW, WIDE, counter_bytes, round_up
from aiscale.plan.cost.parameters import Shape, block_shapes, check_countable, norm_shapes

#: numbers; alignment of tensors in the buffer of the distributed optimizer
PARAMETER_ALIGNMENT = 64
BUCKET_ALIGNMENT = 128  #: numbers; alignment of a data-parallel rank's share of the buffer

FP32 = 4


@dataclass(frozen=True)
class Place:
    """A rank's position in the grid, and the sizes of its numbers."""

    run: Run
    world_size: int
    rank: int

    @property
    def dp(self) -> int:
        return self.world_size // (self.run.parallel.tp * self.run.parallel.pp)

    @property
    def dp_rank(self) -> int:
        return self.rank // self.run.parallel.tp % self.dp

    @property
    def pp_rank(self) -> int:
        return self.rank // (self.run.parallel.tp * self.dp)

    @property
    def stages(self) -> list[int]:
        """This rank's pieces of the model, numbered along the model."""
        layout = self.run.parallel
        return [chunk * layout.pp + self.pp_rank for chunk in range(layout.virtual_stages)]

    @property
    def last_stage(self) -> int:
        return self.run.parallel.pp * self.run.parallel.virtual_stages - 1

    @property
    def has_first(self) -> bool:
        return 0 in self.stages

    @property
    def has_last(self) -> bool:
        return self.last_stage in self.stages

    @property
    def layers(self) -> int:
        return len(self.stages) * self.run.model.n_layer // (self.last_stage + 1)

    @property
    def weight_bytes(self) -> int:
        return NARROW[self.run.loop.precision]

    @property
    def gradient_bytes(self) -> int:
        """fp32 for bf16 weights, but 2 bytes for fp16.

        arguments.py: accumulate_allreduce_grads_in_fp32 with bf16.
        """
        return 2 if self.run.loop.precision == "fp16" else WIDE[self.run.loop.precision]

    @property
    def micro_batch(self) -> tuple[int, int]:
        """(micro-batches in a step, tokens in each)."""
        n_micro, size = self.run.loop.micro_batches(self.dp)
        return n_micro, size * self.run.loop.seq_len

    def shapes(self, stage: int) -> dict[str, Shape]:
        """The shapes of this rank's tensors on one stage, with Megatron-Core's names and order."""
        model, tp = self.run.model, self.run.parallel.tp
        rows = ceil(model.vocab_size / tp)  # the vocabulary is padded to a multiple of tp
        shapes: dict[str, Shape] = {}
        if stage == 0:
            shapes["embedding.word_embeddings.weight"] = (rows, model.d_model)
            if model.position == "learned":
                shapes["embedding.position_embeddings.weight"] = (model.max_seq_len, model.d_model)
        layer = _layer_shapes(model, tp)
        for number in range(model.n_layer // (self.last_stage + 1)):
            shapes |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
        if stage == self.last_stage:
            shapes |= norm_shapes("decoder.final_layernorm", model)
            if not model.tied or stage > 0:
                shapes["output_layer.weight"] = (rows, model.d_model)
        return shapes


def megatron_traffic(run: Run, world_size: int, rank: int) -> dict[tuple[str, str], int]:
    place = Place(run, world_size, rank)
    sent = _tensor_parallel(place) if run.parallel.tp > 1 else {}
    sent |= _messages(place) if run.parallel.pp > 1 else {}
    sent |= _gradients(place) if place.dp > 1 else {}
    tied_apart = run.model.tied and run.parallel.pp > 1
    if tied_apart and (place.has_first or place.has_last):
        rows = ceil(run.model.vocab_size / run.parallel.tp)
        sent["all_reduce", "embedding"] = rows * run.model.d_model * place.gradient_bytes
    group, size = (
        ("optimizer", world_size)
        if run.parallel.distributed_optimizer
        else ("tp-pp", world_size // place.dp)
    )
    if size > 1:
        sent["all_reduce", group] = place.gradient_bytes
    return sent


def _tensor_parallel(place: Place) -> dict[tuple[str, str], int]:
    model, layout = place.run.model, place.run.parallel
    n_micro, tokens = place.micro_batch
    stream = tokens * model.d_model * place.weight_bytes
    layers, first, last = place.layers, place.has_first, place.has_last
    forwards = 2 if model.activation_checkpointing else 1
    loss = 3 * tokens * place.gradient_bytes if last else 0
    if not layout.sequence_parallel:
        sums = layers * 2 * (forwards + 1) + first + last
        return {("all_reduce", "tp"): n_micro * (stream * sums + loss)}
    # Learned positions are added before tokens are sharded; without them one reduce_scatter reduces
    # and shards.
    divided_later = model.position == "learned"
    gathers = layers * 2 * (forwards + 2) + first + 2 * last
    scatters = layers * 2 * (forwards + 1) + last + (first and not divided_later)
    whole = ("layernorm.weight", "layernorm.bias", "linear_proj.bias", "linear_fc2.bias")
    replicated = _held_numbers(place, lambda name: name.endswith(whole))
    reduced = n_micro * (stream * (first and divided_later) + loss)
    return {
        ("all_gather", "tp"): n_micro * stream * gathers,
        ("reduce_scatter", "tp"): n_micro * stream * scatters,
        ("all_reduce", "tp"): reduced + replicated * place.gradient_bytes,
    }


def _messages(place: Place) -> dict[tuple[str, str], int]:
    n_micro, tokens = place.micro_batch
    layout = place.run.parallel
    divided = layout.tp if layout.sequence_parallel else 1
    message = tokens * place.run.model.d_model * place.weight_bytes // divided
    ends = sum((stage > 0) + (stage < place.last_stage) for stage in place.stages)
    return {("send", "pp"): n_micro * message * ends, ("recv", "pp"): n_micro * message * ends}


def _gradients(place: Place) -> dict[tuple[str, str], int]:
    if not place.run.parallel.distributed_optimizer:
        return {("all_reduce", "dp"): place.gradient_bytes * _held_numbers(place)}
    numbers = sum(size for stage in place.stages for _, size in buckets(place, stage))
    return {
        ("reduce_scatter", "dp"): place.gradient_bytes * numbers,
        ("all_gather", "dp"): place.weight_bytes * numbers,
    }


def megatron_held(run: Run, world_size: int, rank: int) -> dict[str, int]:
    """Bytes that one rank holds between steps.

    In 16 bits the optimizer keeps fp32 masters of what it updates.
    """
    place = Place(run, world_size, rank)
    master = FP32 if place.weight_bytes < FP32 else 0
    if run.parallel.distributed_optimizer:
        pieces = [bucket for stage in place.stages for bucket in buckets(place, stage)]
        numbers = sum(size for _, size in pieces)
        updated, tensors = map(
            sum, zip(*(_share(place, *bucket) for bucket in pieces), strict=True)
        )
    else:
        numbers = updated = _held_numbers(place)
        tensors = sum(len(place.shapes(stage)) for stage in place.stages)
    each = MOMENTS[run.optimizer.name] * WIDE[run.loop.precision] + master
    return {
        "parameters": place.weight_bytes * numbers,
        "gradients": place.gradient_bytes * numbers,
        "optimizer states": each * updated + counter_bytes(run.optimizer.name, tensors),
    }


def _held_numbers(place: Place, chosen: Callable[[str], bool] = lambda name: True) -> int:
    """Numbers in this rank's tensors, or in those whose names are chosen."""
    shapes = [item for stage in place.stages for item in place.shapes(stage).items()]
    return sum(prod(shape) for name, shape in shapes if chosen(name))


def buckets(place: Place, stage: int) -> list[tuple[list[tuple[int, int]], int]]:
    """The distributed optimizer's buffers of one stage.

    (begin and end of each tensor, padded size) of each. Tensors are in reverse model order, as
    gradients appear; a tied embedding on two stages has its own bucket.
    """
    apart = place.run.model.tied and place.run.parallel.pp > 1
    groups: list[list[int]] = [[]]
    for name, shape in reversed(place.shapes(stage).items()):
        if apart and name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            groups += [[prod(shape)], []]
        else:
            groups[-1].append(prod(shape))
    buckets = []
    for sizes in filter(None, groups):
        extents, end = [], 0
        for size in sizes:
            start = round_up(end, PARAMETER_ALIGNMENT)
            end = start + size
            extents.append((start, end))
        buckets.append((extents, round_up(end, lcm(place.dp, BUCKET_ALIGNMENT))))
    return buckets


def _share(place: Place, extents: list[tuple[int, int]], size: int) -> tuple[int, int]:
    """(numbers, whole or partial tensors) of a bucket that this data-parallel rank updates."""
    start, end = (size // place.dp * edge for edge in (place.dp_rank, place.dp_rank + 1))
    parts = [min(b, end) - max(a, start) for a, b in extents]
    return sum(part for part in parts if part > 0), sum(part > 0 for part in parts)


def _layer_shapes(model: ModelConfig, tp: int) -> dict[str, Shape]:
    ours = block_shapes(model)
    names = (  # Megatron-Core's name, ours, the dim that tp shards
        ("input_layernorm", "attn_norm", None),
        ("self_attention.linear_proj", "attn.out", 1),
        ("self_attention.linear_qkv", "attn.qkv", 0),
        ("pre_mlp_layernorm", "mlp_norm", None),
        ("mlp.linear_fc1", "mlp.up", 0),
        ("mlp.linear_fc2", "mlp.down", 1),
    )
    shapes = {}
    for theirs, mine, dim in names:
        for part in ("weight", "bias"):
            if (shape := ours.get(f"{mine}.{part}")) is not None:
                cut = [size // tp if axis == dim else size for axis, size in enumerate(shape)]
                shapes[f"{theirs}.{part}"] = tuple(cut)
    return shapes


# Activations -------------------------------------------------------------------------------------


def megatron_activation_bytes_by_part(run: Run, world_size: int, rank: int = 0) -> dict[str, int]:
    """Activation bytes of one micro-batch in all of this rank's layers, by part.

    Scores are separate because flash attention does not keep them. In units of B T D numbers of a
    layer, with t tensor-parallel ranks, and bytes in Korthikanti et al. 2022:

        inputs of both norms and of qkv and mlp.up   4, over t with sequence parallelism    8
        q, k, v and attention's output               4 / t                                  8 / t
        both sides of GELU                           8 / t                                  16 / t
        scores, of H T for each D                    1 / t, in 16 bits also fp32's softmax  5 / t
    """
    place, model, layout = Place(run, world_size, rank), run.model, run.parallel
    check_countable(model)
    _, tokens = place.micro_batch
    each, t = place.weight_bytes, layout.tp
    divided = t if layout.sequence_parallel else 1
    stream = tokens * model.d_model * each // divided
    # For each token mean and 1/deviation, or (RMS, on a CPU) 1/root and the normed input.
    norm = tokens * each * (2 if model.norm == "layernorm" else 1 + model.d_model) // divided
    angles = 0
    if model.position == "rotary":  # for q and k
        angles = 4 * run.loop.seq_len * model.d_head * max(each, FP32)
    score = each + (FP32 if each < FP32 else 0)
    kept = 5 if model.gated else ACTIVATIONS[model.activation].kept
    layers, first, last = place.layers, place.has_first, place.has_last
    inner = {
        "norms": 2 * norm + 4 * stream,
        "attention": tokens * _attention_numbers(run) * each // t + angles,
        "scores": tokens * run.loop.seq_len * model.n_head // t * score,
        "mlp": tokens * model.ff_width * kept * each // t,
    }
    blocks = 1 if model.activation_checkpointing else layers
    parts = {part: blocks * nbytes for part, nbytes in inner.items()}
    if model.activation_checkpointing:
        parts["block_inputs"] = (layers - 1) * stream
    positions = 8 * run.loop.seq_len if model.position == "learned" else 0
    parts["embeddings"] = first * (8 * tokens + (tokens if t > 1 else 0) + positions)
    parts["head"] = last * (2 * stream + norm + 9 * tokens) + megatron_logit_bytes(place)
    return parts


def megatron_logit_bytes(place: Place) -> int:
    """Of one micro-batch on the last stage, kept by the loss in fp32; part of "head"."""
    _, tokens = place.micro_batch
    rows = ceil(place.run.model.vocab_size / place.run.parallel.tp)
    return place.has_last * tokens * rows * max(place.weight_bytes, FP32)


def _attention_numbers(run: Run) -> int:
    """Numbers per token before sharding over tp: q, k, v and attention's output.

    q, k and v are views of one tensor unless something changes them. Rotated q and k are kept in
    addition to that tensor, since v is a view of it; shared k and v are expanded for every head.
    """
    model = run.model
    width = model.d_model
    if model.kv_heads != model.n_head:
        return 4 * width
    return (6 if model.position == "rotary" else 4) * width
