"""The instructor's pages are true: agendas add up, commands run, sections exist, answers agree."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aiscale import lesson
from aiscale.cli import _parser
from aiscale.lesson.notebook import tags
from aiscale.plan import cost, published
from aiscale.plan.presets import model_of
from browser import Browser, find_browser
from ranks import wait_until

ROOT = Path(__file__).parents[1]
WORKSHOP = ROOT / "workshop"
PAGE = (WORKSHOP / "README.md").read_text()
BLOCKS = {path.stem: path.read_text() for path in sorted((WORKSHOP / "blocks").glob("*.md"))}
QUIZ = (WORKSHOP / "quiz.html").read_text()
QUESTIONS = json.loads(re.search(r'id="questions">(.*?)</script>', QUIZ, re.S)[1])
LESSONS = {notebook.name[:2]: notebook for notebook in lesson.notebooks(root=ROOT / "notebooks")}
TEXTS = {
    number: "\n".join(cell.source for cell in lesson.cells) for number, lesson in LESSONS.items()
}

AGENDAS = {
    name: [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines()[2:]
    ]
    for name, table in re.findall(r"^### (.+)\n\n(\| at \|.*\n(?:\|.*\n)+)", PAGE, re.M)
}
TWO_DAYS = ("Two days, first day", "Two days, second day")
DAY = dict.fromkeys(["One day", *TWO_DAYS, "A third day", "A fourth day"], 480)
TOTALS = {"Two hours": 120, "Half a day": 240, **DAY}
EXERCISES = {  # number: name, minutes
    number: (name, int(minutes))
    for path in (WORKSHOP / "exercises").glob("*.ipynb")
    for number, name, minutes in re.findall(
        r"## (\d\d\.\d) · (.+) \(\w+, (\d+) minutes\)", path.read_text()
    )
}


def sheet(number: str) -> list[tuple[int, str, str, str]]:
    """Minute, section, what they do and what to cut, in a block's rows."""
    rows = re.findall(
        r"^\| (\d+) \| (.+?) \| .*? ?\| .*? ?\| (.*?) ?\| (.*?) ?\|$", BLOCKS[number], re.M
    )
    return [(int(minute), *rest) for minute, *rest in rows]


@pytest.mark.parametrize("name", TOTALS)
def test_an_agenda_adds_up_to_its_time_and_breaks_after_75_minutes_at_most(name):
    rows, now, since = AGENDAS[name], 9 * 60, 9 * 60
    for at, minutes, what in rows:
        assert at == f"{now // 60}:{now % 60:02}", what
        now += int(minutes)
        since = now if what in ("break", "lunch") else since
        if deck := re.match(r"deck \[(\w+)\]", what):
            about = (ROOT / f"slides/{deck[1]}.md").read_text()
            assert f"\nminutes: {minutes}\n" in about, what
        assert now - since <= 75, what
        if block := re.match(r"\[(\d\d) .*?\]\(\S+\)(?:, without \*(\S+) · (.+)\*)?$", what):
            cuts = [
                int(cut.split()[-2])
                for *_, do, cut in sheet(block[1])
                if f"**{block[2]} · {block[3]}" in do
            ]
            assert int(minutes) == LESSONS[block[1]].header.minutes - sum(cuts) and len(
                cuts
            ) == bool(block[2]), what
    assert now - 9 * 60 == TOTALS[name]


@pytest.mark.parametrize("name", [*TWO_DAYS, "A third day"])
def test_each_half_of_a_day_has_an_open_half_hour_to_catch_up(name):
    halves = "|".join("".join(row[1:]) for row in AGENDAS[name]).split("lunch")
    assert len(halves) == 2 and all("|30open: " in half for half in halves)


def test_two_days_have_eight_blocks_with_their_decks():
    rows = [row[2] for name in TWO_DAYS for row in AGENDAS[name]]
    blocks = [what[1:3] for what in rows if "(blocks/" in what]
    decks = [what[6:8] for what in rows if what.startswith("deck ")]
    assert blocks == decks and len(blocks) == 8


