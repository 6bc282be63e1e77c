"""`check_seat()`, in the first cell of lesson 00: this seat is ready, or what it lacks.

It asks what `aiscale doctor` asks, holds the memory that is free against what each lesson was
measured to take, and starts two ranks. Colab has the packages of two lessons (scripts/colab.sh). A
class's room (`room.py`) counts the seats that are ready; it is told the names of what is missing,
without their texts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from aiscale.launch import launch
from aiscale.lesson import progress, room
from aiscale.plan import published
from aiscale.site import doctor
from aiscale.site.doctor import GIB, Finding

#: What a seat must have; of the rest `doctor` says what may be slow or is for nodes of a centre.
NEEDED = ("packages", "cores", "limits", "disk", "loopback", "TMPDIR")
RANKS = 2
PATIENCE_S = 60  # for two ranks to meet, on a busy seat


def check_seat() -> None:
    """Show whether this seat is ready, and tell the room."""
    findings = list(_findings())
    missing = [finding for finding in findings if _is_missing(finding)]
    names = ", ".join(finding.name for finding in missing)
    if missing:
        few = all(finding.name == "packages" and finding.state == "warning" for finding in missing)
        head = "is ready for lessons 00 and 03 alone" if few else "is not ready"
        lines = [f"{finding.name}: {finding.text} → {finding.remedy}" for finding in missing]
        progress.show("\n".join([f"seat: this seat {head}", *lines]), "near" if few else "off")
    else:
        has = {finding.name: finding.text for finding in findings}
        facts = f"{has['memory']}; cores: {has['cores']}; {RANKS} ranks answer"
        progress.show(f"seat: this seat is ready: {facts}", "exact")
    room.post("seat", f"not ready: {names}" if missing else "ready")


def _is_missing(finding: Finding) -> bool:
    # A long TMPDIR that has a link is no trouble for lessons.
    lacks = ("wrong",) if finding.name in ("TMPDIR", "memory") else ("wrong", "warning")
    return finding.state in lacks


def _findings() -> Iterator[Finding]:
    for finding in doctor.examine():
        if finding.name in NEEDED:
            yield finding
    yield memory(doctor.free_memory_bytes())
    yield _ranks()


def memory(free_bytes: int) -> Finding:
    """Whether it is enough for each lesson that was measured (benchmarks/seat.py)."""
    rows = published.measured("seat")["lessons"]
    takes = sorted((row["peak_bytes"], row["lesson"][:2]) for row in rows)
    largest_bytes, largest = takes[-1]
    usual_bytes = takes[-2][0]  # one lesson starts eight ranks, all others four
    text = f"{free_bytes / GIB:.1f} GiB of memory are free"
    wants = f"lessons want {usual_bytes / GIB:.1f}, lesson {largest} {largest_bytes / GIB:.1f}"
    remedy = "close other programs and notebooks"
    if free_bytes < usual_bytes:
        return Finding("memory", "wrong", f"{text}, and {wants}", remedy)
    if free_bytes < largest_bytes:
        return Finding("memory", "warning", f"{text}, enough but for lesson {largest}", remedy)
    return Finding("memory", "ok", text)


def _ranks() -> Finding:
    """Two ranks start, meet and sum, as those of the lessons do."""
    with tempfile.TemporaryFile() as printed:
        command = doctor.as_rank("cpu", PATIENCE_S)
        status = launch(RANKS, command, stdout=printed.fileno())
    if status:
        text = f"{RANKS} did not start or gave a wrong sum (exit status {status})"
        return Finding("ranks", "wrong", text, "run `aiscale doctor` in a terminal: it says why")
    return Finding("ranks", "ok", f"{RANKS} answer")
