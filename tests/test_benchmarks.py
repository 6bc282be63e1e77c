"""The benchmarks: fair ratios, a floor that is one, figures from measured steps, no run lost."""

import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aiscale.measure.distributed import connect
from aiscale.measure.study.grid import epoch_of, run_of
from aiscale.plan import cost, published
from aiscale.train.model import build, draw, loss_of
from aiscale.train.optimizer import make_optimizer
from aiscale.train.options import options
from ranks import processes_with, script, wait_until

common, model, gpu, radius, radius_sweep = map(
    script, ("common", "model", "gpu", "radius", "radius_sweep")
)
largest, choices, ways, seat = map(script, ("largest", "choices", "ways", "seat"))
table2 = script("table2")
TINY = model.Cell(model="2x64", batch=2, length=64, rounds=3)


def quick(benchmark) -> dict:
    """The result of `python benchmarks/NAME.py --quick --json`."""
    command = [sys.executable, benchmark.__file__, "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_ratio_is_taken_round_by_round_after_the_warm_up(monkeypatch):
    """A machine that becomes three times slower in the middle does not change the ratio."""
    now, slower, calls = 0.0, iter([9, 9, 1, 1, 1, 1, 3, 3, 3, 3, 3, 3]), []
    monkeypatch.setattr(common.time, "perf_counter", lambda: now)

    def work(name, seconds):
        def step():
            nonlocal now
            now += seconds * next(slower)
            calls.append(name)

        return step

    measured = common.paired({"a": work("a", 1.0), "b": work("b", 2.0)}, rounds=5, warmup=1)
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab" + "ba" + "ab", "they take turns"
    assert measured.ratios("b", "a") == [2.0] * 5 and measured.ratio("b", "a") == 2.0
    assert measured.median_s("a") == 3.0


HOLDS = """
import subprocess, sys, time
held = b"1" * {nbytes}
subprocess.run([sys.executable, "-c", sys.argv[1]]) if sys.argv[1:] else time.sleep(1.5)
"""


def test_the_memory_of_a_seat_is_that_of_all_processes_but_the_runner(tmp_path):
    inner = HOLDS.format(nbytes=80_000_000)
    command = [sys.executable, "-c", HOLDS.format(nbytes=50_000_000), inner]
    alone = seat.watched(command, tmp_path)
    both = seat.watched(command, tmp_path, leave_out=False)
    assert alone["processes"] == 1 and 80e6 < alone["peak_bytes"] < 110e6
    assert both["processes"] == 2 and 130e6 < both["peak_bytes"] < 180e6


@pytest.mark.extended
def test_the_model_benchmark_measures_everything():
    result = quick(model)
    (training,) = result["training"]
    contenders = {"ours", "transformers", "floor"}
    assert training["seconds"].keys() == contenders == training["speedup"].keys() | {"ours"}
    assert training["tokens_per_s"]["ours"] == pytest.approx(128 / training["seconds"]["ours"])


def test_the_floor_does_the_products_of_a_training_step():
    """Counted by torch: weights exactly; attention half, because of the causal mask."""
    with FlopCounterMode(display=False) as floor:
        model.products_step(TINY)()
    step, _ = model.our_step(TINY, torch.zeros(2, 65, dtype=torch.long))
    with FlopCounterMode(display=False) as counter:
        step()
    # 2 per product term, batch x head, T, T, C, products, layers
    attention = 2 * 2 * 64 * 64 * 64 * 6 * 2
    counts = counter.get_flop_counts()["Global"]
    linear = sum(
        n for operation, n in counts.items() if str(operation) in ("aten.mm", "aten.addmm")
    )
    assert floor.get_total_flops() == linear + attention / 2


# GPU ---------------------------------------------------------------------------------------------


def test_the_figures_of_the_gpu_benchmark_come_from_the_steps_it_measured(monkeypatch):
    cell = gpu.cell_of("quick", 4, steps=4, compile=False)
    assert (epoch_of(cell), cell["batch"], cell["precision"]) == (4, 4, "bf16")
    found = {
        "tokens_per_s": 1000.0,
        "step_s": 0.256,
        "peak_bytes": 7,
        "ready_s": 2.0,
        "device": "a card",
    }
    monkeypatch.setattr(gpu, "attempt", lambda study, cell, scratch: found)
    monkeypatch.setattr(gpu, "peak_of", lambda precision: (1e12, "a data sheet"))
    row = gpu.measure_training(cell)
    flops = cost.flops_per_token(run_of(cell).model, cell["length"])
    assert row["mfu"] == pytest.approx(1000 * flops / 1e12)
    assert (row["peak_memory_bytes"], row["step_s"]) == (7, 0.256)


def test_the_compiler_sees_the_whole_model_as_one_graph_and_it_computes_the_same():
    args = options().parse_args(["--model", "2x32"])
    ours, x = draw(build(args), args, torch.device("cpu")), torch.randint(0, 256, (2, 32))
    loss_of(ours(x), x).backward()
    plain = [p.grad.clone() for p in ours.parameters()]
    ours.zero_grad()
    loss_of(torch.compile(ours, fullgraph=True, backend="aot_eager")(x), x).backward()
    for parameter, expected in zip(ours.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_a_benchmark_of_radius_ends_at_the_first_ctrl_c():
    from aiscale.train.ranks import note_signal  # after `ways`, which has imported it

    assert signal.getsignal(signal.SIGINT) is not note_signal


def test_simulated_ranks_compute_what_one_rank_with_the_whole_batch_does():
    """Dense, Radius between a choice and the next, and top-k that chooses all.
    Each sends less where it may."""
    world = connect("cpu")
    rows = torch.randint(0, 256, (8, 17), generator=torch.Generator().manual_seed(0))

    def weights(method, n, **about):
        args = options().parse_args(["--model", "1x32", "--lr", "1e-2"])
        model = draw(build(args), args, torch.device("cpu")).double()
        optimizer = make_optimizer(model, args)
        several = [ways.make(method, model, **about) for _ in range(n)]
        simulated = ways.SimulatedRanks(model, optimizer, several)
        for _ in range(5):
            simulated.step(rows.split(8 // n))
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def same(one, other):
        return torch.allclose(one, other, rtol=0, atol=1e-7)

    dense = weights("dense", 1)
    assert same(weights("dense", 4), dense)
    assert same(weights("top-k", 4, density=1.0), dense)
    assert same(weights("radius", 2, density=1.0), dense)
    sums = weights("radius", 1, density=0.4, interval=3)
    assert same(weights("radius", 4, density=0.4, interval=3), sums) and not same(sums, dense)
    assert not same(weights("radius", 1, density=0.4, interval=3, residual="mean"), sums)
    assert not same(weights("top-k", 4, density=0.1), dense)
    assert not same(weights("powersgd", 1, rank=2), dense)
    world.close()


def test_the_parts_of_the_gpu_day_have_twelve_minutes_together():
    text = Path(gpu.__file__).with_name("gpu_day.sh").read_text()
    parts = re.search(r"^PARTS=\((.*)\)$", text, re.M)[1].split()
    limits = {name: int(seconds) for name, seconds in re.findall(r"\[(\w+)\]=(\d+)", text)}
    assert sum(limits[part] for part in parts) == 12 * 60
    assert set(parts) == set(limits) - {"study"}


@pytest.mark.timeout(1500)
@pytest.mark.extended
def test_the_gpu_day_runs_in_small_without_a_gpu_and_resumes(tmp_path):
    parts = ["gpt2_124M", "reference_124M", "radius", "trace", "memory"]
    command = [gpu.__file__.replace("gpu.py", "gpu_day.sh"), *parts]
    env = os.environ | {"QUICK": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    first = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1400).stdout
    found = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in parts}
    assert all(f"{part}: {tmp_path}/{part}.json, in " in first for part in parts)
    own, plain = found["gpt2_124M"], found["reference_124M"]
    assert own["mfu"] > 0 and plain["mfu"] > 0 and own["peak_flops"] > 0
    assert plain["reference"] == "aiscale's GPT in a plain loop"
    assert all(
        each["quick"] and each["machine"]["command"].endswith("--quick") for each in found.values()
    )
    assert (own["trainer"], plain["batch"]) == ("ddp", own["batch"])
    steps = found["radius"]["steps"]
    assert [row["density"] for row in steps] == [1.0, 0.9, 0.5, 0.4, 0.1]
    assert all(row["step_s"] > 0 for row in steps)
    assert [row["strategy"] for row in found["trace"]["strategies"]] == ["ddp", "fsdp"]
    traces = {path.name.split(".")[0] for path in tmp_path.glob("trace_*.json.gz")}
    assert traces == {"trace_eager", "trace_ddp", "trace_fsdp"}
    dense, dense_bf16, sparse, _ = (row["val_loss"] for row in found["radius"]["training"])
    assert dense != sparse and dense_bf16 == pytest.approx(dense, abs=0.05)
    assert [row["density"] for row in found["radius"]["work"]] == [0.4, 0.1]
    assert (
        0 < found["trace"]["rows"][0]["busy_traced"] <= 1
        and len(found["trace"]["rows"][0]["longest_a_step"]) == 8
    )
    plain, recomputing = found["memory"]["rows"]
    assert recomputing["forward_peak_bytes"] < plain["forward_peak_bytes"] > plain["held_bytes"]
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60).stdout
    assert again.count("is there") == len(parts)


@pytest.mark.extended
def test_the_radius_benchmark_compares_steps_on_a_slow_link_with_their_bytes():
    result = quick(radius)
    rows = {row["name"]: row for row in result["rows"]}
    dense, sparse = rows["dense, fp32, at once"], rows["radius d 0.1, fp32, at once"]
    assert dense["payload_bytes"] == 4 * result["parameters"] and dense["held_bytes"] == 0
    assert sparse["payload_bytes"] < 0.13 * dense["payload_bytes"]  # a tenth, plus the biases
    assert sparse["wire_bytes"] == round(1.5 * sparse["payload_bytes"])  # ring of 4 ranks
    assert sparse["held_bytes"] == 5 * result["parameters"]  # an fp32 residual and a byte of mask
    assert dense["peak_bytes"] < sparse["peak_bytes"]
    assert result["share_here"] == pytest.approx(
        1 - result["compute_s"] / dense["step_s"]["median"]
    )


def test_stored_results_come_from_slowed_links_and_meet_the_targets():
    speed = published.measured("radius_cpu")["speed"]
    assert speed["link"] == "shaped" and len(speed["checks"]) == 4
    assert abs(speed["share_here"] - speed["share"]) < 0.02
    assert speed["checks"] == radius.checks(speed)
    assert all(check["met"] for check in speed["checks"])


def test_the_stored_sweep_has_the_trend_and_the_grid_with_every_seed():
    rows = {
        (row["case"], row["steps"]): row
        for row in published.measured("radius_cpu")["sweep"]["rows"]
    }
    theirs = "radius d 0.4 T 200 sum switch 0.2"
    rivals = ("top-k d 0.1 switch 0.2", "powersgd rank 17 switch 0.2")
    tuned = [(case, steps) for case in ("dense", theirs) for steps in (500, 1000, 2000, 4000)]
    for case, steps in [*tuned, *((case, steps) for case in rivals for steps in (500, 1000, 2000))]:
        assert rows[case, steps]["seeds"] == [0, 1, 2] and rows[case, steps]["rates_tried"] == 4, (
            case,
            steps,
        )
        assert rows[case, steps]["wire_share"] <= rows[theirs, 500]["wire_share"] or case == "dense"
    for d in (0.9, 0.5, 0.1):  # in one table with dense and d 0.4, so tuned alike
        assert (
            rows[f"radius d {d} T 200 sum switch 0.2", published.reader.STEPS]["rates_tried"] == 4
        )
    for d, T, residual, switch in itertools.product(
        (0.9, 0.5, 0.4, 0.1), (50, 200), ("sum", "mean"), (0.2, 0)
    ):
        for steps in (500, 1000, 2000):
            row = rows[f"radius d {d:g} T {T} {residual} switch {switch:g}", steps]
            assert row["seeds"] == [0, 1, 2] and row["val_over_dense_pct"], (row["case"], steps)


@pytest.mark.extended
def test_a_killed_sweep_resumes_without_repeating_finished_runs(tmp_path):
    out = tmp_path / "sweep.jsonl"
    command = [sys.executable, radius_sweep.__file__, "--quick", str(out)]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: out.exists() and '"case"' in out.read_text(), 240, "a finished run")
    job.send_signal(signal.SIGKILL)
    job.wait()
    wait_until(lambda: not processes_with(str(out)), 30, "the workers' end")
    (first, *_) = radius_sweep.load(out)
    with out.open("a") as file:
        file.write('{"case": "radius d 0.4 T 200 s')  # a line cut off by a killed writer
    subprocess.run(command, check=True)
    rows = radius_sweep.load(out)
    assert rows[0] == first and len(rows) == 2
    assert [
        line.count("seconds")
        for line in out.read_text().splitlines()
        if first["case"] + '"' in line
    ] == [1]
    assert len(radius_sweep.table_of(rows)) == 2


@pytest.mark.extended
def test_a_killed_pair_resumes_and_its_masks_last_longer_than_chance(tmp_path):
    command = [sys.executable, script("radius_pair").__file__, str(tmp_path), "--quick"]
    job = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    first = tmp_path / "dense-20-0.0005-0/metrics.jsonl"
    second = tmp_path / "dense-20-0.001-0/metrics.jsonl"
    wait_until(second.exists, 240, "a finished run")
    os.killpg(job.pid, signal.SIGKILL)
    wait_until(lambda: not processes_with(str(tmp_path)), 30, "the run's end")
    finished = first.stat().st_mtime_ns
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((tmp_path / "radius_pair.json").read_text())
    assert first.stat().st_mtime_ns == finished
    assert [len(row["runs"]) for row in result["compare"]] == [2, 2] and len(result["tasks"]) == 4
    assert all(result["mask_kept_by_chance"] < kept <= 1 for _, kept in result["mask_kept"])
    assert [step for step, _ in result["mask_kept"]] == [10, 20, 30]


@pytest.mark.parametrize("best", [0.25e-3, 2e-3, 16e-3])
def test_the_search_for_a_rate_ends_inside_what_it_has_tried(best, monkeypatch):
    experiment = object.__new__(table2.Experiment)
    monkeypatch.setattr(experiment, "val_ppl", lambda row, lr: abs(math.log(lr / best)))
    found = sorted(experiment.search_rate(row=None))
    place = found.index(best)
    assert 0 < place < len(found) - 1


@pytest.mark.extended
def test_table_2_has_a_time_and_a_perplexity_in_each_row_and_goes_on_where_it_was(tmp_path):
    command = [sys.executable, table2.__file__, tmp_path, "--quick"]
    subprocess.run([*command, "--minutes=0"], check=True, timeout=300)
    assert not (tmp_path / "table2.json").exists()
    subprocess.run(command, check=True, timeout=900)
    result = json.loads((tmp_path / "table2.json").read_text())
    dense, sparse = result["compare"]
    assert (dense["settings"], sparse["settings"]["trainer"]) == ({}, "radius")
    assert dense["ranks"] == sparse["ranks"] == 4
    assert dense["days"][0] * sparse["days"][0] > 0 and sparse["val_ppl"] != dense["val_ppl"]
    written = (tmp_path / "table2.json").stat().st_mtime_ns
    logs = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.log")}
    subprocess.run(command, check=True, timeout=300)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*.log")} == logs
    assert (tmp_path / "table2.json").stat().st_mtime_ns > written


@pytest.mark.parametrize("guess", [0, 1, 6, 7, 8, 50])
@pytest.mark.parametrize("limit", [0, 1, 7])
def test_the_deepest_model_is_found_from_any_guess(guess, limit):
    tried = []
    assert largest.deepest(lambda layers: tried.append(layers) or layers <= limit, guess) == limit
    assert len(tried) == len(set(tried)) and min(tried) > 0


@pytest.mark.extended
def test_sharding_everything_trains_the_largest_model_and_so_does_fsdp(tmp_path):
    """The report's ZeRO-3 alone reached gpt2-xxxl; here FSDP goes as far or nearly.
    It frees each block's weights. Where it keeps them, less fits."""
    command = [
        sys.executable,
        largest.__file__,
        tmp_path / "out.json",
        "--width",
        "128",
        "--mib",
        "12",
    ]
    subprocess.run(
        [*command, "--strategies", "ddp", "zero3", "fsdp", "fsdp-kept"], check=True, timeout=600
    )
    rows = {row["strategy"]: row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    layers = {name: row["layers"] for name, row in rows.items()}
    assert (
        layers["zero3"] >= 2 * layers["ddp"] > 0
        and layers["fsdp"] > layers["fsdp-kept"] > layers["ddp"]
    )
    assert all(row["peak_bytes"] <= 12 * 2**20 for row in rows.values())
    assert all(row["tried"][-1]["layers"] > row["layers"] for row in rows.values()), (
        "one more does not fit"
    )


# Choices of a model ------------------------------------------------------------------------------


@pytest.mark.extended
def test_every_choice_runs_in_small_and_a_second_start_runs_nothing(tmp_path):
    command = [sys.executable, choices.__file__, tmp_path, "--quick"]
    subprocess.run(command, check=True, timeout=500)
    runs = {file: file.stat().st_mtime_ns for file in tmp_path.glob("*-*.json")}
    first = json.loads((tmp_path / "choices.json").read_text())["topics"]
    assert all(list(first[topic]) == list(rows) for topic, rows in choices.all_cases().items())
    subprocess.run(command, check=True, timeout=100)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.glob("*-*.json")} == runs
    assert json.loads((tmp_path / "choices.json").read_text())["topics"] == first


def test_numbers_are_rounded_as_torch_rounds_them_and_blocks_as_the_lesson_does():
    x = torch.randn(64, 64) * torch.exp2(torch.randint(-14, 8, (64, 64)).float())
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        inside = x.clamp(-choices.BITS[kind][2], choices.BITS[kind][2])
        torch.testing.assert_close(
            choices.nearest(x, kind), inside.to(dtype).float(), rtol=0, atol=0
        )
    torch.testing.assert_close(
        choices.scaled(x, "e2m1", 32), choices.block_scaled(x, 32), rtol=0, atol=0
    )
    fine, coarse = (
        choices.scaled(x, "e2m1", size, kind) for size, kind in ((16, "e4m3"), (x.numel(), "fp32"))
    )
    assert (fine - x).square().sum() < (coarse - x).square().sum() and not coarse.all()


def test_the_stored_choices_cost_what_their_formulas_say():
    topics = published.measured("choices")["topics"]
    assert {len(run["val"]) for runs in topics.values() for run in runs.values()} == {3, 9}
    numbers = {name: run["parameters"] for name, run in topics["positions"].items()}
    beside = {
        "learned": 256 * 64,
        "none": 256 * 64,
        "t5": 16 * 4,
        "shaw": 2 * 33 * 16,
        "huang": 2 * 33 * 16,
    }
    assert numbers == {name: numbers["rotary"] + beside.get(name, 0) for name in numbers}
    assert len({run["parameters"] for run in topics["activations"].values()}) == 1
    kept = {name.split(", batch")[0]: run for name, run in topics["optimizers"].items()}
    bytes_each = {name: run["state_bytes"] / run["parameters"] for name, run in kept.items()}
    assert all(bytes_each[name] == 8 for name in ("adam", "adamw", "lamb"))
    assert bytes_each["sgd"] == bytes_each["lars"] == 4 and round(bytes_each["muon"] / 8, 2) == 0.63
    assert 2 + 8 / 256 <= bytes_each["adamw8bit"] < 2.2 and bytes_each["adafactor"] < 0.5


def test_six_seeds_decide_what_three_left_open(monkeypatch):
    from instruments import choices as stored  # found since `choices` was imported

    three, six = [9.0, 9.0, 8.0], [2.0, 2.1, 1.9, 2.0, 2.1, 1.9]
    rows = {"base": {"val": [1.0] * 9}, "new": {"val": three + six}}
    monkeypatch.setattr(stored, "runs", lambda topic: rows)
    mean, error = stored.gain("any", "new", "base")
    assert mean == pytest.approx(1.0)
    assert error == pytest.approx(2.571 * statistics.stdev(six) / 6**0.5)


def test_what_lesson_14_says_of_the_stored_choices_holds_at_95_percent():
    from instruments import choices as stored  # found since `choices` was imported

    def gain(topic, name, base):
        mean, error = stored.gain(topic, name, base)
        return 0 if abs(mean) <= error else mean

    topics = published.measured("choices")["topics"]
    shares = torch.bincount(stored.TRAIN, minlength=256) + 1
    frequencies = -(shares / shares.sum()).log()[stored.HELD_OUT[1:16385]].mean().item()
    bases = {
        "positions": ["learned"],
        "activations": ["relu"],
        "optimizers": ["adamw, batch 8", "adamw, batch 64"],
    }
    bases |= {"schedules": topics["schedules"], "formats": ["fp32", "control: products 0"]}
    assert all(
        max(topics[topic][n]["val"]) < frequencies - 0.3
        for topic, names in bases.items()
        for n in names
    )
    more = {
        name: sum(val < frequencies - 0.3 for val in run["val"])
        for name, run in topics["norms"].items()
    }
    floor = statistics.mean(topics["formats"][stored.FLOOR]["val"])
    assert round(floor, 2) == 2.04
    assert statistics.mean(topics["optimizers"]["adamw, batch 64"]["val"]) > floor - 0.1
    assert more == dict.fromkeys(more, 0) | {
        "pre, layer, 300 steps": 3,
        "pre, RMS, 300 steps": 3,
        "deep, 300 steps": 2,
    }
    assert not any(gain("activations", name, "relu") for name in topics["activations"])
    assert not gain("optimizers", "adamw, embeddings 2^-5, batch 8", "adamw, batch 8")
    for batch, change, part in (("8", " 2^-8", 0.47), ("64", "", 0.48)):
        muon, adamw, ours = (
            f"{n}, batch {batch}" for n in ("muon", "adamw", f"adamw{change}, embeddings 2^-5")
        )
        assert gain("optimizers", muon, ours) < 0 > gain("optimizers", ours, adamw)
        assert gain("optimizers", ours, adamw) / gain("optimizers", muon, adamw) == pytest.approx(
            part, abs=0.01
        )
        assert not gain("optimizers", f"adamw8bit, batch {batch}", adamw)
    for run in (run for name in choices.SEARCHED for run in topics[name].values() if run["tried"]):
        rates = [float(rate) / run["lr"] for rate in run["tried"]]
        assert min(rates) < 0.6 and max(rates) > 1.9, "the search ended at its edge"
    assert min(topics["optimizers"]["adamw8bit, even codes, batch 8"]["tried"].values()) > 2.5
    assert (
        stored.verdict("optimizers", "adamw8bit, even codes, batch 8", "adamw, batch 8")
        == "1 of 3 fails"
    )
    cold, wsd = (
        gain("schedules", name, "cosine, warm-up")
        for name in ("cosine, no warm-up", "wsd, warm-up")
    )
    assert cold > 0 > wsd and not gain("schedules", "wsd, half as long", "cosine, half as long")
    assert not any(
        gain("formats", n, "fp32") for n in ("tf32", "bf16", "fp16", "fp16, loss scaling", "nvfp4")
    )
    assert gain("formats", "fp8", "control: their gradients 0") > 0.5
    assert (
        gain("formats", "fp4, scale by tensor", "control: products 0")
        >= 0
        > gain("formats", "nvfp4", "fp8")
    )
    assert (
        topics["formats"]["fp4, loss scaling"]["val"]
        == topics["formats"]["control: products 0"]["val"][:3]
    )
    two_groups = {
        n: count for n in topics["formats"] if (count := stored.beside_floor("formats", n))
    }
    assert two_groups == {"fp32": 1, "mxfp4": 3}
    assert stored.verdict("formats", "mxfp4", "fp32") == "3 of 9 as without layers"
    assert len(stored.dots("formats", ["nvfp4", "mxfp4"], "fp32").containers) == 1, (
        "no bar for two groups"
    )
    below = sorted(stored.differences("formats", "mxfp4", stored.FLOOR))
    assert below[5] < -0.15 and -0.05 < below[6]
    lost = {
        name: [at["256"] - at["64"] for at in run["by_length"]]
        for name, run in topics["positions"].items()
    }
    assert max(max(lost[name]) for name in ("alibi", "shaw", "huang")) < 0.05
    assert min(min(lost[name]) for name in ("learned", "sinusoidal", "sinusoidal, D^-0.5")) > 0.3
    assert (
        gain("positions", "sinusoidal", "learned")
        > 0
        == gain("positions", "sinusoidal, D^-0.5", "learned")
    )
