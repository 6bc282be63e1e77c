"""workshop/from_scratch: gradients are torch's and finite differences'; all stages learn alike."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
WORKSHOP = ROOT / "workshop"
sys.path.insert(0, str(WORKSHOP))

from from_scratch import checkpoint, cpu, layers  # noqa: E402
from from_scratch import tensor as tape  # noqa: E402
from from_scratch.adam import Adam  # noqa: E402
from from_scratch.corpus import corpus  # noqa: E402
from from_scratch.dataloader import DataLoader  # noqa: E402
from from_scratch.gpt import GPT  # noqa: E402
from from_scratch.inference import TRAINED, generate  # noqa: E402
from from_scratch.tensor import Tensor  # noqa: E402
from from_scratch.tokenizer import Tokenizer, split  # noqa: E402

random = np.random.default_rng(0)
WORDS = random.integers(0, 5, (2, 3))


def later(size):
    return torch.full((size, size), -torch.inf).triu(1)


#: name -> shapes of its arrays, the operation of the kit, torch's
OPERATIONS = {
    "add": ([(2, 3, 4), (4,)], lambda a, b: a + b, lambda a, b: a + b),
    "matmul": ([(2, 3, 4), (4, 5)], lambda a, b: a @ b, lambda a, b: a @ b),
    "reshape": ([(2, 6)], lambda x: tape.reshape(x, 3, 4), lambda x: x.reshape(3, 4)),
    "transpose": ([(2, 3, 4)], lambda x: tape.transpose(x, 2, 0, 1), lambda x: x.permute(2, 0, 1)),
    "gather": ([(5, 4)], lambda x: tape.gather(x, WORDS), lambda x: x[torch.from_numpy(WORDS)]),
    "gelu": ([(3, 4)], layers.gelu, lambda x: F.gelu(x, approximate="tanh")),
    "layer_norm": (
        [(2, 3, 4), (4,), (4,)],
        layers.layer_norm,
        lambda x, gain, bias: F.layer_norm(x, (4,), gain, bias),
    ),
    "causal_softmax": (
        [(2, 4, 4)],
        lambda x: layers.causal_softmax(x, 0.5),
        lambda x: torch.softmax(0.5 * x + later(4), -1),
    ),
    "cross_entropy": (
        [(2, 3, 5)],
        lambda x: layers.cross_entropy(x, WORDS),
        lambda x: F.cross_entropy(x.flatten(0, 1), torch.from_numpy(WORDS).flatten())[None],
    ),
}


def overwrite(dy, table, indices):
    """A word that occurs twice counts once."""
    dtable = np.zeros_like(table)
    dtable[indices] = dy
    return dtable


#: What a wrong backward of each operation could be. Moves of data, of which cpu.py has no backward,
#: move the wrong way.
FAULTS = {
    "add": ("add_backward", lambda dc, a, b: (dc, dc.reshape(-1, *b.shape).mean(0))),
    "matmul": (
        "matmul_backward",
        lambda dc, a, b: (dc @ b.T, cpu.rows(a).T @ np.abs(cpu.rows(dc))),
    ),
    "reshape": (
        "reshape",
        lambda x, shape: x.reshape(shape) if shape == (3, 4) else x.T.reshape(shape),
    ),
    "transpose": (
        "transpose",
        lambda x, axes: x.transpose(axes) if axes == (2, 0, 1) else x.reshape(2, 3, 4),
    ),
    "gather": ("gather_backward", overwrite),
    "gelu": ("gelu_backward", lambda dy, x: dy * (x > 0)),
    "layer_norm": (
        "layer_norm_backward",
        lambda dy, gain, normed, rstd: (dy * gain * rstd, gain, gain),
    ),
    "causal_softmax": ("causal_softmax_backward", lambda dy, y, scale: scale * dy * y * (1 - y)),
    "cross_entropy": ("cross_entropy_backward", lambda p, targets: p / targets.size),
}


def gradients(name):
    """(ours, torch's, by finite differences) of a weighted sum of the result, for each array."""
    shapes, ours, theirs = OPERATIONS[name]
    arrays = [random.standard_normal(shape) for shape in shapes]
    leaves = [Tensor(array) for array in arrays]
    mine = ours(*leaves)
    weights = np.ones(1) if name == "cross_entropy" else random.standard_normal(mine.shape)

    total = Tensor(np.sum(mine.array * weights), (mine,), lambda _: (weights,))
    total.backward()

    references = [torch.from_numpy(array).requires_grad_() for array in arrays]
    (theirs(*references) * torch.from_numpy(weights)).sum().backward()

    def difference(array, at, step=1e-6):
        def result(value):
            old, array[at] = array[at], value
            try:
                return np.sum(ours(*map(Tensor, arrays)).array * weights)
            finally:
                array[at] = old

        return (result(array[at] + step) - result(array[at] - step)) / (2 * step)

    numeric = [
        np.reshape([difference(a, at) for at in np.ndindex(a.shape)], a.shape) for a in arrays
    ]
    return [leaf.grad for leaf in leaves], [leaf.grad.numpy() for leaf in references], numeric


def assert_right(name):
    for mine, theirs, numeric in zip(*gradients(name), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-10)
        np.testing.assert_allclose(mine, numeric, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_gradient_of_an_operation(name):
    assert_right(name)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_wrong_backward_is_noticed(name, monkeypatch):
    monkeypatch.setattr(cpu, *FAULTS[name])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_right(name)


def test_a_whole_gpt_has_the_loss_and_gradients_of_torchs_layers():
    model = GPT(5, block=3, layers=2, heads=2, width=8, dtype=np.float64)
    targets = random.integers(0, 5, (2, 3))
    loss = model.loss(WORDS, targets)
    loss.backward()
    w = {name: torch.from_numpy(p.array).requires_grad_() for name, p in model.parameters().items()}

    def linear(x, name):
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, (8,), w[f"{name}.gain"], w[f"{name}.bias"])

    x = w["words.table"][torch.from_numpy(WORDS)] + w["positions.table"]
    for b in ("blocks.0.", "blocks.1."):
        y = norm(x, b + "norm1")
        q, k, v = (linear(y, f"{b}attention.{n}") for n in ("query", "key", "value"))
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + linear(y, b + "attention.out")
        x = x + linear(
            F.gelu(linear(norm(x, b + "norm2"), b + "mlp.up"), approximate="tanh"), b + "mlp.down"
        )
    logits = linear(norm(x, "norm"), "head")
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
    expected.backward()
    assert abs(loss.array[0] - expected.item()) < 1e-12
    for name, p in model.parameters().items():
        np.testing.assert_allclose(p.grad, w[name].grad.numpy(), rtol=0, atol=1e-10, err_msg=name)


def test_the_corpus_has_the_published_counts_and_windows_share_no_word():
    words = split(corpus())
    assert (len(words), len(set(words))) == (52_600, 172) and abs(len(corpus()) - 290_599) < 300
    tokenizer = Tokenizer(words)
    loader = DataLoader(tokenizer.encode(corpus()), block=256, batch=16)
    assert loader.steps(50) == 640
    read = np.concatenate([loader.windows(step) for step in range(13)])[: loader.n_windows]
    assert sorted(read) == list(range(205))
    second = np.concatenate([loader.windows(step) for step in range(26)])[205:410]
    assert sorted(second) == list(range(205)) and list(second) != list(read)
    halves = [DataLoader(loader.numbers, 256, 16, rank, 2)(0)[0] for rank in (0, 1)]
    np.testing.assert_array_equal(np.concatenate(halves), loader(0)[0])


def test_a_text_goes_on_from_its_last_words_when_it_is_longer_than_a_block():
    def next_number(words):
        logits = np.full((*words.shape, 20), -np.inf)
        logits[0, -1, words[0, -1] + 1] = 0.0
        return Tensor(logits)

    next_number.block = 3
    words = generate(next_number, [0, 1], 10, temperature=1.0, random=np.random.default_rng(0))
    assert words == list(range(12))


def run(*command, ranks=0, module="train"):
    start = ["mpiexec", "-n", str(ranks)] if ranks else []
    done = subprocess.run(
        [*start, sys.executable, "-m", f"from_scratch.{module}", *map(str, command)],
        cwd=WORKSHOP,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output):
    return np.array([float(loss) for loss in re.findall(r"loss (\S+)", output)])


def test_ranks_learn_what_one_process_does_and_a_run_goes_on_from_its_checkpoint(tmp_path):
    alone = losses(run("tiny"))
    assert alone.size == 4 and np.ptp(alone) > 1e-3
    for options in ([], ["--overlap"]):
        np.testing.assert_allclose(losses(run("tiny", *options, ranks=2)), alone, rtol=0, atol=1e-5)
    several_buckets = ["tiny", "--width", 512, "--steps", 2]
    np.testing.assert_allclose(
        losses(run(*several_buckets, "--overlap", ranks=2)),
        losses(run(*several_buckets)),
        rtol=0,
        atol=1e-5,
    )
    kept = tmp_path / "run.npz"
    run("tiny", "--steps", 2, "--checkpoint", kept)
    np.testing.assert_allclose(
        losses(run("tiny", "--checkpoint", kept, ranks=2)), alone[2:], rtol=0, atol=1e-5
    )
    prompt = ["--prompt", split(corpus())[0], "--words", 5]
    alone, two = (run(kept, *prompt, ranks=n, module="inference").splitlines() for n in (0, 2))
    assert alone[:2] == two[:2] and len(set(alone[:2])) == 2
    assert re.fullmatch(r"2 texts of 5 words by one process on the cpu: [\d.]+ s", alone[2])
    assert re.fullmatch(r"2 texts of 5 words by 2 ranks on the cpu: [\d.]+ s", two[2])


def test_a_checkpoint_of_any_corpus_has_a_default_prompt(tmp_path):
    kept, french = tmp_path / "run.npz", tmp_path / "french.txt"
    french.write_text(", ".join(["un petit pas"] * 20))
    for options in ([], ["--corpus", french]):
        run("tiny", "--steps", 1, "--checkpoint", kept, *options)
        assert len(run(kept, "--words", 3, module="inference").splitlines()) == 3
        kept.unlink()


def test_the_shipped_weights_know_the_corpus_and_no_run_can_go_on_from_them():
    about, arrays = checkpoint.read(TRAINED)
    words = Tokenizer(about["words"])
    model = GPT(len(words.words), **about["shape"])
    checkpoint.restore(arrays, model)
    loader = DataLoader(words.encode(corpus()), model.block, batch=16)
    # an untrained model: ln 172 = 5.1; one that knows only how often each word comes: 4.8
    assert model.loss(*loader(0)).array[0] < 1
    assert TRAINED.stat().st_size < 1_000_000
    text, seconds = run("--samples", 1, module="inference").splitlines()
    assert set(split(text)) <= set(words.words) and len(split(text)) == 41
    assert seconds.startswith("1 text of 40 words by one process")
    with pytest.raises(SystemExit, match="weights without Adam's moments"):
        checkpoint.restore(arrays, model, Adam(model.parameters()))


def test_the_readme_states_the_seconds_that_are_stored():
    stored = json.loads(
        (ROOT / "src/aiscale/plan/published/measured/from_scratch.json").read_text()
    )
    readme = " ".join((WORKSHOP / "from_scratch/README.md").read_text().split())
    one, two = (stored["runs"][name]["train_s"] for name in ("one process", "two ranks"))
    assert f"{one:,} s in one process and {two:,} s on two ranks" in readme
    one, two = (np.median(stored["step_s"][name]) for name in ("one process", "two ranks"))
    minutes = f"{one:.1f} s and {two:.1f} s: {640 * one / 60:.0f} and {640 * two / 60:.0f} minutes"
    assert minutes in readme
