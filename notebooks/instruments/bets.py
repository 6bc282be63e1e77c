"""Bets of lesson 11: eight published layouts of one job, and what a choice among them costs.

job = eight_of(published_groups("nanotron_sweep")[0])
regret_table({"a name": job}, {"a name": "dp 8, tp 1, pp 1, zero 1, micro-batch 2, recompute none"})
"""

from aiscale.plan.regret import Group, of_choice

EIGHT = 8


def eight_of(group):
    """The fastest measured layout of a job and the seven others that the planner predicts fastest, sorted by name.
    Of a layout that was measured more than once the fastest run counts."""
    runs = {}
    for name, measured, predicted in zip(group.layouts, group.measured_s, group.predicted_s, strict=True):
        if name not in runs or measured < runs[name][0]:
            runs[name] = (measured, predicted)
    fastest = min(runs, key=lambda name: runs[name][0])
    others = sorted((name for name in runs if name != fastest), key=lambda name: runs[name][1])
    taken = sorted([fastest, *others[: EIGHT - 1]])
    measured, predicted = zip(*(runs[name] for name in taken), strict=True)
    return Group(group.name, tuple(taken), measured, predicted)


def regret_table(jobs, chosen):
    """Markdown: seconds of the layouts that the reader and the planner chose, and of the fastest."""
    lines = ["| job | fastest | yours | seconds lost | the planner's | seconds lost |", "|---|---|---|---|---|---|"]
    for name, job in jobs.items():
        best = min(job.measured_s)
        cells = [name, f"{best:.3g} s"]
        for choice in (chosen.get(name), job.planned):
            if choice is None:
                cells += ["", ""]
            else:
                seconds = best * of_choice(job, choice)
                cells += [f"{choice}: {seconds:.3g} s", f"{seconds - best:.3g} ({of_choice(job, choice):.2f} x)"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
