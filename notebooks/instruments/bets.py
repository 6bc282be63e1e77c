"""Bets of lesson 11: eight published layouts of one job, and what a choice among them costs.

job = eight_of(published_groups("nanotron_sweep")[0])
regret_table({"a name": job}, {"a name": "dp 8, tp 1, pp 1, zero 1, micro-batch 2, recompute none"})
rules_table({"nanotron": published_groups("nanotron_sweep")})     # the planner beside two rules without a planner
"""

import re

from aiscale.plan.regret import RIGHT, Group, of_choice

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


# The planner beside rules that need none ------------------------------------------------------------------------------


def first_three(group):
    """The three layouts that the planner predicts to be fastest."""
    by_predicted = sorted(range(len(group.layouts)), key=group.predicted_s.__getitem__)
    return list(dict.fromkeys(group.layouts[number] for number in by_predicted))[:3]


def least_cut(group):
    """The layouts with the least tp x pp that ran."""
    ranks = {name: ranks_of_a_copy(name) for name in group.layouts}
    return [name for name, count in ranks.items() if count == min(ranks.values())]


def ranks_of_a_copy(layout):
    """tp x pp of a layout's name."""
    tp, pp = (int(re.search(rf"{axis} (\d+)", layout)[1]) for axis in ("tp", "pp"))
    return tp * pp


def right_share(group, layouts):
    """The chance that one of these layouts, drawn at random, is within a tenth of the best."""
    return sum(of_choice(group, name) <= RIGHT for name in layouts) / len(layouts)


def rules_table(tables):
    """Markdown: in how many jobs of each table a rule is within a tenth of the best, and by what it misses the others.
    Where a rule leaves several layouts it takes one at random, so that its count is a mean."""
    rows = {"the planner's first": [], "the best of its first three": [], "least tp x pp": [], "any layout": []}
    for groups in tables.values():
        firsts = [of_choice(group, group.planned) for group in groups]
        threes = [min(of_choice(group, name) for name in first_three(group)) for group in groups]
        for rule, regrets in zip(rows, (firsts, threes), strict=False):
            missed = ", ".join(f"{value:.2f} x" for value in sorted(regrets) if value > RIGHT)
            right = sum(value <= RIGHT for value in regrets)
            rows[rule].append(f"{right}; the others {missed}" if missed else f"{right}")
        rows["least tp x pp"].append(f"{sum(right_share(group, least_cut(group)) for group in groups):.1f}")
        rows["any layout"].append(f"{sum(right_share(group, set(group.layouts)) for group in groups):.1f}")
    heads = [f"{name}, {len(groups)} jobs" for name, groups in tables.items()]
    lines = [["within a tenth of the best", *heads], ["---"] * (1 + len(heads))]
    lines += [[rule, *cells] for rule, cells in rows.items()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
