"""Hugging Face models through the same fit: exact sizes, serial losses under every strategy, checkpoints, refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aiscale import cost
from aiscale.config import ConfigError, HFModelConfig, Run
from aiscale.data import learn, prepare_corpus
from aiscale.model.build import build_model, count_parameters
from aiscale.recipes import recipe
from aiscale.train import fit, open_trained
from aiscale.train.export import export, hugging_face_tokenizer
from ranks import aiscale, run_ranks

TINY = {"n_layer": 2, "n_head": 4, "d_model": 32, "vocab_size": 67, "max_seq_len": 16}
TWINS = ("gpt2-xl-hf-tiny", "gptj-6b-hf-tiny")
TRAINED = (*TWINS, "bert-hf-tiny", "t5-hf-tiny")
SHORT = ("loop.steps=4", "loop.global_batch=8", "loop.seq_len=16", "loop.eval_every=0", "loop.eval_batches=1")
SHORT += ("loop.device=cpu",)

STRATEGIES = {  # name -> (settings, tolerance of its losses against serial)
    "ddp": (("parallel.strategy=ddp", "loop.precision=fp64"), 1e-6),
    "fsdp": (("parallel.strategy=fsdp", "loop.precision=fp64"), 1e-6),
    "zero1": (("parallel.strategy=zero", "parallel.zero_stage=1"), 2e-4),
    "zero3": (("parallel.strategy=zero", "parallel.zero_stage=3"), 2e-4),
}


def tokens(n: int = 16) -> torch.Tensor:
    return torch.randint(0, 67, (2, n), generator=torch.Generator().manual_seed(3))


# Sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "count"), [("gpt2-xl-hf", 1_557_611_200), ("gptj-6b-hf", 6_050_882_784)])
def test_full_size_models_have_exactly_the_published_parameters(name, count):
    model = recipe(name).model
    with torch.device("meta"):
        assert build_model(model).num_parameters() == count
    assert cost.parameter_count(model) == count == count_parameters(model)
    assert f"{count:,} parameters" in recipe.__globals__["RECIPES"][name].__doc__


# The model -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_transformers_own_and_parameters_keep_transformers_names():
    torch.manual_seed(0)
    model, x = build_model(HFModelConfig(model_type="gpt2", **TINY)), tokens()
    own = model.inner(input_ids=x, labels=x).loss  # transformers shifts the labels itself
    torch.testing.assert_close(model(x[:, :-1], x[:, 1:]), own)
    assert set(model.state_dict()) == set(model.inner.state_dict())
    assert model.double()(x, x).dtype == torch.float64, "the loss of an fp64 model must not be rounded to fp32"


def test_a_folder_gives_shape_and_weights(tmp_path):
    torch.manual_seed(0)
    model, x = build_model(HFModelConfig(model_type="gpt2", **TINY)), tokens()
    model.save_pretrained(tmp_path / "hf")
    run = Run().override(f"model.folder={tmp_path / 'hf'}", "loop.seq_len=16")
    assert isinstance(run.model, HFModelConfig) and (run.model.n_layer, run.model.vocab_size) == (2, 67)
    assert Run.from_dict(json.loads(run.to_json())) == run
    again = build_model(run.model)
    assert again(x, x) == model(x, x)
    torch.manual_seed(1)
    assert build_model(run.model, weights=False)(x, x) != model(x, x)


# Configuration -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [({"model_type": "gpt5"}, "model.model_type is 'gpt5': this transformers has no such architecture")],
)
def test_a_configuration_transformers_cannot_build_is_refused_in_one_line(config, says):
    with pytest.raises(ConfigError) as error:
        build_model(HFModelConfig(**TINY, **config))
    assert says in str(error.value) and "\n" not in str(error.value)


# Training ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    folder, known = tmp_path_factory.mktemp("serial"), {}

    def losses(twin: str, *settings: str) -> list[float]:
        key = (twin, *settings)
        if key not in known:
            run = recipe(twin).override(*SHORT, *settings)
            known[key] = fit(run, runs_dir=folder / str(len(known)), progress=False).losses
        return known[key]

    return losses


TRAIN = """
from aiscale.recipes import recipe
from aiscale.train import fit
for twin in TWINS:
    result = fit(recipe(twin).override(*SETTINGS), world, runs_dir=".", progress=False)
    if world.is_main:
        say(result.losses)
