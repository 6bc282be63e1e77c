"""Experts, latent attention, context parallelism and fp8 in the planner: by hand, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from aiscale.cli import main
from aiscale.errors import ConfigError
from aiscale.plan import rows
from aiscale.plan.answer import plan
from aiscale.plan.constants import CONSTANTS, constants
from aiscale.plan.experts import copies_of, copies_over_nodes, exchange_seconds
from aiscale.plan.hardware import platform
from aiscale.plan.layer import seconds
from aiscale.plan.layout import SHAPES, Layout, Shape, Software
from aiscale.plan.memory import layer_bytes, one_stage, stage_grids
from aiscale.plan.search import meshes, search, tuned
from aiscale.plan.step import step_seconds

H100 = platform("h100-sxm5-80gb", node_gbit_s=3200.0)
MOE = Shape(
    layers=8, hidden=1024, heads=16, ffn=4096, gated=True, vocab=32768, seq=2048,
    experts=16, top_k=2, expert_ffn=512,
)  # fmt: skip
BASE = Layout(dp=16, tp=2, ep=8, zero_stage=1, sequence_parallel=True, global_batch=64)


def test_models_have_the_parameters_that_their_makers_print():
    published = {
        "mixtral-8x7b": (46.7, 12.9),
        "mixtral-8x22b": (141, 39),
        "olmoe-1b-7b": (6.9, 1.3),
        "qwen3-235b-a22b": (235, 22),
        "deepseek-v3": (671, 37),
    }
    for name, (total, active) in published.items():
        shape = SHAPES[name]
        assert shape.parameters / 1e9 == pytest.approx(total, rel=0.01), name
        assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.025), name


def test_flops_count_the_experts_that_a_token_meets():
    active = 1024 * 3072 + 1024 * 1024 + 1024 * 16 + 2048 + 2 * 3 * 1024 * 512
    flops = 6 * (8 * active + 32768 * 1024) + 12 * 8 * 1024 * 2048
    assert MOE.flops_per_token() == pytest.approx(flops)
    assert MOE.parameters > 2 * MOE.active_parameters


def test_experts_and_everything_else_lie_on_two_grids():
    assert BASE.expert_replicas == 16 * 2 // 8
    dense, experts = stage_grids(MOE, BASE, BASE.stages(MOE)[0])
    assert experts == 8 * 16 * 3 * 1024 * 512 / 8
    held = one_stage(MOE, BASE, 0, CONSTANTS)
    assert held["weights"] == pytest.approx(2 * (dense + experts))
    assert held["optimizer states"] == pytest.approx(12 * (dense / 16 + experts / 4))
    cut = replace(BASE, ep=4, etp=2)
    assert stage_grids(MOE, cut, cut.stages(MOE)[0])[1] == experts


def test_a_token_is_kept_once_for_each_of_its_experts():
    one = replace(BASE, ep=1, tp=1, sequence_parallel=False)
    more = layer_bytes(replace(MOE, top_k=3), one, 1.0, CONSTANTS)
    less = layer_bytes(MOE, one, 1.0, CONSTANTS)
    assert more - less == pytest.approx(2 * 1024 + CONSTANTS.gated_bytes * 512)


def test_tokens_travel_to_experts_and_back_in_both_passes():
    c = constants(exchange_node=1.0, exchange_network=1.0)
    layout = replace(BASE, tp=1, ep=8, sequence_parallel=False)
    copies = copies_of(MOE, layout, 2048)
    once = seconds("all_to_all", 2 * 2 * 2048 * 1024, 8, 8, H100, c)
    assert copies == 2 * 2048
    assert exchange_seconds(MOE, layout, copies, H100, c, seconds) == pytest.approx(4 * once)
    far = replace(layout, dp=64, ep=16)
    by_node = replace(far, software=Software(dispatch="by node"))
    both = [exchange_seconds(MOE, one, copies, H100, c, seconds) for one in (far, by_node)]
    assert both[1] < both[0]
    # two experts on two nodes: both on one in half of the cases
    assert copies_over_nodes(2, 2) == pytest.approx(1.5)
    # inside a node every copy travels
    fast = platform("h100-sxm5-80gb", node_gbit_s=1e6)
    inside = seconds("all_to_all", 2000 * copies * 1024, 8, 8, fast, c)
    assert exchange_seconds(MOE, by_node, 1000 * copies, fast, c, seconds) >= 4 * inside


def test_only_where_deepep_runs_a_token_is_sent_once_to_a_node(capsys):
    argv = "plan --model mixtral-8x7b --nodes 2 --layout ep=8 --machine"
    for machine, said in (("frontier", "(all-to-all)"), ("dgx-h100", "(DeepEP)")):
        main([*argv.split(), machine])
        assert f"{said}\n" in capsys.readouterr().out, machine
    assert tuned(platform("a100-sxm4-80gb")).dispatch == "alltoall"


@pytest.mark.parametrize("seq, most", [(8191, 1), (8192, 8)])
def test_context_parallelism_is_tried_from_8192_tokens(seq, most):
    tried = meshes(replace(SHAPES["llama-8b"], seq=seq), H100, 64, 64)
    assert max(bases[0].cp for bases in tried) == most


def test_ranks_that_share_an_expert_hold_all_of_its_tokens():
    one = replace(BASE, ep=2)
    cut = replace(one, etp=2)
    more = layer_bytes(MOE, cut, 1.0, CONSTANTS) - layer_bytes(MOE, one, 1.0, CONSTANTS)
    assert more == pytest.approx(copies_of(MOE, one, 1) * 2 * MOE.hidden)


def test_narrow_experts_with_few_tokens_run_slower_and_dropping_tokens_helps():
    def compute_s(**changes):
        layout = replace(BASE, software=Software(graphed=True))  # no host
        return step_seconds(replace(MOE, **changes), layout, H100, CONSTANTS).compute_s

    wide = {"experts": 16, "top_k": 2, "expert_ffn": 512}
    fine = {"experts": 128, "top_k": 16, "expert_ffn": 64}
    assert compute_s(**fine) > 1.2 * compute_s(**wide)
    assert compute_s(capacity=0.5) < compute_s(capacity=1.0) < compute_s(capacity=2.0)


def test_latent_attention_keeps_and_multiplies_what_it_compresses():
    plain = Shape(layers=4, hidden=2048, heads=16, head_dim=128, vocab=32000, seq=4096)
    latent = replace(plain, q_rank=512, kv_rank=256, rope_width=64)
    parameters = 2048 * 512 + 512 * 16 * 192 + 2048 * 320 + 256 * 16 * 256 + 16 * 128 * 2048
    assert sum(c * k for c, k in latent.attention_matrices(1)) == parameters
    assert latent.attention_kept == 512 + 320 + 16 * (2 * 192 + 2 * 128)
    grouped = replace(plain, kv_heads=4)
    assert grouped.attention_kept == plain.attention_kept * (1 + 1 / 4) / 2


def test_a_ring_hides_behind_attention_and_all_to_all_does_not():
    long = replace(SHAPES["llama-8b"], seq=131072)
    ring = Layout(dp=1, cp=8, global_batch=8, recompute="full")
    both = [
        step_seconds(long, replace(ring, cp_kind=kind), H100, CONSTANTS).parts["tensor parallel"]
        for kind in ("ring", "all-to-all")
    ]
    assert 0 < both[0] < both[1]


def test_fp8_multiplies_faster_and_pays_for_its_casts():
    shape, layout = SHAPES["llama-8b"], Layout(dp=8, micro_batch=2, global_batch=128)
    half, eight = (
        step_seconds(shape, replace(layout, precision=name), H100, CONSTANTS).compute_s
        for name in ("bf16", "fp8")
    )
    free = step_seconds(shape, replace(layout, precision="fp8"), H100, constants(fp8_cast=0))
    assert free.compute_s < eight < half


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (MOE, {"ep": 3}, "16 experts are not divisible by ep 3"),
        (MOE, {"dp": 2, "ep": 8}, "ep 8 x etp 1 does not divide dp 2 x cp 1 x tp 2 = 4 ranks"),
        (SHAPES["llama-8b"], {"ep": 2}, "ep 2 x etp 1, but the model has no experts"),
        (MOE, {"tp": 8, "cp": 4, "cp_kind": "all-to-all"}, r"heads 16 / \(tp 8 x cp 4\)"),
    ],
)
def test_layouts_that_do_not_fit_experts_or_heads_are_refused(shape, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan(shape, replace(BASE, **changes), H100)


def test_the_command_plans_experts_and_says_what_nobody_measured(capsys):
    argv = "plan --model mixtral-8x7b --machine dgx-h100 --nodes 4 --batch 256 --json"
    assert main([*argv.split(), "--layout", "ep=8,pp=2"]) in (0, 1)
    answer = json.loads(capsys.readouterr().out)
    assert answer["active_params_B"] < 0.3 * answer["params_B"]
    assert answer["tokens"] == pytest.approx(20e9 * answer["active_params_B"], rel=1e-3)
    assert "tokens to experts" in answer["seconds"]
    assert any("memory" in caution for caution in answer["cautions"])
    assert answer["checkpoint_GB"] == pytest.approx(14 * answer["params_B"], rel=1e-3)
    argv = "plan --model llama-8b --machine dgx-h100 --batch 64 --experts 8 --top-k 9 --json"
    assert main(argv.split()) == 2
    assert "top_k 9 of 8 experts" in capsys.readouterr().err


def test_a_row_may_have_experts_under_the_names_that_tables_give_them():
    ours = {"gpus": "8", "experts": "8", "top_k": "2", "expert_ffn": "4096", "ep": "4"}
    theirs = {"gpus": "8", "num_experts": "8", "topk": "2", "moe_ffn": "4096", "ep": "4"}
    first, second = rows.answers([ours, theirs])
    assert first | {"id": ""} == second | {"id": ""} and first["step_time_s"]


def test_the_search_tries_expert_ranks_and_large_micro_batches():
    found = search("mixtral-8x7b", H100, 64, 512)
    tried = {answer.layout.ep for answer in found.ranked}
    assert {1, 8} <= tried and found.best.layout.ep > 1
    small = search("gpt2", H100, 8, 4096)
    assert max(answer.layout.micro_batch for answer in small.ranked) > 16
