"""Which packages of a lock this Python has not: `.venv/bin/python scripts/missing.py requirements.lock`.

Prints one phrase, such as "torch, numpy and 140 more packages are". Standard library only, and pip's own copy of
`packaging` for the markers: it runs when nothing else is installed.
"""

import sys
from importlib.metadata import PackageNotFoundError, version

from pip._vendor.packaging.requirements import Requirement

NAMED = 3


def main() -> None:
    with open(sys.argv[1]) as lock:
        requirements = [Requirement(line) for line in lock if line.strip() and not line.startswith("#")]
    wanted = [r for r in requirements if not r.marker or r.marker.evaluate()]
    # torch first: everything else stands on it.
    names = sorted((r.name for r in wanted if _is_missing(r)), key=lambda name: name != "torch")
    if not names:
        print("aiscale is")
    elif len(names) == 1:
        print(f"{names[0]} is")
    elif len(names) <= NAMED:
        print(f"{', '.join(names[:-1])} and {names[-1]} are")
    else:
        print(f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more packages are")


def _is_missing(requirement: Requirement) -> bool:
    try:
        return not requirement.specifier.contains(version(requirement.name), prereleases=True)
    except PackageNotFoundError:
        return True


if __name__ == "__main__":
    main()
