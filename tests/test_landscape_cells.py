"""A fault planted in the cells of lesson 12, at least one in each idea, makes the next assertion of the lesson fail."""

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import pytest

from aiscale import published
from aiscale.lesson.exercise_command import Seat
from aiscale.lesson.notebook import Notebook


class Fault(NamedTuple):
    idea: str  #: the framework's name
    old: str  #: text that one cell alone holds
    new: str  #: what stands there instead
    says: str = ""  #: a part of what the assertion says, if it says anything


CLOSE, ORDER = "not close", "order of summation"
THREE = 'kill=kill) for idea in ("oobleck", "varuna", "restart")'
PRODUCT = "(torch.relu(x_ @ A_) @ B_)"
PARTIAL = "partial.redistribute(placements=[place])"
FAULTS = [
    Fault("Mesh-TensorFlow", PRODUCT, f"DTensor.from_local({PRODUCT}.to_local(), mesh, x_.placements)", CLOSE),
    Fault("Mesh-TensorFlow", '"hidden over columns": {"hidden"', '"hidden over columns": {"model"'),
    Fault("OneFlow", PARTIAL, "DTensor.from_local(partial.to_local(), line, [place])"),
    Fault("OneFlow", "distribute_tensor(B, line, [Shard(0)])", "distribute_tensor(B, line, [Shard(1)])"),
    Fault("OneFlow", '"C": ("rows", "P")', '"C": ("rows", "B")'),
    Fault("EPL (Whale)", "(mine @ weight).square().sum() / len(x)", "(mine @ weight).square().mean()", CLOSE),
    Fault("EPL (Whale)", "    dist.all_reduce(weight.grad)\n", "", CLOSE),
    Fault("Merak", "min(every, key=slowest)", "min(every)"),
    Fault("Merak", "costs[a:b]", "costs[a + 1 : b]"),
    Fault("Bamboo", '"bamboo", kill=kill', '"bamboo", kill=kill, fault="reduction"'),
    Fault("veGiantModel", "dist.recv(gradient, rank + 1)", "dist.recv(gradient.clone(), rank + 1)", CLOSE),
    Fault("veGiantModel", "slice(edges[rank], edges[rank + 1])", "slice(edges[rank], edges[rank + 1] - 1)", "length"),
    Fault("torchgpipe", "checkpoint(stage, part, use_reentrant=True) if again else", ""),
    Fault("torchgpipe", "for end in ends).backward()", "for end in ends[again:]).backward()"),
    Fault("FairScale", "dist.reduce(parameter.grad,", "dist.reduce(parameter.grad.clone(),", ORDER),
    Fault("FairScale", "[p for p in parameters if owner[p] == rank]", "parameters[:4]", ORDER),
    Fault("DeepSpeed", 'parallel.zero_stage={stage}") for', 'parallel.zero_stage=1") for'),
    Fault("DeepSpeed", "lines.chunk(engine.data_world)[engine.data_rank]", "lines.chunk(engine.data_world)[0]", ORDER),
    Fault("DeepSpeed", "routed[by_expert] = answers", "routed = answers", CLOSE),
    Fault("Megatron-LM", "cost.pipeline_timeline(name, 4, 8, v,", "cost.pipeline_timeline(name, 4, 4, v,", "waits"),
    Fault("Megatron-LM", '"parallel.pp=4", *order', '"parallel.pp=4", *order, "model.n_layer=16"', "fp32"),
    Fault("Megatron-DeepSpeed", "both = train(", "both = (lambda *some: train(*some[:-1]))("),
    Fault("Megatron-LLaMA", "dist.reduce_scatter_tensor(part,", "dist.reduce_scatter_tensor(part.clone(),", CLOSE),
    Fault("Megatron-LLaMA", "nn.utils.vector_to_parameters(flat[block], block.parameters())", "pass", CLOSE),
    Fault("PaddleFleetX", "*place[axis + 1 :])]", "*[0] * (3 - axis))]"),
    Fault("PaddleFleetX", "{name: train(*settings)", '{name: train(*settings, "model.n_layer=4")', ORDER),
    Fault("AxonNN", "seconds=slow)", 'seconds=slow, fault="skip")', CLOSE),
    Fault("AxonNN", "for part in lines.chunk(8)]", "for part in lines.chunk(8)[1:]]", CLOSE),
    Fault("AxonNN", "sums[i, 0, k] + sums[i, 1, k]", "sums[i, 0, k]", CLOSE),
    Fault("Colossal-AI", "grid.matmul(a, b)", 'grid.matmul(a, b, fault="reduction")', CLOSE),
    Fault("Colossal-AI", "(grid.cut(tensor).", "(grid.cut(tensor.flip(0)).", CLOSE),
    Fault("Oobleck", THREE, 'kill=kill, fault="reduction") for idea in ("oobleck",)', ORDER),
    Fault("Varuna", THREE, 'kill=kill, fault="moments") for idea in ("varuna",)', ORDER),
    Fault("ring attention", "ring_attention(*mine, world)", 'ring_attention(*mine, world, fault="merge")', CLOSE),
]


def code_cells() -> list[str]:
    """Of the sections that hold ideas: neither the survey's machines and networks, nor the figure of four deaths."""
    found, section = [], ""
    for cell in Notebook(Path(__file__).parents[1] / "notebooks" / "12_framework_landscape.ipynb").cells:
        section = next(
            iter(re.findall(r"^#+ +(.*)", cell.source, re.M) if cell.cell_type == "markdown" else []), section
        )
        wanted = not section.endswith("of the survey (optional)") and "jobs.values()" not in cell.source
        if cell.cell_type == "code" and wanted:
            found.append(cell.source)
    return found


CELLS = code_cells()


def first_and_last(fault: Fault) -> tuple[int, int]:
    """The cell that the fault changes, and the one with the next assertion."""
    holding = [i for i, source in enumerate(CELLS) if fault.old in source]
    assert len(holding) == 1 and CELLS[holding[0]].count(fault.old) == 1, f"not once in the lesson: {fault.old!r}"
    return holding[0], next(i for i in range(holding[0], len(CELLS)) if "assert" in CELLS[i])


def test_each_of_the_seventeen_ideas_has_a_planted_fault_and_an_assertion_in_the_lesson():
    assert {entry["name"] for entry in published.facts("frameworks")["frameworks"]} <= {fault.idea for fault in FAULTS}
    for fault in FAULTS:
        first_and_last(fault)


def error_with(fault: Fault, seat: Seat) -> str:
    """What the assertion says; runs the cells from the changed one down to it."""
    first, last = first_and_last(fault)
    above, asserting = CELLS[first:last], CELLS[last]
    if error := seat.run([source.replace(fault.old, fault.new) for source in above]):
        return f"a cell above the assertion failed: {error}"
    return seat.run([asserting.replace(fault.old, fault.new)]) or "nothing failed"


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_fault_planted_in_a_cell_makes_the_next_assertion_fail_and_without_it_all_pass():
    first, wrong = {}, []
    for fault in FAULTS:
        first.setdefault(first_and_last(fault)[0], []).append(fault)
    with plt.rc_context(), Seat() as seat:
        for i, source in enumerate(CELLS):
            for fault in first.get(i, ()):
                error = error_with(fault, seat)
                if not (error.startswith("AssertionError") and fault.says in error):
                    wrong.append((fault.idea, fault.new, error))
            if THREE not in source:  # three more jobs; unchanged, all cells run in test_notebooks.py, too
                assert not (error := seat.run([source])), f"{error}, in the unchanged cell\n{source}"
            plt.close("all")
    assert not wrong
