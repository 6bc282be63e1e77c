"""Gaps of scripts: what is written in them is kept, and graded by running the script."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from aiscale import lesson
from aiscale.lesson import exercises, gaps, progress, scripts, workbooks
from aiscale.lesson.notebook import LessonError, tags
from lessons import run_script_cells

ROOT = Path(__file__).parents[1]
OWN = ROOT / "workshop" / "your_own"
GAPS = {
    id: gap
    for path in workbooks.lessons(root=ROOT / "workshop").values()
    for id, gap in workbooks.gaps(path).items()
}
NOTEBOOKS = {notebook.name[:2]: notebook for notebook in lesson.notebooks(root=ROOT / "notebooks")}
NUMBERS = [f"{number:02}" for number in range(1, 9)]
extended = pytest.mark.extended


@pytest.fixture
def shell(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(progress, "_FOLDER", tmp_path / "progress")
    shell = InteractiveShell.instance()
    scripts.load_ipython_extension(shell)
    return shell


def fill(shell, path: Path, id: str, lines: str) -> None:
    shell.run_cell_magic("fill", f"'{path}' {id}", lines + "\n")


def write_scripts(shell, number: str, folder: Path) -> None:
    run_script_cells(shell, NOTEBOOKS[number], folder)


# text --------------------------------------------------------------------------------------------

GAP = "    # gap 02.a: what it is for\n"


def test_a_gap_opens_closes_and_keeps_its_lines():
    short = f"def f():\n{GAP}    return x\n"
    empty = gaps.expanded(short, {})
    assert 'raise NotImplementedError("02.a")' in empty
    assert gaps.collapsed(empty) == (short, {})
    full = gaps.expanded(short, {"02.a": gaps.Filling("x = 1\n\nif x:\n    x = 2")})
    assert "\n    x = 1\n\n    if x:\n        x = 2\n    # end of gap 02.a\n" in full
    assert gaps.collapsed(full) == (short, {"02.a": gaps.Filling("x = 1\n\nif x:\n    x = 2")})
    plain = gaps.without_marks(full)
    assert plain == "def f():\n    x = 1\n\n    if x:\n        x = 2\n    return x\n"


def test_what_the_kit_has_filled_in_is_known_as_such():
    full = gaps.expanded(GAP, {"02.a": gaps.Filling("x = 1", by_kit=True)})
    assert gaps.collapsed(full)[1]["02.a"].by_kit


def test_a_gap_whose_end_is_gone_is_told():
    text = gaps.expanded(GAP, {"02.a": gaps.Filling("x = 1\n# end of gap 02.a, says the text")})
    assert gaps.collapsed(text)[1]["02.a"].lines == "x = 1"
    assert gaps.collapsed(GAP + "    x = 1\n") == (GAP + "    x = 1\n", {})


@pytest.mark.parametrize("cell", ["", "# a comment\n", "...\n", "# as\n...  # here\n"])
def test_a_cell_of_comments_fills_nothing(cell):
    assert gaps.written_in(cell, "02.a") == ""


def test_lines_that_are_no_python_are_told_by_their_number():
    with pytest.raises(LessonError, match="02.a, line 2 of the cell: "):
        gaps.written_in("x = 1\nfor x in:\n", "02.a")


# cells -------------------------------------------------------------------------------------------


def test_a_gap_is_filled_by_its_cell_and_survives_the_cell_that_leaves_it(shell, tmp_path, capsys):
    script = tmp_path / "train.py"
    shell.run_cell_magic("write", f"'{script}'", "def f():\n    return x\n")
    change = f" def f():\n+{GAP}"
    for lines in ("x = 1", "x = 2"):
        shell.run_cell_magic("change", f"'{script}'", change)
        fill(shell, script, "02.a", lines)
        assert gaps.without_marks(script.read_text()) == f"def f():\n    {lines}\n    return x\n"
    shell.run_cell_magic("change", f"'{script}'", change)
    fill(shell, script, "02.a", "# nothing yet")
    assert "    x = 2\n" in script.read_text() and not list(tmp_path.glob("train.*.py"))
    with pytest.raises(LessonError, match="has no gap 02.b"):
        fill(shell, script, "02.b", "x = 1")


OTHER_STYLE = """
gradients = [parameter.grad for parameter in model.parameters()]
loss += 0  # as a later cell may write it
for tensor in [*gradients, loss]:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    tensor /= world_size
"""


def test_later_lessons_find_their_place_in_another_style(shell, tmp_path, capsys):
    write_scripts(shell, "02", tmp_path)
    fill(shell, tmp_path / "train_ranks.py", "02.a", OTHER_STYLE)
    for number in ("03", "04", "05", "06", "07", "08"):
        write_scripts(shell, number, tmp_path)
    assert "goes on from the kit's" not in capsys.readouterr().out
    left = [
        path.name for path in tmp_path.glob("train_*.py") if "gradients = [p" in path.read_text()
    ]
    assert left == ["train_ranks.py"]


def test_a_script_that_does_not_fit_stays_and_the_kits_goes_on(shell, tmp_path, capsys):
    write_scripts(shell, "02", tmp_path)
    ranks = tmp_path / "train_ranks.py"
    mine = ranks.read_text().replace("loss += part.detach()", "loss = loss + part.detach()")
    ranks.write_text(mine)
    write_scripts(shell, "03", tmp_path)
    assert "goes on from the kit's train_ranks.py" in capsys.readouterr().out
    assert ranks.read_text() == mine


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_that_begins_with_the_kits_scripts_leaves_no_gap_of_an_earlier_one(
    shell, tmp_path, number
):
    write_scripts(shell, number, tmp_path)
    for script in tmp_path.glob("*.py"):
        text, fillings = gaps.collapsed(script.read_text())
        empty = [id for id in gaps.gaps_in(text) if id not in fillings]
        assert all(id.startswith(number) for id in empty), f"{script.name}: {empty}"


def test_catching_up_brings_what_the_lessons_write_and_keeps_what_was_there(shell, tmp_path):
    (tmp_path / "train.py").write_text("mine\n")
    scripts.catch_up(tmp_path, "03")
    names = {path.name for path in tmp_path.glob("*.py")}
    assert {"model.py", "train_ranks.py", "train_ddp.py", "train.1.py"} <= names
    assert "train_fsdp.py" not in names
    assert (tmp_path / "train.1.py").read_text() == "mine\n"
    assert (tmp_path / "train_ddp.py").read_text() == (OWN / "train_ddp.py").read_text()


def test_an_empty_gap_gets_the_kits_lines_and_counts_as_open(shell, tmp_path, capsys):
    write_scripts(shell, "02", tmp_path)
    assert exercises.check("02.a").state == "empty"
    text = (tmp_path / "train_ranks.py").read_text()
    assert gaps.without_marks(text) == (OWN / "train_ranks.py").read_text()
    assert exercises.check("02.a").state == "empty"
    exercises.check.card()
    assert "0 of 1 exercises and gaps" in capsys.readouterr().out


# all gaps ----------------------------------------------------------------------------------------


def test_each_gap_is_left_filled_and_checked_in_its_lesson():
    for number, notebook in NOTEBOOKS.items():
        code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
        left = re.findall(r"^\+? *# gap (\d\d\.[a-z]): ", code, flags=re.MULTILINE)
        left = [id for id in left if id.startswith(number)]  # others show a place
        known = [id for id in GAPS if id.startswith(number)]
        assert sorted(left) == known, f"{notebook.name} leaves {left}"
        # A gap that is taught first may stand below another in the script.
        checked = re.findall(r'^check\("(\d\d\.[a-z])"\)', code, flags=re.MULTILINE)
        assert sorted(checked) == known
        filled = re.findall(r"^%%fill \{folder\}/([\w.]+) (\d\d\.[a-z])$", code, flags=re.MULTILINE)
        assert filled == [(GAPS[id].script, id) for id in checked]


def test_each_gap_has_hints_and_refuses_the_usual_mistakes():
    for id, gap in GAPS.items():
        assert len(gap.hints) >= 2 and len(gap.refused) >= 3, id
        assert all(said for _, said, _ in gap.refused), id


def lines_written(number: str) -> int:
    """Lines of code that the learner of a lesson writes: gaps, and exercises that stand in it."""
    notebook = NOTEBOOKS[number]
    code = "\n".join(cell.source for cell in notebook.cells if "optional" not in tags(cell))
    written = []
    for id in re.findall(r'^check\("([\w.]+)"\)', code, flags=re.MULTILINE):
        solution = GAPS[id].lines if id in GAPS else workbooks.solution_of(notebook.name, id)
        written += [line for line in solution.splitlines() if line.strip()]
    return len(written)


def test_learners_write_ten_lines_in_each_lesson_and_150_in_all():
    written = {number: lines_written(number) for number in NUMBERS}
    assert min(written.values()) >= 10 and sum(written.values()) >= 150, written


def tried(shell, id: str, lines: str, folder: Path):
    write_scripts(shell, id[:2], folder)
    fill(shell, folder / GAPS[id].script, id, lines)
    return GAPS[id].graded()


FIRST = [(id, gap.refused[0]) for id, gap in GAPS.items() if id.endswith("a")]


@pytest.mark.parametrize("id,wrong", FIRST, ids=[id for id, _ in FIRST])
def test_the_usual_mistake_is_told_by_its_cause(shell, tmp_path, id, wrong):
    _, said, lines = wrong
    verdict = tried(shell, id, lines, tmp_path)
    assert verdict.state == "wrong" and said in verdict.text, verdict.text


@extended
@pytest.mark.parametrize("id", GAPS)
def test_the_kits_lines_are_right_and_each_mistake_is_refused(shell, tmp_path, id):
    assert tried(shell, id, GAPS[id].lines, tmp_path).state == "right"
    otherwise = []
    for name, said, lines in GAPS[id].refused:
        verdict = tried(shell, id, lines, tmp_path)
        assert verdict.state == "wrong", f"{name}: {verdict.text}"
        if said not in verdict.text:
            otherwise.append(f"{name}: {verdict.text}")
    assert otherwise == []


@extended
@pytest.mark.notebook
@pytest.mark.parametrize("number", sorted({id[:2] for id in GAPS}))
def test_a_lesson_whose_gaps_are_filled_runs_to_its_end_and_each_is_right(number, tmp_path):
    (done,) = lesson.execute([NOTEBOOKS[number]], out=tmp_path / "build", core=True, solved=True)
    assert not done.error, done.error
    shown = [
        output for cell in lesson.read(done.executed).cells for output in cell.get("outputs", [])
    ]
    facts = [output.get("metadata", {}).get("aiscale", {}) for output in shown]
    states = {each["check"]: each["state"] for each in facts if each.get("check") in GAPS}
    assert states == {id: "right" for id in GAPS if id.startswith(number)}


#: Right in another style than the kit's.
OTHER_STYLES = {
    "04.a": """
    def __init__(self, model, lr):
        # whole tensors in turn
        self.all = list(model.parameters())
        self.mine = [weight for i, weight in enumerate(self.all) if i % world_size == rank]
        self.optimizer = torch.optim.AdamW(self.mine, lr)

    def step(self):
        for i, weight in enumerate(self.all):
            weight.grad /= world_size
            dist.reduce(weight.grad, dst=i % world_size)
        whole = torch.stack([weight.grad.norm() ** 2 for weight in self.mine]).sum()
        dist.all_reduce(whole)
        for weight in self.mine:
            weight.grad *= min(1.0, 1.0 / (whole.item() ** 0.5 + 1e-6))
        self.optimizer.step()
        for i, weight in enumerate(self.all):
            dist.broadcast(weight.data, src=i % world_size)
    """,
    "03.a": """
    def ready(self, weight):
        if not self.sync:
            return
        size = sum(each.grad.numel() * each.grad.element_size() for each in self.bucket)
        if self.bucket and size + weight.grad.nbytes > self.bucket_bytes:
            self.leave()
        self.bucket += [weight]

    def leave(self):
        grads = [weight.grad for weight in self.bucket]
        buffer = torch.nn.utils.parameters_to_vector(grads)
        buffer /= world_size
        self.sent += [(dist.all_reduce(buffer, async_op=True), buffer, grads)]
        self.bucket.clear()

    def finish(self):
        self.leave()
        while self.sent:
            work, buffer, grads = self.sent.pop()
            work.wait()
            torch.nn.utils.vector_to_parameters(buffer, grads)
    """,
    "07.a": """
    batch = next(iterator).to(device)
    tokens, labels = batch[:, :T], batch[:, 1:]
    place = torch.arange(T, device=device).unsqueeze(0).repeat(tokens.shape[0], 1)

    def mean(each):
        loss = each.mean()
        return loss, loss.detach().clone()

    return model(tokens, place, attention_mask=None, labels=labels), mean
    """,
    "07.b": """
    for clear in (optimizer.zero_grad, model.zero_grad_buffer):
        clear()
    size, _ = micro_batches[0].shape
    shape = {"seq_length": T, "micro_batch_size": size, "num_microbatches": len(micro_batches)}
    step = get_forward_backward_func()
    given = iter(list(micro_batches))
    reported = step(
        forward_step_func=forward, data_iterator=given, model=[model], forward_only=False, **shape
    )
    optimizer.step()
    mean = sum(reported) / len(reported) if reported else torch.tensor(0.0, device=device)
    copies = parallel_state.get_data_parallel_group()
    for group in (parallel_state.get_pipeline_model_parallel_group(), copies):
        dist.all_reduce(mean, group=group)
    return mean / copies.size()
    """,
    "08.a": """
    sizes = [p.numel() for p in parameters]
    dense = self.step % self.interval == 0
    mask = torch.cat([self.mask[p] | dense for p in parameters])
    for p, part in zip(parameters, gradient.split(sizes), strict=True):
        self.residual[p] += part
    total = torch.cat([self.residual[p] for p in parameters])
    for p in parameters:
        self.residual[p][self.mask[p] | dense] = 0.0

    def unpack(done):
        mean = torch.zeros_like(total)
        mean[mask] = done.value()[0] / world_size
        return mean

    return dist.all_reduce(total[mask], async_op=True).get_future().then(unpack)
    """,
    "08.b": """
    if self.step % self.interval:
        self.step += 1
        return
    for p, old in self.mask.items():
        if p.dim() == 1:
            continue
        state = optimizer.state[p]
        moves = state["exp_avg"].abs() / (state["exp_avg_sq"].sqrt() + 1e-8)
        places = moves.flatten().argsort(descending=True)[: int(self.density * p.numel())]
        old.fill_(False)[places] = True
    """,
    "01.a": """
    B, T, D = x.shape
    h = self.norm1(x)
    q, k, v = (w(h).view(B, T, -1, self.head_width).permute(0, 2, 1, 3) for w in (
        self.query, self.key, self.value))
    scores = q @ k.mT / self.head_width**0.5
    scores = scores + torch.full((T, T), -torch.inf, device=x.device).triu(1)
    after = x + self.out((scores.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(B, T, D))
    return after + self.down(gelu(self.up(self.norm2(after))))
    """,
    "01.b": """
    optimizer.zero_grad(set_to_none=False)
    for piece in micro_batches:
        part = loss_of(model(piece[:, :-1]), piece[:, 1:])
        (part * (len(piece) / len(batch))).backward()
        loss = loss + part.item() * len(piece) / len(batch)
    torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm=1)
    optimizer.step()
    """,
    "02.b": """
    me, all_of_us = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    hosts = MPI.COMM_WORLD.allgather(socket.gethostname())
    ports = MPI.COMM_WORLD.allgather(free_port())
    os.environ.update(
        RANK=f"{me}",
        WORLD_SIZE=f"{all_of_us}",
        LOCAL_RANK=f"{hosts[:me].count(hosts[me])}",
        MASTER_ADDR=hosts[0],
        MASTER_PORT=f"{ports[0]}",
    )
    """,
    "03.c": """
    pieces = batch.to(device).chunk(batch.shape[0] // args.micro_batch)
    total = 0.0
    with model.no_sync():
        for piece in pieces[:-1]:
            part = loss_of(model(piece[:, :-1]), piece[:, 1:]) / len(pieces)
            part.backward()
            total += part.item()
    part = loss_of(model(pieces[-1][:, :-1]), pieces[-1][:, 1:]) / len(pieces)
    part.backward()
    loss = torch.tensor(total + part.item(), device=device)
    dist.all_reduce(loss)
    loss /= world_size
    """,
    "06.a": """
    into, out_of = ("query", "key", "value", "up"), ("out", "down")
    PLAN = dict.fromkeys(into, ColwiseParallel()) | dict.fromkeys(out_of, RowwiseParallel())
    """,
    "06.b": """
    numbers = torch.arange(len(model.blocks)).tensor_split(stages)[stage].tolist()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = block if number in numbers else nn.Identity()
    model.embed = model.embed if stage == 0 else nn.Identity()
    model.head = model.head if stage + 1 == stages else nn.Identity()
    """,
    "06.c": """
    names = ("dp", "pp", "tp")
    mesh = init_device_mesh(device.type, mesh_shape=(dp, args.pp, args.tp), mesh_dim_names=names)
    axis = mesh["pp"]
    data, pipeline = (mesh[name].get_group() for name in ("dp", "pp"))
    cut(model, axis.get_local_rank(), axis.size())
    for block in [block for block in model.blocks if hasattr(block, "query")]:
        parallelize_module(block, device_mesh=mesh["tp"], parallelize_plan=plan)
    stage = PipelineStage(
        submodule=model, stage_index=axis.get_local_rank(), num_stages=axis.size(),
        device=device, group=axis.get_group(),
    )
    n = args.batch // (dp * args.micro_batch)
    schedule = Schedule1F1B(stage, n_microbatches=n, loss_fn=lambda *given: loss_of(*given))
    """,
    "06.d": """
    normed = self.norm1(x)
    q, k, v = (
        torch.stack(part(normed).split(self.head_width, dim=-1), dim=1)
        for part in (self.query, self.key, self.value)
    )
    """,
    "04.b": """
        settings = json.load(args.config)
        settings["train_micro_batch_size_per_gpu"] = args.micro_batch
        settings["gradient_accumulation_steps"] = args.batch // world_size // args.micro_batch
        settings["train_batch_size"] = args.batch
        engine, optimizer, _, _ = deepspeed.initialize(None, model, optimizer, config=settings)
        path, client = engine.load_checkpoint(args.save)
        first = 0
        if path is not None:
            first = client["steps"]
    """,
    "04.c": """
        parts = []
        for i in range(len(micro_batches)):
            x, y = micro_batches[i][:, :-1], micro_batches[i][:, 1:]
            parts.append(engine.backward(loss_of(engine(x), y)))
            if i == 0 and step + 1 == args.steps and rank == 0:
                print(f"rank 0 holds {held_bytes(model)} bytes", flush=True)
            engine.step()
        loss = sum(each.detach() for each in parts)
        dist.all_reduce(loss)
        loss /= world_size
    """,
    "05.a": """
        mixed = MixedPrecisionPolicy(torch.bfloat16 if args.bf16 else None, torch.float32)
        following = None
        for block in reversed(model.blocks):
            fully_shard(block, mp_policy=mixed, reshard_after_forward=True)
            if following is not None:
                block.set_modules_to_forward_prefetch([following])
            following = block
        model = fully_shard(model, mp_policy=mixed)
        optimizer = torch.optim.AdamW(params=list(model.parameters()), lr=args.lr)
    """,
    "05.b": """
        *early, last = micro_batches
        for micro_batch in micro_batches:
            model.set_requires_gradient_sync(micro_batch is last)
            part = loss_of(model(micro_batch[:, :-1]), micro_batch[:, 1:])
            (part / len(micro_batches)).backward()
            loss += part.item() / len(micro_batches)
        dist.all_reduce(loss)
        loss /= world_size
    """,
}


@extended
@pytest.mark.parametrize("id", OTHER_STYLES)
def test_a_solution_in_another_style_is_right(shell, tmp_path, id):
    verdict = tried(shell, id, textwrap.dedent(OTHER_STYLES[id]), tmp_path)
    assert verdict.state == "right", verdict.text
