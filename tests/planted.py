"""Plants one fault after another in a copy of the tree, and runs the test that must fail on it.

    python tests/planted.py                 # all of planted.toml, then the share of faults that were seen
    python tests/planted.py cluster hangs   # those whose file or name contains one of these words

A fault replaces a text of one file. The exit status is 1 if fewer faults are seen than `least_seen_pct` asks for, if a
text is no longer in its file exactly once, or if a test fails before anything is planted.
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


def run_tests(tree: Path, tests: list[str]) -> subprocess.CompletedProcess:
    """pytest on the copy, whose package comes before the installed one."""
    # Without variables of pytest: a worker of pytest-xdist holds a lock that the inner tests would wait for.
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(tree / "src")
    options = ["-q", "-x", "-m", "", "-p", "no:xdist", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=TIME_LIMIT_S)


def is_seen(fault: Fault, tree: Path) -> bool:
    """Whether the fault's test fails with it; the tree is as before afterwards."""
    path = tree / fault.file
    before = path.read_text()
    fault.plant(tree)
    try:
        return run_tests(tree, [fault.test]).returncode == FAILED
    except subprocess.TimeoutExpired:  # it hangs, so nobody takes it for a success
        return True
    finally:
        path.write_text(before)


def main(words: list[str]) -> int:
    least_seen_pct, faults = read_table()
    faults = [fault for fault in faults if not words or any(word in f"{fault.file} {fault.name}" for word in words)]
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_tree(Path(folder))
        lost = [fault for fault in faults if fault.times_found(tree) != 1]
        for fault in lost:
            print(f"lost   {fault.file}: {fault.name}: the text is there {fault.times_found(tree)} times, not once")
        faults = [fault for fault in faults if fault not in lost]
        done = run_tests(tree, sorted({fault.test for fault in faults}))
        if done.returncode:
            print(f"{done.stdout}{done.stderr}\nthese tests must pass before a fault is planted")
            return 1
        seen = 0
        for fault in faults:
            red = is_seen(fault, tree)
            seen += red
            print(f"{'red' if red else 'UNSEEN':6} {fault.file}: {fault.name}", flush=True)
    share_pct = 100 * seen / max(len(faults), 1)
    print(f"{seen} of {len(faults)} faults were seen, {share_pct:.0f} %; the least is {least_seen_pct:g} %")
    return int(bool(lost) or share_pct < least_seen_pct)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose file or name contains one of these")
    sys.exit(main(parser.parse_args().words))
