"""FSDP2, DDP and Megatron-Core among 1,024 ranks that do not exist send and hold what cost and the planner say."""

import json
from pathlib import Path

import pytest

from aiscale.machines import find_machine
from aiscale.plan.answer import Answer, plan
from aiscale.plan.constants import constants
from aiscale.plan.hardware import platform_of
from aiscale.plan.layout import PROGRAMS, Layout, Shape, Software, shape_of
from aiscale.plan.memory import layer_bytes
from aiscale.plan.step import seconds
from aiscale.verify.bytes import ByteCase
from ranks import forked

RANKS = 1024
FSDP, DDP, MEGATRON = (f"parallel.strategy={name}" for name in ("fsdp", "ddp", "megatron"))
TP8, BF16, ZERO1 = "parallel.tp=8", "loop.precision=bf16", "parallel.distributed_optimizer=true"
#: Its tensors have 16 to 256 rows: some ranks hold no row of some.
SMALL = ("model.n_layer=2", "model.n_head=8", "model.d_model=64")


def counted(jobs: list[list]) -> list[list[list[dict]]]:
    """The answers of `fakes`, a process apart: this one need not import Megatron-Core."""
    done = forked(["-m", "fakes", json.dumps(jobs)], timeout=600, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


#: strategy -> (settings, a rank of each role)
ROLES = {
    "fsdp": (((FSDP,), (0, 1023)), ((FSDP, BF16, "parallel.replicas=8"), (128,))),
    "ddp": (((DDP,), (0, 1023)), ((DDP, ZERO1), (0, 30, 1023))),
    "megatron": (
        ((MEGATRON, TP8), (0, 7, 1023)),
        ((MEGATRON, TP8, ZERO1, BF16), (0, 8, 1023)),
        ((MEGATRON, TP8, "parallel.pp=2"), (0, 1023)),
    ),
}


@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(s, marks=pytest.mark.extended) for s in ("fsdp", "megatron"))]
)
def test_a_rank_of_each_role_of_1024_sends_and_holds_the_predicted_bytes(strategy):
    memory, steps = strategy != "fsdp", 3 if strategy == "ddp" else 1  # DDP settles its buckets in the first
    jobs = [[[*SMALL, *settings], 1, RANKS, ranks, memory, steps] for settings, ranks in ROLES[strategy]]
    for (settings, ranks), answers in zip(ROLES[strategy], counted(jobs), strict=True):
        for rank, rows in zip(ranks, answers, strict=True):
            assert [row for row in rows if row["predicted"] != row["measured"]] == [], (settings, rank)
            assert sum(row["measured"] for row in rows if row["kind"] == "payload") > 0, (settings, rank)


#: Nothing but communication is waited for, and nothing hides it.
BARE = constants(launch_s=0, launch_tp_s=0, launch_fsdp_s=0, cast_bytes=0)
VISIBLE = Software(overlap=False, tp_overlap="none")
#: category of ours -> of the planner
STATES = {"parameters": "weights", "gradients": "gradients", "optimizer states": "optimizer states"}


def model(d: int, vocab: int, tokens: int, precision: str) -> list[str]:
    """No biases and no learned positions, which the planner leaves out."""
    sizes = ("n_head=16", f"d_model={d}", f"vocab_size={vocab}", f"max_seq_len={tokens}", "bias=false")
    settings = [f"model.{size}" for size in (*sizes, "position=rotary")]
    return [*settings, f"loop.seq_len={tokens}", f"loop.precision={precision}"]


def layers_and_all(settings: list[str], strategy: str) -> tuple[dict, dict, dict]:
    """(what one more layer adds, the rest of a collective beside four layers, what all takes): {what: (calls, bytes)}
    of rank 0 of 1,024."""
    memory = strategy != "fsdp"
    jobs = [[[*settings, f"model.n_layer={n}"], 1, RANKS, [0], memory, 1] for n in (1, 2, 4)]
    one, two, four = ({row["what"]: (row["calls"], row["measured"]) for row in ranks[0]} for ranks in counted(jobs))
    added = {what: (two[what][0] - one[what][0], two[what][1] - one[what][1]) for what in two}
    layer = {what: cell for what, cell in added.items() if cell[0] and cell[1]}
    ends = {what: (four[what][0] - 4 * calls, four[what][1] - 4 * nbytes) for what, (calls, nbytes) in layer.items()}
    return layer, ends, four


