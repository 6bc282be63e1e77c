"""Studies: refused before anything runs, resumed without a run made twice, compared and reported as measured."""

import copy
import re
import resource
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest

from aiscale import published
from aiscale.bench.study import engine, load, read_study, results, run_study, side_by_side, summary
from aiscale.bench.study.grid import check, run_of, shipped, study_of
from aiscale.config import ConfigError
from aiscale.parallel.megatron import engine as megatron

LESSON = nbformat.read(Path(__file__).parents[1] / "notebooks/09_benchmarks.ipynb", 4)
TINY = {"size": "1x32", "batch": 2, "data_kib": 1, "strategy": "serial", "loop.seq_len": 16, "loop.device": "cpu"}


def tiny(**tables) -> dict:
    return {"name": "tiny", "repeats": 1, "base": TINY, **tables}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "its grid is empty: give axes and values"),
        ({"vary": {"presicion": ["bf16"]}}, "unknown axis or field presicion: did you mean precision?"),
        ({"cross": [{"ranks": [3], "strategy": ["pp"]}]}, "model.n_layer 1 is not divisible by parallel.pp 3"),
        ({"vary": {"batch": [512]}}, "data_kib 1 is less than one step reads: set at least 9"),
        (
            {"cross": [{"ranks": [2], "strategy": ["fsdp"], "precision": ["fp16"]}]},
            "loop.precision fp16 with parallel.strategy fsdp: .*: set loop.precision=bf16",
        ),
    ],
)
def test_a_study_that_makes_no_sense_is_refused_in_one_line(tree, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        study_of(tiny(**tree))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", shipped())
def test_every_row_of_the_kits_studies_is_a_setting_that_its_strategy_takes(name):
    study = read_study(name)
    for cell in (study.base, *study.cells, *(cell for cell, _ in study.largest)):
        check(cell)
        if (run := run_of(cell)).parallel.strategy == "megatron":
            megatron.check(run)


@pytest.fixture
def played(monkeypatch):
    """Runs whose seconds are made up; the list of cells that were run."""
    made = []

    def attempt(study, cell, folder, limit, probe=False):
        made.append(study.label(cell))
        if cell["batch"] == 4:
            return {"status": "out of memory", "error": "no room"}
        seconds = 0.5 * len(made) * int(cell["micro"] or 1)  # the machine slows down
        figures = {name: 1.0 for name in engine.MEASURED} | {"epoch_s": seconds, "step_s": seconds}
        return figures | {"device": "a processor", "cores": 2, "torch": "2", "python": "3", "commit": "c"}

    monkeypatch.setattr(engine, "attempt", attempt)
    return made


def test_a_killed_study_goes_on_with_nothing_run_twice(tmp_path, played, monkeypatch):
    study, out = study_of(tiny(vary={"micro": [1, 2], "batch": [4]})), tmp_path / "a.csv"
    whole, append = len(list(engine.turns(study))), engine._append

    def killed_after_two(path, row):
        append(path, row)
        if len(load(path)) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_append", killed_after_two)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, out)
    with out.open("a") as file:
        file.write("tiny,cut off")  # a row that the kill tore
    monkeypatch.setattr(engine, "_append", append)
    rows = run_study(study, out)
    assert len(played) == whole == len(rows)
    assert len({(row["id"], row["round"], row["turn"]) for row in rows}) == whole


def test_a_machine_that_slows_down_or_hesitates_does_not_change_the_ratios(tmp_path, played):
    rows = run_study(study_of(tiny(vary={"micro": [2]}, repeats=3)), tmp_path / "a.csv")
    ratio = next(entry["ratio"] for entry in summary(rows) if entry["cell"] == "micro 2")
    assert ratio["low"] == pytest.approx(2) and ratio["high"] == pytest.approx(2)
    late = [{**row, "epoch_s": 1.5 * row["epoch_s"]} if row["cell"] == "micro 2" else row for row in rows]
    assert next(entry["ratio"] for entry in summary(late) if entry["cell"] == "micro 2") == ratio, "a few late steps"


def test_a_full_disk_loses_no_finished_cell(tmp_path, played):
    study, out = study_of(tiny(vary={"micro": [1, 2]})), tmp_path / "a.csv"
    run_study(study, tmp_path / "elsewhere.csv")
    lines = (tmp_path / "elsewhere.csv").read_bytes().splitlines(keepends=True)
    room, (soft, hard) = len(b"".join(lines[:3])) + 60, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))  # the heading, two rows, a part of the third
    try:
        with pytest.raises(ConfigError, match="free some space, or name another folder with --out; its finished cells"):
            run_study(study, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(load(out)) == 2 and out.read_bytes().endswith(b"\n")
    assert len(run_study(study, out)) == len(list(engine.turns(study))), "it goes on when there is room"


def test_a_budget_is_kept(tmp_path, played):
    lines = []
    study = study_of(tiny(vary={"micro": [1, 2]}))
    assert run_study(study, tmp_path / "a.csv", budget_minutes=1e-9, report=lines.append) == []
    assert "runs are left: run it again" in lines[-1]


def test_what_the_comparison_says_follows_the_file(tmp_path, played):
    study, out = study_of(tiny(vary={"micro": [2], "batch": [4]})), tmp_path / "a.csv"
    rows = run_study(study, out)
    half = {"micro 2": 0.5}
    faster = [{**row, **{name: row[name] * half.get(row["cell"], 1) for name in ("epoch_s", "step_s")}} for row in rows]
    both = {entry["cell"]: entry for entry in side_by_side(rows, faster)}
    assert both["micro 2"]["times"]["median"] == 0.5 and not both["micro 2"]["agree"] and both["base"]["agree"]


def test_an_interval_needs_six_runs():
    assert results.spread([3, 1, 2]) == {"median": 2, "low": 1, "high": 3}
    assert results.spread(range(1, 10)) == {"median": 5, "low": 2, "high": 8}  # 96 %: the binomial distribution


def h100(document: dict) -> dict:
    return next(fact for fact in document["facts"] if fact["what"] == "H100 over A100, bf16")


def told(tables: dict) -> tuple[str, str]:
    """(the sentences, the numbers in figures) of lesson 09 where it reads the report's tables, with these ones."""
    said, drawn, names = [], [], {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("IPython.display.display", lambda shown: said.append(shown.data))
        patch.setattr(published, "facts", lambda name: tables[name])
        patch.setattr(published, "table", lambda name: tables[name])
        for cell in LESSON.cells[: 1 + next(i for i, cell in enumerate(LESSON.cells) if cell.id == "09-017")]:
            if cell.cell_type == "code":
                plt.close("all")
                exec(cell.source, names)
                drawn += [line.get_xydata().tolist() for ax in plt.gcf().axes for line in ax.lines]
    return " ".join(said), str(drawn)


@pytest.mark.parametrize(
    ("table", "change", "sentence"),
    [
        ("turing_table5_peak_memory", lambda rows: rows[0].update(peak_memory_MiB=9999.0), "Counted: 22"),
        ("turing_facts", lambda doc: h100(doc).update(ratio=[1.5, 3.25]), "1.5 to 3.25 times"),
    ],
)
def test_changing_a_cell_of_a_published_table_changes_figure_and_text_of_the_lesson(table, change, sentence):
    tables = {
        "turing_facts": published.facts("turing_facts"),
        "turing_table5_peak_memory": published.table("turing_table5_peak_memory"),
    }
    before = told(copy.deepcopy(tables))
    change(tables[table])
    text, drawn = told(tables)
    assert text != before[0] and drawn != before[1] and sentence in text


@pytest.mark.extended
def test_a_study_measures_on_real_ranks_and_records_a_crash(tmp_path):
    tree = tiny(vary={"precision": ["fp64"], "phase": ["inference"]}, cross=[{"ranks": [2], "strategy": ["ddp"]}])
    tree |= {"memory_limit_mib": 0.6, "largest": {"limit_mib": 1, "width": 32}}
    found = {entry["cell"]: entry for entry in summary(run_study(study_of(tree), tmp_path / "a.csv"))}
    assert found["precision fp64"]["status"] == "out of memory"
    assert found["base"]["peak_bytes"] > found["phase inference"]["peak_bytes"]
    parameters = next(row["parameters"] for row in load(tmp_path / "a.csv"))
    assert found["ranks 2, strategy ddp"]["wire_bytes_per_step"] == 4 * parameters
    searched = next(entry for name, entry in found.items() if name.startswith("largest"))
    assert searched["largest_layers"] > 1 and searched["peak_bytes"] <= 2**20


@pytest.mark.extended
def test_the_largest_model_by_search_needs_the_predicted_memory_within_5_percent(tmp_path):
    search = {"limit_mib": 96, "width": 128, "batch": [16]}  # below, temporary tensors of the loss weigh more
    tree = {"name": "largest", "repeats": 1, "base": {"strategy": "serial", "loop.device": "cpu"}, "largest": search}
    row = run_study(study_of(tree), tmp_path / "a.csv")[-1]
    assert row["peak_bytes"] == pytest.approx(row["predicted_bytes"], rel=0.05) and row["peak_bytes"] <= 96 * 2**20
    assert abs(row["largest_layers"] - row["predicted_layers"]) <= 1


def test_the_stored_study_says_of_itself_what_its_cells_say():
    stored = published.measured("study")
    assert (stored["within_10_pct"], stored["of"]) == results.agreement(stored["cells"])
    for facts in stored["machines"]:
        assert re.search(r"\d cores, torch .*, Python .*, commit \w+.* to 20\d\d-.*, load before a run", facts)
