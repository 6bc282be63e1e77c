"""The planner sends as much as often as `cost` says of a step, which the byte table measures."""

from __future__ import annotations

import dataclasses

import pytest

from aiscale.plan import cost
from aiscale.plan.answer import Answer, plan
from aiscale.plan.config import ModelConfig, Run
from aiscale.plan.constants import constants
from aiscale.plan.hardware import platform_of
from aiscale.plan.layout import PROGRAMS, Layout, Shape, Software, shape_of
from aiscale.plan.machines import find_machine
from aiscale.plan.memory import layer_bytes
from aiscale.plan.options import planned
from aiscale.plan.step import seconds
from ranks import forked

RANKS = 1024
#: Nothing but communication is waited for, and nothing hides it.
BARE = constants(launch_s=0, launch_tp_s=0, launch_fsdp_s=0, cast_bytes=0)
VISIBLE = Software(overlap=False, tp_overlap="none")
#: category of ours -> of the planner
STATES = {"parameters": "weights", "gradients": "gradients", "optimizer states": "optimizer states"}


def run_of(trainer: str, words: str, layers: int, width: int, vocabulary: int) -> Run:
    """Without biases and learned positions, which the planner leaves out."""
    run = planned(trainer, f"{words} --model 175b --length {width} --micro-batch 1")
    sizes = {
        "n_layer": layers,
        "n_head": 16,
        "d_model": width,
        "vocab_size": vocabulary,
        "max_seq_len": width,
    }
    model = ModelConfig(**sizes, bias=False, position="rotary")
    return dataclasses.replace(run, model=model)


def layer_and_ends(trainer: str, words: str, *sizes: int) -> tuple[dict, dict]:
    """(what one more layer adds, the rest of a collective): {cell: bytes} of rank 0 of 1,024."""
    one, two = (cost.step_traffic(run_of(trainer, words, n, *sizes), RANKS, 0) for n in (1, 2))
    layer = {cell: two[cell] - one[cell] for cell in two if two[cell] > one.get(cell, 0)}
    return layer, {cell: one[cell] - nbytes for cell, nbytes in layer.items()}


def answer_to(run: Run, **layout) -> Answer:
    layout = Layout(
        global_batch=layout["dp"], precision=run.loop.precision, software=VISIBLE, **layout
    )
    return plan(
        shape_of(run.model, run.loop.seq_len), layout, platform_of(find_machine("frontier")), BARE
    )


def test_the_planner_gathers_and_scatters_a_layer_as_often_and_as_much_as_fsdp2():
    sizes = 2048, 32768  # all tensors divide by 1,024
    words = f"--bf16 --batch {RANKS}"
    layer, tables = layer_and_ends("fsdp", words, *sizes)
    run = run_of("fsdp", words, 4, *sizes)
    answer = answer_to(run, dp=RANKS, fsdp=True)
    calls = {"all_gather": 2, "reduce_scatter": 1}  # the tables, used at both ends, stay gathered

    def took_s(part: dict, calls: dict[str, int]) -> float:
        return sum(
            calls[op] * seconds(op, nbytes / calls[op], RANKS, 8, answer.platform, BARE)
            for (op, _), nbytes in part.items()
        )

    assert {op for op, _ in layer} == set(calls)
    both_s = 4 * took_s(layer, calls) + took_s(tables, dict.fromkeys(calls, 1))
    assert answer.step.parts["gradients and weights"] == pytest.approx(both_s, rel=1e-4)
    held = cost.held_bytes(run, RANKS, 0)
    for ours, its in STATES.items():  # which leave out the last norm and AdamW's step counters
        assert answer.stages[0][its] == pytest.approx(held[ours], rel=1e-3), ours


@pytest.mark.parametrize("precision", ["--bf16", ""])
def test_the_planner_sums_activations_and_gradients_as_often_and_as_much_as_megatron(precision):
    words = f"--tp 8 --pp 1 {precision} --batch 128"
    sizes = 256, 4096
    layer, ends = layer_and_ends("megatron", words, *sizes)
    calls, nbytes = 4, layer["all_reduce", "tp"]
    scalars = 3 * 256 * 4  # of the loss: a maximum, a sum and a target of each token
    # after the embedding, before the head
    assert ends["all_reduce", "tp"] == 2 * nbytes / calls + scalars
    run = run_of("megatron", words, 4, *sizes)
    answer = answer_to(run, dp=128, tp=8, zero_stage=1)
    once_s = seconds("all_reduce", nbytes / calls, 8, 8, answer.platform, BARE)
    assert answer.step.parts["tensor parallel"] == pytest.approx((4 * calls + 2) * once_s)
    whole = cost.step_traffic(run, RANKS, 0)
    both = [(op, whole[op, "dp"]) for op in ("reduce_scatter", "all_gather")]
    exchange_s = sum(seconds(op, nbytes, 128, 1, answer.platform, BARE) for op, nbytes in both)
    assert answer.step.parts["gradients and weights"] == pytest.approx(exchange_s, rel=1e-2)
    held = cost.held_bytes(run, RANKS, 0)
    for ours, its in STATES.items():  # norms are on every tensor-parallel rank, buckets are padded
        assert answer.stages[0][its] == pytest.approx(held[ours], rel=1e-2), ours


KEPT = """
import torch
from aiscale.measure.distributed.fake import fake_world
from aiscale import without_gpu
without_gpu.prepare_megatron()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

def kept(call, *tensors):
    sizes = {}
    def pack(tensor):
        sizes[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(*tensors) is not None and sum(sizes.values())

with fake_world(2, rank=0, memory=True):
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    logits, up = (torch.ones(64, n, 4096, dtype=torch.bfloat16, requires_grad=True) for n in (1, 2))
    targets = torch.zeros(64, 1, dtype=torch.long)
    loss = kept(tensor_parallel.vocab_parallel_cross_entropy, logits, targets)
    gated = kept(lambda x: SwiGLUFunction.apply(x, False, False).square(), up.view(64, -1))
    print(logits.nbytes + loss, gated)
"""


@pytest.mark.extended
def test_megatrons_loss_and_swiglu_keep_the_bytes_that_its_program_is_planned_with():
    done, c = forked(["-c", KEPT], timeout=120), constants()
    loss, swiglu = (int(nbytes) / (64 * 4096) for nbytes in done.stdout.split()[-2:])
    # 10 are counted without it
    assert loss == pytest.approx(10 * c.loss_in_place, rel=1e-2), done.stderr
    shape = Shape(layers=1, hidden=64, heads=1, ffn=4096, gated=True, vocab=64, seq=64)
    plain, fused = (
        layer_bytes(shape, Layout(software=s), 1, c) for s in (Software(), PROGRAMS["megatron"])
    )
    assert swiglu == 6 and (plain - fused) / 4096 == pytest.approx(c.gated_bytes * (1 - swiglu / 8))