@pytest.mark.parametrize("number", BLOCKS)
def test_a_run_sheet_states_its_lessons_minutes_and_asks_for_its_predictions(number):
    stated, rows = LESSONS[number].header.minutes, sheet(number)
    assert f"\n{stated} minutes, [the lesson]" in BLOCKS[number]
    assert f"| [{number}](blocks/{number}.md) | {stated} |" in PAGE
    said = re.findall(r"exercise \*\*(\d\d\.\d) · (.+?)\*\*, (\d+) minutes", BLOCKS[number])
    for exercise, name, minutes in said:
        assert EXERCISES[exercise] == (name, int(minutes))
    begins = [minute for minute, *_ in rows]
    assert begins == sorted(begins) and begins[-1] < stated
    for _, section, *_ in rows[1:]:
        assert re.search(rf"^#+ {re.escape(section)}$", TEXTS[number], re.M), section
    code = "\n".join(c.source for c in LESSONS[number].cells if "optional" not in tags(c))
    labels = re.findall(r'(?<![.\w])predict\(\s*f?"(.*?)"', code)
    asked = [
        guess for *_, do, _ in rows for guess in re.findall(r"\*([^*]+)\*", do.replace("**", ""))
    ]
    assert len(asked) == len(labels)
    for guess, label in zip(asked, labels, strict=True):
        assert re.fullmatch(re.sub(r"\\{.*?\\}", ".*", re.escape(label)), guess), (guess, label)


def test_an_agenda_has_the_lessons_that_its_lessons_need_and_those_up_to_radius_fit_into_a_day():
    assert sum(LESSONS[f"{number:02}"].header.minutes for number in range(9)) <= 550
    days = {
        name: [row[2][1:3] for row in rows if "(blocks/" in row[2]]
        for name, rows in AGENDAS.items()
    }
    days["Two days, second day"] = days["Two days, first day"] + days["Two days, second day"]
    days["A third day"] = days["Two days, second day"] + days["A third day"]
    days["A fourth day"] = days["A third day"] + days["A fourth day"]
    for name, numbers in days.items():
        for at, number in enumerate(numbers):
            needs = LESSONS[number].header.needs
            assert needs == "nothing" or needs[:2] in numbers[:at], (
                f"{name}: {number} needs {needs}"
            )


def test_all_pages_state_the_memory_of_a_seat_that_was_measured():
    measured = published.measured("seat")
    gib = {row["lesson"][:2]: row["peak_bytes"] / 2**30 for row in measured["lessons"]}
    assert {f"{number:02}" for number in range(9)} <= set(gib)
    for number in BLOCKS:
        stated = f"{math.ceil(gib[number] * 10) / 10:.1f}" if number in gib else "unknown"
        assert re.search(rf"^\| \[{number}\]\(\S+\) \| \d+ \| {stated} \|", PAGE, re.M), number
    server_gib = measured["server"]["peak_bytes"] / 2**30
    largest = math.ceil(gib.pop("07") + server_gib)
    usual = math.ceil(max(gib.values()) + server_gib)
    hub = (WORKSHOP / "jupyterhub_config.py").read_text()
    words = rf"{usual} GiB of free\s+(> )?memory \({largest} GiB for lesson 07\)"
    pages = (ROOT / "README.md").read_text(), PAGE, hub
    assert [len(re.findall(words, page)) for page in pages] == [1, 3, 1]
    assert f'"AISCALE_HUB_MEMORY", "{largest}G"' in hub and f"AISCALE_HUB_MEMORY={largest}G" in hub


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", text, re.M)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h)).lower().replace(" ", "-")
        for h in headings
    }


def test_links_and_their_anchors_lead_somewhere():
    for path in (WORKSHOP / "README.md", *(WORKSHOP / "blocks").glob("*.md")):
        for link in re.findall(r"\]\(([^)]+)\)", path.read_text()):
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            assert target.exists(), (path.name, link)
            assert not anchor or anchor in anchors(target.read_text()), (path.name, link)


PAGES = "\n".join([PAGE, *BLOCKS.values()])
FENCED = re.findall(
    r"^((?:make|aiscale) .+)$", "\n".join(re.findall(r"^```\n(.*?)^```", PAGES, re.M | re.S)), re.M
)
COMMANDS = sorted({*FENCED, *re.findall(r"`((?:make|aiscale|jupyterhub) [^`\n]+)`", PAGES)})


