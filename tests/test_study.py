"""Studies: refused before anything runs, resumed without a run twice, summed up and compared."""

import json
import re
import subprocess
import sys

import pytest
import torch

from aiscale import cli
from aiscale.errors import ConfigError
from aiscale.measure.study import cell as measured
from aiscale.measure.study import engine, load, read_study, run_study, side_by_side, summary
from aiscale.measure.study.grid import args_of, options_of, run_of, study_of, words_of
from aiscale.plan import published
from aiscale.plan.config import Run
from aiscale.train.data import read_tokens
from ranks import aiscale, wait_until

TINY = {"size": "1x32", "batch": 2, "data_kib": 1, "strategy": "serial", "length": 16}


def tiny(**tables) -> dict:
    return {"name": "tiny", "repeats": 1, "base": TINY, **tables}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"vary": {"presicion": ["bf16"]}},
            "unknown axis or field presicion: did you mean precision?",
        ),
        ({"vary": {"place": ["disk"]}}, "place is 'disk': it must be one of memory, spooled"),
        ({"vary": {"batch": ["8"]}}, "batch is '8': write it like 8"),
        ({"vary": {"lenght": [32]}}, "unknown axis or field lenght: did you mean length?"),
        ({"vary": {"length": ["64"]}}, "length is '64': write it like 64"),
        ({"vary": {"micro_batch": [2]}}, "micro_batch is set by the axis micro: vary that"),
        (
            {"vary": {"evaluate_every": [2]}},
            "a study saves and evaluates nothing: leave evaluate_every",
        ),
        ({"vary": {"density": [0.1]}}, "strategy serial: unrecognized arguments: --density 0.1"),
        ({"vary": {"size": ["1y8"]}}, "unknown model '1y8'"),
        ({"vary": {"size": ["1x100"]}}, "model.d_model 100 is not divisible by model.n_head 3"),
        ({"vary": {"ranks": [2]}}, "strategy serial uses 1 rank, but ranks is 2: take ddp"),
        ({"vary": {"precision": ["fp16"]}}, "strategy serial has no fp16: take tp or 3d, or bf16"),
        (
            {"vary": {"micro": [3]}},
            "--batch is 2: it must be a multiple of 1 copies of the model x --micro-batch 3",
        ),
        (
            {"cross": [{"ranks": [3], "strategy": ["pp"]}]},
            "model.n_layer 1 is not divisible by parallel.pp 3",
        ),
        (
            {"cross": [{"ranks": [2], "strategy": ["pp"], "size": ["2x32"]}]},
            "pp has 1 micro-batches for 2 stages: lower micro, or raise batch",
        ),
        (
            {"cross": [{"strategy": ["fsdp"], "phase": ["inference"]}]},
            "phase inference, strategy fsdp: take serial or ddp",
        ),
        (
            {"vary": {"phase": ["fine-tuning"]}},
            "phase fine-tuning, size .*: it begins with weights, so size must be a folder",
        ),
        ({"vary": {"batch": [512]}}, "data_kib 1 is less than one step reads: set at least 8"),
    ],
)
def test_a_study_that_makes_no_sense_is_refused_in_one_line(tree, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        study_of(tiny(**tree))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["grid", "grid-node", "laptop", "node", "quick"])
def test_every_row_of_the_kits_studies_is_a_setting_that_its_strategy_takes(name):
    study = read_study(name)  # which refuses others
    assert all(isinstance(run_of(cell), Run) for cell in (study.base, *study.cells))


