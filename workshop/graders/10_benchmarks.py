"""Graders of the exercises on benchmarks: a ratio under drift, an interval of the median, a study that resumes."""

import csv
import io
import random
import statistics

import numpy as np

from aiscale.lesson.grading import exercise, require, same

# 10.1 ---------------------------------------------------------------------------------------------------------------


@exercise(
    "10.1",
    "Divide by the neighbour",
    "times_the_base",
    minutes=10,
    hints=[
        "Walk through the list with the number of each run: its neighbours have the numbers before and after.",
        "Collect a ratio for each run of the cell; only then take the median.",
    ],
)
def divide_by_the_neighbour(times_the_base):
    for _ in range(5):
        # The ratios are planted, and the machine slows down by as much from run to run.
        planted = [random.uniform(0.3, 4) * random.uniform(0.97, 1.03) for _ in range(random.choice([3, 5, 7]))]
        planted[0] *= 3  # another program
        others = [("b", random.uniform(0.5, 3)) for _ in range(2 * len(planted))]
        cells = others + [("a", ratio) for ratio in planted]  # the cell comes late, when the machine is slow
        start, slower = random.uniform(0.1, 2), random.uniform(0.02, 0.08)
        runs = []
        for name, ratio in [("base", 1.0)] + [each for cell in cells for each in (cell, ("base", 1.0))]:
            runs.append((name, start * (1 + slower * len(runs)) * ratio))
        base = [seconds for name, seconds in runs if name == "base"]
        mine = [i for i, (name, _) in enumerate(runs) if name == "a"]
        before, after = ([runs[i][1] / runs[i + side][1] for i in mine] for side in (-1, 1))
        right = statistics.median(planted)
        causes = {
            "the machine slowed down, and this divides by the base of the whole study": statistics.median(
                runs[i][1] for i in mine
            )
            / statistics.median(base),
            "the machine slowed down, and this divides by the mean of all bases": statistics.median(
                runs[i][1] for i in mine
            )
            / statistics.fmean(base),
            "this divides by the base before it alone": statistics.median(before),
            "this divides by the base after it alone": statistics.median(after),
            "this is the mean: one disturbed run moves it, and the median hardly": statistics.fmean(planted),
            "this is base over run: it should be run over base": 1 / right,
            "this is in seconds: divide by the base": statistics.median(runs[i][1] for i in mine),
        }
        same(times_the_base(runs, "a"), right, f"the ratio of {len(mine)} runs", causes=causes, rtol=1e-7)


_SECONDS = "seconds = [s for cell, s in runs if cell == name]\nbase = [s for cell, s in runs if cell == 'base']\n"
_EACH = "mine = [i for i, (cell, _) in enumerate(runs) if cell == name]\n"
divide_by_the_neighbour.refuses(
    "the base of the whole study",
    "the base of the whole study",
    _SECONDS + "return statistics.median(seconds) / statistics.median(base)",
)
divide_by_the_neighbour.refuses(
    "the base before it",
    "the base before it alone",
    _EACH + "return statistics.median(runs[i][1] / runs[i - 1][1] for i in mine)",
)
divide_by_the_neighbour.refuses(
    "the mean of the ratios",
    "one disturbed run moves it",
    _EACH + "return statistics.fmean(runs[i][1] / ((runs[i - 1][1] + runs[i + 1][1]) / 2) for i in mine)",
)
divide_by_the_neighbour.refuses(
    "upside down",
    "run over base",
    _EACH + "return statistics.median((runs[i - 1][1] + runs[i + 1][1]) / 2 / runs[i][1] for i in mine)",
)
divide_by_the_neighbour.refuses("not divided", "in seconds", _SECONDS + "return statistics.median(seconds)")
divide_by_the_neighbour.refuses("hard-coded for the shown runs", "the ratio of", "return 2.0")


# 10.2 ---------------------------------------------------------------------------------------------------------------


