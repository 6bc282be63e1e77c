"""Formulas against torch's counters, and against the numbers that papers print."""

import itertools
import random

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from aiscale.lesson.model import GPT
from aiscale.lesson.optim import build_optimizer
from aiscale.plan import cost
from aiscale.plan.config import LoopConfig, ModelConfig, OptimizerConfig, ParallelConfig, Run

SMALL = {"n_layer": 3, "n_head": 4, "d_model": 64, "vocab_size": 130, "max_seq_len": 64}
GPT3 = ModelConfig(n_layer=96, n_head=96, d_model=12288, vocab_size=51200, max_seq_len=2048)
SWITCHES = {
    "norm": ["layernorm", "rmsnorm"],
    "position": ["learned", "rotary", "alibi"],
    "activation": ["gelu_tanh", "relu", "swiglu"],
    "n_kv_head": [0, 1, 2],
    "d_ff": [0, 96],
    "parallel_residual": [False, True],
    "bias": [True, False],
    "tied": [True, False],
}


def every_switch(sample: int = 0) -> list[ModelConfig]:
    combinations = list(itertools.product(*SWITCHES.values()))
    if sample:
        combinations = random.Random(0).sample(combinations, sample)
    return [
        ModelConfig(**SMALL, **dict(zip(SWITCHES, values, strict=True))) for values in combinations
    ]


def one_switch_at_a_time() -> list[ModelConfig]:
    return [
        ModelConfig(**SMALL, **{name: value})
        for name, values in SWITCHES.items()
        for value in values
    ]


# Parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", every_switch(60), ids=str)
def test_parameter_counts_match_the_model_part_by_part(config):
    with torch.device("meta"):
        model = GPT(config)
    actual = dict.fromkeys(cost.parameters(config), 0)
    for name, tensor in model.named_parameters():
        part = next(
            (p for p in ("token_embedding", "position_embedding", "head") if name.startswith(p)),
            None,
        )
        part = part or ("norms" if "norm" in name else "attention" if ".attn." in name else "mlp")
        actual[part] += tensor.numel()
    assert cost.parameters(config) == actual
    assert cost.parameter_count(config) == model.num_parameters()
    assert cost.parameter_tensors(config) == len(list(model.parameters()))


# FLOPs -------------------------------------------------------------------------------------------


