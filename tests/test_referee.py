"""`aiscale verify SCRIPT.py`: a correct script equals itself on one rank; faults are found."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import referee_faults as faults
import referee_reports as reports
from aiscale.cli import main
from aiscale.measure.referee import samples, shards, trace
from aiscale.measure.referee.judge import Question, judge
from aiscale.measure.referee.placeholders import PlaceholderError, fill
from aiscale.measure.referee.probe import STUCK
from aiscale.measure.referee.question import Runs
from aiscale.measure.referee.recorder import Recorder
from aiscale.measure.referee.runs import Run
from aiscale.measure.referee.step import Step
from aiscale.measure.referee.verdict import CANNOT_TELL, EQUAL, PARTS, Cause, Part, Verdict

YOUR_OWN, OTHERS = faults.FOLDERS
TRAINER = ("--output_dir", "out", "--use_cpu", "--ddp_backend", "gloo", "--max_steps", "4")
TRAINER += ("--report_to", "none", "--per_device_train_batch_size", "{8//N}")

#: name -> (script, arguments, ranks)
CORRECT = {
    "ranks": ("train_ranks.py", (), 2),
    "three ranks": ("train_ddp.py", ("--batch", "12"), 3),
    "fsdp": ("train_fsdp.py", (), 2),
    "tensor": ("train_tp_pp.py", faults.TENSOR, 2),
    "stages": ("train_tp_pp.py", faults.STAGES, 2),
    "grid": ("train_tp_pp.py", faults.GRID, 4),
    "zero": ("train_zero.py", (), 2),
    "megatron tensor": ("train_megatron.py", faults.TENSOR, 2),
    "radius": ("train_radius.py", (), 2),
    "experts of your own": ("train_experts.py", (), 2),
    "profiled": ("train_profiled.py", (), 2),
    "mlp": ("mlp.py", faults.EACH, 2),
    "on meta": ("on_meta.py", (), 2),
    "pipeline by hand": ("pipeline_by_hand.py", (), 2),
    "layers by hand": ("layers_by_hand.py", (), 2),
    "tensor by hand": ("tensor_by_hand.py", (), 2),
    "hugging face": ("hugging_face.py", faults.EACH, 2),
    "accelerate": ("with_accelerate.py", faults.EACH, 2),
    "four ranks": ("train_ranks.py", ("--micro-batch", "1"), 4),
    "fsdp in bf16": ("train_fsdp.py", ("--bf16",), 2),
    "ranks on three": ("train_ranks.py", ("--batch", "12"), 3),
    "ddp on four": ("train_ddp.py", (), 4),
    "fsdp on three": ("train_fsdp.py", ("--batch", "12"), 3),
    "fsdp on four": ("train_fsdp.py", (), 4),
    "zero in bf16": ("train_zero.py", ("--config", str(OTHERS / "zero_bf16.json")), 2),
    "zero on three": ("train_zero.py", ("--batch", "12"), 3),
    "zero on four": ("train_zero.py", (), 4),
    "profiled on four": ("train_profiled.py", (), 4),
    "radius on four": ("train_radius.py", (), 4),
    "experts of your own on four": ("train_experts.py", (), 4),
    "tensor on four": ("train_tp_pp.py", ("--tp", "{min(4,N)}", "--pp", "1"), 4),
    "megatron tensor on four": ("train_megatron.py", faults.TENSOR, 4),
    "plain on four": ("plain.py", (), 4),
    "mlp on four": ("mlp.py", faults.EACH, 4),
    "resumable": ("resumable.py", ("{TMP}/checkpoint", "4"), 2),
    "hugging face on four": ("hugging_face.py", faults.EACH, 4),
    "on meta on four": ("on_meta.py", (), 4),
    "tensor by hand on four": ("tensor_by_hand.py", (), 4),
    "two models": ("two_models.py", (), 2),
    "contrastive": ("contrastive.py", (), 2),
    "contrastive on four": ("contrastive.py", (), 4),
    "zero by hand": ("zero_by_hand.py", (), 2),
    "zero by hand on four": ("zero_by_hand.py", (), 4),
    "experts": ("experts_by_hand.py", (), 2),
    "experts on four": ("experts_by_hand.py", (), 4),
    "sequence": ("sequence_by_hand.py", (), 2),
    "sequence on four": ("sequence_by_hand.py", (), 4),
    "language": ("language.py", (), 2),
    "language on four": ("language.py", (), 4),
    "language in fp64": ("language.py", ("--double", "--scheduler"), 2),
    "language in bf16": ("language.py", ("--half",), 2),
    "language, dropout": ("language.py", ("--dropout", "--average"), 2),
    "language, scaled": ("language.py", ("--scaler", "--checkpointed"), 2),
    "language, Adagrad": ("language.py", ("--optimizer", "Adagrad", "--scheduler"), 2),
    "language, RMSprop": ("language.py", ("--optimizer", "RMSprop", "--average"), 2),
    "trainer": ("trainer_tokens.py", reports.TRAINER, 2),
    "trainer, cosine": (
        "trainer_tokens.py",
        (*reports.TRAINER, "--lr_scheduler_type", "cosine", "--warmup_steps", "2"),
        2,
    ),
    "accelerate, tokens": ("accelerate_tokens.py", faults.EACH, 2),
    "accelerate, tokens on four": ("accelerate_tokens.py", faults.EACH, 4),
}


def path(script: str) -> Path:
    return next(folder / script for folder in faults.FOLDERS if (folder / script).exists())


def ask(script: Path, *arguments: str, ranks=2, steps=2, **more):
    return judge(Question(script, arguments, ranks, steps, limit_s=600, **more))


def test_a_ddp_script_equals_itself_on_one_rank():
    verdict = ask(path("train_ddp.py"))
    assert verdict.status == EQUAL and verdict.steps == 2 and not verdict.warnings, str(verdict)
    for what in ("weights", "samples", "activations", "loss", "gradients", "updates"):
        assert verdict.compared[what], what


def test_summed_gradients_are_found_with_step_tensor_and_cause(tmp_path):
    verdict = ask(faults.write("summed", tmp_path))
    assert verdict.status == PARTS
    first = verdict.first
    assert (first.step, first.what) == (0, "gradient before clipping")
    assert "weight" in first.where and first.size > 0.5 and first.cause.lesson == "03_ddp"
    assert "2 times as large: summed over ranks, not averaged" in first.cause.words


def test_watching_does_not_exhaust_a_generator_of_parameters():
    verdict = ask(path("plain.py"))
    assert verdict.status == EQUAL and not verdict.not_compared, str(verdict)


#: Rank 0 takes all steps; rank 1 hangs, is stopped, and saves its trace on a slow disk.
SLOW_DISK = """    if rank == 0:
        optimizer.step()
    elif step == 0:
        import time
        from aiscale.measure.referee import trace
        save = trace.save
        def save_slowly(*given):
            time.sleep(3)
            save(*given)
        trace.save = save_slowly