def _heads(n: int) -> np.ndarray:
    """The probability of 0 to n heads, by adding one coin at a time."""
    chances = np.ones(1)
    for _ in range(n):
        chances = np.convolve(chances, [0.5, 0.5])
    return chances


def _ends(times: list[float], outside: float = 0.05, sides: int = 2) -> tuple[float, float] | None:
    chances, times = _heads(len(times)), sorted(times)
    fits = [k for k in range(len(times) // 2) if sides * chances[: k + 1].sum() <= outside + 1e-12]
    return (times[fits[-1]], times[-1 - fits[-1]]) if fits else None


@exercise(
    "10.2",
    "An interval by coins",
    "median_interval",
    minutes=12,
    hints=[
        "The true median is below the k-th smallest of n runs if at most k - 1 coins show tails. Both sides count.",
        "math.comb(n, j) / 2**n is the probability of j tails. Add them up while twice the sum stays at 0.05 or less.",
    ],
)
def an_interval_by_coins(median_interval):
    for n in (8, random.choice([3, 4, 5]), 6, 12, *random.sample(range(9, 41), 3)):
        times = [random.lognormvariate(0, 0.4) for _ in range(n)]
        found, right = median_interval(list(times)), _ends(times)
        what = f"the interval of {n} runs"
        if right is None:
            outside = 2 * _heads(n)[0]
            require(
                found is None,
                f"{n} runs are too few: all of them lie on one side in {outside:.1%} of all cases. Return None",
            )
            continue
        require(found is not None, f"{what} is None, but the smallest and the largest hold the median in 95 % of cases")
        require(isinstance(found, (tuple, list)) and len(found) == 2, f"{what}: return (low, high), not {found!r:.60}")
        low, high = np.percentile(times, [2.5, 97.5])
        middle, error = statistics.fmean(times), 1.96 * statistics.stdev(times) / n**0.5
        causes = {
            "5 % are outside on each side, so 10 % in all": _ends(times, sides=1),
            "the interval is wider than it need be: leave out runs at both ends while 95 % remain": (
                min(times),
                max(times),
            ),
            "single runs lie there; where their median lies is known better": (low, high),
            "that is the interval of a mean, for times with a bell's distribution; these have a long tail": (
                middle - error,
                middle + error,
            ),
            "sort the runs first": (times[sorted(times).index(right[0])], times[-1 - sorted(times).index(right[0])]),
        }
        same(found, right, what, causes={k: v for k, v in causes.items() if v and tuple(v) != right}, rtol=1e-9)


an_interval_by_coins.refuses(
    "the range", "leave out runs", "return (min(times), max(times)) if len(times) > 5 else None"
)
an_interval_by_coins.refuses(
    "one side counted",
    "10 % in all",
    """
    times, n = sorted(times), len(times)
    best, outside = None, 0
    for k in range(1, n // 2 + 1):
        outside += math.comb(n, k - 1) / 2**n
        if outside <= 0.05:
            best = times[k - 1], times[n - k]
    return best
    """,
)
_K = """
    n, k, outside = len(times), 0, 2 / 2 ** len(times)
    if outside > 0.05:
        return {few}
    while outside + 2 * math.comb(n, k + 1) / 2**n <= 0.05:
        k += 1
        outside += 2 * math.comb(n, k) / 2**n
    {then}
"""
an_interval_by_coins.refuses(
    "never too few",
    "runs are too few",
    _K.format(few="min(times), max(times)", then="return sorted(times)[k], sorted(times)[n - 1 - k]"),
)
an_interval_by_coins.refuses(
    "not sorted", "the interval of", _K.format(few="None", then="return times[k], times[n - 1 - k]")
)
an_interval_by_coins.refuses("hard-coded for the shown times", "the interval of 8 runs", "return 2, 8")


# 10.3 ---------------------------------------------------------------------------------------------------------------

_CELLS = (
    "base",
    "batch 16",
    "precision bf16",
    "ranks 2, strategy ddp",
    "ranks 2, strategy fsdp",
    "size 4x128, micro 2",
)
_COLUMNS = ("cell", "round", "status", "epoch_s")


def _line(values: list, end: str = "\n") -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerow(values)
    return text.getvalue()


@exercise(
    "10.3",
    "Nothing run twice",
    "still_to_run",
    minutes=10,
    core=False,
    hints=[
        "Cut the text off behind its last newline first.",
        "csv.DictReader(io.StringIO(...)) reads quotes and headings; numbers are still text then.",
        "Put (cell, round) of each whole line into a set, and go through the plan.",
    ],
)
def nothing_run_twice(still_to_run):
    for turn in range(6):
        plan = [(cell, number) for number in range(3) for cell in random.sample(_CELLS, len(_CELLS))]
        columns = random.sample(_COLUMNS, len(_COLUMNS))
        made = random.randint(7, 12)  # all cells of the first round, some of the second
        crashed = random.randint(0, made - 1)
        text = _line(columns)
        for i, (cell, number) in enumerate(plan[: made + 1]):
            facts = {"cell": cell, "round": number, "status": "out of memory" if i == crashed else "ok"}
            facts["epoch_s"] = round(random.uniform(1, 20), 4)
            line = _line([facts[column] for column in columns])
            # The last line looks whole but for its newline; or is cut off anywhere; or is not there at all.
            keep = len(line) if i < made else (len(line) - 1, random.randint(1, len(line) - 1), 0)[turn % 3]
            text += line[:keep]
        if turn == 5:
            text, made = "", 0
        found = still_to_run(list(plan), text)
        require(isinstance(found, (list, tuple)), f"return a list of (cell, round), not {type(found).__name__}")
        found = [tuple(run) for run in found]
        again = [run for run in plan[:made] if run in found]
        missing = [run for run in plan[made:] if run not in found]
        where = f"a study of {len(plan)} runs, {made} of them made"
        require(
            again != [plan[crashed]],
            f"{where}: {plan[crashed]} crashed, and that is its result; it would be run again",
        )
        commas = made and all("," in cell for cell, _ in again) and again
        require(not commas, f"{where}: {commas and commas[0]} would be made twice; its label has a comma")
        require(not again, f"{where}: {len(again)} runs would be made twice, the first is {again and again[0]}")
        torn = made and missing == [plan[made]]
        require(not torn, f"{where}: the line of {plan[made]} has no newline, so the kill may have cut it off; run it")
        require(
            not missing,
            f"{where}: {len(missing)} runs would never be made, the first is {missing and missing[0]}: "
            "does a cell count as done when only another round has run it?",
        )
        require(found == plan[made:], f"{where}: the runs are right, but not in the order of the plan")


_DONE = 'done = {(row["cell"], int(row["round"])) for row in csv.DictReader(io.StringIO(text))%s}\n'
_LEFT = "return [run for run in plan if run not in done]"
nothing_run_twice.refuses(
    "a line that was cut off counts",
    "has no newline",
    'done = {(row["cell"], row["round"]) for row in csv.DictReader(io.StringIO(text))}\n'
    "return [run for run in plan if (run[0], str(run[1])) not in done]",
)
_WHOLE = 'text = text[: text.rfind("\\n") + 1]\n'
nothing_run_twice.refuses(
    "a crash is tried again", "that is its result", _WHOLE + _DONE % ' if row["status"] == "ok"' + _LEFT
)
nothing_run_twice.refuses(
    "rounds forgotten",
    "would never be made",
    _WHOLE
    + 'done = {row["cell"] for row in csv.DictReader(io.StringIO(text))}\nreturn [r for r in plan if r[0] not in done]',
)
nothing_run_twice.refuses(
    "numbers left as text",
    "would be made twice",
    _WHOLE + 'done = {(row["cell"], row["round"]) for row in csv.DictReader(io.StringIO(text))}\n' + _LEFT,
)
nothing_run_twice.refuses(
    "in another order", "order of the plan", _WHOLE + _DONE % "" + "return sorted(set(plan) - done, reverse=True)"
)
nothing_run_twice.refuses("hard-coded: all are left", "would be made twice", "return plan")
