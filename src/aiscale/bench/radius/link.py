"""Does the emulated link behave like a real one? `aiscale bench link`, on four new ranks (Linux with namespaces).

Each rank has a virtual node (`bench.radius.nodes`). Two links take turns: the kernel slows the nodes' network cards,
or `distributed.link` emulates the same rate over unslowed cards. It times every collective, and DDP steps of the model
of `bench radius`, dense and sparse, overlapped and not, at its rate, a slower and a faster one. It also
reports the latency of the real cards, from all-reduces of few bytes.

DDP steps must agree within a tenth, up to the rate of `bench radius`. Faster rates are shown but not checked: there
the kernel's own work of slowing the cards takes processor time from the ranks, which neither emulation nor separate
machines would.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from aiscale import cost
from aiscale.bench.radius.nodes import shape, start_on_nodes, why_no_nodes
from aiscale.bench.radius.steps import SHARE, SILENT, Bench, Contender, Plan, plan
from aiscale.bench.ranks import Report, on_ranks, silent, turns
from aiscale.bench.tables import checks_table, heading, table
from aiscale.bench.timing import machine_facts
from aiscale.distributed.link import FRAMING

RANKS, ROUNDS, QUICK_ROUNDS = 4, 9, 3
TOLERANCE = 0.10  #: allowed relative difference of a DDP step on the emulated link
_SLOWER, _FASTER = 2.0, 0.25  #: seconds of an all-reduce of all gradients / seconds of a step without communication
_COLLECTIVES_MBIT_S, _COLLECTIVES_BYTES = 200.0, 3 * 2**20
_FEW_BYTES = 4096  #: message size for measuring latency


_STEPS = {
    f"DDP step{', Radius' * (density < 1)}{', at once' * (not overlap)}": Contender(
        method="radius" if density < 1 else "none", density=density, overlap=overlap
    )
    for overlap in (True, False)
    for density in (1.0, 0.4)
}


def bench_link(*, quick: bool = False, report: Report = silent) -> dict:
    """Rows of real and emulated seconds, and the check that DDP steps agree. quick: few rounds, no checks."""
    if why := why_no_nodes():
        return {"skipped": why, "rows": [], "checks": [], "machine": machine_facts()}
    report(f"{RANKS} ranks on nodes of their own, {QUICK_ROUNDS if quick else ROUNDS} rounds")
    result = on_ranks(RANKS, "aiscale.bench.radius.link:measure", quick, start=start_on_nodes)
    checks = [
        {"name": f"{row['what']} at {row['rate_mbit_s']:.0f} Mbit/s, emulated over real", "value": row["ratio"]}
        | {"target": [1 - TOLERANCE, 1 + TOLERANCE], "met": abs(row["ratio"] - 1) <= TOLERANCE}
        for row in result["rows"]
        if row["what"].startswith("DDP step") and row["rate_mbit_s"] <= result["radius_mbit_s"]
    ]
    return {**result, "checks": [] if quick else checks, "machine": machine_facts()}


def show_link(result: dict) -> None:
    if "skipped" in result:
        print(f"not measured: {result['skipped']}")
        return
    heading(result)
    rows = [
        (
            row["what"],
            f"{row['rate_mbit_s']:.0f}",
            f"{1e3 * row['latency_s']:.2f} ms",
            f"{row['payload_bytes'] / 1e6:.2f} MB",
            f"{row['real_s']:.3f}",
            f"{row['emulated_s']:.3f}",
            f"{row['ratio']:.2f}",
        )
        for row in result["rows"]
    ]
    title = (
        f"{result['ranks']} ranks, {result['rounds']} rounds; a step without communication {result['quiet_s']:.3f} s"
    )
    table(title, ("", "Mbit/s", "a message", "payload", "real s", "emulated s", "emulated / real"), rows)
    checks_table(result["checks"])


class _Comparison:
    """Times the same work on both kinds of link; one object on every rank."""

    def __init__(self, world, rounds: int) -> None:
        self.world, self.rounds, self.latencies_s = world, rounds, {}

    def row(self, what: str, action: Callable[[], object], rate_mbit_s: float, payload_bytes: int) -> dict:
        """Median seconds of `action` at a rate, on the real and the emulated link in turn, and the median of their
        ratios."""
        latency_s = self.latency_s(rate_mbit_s)
        seconds: dict[str, list[float]] = {"real": [], "emulated": []}
        for i in range(self.rounds):
            for kind in ("real", "emulated") if i % 2 else ("emulated", "real"):
                seconds[kind].append(self._seconds(kind, action, rate_mbit_s))
        ratios = [e / r for e, r in zip(seconds["emulated"], seconds["real"], strict=True)]
        median_s = {f"{kind}_s": statistics.median(values) for kind, values in seconds.items()}
        facts = {"what": what, "rate_mbit_s": rate_mbit_s, "latency_s": latency_s, "payload_bytes": payload_bytes}
        return {**facts, **median_s, "ratio": statistics.median(ratios), "seconds": seconds}

    def latency_s(self, rate_mbit_s: float) -> float:
        """Latency of one message on real links of this rate: all-reduce time of few bytes minus the time of the
        bytes."""
        if rate_mbit_s not in self.latencies_s:
            few, in_a_row = torch.zeros(_FEW_BYTES // 4 * self.world.size), 10

            def work() -> None:
                for _ in range(in_a_row):
                    dist.all_reduce(few)

            shape(rate_mbit_s)
            taken_s = statistics.median([self._timed(work) for _ in range(2 + self.rounds)][2:]) / in_a_row
            messages, sent_bytes = cost.collective_terms("all_reduce", few.nbytes, self.world.size, "gloo")
            found_s = (taken_s - 8 * FRAMING * sent_bytes / (1e6 * rate_mbit_s)) / messages
            self.latencies_s[rate_mbit_s] = self.world.from_rank0(lambda: max(0.0, found_s))
        return self.latencies_s[rate_mbit_s]

    def _seconds(self, kind: str, action: Callable[[], object], rate_mbit_s: float) -> float:
        shape(rate_mbit_s if kind == "real" else 0)
        with self.world.link.at(rate_mbit_s if kind == "emulated" else 0):
            self._timed(action)  # TCP has to adapt to the new rate
            return self._timed(action)

    def _timed(self, action: Callable[[], object]) -> float:
        self.world.barrier()
        start = time.perf_counter()
        action()
        self.world.barrier()  # it takes as long as the slowest rank
        return time.perf_counter() - start


def collectives(world, nbytes: int) -> dict[str, Callable[[], object]]:
    """Every collective with a payload of `nbytes`, and a message from rank 0 to rank 1; all ranks call each."""
    n, r, size = world.size, world.rank, nbytes // 4
    x, share = torch.ones(size), torch.ones(size // n)

    def parts() -> list | None:
        return list(torch.empty(size).chunk(n)) if r == 0 else None

    return {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather(list(torch.empty(size).chunk(n)), share),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(size // n), list(x.chunk(n))),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "gather": lambda: dist.gather(share, parts(), 0),
        "scatter": lambda: dist.scatter(torch.empty(size // n), parts(), 0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(size), x),
        "send": lambda: dist.send(x, 1) if r == 0 else dist.recv(x, 0) if r == 1 else None,
    }


def measure(world, quick: bool) -> dict:
    torch.set_num_threads(1)
    compare = _Comparison(world, QUICK_ROUNDS if quick else ROUNDS)
    rows = [
        compare.row(what, action, _COLLECTIVES_MBIT_S, _COLLECTIVES_BYTES)
        for what, action in collectives(world, _COLLECTIVES_BYTES).items()
        if not quick or what == "all_reduce"
    ]
    model = ("model.n_layer=1",) if quick else plan(False).model
    bench = Bench(world, Plan(model=model, contenders=tuple(_STEPS.values()), rounds=compare.rounds))
    quiet = turns(world, {SILENT: bench.silent}, 3 if quick else 9)
    quiet_s = world.sum(quiet.median_s(SILENT)) / world.size
    gradients = torch.zeros(cost.parameter_count(bench.run.model))
    sent_bits = 8 * FRAMING * cost.all_reduce_wire_bytes(gradients.nbytes, world.size)
    rates = [sent_bits / (ratio * quiet_s) / 1e6 for ratio in (_SLOWER, SHARE / (1 - SHARE), _FASTER)]
    payload_bytes = {what: bench.sizes(step)["payload_bytes"] for what, step in _STEPS.items()}
    for rate_mbit_s in rates[:1] if quick else rates:
        rows.append(compare.row("all gradients", lambda: dist.all_reduce(gradients), rate_mbit_s, gradients.nbytes))
        for what, step in _STEPS.items():
            rows.append(compare.row(what, lambda step=step: bench.step(step), rate_mbit_s, payload_bytes[what]))
    facts = {"ranks": world.size, "rounds": compare.rounds, "quiet_s": quiet_s, "radius_mbit_s": rates[1]}
    return {**facts, "rows": rows}