"""


@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp", "zero1"])
def test_a_twin_gives_the_serial_losses_under_every_strategy(strategy, serial, tmp_path):
    settings, tolerance = STRATEGIES[strategy]
    code = TRAIN.replace("TWINS", repr(TRAINED)).replace("SETTINGS", repr((*SHORT, *settings)))
    done = run_ranks(code, 2, tmp_path, strategy=settings[0].partition("=")[2])
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    precision = [setting for setting in settings if setting.startswith("loop.precision")]
    for twin, line in zip(TRAINED, done.stdout.splitlines(), strict=True):
        assert json.loads(line) == pytest.approx(serial(twin, *precision), abs=tolerance), twin
        assert json.loads((tmp_path / twin / "run.json").read_text())["parameters"] == count_parameters(
            recipe(twin).model
        )


def test_an_fsdp_run_of_two_ranks_resumes_in_one_process(tmp_path, serial):
    """GPT-2's head is its embedding: two names in transformers, one tensor in the optimizer's checkpoint."""
    settings = (*SHORT, "optimizer.schedule=constant")
    code = TRAIN.replace("TWINS", repr(TWINS[:1])).replace(
        "SETTINGS", repr((*settings, "loop.steps=2", "parallel.strategy=fsdp"))
    )
    done = run_ranks(code, 2, tmp_path, strategy="fsdp")
    assert done.returncode == 0, done.stderr
    rest = fit(recipe(TWINS[0]).override(*settings), runs_dir=tmp_path, resume=True, progress=False).losses
    expected = serial(TWINS[0], "optimizer.schedule=constant")
    assert json.loads(done.stdout) + rest == pytest.approx(expected, abs=2e-4)


@pytest.mark.extended
def test_the_script_of_hugging_faces_trainer_saves_what_two_ranks_learned(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    (tmp_path / "my_texts").write_text(text := Path(__file__).read_text())
    tokenizer = hugging_face_tokenizer(learn("bpe", [text], bpe_vocab_size=300))
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": len(tokenizer)}
    before = GPT2LMHeadModel(GPT2Config(**shape))
    for part in (tokenizer, before):
        part.save_pretrained(tmp_path / "before")
    script = Path(__file__).parents[1] / "launchers/hf_trainer.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(script), "--model=before", "--window=64", "--max_steps=2", "--use_cpu"]
    command += ["--per_device_train_batch_size=1", "--ddp_backend=gloo", "--bf16=false"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    how = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, **how)
    folder = tmp_path / "runs/hf_trainer"
    assert done.returncode == 0, done.stderr
    assert f"trained as DistributedDataParallel, saved in {folder.resolve()}" in done.stdout
    after = AutoModelForCausalLM.from_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(tokenizer)
    assert not torch.equal(after.lm_head.weight, before.lm_head.weight)
    tokens = torch.arange(8)[None]
    assert torch.isfinite(after(tokens).logits).all()


def test_a_trained_model_is_exported_and_transformers_gives_the_same_logits(tmp_path):
    from transformers import AutoModelForCausalLM

    fit(recipe(TWINS[1]).override(*SHORT), runs_dir=tmp_path, progress=False)
    done = aiscale("export", str(tmp_path / TWINS[1]), str(tmp_path / "hf"))
    assert (done.returncode, done.stderr) == (0, "")
    ours, tokenizer = open_trained(tmp_path / TWINS[1])
    prompt = torch.tensor([tokenizer.encode("The ")])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(theirs(prompt).logits, ours(prompt))


def test_pretrained_weights_need_their_own_tokenizer(tmp_path, capsys):
    """A tokenizer of another text and the same size points at the wrong rows of the embedding."""
    for name, words in (("own", "one two three "), ("other", "four five six ")):
        (tmp_path / f"{name}.txt").write_text(words * 400)
    size = 260
    learnt = (f"data.corpus={tmp_path / 'own.txt'}", f"data.bpe_vocab_size={size}")
    settings = (*SHORT, *learnt, "data.tokenizer=bpe", f"model.vocab_size={size}", "loop.steps=1")
    first = recipe(TWINS[0]).override(*settings, "name=first")
    fit(first, runs_dir=tmp_path, progress=False)
    export(tmp_path / "first", tmp_path / "pre")
    (tmp_path / "pre/aiscale_tokenizer.json").unlink()  # other libraries write only tokenizer.json

    def go_on(name, *settings):
        run = first.override(*settings, f"model.folder={tmp_path / 'pre'}", f"name={name}")
        fit(run, runs_dir=tmp_path, progress=False)
        return capsys.readouterr().err

    assert go_on("same") == ""
    other = f"data.corpus={tmp_path / 'other.txt'}"
    remedy = "aiscale data prepare .* --tokenizer .*tokenizer.json --out FOLDER.*data.tokenizer=bpe"
    why = rf"is not the run's bpe tokenizer \({size} tokens\)"
    with pytest.raises(ConfigError, match=f"{why}.*{remedy}"):
        go_on("anew", other)
    with pytest.raises(ConfigError, match=r"is not the run's byte tokenizer \(256 tokens\)"):
        go_on("bytes", "data.tokenizer=byte")
    prepare_corpus(
        tmp_path / "other.txt",
        tmp_path / "prepared",
        tokenizer=str(tmp_path / "pre/tokenizer.json"),
        progress=False,
    )
    assert go_on("remedy", f"data.corpus={tmp_path / 'prepared'}") == ""
    (tmp_path / "pre/tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read, so whether its weights" in go_on("damaged", other)
    (tmp_path / "pre/tokenizer.json").unlink()
    assert "no tokenizer.json, so whether its weights belong" in go_on("none", other)
