"""GPT's weights in Megatron-Core's order, without Megatron-Core and without processes."""

import dataclasses
import itertools

import pytest
import torch

from aiscale.config import ModelConfig
from aiscale.model import GPT
from aiscale.parallel.megatron import shards
from aiscale.parallel.megatron.layout import Grid, padded_vocab, slots

GPT2 = ModelConfig(n_layer=4, n_head=4, d_model=16, vocab_size=67, max_seq_len=8)
LLAMA = dataclasses.replace(
    GPT2, n_kv_head=2, norm="rmsnorm", position="rotary", activation="swiglu", tied=False, bias=False, d_ff=24
)


def cut_everywhere(model: ModelConfig, grid: Grid, state: dict) -> dict:
    return {
        (stage, rank, name): slot.cut(state[slot.source], rank)
        for stage in range(grid.stages)
        for name, slot in slots(model, grid, stage).items()
        for rank in range(grid.tp)
    }


@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize(("tp", "pp", "virtual"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 4), (1, 2, 2)])
def test_every_weight_comes_back_from_every_layout(model, tp, pp, virtual):
    torch.manual_seed(0)
    state = {name: torch.randn_like(tensor) for name, tensor in GPT(model).state_dict().items()}
    grid = Grid(tp=tp, pp=pp, virtual=virtual)
    parts = cut_everywhere(model, grid, state)
    back = {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}
    for stage, rank in itertools.product(range(grid.stages), range(tp)):
        for name, slot in slots(model, grid, stage).items():
            slot.paste(parts[stage, rank, name], back[slot.source], rank)
            assert list(parts[stage, rank, name].shape) == slot.shape(state[slot.source].shape)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_the_padded_vocabulary_is_zero_and_belongs_to_the_last_rank():
    slot = slots(GPT2, Grid(tp=2), 0)["embedding.word_embeddings.weight"]
    full = torch.ones(67, 16)
    assert padded_vocab(67, 2) == 68
    assert padded_vocab(50257, 2) == 50258
    assert slot.cut(full, 0).sum() == 34 * 16
    assert slot.cut(full, 1).sum() == 33 * 16
    assert not slot.cut(full, 1)[-1].any()


def test_interleaved_ranks_hold_non_adjacent_layers():
    grid = Grid(pp=2, virtual=2)
    found = [slots(GPT2, grid, grid.stage(pp, chunk)) for pp in range(2) for chunk in range(2)]
    layers = [{slot.source.split(".")[1] for slot in stage.values() if "blocks" in slot.source} for stage in found]
    assert layers == [{"0"}, {"2"}, {"1"}, {"3"}]


def test_a_tied_head_is_a_copy_if_the_embedding_is_on_another_stage():
    assert "output_layer.weight" not in slots(GPT2, Grid(tp=2), 0)
    head = slots(GPT2, Grid(pp=2), 1)["output_layer.weight"]
    assert head.source == "token_embedding.weight"
    assert head.is_copy


def write_checkpoint(folder, grid: Grid, model=GPT2) -> dict:
    """Write one as the distributed optimizer would: data-parallel ranks hold uneven ranges of every tensor."""
    torch.manual_seed(0)
    state = {name: torch.randn_like(tensor) for name, tensor in GPT(model).state_dict().items()}
    for rank in range(grid.tp * grid.dp * grid.pp):
        tp, dp, pp = grid.coordinates(rank)
        mine = []
        for chunk in range(grid.virtual):
            stage = grid.stage(pp, chunk)
            for name, slot in slots(model, grid, stage).items():
                if slot.is_copy or (slot.dim is None and tp > 0):
                    continue
                flat = slot.cut(state[slot.source], tp).reshape(-1)
                bounds = [0, *(flat.numel() // 3 + i for i in range(grid.dp - 1)), flat.numel()]
                start, end = bounds[dp], bounds[dp + 1]
                main = flat[start:end]
                moments = {"exp_avg": 2 * main, "exp_avg_sq": 3 * main, "step": torch.tensor(7.0)}
                mine.append(shards.Shard(stage, name, slot, flat, main, start, end, moments))
        shards.write(folder, shards.content(mine, rank=rank, grid=grid, model=model, optimizer="adamw"))
    return state


@pytest.mark.parametrize("grid", [Grid(tp=2, pp=2, dp=2), Grid(pp=2, virtual=2), Grid(tp=2, dp=3)])
def test_a_checkpoint_is_read_without_processes(grid, tmp_path):
    state = write_checkpoint(tmp_path, grid)
    found = shards.weights(tmp_path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    saved = shards.Saved(tmp_path)
    assert all(torch.equal(saved.tensor(name, "exp_avg_sq"), 3 * tensor) for name, tensor in state.items())
    assert saved.state("norm.weight") == (["exp_avg", "exp_avg_sq"], {"step": 7.0})