def test_a_cell_is_a_trainer_with_its_options():
    axes = {
        "strategy": ["3d"],
        "ranks": [8],
        "precision": ["bf16"],
        "micro": [2],
        "recompute": [True],
    }
    (cell,) = study_of(tiny(base=TINY | {"batch": 8, "size": "2x64"}, cross=[axes])).cells
    args = args_of(cell)
    assert (args.tp, args.pp, args.bf16, args.recompute, args.length) == (2, 2, True, True, 16)
    assert (args.batch, args.micro_batch) == (64, 2), "eight ranks, eight sequences each"
    words = words_of(options_of(cell))
    assert "--bf16" in words and "--fp64" not in words and "--micro-batch" in words
    (pp,) = study_of(
        tiny(cross=[{"strategy": ["pp"], "ranks": [2], "size": ["2x32"], "micro": [1]}])
    ).cells
    assert args_of(pp).batch == 2, "stages share a batch"


def test_figures_are_means_over_the_ranks_and_the_largest_peak():
    one = {"first_epoch_s": 4.0, "epoch_s": 1.0, "step_s": 0.1, "steps": 32, "peak_bytes": 5}
    cell = study_of(tiny()).base
    base = engine._together([one, {**one, "epoch_s": 3.0, "peak_bytes": 7}], cell, 0)
    assert (base["epoch_s"], base["peak_bytes"], base["first_epoch_s"]) == (2.0, 7, 4.0)
    assert base["tokens_per_s"] == 1024 / 2
    lost = {"status": "failed", "error": "connection closed"}
    full = {"status": "out of memory", "error": "cannot allocate"}
    assert engine._together([lost, full, one], cell, 1) == full
    assert engine._together([lost], cell, 128 + 9)["status"] == "out of memory", "killed by Linux"
    assert engine._together([lost], cell, 1) == lost


def test_the_second_epoch_is_timed_and_the_peak_is_that_of_the_third_step(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measured.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(measured, "STARTED_S", 97.0)
    meter = measured.Meter(epoch=2)
    kept = torch.empty(2**20, dtype=torch.uint8)
    torch.empty(2**26, dtype=torch.uint8)  # at once released, before the third step
    for step, seconds in enumerate((3, 50, 50, 7, 9, 1, 2)):
        if step == 2:
            torch.empty(2**22, dtype=torch.uint8)
        now_s += seconds
        meter.after_step()
    figures = meter.figures
    assert (figures["ready_s"], figures["first_epoch_s"], figures["epoch_s"]) == (6, 16, 3)
    assert (figures["steps"], figures["step_s"]) == (2, 1.5)
    assert figures["peak_bytes"] == pytest.approx(kept.nbytes + 2**22, abs=1000)


@pytest.fixture
def made(monkeypatch):
    """Runs whose seconds are made up; the list of cells that were run."""
    cells = []

    def attempt(study, cell, scratch):
        cells.append(study.label(cell))
        if cell["batch"] == 4:
            return {"status": "out of memory", "error": "no room"}
        seconds = 0.5 * len(cells) * (cell["micro"] or 1)  # the machine slows down
        figures = {
            "epoch_s": seconds,
            "step_s": seconds,
            "steps": 1,
            "tokens_per_s": 1.0,
            "peak_bytes": 2**20,
        }
        return figures | {
            "device": "a processor",
            "cores": 2,
            "torch": "2",
            "python": "3",
            "commit": "c",
        }

    monkeypatch.setattr(engine, "attempt", attempt)
    return cells


def entry(rows: list[dict], cell: str) -> dict:
    return next(entry for entry in summary(rows) if entry["cell"] == cell)


def test_a_killed_study_goes_on_with_nothing_run_twice(tmp_path, made, monkeypatch):
    study, write = study_of(tiny(vary={"micro": [1, 2], "batch": [4]})), engine.write_whole

    def killed_after_two(file, text):
        write(file, text)
        if len(load(tmp_path)) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "write_whole", killed_after_two)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path)
    (tmp_path / ".0-002.json.1.partial").write_text('{"cut off')
    monkeypatch.setattr(engine, "write_whole", write)
    rows = run_study(study, tmp_path)
    assert len(made) == len(rows) == len(list(engine.turns(study))) and rows == load(tmp_path)
    assert entry(rows, "batch 4")["status"] == "out of memory", "a failed run is a result, too"
    with pytest.raises(
        ConfigError,
        match="holds results of another study than tiny: name another folder with --out",
    ):
        run_study(study_of(tiny(vary={"micro": [2, 1]})), tmp_path)


