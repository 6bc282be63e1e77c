"""Activation memory under tensor, sequence and pipeline parallelism: what autograd keeps, against the formulas."""

import json

import pytest

from aiscale import cost
from aiscale.config import Run
from ranks import run_ranks

MODEL = ("model.n_layer=4", "model.n_head=4", "model.d_model=128", "model.vocab_size=67", "model.max_seq_len=64")
LOOP = ("loop.seq_len=64", "loop.micro_batch=2", "loop.global_batch=4", "loop.device=cpu")
LLAMA = ("model.norm=rmsnorm", "model.position=rotary", "model.activation=swiglu", "model.tied=false")
TP, SP = "parallel.tp=2", "parallel.sequence_parallel=true"
CASES = {
    "tp2": (TP,),
    "tp2 sequence": (TP, SP),
    "tp2 sequence bf16": (TP, SP, "loop.precision=bf16"),
    "tp2 sequence llama": (TP, SP, *LLAMA),
    "tp2 grouped queries": (TP, "model.n_kv_head=2"),
    "pp2": ("parallel.pp=2",),
    "dp2 rotary": ("parallel.dp=2", "model.position=rotary"),
    "tp2 bf16 of half as many layers": (TP, "loop.precision=bf16", "model.n_layer=2"),
    "tp2 bf16": (TP, "loop.precision=bf16"),
    "tp2 sequence bf16 of half as many layers": (TP, SP, "loop.precision=bf16", "model.n_layer=2"),
}

KEPT = """
import json
from aiscale.config import Run
from aiscale.parallel import build
torch.set_num_threads(1)
for name, settings in CASES.items():
    run = Run().override(*MODEL, *LOOP, "parallel.strategy=megatron", *settings)
    engine = build(run, world)
    tokens = torch.randint(0, 67, (2, 65))
    held = {part.untyped_storage().data_ptr() for parts in engine.tensors().values() for part in parts}
    kept = {}
    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage  # alive, so that no other tensor gets the same address
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.accumulate([(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())])
    everyone = world.gather(sum(storage.nbytes() for storage in kept.values()))
    if world.is_main:
        say(json.dumps([name, everyone]))
    del kept
    engine.close()
"""


def run_of(name: str) -> Run:
    return Run().override(*MODEL, *LOOP, "parallel.strategy=megatron", *CASES[name])


@pytest.fixture(scope="module")
def kept_bytes(tmp_path_factory) -> dict[str, list[int]]:
    code = f"MODEL, LOOP, CASES = {MODEL!r}, {LOOP!r}, {CASES!r}\n{KEPT}"
    done = run_ranks(code, 2, tmp_path_factory.mktemp("ranks"))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", CASES)
def test_what_megatron_keeps_is_predicted(name, kept_bytes):
    run = run_of(name)
    for rank, measured in enumerate(kept_bytes[name]):
        assert sum(cost.megatron_activation_bytes_by_part(run, 2, rank).values()) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_layer_keeps_what_korthikanti_predict_within_ten_percent(sequence, kept_bytes):
    """The difference of two depths leaves only the layers. The paper counts 2 more bytes for dropout masks, and 5
    for scores where we have 6."""
    name = "tp2 sequence bf16" if sequence else "tp2 bf16"
    measured = kept_bytes[name][0] - kept_bytes[f"{name} of half as many layers"][0]
    theirs = cost.korthikanti_activation_bytes(
        run_of(f"{name} of half as many layers").model, 2, 64, tp=2, sequence_parallel=sequence
    )
    assert measured == pytest.approx(theirs, rel=0.1)
