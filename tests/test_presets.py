"""Presets match their sources: sizes by formulas written out here, hyper-parameters as printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from aiscale.plan import cost, published
from aiscale.plan.options import planned
from aiscale.plan.presets import model_of, presets


def gpt2_count(L: int, D: int, V: int, T: int) -> int:
    """A GPT-2 with L layers of width D, a tied head, V tokens and T positions.
    It counts matrices, biases, norms, embeddings."""
    return L * (12 * D**2 + 13 * D) + 2 * D + (V + T) * D


def test_presets_and_formulas_need_neither_torch_nor_numpy():
    code = (
        "import sys, aiscale.plan.machines; from aiscale import cost; "
        "from aiscale.plan.options import planned; "
        "cost.step_traffic(planned('ddp', '--model gpt2 --batch 16'), 8); "
        "sys.exit(' '.join({'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt-c", gpt2_count(6, 384, 256, 256)),
        ("gpt2", gpt2_count(12, 768, 50257, 1024)),
        ("gpt2-medium", gpt2_count(24, 1024, 50257, 1024)),
        ("gpt2-large", gpt2_count(36, 1280, 50257, 1024)),
        ("gpt2-xl", gpt2_count(48, 1600, 50257, 1024)),
        ("gpt2-xxl", gpt2_count(60, 1920, 50257, 1024)),
        ("gpt2-xxxl", gpt2_count(96, 2400, 50257, 1024)),
        ("radius-355m", gpt2_count(24, 1024, 50304, 1024)),
        ("radius-2b", gpt2_count(24, 2560, 50304, 1024)),
        ("22b", gpt2_count(48, 6144, 50257, 2048)),
        ("175b", gpt2_count(96, 12288, 50257, 2048)),
    ],
)
def test_models_of_gpt2s_shape_have_the_parameters_of_its_formula(name, count):
    assert cost.parameter_count(model_of(name)) == count


def test_the_turing_reports_models_have_the_parameters_that_it_prints():
    table = {row["model"]: row for row in published.table("turing_table5_peak_memory")}
    for size in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"):
        count = cost.parameter_count(model_of(f"turing-{size}"))
        assert count == table[size]["params_total_untied"]
    for size, printed in (("gpt2", 85.21), ("gpt2-medium", 302.51)):
        preset = presets()[f"turing-{size}"]
        head = preset["vocabulary"] * preset["width"]
        assert round((cost.parameter_count(model_of(f"turing-{size}")) - head) / 1e6, 2) == printed


def test_radius_has_the_published_hyperparameters():
    for name, least, density, *thousands in [
        ("radius-355m", 1e-5, 0.5, 80, 320, 500),
        ("radius-2b", 1e-6, 0.4, 60, 192, 300),
    ]:
        training = presets()[name]["training"]
        assert (training["batch"], presets()[name]["context"]) == (512, 1024)
        assert (training["lr"], training["min_lr"], training["weight_decay"]) == (
            1.5e-4,
            least,
            0.01,
        )
        assert (training["density"], training["interval"]) == (density, 200)
        steps = (training["dense_until"], training["decay_steps"], training["steps"])
        assert [n / 1000 for n in steps] == thousands
        assert training["warm_up"] == training["decay_steps"] * 0.01


def test_forge_has_the_published_hyperparameters():
    sizes = {"forge-s": (24, 2064), "forge-m": (40, 5120), "forge-l": (48, 6144)}
    for name, shape in sizes.items():
        preset = presets()[name]
        assert (preset["layers"], preset["width"], preset["context"]) == (*shape, 2048)
        assert preset["training"]["batch"] * 2048 == pytest.approx(16.8e6, rel=0.02), (
            "tokens a step"
        )
        assert (preset["training"]["steps"], preset["training"]["warm_up"]) == (15_300, 153)


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_run_of_the_formulas(name):
    run = planned("ddp", f"--model {name} --length {presets()[name]['context']}")
    assert cost.parameter_count(run.model) > 0
