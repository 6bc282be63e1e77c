"""Plants one fault after another in a copy of the tree, and runs the test that must fail on it.

    python tests/planted.py                 # all of planted.toml, then the share that was seen
    python tests/planted.py cluster hangs   # those whose file or name contains one of these words

A fault replaces a text of one file. The exit status is 1 if fewer faults are seen than
`least_seen_pct` asks for, if a text is no longer in its file exactly once, or if a test fails
before anything is planted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
TIME_LIMIT_S = 600
FAILED = 1  #: pytest's exit status if tests ran and some failed


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str  #: what is wrong, in a few words
    file: str
    right: str  #: a text that is in the file once
    wrong: str
    test: str  #: FILE::NAME below tests/

    @property
    def place(self) -> str:
        return f"{self.file}: {self.name}"

    def times_found(self, tree: Path) -> int:
        path = tree / self.file
        return path.read_text().count(self.right) if path.exists() else 0

    def plant(self, tree: Path) -> None:
        path = tree / self.file
        path.write_text(path.read_text().replace(self.right, self.wrong))


def read_table() -> tuple[float, list[Fault]]:
    """(least share of faults that must be seen in percent, the faults)."""
    table = tomllib.loads(TABLE.read_text())
    return table["least_seen_pct"], [Fault(**fault) for fault in table["fault"]]


def copy_tree(folder: Path) -> Path:
    """A copy of the files of the repository, as they are now."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run_tests(tree: Path, tests: list[str], limit_s: float | None = None):
    """The finished pytest on the copy, whose package comes before the installed one."""
    # Without variables of pytest: a worker of pytest-xdist holds a lock for which the inner tests
    # would wait.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(tree / "src")
    # Python takes compiled code for that of a source with the same size and second.
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    options = ["-q", "-x", "-m", "", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    how = {"capture_output": True, "text": True, "timeout": limit_s}
    return subprocess.run(command, cwd=tree, env=env, **how)


def is_seen(fault: Fault, tree: Path) -> bool:
    """Whether the fault's test fails with it; the tree is as before afterwards."""
    path = tree / fault.file
    before = path.read_text()
    fault.plant(tree)
    try:
        return run_tests(tree, [fault.test], TIME_LIMIT_S).returncode == FAILED
    except subprocess.TimeoutExpired:  # it hangs, so nobody takes it for a success
        return True
    finally:
        path.write_text(before)


def main(words: list[str]) -> int:
    least_seen_pct, faults = read_table()
    if words:
        faults = [fault for fault in faults if any(word in fault.place for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        lost = [fault for fault in faults if fault.times_found(tree) != 1]
        for fault in lost:
            found = fault.times_found(tree)
            print(f"lost   {fault.place}: the text is there {found} times, not once")
        faults = [fault for fault in faults if fault not in lost]
        done = run_tests(tree, sorted({fault.test for fault in faults}))
        if done.returncode:
            print(f"{done.stdout}{done.stderr}\nthese tests must pass before a fault is planted")
            return 1
        seen = 0
        for fault in faults:
            red = is_seen(fault, tree)
            seen += red
            print(f"{'red' if red else 'UNSEEN':6} {fault.place}", flush=True)
    share_pct = 100 * seen / max(len(faults), 1)
    least = f"the least is {least_seen_pct:g} %"
    print(f"{seen} of {len(faults)} faults were seen, {share_pct:.0f} %; {least}")
    return int(bool(lost) or share_pct < least_seen_pct)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only faults whose file or name has one of them")
    sys.exit(main(parser.parse_args().words))
