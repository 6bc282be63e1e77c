"""Proves that the clinic's programs and checks do what they should.

python workshop/solutions/clinic/prove.py               # each program shows its symptom, mended it passes,
python workshop/solutions/clinic/prove.py 01 04         # and plausible wrong repairs are refused
python workshop/solutions/clinic/prove.py --times 20    # the symptoms alone, that many times, with new seeds
"""

import argparse
import random
import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "clinic"))

from clinic import PROGRAMS, cases, solution
from jobs import Unmended


def edited(name, edits):
    """A copy of a program with some pieces of its text replaced."""
    text = (PROGRAMS / f"{name}.py").read_text()
    for old, new in edits:
        assert text.count(old) >= 1, f"{name}: {old!r} is not in the program"
        text = text.replace(old, new, 1)
    path = Path(tempfile.mkdtemp(prefix="clinic-")) / f"{name}.py"
    path.write_text(text)
    return path


def verdict(case, path):
    """What a check says of a program: empty if it passes."""
    try:
        case.check(path, seed=random.randrange(10**6))
    except Unmended as found:
        return str(found)
    return ""


def expected(name, what, said, pattern):
    """Print one line; returns whether a check said what it should (nothing, if pattern is empty)."""
    right = bool(re.search(pattern, said)) if pattern else not said
    wanted = "" if right else f"\n    but should match: {pattern or 'nothing'}"
    print(f"{'ok   ' if right else 'WRONG'} {name}, {what}: {said or 'passes'}{wanted}", flush=True)
    return right


def prove(name):
    case = solution(name)
    results = [expected(name, "as it is", verdict(case, PROGRAMS / f"{name}.py"), case.SYMPTOM)]
    results.append(expected(name, "mended", verdict(case, edited(name, case.MENDED)), ""))
    for what, (edits, reply) in case.WRONG.items():
        results.append(expected(name, what, verdict(case, edited(name, edits)), reply))
    return all(results)


def repeat(name, times):
    case = solution(name)
    said = [verdict(case, PROGRAMS / f"{name}.py") for _ in range(times)]
    shown = sum(bool(re.search(case.SYMPTOM, line)) for line in said)
    print(f"{name}: the symptom in {shown} of {times} runs", flush=True)
    return shown == times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--times", type=int, default=0, metavar="N")
    args = parser.parse_args()
    names = [name for name in cases() if not args.cases or name.startswith(tuple(args.cases))]
    results = [repeat(name, args.times) if args.times else prove(name) for name in names]
    print(f"{sum(results)} of {len(results)} cases")
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