def test_a_machine_that_slows_down_or_hesitates_does_not_change_the_ratios(tmp_path, made):
    rows = run_study(study_of(tiny(vary={"micro": [2]}, repeats=3)), tmp_path)
    ratio = entry(rows, "micro 2")["ratio"]
    assert ratio["low"] == pytest.approx(2) and ratio["high"] == pytest.approx(2)
    late = [
        {**row, "epoch_s": 1.5 * row["epoch_s"]} if row["cell"] == "micro 2" else row
        for row in rows
    ]
    assert entry(late, "micro 2")["ratio"] == ratio, "a few late steps"


def test_a_budget_is_kept(tmp_path, made, capsys):
    assert run_study(study_of(tiny(vary={"micro": [1, 2]})), tmp_path, budget_minutes=1e-9) == []
    assert "4 runs are left: run it again" in capsys.readouterr().err


def test_two_studies_side_by_side_say_what_changed_and_how_many_ratios_agree(
    tmp_path, made, capsys
):
    rows = run_study(study_of(tiny(vary={"micro": [2], "batch": [4]})), tmp_path / "a")
    half = [
        {**row, "epoch_s": row.get("epoch_s", 0) / 2, "step_s": row.get("step_s", 0) / 2}
        for row in rows
    ]
    faster = [new if row["cell"] == "micro 2" else row for new, row in zip(half, rows, strict=True)]
    (both,) = (entry for entry in side_by_side(rows, faster) if entry["cell"] == "micro 2")
    assert both["times"]["median"] == 0.5 and not both["within_10_pct"]
    assert cli.main(["study", "--compare", str(tmp_path / "a"), str(tmp_path / "a"), "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert (stored["within_10_pct"], stored["of"]) == (1, 1) and len(stored["machines"]) == 2
    assert [entry["cell"] for entry in stored["cells"]] == ["base", "micro 2"]


@pytest.mark.extended
def test_a_study_measures_on_real_ranks_and_records_what_fails(tmp_path):
    vary = {"phase": ["inference"], "size": ["1x8000000"], "precision": ["tf32"], "lr": [1e30]}
    rows = run_study(
        study_of(tiny(vary=vary, cross=[{"ranks": [2], "strategy": ["ddp"]}])), tmp_path
    )
    found = {entry["cell"]: entry for entry in summary(rows)}
    assert found["size 1x8000000"]["status"] == "out of memory"
    assert "tf32 is a precision of GPUs" in found["precision tf32"]["error"]
    assert re.search("the loss is nan at step .: lower --lr", found["lr 1e+30"]["error"]), (
        "the trainer's own words"
    )
    assert found["base"]["peak_bytes"] > found["phase inference"]["peak_bytes"]
    good = {cell for cell, entry in found.items() if entry["status"] == "ok"}
    assert good == {"base", "phase inference", "ranks 2, strategy ddp"}
    steps = {row["cell"]: row["steps"] for row in rows if "steps" in row}
    assert steps["base"] // 2 == steps["ranks 2, strategy ddp"], "a batch for each rank"


def test_offloading_is_deepspeeds_own_setting_and_has_no_formula(tmp_path):
    strategies = ["zero2", "zero2-offload"]
    study = study_of(tiny(cross=[{"strategy": strategies, "ranks": [2]}]))
    plain, offloaded = (
        json.loads(engine._deepspeed_json(cell, tmp_path).read_text()) for cell in study.cells
    )
    assert offloaded["zero_optimization"].pop("offload_optimizer") == {"device": "cpu"}
    assert offloaded.pop("zero_force_ds_cpu_optimizer") is False
    assert offloaded == plain
    predicted = [set(engine._predicted(cell)) for cell in study.cells]
    assert predicted == [{"parameters", "predicted_bytes"}, {"parameters"}]


def test_a_model_of_few_characters_reads_the_commonest_and_one_for_all_others(tmp_path):
    text = b"aaaa bbb cc d"
    folder = engine._write_tokens(text, 4, tmp_path / "tokens")
    tokens, vocabulary, _ = read_tokens(folder)
    assert vocabulary == 4
    # a comes 4 times; the space and b 3 times each, in the order of their codes; c and d are others
    assert list(tokens) == [0] * 4 + [1] + [2] * 3 + [1] + [3] * 2 + [1] + [3]


@pytest.mark.extended
def test_a_study_offloads_fine_tunes_and_trains_models_of_few_characters(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, of which other tests need none

    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "theirs")
    cells = [
        {"strategy": ["zero2", "zero2-offload"], "ranks": [2]},
        {"phase": ["fine-tuning"], "size": [str(tmp_path / "theirs")]},
        {"size": ["odd"]},
    ]
    rows = run_study(study_of(tiny(cross=cells)), tmp_path / "out")
    assert {row["status"] for row in rows} == {"ok"}, [row["error"] for row in rows]
    assert len(rows) == 6 and all(row["epoch_s"] > 0 for row in rows)


@pytest.mark.extended
def test_a_study_whose_process_is_killed_goes_on(tmp_path):
    base = "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in TINY.items())
    (tmp_path / "tiny.toml").write_text(f"repeats = 2\n[base]\n{base}[vary]\nmicro = [1, 2]\n")
    command = [
        sys.executable,
        "-m",
        "aiscale",
        "study",
        str(tmp_path / "tiny.toml"),
        "--out",
        str(tmp_path / "out"),
    ]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(list((tmp_path / "out").glob("*.json"))) >= 2, 120, "two runs")
    process.kill()
    process.wait()
    before = load(tmp_path / "out")
    assert 2 <= len(before) < 8
    done = aiscale(*command[3:])
    after = load(tmp_path / "out")
    assert done.returncode == 0 and len(after) == 8 and all(row in after for row in before), (
        "none is made twice"
    )


@pytest.mark.extended
def test_a_run_that_takes_too_long_is_recorded_as_such(tmp_path):
    (tmp_path / "slow.toml").write_text("repeats = 1\ncell_minutes = 0.002\n")
    done = aiscale("study", str(tmp_path / "slow.toml"), "--out", str(tmp_path / "out"))
    assert done.returncode == 0 and "base: timed out" in done.stdout


@pytest.mark.extended
def test_a_step_peaks_within_5_percent_of_the_predicted_memory(tmp_path):
    base = {"strategy": "serial", "size": "8x128", "batch": 16}
    (row,) = run_study(study_of({"name": "peak", "repeats": 1, "base": base}), tmp_path)
    assert row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.05)


def test_the_stored_study_says_of_itself_what_its_cells_say():
    stored = published.measured("study")
    near = [
        cell["within_10_pct"]
        for cell in stored["cells"]
        if "ratio" in cell and cell["cell"] != "base"
    ]
    assert (stored["within_10_pct"], stored["of"]) == (sum(near), len(near))
    now = read_study("laptop")
    names = {now.label(cell).lower() for cell in (now.base, *now.cells)}
    # measured by the program of that commit alone
    names |= {"place spooled", "model.model_type bert"}
    assert {cell["cell"] for cell in stored["cells"] if "ratio" in cell} <= names, (
        "a row that no study has any more"
    )
    bf16 = next(cell for cell in stored["cells"] if cell["cell"] == "precision bf16")
    # lesson 10 says so
    assert [round(ratio["median"], 2) for ratio in bf16["ratio"]] == [0.96, 1.10]
    for facts in stored["machines"]:
        assert re.search(
            r"\d cores, torch .*, Python .*, commit \w+.* to 20\d\d-.*, load before a run", facts
        )