def planned(settings: list[str], **layout) -> Answer:
    run = ByteCase("four layers", (*settings, "model.n_layer=4"), ()).run(1)
    layout = Layout(global_batch=layout["dp"], precision=run.loop.precision, software=VISIBLE, **layout)
    return plan(shape_of(run.model, run.loop.seq_len), layout, platform_of(find_machine("frontier")), BARE)


@pytest.mark.extended
def test_the_planner_gathers_and_scatters_a_layer_as_often_and_as_much_as_fsdp2():
    settings = model(2048, 32768, 2048, "bf16")  # all tensors divide by 1,024
    layer, tables, whole = layers_and_all([*settings, FSDP], "fsdp")
    assert {what: calls for what, (calls, _) in layer.items()} == {"all_gather world": 2, "reduce_scatter world": 1}
    assert {what: calls for what, (calls, _) in tables.items()} == {"all_gather world": 1, "reduce_scatter world": 1}
    answer = planned(settings, dp=RANKS, fsdp=True)
    layer_s, table_s = (
        sum(
            calls * seconds(what.partition(" ")[0], nbytes / calls, RANKS, 8, answer.platform, BARE)
            for what, (calls, nbytes) in part.items()
        )
        for part in (layer, tables)
    )
    both_s = pytest.approx(4 * layer_s + table_s, rel=1e-4)  # the last norm goes with the table
    assert answer.step.parts["gradients and weights"] == both_s
    for ours, its in STATES.items():  # which leave out the last norm and AdamW's step counters
        assert answer.stages[0][its] == pytest.approx(whole[ours][1], rel=1e-3), ours


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_planner_sums_activations_and_gradients_as_often_and_as_much_as_megatron(precision):
    settings = model(256, 4096, 256, precision)
    layer, ends, whole = layers_and_all([*settings, MEGATRON, TP8, ZERO1], "megatron")
    calls, nbytes = layer["all_reduce tp"]
    assert calls == 4
    scalars = 3 * 256 * 4  # of the loss: a maximum, a sum and a target of each token
    assert ends["all_reduce tp"] == (2 + 3, 2 * nbytes / calls + scalars)  # after the embedding, before the head
    answer = planned(settings, dp=128, tp=8, zero_stage=1)
    once_s = seconds("all_reduce", nbytes / calls, 8, 8, answer.platform, BARE)
    assert answer.step.parts["tensor parallel"] == pytest.approx((4 * calls + 2) * once_s)
    both = [(op, whole[f"{op} dp"][1]) for op in ("reduce_scatter", "all_gather")]
    exchange_s = sum(seconds(op, nbytes, 128, 1, answer.platform, BARE) for op, nbytes in both)
    assert answer.step.parts["gradients and weights"] == pytest.approx(exchange_s, rel=1e-2)
    for ours, its in STATES.items():  # norms are on every tensor-parallel rank, buckets are padded
        assert answer.stages[0][its] == pytest.approx(whole[ours][1], rel=1e-2), ours


KEPT = """
import torch
from aiscale.distributed.fake import fake_world
from aiscale.parallel import preload
preload("megatron")
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction

def kept(call, *tensors):
    sizes = {}
    pack = lambda tensor: sizes.update({tensor.untyped_storage().data_ptr(): tensor.nbytes}) or tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return call(*tensors) is not None and sum(sizes.values())

with fake_world(2, rank=0, memory=True):
    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    logits, up = (torch.ones(64, n, 4096, dtype=torch.bfloat16, requires_grad=True) for n in (1, 2))
    loss = kept(tensor_parallel.vocab_parallel_cross_entropy, logits, torch.zeros(64, 1, dtype=torch.long))
    print(logits.nbytes + loss, kept(lambda x: SwiGLUFunction.apply(x, False, False).square(), up.view(64, -1)))
"""


@pytest.mark.extended
def test_megatrons_loss_and_swiglu_keep_the_bytes_that_its_program_is_planned_with():
    done, c = forked(["-c", KEPT], timeout=120), constants()
    loss, swiglu = (int(nbytes) / (64 * 4096) for nbytes in done.stdout.split()[-2:])
    assert loss == pytest.approx(10 * c.loss_in_place, rel=1e-2), done.stderr  # 10 are counted without it
    shape = Shape(layers=1, hidden=64, heads=1, ffn=4096, gated=True, vocab=64, seq=64)
    plain, fused = (layer_bytes(shape, Layout(software=s), 1, c) for s in (Software(), PROGRAMS["megatron"]))
    assert swiglu == 6 and (plain - fused) / 4096 == pytest.approx(c.gated_bytes * (1 - swiglu / 8))