def counted_flops(config: ModelConfig, batch: int, seq_len: int) -> int:
    """FLOPs counted by torch, with unfused attention.
    Its backward pass does not recompute the scores."""
    model, tokens = GPT(config), torch.zeros(batch, seq_len, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", one_switch_at_a_time(), ids=str)
def test_flops_per_token_match_torchs_counter(config):
    batch, seq_len = 2, 32
    assert cost.flops_per_token(config, seq_len) * batch * seq_len == counted_flops(
        config, batch, seq_len
    )


def test_flops_agree_with_megatrons_formula():
    """Narayanan et al. 2021: 72 s l h^2 (1 + s/(6h) + V/(12 l h)) a sequence, not recomputed."""
    s, layers, h, v = 2048, GPT3.n_layer, GPT3.d_model, GPT3.vocab_size
    megatron = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert cost.flops_per_token(GPT3, s) * s == pytest.approx(megatron, rel=1e-12)


# Memory ------------------------------------------------------------------------------------------


def saved_bytes(config: ModelConfig, batch: int, seq_len: int, precision: str) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once, without parameters."""
    torch.manual_seed(0)
    model = GPT(config)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive, sizes = [], {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no address is reused
        return tensor

    tokens = torch.randint(0, config.vocab_size, (batch, seq_len))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
    ):
        model(tokens, tokens)
    return sum(sizes.values())


@pytest.mark.parametrize("config", [*one_switch_at_a_time(), *every_switch(12)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_are_predicted_to_the_byte(config, precision):
    casts = cost.model_state_bytes(config, "adamw", precision)["weight casts"]
    predicted = cost.activation_bytes(config, 2, 48, precision) + casts
    assert saved_bytes(config, 2, 48, precision) == predicted


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_model_states_are_predicted_to_the_byte(name):
    config = ModelConfig(**SMALL)
    model = GPT(config)
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(tokens, tokens).backward()
    optimizer.step()
    states = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    measured = {
        "parameters": sum(p.nbytes for p in model.parameters()),
        "gradients": sum(p.grad.nbytes for p in model.parameters()),
        "optimizer states": sum(t.nbytes for t in states),
        "weight casts": 0,
    }
    assert cost.model_state_bytes(config, name, "fp32") == measured


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_zero_figure_1(stage, gigabytes):
    """Rajbhandari et al. 2020: 7.5 billion parameters on 64 ranks."""
    assert sum(cost.zero_state_bytes(7.5e9, stage, 64).values()) / 1e9 == pytest.approx(
        gigabytes, abs=0.05
    )


@pytest.mark.parametrize(
    ("shape", "batch", "baseline_gib", "best_gib"),
    [
        ((48, 64, 6144), 4, 59.25, 9.5625),
        ((105, 128, 20480), 1, 114.0234375 / 1.3238, 23.076171875 / 1.3238),
    ],
)
def test_korthikanti_figure_1(shape, batch, baseline_gib, best_gib):
    """22B, and 530B without its interleaving factor, on 8 tensor-parallel ranks at 2048 tokens."""
    n_layer, n_head, d_model = shape
    model = ModelConfig(
        n_layer=n_layer, n_head=n_head, d_model=d_model, vocab_size=51200, max_seq_len=2048
    )
    baseline = cost.korthikanti_activation_bytes(model, batch, 2048, tp=8)
    best = cost.korthikanti_activation_bytes(
        model, batch, 2048, tp=8, sequence_parallel=True, recompute="selective"
    )
    assert baseline / 2**30 == pytest.approx(baseline_gib, rel=1e-4)
    assert best / 2**30 == pytest.approx(best_gib, rel=1e-4)


# Communication -----------------------------------------------------------------------------------


def ring_all_reduce_bytes(world: int, chunks: int) -> list[int]:
    """Bytes each rank sends in a simulated ring, one byte per chunk.
    Asserts that every rank ends with the sums."""
    data = [[{rank} for _ in range(chunks)] for rank in range(world)]
    sent = [0] * world
    for step in range(2 * (world - 1)):
        # In step s rank r sends chunk r - s: first partial sums, then complete ones.
        moving = [
            (rank, (rank - step) % chunks, set(data[rank][(rank - step) % chunks]))
            for rank in range(world)
        ]
        for rank, chunk, partial in moving:
            data[(rank + 1) % world][chunk] |= partial
            sent[rank] += 1
    assert all(cell == set(range(world)) for row in data for cell in row)
    return sent


@pytest.mark.parametrize("world", [2, 3, 4, 7])
def test_a_ring_sends_the_predicted_bytes(world):
    assert ring_all_reduce_bytes(world, world) == [cost.all_reduce_wire_bytes(world, world)] * world


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize("world", [2, 4])
def test_a_fit_recovers_the_link_that_made_the_points(op, world):
    true = cost.AlphaBeta(30e-6, 2e9)
    sizes = [2**k for k in range(8, 27, 2)]
    noise = random.Random(1)
    times = [true.seconds(op, n, world) * noise.uniform(0.95, 1.05) for n in sizes]
    link = cost.fit_alpha_beta(sizes, times, op, world)
    assert link.latency_s == pytest.approx(30e-6, rel=0.1)
    assert link.bandwidth_bytes_s == pytest.approx(2e9, rel=0.1)
    assert link.seconds(op, 2**20, world) == pytest.approx(true.seconds(op, 2**20, world), rel=0.1)


# What a rank of a layout sends and holds ---------------------------------------------------------

M22B = ModelConfig(n_layer=48, n_head=64, d_model=6144, vocab_size=51200, max_seq_len=2048)


def run_of(
    model: ModelConfig, strategy: str, precision: str, *, micro_batch: int = 1, zero1: bool = False
) -> Run:
    parallel = ParallelConfig(strategy=strategy, distributed_optimizer=zero1)
    loop = LoopConfig(seq_len=2048, global_batch=128, micro_batch=micro_batch, precision=precision)
    return Run(model=model, parallel=parallel, loop=loop)


def test_megatrons_gradients_travel_in_fp32_and_its_weights_in_16_bits():
    numbers = cost.held_bytes(run_of(M22B, "megatron", "bf16"), 2)["parameters"] / 2
    plain = cost.step_traffic(run_of(M22B, "megatron", "bf16"), 2)
    assert plain["all_reduce", "dp"] == 4 * numbers
    sharded = run_of(M22B, "megatron", "bf16", zero1=True)
    sent = cost.step_traffic(sharded, 2)
    assert (
        sent["reduce_scatter", "dp"]
        == 2 * sent["all_gather", "dp"]
        == pytest.approx(4 * numbers, rel=1e-4)
    )


def test_fsdp_sends_half_as_much_again_only_if_weights_and_gradients_have_one_type():
    for precision, expected in (("fp32", 1.5), ("bf16", 1.0)):
        fsdp, ddp = (
            sum(cost.wire_bytes(op, n, 4) for (op, _), n in cost.step_traffic(run, 4).items())
            for run in (run_of(M22B, name, precision, micro_batch=32) for name in ("fsdp", "ddp"))
        )
        assert fsdp / ddp == pytest.approx(expected, rel=0.01)


# Data parallelism --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gather_s", "block_s", "ahead", "end_s"),
    [
        (2, 3, 0, 2 + 6 * (2 + 3)),  # the root, then one after the other
        (2, 3, 1, 2 + 2 + 6 * 3),  # only the root and the first gather are exposed
        (3, 2, 1, 3 + 6 * 3 + 2),  # the network is never idle
        (3, 2, 2, 3 + 6 * 3 + 2),  # and prefetching further changes nothing
    ],
)
def test_the_predicted_forward_pass_takes_as_long_as_its_formula_says(
    gather_s, block_s, ahead, end_s
):
    events = cost.prefetch_timeline(6, gather_s, block_s, ahead)
    assert max(event.end_s for event in events) == end_s
    computed = [event.name for event in events if event.kind == "forward"]
    gathered = [event.name for event in events if event.kind == "communication"]
    assert computed == [str(i) for i in range(6)]
    assert gathered == ["root"] + [f"gather {i}" for i in range(6)]