"""


@pytest.mark.extended
def test_a_rank_that_is_done_leaves_after_the_stopped_ones_have_saved(tmp_path):
    """If it left before, it would break their connections: they would fail while they save."""
    script = faults.plant("plain.py", (("    optimizer.step()\n", SLOW_DISK),), tmp_path)
    many = Runs(Question(script, (), 2, 2, limit_s=600), tmp_path, print).many()
    assert [trace["ended"] for trace in many.traces()] == ["steps", "stopped"]
    assert [rank.exitcode for rank in many.ranks] == [0, STUCK]


def test_a_script_ends_only_after_its_trace_is_saved(tmp_path, monkeypatch):
    recorder, saving, save = Recorder(tmp_path, 0, 1), threading.Event(), trace.save

    def save_slowly(*given):
        saving.set()
        time.sleep(1)
        save(*given)

    monkeypatch.setattr(trace, "save", save_slowly)
    threading.Thread(target=recorder.finish, args=("stopped", None)).start()
    saving.wait()
    recorder.finish("script", None)
    assert trace.load(tmp_path / "rank0.pt")["ended"] == "stopped"


def finished(folder: Path, ranks: list) -> SimpleNamespace:
    """A run whose ranks have ended."""
    job = SimpleNamespace(script=folder / "x.py")
    return SimpleNamespace(folder=folder, ranks=ranks, late=False, job=job)


@pytest.mark.parametrize(
    "of_the_others, of_rank_3",
    [
        ("STUCK x.py:20: dist.all_reduce(w)", "STUCK x.py:18: time.sleep(10_000)"),
        ("RuntimeError: Connection closed by peer [127.0.0.1]:{rank}", "ValueError: no such file"),
    ],
)
def test_the_rank_for_which_others_wait_is_told_first(of_the_others, of_rank_3, tmp_path):
    for rank in range(4):
        said = of_rank_3 if rank == 3 else of_the_others.format(rank=rank)
        (tmp_path / f"err{rank}").write_text(said)
    ranks = [SimpleNamespace(exitcode=STUCK)] * 4
    first = Run.complaints(finished(tmp_path, ranks))[0]
    assert first in ("rank 3: stopped at x.py:18: time.sleep(10_000)", f"rank 3: {of_rank_3}")


def test_of_an_exception_the_first_line_is_told(tmp_path):
    said = (
        "Traceback (most recent call last):\n  File \"x.py\"\n    f()\nKeyError: 'w'\nSee more.\n"
    )
    (tmp_path / "err0").write_text(said)
    run = finished(tmp_path, [SimpleNamespace(exitcode=1)])
    assert Run.complaints(run) == ["rank 0: KeyError: 'w'"]


def test_a_script_that_watching_changes_is_not_called_equal(tmp_path):
    watched = 'torch.nn.Module.__call__.__name__ == "call"'
    script = faults.plant("plain.py", (("lr=0.5", f"lr=0.4 if {watched} else 0.5"),), tmp_path)
    verdict = ask(script)
    assert verdict.status == CANNOT_TELL
    assert "weights after optimizer step 0 of rank 0 is another without it" in verdict.unknown


def test_placeholders_are_computed_and_nothing_else_is():
    known = {"N": 4, "TMP": "/somewhere"}
    given = ["--batch={16//N}", "{min(2, N)}", "{TMP}/{N}", "{max(1,N-1)*2%5}", '{{"a": 1}}']
    assert fill(given, known) == ["--batch=4", "2", "/somewhere/4", "1", '{"a": 1}']
    for words in (
        "__import__('os')",
        "N.real",
        "M",
        "N//0",
        "[1 for _ in N]",
        "min(N, key=N)",
        "TMP*2",
        "2**N",
        "f(1)",
    ):
        with pytest.raises(PlaceholderError, match="cannot be computed"):
            fill([f"{{{words}}}"], known)


def test_shards_are_put_together_and_sketches_of_shards_add_up():
    whole = torch.randn(300, 301)
    columns = [whole[:, :100], whole[:, 100:]]
    places = [(0, 0), (0, 100)]
    pieces = []
    for column, at in zip(columns, places, strict=True):
        values = trace.sketch(column, whole.shape, at)
        place = {"shape": (300, 301), "at": at, "size": tuple(column.shape), "partial": False}
        pieces.append({"weights": {"w": {"values": values, **place}}})
    traces = [{"rank": rank, "steps": [piece]} for rank, piece in enumerate(pieces)]
    found = shards.wholes(traces, 0, "weights")["w"]
    right = trace.sketch(whole, whole.shape, (0, 0))
    torch.testing.assert_close(found.values, right)
    assert found.is_sketch and shards.relative(right, right * 1.01) == pytest.approx(0.01, rel=0.02)
    changed = trace.sketch(whole + 0.1 * torch.randn(300, 301), whole.shape, (0, 0))
    assert shards.relative(changed, right) == pytest.approx(0.1, rel=0.1)
    assert shards.wholes(traces[:1], 0, "weights") == {}, "half a tensor is none"


@pytest.mark.parametrize("unseen, allowed", [([], 1e-12), (["AdamW"], 5e-6)])
def test_fp64_is_held_to_fp32_where_an_optimizer_hides_its_tensors(unseen, allowed):
    many = [trace.EMPTY | {"rank": 0, "unseen": unseen}]
    assert Step(0, many, [], [], Verdict(1)).tolerance(1e-16, is_fp64=True) == allowed


def test_texts_filled_up_to_other_lengths_are_no_other_order():
    read, alone = [Counter("ab"), Counter("cd")], Counter("abCD")
    told = samples.difference(read, alone, set(), {30, 40}, {40})
    assert "rows are [30, 40] long, on one rank [40]" in told.words and not told.is_fault
    told = samples.difference(read, alone, set(), {40}, {40})
    assert "the order depends on the number of ranks" in told.words


def test_the_referee_needs_torch_alone():
    """Of what it imports, all is torch's, Python's or its own."""
    code = "import sys, torch, torch._dynamo, torch.distributed.tensor; before = set(sys.modules)\n"
    code += "import aiscale.cli, aiscale.measure.traffic, aiscale.measure.referee.command\n"
    code += "import aiscale.measure.referee.probe\n"
    code += "from aiscale.measure.referee import collectives, gradients, inputs, loaders, modules\n"
    code += "from aiscale.measure.referee import optimizers, recorder\n"
    code += "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
    code += "print(sorted(new - {'aiscale', 'torch'} - set(sys.stdlib_module_names)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    for file in Path(trace.__file__).parent.glob("*.py"):
        assert ".numpy(" not in file.read_text(), f"{file}: torch may be here without numpy"


def test_a_verdict_has_one_status_in_words_and_in_json():
    part = Part(1, "loss", "twice", Cause("counted twice", "count once", "03_ddp"), 1.0, 1e-6)
    verdict = Verdict(ranks=2, steps=2, first=part)
    verdict.compared["weights"] += 5
    read = json.loads(json.dumps(verdict.to_dict()))
    assert (read["status"], read["compared"]) == (PARTS, {"weights": 5})
    assert read["first"]["cause"]["words"] == "counted twice" and "step 1, loss" in str(verdict)
    verdict.unknown = "nothing was seen"
    assert verdict.status == CANNOT_TELL
    assert str(verdict).startswith("CANNOT TELL: nothing was seen")
    assert Verdict(ranks=2).status == EQUAL


@pytest.mark.parametrize(
    "words, remedy",
    [
        (["nothing.py"], "nothing.py is no file"),
        (["-m", "nothing.at.all"], "-m nothing.at.all: Python finds no file of such a module"),
        (["SCRIPT", "--nproc", "0"], "--nproc 0 and --steps 3 must be at least 1"),
        (["SCRIPT", "--", "{M}"], "whole numbers, N, TMP, PWD"),
        (["SCRIPT", "--against", "nothing.py"], "--against nothing.py: the first word is no file"),
        (["SCRIPT", "--against", "a.py", "--resume", "x"], "ask one at a time"),
    ],
)
def test_bad_settings_get_one_line(words, remedy, capsys):
    script = str(path("plain.py"))
    given = [script if word == "SCRIPT" else word for word in words]
    assert main(["verify", *given]) == CANNOT_TELL
    assert remedy in capsys.readouterr().err


def test_words_that_are_no_script_name_the_kits_own_cases(capsys):
    assert main(["verify", "--list", "ddp-x4"]) == 0
    assert capsys.readouterr().out == "ddp-x4\n"


@pytest.mark.parametrize("file", reports.GIVEN_OUT)
def test_scripts_that_are_given_out_have_the_fault_of_their_report(file, tmp_path):
    report = reports.REPORTS[reports.GIVEN_OUT[file]]
    planted = faults.plant(report.script, report.changes, tmp_path).read_text()
    assert (faults.HERE.parent / "workshop" / "clinic" / "others" / file).read_text() == planted


@pytest.mark.extended
@pytest.mark.parametrize("name", CORRECT)
def test_correct_scripts_are_not_blamed(name):
    script, arguments, ranks = CORRECT[name]
    verdict = ask(path(script), *arguments, ranks=ranks, steps=3)
    assert verdict.status == EQUAL and not verdict.warnings, str(verdict)


@pytest.mark.extended
@pytest.mark.parametrize("name", faults.FAULTS)
def test_planted_faults_are_found(name, tmp_path):
    fault = faults.FAULTS[name]
    script, more = faults.write(name, tmp_path), {"ranks": fault.ranks, "steps": fault.steps}
    verdict = ask(script, *fault.arguments, **more)
    if fault.what:
        assert verdict.status == PARTS, str(verdict)
        first = verdict.first
        assert fault.what in first.what and fault.cause in first.cause.words, str(verdict)
    else:
        assert verdict.status == EQUAL, str(verdict)
        assert any(fault.cause in words for words in verdict.warnings), str(verdict)


def test_every_fault_still_fits_its_script(tmp_path):
    """A lesson that changes a line of its script must not take a fault out of the table unseen."""
    for number, fault in enumerate((*faults.FAULTS.values(), *reports.REPORTS.values())):
        folder = tmp_path / str(number)
        folder.mkdir()
        faults.plant(fault.script, fault.changes, folder)


@pytest.mark.extended
@pytest.mark.parametrize("name", reports.REPORTS)
def test_faults_of_reports_are_found_in_their_place_with_their_cause(name, tmp_path):
    verdict = reports.ask(reports.REPORTS[name], tmp_path)
    if name in reports.NOT_SEEN:
        assert [part.what for part in verdict.given] == ["samples"], str(verdict)
        return
    assert reports.marks(reports.REPORTS[name], verdict) == (True, True, True), str(verdict)


@pytest.mark.extended
@pytest.mark.parametrize(
    "trainer, arguments",
    [
        ("megatron", faults.TENSOR),  # a file of the name of the library that it imports
        ("ddp", ("--recompute",)),  # torch counts what is saved in the second forward pass
        ("zero", ("--fp64",)),  # DeepSpeed sums a norm's squares in fp32 all the same
    ],
)
def test_trainers_are_started_as_modules(trainer, arguments):
    script = faults.HERE.parent / "src" / "aiscale" / "train" / f"{trainer}.py"
    verdict = ask(script, *arguments, "--save", "{TMP}/run", module=f"aiscale.train.{trainer}")
    assert verdict.status == EQUAL and verdict.steps == 2, str(verdict)


@pytest.mark.extended
def test_other_initial_weights_are_told_and_the_rest_is_compared_from_equal_ones():
    verdict = ask(path("train_megatron.py"), *faults.STAGES)
    assert verdict.status == EQUAL, str(verdict)
    assert [part.what for part in verdict.given] == ["initial weights"]


@pytest.mark.extended
def test_the_trainer_equals_itself_but_for_masks_that_all_ranks_share():
    verdict = ask(path("trainer.py"), *TRAINER)
    assert verdict.status == EQUAL, str(verdict)
    assert len(verdict.warnings) == 1 and "the same dropout masks" in verdict.warnings[0]


RESUMED = ("{TMP}/checkpoint", "4")


@pytest.mark.extended
def test_a_restart_changes_nothing():
    verdict = ask(path("resumable.py"), *RESUMED, steps=4, resume=("2",))
    assert verdict.status == EQUAL and verdict.steps == 4, str(verdict)


@pytest.mark.extended
def test_a_restart_on_another_number_of_ranks_changes_nothing():
    more = {"steps": 4, "resume": ("2",), "resume_ranks": 1}
    verdict = ask(path("resumable.py"), *RESUMED, **more)
    assert verdict.status == EQUAL and verdict.steps == 4, str(verdict)
    assert "with and without a stop, 1 rank after it" in str(verdict)


@pytest.mark.extended
def test_a_generator_that_begins_anew_after_a_restart_is_told(tmp_path):
    noisy = "x[share] + torch.randn_like(x[share]) * 0"
    script = faults.plant("resumable.py", (("model(x[share])", f"model({noisy})"),), tmp_path)
    verdict = ask(script, *RESUMED, steps=4, resume=("2",))
    assert any("generator does not go on" in words for words in verdict.warnings), str(verdict)


@pytest.mark.extended
@pytest.mark.parametrize(
    "old, new, what",
    [
        ("range(first, last)", "range(0, last - first)", "samples"),
        ('    optimizer.load_state_dict(saved["optimizer"])\n', "", "optimizer's states"),
    ],
)
def test_what_a_restart_forgets_is_found(old, new, what, tmp_path):
    script = faults.plant("resumable.py", ((old, new),), tmp_path)
    verdict = ask(script, *RESUMED, steps=4, resume=("2",))
    assert verdict.status == PARTS, str(verdict)
    assert (verdict.first.step, verdict.first.what) == (2, what), str(verdict)


@pytest.mark.extended
def test_the_command_prints_the_verdict_as_json(tmp_path, capsys):
    script = str(faults.write("wrapper_bypassed", tmp_path))
    words = ["verify", script, "--nproc", "2", "--steps", "1", "--limit", "600", "--json"]
    assert main([*words, "--", *faults.EACH]) == PARTS
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["status"] == PARTS
    assert "never averaged" in verdict["first"]["cause"]["words"]


@pytest.mark.extended
def test_another_script_is_the_reference(tmp_path):
    other = faults.plant("resumable.py", (("lr=1e-2", "lr=2e-2"),), tmp_path)
    verdict = ask(path("resumable.py"), *RESUMED, against=(other, RESUMED))
    assert verdict.status == PARTS, str(verdict)
    assert verdict.first.what == "learning rate"


#: Cases of the bug clinic that show within a few steps -> what parts first, and its cause. Of the
#: others, 01 and 02 hang, 05 and 08 fill texts up to other lengths, and 10 has no form for one
#: rank.
CLINIC = {
    "03_scaling.py": (4, "samples", "the same samples"),
    "04_gradients.py": (2, "gradient before clipping", "clipped before the average"),
    "06_experts.py": (2, "order of collectives", "another order"),
    "09_halves.py": (2, "loss", "the loss"),
}


@pytest.mark.extended
@pytest.mark.parametrize("case", CLINIC)
def test_cases_of_the_clinic_are_diagnosed(case):
    ranks, what, cause = CLINIC[case]
    verdict = ask(faults.HERE.parent / "workshop" / "clinic" / case, ranks=ranks)
    assert verdict.status == PARTS, str(verdict)
    assert verdict.first.what == what and cause in verdict.first.cause.words, str(verdict)


@pytest.mark.extended
def test_a_restart_of_the_clinic_parts_from_the_run_without_a_stop():
    case = faults.HERE.parent / "workshop" / "clinic" / "07_checkpoint.py"
    words = ("--steps", "4", "--save", "{TMP}/model.pt")
    verdict = ask(case, *words, steps=4, resume=("--steps", "2"))
    assert verdict.status == PARTS, str(verdict)
    assert (verdict.first.step, verdict.first.what) == (1, "next weights"), str(verdict)


@pytest.mark.extended
def test_tasks_of_srun_are_the_ranks_and_the_job_follows_only_an_equal_script(frontier, place):
    """Task 0 judges, and srun's status is its own."""
    for name in ("ranks", "summed"):
        script = path("train_ranks.py") if name == "ranks" else faults.write("summed", place)
        words = f"srun -A ABC123 -t 20 -N 2 -n 2 aiscale verify {script} --steps 1 --limit 300"
        done = frontier.login(
            ["bash", "-c", f"{words} && echo the job follows"], cwd=place, capture_output=True
        )
        if name == "ranks":
            assert "the job follows" in done.stdout and "EQUAL" in done.stdout, done
        else:
            assert "the job follows" not in done.stdout, done
            assert "summed over ranks, not averaged" in done.stdout, done
    assert not list(place.glob(".aiscale-referee-*"))