def test_commands_parse():
    for command in [command for command in COMMANDS if command.startswith("aiscale")]:
        words = shlex.split(command)[1:]
        words += ["FILE"] if words[0] == "submit" else []
        try:
            _parser(words[0]).parse_args(words)
        except SystemExit:
            pytest.fail(command)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The course as a class has it: its files under git, and a site."""
    folder = tmp_path_factory.mktemp("clone")
    files = "git ls-files -co --exclude-standard -- . ':!tests' ':!src'"
    subprocess.run(
        f"{files} | tar cf - -T - | tar xf - -C '{folder}'", shell=True, cwd=ROOT, check=True
    )
    site = "mkdir -p build/site && echo the site > build/site/index.html"
    subprocess.run(f"git init -q && git add . && {site}", shell=True, cwd=folder, check=True)
    return folder


def test_the_quick_commands_of_the_page_do_what_it_says(clone):
    quick = ("make class", "aiscale notebooks --list", "aiscale plan --model")
    for command in [
        command for command in COMMANDS if command.startswith(quick) and "WHEELS" not in command
    ]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            command, shell=True, cwd=clone, env={**os.environ, "PATH": path}, capture_output=True
        )
        assert done.returncode == 0 and done.stdout, (command, done.stderr)


GPT2 = model_of("gpt2")
#: What `computed` names.
ANSWERS = {
    "ring MB": f"{cost.wire_bytes('all_reduce', 100, world=8):g}",
    "gpt2 GB": f"{16 * cost.parameter_count(GPT2) / 1e9:.1f}",
    "zero1 / ddp": {1: "the same"}[
        (cost.wire_bytes("reduce_scatter", 1, world=8) + cost.wire_bytes("all_gather", 1, world=8))
        / cost.wire_bytes("all_reduce", 1, world=8)
    ],
    "bubble %": f"{100 * cost.bubble('1f1b', 4, 12):g}",
    "checkpoint GB": f"{10 * (1 + 2):g}",  # weights and two moments
    "top-k / dense": "several times as much"
    if cost.wire_bytes("all_gather", 64 * 0.1 * 8, world=64)
    > 3 * cost.wire_bytes("all_reduce", 4, world=64)
    else "",
}


def test_each_answer_of_the_quiz_is_said_in_its_lesson_and_computed_where_it_is_a_number():
    assert len(QUESTIONS) == 10
    assert {q["lesson"] for q in QUESTIONS} == set("00 01 02 03 04 05 06 08 09".split())
    assert {q["computed"] for q in QUESTIONS if "computed" in q} == set(ANSWERS)
    for question in QUESTIONS:
        assert question["says"] in TEXTS[question["lesson"]], question["says"]
        right = question["choices"][question["right"]]
        assert right == ANSWERS.get(question.get("computed"), right), question["ask"]
        assert len(set(question["choices"])) == 4
    places = [question["right"] for question in QUESTIONS]
    assert max(map(places.count, places)) <= 4, "no place is right much more often than another"


ANSWER = """
[...document.querySelectorAll('fieldset')].forEach((box, i) => {
  if (i % 2 === 0 || %s) box.querySelectorAll('input')[%s[i]].click();
});
document.querySelector('form button').click()
"""


@pytest.mark.skipif(not find_browser(), reason="no chromium on this machine")
def test_a_participant_answers_twice_and_sees_both_beside_each_other(tmp_path):
    right = [question["right"] for question in QUESTIONS]
    with Browser(tmp_path) as browser:
        page = browser.page()
        page.goto((WORKSHOP / "quiz.html").as_uri())
        page.wait("document.querySelectorAll('fieldset').length === 10")

        # Chromium's storage is another process, which a page that goes at once may not reach
        def kept() -> bool:
            # every second question
            page.evaluate(ANSWER.replace("%s", "false", 1).replace("%s", str(right)))
            assert "Before: 5 of 10." in page.text() and "2 (n - 1)" not in page.text(), (
                "the answers come later"
            )
            page.evaluate("window.before = true; location.reload()")
            page.wait("!window.before && document.querySelector('fieldset, #result button')")
            return page.evaluate("!!document.querySelector('#result button')")

        wait_until(kept, 60, "the answers are kept")
        page.evaluate("document.querySelector('#result button').click()")
        # "I do not know" at last
        page.evaluate(ANSWER.replace("%s", "true", 1).replace("%s", str([*right[:9], 4])))
        assert (
            "Before: 5 of 10. After: 9 of 10." in page.text()
            and "2 (n - 1) / n times the buffer" in page.text()
        )
        line = page.evaluate("document.getElementById('line').value")
        assert line == "before 1010101010 after 1111111110"
        box = "document.getElementById('lines')"
        page.evaluate(f"{box}.value = '{line}\\\\n{line}'; {box}.oninput({{target: {box}}})")
        table = page.evaluate(
            "[...document.querySelectorAll('#class tr')].map(row => row.textContent)"
        )
        assert table[1:3] == ["1 (lesson 00)2 of 22 of 2", "2 (lesson 00)0 of 22 of 2"]
        page.goto((WORKSHOP / "quiz.html").as_uri() + "?lessons=00,03")
        page.wait("document.querySelectorAll('fieldset').length === 3")
        assert "no_sync" in page.text() and "GPT-2" not in page.text(), (
            "only what these lessons answer"
        )
