"""Recipes match their sources: sizes by formulas written out here, hyper-parameters as published."""

import math
import subprocess
import sys
from collections import Counter

import pytest

from aiscale.config import Run
from aiscale.cost import parameters
from aiscale.data import embedded_text
from aiscale.recipes import RECIPES, recipe


def gpt2_count(L: int, D: int, V: int, T: int) -> int:
    """A GPT-2 with L layers of width D, a tied head, V tokens and T positions: matrices, biases, norms, embeddings."""
    return L * (12 * D**2 + 13 * D) + 2 * D + (V + T) * D


def total(name: str) -> int:
    return sum(parameters(recipe(name).model).values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_complete_run_under_its_own_name_with_its_source(name):
    run = recipe(name)
    assert run.name == name and Run.from_dict(run.to_dict()) == run
    assert RECIPES[name].__doc__
    run.loop.micro_batches(dp=1)


def test_recipes_and_formulas_need_neither_torch_nor_numpy():
    code = (
        "import sys, aiscale.machines; from aiscale import cost; from aiscale.recipes import recipe; "
        "cost.step_traffic(recipe('gpt2'), 8); sys.exit(' '.join({'torch', 'numpy'} & set(sys.modules)) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gpt-c", gpt2_count(6, 384, 172, 256)),
        ("gpt2", gpt2_count(12, 768, 50257, 1024)),
        ("gpt2-medium", gpt2_count(24, 1024, 50257, 1024)),
        ("gpt2-large", gpt2_count(36, 1280, 50257, 1024)),
        ("gpt2-xl", gpt2_count(48, 1600, 50257, 1024)),
        ("gpt2-xxl", gpt2_count(60, 1920, 50257, 1024)),
        ("gpt2-xxxl", gpt2_count(96, 2400, 50257, 1024)),
        ("radius-355m", gpt2_count(24, 1024, 50304, 1024)),
        ("radius-2b", gpt2_count(24, 2560, 50304, 1024)),
        ("radius-tiny", gpt2_count(2, 64, 256, 0)),
        ("22b", gpt2_count(48, 6144, 50257, 2048)),
        ("175b", gpt2_count(96, 12288, 50257, 2048)),
    ],
)
def test_models_of_gpt2s_shape_have_the_parameters_of_its_formula(name, count):
    assert total(name) == count


def test_radius_has_the_published_hyperparameters():
    for name in ("radius-355m", "radius-2b"):
        run = recipe(name)
        assert (run.loop.global_batch, run.loop.micro_batch, run.loop.seq_len) == (512, 8, 1024)
        assert (run.optimizer.lr, run.optimizer.weight_decay, run.optimizer.clip_norm) == (1.5e-4, 0.01, 1.0)
        assert run.optimizer.warmup_steps == run.optimizer.decay_steps * 0.01 and run.loop.precision == "bf16"
        assert run.loop.micro_batches(dp=64) == (1, 8) and run.model.activation_checkpointing
        assert f"{total(name):,} parameters" in RECIPES[name].__doc__
    for name, least, *steps in [("radius-355m", 1e-5, 80, 320, 500), ("radius-2b", 1e-6, 60, 192, 300)]:
        run = recipe(name)
        thousands = (run.compression.warmup_steps, run.optimizer.decay_steps, run.loop.steps)
        assert (run.optimizer.min_lr, [n / 1000 for n in thousands]) == (least, steps)


@pytest.mark.extended
def test_the_laptop_recipe_learns_more_than_bigrams(tmp_path):
    from aiscale.train import fit

    result = fit(recipe("laptop"), runs_dir=tmp_path, progress=False)
    text = embedded_text()
    pairs, firsts = Counter(zip(text, text[1:], strict=False)), Counter(text[:-1])
    entropy = -sum(n * math.log(n / firsts[pair[0]]) for pair, n in pairs.items()) / (len(text) - 1)
    assert result.summary["val_loss"] < entropy - 0.2
