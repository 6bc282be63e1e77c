"""`check`: a participant's exercises, graded where they stand, with a ladder of hints and a card.

    check("03.2")            # right, or in which way it is wrong; each further failing try shows
                             # one more hint
    check("03.2", hint=2)    # the first two hints; at the end of the ladder: solution=True
    check.card()             # what is done, and which predictions held

A wrong answer raises nothing, so that the notebook goes on. What is found is kept on this machine's
disk; a class's room, if this seat has one (`room.py`), is told state and tries.
"""

from __future__ import annotations

import html

from aiscale.lesson import cluster, progress, room
from aiscale.lesson.gap_grader import Gap
from aiscale.lesson.grading import Graded, Task
from aiscale.lesson.workbooks import find, solution_of


def check(id: str, *, hint: int = 0, solution: bool = False) -> Graded | None:
    """Grade an exercise and show what was found; or show its first hints, or its solution."""
    lesson, task = find(id)
    entry = entry_of(lesson, id, task.title)
    if solution:
        return _show_solution(lesson, task, entry)
    if hint:
        entry["hints"] = max(entry["hints"], min(hint, len(task.hints)))
        progress.show(f"{id}: {task.title}{_ladder(task, entry)}", "near")
        return progress.save("exercises", id, entry, lesson)
    import __main__

    shell = progress.shell()
    verdict = task.graded(shell.user_ns if shell else vars(__main__), cluster.current())
    if verdict.state in ("empty", "unknown"):
        progress.show(f"{id}: {verdict.text}", None, check=id, state=verdict.state)
        if isinstance(task, Gap):  # it counts as open
            progress.save("exercises", id, entry, lesson)
        _tell_room(lesson, task, entry, verdict.state)
        return verdict
    tried(entry, verdict.state)
    if entry["state"] != "right" and (entry["tries"] > 1 or entry["hints"]):  # as the ladder says
        entry["hints"] = min(entry["hints"] + 1, len(task.hints))
    line = (
        f"✓ {verdict.text}"
        if verdict.state == "right"
        else f"not yet: {verdict.text}{_ladder(task, entry)}"
    )
    progress.show(
        f"{id}: {line}",
        "exact" if verdict.state == "right" else "off",
        check=id,
        state=verdict.state,
    )
    progress.save("exercises", id, entry, lesson)
    _tell_room(lesson, task, entry, verdict.state)
    return verdict


def _tell_room(lesson: str, task: Task, entry: dict, state: str) -> None:
    room.post("check", f"{task.id} {task.title}", lesson, state=state, tries=entry["tries"])


def entry_of(lesson: str, id: str, title: str) -> dict:
    new = {"title": title, "state": "", "tries": 0, "hints": 0, "solution": False}
    return new | progress.load("exercises", lesson).get(id, {})


def tried(entry: dict, state: str) -> None:
    """Note one try; when it was done before, a later try takes nothing away."""
    if entry["state"] != "right":
        entry |= {"tries": entry["tries"] + 1, "state": state}


def _ladder(task: Task, entry: dict) -> str:
    shown, steps = entry["hints"], len(task.hints)
    lines = [
        f"Hint {number} of {steps}: {text}" for number, text in enumerate(task.hints[:shown], 1)
    ]
    if shown < steps:
        asked = f'check("{task.id}", hint={shown + 1})'
        if entry["state"] == "right":  # of an earlier try: later ones do not count
            lines.append(f"{asked} shows hint {shown + 1}.")
        else:
            lines.append(f"Another try shows hint {shown + 1}, and so does {asked}.")
    else:
        lines.append(f'That was the last hint. check("{task.id}", solution=True) shows a solution.')
    return "\n" + "\n".join(lines)


def _show_solution(lesson: str, task: Task, entry: dict) -> None:
    if entry["hints"] < len(task.hints) and entry["state"] != "right":
        progress.show(
            f"{task.id}: the solution is at the end of the ladder{_ladder(task, entry)}", "near"
        )
        return
    source = (
        task.lines if isinstance(task, Gap) else solution_of(lesson, task.id)
    ) or "workshop/solutions is not on this machine: ask your instructor for it"
    head = f"{task.id}: a solution"
    page = f'<b>{head}</b><pre style="padding: 0.5em 0.8em">{html.escape(source)}</pre>'
    progress.show(f"{head}\n{source}", "near", page)
    entry["solution"] = entry["solution"] or entry["state"] != "right"
    progress.save("exercises", task.id, entry, lesson)


def card() -> None:
    """Show what this participant has done in all lessons, and write it to progress/card.json."""
    lessons = progress.kept()
    table = [("exercise", "", "tries", "hints")]
    for lesson in lessons.values():
        for id, entry in sorted(lesson["exercises"].items()):
            done = "seen the solution" if entry["solution"] else "open"
            if entry["state"] == "right":
                done = "✓" + (" after the solution" if entry["solution"] else "")
            table.append((f"{id} {entry['title']}", done, str(entry["tries"]), str(entry["hints"])))
    note = f"kept in {progress.write('card.json', {'lessons': lessons})}; {room.told()}"
    entries = [entry for lesson in lessons.values() for entry in lesson["exercises"].values()]
    right = [entry for entry in entries if entry["state"] == "right"]
    title = f"{len(right)} of {len(entries)} exercises and gaps that you came by are done"
    grades = [
        made["grade"]
        for lesson in lessons.values()
        for made in lesson["predictions"].values()
        if made["grade"]
    ]
    hits = sum(grade in ("exact", "close") for grade in grades)
    title += f"; {hits} of {len(grades)} predictions held" if grades else ""
    progress.show_table(title, table, note)


check.card = card
