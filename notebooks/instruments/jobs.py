"""Ten jobs with a public precedent, for lesson 13: cards, what a layout keeps on a device, and what was chosen.

    ten = jobs.ten()                                       # {1: {...}, ...}, of plan/published/papers/ten_jobs.json
    jobs.cards(ten)                                        # a table: model, machine, network, people, wish
    mine = jobs.Choice("torchtitan", tp=8, pp=4, shares="optimizer states")
    jobs.states_GB(ten[5], mine), jobs.faults(ten[5], mine)
    jobs.compared(ten, {5: mine})                          # a table: yours, theirs, why, and the source

States are counted with 16 bytes a parameter, as in lesson 04: weights 2, gradients 2, the optimizer's states 12.
Activations are not counted: they depend on the micro-batch, which is not on the cards.
"""

from __future__ import annotations

from dataclasses import dataclass

from IPython.display import Markdown

from aiscale import published

WEIGHTS, GRADIENTS, STATES = 2, 2, 12  #: bytes a parameter
#: what data-parallel ranks divide among themselves: bytes that each has whole, and bytes that are divided
DIVIDED = {
    "nothing": (WEIGHTS + GRADIENTS + STATES, 0),
    "optimizer states": (WEIGHTS + GRADIENTS, STATES),
    "gradients too": (WEIGHTS, GRADIENTS + STATES),
    "everything": (0, WEIGHTS + GRADIENTS + STATES),
}


@dataclass(frozen=True)
class Choice:
    framework: str
    tp: int = 1
    pp: int = 1
    ep: int = 1
    shares: str = "nothing"  #: a name of DIVIDED
    over: int | None = None  #: by how many ranks; without a number all data-parallel ones

    def __post_init__(self) -> None:
        if self.shares not in DIVIDED:
            raise ValueError(f"shares is {self.shares!r}: take one of {', '.join(map(repr, DIVIDED))}")

    def layout(self, job: dict) -> str:
        dp, rest = divmod(job["devices"], self.tp * self.pp)
        if rest:
            return f"tp {self.tp} pp {self.pp}"
        axes = {"tp": self.tp, "pp": self.pp, "ep": self.ep, "dp": dp}
        named = " ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        if self.shares == "nothing":
            return f"{named}, nothing divided"
        return f"{named}, {self.shares} over {self.over or dp}"


def ten() -> dict[int, dict]:
    return {job["job"]: job for job in published.facts("ten_jobs")["jobs"]}


def in_public(job: dict) -> Choice:
    """What was chosen for this job."""
    chosen = job["public"]
    return Choice(
        chosen["framework"], chosen["tp"], chosen["pp"], chosen["ep"], chosen["sharded"], chosen["shard_ranks"]
    )


def states_GB(job: dict, choice: Choice) -> float:
    """Weights, gradients and the optimizer's states on one device."""
    model_parallel = choice.tp * choice.pp
    dp = job["devices"] // model_parallel
    whole, divided = DIVIDED[choice.shares]
    experts_B = job.get("experts_B", 0)
    rest_B = (job["parameters_B"] - experts_B) / model_parallel
    # an expert's copies lie on dp / ep ranks
    here_B = experts_B / (model_parallel * choice.ep)
    over = choice.over or dp
    copies = max(1, over // choice.ep)
    return rest_B * (whole + divided / over) + here_B * (whole + divided / copies)


def faults(job: dict, choice: Choice) -> list[str]:
    """What speaks against a layout, a line each."""
    found, devices, parts = [], job["devices"], choice.tp * choice.pp
    if devices % parts:
        return [f"tp {choice.tp} x pp {choice.pp} = {parts} does not divide {devices} devices: change one of them"]
    dp = devices // parts
    over = choice.over or dp
    if dp % over or dp % choice.ep:
        found.append(f"dp is {dp}: over = {over} and ep = {choice.ep} must divide it")
    if choice.pp > job["layers"]:
        found.append(f"{choice.pp} stages for {job['layers']} layers: a stage needs one")
    if choice.tp > job["per_node"]:
        found.append(f"tp {choice.tp} crosses nodes of {job['per_node']} devices, and sends in every layer")
    if choice.shares == "everything" and choice.pp > 1:
        found.append("with a pipeline FSDP gathers a stage's weights for every micro-batch")
    if job["network"].startswith("the internet") and choice.shares != "nothing" and over > job["per_node"]:
        found.append("what is divided over more than a node crosses the internet in every step")
    if choice.ep > 1 and "experts_B" not in job:
        found.append("this model has no experts: ep must be 1")
    states = states_GB(job, choice)
    if states > job["memory_GB"]:
        found.append(f"{states:.0f} GB of states do not fit {job['memory_GB']} GB: divide more")
    return found


def cards(jobs: dict[int, dict]) -> Markdown:
    rows = [
        [f"**{number}**", *(job[key] for key in ("model", "machine", "network", "people", "wish"))]
        for number, job in jobs.items()
    ]
    return _table(["", "model", "machine", "network", "people", "wish"], rows)


def compared(jobs: dict[int, dict], mine: dict[int, Choice]) -> Markdown:
    """Yours and theirs: framework, layout, GB of states, and what speaks against yours."""
    rows = []
    for number, choice in mine.items():
        job = jobs[number]
        against, fits = faults(job, choice), job["devices"] % (choice.tp * choice.pp) == 0
        states = states_GB(job, choice) if fits else float("nan")
        said = "against it: " + "; ".join(against)
        if not against:
            said = f"nothing against it on the card; {job['memory_GB'] - states:.0f} GB are left for activations"
        rows.append([f"**{number}**", "you", choice.framework, choice.layout(job), f"{states:.1f}", said])
        rows.append(_public_row(job))
    return _table(["", "who", "framework", "layout", "GB of states", ""], rows)


def answers(jobs: dict[int, dict]) -> Markdown:
    """What was chosen for each job, why, and where that is written."""
    return _table(["", "who", "framework", "layout", "GB of states", ""], [_public_row(job) for job in jobs.values()])


def _public_row(job: dict) -> list[str]:
    chosen, public = in_public(job), job["public"]
    own = ", written by themselves" if public["own"] and "own" not in public["framework"] else ""
    said = f"{public['why']}. *{public['source']} ({public['verification']})*"
    states = f"{states_GB(job, chosen):.1f}"
    return [f"**{job['job']}**", public["who"], public["framework"] + own, chosen.layout(job), states, said]


def _table(head: list[str], rows: list[list[str]]) -> Markdown:
    lines = [head, ["---"] * len(head), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))
