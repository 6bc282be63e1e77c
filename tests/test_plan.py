"""The planner: physics that must hold, answers by hand, a scoreboard that must not get worse."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from aiscale.cli import main
from aiscale.errors import ConfigError
from aiscale.plan import command, cost, published, rows
from aiscale.plan.answer import plan
from aiscale.plan.constants import CONSTANTS, SCOREBOARD, TABLE
from aiscale.plan.hardware import platform_of
from aiscale.plan.layout import SHAPES, Layout, Shape, Software, layout_of
from aiscale.plan.machines import find_machine
from aiscale.plan.memory import (
    capacity_bytes,
    needed_bytes,
    one_stage,
    stage_memory,
    stage_parameters,
)
from aiscale.plan.options import run_of
from aiscale.plan.search import search
from aiscale.plan.step import message_of_stage, seconds, step_seconds
from aiscale.train.options import options

PLANNER = Path(__file__).parents[1] / "benchmarks/planner"
SELENE = platform_of(find_machine("selene"))
GPT = Shape(layers=24, hidden=2048, heads=16, vocab=51200, tied=True, seq=2048)
BASE = Layout(dp=8, micro_batch=2, global_batch=128)
LATE = Software(overlap=False)


def step(shape=GPT, layout=BASE, on=SELENE):
    layout.check(shape)
    return step_seconds(shape, layout, on, CONSTANTS)


# physics -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        (replace(BASE, global_batch=256), BASE),
        (replace(BASE, recompute="full"), BASE),
        (replace(BASE, software=Software(flash=False)), BASE),
        (BASE, replace(BASE, software=Software(fused_optimizer=True))),
        (BASE, replace(BASE, software=Software(fused_loss=True))),
        (replace(BASE, pp=4), replace(BASE, pp=4, virtual_stages=2, schedule="interleaved")),
        (replace(BASE, software=LATE), replace(BASE, density=0.1, software=LATE)),
    ],
)  # fmt: skip
def test_more_work_or_more_waiting_takes_longer(slower, faster):
    assert step(layout=slower).total_s > step(layout=faster).total_s


def test_megatron_holds_6_bytes_a_parameter_and_its_share_of_12_and_torch_2_more():
    layout = replace(BASE, zero_stage=1)
    for fused, most in ((True, 6 + 12 / 8), (False, 8 + 12 / 8)):
        held = stage_memory(
            GPT, replace(layout, software=Software(fused_gradients=fused)), CONSTANTS
        )[0]
        states = sum(held[name] for name in ("weights", "gradients", "optimizer states", "buffers"))
        fragments = (CONSTANTS.allocator - 1) * (held["activations"] + held["logits"])
        stage = layout.stages(GPT)[0]
        assert (states - fragments) / stage_parameters(GPT, layout, stage) == pytest.approx(most)


def test_a_small_model_in_eager_python_is_bound_by_its_launches():
    tiny = replace(GPT, hidden=256, heads=4, vocab=512)
    assert step(tiny, replace(BASE, micro_batch=1)).launch_bound
    assert not step(GPT, replace(BASE, micro_batch=8)).launch_bound


def test_a_row_has_the_facts_of_the_program_that_it_names_else_megatrons():
    small = {"hidden": "1024", "heads": "16", "seq": "512", "tp": "2", "zero_stage": "1"}
    cells = (
        {"program": "megatron"},
        {"note": "Megatron-LM, 2023"},
        {"program": "nanotron"},
        {"id": "nanotron-1B-0"},
        {},
    )
    fast, same, slow, also, untold = (rows.read(small | cell) for cell in cells)
    assert 1.5 * fast.step.total_s < slow.step.total_s and fast.memory_gb < slow.memory_gb
    assert same.to_dict() == fast.to_dict() and also.to_dict() == slow.to_dict()
    assert (untold.step, untold.memory_gb) == (
        fast.step,
        fast.memory_gb,
    )
    assert untold.kind != fast.kind


def test_tensor_parallelism_across_nodes_costs_more_than_inside():
    on = platform_of(find_machine("jean-zay-a100"))
    inside, across = (seconds("all_reduce", 2**26, n, 8, on, CONSTANTS) for n in (8, 16))
    assert across > 1.5 * inside


@pytest.mark.parametrize(
    ("ranks", "batch", "text"), [(8, 64, "pp=4"), (6, 48, "pp=6"), (8, 64, "pp=4,virtual_stages=3")]
)
def test_the_closed_form_of_the_pipeline_agrees_with_the_simulation(ranks, batch, text):
    layout = command._layout(text, ranks, batch, "bf16", Software())
    closed, m = step(layout=layout), layout.micro_batches
    expected = m * max(closed.stages_s) + closed.bubble_s + closed.parts["pipeline messages"]
    passes = [s / 3 for s in closed.stages_s], [2 * s / 3 for s in closed.stages_s]
    message_s = message_of_stage(GPT, layout, SELENE, CONSTANTS)
    events = cost.pipeline_timeline(
        layout.schedule, layout.pp, m, layout.virtual_stages, *passes, message_s=message_s
    )
    assert max(event.end_s for event in events) == pytest.approx(expected, rel=0.03)


# memory ------------------------------------------------------------------------------------------


def test_states_are_sixteen_bytes_a_parameter_and_zero_divides_them_as_its_paper_says():
    software = Software(fp32_gradients=False, overlap=False)
    n = GPT.parameters

    def states(**changes):
        layout = replace(BASE, software=software, **changes)
        held = one_stage(GPT, layout, 0, CONSTANTS)
        return sum(held[name] for name in ("weights", "gradients", "optimizer states"))

    assert states() == pytest.approx(16 * n)
    assert states(zero_stage=1) == pytest.approx(4 * n + 12 * n / 8)
    assert states(zero_stage=2) == pytest.approx(2 * n + 14 * n / 8)
    assert states(zero_stage=3) == pytest.approx(16 * n / 8)


def test_the_first_stage_of_1f1b_holds_most_micro_batches_and_recomputation_holds_least():
    even = Software(split="even")
    held = stage_memory(GPT, replace(BASE, pp=4, dp=2, software=even), CONSTANTS)
    activations = [stage["activations"] for stage in held]
    assert activations == sorted(activations, reverse=True)
    assert activations[0] == pytest.approx(4 * activations[3])
    layouts = [replace(BASE, recompute=kind) for kind in ("full", "none")]
    full, none = (needed_bytes(GPT, layout, CONSTANTS) for layout in layouts)
    assert full < none


def test_tensor_and_sequence_parallelism_divide_activations():
    def activations(**changes):
        return stage_memory(GPT, replace(BASE, dp=1, pp=2, **changes), CONSTANTS)[0]["activations"]

    assert activations(tp=4) > activations() / 4
    # by one layer's backward pass
    gathered = CONSTANTS.gathered_bytes * BASE.micro_batch * GPT.seq * GPT.hidden
    assert activations(tp=4, sequence_parallel=True) == pytest.approx(activations() / 4 + gathered)


# answers -----------------------------------------------------------------------------------------


def test_an_answer_can_be_checked_by_hand():
    layout = replace(BASE, dp=8, global_batch=128)
    answer = plan(GPT, layout, SELENE)
    assert GPT.parameters == 24 * (12 * 2048**2 + 2 * 2048) + 51200 * 2048 + 2048
    flops = 6 * (24 * (12 * 2048**2 + 2 * 2048) + 51200 * 2048) + 12 * 24 * 2048 * 2048
    tokens_per_s = 128 * 2048 / answer.step.total_s / 8
    assert answer.mfu == pytest.approx(flops * tokens_per_s / 312e12)
    assert answer.node_hours(1e9) == pytest.approx(1e9 / (tokens_per_s * 8) / 3600)
    # 400 W a device
    assert answer.energy_kwh(1e9) == pytest.approx(1e9 / tokens_per_s / 3600 * 0.4)
    assert answer.band(1.0) == SCOREBOARD["bands"]["unseen"]["one_node"] and answer.band(1.0)[0] < 1
    assert (answer.memory_gb, answer.hfu) == (
        needed_bytes(GPT, layout, CONSTANTS) / 1e9,
        answer.mfu,
    )
    assert 8 * answer.tokens_per_s == pytest.approx(128 * 2048 / answer.step.total_s)
    assert sum(answer.step.causes().values()) == pytest.approx(answer.step.total_s)
    full = plan(GPT, replace(layout, recompute="full"), SELENE)
    # of 3 passes the forward one twice, but the head's
    assert full.hfu / full.mfu == pytest.approx(4 / 3, rel=0.05)


def test_rows_are_answered_with_the_stated_defaults_and_a_broken_row_says_why():
    row = dict.fromkeys(rows.DEFAULTS, "") | {"id": "a", "gpus": "16", "zero_stage": "1"}
    wrong = [{"tp": "3"}, {"layers": "many"}, {"network_gbit_per_node": "-1"}, {"gpu": "B300"}]
    good, bad, odd, negative, unknown = rows.answers(
        [row, *(row | {"id": "b"} | change for change in wrong)]
    )
    same = next(rows.answers([{"id": "a", "gpus": "16", "zero_stage": "1"}]))
    assert good == same and good["fits"] in (True, False)
    assert good["params_B"] == pytest.approx(
        (32 * (12 * 4096**2 + 2 * 4096) + 2 * 50304 * 4096 + 4096) / 1e9, abs=1e-4
    )
    assert good["tokens_per_s_per_gpu"] == pytest.approx(2048 * 1 / good["step_time_s"], rel=1e-3)
    assert (
        bad["error"] == "dp 5 x tp 3 x pp 1 = 15, but gpus is 16: change one of them"
        and bad["step_time_s"] is None
    )
    assert odd["error"] == "layers is 'many': it must be a whole number"
    assert (
        negative["error"] == "the network of a node is -1 Gb/s: it must be at least 0, and finite"
    )
    assert unknown["error"].startswith("unknown accelerator 'B300'")


# search ------------------------------------------------------------------------------------------


def test_gpt3_on_a_thousand_nodes_is_searched_in_two_seconds_and_losers_have_reasons():
    start = time.process_time()
    found = search(SHAPES["gpt3-175b"], SELENE, 8192, 8192)
    assert time.process_time() - start < 2
    assert found.best.fits and found.best.layout.gpus == 8192
    times = [answer.step.total_s for answer in found.ranked]
    assert times == sorted(times) and all("slower" in reason for _, reason in found.reasons())
    for answer, reason in found.reasons():
        told = re.match(r"(\S+) % slower: (\S+) s more of (.+)", reason)
        slower_pct, more_s, part = told.groups()
        ratio = answer.step.total_s / found.best.step.total_s
        assert float(slower_pct) == pytest.approx(100 * (ratio - 1), abs=0.6)
        grown_s = answer.step.causes()[part] - found.best.step.causes()[part]
        assert float(more_s) == pytest.approx(grown_s, abs=0.006)


def test_a_model_that_cannot_fit_is_told_by_how_much_and_what_would_help():
    found = search(SHAPES["gpt3-175b"], SELENE, 8, 512)
    layout = found.too_large[0][1]
    over = (
        needed_bytes(found.shape, layout, CONSTANTS) - capacity_bytes(SELENE, layout, CONSTANTS)
    ) / 1e9
    told = rf"needs {over:.0f} GB a device more than there is; .* fit with (\d+) nodes"
    with pytest.raises(ConfigError, match=told) as refused:
        _ = found.best
    gpus = int(re.search(told, str(refused.value))[1]) * SELENE.gpus_per_node
    assert search(SHAPES["gpt3-175b"], SELENE, gpus, 512).ranked
    assert not search(SHAPES["gpt3-175b"], SELENE, gpus // 2, 512).ranked


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--model forgem --machine frontier", "unknown model 'forgem': did you mean forge-m?"),
        (
            "--model forge-m --machine frontier --nodes 0",
            "--nodes is 0: it must be at least 1 and at most 1000000",
        ),
        (
            "--model forge-m --machine frontier --layout tp=3",
            "--layout: dp 1 x tp 3 x pp 1 x cp 1 = 3 devices, but",
        ),
        (
            "--model forge-m --machine frontier --layout tq=2",
            "--layout: unknown key 'tq': did you mean tp?",
        ),
        ("--rows nowhere.csv", "No such file or directory: 'nowhere.csv'"),
    ],
)
def test_bad_input_is_refused_in_one_line(argv, message, capsys):
    assert main(["plan", *argv.split()]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_command_prints_a_page_and_json(capsys, tmp_path):
    assert main(["plan", "--model", "forge-m", "--machine", "frontier", "--nodes", "64"]) == 0
    said = capsys.readouterr().out
    assert "13.1 B parameters" in said and "node-hours" in said and "where the step goes" in said
    assert (
        "(many nodes, a program that was not fitted)" in said
        and "kWh" in said
        and "may not fit" not in said
    )
    days, low, high = map(float, re.search(r"tokens: (\S+) days \((\S+) to (\S+)\)", said).groups())
    bands, doubts = SCOREBOARD["bands"]["unseen"], SCOREBOARD["bands"]["doubts"]
    both = bands["many_nodes"], doubts["rccl_many_nodes"]
    wide = [min(ends[0] for ends in both), max(ends[1] for ends in both)]
    assert [low / days, high / days] == pytest.approx(wide, rel=0.01)
    assert "AMD's GPUs over several nodes took longer" in said
    # fits, but the band's upper end does not
    main("plan --model forge-m --machine perlmutter --nodes 4".split())
    assert "it may not fit" in capsys.readouterr().out
    argv = "plan --model gpt3-175b --machine selene --nodes 128"
    argv += " --layout tp=8,pp=16,micro_batch=1 --json"
    assert main(argv.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["gpus"] == 1024 and answer["fits"] and 0.3 < answer["mfu_pct"] / 100 < 0.7
    fullest_gb = max(sum(stage.values()) for stage in answer["stages_GB"])
    assert fullest_gb == pytest.approx(answer["memory_GB"], rel=1e-3)
    kinds = {"days": "many_nodes", "node_hours": "many_nodes", "memory_GB": "memory"}
    for name, kind in kinds.items():
        expected = [answer[name] * ratio for ratio in bands[kind]]
        assert answer[f"{name}_band"] == pytest.approx(expected, rel=1e-3)
    assert answer["host_GB_a_node"]["fits"] is None, "the catalogue has no figure of Selene's"
    # ZeRO-3 has 70.6 B weights in fp32 on each of 8 hosts.
    argv = "plan --model llama-70b --machine frontier --nodes 16 --batch 128"
    argv += " --layout recompute=full,zero_stage=3"
    assert main([*argv.split(), "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    host = answer["host_GB_a_node"]
    assert host["drawing weights"] == pytest.approx(8 * 4 * answer["params_B"], rel=1e-3)
    assert (answer["fits"], host["capacity"], host["fits"]) == (True, 512, False)
    assert main([*argv.replace("zero_stage=3", "fsdp=true").split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host_GB_a_node"]["fits"] is True
    file = tmp_path / "runs.csv"
    file.write_text("id,gpus\none,8\n")
    assert main(["plan", "--rows", str(file), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)[0]) == ["id", *rows.FIELDS]


def test_a_run_is_planned_in_the_layout_that_it_has():
    for trainer, words, planned in (
        (
            "megatron",
            "--tp 2 --pp 4 --fp16",
            {"dp": 8, "tp": 2, "pp": 4, "zero_stage": 1, "precision": "fp16"},
        ),
        ("fsdp", "--bf16", {"dp": 64, "fsdp": True}),
        ("zero", "--stage 3 --bf16", {"dp": 64, "zero_stage": 3}),
    ):
        words = f"{words} --model forge-m --length 2048 --micro-batch 9 --batch 8064 --recompute"
        run = run_of(trainer, options(trainer).parse_args(words.split()))
        layout = Layout(micro_batch=9, global_batch=8064, recompute="full", **planned)
        assert layout_of(run, 64) == layout and layout_of(run, 64).software == Software()


def test_the_planner_needs_neither_torch_nor_numpy():
    code = "import sys, aiscale.plan.command, aiscale.plan.rows; "
    code += "print({'torch', 'numpy'} & set(sys.modules))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert said.strip() == "set()"


@pytest.fixture
def scoreboard(monkeypatch):
    monkeypatch.syspath_prepend(PLANNER)
    return importlib.import_module("scoreboard")


@pytest.fixture
def scores(scoreboard):
    return importlib.import_module("scores")


@pytest.fixture
def bands(scoreboard):
    return importlib.import_module("bands")


@pytest.fixture
def fit(scoreboard):
    return importlib.import_module("fit")


def test_readme_and_planner_say_of_the_errors_what_the_stored_scoreboard_says():
    stored = published.measured("planner")
    for line, board in zip(stored["lines"][1:], ("left_out", "program_left_out"), strict=False):
        for name, words in (
            ("step_median_pct", "{} % off in the median of 19 tables without stalls ({})"),
            ("step_with_stalls_pct", "{} % with them ({})"),
        ):
            values = [row[name] for row in stored[board][:-1]]
            both = f"{median(values):.1f}", f"{min(values):.1f} to {max(values):.1f} %"
            assert words.format(*both) in line
    shown = "\n".join(f"- {line}" for line in SCOREBOARD["lines"])
    assert (
        SCOREBOARD["lines"] == stored["lines"]
        and shown in (PLANNER.parents[1] / "README.md").read_text()
    )


def test_the_runs_that_errors_leave_out_are_counted_and_stand_beside_the_errors(scores):
    every = [run for source in scores.SOURCES for run in scores.runs(source)]
    timed = [run for run in every if run.step_s]
    scored = [run for run in timed if not scores.is_stall(run)]
    first, *headlines = SCOREBOARD["lines"][:3]
    assert (
        f"{len(timed):,} of {len(every):,} published runs" in first
        and f"{len(scored):,} are scored without stalls" in first
    )
    sweep, c = scores.runs("nanotron_sweep"), scores.blind("nanotron_sweep")
    off = {run.id: 100 * abs(scores.step_s(run, c) / run.step_s - 1) for run in sweep if run.step_s}
    assert len(off) - sum(run.id in off for run in scored) == len(timed) - len(scored), (
        "all stalls are of this table"
    )
    share = 100 * (len(timed) - len(scored)) / len(off)
    assert f"{len(timed) - len(scored)} of {len(off):,} of nanotron_sweep ({share:.0f} %)" in first
    of_64 = [run for run in sweep if run.step_s and run.layout.gpus == 512]
    stalled = sum(map(scores.is_stall, of_64))
    common = " ".join(SCOREBOARD["lines"])
    assert f"on 64 nodes {100 * stalled / len(of_64):.0f} % stalled" in common
    of_all = f"{median(off.values()):.1f} %"
    assert all(of_all in line for line in headlines), "neither headline stands alone"


def test_every_table_weighs_the_same_in_the_bands_of_an_answer(bands):
    long, short = [2.0] * 99, [1.0]
    assert [bands._share([long, short], share) for share in (0.1, 0.4, 0.6, 0.9)] == [
        1.0,
        1.0,
        2.0,
        2.0,
    ]
    for program, ranges in bands.bands().items():
        for name, band in ranges.items():
            assert band == pytest.approx(SCOREBOARD["bands"][program][name], abs=0.002), (
                program,
                name,
            )


def test_the_fit_reads_every_table_from_its_first_rows_to_its_last(fit):
    for source in fit.SOURCES:
        ran = [run.id for run in fit.runs(source) if run.ran and run.step_s]
        chosen = [run.id for run in fit.rows_of([source])["time"][0]]
        tenth = max(1, len(ran) // 10)
        for start in range(0, len(ran) - tenth + 1, tenth):
            assert set(ran[start : start + tenth]) & set(chosen), (
                f"{source}: no row from {start} to {start + tenth}"
            )


def test_the_fit_computes_anew_what_a_constant_changes_and_nothing_else(fit):
    rows = fit.rows_of(["nanotron_sweep", "moe_reports", "torchtitan_llama3"])
    for what, names in (("time", ("order_traffic", "fp8_cast")), ("memory", ("undivided_bytes",))):
        values = {name: TABLE["constants"][name]["value"] for name in fit.FITTED}
        errors = fit.Errors(rows[what], what, values)
        for name in names:
            tried = values | {name: 1.2 * values[name]}
            assert errors.after(tried, name) == fit.Errors(rows[what], what, tried).errors
            assert len(errors.touched[name]) < sum(map(len, rows[what]))


@pytest.mark.extended
def test_the_stored_constants_are_those_of_the_fit(fit):
    stored = {name: TABLE["constants"][name]["value"] for name in fit.FITTED}
    assert fit.fit_without("") == pytest.approx(stored, rel=1e-3)
    without = json.loads(fit.LEFT_OUT.read_text())["nanotron_sweep"]
    assert fit.fit_without("nanotron_sweep") == pytest.approx(without, rel=1e-3)


@pytest.mark.extended
def test_the_scoreboard_from_a_clean_clone_is_the_stored_one():
    """`planner.json` says how to store it anew, with the change that made it better."""
    done = subprocess.run(
        [sys.executable, PLANNER / "scoreboard.py", "--json"], capture_output=True, check=True
    )
    again, stored = json.loads(done.stdout), published.measured("planner")
    assert again["court"] == stored["court"] and again["about"] == stored["about"]
    assert again["lines"] == stored["lines"]
    for board in ("left_out", "program_left_out", "one_model_left_out", "fitted_on_all"):
        for row, was in zip(again[board], stored[board], strict=True):
            assert row == pytest.approx(was, abs=0.1), (board, was["source"])
    for source, columns in stored["points"].items():
        for name, values in columns.items():
            assert again["points"][source][name] == pytest.approx(values, rel=1e-3), (source, name)
