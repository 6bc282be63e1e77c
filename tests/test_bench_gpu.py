"""The GPU benchmark: its arithmetic with a tiny model on a CPU, and its refusals."""

import pytest
import torch

from aiscale import cost
from aiscale.bench.gpu import measure_training, show_gpu, training_run
from aiscale.bench.timing import machine_facts
from aiscale.config import ConfigError
from aiscale.distributed import connect
from aiscale.model import GPT


def test_its_figures_come_from_the_steps_it_measured(capsys):
    run = training_run("quick", 4, compile=False, device="cpu")
    row = measure_training(run, connect("cpu"), steps=3, warmup=1)
    assert row["tokens_per_s"] == 4 * run.loop.seq_len / row["step_s"] and row["slowest_step_s"] >= row["step_s"]
    flops = row["tokens_per_s"] * cost.flops_per_token(run.model, run.loop.seq_len)
    assert row["mfu"] == pytest.approx(flops / row["peak_flops"])
    assert row["parameters"] == cost.parameter_count(run.model) and row["loss"] < 6 and not row["compiled"]
    show_gpu({"rows": [{"size": "quick", **row}], "checks": [], "machine": machine_facts()})
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{row['mfu']:.1%}" in shown and row["peak_source"] in shown and f"{1000 * row['step_s']:.1f} ms" in shown


def test_the_355m_run_is_gpt2_medium_with_a_vocabulary_for_matrix_units():
    run = training_run("355M", 16)
    assert (run.model.vocab_size, run.loop.precision, run.loop.compile) == (50304, "bf16", True)
    assert cost.parameter_count(run.model) == 354_871_296
    with pytest.raises(ConfigError, match="--size 356M: it must be one of 124M, 355M"):
        training_run("356M", 16)


def test_the_compiler_sees_the_whole_model_as_one_graph_and_it_computes_the_same(monkeypatch):
    from aiscale.model import kernels

    monkeypatch.setattr(kernels, "MIN_WEIGHTS", 2**60)  # as on a GPU, which uses torch's own products
    torch.manual_seed(0)
    model, x = GPT(training_run("quick", 4).model), torch.randint(0, 256, (2, 32))
    model(x, x).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.compile(model, fullgraph=True, backend="aot_eager")(x, x).backward()
    for parameter, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
